// A shared pointer that threads read and replace at any time, in forked children, too.

#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include "fork_safe_mutex.h"

namespace tvmify {

// The functions of the standard library for atomic shared pointers take locks that stay locked in a
// child if another thread holds them during the fork.
template <typename T>
class ForkSafePointer {
 public:
  explicit ForkSafePointer(std::shared_ptr<T> value = nullptr) : value_(std::move(value)) {}

  std::shared_ptr<T> load() const {
    const std::lock_guard<ForkSafeMutex> lock(mutex_);
    return value_;
  }

  // Returns the value before.
  std::shared_ptr<T> exchange(std::shared_ptr<T> value) {
    const std::lock_guard<ForkSafeMutex> lock(mutex_);
    const std::lock_guard<std::mutex> change(moment());  // a child never sees half a pointer
    value_.swap(value);
    return value;
  }

 private:
  mutable ForkSafeMutex mutex_;
  std::shared_ptr<T> value_;
};

}  // namespace tvmify
