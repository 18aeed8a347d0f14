// Which memory tensors occupy, to find out in nanoseconds whether another one shares any of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace tvmify {

// From the first byte of a tensor to behind its last one; empty if it has no elements. Gaps between
// rows belong to it: two views that interleave count as sharing.
using MemoryRange = std::pair<uintptr_t, uintptr_t>;

inline MemoryRange range_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  uintptr_t last = 0;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    last += static_cast<uintptr_t>((tensor.size(axis) - 1) * tensor.stride(axis));
  }
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

inline bool overlap(const MemoryRange& a, const MemoryRange& b) {
  return a.first < b.second && b.first < a.second;
}

class MemoryRanges {
 public:
  MemoryRanges() = default;
  explicit MemoryRanges(std::vector<MemoryRange> ranges) : ranges_(std::move(ranges)) {
    std::sort(ranges_.begin(), ranges_.end());
    // They may overlap: each is made to reach as far as any before it.
    for (size_t i = 1; i < ranges_.size(); ++i) {
      ranges_[i].second = std::max(ranges_[i].second, ranges_[i - 1].second);
    }
  }

  bool overlaps(const MemoryRange& range) const {
    const auto behind =
        std::lower_bound(ranges_.begin(), ranges_.end(), range.second,
                         [](const MemoryRange& known, uintptr_t end) { return known.first < end; });
    return range.first != range.second && behind != ranges_.begin() &&
           range.first < std::prev(behind)->second;
  }

 private:
  std::vector<MemoryRange> ranges_;
};

}  // namespace tvmify
