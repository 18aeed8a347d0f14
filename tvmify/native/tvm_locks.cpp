#include "tvm_locks.h"

#include <dlfcn.h>
#include <pthread.h>
#include <tvm/ffi/c_api.h>

#include <mutex>

#include "fork_safe_mutex.h"
#include "tvm_allocator.h"

namespace tvmify {
namespace {

namespace memory = tvm::runtime::memory;

memory::MemoryManager& manager() { return *memory::MemoryManager::Global(); }

void lock_tvm_memory() { manager().mutex().lock(); }

void unlock_tvm_memory() { manager().mutex().unlock(); }

ForkSafeMutex looking_up;

// What TVM's function of this name does, which has a lock of its own: runs `make` once to fill
// `place`, which is empty or complete at any moment.
int make_once(void** place, int (*make)(void**)) {
  if (__atomic_load_n(place, __ATOMIC_ACQUIRE) != nullptr) return 0;
  const std::lock_guard<ForkSafeMutex> lock(looking_up);
  if (*place != nullptr) return 0;  // another thread was faster
  void* made = nullptr;
  if (const int error = make(&made); error != 0) return error;
  __atomic_store_n(place, made, __ATOMIC_RELEASE);
  return 0;
}

}  // namespace

void hold_tvm_memory_at_forks() {
  [[maybe_unused]] static const int watching =
      pthread_atfork(lock_tvm_memory, unlock_tvm_memory, unlock_tvm_memory);
}

void use_fork_safe_lookup(void* handle) {
  if (void* place = dlsym(handle, "__TVMFFIHandleInitOnce")) {
    *static_cast<decltype(&TVMFFIHandleInitOnce)*>(place) = &make_once;
  }
}

}  // namespace tvmify
