// Host twins of csrc/cuda/ptx/sm80_device.cuh: the same names and meanings, run by the emulator.
#pragma once
#include <type_traits>

#include "emulator.h"

namespace attnjourney {

using Bf16 = emulator::Bf16;
using Half = emulator::Half;

namespace ptx {

using emulator::Site;

template <class T>
inline constexpr bool is_bf16 = std::is_same_v<T, Bf16>;

inline unsigned char* dynamic_smem() { return emulator::dynamic_smem(); }
inline uint32_t smem_addr(const void* p, Site s = Site::here()) { return emulator::smem_addr(p, s); }
inline void cp_async_16(uint32_t dst, const void* src, bool valid, Site s = Site::here()) {
  emulator::cp_async(dst, src, 16, valid ? 16 : 0, s);
}
inline void cp_async_4(uint32_t dst, const void* src, bool valid, Site s = Site::here()) {
  emulator::cp_async(dst, src, 4, valid ? 4 : 0, s);
}
inline void cp_async_commit() { emulator::cp_async_commit(); }
template <int Pending>
void cp_async_wait() {
  emulator::cp_async_wait(Pending);
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr, Site s = Site::here()) {
  emulator::ldmatrix(r, addr, 4, false, s);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr, Site s = Site::here()) {
  emulator::ldmatrix(r, addr, 4, true, s);
}

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site s = Site::here()) {
  const uint32_t b[2] = {b0, b1};
  emulator::mma_m16n8k16(d, a, b, is_bf16<T>, s);
}
inline float exp2(float x) { return std::exp2(x); }
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float rounded_product(float a, float b) { return a * b; }
inline float log2(float x) { return std::log2(x); }
inline float reciprocal(float x) { return 1.f / x; }
inline float to_float(Bf16 x) { return emulator::from_bf16(x.bits); }
inline float to_float(Half x) { return emulator::from_half(x.bits); }
inline float as_float(uint32_t bits) { return emulator::float_of(bits); }
inline uint32_t as_bits(float x) { return emulator::bits_of(x); }
template <class T>
uint32_t pack2(float lo, float hi) {
  const auto bits = [](float f) {
    return static_cast<uint32_t>(is_bf16<T> ? emulator::to_bf16(f) : emulator::to_half(f));
  };
  return bits(lo) | bits(hi) << 16;
}
template <class T>
float2 unpack2(uint32_t v) {
  const auto value = [](uint32_t u) {
    const auto b = static_cast<uint16_t>(u);
    return is_bf16<T> ? emulator::from_bf16(b) : emulator::from_half(b);
  };
  return {value(v), value(v >> 16)};
}
template <class T>
uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {  // rounded twice: kernels' sums are exact
  const float2 x = unpack2<T>(a), y = unpack2<T>(b), z = unpack2<T>(c);
  return pack2<T>(std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}
inline uint32_t byte_permute(uint32_t v, uint32_t selector) {
  uint32_t r = 0;
  for (int i = 0; i < 4; i++)
    if (const uint32_t from = selector >> 4 * i & 7; from < 4) r |= (v >> 8 * from & 0xffu) << 8 * i;
  return r;
}

inline uint32_t shfl_xor(uint32_t v, int lane_mask, Site s = Site::here()) {
  return emulator::shfl(v, lane_mask, emulator::Shuffle::exclusive_or, s);
}
inline float shfl_xor(float v, int lane_mask, Site s = Site::here()) {
  return emulator::float_of(shfl_xor(emulator::bits_of(v), lane_mask, s));
}
inline uint32_t shfl(uint32_t v, int lane, Site s = Site::here()) {
  return emulator::shfl(v, lane, emulator::Shuffle::index, s);
}
inline int uniform(int v, Site s = Site::here()) {
  return static_cast<int>(emulator::shfl(static_cast<uint32_t>(v), 0, emulator::Shuffle::index, s));
}
inline bool any(bool b, Site s = Site::here()) { return emulator::ballot(b, s) != 0; }
inline uint32_t ballot(bool b, Site s = Site::here()) { return emulator::ballot(b, s); }
inline int first_bit(uint32_t v) { return __builtin_ctz(v); }
inline int count_bits(uint32_t v) { return __builtin_popcount(v); }
inline void bar_sync(int id, int threads, Site s = Site::here()) { emulator::bar_sync(id, threads, s); }
inline void bar_arrive(int id, int threads, Site s = Site::here()) { emulator::bar_arrive(id, threads, s); }
inline void reduce_add(float* p, float v, Site s = Site::here()) { emulator::reduce_add(p, &v, 1, s); }
inline uint32_t atomic_add(uint32_t* p, uint32_t v, Site s = Site::here()) { return emulator::atomic_add(p, v, s); }
inline uint32_t atomic_or(uint32_t* p, uint32_t v, Site s = Site::here()) { return emulator::atomic_or(p, v, s); }
inline void thread_fence() { emulator::thread_fence(); }
inline void turn_wait(const int* p, int turn, Site s = Site::here()) { emulator::turn_wait(p, turn, s); }
inline void turn_pass(int* p, int next) { emulator::turn_pass(p, next); }

template <class T>
T* global(T* p) {
  return p;
}
inline uint32_t opaque(uint32_t v) { return v; }
template <class T>
T* opaque(T* p) {
  return p;
}

}  // namespace ptx
}  // namespace attnjourney
