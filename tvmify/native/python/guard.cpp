// Guard: notices, in nanoseconds per item, that a module is not what it was.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "../tensor_state.h"
#include "bindings.h"

namespace tvmify::python {
namespace {

struct Slot {
  PyObject *dict, *name, *value;
};
struct Size {
  PyObject* dict;
  Py_ssize_t size;
};
struct Watched {
  PyObject* object;
  TensorState state;
  bool counts_writes;

  const at::Tensor& tensor() const { return THPVariable_Unpack(object); }
};

// All Python objects in here are owned by the guard.
struct Guard {
  PyObject_HEAD std::vector<Slot> slots;
  std::vector<Size> sizes;
  std::vector<Watched> tensors;

  static Guard* from(PyObject* self) { return reinterpret_cast<Guard*>(self); }
};

int traverse(PyObject* self, visitproc visit, void* arg) {
  // A guard hangs on the module whose dicts it holds: that cycle is the garbage collector's.
  Py_VISIT(Py_TYPE(self));
  for (const Slot& slot : Guard::from(self)->slots) {
    Py_VISIT(slot.dict);
    Py_VISIT(slot.name);
    Py_VISIT(slot.value);
  }
  for (const Size& size : Guard::from(self)->sizes) Py_VISIT(size.dict);
  for (const Watched& watched : Guard::from(self)->tensors) Py_VISIT(watched.object);
  return 0;
}

int clear(PyObject* self) {
  // Moved out first: releasing an object may run Python code that comes back here.
  const auto slots = std::exchange(Guard::from(self)->slots, {});
  const auto sizes = std::exchange(Guard::from(self)->sizes, {});
  const auto tensors = std::exchange(Guard::from(self)->tensors, {});
  for (const Slot& slot : slots) {
    Py_DECREF(slot.dict);
    Py_DECREF(slot.name);
    Py_DECREF(slot.value);
  }
  for (const Size& size : sizes) Py_DECREF(size.dict);
  for (const Watched& watched : tensors) Py_DECREF(watched.object);
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  PyTypeObject* type = Py_TYPE(self);
  Guard* guard = Guard::from(self);
  guard->slots.~vector();
  guard->sizes.~vector();
  guard->tensors.~vector();
  type->tp_free(self);
  Py_DECREF(type);
}

// Takes a tuple apart; its parts are borrowed.
template <typename... Parts>
void take_apart(PyObject* tuple, const char* format, Parts... parts) {
  TORCH_CHECK_TYPE(PyTuple_Check(tuple), "expected a tuple, got a ", Py_TYPE(tuple)->tp_name);
  if (!PyArg_ParseTuple(tuple, format, parts...)) throw python_error();
}

void add_slots(Guard& guard, PyObject* slots) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(slots); ++i) {
    PyObject *dict, *name, *value;
    take_apart(PyList_GET_ITEM(slots, i), "O!OO", &PyDict_Type, &dict, &name, &value);
    guard.slots.push_back({Py_NewRef(dict), Py_NewRef(name), Py_NewRef(value)});
  }
}

void add_sizes(Guard& guard, PyObject* sizes) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(sizes); ++i) {
    PyObject* dict;
    Py_ssize_t size;
    take_apart(PyList_GET_ITEM(sizes, i), "O!n", &PyDict_Type, &dict, &size);
    guard.sizes.push_back({Py_NewRef(dict), size});
  }
}

void add_tensors(Guard& guard, PyObject* tensors, bool counts_writes) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* object = PyList_GET_ITEM(tensors, i);
    TORCH_CHECK_TYPE(THPVariable_Check(object), "Guard watches tensors, not ",
                     Py_TYPE(object)->tp_name);
    guard.tensors.push_back(
        {Py_NewRef(object), TensorState(THPVariable_Unpack(object), counts_writes), counts_writes});
  }
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"slots", "sizes", "tensors", "written", nullptr};
  PyObject *slots, *sizes, *tensors, *written = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!|O!:Guard", const_cast<char**>(names),
                                   &PyList_Type, &slots, &PyList_Type, &sizes, &PyList_Type,
                                   &tensors, &PyList_Type, &written)) {
    return nullptr;
  }
  Owned self(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  Guard* guard = Guard::from(self.get());
  new (&guard->slots) std::vector<Slot>();
  new (&guard->sizes) std::vector<Size>();
  new (&guard->tensors) std::vector<Watched>();
  add_slots(*guard, slots);
  add_sizes(*guard, sizes);
  add_tensors(*guard, tensors, true);
  if (written != nullptr) add_tensors(*guard, written, false);
  return self.release();
  END_HANDLE_TH_ERRORS
}

Change compare(const Guard& guard) {
  for (const Size& size : guard.sizes) {
    if (PyDict_GET_SIZE(size.dict) != size.size) return kStructure;
  }
  for (const Slot& slot : guard.slots) {
    if (PyDict_GetItemWithError(slot.dict, slot.name) != slot.value) {
      if (PyErr_Occurred()) throw python_error();
      return kStructure;
    }
  }
  Change change = kNothing;
  for (const Watched& watched : guard.tensors) {
    change = std::max(change, watched.state.compare(watched.tensor()));
  }
  return change;
}

PyObject* changed(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  return PyLong_FromLong(compare(*Guard::from(self)));
  END_HANDLE_TH_ERRORS
}

PyObject* refresh_tensors(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  for (Watched& watched : Guard::from(self)->tensors) {
    watched.state = TensorState(watched.tensor(), watched.counts_writes);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"changed", changed, METH_NOARGS,
     "Return 0 while nothing changed, 1 after a write to a tensor, 2 when anything else did."},
    {"refresh_tensors", refresh_tensors, METH_NOARGS,
     "Take the tensors as they are now for unchanged."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("Notices changes of a module since the guard was made.")},
    {0, nullptr},
};

PyType_Spec spec = {"tvmify._C.Guard", sizeof(Guard), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                    slots};

}  // namespace

bool add_guard(PyObject* module) {
  const Owned type(PyType_FromSpec(&spec));
  return type != nullptr && PyModule_AddObjectRef(module, "Guard", type.get()) == 0;
}

}  // namespace tvmify::python
