// Softmax of one tile of scores, on the accumulators of wgmma: element i of s is row r + 8 (i / 2 % 2) of the
// warpgroup's 64, key 8 (i / 4) + 2 t + i % 2.
#pragma once
#include "forward_shape.cuh"

namespace attnjourney {

template <class Shape>
struct Sm90ForwardSoftmax {
  using T = typename Shape::T;
  float max[2], sum[2];  // of the two rows: the reference of the exponentials, this thread's part of the sum
  float alpha[2];        // by how much the output so far shrinks when the reference moved
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

  // Scores to probabilities; returns whether the reference moved.
  __device__ __forceinline__ bool run(float (&scores)[Shape::kKeys / 2], float scale) {
    // The exponentials of the first groups, against the reference so far: most often it stays.
    float part[4] = {0.f, 0.f, 0.f, 0.f};
    const auto head = [&] {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float base = max[h] == -INFINITY ? 0.f : max[h] * scale;
        part[2 * h] = part[2 * h + 1] = 0.f;
#pragma unroll
        for (int j = 0; j < Shape::kEarly; j++) {
          const float x = ptx::exp2(scores[4 * j + 2 * h] * scale - base);
          const float y = ptx::exp2(scores[4 * j + 2 * h + 1] * scale - base);
          part[2 * h] += x;
          part[2 * h + 1] += y;
          early[2 * j + h] = ptx::pack2<T>(x, y);
        }
      }
    };
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
    const bool moved = ptx::any((top[0] - max[0]) * scale > 8.f || (top[1] - max[1]) * scale > 8.f);
    if (moved) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float to = fmaxf(top[h], max[h]);
        alpha[h] = to == -INFINITY ? 1.f : ptx::exp2((max[h] - to) * scale);
        max[h] = to;
        sum[h] *= alpha[h];
      }
      if (Shape::kEarly) head();
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float base = max[h] == -INFINITY ? 0.f : max[h] * scale;
#pragma unroll
      for (int j = Shape::kEarly; j < Shape::kKeys / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = scores[4 * j + 2 * h + e];
          part[2 * h + e] += x = ptx::exp2(x * scale - base);
        }
      sum[h] += part[2 * h] + part[2 * h + 1];
    }
    return moved;
  }
};

}  // namespace attnjourney
