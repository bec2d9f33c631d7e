// Decoding on mma.sync, 16-bit numbers: a few query rows against many keys (Flash-Decoding; bound by memory). One
// block: the rows of one key head against its share of a sequence's keys, so that a key is read once for all heads of
// its group. Up to 16 rows: every warp goes its own way through every kWarps-th tile of 16 keys, with copies of its own
// in flight and no barrier of the block; in the end the warps' results are joined. Up to 64 (Shared): each warp has 16
// rows, and all of them go through the same tiles.
#pragma once
#include "decode_scores.cuh"

namespace attnjourney {

// head_dim and v_head_dim up to D, multiples of 8; rows of the caches in 16-byte chunks.
template <class T_, int D, int Warps, int Stages, bool Shared = false>
struct DecodeMma {
  using T = T_;
  static constexpr int kD = D, kKeys = 16, kWarps = Warps, kStages = Stages, kThreads = 32 * Warps;
  static constexpr int kBlocks = D == 64 ? 3 : 2;  // of a multiprocessor, as far as registers go
  static constexpr int kWarpRows = 16, kRows = Shared ? Warps * kWarpRows : kWarpRows;
  static constexpr int kTileBytes = kKeys * D * 2, kStageBytes = 2 * kTileBytes;
  static constexpr int kRing = Stages * kStageBytes;  // of a warp, or of the block
  static constexpr int kSmemBytes = (Shared ? 1 : Warps) * kRing;
  static constexpr int kPitch = D + 8;  // of a warp's result, in floats: [16][kPitch], then [16] references, [16] sums
  static constexpr int kTops = kWarpRows * kPitch, kSums = kTops + kWarpRows;
  static constexpr int kResult = Shared ? (kSums + kWarpRows) * 4 : kRing;  // bytes from one warp's to the next
  static_assert(D % 64 == 0 && Stages >= 2 && kResult >= (kSums + kWarpRows) * 4 && Warps * kResult <= kSmemBytes);

  static __device__ __forceinline__ uint32_t chunk_at(uint32_t tile, int row, int chunk) {
    return tile + row * (D * 2) + ((chunk ^ (row & 7)) << 4);
  }

  // Starts the copy of 16 rows of K or V, Shared: of this warp's part. Lane i < 16 knows where row i lies; what is
  // nowhere becomes zeros.
  static __device__ __forceinline__ void load_tile(uint32_t tile, const void* base, const CacheStrides& s, Place place,
                                                   int dim) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kKeys * (D / 8) / (Shared ? kThreads : 32); i++) {
      const int c = (Shared ? i * Warps + threadIdx.x / 32 : i) * 32 + lane, row = c / (D / 8), chunk = c % (D / 8);
      const int outer = static_cast<int>(ptx::shfl(static_cast<uint32_t>(place.outer), row));
      const int slot = static_cast<int>(ptx::shfl(static_cast<uint32_t>(place.slot), row));
      const bool valid = outer >= 0 && chunk * 8 < dim;
      const T* from = static_cast<const T*>(base);
      if (valid) from += outer * s.outer + slot * s.row + chunk * 8;
      ptx::cp_async_16(chunk_at(tile, row, chunk), from, valid);
    }
  }

  // A operand of Q K^T: rows row0 + g and + 8
  static __device__ __forceinline__ void load_query(uint32_t (&qf)[D / 16][4], const DecodeTask& p, int batch, int head,
                                                    int row0) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = row0 + g + 8 * h;
      const T* q = static_cast<const T*>(p.query) + batch * p.q_batch + (head * p.group + i / p.q_len) * p.q_head +
                   i % p.q_len * p.q_row;
#pragma unroll
      for (int k = 0; k < D / 8; k++)
        qf[k / 2][k % 2 * 2 + h] =
            i < p.rows && k * 8 < p.head_dim ? *reinterpret_cast<const uint32_t*>(q + k * 8 + 2 * t) : 0u;
    }
  }

  static __device__ __forceinline__ void run(const DecodeTask& p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const DecodePart<kKeys> part(p, kRows);
    const DecodeSequence& s = part.sequence;
    const uint32_t ring = ptx::smem_addr(ptx::dynamic_smem()) + (Shared ? 0 : warp * kRing);
    const int row0 = part.row0 + (Shared ? warp * kWarpRows : 0);  // this warp's first
    constexpr int kStep = Shared ? 1 : Warps;                      // from one of its tiles to the next
    const T* key = static_cast<const T*>(p.key) + part.head * p.k.head;
    const T* value = static_cast<const T*>(p.value) + part.head * p.v.head;

    // the place of a lane's key of a tile, looked up one tile before its copy starts
    const auto look = [&](int tile) {
      return place_of(p, s, part.batch, tile * kKeys + lane % kKeys, tile < part.last ? s.total : 0);
    };
    uint32_t there[Stages];  // of the tiles in flight: which keys lie anywhere
    const auto start = [&](int stage, Place place) {
      const uint32_t at = ring + stage * kStageBytes;
      load_tile(at, key, p.k, place, p.head_dim);
      load_tile(at + kTileBytes, value, p.v, place, p.v_head_dim);
      ptx::cp_async_commit();
      return ptx::ballot(place.outer >= 0);
    };
    const int tile0 = part.first + (Shared ? 0 : warp);
#pragma unroll
    for (int i = 0; i < Stages - 1; i++) there[i] = start(i, look(tile0 + i * kStep));
    Place next = look(tile0 + (Stages - 1) * kStep);

    uint32_t qf[D / 16][4];
    load_query(qf, p, part.batch, part.head, row0);
    const DecodeRow<float> rows[2] = {{p, part.batch, part.head, s.origin, row0 + g},
                                      {p, part.batch, part.head, s.origin, row0 + g + 8}};
    float acc[D / 8][4] = {};
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};

    int stage = 0;
    for (int tile = tile0; tile < part.last; tile += kStep) {
      ptx::cp_async_wait<Stages - 2>();
      meet();  // @tile_landed: for everyone; all are past the one before
      there[Stages - 1] = start((stage + Stages - 1) % Stages, next);
      next = look(tile + Stages * kStep);
      const uint32_t sk = ring + stage * kStageBytes, sv = sk + kTileBytes;

      float x[2][4] = {};
#pragma unroll
      for (int kk = 0; kk < D / 16; kk++) {
        if (D > 128 && kk * 16 >= p.head_dim) break;
        uint32_t b[4];
        ptx::ldmatrix_x4(b, chunk_at(sk, lane % 8 + lane / 16 * 8, kk * 2 + lane / 8 % 2));
        ptx::mma_m16n8k16<T>(x[0], qf[kk], b[0], b[1]);
        ptx::mma_m16n8k16<T>(x[1], qf[kk], b[2], b[3]);
      }
      const bool hides = score(x, p, s, rows, tile * kKeys, there[0] & 0xffffu);
      softmax(x, acc, top, sum);

      const uint32_t a[4] = {ptx::pack2<T>(x[0][0], x[0][1]), ptx::pack2<T>(x[0][2], x[0][3]),
                             ptx::pack2<T>(x[1][0], x[1][1]), ptx::pack2<T>(x[1][2], x[1][3])};
      const auto values = [&](auto guarded) {
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
          if (D > 128 && j * 16 >= p.v_head_dim) break;
          uint32_t b[4];
          ptx::ldmatrix_x4_trans(b, chunk_at(sv, lane % 16, j * 2 + lane / 16));
          if (decltype(guarded)::value && ptx::any(!all_finite<T>(b)))
            guarded_mma<T>(acc[2 * j], acc[2 * j + 1], a, b);
          else
            pair_mma<T>(acc[2 * j], acc[2 * j + 1], a, b);
        }
      };
      if (hides)
        values(std::true_type{});
      else
        values(std::false_type{});
#pragma unroll
      for (int i = 0; i + 1 < Stages; i++) there[i] = there[i + 1];
      stage = stage + 1 == Stages ? 0 : stage + 1;
    }

    ptx::cp_async_wait<0>();
    meet();
    float* mine = result(warp);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float all = sum[h];
      all += ptx::shfl_xor(all, 1);
      all += ptx::shfl_xor(all, 2);
      const int r = g + 8 * h;
#pragma unroll
      for (int j = 0; j < D / 8; j++)
        *reinterpret_cast<float2*>(mine + r * kPitch + j * 8 + 2 * t) = float2{acc[j][2 * h], acc[j][2 * h + 1]};
      if (t == 0) mine[kTops + r] = top[h], mine[kSums + r] = all;
    }
    __syncthreads();
    join(p, part);
  }

  // Products to scores in log2 units, -inf where hidden; does any row not see a key of the tile?
  static __device__ __forceinline__ bool score(float (&x)[2][4], const DecodeTask& p, const DecodeSequence& s,
                                               const DecodeRow<float> (&rows)[2], int item0, uint32_t there) {
    const int t = threadIdx.x % 4;
    const bool whole = there == 0xffffu && s.is_whole(item0, kKeys);
    if (whole && p.scaled_only) {
#pragma unroll
      for (int i = 0; i < 8; i++) x[i / 4][i % 4] *= static_cast<float>(p.scale * 1.4426950408889634);
      return false;
    }
    bool hides = false;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int column = i / 4 * 8 + 2 * t + i % 2, key = s.key(item0 + column);
      const DecodeRow<float>& r = rows[i / 2 % 2];
      float& y = x[i / 4][i % 4];
      if ((there >> column & 1) && (whole || s.keys.visible(r.row, key)))
        y = decode_score<T>(p, r, s.keys.offset, key, y);
      else
        y = -INFINITY;
      hides |= y == -INFINITY;
    }
    return ptx::any(hides);
  }

  // Scores to weights; sums and outputs so far move to the new maximum.
  static __device__ __forceinline__ void softmax(float (&x)[2][4], float (&acc)[D / 8][4], float (&top)[2],
                                                 float (&sum)[2]) {
    float shrink[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float m = fmaxf(fmaxf(x[0][2 * h], x[0][2 * h + 1]), fmaxf(x[1][2 * h], x[1][2 * h + 1]));
      m = fmaxf(m, ptx::shfl_xor(m, 1));
      m = fmaxf(top[h], fmaxf(m, ptx::shfl_xor(m, 2)));
      const float base = m == -INFINITY ? 0.f : m;
      shrink[h] = ptx::exp2(top[h] - base);
      top[h] = m;
      float part = 0.f;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& y = x[i / 2][2 * h + i % 2];
        y = ptx::exp2(y - base);
        part += y;
      }
      sum[h] = sum[h] * shrink[h] + part;
    }
    if (!ptx::any(shrink[0] != 1.f || shrink[1] != 1.f)) return;
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
      acc[j][0] *= shrink[0], acc[j][1] *= shrink[0];
      acc[j][2] *= shrink[1], acc[j][3] *= shrink[1];
    }
  }

  // of those who share tiles
  static __device__ __forceinline__ void meet() {
    if constexpr (Shared)
      __syncthreads();
    else
      __syncwarp();
  }
  static __device__ __forceinline__ float* result(int warp) {
    return reinterpret_cast<float*>(ptx::dynamic_smem() + warp * kResult);
  }

  // The results of each row, of all warps in their order or of the one that has it, and what becomes of them.
  static __device__ __forceinline__ void join(const DecodeTask& p, const DecodePart<kKeys>& part) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int kParts = Shared ? 1 : Warps;
    for (int r = warp; r < kRows && part.row0 + r < p.rows; r += Warps) {
      const int own = r % kWarpRows;
      const auto result_of = [&](int w) { return result(Shared ? r / kWarpRows : w); };
      float weight[kParts];
      RowSum<float> all{-INFINITY, 0.f};
#pragma unroll
      for (int w = 0; w < kParts; w++) all.top = fmaxf(all.top, result_of(w)[kTops + own]);
#pragma unroll
      for (int w = 0; w < kParts; w++) {
        weight[w] = part_weight(result_of(w)[kTops + own], all.top);
        all.sum += weight[w] * result_of(w)[kSums + own];
      }
      const auto column = [&](int c) {
        float y = 0.f;
#pragma unroll
        for (int w = 0; w < kParts; w++) y += weight[w] * result_of(w)[own * kPitch + c];
        return y;
      };
      if (p.splits > 1) {
        const int64_t at = (part.unit * p.splits + part.split) * kRows + r;
        if (lane == 0) static_cast<float2*>(p.part_stats)[at] = float2{all.top, all.sum};
        float* out = static_cast<float*>(p.part_out) + at * p.v_head_dim;
        if (all.sum != 0.f)
          for (int c = lane; c < p.v_head_dim; c += 32) out[c] = column(c);
        continue;
      }
      const int i = part.row0 + r, head = part.head * p.group + i / p.q_len;
      const int64_t row = (static_cast<int64_t>(part.batch) * p.kv_heads + part.head) * p.rows + i;
      float lse;
      const float factor = end_row(p, part.batch, head, all, lse);
      if (lane == 0) static_cast<float*>(p.lse)[row] = lse;
      uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<T*>(p.out) + row * p.v_head_dim);
      for (int c = lane; c < p.v_head_dim / 2; c += 32)
        out[c] = ptx::pack2<T>(column(2 * c) * factor, column(2 * c + 1) * factor);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks) decode_mma(const DecodeTask p) {
  Kernel::run(p);
}

}  // namespace attnjourney
