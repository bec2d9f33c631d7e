// wgmma m64nNk16, N = 32 (not with A in registers), 64 or 128, fp32 accumulators in registers; of e4m3 m64nNk32.
// Operands in shared memory are named by descriptors. TransA, TransB: 1 for an operand stored MN-major.
#pragma once
#include "sm90_device.cuh"

namespace attnjourney::ptx {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Reads of these accumulators stay behind this point: it follows a wait.
template <int N>
__device__ __forceinline__ void keep(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
#define ATTNJOURNEY_ACC8(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define ATTNJOURNEY_ACC16(c, i) ATTNJOURNEY_ACC8(c, i), ATTNJOURNEY_ACC8(c, i + 8)
#define ATTNJOURNEY_ACC32(c, i) ATTNJOURNEY_ACC8(c, i), ATTNJOURNEY_ACC8(c, i + 8), ATTNJOURNEY_ACC8(c, i + 16), ATTNJOURNEY_ACC8(c, i + 24)
#define ATTNJOURNEY_ACC64(c, i) ATTNJOURNEY_ACC32(c, i), ATTNJOURNEY_ACC32(c, i + 32)
#define ATTNJOURNEY_REGS16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ATTNJOURNEY_REGS32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ATTNJOURNEY_REGS64 ATTNJOURNEY_REGS32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ATTNJOURNEY_WGMMA(n, type) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type
// clang-format on

// d (+)= A B
template <class T, int N, int TransA, int TransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N == 32 || N == 64 || N == 128);
#define ATTNJOURNEY_SS16(type)                                                             \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0; " ATTNJOURNEY_WGMMA(                \
                   "32", type) " {" ATTNJOURNEY_REGS16 "}, %16, %17, p, 1, 1, %19, %20; }" \
               : ATTNJOURNEY_ACC16("+f", 0)                                                \
               : "l"(a), "l"(b), "r"(int(accumulate)), "n"(TransA), "n"(TransB))
#define ATTNJOURNEY_SS32(type)                                                             \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; " ATTNJOURNEY_WGMMA(                \
                   "64", type) " {" ATTNJOURNEY_REGS32 "}, %32, %33, p, 1, 1, %35, %36; }" \
               : ATTNJOURNEY_ACC32("+f", 0)                                                \
               : "l"(a), "l"(b), "r"(int(accumulate)), "n"(TransA), "n"(TransB))
#define ATTNJOURNEY_SS64(type)                                                              \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; " ATTNJOURNEY_WGMMA(                 \
                   "128", type) " {" ATTNJOURNEY_REGS64 "}, %64, %65, p, 1, 1, %67, %68; }" \
               : ATTNJOURNEY_ACC64("+f", 0)                                                 \
               : "l"(a), "l"(b), "r"(int(accumulate)), "n"(TransA), "n"(TransB))
  if constexpr (N == 32 && is_bf16<T>)
    ATTNJOURNEY_SS16("bf16");
  else if constexpr (N == 32)
    ATTNJOURNEY_SS16("f16");
  else if constexpr (N == 64 && is_bf16<T>)
    ATTNJOURNEY_SS32("bf16");
  else if constexpr (N == 64)
    ATTNJOURNEY_SS32("f16");
  else if constexpr (is_bf16<T>)
    ATTNJOURNEY_SS64("bf16");
  else
    ATTNJOURNEY_SS64("f16");
#undef ATTNJOURNEY_SS16
#undef ATTNJOURNEY_SS32
#undef ATTNJOURNEY_SS64
}

// d = A B: d need not be defined before
template <class T, int N, int TransA, int TransB>
__device__ __forceinline__ void wgmma_ss_new(float (&d)[N / 2], uint64_t a, uint64_t b) {
  static_assert(N == 32 || N == 64 || N == 128);
#define ATTNJOURNEY_SS16(type)                                                             \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 0, 0; " ATTNJOURNEY_WGMMA(                  \
                   "32", type) " {" ATTNJOURNEY_REGS16 "}, %16, %17, p, 1, 1, %18, %19; }" \
               : ATTNJOURNEY_ACC16("=f", 0)                                                \
               : "l"(a), "l"(b), "n"(TransA), "n"(TransB))
#define ATTNJOURNEY_SS32(type)                                                             \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 0, 0; " ATTNJOURNEY_WGMMA(                  \
                   "64", type) " {" ATTNJOURNEY_REGS32 "}, %32, %33, p, 1, 1, %34, %35; }" \
               : ATTNJOURNEY_ACC32("=f", 0)                                                \
               : "l"(a), "l"(b), "n"(TransA), "n"(TransB))
#define ATTNJOURNEY_SS64(type)                                                              \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 0, 0; " ATTNJOURNEY_WGMMA(                   \
                   "128", type) " {" ATTNJOURNEY_REGS64 "}, %64, %65, p, 1, 1, %66, %67; }" \
               : ATTNJOURNEY_ACC64("=f", 0)                                                 \
               : "l"(a), "l"(b), "n"(TransA), "n"(TransB))
  if constexpr (N == 32 && is_bf16<T>)
    ATTNJOURNEY_SS16("bf16");
  else if constexpr (N == 32)
    ATTNJOURNEY_SS16("f16");
  else if constexpr (N == 64 && is_bf16<T>)
    ATTNJOURNEY_SS32("bf16");
  else if constexpr (N == 64)
    ATTNJOURNEY_SS32("f16");
  else if constexpr (is_bf16<T>)
    ATTNJOURNEY_SS64("bf16");
  else
    ATTNJOURNEY_SS64("f16");
#undef ATTNJOURNEY_SS16
#undef ATTNJOURNEY_SS32
#undef ATTNJOURNEY_SS64
}

// d += A B with A in registers
template <class T, int N, int TransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(N == 64 || N == 128);
#define ATTNJOURNEY_RS32(type)                                                                         \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; " ATTNJOURNEY_WGMMA(                            \
                   "64", type) " {" ATTNJOURNEY_REGS32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38; }" \
               : ATTNJOURNEY_ACC32("+f", 0)                                                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(TransB))
#define ATTNJOURNEY_RS64(type)                                                                          \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; " ATTNJOURNEY_WGMMA(                             \
                   "128", type) " {" ATTNJOURNEY_REGS64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70; }" \
               : ATTNJOURNEY_ACC64("+f", 0)                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(TransB))
  if constexpr (N == 64 && is_bf16<T>)
    ATTNJOURNEY_RS32("bf16");
  else if constexpr (N == 64)
    ATTNJOURNEY_RS32("f16");
  else if constexpr (is_bf16<T>)
    ATTNJOURNEY_RS64("bf16");
  else
    ATTNJOURNEY_RS64("f16");
#undef ATTNJOURNEY_RS32
#undef ATTNJOURNEY_RS64
}

// ---- e4m3: m64nNk32, both operands K-major (there is no transposed form) ----

// d (+)= A B
template <int N>
__device__ __forceinline__ void wgmma_e4m3_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N == 64 || N == 128);
  if constexpr (N == 64)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" ATTNJOURNEY_REGS32 "}, %32, %33, p, 1, 1; }"
        : ATTNJOURNEY_ACC32("+f", 0)
        : "l"(a), "l"(b), "r"(int(accumulate)));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" ATTNJOURNEY_REGS64 "}, %64, %65, p, 1, 1; }"
        : ATTNJOURNEY_ACC64("+f", 0)
        : "l"(a), "l"(b), "r"(int(accumulate)));
}

// d += A B with A in registers: a[q] has row lane / 4 + 8 (q % 2), columns 16 (q / 2) + 4 (lane % 4) .. of 32
template <int N>
__device__ __forceinline__ void wgmma_e4m3_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
  static_assert(N == 64 || N == 128);
  if constexpr (N == 64)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" ATTNJOURNEY_REGS32
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1;"
                 : ATTNJOURNEY_ACC32("+f", 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" ATTNJOURNEY_REGS64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1;"
                 : ATTNJOURNEY_ACC64("+f", 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef ATTNJOURNEY_ACC8
#undef ATTNJOURNEY_ACC16
#undef ATTNJOURNEY_ACC32
#undef ATTNJOURNEY_ACC64
#undef ATTNJOURNEY_REGS16
#undef ATTNJOURNEY_REGS32
#undef ATTNJOURNEY_REGS64
#undef ATTNJOURNEY_WGMMA

}  // namespace attnjourney::ptx
