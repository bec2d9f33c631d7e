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
  const Sm90FullForwardMaps& maps;
  const uint32_t smem;
  unsigned char* const base;
  uint32_t seen[kHalves];  // what a boolean mask or one of blocks lets through
  uint32_t kept[kHalves];  // what dropout does

  // for one tile: what a call does not use stays undefined, or it would take up registers
  __device__ __forceinline__ Sm90FullScores(const ForwardTask& task_, const Sm90FullForwardMaps& maps_, uint32_t smem_,
                                            unsigned char* base_)
      : task(task_), maps(maps_), smem(smem_), base(base_) {}

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
  // may whole words of a row of a tile be read, of `adjacent` keys each?
  __device__ __forceinline__ bool words(const Slot& slot, int key_tile, int adjacent) const {
    const Scores& options = task.scores;
    return options.mask_col == 1 && options.mask_row % adjacent == 0 && (key_tile + 1) * Shape::kKeys <= task.kv_len &&
           (reinterpret_cast<uintptr_t>(slot.scores().mask) & (adjacent * options.mask_bytes - 1)) == 0;
  }
  // element `key` + step of a row; keys past the end as the last one
  template <class X>
  __device__ __forceinline__ X element(const X* at, int key, int step) const {
    return at[(min(key + step, task.kv_len - 1) - key) * task.scores.mask_col];
  }

  __device__ __forceinline__ void read_boolean(const Slot& slot, int key_tile, int row, int key) {
    const unsigned char *a = row_at<unsigned char>(slot, row, key), *b = row_at<unsigned char>(slot, row + 8, key);
    if (words(slot, key_tile, 2)) {
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

  // The warp's rows of a bias to where TMA would bring them, a row's words one a lane.
  __device__ __forceinline__ void copy_bias(const Slot& slot, int key_tile, int row, int lane) {
    using X = std::conditional_t<Shape::kWideBias, uint32_t, uint16_t>;
    constexpr int kEach = 4 / sizeof(X), kPanels = Shape::kKeys / kEach / 32;
    const bool whole = words(slot, key_tile, kEach);
    const int first = key_tile * Shape::kKeys + lane * kEach;
    row -= lane / 4;
    uint32_t to = Shape::kMaskAt + (row - slot.row) * 128 + lane % 4 * 4;
    __syncwarp();  // of the tile before
#pragma unroll 2
    for (int r = 0; r < 16; r++) {
      const X* from = row_at<X>(slot, row + r, 0);
#pragma unroll
      for (int c = 0; c < kPanels; c++) {
        const uint32_t at = to + c * Shape::kMaskPanel + r * 128 + ((lane / 4 ^ (r & 7)) << 4);
        const int key = first + c * 32 * kEach;
        if (whole) {
          ptx::cp_async_4(smem + at, from + key, true);
          continue;
        }
        uint32_t word = 0;
#pragma unroll
        for (int e = 0; e < kEach; e++)  // keys past the end as the last one
          word |= static_cast<uint32_t>(from[min(key + e, task.kv_len - 1) * task.scores.mask_col]) << 16 * e;
        *reinterpret_cast<uint32_t*>(base + at) = word;
      }
    }
    ptx::cp_async_commit();
  }

  // Part i of a tile's bias, the count-th: read(where it lies) once it is there
  template <class Read>
  __device__ __forceinline__ void with_bias(int count, int i, int lane, Read&& read) {
    using Part = Sm90FullMaskPart<Shape>;
    const Part part(smem, maps.mask_tiles ? count * Shape::kMaskParts + i : i);
    if (maps.mask_tiles) ptx::mbarrier_wait(part.full, part.parity);
    read(part.at);
    if (!maps.mask_tiles) return;
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(part.empty);
  }
  // a tile that this warpgroup does not see
  __device__ __forceinline__ void pass_bias(int count, int lane) {
    if (!maps.mask_tiles) return;
    for (int i = 0; i < Shape::kMaskParts; i++) with_bias(count, i, lane, [](uint32_t) {});
  }
  // the tile's row that a lane reads: there is one where all are the same
  __device__ __forceinline__ uint32_t bias_row(int row) const {
    return maps.mask_tiles && !task.scores.mask_row ? 0 : row;
  }

  // scores * factor + a bias in T; returns the lowest of it, or something finite
  __device__ __forceinline__ float add_bias(float (&scores)[kCount], float factor, uint32_t at, int row, int lane) {
    const uint32_t r = bias_row(row - lane / 4 + lane % 16);
    at += r * 128;
    const auto fragment = [&](uint32_t (&x)[4], int j) {  // of 16 keys
      const uint32_t chunk = j * 2 + lane / 16;
      ptx::ldmatrix_x4(x, at + j / 4 * Shape::kMaskPanel + ((chunk % 8 ^ (r & 7)) << 4));
    };
    constexpr uint32_t kStep = ptx::is_bf16<T> ? 0x00800080u : 0x04000400u;  // to the sign's place from inf
    uint32_t large = 0;
#pragma unroll
    for (int j = 0; j < Shape::kKeys / 16; j++) {
      uint32_t x[4];
      fragment(x, j);
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const float2 bias = ptx::unpack2<T>(x[q]);
        float &low = scores[8 * j + 2 * q], &high = scores[8 * j + 2 * q + 1];
        low = ptx::rounded_product(low, factor) + bias.x, high = ptx::rounded_product(high, factor) + bias.y;
        large |= (x[q] & 0x7fff7fffu) + kStep;
      }
    }
    float lowest = 0.f;
    if (!ptx::any((large & 0x80008000u) != 0)) return lowest;
    // some number is not finite: -inf hides whatever the score is
#pragma unroll
    for (int j = 0; j < Shape::kKeys / 16; j++) {
      uint32_t x[4];
      fragment(x, j);
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const float2 bias = ptx::unpack2<T>(x[q]);
        if (bias.x == -INFINITY) lowest = scores[8 * j + 2 * q] = bias.x;
        if (bias.y == -INFINITY) lowest = scores[8 * j + 2 * q + 1] = bias.y;
      }
    }
    return lowest;
  }
  // the same of one in float32, of half of the keys
  __device__ __forceinline__ float add_fp32_bias(float (&scores)[kCount], int half, float factor, uint32_t at, int row,
                                                 int lane) {
    float lowest = 0.f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t r = bias_row(row + 8 * h);
      const unsigned char* from = base + (at - smem) + r * 128 + lane % 2 * 8;
#pragma unroll
      for (int j = 0; j < kCount / 8; j++) {
        const uint32_t chunk = j * 2 + lane % 4 / 2;
        const float2 bias =
            *reinterpret_cast<const float2*>(from + j / 4 * Shape::kMaskPanel + ((chunk % 8 ^ (r & 7)) << 4));
        const auto add = [&](float& score, float x) {
          score = x == -INFINITY ? x : ptx::rounded_product(score, factor) + x;
          lowest = fminf(lowest, x);
        };
        float* const to = scores + kCount / 2 * half + 4 * j + 2 * h;
        add(to[0], bias.x);
        add(to[1], bias.y);
      }
    }
    return lowest;
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
      if (!maps.mask_tiles) copy_bias(slot, key_tile, row, lane);
    } else if (kind != TileKind::whole) {
      if (options.mask_kind == MaskElement::boolean) read_boolean(slot, key_tile, row, key);
      if (options.mask_kind == MaskElement::blocks)
        each_half(seen,
                  [&](int key) { return seen_in_blocks<Half64>(slot.scores().blocks(options), row, key, lane, ~0u); });
    }
  }

  // Products to scores; returns whether a bias hides any. count: key tiles before this one.
  __device__ __forceinline__ bool apply(float (&scores)[kCount], const Slot& slot, int key_tile, int count,
                                        TileKind kind, int row, int lane) {
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
    if constexpr (Shape::kBias) {
      const int local = row - slot.row;
      if (!maps.mask_tiles) {
        ptx::cp_async_wait<0>();
        __syncwarp();  // @bias_there
      }
#pragma unroll
      for (int part = 0; part < Shape::kMaskParts; part++)
        with_bias(count, part, lane, [&](uint32_t at) {
          if constexpr (Shape::kWideBias)
            lowest = fminf(lowest, add_fp32_bias(scores, part, factor, at, local, lane));
          else
            lowest = add_bias(scores, factor, at, local, lane);
        });
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
