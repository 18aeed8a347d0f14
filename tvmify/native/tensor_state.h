// A snapshot of a tensor, to detect changes in nanoseconds.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstring>
#include <tuple>

#include "memory_ranges.h"

namespace tvmify {

enum Change : long { kNothing = 0, kWeights = 1, kStructure = 2 };

class TensorState {
 public:
  // With `counts_writes` false, writes to the tensor's elements do not count as changes.
  explicit TensorState(const at::Tensor& tensor, bool counts_writes = true)
      : keys_(tensor.key_set()),
        dtype_(tensor.scalar_type()),
        requires_grad_(tensor.requires_grad()),
        counts_writes_(counts_writes),
        is_dense_(is_dense(tensor)),
        storage_(weak_storage_of(tensor)),
        version_(counts_writes ? version_of(tensor) : 0) {
    if (!is_dense_) return;
    device_ = tensor.device();
    sizes_ = tensor.sizes();
    strides_ = tensor.strides();
    place_ = place_of(tensor);
    if (counts_writes && tensor.is_cpu() && tensor.is_non_overlapping_and_dense()) {
      sampled_ = range_of(tensor);
      sample_ = sample();
    }
  }

  Change compare(const at::Tensor& tensor) const {
    // The keys first: they say whether the tensor still has the other properties.
    if (tensor.key_set() != keys_ || tensor.scalar_type() != dtype_ ||
        (is_dense_ && (tensor.device() != device_ || tensor.sizes() != c10::IntArrayRef(sizes_)))) {
      return kStructure;
    }
    const bool equal = tensor.requires_grad() == requires_grad_ &&
                       storage_of(tensor) == storage_._unsafe_get_target() &&
                       (!is_dense_ || (place_of(tensor) == place_ &&
                                       tensor.strides() == c10::IntArrayRef(strides_))) &&
                       !(counts_writes_ && is_written(tensor));
    return equal ? kNothing : kWeights;
  }

 private:
  // For a tensor whose memory and layout are unchanged.
  bool is_written(const at::Tensor& tensor) const {
    return version_of(tensor) != version_ || sample() != sample_;
  }

  // A weak pointer lets replaced weights be freed, but no new storage can take this address and be
  // mistaken for this one.
  using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  static Storage weak_storage_of(const at::Tensor& tensor) {
    if (storage_of(tensor) == nullptr) return Storage(c10::intrusive_ptr<c10::StorageImpl>());
    return tensor.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl();
  }

  // The address and size of the storage, and the tensor's offset in it: while these and the strides
  // are unchanged, so is the result of `range_of`.
  using Place = std::tuple<const void*, size_t, int64_t>;

  static Place place_of(const at::Tensor& tensor) {
    c10::StorageImpl* const storage = storage_of(tensor);
    if (storage == nullptr) return {};
    return {storage->_mutable_data_ptr_no_checks().get(), storage->nbytes(),
            tensor.storage_offset()};
  }
  static uint32_t version_of(const at::Tensor& tensor) {
    // Inference tensors have no version: PyTorch does not count writes to them.
    const auto& version = tensor.unsafeGetTensorImpl()->version_counter();
    return version.enabled() ? version.current_version() : 0;
  }
  // Samples four words spread over the elements. Versions do not count writes through tensor.data
  // or NumPy, or to inference tensors; most of these overwrite the whole weight, which shows here.
  uint64_t sample() const {
    const auto* start = reinterpret_cast<const char*>(sampled_.first);
    const size_t bytes = sampled_.second - sampled_.first;
    uint64_t sample = 0, word = 0;
    if (bytes < sizeof(word)) {
      if (bytes > 0) std::memcpy(&sample, start, bytes);
      return sample;
    }
    for (size_t i = 0; i < 4; ++i) {
      std::memcpy(&word, start + (bytes - sizeof(word)) * i / 3, sizeof(word));
      sample = sample * 0x9e3779b97f4a7c15u + word;  // Knuth's multiplicative hashing
    }
    return sample;
  }

  c10::DispatchKeySet keys_;
  at::ScalarType dtype_;
  bool requires_grad_, counts_writes_, is_dense_;
  Storage storage_;
  uint32_t version_;
  at::Device device_ = at::kCPU;
  c10::SmallVector<int64_t, 5> sizes_, strides_;
  Place place_;
  MemoryRange sampled_;
  uint64_t sample_ = 0;
};

}  // namespace tvmify
