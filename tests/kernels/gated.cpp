// Gated linear attention: forward, backward, and the rows one by one.
#include <algorithm>

#include "program.h"

namespace kernel_tests {

using namespace attnjourney;

// query, key (heads, L, E), value (heads, L, Ev), gate (heads, L) or (heads, L, E), beta (heads, L), initial_state
// (heads, E, Ev), grad_out like out
void gated(const Inputs& in, const Types& types) {
  const GatedKernels& kernel = kernels().gated->of[types.dtype];
  GatedParams p;
  const int64_t heads = in.integer("heads"), len = in.integer("len");
  p.head_dim = in.integer("head_dim"), p.v_head_dim = in.integer("v_head_dim");
  p.scale = in.real("scale"), p.norm_eps = in.real("norm_eps"), p.delta = true;
  p.gate = in.integer("channels") ? Gate::channel : Gate::head;
  p.q_row = p.k_row = p.head_dim, p.v_row = p.grad_out_row = p.v_head_dim;
  const int64_t gate_row = p.gate == Gate::channel ? p.head_dim : 1, state = p.head_dim * p.v_head_dim;
  p.gate_row = gate_row, p.beta_row = 1;

  const int64_t rows = heads * len;
  Memory out(rows * p.v_head_dim * types.item), stepped(rows * p.v_head_dim * types.item);
  Memory last(heads * state * types.real), same(heads * state * types.real);
  Memory grad_query(rows * p.head_dim * types.item), grad_key(rows * p.head_dim * types.item);
  Memory grad_value(rows * p.v_head_dim * types.item), grad_gate(rows * gate_row * types.real);
  Memory grad_beta(rows * types.real), grad_initial(heads * state * types.real);
  const int64_t forward = std::max(kernel.step_space(p, p.v_head_dim), kernel.forward_space(p, p.v_head_dim));
  Memory space(std::max(forward, kernel.backward_space(p, p.v_head_dim, len)));

  for (int64_t h = 0; h < heads; h++) {
    const int64_t row = h * len;
    GatedHead head;
    head.len = len, head.cols = p.v_head_dim;
    head.query = in.tensor("query") + row * p.head_dim * types.item;
    head.key = in.tensor("key") + row * p.head_dim * types.item;
    head.value = in.tensor("value") + row * p.v_head_dim * types.item;
    head.gate = in.tensor("gate") + row * gate_row * types.real;
    head.beta = in.tensor("beta") + row * types.real;
    head.initial_state = in.tensor("initial_state") + h * state * types.real;
    head.grad_out = in.tensor("grad_out") + row * p.v_head_dim * types.item;
    head.out = stepped.at(row * p.v_head_dim * types.item);
    head.state = same.at(h * state * types.real);
    kernel.step(p, head, space.get());
    head.out = out.at(row * p.v_head_dim * types.item);
    head.state = last.at(h * state * types.real);
    kernel.forward(p, head, space.get());
    head.grad_query = grad_query.at(row * p.head_dim * types.item);
    head.grad_key = grad_key.at(row * p.head_dim * types.item);
    head.grad_value = grad_value.at(row * p.v_head_dim * types.item);
    head.grad_gate = grad_gate.at(row * gate_row * types.real);
    head.grad_beta = grad_beta.at(row * types.real);
    head.grad_initial_state = grad_initial.at(h * state * types.real);
    kernel.backward(p, head, space.get());
  }
  give("out", out), give("state", last), give("stepped", stepped), give("stepped_state", same);
  give("grad_query", grad_query), give("grad_key", grad_key), give("grad_value", grad_value);
  give("grad_gate", grad_gate), give("grad_beta", grad_beta), give("grad_initial_state", grad_initial);
}

}  // namespace kernel_tests
