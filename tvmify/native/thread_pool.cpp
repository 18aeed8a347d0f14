#include "thread_pool.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <omp.h>
#include <pthread.h>
#include <tvm/ffi/c_api.h>
#include <tvm/runtime/c_backend_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

namespace tvmify {
namespace {

// In a forked child the threads of OpenMP's pool do not exist, and libgomp would wait for them for
// ever. So would PyTorch's own operators; a child of ours at least finishes, on one thread.
std::atomic<bool> in_forked_child{false};

// Tasks that a loop has for each thread. A core that is slowed down, as by a neighbour on the same
// machine, leaves some of its own to the others: on two shared cores, with one task each, threads
// waited for each other for a tenth of the time. With 8, models take 2 to 4 % less, calls of 30
// microseconds 2 % more; with 16, up to 5 % less and 6 % more.
constexpr int kTasksPerThread = 8;

// The tasks that one thread has yet to run. It takes them from the front, so that it goes on
// through memory; those who are through with their own take them from the back.
class alignas(64) Share {
 public:
  void assign(std::uint32_t begin, std::uint32_t end) {
    left_.store(pack(begin, end), std::memory_order_relaxed);
  }

  // Returns the number of a task, or -1 if none is left.
  int take(bool first) {
    std::uint64_t left = left_.load(std::memory_order_relaxed);
    for (;;) {
      const auto begin = static_cast<std::uint32_t>(left >> 32);
      const auto end = static_cast<std::uint32_t>(left);
      if (begin == end) return -1;
      const std::uint64_t rest = first ? pack(begin + 1, end) : pack(begin, end - 1);
      if (left_.compare_exchange_weak(left, rest, std::memory_order_relaxed)) {
        return static_cast<int>(first ? begin : end - 1);
      }
    }
  }

 private:
  static std::uint64_t pack(std::uint64_t begin, std::uint64_t end) { return begin << 32 | end; }

  std::atomic<std::uint64_t> left_{0};
};

// One parallel loop.
class Loop {
 public:
  Loop(FTVMParallelLambda task, void* closure, int tasks)
      : task_(task), closure_(closure), tasks_(tasks) {}
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  ~Loop() {
    if (error_ != nullptr) TVMFFIObjectDecRef(error_);
  }

  void run(int id) {
    TVMParallelGroupEnv environment{this, tasks_};
    if (task_(id, &environment, closure_) != 0) fail();
  }

  // Takes the error that TVM raised on this thread; only the first one of a loop is kept.
  void fail() {
    TVMFFIObjectHandle error = nullptr;
    TVMFFIErrorMoveFromRaised(&error);
    if (!failed_.exchange(true, std::memory_order_acq_rel)) {
      error_ = error;
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
  const FTVMParallelLambda task_;
  void* const closure_;
  const int tasks_;
  std::atomic<bool> failed_{false};
  TVMFFIObjectHandle error_ = nullptr;
};

int threads_for(int requested) {
  // In a parallel region, PyTorch's or anyone's, the cores are taken: run in line as it does.
  if (in_forked_child.load(std::memory_order_relaxed) || omp_in_parallel()) return 1;
  const int available = at::get_num_threads();
  return requested > 0 ? std::min(requested, available) : available;
}

// Generated code divides its loop by the number of tasks that it is told, not by the number that
// it asked for, so any number is right.
int launch(FTVMParallelLambda task, void* closure, int requested) {
  const int threads = threads_for(requested);
  if (threads <= 1) {
    Loop loop(task, closure, 1);
    loop.run(0);
    return loop.result();
  }
  Loop loop(task, closure, threads * kTasksPerThread);
  // Kept for this thread's next loop. Taken meanwhile: loops within one run in line, but not where
  // OpenMP gives a single thread.
  thread_local std::vector<Share> kept;
  std::vector<Share> shares = std::move(kept);
  if (shares.size() < static_cast<std::size_t>(threads)) shares = std::vector<Share>(threads);
  for (int i = 0; i < threads; ++i) {
    shares[i].assign(i * kTasksPerThread, (i + 1) * kTasksPerThread);
  }
  // OpenMP may give fewer threads than asked for: the others' shares are taken all the same.
#pragma omp parallel num_threads(threads)
  for (int i = 0; i < threads; ++i) {
    Share& share = shares[(omp_get_thread_num() + i) % threads];
    for (int id; (id = share.take(i == 0)) >= 0;) loop.run(id);
  }
  kept = std::move(shares);
  return loop.result();
}

// Tasks could wait for each other only if each had a thread. Generated code does not look at what
// this returns.
int barrier(int, TVMParallelGroupEnv* environment) {
  TVMFFIErrorSetRaisedFromCStr(
      "RuntimeError",
      "a kernel has a barrier between tasks, for which there is none in tvmify: give it two "
      "parallel loops instead");
  static_cast<Loop*>(environment->sync_handle)->fail();
  return -1;
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
