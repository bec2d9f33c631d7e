// Attention forward for Hopper (after FlashAttention-3, arXiv 2407.08608). One block is a producer warpgroup, which
// feeds Q, K and V tiles by TMA, and consumer warpgroups of 64 query rows each. The grid may be smaller than the number
// of tiles: a block then takes one tile after the other without a gap: the first S = Q K^T of a tile is issued before
// the last O += P V of the tile before it. Key tiles go from last to first, so that those with a mask come first.
#pragma once
#include "forward_guard.cuh"
#include "forward_output.cuh"
#include "forward_producer.cuh"
#include "forward_products.cuh"
#include "forward_softmax.cuh"

namespace attnjourney {

template <class S>
struct Sm90Forward {
  using T = typename S::T;
  using Slot = Sm90ForwardSlot;
  using Barriers = Sm90ForwardBarriers<S>;
  using Output = Sm90ForwardOutput<S>;
  using Guard = Sm90ForwardGuard<S>;
  using Products = Sm90ForwardProducts<S>;

  static __device__ __forceinline__ void consume(uint32_t smem, unsigned char* base, const Barriers& b,
                                                 const Slot* slots, const ptx::TensorMap& out_map,
                                                 const ForwardTask& p) {
    const int group = ptx::uniform(threadIdx.x / 128) - 1, lane = threadIdx.x % 32, t = lane % 4;
    const int r0 = (threadIdx.x - 128) / 32 * 16 + lane / 4;  // this thread's row of the tile; and r0 + 8
    const float scale = p.scale_log2;
    auto release = [&](uint32_t bar) {
      if (lane == 0) ptx::mbarrier_arrive(bar);
    };
    auto token_wait = [&] {
      if (S::kPingPong) ptx::bar_sync(1 + group, 256);
    };
    auto token_pass = [&] {
      if (S::kPingPong) ptx::bar_arrive(1 + (group + 1 == S::kGroups ? 0 : group + 1), 256);
    };
    if (S::kPingPong && group == S::kGroups - 1) ptx::bar_arrive(1, 256);

    float o[S::kDv / 2], s[S::kKeys / 2];
    Sm90ForwardSoftmax<S> soft;
    soft.alpha[0] = soft.alpha[1] = 1.f;
    uint32_t pr[S::kKeys / 16][4];
    int round = 0;  // tiles so far
    int c = 0;      // key tiles so far; pr holds the probabilities of this one
    int n = 0;      // its number
    int after = 0;  // that of the one after it
    bool hides = false;
    int turn = 0;  // of the flags

    // where registers are few, what follows from `round` is not held
    auto rounds = [&] { return S::kTight ? int(ptx::opaque(round)) : round; };
    auto query_stage = [&] { return group * S::kQueryStages + rounds() % S::kQueryStages; };
    auto qk = [&](int stage) {  // issue S = Q K^T
      Products::scores(s, smem + query_stage() * S::kQueryBytes, smem + S::kKeyAt + stage * S::kKeyBytes);
    };
    auto pv = [&](int stage) {  // issue O += P V
      Products::output(o, pr, smem + S::kValueAt + stage * S::kValueBytes);
    };
    auto wait_k = [&](int count) { ptx::mbarrier_wait(b.k_full + 8 * (count % S::kStages), count / S::kStages & 1); };
    auto wait_v = [&](int count) { ptx::mbarrier_wait(b.v_full + 8 * (count % S::kStages), count / S::kStages & 1); };
    auto release_k = [&](int count) { release(b.k_empty + 8 * (count % S::kStages)); };
    auto release_v = [&](int count) { release(b.v_empty + 8 * (count % S::kStages)); };
    const uint32_t zero = uint32_t(p.total) >> 31;  // unknown to ptxas, which would put `early` where pr is still read
    auto pack = [&] {
#pragma unroll
      for (int kk = 0; kk < S::kKeys / 16; kk++)
#pragma unroll
        for (int q = 0; q < 4; q++)
          pr[kk][q] = 2 * kk + q / 2 < S::kAhead ? soft.early[4 * kk + q] ^ zero
                                                 : ptx::pack2<T>(s[8 * kk + 2 * q], s[8 * kk + 2 * q + 1]);
    };
    auto slot = [&](int before = 0) -> const Slot& { return slots[group * 4 + (rounds() - before) % 4]; };
    auto softmax = [&] {
      if (hides) {
        const Slot& x = slot();
        soft.hide(s, p, x.sequence(p), x.row + r0, n * S::kKeys + 2 * t);
      }
      return soft.run(s, scale);
    };
    const int whole = p.kv_len / S::kKeys;
    auto look = [&] {  // under the products: does key tile n hide anything, and which one follows?
      after = n - 1;
      hides = n >= whole;
      if constexpr (S::kRanged) {
        const int4 x = *reinterpret_cast<const int4*>(&slot().begin);
        if (n == x.x) after = ptx::uniform(x.y) - 1;
        hides = n < x.z || n >= x.w;
      }
    };
    // The rule for numbers that are not finite (csrc/README.md), where a tile hides something: O += P V by mma.sync.
    auto leaks = [&] {
      if (!S::kRanged || !hides) return false;
      wait_v(c);
      return !Guard::finite(base + S::kValueAt + c % S::kStages * S::kValueBytes, base + S::kFlagsAt, turn);
    };
    auto guarded_pv = [&] {
      Guard::product(o, pr, smem + S::kValueAt + c % S::kStages * S::kValueBytes);
      if constexpr (S::kTight) {  // or they would be held beside what the product needs
#pragma unroll
        for (int e = 0; e < S::kKeys / 2; e++) s[e] = 0.f;
      }
      __syncwarp();
      release_v(c);
    };
    auto clear = [&] {
#pragma unroll
      for (int e = 0; e < S::kDv / 2; e++) o[e] = 0.f;
    };
    int2 next;         // start, first
    auto peek = [&] {  // where the next tile starts; less than 0: there is none
      ptx::mbarrier_wait(b.q_full + 8 * query_stage(), round / S::kQueryStages & 1);
      next = *reinterpret_cast<const int2*>(&slot());
      return ptx::uniform(next.x);
    };
    auto release_q = [&] {
      __syncwarp();
      release(b.q_empty + 8 * query_stage());
      round++;
    };
    auto enter = [&] {
      n = ptx::uniform(next.y);
      soft.start();
    };

    int start = peek();
    for (bool started = false;;) {
      if (!started) {
        for (; start == 0; start = peek()) {
          Output::write_zeros(r0, t, slot(), p);
          release_q();
        }
        if (start < 0) break;
        enter();
        for (int k = 1; k < start; k++, c++) {  // key tiles that only other warpgroups see
          token_wait();
          token_pass();
          wait_k(c);
          wait_v(c);
          __syncwarp();  // @lanes_met: none may still wait when the next phase but one begins
          release_k(c);
          release_v(c);
        }
        wait_k(c);
        token_wait();
        qk(c % S::kStages);
        token_pass();
        look();
        ptx::wgmma_wait<0>();
        ptx::keep(s);
        release_k(c);
        softmax();
        pack();
        clear();
      }
      while (after >= 0) {
        if (leaks()) {
          guarded_pv();
          n = after;
          wait_k(c + 1);
          token_wait();
          qk((c + 1) % S::kStages);
          token_pass();
          look();
          ptx::wgmma_wait<0>();
          ptx::keep(s);
          release_k(c + 1);
          const bool moved = softmax();
          pack();
          if (moved) {
#pragma unroll
            for (int e = 0; e < S::kDv / 2; e++) o[e] *= soft.alpha[e >> 1 & 1];
          }
          c++;
          continue;
        }
        n = after;
        wait_k(c + 1);
        token_wait();
        qk((c + 1) % S::kStages);
        wait_v(c);
        pv(c % S::kStages);
        token_pass();
        look();
        ptx::wgmma_wait<1>();
        ptx::keep(s);
        release_k(c + 1);
        const bool moved = softmax();
        ptx::wgmma_wait<0>();
        ptx::keep(o);
        release_v(c);
        pack();
        if (moved) {
#pragma unroll
          for (int e = 0; e < S::kDv / 2; e++) o[e] *= soft.alpha[e >> 1 & 1];
        }
        c++;
      }
      release_q();  // first: the last values come after the next tile's queries
      const bool rare = leaks();
      if (rare) guarded_pv();
      const float last_max[2] = {soft.max[0], soft.max[1]}, last_sum[2] = {soft.sum[0], soft.sum[1]};
      start = peek();
      started = start == 1 && !rare;
      if (started) {  // as above, across two tiles
        enter();
        wait_k(c + 1);
        token_wait();
        qk((c + 1) % S::kStages);
        wait_v(c);
        pv(c % S::kStages);
        token_pass();
        look();
        ptx::wgmma_wait<1>();
        ptx::keep(s);
        release_k(c + 1);
        softmax();
        ptx::wgmma_wait<0>();
        ptx::keep(o);
        release_v(c);
      } else if (!rare) {
        wait_v(c);
        pv(c % S::kStages);
        ptx::wgmma_wait<0>();
        ptx::keep(o);
        release_v(c);
      }
      if (started) pack();
      c++;
      if (S::kStore)
        Output::store(o, last_max, last_sum, r0, lane, smem, base, slot(1), out_map, p);
      else
        Output::write(o, last_max, last_sum, scale, r0, t, slot(1), p);
      clear();
    }
    if (S::kStore && lane == 0) ptx::bulk_wait_read<0>();
  }

  static __device__ __forceinline__ void run(const Sm90ForwardMaps& maps, const ForwardTask& p) {
    sm90_forward_roles<S>(
        [&](uint32_t smem, unsigned char* base, const Barriers& b) {
          Sm90ForwardProducer<S>{{smem, b, maps, p}, reinterpret_cast<Slot*>(base + S::kSlotsAt)}.run();
        },
        [&](uint32_t smem, unsigned char* base, const Barriers& b) {
          consume(smem, base, b, reinterpret_cast<const Slot*>(base + S::kSlotsAt), maps.out, p);
        });
  }
};

// grid: at most the number of tiles
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sm90_forward(const __grid_constant__ Sm90ForwardMaps maps, const __grid_constant__ ForwardTask p) {
  Sm90Forward<Shape>::run(maps, p);
}

}  // namespace attnjourney
