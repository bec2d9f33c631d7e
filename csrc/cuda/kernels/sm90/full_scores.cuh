// What the options of attention do to a tile of the Hopper forward: the meanings of scores.cuh, on the accumulators of
// wgmma. What does not depend on the scores is read or drawn under the products that make them.
#pragma once
#include "forward_softmax.cuh"
#include "full_shape.cuh"

namespace attnjourney {

template <class S>
struct Sm90FullScores {
  using T = typename S::T;
  using Slot = Sm90FullSlot;
  using Half64 = RowFragment<8>;  // 64 keys
  static constexpr int kCount = S::kKeys / 2, kHalves = S::kKeys / 64;

  const ForwardTask& p;
  uint32_t seen[kHalves];                   // what a boolean mask or one of blocks lets through
  uint32_t kept[kHalves];                   // what dropout does
  uint32_t raw[S::kBias ? kCount / 2 : 1];  // a bias as it lies in memory: pairs of T, or 64 keys' float

  // for one tile: what a call does not use stays undefined, or it would take up registers
  explicit __device__ __forceinline__ Sm90FullScores(const ForwardTask& p_) : p(p_) {}

  // what a score is multiplied by to be one in log2 units once apply() is through: 1 where that did it
  static __device__ __forceinline__ float unit_of(const ForwardTask& p) {
    const Scores& o = p.scores;
    const bool done = S::kBias || o.cap_log2 > 0 || o.slopes || o.sinks || !(p.scale_log2 > 0);
    return done ? 1.f : p.scale_log2;
  }

  // the mask's rows `row` and row + 8 from `key` on; rows past the end as the last one, which range hides
  template <class X>
  __device__ __forceinline__ const X* row_at(const Slot& x, int row, int key) const {
    const Scores& o = p.scores;
    const X* mask = ptx::global(reinterpret_cast<const X*>(x.scores().mask));
    return mask + min(row, p.q_len - 1) * o.mask_row + key * o.mask_col;
  }
  // may two adjacent keys of tile n be read at once?
  __device__ __forceinline__ bool pairs(const Slot& x, int n) const {
    const Scores& o = p.scores;
    return o.mask_col == 1 && o.mask_row % 2 == 0 && (n + 1) * S::kKeys <= p.kv_len &&
           (reinterpret_cast<uintptr_t>(x.scores().mask) & (2 * o.mask_bytes - 1)) == 0;
  }
  // element `key` + step of a row; keys past the end as the last one
  template <class X>
  __device__ __forceinline__ X element(const X* at, int key, int step) const {
    return at[(min(key + step, p.kv_len - 1) - key) * p.scores.mask_col];
  }

  __device__ __forceinline__ void read_boolean(const Slot& x, int n, int row, int key) {
    const unsigned char *a = row_at<unsigned char>(x, row, key), *b = row_at<unsigned char>(x, row + 8, key);
    if (pairs(x, n)) {
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
  __device__ __forceinline__ void read_bias(const Slot& x, int n, int row, int key, int half) {
    constexpr int kWords = sizeof(X) / 2;  // of two keys
    key += 64 * half;
    const X *a = row_at<X>(x, row, key), *b = row_at<X>(x, row + 8, key);
    if (pairs(x, n)) {
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

  // Is every number of a bias in pairs of T finite, and far from where bias_log2 ends?
  __device__ __forceinline__ bool moderate() const {
    constexpr uint32_t kStep = ptx::is_bf16<T> ? 0x01800180u : 0x04000400u;  // to the sign's place from 2^126, from inf
    uint32_t large = 0;
#pragma unroll
    for (int j = 0; j < kCount / 2; j++) large |= (raw[S::kBias ? j : 0] & 0x7fff7fffu) + kStep;
    return !ptx::any((large & 0x80008000u) != 0);
  }

  // Under the products of tile n. row: the thread's first one
  __device__ __forceinline__ void look(const Slot& x, int n, TileKind kind, int row, int lane) {
    const Scores& o = p.scores;
    const int key = n * S::kKeys + 2 * (lane % 4);
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
    if (o.seed) each_half(kept, [&](int key) { return attnjourney::kept(o, x.scores(), row, key, lane, Half64{}); });
    if constexpr (S::kBias) {
      if (o.mask_kind == MaskElement::same)
        read_bias<T>(x, n, row, key, 0);
      else
        read_bias<uint32_t>(x, n, row, key, 0);
    } else if (kind != TileKind::whole) {
      if (o.mask_kind == MaskElement::boolean) read_boolean(x, n, row, key);
      if (o.mask_kind == MaskElement::blocks)
        each_half(seen, [&](int key) { return seen_in_blocks<Half64>(x.scores().blocks(o), row, key, lane, ~0u); });
    }
  }

  // Products to scores; returns whether a bias hides any.
  __device__ __forceinline__ bool apply(float (&s)[kCount], const Slot& x, int n, TileKind kind, int row, int lane) {
    const Scores& o = p.scores;
    const int key = n * S::kKeys + 2 * (lane % 4);
    float factor = p.scale_log2;
    float lowest = 0.f;  // bias, or 0
    if (o.cap_log2 > 0) {
#pragma unroll
      for (int i = 0; i < kCount; i++) s[i] = o.cap_log2 * cap_tanh<T>(o, s[i]);
      factor = 1.f;
    }
    if (o.slopes) {
      const float slope = x.scores().slope;
      const auto distance = static_cast<float>(row + x.offset - key);
#pragma unroll
      for (int i = 0; i < kCount; i++)
        s[i] = s[i] * factor - slope * fabsf(distance + static_cast<float>(Half64::row(i) - Half64::key(i)));
      factor = 1.f;
    }
    const auto add = [&](int i, float bias) {
      s[i] = bias == -INFINITY ? bias : s[i] * factor + bias_log2(bias);
      lowest = fminf(lowest, bias);
    };
    if constexpr (S::kBias) {
      if (o.mask_kind == MaskElement::same && moderate()) {
#pragma unroll
        for (int i = 0; i < kCount; i++) {
          const float2 bias = ptx::unpack2<T>(raw[i / 2]);
          s[i] = s[i] * factor + (i % 2 ? bias.y : bias.x) * kLog2E;
        }
      } else if (o.mask_kind == MaskElement::same) {
#pragma unroll
        for (int j = 0; j < kCount / 2; j++) {
          const float2 bias = ptx::unpack2<T>(raw[j]);
          add(2 * j, bias.x);
          add(2 * j + 1, bias.y);
        }
      } else {
#pragma unroll
        for (int half = 0; half < kHalves; half++) {
          if (half > 0) read_bias<uint32_t>(x, n, row, key, half);
#pragma unroll
          for (int i = 0; i < 32; i++) add(32 * half + i, ptx::as_float(raw[i]));
        }
      }
    } else if ((o.sinks || !(p.scale_log2 > 0)) && factor != 1.f) {
#pragma unroll
      for (int i = 0; i < kCount; i++) s[i] *= factor;
    }
    if (kind == TileKind::whole) return lowest == -INFINITY;
    Sm90ForwardSoftmax<S>::hide(s, p, x.sequence(p), row, key);
    if (!S::kBias && o.mask_kind != MaskElement::none) {
#pragma unroll
      for (int i = 0; i < kCount; i++)
        if (!(seen[i / 32] >> i % 32 & 1)) s[i] = -INFINITY;
    }
    return lowest == -INFINITY;
  }

  // 0 for the weights that dropout takes
  __device__ __forceinline__ void drop(float (&s)[kCount]) const {
    if (!p.scores.seed) return;
#pragma unroll
    for (int i = 0; i < kCount; i++)
      if (!(kept[i / 32] >> i % 32 & 1)) s[i] = 0.f;
  }
};

}  // namespace attnjourney
