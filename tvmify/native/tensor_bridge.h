// Tensors cross between PyTorch and TVM here, without a copy wherever the bytes allow it.
#pragma once

#include <ATen/core/Tensor.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

namespace tvmify {

// Compiled kernels use aligned vector loads: a tensor that starts elsewhere would crash them.
constexpr size_t kAlignment = 64;

// Devices as PyTorch and as TVM name them: the CPU, and GPUs with an index.
c10::Device torch_device(DLDevice device);
DLDevice tvm_device(c10::Device device);

// Thrown for a tensor whose sizes say that it has elements, and that has no memory for them.
class NoMemory : public c10::TypeError {
 public:
  using c10::TypeError::TypeError;
};

// Returns `tensor` itself if a kernel can read it where it is (contiguous, aligned), else a copy
// that one can. Throws TypeError for what has no plain bytes on the device: conjugate, negative,
// complex, quantised, sparse, wrapped by functorch, on another device; NoMemory where the bytes are
// not there.
at::Tensor readable(const at::Tensor& tensor, c10::Device device);

// The same memory as a TVM tensor that keeps `tensor` alive. `tensor` must be `readable`.
tvm::ffi::Tensor to_tvm(at::Tensor tensor);

// The same memory as a PyTorch tensor that keeps the TVM tensor alive. Like the result of any
// operator it may be resized, written to, and outlives the program that made it.
at::Tensor from_tvm(tvm::ffi::Tensor tensor);

// The same for the result of a program, whose memory nothing of TVM's uses any more: on a GPU,
// memory that came from PyTorch becomes its own again.
at::Tensor result_from_tvm(tvm::ffi::Tensor tensor);

// Turn an error of PyTorch's into one that passes through TVM, and back. The latter returns if the
// error was not made so.
[[noreturn]] void throw_through_tvm(const c10::Error& error);
void rethrow_from_tvm(const tvm::ffi::Error& error);

// Whether `tensor` shows all of `source`, and nothing else of its memory.
bool is_same_view(const DLTensor& tensor, const at::Tensor& source);

// Whether all of `tensor` is memory between the first and the last element of `source`. Never if
// it has no elements.
bool lies_inside(const DLTensor& tensor, const at::Tensor& source);

// `tensor`, known to lie inside of `source`, as a view of `source`: the two share a storage and
// a version counter, so that autograd and in-place writes treat them as PyTorch's own views.
at::Tensor view_of(const at::Tensor& source, const DLTensor& tensor);

}  // namespace tvmify
