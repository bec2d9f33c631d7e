// The derivative of a floating mask's gradient in a direction: the sums of mask_gradient.cuh over d(dS), from the
// products of backward_jvp.cuh.
#pragma once
#include "backward_jvp.cuh"
#include "mask_gradient.cuh"

namespace attnjourney {

template <class Math>
struct BackwardJvpMask : MaskGradientOfTiles<BackwardJvpMask<Math>, typename Math::Real, Math::kOthers> {
  using T = typename Math::T;
  using Real = typename Math::Real;
  using Slices = BackwardJvpTiles<Math>;
  using Task = typename Slices::Task;
  using Place = typename Slices::Place;
  static constexpr int kKeys = Math::kOthers, kThreads = 128;
  static constexpr int kPlace = Slices::kOwnPlace + Slices::kOtherPlace, kSmemBytes = 2 * kPlace;
  using Fragment = RowFragment<kKeys / 8>;

  // one tile of one head
  static __device__ __forceinline__ void add(Real (&sum)[kKeys / 8][4], const Task& p, const Sequence& sequence,
                                             int batch, int head, int row0, int n0) {
    const int warp = threadIdx.x / 32, lane = ptx::opaque(threadIdx.x % 32);
    unsigned char* const smem = ptx::dynamic_smem();
    const Place own{0, batch, head, 0, row0, sequence.q_len};
    const Place other{1, batch, head / p.group, 0, n0, sequence.keys.key_length};
    const auto load = [&](int i) {
      unsigned char* const at = smem + i % 2 * kPlace;
      Slices::template load_all<Slices::kOwn>(at, p, own, i);
      Slices::template load_all<kKeys>(at + Slices::kOwnPlace, p, other, i);
      ptx::cp_async_commit();
    };
    typename Slices::Products x;
    __syncthreads();  // @tiles_read: those of the tile before
    load(0);
#pragma unroll 1
    for (int i = 0; i < p.slices; i++) {
      ptx::cp_async_wait<0>();  // @slice_landed
      __syncthreads();          // @slice_read: every warp is done with the one before
      if (i + 1 < p.slices) load(i + 1);
      const unsigned char* const at = smem + i % 2 * kPlace;
      Slices::multiply(x, p, at, at + Slices::kOwnPlace, 0, i, warp * 16, lane);
    }
    const HeadScoresOf<Real> scores(p, p.q_heads, batch, head);
    const HeadChange<Real> direction(p, batch, head);
    const int row = row0 + warp * 16 + lane / 4, key = n0 + lane % 4 * 2;
    const uint32_t seen = seen_in_range<Fragment>(sequence, row, key);
    const uint32_t bits = p.scores.seed ? kept(p.scores, scores, row, key, lane, Fragment{}) : ~0u;
    const RowChange<Real>* const changes = p.changes + scratch_row(p, batch, head) + row;
#pragma unroll
    for (int i = 0; i < Fragment::kCount; i++) {
      const int r = Fragment::row(i), k = key + Fragment::key(i);
      if (row + r >= sequence.q_len) continue;
      sum[i / 4][i % 4] += changed_pair<T>(p, scores, direction, row + r, k, sequence.keys.offset, seen >> i & 1,
                                           bits >> i & 1, changes[r], x.s[i / 4][i % 4], x.move[i / 4][i % 4],
                                           x.grad[i / 4][i % 4], x.grad_change[i / 4][i % 4])
                               .of_score;
    }
  }
};

// After backward_jvp_prepare. grid: mask_gradient_blocks
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 2)
    backward_jvp_mask(const __grid_constant__ BackwardJvpTaskOf<typename Kernel::Real> p) {
  Kernel::run(p);
}

}  // namespace attnjourney
