// The side effects of a call: the tensors that it writes to.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/python_headers.h>

#include <vector>

#include "../memory_ranges.h"
#include "results.h"

namespace tvmify::python {

constexpr const char* kNoMemory =
    "a tensor that the program reads or writes to has no storage, or less than its shape needs";

// Used with the GIL held. A call without effects costs one comparison.
class Effects {
 public:
  // `contiguous` are the tensors that have to be contiguous; `all_contiguous` adds all others.
  Effects(std::vector<Write> writes, std::vector<Writable> contiguous, bool all_contiguous)
      : writes_(std::move(writes)),
        contiguous_(std::move(contiguous)),
        all_contiguous_(all_contiguous) {}

  // Takes the module's tensors that the program writes to or returns, and the other weights, which
  // it reads in packed form.
  void bind(std::vector<at::Tensor> state, const std::vector<at::Tensor>& weights);
  const std::vector<at::Tensor>& state() const { return state_; }

  bool writes() const { return !writes_.empty(); }

  // Why compiled code would behave differently from eager with these leaves; null if it would not.
  const char* obstacle(PyObject* leaves) const {
    return writes() || all_contiguous_ || !contiguous_.empty() ? find_obstacle(leaves) : nullptr;
  }

  // The target of each write; the leaves must have passed `obstacle`.
  std::vector<std::pair<at::Tensor, Computed>> targets(PyObject* leaves) const;

 private:
  const char* find_obstacle(PyObject* leaves) const;
  bool is_written(const Writable& target) const;
  bool needs_contiguous(const Writable& tensor) const;

  std::vector<Write> writes_;
  std::vector<Writable> contiguous_;
  bool all_contiguous_;
  std::vector<at::Tensor> state_;
  const char* lasting_obstacle_ = nullptr;
  MemoryRanges bound_, written_;  // of state and weights; of written state
};

}  // namespace tvmify::python
