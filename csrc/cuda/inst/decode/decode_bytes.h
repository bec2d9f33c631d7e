// The launch function of decoding over caches of bytes for one dtype of queries.
#pragma once
#include "decode.h"

namespace attnjourney {

// f<Kernel>(): as with_decode_mma
template <class T, class F>
auto with_decode_bytes_mma(int head_dim, int v_head_dim, int rows, F&& f) {
  const int dim = std::max(head_dim, v_head_dim);
  if (rows > 16) {
    if (dim <= 64) return f.template operator()<DecodeMma<T, 64, 4, 8, true, true>>();
    if (dim <= 128) return f.template operator()<DecodeMma<T, 128, 4, 8, true, true>>();
    return f.template operator()<DecodeMma<T, 256, 4, 7, true, true>>();
  }
  if (dim <= 64) return f.template operator()<DecodeMma<T, 64, 4, 5, false, true>>();
  if (dim <= 128) return f.template operator()<DecodeMma<T, 128, 4, 4, false, true>>();
  return f.template operator()<DecodeMma<T, 256, 2, 3, false, true>>();
}

template <class T>
DecodeTiling decode_bytes_tiling(int head_dim, int v_head_dim, int rows, bool chunked) {
  if constexpr (sizeof(T) == 2)
    if (chunked)
      return with_decode_bytes_mma<T>(head_dim, v_head_dim, rows, [&]<class Kernel>() {
        return DecodeTiling{.rows = Kernel::kRows,
                            .keys = Kernel::kKeys,
                            .smem_bytes = Kernel::kSmemBytes,
                            .blocks = Kernel::kBlocks,
                            .joins = Kernel::kJoins};
      });
  using Shape = DecodeFmaShape<T, true>;
  return {Shape::kRows, Shape::kKeys, Shape(head_dim, v_head_dim).bytes(), DecodeFma<T, true>::kBlocks};
}

template <class T>
void launch_decode_bytes(const DecodeTask& task, bool chunked, cudaStream_t stream) {
  const DecodeTiling tiling = decode_bytes_tiling<T>(task.head_dim, task.v_head_dim, task.rows, chunked);
  const int64_t pairs = int64_t{task.batch} * task.kv_heads, blocks = pairs * task.row_tiles * task.splits;
  bool done = false;
  if constexpr (sizeof(T) == 2)
    if (chunked) {
      with_decode_bytes_mma<T>(task.head_dim, task.v_head_dim, task.rows, [&]<class Kernel>() {
        static_assert(fits(Kernel::kSmemBytes, true));
        launch_kernel(decode_mma<Kernel>, blocks, Kernel::kThreads, Kernel::kSmemBytes, stream, task);
      });
      done = true;
    }
  static_assert(fits(DecodeFmaShape<T, true>(256, 256).bytes(), true));
  if (!done)
    launch_kernel(decode_bytes_fma<T>, blocks, DecodeFma<T, true>::kThreads, tiling.smem_bytes, stream, task, chunked);
  if (task.splits > 1 && !task.arrivals)
    launch_kernel(decode_merge<T>, pairs * task.rows, kMergeThreads,
                  merge_smem<Compute<T>>(task.splits, task.v_head_dim), stream, task, tiling.rows);
}

}  // namespace attnjourney
