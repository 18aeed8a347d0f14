// Guard: detects changes of a module, in nanoseconds per item.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../tensor_state.h"
#include "bindings.h"
#include "dict_version.h"

namespace tvmify::python {
namespace {

using Slots = std::vector<std::pair<PyObject*, PyObject*>>;  // names and values

// A dict of the module, or of its parameters, buffers or submodules, and the items watched in it.
struct Dict {
  PyObject* dict;
  DictVersion version;
  Slots slots;
  Py_ssize_t size = -1;   // any
  uint64_t verified = 0;  // the version at which all items were last verified, or 0
};
// A list or set that an attribute holds, and its items; those of a set in any order.
struct Collection {
  PyObject* object;
  PyObject* items;  // a tuple
};
// The class of a module in the tree.
struct Instance {
  PyObject* object;  // or a weak reference to it
  PyObject* type;
};
// A class with its own methods.
struct Class {
  PyObject* type;
  Slots methods;
  unsigned int version = 0;  // at which all methods were last verified, or 0
};
struct Watched {
  PyObject* object;
  TensorState state;

  const at::Tensor& tensor() const { return THPVariable_Unpack(object); }
};

// The guard owns all Python objects in it.
struct Guard {
  PyObject_HEAD std::vector<Dict> dicts;
  std::vector<Collection> collections;
  std::vector<Watched> tensors;
  std::vector<Instance> instances;
  std::vector<Class> classes;

  static Guard* from(PyObject* self) { return reinterpret_cast<Guard*>(self); }
};

int traverse_guard(PyObject* self, visitproc visit, void* arg) {
  // The module owns the guard, which holds the module's dicts: a cycle for the garbage collector.
  Py_VISIT(Py_TYPE(self));
  const Guard& guard = *Guard::from(self);
  const auto visit_slots = [&](const Slots& slots) {
    for (const auto& [name, value] : slots) {
      Py_VISIT(name);
      Py_VISIT(value);
    }
    return 0;
  };
  for (const Dict& dict : guard.dicts) {
    Py_VISIT(dict.dict);
    if (const int result = visit_slots(dict.slots)) return result;
  }
  for (const Collection& collection : guard.collections) {
    Py_VISIT(collection.object);
    Py_VISIT(collection.items);
  }
  for (const Watched& watched : guard.tensors) Py_VISIT(watched.object);
  for (const Instance& instance : guard.instances) {
    Py_VISIT(instance.object);
    Py_VISIT(instance.type);
  }
  for (const Class& watched : guard.classes) {
    Py_VISIT(watched.type);
    if (const int result = visit_slots(watched.methods)) return result;
  }
  return 0;
}

void release(const Slots& slots) {
  for (const auto& [name, value] : slots) {
    Py_DECREF(name);
    Py_DECREF(value);
  }
}

int clear_guard(PyObject* self) {
  // Moved out first, since releasing an object may run Python code that re-enters this.
  auto dicts = std::exchange(Guard::from(self)->dicts, {});
  const auto collections = std::exchange(Guard::from(self)->collections, {});
  const auto tensors = std::exchange(Guard::from(self)->tensors, {});
  const auto instances = std::exchange(Guard::from(self)->instances, {});
  const auto classes = std::exchange(Guard::from(self)->classes, {});
  for (Dict& dict : dicts) {
    dict.version = {};  // before the dict, which has to outlive it
    Py_DECREF(dict.dict);
    release(dict.slots);
  }
  for (const Collection& collection : collections) {
    Py_DECREF(collection.object);
    Py_DECREF(collection.items);
  }
  for (const Watched& watched : tensors) Py_DECREF(watched.object);
  for (const Instance& instance : instances) {
    Py_DECREF(instance.object);
    Py_DECREF(instance.type);
  }
  for (const Class& watched : classes) {
    Py_DECREF(watched.type);
    release(watched.methods);
  }
  return 0;
}

void dealloc_guard(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear_guard(self);
  PyTypeObject* type = Py_TYPE(self);
  Guard* guard = Guard::from(self);
  guard->dicts.~vector();
  guard->collections.~vector();
  guard->tensors.~vector();
  guard->instances.~vector();
  guard->classes.~vector();
  type->tp_free(self);
  Py_DECREF(type);
}

// Unpacks a tuple into borrowed references.
template <typename... Parts>
void take_apart(PyObject* tuple, const char* format, Parts... parts) {
  TORCH_CHECK_TYPE(PyTuple_Check(tuple), "expected a tuple, got a ", Py_TYPE(tuple)->tp_name);
  if (!PyArg_ParseTuple(tuple, format, parts...)) throw python_error();
}

// Finds the index of a dict in a guard.
class Places {
 public:
  explicit Places(Guard& guard) : dicts_(guard.dicts) {}

  Dict& operator[](PyObject* dict) {
    const auto [found, is_new] = places_.try_emplace(dict, dicts_.size());
    if (is_new) dicts_.push_back({Py_NewRef(dict), DictVersion(dict), {}});
    return dicts_[found->second];
  }

 private:
  std::vector<Dict>& dicts_;
  std::unordered_map<PyObject*, size_t> places_;
};

void add_dicts(Guard& guard, PyObject* slots, PyObject* sizes) {
  Places places(guard);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(slots); ++i) {
    PyObject *dict, *name, *value;
    take_apart(PyList_GET_ITEM(slots, i), "O!OO", &PyDict_Type, &dict, &name, &value);
    places[dict].slots.emplace_back(Py_NewRef(name), Py_NewRef(value));
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(sizes); ++i) {
    PyObject* dict;
    Py_ssize_t size;
    take_apart(PyList_GET_ITEM(sizes, i), "O!n", &PyDict_Type, &dict, &size);
    places[dict].size = size;
  }
}

void add_collections(Guard& guard, PyObject* collections) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(collections); ++i) {
    PyObject *object, *items;
    take_apart(PyList_GET_ITEM(collections, i), "OO!", &object, &PyTuple_Type, &items);
    TORCH_CHECK_TYPE(PyList_Check(object) || PyAnySet_Check(object),
                     "Guard watches lists and sets, not ", Py_TYPE(object)->tp_name);
    guard.collections.push_back({Py_NewRef(object), Py_NewRef(items)});
  }
}

void add_tensors(Guard& guard, PyObject* tensors, bool counts_writes) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* object = PyList_GET_ITEM(tensors, i);
    TORCH_CHECK_TYPE(THPVariable_Check(object), "Guard watches tensors, not ",
                     Py_TYPE(object)->tp_name);
    guard.tensors.push_back(
        {Py_NewRef(object), TensorState(THPVariable_Unpack(object), counts_writes)});
  }
}

void add_types(Guard& guard, PyObject* types) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(types); ++i) {
    PyObject *object, *type;
    take_apart(PyList_GET_ITEM(types, i), "OO!", &object, &PyType_Type, &type);
    guard.instances.push_back({Py_NewRef(object), Py_NewRef(type)});
  }
}

// Whether a member of a class affects the behaviour of its instances.
bool is_method(PyObject* member) {
  return PyCallable_Check(member) || Py_TYPE(member)->tp_descr_get != nullptr;
}

// The dict of a class, as a borrowed reference; null for built-in classes since Python 3.12.
PyObject* class_dict(PyObject* type) { return reinterpret_cast<PyTypeObject*>(type)->tp_dict; }

void add_classes(Guard& guard, PyObject* classes) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(classes); ++i) {
    PyObject* const type = PyList_GET_ITEM(classes, i);
    TORCH_CHECK_TYPE(PyType_Check(type) && class_dict(type) != nullptr,
                     "Guard watches classes that were made by Python code, not ",
                     Py_TYPE(type)->tp_name);
    guard.classes.push_back({Py_NewRef(type), {}});
    PyObject *name, *member;
    for (Py_ssize_t j = 0; PyDict_Next(class_dict(type), &j, &name, &member);) {
      if (is_method(member)) {
        guard.classes.back().methods.emplace_back(Py_NewRef(name), Py_NewRef(member));
      }
    }
  }
}

PyObject* create_guard(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"slots", "sizes",   "tensors",     "written",
                                "types", "classes", "collections", nullptr};
  PyObject *slots, *sizes, *tensors, *written = nullptr, *types = nullptr, *classes = nullptr;
  PyObject* collections = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!|O!O!O!O!:Guard", const_cast<char**>(names),
                                   &PyList_Type, &slots, &PyList_Type, &sizes, &PyList_Type,
                                   &tensors, &PyList_Type, &written, &PyList_Type, &types,
                                   &PyList_Type, &classes, &PyList_Type, &collections)) {
    return nullptr;
  }
  Owned self(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  Guard* guard = Guard::from(self.get());
  new (&guard->dicts) std::vector<Dict>();
  new (&guard->collections) std::vector<Collection>();
  new (&guard->tensors) std::vector<Watched>();
  new (&guard->instances) std::vector<Instance>();
  new (&guard->classes) std::vector<Class>();
  add_dicts(*guard, slots, sizes);
  add_tensors(*guard, tensors, true);
  if (written != nullptr) add_tensors(*guard, written, false);
  if (types != nullptr) add_types(*guard, types);
  if (classes != nullptr) add_classes(*guard, classes);
  if (collections != nullptr) add_collections(*guard, collections);
  return self.release();
  END_HANDLE_TH_ERRORS
}

// Whether all items of a dict are still in the same order, since forward may iterate over them.
bool is_in_order(const Dict& dict) {
  PyObject* name;
  size_t i = 0;
  for (Py_ssize_t place = 0; PyDict_Next(dict.dict, &place, &name, nullptr); ++i) {
    if (dict.slots[i].first != name) return false;
  }
  return true;
}

bool is_unchanged(const Dict& dict) {
  if (dict.size >= 0 && PyDict_GET_SIZE(dict.dict) != dict.size) return false;
  for (const auto& [name, value] : dict.slots) {
    if (PyDict_GetItemWithError(dict.dict, name) != value) {
      if (PyErr_Occurred()) throw python_error();
      return false;
    }
  }
  return dict.size != static_cast<Py_ssize_t>(dict.slots.size()) || is_in_order(dict);
}

bool is_unchanged(const Collection& collection) {
  const Py_ssize_t size = PyTuple_GET_SIZE(collection.items);
  if (PyObject_Size(collection.object) != size) return false;
  const bool is_list = PyList_Check(collection.object);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* const item = PyTuple_GET_ITEM(collection.items, i);
    const int is_there = is_list ? PyList_GET_ITEM(collection.object, i) == item
                                 : PySet_Contains(collection.object, item);
    if (is_there < 0) throw python_error();
    if (is_there == 0) return false;
  }
  return true;
}

bool is_unchanged(const Instance& instance) {
  if (!PyWeakref_Check(instance.object)) {
    return reinterpret_cast<PyObject*>(Py_TYPE(instance.object)) == instance.type;
  }
  PyObject* object = nullptr;
  if (PyWeakref_GetRef(instance.object, &object) < 0) throw python_error();
  const Owned owned(object);
  return object != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(object)) == instance.type;
}

bool is_unchanged(const Class& watched) {
  size_t i = 0;
  PyObject *name, *member;
  for (Py_ssize_t place = 0; PyDict_Next(class_dict(watched.type), &place, &name, &member);) {
    if (!is_method(member)) continue;
    if (i == watched.methods.size() || watched.methods[i] != std::pair(name, member)) return false;
    ++i;
  }
  return i == watched.methods.size();
}

// A number unique to this class and the last change of it or its bases; 0 if there is none.
unsigned int version_of_class(PyObject* object) {
  auto* type = reinterpret_cast<PyTypeObject*>(object);
  static PyObject* const name = PyUnicode_InternFromString("forward");
  if (type->tp_version_tag == 0) _PyType_Lookup(type, name);  // assigns one
  return type->tp_version_tag;
}

bool has_other_methods(Class& watched) {
  const unsigned int version = version_of_class(watched.type);
  if (version != 0 && version == watched.version) return false;
  if (!is_unchanged(watched)) return true;
  watched.version = version;
  return false;
}

Change compare(Guard& guard) {
  for (Dict& dict : guard.dicts) {
    const uint64_t version = dict.version.now();
    if (version != 0 && version == dict.verified) continue;
    if (!is_unchanged(dict)) return kStructure;
    dict.verified = version;
  }
  for (const Collection& collection : guard.collections) {
    if (!is_unchanged(collection)) return kStructure;
  }
  for (const Instance& instance : guard.instances) {
    if (!is_unchanged(instance)) return kStructure;
  }
  for (Class& watched : guard.classes) {
    if (has_other_methods(watched)) return kStructure;
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

PyMethodDef guard_methods[] = {
    {"changed", changed, METH_NOARGS,
     "Return 0 while nothing changed, 1 after a write to a tensor, 2 when anything else did."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot guard_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create_guard)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_guard)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_guard)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_guard)},
    {Py_tp_methods, guard_methods},
    {Py_tp_doc, const_cast<char*>("Notices changes of a module since the guard was made.")},
    {0, nullptr},
};

}  // namespace

bool is_guard(PyObject* object) { return Py_TYPE(object)->tp_dealloc == dealloc_guard; }

bool has_changed(PyObject* guard) { return compare(*Guard::from(guard)) != kNothing; }

PyType_Spec guard_spec = {"tvmify._C.Guard", sizeof(Guard), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, guard_slots};

}  // namespace tvmify::python
