#include "embedded_program.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "arguments.h"
#include "tensor_state.h"

namespace tvmify {
namespace {

// Version of the description. Increase it when the meaning of a line changes.
constexpr const char* kProgramFormat = "1";

// A limit, since every new kind of arguments gives a new reason.
constexpr size_t kMostReasons = 64;

using Facts = std::map<std::string, std::string>;

Facts parse(const std::string& description) {
  Facts facts;
  std::istringstream lines(description);
  for (std::string line; std::getline(lines, line);) {
    const size_t space = std::min(line.find(' '), line.size());
    facts[line.substr(0, space)] = line.substr(std::min(space + 1, line.size()));
  }
  return facts;
}

std::vector<int64_t> parse_indices(const std::string& text) {
  std::vector<int64_t> indices;
  std::istringstream numbers(text);
  for (int64_t index; numbers >> index;) indices.push_back(index);
  return indices;
}

// Returns dtypes and shapes, as in "float32[1, 3, 224, 224] int64[]".
std::string kinds_of(at::TensorList tensors) {
  std::string text;
  std::vector<at::Tensor> ignored;
  for (const at::Tensor& tensor : tensors) {
    if (!text.empty()) text += ' ';
    describe(tensor, TensorText::kDescribed, text, ignored);
  }
  return text;
}

std::vector<at::Tensor> select(at::TensorList tensors, const std::vector<int64_t>& indices) {
  std::vector<at::Tensor> selected;
  selected.reserve(indices.size());
  for (const int64_t index : indices) {
    TORCH_CHECK_INDEX(index >= 0 && static_cast<size_t>(index) < tensors.size(),
                      "the compiled program reads tensor ", index, " of ", tensors.size());
    selected.push_back(tensors[static_cast<size_t>(index)]);
  }
  return selected;
}

}  // namespace

class EmbeddedProgram::Bound {
 public:
  Bound(c10::intrusive_ptr<CompiledModule> code, at::TensorList weights) : code_(std::move(code)) {
    for (const at::Tensor& weight : weights) {
      states_.emplace_back(weight);
      storages_.push_back(weight.storage().getWeakStorageImpl());
    }
  }

  const CompiledModule& code() const { return *code_; }

  bool is_of(at::TensorList weights) const {
    if (weights.size() != states_.size()) return false;
    for (size_t i = 0; i < states_.size(); ++i) {
      if (states_[i].compare(weights[i]) != kNothing) return false;
    }
    return true;
  }

  // Whether these weights are obsolete, given a call with others: the others are the same memory
  // with new values, or one of these has been freed.
  bool is_stale(at::TensorList others) const {
    bool is_same_memory = true;
    for (size_t i = 0; i < storages_.size(); ++i) {
      if (storages_[i].expired()) return true;
      is_same_memory &= storages_[i] == others[i].storage().getWeakStorageImpl();
    }
    return is_same_memory;
  }

 private:
  const c10::intrusive_ptr<CompiledModule> code_;
  std::vector<TensorState> states_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};

EmbeddedProgram::EmbeddedProgram(const at::Tensor& library, std::string description)
    : description_(std::move(description)), bounds_(std::make_shared<const Bounds>()) {
  Facts facts = parse(description_);
  is_strict_ = facts.count("strict") != 0;
  strides_matter_ = facts.count("strides") != 0;
  if (facts["tvmify"] != kProgramFormat) {
    refusal_ = c10::str("it was exported in format ", facts["tvmify"],
                        ", and this version of tvmify reads ", kProgramFormat);
    return;
  }
  inputs_ = facts["inputs"];
  weights_ = facts["weights"];
  reads_ = parse_indices(facts["reads"]);
  packs_ = parse_indices(facts["packs"]);
  c10::Dict<std::string, std::string> texts;
  for (const char* name : {"features", "runtime", "sha1", "complex"}) {
    texts.insert(name, facts[name]);
  }
  code_ = c10::make_intrusive<CompiledModule>(
      CompiledModule::State(std::atoll(facts["code"].c_str()), texts, library));
  refusal_ = code_->refusal();
  if (!refusal_.empty()) code_.reset();
}

std::shared_ptr<const EmbeddedProgram::Bound> EmbeddedProgram::find(const Bounds& bounds,
                                                                    at::TensorList weights) const {
  for (const auto& bound : bounds) {
    if (bound->is_of(weights)) return bound;
  }
  return nullptr;
}

std::shared_ptr<const EmbeddedProgram::Bound> EmbeddedProgram::bind(at::TensorList weights) const {
  if (auto bound = find(*bounds_.load(), weights)) return bound;
  // Held while packing, so that another thread waits instead of packing again.
  const std::lock_guard<ForkSafeMutex> lock(binding_);
  const std::shared_ptr<const Bounds> present = bounds_.load();
  if (auto bound = find(*present, weights)) return bound;
  if (kinds_of(weights) != weights_) return nullptr;
  if (!std::all_of(weights.begin(), weights.end(), has_memory)) return nullptr;
  auto code = code_->share();
  auto fresh = std::make_shared<const Bound>(code, weights);  // before reading weights
  if (!packs_.empty()) code->bind(code->pack(select(weights, packs_)));
  auto bounds = std::make_shared<Bounds>(Bounds{fresh});
  for (const auto& bound : *present) {
    if (bounds->size() < kMostBound && !bound->is_stale(weights)) bounds->push_back(bound);
  }
  bounds_.exchange(std::move(bounds));
  return fresh;
}

bool EmbeddedProgram::is_news(const std::string& reason) const {
  const std::lock_guard<ForkSafeMutex> lock(binding_);
  return reasons_.size() < kMostReasons && reasons_.insert(reason).second;
}

std::optional<std::vector<at::Tensor>> EmbeddedProgram::run(at::TensorList weights,
                                                            at::TensorList inputs,
                                                            std::string& reason) const {
  if (!refusal_.empty()) {
    reason = refusal_;
    return std::nullopt;
  }
  if (const std::string kinds = kinds_of(inputs); kinds != inputs_) {
    reason = c10::str("it is called with ", kinds, " and was exported for ", inputs_);
    return std::nullopt;
  }
  if (strides_matter_ && !std::all_of(inputs.begin(), inputs.end(), lies_plainly)) {
    reason = "an input is not contiguous, and strides decide what is computed or drawn";
    return std::nullopt;
  }
  const auto device = common_device(inputs.empty() ? weights : inputs);
  const bool agrees = inputs.empty() || weights.empty() || common_device(weights) == device;
  reason = device && agrees ? code_->refusal_on(*device) : "its tensors are on several devices";
  if (!reason.empty()) return std::nullopt;
  const std::shared_ptr<const Bound> bound = bind(weights);
  if (bound == nullptr) {
    reason = "a weight has another dtype or shape than when it was exported, or no memory";
    return std::nullopt;
  }
  const std::vector<at::Tensor> read = select(inputs, reads_);
  if (!std::all_of(read.begin(), read.end(), has_memory)) {
    reason = "an input has no storage, or less than its shape needs";
    return std::nullopt;
  }
  return bound->code().forward(read);
}

}  // namespace tvmify
