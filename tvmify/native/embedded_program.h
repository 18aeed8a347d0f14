// A compiled program inside a torch.export program: its code and packed weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "compiled_module.h"
#include "fork_safe_mutex.h"
#include "fork_safe_pointer.h"

namespace tvmify {

// Thread-safe; no lock is held while kernels run.
class EmbeddedProgram {
 public:
  // `description` is written by tvmify/runtime/embedded.py: a line "name value" for each fact.
  EmbeddedProgram(const at::Tensor& library, std::string description);

  const std::string& description() const { return description_; }
  bool is_strict() const { return is_strict_; }

  // Runs the program, after packing weights that are new or have changed. Without a result,
  // `reason` says why it cannot run with these tensors or in this process.
  std::optional<std::vector<at::Tensor>> run(at::TensorList weights, at::TensorList inputs,
                                             std::string& reason) const;

  // Whether this is the first query about a reason.
  bool is_news(const std::string& reason) const;

 private:
  // The program with one set of packed weights, and the weights they were packed from.
  class Bound;
  using Bounds = std::vector<std::shared_ptr<const Bound>>;

  // Modules with different weights may share a program; at most this many sets are kept.
  static constexpr size_t kMostBound = 8;

  std::shared_ptr<const Bound> find(const Bounds& bounds, at::TensorList weights) const;
  std::shared_ptr<const Bound> bind(at::TensorList weights) const;

  const std::string description_;
  bool is_strict_ = false;
  bool strides_matter_ = false;         // whether it serves contiguous inputs only
  std::string inputs_, weights_;        // dtypes and shapes of the tensors that it was exported for
  std::vector<int64_t> reads_, packs_;  // which of them the code takes
  std::string refusal_;                 // why the code cannot run in this process
  c10::intrusive_ptr<CompiledModule> code_;  // null if it is refused
  mutable ForkSafePointer<const Bounds> bounds_;
  mutable ForkSafeMutex binding_;  // held while `bounds_` is replaced, and for `reasons_`
  mutable std::set<std::string> reasons_;
};

}  // namespace tvmify
