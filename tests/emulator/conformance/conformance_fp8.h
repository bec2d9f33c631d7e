// What e4m3 relies on beyond conformance.h: conversion, bytes chosen from two words, wgmma with rows of 128 and 64
// bytes.
#pragma once
#include "conformance.h"

namespace conformance {

// d[m][n] = 1 + sum over Line k of a(m, k) b(n, k), rows of Line bytes; FromRegisters: A is.
template <int N, int Line, bool FromRegisters>
struct WgmmaE4m3 {
  float* out;  // [64][N]
  static __device__ uint32_t at(int row, int k) {
    const auto offset = static_cast<uint32_t>(row * Line + k);
    return offset ^ (offset >> 7 & (Line / 16 - 1)) << 4;
  }
  static __device__ uint64_t operand(uint32_t addr) {
    constexpr uint32_t kSwizzle = Line == 128 ? 1u : 2u;
    return uint64_t(addr >> 4 | 1u << 16) | uint64_t(kSwizzle << 30 | 8 * Line >> 4) << 32;
  }
  // small(row, k) .. small(row, k + 3)
  static __device__ uint32_t four(int row, int k) {
    const auto number = [&](int i) { return static_cast<float>(small(row, k + i)); };
    return ptx::pack4_e4m3(number(0), number(1), number(2), number(3));
  }
  static __device__ void fill(unsigned char* to, int rows, int first) {
    for (int i = 4 * threadIdx.x; i < rows * Line; i += 4 * 128)
      *reinterpret_cast<uint32_t*>(to + at(i / Line, i % Line)) = four(i / Line + first, i % Line);
  }
  __device__ void operator()() const {
    const int tid = threadIdx.x, g = tid % 32 / 4, t = tid % 4, row = tid / 32 * 16 + g;
    unsigned char *a = ptx::dynamic_smem(), *b = a + 64 * Line;
    fill(a, 64, 0);
    fill(b, N, 2);
    ptx::fence_proxy_async();
    __syncthreads();
    const uint64_t da = operand(ptx::smem_addr(a)), db = operand(ptx::smem_addr(b));
    float d[N / 2];
    for (int i = 0; i < N / 2; i++) d[i] = 1.f;
    uint32_t regs[Line / 32][4];
    for (int kk = 0; kk < Line / 32; kk++)
      for (int q = 0; q < 4; q++) regs[kk][q] = four(row + 8 * (q & 1), 32 * kk + 4 * t + 16 * (q >> 1));
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < Line / 32; kk++) {
      if constexpr (FromRegisters)
        ptx::wgmma_e4m3_rs<N>(d, regs[kk], db + kk * 2);
      else
        ptx::wgmma_e4m3_ss<N>(d, da + kk * 2, db + kk * 2, true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::keep(d);
    for (int i = 0; i < N / 2; i++) out[(row + 8 * (i >> 1 & 1)) * N + i / 4 * 8 + 2 * t + (i & 1)] = d[i];
  }
};

struct Bytes {
  const float* in;  // [128]
  float* out;       // [256]: bytes of in, by four; chosen bytes
  __device__ void operator()() const {
    if (threadIdx.x >= 32) return;
    const float* const x = in + 4 * threadIdx.x;
    const uint32_t bytes = ptx::pack4_e4m3(x[0], x[1], x[2], x[3]);
    const uint32_t chosen = ptx::select_bytes<0x7520>(0x04030201u, 0x08070605u);
    for (int i = 0; i < 4; i++) {
      out[4 * threadIdx.x + i] = static_cast<float>(bytes >> 8 * i & 0xff);
      out[128 + 4 * threadIdx.x + i] = static_cast<float>(chosen >> 8 * i & 0xff);
    }
  }
};

template <class Host>
struct Fp8Program {
  template <class T>
  using Buffer = typename Host::template Buffer<T>;

  template <int N, int Line, bool FromRegisters>
  static void wgmma(const char* name) {
    Buffer<float> out(std::vector<float>(64 * N, 0.f), "out");
    Host::launch((64 + N) * Line, WgmmaE4m3<N, Line, FromRegisters>{out.data});
    std::vector<float> want;
    for (int m = 0; m < 64; m++)
      for (int n = 0; n < N; n++) {
        int sum = 1;
        for (int k = 0; k < Line; k++) sum += small(m, k) * small(n + 2, k);
        want.push_back(static_cast<float>(sum));
      }
    compare(name, out.data, want);
  }
  static void run() {
    // halves of steps go to even numbers; 448 is the largest; 2^-9 the smallest
    const std::vector<float> some = {1.f, -1.f, 1.0625f, 1.1875f, 448.f,   464.f,     1e9f,     -1e9f,
                                     0.f, -0.f, 0.25f,   17.f,    0x1p-9f, 0x1.8p-9f, 0x1p-10f, 0x1.1p-10f};
    const std::vector<float> bytes = {0x38, 0xb8, 0x38, 0x3a, 0x7e, 0x7e, 0x7e, 0xfe, 0, 0x80, 0x28, 0x58, 1, 2, 0, 1};
    std::vector<float> in, want;
    for (size_t i = 0; i < 128; i++) in.push_back(some[i % 16]), want.push_back(bytes[i % 16]);
    for (size_t i = 0; i < 32; i++)
      for (const float chosen : {1.f, 3.f, 6.f, 8.f}) want.push_back(chosen);
    Buffer<float> given(in, "in"), out(std::vector<float>(256, -1.f), "out");
    Host::launch(0, Bytes{given.data, out.data});
    compare("e4m3, chosen bytes", out.data, want);
    wgmma<64, 128, false>("wgmma SS e4m3 n64");
    wgmma<128, 128, false>("wgmma SS e4m3 n128");
    wgmma<128, 64, false>("wgmma SS e4m3 n128, rows of 64 bytes");
    wgmma<64, 128, true>("wgmma RS e4m3 n64");
    wgmma<128, 64, true>("wgmma RS e4m3 n128, rows of 64 bytes");
  }
};

}  // namespace conformance
