#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace attnjourney {

using Bf16 = __nv_bfloat16;
using Half = __half;

namespace ptx {

template <class T>
inline constexpr bool is_bf16 = std::is_same_v<T, Bf16>;

// ---- shared memory and copies; addresses are 32-bit shared-memory addresses ----

__device__ __forceinline__ unsigned char* dynamic_smem() {
  extern __shared__ __align__(1024) unsigned char smem[];
  return smem;
}
__device__ __forceinline__ uint32_t smem_addr(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// 16 bytes global -> shared; zeros instead when !valid (src is then not read)
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
// 4 bytes, in the same way
__device__ __forceinline__ void cp_async_4(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(valid ? 4 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}

// ---- arithmetic ----

// d += a * b
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define ATTNJOURNEY_MMA(type)                                               \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (is_bf16<T>)
    ATTNJOURNEY_MMA("bf16");
  else
    ATTNJOURNEY_MMA("f16");
#undef ATTNJOURNEY_MMA
}
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// a b, rounded by itself: no part of a fused multiply-add
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float log2(float x) { return __log2f(x); }
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float to_float(Bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(Half x) { return __half2float(x); }
__device__ __forceinline__ float as_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t as_bits(float x) { return __float_as_uint(x); }
// two floats rounded to T, lo in the low half
template <class T>
__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
  uint32_t r;
  if constexpr (is_bf16<T>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <class T>
__device__ __forceinline__ float2 unpack2(uint32_t v) {
  if constexpr (is_bf16<T>)
    return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)};
  else
    return __half22float2(*reinterpret_cast<const __half2*>(&v));
}
// a b + c for two numbers of T, each rounded once
template <class T>
__device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  if constexpr (is_bf16<T>)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// The four bytes whose numbers the selector's digits are, the lowest first; from 4 on: 0.
__device__ __forceinline__ uint32_t byte_permute(uint32_t v, uint32_t selector) { return __byte_perm(v, 0, selector); }

// ---- threads of a warp, a block, a grid ----

__device__ __forceinline__ float shfl_xor(float v, int lane_mask) { return __shfl_xor_sync(0xffffffffu, v, lane_mask); }
__device__ __forceinline__ uint32_t shfl_xor(uint32_t v, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, v, lane_mask);
}
// the value of one lane of the warp
__device__ __forceinline__ uint32_t shfl(uint32_t v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
// lane 0's value: tells the compiler that it is the same in the whole warp
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(0xffffffffu, v, 0); }
__device__ __forceinline__ bool any(bool b) { return __any_sync(0xffffffffu, b); }
// one bit for each lane
__device__ __forceinline__ uint32_t ballot(bool b) { return __ballot_sync(0xffffffffu, b); }
__device__ __forceinline__ int first_bit(uint32_t v) { return __ffs(v) - 1; }  // v is not 0
__device__ __forceinline__ int count_bits(uint32_t v) { return __popc(v); }
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void reduce_add(float* p, float v) { atomicAdd(p, v); }
__device__ __forceinline__ uint32_t atomic_add(uint32_t* p, uint32_t v) { return atomicAdd(p, v); }
__device__ __forceinline__ uint32_t atomic_or(uint32_t* p, uint32_t v) { return atomicOr(p, v); }
__device__ __forceinline__ void thread_fence() { __threadfence(); }
// Waits until *p == turn (one thread, a barrier follows); passes the turn on (after a barrier).
__device__ __forceinline__ void turn_wait(const int* p, int turn) {
  int v;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  } while (v != turn);
}
__device__ __forceinline__ void turn_pass(int* p, int next) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(next) : "memory");
}

// ---- what the compiler may not know ----

// The same pointer, and it leads to global memory.
template <class T>
__device__ __forceinline__ T* global(T* p) {
  __builtin_assume(__isGlobal(p));
  return p;
}

// The same value, but what is computed from it cannot be hoisted out of a loop (and then spilled).
__device__ __forceinline__ uint32_t opaque(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}
// Pointers too: accesses at constant distances then use one address register and immediate offsets.
template <class T>
__device__ __forceinline__ T* opaque(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

}  // namespace ptx
}  // namespace attnjourney
