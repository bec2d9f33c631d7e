// The device and stream of a call, through what torch offers at run time: the library loads without CUDA.
#pragma once
#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "core/aten.h"
#include "core/checks.h"
#include "launch.h"

namespace attnjourney {

// ATTNJOURNEY_CUDA_ARCH=80: the kernels that every GPU has, on Hopper too.
inline bool oldest_kernels() {
  static const char* const forced = std::getenv("ATTNJOURNEY_CUDA_ARCH");
  if (forced == nullptr || *forced == 0) return false;
  check_runtime(std::string(forced) == "80", "ATTNJOURNEY_CUDA_ARCH: expected 80 or nothing, got '", forced, "'");
  return true;
}

inline Device current_device(const Tensor& query) {
  Device d{.index = query.get_device_index()};
  const auto attribute = [&](cudaDeviceAttr a) {
    int value = 0;
    cuda_check(cudaDeviceGetAttribute(&value, a, d.index), "cudaDeviceGetAttribute");
    return value;
  };
  d.capability = attribute(cudaDevAttrComputeCapabilityMajor) * 10 + attribute(cudaDevAttrComputeCapabilityMinor);
  d.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  d.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  d.multiprocessor_bytes = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  check_runtime(d.capability >= 80, "attention: expected a GPU of compute capability 8.0 or later, got ",
                d.capability / 10, ".", d.capability % 10);
  if (oldest_kernels()) d.capability = 80;
  return d;
}

inline cudaStream_t current_stream(int device) {
  using Function = int32_t (*)(int32_t, void**);
  static const auto get = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* function = torch_cuda ? dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream") : nullptr;
    check_runtime(function != nullptr, "attention: this torch has no CUDA");
    return reinterpret_cast<Function>(function);
  }();
  void* stream = nullptr;
  check_runtime(get(device, &stream) == 0, "attention: torch gave no current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

// torch.are_deterministic_algorithms_enabled(), an operator that the Python package defines
inline bool deterministic_algorithms() {
  StableIValue result{};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("attnjourney::_deterministic_algorithms", "", &result, TORCH_ABI_VERSION));
  return torch::stable::detail::to<bool>(result);
}

// Zeros for kernels that leave them so, numbers [first, first + count) of each stream's kStreamZeros: two for the
// persistent forward, behind them those of decoding. Under graph capture each call has its own, since graphs may run
// side by side. Holds the memory in `keep` where it is this call's own.
constexpr int kTileCounters = 2, kStreamZeros = kTileCounters + kMostArrivals;
inline uint32_t* stream_zeros(const Tensor& like, int device, cudaStream_t stream, int first, int count,
                              OptionalTensor& keep) {
  const auto own = [&] {
    keep = aten::empty(like, {count}, ScalarType::Int);
    cuda_check(cudaMemsetAsync(keep->data_ptr(), 0, 4 * count, stream), "cudaMemsetAsync");
    return static_cast<uint32_t*>(keep->data_ptr());
  };
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cuda_check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  if (capture != cudaStreamCaptureStatusNone) return own();
  // not the handle: a stream may get that of one that was destroyed and still runs
  unsigned long long id = 0;
  cuda_check(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  constexpr size_t most = 1024;  // of a program that makes streams again and again
  static std::mutex mutex;
  static std::map<std::pair<int, unsigned long long>, uint32_t*> counters;
  const std::lock_guard lock(mutex);
  if (counters.size() >= most && !counters.contains({device, id})) return own();
  uint32_t*& counter = counters[{device, id}];
  if (!counter) {
    // allowed, though another thread may be capturing a graph: it is not part of that
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cuda_check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    const cudaError_t allocated = cudaMalloc(&counter, 4 * kStreamZeros);
    cuda_check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    cuda_check(allocated, "cudaMalloc");
    cuda_check(cudaMemsetAsync(counter, 0, 4 * kStreamZeros, stream), "cudaMemsetAsync");
  }
  return counter + first;
}
inline uint32_t* tile_counter(const Tensor& like, int device, cudaStream_t stream, OptionalTensor& keep) {
  return stream_zeros(like, device, stream, 0, kTileCounters, keep);
}

}  // namespace attnjourney
