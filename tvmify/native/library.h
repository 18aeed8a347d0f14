// A shared library of compiled kernels in this process, and the virtual machines that run it.
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
  // One of TVM's virtual machines. It may run one call at a time.
  struct Machine {
    tvm::ffi::Module module;
    tvm::ffi::Function main;
  };

  // The idle machines of one device.
  static constexpr size_t kIdleMachines = 16;  // a machine takes 3 KB, making one takes 30 µs
  using Pool = std::array<std::atomic<Machine*>, kIdleMachines>;

  // A machine for the duration of one call. `give_back` returns it for the next one; a machine
  // that is not given back, because its call failed half-way, is destroyed. On a GPU it `stays`
  // whatever happens: CUDA graphs read its constants.
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

  // Loads the bytes of a shared library, a contiguous uint8 tensor. No file is involved that
  // anybody could replace or truncate while its code runs. Its programs run on the CPU, or on GPUs.
  Library(const at::Tensor& bytes, c10::DeviceType type);
  // What is for a GPU stays until the next such library is loaded: its kernels may be running, and
  // waiting for them here might spoil a graph that somebody captures.
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // Returns an idle machine of a device, or a new one. Any thread may call it, at any time, except
  // that none can be made while a graph is captured.
  Lease lease(c10::Device device) const;

  // The same for one call of `pack`. On the CPU it is a machine that keeps no memory for later.
  Lease lease_for_packing(c10::Device device) const;

  // Returns a copy of the bytes that were loaded.
  at::Tensor bytes() const;

 private:
  // All that leaves with the library.
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

  // Those for GPUs that nobody uses any more.
  class Retired;
  static Retired& retired();

  // `memory` is the number of the allocator for the CPU.
  std::unique_ptr<Machine> make_machine(c10::Device device, int memory) const;

  const c10::DeviceType type_;
  std::unique_ptr<Loaded> loaded_;
  mutable ForkSafeMutex making_;
};

// A library that is checked and loaded when it is first used. Any thread may call any method.
class LazyLibrary {
 public:
  // `refusal` says why it must not be loaded here, and is empty if it may; `architecture` is that
  // of the GPUs which it is for, and empty for the CPU; `digest`, of an archive, is what `bytes`
  // should have: empty to compute it.
  LazyLibrary(at::Tensor bytes, std::string refusal, std::string architecture,
              std::string digest = "");

  // Throws if the library is refused, or if its bytes are not those that were saved.
  const Library& get() const;

  at::Tensor bytes() const;
  std::string digest() const;

 private:
  const std::string refusal_, architecture_, digest_;
  mutable ForkSafeMutex loading_;
  mutable at::Tensor bytes_;  // until the library is loaded, which keeps them then
  mutable std::unique_ptr<const Library> owned_;
  mutable std::atomic<const Library*> library_{nullptr};
};

}  // namespace tvmify
