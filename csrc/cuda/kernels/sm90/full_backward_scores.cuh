// Scores of the Hopper backward with options: from the products S^T and dP^T of 64 rows to weights and dS. A warp has
// 16 keys of them, which is a KeyFragment<1, 8>; by columns 32 rows, a KeyFragment<1, 4>. What the options mean is in
// scores.cuh.
#pragma once
#include "full_backward_ring.cuh"

namespace attnjourney {

template <class Shape>
struct Sm90FullBackwardScores {
  using T = typename Shape::T;
  static constexpr int kScoreRows = Shape::Part::kScoreRows;
  using Fragment = KeyFragment<1, kScoreRows / 8>;
  static constexpr int kDelta = Shape::kQueryStages * Shape::kRows * 4;  // behind the references, of stage 0
  static constexpr int kInverse = Shape::kOutStages * Shape::kRows * 4;  // behind delta

  const BackwardTask& task;
  const HeadScores head;
  const Sequence& sequence;
  const int row, key;  // of element 0
  uint32_t seen, bits;

  // whole: the ranges hide nothing of the tile; mask_whole: nor does its mask
  __device__ __forceinline__ Sm90FullBackwardScores(const BackwardTask& task_, const typename Shape::Work& work,
                                                    int q_head, int row_, int key_, bool whole, bool mask_whole)
      : task(task_),
        head(task_, task_.q_heads, work.where.batch, q_head, work.mask_batch),
        sequence(work.sequence),
        row(row_),
        key(key_) {
    const Scores& s = task.scores;
    seen = whole ? kAllSeen<Fragment> : seen_in_range<Fragment>(sequence, row, key);
    if (!mask_whole)
      seen = s.mask_kind == MaskElement::boolean
                 ? seen_in_mask<Fragment>(s, head, row, key, seen)
                 : seen_in_blocks<Fragment>(head.blocks(s), row, key, threadIdx.x % 32, seen);
    bits = s.seed ? kept(s, head, row, key, threadIdx.x % 32, Fragment{}) : ~0u;
  }

  // A floating mask that TMA does not bring, each thread's elements for itself: they are fetched while
  // the products run. own: of this thread, [Fragment::kCount][128 threads].
  __device__ __forceinline__ void fetch_mask(float* own) const {
    own = ptx::opaque(own);
#pragma unroll 8
    for (int i = 0; i < Fragment::kCount; i++) {
      const int r = row + i / 4 * 8 + i % 2, k = key + i / 2 % 2 * 8;  // Fragment's, computed
      own[i * 128] = seen >> i & 1 ? mask_value<T>(task.scores, head, r, k) : 0.f;
    }
  }

  // s, dp: the products; pf, df: weights and dS in T, operands of dV and dK. st: where the references of the rows
  // lie; delta: how far behind them it lies, with inverse behind it. mask: where `tiles` the panel of a tile of the
  // mask, as `mask_chunk` says; else `own` holds a floating one.
  template <class Products, class Fragments>
  __device__ __forceinline__ void softmax(Products& scores, Products& dp, Fragments& pf, Fragments& df,
                                          const unsigned char* st, int delta, bool tiles, uint32_t mask,
                                          const float* own, float& slope_sum) const {
    const Scores& options = task.scores;
    const bool bias = options.mask_kind > MaskElement::boolean;
    if (options.modified() || options.slopes || (bias && options.seed))
      pass<true, true>(scores, dp, pf, df, st, delta, tiles, mask, own, slope_sum);
    else if (bias)
      pass<false, true>(scores, dp, pf, df, st, delta, tiles, mask, own, slope_sum);
    else
      pass<false, false>(scores, dp, pf, df, st, delta, tiles, mask, own, slope_sum);
  }

 private:
  // Bias: a floating mask. All: everything else too; without, with a mask there is no dropout.
  template <bool All, bool Bias, class Products, class Fragments>
  __device__ __forceinline__ void pass(Products& scores, Products& dp, Fragments& pf, Fragments& df,
                                       const unsigned char* st, int delta_at, bool tiles, uint32_t mask,
                                       const float* own, float& slope_sum) const {
    Scores options = task.scores;  // what is not asked for is not compiled in
    if (!All) options.leave_unmodified(), options.slopes = nullptr;
    if (!All && Bias) options.seed = nullptr, options.mask_kind = MaskElement::same;
    if (!Bias) options.mask_kind = MaskElement::none, options.exponent = 1.f;
    if (Bias && !All) options.exponent = float(log2_e);
    const float away = static_cast<float>(row + sequence.keys.offset - key);
    const bool slopes = All && task.slope_sum;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kScoreRows / 16; i++) {  // 16 rows: two tiles of accumulators
      float bias[8] = {};
      uint32_t here = seen;
      if (Bias && tiles) {
        uint32_t x[4];
        ptx::ldmatrix_x4_trans(x, mask_chunk(mask, i));
#pragma unroll
        for (int q = 0; q < 4; q++) {
          const float2 two = ptx::unpack2<T>(x[q]);
          bias[2 * q] = two.x, bias[2 * q + 1] = two.y;
          if (two.x == -INFINITY) here &= ~(1u << (8 * i + 2 * q));
          if (two.y == -INFINITY) here &= ~(2u << (8 * i + 2 * q));
        }
      } else if (Bias && options.mask_kind > MaskElement::boolean) {
#pragma unroll
        for (int q = 0; q < 8; q++) {
          bias[q] = own[(8 * i + q) * 128];
          if (bias[q] == -INFINITY) here &= ~(1u << (8 * i + q));
        }
      }
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const auto two = [&](int at) { return *reinterpret_cast<const float2*>(st + at + i * 64 + j * 8); };
        const float2 reference = two(0), inverse = two(delta_at + kInverse), two_delta = two(delta_at);
        const RowStats<float> stats[2] = {{reference.x, inverse.x}, {reference.y, inverse.y}};
        const float delta[2] = {two_delta.x, two_delta.y};
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float pr[2], ds[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int element = 8 * i + 4 * j + 2 * h + e, r = Fragment::row(element), k = Fragment::key(element);
            const bool visible = here >> element & 1, keep = (Bias && !All) || (bits >> element & 1);
            const auto distance = [&] { return fabsf(away + static_cast<float>(r - k)); };
            const auto value = [&] { return bias[4 * j + 2 * h + e]; };
            const auto weighted = weighted_by<T>(options, head.slope, distance, value, visible, keep, scores[element],
                                                 task.score_scale, stats[e], dp[element], delta[e]);
            if (slopes) sum -= weighted.grad * distance();
            pr[e] = keep ? weighted.weight : 0.f;
            ds[e] = All ? weighted.grad * weighted.slope : weighted.grad;
          }
          pf[i][2 * j + h] = ptx::pack2<T>(pr[0], pr[1]);
          df[i][2 * j + h] = ptx::pack2<T>(ds[0], ds[1]);
        }
      }
    }
    if (slopes) slope_sum += sum;
  }

 public:
  // Of 16 rows x 16 keys in rows of 128 bytes, swizzled: the lane's row of 8 keys, for ldmatrix and stmatrix, whose
  // registers are then (rows 0, keys 0), (0, 8), (8, 0), (8, 8). tile: its panel; the warp has 16 keys of its 64.
  static __device__ __forceinline__ uint32_t mask_chunk(uint32_t panel, int i) {
    const uint32_t lane = ptx::opaque(threadIdx.x) % 32, warp = threadIdx.x / 32 % 4;
    const uint32_t r = i * 16 + lane % 8 + lane / 16 * 8, chunk = warp * 2 + lane / 8 % 2;
    return panel + r * 128 + ((chunk ^ (r & 7)) << 4);
  }
};

}  // namespace attnjourney
