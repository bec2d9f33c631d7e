// Softmax of one tile of scores of the Hopper forward over e4m3, on the accumulators of wgmma: element i is row r + 8
// (i / 2 % 2) of the warpgroup's 64, key 8 (i / 4) + 2 t + i % 2. Weights are 2^8 at a row's maximum so far: rounded to
// e4m3, whose largest number is 448, they are normal down to 2^-14 of that maximum and 0 from 2^-18 on. Their sum is
// that of the unrounded ones.
#pragma once
#include "cuda/kernels/common/scores.cuh"
#include "fp8_shape.cuh"

namespace attnjourney {

template <class Shape>
struct Sm90Fp8Softmax {
  static constexpr float kHeadroom = 8.f;  // log2 of the weight at the maximum
  static constexpr int kCount = Shape::kKeys / 2;
  // of the two rows: the largest score in log2 units, this thread's part of the sum of weights, and by how much the
  // output so far shrinks
  float max[2], sum[2], alpha[2];

  // nothing, or the sink of the head
  __device__ __forceinline__ void start(const Fp8Task& task, int index, int t) {
    max[0] = max[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
    alpha[0] = alpha[1] = 1.f;
    if (!task.scores.sinks) return;
    const float sink = task.scores.sinks[index];
    if (sink == -INFINITY) return;
    max[0] = max[1] = sink_score(task.scores, sink);
    sum[0] = sum[1] = t == 0 ? 256.f : 0.f;
  }

  // -inf for the keys that rows `row` and row + 8 do not see; key: that of scores[0]
  static __device__ __forceinline__ void hide(float (&scores)[kCount], const Sequence& sequence, int row, int key) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const SeenKeys keys = row_keys_of(sequence, row + 8 * h).from(key);
#pragma unroll
      for (int j = 0; j < kCount / 4; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (keys.hides(j * 8 + e)) scores[4 * j + 2 * h + e] = -INFINITY;
    }
  }

  // Products to weights. number_scale: of query times key; hides: the tile hides something, and then no weight of a
  // key that is seen is 0; row, key: as for hide.
  __device__ __forceinline__ void run(float (&scores)[kCount], const Fp8Task& task, float number_scale, bool hides,
                                      const Sequence& sequence, int row, int key) {
    float factor = task.score_scale * number_scale;
    if (task.scores.modified() || !(factor > 0.f)) {  // else the largest product is the largest score
#pragma unroll
      for (int i = 0; i < kCount; i++)
        scores[i] = task.scores.modified() ? modified_score<Bf16>(task.scores, scores[i] * number_scale)
                                           : ptx::rounded_product(scores[i], factor);
      factor = 1.f;
    }
    if (hides) hide(scores, sequence, row, key);
    float base[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float even = scores[2 * h], odd = scores[2 * h + 1];
#pragma unroll
      for (int j = 1; j < kCount / 4; j++) {
        even = fmaxf(even, scores[4 * j + 2 * h]);
        odd = fmaxf(odd, scores[4 * j + 2 * h + 1]);
      }
      float top = fmaxf(even, odd);
      top = fmaxf(top, ptx::shfl_xor(top, 1));
      top = fmaxf(top, ptx::shfl_xor(top, 2));
      const float to = fmaxf(max[h], ptx::rounded_product(top, factor));
      alpha[h] = to == -INFINITY ? 1.f : ptx::exp2(max[h] - to);
      max[h] = to;
      base[h] = to == -INFINITY ? 0.f : to - kHeadroom;  // of a row that has seen nothing: its weights are 0
    }
    if (hides) {  // exp2 stops at the smallest normal number
#pragma unroll
      for (int i = 0; i < kCount; i++) {
        const bool seen = scores[i] != -INFINITY;
        scores[i] = ptx::fma(scores[i], factor, -base[i / 2 % 2]);
        if (seen && scores[i] < -126.f) scores[i] = -126.f;  // @seen_not_zero
      }
      factor = 1.f, base[0] = base[1] = 0.f;
    }
    float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      scores[i] = ptx::exp2(ptx::fma(scores[i], factor, -base[i / 2 % 2]));
      part[i % 4] += scores[i];
    }
#pragma unroll
    for (int h = 0; h < 2; h++) sum[h] = ptx::fma(sum[h], alpha[h], part[2 * h] + part[2 * h + 1]);
  }
};

}  // namespace attnjourney
