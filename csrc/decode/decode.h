// Attention of the last query rows of each sequence over a cache of keys and values: the operator `decode`, its legal
// inputs, and what a device must supply.
//
// A sequence b of length n = lengths[b] holds keys 0 .. n - 1; its query rows are its last ones: row i stands at
// position n - q_len + i (bottom-right alignment by each sequence's own length). What lies beyond a length is not read.
#pragma once
#include <optional>
#include <tuple>

#include "attention/params.h"
#include "core/aten.h"
#include "core/checks.h"
#include "core/mask.h"

namespace attnjourney {

struct DecodeInputs {
  Tensor query;    // (batch, q_heads, q_len, head_dim)
  Tensor key;      // dense: (batch, kv_heads, capacity, head_dim); paged: (num_blocks, kv_heads, block_size, head_dim)
  Tensor value;    // the same with v_head_dim
  Tensor lengths;  // (batch,) int64
  OptionalTensor block_table =
      std::nullopt;   // (batch, max_blocks) int32: block j / block_size of a sequence holds its key j
  bool ring = false;  // dense only: key j lies at j % capacity, and only the last `capacity` keys are there
  bool is_causal = true;
  int64_t left = -1, right = -1;               // window, inclusive; -1 = unbounded
  std::optional<double> scale = std::nullopt;  // default head_dim^-0.5
  OptionalTensor attn_mask =
      std::nullopt;           // broadcasts to (batch, q_heads, q_len, S), S the longest length or capacity
  int64_t prefix_length = 0;  // the first keys, seen by every row
  double softcap = 0;
  OptionalTensor sinks = std::nullopt, alibi_slopes = std::nullopt;  // (q_heads,) or (batch, q_heads)
};

struct DecodeCall {
  int64_t batch, q_heads, kv_heads, q_len, head_dim, v_head_dim;
  int64_t group;       // q_heads / kv_heads
  int64_t capacity;    // keys a sequence can have
  int64_t block_size;  // paged; 0: dense
  double scale;
  int64_t left, right, prefix;  // as KeyRanges has them
  bool ring;
  double softcap;
  MaskKind mask = MaskKind::none;
  bool mask_fp32 = false;
  int64_t mask_batch = 0, mask_head = 0, mask_row = 0, mask_col = 0;  // strides, 0 where the mask broadcasts

  // The keys of a sequence that its query rows may see.
  KeyRanges keys(int64_t length) const {
    KeyRanges k;
    k.offset = length - q_len;
    k.left = left;
    k.right = right;
    k.prefix = prefix;
    k.set_length(length);
    return k;
  }
};

#define ATTNJOURNEY_DECODE_OPTIONS                                                                   \
  "bool is_causal=True, SymInt[2] window_size=[-1, -1], float? scale=None, Tensor? attn_mask=None, " \
  "SymInt prefix_length=0, float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None"

// Checks shapes, dtypes, devices and numbers; values of lengths and block_table: check_decode_values.
DecodeCall check_decode(const DecodeInputs& in);
// The values of lengths and block_table in host memory, and with them attn_mask's last dimension.
void check_decode_values(const DecodeCall& call, const DecodeInputs& in);

// out (batch, q_heads, q_len, v_head_dim), lse (batch, q_heads, q_len): dense
using DecodeKernel = void (*)(const DecodeCall&, const DecodeInputs&, const Tensor& out, const Tensor& lse);
void cpu_decode(const DecodeCall&, const DecodeInputs&, const Tensor& out,
                const Tensor& lse);  // csrc/cpu/decode/decode.cpp

std::tuple<Tensor, Tensor> decode(DecodeKernel kernel, const DecodeInputs& in);

}  // namespace attnjourney
