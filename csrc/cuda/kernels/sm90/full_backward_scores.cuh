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
  const typename Shape::Work& work;
  const int row, key;  // of element 0
  uint32_t seen, bits;

  // whole: the ranges hide nothing of the tile; mask_whole: nor does its mask
  __device__ __forceinline__ Sm90FullBackwardScores(const BackwardTask& task_, const typename Shape::Work& work_,
                                                    int q_head, int row_, int key_, bool whole, bool mask_whole)
      : task(task_),
        head(task_, task_.q_heads, work_.where.batch, q_head, work_.mask_batch),
        work(work_),
        row(row_),
        key(key_) {
    const Scores& s = task.scores;
    seen = whole ? kAllSeen<Fragment> : seen_in_range<Fragment>(work.sequence, row, key);
    if (!mask_whole)
      seen = s.mask_kind == MaskElement::boolean
                 ? seen_in_mask<Fragment>(s, head, row, key, seen)
                 : seen_in_blocks<Fragment>(head.blocks(s), row, key, threadIdx.x % 32, seen);
    bits = s.seed ? kept(s, head, row, key, threadIdx.x % 32, Fragment{}) : ~0u;
  }

  // with what the options hide and keep, found before
  __device__ __forceinline__ Sm90FullBackwardScores(const BackwardTask& task_, const typename Shape::Work& work_,
                                                    int q_head, int row_, int key_, uint2 found)
      : task(task_),
        head(task_, task_.q_heads, work_.where.batch, q_head, work_.mask_batch),
        work(work_),
        row(row_),
        key(key_),
        seen(found.x),
        bits(found.y) {}
  __device__ __forceinline__ uint2 found() const { return {seen, bits}; }

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
  // mask, as `mask_chunk` says; else where a floating one is, from `base` on, as fetch_mask left it. Returns the sum
  // for the slope.
  template <class Products, class Fragments>
  __device__ __forceinline__ float softmax(Products& scores, Products& dp, Fragments& pf, Fragments& df,
                                           const unsigned char* st, int delta, bool tiles, uint32_t mask,
                                           const unsigned char* base) const {
    const Scores& options = task.scores;
    const bool bias = options.mask_kind > MaskElement::boolean;
    if (options.modified() || options.slopes || options.seed)
      return bias ? pass<true, true>(scores, dp, pf, df, st, delta, tiles, mask, base)
                  : pass<true, false>(scores, dp, pf, df, st, delta, tiles, mask, base);
    if (bias) return pass<false, true>(scores, dp, pf, df, st, delta, tiles, mask, base);
    return pass<false, false>(scores, dp, pf, df, st, delta, tiles, mask, base);
  }

 private:
  // Bias: a floating mask. All: everything else too; without there is neither softcap nor slopes nor dropout.
  template <bool All, bool Bias, class Products, class Fragments>
  __device__ __forceinline__ float pass(Products& scores, Products& dp, Fragments& pf, Fragments& df,
                                        const unsigned char* st, int delta_at, bool tiles, uint32_t mask,
                                        const unsigned char* base) const {
    Scores options = task.scores;  // what is not asked for is not compiled in
    if (!All) options.leave_unmodified(), options.slopes = nullptr, options.seed = nullptr;
    options.mask_kind = Bias ? MaskElement::same : MaskElement::none;
    options.exponent = Bias ? float(log2_e) : 1.f;
    const float away = static_cast<float>(row + work.sequence.keys.offset - key);
    const bool slopes = All && task.slope_sum;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kScoreRows / 16; i++) {  // 16 rows: two tiles of accumulators
      uint32_t x[4] = {};
      if (Bias && tiles)
        ptx::ldmatrix_x4_trans(x, mask_chunk(work, mask + own_part(Shape::kByColumns ? 0 : Shape::kMaskPanel), i));
      const float* own = Bias && !tiles ? reinterpret_cast<const float*>(base + mask + own_part(Shape::kOwnBytes)) +
                                              thread_of(work) % 128 + 8 * i * 128
                                        : nullptr;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const auto bias = [&](int h, int e) {
          if (!tiles) return own[(4 * j + 2 * h + e) * 128];
          const float2 pair = ptx::unpack2<T>(x[2 * j + h]);
          return e ? pair.y : pair.x;
        };
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
            const bool visible = seen >> element & 1, keep = !All || (bits >> element & 1);
            const auto distance = [&] { return fabsf(away + static_cast<float>(r - k)); };
            // as weighted_by says, without branches
            Score<float> score = capped<T>(options, scores[element], task.score_scale);
            if (options.slopes) score.value -= ptx::rounded_product(head.slope, distance());
            bool counts = visible;
            if (Bias) {
              const float b = bias(h, e);
              score.value += b;
              counts = counts && b != -INFINITY;
            }
            const float weight = ptx::exp2((score.value - stats[e].reference) * options.exponent) * stats[e].inverse;
            WeightedScore<float> weighted{counts ? weight : 0.f, 0.f, 0.f};
            float grad = dp[element];
            if (options.seed) grad = keep ? grad * options.keep_scale : 0.f;
            grad = weighted.weight * (grad - delta[e]);
            if (weighted.weight != 0.f) weighted.grad = grad, weighted.slope = score.slope;
            if (slopes) sum -= weighted.grad * distance();
            pr[e] = keep ? weighted.weight : 0.f;
            ds[e] = All ? weighted.grad * weighted.slope : weighted.grad;
          }
          pf[i][2 * j + h] = ptx::pack2<T>(pr[0], pr[1]);
          df[i][2 * j + h] = ptx::pack2<T>(ds[0], ds[1]);
        }
      }
    }
    return sum;
  }

  // where that of this thread's warpgroup begins
  __device__ __forceinline__ int own_part(int bytes) const { return thread_of(work) / 128 * bytes; }

 public:
  // Of 16 rows x 16 keys in rows of 128 bytes, swizzled: the lane's row of 8 keys, for ldmatrix and stmatrix, whose
  // registers are then (rows 0, keys 0), (0, 8), (8, 0), (8, 8). tile: its panel; the warp has 16 keys of its 64.
  static __device__ __forceinline__ uint32_t mask_chunk(const typename Shape::Work& work, uint32_t panel, int i) {
    const uint32_t thread = thread_of(work), lane = thread % 32, warp = thread / 32 % 4;
    const uint32_t r = i * 16 + lane % 8 + lane / 16 * 8, chunk = warp * 2 + lane / 8 % 2;
    return panel + r * 128 + ((chunk ^ (r & 7)) << 4);
  }
};

}  // namespace attnjourney
