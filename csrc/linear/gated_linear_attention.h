// Linear attention whose state decays (gates) or is corrected (delta rule): legal inputs, the operators over what a
// device supplies. For each row, S = e^gate S, then S = S + beta k (v - S^T k)^T (delta rules) or S + k v^T, and
// out = scale S^T q.
#pragma once
#include "core/arguments.h"
#include "gated_params.h"

namespace attnjourney {

enum class GatedUpdate : int64_t { linear, gated, delta, gated_delta, kda };

struct GatedInputs {
  Tensor query;                  // (batch, q_heads, len, head_dim)
  Tensor key;                    // (batch, kv_heads, len, head_dim), a divisor of v_heads
  Tensor value;                  // (batch, v_heads, len, v_head_dim); one of q_heads and v_heads divides the other
  OptionalTensor gate;           // (batch, v_heads, len) or (batch, v_heads, len, head_dim); query's dtype or float
  OptionalTensor beta;           // (batch, v_heads, len), as gate
  OptionalTensor initial_state;  // (sequences, v_heads, head_dim, v_head_dim), float (double for double)
  OptionalTensor cu_seqlens;     // (sequences + 1,) int32 or int64: rows of one batch item
  int64_t update = 0;
  double scale = 1;
  bool qk_l2norm = false;
};

struct GatedCall {
  int64_t batch = 0, sequences = 0, q_heads = 0, kv_heads = 0, v_heads = 0, len = 0;
  int64_t out_heads() const { return q_heads > v_heads ? q_heads : v_heads; }
  GatedParams params;  // strides are the device's to fill in
  ScalarType dtype = ScalarType::Float, state_dtype = ScalarType::Float;
};

GatedCall check_gated_linear_attention(const GatedInputs& in);

// of query, key, value, gate, beta, initial_state: dense; (0,) where not wanted. Those of gate and beta have
// state_dtype.
using GatedGradients = std::array<Tensor, 6>;

struct GatedBackend {
  // out (batch, out_heads, len, v_head_dim), state (sequences, v_heads, head_dim, v_head_dim), dense
  void (*forward)(const GatedCall&, const GatedInputs&, const Tensor& out, const Tensor& state);
  // gradients that have a size are to be written
  void (*backward)(const GatedCall&, const GatedInputs&, const Tensor& grad_out, const OptionalTensor& grad_state,
                   const GatedGradients&);
};

struct Backend;
// out, state
std::vector<Tensor> gated_linear_attention_forward(const Backend&, Arguments&);
// bit i of need asks for gradient i
std::vector<Tensor> gated_linear_attention_backward(const Backend&, Arguments&);

}  // namespace attnjourney
