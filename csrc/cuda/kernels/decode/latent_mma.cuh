// Decoding over latents (csrc/decode/mla_decode.h) on mma.sync, 16-bit numbers: many heads against one key stream whose
// values are the front of its keys, so that a tile of keys in shared memory serves both products. One block: Rows rows
// of a sequence against its share of the keys. Two warps share 16 rows: for scores each takes half of a tile's keys,
// for the output half of the columns; weights pass between them in shared memory. Proofs:
// tests/emulator/test_latent.py.
// Bytes are expanded in shared memory, a tile at a time.
#pragma once
#include "decode_scores.cuh"
#include "latent_size.cuh"

namespace attnjourney {

// head_dim and v_head_dim multiples of 8; rows of the cache in 16-byte chunks.
// Bytes: the cache is of bytes.
template <class T_, int Rows, int Keys, bool Bytes = false>
struct LatentMma {
  using T = T_;
  static constexpr int kD = kLatentDim, kDv = kLatentValueDim, kRows = Rows, kKeys = Keys, kHalf = Keys / 2;
  static constexpr int kWarps = Rows / 16 * 2, kThreads = 32 * kWarps;
  static constexpr int kBlocks = 8 / kWarps;  // of a multiprocessor: 202 registers a thread
  static constexpr int kTileBytes = Keys * kD * 2, kQueryBytes = Rows * kD * 2;
  static constexpr int kPitch = Keys * 2 + 16;  // of a row of weights: no two of 8 rows in the same banks
  // two tiles; of bytes, which take half, behind the one that they are expanded to
  static constexpr int kStageBytes = Bytes ? kTileBytes / 2 : kTileBytes;
  static constexpr int kStagesAt = kQueryBytes + (Bytes ? kTileBytes : 0);
  static constexpr int kWeightsAt = kStagesAt + 2 * kStageBytes, kStatsAt = kWeightsAt + Rows * kPitch;
  static constexpr int kThereAt = kStatsAt + 4 * Rows * 4;   // [stage][key]: is the key anywhere?
  static constexpr int kScalesAt = kThereAt + 2 * Keys * 4;  // [stage][key]
  static constexpr int kSmemBytes = kScalesAt + (Bytes ? 2 * Keys * 4 : 0);
  static_assert(Keys % 16 == 0 && Rows % 16 == 0);

  static __device__ __forceinline__ uint32_t chunk_at(uint32_t tile, int row, int chunk) {
    return tile + row * (kD * 2) + ((chunk ^ (row & 7)) << 4);
  }
  // Starts the copy of one row by one warp; columns past `dim` become zeros, as does a row that is nowhere.
  static __device__ __forceinline__ void load_row(uint32_t tile, int row, const T* from, bool valid, int dim) {
    const int chunks = (dim + 31) / 32 * 4;
    for (int c = threadIdx.x % 32; c < chunks; c += 32) {
      const bool inside = valid && c * 8 < dim;
      ptx::cp_async_16(chunk_at(tile, row, c), from + (inside ? c * 8 : 0), inside);
    }
  }

  static __device__ __forceinline__ void load_bytes(uint32_t row, const unsigned char* from, bool valid, int dim) {
    for (int c = threadIdx.x % 32; c < (dim + 31) / 32 * 2; c += 32) {
      const bool inside = valid && c * 16 < dim;
      ptx::cp_async_16(row + c * 16, from + (inside ? c * 16 : 0), inside);
    }
  }
  // A stage of bytes to the tile. The whole block.
  static __device__ __forceinline__ void expand(const unsigned char* stage, unsigned char* tile, ByteKind kind,
                                                int dim) {
    const int chunks = (dim + 31) / 32 * 2;
    for (int i = threadIdx.x; i < kKeys * chunks; i += kThreads) {
      const int row = i / chunks, c = i - row * chunks;
      uint4 numbers[2];
      expand_bytes<T>(numbers, kind, *reinterpret_cast<const uint4*>(stage + row * kD + c * 16));
#pragma unroll
      for (int half = 0; half < 2; half++)
        *reinterpret_cast<uint4*>(tile + chunk_at(0, row, 2 * c + half)) = numbers[half];
    }
  }

  static __device__ __forceinline__ void run(const DecodeTask& task) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int pair = warp / 2, half = warp % 2, row = pair * 16 + g;  // rows `row` and row + 8 of the block
    const DecodePart<kKeys> part(task, kRows);
    const DecodeSequence& sequence = part.sequence;
    unsigned char* const smem = ptx::dynamic_smem();
    const uint32_t sq = ptx::smem_addr(smem), tiles = sq + kStagesAt, weights = sq + kWeightsAt;
    float *const tops = reinterpret_cast<float*>(smem + kStatsAt), *const sums = tops + 2 * kRows;  // [half][row]
    uint32_t* const there = reinterpret_cast<uint32_t*>(smem + kThereAt);
    using Stored = std::conditional_t<Bytes, unsigned char, T>;
    const Stored* const latent = static_cast<const Stored*>(task.key) + part.head * task.k.head;
    [[maybe_unused]] const float* const scales = reinterpret_cast<const float*>(smem + kScalesAt);

    const auto start = [&](int tile, int stage) {
      for (int r = warp; r < kKeys; r += kWarps) {
        const Place at = place_of(task, sequence, part.batch, tile * kKeys + r, sequence.total);
        const bool valid = at.outer >= 0;
        const Stored* const from = latent + (valid ? at.outer * task.k.outer + at.slot * task.k.row : 0);
        if constexpr (Bytes) {
          load_bytes(tiles + stage * kStageBytes + r * kD, from, valid, task.head_dim);
          if (lane == 0)
            ptx::cp_async_4(sq + kScalesAt + (stage * kKeys + r) * 4,
                            task.key_scale + (valid ? at.outer * task.key_scale_outer + at.slot : 0), valid);
        } else {
          load_row(tiles + stage * kTileBytes, r, from, valid, task.head_dim);
        }
        if (lane == 0) there[stage * kKeys + r] = valid;
      }
      ptx::cp_async_commit();
    };
    for (int r = warp; r < kRows; r += kWarps) {
      const int i = part.row0 + r;
      const bool valid = i < task.rows;
      const int64_t at = valid ? part.batch * task.q_batch + (part.head * task.group + i / task.q_len) * task.q_head +
                                     i % task.q_len * task.q_row
                               : 0;
      load_row(sq, r, static_cast<const T*>(task.query) + at, valid, task.head_dim);
    }
    ptx::cp_async_commit();
    if (part.first < part.last) start(part.first, 0);
    const DecodeRow<float> rows[2] = {{task, part.batch, part.head, sequence.origin, part.row0 + row},
                                      {task, part.batch, part.head, sequence.origin, part.row0 + row + 8}};
    float acc[kDv / 16][4] = {};
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
    [[maybe_unused]] float unit = 0.f;  // of acc: the largest scale so far; weights are multiplied by scale / unit

    for (int tile = part.first, stage = 0; tile < part.last; tile++, stage ^= 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // @tile_landed: with Q; every warp is past the one before
      if (tile + 1 < part.last) start(tile + 1, stage ^ 1);
      if constexpr (Bytes) {
        expand(smem + kStagesAt + stage * kStageBytes, smem + kQueryBytes, task.bytes, task.head_dim);
        __syncthreads();  // @expanded
      }
      const uint32_t keys = Bytes ? sq + kQueryBytes : tiles + stage * kTileBytes;
      [[maybe_unused]] const float* const own_scales = scales + stage * kKeys + half * kHalf + 2 * t;

      float scores[kHalf / 8][4] = {};
#pragma unroll 3
      for (int kk = 0; kk < kD / 32; kk++) {
        if (kk * 32 >= task.head_dim) break;
        uint32_t a[2][4];
        ptx::ldmatrix_x4(a[0], chunk_at(sq, pair * 16 + lane % 16, kk * 4 + lane / 16));
        ptx::ldmatrix_x4(a[1], chunk_at(sq, pair * 16 + lane % 16, kk * 4 + 2 + lane / 16));
#pragma unroll
        for (int j = 0; j < kHalf / 8; j++) {
          uint32_t b[4];
          ptx::ldmatrix_x4(b, chunk_at(keys, half * kHalf + j * 8 + lane % 8, kk * 4 + lane / 8));
          ptx::mma_m16n8k16<T>(scores[j], a[0], b[0], b[1]);
          ptx::mma_m16n8k16<T>(scores[j], a[1], b[2], b[3]);
        }
      }
      if constexpr (Bytes) {
#pragma unroll
        for (int i = 0; i < kHalf / 2; i++) scores[i / 4][i % 4] *= own_scales[i / 4 * 8 + i % 2];
      }
      const bool hides = score(scores, task, sequence, rows, tile * kKeys, half * kHalf + 2 * t, there + stage * kKeys);

      // both warps of a pair move to the maximum of the whole tile
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float largest = scores[0][2 * h];
#pragma unroll
        for (int j = 0; j < kHalf / 8; j++) largest = fmaxf(largest, fmaxf(scores[j][2 * h], scores[j][2 * h + 1]));
        largest = fmaxf(largest, ptx::shfl_xor(largest, 1));
        largest = fmaxf(largest, ptx::shfl_xor(largest, 2));
        if (t == 0) tops[half * kRows + row + 8 * h] = largest;
      }
      ptx::bar_sync(1 + pair, 64);
      const float exponent = score_exponent<float>(task);
      float shrink[2];
      [[maybe_unused]] float inverse = 1.f, moved = 1.f;  // 1 / unit; what a new unit does to acc
      if constexpr (Bytes) {
        float most = lane < kKeys ? fabsf(scales[stage * kKeys + lane]) : 0.f;
        most = most < INFINITY ? most : 0.f;
#pragma unroll
        for (int w = 1; w < 32; w *= 2) most = fmaxf(most, ptx::shfl_xor(most, w));
        most = fmaxf(unit, most);
        inverse = most == 0.f ? 0.f : 1.f / most;
        moved = unit * inverse, unit = most;
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float largest = fmaxf(top[h], fmaxf(tops[row + 8 * h], tops[kRows + row + 8 * h]));
        const float base = largest == -INFINITY ? 0.f : largest;
        shrink[h] = ptx::exp2((top[h] - base) * exponent);
        top[h] = largest;
        float own = 0.f;
#pragma unroll
        for (int j = 0; j < kHalf / 8; j++) {
          const float low = ptx::exp2((scores[j][2 * h] - base) * exponent),
                      high = ptx::exp2((scores[j][2 * h + 1] - base) * exponent);
          own += low + high;
          const auto weight = [&](float x, int e) {  // a hidden key's scale may be NaN
            return !Bytes ? x : x == 0.f ? 0.f : x * (own_scales[j * 8 + e] * inverse);
          };
          *reinterpret_cast<uint32_t*>(smem + kWeightsAt + (row + 8 * h) * kPitch +
                                       (half * kHalf + j * 8 + 2 * t) * 2) =
              ptx::pack2<T>(weight(low, 0), weight(high, 1));
        }
        sum[h] = sum[h] * shrink[h] + own;
        if constexpr (Bytes) shrink[h] *= moved;
      }
      if (ptx::any(shrink[0] != 1.f || shrink[1] != 1.f)) {
#pragma unroll
        for (int j = 0; j < kDv / 16; j++) {
          acc[j][0] *= shrink[0], acc[j][1] *= shrink[0];
          acc[j][2] *= shrink[1], acc[j][3] *= shrink[1];
        }
      }
      ptx::bar_sync(1 + pair, 64);  // @weights_complete: the pair's
#pragma unroll
      for (int kk = 0; kk < kKeys / 16; kk++) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, weights + (pair * 16 + lane % 16) * kPitch + (kk * 2 + lane / 16) * 16);
#pragma unroll
        for (int j = 0; j < kDv / 32; j++) {
          const int column = half * (kDv / 2) + j * 16;
          if (column >= task.v_head_dim) break;
          uint32_t b[4];
          ptx::ldmatrix_x4_trans(b, chunk_at(keys, kk * 16 + lane % 16, column / 8 + lane / 16));
          if (!hides || !ptx::any(!all_finite<T>(b)))
            pair_mma<T>(acc[2 * j], acc[2 * j + 1], a, b);
          else
            guarded_mma<T>(acc[2 * j], acc[2 * j + 1], a, b);
        }
      }
    }
    ptx::cp_async_wait<0>();  // without any tile, Q is still on its way
    if constexpr (Bytes) {
#pragma unroll
      for (int i = 0; i < kDv / 4; i++) acc[i / 4][i % 4] *= unit;
    }
    write(task, part, acc, top, sum, sums);
  }

  // Products of tile items first + 8 j + ... to scores, -inf where hidden; may the tile hide a key?
  static __device__ __forceinline__ bool score(float (&scores)[kHalf / 8][4], const DecodeTask& task,
                                               const DecodeSequence& sequence, const DecodeRow<float> (&rows)[2],
                                               int item0, int first, const uint32_t* there) {
    const bool whole = !task.table && sequence.is_whole(item0, kKeys);
    if (whole && task.scaled_only) {
      const float scale = static_cast<float>(task.score_scale);
#pragma unroll
      for (int i = 0; i < kHalf / 2; i++) scores[i / 4][i % 4] = ptx::rounded_product(scores[i / 4][i % 4], scale);
      return false;
    }
#pragma unroll
    for (int i = 0; i < kHalf / 2; i++) {
      const int column = first + i / 4 * 8 + i % 2, key = sequence.key(item0 + column);
      const DecodeRow<float>& r = rows[i / 2 % 2];
      float& score_ = scores[i / 4][i % 4];
      const bool seen = there[column] && (whole || sequence.keys.visible(r.row, key));
      score_ = seen ? decode_score<T>(task, r, sequence.keys.offset, key, score_) : -INFINITY;
    }
    return true;
  }

  static __device__ __forceinline__ void write(const DecodeTask& task, const DecodePart<kKeys>& part,
                                               const float (&acc)[kDv / 16][4], const float (&top)[2],
                                               const float (&sum)[2], float* sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
    const int half = warp % 2, row = warp / 2 * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float own = sum[h];
      own += ptx::shfl_xor(own, 1);
      own += ptx::shfl_xor(own, 2);
      if (t == 0) sums[half * kRows + row + 8 * h] = own;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = row + 8 * h, i = part.row0 + r;
      if (i >= task.rows) continue;
      const RowSum<float> all{top[h], sums[r] + sums[kRows + r]};
      const int column = half * (kDv / 2) + 2 * t;
      if (task.splits > 1) {
        const int64_t at = (part.unit * task.splits + part.split) * kRows + r;
        if (half == 0 && t == 0) static_cast<float2*>(task.part_stats)[at] = float2{all.top, all.sum};
        float* const out = static_cast<float*>(task.part_out) + at * task.v_head_dim + column;
#pragma unroll
        for (int j = 0; j < kDv / 16; j++)
          if (column + j * 8 < task.v_head_dim)
            *reinterpret_cast<float2*>(out + j * 8) = float2{acc[j][2 * h], acc[j][2 * h + 1]};
        continue;
      }
      const int64_t to = (static_cast<int64_t>(part.batch) * task.kv_heads + part.head) * task.rows + i;
      float lse;
      const float factor = end_row(task, part.batch, part.head * task.group + i / task.q_len, all, lse);
      if (half == 0 && t == 0) static_cast<float*>(task.lse)[to] = lse;
      T* const out = static_cast<T*>(task.out) + to * task.v_head_dim + column;
#pragma unroll
      for (int j = 0; j < kDv / 16; j++)
        if (column + j * 8 < task.v_head_dim)
          *reinterpret_cast<uint32_t*>(out + j * 8) = ptx::pack2<T>(acc[j][2 * h] * factor, acc[j][2 * h + 1] * factor);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads) latent_mma(const DecodeTask task) {
  Kernel::run(task);
}

}  // namespace attnjourney
