// Passes graphs of PyTorch's TorchScript executor to Python (tvmify/integrations/enable.py): a pass
// replaces a graph by one node, whose operator gets the results from Python.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/passes/pass_manager.h>
#include <torch/csrc/jit/passes/shape_analysis.h>
#include <torch/csrc/jit/python/module_python.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/runtime/jit_exception.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>

#include "bindings.h"

namespace tvmify::python {
namespace {

namespace jit = torch::jit;
using jit::IValue;

std::atomic<bool> is_enabled{false};
PyObject* make_calls = nullptr;  // what `jit_graphs` was given; changes under the GIL

// Set while a thread runs or compiles a graph: the JIT runs nested graphs itself.
thread_local bool is_inside = false;

class Inside {
 public:
  Inside() { is_inside = true; }
  ~Inside() { is_inside = false; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

c10::Symbol kind() {
  static const auto symbol = c10::Symbol::fromQualString("tvmify::jit_graph");
  return symbol;
}

bool is_module(const c10::TypePtr& type) {
  const auto class_type = type->cast<c10::ClassType>();
  return class_type != nullptr && class_type->is_module();
}

bool has_module(const jit::Graph& graph) {
  return !graph.inputs().empty() && is_module(graph.inputs()[0]->type());
}

bool needs_gradients(at::ArrayRef<IValue> values) {
  bool found = false;
  const auto look = [&found](const IValue& value) {
    found = found || (value.isTensor() && value.toTensor().requires_grad());
    return found;
  };
  for (const IValue& value : values) value.visit(look);
  return found;
}

// Bytes that differ if any tensor, its memory, or any number of a module differs.
std::string state_of(const IValue& module) {
  std::string state;
  const auto add = [&state](const void* data, size_t size) {
    state.append(static_cast<const char*>(data), size);
  };
  module.visit([&add](const IValue& value) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      const void* const impl = tensor.unsafeGetTensorImpl();
      add(&impl, sizeof impl);
      if (tensor.defined() && tensor.has_storage()) {
        const void* const memory = tensor.storage().unsafeGetStorageImpl()->data();
        add(&memory, sizeof memory);
      }
    } else if (value.isBool() || value.isInt() || value.isDouble() || value.isString()) {
      const size_t hash = value.isString() ? std::hash<std::string>()(value.toStringRef())
                                           : c10::get_hash(value.isDouble() ? value.toDouble()
                                                           : value.isInt()  ? value.toInt()
                                                                            : value.toBool());
      add(&hash, sizeof hash);
    }
    return false;
  });
  return state;
}

// A graph that runs compiled, in the JIT's own form and in Python's.
class GraphCalls {
 public:
  explicit GraphCalls(std::shared_ptr<jit::Graph> graph)
      : graph_(std::move(graph)), executor_(graph_->copy(), "tvmify_graph") {}

  ~GraphCalls() {
    if (calls_ == nullptr || Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(calls_);
  }

  GraphCalls(const GraphCalls&) = delete;
  GraphCalls& operator=(const GraphCalls&) = delete;

  void run(jit::Stack& stack) {
    const auto arguments = jit::last(stack, graph_->inputs().size());
    const bool is_ours =
        is_enabled && !is_inside && !(at::GradMode::is_enabled() && needs_gradients(arguments));
    if (!is_ours || !run_in_python(stack, arguments)) executor_.run(stack);
  }

 private:
  // Returns false, with the stack unchanged, if the JIT has to run the call.
  bool run_in_python(jit::Stack& stack, at::ArrayRef<IValue> arguments) {
    const bool is_method = has_module(*graph_);
    const std::string state = is_method ? state_of(arguments[0]) : "";
    const py::gil_scoped_acquire gil;
    const Inside inside;
    try {
      if (calls_ == nullptr) calls_ = py::handle(make_calls)(graph_).release().ptr();
      py::object module = is_method ? jit::toPyObject(arguments[0]) : py::none();
      py::tuple rest(arguments.size() - is_method);
      for (size_t i = 0; i < rest.size(); ++i) rest[i] = jit::toPyObject(arguments[i + is_method]);
      const auto address =
          reinterpret_cast<uintptr_t>(is_method ? arguments[0].toObject().get() : nullptr);
      const py::object result =
          py::handle(calls_)(std::move(module), address, py::bytes(state), rest);
      if (result.ptr() == Py_NotImplemented) return false;
      IValue value = jit::toIValue(result, graph_->outputs()[0]->type());
      jit::drop(stack, arguments.size());
      stack.push_back(std::move(value));
      return true;
    } catch (py::error_already_set& error) {
      const py::object of_torchscript = py::module_::import("torch.jit").attr("Error");
      if (error.matches(of_torchscript)) {
        throw jit::JITException(py::str(error.value()).cast<std::string>());
      }
      error.restore();
      python_error raised;
      raised.persist();
      throw raised;
    }
  }

  std::shared_ptr<jit::Graph> graph_;
  jit::GraphExecutor executor_;
  PyObject* calls_ = nullptr;
};

jit::Operation operation_of(const jit::Node* node) {
  auto calls = std::make_shared<GraphCalls>(node->g(jit::attr::Subgraph)->copy());
  return [calls](jit::Stack& stack) { calls->run(stack); };
}

// It may have any effect of the graph that it replaces.
const jit::RegisterOperators registered({
    jit::Operator(kind(), operation_of, c10::AliasAnalysisKind::CONSERVATIVE),
});

// Whether blocks are worth compiling, and contain none of our nodes yet.
bool is_ours(at::ArrayRef<const jit::Block*> blocks, int& operators) {
  for (const jit::Block* block : blocks) {
    for (const jit::Node* node : block->nodes()) {
      if (node->kind().ns() == kind().ns() || node->kind() == jit::prim::DifferentiableGraph) {
        return false;
      }
      for (const jit::Value* input : node->inputs()) {
        const auto type = input->type()->cast<c10::ClassType>();
        if (type != nullptr && type->name() &&
            type->name()->prefix().find("tvmify") != std::string::npos) {
          return false;
        }
      }
      operators += node->kind().is_aten() && node->outputs().size() == 1 &&
                   node->output()->type()->isSubtypeOf(*c10::TensorType::get());
      if (!is_ours(node->blocks(), operators)) return false;
    }
  }
  return true;
}

// Removes the profile of one call. PyTorch's own pass leaves the profiles of branches that were not
// taken.
void remove_profile(jit::Block* block) {
  for (auto node = block->nodes().begin(); node != block->nodes().end(); ++node) {
    for (jit::Block* inner : node->blocks()) remove_profile(inner);
    if (node->kind() != jit::prim::profile && node->kind() != jit::prim::profile_ivalue) continue;
    if (!node->outputs().empty()) node->output()->replaceAllUsesWith(node->input());
    node.destroyCurrent();
  }
}

void replace(std::shared_ptr<jit::Graph>& graph) {
  constexpr int kFewest = 2;
  if (!is_enabled || is_inside || graph->outputs().size() != 1) return;
  // This may be the differentiated part of a function that needs gradients.
  if (at::GradMode::is_enabled() && !has_module(*graph)) return;
  int operators = 0;
  if (!is_ours({graph->block()}, operators) || operators < kFewest) return;

  auto whole = graph->copy();
  remove_profile(whole->block());
  jit::EraseShapeInformation(whole);
  for (size_t i = 0; i < whole->inputs().size(); ++i) {
    const bool is_self = i == 0 && has_module(*whole);
    whole->inputs()[i]->setDebugName(is_self ? "self" : "input_" + std::to_string(i));
  }
  jit::Node* const node = graph->create(kind(), graph->inputs(), 1);
  node->g_(jit::attr::Subgraph, whole);
  node->output()->setType(whole->outputs()[0]->type());
  graph->prependNode(node);
  graph->return_node()->replaceInput(0, node->output());
  for (auto other = graph->nodes().rbegin(); other != graph->nodes().rend(); ++other) {
    if (*other != node) other.destroyCurrent();
  }
}

// Returns the graph as the forward of a module of the given module's type.
jit::Module with_forward(const jit::Module& original, const std::shared_ptr<jit::Graph>& graph) {
  jit::Module module = original.clone(/*inplace=*/true);
  std::unordered_map<const c10::Type*, c10::TypePtr> types;
  const auto before = original.modules();
  auto after = module.modules().begin();
  for (const jit::Module& child : before) types.emplace(child.type().get(), (*after++).type());
  const std::function<c10::TypePtr(c10::TypePtr)> mapped = [&](c10::TypePtr type) -> c10::TypePtr {
    if (type->kind() == c10::TypeKind::ClassType) {
      const auto found = types.find(type.get());
      return found == types.end() ? type : found->second;
    }
    if (type->containedTypes().empty()) return type;
    std::vector<c10::TypePtr> contained;
    for (const auto& inner : type->containedTypes()) contained.push_back(mapped(inner));
    return type->withContained(std::move(contained));
  };
  const auto copy = graph->copy();
  copy->remapTypes(mapped);
  const auto type = module.type();
  const auto unit = module._ivalue()->compilation_unit();
  const c10::QualifiedName name(*type->name(), "forward");
  if (type->findMethod("forward") != nullptr) {
    type->unsafeRemoveMethod("forward");
    unit->unsafeRemoveMethod(name);
  }
  detach_tensors(module);
  type->addMethod(unit->create_function(name, copy));
  return module;
}

}  // namespace

PyObject* jit_graphs(PyObject*, PyObject* handler) {
  HANDLE_TH_ERRORS
  static std::once_flag once;
  std::call_once(once, [] { jit::registerPrePass(replace); });
  if (handler != Py_None) {
    Py_INCREF(handler);
    Py_XDECREF(std::exchange(make_calls, handler));
  }
  is_enabled = handler != Py_None;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* module_of_graph(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *module, *graph;
  if (!PyArg_ParseTuple(args, "OO:module_of_graph", &module, &graph)) return nullptr;
  const auto script = py::cast<jit::Module>(py::handle(module));
  const auto inner = py::cast<std::shared_ptr<jit::Graph>>(py::handle(graph));
  return py::cast(with_forward(script, inner)).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace tvmify::python
