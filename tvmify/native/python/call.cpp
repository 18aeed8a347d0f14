// Call: from the leaves of a call to its result, through the compiled program.

// clang-format off: structmember.h needs Python.h, and does not say so
#include <torch/csrc/python_headers.h>
#include <structmember.h>
// clang-format on
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <new>
#include <string_view>
#include <vector>

#include "../compiled_module.h"
#include "bindings.h"

namespace tvmify::python {
namespace {

// Where a leaf of the result comes from.
struct Output {
  enum Kind { kTensor, kArgument, kConstant } kind;
  size_t index;        // of the program's tensor, or of the leaf among the arguments
  PyObject* constant;  // owned, or null
};

struct Call {
  PyObject_HEAD vectorcallfunc vectorcall;
  c10::intrusive_ptr<CompiledModule> compiled;
  std::vector<size_t> inputs;
  std::vector<Output> outputs;
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
  return inputs;
}

// Returns a new reference to one leaf of the result.
PyObject* make_leaf(const Output& output, const std::vector<at::Tensor>& tensors,
                    PyObject* leaves) {
  switch (output.kind) {
    case Output::kTensor: {
      TORCH_CHECK_INDEX(output.index < tensors.size(), "the program returned ", tensors.size(),
                        " tensors, and tensor ", output.index, " is wanted");
      PyObject* leaf = THPVariable_Wrap(tensors[output.index]);
      if (leaf == nullptr) throw python_error();
      return leaf;
    }
    case Output::kArgument:
      TORCH_CHECK_INDEX(output.index < static_cast<size_t>(PyTuple_GET_SIZE(leaves)),
                        "the program returns leaf ", output.index, ", which the call lacks");
      return Py_NewRef(PyTuple_GET_ITEM(leaves, static_cast<Py_ssize_t>(output.index)));
    case Output::kConstant:
      break;
  }
  return Py_NewRef(output.constant);
}

PyObject* make_result(const Call& call, const std::vector<at::Tensor>& tensors, PyObject* leaves) {
  if (call.rebuild == nullptr) return make_leaf(call.outputs.front(), tensors, leaves);
  // The two commonest structures are built here; others by a function that takes a list.
  const bool is_tuple = call.rebuild == reinterpret_cast<PyObject*>(&PyTuple_Type);
  const bool is_list = call.rebuild == reinterpret_cast<PyObject*>(&PyList_Type);
  const auto count = static_cast<Py_ssize_t>(call.outputs.size());
  Owned result(is_tuple ? PyTuple_New(count) : PyList_New(count));
  if (result == nullptr) throw python_error();
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* leaf = make_leaf(call.outputs[static_cast<size_t>(i)], tensors, leaves);
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
  std::vector<at::Tensor> tensors;
  {
    const pybind11::gil_scoped_release no_gil;
    tensors = call.compiled->forward(inputs);
  }
  return make_result(call, tensors, leaves);
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
  type->tp_free(self);
  Py_DECREF(type);
}

size_t to_index(PyObject* object) {
  const size_t index = PyLong_AsSize_t(object);
  if (PyErr_Occurred()) throw python_error();
  return index;
}

Output parse_output(PyObject* pair) {
  const char* kind;
  PyObject* value;
  TORCH_CHECK_TYPE(PyTuple_Check(pair), "an output is a tuple, not a ", Py_TYPE(pair)->tp_name);
  if (!PyArg_ParseTuple(pair, "sO", &kind, &value)) throw python_error();
  const std::string_view name(kind);
  if (name == "tensor") return {Output::kTensor, to_index(value), nullptr};
  if (name == "argument") return {Output::kArgument, to_index(value), nullptr};
  TORCH_CHECK_VALUE(name == "constant", "an output is a tensor, argument or constant, not ", name);
  return {Output::kConstant, 0, Py_NewRef(value)};
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"compiled", "inputs", "outputs", "rebuild", nullptr};
  PyObject *compiled, *inputs, *outputs, *rebuild;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!O:Call", const_cast<char**>(names),
                                   &compiled, &PyTuple_Type, &inputs, &PyList_Type, &outputs,
                                   &rebuild)) {
    return nullptr;
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

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, members},
    {Py_tp_doc, const_cast<char*>("Runs a compiled program on the leaves of a call.")},
    {0, nullptr},
};

PyType_Spec spec = {"tvmify._C.Call", sizeof(Call), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

bool add_call(PyObject* module) {
  const Owned type(PyType_FromSpec(&spec));
  return type != nullptr && PyModule_AddObjectRef(module, "Call", type.get()) == 0;
}

}  // namespace tvmify::python
