// Attention backward on mma.sync for heads of more than 256 columns, 16-bit numbers, with all options. One block: 32
// keys of one key head, all query tiles of all its query heads, 16 rows each. Of eight warps four make S^T = K Q^T, 16
// keys by 8 rows each, and four dP^T = V dO^T; for dV += P^T dO, dK += dS^T Q and dQ = dS K each has 64 of 512 columns.
#pragma once
#include "cuda/kernels/common/backward_passes.cuh"
#include "cuda/kernels/common/next_tile.cuh"
#include "cuda/kernels/common/slope_sum.cuh"

namespace attnjourney {

template <class T_, int D, bool Deterministic>
struct Sm80WideBackward {
  using T = T_;
  static constexpr int kRows = 16, kKeys = 32, kD = D, kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kColumns = D / kWarps, kChunks = kColumns / 8;  // of a warp
  static constexpr int kRow = D * 2, kColumn = kRows * 2;              // bytes of a row, of a key's scores
  static constexpr int kKeyBytes = kKeys * kRow, kRowBytes = kRows * kRow, kScoreBytes = kKeys * kColumn;
  static constexpr int kStats = kRows * 12;  // reference, delta, inverse
  static constexpr int kScoresAt = 2 * kKeyBytes + 2 * kRowBytes, kStatsAt = kScoresAt + 2 * kScoreBytes;
  static constexpr int kTileBytes = kStatsAt + kStats;
  using Window = TileWindow<kThreads>;
  struct Place {  // of a block
    Sequence sequence;
    BackwardTile tile;
    // the tile of queries that is worked on: its head, its number in the scratch, how many blocks add to it before
    int head, turn;
    int64_t number;
    bool border;  // may anything be hidden in it?
  };
  static constexpr int kPlaceAt = kTileBytes + Window::kBytes + kWarps * 4;
  static constexpr int kSmemBytes = kPlaceAt + sizeof(Place);
  static constexpr bool kOptions = true, kRecompute = true;  // see QueryTileWalk
  static __device__ __forceinline__ bool takes_turns(const BackwardTask&) { return Deterministic; }
  using Fragment = KeyFragment<1, 1>;
  using KeySums = float[kKeys / 16][kColumns / 8][4];
  static_assert(kColumns % 16 == 0 && kRows * kColumns == 32 * 32 && 2 * kScoreBytes == kKeys * kRows * 4);

  static __device__ __forceinline__ uint32_t at_row(uint32_t tile, int row, int chunk) {
    return tile + row * kRow + ((chunk ^ (row & 7)) << 4);
  }
  static __device__ __forceinline__ uint32_t at_col(uint32_t tile, int row, int chunk) {
    return tile + row * kColumn + ((chunk ^ (row >> 2 & 1)) << 4);  // rows of two chunks
  }

  // Eight columns of a row of dQ from a tile of query_sum, in the order in which warps add 32 consecutive floats.
  static __device__ __forceinline__ void load_query(float (&x)[8], const float* tile, int row, int chunk) {
    const int element = chunk % kChunks * 4 + row / 8 * 2;
    const float* at = tile + element * kThreads + chunk / kChunks * 32 + row % 8 * 4;
    const float4 a = *reinterpret_cast<const float4*>(at), b = *reinterpret_cast<const float4*>(at + kThreads);
    x[0] = a.x, x[1] = b.x, x[2] = a.y, x[3] = b.y, x[4] = a.z, x[5] = b.z, x[6] = a.w, x[7] = b.w;
  }

  // Where a thread stands; made opaque in every iteration: hoisted out of the loop, addresses made of these would
  // spill.
  struct Lane {
    int warp, lane;
    __device__ __forceinline__ Lane() : warp(ptx::opaque(threadIdx.x / 32)), lane(ptx::opaque(threadIdx.x % 32)) {}
    __device__ __forceinline__ bool of_values() const { return warp >= 4; }  // dP^T
    __device__ __forceinline__ int first_key() const { return warp / 2 % 2 * 16; }
    __device__ __forceinline__ int first_row() const { return warp % 2 * 8; }
    // of element 0 of a fragment, in its tile
    __device__ __forceinline__ int key() const { return first_key() + lane / 4; }
    __device__ __forceinline__ int row() const { return first_row() + lane % 4 * 2; }
    __device__ __forceinline__ int chunk() const { return warp * kChunks; }  // the first one of its columns
  };

  template <int Count>
  static __device__ __forceinline__ void load_tile(uint32_t tile, const T* base, int row0, int rows, int64_t stride,
                                                   int dim) {
    const int tid = ptx::opaque(threadIdx.x);
#pragma unroll 4
    for (int i = 0; i < Count * (D / 8) / kThreads; i++) {
      const int c = i * kThreads + tid, row = c / (D / 8), chunk = c % (D / 8);
      const bool valid = row0 + row < rows && chunk * 8 < dim;
      ptx::cp_async_16(at_row(tile, row, chunk), base + (valid ? (row0 + row) * stride + chunk * 8 : 0), valid);
    }
  }

  // 16 keys of a by 8 rows of b
  static __device__ __forceinline__ void product(float (&acc)[4], uint32_t a_tile, uint32_t b_tile, const Lane& l) {
#pragma unroll 4
    for (int kk = 0; kk < D / 32; kk++) {
      uint32_t a[2][4], b[4];
#pragma unroll
      for (int i = 0; i < 2; i++)
        ptx::ldmatrix_x4(a[i], at_row(a_tile, l.first_key() + l.lane % 16, kk * 4 + i * 2 + l.lane / 16));
      ptx::ldmatrix_x4(b, at_row(b_tile, l.first_row() + l.lane % 8, kk * 4 + l.lane / 8));
      ptx::mma_m16n8k16<T>(acc, a[0], b[0], b[1]);
      ptx::mma_m16n8k16<T>(acc, a[1], b[2], b[3]);
    }
  }

  // Are the numbers of this warp's columns finite in rows [0, Count) of a tile? The whole warp.
  template <int Count>
  static __device__ __forceinline__ bool finite(uint32_t tile, const Lane& l) {
    bool good = true;
#pragma unroll 1
    for (int i = 0; i < Count / 16 * (kChunks / 2); i++) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(
          b, at_row(tile, i / (kChunks / 2) * 16 + l.lane % 16, l.chunk() + i % (kChunks / 2) * 2 + l.lane / 16));
      good = good && all_finite<T>(b);
    }
    return !ptx::any(!good);
  }

  // acc += A B: A = P^T or dS^T, B = this warp's columns of dO or Q
  template <bool Guarded>
  static __device__ __forceinline__ void accumulate(KeySums& acc, uint32_t a_tile, uint32_t b_tile, const Lane& l) {
    uint32_t a[kKeys / 16][4];
#pragma unroll
    for (int i = 0; i < kKeys / 16; i++) ptx::ldmatrix_x4(a[i], at_col(a_tile, i * 16 + l.lane % 16, l.lane / 16));
#pragma unroll
    for (int j = 0; j < kChunks / 2; j++) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, at_row(b_tile, l.lane % 16, l.chunk() + j * 2 + l.lane / 16));
#pragma unroll
      for (int i = 0; i < kKeys / 16; i++) {
        const auto mma = Guarded ? guarded_mma<T> : pair_mma<T>;
        mma(acc[i][2 * j], acc[i][2 * j + 1], a[i], b);
      }
    }
  }
  template <bool Guarded>
  static __device__ __forceinline__ void query_product(float (&dq)[kChunks][4], uint32_t score_grads, uint32_t keys,
                                                       const Lane& l) {
#pragma unroll
    for (int kk = 0; kk < kKeys / 16; kk++) {
      uint32_t a[4];
      ptx::ldmatrix_x4_trans(a, at_col(score_grads, kk * 16 + l.lane / 16 * 8 + l.lane % 8, l.lane / 8 % 2));
#pragma unroll
      for (int j = 0; j < kChunks / 2; j++) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, at_row(keys, kk * 16 + l.lane % 16, l.chunk() + j * 2 + l.lane / 16));
        const auto mma = Guarded ? guarded_mma<T> : pair_mma<T>;
        mma(dq[2 * j], dq[2 * j + 1], a, b);
      }
    }
  }

  struct Block : QueryTileWalk<Sm80WideBackward, true, float> {
    using Walk = QueryTileWalk<Sm80WideBackward, true, float>;
    using Walk::p, Walk::where, Walk::held, Walk::at, Walk::first_key, Walk::total;
    unsigned char* const smem;
    const uint32_t key_tile, value_tile, query_tile, grad_out_tile, weight_tile, score_grad_tile;
    VisibleTile found;  // of the tile to come
    int flags_turn = 0;
    Window window;
    KeySums dk = {}, dv = {};
    float slope_sum = 0.f;

    explicit __device__ __forceinline__ Block(const BackwardTask& p_)
        : Walk(p_, blockIdx.x),
          smem(ptx::dynamic_smem()),
          key_tile(ptx::smem_addr(smem)),
          value_tile(key_tile + kKeyBytes),
          query_tile(value_tile + kKeyBytes),
          grad_out_tile(query_tile + kRowBytes),
          weight_tile(key_tile + kScoresAt),
          score_grad_tile(weight_tile + kScoreBytes),
          window{reinterpret_cast<uint32_t*>(smem + kTileBytes)} {}

    __device__ __forceinline__ const T* head_of(const void* tensor, const Strides& s, int head, int begin) const {
      return static_cast<const T*>(tensor) + own().tile.batch * s.batch + head * s.head + begin * s.row;
    }
    __device__ __forceinline__ void load_keys() const {
      const int length = sequence().keys.key_length, begin = sequence().k_begin;
      load_tile<kKeys>(key_tile, head_of(p.key, p.key_strides, own().tile.head_k, begin), first_key, length,
                       p.key_strides.row, p.head_dim);
      load_tile<kKeys>(value_tile, head_of(p.value, p.value_strides, own().tile.head_k, begin), first_key, length,
                       p.value_strides.row, p.v_head_dim);
    }
    __device__ __forceinline__ void load() const {
      load_tile<kRows>(query_tile, head_of(p.query, p.query_strides, at.head, sequence().q_begin), at.tile * kRows,
                       sequence().q_len, p.query_strides.row, p.head_dim);
      load_tile<kRows>(grad_out_tile, head_of(p.grad_out, p.grad_out_strides, at.head, sequence().q_begin),
                       at.tile * kRows, sequence().q_len, p.grad_out_strides.row, p.v_head_dim);
      if (const int i = ptx::opaque(threadIdx.x); i < kStats / 16) {
        const float* of = i < 4 ? p.reference : i < 8 ? p.delta : p.inverse;
        ptx::cp_async_16(key_tile + kStatsAt + i * 16, of + scratch_of(at.head) + at.tile * kRows + i % 4 * 4, true);
      }
      ptx::cp_async_commit();
    }

    __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
    // in shared memory: held through the loop, it would spill
    __device__ __forceinline__ Place& own() const { return *reinterpret_cast<Place*>(smem + kPlaceAt); }
    __device__ __forceinline__ const Sequence& sequence() const { return own().sequence; }
    __device__ __forceinline__ int64_t scratch_of(int head) const { return scratch_row(p, own().tile.batch, head); }
    __device__ __forceinline__ HeadScores scores() const { return HeadScores(p, p.q_heads, own().tile.batch, at.head); }
    __device__ __forceinline__ TilePlace place(int, const Sequence& sequence) const {
      const Lane l;
      const int first_row = at.tile * kRows;
      return {first_row + l.row(), first_key + l.key(), at.whole(first_row) && first_row + kRows <= sequence.rows};
    }
    __device__ __forceinline__ int next_visible(int n) {
      return next_visible_tile<Fragment, kWarps>(n, found, p.scores, *this, window, window.found, flags_turn);
    }

    // Products q . k and dO . v of this thread to weights and dS, in shared memory.
    __device__ __forceinline__ void softmax(const float (&s)[4], const float4& grads, uint32_t seen, const Lane& l) {
      const HeadScores scores = this->scores();
      const float* const stats = reinterpret_cast<const float*>(smem + kStatsAt) + l.lane % 4 * 4 + l.warp % 2 * 2;
      const float dp[4] = {grads.x, grads.y, grads.z, grads.w};
      const int row = at.tile * kRows + l.row(), key = first_key + l.key();
      const uint32_t bits = p.scores.seed ? kept(p.scores, scores, row, key, l.lane, Fragment{}) : ~0u;
      float weight[4], ds[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = row + Fragment::row(i), k = key + Fragment::key(i);
        const WeightedScore x =
            weighted<T>(p.scores, scores, r, k, sequence().keys.offset, seen >> i & 1, bits >> i & 1, s[i],
                        p.score_scale, RowStats<float>{stats[i % 2], stats[32 + i % 2]}, dp[i], stats[16 + i % 2]);
        if (p.slope_sum) slope_sum -= x.grad * distance(r, k, sequence().keys.offset);
        weight[i] = bits >> i & 1 ? x.weight : 0.f;
        ds[i] = x.grad * x.slope;
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        unsigned char* to = smem + (at_col(weight_tile, l.key() + 8 * h, l.warp % 2) - key_tile) + l.lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(to) = ptx::pack2<T>(weight[2 * h], weight[2 * h + 1]);
        *reinterpret_cast<uint32_t*>(to + kScoreBytes) = ptx::pack2<T>(ds[2 * h], ds[2 * h + 1]);
      }
    }

    // dQ of a tile: added to query_sum, with turns in the order of the blocks.
    __device__ __forceinline__ void add_query() const {
      const int tid = threadIdx.x;
      float dq[kChunks][4] = {};
      if (!own().border || finite<kKeys>(key_tile, Lane()))
        query_product<false>(dq, score_grad_tile, key_tile, Lane());
      else
        query_product<true>(dq, score_grad_tile, key_tile, Lane());
      if (Deterministic) {
        if (tid == 0) ptx::turn_wait(p.turn + 2 * own().number, own().turn);
        __syncthreads();
      }
      float* const sum = p.query_sum + own().number * (kRows * D) + tid;
#pragma unroll
      for (int e = 0; e < 4 * kChunks; e++) ptx::reduce_add(sum + e * kThreads, dq[e / 4][e % 4]);
      if (Deterministic) {
        ptx::thread_fence();
        __syncthreads();
        if (tid == 0) ptx::turn_pass(p.turn + 2 * own().number, own().turn + 1);
      }
    }

    // Works on tile n, which is on its way; returns the number of the next one.
    __device__ __forceinline__ int step(int n) {
      const int tid = threadIdx.x;
      const uint32_t seen = found.seen;
      const Lane l;
      ptx::cp_async_wait<0>();
      __syncthreads();  // @tile_landed: every warp is done with P and dS of the one before
      if (tid == 0) {
        own().head = at.head, own().number = scratch_of(at.head) / kRows + at.tile, own().border = found.hides;
        if (Deterministic) own().turn = at.turn(p, own().tile, sequence());
      }
      float acc[4] = {};
      product(acc, l.of_values() ? value_tile : key_tile, l.of_values() ? grad_out_tile : query_tile, l);
      float4* const exchange = reinterpret_cast<float4*>(smem + kScoresAt) + l.warp % 4 * 32 + l.lane;
      if (l.of_values()) *exchange = {acc[0], acc[1], acc[2], acc[3]};
      __syncthreads();  // @grads_there: dP^T, where P and dS will be
      float4 grads = {};
      if (!l.of_values()) grads = *exchange;
      __syncthreads();  // @grads_read: by all warps
      if (!l.of_values()) softmax(acc, grads, seen, l);
      __syncthreads();  // @scores_complete: P and dS
      if (!own().border || finite<kRows>(grad_out_tile, Lane()))
        accumulate<false>(dv, weight_tile, grad_out_tile, Lane());
      else
        accumulate<true>(dv, weight_tile, grad_out_tile, Lane());
      if (!own().border || finite<kRows>(query_tile, Lane()))
        accumulate<false>(dk, score_grad_tile, query_tile, Lane());
      else
        accumulate<true>(dk, score_grad_tile, query_tile, Lane());
      __syncthreads();  // @rows_read: Q and dO, by all warps
      at.next();
      const int next = next_visible(n + 1);
      if (next < total) load();
      add_query();
      if (p.slope_sum && (next >= total || at.head != own().head)) {
        add_slopes<kKeys, kWarps>(p, own().tile, own().head, slope_sum,
                                  reinterpret_cast<float*>(smem + kTileBytes + Window::kBytes));
        slope_sum = 0.f;
      }
      return next;
    }

    // dK and dV leave through the K and V tiles, so that global stores are whole 16-byte chunks.
    __device__ __forceinline__ void write() const {
      const int tid = threadIdx.x;
      const Lane l;
      const float value_scale = p.scores.seed ? p.scores.keep_scale : 1.f;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kKeys / 16; i++)
#pragma unroll
        for (int j = 0; j < kChunks; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            unsigned char* to = smem + at_row(0, i * 16 + l.lane / 4 + 8 * h, l.chunk() + j) + l.lane % 4 * 4;
            *reinterpret_cast<uint32_t*>(to) = ptx::pack2<T>(dk[i][j][2 * h] * p.scale, dk[i][j][2 * h + 1] * p.scale);
            *reinterpret_cast<uint32_t*>(to + kKeyBytes) =
                ptx::pack2<T>(dv[i][j][2 * h] * value_scale, dv[i][j][2 * h + 1] * value_scale);
          }
      __syncthreads();
      const auto grad_of = [&](void* tensor, const Strides& s) {
        return static_cast<T*>(tensor) + own().tile.batch * s.batch + own().tile.head_k * s.head +
               sequence().k_begin * s.row;
      };
      T* grad_key = p.grad_key ? grad_of(p.grad_key, p.grad_key_strides) : nullptr;
      T* grad_value = p.grad_value ? grad_of(p.grad_value, p.grad_value_strides) : nullptr;
#pragma unroll
      for (int i = 0; i < kKeys * (D / 8) / kThreads; i++) {
        const int c = i * kThreads + tid, row = c / (D / 8), chunk = c % (D / 8);
        if (first_key + row >= sequence().k_rows) continue;
        const unsigned char* from = smem + at_row(0, row, chunk);
        if (grad_key && chunk * 8 < p.head_dim)
          *reinterpret_cast<uint4*>(grad_key + (first_key + row) * p.grad_key_strides.row + chunk * 8) =
              *reinterpret_cast<const uint4*>(from);
        if (grad_value && chunk * 8 < p.v_head_dim)
          *reinterpret_cast<uint4*>(grad_value + (first_key + row) * p.grad_value_strides.row + chunk * 8) =
              *reinterpret_cast<const uint4*>(from + kKeyBytes);
      }
    }

    __device__ __forceinline__ void run() {
      if (first_key >= held.k_rows) return;
      if (threadIdx.x == 0) own().sequence = held, own().tile = where;
      __syncthreads();  // @place_there
      int n = next_visible(0);
      if (n < total) {
        load_keys();
        load();
      }
      while (n < total) n = step(n);
      write();
    }
  };

  static __device__ __forceinline__ void run(const BackwardTask& p) { Block(p).run(); }
};

// The kernel that is built: it fits into 99 KB.
template <class T, bool Deterministic>
using Sm80Backward512 = Sm80WideBackward<T, 512, Deterministic>;

// grid: key_tiles * kv_heads * batch
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) sm80_wide_backward(const __grid_constant__ BackwardTask p) {
  Kernel::run(p);
}

}  // namespace attnjourney
