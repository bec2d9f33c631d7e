// The matrix unit of AMX-BF16, and of AMX-FP16: eight registers of 16 rows of 64 bytes. One session per kernel call
// sets their shape.
//
// With ATTNJOURNEY_AMX_TWIN the same operations in plain C++, so that a machine without AMX can test the kernel.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/kernels/common/common.h"

namespace attnjourney {
namespace {

struct MatrixUnit {
  using Number = bf16;

#ifdef ATTNJOURNEY_AMX_TWIN
  static inline thread_local uint32_t registers[8][16][16];
  template <int T>
  static void zero() {
    memset(registers[T], 0, sizeof registers[T]);
  }
  template <int T>
  static void load(const void* p, int64_t stride) {  // bytes
    for (int r = 0; r < 16; r++) memcpy(registers[T][r], static_cast<const char*>(p) + r * stride, 64);
  }
  template <int T>
  static void store(void* p, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy(static_cast<char*>(p) + r * stride, registers[T][r], 64);
  }
  // C[m][n] += A[m][2k] B[k][2n] + A[m][2k + 1] B[k][2n + 1], float32 += Number * Number
  template <int C, int A, int B, class N = Number>
  static void dot() {
    const auto number = [](uint32_t bits) {
      const N x{uint16_t(bits)};
      return load_one(&x);
    };
    for (int m = 0; m < 16; m++)
      for (int n = 0; n < 16; n++) {
        float sum = bits_float(registers[C][m][n]);
        for (int k = 0; k < 16; k++) {
          const uint32_t a = registers[A][m][k], b = registers[B][k][n];
          sum += number(a) * number(b) + number(a >> 16) * number(b >> 16);
        }
        registers[C][m][n] = float_bits(sum);
      }
  }
#else
  struct alignas(64) Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static_assert(sizeof(Shape) == 64);
  MatrixUnit() {
    const Shape shape;
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  ~MatrixUnit() { asm volatile("tilerelease"); }
  MatrixUnit(const MatrixUnit&) = delete;

  template <int T>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  static void load(const void* p, int64_t stride) {  // bytes
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  static void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  // C[m][n] += A[m][2k] B[k][2n] + A[m][2k + 1] B[k][2n + 1], float32 += Number * Number
  template <int C, int A, int B>
  static void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
#endif
};

// Of float16 numbers, also the subnormal ones; sums that are not normal float32 numbers become 0.
struct MatrixUnitF16 : MatrixUnit {
  using Number = f16;
  template <int C, int A, int B>
  static void dot() {
#ifdef ATTNJOURNEY_AMX_TWIN
    MatrixUnit::dot<C, A, B, f16>();
#else  // tdpfp16ps %tmm<B>, %tmm<A>, %tmm<C>, which assemblers before binutils 2.40 do not know
    asm volatile(".byte 0xc4, 0xe2, 0x7b - 8 * %c2, 0x5c, 0xc0 + 8 * %c0 + %c1" ::"i"(C), "i"(A), "i"(B));
#endif
  }
};

}  // namespace
}  // namespace attnjourney
