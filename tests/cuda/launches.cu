// How csrc/cuda/inst/sm90/forward_bf16.cu launches its kernels, for test_build.py: its object is linked with a CUDA
// runtime that launches nothing and says what it is asked. stdin: calls; stdout: a line for each, of blocks, blocks of
// a cluster, whether a counter hands out tiles, rows of keys in a copy, and the kernel's name.
#include <cuda.h>

#include <cstdio>
#include <iostream>
#include <map>

#include "cuda/launch.h"

using namespace attnjourney;

static std::map<const void*, const char*> names;
static int clusters;  // that the device runs at a time; less than 0: it knows of none

static cudaError_t launched(const void* kernel, dim3 grid, unsigned cluster, void** arguments) {
  const auto& task = *static_cast<const ForwardTask*>(arguments[1]);
  const auto rows = static_cast<const CUtensorMap*>(arguments[0])[1].opaque[0];  // Sm90ForwardMaps::key, as encode says
  std::printf("%u %u %d %d %s\n", grid.x, cluster, task.counter != nullptr, int(rows), names[kernel]);
  return cudaSuccess;
}
static CUresult encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                       const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  map->opaque[0] = box[2];
  return CUDA_SUCCESS;
}
static dim3 next_grid;

extern "C" {
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  names[host] = name;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3*, size_t*, void*) {
  *grid = next_grid;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3, void** arguments, size_t, cudaStream_t) {
  return launched(kernel, grid, 1, arguments);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* kernel, void** arguments) {
  const auto& attribute = how->attrs[0];
  const bool is_cluster = how->numAttrs == 1 && attribute.id == cudaLaunchAttributeClusterDimension;
  return launched(kernel, how->gridDim, is_cluster ? attribute.val.clusterDim.x : 0, arguments);
}
cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t*) {
  *count = clusters;
  return clusters < 0 ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
// which nvcc knows as functions of the device, too
unsigned push_call(dim3 grid, dim3, size_t, CUstream_st*) __asm__("__cudaPushCallConfiguration");
unsigned push_call(dim3 grid, dim3, size_t, CUstream_st*) {
  next_grid = grid;
  return 0;
}
cudaError_t last_error() __asm__("cudaGetLastError");
cudaError_t last_error() { return cudaSuccess; }
const char* error_string(cudaError_t) __asm__("cudaGetErrorString");
const char* error_string(cudaError_t) { return "an error"; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(encode);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}

int main() {
  alignas(16) static unsigned char data[16];
  uint32_t counter[2] = {};
  ForwardTask task{};
  bool ranged;
  for (int number = 0;
       std::cin >> task.q_heads >> task.group >> task.q_len >> task.kv_len >> task.head_dim >> ranged >> clusters;
       number++) {
    task.query = task.key = task.value = data, task.out = data, task.counter = counter;
    task.batch = 1, task.v_head_dim = 128;
    task.query_strides = task.key_strides = task.value_strides = task.out_strides = {1 << 24, 256, 256 * task.q_heads};
    const Device device{.index = number,  // a new one each time: what it runs is asked once
                        .capability = 90,
                        .multiprocessors = 132,
                        .shared_bytes = 227 << 10,
                        .multiprocessor_bytes = 228 << 10};
    sm90_forward_bf16(task, ranged, device, nullptr);
  }
}
