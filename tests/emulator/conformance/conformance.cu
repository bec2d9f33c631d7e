// The conformance program on a GPU. On one that is not Hopper only sm_80's instructions run.
#include <cmath>
#include <stdexcept>

#include "cuda/clusters.h"
#include "cuda/kernels/common/forward_task.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/tensor_map.h"
//
#include "conformance_fp16x2.h"
#include "conformance_fp32.h"
#include "conformance_fp8.h"

template <class F>
__global__ void run(const __grid_constant__ F f) {
  f();
}

struct DeviceHost {
  template <class T>
  struct Buffer {
    T* data = nullptr;
    Buffer(const std::vector<T>& values, const char*) {
      attnjourney::cuda_check(cudaMallocManaged(&data, values.size() * sizeof(T)), "cudaMallocManaged");
      for (size_t i = 0; i < values.size(); i++) data[i] = values[i];
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { cudaFree(data); }
  };
  template <class F>
  static void launch(int shared_bytes, F f) {
    run<<<1, 128, static_cast<size_t>(shared_bytes)>>>(f);
    attnjourney::cuda_check(cudaGetLastError(), "launch");
    attnjourney::cuda_check(cudaDeviceSynchronize(), "kernel");
  }
  template <class F>
  static void launch_pair(int shared_bytes, F f) {
    attnjourney::ClusterLaunch<F>{run<F>, 2, 128, shared_bytes}.run(2, nullptr, f);
    attnjourney::cuda_check(cudaDeviceSynchronize(), "kernel");
  }
  static CUtensorMap map(const uint16_t* data, int heads, int length, int dim, int rows) {
    const int64_t head = int64_t{length} * dim;
    return attnjourney::tensor_map(data, {head * heads, head, dim}, 1, heads, length, dim, rows, true);
  }
};

int main() {
  try {
    cudaDeviceProp device;
    attnjourney::cuda_check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    conformance::Program<DeviceHost>::sm80();
    conformance::Fp32Program<DeviceHost>::run();
    conformance::Fp16x2Program<DeviceHost>::sm80();
    if (device.major == 9) {
      conformance::Program<DeviceHost>::sm90();
      conformance::Fp16x2Program<DeviceHost>::run();
      conformance::Fp8Program<DeviceHost>::run();
    }
    printf("%s: %d of %d as expected\n", device.name, conformance::checked - conformance::failed, conformance::checked);
  } catch (const std::exception& e) {
    printf("FAIL %s\n", e.what());
    return 1;
  }
  return conformance::failed != 0;
}
