// Converts tensors between PyTorch and TVM, without a copy where possible.
#pragma once

#include <ATen/core/Tensor.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

namespace tvmify {

// Compiled kernels use aligned vector loads, which would crash on a misaligned tensor.
constexpr size_t kAlignment = 64;

// Convert devices between PyTorch and TVM: the CPU, and GPUs with an index.
c10::Device torch_device(DLDevice device);
DLDevice tvm_device(c10::Device device);

// Thrown for a tensor that has elements but no memory for them.
class NoMemory : public c10::TypeError {
 public:
  using c10::TypeError::TypeError;
};

// Returns `tensor` itself if kernels can read it in place (it lies plainly, aligned), otherwise a
// copy. Throws TypeError for tensors without plain bytes on the device (quantized, sparse, wrapped
// by functorch, on another device), NoMemory if the bytes are missing.
at::Tensor readable(const at::Tensor& tensor, c10::Device device);

// Returns a TVM tensor that shares memory with `tensor` and keeps it alive. `tensor` must be
// `readable`. TVM has no complex numbers: they are pairs of floats along an additional last axis.
tvm::ffi::Tensor to_tvm(at::Tensor tensor);

// Returns a PyTorch tensor that shares memory with the TVM tensor and keeps it alive. Like any
// operator's result, it may be resized, written to, and outlive the program that made it.
at::Tensor from_tvm(tvm::ffi::Tensor tensor);

// The same for the result of a program, whose memory TVM no longer uses: on a GPU, memory from
// PyTorch's allocator is returned to PyTorch.
at::Tensor result_from_tvm(tvm::ffi::Tensor tensor);

// Returns pairs of floats along the last axis as complex numbers in the same memory; `pairs` must
// be contiguous. Complex numbers are returned as they are.
at::Tensor as_complex(at::Tensor pairs);

// Convert a PyTorch error to one that can cross TVM, and back. The latter returns if the error did
// not come from the former.
[[noreturn]] void throw_through_tvm(const c10::Error& error);
void rethrow_from_tvm(const tvm::ffi::Error& error);

// Whether `tensor` is exactly the memory of `source`, with the same layout.
bool is_same_view(const DLTensor& tensor, const at::Tensor& source);

// Whether `tensor` lies between the first and the last element of `source`. False if it has no
// elements.
bool lies_inside(const DLTensor& tensor, const at::Tensor& source);

// Returns `tensor`, which must lie inside `source`, as a view of `source`: they share a storage and
// a version counter, so autograd and in-place writes treat it like any PyTorch view.
at::Tensor view_of(const at::Tensor& source, const DLTensor& tensor);

}  // namespace tvmify
