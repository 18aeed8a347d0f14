// PyTorch's allocators for TVM's virtual machines, so that a process has a single pool of GPU
// memory, blocks belong to streams, and captured graphs keep their memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <dlpack/dlpack.h>

#include <optional>

namespace tvmify {

// Returns a tensor's memory to PyTorch, if the allocator allocated it for this tensor alone, so
// that PyTorch knows the block (`record_stream`). TVM must no longer use it.
std::optional<c10::DataPtr> reclaim(const DLTensor& tensor);

}  // namespace tvmify
