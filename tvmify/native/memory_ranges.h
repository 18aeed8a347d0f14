// The memory that tensors occupy. All code that reads a tensor's bytes, or checks whether tensors
// overlap, uses this: a tensor may have no memory, and its extent depends on its strides.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace tvmify {

// Tensors with these keys wrap others: their sizes come from a transform or from Python code, and
// their storage is a dummy.
constexpr c10::DispatchKeySet kWrapped({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                        c10::DispatchKey::FuncTorchBatched,
                                        c10::DispatchKey::FuncTorchGradWrapper});

// Whether the tensor has concrete sizes and strides: not sparse, nested or wrapped, and without
// symbolic sizes.
inline bool is_dense(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.key_set().has_any(kWrapped) &&
         tensor.layout() == at::kStrided && !tensor.is_nested() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// Whether memory holds the values in order: of a tensor that is contiguous, and neither conjugated
// nor negated without a copy.
inline bool lies_plainly(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// The storage, or null. Unlike Tensor::storage(), never throws.
inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Half-open range of addresses; empty if there are no bytes. It includes gaps between rows, so
// interleaved views count as overlapping.
using MemoryRange = std::pair<uintptr_t, uintptr_t>;

inline bool is_empty(const MemoryRange& range) { return range.first == range.second; }

inline bool overlap(const MemoryRange& a, const MemoryRange& b) {
  return a.first < b.second && b.first < a.second;
}

// Whether `outer` contains `inner`, which must not be empty.
inline bool contains(const MemoryRange& outer, const MemoryRange& inner) {
  return !is_empty(inner) && outer.first <= inner.first && inner.second <= outer.second;
}

// The number of bytes that a tensor with this layout spans; strides may be null.
inline size_t extent(const int64_t* sizes, const int64_t* strides, size_t axes, size_t itemsize) {
  size_t last = 0, elements = 1;
  for (size_t axis = axes; axis-- > 0;) {
    const auto size = static_cast<size_t>(sizes[axis]);
    if (size == 0) return 0;
    last += (size - 1) * (strides != nullptr ? static_cast<size_t>(strides[axis]) : elements);
    elements *= size;
  }
  return (last + 1) * itemsize;
}

// The readable memory of a tensor. Empty if it has no elements, is not dense, has no memory (on the
// meta device, a wrapper subclass, a freed storage), or less than its sizes say.
inline MemoryRange range_of(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = storage_of(tensor);
  if (storage == nullptr || !is_dense(tensor)) return {0, 0};
  const auto base = reinterpret_cast<uintptr_t>(storage->_mutable_data_ptr_no_checks().get());
  const size_t itemsize = tensor.itemsize();
  const size_t bytes = extent(tensor.sizes().data(), tensor.strides().data(),
                              static_cast<size_t>(tensor.dim()), itemsize);
  const size_t offset = static_cast<size_t>(tensor.storage_offset()) * itemsize;
  if (base == 0 || bytes == 0 || offset + bytes > storage->nbytes()) return {0, 0};
  return {base + offset, base + offset + bytes};
}

inline MemoryRange range_of(const DLTensor& tensor) {
  const auto start = reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
  const size_t itemsize = (tensor.dtype.bits * size_t{tensor.dtype.lanes} + 7) / 8;
  return {start,
          start + extent(tensor.shape, tensor.strides, static_cast<size_t>(tensor.ndim), itemsize)};
}

// Whether each element of a tensor can be read at its address.
inline bool has_memory(const at::Tensor& tensor) {
  return is_dense(tensor) && (tensor.numel() == 0 || !is_empty(range_of(tensor)));
}

class MemoryRanges {
 public:
  MemoryRanges() = default;
  explicit MemoryRanges(std::vector<MemoryRange> ranges) : ranges_(std::move(ranges)) {
    std::sort(ranges_.begin(), ranges_.end());
    // Ranges may overlap, so each is extended to the furthest end before it.
    for (size_t i = 1; i < ranges_.size(); ++i) {
      ranges_[i].second = std::max(ranges_[i].second, ranges_[i - 1].second);
    }
  }

  bool overlaps(const MemoryRange& range) const {
    const auto behind =
        std::lower_bound(ranges_.begin(), ranges_.end(), range.second,
                         [](const MemoryRange& known, uintptr_t end) { return known.first < end; });
    return !is_empty(range) && behind != ranges_.begin() && range.first < std::prev(behind)->second;
  }

 private:
  std::vector<MemoryRange> ranges_;
};

}  // namespace tvmify
