#include "compiled_module.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/StringUtil.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <sstream>
#include <utility>

#include "cpu_features.h"
#include "cuda.h"
#include "huge_pages.h"
#include "memory_ranges.h"
#include "tensor_bridge.h"

namespace tvmify {
namespace {

namespace ffi = tvm::ffi;

template <typename Body>
auto translate_errors(const Body& body) {
  try {
    return body();
  } catch (const ffi::Error& error) {
    rethrow_from_tvm(error);
    // An index out of range: raise the same type as eager, so that callers can catch it.
    TORCH_CHECK_INDEX(error.kind() != "IndexError", error.message());
    TORCH_CHECK(false, "the compiled program failed with TVM's ", error.kind(), ": ",
                error.message());
  }
}

using TvmTensors = c10::SmallVector<ffi::Tensor, 8>;

// The arguments of one call of a TVM function. Does not own the tensors.
class Arguments {
 public:
  explicit Arguments(size_t size) { views_.reserve(size); }
  void add(const ffi::Tensor& tensor) { views_.emplace_back(tensor); }

  // Calls the function, and returns its result, a tensor or an array, as a list of tensors.
  TvmTensors call(const ffi::Function& function) const {
    ffi::Any result;
    function.CallPacked(views_.data(), static_cast<int32_t>(views_.size()), &result);
    if (auto tensor = result.try_cast<ffi::Tensor>()) return {*std::move(tensor)};
    TvmTensors tensors;
    for (const ffi::Any& item : result.cast<ffi::Array<ffi::Any>>()) {
      tensors.push_back(item.cast<ffi::Tensor>());
    }
    return tensors;
  }

 private:
  std::vector<ffi::AnyView> views_;
};

// Returns the tensor of which an output is a view, or null.
const at::Tensor* owner_of(const DLTensor& output, at::ArrayRef<at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (lies_inside(output, tensor)) return &tensor;
  }
  return nullptr;
}

at::Tensor shown_by(const DLTensor& output, const at::Tensor& owner) {
  return is_same_view(output, owner) ? owner : view_of(owner, output);
}

// Versions of CompiledModule::State: with complex outputs, and without them, which older versions
// read as well. Increase both when the meaning of a part changes.
constexpr int64_t kModuleFormat = 2, kWithoutComplex = 1;

// The packages that kernels link to, as in "apache-tvm==0.27.0 apache-tvm-ffi==0.1.14".
constexpr const char* kRuntime = TVMIFY_RUNTIME;

std::string missing_features(const std::string& needed) {
  static const std::vector<std::string> present = [] {
    std::vector<std::string> names = cpu_features();
    names.emplace_back(kArchitecture);
    return names;
  }();
  std::string missing;
  std::istringstream names(needed);
  const std::string gpu = "cuda:" + cuda::architecture_in(needed);
  for (std::string name; names >> name;) {
    if (name == gpu) continue;  // checked when a call has tensors on it
    if (std::find(present.begin(), present.end(), name) == present.end()) missing += ' ' + name;
  }
  return missing.empty() ? missing : "this CPU does not have" + missing;
}

}  // namespace

// Immutable: `bind` replaces the whole object, and running calls keep the old one alive.
class CompiledModule::PackedWeights {
 public:
  PackedWeights(at::ArrayRef<at::Tensor> weights, c10::Device device) : device_(device) {
    std::vector<MemoryRange> ranges;
    for (const at::Tensor& weight : weights) {
      const at::Tensor packed = readable(weight, device).detach();
      tensors_.push_back(to_tvm(packed));
      ranges.push_back(range_of(packed));
    }
    ranges_ = MemoryRanges(std::move(ranges));
  }

  const std::vector<ffi::Tensor>& tensors() const { return tensors_; }
  c10::Device device() const { return device_; }

  // Whether an output shares a weight's memory.
  bool own(const DLTensor& output) const { return ranges_.overlaps(range_of(output)); }

 private:
  const c10::Device device_;
  std::vector<ffi::Tensor> tensors_;
  MemoryRanges ranges_;
};

CompiledModule::CompiledModule(std::string metadata, const at::Tensor& library,
                               const std::vector<std::string>& features,
                               std::vector<int64_t> complex)
    : metadata_(std::move(metadata)),
      features_(c10::Join(" ", features)),
      runtime_(kRuntime),
      refusal_(missing_features(features_)),
      complex_(std::move(complex)),
      architecture_(cuda::architecture_in(features_)),
      library_(std::make_shared<const LazyLibrary>(library, refusal_, architecture_)),
      weights_(no_weights()) {}

CompiledModule::CompiledModule(const State& state) : weights_(no_weights()) {
  const auto& [format, texts, library] = state;
  const auto text = [&texts = texts](const char* name) {
    return texts.contains(name) ? texts.at(name) : std::string();
  };
  metadata_ = text("metadata");
  features_ = text("features");
  runtime_ = text("runtime");
  const std::string complex = text("complex");
  std::istringstream indices(complex);
  complex_.assign(std::istream_iterator<int64_t>(indices), {});
  is_known_ = format == kModuleFormat || format == kWithoutComplex;
  if (!is_known_) {
    refusal_ = c10::str("it was saved in format ", format, ", and this version of tvmify reads ",
                        kModuleFormat);
  } else if (runtime_ != kRuntime) {
    refusal_ = c10::str("it was built for ", runtime_, ", and this process has ", kRuntime);
  } else {
    TORCH_CHECK(!text("sha1").empty(), "compiled code in a saved module has no digest");
    TORCH_CHECK(c10::Join(" ", complex_) == complex,
                "compiled code in a saved module has complex results '", complex,
                "', which are no indices");
    refusal_ = missing_features(features_);
  }
  architecture_ = cuda::architecture_in(features_);
  library_ = std::make_shared<const LazyLibrary>(library, refusal_, architecture_, text("sha1"));
}

std::shared_ptr<const CompiledModule::PackedWeights> CompiledModule::no_weights() {
  return std::make_shared<const PackedWeights>(at::ArrayRef<at::Tensor>(), c10::kCPU);
}

std::string CompiledModule::refusal() const {
  return refusal_.empty() && !architecture_.empty() ? cuda::refusal(architecture_) : refusal_;
}

std::string CompiledModule::refusal_on(c10::Device device) const {
  if (!refusal_.empty()) return refusal_;
  const bool for_cpu = architecture_.empty();
  if (device.type() != (for_cpu ? c10::kCPU : c10::kCUDA)) {
    return c10::str("it is code for ", for_cpu ? "the CPU" : architecture_,
                    ", and the tensors are on ", device);
  }
  return for_cpu ? "" : cuda::refusal(architecture_, device.index());
}

c10::Device CompiledModule::device_of(at::ArrayRef<at::Tensor> tensors,
                                      const PackedWeights* weights) const {
  if (architecture_.empty()) return c10::kCPU;
  const bool has_weights = weights != nullptr && !weights->tensors().empty();
  // Without any tensor, PyTorch may not have initialized CUDA yet.
  if (tensors.empty() && !has_weights) at::globalContext().lazyInitDevice(c10::kCUDA);
  const c10::Device device = !tensors.empty() ? tensors.front().device()
                             : has_weights    ? weights->device()
                                              : c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
  TORCH_CHECK_TYPE(device.is_cuda() && (!has_weights || weights->device() == device),
                   "compiled code for a GPU has tensors on ", device, " and weights on ",
                   has_weights ? weights->device() : device);
  return device;
}

CompiledModule::State CompiledModule::state() const {
  TORCH_CHECK(is_known_, "compiled code cannot be saved again: ", refusal_);
  c10::Dict<std::string, std::string> texts;
  texts.insert("metadata", metadata_);
  texts.insert("features", features_);
  texts.insert("runtime", runtime_);
  texts.insert("sha1", library_->digest());
  if (!complex_.empty()) texts.insert("complex", c10::Join(" ", complex_));
  return {complex_.empty() ? kWithoutComplex : kModuleFormat, texts, library_->bytes()};
}

CompiledModule::CompiledModule(const CompiledModule& other)
    : metadata_(other.metadata_),
      features_(other.features_),
      runtime_(other.runtime_),
      refusal_(other.refusal_),
      complex_(other.complex_),
      architecture_(other.architecture_),
      is_known_(other.is_known_),
      library_(other.library_),
      weights_(no_weights()) {}

c10::intrusive_ptr<CompiledModule> CompiledModule::share() const {
  return c10::intrusive_ptr<CompiledModule>::unsafe_steal_from_new(new CompiledModule(*this));
}

void CompiledModule::bind(at::ArrayRef<at::Tensor> packed) {
  const c10::Device device = device_of(packed, nullptr);
  const auto before = weights_.exchange(std::make_shared<const PackedWeights>(packed, device));
  if (device.is_cuda() && !before->tensors().empty()) {
    // Freed weights return to the stream that packed them, while other streams may still read them.
    c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeDevice(before->device().index());
  }
}

std::vector<at::Tensor> CompiledModule::pack(at::ArrayRef<at::Tensor> weights,
                                             const std::optional<c10::List<bool>>& wanted) const {
  return translate_errors([&] {
    const c10::Device device = device_of(weights, nullptr);
    std::optional<cuda::OnDevice> on_device;
    if (device.is_cuda()) on_device.emplace(device);
    std::vector<at::Tensor> sources;
    TvmTensors held;
    Arguments arguments(weights.size());
    for (const at::Tensor& weight : weights) {
      // Outputs may alias the readable copy, if one was made, since that is what kernels need.
      sources.push_back(readable(weight, device));
      held.push_back(to_tvm(sources.back()));
      arguments.add(held.back());
    }
    const Library::Lease machine = library_->get().lease_for_packing(device);
    const auto function = machine->module->GetFunction("pack");
    TORCH_CHECK(function.has_value(), "this program has no weights to pack");
    TvmTensors outputs = arguments.call(*function);
    TORCH_CHECK(!wanted || wanted->size() == outputs.size(), "a program packed ", outputs.size(),
                " weights instead of ", wanted->size());
    std::vector<at::Tensor> packed;
    packed.reserve(outputs.size());  // `fresh` points into it
    std::vector<at::Tensor*> fresh;  // outputs that do not share a weight's memory
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (wanted && !wanted->get(i)) continue;
      const DLTensor& shown = *outputs[i].GetDLTensorPtr();
      const at::Tensor* owner = owner_of(shown, sources);
      packed.push_back(owner ? shown_by(shown, *owner) : result_from_tvm(std::move(outputs[i])));
      if (owner == nullptr) fresh.push_back(&packed.back());
    }
    outputs.clear();
    if (on_device) {
      on_device->synchronize();
    } else {
      gather_in_huge_pages(fresh);
    }
    return packed;
  });
}

std::vector<at::Tensor> CompiledModule::forward(at::ArrayRef<at::Tensor> inputs) const {
  return translate_errors([&] {
    const std::shared_ptr<const PackedWeights> weights = weights_.load();
    const c10::Device device = device_of(inputs, weights.get());
    std::optional<cuda::OnDevice> on_device;
    if (device.is_cuda()) on_device.emplace(device);
    std::vector<at::Tensor> read;  // the inputs, or copies that kernels can read
    TvmTensors held;
    Arguments arguments(inputs.size() + weights->tensors().size());
    for (const at::Tensor& input : inputs) {
      read.push_back(readable(input, device));
      held.push_back(to_tvm(read.back()));
      arguments.add(held.back());
    }
    for (const ffi::Tensor& weight : weights->tensors()) arguments.add(weight);

    Library::Lease machine = library_->get().lease(device);
    auto returned = arguments.call(machine->main);
    machine.give_back();

    std::vector<at::Tensor> outputs;
    outputs.reserve(returned.size());
    for (ffi::Tensor& output : returned) {
      const DLTensor& shown = *output.GetDLTensorPtr();
      const auto same = std::find_if(held.begin(), held.end(), [&](const ffi::Tensor& tensor) {
        return tensor.same_as(output);
      });
      if (same != held.end()) {
        // A program returns an argument that it has written to: itself, or the copy.
        outputs.push_back(read[static_cast<size_t>(same - held.begin())]);
      } else if (const at::Tensor* owner = owner_of(shown, inputs)) {
        outputs.push_back(shown_by(shown, *owner));
      } else if (const at::Tensor* earlier = owner_of(shown, outputs)) {
        outputs.push_back(shown_by(shown, *earlier));
      } else if (weights->own(shown)) {
        // Callers must not be able to write to weights that other calls read.
        outputs.push_back(from_tvm(std::move(output)).clone());
      } else {
        outputs.push_back(result_from_tvm(std::move(output)));
      }
    }
    for (const int64_t index : complex_) {
      TORCH_CHECK_INDEX(index >= 0 && static_cast<size_t>(index) < outputs.size(),
                        "the program has ", outputs.size(), " results, and result ", index,
                        " is to be complex");
      at::Tensor& output = outputs[static_cast<size_t>(index)];
      output = as_complex(std::move(output));
    }
    return outputs;
  });
}

}  // namespace tvmify
