// A compiled program inside of a torch.export program: its code, and the weights it has packed.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "compiled_module.h"
#include "fork_safe_mutex.h"

namespace tvmify {

// Any thread may call any method, and no lock is held while kernels run.
class EmbeddedProgram {
 public:
  // `description` is what tvmify/runtime/embedded.py writes: a line for each fact, "name value".
  EmbeddedProgram(const at::Tensor& library, std::string description);

  const std::string& description() const { return description_; }
  bool is_strict() const { return is_strict_; }

  // Runs the program; without a result, `reason` says why it cannot run with these tensors or in
  // this process. Weights that changed, or that are new, are packed first.
  std::optional<std::vector<at::Tensor>> run(at::TensorList weights, at::TensorList inputs,
                                             std::string& reason) const;

  // Whether this reason was not asked about before.
  bool is_news(const std::string& reason) const;

 private:
  // The program with one set of packed weights, and what they were made of.
  class Bound;
  using Bounds = std::vector<std::shared_ptr<const Bound>>;

  // Modules with weights of their own may share a program: as many of them are kept ready.
  static constexpr size_t kMostBound = 8;

  std::shared_ptr<const Bound> find(const Bounds& bounds, at::TensorList weights) const;
  std::shared_ptr<const Bound> bind(at::TensorList weights) const;

  const std::string description_;
  bool is_strict_ = false;
  std::string inputs_, weights_;        // dtypes and shapes of the tensors that it was made for
  std::vector<int64_t> reads_, packs_;  // which of them the code takes
  std::string refusal_;                 // why the code cannot run in this process
  c10::intrusive_ptr<CompiledModule> code_;       // null if it is refused
  mutable std::shared_ptr<const Bounds> bounds_;  // read and replaced atomically
  mutable ForkSafeMutex binding_;  // held while `bounds_` is replaced, and for `reasons_`
  mutable std::set<std::string> reasons_;
};

}  // namespace tvmify
