// Attention forward on mma.sync for heads of more than 256 columns, 16-bit numbers (Gemma 4 has 512): the walk of
// sm80/forward.cuh with all its options. One block: 32 query rows of one head, two groups of 16; the warps of a group
// share the columns, of Q K^T, whose parts they add up through shared memory in one order, and of the output.
#pragma once
#include "cuda/kernels/common/next_tile.cuh"
#include "forward.cuh"
#include "row_products.cuh"

namespace attnjourney {

template <class T_, int D, int Keys, int Parts>
struct Sm80WideForward {
  using T = T_;
  static constexpr int kD = D, kRows = 32, kKeys = Keys, kParts = Parts, kWarps = kRows / 16 * Parts;
  static constexpr int kThreads = 32 * kWarps, kColumns = D / Parts;
  static constexpr int kQueryBytes = kRows * D * 2, kKeyBytes = Keys * D * 2;
  static constexpr int kPartBytes = 16 * Keys * 4;  // of a warp's products
  static constexpr int kPartsAt = kQueryBytes + 2 * kKeyBytes, kTileBytes = kPartsAt + kWarps * kPartBytes;
  using Window = TileWindow<kThreads>;
  using Fragment = RowFragment<Keys / 8>;
  using Products = Sm80RowProducts<T, D, Keys, kColumns>;
  using Weights = typename Products::Weights;
  using Sums = typename Products::Sums;
  using Softmax = Sm80Forward<T, kColumns, kColumns, Keys, true>;
  static constexpr int kSmemBytes = kTileBytes + Window::kBytes;

  template <int Count>
  static __device__ __forceinline__ void load_tile(uint32_t tile, const T* base, int64_t stride, int row0, int rows,
                                                   int dim) {
    const int tid = ptx::opaque(threadIdx.x);
#pragma unroll
    for (int i = 0; i < Count * (D / 8) / kThreads; i++) {
      const int c = i * kThreads + tid, row = c / (D / 8), chunk = c % (D / 8);
      const bool valid = row0 + row < rows && chunk * 8 < dim;
      ptx::cp_async_16(Products::chunk_at(tile, row, chunk), base + (valid ? (row0 + row) * stride + chunk * 8 : 0),
                       valid);
    }
    ptx::cp_async_commit();
  }

  static __device__ __forceinline__ void run(const ForwardTask& p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row_group = warp / Parts, first = warp % Parts * (kColumns / 8);  // this warp's rows, its first chunk
    const ForwardTile where = packed_tile<kRows>(p, blockIdx.x);
    const Sequence sequence = sequence_of<true>(p, where.batch);
    if (where.row >= sequence.rows) return;
    const int head_k = where.head / p.group, row = where.row + row_group * 16 + g;
    const KeyTiles tiles = key_tiles_of<Keys, true>(p, sequence, where.row, where.row + kRows - 1);
    const KeyTiles own = key_tiles_of<Keys, true>(p, sequence, row - g, row - g + 15);
    const auto head_of = [&](const void* base, const Strides& s, int head, int begin) {
      return static_cast<const T*>(base) + where.batch * s.batch + head * s.head + begin * s.row;
    };
    const T* query = head_of(p.query, p.query_strides, where.head, sequence.q_begin);
    const T* key = head_of(p.key, p.key_strides, head_k, sequence.k_begin);
    const T* value = head_of(p.value, p.value_strides, head_k, sequence.k_begin);
    unsigned char* const smem = ptx::dynamic_smem();
    const uint32_t query_tile = ptx::smem_addr(smem), key_tile = query_tile + kQueryBytes;
    const uint32_t value_tile = key_tile + kKeyBytes;
    const auto load_keys = [&](int n) {
      load_tile<Keys>(key_tile, key, p.key_strides.row, n * Keys, tiles.key_end, p.head_dim);
    };

    const HeadScores scores(p, p.q_heads, where.batch, where.head);
    VisibleTile found;  // of the tile to come
    int flags_turn = 0;
    Window window{reinterpret_cast<uint32_t*>(smem + kTileBytes)};
    const KeyTileWalk<kRows, Keys, float> walk{p, sequence, scores, tiles, own, where.row, row};
    const auto next_visible = [&](int n) {
      return next_visible_tile<Fragment, kWarps>(n, found, p.scores, walk, window, window.found, flags_turn);
    };

    load_tile<kRows>(query_tile, query, p.query_strides.row, where.row, sequence.rows, p.head_dim);
    const int first_tile = next_visible(tiles.first());
    if (first_tile < tiles.end) load_keys(first_tile);

    Sums acc = {};
    float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f};
    if (p.scores.sinks) {
      const float sink = p.scores.sinks[scores.index];
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (row + 8 * h < sequence.q_len && sink != -INFINITY) {
          row_max[h] = sink_score(p.scores, sink);
          row_sum[h] = t == 0 ? 1.f : 0.f;
        }
    }

    int at = lane;
    for (int n = first_tile, next; n < tiles.end; n = next) {
      at = ptx::opaque(at);     // hoisted out of the loop, addresses would spill
      ptx::cp_async_wait<0>();  // @key_landed: K (and Q) of this tile have landed
      __syncthreads();          // @value_read: every warp is past V and the parts of the tile before
      load_tile<Keys>(value_tile, value, p.value_strides.row, n * Keys, tiles.key_end, p.v_head_dim);
      Weights s = {};
      Products::add_scores(s, query_tile, key_tile, row_group * 16, first, at);
      float4* const parts = reinterpret_cast<float4*>(smem + kPartsAt) + row_group * (Parts * kPartBytes / 16) + at;
#pragma unroll
      for (int j = 0; j < Keys / 8; j++)
        parts[(warp % Parts * (Keys / 8) + j) * 32] = {s[j][0], s[j][1], s[j][2], s[j][3]};
      __syncthreads();  // @parts_complete: and K is read
#pragma unroll
      for (int j = 0; j < Keys / 8; j++) {
        float4 sum = parts[j * 32];
#pragma unroll
        for (int i = 1; i < Parts; i++) {
          const float4 x = parts[(i * (Keys / 8) + j) * 32];
          sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
        s[j][0] = sum.x, s[j][1] = sum.y, s[j][2] = sum.z, s[j][3] = sum.w;
      }

      const int key0 = n * Keys + 2 * t;
      const uint32_t shown =
          score<T, Fragment>(s, p.scores, scores, p.score_scale, sequence.keys.offset, row, key0, found.seen);
      const bool hides = ptx::any(shown != kAllSeen<Fragment>);
      Softmax::softmax(s, acc, row_max, row_sum, p.scores.exponent);
      if (p.scores.seed) drop<Fragment>(s, p.scores, scores, row, key0);

      ptx::cp_async_wait<0>();  // @value_landed
      __syncthreads();          // @value_seen: by all warps
      next = next_visible(tiles.above(n));
      if (next < tiles.end) load_keys(next);
      Products::add_values(acc, s, value_tile, hides, first, lane, at);
    }
    ptx::cp_async_wait<0>();  // without any key tile, Q is still on its way
    write(p, acc, row_max, row_sum);
  }

  static __device__ __forceinline__ void write(const ForwardTask& p, const Sums& acc, const float (&row_max)[2],
                                               const float (&row_sum)[2]) {
    // once more: held through the loop, this would spill
    const int lane = ptx::opaque(threadIdx.x % 32), warp = ptx::opaque(threadIdx.x / 32), t = lane % 4;
    const ForwardTile where = packed_tile<kRows>(p, ptx::opaque(blockIdx.x));
    const Sequence sequence = sequence_of<true>(p, where.batch);
    const int row = where.row + warp / Parts * 16 + lane / 4, column = warp % Parts * kColumns;
    T* const out = static_cast<T*>(p.out) + where.batch * p.out_strides.batch + where.head * p.out_strides.head +
                   sequence.q_begin * p.out_strides.row + column + 2 * t;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = row + 8 * h;
      float sum = row_sum[h];
      sum += ptx::shfl_xor(sum, 1);
      sum += ptx::shfl_xor(sum, 2);
      if (r >= sequence.rows) continue;
      if (column == 0 && t == 0) {
        const int64_t head = p.cu_q ? where.head : int64_t(where.batch) * p.q_heads + where.head;
        write_stats(p, head * p.q_len + sequence.q_begin + r, row_max[h], sum, p.scores.unit != 1);
      }
      float inverse = sum == 0.f ? 0.f : 1.f / sum;
      if (p.scores.seed) inverse *= p.scores.keep_scale;
#pragma unroll
      for (int j = 0; j < kColumns / 8; j++) {
        if (column + j * 8 >= p.v_head_dim) break;
        *reinterpret_cast<uint32_t*>(out + r * p.out_strides.row + j * 8) =
            ptx::pack2<T>(acc[j][2 * h] * inverse, acc[j][2 * h + 1] * inverse);
      }
    }
  }
};

// The kernel that is built: it fits into 99 KB.
template <class T>
using Sm80Forward512 = Sm80WideForward<T, 512, 16, 4>;

// grid: total tiles
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) sm80_wide_forward(const __grid_constant__ ForwardTask p) {
  Kernel::run(p);
}

}  // namespace attnjourney
