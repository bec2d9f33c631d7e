// Matrix instructions on TF32 and double.
#include <bit>

#include "ptx_fp32.h"
#include "state.h"

namespace emulator {
namespace {

float tf32(uint32_t bits) { return float_of(bits & 0xffffe000u); }

constexpr int kBias = 1023;
int exponent(double x) { return static_cast<int>(std::bit_cast<uint64_t>(x) >> 52 & 2047); }
double power_of_two(int exponent) { return std::bit_cast<double>(static_cast<uint64_t>(kBias + exponent) << 52); }

}  // namespace

// As tensor cores add (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021), the coarsest of them: the terms
// are cut off one bit below the last one of the largest, and so is the sum to 24 bits; nothing is rounded.
float add_and_cut(float sum, double a, double b, double c, double d) {
  const auto wide = static_cast<double>(sum);
  const int top = std::max({exponent(a), exponent(b), exponent(c), exponent(d), exponent(wide)});
  if (top == 2047) return static_cast<float>(wide + a + b + c + d);
  if (top < 512) return sum;
  const double unit = power_of_two(top - kBias - 24), inverse = power_of_two(kBias + 24 - top);
  const auto cut = [inverse](double x) { return static_cast<int64_t>(x * inverse); };
  const auto bits = std::bit_cast<uint64_t>(static_cast<double>(cut(wide) + cut(a) + cut(b) + cut(c) + cut(d)) * unit);
  return static_cast<float>(std::bit_cast<double>(bits & ~((uint64_t{1} << 29) - 1)));
}

void mma_m16n8k8(float* d, const uint32_t* a, const uint32_t* b, Site s) {
  struct Args {
    float* d;
    const uint32_t *a, *b;
  } args{d, a, b};
  warp_collective("mma.tf32", args, s, [&](Args** l) {
    counts.mma++;
    double ma[16][8], mb[8][8];
    for (int i = 0; i < 32; i++) {
      const int g = i / 4, t = i % 4;
      for (int q = 0; q < 4; q++) ma[g + 8 * (q & 1)][t + 4 * (q >> 1)] = static_cast<double>(tf32(l[i]->a[q]));
      for (int q = 0; q < 2; q++) mb[t + 4 * q][g] = static_cast<double>(tf32(l[i]->b[q]));
    }
    for (int i = 0; i < 32; i++)
      for (int q = 0; q < 4; q++) {
        const int row = i / 4 + 8 * (q >> 1), col = 2 * (i % 4) + (q & 1);
        float sum = l[i]->d[q];
        for (int k = 0; k < 8; k += 4)
          sum = add_and_cut(sum, ma[row][k] * mb[k][col], ma[row][k + 1] * mb[k + 1][col],
                            ma[row][k + 2] * mb[k + 2][col], ma[row][k + 3] * mb[k + 3][col]);
        l[i]->d[q] = sum;
      }
  });
}

void rounded_bits(uint32_t (&bits)[6], std::initializer_list<float> numbers, Site s) {
  uint32_t* to = bits;
  for (float x : numbers) {
    *to = bits_of(x);
    if (*to++ & 0x1fff && x == x) fail("mma.tf32 reads a number that is not rounded, " + who() + " at " + at(s));
  }
}

void mma_m8n8k4(double* d, double a, double b, Site s) {
  struct Args {
    double *d, a, b;
  } args{d, a, b};
  warp_collective("mma.f64", args, s, [&](Args** l) {
    counts.mma++;
    for (int i = 0; i < 32; i++)
      for (int e = 0; e < 2; e++)
        for (int k = 0; k < 4; k++)
          l[i]->d[e] = std::fma(l[i / 4 * 4 + k]->a, l[(2 * (i % 4) + e) * 4 + k]->b, l[i]->d[e]);
  });
}

void reduce_add(double* p, double value, Site s) {
  counts.atomics++;
  global_access(p, 8, Access::atomic, s);
  *p += value;
}

}  // namespace emulator
