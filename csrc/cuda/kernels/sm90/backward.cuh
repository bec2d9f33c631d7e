// Attention backward for Hopper. One block: 128 keys of one key head, all query tiles of all its query heads. Warpgroup
// 0 feeds tiles by TMA; warpgroups 1 and 2 own 64 keys each: S^T = K Q^T and dP^T = V dO^T (both operands in shared
// memory), dV += P^T dO and dK += dS^T Q (A in registers), dQ = dS K with dS^T through shared memory, half of the tile
// a warpgroup.
//
// Order of an iteration: dP, dV | wait dP, dS, arrive | dK, S of the next tile | wait | wait for the other warpgroup's
// dS | dQ | softmax of the next tile | wait | dQ out: by vector reductions, or when deterministic through shared memory
// by warps of their own, block after block.
#pragma once
#include "backward_finish.cuh"
#include "backward_guard.cuh"

namespace attnjourney {

template <class Shape, bool Ranged>
struct Sm90BackwardConsumer {
  using T = typename Shape::T;
  static constexpr int kD = Shape::kD, kDv = Shape::kDv, kRows = Shape::kRows, kScoreRows = Shape::kScoreRows;
  // statistics read before the wait that they are used after, as far as registers allow
  static constexpr bool kEarlyLse = kD == 128 || (kD == 64 && Shape::kDeterministic && !Ranged);
  static constexpr bool kEarlyDelta = kD == 128;
  using Queries = BackwardQueries<kRows, Shape::kKeys, Ranged>;
  // of kScoreRows rows: all those of a tile, or a part of them
  using Fragments = uint32_t[kScoreRows / 16][4];
  using Scores = float[kScoreRows / 2];
  using Stats = float4[kScoreRows / 16];
  using Guard = Sm90BackwardGuard<Shape>;

  const BackwardTask& task;
  const BackwardTile& where;
  const Sm90BackwardMemory<Shape>& memory;
  unsigned char* const smem;
  const int group, tid, warp, lane;  // group 0 or 1: 64 keys each
  const int n0;
  float dk[Shape::kHeld / 2] = {}, dv[Shape::kHeldDv / 2] = {};

  __device__ __forceinline__ Sm90BackwardConsumer(const BackwardTask& task_, const BackwardTile& where_,
                                                  const Sm90BackwardMemory<Shape>& memory_, unsigned char* smem_,
                                                  int group_)
      : task(task_),
        where(where_),
        memory(memory_),
        smem(smem_),
        group(group_),
        tid(threadIdx.x % 128),
        warp(ptx::uniform(tid / 32)),
        lane(tid % 32),
        n0(where.key_tile * Shape::kKeys) {}

  // of the 64 keys whose scores the warpgroup has
  __device__ __forceinline__ int first_key() const { return Shape::kByColumns ? 0 : group * 64; }
  // This thread's keys are key() and key() + 8; computed wherever it is needed: held, it would be spilled.
  __device__ __forceinline__ int key() const {
    return n0 + first_key() + warp * 16 + static_cast<int>(ptx::opaque(threadIdx.x)) % 32 / 4;
  }

  // d = A B over K in 16s; a(kk), b(kk) give the descriptors.
  template <int N, int TransA, int TransB, int K, class A, class B>
  static __device__ __forceinline__ void gemm(float (&d)[N / 2], A&& a, B&& b) {
    ptx::wgmma_ss_new<T, N, TransA, TransB>(d, a(0), b(0));
#pragma unroll
    for (int kk = 1; kk < K / 16; kk++) ptx::wgmma_ss<T, N, TransA, TransB>(d, a(kk), b(kk), true);
    ptx::wgmma_commit();
  }
  // d = (64 keys of `keys`) (rows of `queries`)^T; K: columns of both. rows: where those of a stage and part begin
  template <int K = kD>
  __device__ __forceinline__ void issue_scores(Scores& d, uint32_t keys, uint32_t rows) {
    const uint32_t a = Shape::code(keys) + first_key() * 8, b = Shape::code(rows);
    gemm<kScoreRows, 0, 0, K>(
        d, [&](int kk) { return Shape::desc(a, kk / 4 * Shape::kKeyPanel + kk % 4 * 32); },
        [&](int kk) { return Shape::desc(b, kk / 4 * Shape::kQueryPanel + kk % 4 * 32); });
  }
  // d += A (rows of K columns)
  template <int K>
  __device__ __forceinline__ void issue_sum(float (&d)[K / 2], const Fragments& a, uint32_t rows) {
    const uint32_t b = Shape::code(rows, Shape::kQueryPanel);
    constexpr int kFirst = K == 192 ? 128 : K;  // columns of a product
#pragma unroll
    for (int kk = 0; kk < kScoreRows / 16; kk++) {
      ptx::wgmma_rs<T, kFirst, 1>(reinterpret_cast<float (&)[kFirst / 2]>(d), a[kk], Shape::desc(b, kk * 2048), true);
      if constexpr (K > kFirst)
        ptx::wgmma_rs<T, K - kFirst, 1>(reinterpret_cast<float (&)[(K - kFirst) / 2]>(d[kFirst / 2]), a[kk],
                                        Shape::desc(b, kFirst / 64 * Shape::kQueryPanel + kk * 2048), true);
    }
    ptx::wgmma_commit();
  }
  // by columns: d += A B, 64 keys x kRows rows of `scores`, this warpgroup's columns of the rows of `queries`
  __device__ __forceinline__ void issue_held_sum(float (&d)[Shape::kHeld / 2], uint32_t scores, uint32_t queries) {
    constexpr int kHeld = Shape::kHeld;
    const uint32_t a = Shape::code(scores),
                   b = Shape::code(queries + group * (kHeld / 64) * Shape::kQueryPanel, Shape::kQueryPanel);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kRows / 16; kk++)
      ptx::wgmma_ss<T, kHeld, 0, 1>(d, Shape::desc(a, kk * 32), Shape::desc(b, kk * 2048), true);
    ptx::wgmma_commit();
  }
  // the first row in a stage of Q, of dO; part: of kScoreRows rows
  __device__ __forceinline__ uint32_t query_rows(int stage, int part = 0) const {
    return memory.q + stage * Shape::kQueryBytes + part * (kScoreRows * 128);
  }
  __device__ __forceinline__ uint32_t out_rows(int stage, int part = 0) const {
    return memory.d_out + stage * Shape::kOutBytes + part * (kScoreRows * 128);
  }
  // piece: of dQ
  __device__ __forceinline__ void issue_dq(float (&dq)[32], uint32_t ds_tile, int piece) {
    ptx::wgmma_fence();
    const uint32_t a = Shape::code(ds_tile) + (kRows == 64 ? 0 : piece * (Shape::kScorePanel / 16));
    const uint32_t b = Shape::code(memory.k) + (kRows == 64 ? piece * (Shape::kKeyPanel / 16) : 0);
    gemm<64, 1, 1, Shape::kKeys>(
        dq, [&](int kk) { return Shape::desc(a, kk * 2048); }, [&](int kk) { return Shape::desc(b, kk * 2048); });
  }

  __device__ __forceinline__ void release(uint32_t bar) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(bar);
  }
  __device__ __forceinline__ void load_stats(Stats& stats, uint32_t from, int stage, int part = 0) {
    const int row = stage * kRows + part * kScoreRows;
    const float4* src = reinterpret_cast<const float4*>(smem + (from - memory.k) + row * 4) + lane % 4;
#pragma unroll
    for (int i = 0; i < kScoreRows / 16; i++) stats[i] = src[4 * i];
  }
  __device__ __forceinline__ Range key_rows(int n) const {
    return Ranged ? key_rows_of(sequence_of(task, where.batch), n) : Range{0, n < task.kv_len ? task.rows : 0};
  }
  // is a row of the stage's part far?
  __device__ __forceinline__ bool any_far(int stage, int part) const {
    const int row = stage * kRows + part * kScoreRows + lane;
    const float* lse = reinterpret_cast<const float*>(smem + (memory.lse - memory.k)) + row;
    bool far = false;
#pragma unroll
    for (int i = 0; i < kScoreRows / 32; i++) far = far || is_far(lse[32 * i]);
    return ptx::any(far);
  }
  // scores = P of the query tile `at` in a stage, pf = P rounded. Element 4 j + e: key() + 8 (e / 2), query m0 + 8 j +
  // 2 t + e % 2.
  __device__ __forceinline__ void softmax(Scores& scores, Fragments& pf, Stats& lse, const Queries& at, int stage,
                                          int part = 0) {
    const int m0 = at.tile * kRows + part * kScoreRows;
    const bool far = any_far(stage, part);
    if (Ranged && Guard::found_keys(memory, smem)) Guard::poison_scores(scores, memory, smem, key() - n0);
    if (!at.whole(at.tile * kRows)) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = m0 + 2 * (lane % 4);
        const Range rows = key_rows(key() + 8 * h);
        const int begin = rows.begin - row, end = rows.end - row;
#pragma unroll
        for (int j = 0; j < kScoreRows / 8; j++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int x = j * 8 + e;
            if (x < begin || x >= end) scores[4 * j + 2 * h + e] = -INFINITY;
          }
      }
    }
    if (far) {
      const int64_t first =
          (int64_t(where.batch) * task.q_heads + at.head) * task.rows + m0 + ptx::opaque(threadIdx.x) % 4 * 4;
#pragma unroll
      for (int i = 0; i < kScoreRows / 16; i++) {
        const float4 row = *reinterpret_cast<const float4*>(task.reference + first + 16 * i);
        const float4 inverse = *reinterpret_cast<const float4*>(task.inverse + first + 16 * i);
        const float x[4] = {row.x, row.y, row.z, row.w}, y[4] = {inverse.x, inverse.y, inverse.z, inverse.w};
#pragma unroll
        for (int e = 0; e < 8; e++) {
          float& s = scores[8 * i + e];
          s = ptx::exp2(ptx::rounded_product(s, task.score_scale) - x[e / 4 * 2 + e % 2]) * y[e / 4 * 2 + e % 2];
        }
      }
    } else {
      if (!kEarlyLse) load_stats(lse, memory.lse, stage, part);
#pragma unroll
      for (int j = 0; j < kScoreRows / 8; j++) {
        const float2 two = j % 2 ? float2{lse[j / 2].z, lse[j / 2].w} : float2{lse[j / 2].x, lse[j / 2].y};
#pragma unroll
        for (int e = 0; e < 4; e++)
          scores[4 * j + e] = ptx::exp2(ptx::fma(scores[4 * j + e], task.score_scale, -(e & 1 ? two.y : two.x)));
      }
    }
#pragma unroll
    for (int j = 0; j < kScoreRows / 8; j++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        pf[j / 2][j % 2 * 2 + h] = ptx::pack2<T>(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]);
  }
  // df = dS, also stored for the other warpgroup, visible to wgmma after a barrier; 0 where the weight is, whatever dP
  // and delta are there
  __device__ __forceinline__ void gradient(const Scores& scores, Fragments& df, Scores& dp, const Stats& delta,
                                           uint32_t ds_tile, const Fragments& pf, const Queries& at, int part = 0) {
#pragma unroll
    for (int j = 0; j < kScoreRows / 8; j++) {
      const float2 two = j % 2 ? float2{delta[j / 2].z, delta[j / 2].w} : float2{delta[j / 2].x, delta[j / 2].y};
#pragma unroll
      for (int e = 0; e < 4; e++) dp[4 * j + e] = scores[4 * j + e] * (dp[4 * j + e] - (e & 1 ? two.y : two.x));
#pragma unroll
      for (int h = 0; h < 2; h++) df[j / 2][j % 2 * 2 + h] = ptx::pack2<T>(dp[4 * j + 2 * h], dp[4 * j + 2 * h + 1]);
    }
    if (Ranged && !at.whole(at.tile * kRows)) {
#pragma unroll
      for (int i = 0; i < kScoreRows / 4; i++) df[i / 4][i % 4] &= not_zero(pf[i / 4][i % 4]);
    }
    store_scores(ds_tile, df, part);
    ptx::fence_proxy_async();
  }
  // [keys][rows], for wgmma
  __device__ __forceinline__ void store_scores(uint32_t tile, const Fragments& x, int part) {
#pragma unroll
    for (int kk = 0; kk < kScoreRows / 16; kk++)
      ptx::stmatrix_x4(Shape::chunk_at(tile, Shape::kScorePanel, first_key() + warp * 16 + lane % 16,
                                       part * (kScoreRows / 8) + kk * 2 + lane / 16),
                       x[kk]);
  }
  __device__ __forceinline__ void store_dq(const float (&dq)[32], int tile, int piece) {
    store_dq(dq, tile, piece, tid);
  }
  __device__ __forceinline__ void store_dq(const float (&dq)[32], int tile, int piece, int tid) {
    if (Shape::kDeterministic) {
      float4* stage = reinterpret_cast<float4*>(smem + (memory.dq - memory.k) + group * 16384) + tid;
#pragma unroll
      for (int j = 0; j < 8; j++) stage[j * 128] = float4{dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
      ptx::fence_proxy_async();
      ptx::bar_arrive(2 + group, 160);
    } else {
      float* acc = task.query_sum + int64_t(tile) * (kRows * kD) + piece * 4096;
      acc = ptx::opaque(acc + tid * 4);
#pragma unroll
      for (int j = 0; j < 8; j++)
        ptx::reduce_add_v4(acc + j * 512, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
    }
  }

  __device__ __forceinline__ void run(Queries at, int total) {
    int qs = 0, qp = 0, ds = 0, dop = 0;  // stages of Q and dO, and their parities
    Fragments pf;
    Scores scores;
    if (total > 0) {
      ptx::mbarrier_wait(memory.kv_full, 0);
      if (Ranged) Guard::clean_keys(memory, smem);
      ptx::mbarrier_wait(memory.q_full, 0);
      ptx::wgmma_fence();
      issue_scores(scores, memory.k, query_rows(0));
      ptx::wgmma_wait<0>();  // the compiler zeroes dK and dV on the way into the loop: no wgmma may be in flight there
      ptx::keep(scores);
      Stats lse;
      if (kEarlyLse) load_stats(lse, memory.lse, 0);
      softmax(scores, pf, lse, at, 0);
    }
    for (int it = 0; it < total; it++) {
      const int this_qs = qs, this_ds = ds;
      const uint32_t ds_tile = memory.ds + (it & 1) * Shape::kScoreBytes;
      const int tile = (where.batch * task.q_heads + at.head) * at.tiles + at.tile;
      Fragments df;
      float dp[kRows / 2], dq[32];
      Stats lse, delta;
      ptx::mbarrier_wait(memory.do_full + 8 * ds, dop);
      if (Ranged && !at.whole(at.tile * kRows)) Guard::clean_queries(pf, memory, smem, query_rows(qs), out_rows(ds));
      ptx::wgmma_fence();
      issue_scores(dp, memory.v, out_rows(ds));
      if (kEarlyDelta) load_stats(delta, memory.delta, ds);
      ptx::wgmma_fence();
      issue_sum<kDv>(dv, pf, out_rows(ds));
      ptx::wgmma_wait<1>();  // dP
      if (!kEarlyDelta) load_stats(delta, memory.delta, ds);
      ptx::keep(dp);
      // The tile written here was last read by dQ two iterations ago. Both warpgroups waited for that before they said
      // that the tile of one iteration ago was ready.
      gradient(scores, df, dp, delta, ds_tile, pf, at);
      ptx::bar_arrive(4 + 2 * (it & 1) + group, 256);  // two pairs: the warpgroups may drift apart until the wait below
      if (it + 1 < total) {  // else S is recomputed: a branch around wgmma would cost the overlap
        if (++qs == Shape::kQueryStages) qs = 0, qp ^= 1;
        if (++ds == Shape::kOutStages) ds = 0, dop ^= 1;
        at.next();
      }
      ptx::mbarrier_wait(memory.q_full + 8 * qs, qp);
      if (kEarlyLse) load_stats(lse, memory.lse, qs);
      ptx::wgmma_fence();
      issue_sum<kD>(dk, df, query_rows(this_qs));
      ptx::wgmma_fence();
      issue_scores(scores, memory.k, query_rows(qs));
      ptx::wgmma_wait<0>();  // @products_done: dV, dK, S of the next tile
      release(memory.q_empty + 8 * this_qs);
      ptx::keep(scores);
      release(memory.do_empty + 8 * this_ds);
      ptx::bar_sync(4 + 2 * (it & 1) + (group ^ 1), 256);
      issue_dq(dq, ds_tile, group);
      softmax(scores, pf, lse, at, qs);
      ptx::wgmma_wait<0>();
      ptx::keep(dq);
      if (Shape::kDeterministic && it > 0) ptx::bar_sync(8 + group, 160);
      store_dq(dq, tile, group);
    }
    finish(total > 0);
  }
  // stored: has any dQ been?
  __device__ __forceinline__ void finish(bool stored) {
    ptx::wgmma_wait<0>();
    ptx::keep(dk);
    ptx::keep(dv);
    if (Shape::kDeterministic && stored) ptx::bar_sync(8 + group, 160);
    if (task.key_value_sum)
      add();
    else
      write(0, task.kv_len);
    if (!Shape::kDeterministic && task.query_blocks)
      finish_queries<Shape>(task, where, reinterpret_cast<uint32_t*>(smem + (memory.votes - memory.k)));
  }

  // to the sums of a group of query heads
  __device__ __forceinline__ void add() {
    const int64_t tile = (int64_t(where.batch) * task.kv_heads + where.head_k) * task.key_tiles + where.key_tile;
    float* to_k = task.key_value_sum + (tile * 2 + group) * (Shape::kKeys / 2 * kD) + tid * 4;
    to_k = ptx::opaque(to_k);
    float* to_v = to_k + int64_t(task.batch) * task.kv_heads * task.key_tiles * (Shape::kKeys * kD);
    to_v = ptx::opaque(to_v);
#pragma unroll
    for (int j = 0; j < Shape::kHeld / 8; j++) {
      ptx::reduce_add_v4(to_k + j * 512, dk[4 * j], dk[4 * j + 1], dk[4 * j + 2], dk[4 * j + 3]);
      if (j < Shape::kHeldDv / 8)
        ptx::reduce_add_v4(to_v + j * 512, dv[4 * j], dv[4 * j + 1], dv[4 * j + 2], dv[4 * j + 3]);
    }
  }

  // through the K and V tiles: whole 16-byte chunks to global memory; k_begin, k_rows: of the item's keys
  __device__ __forceinline__ void write(int k_begin, int k_rows) {
    constexpr int kChunks = Shape::kHeld / 8;
    const int first_chunk = Shape::kByColumns ? group * kChunks : 0;
    ptx::bar_sync(1, 256);
#pragma unroll
    for (int kk = 0; kk < Shape::kHeld / 16; kk++) {
      const uint32_t at =
          Shape::chunk_at(0, Shape::kKeyPanel, first_key() + warp * 16 + lane % 16, first_chunk + kk * 2 + lane / 16);
      uint32_t a[4], b[4];
#pragma unroll
      for (int q = 0; q < 4; q++) {
        a[q] = ptx::pack2<T>(dk[8 * kk + 2 * q] * task.scale, dk[8 * kk + 2 * q + 1] * task.scale);
        if (kk < Shape::kHeldDv / 16) b[q] = ptx::pack2<T>(dv[8 * kk + 2 * q], dv[8 * kk + 2 * q + 1]);
      }
      ptx::stmatrix_x4(memory.k + at, a);
      if (kk < Shape::kHeldDv / 16) ptx::stmatrix_x4(memory.v + at, b);
    }
    __syncwarp();
    const auto head_of = [&](void* base, const Strides& strides) {
      return static_cast<T*>(base) + where.batch * strides.batch + where.head_k * strides.head + k_begin * strides.row;
    };
    T* out_k = head_of(task.grad_key, task.grad_key_strides);
    T* out_v = head_of(task.grad_value, task.grad_value_strides);
#pragma unroll 4
    for (int i = 0; i < kChunks / 2; i++) {
      const int c = i * 32 + lane, row = first_key() + warp * 16 + c / kChunks, chunk = first_chunk + c % kChunks;
      const unsigned char* from = smem + Shape::chunk_at(0, Shape::kKeyPanel, row, chunk);
      if (n0 + row >= k_rows) continue;
      if (task.grad_key && chunk * 8 < task.head_dim)
        *reinterpret_cast<uint4*>(out_k + (n0 + row) * task.grad_key_strides.row + chunk * 8) =
            *reinterpret_cast<const uint4*>(from);
      if (task.grad_value && chunk * 8 < task.v_head_dim)  // at most kDv
        *reinterpret_cast<uint4*>(out_v + (n0 + row) * task.grad_value_strides.row + chunk * 8) =
            *reinterpret_cast<const uint4*>(from + Shape::kKeyBytes);
    }
  }
};

template <class Shape>
struct Sm90Backward {
  template <bool Ranged, class Consumer>
  static __device__ __forceinline__ void run(const Sm90BackwardMaps& maps, const BackwardTask& task) {
    unsigned char* smem = ptx::dynamic_smem();
    const Sm90BackwardMemory<Shape> memory(ptx::smem_addr(smem));
    const BackwardTile where(task, blockIdx.x, Shape::kDeterministic);
    const Sequence sequence = sequence_of(task, where.batch);
    const BackwardQueries<Shape::kRows, Shape::kKeys, Ranged> at(task, where, sequence);
    const int total = at.per_head() * where.heads;
    if (threadIdx.x == 0) memory.init();
    __syncthreads();
    const int role = ptx::uniform(threadIdx.x / 128);
    if (role == 0) {
      ptx::setmaxnreg_dec<Shape::kProducerRegisters>();
      if (threadIdx.x == 0 && total > 0) feed(maps, task, where, sequence, at, total, memory);
      if (Shape::kDeterministic && (threadIdx.x / 32 == 1 || threadIdx.x / 32 == 2))
        add_in_turn(task, where, sequence, at, total, memory, threadIdx.x / 32 - 1);
    } else {
      ptx::setmaxnreg_inc<Shape::kConsumerRegisters>();
      Consumer(task, where, memory, smem, role - 1).run(at, total);
    }
  }

  template <class Queries>
  static __device__ __forceinline__ void feed(const Sm90BackwardMaps& maps, const BackwardTask& task,
                                              const BackwardTile& where, const Sequence& sequence, Queries at,
                                              int total, const Sm90BackwardMemory<Shape>& memory) {
    const int n0 = where.key_tile * Shape::kKeys, batch = where.batch;
    ptx::mbarrier_arrive_expect_tx(memory.kv_full, Shape::kKeyBytes + Shape::kValueBytes);
    const int k_len = sequence.keys.key_length;
    tma_load_rows<Shape::kKeys, Shape::kPanels>(memory.k, maps.key, maps.key8, maps.key1, n0, k_len, task.kv_len,
                                                where.head_k, batch, memory.kv_full);
    tma_load_rows<Shape::kKeys, Shape::kOutPanels>(memory.v, maps.value, maps.value8, maps.value1, n0, k_len,
                                                   task.kv_len, where.head_k, batch, memory.kv_full);
    const auto load = [&]<int Panels>(const ptx::TensorMap& map, const ptx::TensorMap& eight, const ptx::TensorMap& one,
                                      uint32_t tile, const float* from, uint32_t stats, uint32_t bar) {
      const int row = at.tile * Shape::kRows;
      ptx::mbarrier_arrive_expect_tx(bar, Panels * Shape::kQueryPanel + Shape::kRows * 4);
      tma_load_rows<Shape::kRows, Panels>(tile, map, eight, one, row, sequence.q_len, task.q_len, at.head, batch, bar);
      ptx::bulk_load(stats, from + (int64_t(batch) * task.q_heads + at.head) * task.rows + row, Shape::kRows * 4, bar);
    };
    int qs = 0, qp = 1, ds = 0, dop = 1;
    for (int it = 0; it < total; it++) {
      ptx::mbarrier_wait(memory.q_empty + 8 * qs, qp);
      load.template operator()<Shape::kPanels>(maps.query, maps.query8, maps.query1, memory.q + qs * Shape::kQueryBytes,
                                               task.lse2, memory.lse + qs * Shape::kRows * 4, memory.q_full + 8 * qs);
      ptx::mbarrier_wait(memory.do_empty + 8 * ds, dop);
      load.template operator()<Shape::kOutPanels>(maps.grad_out, maps.grad_out8, maps.grad_out1,
                                                  memory.d_out + ds * Shape::kOutBytes, task.delta,
                                                  memory.delta + ds * Shape::kRows * 4, memory.do_full + 8 * ds);
      if (++qs == Shape::kQueryStages) qs = 0, qp ^= 1;
      if (++ds == Shape::kOutStages) ds = 0, dop ^= 1;
      at.next();
    }
  }

  // Deterministic: one warp for each warpgroup's half of dQ, in the order that `turn` gives.
  template <class Queries>
  static __device__ __forceinline__ void add_in_turn(const BackwardTask& task, const BackwardTile& where,
                                                     const Sequence& sequence, Queries at, int total,
                                                     const Sm90BackwardMemory<Shape>& memory, int half) {
    for (int it = 0; it < total; it++) {
      const int64_t tile = (int64_t(where.batch) * task.q_heads + at.head) * at.tiles + at.tile;
      // recomputed: registers are few
      const int turn = at.turn(task, where, sequence_of(task, ptx::opaque(where.batch)));
      const auto add = [&](int piece) {
        ptx::bar_sync(2 + half, 160);  // written
        if (threadIdx.x % 32 == 0) {
          ptx::turn_wait(task.turn + 2 * tile + half, turn);
          ptx::bulk_reduce_add(task.query_sum + tile * (Shape::kRows * Shape::kD) + piece * 4096,
                               memory.dq + half * 16384, 16384);
          ptx::bulk_commit();
          ptx::bulk_wait_read<0>();
        }
        __syncwarp();
        ptx::bar_arrive(8 + half, 160);  // read
      };
      if constexpr (Shape::kPieces == 2) {
        add(half);
      } else {
#pragma unroll
        for (int piece = 0; piece < Shape::kPieces; piece++)
          if (Shape::adds(piece, half, at.tile)) add(piece);
      }
      if (threadIdx.x % 32 == 0) {
        ptx::bulk_wait<0>();
        ptx::thread_fence();
        ptx::turn_pass(task.turn + 2 * tile + half, turn + 1);
      }
      at.next();
    }
  }
};

// grid: key_tiles * (key_value_sum ? q_heads : kv_heads) * batch
template <class Shape, bool Ranged>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sm90_backward(const __grid_constant__ Sm90BackwardMaps maps, const __grid_constant__ BackwardTask task) {
  Sm90Backward<Shape>::template run<Ranged, Sm90BackwardConsumer<Shape, Ranged>>(maps, task);
}

}  // namespace attnjourney
