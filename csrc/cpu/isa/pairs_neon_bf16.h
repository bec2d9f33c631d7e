// Products of bfloat16 pairs (FEAT_BF16: Armv8.6, Neoverse V1, N2 and later, Apple M2 and later): what vec_neon.h does
// not have.
#pragma once
#include "vec_neon.h"

namespace attnjourney {
namespace {

// 4 lanes of two bfloat16 numbers: low half first
struct Pairs {
  uint32x4_t v;
  static constexpr int width = 4;
};
ATTN_INLINE uint16x8_t numbers_of(Pairs a) { return vreinterpretq_u16_u32(a.v); }
ATTN_INLINE Pairs pairs_of(uint16x8_t numbers) { return {vreinterpretq_u32_u16(numbers)}; }
ATTN_INLINE Pairs load_pairs(const uint32_t* p) { return {from_memory<uint32x4_t>(p)}; }
ATTN_INLINE void store_pairs(uint32_t* p, Pairs a) { to_memory(p, a.v); }
// The same pair for all lanes: products take it as an element of a register, and no pipe of theirs copies it.
struct PairForAll {
  bfloat16x4_t v;
};
// two neighbours in memory, at any 2-byte boundary
ATTN_INLINE PairForAll broadcast_pair(const void* p) { return {vcreate_bf16(from_memory<uint32_t>(p))}; }
// sum + a.low * b.low + a.high * b.high
ATTN_INLINE Vf dot_pairs(Vf sum, Pairs a, Pairs b) {
  return {vbfdotq_f32(sum.v, vreinterpretq_bf16_u32(a.v), vreinterpretq_bf16_u32(b.v))};
}
ATTN_INLINE Vf dot_pairs(Vf sum, PairForAll a, Pairs b) {
  return {vbfdotq_lane_f32(sum.v, vreinterpretq_bf16_u32(b.v), a.v, 0)};
}
// 8 numbers in a row, rounded to nearest even
ATTN_INLINE Pairs round_neighbours(Vf first, Vf second) {
  return {vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first.v), second.v))};
}
// rounded to nearest even
ATTN_INLINE Pairs round_pairs(Vf low, Vf high) {
  const uint16x8_t side_by_side = numbers_of(round_neighbours(low, high));
  return pairs_of(vzip1q_u16(side_by_side, vextq_u16(side_by_side, side_by_side, 4)));
}
// sum + a.low + a.high; not as a product with ones, of which g++ 12 makes float16's
ATTN_INLINE Vf add_pairs(Vf sum, Pairs a) {
  const float32x4_t low = vreinterpretq_f32_u32(vshlq_n_u32(a.v, 16));
  const float32x4_t high = vreinterpretq_f32_u32(vandq_u32(a.v, vdupq_n_u32(0xffff0000)));
  return {vaddq_f32(sum.v, vaddq_f32(low, high))};
}
ATTN_INLINE Vf reciprocal(Vf a) { return Vf::set(1.f) / a; }
// rows a and b, 4 columns of each -> (a[d], b[d])
ATTN_INLINE Pairs zip(const bf16* a, const bf16* b) {
  const uint32x4_t low = vmovl_u16(from_memory<uint16x4_t>(a));
  return {vsliq_n_u32(low, vmovl_u16(from_memory<uint16x4_t>(b)), 16)};
}
ATTN_INLINE bool all_finite(Pairs a) {
  const uint16x8_t exponent = vdupq_n_u16(0x7f80);
  return vmaxvq_u16(vceqq_u16(vandq_u16(numbers_of(a), exponent), exponent)) == 0;
}
// the halves whose 16 bits are at least the threshold, else 0; threshold 65536 keeps none
ATTN_INLINE Pairs keep_pairs(Lanes bits, uint32_t threshold, Pairs a) {
  if (threshold > 0xffff) return {vdupq_n_u32(0)};
  const uint16x8_t keep = vcgeq_u16(vreinterpretq_u16_u32(bits.v), vdupq_n_u16(uint16_t(threshold)));
  return {vandq_u32(vreinterpretq_u32_u16(keep), a.v)};
}

// the numbers of x, rounded to bfloat16
ATTN_INLINE Vf rounded_to_bf16(Vf x) {
  const uint16x4_t numbers = vreinterpret_u16_bf16(vcvt_bf16_f32(x.v));
  return {vreinterpretq_f32_u32(vshll_n_u16(numbers, 16))};
}
// 8 numbers in a row
ATTN_INLINE Pairs load_pairs(const bf16* p) { return {from_memory<uint32x4_t>(p)}; }
// the first n of them, the others 0 and not read
ATTN_INLINE Pairs load_pairs(const bf16* p, int64_t n) {
  uint16_t numbers[8] = {};
  for (int64_t i = 0; i < n; i++) numbers[i] = p[i].bits;
  return {from_memory<uint32x4_t>(numbers)};
}
// Numbers of a and b side by side, in an order that `in_order` undoes for what is computed of them in two halves.
ATTN_INLINE void zip_rows(Pairs a, Pairs b, Pairs& some, Pairs& others) {
  some = pairs_of(vzip1q_u16(numbers_of(a), numbers_of(b)));
  others = pairs_of(vzip2q_u16(numbers_of(a), numbers_of(b)));
}
ATTN_INLINE void in_order(Vf&, Vf&) {}

}  // namespace
}  // namespace attnjourney
