#include "library.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/hash.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include "cuda.h"
#include "fork_safe_mutex.h"
#include "memory_ranges.h"
#include "thread_pool.h"
#include "tvm_allocator.h"
#include "tvm_locks.h"

namespace tvmify {
namespace {

namespace ffi = tvm::ffi;

// Kernel libraries refer to TVMBackend* and TVMFFI* as plain symbols, but Python loads libraries
// with RTLD_LOCAL: without this, the first call of such a function would abort the process.
void publish_tvm_runtime() {
  static void* const runtime = dlopen("libtvm_runtime.so", RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
  TORCH_CHECK(runtime != nullptr, "libtvm_runtime.so is not loaded: ", dlerror());
}

// An archive may contain any tensor here.
void check_is_library(const at::Tensor& bytes) {
  TORCH_CHECK_TYPE(bytes.defined() && bytes.layout() == at::kStrided && bytes.is_cpu() &&
                       bytes.scalar_type() == at::kByte && bytes.is_contiguous() &&
                       has_memory(bytes),
                   "a library is a contiguous uint8 tensor with memory, not ", bytes.toString());
}

// For kernels that lack or forbid memfd: a file in a private directory, unlinked once it is open.
int nameless_file() {
  const char* parent = std::getenv("TMPDIR");
  std::string directory = std::string(parent != nullptr ? parent : "/tmp") + "/tvmify-XXXXXX";
  if (mkdtemp(directory.data()) == nullptr) return -1;
  const std::string path = directory + "/library";
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  const int error = errno;
  unlink(path.c_str());
  rmdir(directory.c_str());
  errno = error;
  return file;
}

int anonymous_file() {
  const int file = memfd_create("tvmify", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  const bool has_none = file < 0 && (errno == ENOSYS || errno == EPERM || errno == EACCES);
  return has_none ? nameless_file() : file;
}

// Writes the bytes to an anonymous file, which is then sealed against changes.
int sealed_file(const at::Tensor& bytes) {
  const int file = anonymous_file();
  TORCH_CHECK(file >= 0, "there is no place for a compiled library: ", std::strerror(errno));
  const char* data = static_cast<const char*>(bytes.const_data_ptr());
  for (size_t done = 0, size = bytes.nbytes(); done < size;) {
    const ssize_t written = write(file, data + done, size - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      const int error = errno;
      close(file);
      TORCH_CHECK(false, "writing a compiled library to memory: ", std::strerror(error));
    }
    done += static_cast<size_t>(written);
  }
  // Only a memfd has seals; the fallback file has no name by which it could be opened.
  fcntl(file, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return file;
}

// Detects damage, not forgery: who can change the bytes can also change the digest next to them.
// Archives can be signed against forgery (tvmify/runtime/archive.py).
std::string digest_of(const at::Tensor& bytes) {
  check_is_library(bytes);
  const char* data = static_cast<const char*>(bytes.const_data_ptr());
  return bytes.nbytes() == 0 ? "" : c10::sha1(std::string(data, bytes.nbytes())).str();
}

// Returns the directory of this process's open files, by a name that is valid in a debugger, too:
// in its own /proc/self, it would find no such file, or wait for a pipe.
std::string open_files() {
  char number[32];  // of the process, as this /proc counts
  const ssize_t size = readlink("/proc/self", number, sizeof(number));
  const bool is_whole = size > 0 && static_cast<size_t>(size) < sizeof(number);
  return "/proc/" + (is_whole ? std::string(number, size) : "self") + "/fd/";
}

// Returns a path of the open file that was never used before. glibc identifies libraries by path,
// and file descriptors are reused, so the same path could return an older library. The path counts
// loads in binary, "./" for 0 and ".//" for 1, so that it stays short.
std::string unique_path(int file) {
  static std::atomic<uint64_t> loads{0};
  std::string path = open_files();
  for (uint64_t number = ++loads; number != 0; number >>= 1) path += number & 1 ? ".//" : "./";
  return path + std::to_string(file);
}

}  // namespace

Library::Loaded::~Loaded() {
  for (Pool& pool : idle) {
    for (auto& place : pool) delete place.load();
  }
  executable = std::nullopt;  // first: its destructor runs code in the library
  if (handle != nullptr) dlclose(handle);
  if (file >= 0) close(file);
}

class Library::Retired {
 public:
  using Several = std::vector<std::unique_ptr<Loaded>>;

  void add(Several several) {
    const std::lock_guard<std::mutex> lock(moment());
    std::move(several.begin(), several.end(), std::back_inserter(several_));
  }

  // Destroys them, after waiting for the GPUs that they used.
  void clear() {
    Several leaving;
    {
      const std::lock_guard<std::mutex> lock(moment());
      leaving.swap(several_);
    }
    try {
      wait_for(leaving);
    } catch (...) {
      add(std::move(leaving));
      throw;
    }
    if (leaving.empty()) return;
    // To unload kernels, TVM goes from GPU to GPU and stays on the last one.
    const c10::DeviceGuard here(c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice());
    leaving.clear();
  }

 private:
  static void wait_for(const Several& several) {
    for (size_t i = 0; !several.empty() && i < several.front()->idle.size(); ++i) {
      const auto was_used = [i](const std::unique_ptr<Loaded>& loaded) {
        return loaded->idle[i].front().load() != nullptr;
      };
      // Waiting for an unused GPU would create a context on it.
      if (std::none_of(several.begin(), several.end(), was_used)) continue;
      c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeDevice(static_cast<c10::DeviceIndex>(i));
    }
  }

  Several several_;
};

Library::Retired& Library::retired() {
  static auto* const retired = new Retired();  // never destroyed: CUDA's statics may be gone
  return *retired;
}

Library::Library(const at::Tensor& bytes, c10::DeviceType type) : type_(type) {
  check_is_library(bytes);
  publish_tvm_runtime();
  hold_tvm_memory_at_forks();
  const bool on_cpu = type == c10::kCPU;
  if (!on_cpu) retired().clear();
  loaded_ = std::make_unique<Loaded>(on_cpu ? 1 : c10::impl::VirtualGuardImpl(type).deviceCount());
  loaded_->file = sealed_file(bytes);
  const std::string path = unique_path(loaded_->file);
  // ffi::Module::LoadFromFile requires a path with an extension.
  static const auto load = ffi::Function::GetGlobalRequired("ffi.Module.load_from_file.so");
  loaded_->executable = load(path, "so").cast<ffi::Module>();
  loaded_->handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  TORCH_CHECK(loaded_->handle != nullptr, "a compiled library is gone after loading: ", dlerror());
  use_torch_threads(loaded_->handle);
  use_fork_safe_lookup(loaded_->handle);
}

Library::~Library() {
  if (type_ == c10::kCPU) return;
  Retired::Several self;
  self.push_back(std::move(loaded_));
  retired().add(std::move(self));
}

Library::Lease Library::lease(c10::Device device) const {
  Pool& pool = device.is_cpu() ? loaded_->idle.front()
                               : loaded_->idle.at(static_cast<size_t>(device.index()));
  // Lock-free, so that a fork during another thread's call leaves nothing locked.
  for (auto& place : pool) {
    if (place.load(std::memory_order_relaxed) == nullptr) continue;
    if (Machine* machine = place.exchange(nullptr, std::memory_order_acquire)) {
      return {pool, std::unique_ptr<Machine>(machine), !device.is_cpu()};
    }
  }
  return {pool, make_machine(device, kPoolAllocator), !device.is_cpu()};
}

Library::Lease Library::lease_for_packing(c10::Device device) const {
  if (!device.is_cpu()) return lease(device);
  return {loaded_->idle.front(), make_machine(device, kHugePageAllocator), false};
}

void Library::Lease::give_back() {
  for (auto& place : pool_) {
    Machine* none = nullptr;
    if (place.compare_exchange_strong(none, machine_.get(), std::memory_order_release,
                                      std::memory_order_relaxed)) {
      machine_.release();
      return;
    }
  }
  if (stays_) machine_.release();  // leaks one for each concurrent call beyond the pool
  machine_.reset();
}

std::unique_ptr<Library::Machine> Library::make_machine(c10::Device device, int memory) const {
  constexpr int kCpu = kDLCPU;
  const std::lock_guard<ForkSafeMutex> lock(making_);
  auto module =
      (*loaded_->executable)->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
  const ffi::Function initialize = module->GetFunction("vm_initialization").value();
  if (device.is_cpu()) {
    initialize(kCpu, /*device_id=*/0, memory);
  } else {
    // It copies constants on the default stream, which other streams do not wait for.
    const c10::impl::VirtualGuardImpl cuda(device.type());
    const c10::StreamGuard stream(cuda.getDefaultStream(device));
    constexpr int kGpu = kDLCUDA;
    const int index = device.index();
    initialize(kGpu, index, memory, kCpu, /*device_id=*/0, memory);
    cuda.synchronizeStream(stream.current_stream());
  }
  ffi::Function main = module->GetFunction("main").value();
  return std::make_unique<Machine>(Machine{std::move(module), std::move(main)});
}

at::Tensor Library::bytes() const {
  struct stat status{};
  TORCH_CHECK(fstat(loaded_->file, &status) == 0, "fstat: ", std::strerror(errno));
  at::Tensor bytes = at::empty({status.st_size}, at::kByte);
  auto* data = static_cast<char*>(bytes.mutable_data_ptr());
  for (off_t done = 0; done < status.st_size;) {
    const ssize_t count =
        pread(loaded_->file, data + done, static_cast<size_t>(status.st_size - done), done);
    TORCH_CHECK(count > 0, "reading a compiled library back: ", std::strerror(errno));
    done += count;
  }
  return bytes;
}

LazyLibrary::LazyLibrary(at::Tensor bytes, std::string refusal, std::string architecture,
                         std::string digest)
    : refusal_(std::move(refusal)),
      architecture_(std::move(architecture)),
      digest_(std::move(digest)),
      bytes_(std::move(bytes)) {}

const Library& LazyLibrary::get() const {
  if (const Library* library = library_.load(std::memory_order_acquire)) return *library;
  const std::lock_guard<ForkSafeMutex> lock(loading_);
  if (owned_ == nullptr) {
    TORCH_CHECK(refusal_.empty(), "compiled code cannot run here: ", refusal_);
    if (!architecture_.empty()) {
      const std::string refusal = cuda::refusal(architecture_);  // also loads the CUDA runtime
      TORCH_CHECK(refusal.empty(), "compiled code cannot run here: ", refusal);
    }
    TORCH_CHECK(digest_.empty() || digest_of(bytes_) == digest_, "compiled code of ",
                bytes_.nbytes(),
                " bytes is damaged: its digest is not the "
                "one that it was saved with. Save the model again, or copy the file again.");
    const c10::DeviceType type = architecture_.empty() ? c10::kCPU : c10::kCUDA;
    owned_ = std::make_unique<const Library>(bytes_, type);
    bytes_.reset();
    library_.store(owned_.get(), std::memory_order_release);
  }
  return *owned_;
}

at::Tensor LazyLibrary::bytes() const {
  const std::lock_guard<ForkSafeMutex> lock(loading_);
  return owned_ == nullptr ? bytes_ : owned_->bytes();
}

std::string LazyLibrary::digest() const { return digest_.empty() ? digest_of(bytes()) : digest_; }

}  // namespace tvmify
