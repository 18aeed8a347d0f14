// A loaded library of compiled kernels, and the virtual machines that run it.
#pragma once

#include <ATen/core/Tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "fork_safe_mutex.h"

namespace tvmify {

class Library {
 public:
  // A TVM virtual machine. It can run one call at a time.
  struct Machine {
    tvm::ffi::Module module;
    tvm::ffi::Function main;
  };

  // The idle machines of one device.
  static constexpr size_t kIdleMachines = 16;  // a machine takes 3 KB, creating one 30 µs
  using Pool = std::array<std::atomic<Machine*>, kIdleMachines>;

  // A machine for the duration of one call. `give_back` returns it to the pool; if the call fails,
  // it is destroyed instead. On a GPU it always `stays`, since CUDA graphs read its constants.
  class Lease {
   public:
    Lease(Pool& pool, std::unique_ptr<Machine> machine, bool stays)
        : pool_(pool), machine_(std::move(machine)), stays_(stays) {}
    ~Lease() {
      if (stays_ && machine_ != nullptr) give_back();
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    const Machine& operator*() const { return *machine_; }
    const Machine* operator->() const { return machine_.get(); }
    void give_back();

   private:
    Pool& pool_;
    std::unique_ptr<Machine> machine_;
    const bool stays_;
  };

  // Loads a shared library from a contiguous uint8 tensor, through a file that cannot be replaced
  // or truncated while the code runs. `type` says whether its programs run on the CPU or on GPUs.
  Library(const at::Tensor& bytes, c10::DeviceType type);
  // A GPU library stays until the next one is loaded: its kernels may still be running, and waiting
  // for them here could invalidate a graph capture.
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // Returns an idle machine for a device, or a new one. Thread-safe, but no machine can be created
  // during a graph capture.
  Lease lease(c10::Device device) const;

  // The same for one call of `pack`. On the CPU, this machine does not pool memory.
  Lease lease_for_packing(c10::Device device) const;

  // Returns a copy of the bytes that were loaded.
  at::Tensor bytes() const;

 private:
  // Everything that is destroyed with the library.
  struct Loaded {
    explicit Loaded(size_t devices) : idle(devices) {}
    ~Loaded();
    Loaded(const Loaded&) = delete;
    Loaded& operator=(const Loaded&) = delete;

    int file = -1;           // anonymous, and sealed where it can be
    void* handle = nullptr;  // from dlopen
    tvm::ffi::Optional<tvm::ffi::Module> executable;
    std::vector<Pool> idle;  // of the CPU, or of each GPU
  };

  // GPU libraries that are no longer used.
  class Retired;
  static Retired& retired();

  // `memory` is the number of the CPU allocator.
  std::unique_ptr<Machine> make_machine(c10::Device device, int memory) const;

  const c10::DeviceType type_;
  std::unique_ptr<Loaded> loaded_;
  mutable ForkSafeMutex making_;
};

// A library that is checked and loaded on first use. Thread-safe.
class LazyLibrary {
 public:
  // `refusal` says why it must not be loaded here, empty if it may; `architecture` is its GPU
  // architecture, empty for the CPU; `digest` is the expected digest of `bytes`, from an archive,
  // or empty to compute it.
  LazyLibrary(at::Tensor bytes, std::string refusal, std::string architecture,
              std::string digest = "");

  // Throws if the library is refused or damaged.
  const Library& get() const;

  at::Tensor bytes() const;
  std::string digest() const;

 private:
  const std::string refusal_, architecture_, digest_;
  mutable ForkSafeMutex loading_;
  mutable at::Tensor bytes_;  // until the library is loaded, which then holds them
  mutable std::unique_ptr<const Library> owned_;
  mutable std::atomic<const Library*> library_{nullptr};
};

}  // namespace tvmify
