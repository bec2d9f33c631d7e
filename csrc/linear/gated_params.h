// What a kernel of gated linear attention needs to know. Pointers and numbers only: no torch.
#pragma once
#include <cstdint>

namespace attnjourney {

// what the state is multiplied by before a row: nothing, a number a head, a number a channel of the key
enum class Gate : int64_t { none, head, channel };

// One call, shared by all of its heads. Strides count elements; the last dimension of every tensor is dense.
struct GatedParams {
  int64_t group = 1;  // query heads that read one state
  int64_t head_dim = 0, v_head_dim = 0;
  double scale = 1;      // of queries
  double norm_eps = -1;  // rows of query and key become x / sqrt(sum x^2 + norm_eps); below 0: they stay
  Gate gate = Gate::none;
  bool delta = false;  // what is written is value - (what the state holds for the key)
  int64_t q_head = 0, q_row = 0, k_row = 0, v_row = 0, gate_row = 0, beta_row = 0;
  int64_t grad_out_head = 0, grad_out_row = 0;
  int64_t out_head = 0, grad_q_head = 0;  // the rows of results are dense: v_head_dim, head_dim, or 1 numbers
};

// Columns of the values of one state head, over one sequence. Gates, betas and states are in compute precision.
struct GatedHead {
  int64_t len = 0, cols = 0;            // rows; columns of value, out and the state
  const void* query = nullptr;          // [group][len][head_dim]
  const void* key = nullptr;            // [len][head_dim]
  const void* value = nullptr;          // [len][cols]
  const void* gate = nullptr;           // [len] or [len][head_dim], logarithms
  const void* beta = nullptr;           // [len]; null: 1
  const void* initial_state = nullptr;  // [head_dim][v_head_dim]; null: 0
  void* out = nullptr;                  // [group][len][cols]
  void* state = nullptr;                // [head_dim][v_head_dim], after the last row
  // of the backward
  const void *grad_out = nullptr, *grad_state = nullptr;  // like out and state; null: 0
  bool partial = false;                                   // gradients of query and key are sums of several heads': in
                                                          // compute precision, to be added up
  void *grad_query = nullptr, *grad_key = nullptr;        // all of these: null where not wanted
  void *grad_value = nullptr, *grad_gate = nullptr, *grad_beta = nullptr, *grad_initial_state = nullptr;
};

}  // namespace attnjourney
