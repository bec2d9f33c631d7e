// Host twins of csrc/cuda/ptx/tf32_device.cuh.
#pragma once
#include "ptx_sm80.h"

namespace emulator {
void mma_m16n8k8_tf32(float* d, const float* a, const float* b, Site);  // tf32.cpp
}

namespace attnjourney::ptx {

inline float round_tf32(float x) {
  const uint32_t u = emulator::bits_of(x);
  if ((u & 0x7fffffff) > 0x7f800000) return emulator::float_of(0x7fffffff);
  return emulator::float_of((u & 0x7fffffff) == 0x7f800000 ? u : (u + 0x1000) & ~0x1fffu);
}
inline void mma_m16n8k8_tf32(float (&d)[4], const float (&a)[4], float b0, float b1, Site s = Site::here()) {
  const float b[2] = {b0, b1};
  emulator::mma_m16n8k8_tf32(d, a, b, s);
}

}  // namespace attnjourney::ptx
