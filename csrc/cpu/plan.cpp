#include "plan.h"

#include <algorithm>

#include "threads.h"

namespace attnjourney {
namespace {

// pairs of query and key that are computed, per head; an estimate for sharing out work
double visible_pairs(const AttentionParams& p) {
  const double all = static_cast<double>(p.q_len) * static_cast<double>(p.kv_len);
  return p.keys.right < p.q_len ? all / 2 : all;
}

const AttentionKernels& kernels_for(const AttentionCall& c) {
  return kernels().attention[static_cast<int>(kernel_dtype(c.dtype))];
}

int64_t pieces(int64_t n, int64_t of) { return (n + of - 1) / of; }

}  // namespace

DType kernel_dtype(ScalarType t) {
  switch (t) {
    case ScalarType::Double:
      return DType::f64;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::f16;
    default:
      return DType::f32;
  }
}

ForwardPlan plan_forward(const AttentionCall& c) {
  const AttentionParams& p = c.params;
  ForwardPlan plan;
  plan.kernel = &kernels_for(c);
  plan.heads = c.batch * c.q_heads;
  const int64_t tiles = pieces(p.q_len, plan.kernel->forward_tile);
  const double flops = 2.0 * static_cast<double>(plan.heads * (p.head_dim + p.v_head_dim)) * visible_pairs(p);
  plan.threads = thread_count(plan.heads * tiles, flops);
  // tiles of one item share converted keys and values; fewer where the threads would not be filled evenly
  int64_t per = std::min(plan.kernel->forward_tiles, tiles);
  while (per > 1 && plan.threads > 1 && plan.heads * pieces(tiles, per) < 6 * plan.threads) per = (per + 1) / 2;
  plan.rows = per * plan.kernel->forward_tile;
  plan.blocks = pieces(p.q_len, plan.rows);
  return plan;
}

BackwardPlan plan_backward(const AttentionCall& c) {
  const AttentionParams& p = c.params;
  BackwardPlan plan;
  plan.kernel = &kernels_for(c);
  plan.items = c.batch * c.kv_heads;
  const int64_t key_blocks = pieces(p.kv_len, plan.kernel->backward_key_block);
  const double flops =
      2.0 * static_cast<double>(plan.items * p.group * (3 * p.head_dim + 2 * p.v_head_dim)) * visible_pairs(p);
  plan.threads = thread_count(plan.items * key_blocks, flops);
  // whole heads fill the threads evenly; those left over are split by key blocks, each part with a dQ of its own
  plan.whole = plan.items / plan.threads * plan.threads;
  const int64_t left = plan.items - plan.whole;
  plan.parts = left ? std::min(pieces(plan.threads, left), key_blocks) : 1;
  if (plan.parts <= 1) plan.whole = plan.items, plan.parts = 1;
  return plan;
}

}  // namespace attnjourney
