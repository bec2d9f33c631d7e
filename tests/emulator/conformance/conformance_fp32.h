// conformance.h for the functions that kernels for float and double use.
#pragma once
#include "conformance.h"

namespace conformance {

struct Tf32 {
  float* out;  // [16][8]
  bool cut;    // bits that are to count for nothing are set
  __device__ void operator()() const {
    if (threadIdx.x >= 32) return;
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    float x[4], y[2], d[4] = {1, 1, 1, 1};
    for (int i = 0; i < 4; i++) x[i] = static_cast<float>(small(g + 8 * (i & 1), t + 4 * (i >> 1)));
    for (int i = 0; i < 2; i++) y[i] = static_cast<float>(small(t + 4 * i, g));
    if (cut) {
      uint32_t a[4], b[2], none;
      for (int i = 0; i < 4; i++) ptx::split(x[i], a[i], none), ptx::split(y[i / 2], b[i / 2], none);
      for (int i = 0; i < 4; i++) a[i] |= 0x1fffu, b[i / 2] |= 0x1fffu;
      ptx::mma_m16n8k8(d, a, b[0], b[1]);
    } else {
      ptx::mma_m16n8k8(d, x, y[0], y[1]);
    }
    for (int i = 0; i < 4; i++) out[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = d[i];
  }
};

struct Float64 {
  float* out;  // [8][8]
  __device__ void operator()() const {
    if (threadIdx.x >= 32) return;
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    constexpr double kLarge = 1ll << 40;  // beyond the precision of float
    double d0 = kLarge + 1, d1 = kLarge + 1;
    ptx::mma_m8n8k4(d0, d1, small(g, t), small(t, g));
    out[g * 8 + 2 * t] = static_cast<float>(d0 - kLarge);
    out[g * 8 + 2 * t + 1] = static_cast<float>(d1 - kLarge);
  }
};

struct Fp32Scalars {
  const float* in;
  float* out;
  double* sum;
  __device__ void operator()() const {
    const int t = threadIdx.x;
    const double x = in[t];
    uint32_t high, low;
    ptx::split(in[t], high, low);
    out[t] = static_cast<float>(high >> 12 & 0xfff);
    out[128 + t] = static_cast<float>((ptx::log2(ptx::exp2(x / 16)) - x / 16) * 1e12);
    out[256 + t] = ptx::tanh(in[t]);
    out[384 + t] = static_cast<float>(ptx::tanh(x));
    out[512 + t] = static_cast<float>((ptx::shfl_xor(t + 1e-12, 5) - (t ^ 5)) * 1e12);
    ptx::reduce_add(sum, 1 + 1e-12);
    out[640 + t] = ptx::round_tf32(t == 3 ? INFINITY : in[t]);
  }
};

template <class Host>
struct Fp32Program {
  template <class T>
  using Buffer = typename Host::template Buffer<T>;

  static void run() {
    Buffer<float> out(std::vector<float>(768, -1.f), "out");
    for (bool cut : {false, true}) {
      Host::launch(0, Tf32{out.data, cut});
      std::vector<float> want;
      for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++) {
          int sum = 1;
          for (int k = 0; k < 8; k++) sum += small(m, k) * small(k, n);
          want.push_back(static_cast<float>(sum));
        }
      compare(cut ? "mma tf32, last bits" : "mma tf32", out.data, want, cut ? 0.05f : 0.f);
    }
    Host::launch(0, Float64{out.data});
    std::vector<float> want;
    for (int i = 0; i < 64; i++) {
      int sum = 1;
      for (int k = 0; k < 4; k++) sum += small(i / 8, k) * small(k, i % 8);
      want.push_back(static_cast<float>(sum));
    }
    compare("mma f64", out.data, want);

    std::vector<float> x, hyperbolic, shuffled(128, 1.f);
    for (int i = 0; i < 128; i++) x.push_back((static_cast<float>(i) - 64.f) / 16.f);
    x[0] = 1.00048828125f, x[1] = -1.00048828125f, x[2] = 1.0014648f;  // halfway: away from zero
    for (float v : x) hyperbolic.push_back(static_cast<float>(std::tanh(static_cast<double>(v))));
    Buffer<float> in(x, "in");
    Buffer<double> sum(std::vector<double>{0}, "sum");
    Host::launch(0, Fp32Scalars{in.data, out.data, sum.data});
    compare("split, ties away from zero", out.data, {0x802, 0x802, 0x804});
    compare("rounding to TF32", out.data + 640, {1.0009765625f, -1.0009765625f, 1.001953125f, INFINITY});
    checked++;
    for (int i = 0; i < 128; i++)
      if (std::fabs(static_cast<double>(out.data[128 + i])) > 0.01) failed++, printf("FAIL exp2, log2 of double\n");
    compare("tanh", out.data + 256, hyperbolic, 4e-7f);
    compare("tanh of double", out.data + 384, hyperbolic, 1e-7f);
    compare("shfl.bfly of double", out.data + 512, shuffled, 0.02f);
    const float total = static_cast<float>((sum.data[0] - 128) * 1e12);
    compare("addition of double", &total, {128.f}, 0.2f);
  }
};

}  // namespace conformance
