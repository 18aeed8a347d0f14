// The object that executes one compiled program: in Python, in TorchScript and in a C++ program.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <memory>
#include <string>
#include <vector>

#include "library.h"

namespace tvmify {

// Registered with TorchScript as `torch.classes.tvmify.CompiledModule`. All methods may be called
// from several threads at once, and none holds a lock while kernels run.
class __attribute__((visibility("default"))) CompiledModule : public torch::CustomClassHolder {
 public:
  // `metadata` is text that the object only carries; `library` the bytes of the shared library.
  CompiledModule(std::string metadata, const at::Tensor& library);

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

  CompiledModule(std::string metadata, std::shared_ptr<const Library> library);

  const std::string metadata_;
  const std::shared_ptr<const Library> library_;
  std::shared_ptr<const PackedWeights> weights_;  // read and replaced atomically
};

}  // namespace tvmify
