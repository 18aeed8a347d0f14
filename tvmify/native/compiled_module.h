// The object that executes one compiled program: in Python, in TorchScript and in a C++ program.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "library.h"

namespace tvmify {

// Registered with TorchScript as `torch.classes.tvmify.CompiledModule`. All methods may be called
// from several threads at once, and none holds a lock while kernels run.
class __attribute__((visibility("default"))) CompiledModule : public torch::CustomClassHolder {
 public:
  // What an archive holds of it: the version of this layout, texts by name, and the library.
  using State = std::tuple<int64_t, c10::Dict<std::string, std::string>, at::Tensor>;

  // `metadata` is text that the object only carries, `library` the bytes of the shared library, and
  // `features` the instruction sets that its code uses, by LLVM's names, after the architecture,
  // and the architecture of the GPU that it is for: {"x86_64", "avx2", "cuda:sm_80", ...}. Nothing
  // is loaded before it is needed.
  CompiledModule(std::string metadata, const at::Tensor& library,
                 const std::vector<std::string>& features);

  // From an archive, of this version or another.
  explicit CompiledModule(const State& state);
  State state() const;

  // Why the code cannot run in this process: it is of another version, needs instructions that this
  // CPU does not have, or a GPU that is not there. Empty if it can.
  std::string refusal() const;

  // The same for tensors on one device, without a look at others.
  std::string refusal_on(c10::Device device) const;

  // Loads the library now instead of at the first use. Throws if it is refused or damaged.
  void load() const { library_->get(); }

  // The same library without weights: for another instance of the same module.
  c10::intrusive_ptr<CompiledModule> share() const;

  // Lays the weights of the module out for the kernels, and returns all of them or those that are
  // wanted, with a flag for each. A weight that is used as it is comes back itself, not as a copy;
  // the others lie in huge pages, where Linux has them. On a GPU it waits until that is done, so
  // that any stream may use them.
  std::vector<at::Tensor> pack(at::ArrayRef<at::Tensor> weights,
                               const std::optional<c10::List<bool>>& wanted = std::nullopt) const;

  // Makes these the packed weights of all calls of `forward` that begin from now on. On a GPU it
  // waits for calls that may still use those of before.
  void bind(at::ArrayRef<at::Tensor> packed);

  // Runs the program; on a GPU, that of its tensors, on PyTorch's current stream. An output that
  // aliases an input shares its storage (or is the input, if the program returns it whole); all
  // others have memory of their own, which nothing writes to again.
  std::vector<at::Tensor> forward(at::ArrayRef<at::Tensor> inputs) const;

  const std::string& metadata() const { return metadata_; }
  at::Tensor library() const { return library_->bytes(); }

 private:
  class PackedWeights;
  static std::shared_ptr<const PackedWeights> no_weights();

  CompiledModule(const CompiledModule& other);

  // The device of a call with these tensors; of their weights where there are none.
  c10::Device device_of(at::ArrayRef<at::Tensor> tensors, const PackedWeights* weights) const;

  std::string metadata_, features_, runtime_, refusal_;
  std::string architecture_;  // of the GPU; empty for code that runs on the CPU
  bool is_known_ = true;      // the format that it was saved in
  std::shared_ptr<const LazyLibrary> library_;
  std::shared_ptr<const PackedWeights> weights_;  // read and replaced atomically
};

}  // namespace tvmify
