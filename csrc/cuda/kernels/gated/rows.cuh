// The passes of gated linear attention over single rows and gates.
#pragma once
#include "chunk.cuh"

namespace attnjourney {

constexpr int kGatedPassThreads = 256;

constexpr int kGatedPassRows = kGatedPassThreads / 32;

// Blocks of passes with a warp for each row of `heads` heads of every batch item.
inline int64_t gated_pass_blocks(const GatedTask& t, int heads) {
  return int64_t{t.batch} * heads * ((t.len + kGatedPassRows - 1) / kGatedPassRows);
}
struct GatedPassRow {
  int pair, row;  // batch item * heads + head; row: of the head
};
__device__ __forceinline__ GatedPassRow gated_pass_row(int block, int len) {
  const int per_head = (len + kGatedPassRows - 1) / kGatedPassRows, pair = block / per_head;
  return {pair, (block - pair * per_head) * kGatedPassRows + int(threadIdx.x) / 32};
}

// One warp for each row of query, then of key.
template <class T>
__global__ void __launch_bounds__(kGatedPassThreads) gated_norms(const GatedTask task) {
  using Real = Compute<T>;
  const int query_blocks = task.batch * task.q_heads * ((task.len + kGatedPassRows - 1) / kGatedPassRows);
  const bool of_query = int(blockIdx.x) < query_blocks;
  const GatedPassRow at = gated_pass_row(int(blockIdx.x) - (of_query ? 0 : query_blocks), task.len);
  if (at.row >= task.len) return;
  const LinearRows& rows = of_query ? task.query : task.key;
  const int heads = of_query ? task.q_heads : task.kv_heads;
  const T* x =
      static_cast<const T*>(rows.data) + at.pair / heads * rows.batch + at.pair % heads * rows.head + at.row * rows.row;
  Real sum = 0;
  for (int d = threadIdx.x % 32; d < task.head_dim; d += 32) {
    const Real y = ptx::to_float(x[d]);
    sum += y * y;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0)
    static_cast<Real*>(of_query ? task.query_inverse : task.key_inverse)[int64_t(at.pair) * task.len + at.row] =
        Real(1) / sqrt(sum + Real(task.norm_eps));
}

// reads[i]: the product of the gates of the chunk's rows up to i; writes[i]: of those after i. One block for each chunk
// and head; a thread for each channel, or for each row.
template <class Real>
__global__ void __launch_bounds__(kGatedThreads) gated_decays(const GatedTask task) {
  constexpr int kRows = gated_rows(sizeof(Real)), kGatesAtOnce = sizeof(Real) == 8 ? 2 : 4;
  const int slot = blockIdx.x / task.v_heads, head = blockIdx.x - slot * task.v_heads;
  const GatedChunk chunk = gated_chunk(task, slot, kRows);
  const Real* gate = static_cast<const Real*>(task.gate) + chunk.batch * task.gate_batch + head * task.gate_head;
  const int64_t first = (int64_t(chunk.batch) * task.v_heads + head) * task.len + chunk.first;
  Real *const reads = static_cast<Real*>(task.reads), *const writes = static_cast<Real*>(task.writes);
  if (task.kind == Gate::head) {
    Real* factors = reinterpret_cast<Real*>(ptx::dynamic_smem());
    for (int i = threadIdx.x; i < chunk.count; i += kGatedThreads)
      factors[i] = gated_exp(gate[int64_t(chunk.first + i) * task.gate_row]);
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * chunk.count; i += kGatedThreads) {
      const bool write = i >= chunk.count;
      const int row = write ? i - chunk.count : i;
      Real product = 1;
      for (int k = write ? row + 1 : 0; k < (write ? chunk.count : row + 1); k++) product *= factors[k];
      (write ? writes : reads)[first + row] = product;
    }
    return;
  }
  for (int d = threadIdx.x; d < task.head_dim; d += kGatedThreads) {
    const Real* x = gate + int64_t(chunk.first) * task.gate_row + d;
    Real product = 1;
#pragma unroll kGatesAtOnce
    for (int i = 0; i < chunk.count; i++) {
      product *= gated_exp(x[i * task.gate_row]);
      reads[(first + i) * task.head_dim + d] = product;
    }
    product = 1;
#pragma unroll kGatesAtOnce
    for (int i = chunk.count - 1; i >= 0; i--) {
      writes[(first + i) * task.head_dim + d] = product;
      product *= gated_exp(x[i * task.gate_row]);
    }
  }
}

// Gradients of query (or, of_key, of key) from those of its heads: their sum, through the norm, times scale, in dtype.
// One warp for each row; rows behind the last packed sequence are 0.
template <class T>
__global__ void __launch_bounds__(kGatedPassThreads, 4) gated_finish(const GatedTask task, bool of_key) {
  using Real = Compute<T>;
  constexpr int kPer = kGatedMost / 32;
  const int heads = of_key ? task.kv_heads : task.q_heads, lane = threadIdx.x % 32;
  const auto [pair, at] = gated_pass_row(blockIdx.x, task.len);
  if (at >= task.len) return;
  const int sum_heads = of_key ? task.v_heads : task.out_heads(), shared = sum_heads / heads;
  const int64_t row = int64_t(pair) * task.len + at;
  const int64_t first = (int64_t(pair / heads) * sum_heads + pair % heads * shared) * task.len + at;
  const bool there = !task.offsets || at < task.offsets[task.sequences];
  const Real* sums = static_cast<const Real*>(of_key ? task.key_sums : task.query_sums);
  Real grad[kPer] = {};
  for (int h = 0; there && h < shared; h++)
#pragma unroll
    for (int i = 0; i < kPer; i++)
      if (lane + 32 * i < task.head_dim)
        grad[i] += sums[(first + int64_t(h) * task.len) * task.head_dim + lane + 32 * i];
  if (task.norm_eps >= 0 && there) {
    const LinearRows& rows = of_key ? task.key : task.query;
    const T* x =
        static_cast<const T*>(rows.data) + pair / heads * rows.batch + pair % heads * rows.head + at * rows.row + lane;
    Real dot = 0;
#pragma unroll
    for (int i = 0; i < kPer; i++)
      if (lane + 32 * i < task.head_dim) dot += grad[i] * ptx::to_float(x[32 * i]);
    const Real inverse = static_cast<const Real*>(of_key ? task.key_inverse : task.query_inverse)[row];
    dot = warp_sum(dot) * inverse * inverse;
#pragma unroll
    for (int i = 0; i < kPer; i++)
      if (lane + 32 * i < task.head_dim) grad[i] = inverse * (grad[i] - dot * ptx::to_float(x[32 * i]));
  }
  const Real scale = of_key ? Real(1) : Real(task.scale);
  T* to = static_cast<T*>(of_key ? task.grad_key : task.grad_query) + row * task.head_dim + lane;
#pragma unroll
  for (int i = 0; i < kPer; i++)
    if (lane + 32 * i < task.head_dim) store_one(to + 32 * i, scale * grad[i]);
}

// A gradient with a number a row, from those of the slices of key's columns.
template <class Real>
__global__ void __launch_bounds__(kGatedPassThreads)
    gated_sum_slices(const GatedTask task, const void* sums, void* to) {
  const int64_t count = int64_t(task.batch) * task.v_heads * task.len;
  const int64_t i = int64_t(blockIdx.x) * kGatedPassThreads + threadIdx.x;
  if (i >= count) return;
  Real sum = 0;
  if (!task.offsets || i % task.len < task.offsets[task.sequences])
    for (int slice = 0; slice < gated_slices(task.head_dim); slice++)
      sum += static_cast<const Real*>(sums)[slice * count + i];
  static_cast<Real*>(to)[i] = sum;
}

}  // namespace attnjourney
