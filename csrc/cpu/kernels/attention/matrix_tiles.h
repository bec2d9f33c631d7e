// The two products of attention/matrix_products.h on a matrix unit (registers of 16 x 16 float32 or 16 x 32 bfloat16):
// six accumulators, one register for each operand.
#pragma once
#include "cpu/kernels/common/pack.h"

namespace attnjourney {
namespace {

// f(Rows<0>) .. f(Rows<N - 1>)
template <int N, class F>
ATTN_INLINE void unrolled(F&& f) {
  if constexpr (N > 1) unrolled<N - 1>(f);
  f(Rows<N - 1>{});
}

template <class Unit>
struct MatrixTiles {
  static constexpr int64_t side = 16, keys = 2 * side;  // of a group
  static constexpr int columns = 3;                     // the most registers side by side

  // S[32 keys][16 N lanes of ld] = K Q^T: K rows of 2 * pairs numbers, Q [pairs][ld], pairs a multiple of 16
  template <int N>
  static ATTN_NOINLINE void scores(const bf16* K, int64_t ldk, const uint32_t* Q, int64_t pairs, float* S, int64_t ld) {
    unrolled<2 * N>([](auto i) { Unit::template zero<i.count>(); });
    for (int64_t x = 0; x < pairs; x += side)
      unrolled<2>([&](auto i) {
        Unit::template load<6>(K + i.count * side * ldk + 2 * x, ldk * 2);
        unrolled<N>([&](auto j) {
          Unit::template load<7>(Q + x * ld + side * j.count, ld * 4);
          Unit::template dot<i.count * N + j.count, 6, 7>();
        });
      });
    unrolled<2>([&](auto i) {
      unrolled<N>([&](auto j) {
        Unit::template store<i.count * N + j.count>(S + i.count * side * ld + side * j.count, ld * 4);
      });
    });
  }

  // P [pairs of keys][ld] -> A [group of 16 rows][step of 16 pairs][16 rows][16 pairs], 0 beyond the last pair
  static ATTN_NOINLINE void transpose_weights(const uint32_t* P, int64_t ld, int64_t pairs, int64_t groups,
                                              uint32_t* A) {
    static_assert(Vf::width == side);
    float* to = reinterpret_cast<float*>(A);
    for (int64_t g = 0; g < groups; g++)
      for (int64_t x = 0; x < pairs; x += side, to += side * side) {
        Vf t[side];
        for (int64_t i = 0; i < side; i++)
          t[i] = x + i < pairs ? load(reinterpret_cast<const float*>(P + (x + i) * ld + g * side)) : Vf::zero();
        transpose(t);
        ATTN_UNROLL for (int i = 0; i < side; i++) store(to + i * side, t[i]);
      }
  }
  // C[16 G rows][16 N columns] = A V, V [pairs of keys][ldv], which ends in 15 rows of zeros
  template <int G, int N>
  static ATTN_NOINLINE void values(const uint32_t* A, const uint32_t* V, int64_t ldv, int64_t pairs, float* C) {
    unrolled<G * N>([](auto i) { Unit::template zero<i.count>(); });
    const int64_t group = (pairs + side - 1) / side * side * side;
    for (int64_t x = 0; x < pairs; x += side, A += side * side)
      unrolled<N>([&](auto j) {
        Unit::template load<7>(V + x * ldv + side * j.count, ldv * 4);
        unrolled<G>([&](auto g) {
          Unit::template load<6>(A + g.count * group, side * 4);
          Unit::template dot<g.count * N + j.count, 6, 7>();
        });
      });
    unrolled<G>([&](auto g) {
      unrolled<N>([&](auto j) {
        Unit::template store<g.count * N + j.count>(C + g.count * side * N * side + side * j.count, N * side * 4);
      });
    });
  }
};

}  // namespace
}  // namespace attnjourney
