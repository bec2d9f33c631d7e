// Joins what the blocks of a sequence found about a row, always in the same order: the same bits at every call.
#pragma once
#include "decode_scores.cuh"

namespace attnjourney {

constexpr int kMergeThreads = 256, kMergeWarps = kMergeThreads / 32;
// A weight for each split, two numbers and an output for each warp.
template <class Real>
constexpr int merge_smem(int splits, int v_head_dim) {
  return (splits + kMergeWarps * (2 + v_head_dim)) * static_cast<int>(sizeof(Real));
}

// grid: batch * kv_heads * rows, packed: kv_heads * tiles * tile_rows; tile_rows: those of the kernel before. Each warp
// adds up every kMergeWarps-th split.
template <class T>
__global__ void __launch_bounds__(kMergeThreads) decode_merge(const DecodeTask task, int tile_rows) {
  using Real = Compute<T>;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  int batch, kv_head, i, q_len = task.q_len;
  int64_t unit;
  if (task.cu_q) {
    unit = blockIdx.x / tile_rows, kv_head = static_cast<int>(unit) / task.tiles;
    const PackedRows packed(task, static_cast<int>(unit) % task.tiles, tile_rows);
    batch = packed.batch, i = packed.row0 + blockIdx.x % tile_rows;
    if (i >= packed.count) return;
    q_len = packed.count / task.group;
  } else {
    const int pair = blockIdx.x / task.rows;
    batch = pair / task.kv_heads, kv_head = pair % task.kv_heads, i = blockIdx.x % task.rows;
    unit = static_cast<int64_t>(pair) * task.row_tiles + i / tile_rows;
  }
  const int head = kv_head * task.group + i / q_len;
  const int64_t first = unit * task.splits * tile_rows + i % tile_rows;  // the row's part of the first split
  const auto part = [&](int split) { return first + static_cast<int64_t>(split) * tile_rows; };
  const Real *const stats = static_cast<const Real*>(task.part_stats), *const parts =
                                                                           static_cast<const Real*>(task.part_out);
  Real *const weights = reinterpret_cast<Real*>(ptx::dynamic_smem()), *const tops = weights + task.splits,
              *const sums = tops + kMergeWarps, *const outputs = sums + kMergeWarps;  // outputs [warp][v_head_dim]

  const Real exponent = score_exponent<Real>(task);
  Real top = -Real(INFINITY), sum = 0;
  for (int split = tid; split < task.splits; split += kMergeThreads) {
    const Real own = stats[2 * part(split)];
    top = own > top ? own : top;
  }
#pragma unroll
  for (int w = 16; w > 0; w /= 2) {
    const Real other = ptx::shfl_xor(top, w);
    top = other > top ? other : top;
  }
  if (lane == 0) tops[warp] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kMergeWarps; w++) top = tops[w] > top ? tops[w] : top;
  for (int split = tid; split < task.splits; split += kMergeThreads) {
    const Real own = stats[2 * part(split) + 1], weight = part_weight(stats[2 * part(split)], top, exponent);
    sum += weight * own;
    weights[split] = own == Real(0) ? Real(-1) : weight;  // -1: there is no output
  }
#pragma unroll
  for (int w = 16; w > 0; w /= 2) sum += ptx::shfl_xor(sum, w);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();

  for (int column = lane; column < task.v_head_dim; column += 32) {
    Real value = 0;
#pragma unroll 4
    for (int split = warp; split < task.splits; split += kMergeWarps)
      if (!(weights[split] < Real(0))) value += weights[split] * parts[part(split) * task.v_head_dim + column];
    outputs[warp * task.v_head_dim + column] = value;
  }
  sum = sums[0];
#pragma unroll
  for (int w = 1; w < kMergeWarps; w++) sum += sums[w];
  Real lse;
  const Real factor = end_row(task, batch, head, RowSum<Real>{top, sum}, lse);
  const DecodeResult to(task, batch, kv_head, i);
  if (tid == 0) static_cast<Real*>(task.lse)[to.lse] = lse;
  __syncthreads();
  T* const out = static_cast<T*>(task.out) + to.out;
  for (int column = tid; column < task.v_head_dim; column += kMergeThreads) {
    Real value = 0;
#pragma unroll
    for (int w = 0; w < kMergeWarps; w++) value += outputs[w * task.v_head_dim + column];
    store_one<T>(out + column, value * factor);
  }
}

}  // namespace attnjourney
