// Mutexes that are free in a forked child, even if another thread held them during the fork.

#pragma once

#include <atomic>
#include <mutex>
#include <new>

namespace tvmify {

// How many forks lie between this process and the first one.
int forks_so_far();

// A mutex that may be held for long. A child replaces it on its first lock, so the data that it
// guards must be consistent, if not complete, at any moment.
class ForkSafeMutex {
 public:
  ForkSafeMutex() : forks_(forks_so_far()) {}
  ~ForkSafeMutex() = default;
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;

  void lock() {
    if (forks_.load(std::memory_order_acquire) != forks_so_far()) renew();
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }

 private:
  void renew();

  std::atomic<int> forks_;
  std::mutex mutex_;
};

// For short changes of process-wide state, during which no other lock is taken, not even the GIL.
// Forks wait for it, so a child never sees half a change.
std::mutex& moment();

}  // namespace tvmify
