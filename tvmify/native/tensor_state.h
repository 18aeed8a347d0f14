// What a tensor was at some moment, to notice in nanoseconds that it is not that any more.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstring>

namespace tvmify {

enum Change : long { kNothing = 0, kWeights = 1, kStructure = 2 };

class TensorState {
 public:
  // With `counts_writes` false, writes to the elements of the tensor are no change.
  explicit TensorState(const at::Tensor& tensor, bool counts_writes = true)
      : counts_writes_(counts_writes),
        storage_(storage_of(tensor)),
        start_(start_of(tensor)),
        version_(counts_writes ? version_of(tensor) : 0),
        sampled_bytes_(counts_writes ? sampled_bytes_of(tensor) : 0),
        sample_(sample()),
        requires_grad_(tensor.requires_grad()),
        dtype_(tensor.scalar_type()),
        device_(tensor.device()),
        sizes_(sizes_of(tensor)),
        strides_(strides_of(tensor)) {}

  Change compare(const at::Tensor& tensor) const {
    if (tensor.scalar_type() != dtype_ || tensor.device() != device_ ||
        sizes_of(tensor) != sizes_) {
      return kStructure;
    }
    const bool equal = start_of(tensor) == start_ && tensor.requires_grad() == requires_grad_ &&
                       strides_of(tensor) == strides_ && is_same_storage(tensor) &&
                       !(counts_writes_ && is_written(tensor));
    return equal ? kNothing : kWeights;
  }

 private:
  // Of a tensor whose memory and layout are the same.
  bool is_written(const at::Tensor& tensor) const {
    return version_of(tensor) != version_ || sample() != sample_;
  }

  // Held weakly: the memory of replaced weights is freed, but another storage cannot take the
  // address of this one and pass for it.
  using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  static Storage storage_of(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return Storage(c10::intrusive_ptr<c10::StorageImpl>());
    return tensor.storage().getWeakStorageImpl();
  }
  // Without counting references, which would write to the storage of every tensor.
  bool is_same_storage(const at::Tensor& tensor) const {
    const auto* now = tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
    return now == storage_._unsafe_get_target();
  }
  static const void* start_of(const at::Tensor& tensor) {
    return tensor.has_storage() ? tensor.const_data_ptr() : nullptr;
  }
  // Sparse and nested tensors have no strides, or no sizes either: they are watched without.
  static bool is_dense(const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && !tensor.is_nested() &&
           !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  }
  static c10::IntArrayRef sizes_of(const at::Tensor& tensor) {
    return is_dense(tensor) ? tensor.sizes() : c10::IntArrayRef();
  }
  static c10::IntArrayRef strides_of(const at::Tensor& tensor) {
    return is_dense(tensor) ? tensor.strides() : c10::IntArrayRef();
  }
  static uint32_t version_of(const at::Tensor& tensor) {
    // An inference tensor has no version: PyTorch itself does not count writes to it.
    const auto& version = tensor.unsafeGetTensorImpl()->version_counter();
    return version.enabled() ? version.current_version() : 0;
  }
  static size_t sampled_bytes_of(const at::Tensor& tensor) {
    const bool is_readable =
        is_dense(tensor) && tensor.is_cpu() && tensor.has_storage() && tensor.is_contiguous();
    return is_readable ? tensor.nbytes() : 0;
  }
  // Four words spread over the elements. Versions do not count writes through tensor.data, through
  // NumPy, or to inference tensors; those that fill a weight anew, as nearly all do, show here.
  uint64_t sample() const {
    const auto* start = static_cast<const char*>(start_);
    uint64_t sample = 0, word = 0;
    if (sampled_bytes_ < sizeof(word)) {
      if (sampled_bytes_ > 0) std::memcpy(&sample, start, sampled_bytes_);
      return sample;
    }
    for (size_t i = 0; i < 4; ++i) {
      std::memcpy(&word, start + (sampled_bytes_ - sizeof(word)) * i / 3, sizeof(word));
      sample = sample * 0x9e3779b97f4a7c15u + word;  // Knuth's multiplicative hashing
    }
    return sample;
  }

  bool counts_writes_;
  Storage storage_;
  const void* start_;
  uint32_t version_;
  size_t sampled_bytes_;
  uint64_t sample_;
  bool requires_grad_;
  at::ScalarType dtype_;
  at::Device device_;
  c10::SmallVector<int64_t, 5> sizes_, strides_;
};

}  // namespace tvmify
