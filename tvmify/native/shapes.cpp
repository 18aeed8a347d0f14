#include "shapes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

namespace tvmify {
namespace {

namespace json = tvm::ffi::json;

json::Array list_of(const json::Object& object, const char* name) {
  const auto found = object.find(tvm::ffi::String(name));
  TORCH_CHECK_VALUE(found != object.end(), "shapes have no ", name);
  return json_list((*found).second, name);
}

// The sizes of a tensor; nullopt if they are not plain numbers.
std::optional<c10::IntArrayRef> sizes_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_nested() ||
      tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return std::nullopt;
  }
  return tensor.sizes();
}

}  // namespace

Shapes::Shapes(const std::string& text) {
  const json::Value value = parse_json(text);
  const auto object = value.as<json::Object>();
  TORCH_CHECK_VALUE(object.has_value() && object->size() == 4, "JSON that describes no shapes");
  read_symbols(list_of(*object, "symbols"), list_of(*object, "hints"));
  read_leaves(list_of(*object, "leaves"));
  for (const json::Value& guard : list_of(*object, "guards")) {
    guards_.push_back(Expression::condition(guard, indices_));
  }
}

void Shapes::read_symbols(const json::Array& symbols, const json::Array& hints) {
  TORCH_CHECK_VALUE(hints.size() == symbols.size(), hints.size(), " hints for ", symbols.size(),
                    " symbols");
  for (const json::Value& symbol : symbols) {
    const json::Array parts = json_list(symbol, "a symbol");
    TORCH_CHECK_VALUE(parts.size() == 3, "a symbol of ", parts.size(), " parts");
    const size_t index = ranges_.size();
    const std::string name = json_text(parts[0], "the name of a symbol");
    TORCH_CHECK_VALUE(name == "s" + std::to_string(index), "symbol ", index, " has another name");
    const Range range{json_number(parts[1], "a least value"),
                      json_number(parts[2], "a greatest value"),
                      json_number(hints[static_cast<int64_t>(index)], "a hint")};
    TORCH_CHECK_VALUE(0 <= range.lower && range.lower <= range.upper, "a symbol without a value");
    TORCH_CHECK_VALUE(range.contains(range.hint), "a hint out of range");
    indices_.emplace(name, index);
    ranges_.push_back(range);
  }
}

void Shapes::read_leaves(const json::Array& leaves) {
  for (const json::Value& leaf : leaves) {
    const json::Array parts = json_list(leaf, "a leaf");
    TORCH_CHECK_VALUE(parts.size() == 2, "a leaf of ", parts.size(), " parts");
    const int64_t index = json_number(parts[0], "the index of a leaf");
    TORCH_CHECK_VALUE(index >= 0, "a leaf without an index");
    leaves_.push_back({static_cast<size_t>(index), {}});
    for (const json::Value& size : json_list(parts[1], "the sizes of a leaf")) {
      leaves_.back().sizes.push_back(Expression::size(size, indices_));
    }
  }
  std::sort(leaves_.begin(), leaves_.end(),
            [](const Leaf& one, const Leaf& other) { return one.index < other.index; });
  size_t bound = 0;  // symbols that stand alone so far
  for (size_t i = 0; i < leaves_.size(); ++i) {
    TORCH_CHECK_VALUE(i == 0 || leaves_[i - 1].index != leaves_[i].index, "a leaf occurs twice");
    for (const Expression& size : leaves_[i].sizes) {
      const size_t symbol = size.symbol().value_or(0);
      TORCH_CHECK_VALUE(!size.symbol() || symbol <= bound, "symbols are in another order");
      if (size.symbol() && symbol == bound) ++bound;
    }
  }
  TORCH_CHECK_VALUE(bound == ranges_.size(), "a symbol never stands alone");
}

bool Shapes::bind(c10::ArrayRef<const at::Tensor*> leaves, Values& values) const {
  size_t next = 0;  // of `leaves_`
  for (size_t i = 0; i < leaves.size(); ++i) {
    const bool wanted = next < leaves_.size() && leaves_[next].index == i;
    if (wanted != (leaves[i] != nullptr)) return false;
    if (!wanted) continue;
    const auto sizes = sizes_of(*leaves[i]);
    const std::vector<Expression>& expressions = leaves_[next++].sizes;
    if (!sizes || sizes->size() != expressions.size()) return false;
    for (size_t axis = 0; axis < expressions.size(); ++axis) {
      const auto symbol = expressions[axis].symbol();
      // In the order in which they first stand alone.
      if (symbol && *symbol == values.size()) values.push_back((*sizes)[axis]);
    }
  }
  return next == leaves_.size();
}

std::optional<Shapes::Values> Shapes::solve(c10::ArrayRef<const at::Tensor*> leaves) const {
  Values values;
  if (!bind(leaves, values)) return std::nullopt;
  for (size_t i = 0; i < ranges_.size(); ++i) {
    if (!ranges_[i].contains(values[i])) return std::nullopt;
  }
  for (const Leaf& leaf : leaves_) {
    const c10::IntArrayRef sizes = leaves[leaf.index]->sizes();
    for (size_t axis = 0; axis < sizes.size(); ++axis) {
      if (leaf.sizes[axis].value(values) != sizes[axis]) return std::nullopt;
    }
  }
  for (const Expression& guard : guards_) {
    if (guard.value(values) != 1) return std::nullopt;
  }
  return values;
}

double Shapes::distance(c10::IntArrayRef values) const {
  double sum = 0;
  for (size_t i = 0; i < ranges_.size(); ++i) {
    sum += std::abs(std::log2((static_cast<double>(values[i]) + 1) /
                              (static_cast<double>(ranges_[i].hint) + 1)));
  }
  return sum;
}

}  // namespace tvmify
