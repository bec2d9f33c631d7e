// The pass before the kernels of backward_jvp.cuh: what they read of a row.
#pragma once
#include "backward_jvp_task.cuh"

namespace attnjourney {

constexpr int kChangePassThreads = 256, kChangePassRows = kChangePassThreads / 32;

// One warp for each row of the scratch.
template <class T, class Real>
__global__ void __launch_bounds__(kChangePassThreads)
    backward_jvp_prepare(const __grid_constant__ BackwardJvpTaskOf<Real> p, int64_t rows_in_all) {
  constexpr int kChunk = 16 / sizeof(T);
  const int64_t number = int64_t(blockIdx.x) * kChangePassRows + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (number >= rows_in_all) return;
  const int pair = static_cast<int>(number / p.rows);
  const ScratchRow own(p, pair, static_cast<int>(number - int64_t(pair) * p.rows));
  const Sequence sequence = sequence_of<true>(p, own.batch);
  const bool exists = own.row < sequence.q_len;
  const auto add = [&](Real& sum, const void* a, const Strides& sa, const void* b, const Strides& sb) {
    if (!exists || !a || !b) return;
    const auto row_of = [&](const void* base, const Strides& s) {
      return static_cast<const T*>(base) + own.batch * s.batch + own.head * s.head +
             (sequence.q_begin + own.row) * s.row;
    };
    const T *const x = row_of(a, sa), *const y = row_of(b, sb);
    for (int c = lane * kChunk; c < p.v_head_dim; c += 32 * kChunk) {
      if constexpr (sizeof(T) == 2) {
        const uint4 u = *reinterpret_cast<const uint4*>(x + c), w = *reinterpret_cast<const uint4*>(y + c);
        const uint32_t us[4] = {u.x, u.y, u.z, u.w}, ws[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float2 f = ptx::unpack2<T>(us[i]), g = ptx::unpack2<T>(ws[i]);
          sum += f.x * g.x + f.y * g.y;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kChunk; i++) sum += x[c + i] * y[c + i];
      }
    }
  };
  Real delta = 0, change = 0;
  add(delta, p.out, p.out_strides, p.grad_out, p.grad_out_strides);
  add(change, p.out_tangent, p.out_tangent_strides, p.grad_out, p.grad_out_strides);
  add(change, p.out, p.out_strides, p.grad_out_tangent, p.grad_out_tangent_strides);
#pragma unroll
  for (int m = 1; m < 32; m *= 2) delta += ptx::shfl_xor(delta, m), change += ptx::shfl_xor(change, m);
  if (lane != 0) return;
  const int64_t stat = stat_row(p, own, sequence.q_begin);
  const RowStats<Real> stats = exists ? p.stats[stat] : RowStats<Real>{0, 0};
  RowChange<Real> to{};
  to.reference = INFINITY;
  if (stats.inverse != 0) {  // a NaN of its sum shows in all of it
    to.reference = stats.inverse == stats.inverse ? stats.reference : stats.inverse;
    to.inverse = stats.inverse, to.mu = p.lse_tangent[stat];
    to.delta = p.grad_lse ? delta - p.grad_lse[stat] : delta;
    to.delta_change = p.grad_lse_tangent ? change - p.grad_lse_tangent[stat] : change;
  }
  p.changes[number] = to;
  if (!p.reference) return;
  const Real sink = p.sinks_tangent ? p.sinks_tangent[int64_t(own.batch) * p.q_heads + own.head] : 0;
  p.reference[number] = to.reference, p.inverse[number] = to.inverse;
  p.delta[number] = to.inverse == 0 ? 0 : (sink - to.mu) * to.delta + to.delta_change;
}

}  // namespace attnjourney
