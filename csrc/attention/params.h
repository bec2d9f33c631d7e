// What an attention kernel needs to know. Pointers and numbers only: no torch.
#pragma once
#include <cstdint>

#include "core/mask.h"
#include "core/philox.h"

namespace attnjourney {

// boolean: true = may attend; floating: added; blocks: HeadPointers::mask is a BlockRows
enum class MaskKind : int8_t { none, boolean, floating, blocks };

// Which blocks of size x size pairs one head sees any pair of: the key blocks of row block r are index[offsets[r]] ..
// index[offsets[r + 1] - 1], ascending. The pairs of a block with partial >= 0 are given by
// elements[partial][row][key] (1 = may attend); all of any other are seen.
struct BlockRows {
  const int32_t *offsets = nullptr, *index = nullptr, *partial = nullptr;
  const uint8_t* elements = nullptr;
  int64_t size = 0;
};

// What is done to the scaled scores, before any mask. Kernels know no more of it than on() and the functions of
// cpu/kernels/common/score_modifier.h and cuda/kernels/common/scores.cuh.
struct ScoreModifier {
  double softcap = 0;  // scores become softcap * tanh(score / softcap); 0 leaves them
  ATTNJOURNEY_HD bool on() const { return softcap > 0; }
};

// One call, shared by all of its heads. Strides count elements; the last dimension of every tensor but the mask is
// dense.
struct AttentionParams {
  int64_t q_len = 0, kv_len = 0;
  int64_t head_dim = 0, v_head_dim = 0;
  int64_t group = 1;  // query heads per key/value head
  double scale = 1;
  KeyRanges keys;
  Dropout dropout;
  int64_t q_row = 0, k_row = 0, v_row = 0, out_row = 0, grad_out_row = 0;  // row strides
  MaskKind mask = MaskKind::none;
  bool mask_fp32 = false;  // a floating mask in float32 next to 16-bit tensors; else it has their dtype
  int64_t mask_row = 0, mask_col = 0;
  int64_t block_size = 0;  // of a mask of blocks,
  double density = 1;      // and the share of the pairs that it leaves
  ScoreModifier modifier;
  bool alibi = false;  // -slope * |row position - key| is added to the scores
  int64_t query_scale_block = 0, key_scale_block = 0, value_scale_block = 0;  // strides, see HeadPointers
  int64_t page_size = 0;           // keys of a page, as a block of a paged cache is called here; 0: all in one piece
  int64_t k_page = 0, v_page = 0;  // strides
};

// Numbers in e4m3 have a float32 scale for every so many rows of a head, which they are multiplied by.
constexpr int64_t fp8_scale_rows = 128;

// One query head of one batch item, with its key/value head.
struct HeadPointers {
  uint32_t index = 0;              // of the head in the whole: the dropout counter
  const void* query = nullptr;     // [q_len, head_dim]
  const void* key = nullptr;       // [kv_len, head_dim], or page 0
  const void* value = nullptr;     // [kv_len, v_head_dim], or page 0
  const int32_t* pages = nullptr;  // key j is row j % page_size of page pages[j / page_size]
  const void* mask = nullptr;      // [q_len, kv_len] through mask_row, mask_col, or a BlockRows
  void* out = nullptr;             // [q_len, v_head_dim]; read by the backward
  void* lse = nullptr;             // [q_len] dense, float (double for double); -inf marks a row that sees no key
  void* stats = nullptr;  // [q_len][2] dense, like lse: the reference of a row's weights, and 1 / their sum against it
  const void* grad_out = nullptr;  // [q_len, v_head_dim]
  const void* grad_lse = nullptr;  // [q_len] dense, like lse, or null
  double sink = -__builtin_inf();  // a logit that joins the denominator; -inf: none
  double slope = 0;                // of ALiBi
  // of numbers in e4m3: of rows [i * fp8_scale_rows, (i + 1) * fp8_scale_rows) at i * query_scale_block
  const float *query_scale = nullptr, *key_scale = nullptr, *value_scale = nullptr;
};

// Tangents of one query head, for derivatives in a direction: like what they belong to, null where zero, with row
// strides of their own.
struct HeadTangents {
  const void *query = nullptr, *key = nullptr, *value = nullptr, *mask = nullptr;
  const void *grad_out = nullptr, *grad_lse = nullptr;
  void *out = nullptr, *lse = nullptr;  // written by the jvp, read by that of the backward
  double sink = 0, slope = 0;
  int64_t q_row = 0, k_row = 0, v_row = 0, mask_row = 0, mask_col = 0, grad_out_row = 0, out_row = 0;

  bool scores() const { return query || key || mask || slope != 0; }  // any score changes
};

// Where the gradients of one query head go, and those of its key/value head; null where none is wanted.
struct HeadGradients {
  void* query = nullptr;  // [q_len, head_dim]
  void* key = nullptr;    // [kv_len, head_dim]; the same for all heads of a group
  void* value = nullptr;  // [kv_len, v_head_dim]
  // [q_len, kv_len] in float (double for double). A stride is 0 where the mask broadcasts; mask_col is 0 or 1.
  // mask_first: written where the head sees anything, else added to. mask_once: written by no other head, and in the
  // dtype of query.
  void* mask = nullptr;
  bool mask_first = false, mask_once = false;
  double *sink = nullptr, *slope = nullptr;  // added to
  int64_t query_row = 0, key_row = 0, value_row = 0, mask_row = 0, mask_col = 0;
};

}  // namespace attnjourney
