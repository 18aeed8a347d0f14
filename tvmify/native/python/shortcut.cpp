// Shortcut: from nn.Module.__call__ to the call that was made last, past all that lies between.
//
// nn.Module asks for `_compiled_call_impl` first, where Module.compile() puts its own. What it does
// otherwise, in Python, looks for hooks, finds none, and calls a forward which asks a dispatcher:
// that takes longer than many a short program.

// clang-format off: structmember.h needs Python.h, and does not say so
#include <torch/csrc/python_headers.h>
#include <structmember.h>
// clang-format on
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <array>
#include <utility>

#include "bindings.h"

namespace tvmify::python {
namespace {

Owned checked(PyObject* object) {
  if (object == nullptr) throw python_error();
  return Owned(object);
}

// A name that Python code has in the same place in memory.
PyObject* name(const char* text) { return checked(PyUnicode_InternFromString(text)).release(); }

Owned attribute_of(PyObject* object, PyObject* name) {
  return checked(PyObject_GetAttr(object, name));
}

// Returns a borrowed reference, or null.
PyObject* find(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred()) throw python_error();
  return value;
}

// What of PyTorch's own decides how a module is called.
struct Surroundings {
  Owned module_py = checked(PyImport_ImportModule("torch.nn.modules.module"));
  Owned base = checked(PyObject_GetAttrString(module_py.get(), "Module"));
  Owned call_impl = checked(PyObject_GetAttrString(base.get(), "_call_impl"));
  std::array<Owned, 4> hooks = {
      checked(PyObject_GetAttrString(module_py.get(), "_global_backward_pre_hooks")),
      checked(PyObject_GetAttrString(module_py.get(), "_global_backward_hooks")),
      checked(PyObject_GetAttrString(module_py.get(), "_global_forward_hooks")),
      checked(PyObject_GetAttrString(module_py.get(), "_global_forward_pre_hooks")),
  };
  Owned dynamo = checked(PyImport_ImportModule("torch._C._dynamo.eval_frame"));
  Owned frame_callback = checked(PyObject_GetAttrString(dynamo.get(), "get_eval_frame_callback"));

  static const Surroundings& get() {
    static const auto* const surroundings = new Surroundings();  // the interpreter ends before
    return *surroundings;
  }

  // Whether a call now is just a call: there are no hooks for all modules, and nobody records.
  bool are_plain() const {
    for (const Owned& dict : hooks) {
      if (!PyDict_Check(dict.get()) || PyDict_GET_SIZE(dict.get()) != 0) return false;
    }
    if (torch::jit::tracer::isTracing()) return false;
    // While torch.compile looks at frames, it is to see the operators.
    return checked(PyObject_CallNoArgs(frame_callback.get())).get() == Py_None;
  }
};

struct Shortcut {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject *place, *forward;  // owned

  static Shortcut* from(PyObject* self) { return reinterpret_cast<Shortcut*>(self); }
};

// Returns the LatestCall of a module whose call would lead there, and to nothing else; or null.
Owned latest_of(PyObject* module, const Shortcut& shortcut) {
  static PyObject *const forward = name("forward"), *const call_impl = name("_call_impl"),
                         *const referenced = name("module"), *const latest = name("latest");
  static const std::array<PyObject*, 4> hooks = {
      name("_backward_hooks"), name("_backward_pre_hooks"), name("_forward_hooks"),
      name("_forward_pre_hooks")};
  const Surroundings& surroundings = Surroundings::get();
  if (!surroundings.are_plain()) return nullptr;
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(module));
  if (attribute_of(type, forward).get() != shortcut.forward ||
      attribute_of(type, call_impl) != surroundings.call_impl) {
    return nullptr;
  }
  const Owned members = checked(PyObject_GenericGetDict(module, nullptr));
  PyObject* dict = members.get();
  if (find(dict, forward) != nullptr || find(dict, call_impl) != nullptr) return nullptr;
  for (PyObject* const key : hooks) {
    PyObject* const found = find(dict, key);
    if (found == nullptr || !PyDict_Check(found) || PyDict_GET_SIZE(found) != 0) return nullptr;
  }
  PyObject* const dispatcher = find(dict, shortcut.place);
  if (dispatcher == nullptr || dispatcher == Py_None) return nullptr;
  // A shallow copy of a module comes with the dispatcher of the one it was copied from.
  PyObject* owner = nullptr;
  if (PyWeakref_GetRef(attribute_of(dispatcher, referenced).get(), &owner) < 0) {
    throw python_error();
  }
  const bool is_its_own = owner == module;
  Py_XDECREF(owner);
  return is_its_own ? attribute_of(dispatcher, latest) : nullptr;
}

// The arguments of a call as Python code has them.
std::pair<Owned, Owned> packed(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Owned positional = checked(PyTuple_New(count)), named = checked(PyDict_New());
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(positional.get(), i, Py_NewRef(args[i]));
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); ++i) {
    if (PyDict_SetItem(named.get(), PyTuple_GET_ITEM(names, i), args[count + i]) < 0) {
      throw python_error();
    }
  }
  return {std::move(positional), std::move(named)};
}

// Takes the module first, as methods do.
PyObject* call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  TORCH_CHECK_TYPE(count > 0, "a Shortcut is an attribute of a class of modules");
  PyObject* const module = args[0];
  const auto [positional, named] = packed(args + 1, count - 1, names);
  if (const Owned latest = latest_of(module, *Shortcut::from(self))) {
    PyObject* const both[] = {positional.get(), named.get()};
    Owned result = checked(PyObject_Vectorcall(latest.get(), both, 2, nullptr));
    if (result.get() != Py_NotImplemented) return result.release();
  }
  static PyObject* const call_impl = name("_call_impl");
  return PyObject_Call(attribute_of(module, call_impl).get(), positional.get(), named.get());
  END_HANDLE_TH_ERRORS
}

PyObject* get(PyObject* self, PyObject* module, PyObject*) {
  return module == nullptr || module == Py_None ? Py_NewRef(self) : PyMethod_New(self, module);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(Shortcut::from(self)->forward);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(Shortcut::from(self)->place);
  Py_CLEAR(Shortcut::from(self)->forward);
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"place", "forward", nullptr};
  PyObject *place, *forward;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UO:Shortcut", const_cast<char**>(names), &place,
                                   &forward)) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  Shortcut::from(self)->vectorcall = call;
  Shortcut::from(self)->place = Py_NewRef(place);
  Shortcut::from(self)->forward = Py_NewRef(forward);
  return self;
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Shortcut, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_descr_get, reinterpret_cast<void*>(get)},
    {Py_tp_members, members},
    {Py_tp_doc, const_cast<char*>("Leads from a call of a module to its LatestCall.")},
    {0, nullptr},
};

}  // namespace

PyType_Spec shortcut_spec = {"tvmify._C.Shortcut", sizeof(Shortcut), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                             slots};

}  // namespace tvmify::python
