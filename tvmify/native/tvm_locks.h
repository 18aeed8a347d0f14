// The locks of TVM's runtime that compiled calls take, made safe for forks.
#pragma once

namespace tvmify {

// From the first call on, a fork waits for threads that look up TVM's allocators, which takes
// microseconds. Otherwise a child could inherit a lock that no thread releases.
void hold_tvm_memory_at_forks();

// Makes one loaded kernel library look up the functions that it calls under a lock that is free in
// forked children. `handle` comes from dlopen.
void use_fork_safe_lookup(void* handle);

}  // namespace tvmify
