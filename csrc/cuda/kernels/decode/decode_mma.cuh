// Decoding on mma.sync, 16-bit numbers: a few query rows against many keys (Flash-Decoding; bound by memory). One
// block: the rows of one key head against its share of a sequence's keys, so that a key is read once for all heads of
// its group. Up to 16 rows: every warp goes its own way through every kWarps-th tile of 16 keys, with copies of its own
// in flight and no barrier of the block; in the end the warps' results are joined. Up to 64 (Shared): each warp has 16
// rows, and all of them go through the same tiles. Bytes are expanded in shared memory, a tile at a time; their scales
// meet scores and weights. Proofs: tests/emulator/test_decode.py, faults/decode.py.
#pragma once
#include "decode_scores.cuh"

namespace attnjourney {

// head_dim and v_head_dim up to D, multiples of 8; rows of the caches in 16-byte chunks. Bytes: the caches are of
// bytes.
template <class T_, int D, int Warps, int Stages, bool Shared = false, bool Bytes = false>
struct DecodeMma {
  using T = T_;
  static constexpr int kD = D, kKeys = 16, kWarps = Warps, kStages = Stages, kThreads = 32 * Warps;
  static constexpr int kBlocks = D == 64 ? 3 : 2;  // of a multiprocessor, as far as registers go
  static constexpr int kWarpRows = 16, kRows = Shared ? Warps * kWarpRows : kWarpRows;
  static constexpr int kTileBytes = kKeys * D * 2;  // expanded
  static constexpr int kStoredBytes = kKeys * D * (Bytes ? 1 : 2);
  static constexpr int kScalesAt = 2 * kStoredBytes, kStageBytes = kScalesAt + (Bytes ? 2 * kKeys * 4 : 0);
  static constexpr int kExpandedAt = Stages * kStageBytes;
  static constexpr int kRing = kExpandedAt + (Bytes ? 2 * kTileBytes : 0);  // of a warp, or of the block
  static constexpr int kSmemBytes = (Shared ? 1 : Warps) * kRing;
  static constexpr int kPitch = D + 8;  // of a warp's result, in floats: [16][kPitch], then [16] references, [16] sums
  static constexpr int kTops = kWarpRows * kPitch, kSums = kTops + kWarpRows;
  static constexpr int kResult = Shared ? (kSums + kWarpRows) * 4 : kRing;  // bytes from one warp's to the next
  static constexpr bool kJoins = D <= 128;  // blocks of a unit, by the last of them; at 256 that would spill
  using Part = DecodePart<kKeys, !Bytes>;
  static_assert(D % 64 == 0 && Stages >= 2 && kResult >= (kSums + kWarpRows) * 4 && Warps * kResult <= kSmemBytes);

  static __device__ __forceinline__ uint32_t chunk_at(uint32_t tile, int row, int chunk) {
    return tile + row * (D * 2) + ((chunk ^ (row & 7)) << 4);
  }

  static __device__ __forceinline__ Place of_lane(Place place, int row) {
    return {static_cast<int>(ptx::shfl(static_cast<uint32_t>(place.outer), row)),
            static_cast<int>(ptx::shfl(static_cast<uint32_t>(place.slot), row))};
  }

  // Starts the copy of 16 rows of K or V, Shared: of this warp's part. Lane i < 16 knows where row i lies; what is
  // nowhere becomes zeros.
  static __device__ __forceinline__ void load_tile(uint32_t tile, const void* base, const CacheStrides& strides,
                                                   Place place, int dim) {
    const int lane = threadIdx.x % 32;
    if constexpr (Bytes) {
      constexpr int kChunks = kStoredBytes / 16, kEach = Shared ? kThreads : 32;
#pragma unroll(D > 128 && !Shared ? 2 : kChunks / kEach + 1)
      for (int i = 0; i < (kChunks + kEach - 1) / kEach; i++) {
        const int c = (Shared ? i * Warps + threadIdx.x / 32 : i) * 32 + lane, row = c / (D / 16), chunk = c % (D / 16);
        if (kChunks % kEach && c - lane >= kChunks) break;  // whole warps
        const Place at = of_lane(place, row);
        const bool valid = at.outer >= 0 && chunk * 16 < dim;
        const unsigned char* from = static_cast<const unsigned char*>(base);
        if (valid) from += at.outer * strides.outer + at.slot * strides.row + chunk * 16;
        ptx::cp_async_16(tile + c * 16, from, valid);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kKeys * (D / 8) / (Shared ? kThreads : 32); i++) {
        const int c = (Shared ? i * Warps + threadIdx.x / 32 : i) * 32 + lane, row = c / (D / 8), chunk = c % (D / 8);
        const Place at = of_lane(place, row);
        const bool valid = at.outer >= 0 && chunk * 8 < dim;
        const T* from = static_cast<const T*>(base);
        if (valid) from += at.outer * strides.outer + at.slot * strides.row + chunk * 8;
        ptx::cp_async_16(chunk_at(tile, row, chunk), from, valid);
      }
    }
  }

  // Starts the copy of the scales of a tile's keys, by lanes 0 .. 15, and of its values; 0 for what is nowhere.
  static __device__ __forceinline__ void load_scales(uint32_t scales, const DecodeTask& task, int head, Place place) {
    const int lane = threadIdx.x % 32;
    if (Shared && threadIdx.x >= 32) return;
    const bool keys = lane < kKeys, valid = place.outer >= 0;
    const float* from = keys ? task.key_scale : task.value_scale;
    if (valid)
      from += place.outer * (keys ? task.key_scale_outer : task.value_scale_outer) +
              head * (keys ? task.key_scale_head : task.value_scale_head) + place.slot;
    ptx::cp_async_4(scales + lane * 4, from, valid);
  }
  // Bytes of a stage to the tiles of K and V, by those who share them.
  static __device__ __forceinline__ void expand(unsigned char* stage, unsigned char* tiles, ByteKind kind) {
    constexpr int kChunks = 2 * kStoredBytes / 16, kEach = Shared ? kThreads : 32;
#pragma unroll 2
    for (int c = Shared ? threadIdx.x : threadIdx.x % 32; c < kChunks; c += kEach) {
      const int row = c / (D / 16), chunk = c % (D / 16);  // rows of V behind those of K
      uint4 numbers[2];
      expand_bytes<T>(numbers, kind, *reinterpret_cast<const uint4*>(stage + c * 16));
#pragma unroll
      for (int i = 0; i < 2; i++) *reinterpret_cast<uint4*>(tiles + chunk_at(0, row, 2 * chunk + i)) = numbers[i];
    }
  }

  // A operand of Q K^T: rows row0 + g and + 8
  static __device__ __forceinline__ void load_query(uint32_t (&qf)[D / 16][4], const DecodeTask& task, const Part& part,
                                                    int row0) {
    const int q_len = part.sequence.q_len, head = part.head;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = row0 + g + 8 * h;
      const T* q = static_cast<const T*>(task.query) + part.batch * task.q_batch +
                   (head * task.group + i / q_len) * task.q_head + (part.sequence.q_begin + i % q_len) * task.q_row;
#pragma unroll
      for (int k = 0; k < D / 8; k++)
        qf[k / 2][k % 2 * 2 + h] =
            i < part.rows && k * 8 < task.head_dim ? *reinterpret_cast<const uint32_t*>(q + k * 8 + 2 * t) : 0u;
    }
  }

  static __device__ __forceinline__ void run(const DecodeTask& task) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Part part(task, kRows);
    if (part.row0 >= part.rows) return;
    const DecodeSequence& sequence = part.sequence;
    const uint32_t ring = ptx::smem_addr(ptx::dynamic_smem()) + (Shared ? 0 : warp * kRing);
    const int row0 = part.row0 + (Shared ? warp * kWarpRows : 0);  // this warp's first
    constexpr int kStep = Shared ? 1 : Warps;                      // from one of its tiles to the next
    using Stored = std::conditional_t<Bytes, unsigned char, T>;
    const Stored* key = static_cast<const Stored*>(task.key) + part.head * task.k.head;
    const Stored* value = static_cast<const Stored*>(task.value) + part.head * task.v.head;
    [[maybe_unused]] unsigned char* const own_smem = ptx::dynamic_smem() + (Shared ? 0 : warp * kRing);

    // the place of a lane's key of a tile, looked up one tile before its copy starts
    const auto locate = [&](int tile) {
      return place_of(task, sequence, part.batch, tile * kKeys + lane % kKeys, tile < part.last ? sequence.total : 0);
    };
    uint32_t there[Stages];  // of the tiles in flight: which keys lie anywhere
    const auto start = [&](int stage, Place place) {
      const uint32_t at = ring + stage * kStageBytes;
      load_tile(at, key, task.k, place, task.head_dim);
      load_tile(at + kStoredBytes, value, task.v, place, task.v_head_dim);
      if constexpr (Bytes) load_scales(at + kScalesAt, task, part.head, place);
      ptx::cp_async_commit();
      return ptx::ballot(place.outer >= 0);
    };
    const int tile0 = part.first + (Shared ? 0 : warp);
#pragma unroll
    for (int i = 0; i < Stages - 1; i++) there[i] = start(i, locate(tile0 + i * kStep));
    Place next = locate(tile0 + (Stages - 1) * kStep);

    uint32_t qf[D / 16][4];
    load_query(qf, task, part, row0);
    const auto row_at = [&](int i) {
      return DecodeRow<float>(task, part.batch, part.head, sequence.origin, i, part.rows, sequence.q_len);
    };
    const DecodeRow<float> rows[2] = {row_at(row0 + g), row_at(row0 + g + 8)};
    float acc[D / 8][4] = {};
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
    [[maybe_unused]] float unit[2] = {0.f, 0.f};  // of acc: see weigh_bytes

    int stage = 0;
    for (int tile = tile0; tile < part.last; tile += kStep) {
      ptx::cp_async_wait<Stages - 2>();
      meet();  // @tile_landed: for everyone; all are past the one before
      there[Stages - 1] = start((stage + Stages - 1) % Stages, next);
      next = locate(tile + Stages * kStep);
      if constexpr (Bytes) {
        expand(own_smem + stage * kStageBytes, own_smem + kExpandedAt, task.bytes);
        meet();  // @expanded
      }
      const uint32_t sk = ring + (Bytes ? kExpandedAt : stage * kStageBytes), sv = sk + kTileBytes;

      float scores[2][4] = {};
#pragma unroll
      for (int kk = 0; kk < D / 16; kk++) {
        if (D > 128 && kk * 16 >= task.head_dim) break;
        uint32_t b[4];
        ptx::ldmatrix_x4(b, chunk_at(sk, lane % 8 + lane / 16 * 8, kk * 2 + lane / 8 % 2));
        ptx::mma_m16n8k16<T>(scores[0], qf[kk], b[0], b[1]);
        ptx::mma_m16n8k16<T>(scores[1], qf[kk], b[2], b[3]);
      }
      [[maybe_unused]] const float* const scales =
          reinterpret_cast<const float*>(own_smem + stage * kStageBytes + kScalesAt) + 2 * t;
      if constexpr (Bytes) {
#pragma unroll
        for (int i = 0; i < 8; i++) scores[i / 4][i % 4] *= scales[i / 4 * 8 + i % 2];
      }
      const bool hides = score(scores, task, sequence, rows, tile * kKeys, there[0] & 0xffffu);
      if constexpr (Bytes)
        weigh_bytes(scores, acc, top, sum, unit, scales + kKeys, score_exponent<float>(task));
      else
        softmax(scores, acc, top, sum, score_exponent<float>(task));

      const uint32_t a[4] = {ptx::pack2<T>(scores[0][0], scores[0][1]), ptx::pack2<T>(scores[0][2], scores[0][3]),
                             ptx::pack2<T>(scores[1][0], scores[1][1]), ptx::pack2<T>(scores[1][2], scores[1][3])};
      const auto values = [&](auto guarded) {
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
          if (D > 128 && j * 16 >= task.v_head_dim) break;
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
    if constexpr (Bytes) {
#pragma unroll
      for (int i = 0; i < D / 2; i++) acc[i / 4][i % 4] *= unit[i % 4 / 2];
    }
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
    __syncthreads();                   // @results_there
    if constexpr (D > 128 && !Shared)  // held through the loop, it would spill
      join(task, Part(task, kRows, ptx::opaque(blockIdx.x)));
    else
      join(task, part);
  }

  // Products to scores, -inf where hidden; does any row not see a key of the tile?
  static __device__ __forceinline__ bool score(float (&scores)[2][4], const DecodeTask& task,
                                               const DecodeSequence& sequence, const DecodeRow<float> (&rows)[2],
                                               int item0, uint32_t there) {
    const int t = threadIdx.x % 4;
    const bool whole = there == 0xffffu && sequence.is_whole(item0, kKeys);
    if (whole && task.scaled_only) {
      const float scale = static_cast<float>(task.score_scale);
#pragma unroll
      for (int i = 0; i < 8; i++) scores[i / 4][i % 4] = ptx::rounded_product(scores[i / 4][i % 4], scale);
      return false;
    }
    bool hides = false;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int column = i / 4 * 8 + 2 * t + i % 2, key = sequence.key(item0 + column);
      const DecodeRow<float>& r = rows[i / 2 % 2];
      float& score = scores[i / 4][i % 4];
      if ((there >> column & 1) && (whole || sequence.keys.visible(r.row, key)))
        score = decode_score<T>(task, r, sequence.keys.offset, key, score);
      else
        score = -INFINITY;
      hides |= score == -INFINITY;
    }
    return ptx::any(hides);
  }

  // Scores to weights; sums and outputs so far move to the new maximum.
  static __device__ __forceinline__ void softmax(float (&scores)[2][4], float (&acc)[D / 8][4], float (&top)[2],
                                                 float (&sum)[2], float exponent) {
    float shrink[2];
    weigh(scores, shrink, top, sum, exponent);
    move(acc, shrink);
  }
  // The same where values have scales: scores become weight * scale, which is rounded to T, in a unit of the row's own,
  // the power of two below the largest of these so far; acc is in that unit.
  static __device__ __forceinline__ void weigh_bytes(float (&scores)[2][4], float (&acc)[D / 8][4], float (&top)[2],
                                                     float (&sum)[2], float (&unit)[2], const float* scales,
                                                     float exponent) {
    float shrink[2];
    weigh(scores, shrink, top, sum, exponent);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float most = 0.f;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& weight = scores[i / 2][2 * h + i % 2];
        weight = weight == 0.f ? 0.f : weight * scales[i / 2 * 8 + i % 2];  // a hidden key's scale may be NaN
        const float size = fabsf(weight);
        if (size < INFINITY) most = fmaxf(most, size);
      }
      most = fmaxf(most, ptx::shfl_xor(most, 1));
      most = fmaxf(most, ptx::shfl_xor(most, 2));
      const float before = unit[h] * shrink[h];
      const uint32_t power = min(max(ptx::as_bits(fmaxf(before, most)) & 0x7f800000u, 0x00800000u), 0x7e800000u);
      const float inverse = ptx::as_float(0x7f000000u - power);
      unit[h] = ptx::as_float(power);
      shrink[h] = before * inverse;
#pragma unroll
      for (int i = 0; i < 4; i++) scores[i / 2][2 * h + i % 2] *= inverse;
    }
    move(acc, shrink);
  }
  // Scores to weights; shrink: what the sums so far were multiplied by.
  static __device__ __forceinline__ void weigh(float (&scores)[2][4], float (&shrink)[2], float (&top)[2],
                                               float (&sum)[2], float exponent) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float largest =
          fmaxf(fmaxf(scores[0][2 * h], scores[0][2 * h + 1]), fmaxf(scores[1][2 * h], scores[1][2 * h + 1]));
      largest = fmaxf(largest, ptx::shfl_xor(largest, 1));
      largest = fmaxf(top[h], fmaxf(largest, ptx::shfl_xor(largest, 2)));
      const float base = largest == -INFINITY ? 0.f : largest;
      shrink[h] = ptx::exp2((top[h] - base) * exponent);
      top[h] = largest;
      float part = 0.f;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& score = scores[i / 2][2 * h + i % 2];
        score = ptx::exp2((score - base) * exponent);
        part += score;
      }
      sum[h] = sum[h] * shrink[h] + part;
    }
  }
  static __device__ __forceinline__ void move(float (&acc)[D / 8][4], const float (&shrink)[2]) {
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
  static __device__ __forceinline__ void join(const DecodeTask& task, const Part& part) {
    join_warps(task, part);
    if constexpr (kJoins)
      if (task.splits > 1 && task.arrivals) join_blocks(task, part);
  }
  static __device__ __forceinline__ void join_warps(const DecodeTask& task, const Part& part) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int kParts = Shared ? 1 : Warps;
    for (int r = warp; r < kRows && part.row0 + r < part.rows; r += Warps) {
      const int own = r % kWarpRows;
      const auto result_of = [&](int w) { return result(Shared ? r / kWarpRows : w); };
      float weight[kParts];
      RowSum<float> all{-INFINITY, 0.f};
#pragma unroll
      for (int w = 0; w < kParts; w++) all.top = fmaxf(all.top, result_of(w)[kTops + own]);
#pragma unroll
      for (int w = 0; w < kParts; w++) {
        weight[w] = part_weight(result_of(w)[kTops + own], all.top, score_exponent<float>(task));
        all.sum += weight[w] * result_of(w)[kSums + own];
      }
      const auto column = [&](int c) {
        float y = 0.f;
#pragma unroll
        for (int w = 0; w < kParts; w++) y += weight[w] * result_of(w)[own * kPitch + c];
        return y;
      };
      if (task.splits > 1) {
        const int64_t at = (part.unit * task.splits + part.split) * kRows + r;
        if (lane == 0) static_cast<float2*>(task.part_stats)[at] = float2{all.top, all.sum};
        float* out = static_cast<float*>(task.part_out) + at * task.v_head_dim;
        if (all.sum != 0.f)
          for (int c = lane; c < task.v_head_dim; c += 32) out[c] = column(c);
        continue;
      }
      const int i = part.row0 + r, head = part.head * task.group + i / part.sequence.q_len;
      const DecodeResult to(task, part.batch, part.head, i);
      float lse;
      const float factor = end_row(task, part.batch, head, all, lse);
      if (lane == 0) static_cast<float*>(task.lse)[to.lse] = lse;
      uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<T*>(task.out) + to.out);
      for (int c = lane; c < task.v_head_dim / 2; c += 32)
        out[c] = ptx::pack2<T>(column(2 * c) * factor, column(2 * c + 1) * factor);
    }
  }

  // The parts of a unit, by the last of its blocks, a warp for each row, always in the same order. They lie in the
  // second-level cache, and the launch of a kernel that does it (decode_merge.cuh) is saved.
  static __device__ __forceinline__ void join_blocks(const DecodeTask& task, const Part& part) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t* const arrived = reinterpret_cast<uint32_t*>(ptx::dynamic_smem());
    __syncthreads();  // @parts_written
    if (threadIdx.x == 0) {
      ptx::thread_fence();  // @counted_after: this block's parts before the count, the others' after it
      *arrived = ptx::atomic_add(task.arrivals + part.unit, 1);
      ptx::thread_fence();
    }
    __syncthreads();  // @count_known
    if (*arrived != static_cast<uint32_t>(task.splits) - 1) return;
    if (threadIdx.x == 0) ptx::atomic_add(task.arrivals + part.unit, 0u - static_cast<uint32_t>(task.splits));
    const float exponent = score_exponent<float>(task);
    for (int r = warp; r < kRows && part.row0 + r < part.rows; r += Warps) {
      const int64_t first = part.unit * task.splits * kRows + r;
      const float2* const stats = static_cast<const float2*>(task.part_stats) + first;
      const auto stats_of = [&](int split) {
        return split < task.splits ? stats[int64_t{split} * kRows] : float2{-INFINITY, 0.f};
      };
      RowSum<float> all{-INFINITY, 0.f};
      for (int split = lane; split < task.splits; split += 32) all.top = fmaxf(all.top, stats_of(split).x);
#pragma unroll
      for (int w = 16; w > 0; w /= 2) all.top = fmaxf(all.top, ptx::shfl_xor(all.top, w));
      constexpr int kEach = D / 128 > 0 ? D / 128 : 1, kAtOnce = 8;  // columns of a lane in fours; splits
      float4 y[kEach] = {};
#pragma unroll 1
      for (int base = 0; base < task.splits; base += 32) {  // lane i has the weight of split base + i
        const float2 own = stats_of(base + lane);
        const float weight = own.y == 0.f ? 0.f : part_weight(own.x, all.top, exponent);
        all.sum += weight * own.y;
        const uint32_t there = ptx::ballot(own.y != 0.f);  // whose outputs were written
#pragma unroll 1
        for (int i = 0; i < 32 && base + i < task.splits; i += kAtOnce) {
          float4 x[kAtOnce][kEach];
#pragma unroll
          for (int u = 0; u < kAtOnce; u++)
#pragma unroll
            for (int c = 0; c < kEach; c++) {
              const int column = 4 * (c * 32 + lane);
              const float* const from = static_cast<const float*>(task.part_out) +
                                        (first + int64_t{base + i + u} * kRows) * task.v_head_dim + column;
              x[u][c] = (there >> (i + u) & 1) && column < task.v_head_dim ? *reinterpret_cast<const float4*>(from)
                                                                           : float4{0.f, 0.f, 0.f, 0.f};
            }
#pragma unroll
          for (int u = 0; u < kAtOnce; u++) {
            const float w = ptx::as_float(ptx::shfl(ptx::as_bits(weight), i + u));
#pragma unroll
            for (int c = 0; c < kEach; c++) {
              y[c].x += w * x[u][c].x, y[c].y += w * x[u][c].y;
              y[c].z += w * x[u][c].z, y[c].w += w * x[u][c].w;
            }
          }
        }
      }
#pragma unroll
      for (int w = 16; w > 0; w /= 2) all.sum += ptx::shfl_xor(all.sum, w);
      const int i = part.row0 + r, head = part.head * task.group + i / part.sequence.q_len;
      const DecodeResult to(task, part.batch, part.head, i);
      float lse;
      const float factor = end_row(task, part.batch, head, all, lse);
      if (lane == 0) static_cast<float*>(task.lse)[to.lse] = lse;
#pragma unroll
      for (int c = 0; c < kEach; c++)
        if (const int column = 4 * (c * 32 + lane); column < task.v_head_dim)
          *reinterpret_cast<uint2*>(static_cast<T*>(task.out) + to.out + column) =
              uint2{ptx::pack2<T>(y[c].x * factor, y[c].y * factor), ptx::pack2<T>(y[c].z * factor, y[c].w * factor)};
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks) decode_mma(const DecodeTask task) {
  Kernel::run(task);
}

}  // namespace attnjourney
