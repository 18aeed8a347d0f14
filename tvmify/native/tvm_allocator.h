// The allocators of TVM's virtual machines, and the numbers that select them.
#pragma once

#include <dlpack/dlpack.h>
#include <tvm/ffi/container/shape.h>

#include <cstddef>
#include <mutex>
#include <string>

// Copied from TVM's tvm/runtime/memory/memory_manager.h, which includes a header that the wheel
// lacks; the library refuses any version of TVM other than the one it was built against.
namespace tvm::runtime::memory {

enum AllocatorType { kNaive = 1, kPooled };

struct Buffer {
  void* data{nullptr};
  size_t size{0};
  DLDevice device;
  AllocatorType alloc_type;
};

class __attribute__((visibility("default"))) Allocator {
 public:
  explicit Allocator(AllocatorType type) : type_(type) {}
  virtual ~Allocator() = default;
  AllocatorType type() const { return type_; }
  virtual Buffer Alloc(DLDevice device, size_t size, size_t alignment, DLDataType hint) = 0;
  virtual Buffer Alloc(DLDevice device, ffi::Shape shape, DLDataType hint,
                       const std::string& scope = "");
  virtual void* CreateView(const Buffer& buffer, ffi::Shape, DLDataType,
                           const std::string& = "global") {
    return buffer.data;
  }
  virtual void FreeView(DLDevice, void*) {}
  virtual void Free(const Buffer& buffer) = 0;
  virtual void Clear();
  virtual size_t UsedMemory() const = 0;

 protected:
  virtual bool AllowMemoryScope(const std::string& scope) const;

 private:
  AllocatorType type_;
};

class __attribute__((visibility("default"))) MemoryManager {
 public:
  static MemoryManager* Global();
  static Allocator* GetOrCreateAllocator(DLDevice device, AllocatorType type);
  std::mutex& mutex() { return mu_; }

 protected:
  std::mutex mu_;  // more members follow
};

}  // namespace tvm::runtime::memory

namespace tvmify {

// For `vm_initialization`. TVM's type has the values 0 to 3, of which TVM uses 1 and 2. The pool is
// a `BlockPool` on the CPU, and PyTorch's allocator on GPUs.
constexpr int kHugePageAllocator = 0, kPoolAllocator = 3;

}  // namespace tvmify
