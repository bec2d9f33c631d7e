// Attention backward with options for Hopper at head dimension 256: tiles, operands and sums of backward_columns.cuh,
// what the options mean and who hands out the tiles as in full_backward.cuh.
//
// Order of an iteration: S, dP | what the options hide and keep | wait | weights, dS | wait until the other warpgroup
// is done with the tile before | both to shared memory, meet | dV, dK, dQ | the mask's gradient | wait | dQ out.
//
// Not yet measured on a GPU. Proofs: tests/emulator/test_full_sm90_backward.py, tests/emulator/faults/full_backward.py.
#pragma once
#include "full_backward.cuh"

namespace attnjourney {

template <class Shape>
struct Sm90FullColumnsConsumer : Sm90FullConsumer<Shape> {
  using Base = Sm90FullConsumer<Shape>;
  using Base::Base;
  using Base::dk, Base::dv, Base::maps, Base::smem, Base::task, Base::work;
  using Plain = Sm90BackwardConsumer<Shape, true>;
  using Plain::group;
  using Memory = Sm90FullBackwardMemory<Shape>;
  using Guard = Sm90BackwardGuard<typename Shape::Part, Memory>;
  struct WholeTile : Shape::Part {
    static constexpr int kScoreRows = Shape::kRows;
  };
  using TileGuard = Sm90BackwardGuard<WholeTile, Memory>;
  using Scores = Sm90FullBackwardScores<Shape>;
  static constexpr int kRows = Shape::kRows, kScoreRows = Scores::kScoreRows, kHeld = Shape::kHeld;
  using Fragments = uint32_t[kScoreRows / 16][4];

  __device__ __forceinline__ void run() {
    const TileRing<Shape> ring(Base::memory, smem);
    if (ring.wait(0).exists()) {
      ptx::mbarrier_wait(Base::memory.kv_full, 0);
      Guard::clean_keys(Base::memory, smem);
    }
    const int row = group * kScoreRows;  // the first whose scores are this warpgroup's
    float slope_sum = 0.f;
    bool stored = false;
#pragma unroll 1
    for (uint32_t it = 0; ring.wait(it).exists(); it++) {
      const Memory memory(ptx::opaque(Base::memory.k));  // addresses are recomputed, not held
      const uint32_t qs = it % Shape::kQueryStages, os = it % Shape::kOutStages, ms = it % Shape::kMaskStages;
      const uint32_t weights = memory.ds + Shape::kScoreBytes, panel = memory.mask + ms * Shape::kMaskBytes;
      ptx::mbarrier_wait(memory.q_full + 8 * qs, it / Shape::kQueryStages % 2);
      ptx::mbarrier_wait(memory.do_full + 8 * os, it / Shape::kOutStages % 2);
      if (maps.mask_tiles) ptx::mbarrier_wait(memory.mask_full + 8 * ms, it / Shape::kMaskStages % 2);
      {
        const RingTile& tile = ring.slot(it);
        Fragments pf, df;
        float s[kScoreRows / 2], dp[kScoreRows / 2];
        ptx::wgmma_fence();
        Base::issue_scores(s, memory.k, Base::query_rows(qs, group));
        ptx::wgmma_fence();
        Base::issue_scores(dp, memory.v, Base::out_rows(os, group));
        const int m0 = tile.tile * kRows;
        const Scores scores(task, work, tile.head, m0 + row + 2 * (Base::lane() % 4), Base::key(), Base::whole(m0),
                            tile.whole);
        if (!maps.mask_tiles && task.scores.mask_kind > MaskElement::boolean) scores.fetch_mask(Base::own_mask(memory));
        ptx::wgmma_wait<0>();  // @full_scores_done
        ptx::keep(s);
        ptx::keep(dp);
        const unsigned char *references = smem + (memory.lse - memory.k) + qs * kRows * 4,
                            *deltas = smem + (memory.delta - memory.k) + os * kRows * 4;
        if (Guard::found_keys(memory, smem)) Guard::poison_scores(s, memory, smem, Base::own_key());
        slope_sum += scores.softmax(s, dp, pf, df, references + row * 4 + Base::lane() % 4 * 16,
                                    static_cast<int>(deltas - references), maps.mask_tiles,
                                    maps.mask_tiles ? panel + row * 128 : Base::mask_of(memory, it, 0), smem);
        if (Base::hides(tile) && Base::suspect(references, deltas) &&
            TileGuard::clean_rows_of(memory, smem, Base::query_rows(qs), Base::out_rows(os), 0))
          Guard::poison_weights(pf, memory, smem, row);
        if (it > 0)
          ptx::bar_sync(6 + (group ^ 1), 256);  // @full_scores_read: by the other warpgroup, of the tile before
        Base::store_scores(weights, pf, group);
        Base::store_scores(memory.ds, df, group);
        ptx::fence_proxy_async();
      }
      ptx::bar_sync(4, 256);  // @full_scores_written
      Base::issue_held_sum(dv, weights, Base::out_rows(os));
      Base::issue_held_sum(dk, memory.ds, Base::query_rows(qs));
      const RingTile &done = ring.slot(it), &next = ring.slot(it + 1);
      float dq[2][32];
      Base::issue_dq(dq[0], memory.ds, 2 * group);
      Base::issue_dq(dq[1], memory.ds, 2 * group + 1);
      if (task.mask_gradient.own)
        Base::template write_mask_gradient<kScoreRows>(memory.ds, row, panel, done.head, done.tile * kRows, row);
      if (maps.mask_tiles) Base::release(memory.mask_empty + 8 * ms);
      ring.wait(it + 1);
      ptx::wgmma_wait<0>();  // @full_products_done
      ptx::keep(dq[0]);
      ptx::keep(dq[1]);
      Base::release(memory.q_empty + 8 * qs);
      Base::release(memory.do_empty + 8 * os);
      if (next.exists()) ptx::bar_arrive(6 + group, 256);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (Shape::kDeterministic && stored) ptx::bar_sync(8 + group, 160);
        Base::store_dq(dq[i], done.scratch, 2 * group + i);
        stored = true;
      }
      if (task.slope_sum && (!next.exists() || next.head != done.head)) {
        const float sum = Base::warp_sum(slope_sum);
        slope_sum = 0.f;
        if (Base::lane() == 0) Base::own_slope(memory) = sum;
        Base::add_slopes(done.head);
      }
      Base::release(ring.empty(it));
    }
    ptx::keep(dk);
    ptx::keep(dv);
    if (task.scores.seed) {
#pragma unroll
      for (int i = 0; i < kHeld / 2; i++) dv[i] *= task.scores.keep_scale;
    }
    if (Shape::kDeterministic && stored) ptx::bar_sync(8 + group, 160);
    if (task.key_value_sum)
      Base::add();
    else
      Base::write(work.sequence.k_begin, work.sequence.k_rows);
  }
};

// grid: as sm90_full_backward
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sm90_full_columns_backward(const __grid_constant__ Sm90FullBackwardMaps maps,
                               const __grid_constant__ BackwardTask task) {
  Sm90FullBackward<Shape, Sm90FullColumnsConsumer<Shape>>::run(maps, task);
}

}  // namespace attnjourney
