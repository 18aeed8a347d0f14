#include "thread_pool.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <tvm/ffi/c_api.h>
#include <tvm/runtime/c_backend_api.h>

#include <algorithm>
#include <atomic>

namespace tvmify {
namespace {

// In a forked child the threads of OpenMP's pool do not exist, and libgomp would wait for them for
// ever. So would PyTorch's own operators; a child of ours at least finishes, on one thread.
std::atomic<bool> in_forked_child{false};

// The tasks of one parallel loop, as they meet at barriers and report errors.
class Team {
 public:
  Team() = default;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() {
    if (error_ != nullptr) TVMFFIObjectDecRef(error_);
  }

  // Waits until all tasks, `size` of them, are here. Returns -1 if one failed and will never come.
  int meet(int size) {
    const int round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.fetch_add(1, std::memory_order_release);
      return 0;
    }
    // Tasks arrive within microseconds unless there are more threads than cores: spin, then yield.
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (failed_.load(std::memory_order_acquire)) return -1;
      if (spins > kSpins) sched_yield();
    }
    return 0;
  }

  // Takes the error that TVM raised on this thread; only the first one of a team is kept.
  void fail() {
    TVMFFIObjectHandle error = nullptr;
    TVMFFIErrorMoveFromRaised(&error);
    if (!claimed_.exchange(true)) {
      error_ = error;
      failed_.store(true, std::memory_order_release);
    } else if (error != nullptr) {
      TVMFFIObjectDecRef(error);
    }
  }

  // To be called when all tasks are over: raises a task's error on this thread.
  int result() {
    if (!failed_.load(std::memory_order_acquire)) return 0;
    if (error_ != nullptr) TVMFFIErrorSetRaised(error_);
    return -1;
  }

 private:
  static constexpr int kSpins = 2000;
  std::atomic<int> arrived_{0};
  std::atomic<int> round_{0};
  std::atomic<bool> claimed_{false};
  std::atomic<bool> failed_{false};
  TVMFFIObjectHandle error_ = nullptr;
};

void run_task(FTVMParallelLambda task, void* closure, int id, int size, Team& team) {
  TVMParallelGroupEnv environment{&team, size};
  if (task(id, &environment, closure) != 0) team.fail();
}

int threads_for(int requested) {
  // In a parallel region, PyTorch's or anyone's, the cores are taken: run in line as it does.
  if (in_forked_child.load(std::memory_order_relaxed) || omp_in_parallel()) return 1;
  const int available = at::get_num_threads();
  return requested > 0 ? std::min(requested, available) : available;
}

// Generated code divides its loop by the number of tasks that it is told, not by the number that
// it asked for, so any number is right.
int launch(FTVMParallelLambda task, void* closure, int requested) {
  Team team;
  const int threads = threads_for(requested);
  if (threads <= 1) {
    run_task(task, closure, 0, 1, team);
    return team.result();
  }
#pragma omp parallel num_threads(threads)
  // OpenMP may give fewer threads than asked for: the tasks are as many as it gave.
  run_task(task, closure, omp_get_thread_num(), omp_get_num_threads(), team);
  return team.result();
}

int barrier(int, TVMParallelGroupEnv* environment) {
  return static_cast<Team*>(environment->sync_handle)->meet(environment->num_task);
}

void replace_pointer(void* handle, const char* symbol, void* function) {
  // A library without parallel loops has no such pointer.
  if (void* place = dlsym(handle, symbol)) *static_cast<void**>(place) = function;
}

}  // namespace

void use_torch_threads(void* handle) {
  [[maybe_unused]] static const int watching_forks = pthread_atfork(
      nullptr, nullptr, [] { in_forked_child.store(true, std::memory_order_relaxed); });
  replace_pointer(handle, "__TVMBackendParallelLaunch", reinterpret_cast<void*>(&launch));
  replace_pointer(handle, "__TVMBackendParallelBarrier", reinterpret_cast<void*>(&barrier));
}

}  // namespace tvmify
