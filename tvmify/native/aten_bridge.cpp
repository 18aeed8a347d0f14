// tvmify.aten: the function that compiled programs call for operators that PyTorch computes.
//
// Its first argument is a TorchScript graph as text, a few nodes without control flow, written by
// tvmify/compiler/aten/bridge.py; the tensors that follow are the graph's inputs. If sizes vary, a
// shape comes last: the graph's further inputs, which are integers, and then the sizes of results
// that their types leave open. Nothing here needs Python, so saved files and C++ programs compute
// the same.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/ir/irparser.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fork_safe_mutex.h"
#include "tensor_bridge.h"
#include "thread_pool.h"

namespace tvmify {
namespace {

namespace ffi = tvm::ffi;
using torch::jit::Node;
using torch::jit::Stack;
using torch::jit::Value;

// The shape and dtype that a graph declares for a result, which kernels that read it rely on.
struct Expected {
  std::vector<std::optional<int64_t>> sizes;  // unknown where they vary
  at::ScalarType dtype;
};

Expected expected(const Value& value) {
  const auto type = value.type()->cast<at::TensorType>();
  const auto sizes = type ? type->sizes().sizes() : std::nullopt;
  TORCH_CHECK(sizes && type->scalarType(), "a result of the graph has no known shape or dtype");
  return {*sizes, *type->scalarType()};
}

// Takes the first number from the rest of the sizes that were passed.
int64_t take(at::IntArrayRef& sizes) {
  TORCH_CHECK(!sizes.empty(), "the graph takes more sizes than were passed");
  const int64_t size = sizes.front();
  sizes = sizes.slice(1);
  return size;
}

void construct_list(Stack& stack, const at::TypePtr& element, size_t size) {
  c10::impl::GenericList list(element);
  for (const at::IValue& item : torch::jit::last(stack, size)) list.push_back(item);
  torch::jit::drop(stack, size);
  stack.emplace_back(std::move(list));
}

// A graph whose operators have been resolved. Thread-safe.
class Bridged {
 public:
  explicit Bridged(const std::string& text) {
    torch::jit::Graph graph;
    torch::jit::parseIR(text, &graph);
    std::unordered_map<const Value*, size_t> places;
    for (const Value* input : graph.inputs()) {
      const bool is_size = input->type()->kind() == c10::TypeKind::IntType;
      TORCH_CHECK(is_size || sizes_ == 0, "the graph takes a tensor after a size");
      ++(is_size ? sizes_ : inputs_);
      places.emplace(input, places.size());
    }
    initial_.resize(inputs_ + sizes_);
    for (Node* node : graph.nodes()) {
      if (node->kind() != at::prim::Constant) {
        Step& step = steps_.emplace_back(Step{operation(node), {}, {}});
        for (const Value* input : node->inputs()) step.inputs.push_back(places.at(input));
        for (size_t i = 0; i < node->outputs().size(); ++i) {
          step.outputs.push_back(initial_.size() + i);
        }
      }
      for (const Value* output : node->outputs()) {
        places.emplace(output, initial_.size());
        const bool known = node->kind() == at::prim::Constant;
        initial_.push_back(known ? torch::jit::toIValue(output).value() : at::IValue());
      }
    }
    for (const Value* output : graph.outputs()) {
      outputs_.push_back(places.at(output));
      expected_.push_back(expected(*output));
    }
  }

  std::vector<at::Tensor> run(at::ArrayRef<at::Tensor> inputs, at::IntArrayRef sizes) const {
    TORCH_CHECK(inputs.size() == inputs_, "the graph takes ", inputs_, " tensors, not ",
                inputs.size());
    std::vector<at::IValue> values = initial_;
    std::copy(inputs.begin(), inputs.end(), values.begin());
    for (size_t i = 0; i < sizes_; ++i) values[inputs_ + i] = take(sizes);
    Stack stack;
    for (const Step& step : steps_) {
      for (size_t input : step.inputs) stack.push_back(values[input]);
      step.run(stack);
      TORCH_CHECK(stack.size() == step.outputs.size(), "an operator returned ", stack.size(),
                  " values, not ", step.outputs.size());
      for (size_t i = 0; i < stack.size(); ++i) values[step.outputs[i]] = std::move(stack[i]);
      stack.clear();
    }
    std::vector<at::Tensor> results;
    for (size_t i = 0; i < outputs_.size(); ++i) {
      std::vector<int64_t> wanted;
      for (const auto& size : expected_[i].sizes) wanted.push_back(size ? *size : take(sizes));
      const at::Tensor& result = values[outputs_[i]].toTensor();
      results.push_back(owned(result, wanted, expected_[i].dtype, inputs));
    }
    TORCH_CHECK(sizes.empty(), "the graph takes fewer sizes than were passed");
    return results;
  }

 private:
  struct Step {
    std::function<void(Stack&)> run;
    std::vector<size_t> inputs, outputs;
  };

  static std::function<void(Stack&)> operation(Node* node) {
    if (node->kind() == at::prim::ListConstruct) {
      const auto element = node->output()->type()->expectRef<at::ListType>().getElementType();
      return [element, size = node->inputs().size()](Stack& stack) {
        construct_list(stack, element, size);
      };
    }
    if (node->kind() == at::prim::ListUnpack) {
      return [](Stack& stack) {
        const at::IValue list = torch::jit::pop(stack);
        for (const at::Tensor& item : list.toTensorVector()) stack.emplace_back(item);
      };
    }
    return node->getOperation();
  }

  // Returns a result that the program may keep: in separate memory, since the inputs' memory is
  // reused; and checked for the compiled shape, since kernels do not check.
  static at::Tensor owned(const at::Tensor& result, at::IntArrayRef sizes, at::ScalarType dtype,
                          at::ArrayRef<at::Tensor> inputs) {
    TORCH_CHECK(result.sizes() == sizes && result.scalar_type() == dtype, "an operator returned ",
                result.scalar_type(), result.sizes(), " where the program was compiled for ", dtype,
                sizes);
    for (const at::Tensor& input : inputs) {
      if (result.is_alias_of(input)) return result.clone(at::MemoryFormat::Contiguous);
    }
    return readable(result, inputs.empty() ? result.device() : inputs.front().device());
  }

  size_t inputs_ = 0;                // tensors
  size_t sizes_ = 0;                 // integers, after the tensors
  std::vector<at::IValue> initial_;  // including constants
  std::vector<Step> steps_;
  std::vector<size_t> outputs_;
  std::vector<Expected> expected_;
};

// Returns the graph for a text. Graphs are never freed: texts are short, and programs share them.
std::shared_ptr<const Bridged> bridged(const std::string& text) {
  static std::unordered_map<std::string, std::shared_ptr<const Bridged>> graphs;
  {
    const std::lock_guard<std::mutex> lock(moment());
    const auto found = graphs.find(text);
    if (found != graphs.end()) return found->second;
  }
  auto made = std::make_shared<const Bridged>(text);
  const std::lock_guard<std::mutex> lock(moment());
  return graphs.try_emplace(text, std::move(made)).first->second;
}

void call(ffi::PackedArgs arguments, ffi::Any* result) {
  // Skip autocast and autograd: the program already contains the casts.
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  const WithoutThreadsAfterFork without_threads;
  try {
    std::vector<at::Tensor> inputs;
    ffi::Shape sizes;
    for (int i = 1; i < arguments.size(); ++i) {
      if (i + 1 == arguments.size() && arguments[i].as<ffi::Shape>()) {
        sizes = arguments[i].cast<ffi::Shape>();
      } else {
        inputs.push_back(from_tvm(arguments[i].cast<ffi::Tensor>()));
      }
    }
    const auto graph = bridged(arguments[0].cast<std::string>());
    auto results = graph->run(inputs, at::IntArrayRef(sizes.data(), sizes.size()));
    if (results.size() == 1) {
      *result = to_tvm(std::move(results[0]));
      return;
    }
    ffi::Array<ffi::Tensor> tensors;
    for (at::Tensor& tensor : results) tensors.push_back(to_tvm(std::move(tensor)));
    *result = tensors;
  } catch (const c10::Error& error) {
    throw_through_tvm(error);  // PyTorch's exceptions cannot cross TVM
  }
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def_packed("tvmify.aten", call); }

}  // namespace
}  // namespace tvmify
