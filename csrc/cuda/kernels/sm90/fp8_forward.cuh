// Attention forward for Hopper over queries, keys and values in e4m3 with scales of blocks (after FlashAttention-3,
// arXiv 2407.08608). A block has 128 query rows of one head: a warpgroup whose first warp feeds Q, K and V by TMA while
// the other three turn each tile of V (fp8_turn.cuh), and two consumer warpgroups of 64 rows each. Under the softmax of
// a key tile runs O += P V of the one before. Key tiles go from last to first.
//
// Scales: those of a query tile and a key tile join the softmax scale, for each key tile is part of one block. Sums of
// values are counted in the scale of the tile they came from last: when the next tile has another one, they are
// rescaled with what the softmax takes from them. A scale of less than 2^-64 of the largest one so far counts in that
// unit, through the weights: no sum leaves float32.
//
// Hopper's tensor cores keep about 14 bits of a sum of e4m3 products. Not yet measured on a GPU. Proofs:
// tests/emulator/test_fp8.py.
#pragma once
#include "cuda/kernels/common/bytes.cuh"
#include "fp8_softmax.cuh"
#include "fp8_turn.cuh"

namespace attnjourney {

// the thread that feeds the tiles
template <class Shape>
__device__ __forceinline__ void sm90_fp8_produce(uint32_t smem, const Sm90Fp8Barriers<Shape>& barriers,
                                                 const Sm90Fp8Maps& maps, const Fp8Task& task, const Fp8Tile& tile) {
  constexpr int kLine = Shape::kLine;
  const int head_k = tile.at.head / task.group;
#pragma unroll
  for (int g = 0; g < Shape::kGroups; g++) {
    ptx::mbarrier_arrive_expect_tx(barriers.q_full + 8 * g, Shape::kQueryBytes);
#pragma unroll
    for (int c = 0; c < Shape::kD / kLine; c++)
      ptx::tma_load_4d(smem + g * Shape::kQueryBytes + c * 64 * kLine, &maps.query, c * kLine, tile.at.head,
                       tile.at.row + 64 * g, tile.at.batch, barriers.q_full + 8 * g);
  }
  int key_tile = tile.tiles.end - 1;
#pragma unroll 1
  for (int number = 0; number < tile.tiles.count(); number++, key_tile = tile.tiles.below(key_tile)) {
    const int stage = number % Shape::kStages;
    const auto load = [&](uint32_t full, uint32_t empty, uint32_t at, const ptx::TensorMap& map) {
      wait_empty<Shape>(empty, number);
      ptx::mbarrier_arrive_expect_tx(full + 8 * stage, Shape::kKeyBytes);
#pragma unroll
      for (int c = 0; c < Shape::kD / kLine; c++)
        ptx::tma_load_4d(at + stage * Shape::kKeyBytes + c * Shape::kKeys * kLine, &map, c * kLine, head_k,
                         key_tile * Shape::kKeys, tile.at.batch, full + 8 * stage);
    };
    load(barriers.k_full, barriers.k_empty, smem + Shape::kKeyAt, maps.key);
    load(barriers.v_full, barriers.v_empty, smem + Shape::kValueAt, maps.value);
  }
}

// One thread of a consumer warpgroup.
template <class Shape>
struct Sm90Fp8Consumer {
  const uint32_t smem;
  unsigned char* const base;
  const Sm90Fp8Barriers<Shape>& barriers;
  const Fp8Task& task;
  const Fp8Tile& tile;
  const KeyTiles own;          // of this warpgroup's rows alone
  const int group, lane, row;  // row: of the tensor; the thread has row + 8, too
  const float *const key_scale, *const value_scale;
  const float query_scale;

  float out[Shape::kD / 2], scores[Shape::kKeys / 2];
  uint32_t weights[Shape::kKeys / 32][4];  // of key tile `count`
  Sm90Fp8Softmax<Shape> soft;
  int count = 0;                 // key tiles so far
  int key_tile;                  // the number of the one whose scores were last computed
  float unit = 0.f, most = 0.f;  // of the output; the largest scale of values so far
  float weight_factor = 1.f;     // of the tile's weights
  bool guarded = false;          // the tile hides something and has a NaN among its values

  static __device__ __forceinline__ const float* scale_of(const Fp8Scale& s, int batch, int head) {
    return s.data + batch * s.batch + head * s.head;
  }
  __device__ __forceinline__ Sm90Fp8Consumer(uint32_t smem_, unsigned char* base_,
                                             const Sm90Fp8Barriers<Shape>& barriers_, const Fp8Task& task_,
                                             const Fp8Tile& tile_)
      : smem(smem_),
        base(base_),
        barriers(barriers_),
        task(task_),
        tile(tile_),
        own(key_tiles_of<Shape::kKeys, true>(task_, tile_.sequence,
                                             tile_.at.row + 64 * (ptx::uniform(threadIdx.x / 128) - 1),
                                             tile_.at.row + 64 * (ptx::uniform(threadIdx.x / 128) - 1) + 63)),
        group(ptx::uniform(threadIdx.x / 128) - 1),
        lane(threadIdx.x % 32),
        row(tile_.at.row + (threadIdx.x - 128) / 32 * 16 + lane / 4),
        key_scale(scale_of(task_.key_scale, tile_.at.batch, tile_.at.head / task_.group)),
        value_scale(scale_of(task_.value_scale, tile_.at.batch, tile_.at.head / task_.group)),
        query_scale(scale_of(task_.query_scale, tile_.at.batch,
                             tile_.at.head)[tile_.at.row / kFp8ScaleRows * task_.query_scale.block]) {
    soft.start(task, tile.at.batch * task.q_heads + tile.at.head, lane % 4);
#pragma unroll
    for (int e = 0; e < Shape::kD / 2; e++) out[e] = 0.f;
  }

  __device__ __forceinline__ void release(uint32_t bar, int number) const {
    if (lane == 0) ptx::mbarrier_arrive(bar + 8 * (number % Shape::kStages));
  }
  __device__ __forceinline__ uint32_t turned_of(int number) const {
    return smem + Shape::kTurnedAt + number % Shape::kStages * Shape::kKeyBytes;
  }

  // issues S = Q K^T
  __device__ __forceinline__ void issue_scores(int number) {
    constexpr int kLine = Shape::kLine, kSteps = kLine / 32;
    const uint64_t q = fp8_operand<kLine>(smem + group * Shape::kQueryBytes);
    const uint64_t k = fp8_operand<kLine>(smem + Shape::kKeyAt + number % Shape::kStages * Shape::kKeyBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < Shape::kD / 32; kk++)
      ptx::wgmma_e4m3_ss<Shape::kKeys>(scores, q + kk / kSteps * (64 * kLine / 16) + kk % kSteps * 2,
                                       k + kk / kSteps * (Shape::kKeys * kLine / 16) + kk % kSteps * 2, kk > 0);
    ptx::wgmma_commit();
  }
  // issues O += P V
  __device__ __forceinline__ void issue_output(int number) {
    constexpr int kColumns = Shape::kD < 128 ? Shape::kD : 128;  // of a product
    const uint64_t v = fp8_operand<Shape::kKeys>(turned_of(number));
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < Shape::kKeys / 32; kk++)
#pragma unroll
      for (int c = 0; c < Shape::kD / kColumns; c++)
        ptx::wgmma_e4m3_rs<kColumns>(reinterpret_cast<float (&)[kColumns / 2]>(out[c * kColumns / 2]), weights[kk],
                                     v + c * (kColumns * Shape::kKeys / 16) + kk * 2);
    ptx::wgmma_commit();
  }

  // Scores of the key tile that is the `number`th, to weights but for packing; WithOutput: under it runs O += P V of
  // the one before.
  template <bool WithOutput>
  __device__ __forceinline__ void step(int number) {
    const int block = key_tile * Shape::kKeys / kFp8ScaleRows;
    const float of_key = key_scale[block * task.key_scale.block],
                of_value = value_scale[block * task.value_scale.block];
    wait_full<Shape>(barriers.k_full, number);
    issue_scores(number);
    if (WithOutput) {
      wait_full<Shape>(barriers.turned_full, number - 1);
      issue_output(number - 1);
    }
    ptx::wgmma_wait<WithOutput ? 1 : 0>();
    ptx::keep(scores);
    release(barriers.k_empty, number);        // @key_released
    const bool hides = !own.whole(key_tile);  // anything from a row of this warpgroup?
    soft.run(scores, task, query_scale * of_key, hides, tile.sequence, row, key_tile * Shape::kKeys + 2 * (lane % 4));
    take_unit(of_value);
    if (WithOutput) finish_output(number - 1);
    rescale();
    guarded = hides && has_nan(number);
    pack();
  }
  __device__ __forceinline__ void finish_output(int number) {
    ptx::wgmma_wait<0>();  // @output_done
    ptx::keep(out);
    release(barriers.turned_empty, number);
  }

  // The unit of the output becomes that of a tile of values. A scale that is not finite makes weights of NaN.
  __device__ __forceinline__ void take_unit(float scale) {
    const bool finite = fabsf(scale) < INFINITY;
    const float size = finite ? fabsf(scale) : 0.f;
    most = fmaxf(most, size);
    float to = fmaxf(size, most * 0x1p-64f);
    if (to == 0.f) to = 1.f;
    const float ratio = unit / to;
#pragma unroll
    for (int h = 0; h < 2; h++) soft.alpha[h] *= ratio;
    weight_factor = finite ? scale / to : NAN;
    unit = to;
  }
  __device__ __forceinline__ void rescale() {
    if (!ptx::any(soft.alpha[0] != 1.f || soft.alpha[1] != 1.f)) return;
#pragma unroll
    for (int e = 0; e < Shape::kD / 2; e++) out[e] *= soft.alpha[e >> 1 & 1];
  }
  // the weights of 32 keys as an A operand, the keys of fp8_turn.cuh
  __device__ __forceinline__ void pack() {
    if (guarded || weight_factor != 1.f) {  // a negative scale, or one beyond the range
#pragma unroll
      for (int i = 0; i < Shape::kKeys / 2; i++) {
        const bool hidden = scores[i] == 0.f;
        if (!hidden) scores[i] *= weight_factor;
        // what rounds to 0 is seen all the same: as -0
        if (guarded && !hidden && fabsf(scores[i]) <= 0x1p-10f) scores[i] = -0x1p-11f;
      }
    }
#pragma unroll
    for (int kk = 0; kk < Shape::kKeys / 32; kk++)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const float* const s = scores + 16 * kk + q / 2 * 8 + q % 2 * 2;
        weights[kk][q] = ptx::pack4_e4m3(s[0], s[1], s[4], s[5]);
      }
  }

  // ---- where a tile hides something and a value is a NaN, O += P V is left to mma.sync, which passes over weights of
  // 0

  __device__ __forceinline__ bool has_nan(int number) const {
    wait_full<Shape>(barriers.turned_full, number);
    const uint32_t* const nan = reinterpret_cast<const uint32_t*>(base + Shape::kNanAt) + 4 * (number % Shape::kStages);
    const bool any = (nan[0] | nan[1] | nan[2]) != 0;
    __syncwarp();  // @nan_read: by every lane, before one releases the stage
    return any;
  }
  // two numbers in e4m3 as Bf16, exact; of weights -0 as the least there is
  static __device__ __forceinline__ uint32_t widened(uint32_t two) {
    return ptx::pack2<Bf16>(byte_number(ByteKind::e4m3, two & 0xffu), byte_number(ByteKind::e4m3, two >> 8 & 0xffu));
  }
  static __device__ __forceinline__ float widened_weight(uint32_t byte) {
    return byte == 0x80u ? 0x1p-100f : byte_number(ByteKind::e4m3, byte);
  }
  static __device__ __forceinline__ uint32_t widened_weights(uint32_t two) {
    return ptx::pack2<Bf16>(widened_weight(two & 0xffu), widened_weight(two >> 8 & 0xffu));
  }
  __device__ __forceinline__ void guarded_output() {
    const unsigned char* const turned = base + Shape::kTurnedAt + count % Shape::kStages * Shape::kKeyBytes;
#pragma unroll 1
    for (int half = 0; half < Shape::kKeys / 16; half++) {
      // the weights of these 16 keys come to the front: registers have no index
      const uint32_t a[4] = {widened_weights(weights[0][0]), widened_weights(weights[0][1]),
                             widened_weights(weights[0][0] >> 16), widened_weights(weights[0][1] >> 16)};
#pragma unroll
      for (int kk = 0; kk < Shape::kKeys / 32; kk++) {
        weights[kk][0] = weights[kk][2], weights[kk][1] = weights[kk][3];
        if (kk + 1 < Shape::kKeys / 32) weights[kk][2] = weights[kk + 1][0], weights[kk][3] = weights[kk + 1][1];
      }
#pragma unroll
      for (int j = 0; j < Shape::kD / 8; j += 2) {
        uint32_t b[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int n = (j + i) * 8 + lane / 4;
          const uint32_t word =
              *reinterpret_cast<const uint32_t*>(turned + swizzled_chunk<Shape::kKeys>(n, half) + lane % 4 * 4);
          b[2 * i] = widened(word), b[2 * i + 1] = widened(word >> 16);
        }
        guarded_mma<Bf16>(reinterpret_cast<float (&)[4]>(out[4 * j]), reinterpret_cast<float (&)[4]>(out[4 * j + 4]), a,
                          b);
      }
    }
    __syncwarp();
    release(barriers.turned_empty, count);
  }

  __device__ __forceinline__ void run() {
    ptx::mbarrier_wait(barriers.q_full + 8 * group, 0);
    const int tiles = tile.tiles.count();
    key_tile = tile.tiles.end - 1;
    if (tiles > 0) {
      step<false>(0);
#pragma unroll 1
      for (; count + 1 < tiles; count++) {
        key_tile = tile.tiles.below(key_tile);
        if (guarded) {
          guarded_output();
          step<false>(count + 1);
        } else {
          step<true>(count + 1);
        }
      }
      if (guarded) {
        guarded_output();
      } else {
        wait_full<Shape>(barriers.turned_full, count);
        issue_output(count);
        finish_output(count);
      }
    }
    write();
  }

  // Four adjacent columns at a time: see fp8_turn.cuh.
  __device__ __forceinline__ void write() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = row + 8 * h;
      float sum = soft.sum[h];
      sum += ptx::shfl_xor(sum, 1);
      sum += ptx::shfl_xor(sum, 2);
      if (r >= task.q_len) continue;
      const float inverse = sum == 0.f ? 0.f : 1.f / sum, factor = inverse * unit;
      const int64_t first =
          tile.at.batch * task.out_strides.batch + tile.at.head * task.out_strides.head + r * task.out_strides.row;
#pragma unroll
      for (int m = 0; m < Shape::kD / 16; m++) {
        const int column = 16 * m + 4 * (lane % 4);
        if (column >= task.v_head_dim) continue;
        const float* const o = out + 8 * m + 2 * h;
        const float x[4] = {o[0] * factor, o[4] * factor, o[1] * factor, o[5] * factor};
        if (task.out_type == Fp8Out::fp32)
          *reinterpret_cast<float4*>(static_cast<float*>(task.out) + first + column) = {x[0], x[1], x[2], x[3]};
        else if (task.out_type == Fp8Out::bf16)
          *reinterpret_cast<uint2*>(static_cast<uint16_t*>(task.out) + first + column) = {ptx::pack2<Bf16>(x[0], x[1]),
                                                                                          ptx::pack2<Bf16>(x[2], x[3])};
        else
          *reinterpret_cast<uint2*>(static_cast<uint16_t*>(task.out) + first + column) = {ptx::pack2<Half>(x[0], x[1]),
                                                                                          ptx::pack2<Half>(x[2], x[3])};
      }
      if (lane % 4 == 0) {
        const int64_t at = (int64_t(tile.at.batch) * task.q_heads + tile.at.head) * task.q_len + r;
        const float lse = (soft.max[h] + ptx::log2(sum) - soft.kHeadroom) * float(ln_2);
        write_row(task, at, soft.max[h], inverse * 256.f, lse);
      }
    }
  }
};

// grid: the tiles of 128 rows
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sm90_fp8_forward(const __grid_constant__ Sm90Fp8Maps maps, const __grid_constant__ Fp8Task task) {
  unsigned char* base = ptx::dynamic_smem();
  const uint32_t smem = ptx::smem_addr(base);
  const Sm90Fp8Barriers<Shape> barriers(smem + Shape::kBarriersAt);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  const Fp8Tile tile = Fp8Tile::of<Shape>(task, blockIdx.x);
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Shape::kProducerRegisters>();
    const int warp = ptx::uniform(threadIdx.x / 32);
    if (warp > 0)
      Sm90Fp8Turn<Shape>::run(smem, base, barriers, tile.tiles.count(), warp - 1, threadIdx.x % 32);
    else if (threadIdx.x == 0)
      sm90_fp8_produce<Shape>(smem, barriers, maps, task, tile);
  } else {
    ptx::setmaxnreg_inc<Shape::kConsumerRegisters>();
    Sm90Fp8Consumer<Shape>(smem, base, barriers, task, tile).run();
  }
}

}  // namespace attnjourney
