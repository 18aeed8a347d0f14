// The compiled part of a saved module, which selects the program for each call.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "compiled_module.h"
#include "fork_safe_mutex.h"
#include "fork_safe_pointer.h"
#include "shapes.h"

namespace tvmify {

// Registered with TorchScript as `torch.classes.tvmify.SavedModule`: the attribute `_tvmify` of the
// module that `tvmify.save` writes, whose forward first calls `run`. All methods except `add` are
// thread-safe, and none holds a lock while kernels run.
class __attribute__((visibility("default"))) SavedModule : public torch::CustomClassHolder {
 public:
  // One program for one signature and one target.
  struct Program {
    std::string arguments;              // as `describe` writes them; a pattern if there are shapes
    std::vector<int64_t> inputs;        // tensors of the arguments that it reads
    std::vector<int64_t> weights;       // tensors of the module's state that it packs
    std::vector<std::string> packings;  // equal texts for equal packed weights
    std::vector<int64_t> outputs;       // i: its i-th tensor; ~i: the i-th tensor of the arguments
    int64_t form;                       // number of the result's structure
    c10::intrusive_ptr<CompiledModule> compiled;
    std::string shapes;  // JSON of the shapes that it serves; empty if it serves `arguments` alone
    bool contiguous;     // whether it serves contiguous tensors only
    std::shared_ptr<const Shapes> served = nullptr;  // the same, as `add` reads it
  };

  // Its serialized form: the version of this layout, lists of texts and numbers by name, and the
  // programs.
  using State = std::tuple<int64_t, c10::Dict<std::string, std::vector<std::string>>,
                           c10::Dict<std::string, std::vector<std::vector<int64_t>>>,
                           std::vector<c10::intrusive_ptr<CompiledModule>>>;

  // `state` describes the state that forward passes to `run`: the programs are only valid for it,
  // except that elements of tensors may change. `fallbacks` describes the arguments with which the
  // module may be interpreted instead; if empty, any arguments.
  SavedModule(std::string state, std::vector<std::string> fallbacks);

  explicit SavedModule(const State& state);
  State state() const;

  // If several programs have the same arguments, the first that can run on the tensors' device is
  // used. Those with shapes come after those for one signature, and the one that was tuned for the
  // nearest sizes first. Throws c10::ValueError if its shapes cannot be read.
  void add(Program program);

  // Runs the program for these arguments. Returns its form and the leaves of the result. If no
  // program serves them, returns nullopt and warns once per reason, or throws if `strict`.
  //
  // `state` holds the weights and everything else that forward reads from its module. Weights that
  // changed are packed again.
  std::optional<std::tuple<int64_t, std::vector<at::Tensor>>> run(const c10::IValue& arguments,
                                                                  const c10::IValue& state);

  void set_strict(bool strict) { strict_ = strict; }

  // Whether the module may be interpreted for all arguments.
  bool interprets_all() const { return fallbacks_.empty(); }

  // From `hold_weights` to `release_weights`, calls use copies of the weights, so that the weights
  // can be overwritten one by one and no call sees a mix of old and new. Returns when no call reads
  // the weights themselves.
  void hold_weights();
  void release_weights() { held_ = false; }

  // A line for each program: its arguments, and whether it can run here.
  std::vector<std::string> explain() const;

 private:
  class Weights;

  // A call: its arguments, their text, and the tensors among them.
  struct Call {
    const c10::IValue& arguments;
    std::string text;
    std::vector<at::Tensor> tensors;
  };

  const Program* find(const Call& call, c10::Device device, std::string& reason) const;
  // The program with shapes, of those that `usable` accepts.
  template <typename Usable>
  const Program* find_symbolic(const Call& call, Usable usable) const;
  // Throws if a weight that programs read has no memory.
  void check_memory(const std::vector<at::Tensor>& tensors) const;
  std::shared_ptr<const Weights> weights_of(const c10::IValue& state);
  void fall_back(const std::string& arguments, const std::string& reason);

  std::string state_;  // including descriptions of its tensors
  std::vector<std::string> fallbacks_;
  std::vector<Program> programs_;
  bool any_symbolic_ = false;
  std::string refusal_;  // why no program of the archive can be read
  std::atomic<bool> strict_{false};
  ForkSafePointer<Weights> weights_;
  std::atomic<bool> held_{false};  // calls use `weights_`, whatever their state
  ForkSafeMutex changing_;         // held while `weights_` is replaced, and for `warned_`
  std::set<std::string> warned_;
};

}  // namespace tvmify
