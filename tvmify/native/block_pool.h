// The memory of calls on the CPU: temporaries and results.
//
// TVM's own pool keeps each block for later requests of exactly its size. Programs for many shapes
// ask for ever other sizes, so it would grow with every shape that a process has seen.
#pragma once

#include <cstddef>
#include <vector>

#include "huge_pages.h"
#include "tvm_allocator.h"

namespace tvmify {

// Keeps freed blocks, and serves each request with the smallest that fits and is not much larger.
// A request that none fits replaces a block that is a little too small. So the pool holds some
// times the memory that calls have needed at once, however many shapes there are.
class BlockPool final : public tvm::runtime::memory::Allocator {
 public:
  BlockPool();

  using Allocator::Alloc;
  tvm::runtime::memory::Buffer Alloc(DLDevice device, size_t size, size_t alignment,
                                     DLDataType hint) final;
  void Free(const tvm::runtime::memory::Buffer& buffer) final;
  size_t UsedMemory() const final { return 0; }  // nobody reads it

 private:
  struct Block {
    size_t size;
    void* data;
  };

  // Removes an idle block that serves a request, or one that the request has outgrown.
  Block take(size_t size);
  void release_idle();
  void release(const Block& block);

  std::vector<Block> idle_;  // by size; of equal ones, the last was used last
  HugePageAllocator system_;
};

}  // namespace tvmify
