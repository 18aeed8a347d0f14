// with_method_renamed: renames a method of a TorchScript module, to make room for a new forward.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/python/module_python.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <string>

#include "bindings.h"

namespace tvmify::python {

void detach_tensors(const torch::jit::Module& root) {
  for (const torch::jit::Module& module : root.modules()) {
    for (const auto& attribute : module.named_attributes(/*recurse=*/false)) {
      if (!attribute.value.isTensor()) continue;
      module._ivalue()->setAttr(attribute.name, attribute.value.toTensor().detach());
    }
  }
}

namespace {

torch::jit::Module renamed(const torch::jit::Module& module, const std::string& old_name,
                           const std::string& new_name) {
  // A clone has its own types, so other modules of the class keep their methods.
  torch::jit::Module result = module.clone(/*inplace=*/true);
  detach_tensors(result);
  const auto type = result.type();
  const auto unit = result._ivalue()->compilation_unit();
  const torch::jit::Function& old_method = type->getMethod(old_name);
  const auto graph = torch::jit::toGraphFunction(old_method).graph()->copy();
  const c10::FunctionSchema schema = old_method.getSchema().cloneWithName(new_name, "");
  for (const std::string& name : {old_name, new_name}) {
    if (type->findMethod(name) == nullptr) continue;
    type->unsafeRemoveMethod(name);
    unit->unsafeRemoveMethod(c10::QualifiedName(*type->name(), name));
  }
  auto* method = unit->create_function(c10::QualifiedName(*type->name(), new_name), graph);
  method->setSchema(schema);
  type->addMethod(method);
  return result;
}

}  // namespace

PyObject* with_method_renamed(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* module;
  const char *old_name, *new_name;
  if (!PyArg_ParseTuple(args, "Oss:with_method_renamed", &module, &old_name, &new_name)) {
    return nullptr;
  }
  const auto script = torch::jit::as_module(py::reinterpret_borrow<py::object>(module));
  TORCH_CHECK_TYPE(script.has_value(), "expected a ScriptModule, got a ", Py_TYPE(module)->tp_name);
  return py::cast(renamed(*script, old_name, new_name)).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace tvmify::python
