#include "shape_guard.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <new>
#include <string>
#include <utility>

#include "bindings.h"

namespace tvmify::python {
namespace {

struct ShapeGuard {
  PyObject_HEAD Shapes shapes;

  static const Shapes& of(PyObject* self) { return reinterpret_cast<ShapeGuard*>(self)->shapes; }
};

std::optional<Shapes::Values> solved(PyObject* self, PyObject* leaves) {
  return solve_leaves(ShapeGuard::of(self), leaves);
}

PyObject* serves(PyObject* self, PyObject* leaves) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(solved(self, leaves).has_value());
  END_HANDLE_TH_ERRORS
}

PyObject* solve(PyObject* self, PyObject* leaves) {
  HANDLE_TH_ERRORS
  const auto values = solved(self, leaves);
  if (!values) Py_RETURN_NONE;
  Owned tuple(PyTuple_New(static_cast<Py_ssize_t>(values->size())));
  if (tuple == nullptr) return nullptr;
  for (size_t i = 0; i < values->size(); ++i) {
    PyObject* number = PyLong_FromLongLong((*values)[i]);
    if (number == nullptr) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), number);
  }
  return tuple.release();
  END_HANDLE_TH_ERRORS
}

PyObject* create_shape_guard(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"text", nullptr};
  PyObject* object;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "U:ShapeGuard", const_cast<char**>(names),
                                   &object)) {
    return nullptr;
  }
  Py_ssize_t length;
  const char* text = PyUnicode_AsUTF8AndSize(object, &length);
  if (text == nullptr) return nullptr;
  Shapes shapes(std::string(text, static_cast<size_t>(length)));
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  new (&reinterpret_cast<ShapeGuard*>(self)->shapes) Shapes(std::move(shapes));
  return self;
  END_HANDLE_TH_ERRORS
}

void dealloc_shape_guard(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<ShapeGuard*>(self)->shapes.~Shapes();
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef shape_guard_methods[] = {
    {"serves", serves, METH_O, "Whether the program serves a call with these leaves."},
    {"solve", solve, METH_O, "Return the values of the symbols for these leaves, or None."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot shape_guard_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create_shape_guard)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_shape_guard)},
    {Py_tp_methods, shape_guard_methods},
    {Py_tp_doc, const_cast<char*>("Decides which shapes a program serves.")},
    {0, nullptr},
};

}  // namespace

std::optional<Shapes::Values> solve_leaves(const Shapes& shapes, PyObject* leaves) {
  TORCH_CHECK_TYPE(PyTuple_CheckExact(leaves), "the leaves are a tuple");
  c10::SmallVector<const at::Tensor*, 8> tensors;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(leaves); ++i) {
    PyObject* leaf = PyTuple_GET_ITEM(leaves, i);
    tensors.push_back(THPVariable_Check(leaf) ? &THPVariable_Unpack(leaf) : nullptr);
  }
  return shapes.solve(tensors);
}

PyType_Spec shape_guard_spec = {"tvmify._C.ShapeGuard", sizeof(ShapeGuard), 0, Py_TPFLAGS_DEFAULT,
                                shape_guard_slots};

}  // namespace tvmify::python
