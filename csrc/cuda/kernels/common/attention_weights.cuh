// The weights of chosen rows and heads, for every dtype and head_dim: products in float, or double for
// double, without tensor cores, since writing the weights takes longer. One block of 256 threads: 64 rows by 64 keys of
// one head, 4 by 4 a thread.
#pragma once
#include "numbers.cuh"
#include "scores.cuh"

namespace attnjourney {

// Any tensor [batch, heads, length, dim] with dense rows.
struct WeightsOperand {
  const void* data;
  int64_t batch[kMaskDims], head, row;  // strides; 0 where it broadcasts
  int group;                            // query heads that share a head
};

template <class C>
struct WeightsTask : SequenceTask {  // of the scores: the mask alone
  WeightsOperand query, key;
  const C* lse;                 // [batch, q_heads, q_len], natural logarithm
  const RowStats<C>* stats;     // like lse, or null: weights are exp(score - lse) then, with the rounding of lse
  const double* slopes;         // of ALiBi, [batch, q_heads] or null
  void* out;                    // [batch, n_heads, n_rows, kv_len]
  const int64_t *rows, *heads;  // what is chosen; numbers that are not there give zeros
  int batch, q_heads, n_rows, n_heads, head_dim;
  C scale, softcap;  // times ScoresOf::unit, as scores are; softcap 0: none
  C cap_factor;      // of products under softcap's tanh
  C unit, exponent;  // see ScoresOf
};

template <class T_, class C_>
struct AttentionWeights {
  using T = T_;
  using C = C_;
  static constexpr int kTile = 64, kDepth = 32, kThreads = 256, kStride = kTile + 1, kWarps = kThreads / 32;
  static constexpr int kOperandBytes = kDepth * kStride * sizeof(C);
  static constexpr int kSmemBytes = 2 * kOperandBytes + kTile * 4 + 2 * kWarps * 4;

  // Row r of `rows` at depth d goes to [d][r]: a warp reads 32 numbers of a row.
  template <class RowOf>
  static __device__ __forceinline__ void load(C* to, const WeightsOperand& x, const T* base, int depth, int head_dim,
                                              RowOf&& row_of) {
    const int d = threadIdx.x % 32;
#pragma unroll 4
    for (int r = threadIdx.x / 32; r < kTile; r += kWarps) {
      const int row = row_of(r);
      to[d * kStride + r] = row >= 0 && depth + d < head_dim ? ptx::to_float(base[row * x.row + depth + d]) : C(0);
    }
  }

  static __device__ __forceinline__ C mask_value(const Scores& s, const HeadScores& h, int row, int key) {
    const int64_t at = row * s.mask_row + key * s.mask_col;
    return s.mask_kind == MaskElement::fp32 ? C(reinterpret_cast<const float*>(h.mask)[at])
                                            : ptx::to_float(reinterpret_cast<const T*>(h.mask)[at]);
  }

  static __device__ __forceinline__ void run(const WeightsTask<C>& p) {
    const int tid = threadIdx.x, tx = tid % 16, ty = tid / 16;
    const int key_tiles = (p.kv_len + kTile - 1) / kTile, row_tiles = (p.n_rows + kTile - 1) / kTile;
    int i = blockIdx.x;
    const int n0 = i % key_tiles * kTile;
    i /= key_tiles;
    const int first = i % row_tiles * kTile;
    i /= row_tiles;
    const int place = i % p.n_heads, batch = i / p.n_heads;
    const int64_t wanted = p.heads[place];
    const bool is_head = wanted >= 0 && wanted < p.q_heads;
    const int head = is_head ? static_cast<int>(wanted) : 0;
    const Sequence sequence = sequence_of(p, batch);
    const HeadScores scores(p, p.q_heads, batch, head);
    unsigned char* smem = ptx::dynamic_smem();
    C *a = reinterpret_cast<C*>(smem), *b = reinterpret_cast<C*>(smem + kOperandBytes);
    int* rows = reinterpret_cast<int*>(smem + 2 * kOperandBytes);  // their numbers; -1: none
    if (tid < kTile) {
      const int64_t row = first + tid < p.n_rows ? p.rows[first + tid] : -1;
      rows[tid] = is_head && row >= 0 && row < sequence.q_len ? static_cast<int>(row) : -1;
    }
    __syncthreads();

    // this thread's rows are ty + 16 i, its keys n0 + tx + 16 j; bit 4 i + j: is the pair seen?
    int own[4];
    uint32_t seen = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) own[r] = rows[ty + 16 * r];
#pragma unroll
    for (int e = 0; e < 16; e++)
      if (own[e / 4] >= 0 && sequence.keys.visible(own[e / 4], n0 + tx + e % 4 * 16)) seen |= 1u << e;
    seen = seen_in_tensor(p, scores, own, n0 + tx, seen);
    int turn = 0;
    C sum[4][4] = {};
    if (block_any(seen != 0, reinterpret_cast<uint32_t*>(rows + kTile), turn, kWarps)) {
      const T* query = static_cast<const T*>(p.query.data) + batch_offset(p.scores, p.query.batch, batch) +
                       head / p.query.group * p.query.head;
      const T* key = static_cast<const T*>(p.key.data) + batch_offset(p.scores, p.key.batch, batch) +
                     head / p.key.group * p.key.head;
      for (int depth = 0; depth < p.head_dim; depth += kDepth) {
        load(a, p.query, query, depth, p.head_dim, [&](int r) { return rows[r]; });
        load(b, p.key, key, depth, p.head_dim, [&](int r) { return n0 + r < sequence.keys.key_length ? n0 + r : -1; });
        __syncthreads();
#pragma unroll 8
        for (int d = 0; d < kDepth; d++) {
          C x[4], y[4];
#pragma unroll
          for (int r = 0; r < 4; r++) x[r] = a[d * kStride + ty + 16 * r], y[r] = b[d * kStride + tx + 16 * r];
#pragma unroll
          for (int e = 0; e < 16; e++) sum[e / 4][e % 4] += x[e / 4] * y[e % 4];
        }
        __syncthreads();  // @tiles_read: both
      }
    }
    write(p, scores, sequence, sum, own, seen, first, n0, (int64_t(batch) * p.n_heads + place) * p.n_rows, batch, head);
  }

  // `seen` without what a boolean mask or one of blocks hides. Blocks: the 16 threads of a row look one up each.
  static __device__ __forceinline__ uint32_t seen_in_tensor(const WeightsTask<C>& p, const HeadScores& h,
                                                            const int (&own)[4], int key, uint32_t seen) {
    const int lane = threadIdx.x % 32, tx = lane % 16, key0 = key - tx, size = p.scores.blocks.size;
    if (p.scores.mask_kind == MaskElement::boolean) {
#pragma unroll
      for (int e = 0; e < 16; e++)
        if (seen >> e & 1 && !h.mask[own[e / 4] * p.scores.mask_row + (key + e % 4 * 16) * p.scores.mask_col])
          seen &= ~(1u << e);
    }
    if (p.scores.mask_kind != MaskElement::blocks) return seen;
    const HeadBlocks blocks = h.blocks(p.scores);
    const int mine = own[0] * (tx / 4 == 0) + own[1] * (tx / 4 == 1) + own[2] * (tx / 4 == 2) + own[3] * (tx / 4 == 3);
    const int found = mine >= 0 ? blocks.block_of(mine, key0 + tx % 4 * 16) : HeadBlocks::kHidden;
#pragma unroll
    for (int e = 0; e < 16; e++) {
      const int number = static_cast<int>(ptx::shfl(static_cast<uint32_t>(found), (lane & 16) | e));
      const int k = key + e % 4 * 16;
      const bool hidden =
          number == HeadBlocks::kHidden ||
          (number >= 0 && !p.scores.blocks.elements[(int64_t(number) * size + own[e / 4] % size) * size + k % size]);
      if (hidden) seen &= ~(1u << e);
    }
    return seen;
  }

  static __device__ __forceinline__ void write(const WeightsTask<C>& p, const HeadScores& h, const Sequence& sequence,
                                               const C (&sum)[4][4], const int (&own)[4], uint32_t seen, int first,
                                               int n0, int64_t row0, int batch, int head) {
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const int64_t pair = int64_t(batch) * p.q_heads + head;
    const C slope = p.slopes ? C(p.slopes[pair]) * p.unit : C(0);
#pragma unroll
    for (int r = 0; r < 4; r++) {
      if (first + ty + 16 * r >= p.n_rows) continue;
      RowStats<C> stats{};
      if (own[r] >= 0) {
        const int64_t at = pair * p.q_len + own[r];
        stats = p.stats ? p.stats[at] : RowStats<C>{p.lse[at] * p.unit, 1};
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int key = n0 + tx + 16 * j;
        if (key >= p.kv_len) continue;
        C weight = 0;
        if (seen >> (4 * r + j) & 1) {
          C x = p.softcap > 0 ? p.softcap * std::tanh(sum[r][j] * p.cap_factor)
                              : ptx::rounded_product(sum[r][j], p.scale);
          x -= ptx::rounded_product(slope, C(abs(own[r] + sequence.keys.offset - key)));
          bool hidden = false;
          if (p.scores.mask_kind > MaskElement::boolean) {
            const C bias = mask_value(p.scores, h, own[r], key);
            hidden = bias == -C(INFINITY);
            x += bias;
          }
          weight = hidden ? C(0) : std::exp2((x - stats.reference) * p.exponent) * stats.inverse;
        }
        const int64_t at = (row0 + first + ty + 16 * r) * p.kv_len + key;
        store_one(static_cast<T*>(p.out) + at, weight);
      }
    }
  }
};

inline int64_t weights_blocks(int64_t rows, int64_t keys, int64_t heads) {
  return (rows + 63) / 64 * ((keys + 63) / 64) * heads;
}

// grid: weights_blocks of the batch's chosen heads
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 3)
    attention_weights(const __grid_constant__ WeightsTask<typename Kernel::C> p) {
  Kernel::run(p);
}

}  // namespace attnjourney
