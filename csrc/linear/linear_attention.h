// Linear attention (Katharopoulos et al. 2020, arXiv 2006.16236): legal inputs, the operators over what a device
// supplies. With Q = scale * phi(query), K = phi(key): state S = S0 + sum K^T V, z = z0 + sum K over the keys that a
// row sees (all, or those up to its own), out = Q S / (Q z + eps), or Q S without normalisation.
#pragma once
#include "core/arguments.h"
#include "params.h"

namespace attnjourney {

struct LinearInputs {
  Tensor query;                     // (batch, q_heads, q_len, head_dim)
  Tensor key;                       // (batch, kv_heads, kv_len, head_dim); query head h reads h / (q_heads / kv_heads)
  Tensor value;                     // (batch, kv_heads, kv_len, v_head_dim)
  OptionalTensor key_padding_mask;  // (batch, kv_len) bool: true = the key does not exist
  OptionalTensor initial_state;     // (batch, kv_heads, head_dim, v_head_dim), float (double for double)
  OptionalTensor initial_normalizer;  // (batch, kv_heads, head_dim), like it; with normalize, next to initial_state
  int64_t feature_map = static_cast<int64_t>(FeatureMap::elu_plus_one);
  bool is_causal = true;
  double scale = 1;
  bool normalize = true;
  double eps = 1e-6;
};

struct LinearCall {
  int64_t batch = 0, q_heads = 0, kv_heads = 0;
  LinearParams params;  // strides are the device's to fill in
  ScalarType dtype = ScalarType::Float, state_dtype = ScalarType::Float;
};

// Checks shapes, dtypes, devices and numbers. Throws with the argument's name.
LinearCall check_linear_attention(const LinearInputs& in);

// of query, key, value, initial_state, initial_normalizer: dense; (0,) where not wanted
using LinearGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

struct LinearGradientInputs {
  Tensor grad_out;                                               // like out, any strides
  OptionalTensor grad_denominator, grad_state, grad_normalizer;  // like the results, dense or not
  Tensor out, denominator;
};

struct LinearBackend {
  // out (batch, q_heads, q_len, v_head_dim); denominator (batch, q_heads, q_len) and normalizer (batch, kv_heads,
  // head_dim) with normalize, else (0,); state (batch, kv_heads, head_dim, v_head_dim). All dense.
  void (*forward)(const LinearCall&, const LinearInputs&, const Tensor& out, const Tensor& denominator,
                  const Tensor& state, const Tensor& normalizer);
  // gradients that have a size are to be written; those of key and value come together
  void (*backward)(const LinearCall&, const LinearInputs&, const LinearGradientInputs&, const LinearGradients&);
};

struct Backend;
// out, denominator, state, normalizer
std::vector<Tensor> linear_attention_forward(const Backend&, Arguments&);
// bit i of need asks for gradient i
std::vector<Tensor> linear_attention_backward(const Backend&, Arguments&);

}  // namespace attnjourney
