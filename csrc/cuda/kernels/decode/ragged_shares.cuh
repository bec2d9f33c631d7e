// How blocks share out the keys of all sequences of a call, whose lengths only the device knows: groups of blocks, one
// block for each tile of rows, have equal shares of all tiles of keys, one sequence behind the other. A sequence whose
// keys belong to several groups is cut, and ragged_merge.cuh joins its parts; where whole sequences are as good, none
// is. Every block counts for itself. Proofs: tests/emulator/test_ragged.py.
#pragma once
#include "decode_task.cuh"

namespace attnjourney {

// In the time of a tile: what a sequence takes beside its tiles; what cutting costs a call, by writing and joining
// parts; a share that is worth a block.
constexpr int kRaggedBegin = 1, kRaggedCut = 5, kRaggedShare = 2;
constexpr int kRaggedThreads = 384;  // there are at most as many groups

// Before tile `tile` of sequence `batch`.
struct RaggedCut {
  int batch, tile;
};
// What group `group` has: from `begin` to `end`.
struct RaggedShare {
  int group;
  RaggedCut begin, end;
};

struct RaggedPlan {
  int64_t all;      // of tiles and begins
  int groups;       // that have work
  int each, batch;  // each: sequences of a group, 0: they are cut
  // most: all of a group, where none is cut
  __device__ __forceinline__ RaggedPlan(int64_t all_, int64_t most, int given, int sequences)
      : all(all_), groups(given), each((sequences + given - 1) / given), batch(sequences) {
    const int64_t worth = all / kRaggedShare;
    if (worth < groups) groups = worth > 1 ? static_cast<int>(worth) : 1;
    if (most > (all + groups - 1) / groups + kRaggedCut) each = 0;
    if (each) groups = given;
  }
  __device__ __forceinline__ int64_t begin_of(int group) const { return group < groups ? all * group / groups : all; }
  __device__ __forceinline__ RaggedCut whole_cut(int group) const { return {min(group * each, batch), 0}; }
  // at `at` of what a sequence takes, its begin first
  static __device__ __forceinline__ RaggedCut cut(int sequence, int at) {
    return {sequence, max(at - kRaggedBegin, 0)};
  }
};

template <int Keys>
__device__ __forceinline__ int ragged_tiles(const DecodeTask& task, int batch) {
  return (decode_sequence<false>(task, batch).total + Keys - 1) / Keys;
}

// A block of kRaggedThreads threads. room: 2 * (its warps + 2) numbers of shared memory.
template <int Keys>
__device__ __forceinline__ RaggedShare ragged_share(const DecodeTask& task, int group, int* room) {
  constexpr int kWarps = kRaggedThreads / 32;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int chunk = (task.batch + kRaggedThreads - 1) / kRaggedThreads;  // sequences of a thread
  const auto sum_of = [&](int first, int count) {
    int sum = 0;
    for (int b = first; b < min(first + count, task.batch); b++) sum += ragged_tiles<Keys>(task, b) + kRaggedBegin;
    return sum;
  };
  const int own = sum_of(thread * chunk, chunk), each = (task.batch + task.splits - 1) / task.splits;
  int most = thread < task.splits ? sum_of(thread * each, each) : 0, before = own;
#pragma unroll
  for (int w = 1; w < 32; w *= 2) {
    const int other = static_cast<int>(ptx::shfl(static_cast<uint32_t>(before), lane - w & 31));
    if (lane >= w) before += other;
    most = max(most, static_cast<int>(ptx::shfl_xor(static_cast<uint32_t>(most), w)));
  }
  if (lane == 31) room[warp] = before, room[kWarps + warp] = most;
  __syncthreads();  // @sums_there
  before -= own;
  int64_t all = 0;
  for (int w = 0; w < kWarps; w++) {
    if (w < warp) before += room[w];
    all += room[w];
    most = max(most, room[kWarps + w]);
  }
  const RaggedPlan plan(all, most, task.splits, task.batch);
  if (plan.each) return {group, plan.whole_cut(group), plan.whole_cut(group + 1)};
  int* const cuts = room + 2 * kWarps;
  for (int k = 0; k < 2; k++) {
    int64_t at = plan.begin_of(group + k) - before;
    if (at < 0 || at >= own) continue;  // another thread's
    int b = thread * chunk;
    for (int here; here = ragged_tiles<Keys>(task, b) + kRaggedBegin, at >= here; b++) at -= here;
    const RaggedCut cut = RaggedPlan::cut(b, static_cast<int>(at));
    cuts[2 * k] = cut.batch, cuts[2 * k + 1] = cut.tile;
  }
  __syncthreads();  // @cuts_there
  const auto cut = [&](int k) {
    return plan.begin_of(group + k) < all ? RaggedCut{cuts[2 * k], cuts[2 * k + 1]} : RaggedCut{task.batch, 0};
  };
  return {group, cut(0), cut(1)};
}

// Tiles [first, last) of a sequence that a group has, if it has `any` of it. slot: of a cut sequence, where the part
// goes, less than 0: it is whole.
struct RaggedPart {
  int first, last, slot;
  bool any, ends;
  __device__ __forceinline__ RaggedPart(const RaggedShare& share, int batch, int tiles) {
    const bool stops = batch == share.end.batch;  // in front of the end, if not at it
    first = batch == share.begin.batch ? share.begin.tile : 0, last = stops ? share.end.tile : tiles;
    any = stops ? first < last : first < last || tiles == 0;
    ends = last == tiles;
    slot = first == 0 && ends ? -1 : 2 * share.group + (batch != share.begin.batch);
  }
  // by one thread: where ragged_merge finds the parts of sequence `batch`
  __device__ __forceinline__ void note(const DecodeTask& task, const RaggedShare& share, int batch) const {
    if (first == 0) task.shares[2 * batch] = slot;
    if (ends) task.shares[2 * batch + 1] = share.group;
  }
};

}  // namespace attnjourney
