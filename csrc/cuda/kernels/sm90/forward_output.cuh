// How the Hopper forward writes its output and lse: every warp its 16 rows. o is a wgmma accumulator; row: this
// thread's first row of the tile.
#pragma once
#include "forward_shape.cuh"

namespace attnjourney {

template <class S>
struct Sm90ForwardOutput {
  using T = typename S::T;
  using Slot = Sm90ForwardSlot;

  static __device__ __forceinline__ int rows_of(const Slot& x, const ForwardTask& p) {
    return S::kOptions ? x.rows : p.q_len;
  }
  // What a row's output is multiplied by, 0 where it saw nothing; writes its lse. unit: of max, in log2 units
  static __device__ __forceinline__ float finish_row(float sum, float max, float unit, int row, int t, const Slot& x,
                                                     const ForwardTask& p) {
    sum += ptx::shfl_xor(sum, 1);
    sum += ptx::shfl_xor(sum, 2);
    const int64_t first = S::kOptions && p.cu_q ? int64_t(x.head) * p.q_len + x.q_begin
                                                : (int64_t(x.batch) * p.q_heads + x.head) * p.q_len;
    if (t == 0 && row < rows_of(x, p))
      p.lse[first + row] = sum == 0.f ? -INFINITY : (max * unit + ptx::log2(sum)) * 0.6931471805599453f;
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    return S::kOptions && p.scores.seed ? inverse * p.scores.keep_scale : inverse;
  }

  // through shared memory and one TMA store for each 64 columns
  static __device__ __forceinline__ void store(float (&o)[S::kDv / 2], const float (&max)[2], const float (&sum)[2],
                                               int row, int lane, uint32_t smem, unsigned char* base, const Slot& x,
                                               const ptx::TensorMap& map, const ForwardTask& p) {
    const int g = lane / 4, t = lane % 4, at = S::kOutAt + row / 16 * (16 * S::kDv * 2);
    if (lane == 0) ptx::bulk_wait_read<0>();  // @output_stored: that of the last tile
    __syncwarp();
    const int word = at + g * 128 + (g << 4) + 4 * t;  // 128-byte rows, 16-byte chunks exchanged by the row's number
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float inverse = finish_row(sum[h], max[h], p.scale_log2, x.row + row + 8 * h, t, x, p);
#pragma unroll
      for (int j = 0; j < S::kDv / 8; j++)
        *reinterpret_cast<uint32_t*>(base + (word ^ (j % 8 << 4)) + h * 1024 + j / 8 * 2048) =
            ptx::pack2<T>(o[4 * j + 2 * h] * inverse, o[4 * j + 2 * h + 1] * inverse);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int c = 0; c < S::kDv / 64; c++)
        ptx::tma_store_4d(&map, smem + at + c * 2048, c * 64, x.head, x.row + row / 16 * 16, x.batch);
      ptx::bulk_commit();
    }
  }

  static __device__ __forceinline__ T* row_of(const Slot& x, int row, const ForwardTask& p) {
    return static_cast<T*>(p.out) + x.batch * p.out_strides.batch + x.head * p.out_strides.head +
           (S::kOptions ? x.q_begin + row : row) * p.out_strides.row;
  }

  // from registers: a 4 x 4 transpose among the four lanes of a row makes 16 bytes each
  static __device__ __forceinline__ void write(float (&o)[S::kDv / 2], const float (&max)[2], const float (&sum)[2],
                                               float unit, int row, int t, const Slot& x, const ForwardTask& p) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = x.row + row + 8 * h;
      const float inverse = finish_row(sum[h], max[h], unit, r, t, x, p);
      T* at = row_of(x, r, p) + 8 * t;
#pragma unroll
      for (int j = 0; j < S::kDv / 8; j += 4) {
        uint32_t w[4];
#pragma unroll
        for (int q = 0; q < 4; q++)
          w[q] = ptx::pack2<T>(o[4 * (j + q) + 2 * h] * inverse, o[4 * (j + q) + 2 * h + 1] * inverse);
        const bool odd = t & 1, high = t & 2;
        const uint32_t b0 = ptx::shfl_xor(odd ? w[0] : w[1], 1), b1 = ptx::shfl_xor(odd ? w[2] : w[3], 1);
        w[0] = odd ? b0 : w[0], w[1] = odd ? w[1] : b0, w[2] = odd ? b1 : w[2], w[3] = odd ? w[3] : b1;
        const uint32_t b2 = ptx::shfl_xor(high ? w[0] : w[2], 2), b3 = ptx::shfl_xor(high ? w[1] : w[3], 2);
        w[0] = high ? b2 : w[0], w[2] = high ? w[2] : b2, w[1] = high ? b3 : w[1], w[3] = high ? w[3] : b3;
        if (r < rows_of(x, p) && (j + t) * 8 < p.v_head_dim)
          *reinterpret_cast<uint4*>(at + j * 8) = uint4{w[0], w[1], w[2], w[3]};
      }
    }
  }

  // a tile that sees no key at all
  static __device__ __forceinline__ void write_zeros(int row, int t, const Slot& x, const ForwardTask& p) {
#pragma unroll 1
    for (int r = x.row + row; r < min(p.q_len, x.row + row + 9); r += 8) {
#pragma unroll 1
      for (int c = t * 8; c < p.v_head_dim; c += 32) *reinterpret_cast<uint4*>(row_of(x, r, p) + c) = uint4{0, 0, 0, 0};
      if (t == 0) p.lse[(int64_t(x.batch) * p.q_heads + x.head) * p.q_len + r] = -INFINITY;
    }
  }
};

}  // namespace attnjourney
