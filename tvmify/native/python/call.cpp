// Call: runs the compiled program on the leaves of a call, and builds the result.

// clang-format off: structmember.h needs Python.h, but does not include it
#include <torch/csrc/python_headers.h>
#include <structmember.h>
// clang-format on
#include <ATen/ops/as_strided.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "../compiled_module.h"
#include "../memory_ranges.h"
#include "../tensor_bridge.h"
#include "bindings.h"
#include "effects.h"
#include "results.h"
#include "shape_guard.h"

namespace tvmify::python {
namespace {

struct Call {
  PyObject_HEAD vectorcallfunc vectorcall;
  c10::intrusive_ptr<CompiledModule> compiled;
  std::vector<size_t> inputs;
  std::vector<Result> results;
  Effects effects;
  std::optional<Shapes> shapes;  // if a result has sizes that vary
  PyObject* rebuild;             // owned, or null if the result is a single leaf

  static Call* from(PyObject* self) { return reinterpret_cast<Call*>(self); }
};

using Tensors = c10::SmallVector<at::Tensor, 8>;

Tensors select_inputs(const Call& call, PyObject* leaves) {
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(leaves));
  Tensors inputs;
  for (const size_t index : call.inputs) {
    TORCH_CHECK_INDEX(index < count, "the program reads leaf ", index, " of ", count);
    PyObject* leaf = PyTuple_GET_ITEM(leaves, static_cast<Py_ssize_t>(index));
    TORCH_CHECK_TYPE(THPVariable_Check(leaf), "leaf ", index, " should be a tensor and is a ",
                     Py_TYPE(leaf)->tp_name);
    inputs.push_back(THPVariable_Unpack(leaf));
  }
  for (const at::Tensor& tensor : call.effects.state()) inputs.push_back(tensor);
  return inputs;
}

PyObject* wrap(const at::Tensor& tensor) {
  PyObject* leaf = THPVariable_Wrap(tensor);
  if (leaf == nullptr) throw python_error();
  return leaf;
}

// Creates the leaves of the result, as new references.
class Leaves {
 public:
  Leaves(const std::vector<at::Tensor>& computed, PyObject* arguments,
         const std::vector<at::Tensor>& state, c10::IntArrayRef symbols, PyObject* earlier)
      : computed_(computed),
        arguments_(arguments),
        state_(state),
        symbols_(symbols),
        earlier_(earlier) {}

  PyObject* operator()(const Computed& result) const { return wrap(tensor(result)); }

  PyObject* operator()(const Argument& result) const { return Py_NewRef(object(result)); }

  PyObject* operator()(const StateTensor& result) const { return wrap(tensor(result)); }

  PyObject* operator()(const Repeated& result) const {
    PyObject* leaf = PySequence_GetItem(earlier_, static_cast<Py_ssize_t>(result.result));
    if (leaf == nullptr) throw python_error();
    return leaf;
  }

  PyObject* operator()(const Constant& result) const { return Py_NewRef(result.value.get()); }

  PyObject* operator()(const ComputedSize& result) const {
    PyObject* leaf = PyLong_FromLongLong(number(result.value, symbols_));
    if (leaf == nullptr) throw python_error();
    return leaf;
  }

  // Creates the view in the caller's modes.
  PyObject* operator()(const View& result) const {
    const at::Tensor& base = std::visit(
        [this](const auto& kind) -> decltype(auto) { return tensor(kind); }, result.base);
    if (result.symbolic != nullptr) return wrap(viewed(base, *result.symbolic));
    return wrap(
        at::as_strided(base, result.sizes, result.strides, base.storage_offset() + result.offset));
  }

 private:
  using Numbers = c10::SmallVector<int64_t, 8>;

  static int64_t number(const Expression& expression, c10::IntArrayRef symbols) {
    const auto value = expression.value(symbols);
    TORCH_CHECK(value, "a size in a result does not fit into 64 bits");
    return *value;
  }

  static Numbers numbers(const std::vector<Expression>& expressions, c10::IntArrayRef symbols) {
    Numbers numbers;
    for (const Expression& expression : expressions) numbers.push_back(number(expression, symbols));
    return numbers;
  }

  at::Tensor viewed(const at::Tensor& base, const SymbolicGeometry& geometry) const {
    // Zero for strides that the tensor does not have.
    std::vector<int64_t> symbols(symbols_.size() + kMostAxes, 0);
    const auto strides = std::copy(symbols_.begin(), symbols_.end(), symbols.begin());
    std::copy(base.strides().begin(), base.strides().end(), strides);
    return at::as_strided(base, numbers(geometry.sizes, symbols),
                          numbers(geometry.strides, symbols),
                          base.storage_offset() + number(geometry.offset, symbols));
  }

  const at::Tensor& tensor(const Computed& result) const {
    TORCH_CHECK_INDEX(result.index < computed_.size(), "the program returned ", computed_.size(),
                      " tensors, and tensor ", result.index, " is wanted");
    return computed_[result.index];
  }

  const at::Tensor& tensor(const Argument& result) const {
    PyObject* leaf = object(result);
    TORCH_CHECK_TYPE(THPVariable_Check(leaf), "a view is of a tensor, not of a ",
                     Py_TYPE(leaf)->tp_name);
    return THPVariable_Unpack(leaf);
  }

  const at::Tensor& tensor(const StateTensor& result) const {
    TORCH_CHECK_INDEX(result.index < state_.size(), "the program returns tensor ", result.index,
                      " of a module that has none");
    return state_[result.index];
  }

  PyObject* object(const Argument& result) const {
    TORCH_CHECK_INDEX(result.leaf < static_cast<size_t>(PyTuple_GET_SIZE(arguments_)),
                      "the program returns leaf ", result.leaf, ", which the call lacks");
    return PyTuple_GET_ITEM(arguments_, static_cast<Py_ssize_t>(result.leaf));
  }

  const std::vector<at::Tensor>& computed_;
  PyObject* arguments_;
  const std::vector<at::Tensor>& state_;
  c10::IntArrayRef symbols_;
  PyObject* earlier_;
};

PyObject* make_result(const Call& call, const std::vector<at::Tensor>& tensors, PyObject* leaves,
                      c10::IntArrayRef symbols) {
  if (call.rebuild == nullptr) {
    return std::visit(Leaves(tensors, leaves, call.effects.state(), symbols, nullptr),
                      call.results.front());
  }
  // The two most common structures are built here, others by a function that takes a list.
  const bool is_tuple = call.rebuild == reinterpret_cast<PyObject*>(&PyTuple_Type);
  const bool is_list = call.rebuild == reinterpret_cast<PyObject*>(&PyList_Type);
  const auto count = static_cast<Py_ssize_t>(call.results.size());
  Owned result(is_tuple ? PyTuple_New(count) : PyList_New(count));
  if (result == nullptr) throw python_error();
  const Leaves made(tensors, leaves, call.effects.state(), symbols, result.get());
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* leaf = std::visit(made, call.results[static_cast<size_t>(i)]);
    if (is_tuple) {
      PyTuple_SET_ITEM(result.get(), i, leaf);
    } else {
      PyList_SET_ITEM(result.get(), i, leaf);
    }
  }
  if (is_tuple || is_list) return result.release();
  return PyObject_CallOneArg(call.rebuild, result.get());
}

// Why the latest call of this thread failed; empty if it did not.
thread_local std::string failure;

PyObject* run(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      PyVectorcall_NARGS(flags) == 1 && names == nullptr && PyTuple_CheckExact(args[0]),
      "Call takes one tuple, the leaves of the arguments");
  const Call& call = *Call::from(self);
  PyObject* leaves = args[0];
  failure.clear();
  const Tensors inputs = select_inputs(call, leaves);
  if (call.effects.obstacle(leaves) != nullptr) Py_RETURN_NOTIMPLEMENTED;
  std::optional<Shapes::Values> symbols;
  if (call.shapes) {
    symbols = solve_leaves(*call.shapes, leaves);
    if (!symbols) Py_RETURN_NOTIMPLEMENTED;
  }
  const auto targets = call.effects.targets(leaves);
  std::optional<std::vector<at::Tensor>> tensors;
  {
    const pybind11::gil_scoped_release no_gil;
    try {
      // A kernel may write to these, so lazy clones get their own memory now.
      for (const auto& [target, source] : targets) target.mutable_data_ptr();
      tensors = call.compiled->forward(inputs);
    } catch (const std::exception& error) {
      failure = error.what();
      // Eager repeats what has been written so far, and only it raises exactly the right exception.
    }
    for (const auto& [target, source] : targets) {
      if (!tensors) break;
      TORCH_CHECK_INDEX(source.index < tensors->size(), "the program returned ", tensors->size(),
                        " tensors, and tensor ", source.index, " is to be written");
      target.copy_((*tensors)[source.index]);
    }
  }
  if (!tensors) Py_RETURN_NOTIMPLEMENTED;
  return make_result(call, *tensors, leaves,
                     symbols ? c10::IntArrayRef(*symbols) : c10::IntArrayRef());
  END_HANDLE_TH_ERRORS
}

PyObject* obstacle(PyObject* self, PyObject* leaves) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyTuple_CheckExact(leaves), "the leaves are a tuple");
  const Call& call = *Call::from(self);
  const char* text = call.effects.obstacle(leaves);
  for (const at::Tensor& input : select_inputs(call, leaves)) {
    if (text == nullptr && !has_memory(input)) text = kNoMemory;
  }
  if (text == nullptr) Py_RETURN_NONE;
  return PyUnicode_FromString(text);
  END_HANDLE_TH_ERRORS
}

std::vector<at::Tensor> to_tensors(PyObject* list) {
  std::vector<at::Tensor> tensors;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    TORCH_CHECK_TYPE(THPVariable_Check(item), "Call binds tensors, not ", Py_TYPE(item)->tp_name);
    tensors.push_back(THPVariable_Unpack(item));
  }
  return tensors;
}

PyObject* bind(PyObject* self, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *state, *weights;
  if (!PyArg_ParseTuple(args, "O!O!:bind", &PyList_Type, &state, &PyList_Type, &weights)) {
    return nullptr;
  }
  Call::from(self)->effects.bind(to_tensors(state), to_tensors(weights));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

int traverse_call(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(Call::from(self)->rebuild);
  for (const Result& result : Call::from(self)->results) {
    if (const auto* constant = std::get_if<Constant>(&result)) Py_VISIT(constant->value.get());
  }
  return 0;
}

int clear_call(PyObject* self) {
  Py_CLEAR(Call::from(self)->rebuild);
  for (Result& result : Call::from(self)->results) {
    if (auto* constant = std::get_if<Constant>(&result)) constant->value.reset();
  }
  return 0;
}

void dealloc_call(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear_call(self);
  PyTypeObject* type = Py_TYPE(self);
  Call* call = Call::from(self);
  call->compiled.~intrusive_ptr();
  call->inputs.~vector();
  call->results.~vector();
  call->effects.~Effects();
  call->shapes.~optional();
  type->tp_free(self);
  Py_DECREF(type);
}

// Applies `parse` to the items of a Python sequence.
template <typename Parse>
auto parse_all(PyObject* sequence, Parse parse) {
  const Owned items(PySequence_Fast(sequence, "results, writes and tensors are sequences"));
  if (items == nullptr) throw python_error();
  std::vector<std::invoke_result_t<Parse, PyObject*>> parsed;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); ++i) {
    parsed.push_back(parse(PySequence_Fast_GET_ITEM(items.get(), i)));
  }
  return parsed;
}

std::vector<Result> parse_results(PyObject* sequence, const SymbolIndices& symbols) {
  std::vector<Result> results =
      parse_all(sequence, [&](PyObject* result) { return parse_result(result, symbols); });
  for (size_t i = 0; i < results.size(); ++i) {
    const auto* repeated = std::get_if<Repeated>(&results[i]);
    TORCH_CHECK_VALUE(repeated == nullptr || repeated->result < i, "leaf ", i,
                      " of the result repeats one that is not there yet");
  }
  return results;
}

// Whether one of the results has sizes that vary.
bool varies(const std::vector<Result>& results) {
  return std::any_of(results.begin(), results.end(), [](const Result& result) {
    if (std::holds_alternative<ComputedSize>(result)) return true;
    const auto* view = std::get_if<View>(&result);
    return view != nullptr && view->symbolic != nullptr;
  });
}

PyObject* create_call(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"compiled", "inputs",           "results", "rebuild",
                                "writes",   "needs_contiguous", "shapes",  nullptr};
  PyObject *compiled, *inputs, *described, *rebuild, *writes = nullptr, *contiguous = Py_False;
  const char* text = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!OO|OOz:Call", const_cast<char**>(names),
                                   &compiled, &PyTuple_Type, &inputs, &described, &rebuild, &writes,
                                   &contiguous, &text)) {
    return nullptr;
  }
  std::vector<size_t> indices;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i) {
    indices.push_back(to_index(PyTuple_GET_ITEM(inputs, i)));
  }
  std::optional<Shapes> shapes;
  if (text != nullptr) shapes.emplace(text);
  std::vector<Result> results =
      parse_results(described, shapes ? shapes->symbols() : SymbolIndices());
  if (!varies(results)) shapes.reset();
  TORCH_CHECK_VALUE(rebuild != Py_None || results.size() == 1,
                    "without rebuild there is one result, not ", results.size());
  std::vector<Write> parsed;
  if (writes != nullptr) parsed = parse_all(writes, parse_write);
  std::vector<Writable> needed;
  if (!PyBool_Check(contiguous)) needed = parse_all(contiguous, parse_writable);
  auto program =
      torch::jit::toIValue(compiled, c10::getCustomClassType<c10::intrusive_ptr<CompiledModule>>())
          .toCustomClass<CompiledModule>();
  Owned self(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  Call* call = Call::from(self.get());
  call->vectorcall = run;
  new (&call->compiled) c10::intrusive_ptr<CompiledModule>(std::move(program));
  new (&call->inputs) std::vector<size_t>(std::move(indices));
  new (&call->results) std::vector<Result>(std::move(results));
  new (&call->effects) Effects(std::move(parsed), std::move(needed), contiguous == Py_True);
  new (&call->shapes) std::optional<Shapes>(std::move(shapes));
  call->rebuild = rebuild == Py_None ? nullptr : Py_NewRef(rebuild);
  return self.release();
  END_HANDLE_TH_ERRORS
}

PyMemberDef call_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Call, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef call_methods[] = {
    {"bind", bind, METH_VARARGS,
     "Take the state and the weights of the module that all calls from now on are about."},
    {"obstacle", obstacle, METH_O,
     "Return why a call with these leaves is for eager PyTorch, or None."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot call_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create_call)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_call)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_call)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_call)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, call_members},
    {Py_tp_methods, call_methods},
    {Py_tp_doc, const_cast<char*>("Runs a compiled program on the leaves of a call.")},
    {0, nullptr},
};

}  // namespace

PyObject* take_failure(PyObject*, PyObject*) {
  const std::string text = std::exchange(failure, {});
  return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
}

PyType_Spec call_spec = {"tvmify._C.Call", sizeof(Call), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                         call_slots};

}  // namespace tvmify::python
