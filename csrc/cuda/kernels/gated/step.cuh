// Gated linear attention row after row, for few rows: a token of generation. One block for each sequence, head and 32
// columns of the values, a warp's lanes over them and four warps over the rows of the state, which stay in registers:
// the state is read and written once.
#pragma once
#include "chunk.cuh"

namespace attnjourney {

// Depth: rows of the state that a thread holds, d = warp, warp + 4, ...
template <class T, int Depth>
struct GatedStep {
  using Real = Compute<T>;
  static constexpr int kWarps = kGatedThreads / 32, kMost = Depth * kWarps;
  // key, what it writes, gates, query; partial sums of the warps; the factors of key and query
  static constexpr int smem_bytes() { return int(sizeof(Real)) * (4 * kMost + kWarps * 32); }

  const GatedTask& task;
  Real *key, *write, *decay, *query, *sums;
  int warp, lane;
  __device__ __forceinline__ explicit GatedStep(const GatedTask& task_) : task(task_) {
    key = reinterpret_cast<Real*>(ptx::dynamic_smem()), write = key + kMost, decay = write + kMost;
    query = decay + kMost, sums = query + kMost;
    warp = ptx::uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  }

  // 1 / the norm of a row, in every thread: each warp adds up all of it
  __device__ __forceinline__ Real inverse(const T* row) const {
    if (task.norm_eps < 0) return Real(1);
    Real sum = 0;
    for (int d = lane; d < task.head_dim; d += 32) {
      const Real x = ptx::to_float(row[d]);
      sum += x * x;
    }
    return Real(1) / sqrt(warp_sum(sum) + Real(task.norm_eps));
  }
  // Of all warps' numbers of a column. Whoever comes back knows that all threads have come here, which is what lets key
  // and query be put anew; between two calls all wait for what was put.
  __device__ __forceinline__ Real over_warps(Real x) const {
    sums[warp * 32 + lane] = x;
    __syncthreads();
    Real sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) sum += sums[w * 32 + lane];
    return sum;
  }

  __device__ __forceinline__ void run() {
    const int slices = (task.v_head_dim + kGatedStepCols - 1) / kGatedStepCols, block = blockIdx.x;
    const int remaining = block / slices, n = remaining / task.v_heads, head = remaining - n * task.v_heads;
    const int col = (block - remaining * slices) * kGatedStepCols + lane;
    const bool there = col < task.v_head_dim;
    const GatedSequence s = gated_sequence(task, n, gated_rows(sizeof(Real)));
    const int64_t at = (int64_t(n) * task.v_heads + head) * task.head_dim * task.v_head_dim + col;
    const Real* first = static_cast<const Real*>(task.initial_state);
    Real state[Depth];
#pragma unroll
    for (int i = 0; i < Depth; i++) {
      const int d = i * kWarps + warp;
      state[i] = first && there && d < task.head_dim ? first[at + int64_t(d) * task.v_head_dim] : Real(0);
    }
    const int key_head = head / (task.v_heads / task.kv_heads);
    const T* keys = static_cast<const T*>(task.key.data) + s.batch * task.key.batch + key_head * task.key.head;
    const T* values = static_cast<const T*>(task.value.data) + s.batch * task.value.batch + head * task.value.head;
    const Real* gates = static_cast<const Real*>(task.gate) + s.batch * task.gate_batch + head * task.gate_head;
    const int query_head = static_cast<int>(int64_t(head) * task.q_heads / task.v_heads);
#pragma unroll 1
    for (int i = 0; i < s.len; i++) {
      const int row = s.first + i;
      const T* k = keys + row * task.key.row;
      const Real of_key = inverse(k), beta = task.delta ? gated_beta<Real>(task, s.batch, head, row) : Real(1);
      for (int d = threadIdx.x; d < kMost; d += kGatedThreads) {
        const bool used = d < task.head_dim;
        const Real x = used ? Real(ptx::to_float(k[d])) * of_key : Real(0);
        Real gate = 1;
        if (used && task.kind != Gate::none)
          gate = gated_exp(gates[row * task.gate_row + (task.kind == Gate::channel ? d : 0)]);
        key[d] = x, write[d] = x * beta, decay[d] = gate;
      }
      __syncthreads();
      Real error = there ? Real(ptx::to_float(values[row * task.value.row + col])) : Real(0), held = 0;
#pragma unroll
      for (int j = 0; j < Depth; j++) {
        const int d = j * kWarps + warp;
        state[j] *= decay[d];
        held += key[d] * state[j];
      }
      if (task.delta) error -= over_warps(held);
#pragma unroll
      for (int j = 0; j < Depth; j++) state[j] += write[j * kWarps + warp] * error;
#pragma unroll 1
      for (int g = 0; g < task.group; g++) {
        const T* q = static_cast<const T*>(task.query.data) + s.batch * task.query.batch +
                     (query_head + g) * task.query.head + row * task.query.row;
        const Real of_query = Real(task.scale) * inverse(q);
        for (int d = threadIdx.x; d < kMost; d += kGatedThreads)
          query[d] = d < task.head_dim ? Real(ptx::to_float(q[d])) * of_query : Real(0);
        __syncthreads();
        Real read = 0;
#pragma unroll
        for (int j = 0; j < Depth; j++) read += query[j * kWarps + warp] * state[j];
        read = over_warps(read);
        if (there && warp == 0) {
          const int64_t head_row = (int64_t(s.batch) * task.out_heads() + head * task.group + g) * task.len + row;
          store_one(static_cast<T*>(task.out) + head_row * task.v_head_dim + col, read);
        }
      }
    }
    if (!task.state || !there) return;
#pragma unroll
    for (int i = 0; i < Depth; i++) {
      const int d = i * kWarps + warp;
      if (d < task.head_dim) static_cast<Real*>(task.state)[at + int64_t(d) * task.v_head_dim] = state[i];
    }
  }
};

// grid: sequences * v_heads * slices
template <class T, int Depth>
__global__ void __launch_bounds__(kGatedThreads) gated_step(const GatedTask task) {
  GatedStep<T, Depth>(task).run();
}

}  // namespace attnjourney
