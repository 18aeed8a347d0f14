#include "block_pool.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "fork_safe_mutex.h"
#include "tensor_bridge.h"

namespace tvmify {
namespace {

namespace memory = tvm::runtime::memory;

// Requests are rounded up to it, so that small ones share blocks.
constexpr size_t kPage = 4096;
// The most idle blocks of about one size; the results that a caller has dropped at once may be
// more. A step of a language model drops a cache: two blocks for each layer.
constexpr ptrdiff_t kMostIdle = 64;

constexpr size_t round_up(size_t size) { return (size + kPage - 1) / kPage * kPage; }

// The largest block for a request: a result keeps its block, so little of it may be unused.
constexpr size_t largest_for(size_t size) { return size + size / 4; }

}  // namespace

BlockPool::BlockPool() : Allocator(static_cast<memory::AllocatorType>(kPoolAllocator)) {}

memory::Buffer BlockPool::Alloc(DLDevice device, size_t size, size_t, DLDataType) {
  size = round_up(std::max<size_t>(size, 1));
  Block block = take(size);
  if (block.size < size) {
    std::free(block.data);  // outgrown, or null
    block = {size, std::aligned_alloc(kAlignment, size)};
  }
  if (block.data == nullptr) {
    release_idle();
    block.data = std::aligned_alloc(kAlignment, size);
  }
  try {
    TORCH_CHECK_WITH(OutOfMemoryError, block.data != nullptr, "there is no memory for ", size,
                     " bytes of a call of compiled code");
  } catch (const c10::Error& error) {
    throw_through_tvm(error);  // PyTorch's exceptions cannot cross TVM
  }
  return {block.data, block.size, device, type()};
}

BlockPool::Block BlockPool::take(size_t size) {
  const auto is_smaller = [](const Block& block, size_t than) { return block.size < than; };
  const auto is_larger = [](size_t than, const Block& block) { return block.size > than; };
  const std::lock_guard<std::mutex> lock(moment());
  auto found = std::lower_bound(idle_.begin(), idle_.end(), size, is_smaller);
  if (found != idle_.end() && found->size <= largest_for(size)) {
    found = std::upper_bound(found, idle_.end(), found->size, is_larger) - 1;
  } else if (found != idle_.begin() && largest_for((found - 1)->size) >= size) {
    --found;
  } else {
    return {0, nullptr};
  }
  const Block block = *found;
  idle_.erase(found);
  return block;
}

void BlockPool::Free(const memory::Buffer& buffer) {
  const auto is_smaller = [](const Block& block, size_t than) { return block.size < than; };
  const auto is_larger = [](size_t than, const Block& block) { return block.size > than; };
  {
    const std::lock_guard<std::mutex> lock(moment());
    const auto place = std::upper_bound(idle_.begin(), idle_.end(), buffer.size, is_larger);
    const auto end = std::upper_bound(place, idle_.end(), largest_for(buffer.size), is_larger);
    const auto begin =
        std::lower_bound(idle_.begin(), place, buffer.size - buffer.size / 5, is_smaller);
    if (end - begin < kMostIdle) {
      idle_.insert(place, {buffer.size, buffer.data});
      return;
    }
  }
  std::free(buffer.data);
}

void BlockPool::release_idle() {
  std::vector<Block> idle;
  {
    const std::lock_guard<std::mutex> lock(moment());
    idle.swap(idle_);
  }
  for (const Block& block : idle) std::free(block.data);
}

}  // namespace tvmify
