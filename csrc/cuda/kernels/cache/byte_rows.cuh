// Rows of caches of bytes (common/bytes.cuh): how new tokens are quantised, and rows expanded for kernels that read
// others. T: the numbers outside of the caches.
#pragma once
#include "cache_rows.cuh"

namespace attnjourney {

// A row by one warp.
template <class T>
__device__ __forceinline__ void quantize_row(ByteKind kind, const T* from, int dim, unsigned char* to, float* scale) {
  const int lane = threadIdx.x % 32;
  float top = 0.f;
  bool finite = true;
  for (int d = lane; d < dim; d += 32) {
    const float size = fabsf(ptx::to_float(from[d]));
    if (size < INFINITY)
      top = fmaxf(top, size);
    else
      finite = false;
  }
#pragma unroll
  for (int w = 1; w < 32; w *= 2) top = fmaxf(top, ptx::shfl_xor(top, w));
  finite = !ptx::any(!finite);
  const float step = byte_scale(kind, top, true);
  for (int d = lane; d < dim; d += 32) to[d] = static_cast<unsigned char>(to_byte(kind, ptx::to_float(from[d]) / step));
  if (lane == 0) *scale = byte_scale(kind, top, finite);
}

// As cache_append. grid: batch * parts
template <class T>
__global__ void __launch_bounds__(kCacheThreads) cache_append_bytes(const AppendTask task, const AppendBytes bytes) {
  constexpr int kWarps = kCacheThreads / 32;
  const NewTokens fresh(task, blockIdx.x / task.parts);
  const int first = blockIdx.x % task.parts * kWarps + threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 2; i++) {  // numbers known to the compiler: else `bytes` is copied to the stack
    if (i >= task.to.count) break;
    for (int64_t row = first; row < int64_t{task.heads} * fresh.count; row += int64_t{task.parts} * kWarps) {
      const int head = static_cast<int>(row / fresh.count), t = static_cast<int>(row % fresh.count);
      int64_t outer, slot;
      if (!fresh.place(task, t, outer, slot)) continue;
      quantize_row(bytes.kind, reinterpret_cast<const T*>(fresh.given(task, i, head, t)), bytes.dim[i],
                   task.to.cache[i].at(outer, head, slot),
                   reinterpret_cast<float*>(bytes.scale[i].at(outer, head, slot)));
    }
  }
  fresh.move_length(task);
}

// As cache_gather. grid: sequences * parts
template <class T>
__global__ void __launch_bounds__(kCacheThreads) cache_expand(const GatherTask task) {
  const int i = blockIdx.x / task.parts, part = blockIdx.x % task.parts, batch = task.first_sequence + i;
  const DecodeSequence s = decode_sequence<false>(task.cache, batch);
  const int count = s.keys.key_length;
  if (part == 0 && threadIdx.x == 0) task.held[i] = count;
  for (int t = 0; t < task.from.count; t++)
    each_unit(task.heads * count, task.from.units[t], part, task.parts, [&](int row, int d) {
      const int head = row / count, key = row - head * count;
      if (s.seen.between(key, kNear)) return;
      const Place at = place_of_key(task.cache, s, batch, key);
      float x = 0.f;
      if (at.outer >= 0)
        x = byte_number(task.bytes, task.from.cache[t].at(at.outer, head, at.slot)[d]) *
            *reinterpret_cast<const float*>(task.scales[t].at(at.outer, head, at.slot));
      store_one<T>(reinterpret_cast<T*>(task.to[t].at(i, head, key)) + d, x);
    });
}

// out (rows, dim), dense, of bytes whose rows are `pitch` apart. grid: parts
template <class T>
__global__ void __launch_bounds__(kCacheThreads)
    dequantize_rows(ByteKind kind, const unsigned char* bytes, int64_t pitch, const float* scale, T* out, int rows,
                    int dim) {
  each_unit(rows, dim, blockIdx.x, gridDim.x, [&](int row, int d) {
    store_one<T>(out + int64_t{row} * dim + d, byte_number(kind, bytes[row * pitch + d]) * scale[row]);
  });
}

}  // namespace attnjourney
