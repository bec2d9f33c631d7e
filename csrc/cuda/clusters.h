// Launches of blocks in clusters, which reach each other's shared memory.
#pragma once
#include <map>
#include <mutex>

#include "launch.h"

namespace attnjourney {

// Kernel, blocks of a cluster, threads and shared memory of a block
template <class... Params>
struct ClusterLaunch {
  void (*kernel)(Params...);
  int cluster, threads, shared_bytes;

  // The blocks that run at a time where the device has nothing else to do: clusters lie within parts of it, of which
  // some may be shut off. It is asked once; 0: it runs none.
  int resident(const Device& device) const {
    static std::mutex mutex;
    static std::map<std::pair<const void*, int>, int> known;
    const std::lock_guard lock(mutex);
    const auto [at, fresh] = known.try_emplace({reinterpret_cast<const void*>(kernel), device.index}, 0);
    if (fresh) {
      allow_shared(kernel, shared_bytes);
      cudaLaunchAttribute attribute;
      const cudaLaunchConfig_t how = config(cluster, nullptr, attribute);
      int clusters = 0;
      if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &how) == cudaSuccess)
        at->second = clusters * cluster;
      else
        cudaGetLastError();  // a refusal is an answer, not an error of the call
    }
    return at->second;
  }
  // blocks: a multiple of the cluster
  void run(int blocks, cudaStream_t stream, Params... params) const {
    allow_shared(kernel, shared_bytes);
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t how = config(blocks, stream, attribute);
    cuda_check(cudaLaunchKernelEx(&how, kernel, params...), "kernel launch in clusters");
  }

 private:
  cudaLaunchConfig_t config(int blocks, cudaStream_t stream, cudaLaunchAttribute& attribute) const {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t how{};
    how.gridDim = dim3(static_cast<unsigned>(blocks)), how.blockDim = dim3(static_cast<unsigned>(threads));
    how.dynamicSmemBytes = static_cast<size_t>(shared_bytes), how.stream = stream;
    how.attrs = &attribute, how.numAttrs = 1;
    return how;
  }
};

}  // namespace attnjourney
