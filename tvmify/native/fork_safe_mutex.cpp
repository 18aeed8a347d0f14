#include "fork_safe_mutex.h"

#include <pthread.h>

namespace tvmify {
namespace {

std::atomic<int> forks{0};
std::mutex moments;
std::mutex renewing;

void before_fork() {
  renewing.lock();
  moments.lock();
}

void after_fork_in_parent() {
  moments.unlock();
  renewing.unlock();
}

void after_fork_in_child() {
  forks.fetch_add(1, std::memory_order_relaxed);
  after_fork_in_parent();
}

[[maybe_unused]] const int watching =
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

}  // namespace

int forks_so_far() { return forks.load(std::memory_order_relaxed); }

void ForkSafeMutex::renew() {
  const std::lock_guard<std::mutex> lock(renewing);
  const int present = forks_so_far();
  if (forks_.load(std::memory_order_relaxed) == present) return;  // another thread was faster
  // Not destroyed: a thread that this process does not have may hold it.
  new (&mutex_) std::mutex;
  forks_.store(present, std::memory_order_release);
}

std::mutex& moment() { return moments; }

}  // namespace tvmify
