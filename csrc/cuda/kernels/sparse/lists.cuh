// Where the gradients of keys and values are added up: which rows name a key, in their order, so that the sums are the
// same bits every time. Rows are taken in parts, as many as a workspace holds. Of a part, each key has one bit a row
// (a unit: a row of indices of one batch item and, where heads have their own, of one head); counted along the keys,
// the bits say where what a pair adds goes (key_gradient.cuh) and what a key's sum is over (key_sums.cuh).
#pragma once
#include "task.cuh"

namespace attnjourney {

struct SparseLists {
  int first, rows;    // of indices, of this part
  int words;          // of 32 rows each
  int index_heads;    // 1, or kv_heads
  uint32_t* masks;    // [batch][index_heads][kv_len][words], zeros to begin with
  uint32_t* repeats;  // [batch][index_heads][words], zeros to begin with: rows that name some key twice
  int* begins;        // [batch][index_heads][kv_len * words + 1]: pairs before a word's
  int* totals;        // [batch][index_heads][blocks of the count]
  __device__ __forceinline__ int64_t size(const SparseTask& t) const { return t.params.kv_len * words; }
  __device__ __forceinline__ int64_t list(int batch, int head) const {
    return int64_t{batch} * index_heads + (index_heads > 1 ? head : 0);
  }
  // Where the pair of a row of the part and a key lies among the list's.
  __device__ __forceinline__ int64_t place(const SparseTask& t, int64_t list_, int row, int key) const {
    const int64_t word = int64_t{key} * words + row / 32;
    const uint32_t before = masks[list_ * size(t) + word] & ((1u << row % 32) - 1);
    return begins[list_ * (size(t) + 1) + word] + ptx::count_bits(before);
  }
};

constexpr int kListThreads = 256, kListWords = 4 * kListThreads;  // of a block of the count

inline int64_t sparse_mark_blocks(const SparseTask& t, const SparseLists& l) {
  return (int64_t{l.rows} * t.params.index_count + kListThreads - 1) / kListThreads * t.batch * l.index_heads;
}
inline int64_t sparse_count_blocks(const SparseTask& t, const SparseLists& l) {  // of one list
  return (t.params.kv_len * l.words + kListWords - 1) / kListWords;
}

// grid: sparse_mark_blocks
template <class Lists>
__global__ void __launch_bounds__(kListThreads)
    sparse_mark(const __grid_constant__ SparseTask task, const __grid_constant__ Lists lists) {
  const int64_t pairs = int64_t{lists.rows} * task.params.index_count;
  const auto blocks = static_cast<int>((pairs + kListThreads - 1) / kListThreads);
  const int list = blockIdx.x / blocks;
  const int64_t pair = int64_t{blockIdx.x % blocks} * kListThreads + threadIdx.x;
  if (pair >= pairs) return;
  const auto row = static_cast<int>(pair / task.params.index_count),
             slot = static_cast<int>(pair % task.params.index_count);
  const SparseUnit unit(task, list / lists.index_heads, list % lists.index_heads, lists.first + row);
  const int key = unit.name(task, slot);
  if (key < 0) return;
  const uint32_t bit = 1u << row % 32;
  const uint32_t before =
      ptx::atomic_or(lists.masks + list * lists.size(task) + int64_t{key} * lists.words + row / 32, bit);
  if (before & bit) ptx::atomic_or(lists.repeats + int64_t{list} * lists.words + row / 32, bit);
}

// The sum over the block, and what threads before this one have.
struct BlockCount {
  int before, total;
  __device__ __forceinline__ BlockCount(int own, int* parts) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int sum = own;
#pragma unroll
    for (int w = 1; w < 32; w *= 2) {
      const int other = static_cast<int>(ptx::shfl(static_cast<uint32_t>(sum), max(lane - w, 0)));
      if (lane >= w) sum += other;
    }
    if (lane == 31) parts[warp] = sum;
    __syncthreads();
    before = sum - own, total = 0;
    for (int w = 0; w < kListThreads / 32; w++) {
      if (w < warp) before += parts[w];
      total += parts[w];
    }
    __syncthreads();  // @parts_read
  }
};

// The bits of four words of a thread.
struct ListWords {
  int count[4];
  __device__ __forceinline__ ListWords(const uint32_t* masks, int64_t first, int64_t size) {
#pragma unroll
    for (int i = 0; i < 4; i++) count[i] = first + i < size ? ptx::count_bits(masks[first + i]) : 0;
  }
  __device__ __forceinline__ int all() const { return count[0] + count[1] + count[2] + count[3]; }
};

// grid of both: sparse_count_blocks of every list; shared memory: kListThreads / 32 ints
template <class Lists>
__global__ void __launch_bounds__(kListThreads)
    sparse_count(const __grid_constant__ SparseTask task, const __grid_constant__ Lists lists) {
  const int64_t size = lists.size(task);
  const auto blocks = static_cast<int>((size + kListWords - 1) / kListWords);
  const int list = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const ListWords words(lists.masks + list * size, int64_t{block} * kListWords + 4 * threadIdx.x, size);
  const BlockCount count(words.all(), reinterpret_cast<int*>(ptx::dynamic_smem()));
  if (threadIdx.x == 0) lists.totals[blockIdx.x] = count.total;
}
template <class Lists>
__global__ void __launch_bounds__(kListThreads)
    sparse_places(const __grid_constant__ SparseTask task, const __grid_constant__ Lists lists) {
  int* const parts = reinterpret_cast<int*>(ptx::dynamic_smem());
  const int64_t size = lists.size(task);
  const auto blocks = static_cast<int>((size + kListWords - 1) / kListWords);
  const int list = blockIdx.x / blocks, block = blockIdx.x % blocks;
  int earlier = 0;
  for (int b = threadIdx.x; b < block; b += kListThreads) earlier += lists.totals[int64_t{list} * blocks + b];
  const int base = BlockCount(earlier, parts).total;
  const int64_t first = int64_t{block} * kListWords + 4 * threadIdx.x;
  const ListWords words(lists.masks + list * size, first, size);
  int at = base + BlockCount(words.all(), parts).before;
  int* const begins = lists.begins + list * (size + 1);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (first + i < size) begins[first + i] = at;
    at += words.count[i];
    if (first + i == size - 1) begins[size] = at;
  }
}

}  // namespace attnjourney
