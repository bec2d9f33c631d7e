// Gated linear attention in chunks of rows, each of which is a product of matrices (csrc/cpu/kernels/gated/forward.h
// and backward.h derive them; Yang et al. 2024, arXiv 2406.06484 and 2412.06464). With S the state before a chunk and G
// the gradient of that after it, K, Q, W = beta K the rows of a chunk as they read and write the state (Kr, Qr, Wl:
// with the gates up to it), T = (1 + N)^-1:
//
//   kernel                      for each                                     gives
//   gated_norms                 row of query and key                         1 / norm
//   gated_decays                chunk, head                                  what gates make of rows that read, write
//   gated_pairs                 chunk, head, query head of the group or key  P = lower(scale Q W^T); N, T
//   gated_forward               sequence, head, slice of value's columns     E = T (V - Kr S), out = Qr S + P E,
//                                                                            S = total S + Wl^T E, chunk after chunk
//   gated_backward              the same, from the last chunk                dE = P^T dO + Wl G, Z = T^T dE = dV,
//                                                                            G = total G + Qr^T dO - Kr^T Z
//   gated_pair_gradients        as gated_pairs                               dP = lower(dO E^T), dN = - lower(Z E^T)
//   gated_gradients             chunk, head, slice of key's columns          dQ, dK, dbeta, dgate
//   gated_finish                row                                          sums over heads, through norms, in dtype
//   gated_step                  sequence, head, slice of value's columns     out and S, row after row
//
// Gates enter as products of their exponentials, never as differences of sums: no gate is too strong, and no accuracy
// is lost to them. Pairs of rows with a gate a channel: a chunk is cut into blocks of 16 rows; from block to block a
// factor is one of the reader times one of the writer times those between, none above 1 where gates are negative;
// within a block it is multiplied up row by row.
#pragma once
#include "cuda/kernels/linear/task.cuh"
#include "linear/gated_params.h"

namespace attnjourney {

constexpr int kGatedThreads = 128;
constexpr int kGatedDepth = 32;     // columns that pass by at once
constexpr int kGatedMost = 256;     // columns of keys, of values
constexpr int kGatedBlock = 16;     // rows within which gates are multiplied up one by one
constexpr int kGatedStepCols = 32;  // columns of a block of gated_step
// Rows of a chunk, and columns of a walk's block, by the bytes of a number of the arithmetic: all of it fits 99 KB.
constexpr __host__ __device__ int gated_rows(int number_size) { return number_size == 8 ? 32 : 64; }
constexpr __host__ __device__ int gated_cols(int number_size, bool wide) {
  return (wide ? 32 : 64) / (number_size == 8 ? 2 : 1);
}
constexpr __host__ __device__ bool gated_wide(int head_dim) { return head_dim > 128; }
// Slices of key's columns in gated_gradients.
constexpr __host__ __device__ int gated_slices(int head_dim) { return (head_dim + kGatedDepth - 1) / kGatedDepth; }

// Numbers are in compute precision where not said otherwise; null: not there, or not wanted.
struct GatedTask {
  LinearRows query, key, value, grad_out;  // [batch, heads, len, cols] of the tensors' dtype
  const void *gate, *beta;                 // [batch, v_heads, len(, head_dim)]
  int64_t gate_batch, gate_head, gate_row, beta_batch, beta_head, beta_row;
  Gate kind;
  bool delta;
  double scale, norm_eps;  // norm_eps below 0: rows stay as they are
  int batch, q_heads, kv_heads, v_heads, group, len, head_dim, v_head_dim;
  // Sequences: the items of the batch, or rows offsets[n] .. offsets[n + 1] - 1 of the one item (offsets that fit). A
  // chunk's slot is its number in memory: there are as many as sequences of these lengths can need.
  const int* offsets;
  int sequences, slots;
  const void *initial_state, *grad_state;  // [sequences, v_heads, head_dim, v_head_dim], dense, as the next
  void *state, *grad_initial_state;
  void* out;                    // [batch, out_heads, len, v_head_dim] of the tensors' dtype, dense
  void* grad_value;             // [batch, v_heads, len, v_head_dim], so too
  void *grad_query, *grad_key;  // [batch, q_heads or kv_heads, len, head_dim], so too
  void *grad_gate, *grad_beta;  // [batch, v_heads, len(, head_dim)], dense
  // scratch
  void *query_inverse, *key_inverse;  // [batch, heads, len]: 1 / norm; null: 1
  void *reads, *writes;               // [batch, v_heads, len(, head_dim)]: gates from the chunk's begin, to its end
  void* pairs;                        // [slots, v_heads, group + delta, rows, rows]: P, T; then dP, dN
  void *states, *state_grads;         // [slots, v_heads, head_dim, v_head_dim]: S before, G after
  void *errors, *error_grads;         // [batch, v_heads, len, v_head_dim]: E, Z
  void *query_sums, *key_sums;        // [batch, out_heads or v_heads, len, head_dim]: gradients of each head
  void *gate_sums, *beta_sums;        // [slices, batch, v_heads, len]: of each slice of key's columns

  __host__ __device__ int out_heads() const { return v_heads * group; }
  __host__ __device__ int products() const { return group + (delta ? 1 : 0); }  // of a chunk with itself
};

}  // namespace attnjourney
