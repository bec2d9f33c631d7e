// The lightning indexer: the keys of the highest scores for each row, without all scores of a row at a time. A block
// takes Rows rows of query and a part of their keys, walks those in tiles, and keeps a list (topk_list.cuh) for each
// row; indexer_select takes the highest of all parts. Proofs: tests/emulator/test_indexer.py.
#pragma once
#include "fma_tiles.cuh"
#include "mma_tiles.cuh"
#include "topk_list.cuh"

namespace attnjourney {

struct TopkTask {
  IndexerParams params;
  const void *query, *key;  // [batch, heads, q_len, head_dim], [batch, kv_len, head_dim], the last dimension dense
  Strides q, k;             // k.head: 0
  const void* weights;      // [batch, heads, q_len] in the type of the arithmetic, dense
  const int* key_lengths;   // [batch] or null
  int batch;
  int first_row, rows;              // of each batch item, of this launch
  int parts, part_keys;             // the keys are split over blocks
  int capacity;                     // of a list
  void* list_scores;                // [batch][rows][parts][capacity]
  int *list_indices, *list_counts;  // counts: [batch][rows][parts]
  int* indices;                     // [batch][q_len][topk]
  void* scores;
  template <class Real>
  __device__ __forceinline__ TopkList<Real> list(int item, int row, int part) const {
    const int64_t at = ((int64_t{item} * rows + row) * parts + part) * capacity;
    return {static_cast<Real*>(list_scores) + at, list_indices + at, capacity,
            static_cast<int>(params.topk < params.kv_len ? params.topk : params.kv_len)};
  }
  __device__ __forceinline__ int& count(int item, int row, int part) const {
    return list_counts[(int64_t{item} * rows + row) * parts + part];
  }
  __device__ __forceinline__ int length(int item) const {
    const auto length = static_cast<int>(params.kv_len);
    return key_lengths ? max(0, min(length, key_lengths[item])) : length;
  }
};

// weight * relu(x); a NaN stays
template <class Real>
__device__ __forceinline__ Real weighed(Real weight, Real x) {
  return weight * (x <= Real(0) ? Real(0) : x);
}

// 16-bit numbers in whole chunks: a warp has one row and 32 keys of a tile, which it holds in registers while it goes
// over the heads, 16 at a time. D: columns, 64 or 128.
template <class T_, int D, int Rows, int Warps>
struct TopkMma {
  using T = T_;
  using Real = float;
  using Math = SparseMma<T, Warps>;
  using Tile = typename Math::template Tile<D>;
  static constexpr int kRows = Rows, kThreads = 32 * Warps, kShare = Warps / Rows, kKeys = 32 * kShare;
  static_assert(Warps % Rows == 0);
  static constexpr __host__ __device__ int padded(int heads) { return (heads + 15) / 16 * 16; }
  static constexpr __host__ __device__ int smem_bytes(int heads, int) {
    return Tile::bytes(Rows * padded(heads) + 2 * kKeys, D) + Rows * (padded(heads) + 2 * kKeys) * 4;
  }

  static __device__ __forceinline__ void run(const TopkTask& task) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int heads = static_cast<int>(task.params.heads), dim = static_cast<int>(task.params.head_dim);
    const int row_tiles = (task.rows + Rows - 1) / Rows, part = blockIdx.x % task.parts;
    const int number = blockIdx.x / task.parts, item = number / row_tiles, row0 = number % row_tiles * Rows;
    const int all = padded(heads);
    unsigned char* const smem = ptx::dynamic_smem();
    const Tile queries(smem, dim);
    float* const weights = reinterpret_cast<float*>(smem + Tile::bytes(Rows * all + 2 * kKeys, D));
    float* const scores = weights + Rows * all;
    const auto keys_of = [&](int stage) { return Tile(smem + Tile::bytes(Rows * all + stage * kKeys, D), dim); };

    const int own = warp / kShare, row = task.first_row + row0 + own, length = task.length(item);
    const bool there = row0 + own < task.rows;
    const int end = min(static_cast<int>(task.params.limit(min(row0 + Rows, task.rows) - 1 + task.first_row, length)),
                        (part + 1) * task.part_keys);
    const int limit = there ? min(static_cast<int>(task.params.limit(row, length)), end) : 0;
    const T* const key = static_cast<const T*>(task.key) + item * task.k.batch;
    const auto start = [&](int first, int stage) {
      const Tile to = keys_of(stage);
      for (int i = warp; i < kKeys; i += Warps) {
        const bool valid = first + i < end;
        to.load(i, key + (valid ? (first + i) * task.k.row : 0), valid, dim);
      }
      ptx::cp_async_commit();
    };
    for (int i = warp; i < Rows * all; i += Warps) {
      const int r = i / all, h = i % all;
      const bool valid = h < heads && row0 + r < task.rows;
      const int64_t at = valid ? task.first_row + row0 + r : 0, head = valid ? h : 0;
      queries.load(i, static_cast<const T*>(task.query) + item * task.q.batch + head * task.q.head + at * task.q.row,
                   valid, dim);
      if (lane == 0)
        weights[i] =
            valid ? static_cast<const float*>(task.weights)[(int64_t{item} * heads + head) * task.params.q_len + at]
                  : 0.f;
    }
    ptx::cp_async_commit();
    int first = part * task.part_keys;
    if (first < end) start(first, 0);
    TopkList<float> list = task.list<float>(item, there ? row0 + own : 0, part);
    const float scale = static_cast<float>(task.params.scale);
    for (int stage = 0; first < end; first += kKeys, stage ^= 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // @keys_landed: with queries and weights; every warp is past the keys before
      if (first + kKeys < end) start(first + kKeys, stage ^ 1);
      float* const to = scores + (stage * Rows + own) * kKeys;
      row_scores(queries, keys_of(stage), weights + own * all, own * all, heads, dim, scale, warp % kShare * 32, to);
      __syncthreads();  // @scores_there
      if (warp % kShare == 0)
#pragma unroll 1
        for (int i = lane; i < kKeys; i += 32) list.add(to[i], first + i, first + i < limit);
    }
    ptx::cp_async_wait<0>();
    if (warp % kShare == 0 && there) {
      list.cut();
      if (lane == 0) task.count(item, row0 + own, part) = list.count;
    }
  }

  static __device__ __forceinline__ void row_scores(const Tile& queries, const Tile& keys, const float* weights,
                                                    int row0, int heads, int dim, float scale, int key0, float* to) {
    const int lane = threadIdx.x % 32;
    uint32_t y[D / 32][4][4];
#pragma unroll
    for (int k = 0; k < D / 32; k++) {
      if (k * 32 >= dim) break;
#pragma unroll
      for (int j = 0; j < 4; j++) ptx::ldmatrix_x4(y[k][j], keys.chunk(key0 + j * 8 + lane % 8, k * 4 + lane / 8));
    }
    float sum[4][2] = {};
#pragma unroll 1
    for (int h = 0; h < heads; h += 16) {
      float product[4][4] = {};
#pragma unroll
      for (int k = 0; k < D / 32; k++) {
        if (k * 32 >= dim) break;
        uint32_t x[2][4];
        ptx::ldmatrix_x4(x[0], queries.chunk(row0 + h + lane % 16, k * 4 + lane / 16));
        ptx::ldmatrix_x4(x[1], queries.chunk(row0 + h + lane % 16, k * 4 + 2 + lane / 16));
#pragma unroll
        for (int j = 0; j < 4; j++) {
          ptx::mma_m16n8k16<T>(product[j], x[0], y[k][j][0], y[k][j][1]);
          ptx::mma_m16n8k16<T>(product[j], x[1], y[k][j][2], y[k][j][3]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int head = h + lane / 4 + 8 * i;
        if (head >= heads) break;  // a NaN in a key is that of heads that are there
        const float weight = weights[head];
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j / 2][j % 2] += weighed(weight, product[j / 2][2 * i + j % 2] * scale);
      }
    }
#pragma unroll
    for (int w = 4; w < 32; w *= 2)
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j / 2][j % 2] += ptx::shfl_xor(sum[j / 2][j % 2], w);
    if (lane >= 4) return;
#pragma unroll
    for (int j = 0; j < 4; j++) *reinterpret_cast<float2*>(to + key0 + j * 8 + lane * 2) = float2{sum[j][0], sum[j][1]};
  }
};

// All others, one row a block.
template <class T_>
struct TopkFma {
  using T = T_;
  using Math = SparseFma<T>;
  using Real = typename Math::Real;
  static constexpr int kSize = Math::kSize, kRows = 1, kKeys = kSize, kThreads = Math::kThreads,
                       kPitch = Math::template kPitch<kSize>;
  using Tile = typename Math::template Tile<256>;
  static constexpr __host__ __device__ int smem_bytes(int, int head_dim) {
    return 2 * Tile::bytes(kSize, head_dim) + kSize * (kPitch + 2) * static_cast<int>(sizeof(Real));
  }

  static __device__ __forceinline__ void run(const TopkTask& task) {
    const int tid = threadIdx.x, warp = tid / 32;
    const int heads = static_cast<int>(task.params.heads), dim = static_cast<int>(task.params.head_dim);
    const int part = blockIdx.x % task.parts, number = blockIdx.x / task.parts;
    const int item = number / task.rows, own = number % task.rows, row = task.first_row + own;
    unsigned char* const smem = ptx::dynamic_smem();
    const Tile queries(smem, dim), keys(smem + Tile::bytes(kSize, dim), dim);
    Real* const products = reinterpret_cast<Real*>(smem + 2 * Tile::bytes(kSize, dim));
    Real *const weights = products + kSize * kPitch, *const scores = weights + kSize;
    const int limit = min(static_cast<int>(task.params.limit(row, task.length(item))), (part + 1) * task.part_keys);
    const T* const key = static_cast<const T*>(task.key) + item * task.k.batch;
    const T* const query = static_cast<const T*>(task.query) + item * task.q.batch + row * task.q.row;
    const Real* const weight = static_cast<const Real*>(task.weights) + int64_t{item} * heads * task.params.q_len + row;
    const auto scale = static_cast<Real>(task.params.scale);
    TopkList<Real> list = task.list<Real>(item, own, part);
    for (int first = part * task.part_keys; first < limit; first += kSize) {
      Real sum = 0;  // of key tid
      for (int h = 0; h < heads; h += kSize) {
        __syncthreads();  // @products_read: and tiles
        for (int i = warp; i < kSize; i += Math::kWarps) {
          const bool valid = h + i < heads, seen = first + i < limit;
          queries.load(i, query + (valid ? (h + i) * task.q.head : 0), valid, dim);
          if (h == 0) keys.load(i, key + (seen ? (first + i) * task.k.row : 0), seen, dim);
          if (tid % 32 == 0) weights[i] = valid ? weight[(h + i) * task.params.q_len] : Real(0);
        }
        __syncthreads();  // @tiles_there
        Math::template products<kSize, kSize, 0>(products, queries, keys, dim);
        __syncthreads();  // @products_there
        if (tid < kSize)
          for (int i = 0; i < kSize && h + i < heads; i++)
            sum += weighed(weights[i], products[i * kPitch + tid] * scale);
      }
      if (tid < kSize) scores[tid] = sum;
      if (warp > 0) continue;
      __syncwarp();
      list.add(tid < kSize ? scores[tid] : Real(0), first + tid, tid < kSize && first + tid < limit);
    }
    if (warp > 0) return;
    list.cut();
    if (tid == 0) task.count(item, own, part) = list.count;
  }
};

// grid: [batch][tiles of rows][parts]
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) indexer_parts(const __grid_constant__ TopkTask task) {
  Kernel::run(task);
}

// The highest scores of all parts of a row. grid: [batch][rows]; shared memory: an int for each warp
constexpr int kSelectThreads = 128;
template <class Real>
__global__ void __launch_bounds__(kSelectThreads) indexer_select(const __grid_constant__ TopkTask task) {
  using Rank = typename ScoreRank<Real>::Rank;
  const ListBlock<kSelectThreads / 32> block{reinterpret_cast<int*>(ptx::dynamic_smem())};
  const int item = blockIdx.x / task.rows, own = blockIdx.x % task.rows, tid = threadIdx.x;
  const int64_t to = (int64_t{item} * task.params.q_len + task.first_row + own) * task.params.topk;
  int* const indices = task.indices + to;
  Real* const scores = static_cast<Real*>(task.scores) + to;
  int total = 0;
  for (int p = 0; p < task.parts; p++) total += task.count(item, own, p);
  const TopkList<Real> lists = task.list<Real>(item, own, 0);
  Rank last = 0;
  int left = lists.topk, kept = 0;
  if (total > left)
    last = last_rank<Real>(block, left, [&](auto&& f) {
      for (int p = 0; p < task.parts; p++)
        for (int i = tid; i < task.count(item, own, p); i += kSelectThreads)
          f(lists.scores[int64_t{p} * task.capacity + i]);
    });
  for (int p = 0; p < task.parts; p++) {
    const int count = task.count(item, own, p);
    const Real* const from = lists.scores + int64_t{p} * task.capacity;
    for (int first = 0; first < count; first += kSelectThreads) {
      const int i = first + tid;
      const Real score = i < count ? from[i] : Real(0);
      const Rank rank = ScoreRank<Real>::of(score);
      const bool same = i < count && rank == last;
      int equal, keeps;
      const int earlier = block.before(same, equal);
      const bool keep = i < count && (rank > last || (same && earlier < left));
      left -= min(equal, left);
      const int at = kept + block.before(keep, keeps);
      if (keep) scores[at] = score, indices[at] = lists.indices[int64_t{p} * task.capacity + i];
      kept += keeps;
    }
  }
  for (int64_t i = kept + tid; i < task.params.topk; i += kSelectThreads) scores[i] = -Real(INFINITY), indices[i] = -1;
}

}  // namespace attnjourney
