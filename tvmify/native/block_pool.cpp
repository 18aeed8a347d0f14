#include "block_pool.h"

#include <tvm/ffi/error.h>

#include <algorithm>
#include <mutex>

#include "fork_safe_mutex.h"

namespace tvmify {
namespace {

namespace memory = tvm::runtime::memory;

// Requests are rounded up to it, so that small ones share blocks.
constexpr size_t kPage = 4096;
// How many idle blocks of about one size are kept: a caller may drop many results at once. A step
// of a language model drops a cache, which has two blocks for each layer.
constexpr size_t kMostIdle = 64, kMostIdleBytes = size_t{128} << 20, kLeastIdle = 4;

bool has_room(size_t idle, size_t size) {
  return idle < kLeastIdle || (idle < kMostIdle && idle * size < kMostIdleBytes);
}

constexpr auto is_smaller = [](const auto& block, size_t than) { return block.size < than; };
constexpr auto is_larger = [](size_t than, const auto& block) { return block.size > than; };

// The largest block for a request: a result keeps its block, so little of it may be unused.
constexpr size_t largest_for(size_t size) { return size + size / 4; }

}  // namespace

BlockPool::BlockPool() : Allocator(static_cast<memory::AllocatorType>(kPoolAllocator)) {}

memory::Buffer BlockPool::Alloc(DLDevice device, size_t size, size_t alignment, DLDataType hint) {
  size = round_up(std::max<size_t>(size, 1), kPage);
  const Block block = take(size);
  if (block.size >= size) return {block.data, block.size, device, type()};
  release(block);
  memory::Buffer made;
  try {
    made = system_.Alloc(device, size, alignment, hint);
  } catch (const tvm::ffi::Error&) {  // there is no memory
    release_idle();
    made = system_.Alloc(device, size, alignment, hint);
  }
  return {made.data, size, device, type()};
}

BlockPool::Block BlockPool::take(size_t size) {
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
  {
    const std::lock_guard<std::mutex> lock(moment());
    const auto place = std::upper_bound(idle_.begin(), idle_.end(), buffer.size, is_larger);
    const auto end = std::upper_bound(place, idle_.end(), largest_for(buffer.size), is_larger);
    const auto begin =
        std::lower_bound(idle_.begin(), place, buffer.size - buffer.size / 5, is_smaller);
    if (has_room(static_cast<size_t>(end - begin), buffer.size)) {
      idle_.insert(place, {buffer.size, buffer.data});
      return;
    }
  }
  release({buffer.size, buffer.data});
}

void BlockPool::release_idle() {
  std::vector<Block> idle;
  {
    const std::lock_guard<std::mutex> lock(moment());
    idle.swap(idle_);
  }
  for (const Block& block : idle) release(block);
}

void BlockPool::release(const Block& block) {
  if (block.data != nullptr) system_.Free({block.data, block.size, {kDLCPU, 0}, system_.type()});
}

}  // namespace tvmify
