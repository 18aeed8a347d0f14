// Mutexes that a forked child finds free, although the thread that held one is not there.

#pragma once

#include <atomic>
#include <mutex>
#include <new>

namespace tvmify {

// How often this process, or those that it was forked from, was the child of a fork.
int forks_so_far();

// For what may be held for long. A child replaces it when it first locks it: what it guards has to
// be right, if not complete, at any moment.
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

// For a moment's change of what the whole process has, during which no other lock is taken, the
// interpreter's neither. Forks wait for it, so that a child never sees half a change.
std::mutex& moment();

}  // namespace tvmify
