// Host twins of csrc/cuda/ptx/fp32_device.cuh.
#pragma once
#include "ptx_sm80.h"

namespace emulator {

// d += a b on the fragments of a warp (machine/fp32.cpp)
void mma_m16n8k8(float* d, const uint32_t* a, const uint32_t* b, Site);
// of numbers that are said to be rounded to TF32: an error where one is not
void rounded_bits(uint32_t (&bits)[6], std::initializer_list<float>, Site);
void mma_m8n8k4(double* d, double a, double b, Site);
void reduce_add(double*, double, Site);

}  // namespace emulator

namespace attnjourney::ptx {

inline float round_tf32(float x) {
  const uint32_t u = emulator::bits_of(x);
  if ((u & 0x7fffffff) > 0x7f800000) return emulator::float_of(0x7fffffff);
  return emulator::float_of((u & 0x7fffffff) == 0x7f800000 ? u : (u + 0x1000) & ~0x1fffu);
}
inline void split(float x, uint32_t& high, uint32_t& low) {
  high = (emulator::bits_of(x) + 0x1000u) & 0xffffe000u;
  low = emulator::bits_of(x - emulator::float_of(high));
}
inline void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site s = Site::here()) {
  const uint32_t b[2] = {b0, b1};
  emulator::mma_m16n8k8(d, a, b, s);
}
inline void mma_m16n8k8(float (&d)[4], const float (&a)[4], float b0, float b1, Site s = Site::here()) {
  uint32_t bits[6];
  emulator::rounded_bits(bits, {a[0], a[1], a[2], a[3], b0, b1}, s);
  emulator::mma_m16n8k8(d, bits, bits + 4, s);
}
inline void mma_m8n8k4(double& d0, double& d1, double a, double b, Site s = Site::here()) {
  double d[2] = {d0, d1};
  emulator::mma_m8n8k4(d, a, b, s);
  d0 = d[0], d1 = d[1];
}

inline double exp2(double x) { return std::exp2(x); }
inline double rounded_product(double a, double b) { return a * b; }
inline double log2(double x) { return std::log2(x); }
inline float tanh(float x) { return std::tanh(x); }
inline double tanh(double x) { return std::tanh(x); }
inline float to_float(float x) { return x; }
inline double to_float(double x) { return x; }
inline double shfl_xor(double v, int lane_mask, Site s = Site::here()) {
  uint32_t half[2];
  std::memcpy(half, &v, 8);
  for (uint32_t& h : half) h = shfl_xor(h, lane_mask, s);
  std::memcpy(&v, half, 8);
  return v;
}
inline void reduce_add(double* p, double v, Site s = Site::here()) { emulator::reduce_add(p, v, s); }

}  // namespace attnjourney::ptx
