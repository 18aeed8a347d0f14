// CUDA C++ as TVM writes it for float32 and float16, run by one thread of a CPU: each thread of a block is a
// coroutine, and blocks run one after the other, so that shared memory can be static.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN

using std::max;
using std::min;
using half = _Float16;
using uchar = unsigned char;
using uint = unsigned;

template <typename T>
struct Four {
  T x, y, z, w;
};
template <typename T>
struct Two {
  T x, y;
};
using float2 = Two<float>;
using half2 = Two<half>;
using float4 = Four<float>;
using half4 = Four<half>;
using int4 = Four<int>;
using uint4 = Four<uint>;
using ushort4 = Four<unsigned short>;

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline ushort4 make_ushort4(int x, int y, int z, int w) {
  const auto narrow = [](int value) { return static_cast<unsigned short>(value); };
  return {narrow(x), narrow(y), narrow(z), narrow(w)};
}
inline half4 make_half4(half x, half y, half z, half w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint x, uint y, uint z, uint w) { return {x, y, z, w}; }
inline half __float2half_rn(float x) { return static_cast<half>(x); }
inline uint __pack_half2(half low, half high) {
  const half both[] = {low, high};
  uint packed;
  std::memcpy(&packed, both, sizeof packed);
  return packed;
}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }

namespace emulated {

struct Dim {
  int x, y, z;
};

// Those that wait for each other; who has ended is not waited for.
struct Group {
  int alive = 0, arrived = 0, passed = 0;

  void release() {
    if (arrived == alive && alive > 0) {
      arrived = 0;
      ++passed;
    }
  }
};

constexpr int kWarp = 32;
constexpr size_t kStack = 64 << 10;

struct Warp : Group {
  uint64_t values[kWarp] = {};
};

// Its coroutine serves all blocks. `ucontext` only makes it: each of its switches is a system call.
struct Thread {
  std::unique_ptr<char[]> stack;
  jmp_buf place;
  Dim index;
  int lane;
  Warp* warp;
  bool ended;
};

inline jmp_buf scheduler;
inline Group block;
inline Dim block_index;
inline Thread* self;
inline void (*body)(void**);
inline void** arguments;

inline void suspend() {
  if (_setjmp(self->place) == 0) _longjmp(scheduler, 1);
}

inline void resume(Thread& thread) {
  self = &thread;
  if (_setjmp(scheduler) == 0) _longjmp(thread.place, 1);
}

inline void wait(Group& group) {
  const int before = group.passed;
  ++group.arrived;
  group.release();
  while (group.passed == before) suspend();
}

inline void run_thread() {
  suspend();
  while (true) {
    body(arguments);
    self->ended = true;
    --block.alive;
    block.release();
    --self->warp->alive;
    self->warp->release();
    suspend();
  }
}

inline void start(Thread& thread) {
  self = &thread;
  thread.stack.reset(new char[kStack]);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack.get();
  context.uc_stack.ss_size = kStack;
  makecontext(&context, run_thread, 0);
  if (_setjmp(scheduler) == 0) setcontext(&context);
}

inline void run_block(Dim size) {
  const int count = size.x * size.y * size.z;
  static std::vector<std::unique_ptr<Thread>> threads;
  while (static_cast<int>(threads.size()) < count) {
    threads.push_back(std::make_unique<Thread>());
    start(*threads.back());
  }
  std::vector<Warp> warps((count + kWarp - 1) / kWarp);
  block = Group();
  block.alive = count;
  for (int i = 0; i < count; ++i) {
    Thread& thread = *threads[i];
    thread.index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    thread.lane = i % kWarp;
    thread.warp = &warps[i / kWarp];
    thread.ended = false;
    ++thread.warp->alive;
  }
  while (block.alive > 0) {
    for (int i = 0; i < count; ++i) {
      if (!threads[i]->ended) resume(*threads[i]);
    }
  }
}

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** values, std::index_sequence<I...>) {
  kernel(*static_cast<A*>(values[I])...);
}

template <auto kernel, typename... A>
void unpack(void (*)(A...), void** values) {
  call(kernel, values, std::index_sequence_for<A...>());
}

// Runs a kernel; as for CUDA's own launch, each value is where an argument stands.
template <auto kernel>
void launch(void** values, const int64_t* sizes) {
  body = [](void** given) { unpack<kernel>(kernel, given); };
  arguments = values;
  const Dim size = {static_cast<int>(sizes[3]), static_cast<int>(sizes[4]),
                    static_cast<int>(sizes[5])};
  for (int z = 0; z < sizes[2]; ++z) {
    for (int y = 0; y < sizes[1]; ++y) {
      for (int x = 0; x < sizes[0]; ++x) {
        block_index = {x, y, z};
        run_block(size);
      }
    }
  }
}

}  // namespace emulated

#define alignas(...)  // after "static" it would be an error
#define threadIdx (emulated::self->index)
#define blockIdx (emulated::block_index)

inline void __syncthreads() { emulated::wait(emulated::block); }

inline unsigned __activemask() { return ~0u; }

template <typename T>
T __shfl_sync(unsigned, T value, int lane, int width) {
  emulated::Thread& self = *emulated::self;
  emulated::Warp& warp = *self.warp;
  std::memcpy(&warp.values[self.lane], &value, sizeof(T));
  emulated::wait(warp);
  T result = value;
  if (lane / width == self.lane / width) std::memcpy(&result, &warp.values[lane], sizeof(T));
  emulated::wait(warp);
  return result;
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, int distance, int width) {
  return __shfl_sync(mask, value, emulated::self->lane + distance, width);
}
