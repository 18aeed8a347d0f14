// Tells the thread sanitizer about an order between threads that it cannot see: libgomp waits with
// futexes. In other builds these functions are empty.

#pragma once

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace tvmify {

// What this thread has done so far happens before what follows `happens_after` of the same address.
inline void happens_before([[maybe_unused]] void* address) {
#ifdef __SANITIZE_THREAD__
  __tsan_release(address);
#endif
}

inline void happens_after([[maybe_unused]] void* address) {
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(address);
#endif
}

}  // namespace tvmify
