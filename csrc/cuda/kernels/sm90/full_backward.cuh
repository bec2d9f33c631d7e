// Attention backward with options for Hopper: tiles, operands and sums of sm90/backward.cuh, in another order. Warp 3
// of the producer's warpgroup, the scheduler (full_backward_ring.cuh), hands out the tiles and skips hidden ones: it
// reads a boolean mask 16 bytes at a time, or looks 32 tiles up at once in a mask of blocks.
//
// The two warpgroups are half a step apart, a step being 64 rows: while one weighs its scores the other has its turn in
// the tensor cores. Step: weights and dS | the turn | dQ of the tile before, dV, dK | wait for dQ | dS to shared
// memory, dQ out | wait | S, dP of the next step | pass the turn on | the mask's gradient, what the options hide and
// keep | wait. Whoever has the turn knows thereby that the other's dS of the step before has been written, and its own
// before that read; so dQ, which takes both, is one tile behind, and dS lies in two places, at 64 columns its parts. S
// under dK would need more registers than there are: ptxas then runs the products one by one.
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
  using Base::dk, Base::dv, Base::group, Base::task, Base::smem, Base::where;

  const Sm90FullBackwardMaps& maps;
  const Sm90FullBackwardMemory<Shape>& memory;
  const Work& work;

  __device__ __forceinline__ Sm90FullConsumer(const Sm90FullBackwardMaps& maps_, const BackwardTask& task_,
                                              const Work& work_, const Sm90FullBackwardMemory<Shape>& memory_,
                                              unsigned char* smem_, int group_)
      : Base(task_, work_.where, memory_, smem_, group_), maps(maps_), memory(memory_), work(work_) {}

  // recomputed wherever they are needed, see anew
  __device__ __forceinline__ int thread() const { return thread_of(work) % 128; }
  __device__ __forceinline__ int lane() const { return thread_of(work) % 32; }
  // where the 16 keys of the warp of thread t begin
  static __device__ __forceinline__ int warp_keys(int t) { return Shape::kByColumns ? t % 128 / 32 * 16 : t / 32 * 16; }
  __device__ __forceinline__ void release(uint32_t bar) {
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(bar);
  }
  __device__ __forceinline__ int own_key() const {
    const int t = thread_of(work);
    return warp_keys(t) + t % 32 / 4;
  }
  __device__ __forceinline__ int first() const { return work.where.key_tile * Shape::kKeys; }
  __device__ __forceinline__ int key() const { return first() + own_key(); }

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
    const int t = thread_of(work);
    return reinterpret_cast<float*>(smem + (memory.mask - memory.k)) + t / 128 * (Shape::kOwnBytes / 4) + t % 128;
  }
  __device__ __forceinline__ float& own_slope(const Sm90FullBackwardMemory<Shape>& memory) const {
    return reinterpret_cast<float*>(smem + (memory.slopes - memory.k))[thread_of(work) / 32];
  }

  // The products with 64 rows of the tile, `part` of a stage counted in such.
  __device__ __forceinline__ void issue_part_scores(float (&d)[32], uint32_t keys, uint32_t queries, int group,
                                                    int part) {
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
  // Where the lane's chunk of the warp's dS in a tile or part is; of 16 rows from 16 kk on it is at this ^ 32 kk.
  __device__ __forceinline__ uint32_t ds_chunks(uint32_t tile) const {
    const int t = thread_of(work);
    return Shape::chunk_at(tile, Shape::kScorePanel, warp_keys(t) + t % 16, t % 32 / 16);
  }
  // The warp's dS, turned, through its part of the mask's tile to the gradient of the mask: Rows rows of the tile at m0
  // from first_row on, in `ds` from ds_row on.
  template <int Rows>
  __device__ __forceinline__ void write_mask_gradient(uint32_t ds, int ds_row, uint32_t panel, int head, int m0,
                                                      int first_row) const {
    const MaskGradient& g = task.mask_gradient;
    panel += first_row * 128, m0 += first_row;
    __syncwarp();
    const uint32_t chunks = ds_chunks(ds) ^ ds_row * 2;
#pragma unroll
    for (int kk = 0; kk < Rows / 16; kk++) {
      uint32_t x[4];
      ptx::ldmatrix_x4_trans(x, chunks ^ kk * 32);
      ptx::stmatrix_x4(Scores::mask_chunk(work, panel, kk), x);
    }
    __syncwarp();
    const int64_t first = work.gradient_batch + head * g.head;
    const int t = thread_of(work), chunk = t % 128 / 16, k = this->first() + warp_keys(t) + t % 32 / 16 * 8;
    T* out = static_cast<T*>(g.own) + first + k;
#pragma unroll
    for (int i = 0; i < Rows / 16; i++) {
      const int r = i * 16 + t % 16;
      const unsigned char* from = smem + (panel - memory.k) + r * 128 + ((chunk ^ (r & 7)) << 4);
      if (m0 + r < task.q_len && k < task.kv_len)
        *reinterpret_cast<uint4*>(out + (m0 + r) * g.row) = *reinterpret_cast<const uint4*>(from);
    }
    ptx::fence_proxy_async();
  }

  static __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int n = 1; n < 32; n *= 2) x += ptx::shfl_xor(x, n);
    return x;
  }
  // This block's part of the gradient of a head's slope, from each warp's in own_slope()
  __device__ __forceinline__ void add_slopes(int head) {
    const float* parts = reinterpret_cast<const float*>(smem + (memory.slopes - memory.k));
    ptx::bar_sync(1, 256);  // @slopes_there
    float sum = 0.f;
    if (thread_of(work) == 0)
      for (int w = 0; w < 8; w++) sum += parts[w];
    ptx::bar_sync(1, 256);  // read
    if (lane() == 0) own_slope(memory) = 0.f;
    if (thread_of(work) != 0) return;
    const int slot = where.key_tile + (task.cu_q ? first_packed_tile(task.cu_k, Shape::kKeys, where.batch)
                                                 : where.batch * task.key_tiles);
    task.slope_sum[int64_t(slot) * task.q_heads + head] = sum;
  }

  using Memory = Sm90FullBackwardMemory<Shape>;
  static constexpr int kParts = Shape::kParts;
  static_assert(kParts != 2 || Shape::kOutStages == Shape::kQueryStages);  // of Q and dO, and of the rows' statistics
  static __device__ __forceinline__ int part_of(uint32_t it, int part) {
    return static_cast<int>(it % 2) * kParts + part;
  }
  static __device__ __forceinline__ uint32_t panel_of(const Memory& memory, uint32_t it, int group) {
    return memory.mask + it % Shape::kMaskStages * Shape::kMaskBytes + group * Shape::kMaskPanel;
  }
  // as Sm90FullBackwardScores::softmax wants it
  __device__ __forceinline__ uint32_t mask_of(const Memory& memory, uint32_t it, int part) const {
    if (maps.mask_tiles) return panel_of(memory, it, 0) + part * (64 * 128);
    return memory.mask - memory.k;
  }
  // of a tile, or with one part of two tiles in turns
  static __device__ __forceinline__ uint32_t ds_of(const Memory& memory, uint32_t it) {
    return memory.ds + (kParts > 1 ? 0 : it % 2 * Shape::kScoreBytes);
  }
  static __device__ __forceinline__ void wait_query(const Memory& memory, uint32_t it) {
    ptx::mbarrier_wait(memory.q_full + 8 * (it % Shape::kQueryStages), it / Shape::kQueryStages % 2);
  }
  static __device__ __forceinline__ void wait_out(const Memory& memory, uint32_t it) {
    ptx::mbarrier_wait(memory.do_full + 8 * (it % Shape::kOutStages), it / Shape::kOutStages % 2);
  }
  // what the options hide and keep of a part of a tile, and its mask where TMA does not bring it
  __device__ __forceinline__ uint2 look(const RingTile& tile, int part) const {
    const int m0 = tile.tile * kRows;
    const Scores scores(task, work, tile.head, m0 + part * 64 + 2 * (lane() % 4), key(), whole(m0), tile.whole);
    if (!maps.mask_tiles && task.scores.mask_kind > MaskElement::boolean)
      scores.fetch_mask(own_mask(Memory(ptx::smem_addr(smem))));
    return scores.found();
  }
  // of the it-th tile
  __device__ __forceinline__ void add_dq(const float (&dq)[32], uint32_t it) {
    if (Shape::kDeterministic && it > 0) ptx::bar_sync(8 + group, 160);  // @dq_added
    Base::store_dq(dq, TileRing<Shape>(memory, smem).slot(it).scratch, group, thread());
  }

  // All tiles, of which there are some.
  __device__ __forceinline__ void walk(const TileRing<Shape>& ring) {
    float s[32], dp[32];
    wait_query(memory, 0);
    ptx::wgmma_fence();
    issue_part_scores(s, memory.k, memory.q, group, 0);
    wait_out(memory, 0);
    ptx::wgmma_fence();
    issue_part_scores(dp, memory.v, memory.d_out, group, 0);
    uint2 found = look(ring.slot(0), 0);
    ptx::wgmma_wait<0>();
    ptx::keep(s);
    ptx::keep(dp);
    if (group == 1) ptx::bar_arrive(4, 256);  // the first turn is the other's
    uint32_t it = 0;
#pragma unroll 1
    for (bool more = true; more; it++) {
      if (maps.mask_tiles)
        ptx::mbarrier_wait(memory.mask_full + 8 * (it % Shape::kMaskStages), it / Shape::kMaskStages % 2);
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        const Memory memory(ptx::smem_addr(smem));  // addresses are recomputed, not held
        Fragments pf, df;
        const auto statistics = [&](uint32_t of, uint32_t it) {
          return smem + (of - memory.k) + part_of(it, part) * 256;
        };
        if (Guard::found_keys(memory, smem)) Guard::poison_scores(s, memory, smem, own_key());
        {
          const RingTile& tile = TileRing<Shape>(memory, smem).slot(it);
          const Scores scores(task, work, tile.head, tile.tile * kRows + part * 64 + 2 * (lane() % 4), key(), found);
          const float slope = scores.softmax(s, dp, pf, df, statistics(memory.lse, it) + lane() % 4 * 16,
                                             Scores::kDelta, maps.mask_tiles, mask_of(memory, it, part), smem);
          if (task.slope_sum) {
            const float sum = warp_sum(slope);
            if (lane() == 0) own_slope(memory) += sum;
          }
        }
        if (const uint32_t again = anew(it, work);
            hides(TileRing<Shape>(memory, smem).slot(again)) &&
            suspect(statistics(memory.lse, again), statistics(memory.delta, again))) {
          const Memory memory(anew(ptx::smem_addr(smem), work));
          Guard::clean_queries(pf, memory, smem, memory.q + part_of(again, part) * Part::kQueryBytes,
                               memory.d_out + part_of(again, part) * Part::kOutBytes);
        }
        const uint32_t now = ptx::uniform(anew(it, work));
        const int group = ptx::uniform(anew(this->group, work));
        ptx::bar_sync(4 + group, 256);  // @turn
        // Of the first tile there is none before: what is computed of K instead is not used.
        float dq[32];
        if (part == 0) Base::issue_dq(dq, now > 0 ? ds_of(memory, now - 1) : memory.k, group);
        ptx::wgmma_fence();
        issue_part_sum(dv, pf, memory.d_out, part_of(now, part));
        ptx::wgmma_fence();
        issue_part_sum(dk, df, memory.q, part_of(now, part));
        if (part == 0) {
          ptx::wgmma_wait<2>();  // @dq_done
          ptx::keep(dq);
          if (kParts > 1) ptx::bar_sync(6 + group, 128);  // @dq_read: by all warps, from where dS is written now
        }
        const uint32_t ds = ds_of(memory, now) + part * Shape::kScorePanel, chunks = ds_chunks(ds);
#pragma unroll
        for (int kk = 0; kk < 4; kk++) ptx::stmatrix_x4(chunks ^ kk * 32, df[kk]);
        ptx::fence_proxy_async();  // @ds_written
        if (part == 0 && now > 0) {
          add_dq(dq, now - 1);
          release(ring.empty(now - 1));
        }
        // the next step; after the last one now again
        const bool last_part = part == kParts - 1;
        if (last_part) more = ring.wait(now + 1).exists();
        const uint32_t next = now + (last_part && more);
        const int next_part = last_part ? more ? 0 : part : part + 1;
        if (last_part) {
          wait_query(memory, next);
          wait_out(memory, next);
        }
        ptx::wgmma_wait<0>();  // @sums_done
        ptx::wgmma_fence();
        issue_part_scores(s, memory.k, memory.q, group, part_of(next, next_part));
        if (last_part) {
          release(memory.q_empty + 8 * (now % Shape::kQueryStages));
          release(memory.do_empty + 8 * (now % Shape::kOutStages));
        }
        ptx::wgmma_fence();
        issue_part_scores(dp, memory.v, memory.d_out, group, part_of(next, next_part));
        ptx::bar_arrive(4 + (group ^ 1), 256);
        const RingTile& done = TileRing<Shape>(memory, smem).slot(now);
        if (task.mask_gradient.own)
          write_mask_gradient<64>(ds, 0, panel_of(memory, now, group), done.head, done.tile * kRows, part * 64);
        const RingTile& tile = TileRing<Shape>(memory, smem).slot(next);
        if (last_part) {
          if (maps.mask_tiles) release(memory.mask_empty + 8 * (now % Shape::kMaskStages));
          if (task.slope_sum && (!more || tile.head != done.head)) add_slopes(done.head);
        }
        found = look(tile, next_part);
        ptx::wgmma_wait<0>();  // @scores_done
        ptx::keep(s);
        ptx::keep(dp);
      }
    }
    ptx::bar_sync(4 + group, 256);  // @last_turn: the other's last dS is there
    if (group == 0) ptx::bar_arrive(5, 256);
    const uint32_t last = work.tiles - 1;  // not held through the loop
    float dq[32];
    Base::issue_dq(dq, ds_of(memory, last), group);
    ptx::wgmma_wait<0>();
    ptx::keep(dq);
    ptx::keep(dk);
    ptx::keep(dv);
    add_dq(dq, last);
    release(ring.empty(last));
    if (Shape::kDeterministic) ptx::bar_sync(8 + group, 160);
  }

  __device__ __forceinline__ void run() {
    const TileRing<Shape> ring(memory, smem);
    if (lane() == 0) own_slope(memory) = 0.f;
    if (ring.wait(0).exists()) {
      ptx::mbarrier_wait(memory.kv_full, 0);
      Guard::clean_keys(memory, smem);
      walk(ring);
    }
    // what is written is made anew, with numbers of its own: nothing of it was held through the loop
    Base last(task, work.where, memory, smem, group);
#pragma unroll
    for (int i = 0; i < kD / 2; i++) {
      last.dk[i] = dk[i];
      last.dv[i] = task.scores.seed ? dv[i] * task.scores.keep_scale : dv[i];
    }
    if (task.key_value_sum)
      last.add();
    else
      last.write(work.sequence.k_begin, work.sequence.k_rows);
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
      work.zero = 0;
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
