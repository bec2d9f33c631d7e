// The passes before and after fp16x2_backward; fp32_prepare comes first.
#pragma once
#include "fp16x2_planes.cuh"
#include "passes.cuh"

namespace attnjourney {

// Planes of query, grad_out, key, value, in this order. Sums run over columns (scores and dP) and over rows
// (gradients), so columns count as rows do; those of V are never summed over rows. Gradients are often small, grad_out
// may be 2^-88. grid: 2 * batch * (q_heads * query_tiles + kv_heads * key_tiles)
template <int D>
__global__ void __launch_bounds__(Fp16x2Size<D>::kThreads)
    fp16x2_backward_planes(const __grid_constant__ BackwardTask p, const __grid_constant__ Fp16x2BackwardPlanes w) {
  constexpr int kRows = Fp16x2Size<D>::kRows;
  const int queries = p.batch * p.q_heads * w.query_tiles, keys = p.batch * p.kv_heads * w.key_tiles;
  int tile = blockIdx.x;
  const bool is_row = tile < 2 * queries;
  if (!is_row) tile -= 2 * queries;
  const int all = is_row ? queries : keys;
  const bool second = tile >= all;  // grad_out, value
  if (second) tile -= all;
  const int tiles = is_row ? w.query_tiles : w.key_tiles, heads = is_row ? p.q_heads : p.kv_heads;
  const int pair = tile / tiles, batch = pair / heads, head = pair - batch * heads;
  const int row0 = (tile - pair * tiles) * kRows;
  const Sequence sequence = sequence_of(p, batch);
  const auto one_of = [&](auto query, auto grad_out, auto key, auto value) {
    return is_row ? (second ? grad_out : query) : second ? value : key;
  };
  const Strides s = one_of(p.query_strides, p.grad_out_strides, p.key_strides, p.value_strides);
  Fp16x2Rows r;
  r.from = static_cast<const float*>(one_of(p.query, p.grad_out, p.key, p.value)) + batch * s.batch + head * s.head;
  r.length = is_row ? p.q_len : p.kv_len, r.end = is_row ? sequence.q_len : sequence.keys.key_length;
  r.to = one_of(w.query, w.grad_out, w.key, w.value) + int64_t(pair) * r.length * (4 * D);
  r.stride = s.row, r.dim = second ? p.v_head_dim : p.head_dim;
  r.low_factor = kLowFactor, r.range = 27, r.lowest = is_row && second ? 127 - 88 : 127 - 32;
  r.columns = is_row || !second;
  const PowerOfTwo power = fp16x2_tile<D>(r, row0, w.needs_fallback);
  if (threadIdx.x == 0) {
    float4& scale = (is_row ? w.query_scale : w.key_scale)[tile];
    (second ? scale.y : scale.x) = (second ? scale.w : scale.z) = power.inverse();
  }

  const int row = row0 + threadIdx.x;
  if (!is_row || !second || threadIdx.x >= kRows || row >= r.end) return;
  const float inverse = p.inverse[int64_t(pair) * p.rows + row], delta = p.delta[int64_t(pair) * p.rows + row];
  if (inverse != inverse || !is_finite(delta)) ptx::atomic_add(w.needs_fallback, 1);
}

// After: dQ = scale * sum, as Fp16x2Backward leaves it, or Fp32Backward where numbers did not split. One thread for
// each chunk of four columns.
template <class Kernel>
__global__ void __launch_bounds__(kFp32PassThreads)
    fp16x2_query(const __grid_constant__ BackwardTask p, const uint32_t* needs_fallback, int64_t rows_in_all) {
  constexpr int D = Kernel::kD;
  const bool split = *needs_fallback == 0;
  fp32_query_chunk<float>(p, D, rows_in_all, [&](float (&x)[4], int64_t number, int row, int chunk) {
    if (split)
      Kernel::load_query(x, p.query_sum + (number - row % Kernel::kRows) * D, row % Kernel::kRows, chunk);
    else
      fp32_query_sum(x, p, D, number, row, chunk);
  });
}

}  // namespace attnjourney
