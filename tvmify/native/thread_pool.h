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

// Around PyTorch's own operators that compiled code calls: in a forked child they would wait for
// ever for threads that it does not have, so that meanwhile this thread does without.
class WithoutThreadsAfterFork {
 public:
  WithoutThreadsAfterFork();
  ~WithoutThreadsAfterFork();
  WithoutThreadsAfterFork(const WithoutThreadsAfterFork&) = delete;
  WithoutThreadsAfterFork& operator=(const WithoutThreadsAfterFork&) = delete;

 private:
  int before_;
};

}  // namespace tvmify
