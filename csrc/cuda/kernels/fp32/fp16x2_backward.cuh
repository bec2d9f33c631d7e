// Attention backward of float32 on mma.sync, on planes of halves (fp32/fp16x2_planes.cuh): of each product of two
// numbers, low x high, high x low and high x high count (what is missing is 2^-24 of it). The first two have sums of
// their own, since low halves are times 2^11. Tensor cores cut sums off instead of rounding them, so sums of high
// halves end after 32 or 64 terms, and ordinary addition joins these.
//
// One block: 64 keys of one key head, all query tiles of all its query heads; a warp has 16 keys. S^T = K Q^T and dP^T
// = V dO^T, so that P^T and dS^T are already A operands of dV += P^T dO and dK += dS^T Q; dQ = dS K by way of shared
// memory, 32 columns a warp. P, at most 1, is split times 2^14; dS times the power of two that brings the block's
// largest to [2^14, 2^15). Tiles are loaded as soon as the last product with the one before is done: two blocks share a
// multiprocessor, and one multiplies while the other waits. A delta or lse that is not finite does not split either.
//
// A step of 4096 / D queries (16 at D 128 where a block may have 99 KB) is 480 mma.sync a warp, 192 ldmatrix and about
// 2,100 instructions in all: on an H100 3,100 cycles of tensor cores and 3,400 of shared memory, which bounds it to 180
// TFLOP/s of a plain formula's operations. Not yet measured on a GPU. Proofs: tests/emulator/test_fp16x2_backward.py.
#pragma once
#include "cuda/kernels/common/backward_task.cuh"
#include "fp16x2_planes.cuh"

namespace attnjourney {

template <int D, int Rows>
struct Fp16x2Backward {
  static constexpr int kD = D, kRows = Rows, kKeys = 64, kThreads = 128, kWarps = 4;
  static constexpr int kRow = 2 * D, kCol = 2 * Rows;  // bytes of a row of a plane; of dS^T
  static constexpr int kKeyPlane = kKeys * kRow, kPlane = Rows * kRow, kScorePlane = kKeys * kCol;
  static constexpr int kTileBytes = 4 * kKeyPlane + 4 * kPlane + 2 * kScorePlane, kStats = 3 * Rows * 4;
  static constexpr int kSmemBytes = kTileBytes + kStats + 4 * kWarps + 64;
  static constexpr int kHigh = Rows * D / 2048, kUnit = kHigh * 512;  // of dQ, a warp: 16s of rows; numbers
  static_assert(kHigh == 1 || kHigh == 2);
  static constexpr float kLow = 1 / kLowFactor, kTop = 1 << PowerOfTwo::kTop;  // kTop: of the weights, at most 1
  using Scores = float[Rows / 8][4];  // element e of tile j: key g + 8 (e / 2), query 8 j + 2 t + e % 2
  using Sums = float[D / 8][4];       // the same with columns for queries
  struct Fragments {                  // A of 16 keys and 16 queries a step
    uint32_t high[Rows / 16][4], low[Rows / 16][4];
  };

  struct Place {     // of a query tile
    int pair, tile;  // pair: batch * q_heads + head
  };
  struct Range4 {  // tiles [first, end) of every head; rows [whole_begin, whole_end) see all keys
    int first, end, whole_begin, whole_end;
  };
  static __device__ __forceinline__ Place next(const Place& at, const Range4& range) {
    return at.tile + 1 < range.end ? Place{at.pair, at.tile + 1} : Place{at.pair + 1, range.first};
  }

  // in shared memory; of planes the high one, the low one follows. What the loop needs besides sums is held here, too:
  // in registers it would spill.
  struct Tiles {
    uint32_t key, value, query, grad_out, score;
    unsigned char *scores, *stats;  // scores: score again
    uint32_t* largest;              // magnitudes of dS, one for each warp
    float4* scale;                  // of Q and dO, then of K and V
    Range4* range;
    Place* place;  // of this tile and of the next one
    explicit __device__ __forceinline__ Tiles(unsigned char* smem)
        : key(ptx::smem_addr(smem)),
          value(key + 2 * kKeyPlane),
          query(value + 2 * kKeyPlane),
          grad_out(query + 2 * kPlane),
          score(grad_out + 2 * kPlane),
          scores(smem + kTileBytes - 2 * kScorePlane),
          stats(smem + kTileBytes),
          largest(reinterpret_cast<uint32_t*>(stats + kStats)),
          scale(reinterpret_cast<float4*>(largest + kWarps)),
          range(reinterpret_cast<Range4*>(scale + 2)),
          place(reinterpret_cast<Place*>(range + 1)) {}
  };
  static __device__ __forceinline__ uint32_t at_row(uint32_t tile, uint32_t row, uint32_t chunk) {
    return tile + row * kRow + ((chunk ^ (row & 7)) << 4);
  }
  static __device__ __forceinline__ uint32_t at_col(uint32_t tile, uint32_t row, uint32_t chunk) {
    return tile + row * kCol + ((chunk ^ row / (128 / kCol) % (kCol / 16)) << 4);  // 128 bytes: all banks
  }
  // Where a thread reads fragments of 16 rows by 16 columns for ldmatrix: of A, or transposed, of B; and of B by rows.
  // Addresses are made anew for every product, with few registers: lane() hides that they are always the same.
  struct Reader {
    uint32_t at;
    // columns 16 `step` .., `rows` further down
    __device__ __forceinline__ uint32_t operator()(int step, int rows = 0) const {
      return (at ^ step % 4 * 32) + step / 4 * 128 + rows * kRow;
    }
  };
  static __device__ __forceinline__ Reader reader(uint32_t tile, uint32_t row0, uint32_t lane) {
    return {at_row(tile, row0 + lane % 16, lane / 16)};
  }
  static __device__ __forceinline__ Reader reader_by_rows(uint32_t tile, uint32_t lane) {
    return {at_row(tile, lane / 16 * 8 + lane % 8, lane / 8 % 2)};
  }
  static __device__ __forceinline__ uint32_t lane() { return ptx::opaque(threadIdx.x % 32); }
  static __device__ __forceinline__ uint32_t warp() { return ptx::opaque(threadIdx.x / 32); }

  // Starts the copy of rows [row0, row0 + Count) of both planes, which lie in one piece; rows from `length` on become
  // zeros.
  template <int Count>
  static __device__ __forceinline__ void load(uint32_t tile, const unsigned char* planes, int row0, int length) {
    constexpr int kChunks = D / 4, kStep = kThreads / kChunks;  // of a row; rows in one go
    const uint32_t tid = ptx::opaque(threadIdx.x), chunk = tid % kChunks, row = tid / kChunks;
    const int rows = length - row0 - static_cast<int>(row);
    const unsigned char* from = planes + int64_t(row0) * (4 * D) + tid * 16;
    tile += chunk / (D / 8) * (Count * kRow);
    const uint32_t to[2] = {at_row(tile, row, chunk % (D / 8)), at_row(tile, row + kStep, chunk % (D / 8))};
#pragma unroll
    for (int i = 0; i < Count / kStep; i++)
      ptx::cp_async_16(to[i % 2] + i / 2 * (2 * kStep * kRow), from + i * (kThreads * 16), i * kStep < rows);
  }

  // Three products of one 16 x 16 and two 16 x 8: low halves into small, high ones into large.
  static __device__ __forceinline__ void add(float (&large)[2][4], float (&small)[2][4], const uint32_t (&a_high)[4],
                                             const uint32_t (&a_low)[4], const uint32_t (&b_high)[4],
                                             const uint32_t (&b_low)[4]) {
#pragma unroll
    for (int n = 0; n < 2; n++) ptx::mma_m16n8k16<Half>(small[n], a_low, b_high[2 * n], b_high[2 * n + 1]);
#pragma unroll
    for (int n = 0; n < 2; n++) ptx::mma_m16n8k16<Half>(large[n], a_high, b_high[2 * n], b_high[2 * n + 1]);
#pragma unroll
    for (int n = 0; n < 2; n++) ptx::mma_m16n8k16<Half>(small[n], a_high, b_low[2 * n], b_low[2 * n + 1]);
  }

  // s = A B^T: this warp's keys by all queries, columns up to `dim`. What a step multiplies is read in the step before.
  static __device__ __forceinline__ void product(Scores& s, uint32_t keys, uint32_t queries, int dim) {
    constexpr int kPairs = Rows / 16, kSteps = 4 * kPairs;
    const Reader of_a = reader(keys, 16 * warp(), lane()), of_b = reader_by_rows(queries, lane());
    uint32_t a[2][2][4], b[2][2][4];  // in turns; high and low
    const auto read = [&](int first, int step) {
      const int k = step / kPairs, j = step % kPairs;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (j == 0) ptx::ldmatrix_x4(a[k & 1][half], of_a(first + k) + half * kKeyPlane);
        ptx::ldmatrix_x4(b[step & 1][half], of_b(first + k, 16 * j) + half * kPlane);
      }
    };
    read(0, 0);
#pragma unroll
    for (int first = 0; first < D / 16; first += 4) {  // slices of 64 columns
      if (first && 16 * first >= dim) break;
      float large[kPairs][2][4] = {}, small[kPairs][2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; step++) {
        const int k = step / kPairs, j = step % kPairs;
        if (step + 1 < kSteps || first + 4 < D / 16) read(first, step + 1);
        add(large[j], small[j], a[k & 1][0], a[k & 1][1], b[step & 1][0], b[step & 1][1]);
      }
#pragma unroll
      for (int i = 0; i < Rows / 2; i++) {
        const float sum = large[i / 8][i / 4 % 2][i % 4] + small[i / 8][i / 4 % 2][i % 4] * kLow;
        s[i / 4][i % 4] = first ? s[i / 4][i % 4] + sum : sum;
      }
    }
  }

  // x times scale as A
  static __device__ __forceinline__ void split(Fragments& f, const Scores& x, float scale) {
#pragma unroll
    for (int k = 0; k < Rows / 16; k++)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const float (&from)[4] = x[2 * k + q / 2];
        const Fp16x2Pair two(from[q % 2 * 2] * scale, from[q % 2 * 2 + 1] * scale, kLowFactor);
        f.high[k][q] = two.high, f.low[k][q] = two.low;
      }
  }

  // d += A B times factor: columns of a tile of queries up to `dim`, 32 at a time. The branch between these, as that in
  // product, keeps reads and additions near to where they are needed: else they would spill.
  static __device__ __forceinline__ void accumulate(Sums& d, const Fragments& a, uint32_t tile, float factor, int dim) {
    constexpr int kPerPair = Rows / 16, kPairs = 2, kSteps = kPerPair * kPairs;  // of 16 columns; k, then two pairs
    const Reader of_b = reader(tile, 0, lane());
    uint32_t b[2][2][4];
    const auto read = [&](int first, int step) {
      const int k = step / 2 % kPerPair, pair = first + step / kSteps * kPairs + step % 2;
#pragma unroll
      for (int half = 0; half < 2; half++)
        ptx::ldmatrix_x4_trans(b[step & 1][half], of_b(pair, 16 * k) + half * kPlane);
    };
    read(0, 0);
#pragma unroll
    for (int first = 0; first < D / 16; first += kPairs) {
      if (first && 16 * first >= dim) break;
      float large[2][2][4], small[2][2][4];
#pragma unroll
      for (int step = 0; step < kSteps; step++) {
        const int k = step / 2, j = step % 2, pair = first + j;
        if (step + 1 < kSteps || first + kPairs < D / 16) read(first, step + 1);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          if (k % 2 == 0) large[j][i / 4][i % 4] = 0.f;
          if (k == 0) small[j][i / 4][i % 4] = 0.f;
        }
        add(large[j], small[j], a.high[k], a.low[k], b[step & 1][0], b[step & 1][1]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          float sum = large[j][i / 4][i % 4];
          if (k == kPerPair - 1) sum += small[j][i / 4][i % 4] * kLow;
          if (k % 2 == 1 || k == kPerPair - 1) d[2 * pair + i / 4][i % 4] += sum * factor;
        }
      }
    }
  }

  // dS^T [keys][queries]
  static __device__ __forceinline__ void write_scores(unsigned char* tile, const Fragments& f) {
    const uint32_t key = 16 * warp() + lane() / 4;
#pragma unroll
    for (int k = 0; k < Rows / 16; k++)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        unsigned char* at = tile + at_col(0, key + q % 2 * 8, 2 * k + q / 2) + lane() % 4 * 4;
        *reinterpret_cast<uint32_t*>(at) = f.high[k][q];
        *reinterpret_cast<uint32_t*>(at + kScorePlane) = f.low[k][q];
      }
  }

  // dQ of this tile times factor: a warp's 16 kHigh rows by 32 columns
  static __device__ __forceinline__ void add_query(float* sum_tile, const Tiles& tiles, float factor, int dim) {
    const uint32_t lane_ = lane(), warp_ = warp(), row = warp_ / (D / 32) * (16 * kHigh), column = warp_ % (D / 32);
    if (static_cast<int>(column * 32) >= dim) return;
    const Reader of_b{reader(tiles.key + column / 2 * 128, 0, lane_).at ^ column % 2 * 64};
    float large[kHigh][2][2][4] = {}, small[kHigh][2][2][4] = {};  // rows, columns in 16s
#pragma unroll
    for (int k = 0; k < kKeys / 16; k++) {
      uint32_t a[kHigh][2][4];
#pragma unroll
      for (int i = 0; i < 2 * kHigh; i++)
        ptx::ldmatrix_x4_trans(a[i / 2][i % 2],
                               at_col(tiles.score + i % 2 * kScorePlane, 16 * k + lane_ / 16 * 8 + lane_ % 8,
                                      row / 8 + i / 2 * 2 + lane_ / 8 % 2));
#pragma unroll
      for (int j = 0; j < 2; j++) {
        uint32_t b[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) ptx::ldmatrix_x4_trans(b[half], of_b(j, 16 * k) + half * kKeyPlane);
#pragma unroll
        for (int i = 0; i < kHigh; i++) add(large[i][j], small[i][j], a[i][0], a[i][1], b[0], b[1]);
      }
    }
    float* to = sum_tile + warp_ * kUnit + lane_;
#pragma unroll
    for (int i = 0; i < kUnit / 32; i++) {
      const int m = i / 16, j = i / 8 % 2, n = i / 4 % 2, e = i % 4;
      ptx::reduce_add(to + i * 32, (large[m][j][n][e] + small[m][j][n][e] * kLow) * factor);
    }
  }
  // columns 4 chunk .. of a row of query_sum's tile, where a warp adds to 32 neighbours
  static __device__ __forceinline__ void load_query(float (&x)[4], const float* tile, int row, int chunk) {
    const int warp = row / (16 * kHigh) * (D / 32) + chunk / 8;
    const int element = (row / 16 % kHigh * 4 + chunk % 8 / 2) * 4 + row / 8 % 2 * 2;
    const float* from = tile + warp * kUnit + element * 32 + row % 8 * 4 + chunk % 2 * 2;
    x[0] = from[0], x[1] = from[32], x[2] = from[1], x[3] = from[33];
  }

  static __device__ __forceinline__ int turn_of(const BackwardTask& p, const BackwardTile& where, int tile) {
    const Sequence sequence = sequence_of(p, where.batch);
    BackwardQueries<Rows, kKeys, true> at(p, where, sequence);
    at.tile = tile;
    return at.turn(p, where, sequence);
  }

  // Scores of rows that do not see a key become -inf; row, key: the tile's first.
  static __device__ __forceinline__ void hide(Scores& s, const Sequence& sequence, int row, int key) {
    const int first = row + static_cast<int>(lane() % 4 * 2);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const Range rows = key_rows_of(sequence, key + static_cast<int>(16 * warp() + lane() / 4) + 8 * h);
      const int begin = rows.begin - first, end = rows.end - first;
#pragma unroll
      for (int j = 0; j < Rows / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (8 * j + e < begin || 8 * j + e >= end) s[j][2 * h + e] = -INFINITY;
    }
  }

  // s: products q . k to weights; ds: dO . v to the gradients of q . k, without the scale. The largest of these.
  static __device__ __forceinline__ uint32_t weights(Scores& s, Scores& ds, float factor, float out_factor,
                                                     const unsigned char* stats) {
    uint32_t largest = 0;
    const uint32_t t = lane() % 4;
#pragma unroll
    for (int j = 0; j < Rows / 8; j++) {
      const auto pair = [&](int of) {
        return *reinterpret_cast<const float2*>(stats + (of * Rows + 8 * j + 2 * t) * 4);
      };
      const float2 reference = pair(0), inverse = pair(1), delta = pair(2);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float exponent = ptx::rounded_product(s[j][e], factor) - (e % 2 ? reference.y : reference.x);
        s[j][e] = ptx::exp2(exponent) * (e % 2 ? inverse.y : inverse.x);
        ds[j][e] = s[j][e] * (ds[j][e] * out_factor - (e % 2 ? delta.y : delta.x));
        largest = max(largest, magnitude_bits(ds[j][e]));
      }
    }
    return largest;
  }

  static __device__ __forceinline__ void write(void* to, const Strides& strides, const Sums& d, float scale,
                                               const BackwardTile& where, int kv_len, int dim) {
    if (!to) return;
    float* out = static_cast<float*>(to) + where.batch * strides.batch + where.head_k * strides.head;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int key = where.key_tile * kKeys + static_cast<int>(16 * warp() + lane() / 4) + 8 * h;
      if (key >= kv_len) continue;
      const int column = static_cast<int>(lane() % 4 * 2);
      float* row = out + key * strides.row + column;
#pragma unroll
      for (int j = 0; j < D / 8; j++)
        if (8 * j + column < dim)
          *reinterpret_cast<float2*>(row + 8 * j) = float2{d[j][2 * h] * scale, d[j][2 * h + 1] * scale};
    }
  }

  static __device__ __forceinline__ void run(const BackwardTask& p, const Fp16x2BackwardPlanes& w) {
    if (*w.needs_fallback) return;
    unsigned char* const smem = ptx::dynamic_smem();
    const Tiles tiles(smem);
    const auto here = [&] { return BackwardTile(p, ptx::opaque(blockIdx.x)); };
    const auto load_query_tile = [&](const Place& at) {
      load<Rows>(tiles.query, w.query + int64_t(at.pair) * p.q_len * (4 * D), at.tile * Rows, p.q_len);
      ptx::cp_async_commit();
    };
    const auto load_out_tile = [&](const Place& at) {
      load<Rows>(tiles.grad_out, w.grad_out + int64_t(at.pair) * p.q_len * (4 * D), at.tile * Rows, p.q_len);
      const int i = static_cast<int>(ptx::opaque(threadIdx.x));
      constexpr int kChunks = Rows / 4;
      if (i < 3 * kChunks) {  // reference, inverse, delta
        const float* from = (i < kChunks       ? p.reference
                             : i < 2 * kChunks ? p.inverse
                                               : p.delta) +
                            int64_t(at.pair) * p.rows + at.tile * Rows;
        ptx::cp_async_16(ptx::smem_addr(tiles.stats) + i * 16, from + i % kChunks * 4, true);
      } else if (i == 3 * kChunks) {
        const int64_t scale = int64_t(at.pair) * w.query_tiles + at.tile / (Fp16x2Size<D>::kRows / Rows);
        ptx::cp_async_16(ptx::smem_addr(tiles.scale), w.query_scale + scale, true);
      }
      ptx::cp_async_commit();
    };

    int left;  // tiles
    {
      const BackwardTile where = here();
      const BackwardQueries<Rows, kKeys, true> at(p, where, sequence_of(p, where.batch));
      left = at.per_head() * where.heads;
      const Place first{where.batch * p.q_heads + where.first_head, at.first};
      if (threadIdx.x == 0) {
        *tiles.range = Range4{at.first, at.end, at.whole_begin, at.whole_end};
        tiles.place[left % 2] = first;
      }
      if (left > 0) {
        const int64_t pair = int64_t(where.batch) * p.kv_heads + where.head_k;
        const int n0 = where.key_tile * kKeys;
        load<kKeys>(tiles.key, w.key + pair * p.kv_len * (4 * D), n0, p.kv_len);
        load<kKeys>(tiles.value, w.value + pair * p.kv_len * (4 * D), n0, p.kv_len);
        if (threadIdx.x == 0)
          ptx::cp_async_16(ptx::smem_addr(tiles.scale + 1),
                           w.key_scale + pair * w.key_tiles + n0 / Fp16x2Size<D>::kRows, true);
        load_query_tile(first);
        load_out_tile(first);
      }
    }

    Sums dk = {}, dv = {};
    for (; left > 0; left--) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // @tiles_landed: every warp is done with dS
      if (ptx::opaque(threadIdx.x) == 0) tiles.place[(left - 1) % 2] = next(tiles.place[left % 2], *tiles.range);

      Scores s, ds;
      product(s, tiles.key, tiles.query, p.head_dim);
      product(ds, tiles.value, tiles.grad_out, p.v_head_dim);
      const float4 of_query = tiles.scale[0], of_key = tiles.scale[1];
      {
        const Place at = tiles.place[left % 2];
        const Range4 range = *tiles.range;
        if (at.tile * Rows < range.whole_begin || at.tile * Rows + Rows > range.whole_end) {
          const BackwardTile where = here();
          hide(s, sequence_of(p, where.batch), at.tile * Rows, where.key_tile * kKeys);
        }
      }
      // not 0, which would make NaN of -inf
      const float factor = fmaxf(p.score_scale * (of_key.x * of_query.x), 0x1p-126f);
      uint32_t largest = weights(s, ds, factor, of_key.y * of_query.y, tiles.stats);
#pragma unroll
      for (int mask = 1; mask < 32; mask *= 2) largest = max(largest, ptx::shfl_xor(largest, mask));
      if (lane() == 0) tiles.largest[warp()] = largest;
      Fragments f;
      split(f, s, kTop);
      accumulate(dv, f, tiles.grad_out, of_query.y * (1 / kTop), p.v_head_dim);
      __syncthreads();  // @grad_out_read: with its statistics; every warp has written its largest dS
      if (left > 1) load_out_tile(tiles.place[(left - 1) % 2]);

      const uint4 parts = *reinterpret_cast<const uint4*>(tiles.largest);
      // at least 2^-112, whose inverse is a number
      const PowerOfTwo power{max(PowerOfTwo::kTop + 1, max(max(parts.x, parts.y), max(parts.z, parts.w)) >> 23)};
      const float inverse = power.inverse();
      split(f, ds, power.scale());
      write_scores(tiles.scores, f);
      accumulate(dk, f, tiles.query, inverse * of_query.x, p.head_dim);
      const Place at = tiles.place[left % 2];
      const int64_t number = int64_t(at.pair) * (p.rows / Rows) + at.tile;  // of the query tile
      int turn = 0;
      if (p.turn) {
        turn = turn_of(p, here(), at.tile);
        if (threadIdx.x == 0) ptx::turn_wait(p.turn + 2 * number, turn);
      }
      __syncthreads();  // @scores_complete: dS; every warp is done with Q
      if (left > 1) load_query_tile(tiles.place[(left - 1) % 2]);
      if (p.grad_query) add_query(p.query_sum + number * (Rows * D), tiles, inverse * tiles.scale[1].x, p.head_dim);
      if (p.turn) {
        ptx::thread_fence();
        __syncthreads();
        if (threadIdx.x == 0) ptx::turn_pass(p.turn + 2 * number, turn + 1);
      }
    }
    const BackwardTile where = here();
    write(p.grad_key, p.grad_key_strides, dk, p.scale, where, p.kv_len, p.head_dim);
    write(p.grad_value, p.grad_value_strides, dv, 1.f, where, p.kv_len, p.v_head_dim);
  }
};

// The kernels that are built, by size (launch.h).
template <int D>
struct Fp16x2BackwardOf : Fp16x2Backward<D, 4096 / D> {};
// where shared memory is small
struct Fp16x2BackwardSmall : Fp16x2Backward<128, 16> {};

// grid: key_tiles * kv_heads * batch
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 2)
    fp16x2_backward(const __grid_constant__ BackwardTask p, const __grid_constant__ Fp16x2BackwardPlanes w) {
  Kernel::run(p, w);
}

}  // namespace attnjourney
