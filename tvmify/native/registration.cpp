// Registers everything that TorchScript, Python and C++ programs use under the name "tvmify".

#include <torch/custom_class.h>
#include <torch/library.h>

#include "arguments.h"
#include "compiled_module.h"
#include "cpu_features.h"
#include "saved_module.h"

// Read by tvmify/runtime/native.py before anything else is used.
extern "C" __attribute__((visibility("default"))) const char* tvmify_built_against() {
  return TVMIFY_BUILT_AGAINST;
}

namespace tvmify {
namespace {

using Compiled = c10::intrusive_ptr<CompiledModule>;
using Saved = c10::intrusive_ptr<SavedModule>;
using Tensors = std::vector<at::Tensor>;
using Texts = std::vector<std::string>;
using Indices = std::vector<int64_t>;

// Returns the text and the tensors of a call's arguments, as in `SavedModule::run`.
std::tuple<std::string, Tensors> describe_arguments(const c10::IValue& arguments) {
  std::tuple<std::string, Tensors> result;
  describe(arguments, TensorText::kDescribed, std::get<0>(result), std::get<1>(result));
  return result;
}

// Returns the text of a call's arguments without sizes.
std::string pattern(const c10::IValue& arguments) {
  std::string text;
  Tensors tensors;
  describe(arguments, TensorText::kPattern, text, tensors);
  return text;
}

TORCH_LIBRARY(tvmify, library) {
  library.class_<CompiledModule>("CompiledModule")
      .def(torch::init<std::string, const at::Tensor&, const Texts&, Indices>())
      .def("pack",
           [](const Compiled& self, const Tensors& weights,
              const std::optional<c10::List<bool>>& wanted) { return self->pack(weights, wanted); },
           "", {torch::arg("weights"), torch::arg("wanted") = torch::arg::none()})
      .def("bind", [](const Compiled& self, const Tensors& packed) { self->bind(packed); })
      .def("forward",
           [](const Compiled& self, const Tensors& inputs) { return self->forward(inputs); })
      .def("share", [](const Compiled& self) { return self->share(); })
      .def("load", [](const Compiled& self) { self->load(); })
      .def("refusal", [](const Compiled& self) { return self->refusal(); })
      .def("metadata", [](const Compiled& self) { return self->metadata(); })
      .def("library", [](const Compiled& self) { return self->library(); })
      .def_pickle([](const Compiled& self) { return self->state(); },
                  [](const CompiledModule::State& state) {
                    return c10::make_intrusive<CompiledModule>(state);
                  });

  library.class_<SavedModule>("SavedModule")
      .def(torch::init<std::string, Texts>())
      .def("add",
           [](const Saved& self, std::string arguments, Indices inputs, Indices weights,
              Texts packings, Indices outputs, int64_t form, Compiled compiled, std::string shapes,
              bool contiguous) {
             self->add({std::move(arguments), std::move(inputs), std::move(weights),
                        std::move(packings), std::move(outputs), form, std::move(compiled),
                        std::move(shapes), contiguous});
           })
      .def("run", [](const Saved& self, const c10::IValue& arguments,
                     const c10::IValue& state) { return self->run(arguments, state); })
      .def("set_strict", [](const Saved& self, bool strict) { self->set_strict(strict); })
      .def("interprets_all", [](const Saved& self) { return self->interprets_all(); })
      .def("hold_weights", [](const Saved& self) { self->hold_weights(); })
      .def("release_weights", [](const Saved& self) { self->release_weights(); })
      .def("explain", [](const Saved& self) { return self->explain(); })
      .def_pickle(
          [](const Saved& self) { return self->state(); },
          [](const SavedModule::State& state) { return c10::make_intrusive<SavedModule>(state); });

  library.def("cpu_features() -> str[]", [] { return cpu_features(); });
  library.def("pattern", [](const c10::IValue& arguments) { return pattern(arguments); });
  library.def("describe",
              [](const c10::IValue& arguments) { return describe_arguments(arguments); });
}

}  // namespace
}  // namespace tvmify
