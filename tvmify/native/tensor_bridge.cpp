#include "tensor_bridge.h"

#include <ATen/DLConvertor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/DimVector.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "fork_safe_mutex.h"
#include "memory_ranges.h"
#include "torch_allocator.h"

namespace tvmify {
namespace {

namespace ffi = tvm::ffi;

// A TVM tensor that keeps a PyTorch tensor alive. Its shape, and strides computed from the shape,
// follow the object in memory; PyTorch's strides are arbitrary for dimensions of size one.
class Borrowed : public ffi::TensorObj {
 public:
  explicit Borrowed(at::Tensor owner);
  ~Borrowed();

 private:
  const at::Tensor owner_;
};

// GPU memory that TVM has borrowed, by its start, since a view made by TVM only knows its address.
class Loans {
 public:
  void add(const void* start, const at::Tensor& owner) {
    const std::lock_guard<std::mutex> lock(moment());
    owners_[start] = &owner;
  }
  void remove(const void* start, const at::Tensor& owner) {
    const std::lock_guard<std::mutex> lock(moment());
    const auto found = owners_.find(start);
    if (found != owners_.end() && found->second == &owner) owners_.erase(found);
  }
  at::Tensor find(const void* start) {
    const std::lock_guard<std::mutex> lock(moment());
    const auto found = owners_.find(start);
    return found == owners_.end() ? at::Tensor() : *found->second;
  }

 private:
  std::unordered_map<const void*, const at::Tensor*> owners_;
};

Loans& loans() {
  static auto* const loans = new Loans();  // never destroyed: tensors may outlive statics
  return *loans;
}

// The number of axes that TVM sees.
size_t axes_of(const at::Tensor& tensor) {
  return static_cast<size_t>(tensor.dim() + (tensor.is_complex() ? 1 : 0));
}

Borrowed::Borrowed(at::Tensor owner) : owner_(std::move(owner)) {
  const c10::IntArrayRef sizes = owner_.sizes();
  data = const_cast<void*>(owner_.const_data_ptr());
  device = tvm_device(owner_.device());
  ndim = static_cast<int>(axes_of(owner_));
  dtype = at::getDLDataType(owner_);
  byte_offset = 0;
  shape = reinterpret_cast<int64_t*>(reinterpret_cast<char*>(this) + sizeof(Borrowed));
  strides = shape + ndim;
  std::copy(sizes.begin(), sizes.end(), shape);
  if (owner_.is_complex()) {
    dtype = {kDLFloat, static_cast<uint8_t>(dtype.bits / 2), 1};
    shape[sizes.size()] = 2;
  }
  ffi::details::FillStridesFromShape(ffi::ShapeView(shape, axes_of(owner_)), strides);
  if (device.device_type != kDLCPU) loans().add(data, owner_);
}

Borrowed::~Borrowed() {
  if (device.device_type != kDLCPU) loans().remove(data, owner_);
}

// With any other dispatch key, the bytes are not the values (zero, fake, wrapped by a transform,
// quantized) or are elsewhere (sparse, meta, another device).
constexpr c10::DispatchKeySet kPlainOnCpu(
    {c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU,
     c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
constexpr c10::DispatchKeySet kPlainOnGpu(
    {c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCUDA,
     c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

bool is_plain(const at::Tensor& tensor, c10::Device device) {
  const c10::DispatchKeySet plain = device.is_cpu() ? kPlainOnCpu : kPlainOnGpu;
  return (tensor.key_set() | plain) == plain && (device.is_cpu() || tensor.device() == device);
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

// Returns `shown`, whose memory is in a storage, as a PyTorch tensor.
at::Tensor in(c10::Storage storage, const DLTensor& shown) {
  const auto dtype = c10::scalarTypeToTypeMeta(at::toScalarType(shown.dtype));
  const auto offset = start_of(shown) - static_cast<const char*>(storage.data());
  const bool on_cpu = storage.device_type() == c10::kCPU;
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(on_cpu ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA), dtype);
  c10::TensorImpl* impl = result.unsafeGetTensorImpl();
  if (offset != 0) impl->set_storage_offset(offset / static_cast<int64_t>(dtype.itemsize()));
  if (shown.strides == nullptr) {
    impl->set_sizes_contiguous(shape_of(shown));
  } else {
    impl->set_sizes_and_strides(shape_of(shown), {shown.strides, static_cast<size_t>(shown.ndim)});
  }
  return result;
}

// Returns the memory of `shown`, which `memory` owns, as a PyTorch tensor.
at::Tensor over(const DLTensor& shown, c10::DataPtr memory) {
  const size_t bytes = ffi::GetDataSize(shown);
  const c10::DeviceType type = memory.device().type();
  // With an allocator the storage is resizable, like eager's results; `memory` frees itself.
  c10::Allocator* its = type == c10::kCPU ? c10::GetCPUAllocator() : c10::GetAllocator(type);
  return in({c10::Storage::use_byte_size_t(), bytes, std::move(memory), its, /*resizable=*/true},
            shown);
}

// Kind of a TVM error that carries PyTorch's out-of-memory error.
constexpr const char* kOutOfMemory = "OutOfMemoryError";

}  // namespace

c10::Device torch_device(DLDevice device) {
  if (device.device_type == kDLCPU) return c10::kCPU;
  TORCH_CHECK_TYPE(device.device_type == kDLCUDA, "compiled code runs on the CPU or a GPU");
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(device.device_id)};
}

DLDevice tvm_device(c10::Device device) {
  return device.is_cpu() ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, device.index()};
}

at::Tensor readable(const at::Tensor& tensor, c10::Device device) {
  TORCH_CHECK_TYPE(tensor.defined() && is_plain(tensor, device), "compiled code takes dense ",
                   device.is_cpu() ? "CPU" : device.str(),
                   " tensors that are not quantized, and got one with the dispatch keys ",
                   tensor.defined() ? toString(tensor.key_set()) : "(undefined)", " and dtype ",
                   tensor.dtype(), ". Call .to_dense() first.");
  if (!has_memory(tensor)) {
    throw NoMemory({__func__, __FILE__, __LINE__},
                   c10::str("a tensor of ", tensor.nbytes(), " bytes has no memory, or less than ",
                            "that: its storage was resized"));
  }
  const bool plain = lies_plainly(tensor);
  if (plain && (is_aligned(tensor.const_data_ptr()) || tensor.numel() == 0)) return tensor;
  // Autograd must not record this internal copy.
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return tensor.clone(at::MemoryFormat::Contiguous);
}

ffi::Tensor to_tvm(at::Tensor tensor) {
  const size_t extents = 2 * axes_of(tensor);  // sizes and strides
  return ffi::Tensor(ffi::make_inplace_array_object<Borrowed, int64_t>(extents, std::move(tensor)));
}

at::Tensor from_tvm(ffi::Tensor tensor) {
  const DLTensor& shown = *tensor.GetDLTensorPtr();
  void* data = const_cast<char*>(start_of(shown));
  void* owner = ffi::details::ObjectUnsafe::MoveObjectRefToTVMFFIObjectPtr(std::move(tensor));
  return over(shown, {data, owner, [](void* object) { TVMFFIObjectDecRef(object); },
                      torch_device(shown.device)});
}

at::Tensor result_from_tvm(ffi::Tensor tensor) {
  const DLTensor& shown = *tensor.GetDLTensorPtr();
  if (shown.device.device_type != kDLCPU) {
    const at::Tensor owner = loans().find(start_of(shown));
    if (owner.defined()) return is_same_view(shown, owner) ? owner : in(owner.storage(), shown);
    if (auto memory = reclaim(shown)) return over(shown, *std::move(memory));
  }
  return from_tvm(std::move(tensor));
}

at::Tensor as_complex(at::Tensor pairs) {
  if (pairs.is_complex()) return pairs;
  const bool is_real = pairs.scalar_type() == at::kFloat || pairs.scalar_type() == at::kDouble;
  TORCH_CHECK(is_real && pairs.dim() > 0 && pairs.sizes().back() == 2 && pairs.is_contiguous(),
              "a result of dtype ", pairs.dtype(), " and shape ", pairs.sizes(),
              " does not hold pairs of the parts of complex numbers");
  DLTensor shown{};
  shown.data = const_cast<void*>(pairs.const_data_ptr());
  shown.device = tvm_device(pairs.device());
  shown.ndim = static_cast<int>(pairs.dim()) - 1;
  shown.dtype = {kDLComplex, static_cast<uint8_t>(pairs.itemsize() * 16), 1};
  shown.shape = const_cast<int64_t*>(pairs.sizes().data());
  return in(pairs.storage(), shown);
}

void throw_through_tvm(const c10::Error& error) {
  const bool no_memory = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr;
  throw ffi::Error(no_memory ? kOutOfMemory : "RuntimeError", error.what_without_backtrace(), "");
}

void rethrow_from_tvm(const ffi::Error& error) {
  TORCH_CHECK_WITH(OutOfMemoryError, error.kind() != kOutOfMemory, error.message());
}

bool is_same_view(const DLTensor& tensor, const at::Tensor& source) {
  return start_of(tensor) == source.const_data_ptr() && shape_of(tensor) == source.sizes() &&
         at::toScalarType(tensor.dtype) == source.scalar_type();
}

bool lies_inside(const DLTensor& tensor, const at::Tensor& source) {
  return contains(range_of(source), range_of(tensor));
}

at::Tensor view_of(const at::Tensor& source, const DLTensor& tensor) {
  const auto bytes = start_of(tensor) - static_cast<const char*>(source.const_data_ptr());
  const at::ScalarType dtype = at::toScalarType(tensor.dtype);
  at::NoGradGuard no_grad;
  const at::Tensor parts = source.is_complex() ? at::view_as_real(source) : source;
  const at::Tensor typed = dtype == parts.scalar_type() ? parts : parts.view(dtype);
  const auto itemsize = static_cast<int64_t>(typed.itemsize());
  return typed.as_strided(shape_of(tensor), strides_of(tensor),
                          typed.storage_offset() + bytes / itemsize);
}

}  // namespace tvmify
