// Attention backward with options for Hopper: tiles, operands and sums of sm90/backward.cuh, in another order. Warp 3
// of the producer's warpgroup, the scheduler (full_backward_ring.cuh), hands out the tiles and skips hidden ones: it
// reads a boolean mask 16 bytes at a time, or looks 32 tiles up at once in a mask of blocks.
//
// Order of an iteration: S, dP | what the options hide and keep | wait | weights, dS | dV, dK | dS to shared memory,
// arrive | wait for the other warpgroup's dS | dQ | the mask's gradient | wait | dQ out. Nothing of the next tile:
// scores and dP are both held while the options are looked at, and the other warpgroup's products fill the time.
//
// A floating mask in the dtype of query whose rows are whole 16-byte chunks comes by TMA and is turned by ldmatrix; any
// other is fetched into shared memory while the products run. Where such a mask broadcasts over nothing and there is no
// softcap, dS is its gradient and is written straight into it, in its dtype; else common/mask_gradient.cuh computes it.
// Whether Q or dO has numbers to guard against shows in reference and delta, which are not finite then either; after a
// softcap or with a sink, which may hide that, tiles are always looked at. Not yet measured on a GPU. Proofs:
// tests/emulator/test_full_sm90_backward.py, tests/emulator/faults/full_backward.py.
#pragma once
#include "backward.cuh"
#include "full_backward_scores.cuh"

namespace attnjourney {

template <class Shape>
struct Sm90FullConsumer : Sm90BackwardConsumer<Shape, true> {
  using Base = Sm90BackwardConsumer<Shape, true>;
  using T = typename Shape::T;
  static constexpr int kD = Shape::kD, kRows = Shape::kRows;
  using Work = typename Shape::Work;
  using Guard = Sm90BackwardGuard<typename Shape::Part, Sm90FullBackwardMemory<Shape>>;
  using Scores = Sm90FullBackwardScores<Shape>;
  using Part = typename Shape::Part;
  using Fragments = uint32_t[4][4];
  using Base::dk, Base::dv, Base::group, Base::n0, Base::task, Base::smem, Base::tid, Base::warp, Base::where;

  const Sm90FullBackwardMaps& maps;
  const Sm90FullBackwardMemory<Shape>& memory;
  const Work& work;

  __device__ __forceinline__ Sm90FullConsumer(const Sm90FullBackwardMaps& maps_, const BackwardTask& task_,
                                              const Work& work_, const Sm90FullBackwardMemory<Shape>& memory_,
                                              unsigned char* smem_, int group_)
      : Base(task_, work_.where, memory_, smem_, group_), maps(maps_), memory(memory_), work(work_) {}

  // recomputed wherever they are needed: addresses made of them, hoisted out of the loop, would spill
  static __device__ __forceinline__ int lane() { return static_cast<int>(ptx::opaque(threadIdx.x)) % 32; }
  __device__ __forceinline__ int key() const { return n0 + Base::first_key() + warp * 16 + lane() / 4; }

  // Must what is hidden be kept from the products? Where Q or dO of a row is not finite, neither is its reference or
  // delta, unless a cap or a sink stands between. 64 rows; every warp looks at all of them.
  __device__ __forceinline__ bool suspect(const unsigned char* reference, const unsigned char* delta) const {
    if (task.scores.modified() || task.scores.sinks) return true;
    const auto bad = [&](const unsigned char* of) {
      const int2 x = reinterpret_cast<const int2*>(of)[lane()];
      constexpr int kExponent = 0x7f800000;
      return (x.x & kExponent) == kExponent || (x.y & kExponent) == kExponent;
    };
    return ptx::any(bad(reference) || bad(delta));
  }

  // do the ranges hide nothing of the rows from m0 on, are they all in memory?
  __device__ __forceinline__ bool whole(int m0) const {
    return work.queries.whole(m0) && m0 + kRows <= work.sequence.rows;
  }
  __device__ __forceinline__ bool hides(const RingTile& tile) const {
    return !tile.whole || task.scores.mask_kind > MaskElement::boolean || !whole(tile.tile * kRows);
  }
  // this thread's own, in shared memory
  __device__ __forceinline__ float* own_mask(const Sm90FullBackwardMemory<Shape>& memory) const {
    return reinterpret_cast<float*>(smem + (memory.mask - memory.k) + group * Shape::kOwnBytes) + tid;
  }
  __device__ __forceinline__ float& own_slope(const Sm90FullBackwardMemory<Shape>& memory) const {
    return reinterpret_cast<float*>(smem + (memory.slopes - memory.k))[8 + group * 128 + tid];
  }

  // The products with 64 rows of the tile, `part` of a stage counted in such.
  __device__ __forceinline__ void issue_part_scores(float (&d)[32], uint32_t keys, uint32_t queries, int part) {
    const uint32_t a = Shape::code(keys) + group * 512, b = Shape::code(queries) + part * (Part::kQueryBytes / 16);
    Base::template gemm<64, 0, 0, kD>(
        d, [&](int kk) { return Shape::desc(a, kk / 4 * Shape::kKeyPanel + kk % 4 * 32); },
        [&](int kk) { return Shape::desc(b, kk / 4 * Part::kQueryPanel + kk % 4 * 32); });
  }
  __device__ __forceinline__ void issue_part_sum(float (&d)[kD / 2], const Fragments& a, uint32_t queries, int part) {
    const uint32_t b = Shape::code(queries, Part::kQueryPanel) + part * (Part::kQueryBytes / 16);
#pragma unroll
    for (int kk = 0; kk < 4; kk++) ptx::wgmma_rs<T, kD, 1>(d, a[kk], Shape::desc(b, kk * 2048), true);
    ptx::wgmma_commit();
  }
  // 16 rows from 16 kk on of the warp's dS
  __device__ __forceinline__ uint32_t ds_chunk(int kk) const {
    return Shape::chunk_at(memory.ds, Shape::kScorePanel, Base::first_key() + warp * 16 + lane() % 16,
                           kk * 2 + lane() / 16);
  }
  // The warp's dS, turned, through its part of the mask's tile to the gradient of the mask: Rows rows from first_row
  // on.
  template <int Rows>
  __device__ __forceinline__ void write_mask_gradient(uint32_t panel, int head, int m0, int first_row) const {
    const MaskGradient& g = task.mask_gradient;
    panel += first_row * 128, m0 += first_row;
    __syncwarp();
#pragma unroll
    for (int kk = 0; kk < Rows / 16; kk++) {
      uint32_t x[4];
      ptx::ldmatrix_x4_trans(x, ds_chunk(first_row / 16 + kk));
      ptx::stmatrix_x4(Scores::mask_chunk(panel, kk), x);
    }
    __syncwarp();
    const int64_t first = work.gradient_batch + head * g.head;
    const int chunk = warp * 2 + lane() / 16, k = n0 + Base::first_key() + chunk * 8;
    T* out = static_cast<T*>(g.own) + first + k;
#pragma unroll
    for (int i = 0; i < Rows / 16; i++) {
      const int r = i * 16 + lane() % 16;
      const unsigned char* from = smem + (panel - memory.k) + r * 128 + ((chunk ^ (r & 7)) << 4);
      if (m0 + r < task.q_len && k < task.kv_len)
        *reinterpret_cast<uint4*>(out + (m0 + r) * g.row) = *reinterpret_cast<const uint4*>(from);
    }
    ptx::fence_proxy_async();
  }

  // This block's part of the gradient of a head's slope. own: this thread's
  __device__ __forceinline__ void add_slopes(int head, float& own) {
    float* parts = reinterpret_cast<float*>(smem + (memory.slopes - memory.k));
    float sum = own;
    own = 0.f;
#pragma unroll
    for (int x = 1; x < 32; x *= 2) sum += ptx::shfl_xor(sum, x);
    ptx::bar_sync(1, 256);  // the sums before have been read
    if (lane() == 0) parts[group * 4 + warp] = sum;
    ptx::bar_sync(1, 256);
    if (group != 0 || tid != 0) return;
    sum = 0.f;
    for (int w = 0; w < 8; w++) sum += parts[w];
    const int slot = where.key_tile + (task.cu_q ? first_packed_tile(task.cu_k, Shape::kKeys, where.batch)
                                                 : where.batch * task.key_tiles);
    task.slope_sum[int64_t(slot) * task.q_heads + head] = sum;
  }

  __device__ __forceinline__ void run() {
    const TileRing<Shape> ring(memory, smem);
    if (ring.wait(0).exists()) {
      ptx::mbarrier_wait(memory.kv_full, 0);
      Guard::clean_keys(memory, smem);
    }
    own_slope(memory) = 0.f;
    uint32_t it = 0;
    for (; ring.wait(it).exists(); it++) {
      const RingTile& tile = ring.slot(it);
      const auto panel_of = [&](const Sm90FullBackwardMemory<Shape>& memory, uint32_t it) {
        return memory.mask + it % Shape::kMaskStages * Shape::kMaskBytes + group * Shape::kMaskPanel;
      };
      const int stage = it % Shape::kQueryStages;
      const auto statistics = [&](uint32_t of, int part) { return smem + (of - memory.k) + part * 256; };
      ptx::mbarrier_wait(memory.q_full + 8 * stage, it / Shape::kQueryStages % 2);
      ptx::mbarrier_wait(memory.do_full + 8 * stage, it / Shape::kQueryStages % 2);
      if (maps.mask_tiles)
        ptx::mbarrier_wait(memory.mask_full + 8 * (it % Shape::kMaskStages), it / Shape::kMaskStages % 2);
#pragma unroll 1
      for (int row = 0; row < kRows; row += 64) {
        const int part = stage * Shape::kParts + row / 64;
        Fragments pf, df;
        float s[32], dp[32];
        ptx::wgmma_fence();
        issue_part_scores(s, memory.k, memory.q, part);
        ptx::wgmma_fence();
        issue_part_scores(dp, memory.v, memory.d_out, part);
        const int m0 = tile.tile * kRows;
        const Scores scores(task, work, tile.head, m0 + row + 2 * (lane() % 4), key(), whole(m0), tile.whole);
        if (!maps.mask_tiles && task.scores.mask_kind > MaskElement::boolean) scores.fetch_mask(own_mask(memory));
        ptx::wgmma_wait<0>();
        ptx::keep(s);
        ptx::keep(dp);
        const Sm90FullBackwardMemory<Shape> memory(
            ptx::opaque(this->memory.k));  // from here on addresses are recomputed, not held
        if (Guard::found_keys(memory, smem)) Guard::poison_scores(s, memory, smem, key() - n0);
        scores.softmax(s, dp, pf, df, statistics(memory.lse, part) + lane() % 4 * 16, Scores::kDelta, maps.mask_tiles,
                       panel_of(memory, it) + row * 128, own_mask(memory), own_slope(memory));
        const int again = ptx::opaque(it) % Shape::kQueryStages * Shape::kParts + row / 64;
        if (hides(TileRing<Shape>(memory, smem).slot(ptx::opaque(it))) &&
            suspect(statistics(memory.lse, again), statistics(memory.delta, again)))
          Guard::clean_queries(pf, memory, smem, memory.q + again * Part::kQueryBytes,
                               memory.d_out + again * Part::kOutBytes, row / 64);
        ptx::wgmma_fence();
        issue_part_sum(dv, pf, memory.d_out, again);
        ptx::wgmma_fence();
        issue_part_sum(dk, df, memory.q, again);
        // the other warpgroup is done with dS of the tile before
        if (it > 0 && row == 0) ptx::bar_sync(6 + (group ^ 1), 256);
#pragma unroll
        for (int kk = 0; kk < 4; kk++) ptx::stmatrix_x4(ds_chunk(row / 16 + kk), df[kk]);
      }
      ptx::fence_proxy_async();
      ptx::bar_arrive(4 + group, 256);
      ptx::bar_sync(4 + (group ^ 1), 256);
      const Sm90FullBackwardMemory<Shape> memory(ptx::opaque(this->memory.k));
      const uint32_t now = ptx::opaque(it);
      const RingTile &done = TileRing<Shape>(memory, smem).slot(now),
                     &next = TileRing<Shape>(memory, smem).slot(now + 1);
      float dq[32];
      Base::issue_dq(dq, memory.ds, group);
      if (task.mask_gradient.own) write_mask_gradient<kRows>(panel_of(memory, now), done.head, done.tile * kRows, 0);
      if (maps.mask_tiles) Base::release(memory.mask_empty + 8 * (now % Shape::kMaskStages));
      ring.wait(now + 1);
      ptx::wgmma_wait<0>();
      ptx::keep(dq);
      Base::release(memory.q_empty + 8 * (now % Shape::kQueryStages));
      Base::release(memory.do_empty + 8 * (now % Shape::kQueryStages));
      if (next.exists()) ptx::bar_arrive(6 + group, 256);
      if (Shape::kDeterministic && now > 0) ptx::bar_sync(8 + group, 160);
      Base::store_dq(dq, done.scratch, group);
      if (task.slope_sum && (!next.exists() || next.head != done.head)) add_slopes(done.head, own_slope(memory));
      Base::release(ring.empty(now));
    }
    ptx::keep(dk);
    ptx::keep(dv);
    if (task.scores.seed) {
#pragma unroll
      for (int i = 0; i < kD / 2; i++) dv[i] *= task.scores.keep_scale;
    }
    if (Shape::kDeterministic && it > 0) ptx::bar_sync(8 + group, 160);
    if (task.key_value_sum)
      Base::add();
    else
      Base::write(work.sequence.k_begin, work.sequence.k_rows);
  }
};

template <class Shape, class Consumer>
struct Sm90FullBackward {
  using Work = typename Shape::Work;
  static constexpr int kRows = Shape::kRows;

  static __device__ __forceinline__ void run(const Sm90FullBackwardMaps& maps, const BackwardTask& task) {
    unsigned char* smem = ptx::dynamic_smem();
    const Sm90FullBackwardMemory<Shape> memory(ptx::smem_addr(smem));
    Work& work = *reinterpret_cast<Work*>(smem + (memory.work - memory.k));
    if (threadIdx.x == 0) {
      const BackwardTile where =
          task.cu_q ? BackwardTile(task, blockIdx.x, Shape::kKeys) : BackwardTile(task, blockIdx.x);
      const Sequence sequence = sequence_of<true>(task, where.batch);
      work.where = where;
      work.sequence = sequence;
      const auto item = [&](const int64_t (&strides)[kMaskDims]) {
        return batch_offset(task.scores, strides, where.batch);
      };
      work.mask_batch = task.scores.mask_kind == MaskElement::none ? 0 : item(task.scores.mask_batch);
      work.gradient_batch = task.mask_gradient.own ? item(task.mask_gradient.batch) : 0;
      work.queries = decltype(work.queries)(task, where, sequence);
      memory.init();
    }
    __syncthreads();
    if (work.where.key_tile * Shape::kKeys >= work.sequence.k_rows) return;
    const int role = ptx::uniform(threadIdx.x / 128);
    if (role == 0) {
      ptx::setmaxnreg_dec<40>();
      const int warp = ptx::uniform(threadIdx.x / 32);
      if (warp == 3) Sm90Scheduler<Shape>::run(maps.kinds, task, work, memory, smem);
      if (threadIdx.x == 0) feed(maps, task, work, memory, smem);
      if (Shape::kDeterministic && (warp == 1 || warp == 2)) add_in_turn(task, work, memory, smem, warp - 1);
    } else {
      ptx::setmaxnreg_inc<232>();
      Consumer(maps, task, work, memory, smem, role - 1).run();
    }
  }

  static __device__ __forceinline__ void feed(const Sm90FullBackwardMaps& all, const BackwardTask& task,
                                              const Work& work, const Sm90FullBackwardMemory<Shape>& given,
                                              unsigned char* smem) {
    const TileRing<Shape> ring(given, smem);
    if (!ring.wait(0).exists()) return;
    // maps of one tensor lie four apart; recomputed for each copy: twelve addresses would not fit into registers
    const auto map = [&](int tensor) { return ptx::opaque(&all.tensors.query) + tensor; };
    const auto load_keys = [&](uint32_t to, const ptx::TensorMap* t) {
      tma_load_rows<Shape::kKeys, Shape::kPanels>(to, t[0], t[4], t[8],
                                                  work.sequence.k_begin + work.where.key_tile * Shape::kKeys,
                                                  work.sequence.k_begin + work.sequence.keys.key_length, task.kv_len,
                                                  work.where.head_k, task.cu_q ? 0 : work.where.batch, given.kv_full);
    };
    ptx::mbarrier_arrive_expect_tx(given.kv_full, 2 * Shape::kKeyBytes);
    load_keys(given.k, map(1));
    load_keys(given.v, map(2));
#pragma unroll 1
    for (uint32_t it = 0; ring.wait(it).exists(); it++) {
      const RingTile& tile = ring.slot(it);
      const Sm90FullBackwardMemory<Shape> memory(ptx::opaque(given.k));
      const uint32_t qs = it % Shape::kQueryStages, os = it % Shape::kOutStages;
      const auto load_stats = [&](uint32_t to, const float* from, uint32_t full, uint32_t st) {
        ptx::bulk_load(to + st * kRows * 4, from + int64_t{tile.scratch} * kRows, kRows * 4, full + 8 * st);
      };
      const auto load = [&](uint32_t full, uint32_t empty, uint32_t to, const ptx::TensorMap* t, uint32_t stats_bytes,
                            uint32_t st, uint32_t stages) {
        full += 8 * st;
        ptx::mbarrier_wait(empty + 8 * st, it / stages % 2 ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, Shape::kQueryBytes + stats_bytes);
        tma_load_rows<kRows, Shape::kPanels>(
            to + st * Shape::kQueryBytes, t[0], t[4], t[8], work.sequence.q_begin + tile.tile * kRows,
            work.sequence.q_begin + work.sequence.q_len, task.q_len, tile.head, task.cu_q ? 0 : work.where.batch, full);
      };
      load(memory.q_full, memory.q_empty, memory.q, map(0), kRows * 4, qs, Shape::kQueryStages);
      load_stats(memory.lse, task.reference, memory.q_full, qs);
      load(memory.do_full, memory.do_empty, memory.d_out, map(3), 2 * kRows * 4, os, Shape::kOutStages);
      load_stats(memory.delta, task.delta, memory.do_full, os);
      load_stats(memory.inverse, task.inverse, memory.do_full, os);
      if (const Sm90FullBackwardMaps& maps = *ptx::opaque(&all); maps.mask_tiles) {
        const uint32_t mask_st = it % Shape::kMaskStages, bar = memory.mask_full + 8 * mask_st;
        ptx::mbarrier_wait(memory.mask_empty + 8 * mask_st, it / Shape::kMaskStages % 2 ^ 1);
        ptx::mbarrier_arrive_expect_tx(bar, Shape::kMaskBytes);
#pragma unroll
        for (int c = 0; c < Shape::kMaskPanels; c++)
          ptx::tma_load_4d(memory.mask + mask_st * Shape::kMaskBytes + c * Shape::kMaskPanel, &maps.mask,
                           work.where.key_tile * Shape::kKeys + c * 64, task.scores.mask_head ? tile.head : 0,
                           tile.tile * kRows, maps.mask_batched ? work.where.batch : 0, bar);
      }
      ptx::mbarrier_arrive(ring.empty(it));
    }
  }

  // Deterministic: as the plain kernel's; the turns of tiles that are left out are passed on.
  static __device__ __forceinline__ void add_in_turn(const BackwardTask& task, const Work& work,
                                                     const Sm90FullBackwardMemory<Shape>& memory, unsigned char* smem,
                                                     int half) {
    const TileRing<Shape> ring(memory, smem);
    const bool first_lane = threadIdx.x % 32 == 0;
    int number = 0;
    for (uint32_t it = 0;; it++, number++) {
      const RingTile& next = ring.wait(it);
      for (const int end = next.exists() ? next.number : work.total(); number < end; number++)
        if (first_lane) {
          const Turn turn(task, work, number, half);
          ptx::turn_wait(turn.at, turn.mine);
          ptx::turn_pass(turn.at, turn.mine + 1);
        }
      if (!next.exists()) return;
      const Turn turn(task, work, number, half);
      constexpr int kEach = Shape::kPieces / 2;  // of the pieces of dQ, one warpgroup's one after another
#pragma unroll
      for (int piece = half * kEach; piece < (half + 1) * kEach; piece++) {
        ptx::bar_sync(2 + half, 160);  // written
        if (first_lane) {
          ptx::turn_wait(turn.at, turn.mine);
          ptx::bulk_reduce_add(task.query_sum + int64_t{next.scratch} * (kRows * Shape::kD) + piece * 4096,
                               memory.dq + half * 16384, 16384);
          ptx::bulk_commit();
          ptx::bulk_wait_read<0>();
        }
        __syncwarp();
        ptx::bar_arrive(8 + half, 160);  // read
      }
      if (first_lane) {
        ptx::bulk_wait<0>();
        ptx::thread_fence();
        ptx::turn_pass(turn.at, turn.mine + 1);
        ptx::mbarrier_arrive(ring.empty(it));
      }
    }
  }
  struct Turn {
    int* at;
    int mine;
    __device__ __forceinline__ Turn(const BackwardTask& task, const Work& work, int number, int half) {
      auto queries = work.queries;
      queries.go(number, work.where.first_head);
      at = task.turn + 2 * (scratch_row(task, work.where.batch, queries.head) / kRows + queries.tile) + half;
      mine = queries.turn(task, work.where, work.sequence);
    }
  };
};

// grid: key_tiles * (key_value_sum ? q_heads : kv_heads) * batch, packed: key_tiles * kv_heads
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sm90_full_backward(const __grid_constant__ Sm90FullBackwardMaps maps, const __grid_constant__ BackwardTask task) {
  Sm90FullBackward<Shape, Sm90FullConsumer<Shape>>::run(maps, task);
}

}  // namespace attnjourney
