// The derivative of attention's backward in a direction (backward_jvp_task.cuh), with all options, on mma.sync. One
// kernel for every gradient and head dimension; a launch computes that of query, of key or of value, without atomics. A
// block has 64 rows of its own, of Q or K, and walks over the tiles of the other side: six products for the scores and
// their changes, in slices of the columns, 128 bytes a row, and two for its part of the columns of the gradient. K and
// V have two launches and wide heads several blocks, which do the products for scores again: in exchange one
// accumulator fits every size, and one kernel a dtype is all that is built. Each slice is on its way while the one
// before is multiplied; those of the own tile stay where there is place for all of them.
#pragma once
#include "backward_jvp_task.cuh"
#include "slope_sum.cuh"

namespace attnjourney {

// The two sides of a product in shared memory. Math: the products of a dtype T, summed in Real, of 64 own rows, four
// warps of 16, with kOthers of the other side:
//   Scores, Columns                     of a warp: products with the other rows, sums over them for one slice
//   Exact                               what sums of products q . k are besides, to have the forward's bits
//   at(row, chunk)                      where 16 bytes of a tile lie
//   add_exact(s, exact, own, other, row0, slice, last, lane), add(s, own, other, row0, lane)    s += own other^T
//   sum(d, weights, other, hides, flags, turn, lane)                                            d += weights other
template <class Math>
struct BackwardJvpTiles : Math {
  using Math::kOthers;
  using typename Math::T, typename Math::Real, typename Math::Scores, typename Math::Exact;
  using Task = BackwardJvpTaskOf<Real>;
  static constexpr int kOwn = kOwnRows, kThreads = 128, kWarps = 4, kChunk = 16 / sizeof(T), kColumns = 8 * kChunk;
  static constexpr int kOwnBytes = kOwn * 128, kOtherBytes = kOthers * 128;  // of a slice of one tensor
  static constexpr int kOwnPlace = 4 * kOwnBytes, kOtherPlace = 4 * kOtherBytes;

  struct Products {
    Scores s = {}, move = {}, grad = {}, grad_change = {};
    Exact exact = {};
  };
  // rows of one side
  struct Place {
    int side, batch, head, begin, first, rows;  // side: as BackwardJvpTaskOf::operands; first: of the tile, of `rows`
  };

  // Starts the copy of columns [slice * kColumns, ..) of a tile of Count rows, operand `which` of its side.
  template <int Count>
  static __device__ __forceinline__ void load(unsigned char* to, const Task& p, const Place& from, int which,
                                              int slice) {
    const Operand& x = p.operands[from.side][which];
    const int left = (which < 2 ? p.head_dim : p.v_head_dim) - slice * kColumns;
    if (!x.data || left <= 0) return;
    const T* base = static_cast<const T*>(x.data) + from.batch * x.strides.batch + from.head * x.strides.head +
                    from.begin * x.strides.row + slice * kColumns;
    const int tid = ptx::opaque(threadIdx.x);
    const uint32_t tile = ptx::smem_addr(to);
#pragma unroll
    for (int i = 0; i < Count * 8 / kThreads; i++) {
      const int c = i * kThreads + tid, row = c / 8, chunk = c % 8;
      const bool valid = from.first + row < from.rows && chunk * kChunk < left;
      ptx::cp_async_16(tile + Math::at(row, chunk),
                       base + (valid ? (from.first + row) * x.strides.row + chunk * kChunk : 0), valid);
    }
  }
  template <int Count>
  static __device__ __forceinline__ void load_all(unsigned char* to, const Task& p, const Place& from, int slice,
                                                  int begin = 0, int end = 4) {
#pragma unroll 1
    for (int which = begin; which < end; which++) load<Count>(to + which * Count * 128, p, from, which, slice);
  }

  // The products of one slice. row0: the warp's first row.
  static __device__ __forceinline__ void multiply(Products& x, const Task& p, const unsigned char* own,
                                                  const unsigned char* other, int side, int slice, int row0, int lane) {
    const auto is_there = [&](int side_, int which) { return p.operands[side_][which].data != nullptr; };
    if (slice * kColumns < p.head_dim) {
      Math::add_exact(x.s, x.exact, own, other, row0, slice, (slice + 1) * kColumns >= p.head_dim, lane);
      if (is_there(side, 1)) Math::add(x.move, own + kOwnBytes, other, row0, lane);
      if (is_there(side ^ 1, 1)) Math::add(x.move, own, other + kOtherBytes, row0, lane);
    }
    if (p.gradient == Gradient::value || slice * kColumns >= p.v_head_dim) return;
    own += 2 * kOwnBytes, other += 2 * kOtherBytes;
    Math::add(x.grad, own, other, row0, lane);
    if (is_there(side, 3)) Math::add(x.grad_change, own + kOwnBytes, other, row0, lane);
    if (is_there(side ^ 1, 3)) Math::add(x.grad_change, own, other + kOtherBytes, row0, lane);
  }
};

template <class Math>
struct BackwardJvp : BackwardJvpTiles<Math> {
  using Tiles = BackwardJvpTiles<Math>;
  using Math::kOthers, Math::kSumSlices, Tiles::kOwn, Tiles::kThreads, Tiles::kWarps, Tiles::kColumns;
  using Tiles::kOwnPlace, Tiles::kOtherPlace;
  using typename Math::T, typename Math::Real, typename Math::Scores, typename Tiles::Task, typename Tiles::Place;
  using typename Tiles::Products;
  using Fragment = OwnFragment<kOthers>;
  using Window = TileWindow<kThreads>;
  using Change = RowChange<Real>;
  using Sums = typename Math::Columns[kSumSlices];
  using Work = OwnWork<kOwn, kOthers>;
  static constexpr int kChanges = kOwn > 2 * kOthers ? kOwn : 2 * kOthers;  // rows: own ones, or of two tiles
  static constexpr int kChangeBytes = kChanges * static_cast<int>(sizeof(Change)), kFlagBytes = 2 * kWarps * 4;
  static constexpr int kFlagsAt = kChangeBytes, kPartsAt = kFlagsAt + kFlagBytes;
  static constexpr int kWindowAt = kPartsAt + kWarps * static_cast<int>(sizeof(Real));
  static constexpr int kWorkAt = kWindowAt + Window::kBytes;
  static constexpr int kOtherAt = (kWorkAt + static_cast<int>(sizeof(Work)) + 127) / 128 * 128;
  static constexpr int kOwnAt = kOtherAt + 2 * kOtherPlace;
  static constexpr int smem_bytes(int own_places) { return kOwnAt + own_places * kOwnPlace; }
  static constexpr int kSmemBytes = smem_bytes(2);

  // What a block has in shared memory, at constant places: held in registers, they would spill.
  static __device__ __forceinline__ Change* changes() { return reinterpret_cast<Change*>(ptx::dynamic_smem()); }
  static __device__ __forceinline__ uint32_t* flags() {
    return reinterpret_cast<uint32_t*>(ptx::dynamic_smem() + kFlagsAt);
  }
  static __device__ __forceinline__ unsigned char* other_place(int turn) {
    return ptx::dynamic_smem() + kOtherAt + (turn & 1) * kOtherPlace;
  }
  static __device__ __forceinline__ unsigned char* own_place(int i) {
    return ptx::dynamic_smem() + kOwnAt + i * kOwnPlace;
  }

  static __device__ __forceinline__ void run(const Task& p) {
    const bool by_keys = p.by_keys(), of_values = p.gradient == Gradient::value;
    const int column_block = blockIdx.x % p.column_blocks, first_slice = column_block * kSumSlices;
    Work& work = *reinterpret_cast<Work*>(ptx::dynamic_smem() + kWorkAt);
    if (threadIdx.x == 0) work = Work(p, blockIdx.x / p.column_blocks);
    __syncthreads();  // @work_known
    const OwnTile& where = work.where;
    const Sequence& sequence = work.sequence;
    if (where.tile * kOwn >= (by_keys ? sequence.k_rows : sequence.rows)) return;
    OtherTileWalk<kOwn, kOthers, Real> walk(p, work);
    const int total = walk.end(), side = by_keys;
    void* const to = of_values ? p.grad_value : by_keys ? p.grad_key : p.grad_query;
    const int dim = of_values ? p.v_head_dim : p.head_dim;
    // slices of the other side that the gradient's columns take
    const int sums = to ? min(kSumSlices, (dim + kColumns - 1) / kColumns - first_slice) : 0;
    const bool stays = p.slices <= p.own_places;

    VisibleTile found;  // of the tile to come
    int flags_turn = 0;
    Window window{reinterpret_cast<uint32_t*>(ptx::dynamic_smem() + kWindowAt)};
    const auto next_visible = [&](int n) {
      return next_visible_tile<Fragment, kWarps>(n, found, p.scores, walk, window, flags(), flags_turn,
                                                 Fragment{by_keys});
    };
    const auto load_changes = [&](Change* to, int head, int first, int count) {
      constexpr int kPieces = sizeof(Change) / 16;
      const unsigned char* from =
          reinterpret_cast<const unsigned char*>(p.changes + scratch_row(p, where.batch, head) + first);
      for (int i = threadIdx.x; i < count * kPieces; i += kThreads) {
        const bool valid = first + i / kPieces < sequence.q_len;
        ptx::cp_async_16(ptx::smem_addr(to) + i * 16, valid ? from + i * 16 : from, valid);
      }
    };
    // Starts the copies for step `i` of a tile: of a slice for scores, or of one for sums. first: of the first tile.
    const auto load = [&](int i, bool first, int turn, int tile_turn, int head, int tile) {
      unsigned char* const other = other_place(turn);
      const Place place{side ^ 1,
                        where.batch,
                        by_keys ? head : head / p.group,
                        by_keys ? sequence.q_begin : sequence.k_begin,
                        tile * kOthers,
                        by_keys ? sequence.q_len : sequence.keys.key_length};
      if (i < p.slices) {
        Tiles::template load_all<kOthers>(other, p, place, i, 0, of_values ? 2 : 4);
        if (first || !stays) {
          const Place own{side,
                          where.batch,
                          where.head,
                          by_keys ? sequence.k_begin : sequence.q_begin,
                          where.tile * kOwn,
                          by_keys ? sequence.keys.key_length : sequence.q_len};
          Tiles::template load_all<kOwn>(own_place(stays ? i : turn & 1), p, own, i, 0, of_values ? 2 : 4);
        }
      } else {
        Tiles::template load_all<kOthers>(other, p, place, first_slice + i - p.slices, 2 * of_values,
                                          2 * of_values + 2);
      }
      if (i == 0 && (by_keys || first))
        load_changes(changes() + (by_keys ? tile_turn * kOthers : 0), by_keys ? head : where.head,
                     by_keys ? tile * kOthers : where.tile * kOwn, by_keys ? kOthers : kOwn);
      ptx::cp_async_commit();
    };

    // A round for each tile, and one before them that starts the copies for the first. Each step waits for its copies
    // and starts those of the step after.
    Sums acc = {};
    Real slope_sum = 0;
    const bool moves_other = p.operands[side ^ 1][2 * of_values + 1].data != nullptr;
    const int steps = p.slices + sums;
    int n = -1, turn = -1, tile_turn = 1;  // turns: of the places of a step, of a tile
    for (bool first = true;; tile_turn ^= 1) {
      const VisibleTile now = found;
      const int head = walk.head, tile = walk.tile, next = next_visible(n < 0 ? 0 : walk.after(n));
      Products x;
#pragma unroll 1
      for (int i = n < 0 ? steps - 1 : 0; i < steps; i++, turn++) {
        ptx::cp_async_wait<0>();  // @step_landed
        __syncthreads();          // @step_read: every warp is done with the step before
        const bool same = i + 1 < steps;
        if (same || next < total)
          load(same ? i + 1 : 0, n < 0 || (first && same), turn + 1, same ? tile_turn : tile_turn ^ 1,
               same ? head : walk.head, same ? tile : walk.tile);
        if (n < 0) continue;
        unsigned char* const other = other_place(turn);
        const int lane = ptx::opaque(threadIdx.x % 32);
        if (i < p.slices)
          Tiles::multiply(x, p, own_place(stays ? i : turn & 1), other, side, i,
                          static_cast<int>(threadIdx.x) / 32 * 16, lane);
        if (i == p.slices - 1)
          change(x, p, work, changes() + (by_keys ? tile_turn * kOthers : 0), head, tile, now.seen, slope_sum);
        if (i < p.slices) continue;
#pragma unroll 1
        for (int which = 0; which < (moves_other ? 2 : 1); which++) {
          Scores weights;
#pragma unroll
          for (int e = 0; e < Fragment::kCount; e++)
            weights[e / 4][e % 4] = which ? x.move[e / 4][e % 4] : x.s[e / 4][e % 4];
#pragma unroll
          for (int j = 0; j < kSumSlices; j++)
            if (i - p.slices == j)
              Math::sum(acc[j], weights, other + (2 * of_values + which) * Tiles::kOtherBytes, now.hides, flags(),
                        flags_turn, lane);
        }
      }
      if (n >= 0) first = false;
      if (next >= total) break;
      n = next;
    }
    ptx::cp_async_wait<0>();
    if (to) write(to, acc, p, work, first_slice, dim);
    if (p.slope_sum && !by_keys && column_block == 0) {
      const Real slope = sum_of_warps<kWarps>(slope_sum, reinterpret_cast<Real*>(ptx::dynamic_smem() + kPartsAt));
      const int slot = where.tile + (p.cu_q ? first_packed_tile(p.cu_q, kOwn, where.batch) : where.batch * p.key_tiles);
      if (threadIdx.x == 0) p.slope_sum[int64_t(slot) * p.q_heads + where.head] = slope;
    }
  }

  // Products to what the gradient takes of the other side and of its direction: d(dS) and dS, or d(P) and P, in place
  // of q . k and its change. changes: of the own tile's queries, or of the other's.
  static __device__ __forceinline__ void change(Products& x, const Task& p, const Work& work, const Change* changes,
                                                int head, int tile, uint32_t seen, Real& slope_sum) {
    const bool by_keys = p.by_keys(), of_values = p.gradient == Gradient::value;
    const int lane = ptx::opaque(threadIdx.x % 32), own_row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
    const int own = work.where.tile * kOwn + own_row, other = tile * kOthers + lane % 4 * 2;
    const int offset = work.sequence.keys.offset;
    const int row = by_keys ? other : own, key = by_keys ? own : other;
    const HeadScoresOf<Real> scores(p, p.q_heads, work.where.batch, head);
    const HeadChange<Real> direction(p, work.where.batch, head);
    const Fragment fragment{by_keys};
    const uint32_t bits = p.scores.seed ? kept(p.scores, scores, row, key, lane, fragment) : ~0u;
    const Change* const first = changes + (by_keys ? lane % 4 * 2 : own_row);
#pragma unroll
    for (int i = 0; i < Fragment::kCount; i++) {
      const int r = row + fragment.row(i), k = key + fragment.key(i);
      Real &s = x.s[i / 4][i % 4], &move = x.move[i / 4][i % 4];
      const ChangedPair<Real> y =
          changed_pair<T>(p, scores, direction, r, k, offset, seen >> i & 1, bits >> i & 1, first[fragment.row(i)], s,
                          move, x.grad[i / 4][i % 4], x.grad_change[i / 4][i % 4]);
      if (p.slope_sum) slope_sum -= y.of_score * distance<Real>(r, k, offset);
      s = of_values ? y.weight_change : y.grad_change;
      move = of_values ? y.weight : y.grad;
    }
  }

  static __device__ __forceinline__ void write(void* to, const Sums& acc, const Task& p, const Work& work,
                                               int first_slice, int dim) {
    const bool by_keys = p.by_keys(), of_values = p.gradient == Gradient::value;
    const OwnTile& where = work.where;
    const Sequence& sequence = work.sequence;
    const Strides& s = of_values ? p.grad_value_strides : by_keys ? p.grad_key_strides : p.grad_query_strides;
    const Real scale = !of_values ? p.scale : p.scores.seed ? p.scores.keep_scale : Real(1);
    const int begin = by_keys ? sequence.k_begin : sequence.q_begin, rows = by_keys ? sequence.k_rows : sequence.rows;
    T* const base = static_cast<T*>(to) + where.batch * s.batch + where.head * s.head + begin * s.row;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = where.tile * kOwn + static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4 + 8 * h;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < kSumSlices; j++)
        Math::write(base + row * s.row, acc[j], h, scale, (first_slice + j) * kColumns, dim, lane);
    }
  }
};

// grid: column_blocks * OwnTile::count
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 2)
    backward_jvp(const __grid_constant__ BackwardJvpTaskOf<typename Kernel::Real> p) {
  Kernel::run(p);
}

}  // namespace attnjourney
