// LatestCall: repeats the last call without running any Python code.
//
// Python's overhead takes as long as a short program, and three times as long if the program's
// weights have evicted the interpreter from the processor's caches.

// clang-format off: structmember.h needs Python.h, but does not include it
#include <torch/csrc/python_headers.h>
#include <structmember.h>
// clang-format on
#include <torch/csrc/Exceptions.h>

#include <utility>

#include "bindings.h"

namespace tvmify::python {
namespace {

// Everything needed to repeat a call; either all of it is set, or nothing.
struct Known {
  Owned guard, key, run, names;
  Py_ssize_t free = 0;  // how many of the names a call may have in any order
};

struct LatestCall {
  PyObject_HEAD vectorcallfunc vectorcall;
  Known known;
  long long hits, generation;

  static LatestCall* from(PyObject* self) { return reinterpret_cast<LatestCall*>(self); }

  // Releases the old objects last, since that may run Python code that re-enters this.
  void replace(Known next) { std::swap(known, next); }
};

PyObject* call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyVectorcall_NARGS(flags) == 2 && names == nullptr,
                   "LatestCall takes the arguments of a call, as a tuple and a dict");
  LatestCall* latest = LatestCall::from(self);
  const Known& known = latest->known;
  if (known.run == nullptr) Py_RETURN_NOTIMPLEMENTED;
  const Keywords keywords{known.names.get(), known.free};
  const Owned leaves(leaves_of_same_call(args[0], args[1], known.key.get(), keywords));
  if (leaves == nullptr) Py_RETURN_NOTIMPLEMENTED;
  // Own both: the code below may run Python code or other threads, which may replace them.
  const Owned guard(Py_NewRef(known.guard.get())), run(Py_NewRef(known.run.get()));
  if (has_changed(guard.get())) Py_RETURN_NOTIMPLEMENTED;
  PyObject* argument = leaves.get();
  PyObject* result = PyObject_Vectorcall(run.get(), &argument, 1, nullptr);
  if (result != nullptr && result != Py_NotImplemented) ++latest->hits;
  return result;
  END_HANDLE_TH_ERRORS
}

PyObject* keep(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 6 && PyTuple_CheckExact(args[4]) && PyLong_CheckExact(args[5]),
      "keep() takes a generation, a guard, a key, a Call, a tuple of names and a number");
  const long long generation = PyLong_AsLongLong(args[0]);
  if (PyErr_Occurred()) return nullptr;
  TORCH_CHECK_TYPE(is_guard(args[1]), "expected a Guard, got a ", Py_TYPE(args[1])->tp_name);
  LatestCall* latest = LatestCall::from(self);
  if (generation == latest->generation) {
    const auto owned = [&](int i) { return Owned(Py_NewRef(args[i])); };
    latest->replace({owned(1), owned(2), owned(3), owned(4), PyLong_AsSsize_t(args[5])});
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* forget(PyObject* self, PyObject*) {
  LatestCall* latest = LatestCall::from(self);
  ++latest->generation;
  latest->replace({});
  Py_RETURN_NONE;
}

int traverse_latest_call(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(LatestCall::from(self)->known.guard.get());
  Py_VISIT(LatestCall::from(self)->known.run.get());
  return 0;
}

int clear_latest_call(PyObject* self) {
  LatestCall::from(self)->replace({});
  return 0;
}

void dealloc_latest_call(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* type = Py_TYPE(self);
  LatestCall::from(self)->known.~Known();
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* create_latest_call(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":LatestCall", const_cast<char**>(names))) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  LatestCall::from(self)->vectorcall = call;
  new (&LatestCall::from(self)->known) Known();
  return self;
}

PyMemberDef latest_call_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(LatestCall, vectorcall), READONLY, nullptr},
    {"hits", T_LONGLONG, offsetof(LatestCall, hits), READONLY, "How many calls it has run."},
    {"generation", T_LONGLONG, offsetof(LatestCall, generation), READONLY,
     "How many times it has forgotten."},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef latest_call_methods[] = {
    {"keep", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(keep)), METH_FASTCALL,
     "Remember a call, unless `forget` was called after that generation."},
    {"forget", forget, METH_NOARGS, "Forget the call."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot latest_call_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create_latest_call)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_latest_call)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_latest_call)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_latest_call)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, latest_call_members},
    {Py_tp_methods, latest_call_methods},
    {Py_tp_doc, const_cast<char*>("Runs calls that have the signature of the latest one.")},
    {0, nullptr},
};

}  // namespace

PyType_Spec latest_call_spec = {
    "tvmify._C.LatestCall", sizeof(LatestCall), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, latest_call_slots};

}  // namespace tvmify::python
