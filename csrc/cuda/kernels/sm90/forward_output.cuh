// How the Hopper forward writes its output and lse: every warp its 16 rows. o is a wgmma accumulator; row: this
// thread's first row of the tile.
#pragma once
#include "core/constants.h"
#include "forward_softmax.cuh"

namespace attnjourney {

template <class Shape>
struct Sm90ForwardOutput {
  using T = typename Shape::T;
  using Slot = Sm90ForwardSlot;

  static __device__ __forceinline__ int rows_of(const Slot& slot, const ForwardTask& task) {
    return Shape::kOptions ? slot.rows : task.q_len;
  }
  // The end of a row's softmax: the sum of its weights, of which each of four lanes has a part, and 1 / sum, 0 where it
  // saw nothing.
  struct Row {
    float sum, inverse;
    explicit __device__ __forceinline__ Row(float part) : sum(part) {
      sum += ptx::shfl_xor(sum, 1);
      sum += ptx::shfl_xor(sum, 2);
      inverse = sum == 0.f ? 0.f : 1.f / sum;
    }
    __device__ __forceinline__ float factor(const ForwardTask& task) const {  // of the output
      return Shape::kOptions && task.scores.seed ? inverse * task.scores.keep_scale : inverse;
    }
    // Lse and stats; after the output, when its registers are free. unit: of max, in scores
    __device__ __forceinline__ void write(float max, float unit, int row, int t, const Slot& slot,
                                          const ForwardTask& task) const {
      if (t != 0 || row >= rows_of(slot, task)) return;
      using Softmax = Sm90ForwardSoftmax<Shape>;
      const int64_t first = Shape::kOptions && task.cu_q
                                ? int64_t(slot.head) * task.q_len + slot.q_begin
                                : (int64_t(slot.batch) * task.q_heads + slot.head) * task.q_len;
      const float reference = Softmax::scaled(max, unit), of_sum = ptx::log2(sum) + Softmax::headroom(task);
      const float lse = Softmax::kNatural ? reference + of_sum * float(ln_2) : (reference + of_sum) * float(ln_2);
      write_row(task, first + row, reference, inverse * Softmax::weight_unit(task), lse);
    }
  };

  // through shared memory and one TMA store for each 64 columns
  static __device__ __forceinline__ void store(float (&out)[Shape::kDv / 2], const float (&max)[2],
                                               const float (&sum)[2], int row, int lane, uint32_t smem,
                                               unsigned char* base, const Slot& slot, const ptx::TensorMap& map,
                                               const ForwardTask& task) {
    const int g = lane / 4, t = lane % 4, at = Shape::kOutAt + row / 16 * (16 * Shape::kDv * 2);
    if (lane == 0) ptx::bulk_wait_read<0>();  // @output_stored: that of the last tile
    __syncwarp();
    const int word = at + g * 128 + (g << 4) + 4 * t;  // 128-byte rows, 16-byte chunks exchanged by the row's number
    const Row rows[2] = {Row(sum[0]), Row(sum[1])};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float inverse = rows[h].factor(task);
#pragma unroll
      for (int j = 0; j < Shape::kDv / 8; j++)
        *reinterpret_cast<uint32_t*>(base + (word ^ (j % 8 << 4)) + h * 1024 + j / 8 * 2048) =
            ptx::pack2<T>(out[4 * j + 2 * h] * inverse, out[4 * j + 2 * h + 1] * inverse);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int c = 0; c < Shape::kDv / 64; c++)
        ptx::tma_store_4d(&map, smem + at + c * 2048, c * 64, slot.head, slot.row + row / 16 * 16, slot.batch);
      ptx::bulk_commit();
    }
#pragma unroll
    for (int h = 0; h < 2; h++) rows[h].write(max[h], task.score_scale, slot.row + row + 8 * h, t, slot, task);
  }

  static __device__ __forceinline__ T* row_of(const Slot& slot, int row, const ForwardTask& task) {
    return static_cast<T*>(task.out) + slot.batch * task.out_strides.batch + slot.head * task.out_strides.head +
           (Shape::kOptions ? slot.q_begin + row : row) * task.out_strides.row;
  }

  // from registers: a 4 x 4 transpose among the four lanes of a row makes 16 bytes each
  static __device__ __forceinline__ void write(float (&out)[Shape::kDv / 2], const float (&max)[2],
                                               const float (&sum)[2], float unit, int row, int t, const Slot& slot,
                                               const ForwardTask& task) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = slot.row + row + 8 * h;
      const Row finished(sum[h]);
      const float inverse = finished.factor(task);
      T* at = row_of(slot, r, task) + 8 * t;
#pragma unroll
      for (int j = 0; j < Shape::kDv / 8; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int q = 0; q < 4; q++)
          words[q] = ptx::pack2<T>(out[4 * (j + q) + 2 * h] * inverse, out[4 * (j + q) + 2 * h + 1] * inverse);
        const bool odd = t & 1, high = t & 2;
        const uint32_t b0 = ptx::shfl_xor(odd ? words[0] : words[1], 1),
                       b1 = ptx::shfl_xor(odd ? words[2] : words[3], 1);
        words[0] = odd ? b0 : words[0], words[1] = odd ? words[1] : b0, words[2] = odd ? b1 : words[2],
        words[3] = odd ? words[3] : b1;
        const uint32_t b2 = ptx::shfl_xor(high ? words[0] : words[2], 2),
                       b3 = ptx::shfl_xor(high ? words[1] : words[3], 2);
        words[0] = high ? b2 : words[0], words[2] = high ? words[2] : b2, words[1] = high ? b3 : words[1],
        words[3] = high ? words[3] : b3;
        if (r < rows_of(slot, task) && (j + t) * 8 < task.v_head_dim)
          *reinterpret_cast<uint4*>(at + j * 8) = uint4{words[0], words[1], words[2], words[3]};
      }
      finished.write(max[h], unit, r, t, slot, task);
    }
  }

  // a tile that sees no key at all
  static __device__ __forceinline__ void write_zeros(int row, int t, const Slot& slot, const ForwardTask& task) {
#pragma unroll 1
    for (int r = slot.row + row; r < min(task.q_len, slot.row + row + 9); r += 8) {
#pragma unroll 1
      for (int c = t * 8; c < task.v_head_dim; c += 32)
        *reinterpret_cast<uint4*>(row_of(slot, r, task) + c) = uint4{0, 0, 0, 0};
      if (t == 0) write_row(task, (int64_t(slot.batch) * task.q_heads + slot.head) * task.q_len + r, 0.f, 0.f, 0.f);
    }
  }
};

}  // namespace attnjourney
