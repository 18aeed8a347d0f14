#include "tensor_bridge.h"

#include <ATen/DLConvertor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/DimVector.h>
#include <c10/util/accumulate.h>

#include <utility>

namespace tvmify {
namespace {

namespace ffi = tvm::ffi;

// What TVM calls the allocator of a tensor: here it allocates nothing and keeps the owner alive.
class Borrowed {
 public:
  explicit Borrowed(at::Tensor owner) : owner_(std::move(owner)) {}
  void AllocData(DLTensor* tensor) { tensor->data = const_cast<void*>(owner_.const_data_ptr()); }
  void FreeData(DLTensor*) {}

 private:
  at::Tensor owner_;
};

// Any other dispatch key means that the bytes are not the values (conjugate, negative, zero, fake,
// wrapped by a transform, quantised) or not here (sparse, meta, another device).
constexpr c10::DispatchKeySet kPlain({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                                      c10::DispatchKey::AutocastCPU,
                                      c10::DispatchKey::ADInplaceOrView});

bool is_plain(const at::Tensor& tensor) {
  return (tensor.key_set() | kPlain) == kPlain && !tensor.is_complex();
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAlignment == 0; }

const char* start_of(const DLTensor& tensor) {
  return static_cast<const char*>(tensor.data) + tensor.byte_offset;
}

c10::IntArrayRef shape_of(const DLTensor& tensor) {
  return {tensor.shape, static_cast<size_t>(tensor.ndim)};
}

c10::DimVector strides_of(const DLTensor& tensor) {
  if (tensor.strides != nullptr) return {tensor.strides, tensor.strides + tensor.ndim};
  return c10::contiguous_strides(shape_of(tensor));
}

}  // namespace

at::Tensor readable(const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.defined() && is_plain(tensor),
                   "compiled code takes dense CPU tensors that are not complex, conjugate, "
                   "negative or quantised, and got one with the dispatch keys ",
                   tensor.defined() ? toString(tensor.key_set()) : "(undefined)", " and dtype ",
                   tensor.dtype(), ". Call .resolve_conj(), .resolve_neg() or .to_dense() first.");
  const bool contiguous = tensor.is_contiguous();
  if (contiguous && (is_aligned(tensor.const_data_ptr()) || tensor.numel() == 0)) return tensor;
  // The copy is our own affair, which autograd must not record.
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return contiguous ? tensor.clone(at::MemoryFormat::Contiguous) : tensor.contiguous();
}

ffi::Tensor to_tvm(at::Tensor tensor) {
  // One allocation: the shape, and strides computed from it, lie behind the object. PyTorch's own
  // strides are not used because it leaves those of dimensions of size one arbitrary.
  using Object = ffi::details::TensorObjFromNDAlloc<Borrowed>;
  const c10::IntArrayRef sizes = tensor.sizes();
  const DLDataType dtype = at::getDLDataType(tensor);
  return ffi::Tensor(ffi::make_inplace_array_object<Object, int64_t>(
      sizes.size() * 2, Borrowed(std::move(tensor)), ffi::ShapeView(sizes.data(), sizes.size()),
      dtype, DLDevice{kDLCPU, 0}));
}

at::Tensor from_tvm(ffi::Tensor tensor) {
  const DLTensor& shown = *tensor.GetDLTensorPtr();
  const caffe2::TypeMeta dtype = c10::scalarTypeToTypeMeta(at::toScalarType(shown.dtype));
  const size_t bytes = c10::multiply_integers(shape_of(shown)) * dtype.itemsize();
  void* data = const_cast<char*>(start_of(shown));
  void* owner = ffi::details::ObjectUnsafe::MoveObjectRefToTVMFFIObjectPtr(std::move(tensor));
  c10::DataPtr memory(data, owner, [](void* object) { TVMFFIObjectDecRef(object); }, at::kCPU);
  // With an allocator the storage is resizable, as eager's results are; freeing stays TVM's.
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory),
                       c10::GetCPUAllocator(), /*resizable=*/true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype);
  c10::TensorImpl* impl = result.unsafeGetTensorImpl();
  if (shown.strides == nullptr) {
    impl->set_sizes_contiguous(shape_of(shown));
  } else {
    impl->set_sizes_and_strides(shape_of(shown), {shown.strides, static_cast<size_t>(shown.ndim)});
  }
  return result;
}

bool is_same_view(const DLTensor& tensor, const at::Tensor& source) {
  return start_of(tensor) == source.const_data_ptr() && shape_of(tensor) == source.sizes() &&
         at::toScalarType(tensor.dtype) == source.scalar_type();
}

bool lies_inside(const DLTensor& tensor, const at::Tensor& source) {
  // Compared as integers: the two need not belong to the same object.
  const auto offset = reinterpret_cast<uintptr_t>(start_of(tensor)) -
                      reinterpret_cast<uintptr_t>(source.const_data_ptr());
  return offset < source.nbytes() && ffi::GetDataSize(tensor) <= source.nbytes() - offset;
}

at::Tensor view_of(const at::Tensor& source, const DLTensor& tensor) {
  const auto bytes = start_of(tensor) - static_cast<const char*>(source.const_data_ptr());
  const at::ScalarType dtype = at::toScalarType(tensor.dtype);
  at::NoGradGuard no_grad;
  const at::Tensor typed = dtype == source.scalar_type() ? source : source.view(dtype);
  const auto itemsize = static_cast<int64_t>(typed.itemsize());
  return typed.as_strided(shape_of(tensor), strides_of(tensor),
                          typed.storage_offset() + bytes / itemsize);
}

}  // namespace tvmify
