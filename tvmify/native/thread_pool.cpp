#include "thread_pool.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <omp.h>
#include <pthread.h>
#include <time.h>
#include <tvm/ffi/c_api.h>
#include <tvm/runtime/c_backend_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "backoff.h"
#include "happens_before.h"

namespace tvmify {
namespace {

// A forked child lacks the threads of OpenMP's pool, and libgomp would wait for them forever, as it
// does in PyTorch's operators. Our loops run on one thread there.
std::atomic<bool> in_forked_child{false};

// Tasks of a loop per thread, so that other threads can steal from one on a slow core: with one
// task each, threads on two shared cores waited for each other a tenth of the time. With 8, models
// are 2 to 4 % faster and calls of 30 microseconds 2 % slower; with 16, up to 5 % and 6 %.
constexpr int kTasksPerThread = 8;

// The remaining tasks of one thread. It takes them from the front, to go through memory in order;
// threads that have finished their own steal from the back.
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

  // Takes the error that TVM raised on this thread; only the first error of a loop is kept.
  void fail() {
    TVMFFIObjectHandle error = nullptr;
    TVMFFIErrorMoveFromRaised(&error);
    if (!failed_.exchange(true, std::memory_order_acq_rel)) {
      error_ = error;
    } else if (error != nullptr) {
      TVMFFIObjectDecRef(error);
    }
  }

  // Call when all tasks are finished: raises a task's error on this thread.
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

// State that a thread keeps between loops.
struct Caller {
  std::vector<Share> shares;
  Backoff backoff;
};

// The CPU time of this thread.
Clock::duration processor_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

int threads_for(int requested) {
  // Inside a parallel region the cores are busy: run inline, as PyTorch does.
  if (in_forked_child.load(std::memory_order_relaxed) || omp_in_parallel()) return 1;
  const int available = at::get_num_threads();
  return requested > 0 ? std::min(requested, available) : available;
}

// Generated code divides its loop by the actual number of tasks, not by the requested one, so any
// number is correct.
int launch(FTVMParallelLambda task, void* closure, int requested) {
  thread_local Caller caller;
  const int threads = threads_for(requested);
  if (threads <= 1) {
    Loop loop(task, closure, 1);
    loop.run(0);
    return loop.result();
  }
  const int tasks = threads * kTasksPerThread;
  Loop loop(task, closure, tasks);
  auto forked = Clock::now();
  int first = 0;  // of the remaining tasks
  if (caller.backoff.alone(forked)) {
    const auto start = processor_time();
    const auto enough = [&] {  // reads the slow clock only if the fast one says so
      return Clock::now() - forked >= Backoff::kPatience &&
             processor_time() - start >= Backoff::kPatience;
    };
    while (first < tasks && !enough()) loop.run(first++);
    if (first == tasks) return loop.result();
    forked = Clock::now();
  }
  // Moved out meanwhile: a nested loop runs inline, except where OpenMP gives a single thread.
  std::vector<Share> shares = std::move(caller.shares);
  if (shares.size() < static_cast<std::size_t>(threads)) shares = std::vector<Share>(threads);
  const int left = tasks - first;
  for (int i = 0; i < threads; ++i) {
    shares[i].assign(first + left * i / threads, first + left * (i + 1) / threads);
  }
  Clock::time_point begun, done;
  int own = 0;
  happens_before(&loop);
  // OpenMP may give fewer threads than requested: these steal the shares of the others.
#pragma omp parallel num_threads(threads)
  {
    happens_after(&loop);
    const int thread = omp_get_thread_num();
    if (thread == 0) begun = Clock::now();
    int ran = 0;
    for (int i = 0; i < threads; ++i) {
      Share& share = shares[(thread + i) % threads];
      for (int id; (id = share.take(i == 0)) >= 0; ++ran) loop.run(id);
    }
    if (thread == 0) {
      done = Clock::now();
      own = ran;
    }
    happens_before(&loop);
  }
  happens_after(&loop);
  caller.backoff.add(forked, begun, done, Clock::now(), left, own);
  caller.shares = std::move(shares);
  return loop.result();
}

// Tasks could wait for each other only if each had its own thread. Generated code ignores the
// return value.
int barrier(int, TVMParallelGroupEnv* environment) {
  TVMFFIErrorSetRaisedFromCStr(
      "RuntimeError",
      "a kernel has a barrier between tasks, which tvmify does not support: give it two "
      "parallel loops instead");
  static_cast<Loop*>(environment->sync_handle)->fail();
  return -1;
}

void replace_pointer(void* handle, const char* symbol, void* function) {
  // A library without parallel loops lacks this pointer.
  if (void* place = dlsym(handle, symbol)) *static_cast<void**>(place) = function;
}

}  // namespace

void use_torch_threads(void* handle) {
  [[maybe_unused]] static const int watching_forks = pthread_atfork(
      nullptr, nullptr, [] { in_forked_child.store(true, std::memory_order_relaxed); });
  replace_pointer(handle, "__TVMBackendParallelLaunch", reinterpret_cast<void*>(&launch));
  replace_pointer(handle, "__TVMBackendParallelBarrier", reinterpret_cast<void*>(&barrier));
}

WithoutThreadsAfterFork::WithoutThreadsAfterFork()
    : before_(in_forked_child.load(std::memory_order_relaxed) ? at::get_num_threads() : 1) {
  if (before_ > 1) at::set_num_threads(1);
}

WithoutThreadsAfterFork::~WithoutThreadsAfterFork() {
  if (before_ > 1) at::set_num_threads(before_);
}

}  // namespace tvmify
