// What a decode kernel needs to know. Pointers and numbers only: no torch.
#pragma once
#include <cstdint>

#include "attention/params.h"

namespace attnjourney {

constexpr int64_t decode_row_block = 128;  // rows that one item takes at most: bounds its partial results

// Rows of query that read the same key/value head of one sequence. Row i is query row i % q_len of head i / q_len of
// the group. Strides count elements; the last dimension of every tensor is dense.
struct DecodeRows {
  const void* query = nullptr;  // [group, q_len, head_dim]
  void* out = nullptr;          // [group, q_len, v_head_dim]
  void* lse = nullptr;          // [group, q_len], float (double for double)
  void* stats = nullptr;        // [group, q_len][2], see HeadPointers; or null
  int64_t first = 0, count = 0;
  const void* mask = nullptr;                        // of the group's first head, its row 0 and key 0
  const double *sinks = nullptr, *slopes = nullptr;  // [group]; null: none
};

struct DecodeParams {
  int64_t q_len = 0;
  int64_t head_dim = 0, v_head_dim = 0;
  int64_t q_head = 0, q_row = 0, k_row = 0, v_row = 0;  // strides
  int64_t out_head = 0, out_row = 0, lse_head = 0;      // the rows of lse are dense; stats: two numbers for each of lse
  double scale = 1;
  ScoreModifier modifier;  // this and the mask as in AttentionParams
  MaskKind mask = MaskKind::none;
  bool mask_fp32 = false;
  int64_t mask_head = 0, mask_row = 0, mask_col = 0;
  bool alibi = false;
  KeyRanges keys;  // of this sequence: its length, and the position of its first query row
};

// x W (or x W^T) for the rows of one head: row i of x is at i / q_len * x_batch + i % q_len * x_row, of out likewise.
// W: (inner, width), transposed (width, inner), rows w_row apart, dense.
struct HeadProductParams {
  const void *x = nullptr, *w = nullptr;
  void* out = nullptr;
  int64_t rows = 0, q_len = 1, inner = 0, width = 0;
  int64_t x_batch = 0, x_row = 0, w_row = 0, out_batch = 0, out_row = 0;
  bool transposed = false;
};

// Keys that lie in one piece: key j of [first, first + count) is at key + (j - first) * k_row. Where they are bytes, it
// and its value are these times key_scale[j - first] and value_scale[j - first].
struct DecodeRun {
  const void* key;
  const void* value;
  int64_t first, count;
  const float *key_scale = nullptr, *value_scale = nullptr;
};

}  // namespace attnjourney
