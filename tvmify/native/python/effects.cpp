#include "effects.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

namespace tvmify::python {
namespace {

constexpr const char* kShared =
    "a tensor that forward writes to shares memory with another argument, parameter or buffer";
constexpr const char* kStrided =
    "an argument or buffer is not contiguous, or is a view with a pending conjugation or negation, "
    "and the results or the memory that they share depend on that";
constexpr const char* kInternal = "forward writes to a tensor whose elements overlap in memory";
constexpr const char* kInference = "forward writes to an inference tensor outside inference mode";

// Whether no two elements can share memory: axes nest without overlap.
bool is_spread(const at::Tensor& tensor) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 8> axes;  // stride and size
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    if (tensor.size(axis) > 1) axes.emplace_back(tensor.stride(axis), tensor.size(axis));
  }
  std::sort(axes.begin(), axes.end());
  int64_t reach = 1;
  for (const auto& [stride, size] : axes) {
    if (stride < reach) return false;
    reach += stride * (size - 1);
  }
  return true;
}

const char* unfit_target(const at::Tensor& tensor) {
  if (!has_memory(tensor)) return kNoMemory;
  if (tensor.is_inference() && !c10::InferenceMode::is_enabled()) return kInference;
  return tensor.is_contiguous() || is_spread(tensor) ? nullptr : kInternal;
}

}  // namespace

void Effects::bind(std::vector<at::Tensor> state, const std::vector<at::Tensor>& weights) {
  std::vector<MemoryRange> all, written;
  lasting_obstacle_ = nullptr;
  for (size_t i = 0; i < state.size(); ++i) {
    const MemoryRange range = range_of(state[i]);
    if (is_written(StateTensor{i})) {
      written.push_back(range);
    } else {
      all.push_back(range);
    }
    if (needs_contiguous(StateTensor{i}) && !lies_plainly(state[i])) lasting_obstacle_ = kStrided;
  }
  for (const at::Tensor& weight : weights) all.push_back(range_of(weight));
  // Written ranges come last, each compared with all earlier ones.
  for (const MemoryRange& range : written) {
    const bool is_shared = std::any_of(
        all.begin(), all.end(), [&](const MemoryRange& other) { return overlap(range, other); });
    if (is_shared) lasting_obstacle_ = kShared;
    all.push_back(range);
  }
  bound_ = MemoryRanges(std::move(all));
  written_ = MemoryRanges(std::move(written));
  state_ = std::move(state);
}

bool Effects::is_written(const Writable& target) const {
  return std::any_of(writes_.begin(), writes_.end(),
                     [&](const Write& write) { return write.target == target; });
}

bool Effects::needs_contiguous(const Writable& tensor) const {
  return all_contiguous_ ||
         std::find(contiguous_.begin(), contiguous_.end(), tensor) != contiguous_.end();
}

const char* Effects::find_obstacle(PyObject* leaves) const {
  if (lasting_obstacle_ != nullptr) return lasting_obstacle_;
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(leaves));
  c10::SmallVector<std::pair<MemoryRange, bool>, 8> seen;
  for (size_t i = 0; i < count; ++i) {
    PyObject* leaf = PyTuple_GET_ITEM(leaves, static_cast<Py_ssize_t>(i));
    if (!THPVariable_Check(leaf)) continue;
    const at::Tensor& tensor = THPVariable_Unpack(leaf);
    if (!lies_plainly(tensor) && needs_contiguous(Argument{i})) return kStrided;
    if (!writes()) continue;
    const bool written = is_written(Argument{i});
    const MemoryRange range = range_of(tensor);
    if (written) {
      if (const char* unfit = unfit_target(tensor)) return unfit;
    }
    if ((written ? bound_ : written_).overlaps(range)) return kShared;
    for (const auto& [other, other_written] : seen) {
      if ((written || other_written) && overlap(range, other)) return kShared;
    }
    seen.emplace_back(range, written);
  }
  for (const Write& write : writes_) {
    if (const auto* argument = std::get_if<Argument>(&write.target)) {
      if (argument->leaf >= count) return "the call lacks an argument that forward writes to";
      continue;
    }
    const size_t index = std::get<StateTensor>(write.target).index;
    if (index >= state_.size()) return "the module lacks a tensor that forward writes to";
    if (const char* unfit = unfit_target(state_[index])) return unfit;
  }
  return nullptr;
}

std::vector<std::pair<at::Tensor, Computed>> Effects::targets(PyObject* leaves) const {
  std::vector<std::pair<at::Tensor, Computed>> targets;
  targets.reserve(writes_.size());
  for (const Write& write : writes_) {
    const auto* argument = std::get_if<Argument>(&write.target);
    const at::Tensor& target =
        argument != nullptr
            ? THPVariable_Unpack(PyTuple_GET_ITEM(leaves, static_cast<Py_ssize_t>(argument->leaf)))
            : state_[std::get<StateTensor>(write.target).index];
    targets.emplace_back(target, write.source);
  }
  return targets;
}

}  // namespace tvmify::python
