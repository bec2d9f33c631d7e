// Decoding over latents for Hopper: one block is 64 rows of every sequence against its share of all keys, in tiles of
// 64 keys, sequence after sequence (decode/ragged_shares.cuh). Two warpgroups take turns, half a step apart: each
// computes the scores of every second tile, turns them into weights against the maximum so far, which passes from tile
// to tile, and sums columns 256 w .. of the output over all tiles: its own weights from registers, the other's from
// shared memory, these while it weighs. So the products of one hide the weights of the other, and a buffer of keys is
// filled while the other one's products run. A third warpgroup copies: quarters of 128 columns and the rotary part of a
// tile are free, and full, by themselves. Masks are not read. Proofs: tests/emulator/test_latent.py.
#pragma once
#include "cuda/kernels/decode/latent_mma.cuh"
#include "cuda/kernels/decode/ragged_shares.cuh"
#include "cuda/ptx/sm90.cuh"

namespace attnjourney {

template <class T_>
struct Sm90Latent {
  using T = T_;
  static constexpr int kRows = 64, kKeys = 64, kThreads = 384,
                       kPanelBytes = 64 * 128;  // panels of 64 columns, swizzled
  static constexpr int kHalf = kLatentValueDim / 2, kPanels = kLatentDim / 64;
  // eight panels of Q, whose rotary part is in registers; two tiles of nine; weights of both warpgroups
  static constexpr int kKeyAt = 8 * kPanelBytes, kWeightsAt = kKeyAt + 2 * kPanels * kPanelBytes;
  static constexpr int kBarriersAt = kWeightsAt + 2 * kPanelBytes;
  static constexpr int kTopsAt = kBarriersAt + 192, kSumsAt = kTopsAt + 2 * kRows * 4;  // [warpgroup][row]
  static constexpr int kThereAt = kSumsAt + 2 * kRows * 4;                              // [tile][key]: is it anywhere?
  static constexpr int kFlagsAt = kThereAt + 2 * kKeys * 4;                             // [warpgroup][tile][warp]
  static constexpr int kShareAt = kFlagsAt + 16 * 4;
  static constexpr int kSmemBytes = kShareAt + sizeof(RaggedShare);
  static_assert(kSmemBytes <= 227 * 1024 && kThreads == kRaggedThreads);
  // parts of a tile: quarters of 128 columns, two of each warpgroup; the rotary columns
  static constexpr int kRotary = 4, kParts = 5;

  // Tiles [first, last) of a sequence. turn: tiles of the block before them, so which warpgroup is next, in which
  // phase.
  struct Part {
    int batch, first, last, turn;
    __device__ __forceinline__ int of_own(int own) const { return first + ((own ^ turn) & 1); }  // its first tile
    __device__ __forceinline__ int phase(int tile) const { return (turn + tile - first) >> 1 & 1; }
  };
  static __device__ __forceinline__ int row0(const DecodeTask& task) { return blockIdx.x % task.row_tiles * kRows; }
  // Made anew where it is needed, so that no register holds it through a loop.
  static __device__ __forceinline__ RaggedPart range_of(unsigned char* base, const DecodeTask& task, int batch) {
    const int tiles = ragged_tiles<kKeys>(task, batch);
    return {*reinterpret_cast<const RaggedShare*>(base + kShareAt), batch, tiles};
  }
  // f(part) for all that this block has
  template <class F>
  static __device__ __forceinline__ void for_parts(unsigned char* base, const DecodeTask& task, F&& f) {
    const RaggedShare& share = *reinterpret_cast<const RaggedShare*>(base + kShareAt);
    int turn = 0;
    for (int batch = share.begin.batch; batch <= share.end.batch && batch < task.batch; batch++) {
      const RaggedPart part = range_of(base, task, batch);
      if (!part.any) continue;
      f(Part{batch, part.first, part.last, turn});
      const RaggedPart again = range_of(base, task, ptx::opaque(batch));
      turn = (turn + again.last - again.first) & 3;
    }
  }

  static __device__ __forceinline__ uint32_t full(uint32_t smem, int tile, int part) {
    return smem + kBarriersAt + 8 * (tile * kParts + part);
  }
  static __device__ __forceinline__ uint32_t empty(uint32_t smem, int tile, int part) {
    return full(smem, tile, part) + 8 * (2 * kParts);
  }
  // weights and maxima of a warpgroup's tile
  static __device__ __forceinline__ uint32_t weighed(uint32_t smem, int warpgroup) {
    return smem + kBarriersAt + 8 * (4 * kParts + warpgroup);
  }
  static __device__ __forceinline__ uint32_t tile_at(uint32_t smem, int tile) {
    return smem + kKeyAt + tile * (kPanels * kPanelBytes);
  }
  static __device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
    return row * 128 + ((chunk ^ (row & 7)) << 4);
  }
  // see Sm90Forward
  static __device__ __forceinline__ uint64_t desc(uint32_t addr, int panel) {
    return uint64_t(addr >> 4 | uint32_t(panel >> 4) << 16) | uint64_t(1u << 30 | 1024 >> 4) << 32;
  }

  // ---- the warps that copy: warp 0 columns 0 .. 255 of tile 0 and its rotary part, 1 the other columns, 2 those of
  // tile 1 and its rotary part, 3 columns 0 .. 255 ----
  static __device__ __forceinline__ void produce(uint32_t smem, unsigned char* base, const DecodeTask& task,
                                                 const Part& part) {
    const int warp = ptx::uniform(threadIdx.x / 32) - 8, lane = threadIdx.x % 32;
    const int own = warp / 2, quarter = warp == 0 || warp == 3 ? 0 : 2;  // and the next one
    const bool rotary = warp % 2 == 0;
    const DecodeSequence sequence = decode_sequence<false>(task, part.batch);
    const T* const latent = static_cast<const T*>(task.key);
    const uint32_t tile = tile_at(smem, own);
    uint32_t* const there = reinterpret_cast<uint32_t*>(base + kThereAt) + own * kKeys;
    for (int n = part.of_own(own), phase = part.phase(n); n < part.last; n += 2, phase ^= 1) {
      int offset[2];  // of rows lane and lane + 32, in 16-byte chunks; less than 0: nowhere
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const Place at = place_of(task, sequence, part.batch, n * kKeys + lane + 32 * i, sequence.total);
        offset[i] = at.outer < 0 ? -1 : static_cast<int>((at.outer * task.k.outer + at.slot * task.k.row) / 8);
      }
      const auto copy = [&](uint32_t to, int i, int from, int chunk) {  // a chunk of the row of lane `from`
        const int at = static_cast<int>(ptx::shfl(static_cast<uint32_t>(offset[i]), from));
        const bool valid = at >= 0 && chunk * 8 < task.head_dim;
        ptx::cp_async_16(to, latent + (valid ? int64_t{at + chunk} * 8 : 0), valid);
      };
      if (rotary) {
        ptx::mbarrier_wait(empty(smem, own, kRotary), phase ^ 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          there[lane + 32 * i] = offset[i] >= 0;
#pragma unroll 1
          for (int r = 0; r < 32; r += 4) {
            const int row = r + lane / 8;
            copy(tile + 8 * kPanelBytes + swizzled(row + 32 * i, lane % 8), i, row, kLatentValueDim / 8 + lane % 8);
          }
        }
      }
      ptx::cp_async_commit();
#pragma unroll
      for (int q = quarter; q < quarter + 2; q++) {
        ptx::mbarrier_wait(empty(smem, own, q), phase ^ 1);
        const uint32_t panel = tile + (2 * q + lane / 8 % 2) * kPanelBytes;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll 4
          for (int r = 0; r < 32; r += 2) {
            const int row = r + lane / 16;
            copy(panel + swizzled(row + 32 * i, lane % 8), i, row, q * 16 + lane % 16);
          }
        }
        ptx::cp_async_commit();
      }
      if (rotary) {
        ptx::cp_async_wait<2>();
        ptx::fence_proxy_async();
        ptx::mbarrier_arrive(full(smem, own, kRotary));
      }
      ptx::cp_async_wait<1>();
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(full(smem, own, quarter));
      ptx::cp_async_wait<0>();
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(full(smem, own, quarter + 1));
      __syncwarp();
    }
  }

  // ---- the warpgroups that compute ----

  static __device__ __forceinline__ void load_query(uint32_t smem, const DecodeTask& task, const Part& part) {
    for (int i = threadIdx.x; i < kRows * 64; i += 256) {
      const int row = i / 64, chunk = i % 64;
      const bool valid = row0(task) + row < task.rows && chunk * 8 < task.head_dim;
      const T* from = static_cast<const T*>(task.query);
      if (valid) from += query_at(task, part, row0(task) + row) + chunk * 8;
      ptx::cp_async_16(smem + chunk / 8 * kPanelBytes + swizzled(row, chunk % 8), from, valid);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
  }
  static __device__ __forceinline__ int64_t query_at(const DecodeTask& task, const Part& part, int i) {
    return part.batch * task.q_batch + i / task.q_len * task.q_head + i % task.q_len * task.q_row;
  }

  static __device__ __forceinline__ void consume(uint32_t smem, unsigned char* base, const DecodeTask& task,
                                                 const Part& part) {
    const int own = ptx::uniform(threadIdx.x / 128), lane = threadIdx.x % 32, t = lane % 4;
    const int row = threadIdx.x % 128 / 32 * 16 + lane / 4;  // and row + 8
    const DecodeSequence sequence = decode_sequence<false>(task, part.batch);
    const Range whole_items = task.q_len == 1 ? Range{0, sequence.total} : sequence.whole_items();
    float* const tops = reinterpret_cast<float*>(base + kTopsAt);
    const uint32_t* const there = reinterpret_cast<const uint32_t*>(base + kThereAt) + own * kKeys;
    load_query(smem, task, part);
    uint32_t rotary[4][4];  // A operand: Q's columns from 512 on
#pragma unroll
    for (int kk = 0; kk < 4; kk++)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const int i = row0(task) + row + q % 2 * 8, column = kLatentValueDim + kk * 16 + q / 2 * 8;
        const bool valid = i < task.rows && column < task.head_dim;
        const T* from = static_cast<const T*>(task.query) + (valid ? query_at(task, part, i) + column + 2 * t : 0);
        rotary[kk][q] = valid ? *reinterpret_cast<const uint32_t*>(from) : 0u;
      }
    ptx::bar_sync(1, 256);  // @query_there

    const auto release = [&](int tile, int which) {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(empty(smem, tile, which));
    };
    const uint32_t weights = kWeightsAt + own * kPanelBytes;  // this warpgroup's
    float out[2][64], scores[32], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
    uint32_t packed[4][4];
#pragma unroll
    for (int i = 0; i < 64; i++) out[0][i] = out[1][i] = 0.f;

    // outputs and sum to new maxima
    const auto move = [&](const float (&largest)[2]) {
      float shrink[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        shrink[h] = ptx::exp2(top[h] - (largest[h] == -INFINITY ? 0.f : largest[h]));
        top[h] = largest[h];
        sum[h] *= shrink[h];
      }
      if (ptx::any(shrink[0] != 1.f || shrink[1] != 1.f)) {
#pragma unroll
        for (int i = 0; i < 64; i++) out[0][i] *= shrink[i >> 1 & 1], out[1][i] *= shrink[i >> 1 & 1];
      }
    };
    const auto values_of = [&](int tile, int half) {  // of 128 of this warpgroup's columns
      return desc(tile_at(smem, tile) + (own * 4 + half * 2) * kPanelBytes, kPanelBytes);
    };
    const auto guarded = [&](int n) {  // may a row not see a key of the tile?
      return task.q_len > 1 && (n * kKeys < whole_items.begin || (n + 1) * kKeys > whole_items.end);
    };
    // Starts the products of the other's tile n with its weights, two groups.
    const auto take_over = [&](int n, int phase) {
      ptx::mbarrier_wait(weighed(smem, own ^ 1), phase);
      const float* const others = tops + (own ^ 1) * kRows + row;
      const float theirs_at[2] = {others[0], others[8]};
      move(theirs_at);
      if (guarded(n)) guard(base, own, own ^ 1);
      const uint64_t theirs = desc(smem + kWeightsAt + (own ^ 1) * kPanelBytes, 0);
      ptx::wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int kk = 0; kk < 4; kk++)
          ptx::wgmma_ss<T, 128, 0, 1>(out[half], theirs + kk * 2, values_of(own ^ 1, half) + kk * 128, true);
        ptx::wgmma_commit();
      }
    };

    int n = part.of_own(own);
    for (int phase = part.phase(n); n < part.last; n += 2, phase ^= 1) {
      const uint64_t keys = desc(tile_at(smem, own), 0), queries = desc(smem, 0);
      ptx::mbarrier_wait(full(smem, own, kRotary), phase);
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; kk++)
        ptx::wgmma_rs<T, 64, 0>(scores, rotary[kk], keys + 8 * (kPanelBytes / 16) + kk * 2, kk > 0);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int quarter = i ^ 2 * own;  // those that come first first
        ptx::mbarrier_wait(full(smem, own, quarter), phase);
        ptx::wgmma_fence();
        const uint32_t panel = quarter * 2 * (kPanelBytes / 16);
#pragma unroll
        for (int kk = 0; kk < 8; kk++)
          ptx::wgmma_ss<T, 64, 0, 0>(scores, queries + panel + kk / 4 * (kPanelBytes / 16) + kk % 4 * 2,
                                     keys + panel + kk / 4 * (kPanelBytes / 16) + kk % 4 * 2, true);
      }
      ptx::wgmma_commit();
      const bool behind = n > part.first;
      if (behind) {
        take_over(n - 1, own ? phase : phase ^ 1);
        ptx::wgmma_wait<2>();
      } else {
        ptx::wgmma_wait<0>();
      }
      ptx::keep(scores);

      const int item0 = n * kKeys;
      const bool whole = !task.table && item0 >= whole_items.begin && item0 + kKeys <= whole_items.end;
      score(scores, task, part, row, item0, whole, there, t);
      release(own, kRotary);
      float largest[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float x = top[h];
#pragma unroll
        for (int j = 0; j < 8; j++) x = fmaxf(x, fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
        x = fmaxf(x, ptx::shfl_xor(x, 1));
        largest[h] = fmaxf(x, ptx::shfl_xor(x, 2));
        if (t == 0) tops[own * kRows + row + 8 * h] = largest[h];
      }
      float all[2] = {0.f, 0.f};
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (h == 0)
          ptx::wgmma_wait<1>();  // @other_read
        else
          ptx::wgmma_wait<0>();
        if (behind) release(own ^ 1, 2 * own + h);
        const float zero = largest[h] == -INFINITY ? 0.f : largest[h];
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const float low = ptx::exp2(scores[4 * j + 2 * h] - zero), high = ptx::exp2(scores[4 * j + 2 * h + 1] - zero);
          all[h] += low + high;
          packed[j / 2][j % 2 * 2 + h] = ptx::pack2<T>(low, high);
          *reinterpret_cast<uint32_t*>(base + weights + swizzled(row + 8 * h, j) + t * 4) =
              packed[j / 2][j % 2 * 2 + h];
        }
      }
      ptx::keep(out[0]);
      ptx::keep(out[1]);
      ptx::fence_proxy_async();
      __syncwarp();  // @weights_written
      if (lane == 0) ptx::mbarrier_arrive(weighed(smem, own));
      move(largest);
      sum[0] += all[0], sum[1] += all[1];

      if (guarded(n)) guard(base, own, own);
      ptx::wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int kk = 0; kk < 4; kk++)
          ptx::wgmma_rs<T, 128, 1>(out[half], packed[kk], values_of(own, half) + kk * 128, true);
        ptx::wgmma_commit();
      }
      ptx::wgmma_wait<1>();
      release(own, 2 * own);
      ptx::wgmma_wait<0>();
      ptx::keep(out[0]);
      ptx::keep(out[1]);
      release(own, 2 * own + 1);
    }
    if (n == part.last && n > part.first) {  // the last tile is the other's
      take_over(n - 1, part.phase(n - 1));
      ptx::wgmma_wait<0>();
      ptx::keep(out[0]);
      ptx::keep(out[1]);
      release(own ^ 1, 2 * own);
      release(own ^ 1, 2 * own + 1);
    }
    write(task, part, out, top, sum, base, own, row, t);
  }

  // Products of items item0 + 8 j + 2 t + ... to scores in log2 units, -inf where there is no key.
  static __device__ __forceinline__ void score(float (&scores)[32], const DecodeTask& task, const Part& part, int row,
                                               int item0, bool whole, const uint32_t* there, int t) {
    if (task.scaled_only) {
      const float scale = static_cast<float>(task.score_scale);
#pragma unroll
      for (int i = 0; i < 32; i++) scores[i] = ptx::rounded_product(scores[i], scale);
    } else {  // made here, so that no register holds it through the loop
      const DecodeSequence sequence = decode_sequence<false>(task, part.batch);
      const DecodeRow<float> rows[2] = {{task, part.batch, 0, sequence.origin, row0(task) + row},
                                        {task, part.batch, 0, sequence.origin, row0(task) + row + 8}};
#pragma unroll
      for (int i = 0; i < 32; i++) {
        const int item = item0 + i / 4 * 8 + 2 * t + i % 2;
        scores[i] = decode_score<T>(task, rows[i / 2 % 2], sequence.keys.offset, sequence.key(item), scores[i]);
      }
    }
    if (whole) return;
    const DecodeSequence sequence = decode_sequence<false>(task, part.batch);
    const int number[2] = {(row0(task) + row) % task.q_len, (row0(task) + row + 8) % task.q_len};
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const int column = i / 4 * 8 + 2 * t + i % 2;
      if (!there[column] || !sequence.keys.visible(number[i / 2 % 2], sequence.key(item0 + column)))
        scores[i] = -INFINITY;
    }
  }

  // Zeros in place of a tile's values of this warpgroup's columns that are not finite: a row that sees one has a score
  // and so a weight that is not finite either, since values are part of keys.
  static __device__ __forceinline__ void guard(unsigned char* base, int own, int tile) {
    const int thread = threadIdx.x % 128;
    uint32_t* const flags = reinterpret_cast<uint32_t*>(base + kFlagsAt) + 4 * (2 * own + tile);
    const auto chunk_of = [&](int i) {  // of 64 rows of 32 chunks
      const int r = i / 32, c = i % 32;
      return reinterpret_cast<uint4*>(base + tile_at(0, tile) + (own * 4 + c / 8) * kPanelBytes + swizzled(r, c % 8));
    };
    bool finite = true;
#pragma unroll 1
    for (int i = thread; i < kKeys * 32; i += 128) {
      const uint4 x = *chunk_of(i);
      finite = finite && !(not_finite<T>(x.x) | not_finite<T>(x.y) | not_finite<T>(x.z) | not_finite<T>(x.w));
    }
    finite = !ptx::any(!finite);
    if (thread % 32 == 0) flags[thread / 32] = finite;
    ptx::bar_sync(2 + own, 128);
    if (flags[0] & flags[1] & flags[2] & flags[3]) return;
#pragma unroll 1
    for (int i = thread; i < kKeys * 32; i += 128) {
      uint4* const at = chunk_of(i);
      const uint4 x = *at;
      *at = uint4{x.x & ~not_finite<T>(x.x), x.y & ~not_finite<T>(x.y), x.z & ~not_finite<T>(x.z),
                  x.w & ~not_finite<T>(x.w)};
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(2 + own, 128);
  }

  static __device__ __forceinline__ void write(const DecodeTask& task, const Part& part, const float (&out)[2][64],
                                               const float (&top)[2], const float (&sum)[2], unsigned char* base,
                                               int own, int row, int t) {
    float* const sums = reinterpret_cast<float*>(base + kSumsAt);
    const RaggedPart range = range_of(base, task, ptx::opaque(part.batch));
    if (blockIdx.x % task.row_tiles == 0 && threadIdx.x == 0)
      range.note(task, *reinterpret_cast<const RaggedShare*>(base + kShareAt), part.batch);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float all = sum[h];
      all += ptx::shfl_xor(all, 1);
      all += ptx::shfl_xor(all, 2);
      if (t == 0) sums[own * kRows + row + 8 * h] = all;
    }
    ptx::bar_sync(1, 256);  // @all_multiplied: sums are there, Q is no longer read
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = row + 8 * h, i = row0(task) + r, column = own * kHalf + 2 * t;
      if (i >= task.rows) continue;
      const RowSum<float> all{top[h], sums[r] + sums[kRows + r]};
      const bool first = own == 0 && t == 0;
      if (range.slot >= 0) {
        const int64_t at = (int64_t{range.slot} * task.row_tiles + row0(task) / kRows) * kRows + r;
        if (first) static_cast<float2*>(task.part_stats)[at] = float2{all.top, all.sum};
        float* const to = static_cast<float*>(task.part_out) + at * task.v_head_dim + column;
#pragma unroll
        for (int j = 0; j < 32; j++)
          if (column + j * 8 < task.v_head_dim)
            *reinterpret_cast<float2*>(to + j * 8) =
                float2{out[j / 16][j % 16 * 4 + 2 * h], out[j / 16][j % 16 * 4 + 2 * h + 1]};
        continue;
      }
      const int64_t at = int64_t{part.batch} * task.rows + i;
      float lse;
      const float factor = end_row(task, part.batch, i / task.q_len, all, lse);
      if (first) static_cast<float*>(task.lse)[at] = lse;
      T* const to = static_cast<T*>(task.out) + at * task.v_head_dim + column;
#pragma unroll
      for (int j = 0; j < 32; j++)
        if (column + j * 8 < task.v_head_dim)
          *reinterpret_cast<uint32_t*>(to + j * 8) =
              ptx::pack2<T>(out[j / 16][j % 16 * 4 + 2 * h] * factor, out[j / 16][j % 16 * 4 + 2 * h + 1] * factor);
    }
  }

  static __device__ __forceinline__ void run(const DecodeTask& task) {
    unsigned char* const base = ptx::dynamic_smem();
    const uint32_t smem = ptx::smem_addr(base);
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2 * kParts; i++) {
        ptx::mbarrier_init(full(smem, 0, i), 32);  // every lane of a copying warp
        ptx::mbarrier_init(empty(smem, 0, i), 4);  // every warp of a warpgroup
      }
      for (int i = 0; i < 2; i++) ptx::mbarrier_init(weighed(smem, i), 4);
      ptx::fence_mbarrier_init();
    }
    const RaggedShare share =
        ragged_share<kKeys>(task, blockIdx.x / task.row_tiles, reinterpret_cast<int*>(base + kKeyAt));
    if (threadIdx.x == 0) *reinterpret_cast<RaggedShare*>(base + kShareAt) = share;
    __syncthreads();
    if (threadIdx.x >= 256) {
      ptx::setmaxnreg_dec<40>();
      for_parts(base, task, [&](const Part& part) { produce(smem, base, task, part); });
    } else {
      ptx::setmaxnreg_inc<232>();
      for_parts(base, task, [&](const Part& part) { consume(smem, base, task, part); });
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) sm90_latent(const __grid_constant__ DecodeTask task) {
  Kernel::run(task);
}

}  // namespace attnjourney
