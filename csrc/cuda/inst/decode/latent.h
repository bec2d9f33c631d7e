// The launch functions of decoding over latents for one dtype.
#pragma once
#include "cuda/decode/launch_latent.h"
#include "cuda/kernels/decode/decode_merge.cuh"
#include "cuda/kernels/decode/latent_fma.cuh"
#include "cuda/launch.h"

namespace attnjourney {

constexpr int kRoundKeys = 8192;  // a part of 64 rows costs as much as a thousand keys: few of them

// kernel over all parts, and what joins them; tile_rows: of the kernel
template <class T, class Kernel>
void launch_latent(Kernel kernel, const DecodeTask& task, int threads, int smem_bytes, int tile_rows,
                   cudaStream_t stream) {
  const int64_t items = int64_t{task.batch} * task.kv_heads;
  launch_kernel(kernel, items * task.row_tiles * task.splits, threads, smem_bytes, stream, task);
  if (task.splits > 1)
    launch_kernel(decode_merge<T>, items * task.rows, kMergeThreads,
                  merge_smem<Compute<T>>(task.splits, task.v_head_dim), stream, task, tile_rows);
}

template <class Kernel>
constexpr CudaDecode latent_mma_decode{[](int, int, int, bool) {
                                         return DecodeTiling{Kernel::kRows, Kernel::kKeys, Kernel::kSmemBytes,
                                                             Kernel::kBlocks, kRoundKeys};
                                       },
                                       [](const DecodeTask& task, bool, cudaStream_t stream) {
                                         launch_latent<typename Kernel::T>(latent_mma<Kernel>, task, Kernel::kThreads,
                                                                           Kernel::kSmemBytes, Kernel::kRows, stream);
                                       }};

template <class T, bool Bytes = false>
constexpr CudaDecode latent_fma_decode{[](int head_dim, int, int, bool) {
                                         using Kernel = LatentFma<T, Bytes>;
                                         return DecodeTiling{Kernel::kRows, Kernel::kKeys, Kernel::smem_bytes(head_dim),
                                                             Kernel::kBlocks, kRoundKeys};
                                       },
                                       [](const DecodeTask& task, bool, cudaStream_t stream) {
                                         using Kernel = LatentFma<T, Bytes>;
                                         static_assert(fits(Kernel::smem_bytes(kLatentDim), true));
                                         launch_latent<T>(latent_fma<Kernel>, task, Kernel::kThreads,
                                                          Kernel::smem_bytes(task.head_dim), Kernel::kRows, stream);
                                       }};

template <class T, bool Bytes = false>
constexpr LatentDecode latent_decode = [] {
  using Large = LatentMma<T, 64, 32, Bytes>;
  using Small = LatentMma<T, 32, 16, Bytes>;
  static_assert(fits(Large::kSmemBytes, false) && fits(Small::kSmemBytes, true));
  return LatentDecode{latent_mma_decode<Large>, latent_mma_decode<Small>, latent_fma_decode<T, Bytes>};
}();

}  // namespace attnjourney
