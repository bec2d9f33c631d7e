// Softmax of one tile of scores, on the accumulators of wgmma: element i of s is row r + 8 (i / 2 % 2) of the
// warpgroup's 64, key 8 (i / 4) + 2 t + i % 2.
#pragma once
#include "forward_shape.cuh"

namespace attnjourney {

template <class Shape>
struct Sm90ForwardSoftmax {
  using T = typename Shape::T;
  // scores are in natural units, as they are with a floating mask; else in log2 units, or scaled to these here
  static constexpr bool kNatural = requires { requires Shape::kBias; };
  // of the two rows: the reference of the exponentials, this thread's part of the sum, times weight_unit
  float max[2], sum[2];
  float alpha[2];                         // by how much the output so far shrinks when the reference moved
  uint32_t early[2 * Shape::kEarly + 1];  // the probabilities of the first kEarly groups, packed

  __device__ __forceinline__ void start() {
    max[0] = max[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
  }

  // -inf for the keys that rows `row` and row + 8 do not see; key: that of scores[0]
  static __device__ __forceinline__ void hide(float (&scores)[Shape::kKeys / 2], const ForwardTask& task,
                                              const Sequence& sequence, int row, int key) {
    if constexpr (Shape::kRanged) {
      if (task.keys.bounded_left()) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const SeenKeys keys = row_keys_of(sequence, row + 8 * h).from(key);
#pragma unroll
          for (int j = 0; j < Shape::kKeys / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
              if (keys.hides(j * 8 + e)) scores[4 * j + 2 * h + e] = -INFINITY;
        }
        return;
      }
    }
    // the usual case: nothing but an end
    const int end0 = (Shape::kRanged ? row_keys_of(sequence, row).end : task.kv_len) - key;
    const int end8 = (Shape::kRanged ? row_keys_of(sequence, row + 8).end : task.kv_len) - key;
#pragma unroll
    for (int i = 0; i < Shape::kKeys / 2; i++)
      if (i / 4 * 8 + (i & 1) >= (i & 2 ? end8 : end0)) scores[i] = -INFINITY;
  }

  // The weights of bfloat16 are so small, 2^-headroom at the reference, that no sum of weighted values is beyond the
  // range; those of fp16, whose own range is too short for that, have values of at most 65504.
  static __device__ __forceinline__ float headroom(const ForwardTask& task) {
    return ptx::is_bf16<T> ? task.headroom : 0.f;
  }
  static __device__ __forceinline__ float weight_unit(const ForwardTask& task) { return ptx::exp2(-headroom(task)); }

  // Scores to probabilities; returns whether the reference moved.
  __device__ __forceinline__ bool run(float (&scores)[Shape::kKeys / 2], float scale, const ForwardTask& task) {
    const float headroom = Sm90ForwardSoftmax::headroom(task);
    float part[4] = {0.f, 0.f, 0.f, 0.f};
    float factor = scale, base[2];  // a weight is 2^(factor * score - base), or in natural units e^(score - base)
    const auto take_base = [&] {
#pragma unroll
      for (int h = 0; h < 2; h++) base[h] = base_of(max[h], scale);
    };
    const auto weight = [&](float x, int h) {
      if (kNatural) return ptx::exp2(ptx::fma(x - base[h], float(log2_e), -headroom));
      return ptx::exp2(ptx::fma(x, factor, -(base[h] + headroom)));
    };
    const auto head = [&] {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        part[2 * h] = part[2 * h + 1] = 0.f;
#pragma unroll
        for (int j = 0; j < Shape::kEarly; j++) {
          const float x = weight(scores[4 * j + 2 * h], h), y = weight(scores[4 * j + 2 * h + 1], h);
          part[2 * h] += x;
          part[2 * h + 1] += y;
          early[2 * j + h] = ptx::pack2<T>(x, y);
        }
      }
    };
    // The exponentials of the first groups, against the reference so far: most often it stays.
    take_base();
    if (Shape::kEarly) head();
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float even = scores[2 * h], odd = scores[2 * h + 1];
#pragma unroll
      for (int j = 1; j < Shape::kKeys / 8; j++) {
        even = fmaxf(even, scores[4 * j + 2 * h]);
        odd = fmaxf(odd, scores[4 * j + 2 * h + 1]);
      }
      top[h] = fmaxf(even, odd);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) top[h] = fmaxf(top[h], ptx::shfl_xor(top[h], 1));
#pragma unroll
    for (int h = 0; h < 2; h++) top[h] = fmaxf(top[h], ptx::shfl_xor(top[h], 2));
    // The reference only has to be near the maximum: move it when it lags by more than 2^8.
    constexpr float kFactor = kNatural ? float(log2_e) : 1.f;
    const auto lags = [&](int h) { return (scaled(top[h], scale) - scaled(max[h], scale)) * kFactor > 8.f; };
    const bool moved = ptx::any(lags(0) || lags(1));
    if (moved) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float to = fmaxf(top[h], max[h]);
        alpha[h] = to == -INFINITY ? 1.f : ptx::exp2((scaled(max[h], scale) - base_of(to, scale)) * kFactor);
        max[h] = to;
        sum[h] *= alpha[h];
      }
      take_base();
      if (Shape::kEarly) head();
    }
    // Scores so large that a fused product would not be the one that the reference was taken from.
    if (!kNatural && ptx::any(is_far(base[0]) || is_far(base[1]))) {
#pragma unroll
      for (int i = 0; i < Shape::kKeys / 2; i++) scores[i] = scaled(scores[i], scale) - base[i / 2 % 2];
      factor = 1.f, base[0] = base[1] = 0.f;
      if (Shape::kEarly) head();
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int j = Shape::kEarly; j < Shape::kKeys / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = scores[4 * j + 2 * h + e];
          part[2 * h + e] += x = weight(x, h);
        }
      sum[h] += part[2 * h] + part[2 * h + 1];
    }
    return moved;
  }

  static __device__ __forceinline__ float scaled(float x, float scale) {
    return kNatural ? x : ptx::rounded_product(x, scale);
  }
  // what is taken from scores; of a row which has seen nothing 0
  static __device__ __forceinline__ float base_of(float max, float scale) {
    return max == -INFINITY ? 0.f : scaled(max, scale);
  }
};

}  // namespace attnjourney
