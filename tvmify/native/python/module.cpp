// tvmify._C: the Python bindings that every call goes through.

#include "bindings.h"
#include "shape_guard.h"

namespace tvmify::python {
namespace {

PyMethodDef functions[] = {
    {"flatten", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(flatten)), METH_FASTCALL,
     "flatten(args, kwargs) -> (leaves, key)\n\n"
     "The leaves of a call in the order of torch.utils._pytree, and bytes that differ for calls\n"
     "that need different programs; None where only slower code can tell. Then leaves still\n"
     "holds whole what is neither tuple, list nor dict."},
    {"with_method_renamed", with_method_renamed, METH_VARARGS,
     "with_method_renamed(module, old_name, new_name) -> module\n\n"
     "A copy of a ScriptModule, as TorchScript's own object, of a type of its own in which a "
     "method\n"
     "has another name, in the place of one that had it before. Its tensors share the memory of "
     "the\n"
     "module's and require no gradients."},
    {"jit_graphs", jit_graphs, METH_O,
     "jit_graphs(make_calls)\n\n"
     "Let graphs of TorchScript's executor run by what make_calls(graph) returns; None for no\n"
     "longer."},
    {"module_of_graph", module_of_graph, METH_VARARGS,
     "module_of_graph(module, graph) -> module\n\n"
     "A copy of TorchScript's own object whose forward is the graph. Its tensors share memory."},
    {"take_failure", take_failure, METH_NOARGS,
     "take_failure() -> text\n\n"
     "The message of the error that compiled code raised in the latest call of this thread; empty\n"
     "if it raised none, or if the message was taken already."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_C",
                          "The path of every call, in C++.",
                          -1,
                          functions,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace
}  // namespace tvmify::python

PyMODINIT_FUNC PyInit__C() {
  using namespace tvmify::python;
  Owned module(PyModule_Create(&definition));
  if (module == nullptr) return nullptr;
  for (PyType_Spec* spec : {&guard_spec, &call_spec, &latest_call_spec, &lent_spec, &shortcut_spec,
                            &shape_guard_spec}) {
    const Owned type(PyType_FromSpec(spec));
    auto* const added = reinterpret_cast<PyTypeObject*>(type.get());
    if (added == nullptr || PyModule_AddType(module.get(), added) < 0) return nullptr;
  }
  return module.release();
}
