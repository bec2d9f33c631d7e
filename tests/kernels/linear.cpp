// Linear attention: forward and backward, in pieces of the sequence whose states are summed first, or in one walk.
#include <algorithm>
#include <vector>

#include "program.h"

namespace kernel_tests {
namespace {

using namespace attnjourney;

// states of kernels/linear/forward.h: [rows][ld], then z
struct Shape {
  int64_t bytes;
  Shape(int64_t rows, int64_t cols, int64_t lanes, int64_t real) {
    const auto rounded = [&](int64_t x) { return (x + lanes - 1) / lanes * lanes; };
    bytes = (rows * rounded(cols) + rounded(std::max(rows, cols)) + 15) / 16 * 16 * real;
  }
};

}  // namespace

// query (Hq, L, E), key (Hk, S, E), value (Hk, S, Ev), grad_out like out
void linear(const Inputs& in, const Types& types) {
  const LinearKernels& kernel = kernels().linear[types.dtype];
  LinearParams p;
  const int64_t kv_heads = in.integer("kv_heads");
  p.group = in.integer("group"), p.q_len = in.integer("q_len"), p.kv_len = in.integer("kv_len");
  p.head_dim = in.integer("head_dim"), p.v_head_dim = in.integer("v_head_dim");
  p.scale = in.real("scale"), p.eps = in.real("eps"), p.causal = in.integer("causal") != 0;
  p.feature_map = static_cast<FeatureMap>(in.integer("feature_map")), p.normalize = in.integer("normalize") != 0;
  p.q_row = p.k_row = p.head_dim, p.v_row = p.grad_out_row = p.v_head_dim;
  p.q_head = p.q_len * p.head_dim, p.grad_out_head = p.q_len * p.v_head_dim;

  const int64_t q = kv_heads * p.group * p.q_len, k = kv_heads * p.kv_len;
  Memory out(q * p.v_head_dim * types.item), denominator(q * types.real), grad_query(q * p.head_dim * types.item);
  Memory grad_key(k * p.head_dim * types.item), grad_value(k * p.v_head_dim * types.item), space(kernel.space(p));
  const Shape plain(p.head_dim, p.v_head_dim, kernel.lanes, types.real);
  const Shape transposed(p.v_head_dim, p.head_dim, kernel.lanes, types.real);

  for (int64_t kv = 0; kv < kv_heads; kv++) {
    const int64_t rows = kv * p.group * p.q_len, keys = kv * p.kv_len;
    LinearHead head;
    head.query = in.tensor("query") + rows * p.head_dim * types.item;
    head.key = in.tensor("key") + keys * p.head_dim * types.item;
    head.value = in.tensor("value") + keys * p.v_head_dim * types.item;
    head.out = out.at(rows * p.v_head_dim * types.item);
    if (p.normalize) head.denominator = denominator.at(rows * types.real);
    head.grad_out = in.tensor("grad_out") + rows * p.v_head_dim * types.item;
    head.grad_query = grad_query.at(rows * p.head_dim * types.item);
    head.grad_key = grad_key.at(keys * p.head_dim * types.item);
    head.grad_value = grad_value.at(keys * p.v_head_dim * types.item);

    // `summed` rows give the state of a piece, `walked` rows meet it: causal ones the state of all before them (after
    // them in reverse), others that of the whole sequence
    const auto sweep = [&](LinearKernels::Sum sum, LinearKernels::Sweep step, const Shape& shape, bool reverse,
                           int64_t summed, int64_t walked) {
      const int64_t piece = p.causal ? 2 * kernel.chunk : std::max(summed, walked);
      const int64_t pieces = (std::max(summed, walked) + piece - 1) / piece;
      Memory before(shape.bytes);
      if (!p.causal) sum(p, head, 0, summed, before.get(), space.get());
      for (int64_t n = 0; n < pieces; n++) {
        const int64_t first = (reverse ? pieces - 1 - n : n) * piece;
        Memory running(shape.bytes);
        std::memcpy(running.get(), before.get(), static_cast<size_t>(shape.bytes));
        if (first < walked) step(p, head, first, std::min(piece, walked - first), running.get(), nullptr, space.get());
        if (p.causal && first < summed) sum(p, head, first, std::min(piece, summed - first), before.get(), space.get());
      }
    };
    sweep(kernel.sum_keys, kernel.forward, plain, false, p.kv_len, p.q_len);
    sweep(kernel.sum_keys_transposed, kernel.backward_query, transposed, false, p.kv_len, p.q_len);
    sweep(kernel.sum_queries, kernel.backward_key, plain, true, p.q_len, p.kv_len);
  }
  give("out", out);
  if (p.normalize) give("denominator", denominator);
  give("grad_query", grad_query), give("grad_key", grad_key), give("grad_value", grad_value);
}

}  // namespace kernel_tests
