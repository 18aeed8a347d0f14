// Runs TVM's parallel loops on the threads that PyTorch's own operators use.
#pragma once

namespace tvmify {

// Makes one loaded library of compiled kernels launch its parallel loops here. Other users of TVM
// in the process keep TVM's own pool. `handle` is what dlopen returned.
//
// Why not TVM's pool: its threads and PyTorch's, which spin for a while after each operator, would
// fight for the cores, `torch.set_num_threads` would not hold, and every Python thread would get a
// pool of its own.
void use_torch_threads(void* handle);

// To be called before PyTorch's own operators are, from compiled code. In a forked child they would
// wait for ever for threads that it does not have, so from here on this thread does without.
void expect_no_threads_after_fork();

}  // namespace tvmify
