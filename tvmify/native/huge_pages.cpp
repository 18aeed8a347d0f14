#include "huge_pages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "tensor_bridge.h"

namespace tvmify {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;  // on x86-64, and on aarch64 with pages of 4 KB

constexpr size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// Bytes, the first of which is the first of a huge page.
at::Tensor map(size_t bytes) {
  const size_t length = bytes + kHugePage;
  void* const start =
      mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, start != MAP_FAILED, "there is no memory for ", bytes,
                   " bytes of packed weights: ", std::strerror(errno));
  const auto free = [start, length](void*) { munmap(start, length); };
  void* const first =
      reinterpret_cast<void*>(round_up(reinterpret_cast<uintptr_t>(start), kHugePage));
  madvise(first, bytes, MADV_HUGEPAGE);  // small pages do as well
  return at::from_blob(first, {static_cast<int64_t>(bytes)}, free, at::kByte);
}

}  // namespace

void move_to_huge_pages(at::ArrayRef<at::Tensor*> tensors) {
  size_t bytes = 0;
  for (const at::Tensor* tensor : tensors) bytes += round_up(tensor->nbytes(), kAlignment);
  if (bytes < kHugePage) return;
  const at::NoGradGuard no_grad;
  const at::Tensor room = map(bytes);
  size_t used = 0;
  for (at::Tensor* tensor : tensors) {
    const auto place =
        room.narrow(0, static_cast<int64_t>(used), static_cast<int64_t>(tensor->nbytes()));
    used += round_up(tensor->nbytes(), kAlignment);
    // The old memory is free before the next tensor is touched: at no time are there two of all.
    *tensor = place.view(tensor->scalar_type()).view(tensor->sizes()).copy_(*tensor);
  }
}

}  // namespace tvmify
