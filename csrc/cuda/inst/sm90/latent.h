// The launch function of Hopper's decoding over latents for one dtype.
#pragma once
#include "cuda/inst/decode/latent.h"
#include "cuda/kernels/decode/ragged_merge.cuh"
#include "cuda/kernels/sm90/latent.cuh"

namespace attnjourney {

static_assert(kMostGroups <= kRaggedThreads);

template <class T>
constexpr CudaDecode sm90_latent_decode{[](int, int, int, bool) {
                                          using Kernel = Sm90Latent<T>;
                                          return DecodeTiling{.rows = Kernel::kRows,
                                                              .keys = Kernel::kKeys,
                                                              .smem_bytes = Kernel::kSmemBytes,
                                                              .blocks = 1,
                                                              .shares_all = true};
                                        },
                                        [](const DecodeTask& task, bool, cudaStream_t stream) {
                                          using Kernel = Sm90Latent<T>;
                                          const int64_t rows = int64_t{task.batch} * task.rows;
                                          launch_kernel(sm90_latent<Kernel>, int64_t{task.row_tiles} * task.splits,
                                                        Kernel::kThreads, Kernel::kSmemBytes, stream, task);
                                          if (task.splits > 1)
                                            launch_kernel(ragged_merge<T>,
                                                          (rows + kRaggedMergeRows - 1) / kRaggedMergeRows,
                                                          kRaggedMergeThreads, 0, stream, task, Kernel::kRows);
                                        }};

}  // namespace attnjourney
