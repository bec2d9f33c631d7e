// The keys of the highest scores of a row: a list in which they are in the order in which they came, which is that of
// the keys. Scores that cannot be among the `topk` highest any more are not taken; a list that is full is cut to
// `topk`.
#pragma once
#include "task.cuh"

namespace attnjourney {

// The order of scores as whole numbers from 1 on. A NaN is as high as inf, so that it shows.
template <class Real>
struct ScoreRank {
  using Rank = std::conditional_t<sizeof(Real) == 8, uint64_t, uint32_t>;
  static constexpr int kBits = 8 * sizeof(Rank);
  static __device__ __forceinline__ Rank of(Real score) {
    const Real x = score == score ? score + Real(0) : Real(INFINITY);  // -0 becomes 0
    const Rank bits = __builtin_bit_cast(Rank, x), sign = Rank(1) << (kBits - 1);
    return bits & sign ? ~bits : bits | sign;
  }
};

// One warp that works on a list, and what a block of several needs instead.
struct ListWarp {
  static constexpr int kThreads = 32;
  __device__ __forceinline__ int thread() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int sum(int own) const {
#pragma unroll
    for (int w = 16; w > 0; w /= 2) own += static_cast<int>(ptx::shfl_xor(static_cast<uint32_t>(own), w));
    return own;
  }
  // how many threads before this one have it; total: of all
  __device__ __forceinline__ int before(bool own, int& total) const {
    const uint32_t bits = ptx::ballot(own);
    total = ptx::count_bits(bits);
    return ptx::count_bits(bits & ((1u << thread()) - 1));
  }
};
template <int Warps>
struct ListBlock {
  static constexpr int kThreads = 32 * Warps;
  int* parts;  // shared memory, Warps of them
  __device__ __forceinline__ int thread() const { return threadIdx.x; }
  __device__ __forceinline__ int of_warps(int of_warp, int& total) const {
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) parts[warp] = of_warp;
    __syncthreads();
    int earlier = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < Warps; w++) {
      if (w < warp) earlier += parts[w];
      total += parts[w];
    }
    __syncthreads();  // @list_parts_read
    return earlier;
  }
  __device__ __forceinline__ int sum(int own) const {
    int total;
    of_warps(ListWarp().sum(own), total);
    return total;
  }
  __device__ __forceinline__ int before(bool own, int& total) const {
    int of_warp;
    const int inside = ListWarp().before(own, of_warp);
    return inside + of_warps(of_warp, total);
  }
};

// The rank of the `left`-th highest score, and of those that have it how many, the first ones, are among the highest.
// each(f): f(score) for all scores of this thread.
template <class Real, class Group, class Each>
__device__ __forceinline__ typename ScoreRank<Real>::Rank last_rank(const Group& group, int& left, Each&& each) {
  using Rank = typename ScoreRank<Real>::Rank;
  Rank found = 0;
#pragma unroll 1
  for (int shift = ScoreRank<Real>::kBits - 2; shift >= 0; shift -= 2) {
    int count[3] = {};  // of digits 1, 2, 3
    each([&](Real score) {
      const Rank above = (ScoreRank<Real>::of(score) >> shift) - (found >> shift);
#pragma unroll
      for (int d = 0; d < 3; d++) count[d] += above == Rank(d + 1);
    });
    Rank digit = 0;
#pragma unroll
    for (int d = 2; d >= 0; d--) {
      const int all = group.sum(count[d]);
      if (digit) continue;
      if (all >= left)
        digit = Rank(d + 1);
      else
        left -= all;
    }
    found |= digit << shift;
  }
  return found;
}

template <class Real>
struct TopkList {
  using Rank = typename ScoreRank<Real>::Rank;
  Real* scores;  // [capacity], at least topk + 32
  int* indices;
  int capacity, topk, count = 0;
  Rank above = 0;  // what is taken is of a higher rank

  // A key of each lane of a warp, later ones than before.
  __device__ __forceinline__ void add(Real score, int key, bool there) {
    if (count > capacity - 32) cut();
    int taken;
    const bool takes = there && ScoreRank<Real>::of(score) > above;
    const int at = count + ListWarp().before(takes, taken);
    if (takes) scores[at] = score, indices[at] = key;
    count += taken;
  }
  __device__ __forceinline__ void cut() {
    if (count <= topk) return;
    const ListWarp warp;
    __syncwarp();
    int left = topk, kept = 0;
    const Rank last = last_rank<Real>(warp, left, [&](auto&& f) {
      for (int i = warp.thread(); i < count; i += 32) f(scores[i]);
    });
    for (int first = 0; first < count; first += 32) {
      const int i = first + warp.thread();
      const Real score = i < count ? scores[i] : Real(0);
      const int key = i < count ? indices[i] : 0;
      const Rank rank = ScoreRank<Real>::of(score);
      int equal, keeps;
      const bool same = i < count && rank == last;
      const bool keep = (i < count && rank > last) | (warp.before(same, equal) < left & same);
      left -= min(equal, left);
      const int at = kept + warp.before(keep, keeps);
      if (keep) scores[at] = score, indices[at] = key;
      kept += keeps;
      __syncwarp();
    }
    above = last, count = topk;
  }
};

}  // namespace attnjourney
