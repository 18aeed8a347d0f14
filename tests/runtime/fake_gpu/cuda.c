// What TVM's runtime for GPUs calls of CUDA's runtime and driver, on a machine without either: two
// GPUs of compute capability 8.0, whose memory is the host's. Their kernels are those of the
// library that FAKE_GPU_KERNELS names, made of the same source for the CPU; without it they do
// nothing.
//
// It is loaded as libcudart.so.13 and as libcuda.so.1.

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread int device;

int cudaGetDeviceCount(int* count) {
  *count = 2;
  return 0;
}

int cudaSetDevice(int index) {
  device = index;
  return 0;
}

int cudaGetDevice(int* index) {
  *index = device;
  return 0;
}

int cudaDeviceGetAttribute(int* value, int attribute, int index) {
  *value = attribute == 75 ? 8 : 0;  // 75 and 76 are the two numbers of the capability
  return index < 0;
}

int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  memcpy(to, from, size);
  return kind < 0 || stream != NULL;  // constants go with the default stream
}

const char* cudaGetErrorName(int error) { return error ? "failed" : "success"; }
const char* cudaGetErrorString(int error) { return cudaGetErrorName(error); }

int cuDriverGetVersion(int* version) {
  *version = 13020;
  return 0;
}

int cuModuleLoadData(void** module, const void* image) {
  const char* kernels = getenv("FAKE_GPU_KERNELS");
  *module = kernels == NULL ? NULL : dlopen(kernels, RTLD_NOW);
  return memcmp(image, "\x50\xed\x55\xba", 4) != 0;  // the mark of a fatbin
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  char launch[1024];
  snprintf(launch, sizeof(launch), "launch_%s", name);
  *function = module == NULL ? NULL : dlsym(module, launch);
  return module != NULL && *function == NULL;
}

struct Launch {
  unsigned grid[3], block[3], shared;
  void* stream;
};

int cuLaunchKernelEx(const struct Launch* launch, void* function, void** arguments, void** extra) {
  const unsigned *grid = launch->grid, *block = launch->block;
  const int64_t sizes[] = {grid[0], grid[1], grid[2], block[0], block[1], block[2]};
  if (function != NULL) ((void (*)(void**, const int64_t*))function)(arguments, sizes);
  printf("launched on device %d, stream %p\n", device, launch->stream);
  return arguments == NULL || extra != NULL;
}

int cuModuleUnload(void* module) { return module != NULL && dlclose(module); }

int cuGetErrorName(int error, const char** name) {
  *name = cudaGetErrorName(error);
  return 0;
}

// Named by the library, and never called here.
#define UNUSED(name) \
  int name(void) { return 1; }
UNUSED(cuDeviceGetName)
UNUSED(cuFuncSetAttribute)
UNUSED(cuGetErrorString)
UNUSED(cuTensorMapEncodeTiled)
UNUSED(cudaEventCreate)
UNUSED(cudaEventDestroy)
UNUSED(cudaEventElapsedTime)
UNUSED(cudaEventRecord)
UNUSED(cudaEventSynchronize)
UNUSED(cudaFree)
UNUSED(cudaFreeHost)
UNUSED(cudaGetDeviceProperties)
UNUSED(cudaGetLastError)
UNUSED(cudaGraphDestroy)
UNUSED(cudaGraphExecDestroy)
UNUSED(cudaGraphInstantiate)
UNUSED(cudaGraphLaunch)
UNUSED(cudaMalloc)
UNUSED(cudaMallocHost)
UNUSED(cudaMemGetInfo)
UNUSED(cudaMemcpyPeerAsync)
UNUSED(cudaPeekAtLastError)
UNUSED(cudaStreamBeginCapture)
UNUSED(cudaStreamCreate)
UNUSED(cudaStreamCreateWithFlags)
UNUSED(cudaStreamDestroy)
UNUSED(cudaStreamEndCapture)
UNUSED(cudaStreamSynchronize)
UNUSED(cudaStreamWaitEvent)
