#include "saved_module.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include "arguments.h"
#include "memory_ranges.h"
#include "tensor_state.h"

namespace tvmify {
namespace {

// Version of SavedModule::State. Increase it when the meaning of a part changes.
constexpr int64_t kFileFormat = 1;

constexpr size_t kMostWarnings = 64;

std::string described(const c10::IValue& value) {
  std::string text;
  std::vector<at::Tensor> tensors;
  describe(value, TensorText::kDescribed, text, tensors);
  return text;
}

// Returns a part of an archive's state, which may be damaged or forged.
template <typename Parts>
auto part(const Parts& parts, const std::string& name, std::optional<size_t> size = {}) {
  TORCH_CHECK(parts.contains(name), "a saved module is damaged: it lacks '", name, "'");
  auto found = parts.at(name);
  TORCH_CHECK(!size || found.size() == *size, "a saved module is damaged: '", name, "' has ",
              found.size(), " parts instead of ", *size);
  return found;
}

const at::Tensor& select(const std::vector<at::Tensor>& tensors, int64_t index) {
  TORCH_CHECK(index >= 0 && static_cast<size_t>(index) < tensors.size(),
              "a saved program refers to tensor ", index, " of ", tensors.size());
  return tensors[static_cast<size_t>(index)];
}

std::vector<at::Tensor> select(const std::vector<at::Tensor>& tensors,
                               const std::vector<int64_t>& indices) {
  std::vector<at::Tensor> selected;
  selected.reserve(indices.size());
  for (const int64_t index : indices) selected.push_back(select(tensors, index));
  return selected;
}

bool any_requires_grad(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

}  // namespace

// The module's state at one moment, and the weights that its programs packed from it. Programs
// usually pack a weight in the same way and then share one copy.
class SavedModule::Weights {
 public:
  Weights(std::vector<at::Tensor> tensors, std::string plain, size_t programs)
      : tensors_(std::move(tensors)),
        plain_(std::move(plain)),
        requires_grad_(any_requires_grad(tensors_)),
        device_(common_device(tensors_)),
        owned_(programs),
        bound_(programs),
        sources_(tensors_) {
    for (const at::Tensor& tensor : tensors_) states_.emplace_back(tensor);
  }

  // Returns a copy of the current values, in memory that nothing else writes to.
  std::shared_ptr<Weights> copy() const {
    auto copied = std::make_shared<Weights>(tensors_, plain_, owned_.size());
    copied->refusal = refusal;
    const at::NoGradGuard no_grad;
    for (at::Tensor& source : copied->sources_) source = source.clone();
    if (device_ && device_->is_cuda()) {  // calls on any stream may read them
      c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeDevice(device_->index());
    }
    return copied;
  }

  // Why no program can use them; empty if all can.
  std::string refusal;

  bool are(const std::vector<at::Tensor>& tensors, const std::string& plain) const {
    if (tensors.size() != states_.size() || plain != plain_) return false;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (states_[i].compare(tensors[i]) != kNothing) return false;
    }
    return true;
  }

  bool requires_grad() const { return requires_grad_; }

  // Nullopt if they are on several.
  std::optional<c10::Device> device() const { return device_; }
  bool are_on(c10::Device device) const { return tensors_.empty() || device_ == device; }

  // Returns the program with these weights bound; `index` is its index.
  const CompiledModule& bound(const Program& program, size_t index) const {
    if (const CompiledModule* compiled = bound_[index].load(std::memory_order_acquire)) {
      return *compiled;
    }
    // Held while packing, so that another thread waits instead of packing again.
    const std::lock_guard<ForkSafeMutex> lock(binding_);
    if (owned_[index] == nullptr) {
      auto compiled = program.compiled->share();
      if (!program.packings.empty()) compiled->bind(packed(program, *compiled));
      bound_[index].store(compiled.get(), std::memory_order_release);
      owned_[index] = std::move(compiled);
    }
    return *owned_[index];
  }

 private:
  std::vector<at::Tensor> packed(const Program& program, const CompiledModule& compiled) const {
    c10::List<bool> wanted;
    std::vector<std::string> missing;
    for (const std::string& key : program.packings) {
      wanted.push_back(packed_.count(key) == 0);
      if (packed_.count(key) == 0) missing.push_back(key);
    }
    if (!missing.empty()) {
      auto fresh = compiled.pack(select(sources_, program.weights), wanted);
      for (size_t i = 0; i < missing.size(); ++i) packed_.emplace(missing[i], std::move(fresh[i]));
    }
    std::vector<at::Tensor> result;
    for (const std::string& key : program.packings) result.push_back(packed_.at(key));
    return result;
  }

  const std::vector<at::Tensor> tensors_;
  const std::string plain_;
  const bool requires_grad_;
  const std::optional<c10::Device> device_;
  std::vector<TensorState> states_;
  mutable ForkSafeMutex binding_;
  mutable std::map<std::string, at::Tensor> packed_;
  mutable std::vector<c10::intrusive_ptr<CompiledModule>> owned_;
  mutable std::vector<std::atomic<const CompiledModule*>> bound_;
  std::vector<at::Tensor> sources_;  // the weights to pack: `tensors_`, or copies of them
};

SavedModule::SavedModule(std::string state, std::vector<std::string> fallbacks)
    : state_(std::move(state)), fallbacks_(std::move(fallbacks)) {}

SavedModule::SavedModule(const State& state) {
  const auto& [format, texts, numbers, compiled] = state;
  // Read in every format, since the module can be interpreted even if the code is unreadable.
  fallbacks_ = part(texts, "fallbacks");
  strict_ = !part(texts, "strict").empty();
  if (format != kFileFormat) {
    refusal_ = c10::str("the file was saved in format ", format,
                        ", and this version of tvmify reads ", kFileFormat);
    return;
  }
  const size_t count = compiled.size();
  state_ = part(texts, "state", 1)[0];
  const auto arguments = part(texts, "arguments", count);
  const auto inputs = part(numbers, "inputs", count), weights = part(numbers, "weights", count);
  const auto outputs = part(numbers, "outputs", count), forms = part(numbers, "forms", count);
  // Files without programs for many shapes, or for contiguous tensors only, lack the part.
  std::vector<std::string> shapes(count);
  if (texts.contains("shapes")) shapes = part(texts, "shapes", count);
  std::vector<std::vector<int64_t>> contiguous(count);
  if (numbers.contains("contiguous")) contiguous = part(numbers, "contiguous", count);
  for (size_t i = 0; i < count; ++i) {
    TORCH_CHECK(forms[i].size() == 1, "a saved module is damaged: program ", i, " has ",
                forms[i].size(), " forms");
    add({arguments[i], inputs[i], weights[i], part(texts, "packings " + std::to_string(i)),
         outputs[i], forms[i][0], compiled[i], shapes[i], !contiguous[i].empty()});
  }
}

SavedModule::State SavedModule::state() const {
  TORCH_CHECK(refusal_.empty(), "this module cannot be saved again: ", refusal_);
  c10::Dict<std::string, std::vector<std::string>> texts;
  c10::Dict<std::string, std::vector<std::vector<int64_t>>> numbers;
  std::vector<c10::intrusive_ptr<CompiledModule>> compiled;
  std::vector<std::string> arguments, shapes;
  std::vector<std::vector<int64_t>> inputs, weights, outputs, forms, contiguous;
  for (const Program& program : programs_) {
    texts.insert("packings " + std::to_string(arguments.size()), program.packings);
    arguments.push_back(program.arguments);
    shapes.push_back(program.shapes);
    inputs.push_back(program.inputs);
    weights.push_back(program.weights);
    outputs.push_back(program.outputs);
    forms.push_back({program.form});
    contiguous.push_back(program.contiguous ? std::vector<int64_t>{1} : std::vector<int64_t>());
    compiled.push_back(program.compiled);
  }
  texts.insert("state", std::vector<std::string>{state_});
  texts.insert("fallbacks", fallbacks_);
  texts.insert("strict", strict_ ? std::vector<std::string>{"strict"} : std::vector<std::string>());
  texts.insert("arguments", arguments);
  // Versions without support for shapes read files without this part only.
  if (any_symbolic_) texts.insert("shapes", shapes);
  const auto marked = [](const std::vector<int64_t>& mark) { return !mark.empty(); };
  if (std::any_of(contiguous.begin(), contiguous.end(), marked)) {
    numbers.insert("contiguous", contiguous);
  }
  numbers.insert("inputs", inputs);
  numbers.insert("weights", weights);
  numbers.insert("outputs", outputs);
  numbers.insert("forms", forms);
  return {kFileFormat, texts, numbers, compiled};
}

void SavedModule::add(Program program) {
  if (!program.shapes.empty()) {
    program.served = std::make_shared<const Shapes>(program.shapes);
    any_symbolic_ = true;
  }
  programs_.push_back(std::move(program));
}

const SavedModule::Program* SavedModule::find(const Call& call, c10::Device device,
                                              std::string& reason) const {
  reason = refusal_.empty() ? "it holds no code for these arguments" : refusal_;
  std::string refusals;
  const bool contiguous = std::all_of(call.tensors.begin(), call.tensors.end(), lies_plainly);
  const auto usable = [&](const Program& program) {
    const std::string refusal = program.contiguous && !contiguous
                                    ? "an argument is not contiguous, or is a view with a pending "
                                      "conjugation or negation, and that decides which numbers "
                                      "are drawn or which memory is shared"
                                    : program.compiled->refusal_on(device);
    if (!refusal.empty()) refusals += (refusals.empty() ? "" : "; ") + refusal;
    return refusal.empty();
  };
  for (const Program& program : programs_) {
    if (program.served == nullptr && program.arguments == call.text && usable(program)) {
      return &program;
    }
  }
  const Program* found = any_symbolic_ ? find_symbolic(call, usable) : nullptr;
  if (found == nullptr && !refusals.empty()) reason = refusals;
  return found;
}

template <typename Usable>
const SavedModule::Program* SavedModule::find_symbolic(const Call& call, Usable usable) const {
  std::string pattern;
  std::vector<at::Tensor> tensors;
  describe(call.arguments, TensorText::kPattern, pattern, tensors);
  c10::SmallVector<const at::Tensor*, 8> leaves;
  for (const at::Tensor& tensor : tensors) leaves.push_back(&tensor);
  const Program* nearest = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Program& program : programs_) {
    if (program.served == nullptr || program.arguments != pattern) continue;
    const auto values = program.served->solve(leaves);
    if (!values || !usable(program)) continue;
    const double distance = program.served->distance(*values);
    if (distance < least) {
      nearest = &program;
      least = distance;
    }
  }
  return nearest;
}

void SavedModule::check_memory(const std::vector<at::Tensor>& tensors) const {
  for (const Program& program : programs_) {
    for (const int64_t index : program.weights) {
      if (index < 0 || static_cast<size_t>(index) >= tensors.size()) continue;
      const at::Tensor& weight = tensors[static_cast<size_t>(index)];
      // PyTorch loads truncated records as tensors without memory.
      TORCH_CHECK(!is_dense(weight) || weight.is_meta() || has_memory(weight),
                  "a weight of a saved module is missing: the file is damaged, or the storage of "
                  "the weight was resized");
    }
  }
}

std::shared_ptr<const SavedModule::Weights> SavedModule::weights_of(const c10::IValue& state) {
  std::string plain;
  std::vector<at::Tensor> tensors;
  describe(state, TensorText::kCollectedOnly, plain, tensors);
  std::shared_ptr<const Weights> weights = weights_.load();
  if (weights != nullptr && !held_ && weights->are(tensors, plain)) return weights;
  const std::lock_guard<ForkSafeMutex> lock(changing_);
  weights = weights_.load();
  if (weights != nullptr && (held_ || weights->are(tensors, plain))) return weights;
  check_memory(tensors);
  auto fresh = std::make_shared<Weights>(std::move(tensors), std::move(plain), programs_.size());
  if (described(state) != state_) {
    fresh->refusal =
        "an attribute, or the shape or dtype of a weight, has changed since the module was saved";
  }
  weights_.exchange(fresh);
  return fresh;
}

void SavedModule::hold_weights() {
  std::weak_ptr<Weights> before;
  {
    const std::lock_guard<ForkSafeMutex> lock(changing_);
    const std::shared_ptr<Weights> current = weights_.load();
    if (current == nullptr) return;  // no call was made yet
    before = current;
    weights_.exchange(current->copy());
    held_ = true;
  }
  // Running calls hold the weights until they end. After a fork, a call of the parent never ends
  // here, hence the limit.
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!before.expired() && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void SavedModule::fall_back(const std::string& arguments, const std::string& reason) {
  const bool interpretable = fallbacks_.empty() || std::find(fallbacks_.begin(), fallbacks_.end(),
                                                             arguments) != fallbacks_.end();
  TORCH_CHECK(interpretable, "this saved module cannot run with ", arguments, ": ", reason,
              ". It could not be scripted, so it serves only the arguments that it was saved for: ",
              c10::Join(" and ", fallbacks_), ". Save it with arguments of these shapes, too.");
  TORCH_CHECK(!strict_, "this saved module does not run compiled with ", arguments, ": ", reason,
              ". Save it for such a call, or load it with strict=False.");
  {
    const std::lock_guard<ForkSafeMutex> lock(changing_);
    if (warned_.size() >= kMostWarnings || !warned_.insert(reason + arguments).second) return;
  }
  TORCH_WARN("a saved module runs in PyTorch instead of compiled code with ", arguments, ": ",
             reason, ".");
}

std::optional<std::tuple<int64_t, std::vector<at::Tensor>>> SavedModule::run(
    const c10::IValue& arguments, const c10::IValue& state) {
  Call call{arguments, {}, {}};
  std::string reason;
  const auto& [ignored, text, tensors] = call;
  describe(arguments, TensorText::kDescribed, call.text, call.tensors);
  const auto device = tensors.empty() ? weights_of(state)->device() : common_device(tensors);
  const Program* program = device ? find(call, *device, reason) : nullptr;
  if (!device) reason = "its tensors are on several devices";
  if (program == nullptr) {
    fall_back(text, reason);
    return std::nullopt;
  }
  const std::shared_ptr<const Weights> weights = weights_of(state);
  if (!weights->refusal.empty()) {
    reason = weights->refusal;
  } else if (!weights->are_on(*device)) {
    reason = c10::str("its weights are not on ", *device, ", where the tensors are");
  } else if (at::GradMode::is_enabled() &&
             (weights->requires_grad() || any_requires_grad(tensors))) {
    reason = "gradients are needed";
  } else if (at::autocast::is_autocast_enabled(device->type())) {
    reason = "autocast is on";
  } else {
    const auto index = static_cast<size_t>(program - programs_.data());
    std::vector<at::Tensor> returned =
        weights->bound(*program, index).forward(select(tensors, program->inputs));
    std::vector<at::Tensor> leaves;
    leaves.reserve(program->outputs.size());
    for (const int64_t output : program->outputs) {
      leaves.push_back(output >= 0 ? select(returned, output) : select(tensors, ~output));
    }
    return std::make_tuple(program->form, std::move(leaves));
  }
  fall_back(text, reason);
  return std::nullopt;
}

std::vector<std::string> SavedModule::explain() const {
  std::vector<std::string> lines;
  if (!refusal_.empty()) lines.push_back("no compiled code can be used: " + refusal_);
  for (const Program& program : programs_) {
    const std::string refusal = program.compiled->refusal();
    lines.push_back(program.arguments +
                    (refusal.empty() ? ": compiled" : ": not used, " + refusal));
  }
  return lines;
}

}  // namespace tvmify
