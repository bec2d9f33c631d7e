// What fp16x2_planes makes of float32 inputs, and Sm90Fp16x2Forward and Fp16x2Backward read.
#pragma once
#include "cuda/kernels/common/forward_task.cuh"

namespace attnjourney {

struct Fp16x2Planes {
  // halves [batch, heads, length, 2 D]: columns [0, D) high, [D, 2 D) low; rows beyond a length are zeros
  unsigned char *query, *key, *value;
  float* query_scale;        // [batch, q_heads, query_tiles]: the inverse of the power of two
  float4* key_scale;         // [batch, kv_heads, key_tiles]: x: inverse of K's, y: V's, z: its inverse
  uint32_t* needs_fallback;  // 0 before: how many times numbers were found that do not split
  int kv_heads, query_tiles, key_tiles;
};

// The same for the backward; all low halves are times kLowFactor.
struct Fp16x2BackwardPlanes {
  unsigned char *query, *key, *value, *grad_out;
  // inverses of the powers of two, each twice: 16 bytes can be copied
  float4* query_scale;  // [batch, q_heads, query_tiles]: x: Q's, y: grad_out's
  float4* key_scale;    // [batch, kv_heads, key_tiles]: x: K's, y: V's
  uint32_t* needs_fallback;
  int query_tiles, key_tiles;
};

constexpr float kLowFactor = 2048.f;

template <int D>
struct Fp16x2Size {
  static constexpr int kRows = 8192 / D, kThreads = 256, kSmemBytes = kThreads / 32 * 4;
};

}  // namespace attnjourney
