// The kinds of leaves in a result, and the writes of a program; see artifact/results.py.
#pragma once

#include <torch/csrc/python_headers.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "../expressions.h"
#include "bindings.h"

namespace tvmify::python {

// The tensor with this index that the program returns.
struct Computed {
  size_t index;
};

// A leaf of the arguments, as the same object.
struct Argument {
  size_t leaf;
  bool operator==(const Argument& other) const { return leaf == other.leaf; }
};

// A tensor of the module that is bound to the call, as the same object.
struct StateTensor {
  size_t index;
  bool operator==(const StateTensor& other) const { return index == other.index; }
};

// An earlier leaf of the result, as the same object.
struct Repeated {
  size_t result;
};

struct Constant {
  Owned value;
};

// A number that is computed from the sizes of the arguments.
struct ComputedSize {
  Expression value;
};

// The most axes that a tensor has.
constexpr size_t kMostAxes = 64;

// What replaces the numbers of a view whose sizes vary, or which is of a tensor with any strides.
// Its symbols are those that a result may have, and then the strides of the tensor.
struct SymbolicGeometry {
  std::vector<Expression> sizes, strides;
  Expression offset;
};

// A view of a tensor: sizes, strides, and an offset in elements from the tensor's first one.
struct View {
  std::variant<Computed, Argument, StateTensor> base;
  std::vector<int64_t> sizes, strides;
  int64_t offset;
  std::shared_ptr<const SymbolicGeometry> symbolic = nullptr;
};

using Result =
    std::variant<Computed, Argument, StateTensor, Repeated, Constant, ComputedSize, View>;

using Writable = std::variant<Argument, StateTensor>;

// A tensor that the program returns, and the tensor into which it is copied.
struct Write {
  Writable target;
  Computed source;
};

// Parse tvmify.artifact.results.Result, Write and Writable; throw for anything else. The symbols
// are those that a result may have.
Result parse_result(PyObject* result, const SymbolIndices& symbols);
Write parse_write(PyObject* write);
Writable parse_writable(PyObject* writable);

size_t to_index(PyObject* number);

}  // namespace tvmify::python
