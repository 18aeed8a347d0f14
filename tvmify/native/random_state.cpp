// Operators that read and set the state of the CPU's random generator, for compiled code that draws
// the same numbers twice: a training step that computes a part of its forward again.

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <mutex>
#include <optional>

namespace tvmify {
namespace {

// PyTorch asks for a result on the device "meta" to learn its shape, as of all that makes a tensor.
at::Tensor rng_state(std::optional<at::Device> device) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const at::Tensor state = generator.get_state();
  return device ? state.to(*device) : state;
}

void set_rng_state(const at::Tensor& state) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tvmify, library) {
  library.def("rng_state(*, Device? device=None) -> Tensor", {at::Tag::nondeterministic_seeded});
  library.def("set_rng_state(Tensor state) -> ()");
}

TORCH_LIBRARY_IMPL(tvmify, CompositeExplicitAutograd, library) {
  library.impl("rng_state", rng_state);
  library.impl("set_rng_state", set_rng_state);
}

}  // namespace tvmify
