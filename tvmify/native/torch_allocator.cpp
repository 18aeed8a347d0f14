#include "torch_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/reflection/registry.h>

#include <mutex>
#include <unordered_map>

#include "block_pool.h"
#include "fork_safe_mutex.h"
#include "huge_pages.h"
#include "tensor_bridge.h"
#include "tvm_allocator.h"

namespace tvmify {
namespace {

namespace ffi = tvm::ffi;
namespace memory = tvm::runtime::memory;

// The sizes of the buffers that TVM holds, by address.
class Buffers {
 public:
  void add(const void* start, size_t size) {
    const std::lock_guard<std::mutex> lock(moment());
    sizes_[start] = size;
  }

  // Returns whether TVM still holds it, with this size if one is given.
  bool remove(const void* start, std::optional<size_t> size = std::nullopt) {
    const std::lock_guard<std::mutex> lock(moment());
    const auto found = sizes_.find(start);
    if (found == sizes_.end() || (size && *size != found->second)) return false;
    sizes_.erase(found);
    return true;
  }

 private:
  std::unordered_map<const void*, size_t> sizes_;
};

Buffers& buffers() {
  static auto* const buffers = new Buffers();  // never destroyed: machines may outlive statics
  return *buffers;
}

class TorchAllocator final : public memory::Allocator {
 public:
  explicit TorchAllocator(DLDevice device)
      : Allocator(static_cast<memory::AllocatorType>(kPoolAllocator)),
        device_(torch_device(device)),
        torch_(c10::GetAllocator(device_.type())) {}

  using Allocator::Alloc;

  memory::Buffer Alloc(DLDevice device, size_t size, size_t, DLDataType) final {
    const c10::DeviceGuard guard(device_);
    void* start = nullptr;
    try {
      start = torch_->raw_allocate(size);
    } catch (const c10::Error& error) {
      // PyTorch's exceptions cannot cross TVM; see `translate_errors`.
      throw_through_tvm(error);
    }
    if (start != nullptr) buffers().add(start, size);
    return {start, size, device, type()};
  }

  void Free(const memory::Buffer& buffer) final {
    if (buffers().remove(buffer.data)) torch_->raw_deallocate(buffer.data);
  }

  size_t UsedMemory() const final { return 0; }  // PyTorch counts

 private:
  const c10::Device device_;
  c10::Allocator* const torch_;
};

// TVM looks up a function of this name, which ends early for device types that TVM cannot name, and
// uses its own allocator if there is none or it returns null.
void* allocator_for(DLDevice device, int type) {
  if (type == kHugePageAllocator) return new HugePageAllocator();
  if (type != kPoolAllocator) return nullptr;
  if (device.device_type == kDLCPU) return new BlockPool();
  return new TorchAllocator(device);
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("DeviceAllocator.", allocator_for); }

}  // namespace

std::optional<c10::DataPtr> reclaim(const DLTensor& tensor) {
  if (tensor.byte_offset != 0 || tensor.data == nullptr) return std::nullopt;
  if (!buffers().remove(tensor.data, ffi::GetDataSize(tensor))) return std::nullopt;
  const c10::Device device = torch_device(tensor.device);
  return c10::DataPtr(tensor.data, tensor.data, c10::GetAllocator(device.type())->raw_deleter(),
                      device);
}

}  // namespace tvmify
