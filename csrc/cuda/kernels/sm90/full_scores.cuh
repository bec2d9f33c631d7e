// What the options of attention do to a tile of the Hopper forward: the meanings of scores.cuh, on the accumulators of
// wgmma. What does not depend on the scores is read or drawn under the products that make them.
#pragma once
#include "forward_softmax.cuh"
#include "full_shape.cuh"

namespace attnjourney {

template <class Shape>
struct Sm90FullScores {
  using T = typename Shape::T;
  using Slot = Sm90FullSlot;
  using Half64 = RowFragment<8>;  // 64 keys
  static constexpr int kCount = Shape::kKeys / 2, kHalves = Shape::kKeys / 64;

  const ForwardTask& task;
  uint32_t seen[kHalves];                       // what a boolean mask or one of blocks lets through
  uint32_t kept[kHalves];                       // what dropout does
  uint32_t raw[Shape::kBias ? kCount / 2 : 1];  // a bias as it lies in memory: pairs of T, or half of the keys' float

  // for one tile: what a call does not use stays undefined, or it would take up registers
  explicit __device__ __forceinline__ Sm90FullScores(const ForwardTask& task_) : task(task_) {}

  // what a score is multiplied by once apply() is through: 1 where that did it
  static __device__ __forceinline__ float unit_of(const ForwardTask& task) {
    const Scores& options = task.scores;
    const bool done = Shape::kBias || options.modified() || options.slopes || options.sinks || !(task.score_scale > 0);
    return done ? 1.f : task.score_scale;
  }

  // the mask's rows `row` and row + 8 from `key` on; rows past the end as the last one, which range hides
  template <class X>
  __device__ __forceinline__ const X* row_at(const Slot& slot, int row, int key) const {
    const Scores& options = task.scores;
    const X* mask = ptx::global(reinterpret_cast<const X*>(slot.scores().mask));
    return mask + min(row, task.q_len - 1) * options.mask_row + key * options.mask_col;
  }
  // may two adjacent keys of a tile be read at once?
  __device__ __forceinline__ bool pairs(const Slot& slot, int key_tile) const {
    const Scores& options = task.scores;
    return options.mask_col == 1 && options.mask_row % 2 == 0 && (key_tile + 1) * Shape::kKeys <= task.kv_len &&
           (reinterpret_cast<uintptr_t>(slot.scores().mask) & (2 * options.mask_bytes - 1)) == 0;
  }
  // element `key` + step of a row; keys past the end as the last one
  template <class X>
  __device__ __forceinline__ X element(const X* at, int key, int step) const {
    return at[(min(key + step, task.kv_len - 1) - key) * task.scores.mask_col];
  }

  __device__ __forceinline__ void read_boolean(const Slot& slot, int key_tile, int row, int key) {
    const unsigned char *a = row_at<unsigned char>(slot, row, key), *b = row_at<unsigned char>(slot, row + 8, key);
    if (pairs(slot, key_tile)) {
      uint32_t pair[kCount / 2];
#pragma unroll
      for (int j = 0; j < kCount / 4; j++) {
        pair[2 * j] = *reinterpret_cast<const uint16_t*>(a + 8 * j);
        pair[2 * j + 1] = *reinterpret_cast<const uint16_t*>(b + 8 * j);
      }
#pragma unroll
      for (int i = 0; i < kHalves; i++) {
        seen[i] = 0;
#pragma unroll
        for (int j = 0; j < 16; j++) {
          const uint32_t v = pair[16 * i + j];
          seen[i] |= (v & 0xff ? 1u << 2 * j : 0u) | (v & 0xff00 ? 2u << 2 * j : 0u);
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kHalves; i++) {
      seen[i] = 0;
#pragma unroll 4
      for (int e = 0; e < 32; e++)
        if (element(e & 2 ? b : a, key, 64 * i + Half64::key(e))) seen[i] |= 1u << e;
    }
  }

  // A bias of type X: of the whole tile where it is T, else of half of it
  template <class X>
  __device__ __forceinline__ void read_bias(const Slot& slot, int key_tile, int row, int key, int half) {
    constexpr int kWords = sizeof(X) / 2;  // of two keys
    key += Shape::kKeys / 2 * half;
    const X *a = row_at<X>(slot, row, key), *b = row_at<X>(slot, row + 8, key);
    if (pairs(slot, key_tile)) {
#pragma unroll
      for (int j = 0; j < kCount / 4 / kWords; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const X* at = (h ? b : a) + 8 * j;
          if constexpr (kWords == 1) {
            raw[2 * j + h] = *reinterpret_cast<const uint32_t*>(at);
          } else {
            const uint2 v = *reinterpret_cast<const uint2*>(at);
            raw[4 * j + 2 * h] = v.x, raw[4 * j + 2 * h + 1] = v.y;
          }
        }
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount / 2; i++) raw[i] = 0;  // or they would be alive before
#pragma unroll 1
    for (int j = 0; j < kCount / 4 / kWords; j++) {  // registers have no index: the words move along
#pragma unroll
      for (int i = 0; i + 2 * kWords < kCount / 2; i++) raw[i] = raw[i + 2 * kWords];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const X *at = h ? b : a, first = element(at, key, 8 * j), second = element(at, key, 8 * j + 1);
        uint32_t* to = raw + kCount / 2 - (2 - h) * kWords;
        if constexpr (kWords == 1)
          to[0] = ptx::pack2<T>(ptx::to_float(first), ptx::to_float(second));
        else
          to[0] = first, to[1] = second;
      }
    }
  }

  // Is every number of a bias in pairs of T finite?
  __device__ __forceinline__ bool finite() const {
    constexpr uint32_t kStep = ptx::is_bf16<T> ? 0x00800080u : 0x04000400u;  // to the sign's place from inf
    uint32_t large = 0;
#pragma unroll
    for (int j = 0; j < kCount / 2; j++) large |= (raw[Shape::kBias ? j : 0] & 0x7fff7fffu) + kStep;
    return !ptx::any((large & 0x80008000u) != 0);
  }

  // Under the products of the tile. row: the thread's first one
  __device__ __forceinline__ void prefetch(const Slot& slot, int key_tile, TileKind kind, int row, int lane) {
    const Scores& options = task.scores;
    const int key = key_tile * Shape::kKeys + 2 * (lane % 4);
    const auto each_half = [&](uint32_t (&bits)[kHalves], auto&& of) {
#pragma unroll
      for (int i = 0; i < kHalves; i++) bits[i] = 0;  // or they would be alive before
#pragma unroll 1
      for (int i = 0; i < kHalves; i++) {  // registers have no index: the words move along
#pragma unroll
        for (int j = 0; j + 1 < kHalves; j++) bits[j] = bits[j + 1];
        bits[kHalves - 1] = of(key + 64 * i);
      }
    };
    if (options.seed)
      each_half(kept, [&](int key) { return attnjourney::kept(options, slot.scores(), row, key, lane, Half64{}); });
    if constexpr (Shape::kBias) {
      if (options.mask_kind == MaskElement::same)
        read_bias<T>(slot, key_tile, row, key, 0);
      else
        read_bias<uint32_t>(slot, key_tile, row, key, 0);
    } else if (kind != TileKind::whole) {
      if (options.mask_kind == MaskElement::boolean) read_boolean(slot, key_tile, row, key);
      if (options.mask_kind == MaskElement::blocks)
        each_half(seen,
                  [&](int key) { return seen_in_blocks<Half64>(slot.scores().blocks(options), row, key, lane, ~0u); });
    }
  }

  // Products to scores; returns whether a bias hides any.
  __device__ __forceinline__ bool apply(float (&scores)[kCount], const Slot& slot, int key_tile, TileKind kind, int row,
                                        int lane) {
    const Scores& options = task.scores;
    const int key = key_tile * Shape::kKeys + 2 * (lane % 4);
    float factor = task.score_scale;
    float lowest = 0.f;  // bias, or 0
    if (options.modified()) {
#pragma unroll
      for (int i = 0; i < kCount; i++) scores[i] = modified_score<T>(options, scores[i]);
      factor = 1.f;
    }
    if (options.slopes) {
      const float slope = slot.scores().slope;
      const auto distance = static_cast<float>(row + slot.offset - key);
#pragma unroll
      for (int i = 0; i < kCount; i++)
        scores[i] = ptx::rounded_product(scores[i], factor) -
                    ptx::rounded_product(slope, fabsf(distance + static_cast<float>(Half64::row(i) - Half64::key(i))));
      factor = 1.f;
    }
    const auto add = [&](int i, float bias) {
      scores[i] = bias == -INFINITY ? bias : ptx::rounded_product(scores[i], factor) + bias;
      lowest = fminf(lowest, bias);
    };
    if constexpr (Shape::kBias) {
      if (options.mask_kind == MaskElement::same && finite()) {
#pragma unroll
        for (int i = 0; i < kCount; i++) {
          const float2 bias = ptx::unpack2<T>(raw[i / 2]);
          scores[i] = ptx::rounded_product(scores[i], factor) + (i % 2 ? bias.y : bias.x);
        }
      } else if (options.mask_kind == MaskElement::same) {
#pragma unroll
        for (int j = 0; j < kCount / 2; j++) {
          const float2 bias = ptx::unpack2<T>(raw[j]);
          add(2 * j, bias.x);
          add(2 * j + 1, bias.y);
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if (half > 0) read_bias<uint32_t>(slot, key_tile, row, key, half);
#pragma unroll
          for (int i = 0; i < kCount / 2; i++) add(kCount / 2 * half + i, ptx::as_float(raw[i]));
        }
      }
    } else if ((options.sinks || !(task.score_scale > 0)) && factor != 1.f) {
#pragma unroll
      for (int i = 0; i < kCount; i++) scores[i] = ptx::rounded_product(scores[i], factor);
    }
    if (kind == TileKind::whole) return lowest == -INFINITY;
    Sm90ForwardSoftmax<Shape>::hide(scores, task, slot.sequence(task), row, key);
    if (!Shape::kBias && options.mask_kind != MaskElement::none) {
#pragma unroll
      for (int i = 0; i < kCount; i++)
        if (!(seen[i / 32] >> i % 32 & 1)) scores[i] = -INFINITY;
    }
    return lowest == -INFINITY;
  }

  // 0 for the weights that dropout takes
  __device__ __forceinline__ void drop(float (&scores)[kCount]) const {
    if (!task.scores.seed) return;
#pragma unroll
    for (int i = 0; i < kCount; i++)
      if (!(kept[i / 32] >> i % 32 & 1)) scores[i] = 0.f;
  }
};

}  // namespace attnjourney
