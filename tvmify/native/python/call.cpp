// Call: from the leaves of a call to its result, through the compiled program.

// clang-format off: structmember.h needs Python.h, and does not say so
#include <torch/csrc/python_headers.h>
#include <structmember.h>
// clang-format on
#include <ATen/ops/as_strided.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <exception>
#include <new>
#include <optional>
#include <string_view>
#include <vector>

#include "../compiled_module.h"
#include "../memory_ranges.h"
#include "../tensor_bridge.h"
#include "bindings.h"
#include "effects.h"

namespace tvmify::python {
namespace {

// Where a leaf of the result comes from.
struct Output {
  enum Kind { kTensor, kArgument, kState, kSame, kConstant } kind;
  size_t index = 0;              // of the program's tensor, the argument, the state, or the leaf
  PyObject* constant = nullptr;  // owned, or null
  bool is_view = false;          // of what the rest says, with these sizes, strides and offset
  std::vector<int64_t> sizes = {}, strides = {};
  int64_t offset = 0;
};

struct Call {
  PyObject_HEAD vectorcallfunc vectorcall;
  c10::intrusive_ptr<CompiledModule> compiled;
  std::vector<size_t> inputs;
  std::vector<Output> outputs;
  Effects effects;
  PyObject* rebuild;  // owned, or null where the result is a single leaf

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

// Returns a new reference to one leaf of the result; its views are made in the mode of the caller.
PyObject* make_leaf(const Call& call, const Output& output, const std::vector<at::Tensor>& tensors,
                    PyObject* leaves, PyObject* earlier) {
  Owned leaf;
  switch (output.kind) {
    case Output::kTensor:
      TORCH_CHECK_INDEX(output.index < tensors.size(), "the program returned ", tensors.size(),
                        " tensors, and tensor ", output.index, " is wanted");
      leaf.reset(wrap(tensors[output.index]));
      break;
    case Output::kArgument:
      TORCH_CHECK_INDEX(output.index < static_cast<size_t>(PyTuple_GET_SIZE(leaves)),
                        "the program returns leaf ", output.index, ", which the call lacks");
      leaf.reset(Py_NewRef(PyTuple_GET_ITEM(leaves, static_cast<Py_ssize_t>(output.index))));
      break;
    case Output::kState:
      TORCH_CHECK_INDEX(output.index < call.effects.state().size(), "the program returns tensor ",
                        output.index, " of a module that has none");
      leaf.reset(wrap(call.effects.state()[output.index]));
      break;
    case Output::kSame:
      leaf.reset(PySequence_GetItem(earlier, static_cast<Py_ssize_t>(output.index)));
      if (leaf == nullptr) throw python_error();
      break;
    case Output::kConstant:
      leaf.reset(Py_NewRef(output.constant));
  }
  if (!output.is_view) return leaf.release();
  TORCH_CHECK_TYPE(THPVariable_Check(leaf.get()), "a view is of a tensor, not of a ",
                   Py_TYPE(leaf.get())->tp_name);
  const at::Tensor& base = THPVariable_Unpack(leaf.get());
  return wrap(
      at::as_strided(base, output.sizes, output.strides, base.storage_offset() + output.offset));
}

PyObject* make_result(const Call& call, const std::vector<at::Tensor>& tensors, PyObject* leaves) {
  if (call.rebuild == nullptr) {
    return make_leaf(call, call.outputs.front(), tensors, leaves, nullptr);
  }
  // The two commonest structures are built here; others by a function that takes a list.
  const bool is_tuple = call.rebuild == reinterpret_cast<PyObject*>(&PyTuple_Type);
  const bool is_list = call.rebuild == reinterpret_cast<PyObject*>(&PyList_Type);
  const auto count = static_cast<Py_ssize_t>(call.outputs.size());
  Owned result(is_tuple ? PyTuple_New(count) : PyList_New(count));
  if (result == nullptr) throw python_error();
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Output& output = call.outputs[static_cast<size_t>(i)];
    PyObject* leaf = make_leaf(call, output, tensors, leaves, result.get());
    if (is_tuple) {
      PyTuple_SET_ITEM(result.get(), i, leaf);
    } else {
      PyList_SET_ITEM(result.get(), i, leaf);
    }
  }
  if (is_tuple || is_list) return result.release();
  return PyObject_CallOneArg(call.rebuild, result.get());
}

PyObject* run(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      PyVectorcall_NARGS(flags) == 1 && names == nullptr && PyTuple_CheckExact(args[0]),
      "Call takes one tuple, the leaves of the arguments");
  const Call& call = *Call::from(self);
  PyObject* leaves = args[0];
  const Tensors inputs = select_inputs(call, leaves);
  if (call.effects.obstacle(leaves) != nullptr) Py_RETURN_NOTIMPLEMENTED;
  const auto targets = call.effects.targets(leaves);
  std::optional<std::vector<at::Tensor>> tensors;
  {
    const pybind11::gil_scoped_release no_gil;
    try {
      tensors = call.compiled->forward(inputs);
    } catch (const std::exception&) {
      // Nothing is written yet, and only eager raises the very exception that the code stands for.
    }
    for (const auto& [target, index] : targets) {
      if (!tensors) break;
      TORCH_CHECK_INDEX(index < tensors->size(), "the program returned ", tensors->size(),
                        " tensors, and tensor ", index, " is to be written");
      target.copy_((*tensors)[index]);
    }
  }
  if (!tensors) Py_RETURN_NOTIMPLEMENTED;
  return make_result(call, *tensors, leaves);
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

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(Call::from(self)->rebuild);
  for (const Output& output : Call::from(self)->outputs) Py_VISIT(output.constant);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(Call::from(self)->rebuild);
  for (Output& output : Call::from(self)->outputs) Py_CLEAR(output.constant);
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  PyTypeObject* type = Py_TYPE(self);
  Call* call = Call::from(self);
  call->compiled.~intrusive_ptr();
  call->inputs.~vector();
  call->outputs.~vector();
  call->effects.~Effects();
  type->tp_free(self);
  Py_DECREF(type);
}

size_t to_index(PyObject* object) {
  const size_t index = PyLong_AsSize_t(object);
  if (PyErr_Occurred()) throw python_error();
  return index;
}

std::vector<int64_t> to_sizes(PyObject* tuple) {
  std::vector<int64_t> sizes;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    sizes.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
    if (PyErr_Occurred()) throw python_error();
  }
  return sizes;
}

Output::Kind to_kind(std::string_view name) {
  if (name == "tensor") return Output::kTensor;
  if (name == "argument") return Output::kArgument;
  if (name == "state") return Output::kState;
  if (name == "same") return Output::kSame;
  TORCH_CHECK_VALUE(name == "constant",
                    "an output is a tensor, argument, state, view or constant, not ", name);
  return Output::kConstant;
}

Output parse_output(PyObject* pair) {
  const char* name;
  PyObject* value;
  TORCH_CHECK_TYPE(PyTuple_Check(pair), "an output is a tuple, not a ", Py_TYPE(pair)->tp_name);
  if (!PyArg_ParseTuple(pair, "sO", &name, &value)) throw python_error();
  if (std::string_view(name) == "view") {
    PyObject *index, *sizes, *strides;
    long long offset;
    TORCH_CHECK_TYPE(PyTuple_Check(value), "a view is a tuple, not a ", Py_TYPE(value)->tp_name);
    if (!PyArg_ParseTuple(value, "sOO!O!L", &name, &index, &PyTuple_Type, &sizes, &PyTuple_Type,
                          &strides, &offset)) {
      throw python_error();
    }
    return {to_kind(name),   to_index(index),   nullptr, true,
            to_sizes(sizes), to_sizes(strides), offset};
  }
  const Output::Kind kind = to_kind(name);
  if (kind == Output::kConstant) return {kind, 0, Py_NewRef(value)};
  return {kind, to_index(value)};
}

Write parse_write(PyObject* triple) {
  const char* name;
  PyObject *target, *tensor;
  TORCH_CHECK_TYPE(PyTuple_Check(triple), "a write is a tuple, not a ", Py_TYPE(triple)->tp_name);
  if (!PyArg_ParseTuple(triple, "sOO", &name, &target, &tensor)) throw python_error();
  const std::string_view kind(name);
  TORCH_CHECK_VALUE(kind == "argument" || kind == "state",
                    "what is written is an argument or state, not ", kind);
  return {kind == "argument", to_index(target), to_index(tensor)};
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"compiled", "inputs",           "outputs", "rebuild",
                                "writes",   "needs_contiguous", nullptr};
  PyObject *compiled, *inputs, *outputs, *rebuild, *writes = nullptr;
  int needs_contiguous = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!O|O!p:Call", const_cast<char**>(names),
                                   &compiled, &PyTuple_Type, &inputs, &PyList_Type, &outputs,
                                   &rebuild, &PyTuple_Type, &writes, &needs_contiguous)) {
    return nullptr;
  }
  std::vector<Write> parsed;
  for (Py_ssize_t i = 0; writes != nullptr && i < PyTuple_GET_SIZE(writes); ++i) {
    parsed.push_back(parse_write(PyTuple_GET_ITEM(writes, i)));
  }
  TORCH_CHECK_VALUE(rebuild != Py_None || PyList_GET_SIZE(outputs) == 1,
                    "without rebuild there is one output, not ", PyList_GET_SIZE(outputs));
  auto program =
      torch::jit::toIValue(compiled, c10::getCustomClassType<c10::intrusive_ptr<CompiledModule>>())
          .toCustomClass<CompiledModule>();
  Owned self(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  Call* call = Call::from(self.get());
  call->vectorcall = run;
  new (&call->compiled) c10::intrusive_ptr<CompiledModule>(std::move(program));
  new (&call->inputs) std::vector<size_t>();
  new (&call->outputs) std::vector<Output>();
  new (&call->effects) Effects(std::move(parsed), needs_contiguous != 0);
  call->rebuild = rebuild == Py_None ? nullptr : Py_NewRef(rebuild);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i) {
    call->inputs.push_back(to_index(PyTuple_GET_ITEM(inputs, i)));
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs); ++i) {
    call->outputs.push_back(parse_output(PyList_GET_ITEM(outputs, i)));
  }
  return self.release();
  END_HANDLE_TH_ERRORS
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Call, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS,
     "Take the state and the weights of the module that all calls from now on are about."},
    {"obstacle", obstacle, METH_O,
     "Return why a call with these leaves is for eager PyTorch, or None."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, members},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("Runs a compiled program on the leaves of a call.")},
    {0, nullptr},
};

}  // namespace

PyType_Spec call_spec = {"tvmify._C.Call", sizeof(Call), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                         slots};

}  // namespace tvmify::python
