// The launch function of decoding for one dtype.
#pragma once
#include "cuda/decode/launch_decode.h"
#include "cuda/kernels/decode/decode_fma.cuh"
#include "cuda/kernels/decode/decode_merge.cuh"
#include "cuda/kernels/decode/decode_mma.cuh"
#include "cuda/launch.h"

namespace attnjourney {

// f<Kernel>() for the kernel on mma.sync that takes these head dims and that many rows
template <class T, class F>
auto with_decode_mma(int head_dim, int v_head_dim, int rows, F&& f) {
  const int dim = std::max(head_dim, v_head_dim);
  if (rows > 16) {
    if (dim <= 64) return f.template operator()<DecodeMma<T, 64, 4, 8, true>>();
    if (dim <= 128) return f.template operator()<DecodeMma<T, 128, 4, 8, true>>();
    return f.template operator()<DecodeMma<T, 256, 4, 5, true>>();
  }
  if (dim <= 64) return f.template operator()<DecodeMma<T, 64, 4, 4>>();
  if (dim <= 128) return f.template operator()<DecodeMma<T, 128, 4, 3>>();
  return f.template operator()<DecodeMma<T, 256, 2, 3>>();
}

template <class T>
DecodeTiling decode_tiling(int head_dim, int v_head_dim, int rows, bool chunked) {
  if constexpr (sizeof(T) == 2)
    if (chunked)
      return with_decode_mma<T>(head_dim, v_head_dim, rows, [&]<class Kernel>() {
        return DecodeTiling{.rows = Kernel::kRows,
                            .keys = Kernel::kKeys,
                            .smem_bytes = Kernel::kSmemBytes,
                            .blocks = Kernel::kBlocks,
                            .joins = Kernel::kJoins};
      });
  using Shape = DecodeFmaShape<T>;
  return {Shape::kRows, Shape::kKeys, Shape(head_dim, v_head_dim).bytes(), DecodeFma<T>::kBlocks};
}

template <class T>
void launch_sm80_decode(const DecodeTask& task, bool chunked, cudaStream_t stream) {
  const DecodeTiling tiling = decode_tiling<T>(task.head_dim, task.v_head_dim, task.rows, chunked);
  // tiles of rows, and rows of results; packed rows: what there may be of them
  const int64_t pairs = int64_t{task.batch} * task.kv_heads;
  const int64_t tiles = task.cu_q ? int64_t{task.kv_heads} * task.tiles : pairs * task.row_tiles;
  const int64_t rows = task.cu_q ? tiles * tiling.rows : pairs * task.rows, blocks = tiles * task.splits;
  bool done = false;
  if constexpr (sizeof(T) == 2)
    if (chunked) {
      with_decode_mma<T>(task.head_dim, task.v_head_dim, task.rows, [&]<class Kernel>() {
        static_assert(fits(Kernel::kSmemBytes, true));
        launch_kernel(decode_mma<Kernel>, blocks, Kernel::kThreads, Kernel::kSmemBytes, stream, task);
      });
      done = true;
    }
  static_assert(fits(DecodeFmaShape<T>(256, 256).bytes(), true));
  if (!done) launch_kernel(decode_fma<T>, blocks, DecodeFma<T>::kThreads, tiling.smem_bytes, stream, task, chunked);
  if (task.splits > 1 && !task.arrivals)
    launch_kernel(decode_merge<T>, rows, kMergeThreads, merge_smem<Compute<T>>(task.splits, task.v_head_dim), stream,
                  task, tiling.rows);
}

}  // namespace attnjourney
