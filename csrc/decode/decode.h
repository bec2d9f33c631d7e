// Attention of the last query rows of each sequence over a cache of keys and values: the operator `decode`, its legal
// inputs, and what a device must supply.
//
// A sequence b of length n = lengths[b] holds keys 0 .. n - 1; its query rows are its last ones: row i stands at
// position n - q_len + i (bottom-right alignment by each sequence's own length). What lies beyond a length is not read.
#pragma once
#include <limits>

#include "attention/options.h"
#include "attention/params.h"

namespace attnjourney {

struct DecodeInputs {
  Tensor query;    // (batch, q_heads, q_len, head_dim)
  Tensor key;      // dense: (batch, kv_heads, capacity, head_dim); paged: (num_blocks, kv_heads, block_size, head_dim)
  Tensor value;    // the same with v_head_dim
  Tensor lengths;  // (batch,) int64
  OptionalTensor block_table = {};  // (batch, max_blocks) int32: block j / block_size of a sequence holds its key j
  bool ring = false;  // dense only: key j lies at j % capacity, and only the last `capacity` keys are there
  // Of keys and values in bytes (int8 or float8_e4m3fn): what each is multiplied by, their shapes but for the last
  // dimension, float32. A scale for each token and head: a token is written once and changes no other, whatever its
  // size, for 4 bytes beside the head_dim bytes of each key and value.
  OptionalTensor key_scale = {}, value_scale = {};
  // Grouped heads, aligned at the bottom right, the default scale head_dim^-0.5; attn_mask broadcasts to (batch,
  // q_heads, q_len, S), S the longest length or capacity. No dropout, lengths or masks of blocks: see
  // read_decode_options.
  AttentionOptions options = {};
};

struct DecodeCall {
  int64_t batch, q_heads, kv_heads, q_len, head_dim, v_head_dim;
  int64_t group;       // q_heads / kv_heads
  int64_t capacity;    // keys a sequence can have
  int64_t block_size;  // paged; 0: dense
  double scale;
  int64_t left, right, prefix;  // as KeyRanges has them
  bool ring;
  ScoreModifier modifier;
  MaskKind mask = MaskKind::none;
  bool mask_fp32 = false;
  int64_t mask_batch = 0, mask_head = 0, mask_row = 0, mask_col = 0;  // strides, 0 where the mask broadcasts

  // the keys of a sequence that its query rows may see
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

// Checks shapes, dtypes, devices and numbers; values of lengths and block_table: check_decode_values.
DecodeCall check_decode(const DecodeInputs& in);
// The values of lengths and block_table in host memory, and with them attn_mask's last dimension.
void check_decode_values(const DecodeCall& call, const DecodeInputs& in);

// out (batch, q_heads, q_len, v_head_dim), lse (batch, q_heads, q_len): dense
using DecodeFunction = void (*)(const DecodeCall&, const DecodeInputs&, const Tensor& out, const Tensor& lse);
// out (batch, heads, q_len, m) = x (batch, heads, q_len, n) times each head's w (heads, n, m), transposed (heads, m,
// n); all with a dense last dimension
using HeadProducts = void (*)(const Tensor& x, const Tensor& w, bool transposed, const Tensor& out);

// out (rows, dim), dense, = bytes (rows, dim), dense in the last dimension, times scale (rows,), dense
using Dequantize = void (*)(const Tensor& bytes, const Tensor& scale, const Tensor& out);

// What a device supplies.
struct DecodeBackend {
  DecodeFunction decode, decode_latents;  // the second for one key/value head whose value is the front of its key
  HeadProducts products;
  Dequantize dequantize = nullptr;                              // where caches of bytes are served
  int64_t most_head_dim = std::numeric_limits<int64_t>::max();  // of expanded keys and values (mla_decode.h)
};

// checks a call, allocates its results and has them written
std::tuple<Tensor, Tensor> decode_with(DecodeFunction, const DecodeInputs& in);

struct Backend;
std::tuple<Tensor, Tensor> decode(const Backend&, Arguments&);

}  // namespace attnjourney
