// PyTorch's allocators for TVM's virtual machines, so that one process has one pool of a GPU's
// memory, blocks belong to streams, and what graphs capture stays theirs.
#pragma once

#include <ATen/core/Tensor.h>
#include <dlpack/dlpack.h>

#include <optional>

namespace tvmify {

// Makes the memory of a tensor PyTorch's own again, where the allocator gave all of it for this
// tensor: PyTorch then knows the block (`record_stream`). Nothing of TVM's may use it any more.
std::optional<c10::DataPtr> reclaim(const DLTensor& tensor);

}  // namespace tvmify
