#include "huge_pages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "tensor_bridge.h"

namespace tvmify {
namespace {

namespace memory = tvm::runtime::memory;

constexpr size_t kHugePage = size_t{2} << 20;  // on x86-64, and on aarch64 with pages of 4 KB

// Maps memory that begins at a huge page; null on failure.
void* map(size_t bytes) {
  const size_t length = round_up(bytes, kHugePage);
  void* const start =
      mmap(nullptr, length + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  const size_t before = -reinterpret_cast<uintptr_t>(start) % kHugePage;
  char* const first = static_cast<char*>(start) + before;
  if (before != 0) munmap(start, before);
  munmap(first + length, kHugePage - before);
  // Only for whole huge pages: a partial one at the end would waste memory.
  madvise(first, bytes, MADV_HUGEPAGE);
  return first;
}

void unmap(void* first, size_t bytes) { munmap(first, round_up(bytes, kHugePage)); }

void check(const void* memory, size_t bytes) {
  TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "there is no memory for ", bytes,
                   " bytes for compiled code: ", std::strerror(errno));
}

}  // namespace

HugePageAllocator::HugePageAllocator()
    : Allocator(static_cast<memory::AllocatorType>(kHugePageAllocator)) {}

memory::Buffer HugePageAllocator::Alloc(DLDevice device, size_t size, size_t alignment,
                                        DLDataType) {
  alignment = std::max(alignment, kAlignment);
  void* const start =
      size >= kHugePage
          ? map(size)
          : std::aligned_alloc(alignment, round_up(std::max<size_t>(size, 1), alignment));
  try {
    check(start, size);
  } catch (const c10::Error& error) {
    throw_through_tvm(error);  // PyTorch's exceptions cannot cross TVM
  }
  return {start, size, device, type()};
}

void HugePageAllocator::Free(const memory::Buffer& buffer) {
  if (buffer.size >= kHugePage) {
    unmap(buffer.data, buffer.size);
  } else {
    std::free(buffer.data);
  }
}

void gather_in_huge_pages(at::ArrayRef<at::Tensor*> tensors) {
  std::vector<at::Tensor*> small;
  size_t bytes = 0;
  for (at::Tensor* tensor : tensors) {
    if (tensor->nbytes() >= kHugePage) continue;
    small.push_back(tensor);
    bytes += round_up(tensor->nbytes(), kAlignment);
  }
  if (bytes < kHugePage) return;
  const at::NoGradGuard no_grad;
  void* const first = map(bytes);
  check(first, bytes);
  const at::Tensor room = at::from_blob(
      first, {static_cast<int64_t>(bytes)}, [bytes](void* memory) { unmap(memory, bytes); },
      at::kByte);
  size_t used = 0;
  for (at::Tensor* tensor : small) {
    const auto place =
        room.narrow(0, static_cast<int64_t>(used), static_cast<int64_t>(tensor->nbytes()));
    used += round_up(tensor->nbytes(), kAlignment);
    *tensor = place.view(tensor->scalar_type()).view(tensor->sizes()).copy_(*tensor);
  }
}

}  // namespace tvmify
