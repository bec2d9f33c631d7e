// The Hopper backward at head dimensions of 129 to 192 with values of at most 128. dK and dV take 160 registers of a
// thread, so that scores are worked on in parts of 32 of a tile's 64 rows: blocks, warpgroups and operands are those of
// backward.cuh.
//
// Order of a part: S, dP | wait | weights, dS | dV, dK. Then dS of both parts is told of, and dQ = dS K made in pieces
// of 64 columns: one a warpgroup, and the third by the one whose turn it is. The tensor cores are kept busy by the
// other warpgroup: nothing is held of the next tile.
//
// What it is bound by is counted in docs/cuda.md. Not yet measured on a GPU. Proofs: tests/emulator/test_attention.py,
// tests/emulator/faults/attention.py.
#pragma once
#include "backward.cuh"

namespace attnjourney {

template <class Shape, bool Ranged>
struct Sm90PartsConsumer : Sm90BackwardConsumer<Shape, Ranged> {
  using Base = Sm90BackwardConsumer<Shape, Ranged>;
  using Base::Base;
  using Base::dk, Base::dv, Base::group, Base::memory, Base::smem, Base::task, Base::where;
  using typename Base::Fragments, typename Base::Guard, typename Base::Queries, typename Base::Scores,
      typename Base::Stats;
  static constexpr int kD = Shape::kD, kDv = Shape::kDv, kRows = Shape::kRows;
  static_assert(Shape::kQueryStages == 2 && Shape::kOutStages == 2);

  __device__ __forceinline__ void run(Queries at, int total) {
    bool stored = false;
    if (total > 0) {
      ptx::mbarrier_wait(memory.kv_full, 0);
      if (Ranged) Guard::clean_keys(memory, smem);
    }
#pragma unroll 1
    for (int it = 0; it < total; it++, at.next()) {
      const int stage = it % 2, parity = it / 2 % 2;
      const uint32_t ds_tile = memory.ds + it % 2 * Shape::kScoreBytes;
      ptx::mbarrier_wait(memory.q_full + 8 * stage, parity);
      ptx::mbarrier_wait(memory.do_full + 8 * stage, parity);
#pragma unroll 1
      for (int part = 0; part < kRows / Shape::kScoreRows; part++) {
        const uint32_t query = Base::query_rows(stage, part), out = Base::out_rows(stage, part);
        Scores scores, dp;
        Fragments pf, df;
        Stats lse, delta;
        ptx::wgmma_fence();
        Base::issue_scores(scores, memory.k, query);
        ptx::wgmma_fence();
        Base::template issue_scores<kDv>(dp, memory.v, out);
        ptx::wgmma_wait<0>();  // @scores_done: and dV and dK of the part before
        ptx::keep(scores);
        ptx::keep(dp);
        Base::softmax(scores, pf, lse, at, stage, part);
        if (Ranged && !at.whole(at.tile * kRows)) Guard::clean_queries(pf, memory, smem, query, out, part);
        Base::load_stats(delta, memory.delta, stage, part);
        // what was written here two tiles ago has been read: see backward.cuh
        Base::gradient(scores, df, dp, delta, ds_tile, pf, at, part);
        ptx::wgmma_fence();
        Base::template issue_sum<kDv>(dv, pf, out);
        ptx::wgmma_fence();
        Base::template issue_sum<kD>(dk, df, query);
      }
      ptx::bar_arrive(4 + 2 * (it & 1) + group, 256);
      ptx::bar_sync(4 + 2 * (it & 1) + (group ^ 1), 256);
      const int tile = (where.batch * task.q_heads + at.head) * at.tiles + at.tile;
      bool released = false;
#pragma unroll
      for (int piece = 0; piece < Shape::kPieces; piece++) {
        if (!Shape::adds(piece, group, at.tile)) continue;
        float dq[32];
        Base::issue_dq(dq, ds_tile, piece);
        ptx::wgmma_wait<0>();  // @products_done: dV and dK, too
        ptx::keep(dq);
        if (!released) {
          Base::release(memory.q_empty + 8 * stage);
          Base::release(memory.do_empty + 8 * stage);
          released = true;
        }
        if (Shape::kDeterministic && stored) ptx::bar_sync(8 + group, 160);
        Base::store_dq(dq, tile, piece);
        stored = true;
      }
    }
    Base::finish(stored);
  }
};

// grid: as sm90_backward
template <class Shape, bool Ranged>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sm90_parts_backward(const __grid_constant__ Sm90BackwardMaps maps, const __grid_constant__ BackwardTask task) {
  Sm90Backward<Shape>::template run<Ranged, Sm90PartsConsumer<Shape, Ranged>>(maps, task);
}

}  // namespace attnjourney
