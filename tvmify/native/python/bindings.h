// The parts of tvmify._C. Code that runs on every call uses the CPython API directly.
#pragma once

#include <torch/csrc/python_headers.h>

#include <memory>

namespace torch::jit {
struct Module;
}

namespace tvmify::python {

struct Release {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
// An owned reference, released at the end of its scope.
using Owned = std::unique_ptr<PyObject, Release>;

// flatten(args, kwargs), see flatten.cpp.
PyObject* flatten(PyObject* module, PyObject* const* arguments, Py_ssize_t count);

// The names of keyword arguments, a tuple of strings, in the order in which they are in a key.
// Calls may have the first `free` of them in any order; the order of the others matters, since a
// ``**kwargs`` takes them.
struct Keywords {
  PyObject* names;  // borrowed
  Py_ssize_t free;
};

// Returns a new tuple of the leaves of a call if `flatten` gives it this key when its keyword
// arguments are in this order; otherwise null. Throws python_error.
PyObject* leaves_of_same_call(PyObject* args, PyObject* kwargs, PyObject* key,
                              const Keywords& keywords);

bool is_guard(PyObject* object);
// Whether the module that a Guard watches has changed.
bool has_changed(PyObject* guard);

// with_method_renamed(module, old_name, new_name), see renaming.cpp.
PyObject* with_method_renamed(PyObject* module, PyObject* args);

// Replaces all tensors by detached ones that share their memory.
void detach_tensors(const torch::jit::Module& root);

// jit_graphs(make_calls) and module_of_graph(module, graph), see jit_graphs.cpp.
PyObject* jit_graphs(PyObject* module, PyObject* handler);
PyObject* module_of_graph(PyObject* module, PyObject* args);

// take_failure(), see call.cpp.
PyObject* take_failure(PyObject* module, PyObject* unused);

// The classes of the module.
extern PyType_Spec guard_spec, call_spec, latest_call_spec, lent_spec, shortcut_spec;

}  // namespace tvmify::python
