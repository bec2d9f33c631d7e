// Numbers in one byte, int8 or float8_e4m3fn, each row with a float32 scale: number = byte * scale. The same bits as on
// the CPU (csrc/cpu/kernels/decode/quantized_rows.h).
#pragma once
#include "numbers.cuh"

namespace attnjourney {

enum class ByteKind : int { none, int8, e4m3 };

// A byte's number: exact, and so it is in bfloat16 and float16.
__device__ __forceinline__ float byte_number(ByteKind kind, uint32_t byte) {
  if (kind == ByteKind::int8) return ptx::as_float(0x4b000000u | (byte ^ 0x80u)) - 8388736.f;  // 2^23 + 128
  const float size = ptx::as_float((byte & 0x7fu) << 20) * 0x1p120f;  // the exponent moved by 127 - 7
  const float number = byte & 0x80u ? -size : size;
  return (byte & 0x7fu) == 0x7fu ? NAN : number;
}

// Bytes 2 half and 2 half + 1 of a word, of int8: exact.
template <class T>
__device__ __forceinline__ uint32_t int8_pair(uint32_t word, int half) {
  const uint32_t two = ptx::byte_permute(word, half ? 0x4342 : 0x4140);  // in the low bytes of the halves
  if constexpr (ptx::is_bf16<T>)  // 128 + the low seven bits, less 128 or, of a negative number, 256
    return ptx::fma2<T>((two & 0x007f007fu) | 0x43004300u, 0x3f803f80u, (two & 0x00800080u) | 0xc300c300u);
  else  // 1024 + 128 + number
    return ptx::fma2<T>((two ^ 0x00800080u) | 0x64006400u, 0x3c003c00u, 0xe480e480u);
}
// The same of e4m3, without NaN: a byte's bits in T's places, then the exponent's bias.
template <class T>
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t word, int half) {
  const uint32_t two = ptx::byte_permute(word, half ? 0x3424 : 0x1404);  // in the high bytes
  if constexpr (ptx::is_bf16<T>)
    return ptx::fma2<T>((two & 0x80008000u) | (two >> 4 & 0x07f007f0u), 0x7b807b80u, 0x80008000u);  // 2^120
  else
    return ptx::fma2<T>((two & 0x80008000u) | (two >> 1 & 0x3f803f80u), 0x5c005c00u, 0x80008000u);  // 2^8
}

// 16 bytes to as many numbers of T, in order.
template <class T>
__device__ __forceinline__ void expand_bytes(uint4 (&to)[2], ByteKind kind, uint4 from) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
  uint32_t pairs[8], nan = 0;  // a word's high bits: of its bytes that are NaN
  if (kind == ByteKind::int8) {
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i] = int8_pair<T>(words[i / 2], i % 2);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i] = e4m3_pair<T>(words[i / 2], i % 2);
#pragma unroll
    for (int w = 0; w < 4; w++) nan |= (words[w] & 0x7f7f7f7fu) + 0x01010101u;
  }
  if (nan & 0x80808080u) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32_t two = words[i / 2] >> (i % 2 * 16);
      pairs[i] = ptx::pack2<T>(byte_number(kind, two & 0xffu), byte_number(kind, two >> 8 & 0xffu));
    }
  }
  to[0] = {pairs[0], pairs[1], pairs[2], pairs[3]}, to[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
}

// x to the nearest number of a byte, at most the largest one. int8 has no NaN: that is 0.
__device__ __forceinline__ uint32_t to_byte(ByteKind kind, float x) {
  if (kind == ByteKind::int8) {
    const float bounded = x < -127.f ? -127.f : x > 127.f ? 127.f : x;
    return x == x ? ptx::as_bits(bounded + 0x1.8p23f) & 0xffu : 0u;
  }
  const uint32_t bits = ptx::as_bits(x), sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
  if (size >= 0x7f800000u) return 0x7fu;
  const uint32_t small = ptx::as_bits(ptx::as_float(size) + 0x1p14f) - 0x46800000u;  // below 2^-6: in steps of 2^-9
  const uint32_t normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
  return sign | (size < 0x3c800000u ? small : normal < 0x7eu ? normal : 0x7eu);
}

// The scale of a row whose largest finite magnitude is `top`; finite: all of the row is.
__device__ __forceinline__ float byte_scale(ByteKind kind, float top, bool finite) {
  const float wanted = top / (kind == ByteKind::int8 ? 127.f : 448.f);
  const float scale = top == 0.f ? 1.f : wanted < 0x1p-126f ? 0x1p-126f : wanted;
  return kind == ByteKind::e4m3 || finite ? scale : NAN;
}

}  // namespace attnjourney
