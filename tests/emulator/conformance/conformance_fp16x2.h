// What float32 in halves relies on (csrc/cuda/kernels/fp32/fp16x2_planes.cuh) beyond conformance.h: halves below the
// smallest normal number, and sums on wgmma whose last bits count.
#pragma once
#include "conformance.h"

namespace conformance {

struct HalfSums {  // out[m][n] = c + sum over 16 k of a(k) b(k), c the number after a's and b's
  const float* in;
  float* out;  // [64][64]
  __device__ void operator()() const {
    const int tid = threadIdx.x, t = tid % 4, row = tid / 32 * 16 + tid % 32 / 4;
    unsigned char* b = ptx::dynamic_smem();
    for (int i = tid; i < 16 * 64; i += 128)
      *in_panel(b, i / 64, i % 64) = static_cast<uint16_t>(ptx::pack2<Half>(in[16 + i / 64], 0.f));
    ptx::fence_proxy_async();
    __syncthreads();
    uint32_t a[4];
    for (int q = 0; q < 4; q++) {
      const int k = 2 * t + 8 * (q >> 1);
      a[q] = ptx::pack2<Half>(in[k], in[k + 1]);
    }
    float d[32];
    for (float& x : d) x = in[32];
    ptx::wgmma_fence();
    ptx::wgmma_rs<Half, 64, 1>(d, a, descriptor(ptx::smem_addr(b), 8192), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::keep(d);
    for (int i = 0; i < 32; i++) out[(row + 8 * (i >> 1 & 1)) * 64 + i / 4 * 8 + 2 * t + (i & 1)] = d[i];
  }
};

struct HalfRows {  // out[16][8], by mma.sync: sums as above
  const float* in;
  float* out;
  __device__ void operator()() const {
    if (threadIdx.x >= 32) return;
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    uint32_t a[4], b[2];
    for (int q = 0; q < 4; q++) {
      const int k = 2 * t + 8 * (q >> 1);
      a[q] = ptx::pack2<Half>(in[k], in[k + 1]);
      b[q >> 1] = ptx::pack2<Half>(in[16 + k], in[17 + k]);
    }
    float d[4] = {in[32], in[32], in[32], in[32]};
    ptx::mma_m16n8k16<Half>(d, a, b[0], b[1]);
    for (int i = 0; i < 4; i++) out[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = d[i];
  }
};

template <class Host>
struct Fp16x2Program {
  template <class T>
  using Buffer = typename Host::template Buffer<T>;

  static void sums(const char* name, const std::vector<float>& in, float want) {
    Buffer<float> given(in, "in"), out(std::vector<float>(4096, -1.f), "out");
    Host::launch(2048, HalfSums{given.data, out.data});
    compare(name, out.data, std::vector<float>(4096, want));
  }
  static void sm80() {
    std::vector<float> in(33, 1024.f);
    for (size_t k = 0; k < 16; k++) in[k] = std::ldexp(static_cast<float>(k + 1), -24);
    in[32] = 0.f;
    Buffer<float> given(in, "in"), out(std::vector<float>(128, -1.f), "out");
    Host::launch(0, HalfRows{given.data, out.data});
    compare("mma f16, numbers below the normal ones", out.data, std::vector<float>(128, std::ldexp(136.f, -14)));
  }
  static void run() {
    const float tiny = std::ldexp(1.f, -24), low = std::ldexp(1.f, -12);
    std::vector<float> in(33, 1024.f);
    for (size_t k = 0; k < 16; k++) in[k] = static_cast<float>(k + 1) * tiny;
    in[32] = 0.f;
    sums("wgmma f16, numbers below the normal ones", in, 136.f * 1024.f * tiny);
    // 14 products of half a unit in the last place of the sum, before the number that makes it so large, and after it
    for (size_t k = 0; k < 14; k++) in[k] = in[16 + k] = low;
    in[14] = in[30] = 0.f, in[15] = in[31] = 1.f;
    sums("wgmma f16, half a unit of the sum", in, 1.f + 14.f * tiny);
    in[15] = 0.f, in[32] = 0.5f;
    sums("wgmma f16, a unit of the sum so far", in, 0.5f + 14.f * tiny);
  }
};

}  // namespace conformance
