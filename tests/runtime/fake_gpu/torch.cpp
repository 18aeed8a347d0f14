// PyTorch's part of two GPUs, for a PyTorch without any: devices, streams, an allocator that
// counts, and operators that the CPU computes on the same memory.
//
// Loaded before PyTorch asks for its hooks: with LD_PRELOAD.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/clone.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

// In cuda.c.
extern "C" int cudaGetDevice(int* index);
extern "C" int cudaSetDevice(int index);

namespace {

constexpr c10::DeviceIndex kDevices = 2;

// The one that CUDA's runtime knows, as in PyTorch.
c10::DeviceIndex current_device() {
  int index = 0;
  cudaGetDevice(&index);
  return static_cast<c10::DeviceIndex>(index);
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  const c10::DeviceIndex before = current_device();
  cudaSetDevice(index);
  return before;
}

thread_local std::array<c10::StreamId, kDevices> current_streams{};
int64_t synchronizations = 0, initializations = 0;

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {c10::kCUDA, current_device()}; }
  void setDevice(c10::Device device) const override { exchange_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {c10::kCUDA, exchange_device(index_of(device))};
  }
  c10::Stream stream(c10::DeviceIndex index, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, index), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(index_of(device), current_streams.at(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(index_of(device), 0);
  }
  c10::Stream exchangeStream(c10::Stream other) const override {
    const c10::DeviceIndex index = other.device_index();
    return stream(index, std::exchange(current_streams.at(index), other.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id() * 0x100);
  }
  void synchronizeStream(const c10::Stream&) const override { ++synchronizations; }
  void synchronizeDevice(const c10::DeviceIndex) const override { ++synchronizations; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override { ++initializations; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  int getNumGPUs() const override { return kDevices; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// Blocks by their start, with the stream that was current when they were taken.
std::mutex changing;
std::map<const void*, c10::StreamId> blocks;

void release(void* block) {
  const std::lock_guard<std::mutex> lock(changing);
  TORCH_CHECK(block == nullptr || blocks.erase(block) == 1, "freed twice, or never taken");
  std::free(block);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(c10::kCUDA, current_device());
    if (size == 0) return {nullptr, nullptr, &release, device};
    if (size > size_t{1} << 40) C10_THROW_ERROR(OutOfMemoryError, "too little memory");
    void* const block = std::aligned_alloc(512, (size + 511) / 512 * 512);
    std::memset(block, 0x7f, size);  // nobody may count on zeros
    const std::lock_guard<std::mutex> lock(changing);
    blocks[block] = current_streams.at(current_device());
    return {block, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};
Allocator allocator;
const bool is_set = [] { return c10::SetAllocator(c10::kCUDA, &allocator, 100), true; }();

// A tensor of the shape of `like`, in other memory.
at::Tensor in(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                         c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

c10::Storage storage_of(size_t size, c10::DataPtr memory, c10::Allocator* its) {
  return {c10::Storage::use_byte_size_t(), size, std::move(memory), its, its != nullptr};
}

at::Tensor seen_by_cpu(const at::Tensor& tensor) {
  c10::DataPtr memory(tensor.storage().mutable_data(), c10::kCPU);
  return in(storage_of(tensor.storage().nbytes(), std::move(memory), nullptr), tensor,
            c10::DispatchKey::CPU);
}

at::Tensor copied_to_gpu(const at::Tensor& tensor) {
  const size_t size = tensor.storage().nbytes();
  c10::DataPtr memory = allocator.allocate(size);
  if (size > 0) std::memcpy(memory.get(), tensor.storage().data(), size);
  return in(storage_of(size, std::move(memory), &allocator), tensor, c10::DispatchKey::CUDA);
}

void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<std::pair<at::Tensor, at::Tensor>> seen;  // by the CPU, and as given
  const auto given = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    return seen.emplace_back(seen_by_cpu(tensor), tensor).first;
  };
  const size_t first = stack->size() - op.schema().arguments().size();
  for (size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = stack->at(i);
    if (value.isTensor()) value = given(value.toTensor());
    if (value.isDevice()) value = c10::Device(c10::kCPU);
  }
  op.callBoxed(stack);
  for (c10::IValue& value : *stack) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor result = value.toTensor();
    value = copied_to_gpu(result);
    for (const auto& [alias, tensor] : seen) {
      if (!alias.is_alias_of(result)) continue;
      value = alias.is_same(result) ? tensor : in(tensor.storage(), result, c10::DispatchKey::CUDA);
    }
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

// Those that look at the type of device themselves.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (const char* name : {"convolution", "copy_", "fill_"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
  }
}

at::Tensor to_gpu(const at::Tensor& tensor, int64_t index) {
  const c10::DeviceIndex before = exchange_device(static_cast<c10::DeviceIndex>(index));
  at::Tensor copy = copied_to_gpu(tensor.contiguous());
  exchange_device(before);
  return copy;
}

int64_t stream_of(const at::Tensor& tensor) {
  const std::lock_guard<std::mutex> lock(changing);
  const auto found = blocks.find(tensor.storage().data());
  return found == blocks.end() ? -1 : found->second;
}

TORCH_LIBRARY(fake_gpu, library) {
  library.def("to_gpu(Tensor tensor, int index) -> Tensor", to_gpu);
  library.def("to_cpu(Tensor tensor) -> Tensor",
              [](const at::Tensor& tensor) { return seen_by_cpu(tensor).clone(); });
  library.def("use_stream(int index, int stream) -> ()",
              [](int64_t index, int64_t stream) { current_streams.at(index) = stream; });
  library.def("current_device() -> int", [] { return int64_t{current_device()}; });
  library.def("blocks() -> int", [] { return static_cast<int64_t>(blocks.size()); });
  library.def("synchronizations() -> int", [] { return synchronizations; });
  library.def("initializations() -> int", [] { return initializations; });
  // Of the block that the tensor is in; -1 if it is none of the allocator's.
  library.def("stream_of(Tensor tensor) -> int", stream_of);
  // Whether PyTorch knows the memory as its own, as `record_stream` asks.
  library.def("is_pytorchs(Tensor tensor) -> bool", [](const at::Tensor& tensor) {
    return tensor.storage().data_ptr().get_deleter() == &release;
  });
}

}  // namespace
