// GPUs: what is the same for all programs. This library is linked to PyTorch for the CPU alone, so
// all of it goes through PyTorch's interfaces for devices of any type, and TVM's registry.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <string>

namespace tvmify::cuda {

// The architecture that a program's requirements name: "sm_90a" of "x86_64 avx2 cuda:sm_90a". Empty
// for code that runs on the CPU alone.
std::string architecture_in(const std::string& requirements);

// Why code for an architecture cannot run in this process, on the GPU of this index or, without
// one, on any; empty if it can. Looks for GPUs, and loads TVM's runtime for them.
std::string refusal(const std::string& architecture,
                    std::optional<c10::DeviceIndex> index = std::nullopt);

// While it lives, this thread's calls of PyTorch and of TVM go to one GPU, and TVM's to the stream
// that is PyTorch's current one there.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  // Waits until the stream has done what it was given so far. Not while a graph is captured.
  void synchronize() const;

 private:
  const c10::DeviceGuard guard_;
  const c10::Device device_;
  void* previous_ = nullptr;
};

}  // namespace tvmify::cuda
