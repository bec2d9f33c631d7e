// The Hopper backward at head dimensions of 129 to 256 that backward_parts.cuh does not serve. A block has 64 keys. For
// scores each warpgroup takes 32 of a tile's 64 rows, for sums half of the columns: S^T and dP^T are 64 keys x 32 rows,
// P and dS go through shared memory, and from there dV += P^T dO, dK += dS^T Q and dQ = dS K are products of 128
// columns, with 64 registers each for dK and dV.
//
// Order of an iteration: S, dP | wait | weights, dS | wait until the other warpgroup is done with the tile before | P
// and dS to shared memory, meet | dV, dK, dQ | wait | dQ out.
//
// What it is bound by is counted in docs/cuda.md. Not yet measured on a GPU. Proofs: tests/emulator/test_attention.py,
// tests/emulator/faults/attention.py.
#pragma once
#include "backward.cuh"

namespace attnjourney {

template <class Shape, bool Ranged>
struct Sm90ColumnsConsumer : Sm90BackwardConsumer<Shape, Ranged> {
  using Base = Sm90BackwardConsumer<Shape, Ranged>;
  using Base::Base;
  using Base::dk, Base::dv, Base::group, Base::memory, Base::smem, Base::task, Base::where;
  using typename Base::Fragments, typename Base::Guard, typename Base::Queries, typename Base::Scores,
      typename Base::Stats;
  static constexpr int kRows = Shape::kRows;
  struct WholeTile : Shape {
    static constexpr int kScoreRows = kRows;
  };
  using TileGuard = Sm90BackwardGuard<WholeTile, Sm90BackwardMemory<Shape>>;

  __device__ __forceinline__ void run(Queries at, int total) {
    const uint32_t weights = memory.ds, ds = memory.ds + Shape::kScoreBytes;
    bool stored = false;
    if (total > 0) {
      ptx::mbarrier_wait(memory.kv_full, 0);
      if (Ranged) Guard::clean_keys(memory, smem);
    }
#pragma unroll 1
    for (int it = 0; it < total; it++, at.next()) {
      const int qs = it % Shape::kQueryStages, os = it % Shape::kOutStages;
      ptx::mbarrier_wait(memory.q_full + 8 * qs, it / Shape::kQueryStages % 2);
      ptx::mbarrier_wait(memory.do_full + 8 * os, it / Shape::kOutStages % 2);
      {
        Scores scores, dp;
        Fragments pf, df;
        Stats lse, delta;
        ptx::wgmma_fence();
        Base::issue_scores(scores, memory.k, Base::query_rows(qs, group));
        ptx::wgmma_fence();
        Base::issue_scores(dp, memory.v, Base::out_rows(os, group));
        ptx::wgmma_wait<0>();  // @scores_done
        ptx::keep(scores);
        ptx::keep(dp);
        Base::softmax(scores, pf, lse, at, qs, group);
        if (Ranged && !at.whole(at.tile * kRows) &&
            TileGuard::clean_rows_of(memory, smem, Base::query_rows(qs), Base::out_rows(os), 0))
          Guard::poison_weights(pf, memory, smem, group * Shape::kScoreRows);
        Base::load_stats(delta, memory.delta, os, group);
        if (it > 0) ptx::bar_sync(6 + (group ^ 1), 256);  // @scores_read: by the other warpgroup, of the tile before
        Base::store_scores(weights, pf, group);
        Base::gradient(scores, df, dp, delta, ds, pf, at, group);
      }
      ptx::bar_sync(4, 256);  // @scores_written
      Base::issue_held_sum(dv, weights, Base::out_rows(os));
      Base::issue_held_sum(dk, ds, Base::query_rows(qs));
      const int tile = (where.batch * task.q_heads + at.head) * at.tiles + at.tile;
      float dq[2][32];
      Base::issue_dq(dq[0], ds, 2 * group);
      Base::issue_dq(dq[1], ds, 2 * group + 1);
      ptx::wgmma_wait<0>();  // @products_done
      ptx::keep(dq[0]);
      ptx::keep(dq[1]);
      Base::release(memory.q_empty + 8 * qs);
      Base::release(memory.do_empty + 8 * os);
      if (it + 1 < total) ptx::bar_arrive(6 + group, 256);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (Shape::kDeterministic && stored) ptx::bar_sync(8 + group, 160);
        Base::store_dq(dq[i], tile, 2 * group + i);
        stored = true;
      }
    }
    Base::finish(stored);
  }
};

// grid: as sm90_backward
template <class Shape, bool Ranged>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sm90_columns_backward(const __grid_constant__ Sm90BackwardMaps maps, const __grid_constant__ BackwardTask task) {
  Sm90Backward<Shape>::template run<Ranged, Sm90ColumnsConsumer<Shape, Ranged>>(maps, task);
}

}  // namespace attnjourney
