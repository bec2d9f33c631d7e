// mma.sync on floats of which a tensor core reads 10 bits of mantissa.
#include "state.h"

namespace emulator {

void mma_m16n8k8_tf32(float* d, const float* a, const float* b, Site s) {
  // which of an operand's bits a tensor core leaves out, nobody promises: they have to be 0
  const auto check = [&](float x) {
    if (bits_of(x) & 0x1fff && x == x) fail("mma.tf32 reads a number that is not rounded, " + who() + " at " + at(s));
  };
  for (int q = 0; q < 4; q++) check(a[q]);
  for (int q = 0; q < 2; q++) check(b[q]);
  struct Args {
    float* d;
    const float *a, *b;
  } args{d, a, b};
  warp_collective("mma.tf32", args, s, [&](Args** l) {
    counts.mma++;
    float ma[16][8], mb[8][8], mc[16][8];
    for (int i = 0; i < 32; i++) {
      const int g = i / 4, t = i % 4;
      for (int q = 0; q < 4; q++) ma[g + 8 * (q & 1)][t + 4 * (q >> 1)] = l[i]->a[q];
      for (int q = 0; q < 2; q++) mb[t + 4 * q][g] = l[i]->b[q];
      for (int q = 0; q < 4; q++) mc[g + 8 * (q >> 1)][2 * t + (q & 1)] = l[i]->d[q];
    }
    for (int i = 0; i < 16; i++)
      for (int k = 0; k < 8; k++)
        for (int j = 0; j < 8; j++) mc[i][j] += ma[i][k] * mb[k][j];
    for (int i = 0; i < 32; i++)
      for (int q = 0; q < 4; q++) l[i]->d[q] = mc[i / 4 + 8 * (q >> 1)][2 * (i % 4) + (q & 1)];
  });
}

}  // namespace emulator
