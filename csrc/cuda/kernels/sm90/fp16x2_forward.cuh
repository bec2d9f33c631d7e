// Attention forward of float32 on Hopper, on the planes of halves of fp32/fp16x2_planes.cuh: of each product of two
// numbers, high x low, low x high and high x high count (what is missing is 2^-24 of it). Tensor cores cut sums off
// instead of rounding them, so the small products come first, every tile of keys begins new sums, and ordinary addition
// joins these. A producer warpgroup (that of the 16-bit forward, whose columns are both planes) and two of 64 query
// rows, which multiply in turns: one's exponentials run under the other's products. Three products make a score, three
// an output: 36 wgmma for a tile of 64 keys at D 128 and of 128 keys at D 64, at twice the rate of TF32 and with the
// same 11 bits. What does not split is left to Fp32Forward: both kernels are launched, and one of them finds that it
// has nothing to do, so that the host never waits for the device. Not yet measured on a GPU. Proofs:
// tests/emulator/test_fp16x2.py.
#pragma once
#include "core/constants.h"
#include "cuda/kernels/fp32/fp16x2_planes.cuh"
#include "forward_producer.cuh"
#include "forward_products.cuh"
#include "forward_softmax.cuh"

namespace attnjourney {

template <int D>
struct Sm90Fp16x2Forward {
  struct Shape
      : Sm90ForwardShape<Half, 2 * D, 2 * D, 2, Fp16x2Size<D>::kRows, 2, D == 64 ? 2 : 1, true, true, 0, false> {
    static constexpr bool kScouts = false;
  };
  using Slot = Sm90ForwardSlot;
  using Barriers = Sm90ForwardBarriers<Shape>;
  static constexpr int kKeys = Shape::kKeys, kSteps = kKeys / 16;
  static constexpr int kSlices = D / 64, kParts = kKeys / 64;  // of a tile's columns and keys, with sums of their own
  static constexpr float kTop = 14.f;  // a row's largest weight is 2^14, so that low halves have bits
  using Weights = uint32_t[kSteps][4];

  // S = Q K^T in kSlices sums, of which all but the first are of high halves alone
  static __device__ __forceinline__ void scores(float (&s)[kSlices][kKeys / 2], uint32_t query, uint32_t key) {
    const uint64_t q = swizzled_operand(query, 0), k = swizzled_operand(key, 0);
    constexpr int kQueryPanel = 64 * 128 / 16, kKeyPanel = kKeys * 128 / 16;  // 64 columns
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < D / 16; kk++) {
      const uint64_t at = q + kk / 4 * kQueryPanel + kk % 4 * 2, to = k + kk / 4 * kKeyPanel + kk % 4 * 2;
      if (kk == 0)
        ptx::wgmma_ss_new<Half, kKeys, 0, 0>(s[0], at + kSlices * kQueryPanel, to);
      else
        ptx::wgmma_ss<Half, kKeys, 0, 0>(s[0], at + kSlices * kQueryPanel, to, true);
      ptx::wgmma_ss<Half, kKeys, 0, 0>(s[0], at, to + kSlices * kKeyPanel, true);
    }
#pragma unroll
    for (int kk = 0; kk < D / 16; kk++) {
      const uint64_t at = q + kk / 4 * kQueryPanel + kk % 4 * 2, to = k + kk / 4 * kKeyPanel + kk % 4 * 2;
      if (kk > 0 && kk % 4 == 0)
        ptx::wgmma_ss_new<Half, kKeys, 0, 0>(s[kk / 4], at, to);
      else
        ptx::wgmma_ss<Half, kKeys, 0, 0>(s[kk / 4], at, to, true);
    }
    ptx::wgmma_commit();
  }
  // P V in kParts sums of 64 keys; high halves of P times 2^-11 meet V's low ones times 2^11
  static __device__ __forceinline__ void output(float (&sum)[kParts][D / 2], const Weights& high, const Weights& low,
                                                const Weights& shifted, uint32_t value) {
    const uint64_t v = swizzled_operand(value, kKeys * 128);
    constexpr int kLow = kSlices * (kKeys * 128 / 16), kStep = 16 * 128 / 16;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kParts; i++) {
#pragma unroll
      for (int kk = 4 * i; kk < 4 * i + 4; kk++) {
        ptx::wgmma_rs<Half, D, 1>(sum[i], low[kk], v + kk * kStep, kk > 4 * i);
        ptx::wgmma_rs<Half, D, 1>(sum[i], shifted[kk], v + kLow + kk * kStep, true);
      }
#pragma unroll
      for (int kk = 4 * i; kk < 4 * i + 4; kk++) ptx::wgmma_rs<Half, D, 1>(sum[i], high[kk], v + kk * kStep, true);
    }
    ptx::wgmma_commit();
  }

  // Of two rows. reference: 14 less than the largest score so far, in log2 units, but for scores so large that 14 would
  // be rounded; total: this thread's part of the sum
  struct Softmax {
    float reference[2] = {-INFINITY, -INFINITY}, total[2] = {0.f, 0.f};
    float alpha[2];  // by how much what was summed so far shrinks
    // scores s times factor to weights
    __device__ __forceinline__ void run(float (&s)[kKeys / 2], float factor) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float top = s[2 * h];
#pragma unroll
        for (int i = 0; i < kKeys / 8; i++) top = fmaxf(top, fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
        top = fmaxf(top, ptx::shfl_xor(top, 1));
        top = fmaxf(top, ptx::shfl_xor(top, 2));
        top = ptx::rounded_product(top, factor);
        top = fmaxf(reference[h], fabsf(top) < 65536.f ? top - kTop : top);
        const float base = top == -INFINITY ? 0.f : top;
        alpha[h] = ptx::exp2(reference[h] - base);
        reference[h] = top;
        float part[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < kKeys / 8; i++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float& x = s[4 * i + 2 * h + e];
            part[e] += x = ptx::exp2(ptx::rounded_product(x, factor) - base);
          }
        total[h] = total[h] * alpha[h] + (part[0] + part[1]);
      }
    }
  };

  static __device__ __forceinline__ void split(const float (&s)[kKeys / 2], Weights& high, Weights& low,
                                               Weights& shifted) {
    constexpr float kShift = 1 / kLowFactor;
#pragma unroll
    for (int kk = 0; kk < kSteps; kk++)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const float a = s[8 * kk + 2 * q], b = s[8 * kk + 2 * q + 1];
        const Fp16x2Pair x(a, b, 1.f);
        high[kk][q] = x.high, low[kk][q] = x.low;
        shifted[kk][q] = ptx::pack2<Half>(x.rounded.x * kShift, x.rounded.y * kShift);
      }
  }

  // rows `row` and row + 8 of the tile; inverse: of the scale of the last values
  static __device__ __forceinline__ void write(const float (&out)[D / 2], const Softmax& soft, float inverse, int row,
                                               int t, const Slot& slot, const ForwardTask& task) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = slot.row + row + 8 * h;
      float sum = soft.total[h];
      sum += ptx::shfl_xor(sum, 1);
      sum += ptx::shfl_xor(sum, 2);
      if (r >= task.q_len) continue;
      if (t == 0)
        write_stats(task, (int64_t(slot.batch) * task.q_heads + slot.head) * task.q_len + r, soft.reference[h], sum,
                    (soft.reference[h] + kTop + ptx::log2(sum * (1.f / 16384.f))) * float(ln_2));
      const float factor = sum == 0.f ? 0.f : inverse / sum;
      float* to = row_of(slot, r, task) + 2 * t;
#pragma unroll
      for (int j = 0; j < D / 8; j++)
        if (8 * j + 2 * t < task.v_head_dim)
          *reinterpret_cast<float2*>(to + 8 * j) = float2{out[4 * j + 2 * h] * factor, out[4 * j + 2 * h + 1] * factor};
    }
  }
  static __device__ __forceinline__ void write_zeros(int row, int t, const Slot& slot, const ForwardTask& task) {
#pragma unroll 1
    for (int r = slot.row + row; r < min(task.q_len, slot.row + row + 9); r += 8) {
#pragma unroll 1
      for (int c = 2 * t; c < task.v_head_dim; c += 8)
        *reinterpret_cast<float2*>(row_of(slot, r, task) + c) = float2{0.f, 0.f};
      if (t == 0) write_stats(task, (int64_t(slot.batch) * task.q_heads + slot.head) * task.q_len + r, 0.f, 0.f, true);
    }
  }
  static __device__ __forceinline__ float* row_of(const Slot& slot, int row, const ForwardTask& task) {
    return static_cast<float*>(task.out) + slot.batch * task.out_strides.batch + slot.head * task.out_strides.head +
           row * task.out_strides.row;
  }

  static __device__ __forceinline__ void consume(uint32_t smem, const Barriers& barriers, const Slot* slots,
                                                 const ForwardTask& task, const Fp16x2Planes& planes) {
    const int group = ptx::uniform(threadIdx.x / 128) - 1, lane = threadIdx.x % 32, t = lane % 4;
    const int r0 = (threadIdx.x - 128) / 32 * 16 + lane / 4;  // this thread's row of the tile; and r0 + 8
    const auto release = [&](uint32_t bar) {
      if (lane == 0) ptx::mbarrier_arrive(bar);
    };
    const auto token_wait = [&] { ptx::bar_sync(1 + group, 256); };
    const auto token_pass = [&] { ptx::bar_arrive(2 - group, 256); };
    if (group == 1) ptx::bar_arrive(1, 256);

    float out[D / 2], sum[kParts][D / 2], slices[kSlices][kKeys / 2];
    float (&scores_)[kKeys / 2] = slices[0];
    Weights high, low, shifted;
    int count = 0;  // key tiles so far
    for (int round = 0;; round++) {
      const int query = group * Shape::kQueryStages + round % Shape::kQueryStages;
      const auto release_q = [&] {
        __syncwarp();
        release(barriers.q_empty + 8 * query);
      };
      ptx::mbarrier_wait(barriers.q_full + 8 * query, round / Shape::kQueryStages & 1);
      const Slot& slot = slots[group * 4 + round % 4];
      const int start = ptx::uniform(slot.start);
      if (start < 0) break;
      if (start == 0) {
        write_zeros(r0, t, slot, task);
        release_q();
        continue;
      }
      const float4* key_scale =
          planes.key_scale + (slot.batch * planes.kv_heads + slot.head / task.group) * planes.key_tiles;
      const int query_tile = min((slot.row + 64 * group) / Fp16x2Size<D>::kRows, planes.query_tiles - 1);
      const float query_scale =
          task.score_scale *
          planes.query_scale[(slot.batch * task.q_heads + slot.head) * planes.query_tiles + query_tile];
      for (int k = 1; k < start; k++, count++) {  // key tiles that only the other warpgroup sees
        token_wait();
        token_pass();
        const int stage = 8 * (count % Shape::kStages), phase = count / Shape::kStages & 1;
        ptx::mbarrier_wait(barriers.k_full + stage, phase);
        ptx::mbarrier_wait(barriers.v_full + stage, phase);
        __syncwarp();  // no lane may still be waiting when the next phase but one begins
        release(barriers.k_empty + stage);
        release(barriers.v_empty + stage);
      }
      Softmax soft;
      float unit = 0.f;  // o is in units of this
#pragma unroll
      for (int e = 0; e < D / 2; e++) out[e] = 0.f;
      for (int n = ptx::uniform(slot.first), after; n >= 0; n = after, count++) {
        const int stage = count % Shape::kStages, phase = count / Shape::kStages & 1;
        ptx::mbarrier_wait(barriers.k_full + 8 * stage, phase);
        token_wait();
        scores(slices, smem + query * Shape::kQueryBytes, smem + Shape::kKeyAt + stage * Shape::kKeyBytes);
        token_pass();
        const float4 scale = key_scale[n];
        after = n == slot.tiles.begin ? ptx::uniform(slot.tiles.prefix) - 1 : n - 1;
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kSlices; i++) ptx::keep(slices[i]);
        release(barriers.k_empty + 8 * stage);
        if (after < 0) release_q();
#pragma unroll
        for (int i = 1; i < kSlices; i++)
#pragma unroll
          for (int e = 0; e < kKeys / 2; e++) scores_[e] += slices[i][e];
        if (n < slot.tiles.whole_begin || n >= slot.tiles.whole_end)
          Sm90ForwardSoftmax<Shape>::hide(scores_, task, slot.sequence(task), slot.row + r0, n * kKeys + 2 * t);
        soft.run(scores_, query_scale * scale.x);
        split(scores_, high, low, shifted);
        ptx::mbarrier_wait(barriers.v_full + 8 * stage, phase);
        output(sum, high, low, shifted, smem + Shape::kValueAt + stage * Shape::kValueBytes);
        soft.alpha[0] *= unit * scale.y;
        soft.alpha[1] *= unit * scale.y;
        unit = scale.z;
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kParts; i++) ptx::keep(sum[i]);
        release(barriers.v_empty + 8 * stage);
#pragma unroll
        for (int e = 0; e < D / 2; e++) out[e] = out[e] * soft.alpha[e >> 1 & 1] + sum[0][e];
#pragma unroll
        for (int i = 1; i < kParts; i++)
#pragma unroll
          for (int e = 0; e < D / 2; e++) out[e] += sum[i][e];
      }
      write(out, soft, unit, r0, t, slot, task);
    }
  }

  static __device__ __forceinline__ void run(const Sm90ForwardMaps& maps, const ForwardTask& task,
                                             const Fp16x2Planes& planes) {
    if (*planes.needs_fallback) return;
    sm90_forward_roles<Shape>(
        [&](uint32_t smem, unsigned char* base, const Barriers& barriers) {
          Sm90ForwardProducer<Shape>{{smem, barriers, maps, task}, reinterpret_cast<Slot*>(base + Shape::kSlotsAt)}
              .run();
        },
        [&](uint32_t smem, unsigned char* base, const Barriers& barriers) {
          consume(smem, barriers, reinterpret_cast<const Slot*>(base + Shape::kSlotsAt), task, planes);
        });
  }
};

// grid: at most the number of tiles of 128 rows; maps: of the planes, without one of the output
template <int D>
__global__ void __launch_bounds__(Sm90Fp16x2Forward<D>::Shape::kThreads, 1)
    sm90_fp16x2_forward(const __grid_constant__ Sm90ForwardMaps maps, const __grid_constant__ ForwardTask task,
                        const __grid_constant__ Fp16x2Planes planes) {
  Sm90Fp16x2Forward<D>::run(maps, task, planes);
}

}  // namespace attnjourney
