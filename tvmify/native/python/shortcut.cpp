// Shortcut: goes from nn.Module.__call__ directly to the LatestCall.
//
// nn.Module first looks for `_compiled_call_impl`, which Module.compile() sets. Otherwise it checks
// for hooks in Python and calls forward, which calls a dispatcher: that takes longer than many
// short programs. Shortcut is a property, so that torch.compile, which cannot trace native code,
// uses its Python getter and takes the normal path.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include "bindings.h"

namespace tvmify::python {
namespace {

Owned checked(PyObject* object) {
  if (object == nullptr) throw python_error();
  return Owned(object);
}

Owned attribute_of(PyObject* object, PyObject* name) {
  return checked(PyObject_GetAttr(object, name));
}

// The dict of a module.
Owned members_of(PyObject* module) {
  TORCH_CHECK_TYPE(!PyType_Check(module), "a class has no dispatcher");  // nor a dict to write to
  return checked(PyObject_GenericGetDict(module, nullptr));
}

// Returns a borrowed reference, or null.
PyObject* find(PyObject* dict, PyObject* key) {
  PyObject* const value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred()) throw python_error();
  return value;
}

// Whether a dict of hooks exists and is empty.
bool is_empty(PyObject* dict, PyObject* key) {
  PyObject* const hooks = find(dict, key);
  return hooks != nullptr && (PyDict_CheckExact(hooks) || PyODict_CheckExact(hooks)) &&
         PyDict_GET_SIZE(hooks) == 0;
}

// Interned names, and the parts of PyTorch that decide how a module is called. Never freed: classes
// may outlive everything else.
struct Names {
  static PyObject* of(const char* text) {
    return checked(PyUnicode_InternFromString(text)).release();
  }

  static PyObject* variables_of(const char* module) {
    return PyModule_GetDict(checked(PyImport_ImportModule(module)).release());
  }

  PyObject *compiled_call_impl = of("_compiled_call_impl"), *call_impl = of("_call_impl"),
           *forward = of("forward"), *module = of("module"), *latest = of("latest"),
           *getattribute = of("__getattribute__"), *is_compiling = of("_is_compiling_flag");
  PyObject* own_hooks[4] = {of("_backward_hooks"), of("_backward_pre_hooks"), of("_forward_hooks"),
                            of("_forward_pre_hooks")};
  PyObject* hooks_of_all[4] = {of("_global_backward_hooks"), of("_global_backward_pre_hooks"),
                               of("_global_forward_hooks"), of("_global_forward_pre_hooks")};
  PyObject* of_modules = variables_of("torch.nn.modules.module");
  PyObject* of_compiler = variables_of("torch.compiler");
  PyObject* frame_callback =
      find(variables_of("torch._C._dynamo.eval_frame"), of("get_eval_frame_callback"));
  PyObject* usual_getattribute = _PyType_Lookup(&PyBaseObject_Type, getattribute);
  PyObject* usual_call_impl = attribute_of(find(of_modules, of("Module")), call_impl).release();

  Names() {
    // Other code replaced it before this was loaded, so that must be called instead.
    if (!PyFunction_Check(usual_call_impl) ||
        PyFunction_GET_GLOBALS(usual_call_impl) != of_modules) {
      Py_CLEAR(usual_call_impl);
    }
  }
};
const Names* names;

// Whether nothing observes calls now: no global hooks, and no tracing.
bool is_unobserved() {
  for (PyObject* const key : names->hooks_of_all) {
    if (!is_empty(names->of_modules, key)) return false;
  }
  if (torch::jit::tracer::isTracing()) return false;
  if (find(names->of_compiler, names->is_compiling) != Py_False) return false;
  // While torch.compile traces frames, it must see the operators.
  return names->frame_callback != nullptr &&
         checked(PyObject_CallNoArgs(names->frame_callback)).get() == Py_None;
}

// The fields of a Shortcut, which follow those of property in memory.
struct Fields {
  PyObject *place, *forward;  // owned

  static Fields& of(PyObject* self) {
    return *reinterpret_cast<Fields*>(reinterpret_cast<char*>(self) + PyProperty_Type.tp_basicsize);
  }
};

// Returns the module's LatestCall if calling the module does nothing else; otherwise null.
Owned latest_of(PyObject* module, const Fields& fields) {
  if (!is_unobserved()) return nullptr;
  PyTypeObject* const type = Py_TYPE(module);
  const Owned members = members_of(module);
  PyObject* const dict = members.get();
  if (_PyType_Lookup(type, names->forward) != fields.forward ||
      _PyType_Lookup(type, names->call_impl) != names->usual_call_impl ||
      _PyType_Lookup(type, names->getattribute) != names->usual_getattribute ||
      find(dict, names->forward) != nullptr || find(dict, names->call_impl) != nullptr) {
    return nullptr;
  }
  for (PyObject* const key : names->own_hooks) {
    if (!is_empty(dict, key)) return nullptr;
  }
  const Owned dispatcher(Py_XNewRef(find(dict, fields.place)));
  if (dispatcher == nullptr || dispatcher.get() == Py_None) return nullptr;
  // A shallow copy of a module has the dispatcher of its original.
  PyObject* owner = nullptr;
  if (PyWeakref_GetRef(attribute_of(dispatcher.get(), names->module).get(), &owner) < 0) {
    throw python_error();
  }
  const bool is_its_own = Owned(owner).get() == module;
  return is_its_own ? attribute_of(dispatcher.get(), names->latest) : nullptr;
}

// Repeats the latest call; NotImplemented if this is a different call.
PyObject* call_latest(PyObject* module, const Fields& fields, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  const Owned latest = latest_of(module, fields);
  if (latest == nullptr) return Py_NewRef(Py_NotImplemented);
  const Owned named = kwargs != nullptr ? Owned(Py_NewRef(kwargs)) : checked(PyDict_New());
  PyObject* const both[] = {args, named.get()};
  return PyObject_Vectorcall(latest.get(), both, 2, nullptr);
  END_HANDLE_TH_ERRORS
}

// Calls a module; `bound` holds it and the Shortcut.
PyObject* call_module(PyObject* bound, PyObject* args, PyObject* kwargs) {
  PyObject* const module = PyTuple_GET_ITEM(bound, 0);
  Owned result(call_latest(module, Fields::of(PyTuple_GET_ITEM(bound, 1)), args, kwargs));
  if (result.get() != Py_NotImplemented) return result.release();
  // Outside the two macros, which delay PyTorch's warnings until their end.
  const Owned usual(PyObject_GetAttr(module, names->call_impl));
  return usual == nullptr ? nullptr : PyObject_Call(usual.get(), args, kwargs);
}

PyMethodDef calling = {"_compiled_call_impl",
                       reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call_module)),
                       METH_VARARGS | METH_KEYWORDS, "Call the module."};

PyObject* get(PyObject* self, PyObject* module, PyObject*) {
  HANDLE_TH_ERRORS
  if (module == nullptr || module == Py_None) return Py_NewRef(self);
  const Owned members = members_of(module);
  if (PyObject* set = find(members.get(), names->compiled_call_impl)) return Py_NewRef(set);
  return PyCFunction_New(&calling, checked(PyTuple_Pack(2, module, self)).get());
  END_HANDLE_TH_ERRORS
}

// Called when Module.compile() sets the attribute.
int set(PyObject*, PyObject* module, PyObject* value) {
  HANDLE_TH_ERRORS
  const Owned members = members_of(module);
  if (value != nullptr) return PyDict_SetItem(members.get(), names->compiled_call_impl, value);
  if (find(members.get(), names->compiled_call_impl) == nullptr) {
    PyErr_SetObject(PyExc_AttributeError, names->compiled_call_impl);
    return -1;
  }
  return PyDict_DelItem(members.get(), names->compiled_call_impl);
  END_HANDLE_TH_ERRORS_RET(-1)
}

// Needed for classes that are pickled by value.
PyObject* reduce(PyObject* self, PyObject*) {
  const Owned getter(PyObject_GetAttrString(self, "fget"));
  if (getter == nullptr) return nullptr;
  const Fields& fields = Fields::of(self);
  return Py_BuildValue("O(OOO)", Py_TYPE(self), getter.get(), fields.place, fields.forward);
}

int traverse_shortcut(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(Fields::of(self).forward);
  return PyProperty_Type.tp_traverse(self, visit, arg);
}

int clear_shortcut(PyObject* self) {
  Py_CLEAR(Fields::of(self).place);
  Py_CLEAR(Fields::of(self).forward);
  return PyProperty_Type.tp_clear(self);
}

void dealloc_shortcut(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Py_CLEAR(Fields::of(self).place);
  Py_CLEAR(Fields::of(self).forward);
  PyObject_GC_Track(self);  // property's deallocator expects it
  PyProperty_Type.tp_dealloc(self);
  Py_DECREF(type);
}

PyObject* create_shortcut(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* parameters[] = {"fget", "place", "forward", nullptr};
  PyObject *getter, *place, *forward;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OUO:Shortcut", const_cast<char**>(parameters),
                                   &getter, &place, &forward)) {
    return nullptr;
  }
  if (names == nullptr) names = new Names();
  Owned self = checked(PyType_GenericNew(type, nullptr, nullptr));
  Fields::of(self.get()) = {Py_NewRef(place), Py_NewRef(forward)};
  // An explicit docstring: the getter's would be stored in a __dict__, which this does not have.
  const Owned all = checked(Py_BuildValue("OOOs", getter, Py_None, Py_None, calling.ml_doc));
  return PyProperty_Type.tp_init(self.get(), all.get(), nullptr) == 0 ? self.release() : nullptr;
  END_HANDLE_TH_ERRORS
}

// Does nothing: `new` has set all fields, and they must not change.
int initialize(PyObject*, PyObject*, PyObject*) { return 0; }

PyMethodDef shortcut_methods[] = {
    {"__reduce__", reduce, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot shortcut_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create_shortcut)},
    {Py_tp_init, reinterpret_cast<void*>(initialize)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_shortcut)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_shortcut)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_shortcut)},
    {Py_tp_descr_get, reinterpret_cast<void*>(get)},
    {Py_tp_descr_set, reinterpret_cast<void*>(set)},
    {Py_tp_methods, shortcut_methods},
    {Py_tp_base, &PyProperty_Type},
    {Py_tp_doc, const_cast<char*>("Leads from a call of a module to its LatestCall.")},
    {0, nullptr},
};

}  // namespace

PyType_Spec shortcut_spec = {"tvmify._C.Shortcut",
                             static_cast<int>(PyProperty_Type.tp_basicsize + sizeof(Fields)), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, shortcut_slots};

}  // namespace tvmify::python
