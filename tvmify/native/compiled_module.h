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
  // `features` the instruction sets that its code uses, by LLVM's names, after the architecture:
  // {"x86_64", "avx2", ...}. Nothing is loaded before it is needed.
  CompiledModule(std::string metadata, const at::Tensor& library,
                 const std::vector<std::string>& features);

  // From an archive, of this version or another.
  explicit CompiledModule(const State& state);
  State state() const;

  // Why the code cannot run in this process: it is of another version, or needs instructions that
  // this CPU does not have. Empty if it can.
  const std::string& refusal() const { return refusal_; }

  // Loads the library now instead of at the first use. Throws if it is refused or damaged.
  void load() const { library_->get(); }

  // The same library without weights: for another instance of the same module.
  c10::intrusive_ptr<CompiledModule> share() const;

  // Lays the weights of the module out for the kernels. A weight that is used as it is comes back
  // itself, not as a copy.
  std::vector<at::Tensor> pack(at::ArrayRef<at::Tensor> weights) const;

  // Makes these the packed weights of all calls of `forward` that begin from now on.
  void bind(at::ArrayRef<at::Tensor> packed);

  // Runs the program. An output that aliases an input shares its storage (or is the input, if the
  // program returns it whole); all others have memory of their own, which nothing writes to again.
  std::vector<at::Tensor> forward(at::ArrayRef<at::Tensor> inputs) const;

  const std::string& metadata() const { return metadata_; }
  at::Tensor library() const { return library_->bytes(); }

 private:
  class PackedWeights;

  CompiledModule(const CompiledModule& other);

  std::string metadata_, features_, runtime_, refusal_;
  bool is_known_ = true;  // the format that it was saved in
  std::shared_ptr<const LazyLibrary> library_;
  std::shared_ptr<const PackedWeights> weights_;  // read and replaced atomically
};

}  // namespace tvmify
