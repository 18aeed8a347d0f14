#include "results.h"

#include <torch/csrc/Exceptions.h>

#include <string>
#include <string_view>
#include <utility>

namespace tvmify::python {
namespace {

// A list from `to_json`: a kind and its fields, or the fields of a write.
class Described {
 public:
  explicit Described(PyObject* list) : list_(list) {
    TORCH_CHECK_TYPE(PyList_Check(list), "a result is described by a list, not a ",
                     Py_TYPE(list)->tp_name);
  }

  PyObject* field(Py_ssize_t index) const {
    TORCH_CHECK_VALUE(index < PyList_GET_SIZE(list_), "a description of a result has ",
                      PyList_GET_SIZE(list_), " parts, and part ", index, " is wanted");
    return PyList_GET_ITEM(list_, index);
  }

  std::string_view kind() const {
    Py_ssize_t length;
    const char* text = PyUnicode_AsUTF8AndSize(field(0), &length);
    if (text == nullptr) throw python_error();
    return {text, static_cast<size_t>(length)};
  }

  size_t index(Py_ssize_t i) const { return to_index(field(i)); }

  int64_t number(Py_ssize_t i) const {
    const int64_t number = PyLong_AsLongLong(field(i));
    if (PyErr_Occurred()) throw python_error();
    return number;
  }

  std::vector<int64_t> numbers(Py_ssize_t i) const {
    const Described list(field(i));
    std::vector<int64_t> numbers;
    for (Py_ssize_t j = 0; j < list.size(); ++j) numbers.push_back(list.number(j));
    return numbers;
  }

  std::vector<Expression> expressions(Py_ssize_t i, const SymbolIndices& symbols) const {
    const Described list(field(i));
    std::vector<Expression> expressions;
    for (Py_ssize_t j = 0; j < list.size(); ++j) expressions.push_back(list.expression(j, symbols));
    return expressions;
  }

  Expression expression(Py_ssize_t i, const SymbolIndices& symbols) const {
    const Owned json(PyImport_ImportModule("json"));
    if (json == nullptr) throw python_error();
    const Owned text(PyObject_CallMethod(json.get(), "dumps", "O", field(i)));
    if (text == nullptr) throw python_error();
    const char* characters = PyUnicode_AsUTF8(text.get());
    if (characters == nullptr) throw python_error();
    return Expression::size(parse_json(characters), symbols);
  }

  // Whether the fields from this one on, and what is in those that are lists, are all numbers.
  bool is_static(Py_ssize_t first) const {
    for (Py_ssize_t i = first; i < size(); ++i) {
      PyObject* const value = field(i);
      if (first > 0 && PyList_Check(value) ? !Described(value).is_static(0)
                                           : !PyLong_Check(value)) {
        return false;
      }
    }
    return true;
  }

  Py_ssize_t size() const { return PyList_GET_SIZE(list_); }

 private:
  PyObject* list_;
};

Owned describe(PyObject* result) {
  Owned list(PyObject_CallMethod(result, "to_json", nullptr));
  if (list == nullptr) throw python_error();
  return list;
}

// Converts a result to the variant `Narrow`, or throws if it has another kind.
template <typename Narrow>
Narrow narrow(Result result, const char* purpose) {
  return std::visit(
      [&](auto&& kind) -> Narrow {
        using Kind = std::decay_t<decltype(kind)>;
        if constexpr (std::is_constructible_v<Narrow, Kind>) {
          return std::forward<decltype(kind)>(kind);
        } else {
          TORCH_CHECK_VALUE(false, purpose, " is of another kind");
        }
      },
      std::move(result));
}

View parse_view(const Described& description, decltype(View::base) base,
                const SymbolIndices& symbols) {
  if (description.is_static(2)) {
    return {base, description.numbers(2), description.numbers(3), description.number(4)};
  }
  SymbolIndices known = symbols;
  for (size_t axis = 0; axis < kMostAxes; ++axis) {
    known["t" + std::to_string(axis)] = symbols.size() + axis;
  }
  auto symbolic = std::make_shared<const SymbolicGeometry>(
      SymbolicGeometry{description.expressions(2, known), description.expressions(3, known),
                       description.expression(4, known)});
  return {base, {}, {}, 0, std::move(symbolic)};
}

Result parse(const Described& description, const SymbolIndices& symbols = {}) {
  const std::string_view kind = description.kind();
  if (kind == "computed") return Computed{description.index(1)};
  if (kind == "argument") return Argument{description.index(1)};
  if (kind == "state") return StateTensor{description.index(1)};
  if (kind == "repeated") return Repeated{description.index(1)};
  if (kind == "constant") return Constant{Owned(Py_NewRef(description.field(1)))};
  if (kind == "size") return ComputedSize{description.expression(1, symbols)};
  TORCH_CHECK_VALUE(kind == "view", "a result of the kind ", kind);
  auto base =
      narrow<decltype(View::base)>(parse(Described(description.field(1))), "what is viewed");
  return parse_view(description, base, symbols);
}

}  // namespace

size_t to_index(PyObject* number) {
  const size_t index = PyLong_AsSize_t(number);
  if (PyErr_Occurred()) throw python_error();
  return index;
}

Result parse_result(PyObject* result, const SymbolIndices& symbols) {
  const Owned list = describe(result);
  return parse(Described(list.get()), symbols);
}

Writable parse_writable(PyObject* writable) {
  const Owned list = describe(writable);
  return narrow<Writable>(parse(Described(list.get())), "a tensor from outside");
}

Write parse_write(PyObject* write) {
  const Owned list = describe(write);
  const Described fields(list.get());
  return {narrow<Writable>(parse(Described(fields.field(0))), "what is written to"),
          narrow<Computed>(parse(Described(fields.field(1))), "what is written")};
}

}  // namespace tvmify::python
