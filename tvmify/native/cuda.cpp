#include "cuda.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <dlfcn.h>
#include <link.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/runtime/device_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdio>
#include <sstream>

namespace tvmify::cuda {
namespace {

namespace ffi = tvm::ffi;

constexpr const char* kMark = "cuda:";
constexpr const char* kRuntime = "libtvm_runtime_cuda.so";
constexpr int kMostDevices = 32;  // TVM's limit, too

// Loads TVM's CUDA runtime, a library beside its main one. Nothing links to it, since many machines
// lack what it needs (the driver, CUDA's runtime). Returns the error; empty on success.
std::string load_runtime() {
  void* const runtime = dlopen("libtvm_runtime.so", RTLD_NOW | RTLD_NOLOAD);
  std::string path(PATH_MAX, '\0');
  TORCH_CHECK(runtime != nullptr && dlinfo(runtime, RTLD_DI_ORIGIN, path.data()) == 0,
              "libtvm_runtime.so is not loaded");
  path.resize(path.find('\0'));
  const bool loaded = dlopen((path + '/' + kRuntime).c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr;
  return loaded ? "" : dlerror();
}

// 90 for a GPU of compute capability 9.0, 0 for none.
int capability_of(int index) {
  static std::array<std::atomic<int>, kMostDevices> known{};
  if (const int capability = known.at(index).load(std::memory_order_relaxed)) return capability;
  static const auto attribute = ffi::Function::GetGlobalRequired("runtime.GetDeviceAttr");
  const int type = kDLCUDA, kind = tvm::runtime::kComputeVersion;
  std::istringstream version(attribute(type, index, kind).cast<std::string>());
  int major = 0, minor = 0;
  char dot;
  version >> major >> dot >> minor;
  known.at(index).store(major * 10 + minor, std::memory_order_relaxed);
  return major * 10 + minor;
}

// Code for sm_86 runs on 8.6 and later: where its machine code does not, the driver compiles its
// PTX.
bool fits(const std::string& architecture, int capability) {
  int wanted = 0;
  char prefix[4] = "";
  const int parts = std::sscanf(architecture.c_str(), "%3[a-z]_%d", prefix, &wanted);
  return parts == 2 && std::string(prefix) == "sm" && capability >= wanted;
}

void set_stream(c10::DeviceIndex index, void* stream, void** previous) {
  TORCH_CHECK(TVMFFIEnvSetStream(kDLCUDA, index, stream, previous) == 0,
              "TVM does not take a stream of cuda:", static_cast<int>(index));
}

}  // namespace

std::string architecture_in(const std::string& requirements) {
  std::istringstream names(requirements);
  for (std::string name; names >> name;) {
    if (name.rfind(kMark, 0) == 0) return name.substr(std::string(kMark).size());
  }
  return "";
}

std::string refusal(const std::string& architecture, std::optional<c10::DeviceIndex> index) {
  const std::string what = "it is code for a GPU (" + architecture + "), and ";
  const at::CUDAHooksInterface& torch_cuda = at::detail::getCUDAHooks();
  if (!torch_cuda.hasCUDART()) return what + "this PyTorch is built without CUDA";
  const int count = std::min(torch_cuda.getNumGPUs(), kMostDevices);
  if (count == 0) return what + "PyTorch finds none here (torch.cuda.is_available() says the same)";
  static const std::string failure = load_runtime();
  if (!failure.empty()) {
    return what + "TVM's runtime for it cannot be loaded: " + failure +
           ". It needs the CUDA runtime of that version (for 13: pip install "
           "'nvidia-cuda-runtime>=13,<14') on the library path";
  }
  std::string present;
  for (int i = index.value_or(0); i < (index ? *index + 1 : count); ++i) {
    const int capability = i < count ? capability_of(i) : 0;
    if (fits(architecture, capability)) return "";
    present += c10::str(present.empty() ? "" : ", ", "cuda:", i, " is sm_", capability);
  }
  return what + present;
}

OnDevice::OnDevice(c10::Device device) : guard_(device), device_(device) {
  const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
  set_stream(device_.index(), cuda.getStreamNativeHandle(cuda.getStream(device_)), &previous_);
}

OnDevice::~OnDevice() { TVMFFIEnvSetStream(kDLCUDA, device_.index(), previous_, nullptr); }

void OnDevice::synchronize() const {
  const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
  cuda.synchronizeStream(cuda.getStream(device_));
}

}  // namespace tvmify::cuda
