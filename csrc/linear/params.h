// What a linear attention kernel needs to know. Pointers and numbers only: no torch.
#pragma once
#include <cstdint>

namespace attnjourney {

// phi of a query or key number: x, max(x, 0), or elu(x) + 1 (x + 1 above 0, else exp(x))
enum class FeatureMap : int64_t { identity, relu, elu_plus_one };

// One call, shared by all of its heads. Strides count elements; the last dimension of every tensor is dense.
struct LinearParams {
  int64_t group = 1;  // query heads per key/value head
  int64_t q_len = 0, kv_len = 0;
  int64_t head_dim = 0, v_head_dim = 0;
  double scale = 1;  // of phi(query)
  double eps = 0;    // added to the denominator
  FeatureMap feature_map = FeatureMap::elu_plus_one;
  bool causal = true, normalize = true;
  int64_t q_head = 0, q_row = 0, k_row = 0, v_row = 0, grad_out_head = 0, grad_out_row = 0;
};

// One key/value head of one batch item and its group of query heads. Where no stride is given the tensor is dense.
struct LinearHead {
  const void* query = nullptr;                      // [group, q_len, head_dim]
  const void* key = nullptr;                        // [kv_len, head_dim]
  const void* value = nullptr;                      // [kv_len, v_head_dim]
  const uint8_t* blocked = nullptr;                 // [kv_len], not 0: the key does not exist; or null
  void* out = nullptr;                              // [group, q_len, v_head_dim]; read by the backward
  void* denominator = nullptr;                      // [group, q_len], float (double for double); with normalize only
  const void* grad_out = nullptr;                   // [group, q_len, v_head_dim]
  const void* grad_denominator = nullptr;           // [group, q_len], like denominator, or null
  void* grad_query = nullptr;                       // [group, q_len, head_dim] ...
  void *grad_key = nullptr, *grad_value = nullptr;  // ... [kv_len, dim]; null where none is wanted
};

}  // namespace attnjourney
