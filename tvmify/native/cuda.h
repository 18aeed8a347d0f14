// GPU support shared by all programs. This library links to CPU-only PyTorch, so it uses PyTorch's
// device-independent interfaces and TVM's registry.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <string>

namespace tvmify::cuda {

// The GPU architecture in a program's requirements: "sm_90a" in "x86_64 avx2 cuda:sm_90a". Empty
// for code that runs on the CPU.
std::string architecture_in(const std::string& requirements);

// Why code for an architecture cannot run in this process, on the GPU with this index or, without
// an index, on any; empty if it can. Looks for GPUs, and loads TVM's CUDA runtime.
std::string refusal(const std::string& architecture,
                    std::optional<c10::DeviceIndex> index = std::nullopt);

// During its lifetime, PyTorch and TVM use one GPU in this thread, and TVM uses PyTorch's current
// stream.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  // Waits for all work on the stream so far. Must not be called during a graph capture.
  void synchronize() const;

 private:
  const c10::DeviceGuard guard_;
  const c10::Device device_;
  void* previous_ = nullptr;
};

}  // namespace tvmify::cuda
