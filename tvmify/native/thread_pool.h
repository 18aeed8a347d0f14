// Runs TVM's parallel loops on the threads of PyTorch's operators.
#pragma once

namespace tvmify {

// Makes one loaded kernel library launch its parallel loops here. Other users of TVM in the process
// keep TVM's pool. `handle` comes from dlopen.
//
// TVM's pool is not used because its threads would compete for the cores with PyTorch's, which spin
// for a while after each operator; it would ignore `torch.set_num_threads`, and create a pool for
// every Python thread.
void use_torch_threads(void* handle);

// Guards PyTorch operators that compiled code calls: in a forked child they would wait forever for
// threads that do not exist, so this limits them to one thread.
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
