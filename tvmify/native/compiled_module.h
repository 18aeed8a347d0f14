// The object that executes one compiled program, from Python, TorchScript or C++.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "fork_safe_pointer.h"
#include "library.h"

namespace tvmify {

// Registered with TorchScript as `torch.classes.tvmify.CompiledModule`. Thread-safe; no method
// holds a lock while kernels run.
class __attribute__((visibility("default"))) CompiledModule : public torch::CustomClassHolder {
 public:
  // Its serialized form: the version of this layout, texts by name, and the library.
  using State = std::tuple<int64_t, c10::Dict<std::string, std::string>, at::Tensor>;

  // `metadata` is opaque text, `library` holds the bytes of the shared library, and `features` what
  // its code needs: the architecture, instruction sets by LLVM's names, and the GPU architecture:
  // {"x86_64", "avx2", "cuda:sm_80", ...}. `complex` has the indices of the outputs whose last axis
  // holds the parts of complex numbers. The library is loaded on first use.
  CompiledModule(std::string metadata, const at::Tensor& library,
                 const std::vector<std::string>& features, std::vector<int64_t> complex);

  // From an archive, possibly of another version.
  explicit CompiledModule(const State& state);
  State state() const;

  // Why the code cannot run in this process: it has another version, or needs instructions or a GPU
  // that this machine lacks. Empty if it can.
  std::string refusal() const;

  // The same for tensors on one device, without checking others.
  std::string refusal_on(c10::Device device) const;

  // Loads the library now instead of on first use. Throws if it is refused or damaged.
  void load() const { library_->get(); }

  // Returns an object without weights that shares the library, for another instance of the module.
  c10::intrusive_ptr<CompiledModule> share() const;

  // Packs the module's weights for the kernels, and returns all packed weights or those flagged in
  // `wanted`. A weight that is used unchanged is returned itself, not copied; the others are placed
  // in huge pages if possible. On a GPU this waits for completion, so that any stream may use them.
  std::vector<at::Tensor> pack(at::ArrayRef<at::Tensor> weights,
                               const std::optional<c10::List<bool>>& wanted = std::nullopt) const;

  // Sets the packed weights for all later calls of `forward`. On a GPU this waits for calls that
  // may still use the old ones.
  void bind(at::ArrayRef<at::Tensor> packed);

  // Runs the program; on a GPU, the one that has the tensors, on PyTorch's current stream. An
  // output that aliases an input shares its storage (or is the input itself, if returned whole);
  // all others own their memory, which nothing writes to again.
  std::vector<at::Tensor> forward(at::ArrayRef<at::Tensor> inputs) const;

  const std::string& metadata() const { return metadata_; }
  at::Tensor library() const { return library_->bytes(); }

 private:
  class PackedWeights;
  static std::shared_ptr<const PackedWeights> no_weights();

  CompiledModule(const CompiledModule& other);

  // The device of a call with these tensors; that of the weights if there are none.
  c10::Device device_of(at::ArrayRef<at::Tensor> tensors, const PackedWeights* weights) const;

  std::string metadata_, features_, runtime_, refusal_;
  std::vector<int64_t> complex_;
  std::string architecture_;  // of the GPU; empty for code that runs on the CPU
  bool is_known_ = true;      // whether this version can read its format
  std::shared_ptr<const LazyLibrary> library_;
  ForkSafePointer<const PackedWeights> weights_;
};

}  // namespace tvmify
