// tvmify::execute, the operator in the graph of an exported program. Its fake kernel, and its
// fallbacks for when the code cannot run, are in tvmify/runtime/embedded.py.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "embedded_program.h"
#include "fork_safe_mutex.h"

namespace tvmify {
namespace {

using at::Tensor;
using at::TensorList;
using Tensors = std::vector<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The programs of this process, by the storage of their code, which determines their lifetime.
class Programs {
 public:
  std::shared_ptr<const EmbeddedProgram> find(const Tensor& library, c10::string_view description) {
    TORCH_CHECK_TYPE(
        library.has_storage() && library.is_contiguous() && library.scalar_type() == at::kByte,
        "the library of a compiled program is a contiguous uint8 tensor");
    auto storage = library.storage().getWeakStorageImpl();
    const std::lock_guard<ForkSafeMutex> lock(changing_);
    Entry& entry = programs_[library.storage().unsafeGetStorageImpl()];
    // A new storage may have the address of one that was freed.
    if (entry.program == nullptr || !(entry.storage == storage) ||
        entry.program->description() != description) {
      // The library may have been moved to a GPU together with the module's weights.
      entry = {storage,
               std::make_shared<const EmbeddedProgram>(library.cpu(), std::string(description))};
      const auto program = entry.program;
      drop_unused();
      return program;
    }
    return entry.program;
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    std::shared_ptr<const EmbeddedProgram> program;
  };

  void drop_unused() {
    for (auto entry = programs_.begin(); entry != programs_.end();) {
      entry = entry->second.storage.expired() ? programs_.erase(entry) : std::next(entry);
    }
  }

  ForkSafeMutex changing_;
  std::unordered_map<const void*, Entry> programs_;
};

Programs& programs() {
  static auto* const programs = new Programs();  // never destroyed: libraries may already be gone
  return *programs;
}

// Makes results share no memory with arguments or each other, as operators require.
Tensors owned(Tensors results, TensorList weights, TensorList inputs) {
  for (size_t i = 0; i < results.size(); ++i) {
    const auto shares = [&](const Tensor& other) { return other.is_alias_of(results[i]); };
    const TensorList earlier = TensorList(results).slice(0, i);
    if (std::any_of(inputs.begin(), inputs.end(), shares) ||
        std::any_of(weights.begin(), weights.end(), shares) ||
        std::any_of(earlier.begin(), earlier.end(), shares)) {
      results[i] = results[i].clone(at::MemoryFormat::Contiguous);
    } else {
      results[i] = results[i].contiguous();
    }
  }
  return results;
}

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

Tensors execute_eager(const EmbeddedProgram& program, const Tensor& original,
                      const std::string& reason, TensorList weights, TensorList inputs) {
  static const auto found = find_operator<Tensors(const Tensor&, c10::string_view, c10::string_view,
                                                  TensorList, TensorList)>("tvmify::execute_eager");
  TORCH_CHECK(!program.is_strict(), "an exported program does not run compiled: ", reason,
              ". Export it for this call and this machine, or with strict=False.");
  TORCH_CHECK(found.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd),
              "an exported program does not run compiled: ", reason,
              ", and PyTorch can run it instead only where Python has imported tvmify.");
  const std::string news = program.is_news(reason) ? reason : "";
  return found.call(original, program.description(), news, weights, inputs);
}

Tensors execute(const Tensor& library, const Tensor& original, c10::string_view description,
                TensorList weights, TensorList inputs) {
  const std::shared_ptr<const EmbeddedProgram> program = programs().find(library, description);
  std::string reason;
  if (auto results = program->run(weights, inputs, reason)) {
    return owned(*std::move(results), {}, inputs);  // `run` has already copied weights
  }
  return owned(execute_eager(*program, original, reason, weights, inputs), weights, inputs);
}

Tensors execute_below_autograd(const Tensor& library, const Tensor& original,
                               c10::string_view description, TensorList weights,
                               TensorList inputs) {
  static const auto found = find_operator<Tensors(const Tensor&, const Tensor&, c10::string_view,
                                                  TensorList, TensorList)>("tvmify::execute");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return found.call(library, original, description, weights, inputs);
}

// The backward computes gradients by running the program again in PyTorch.
class Differentiable : public torch::autograd::Function<Differentiable> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& library,
                               const Tensor& original, std::string description, TensorList weights,
                               TensorList inputs) {
    variable_list saved{original};
    saved.insert(saved.end(), weights.begin(), weights.end());
    saved.insert(saved.end(), inputs.begin(), inputs.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["weights"] = static_cast<int64_t>(weights.size());
    context->saved_data["description"] = description;
    return execute_below_autograd(library, original, description, weights, inputs);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto found =
        find_operator<Tensors(const Tensor&, c10::string_view, TensorList, TensorList, TensorList,
                              c10::ArrayRef<bool>)>("tvmify::execute_backward");
    constexpr size_t kFirst = 3;  // arguments of `forward` before the weights
    const variable_list saved = context->get_saved_variables();
    const TensorList tensors = TensorList(saved).slice(1);
    const auto weights = static_cast<size_t>(context->saved_data["weights"].toInt());
    c10::SmallVector<bool, 16> wanted;
    constexpr size_t kFirstEdge = 2;  // the text has no edge
    for (size_t i = 0; i < tensors.size(); ++i) {
      wanted.push_back(context->needs_input_grad(kFirstEdge + i));
    }
    const Tensors found_gradients =
        found.call(saved[0], context->saved_data["description"].toStringRef(),
                   tensors.slice(0, weights), tensors.slice(weights), gradients, wanted);
    variable_list results(kFirst + tensors.size());
    size_t next = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (wanted[i]) results[kFirst + i] = found_gradients.at(next++);
    }
    return results;
  }
};

Tensors execute_autograd(const Tensor& library, const Tensor& original,
                         c10::string_view description, TensorList weights, TensorList inputs) {
  const auto requires_grad = [](const Tensor& tensor) { return tensor.requires_grad(); };
  if (at::GradMode::is_enabled() && (std::any_of(weights.begin(), weights.end(), requires_grad) ||
                                     std::any_of(inputs.begin(), inputs.end(), requires_grad))) {
    return Differentiable::apply(library, original, std::string(description), weights, inputs);
  }
  return execute_below_autograd(library, original, description, weights, inputs);
}

TORCH_LIBRARY_FRAGMENT(tvmify, library) {
  library.def(
      "execute(Tensor library, Tensor original, str description, Tensor[] weights, "
      "Tensor[] inputs) -> Tensor[]");
  library.def(
      "execute_eager(Tensor original, str description, str news, Tensor[] weights, "
      "Tensor[] inputs) -> Tensor[]");
  library.def(
      "execute_backward(Tensor original, str description, Tensor[] weights, Tensor[] inputs, "
      "Tensor[] gradients, bool[] wanted) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(tvmify, CompositeExplicitAutograd, library) { library.impl("execute", execute); }

TORCH_LIBRARY_IMPL(tvmify, Autograd, library) { library.impl("execute", execute_autograd); }

}  // namespace
}  // namespace tvmify
