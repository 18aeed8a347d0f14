// The shapes that a program serves, as artifact/shapes.py describes them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "expressions.h"

namespace tvmify {

// Decides which calls a program serves. Immutable, so that threads can share it.
class __attribute__((visibility("default"))) Shapes {
 public:
  // The values of the symbols.
  using Values = c10::SmallVector<int64_t, 8>;

  // Takes the JSON of tvmify.artifact.shapes.Shapes, which may come from anywhere; throws
  // c10::ValueError if it describes no shapes.
  explicit Shapes(const std::string& json);

  // Returns the values of the symbols for a call, or nullopt if the program does not serve it. A
  // leaf that is not a tensor is null.
  std::optional<Values> solve(c10::ArrayRef<const at::Tensor*> leaves) const;

  // How far a call is from what the program was tuned for: 0 is the same.
  double distance(c10::IntArrayRef values) const;

  const SymbolIndices& symbols() const { return indices_; }

 private:
  struct Range {
    int64_t lower, upper, hint;
    bool contains(int64_t value) const { return lower <= value && value <= upper; }
  };
  struct Leaf {
    size_t index;
    std::vector<Expression> sizes;
  };

  void read_symbols(const tvm::ffi::json::Array& symbols, const tvm::ffi::json::Array& hints);
  void read_leaves(const tvm::ffi::json::Array& leaves);
  // Finds the symbol of each size that is one alone, as far as the ranks agree.
  bool bind(c10::ArrayRef<const at::Tensor*> leaves, Values& values) const;

  SymbolIndices indices_;
  std::vector<Range> ranges_;
  std::vector<Leaf> leaves_;  // in the order of their indices
  std::vector<Expression> guards_;
};

}  // namespace tvmify
