// What TorchScript, Python and C++ programs find under the name "tvmify".

#include <torch/custom_class.h>
#include <torch/library.h>

#include "compiled_module.h"
#include "cpu_features.h"

// Read by tvmify/runtime/native.py before anything else is used.
extern "C" __attribute__((visibility("default"))) const char* tvmify_built_against() {
  return TVMIFY_BUILT_AGAINST;
}

namespace tvmify {
namespace {

using Self = c10::intrusive_ptr<CompiledModule>;
using Tensors = std::vector<at::Tensor>;

TORCH_LIBRARY(tvmify, library) {
  library.class_<CompiledModule>("CompiledModule")
      .def(torch::init<std::string, const at::Tensor&>())
      .def("pack", [](const Self& self, const Tensors& weights) { return self->pack(weights); })
      .def("bind", [](const Self& self, const Tensors& packed) { self->bind(packed); })
      .def("forward", [](const Self& self, const Tensors& inputs) { return self->forward(inputs); })
      .def("share", [](const Self& self) { return self->share(); })
      .def("metadata", [](const Self& self) { return self->metadata(); })
      .def("library", [](const Self& self) { return self->library(); });
  library.def("cpu_features() -> str[]", [] { return cpu_features(); });
}

}  // namespace
}  // namespace tvmify
