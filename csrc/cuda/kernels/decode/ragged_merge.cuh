// Joins the parts of sequences that were cut (ragged_shares.cuh), always in the same order: the same bits at every
// call. Four warps have a row, each of them up to 128 columns. Rows of whole sequences are there already.
#pragma once
#include "decode_scores.cuh"

namespace attnjourney {

constexpr int kRaggedMergeRows = 4, kRaggedMergeThreads = kRaggedMergeRows * 4 * 32;

// One key head, v_head_dim up to 512, a multiple of 4; tile_rows: those of the kernel before
template <class T>
__global__ void __launch_bounds__(kRaggedMergeThreads) ragged_merge(const DecodeTask task, int tile_rows) {
  const int lane = threadIdx.x % 32, column = threadIdx.x / 32 % 4 * 128 + 4 * lane;
  const int64_t at = int64_t{blockIdx.x} * kRaggedMergeRows + threadIdx.x / 128;
  if (at >= int64_t{task.batch} * task.rows) return;
  const int batch = static_cast<int>(at / task.rows), i = static_cast<int>(at % task.rows);
  const int slot0 = task.shares[2 * batch];
  if (slot0 < 0) return;
  const int parts = task.shares[2 * batch + 1] - slot0 / 2 + 1;
  const auto row_of = [&](int part) {  // the parts but the first are the first that their groups have
    const int slot = part == 0 ? slot0 : 2 * (slot0 / 2 + part);
    return (int64_t{slot} * task.row_tiles + i / tile_rows) * tile_rows + i % tile_rows;
  };
  const float2* const stats = static_cast<const float2*>(task.part_stats);
  const float* const outputs = static_cast<const float*>(task.part_out);

  const float exponent = score_exponent<float>(task);
  RowSum<float> all{-INFINITY, 0.f};
  for (int part = lane; part < parts; part += 32) all.top = fmaxf(all.top, stats[row_of(part)].x);
#pragma unroll
  for (int w = 16; w > 0; w /= 2) all.top = fmaxf(all.top, ptx::shfl_xor(all.top, w));
  float4 y{0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int base = 0; base < parts; base += 32) {  // lane j has the weight of part base + j
    const float2 own = base + lane < parts ? stats[row_of(base + lane)] : float2{-INFINITY, 0.f};
    const float weight = part_weight(own.x, all.top, exponent);
    all.sum += weight * own.y;
    constexpr int kAtOnce = 8;
#pragma unroll 1
    for (int j = 0; j < 32 && base + j < parts; j += kAtOnce) {
      float4 x[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; u++)
        x[u] = base + j + u < parts && column < task.v_head_dim
                   ? *reinterpret_cast<const float4*>(outputs + row_of(base + j + u) * task.v_head_dim + column)
                   : float4{0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int u = 0; u < kAtOnce; u++) {
        const float w = ptx::as_float(ptx::shfl(ptx::as_bits(weight), j + u));
        y.x += w * x[u].x, y.y += w * x[u].y, y.z += w * x[u].z, y.w += w * x[u].w;
      }
    }
  }
#pragma unroll
  for (int w = 16; w > 0; w /= 2) all.sum += ptx::shfl_xor(all.sum, w);
  float lse;
  const float factor = end_row(task, batch, i / task.q_len, all, lse);
  if (column == 0) static_cast<float*>(task.lse)[at] = lse;
  if (column < task.v_head_dim)
    *reinterpret_cast<uint2*>(static_cast<T*>(task.out) + at * task.v_head_dim + column) =
        uint2{ptx::pack2<T>(y.x * factor, y.y * factor), ptx::pack2<T>(y.z * factor, y.w * factor)};
}

}  // namespace attnjourney
