// Attention of one batch item: forward, weights, backward (heads in turn whole and in two parts), and with tangents the
// jvp and that of the backward. Tensors are dense: query (Hq, L, E), key (Hk, S, E), value (Hk, S, Ev).
#include <algorithm>
#include <vector>

#include "program.h"

namespace kernel_tests {
namespace {

using namespace attnjourney;

class Call {
 public:
  Call(const Inputs& in, const Types& types) : in_(in), types_(types), kernel_(kernels().attention[types.dtype]) {
    p_.q_len = in.integer("q_len"), p_.kv_len = in.integer("kv_len");
    p_.head_dim = in.integer("head_dim"), p_.v_head_dim = in.integer("v_head_dim");
    p_.group = in.integer("group"), kv_heads_ = in.integer("kv_heads");
    p_.scale = in.real("scale");
    p_.keys = keys_of(in);
    p_.dropout = Dropout::from(in.real("dropout_p"), static_cast<uint64_t>(in.integer("seed")));
    p_.q_row = p_.k_row = p_.head_dim;
    p_.v_row = p_.out_row = p_.grad_out_row = p_.v_head_dim;
    p_.mask = mask_of(in);
    p_.mask_row = p_.kv_len, p_.mask_col = 1;
    p_.modifier.softcap = in.real("softcap");
    p_.alibi = in.has("alibi_slopes");
    const int64_t rows = heads() * p_.q_len;
    out_ = Memory(rows * p_.v_head_dim * types.item), lse_ = Memory(rows * types.real);
    stats_ = Memory(2 * rows * types.real);
    out_tangent_ = Memory(out_.bytes()), lse_tangent_ = Memory(lse_.bytes());
  }

  void forward() {
    const int64_t most = kernel_.forward_tile * kernel_.forward_tiles;
    Memory space(kernel_.forward_space(p_, std::min(most, p_.q_len)));
    for (int64_t h = 0; h < heads(); h++)
      for (int64_t first = 0; first < p_.q_len; first += most)
        kernel_.forward(p_, head(h), first, std::min(most, p_.q_len - first), space.get());
    give("out", out_), give("lse", lse_);
  }

  void weights() {
    AttentionParams p = p_;
    p.out_row = p.kv_len;
    Memory space(kernel_.weights_space(p)), weights(heads() * p.q_len * p.kv_len * types_.item);
    for (int64_t h = 0; h < heads(); h++)
      for (int64_t first = 0; first < p.q_len; first += kernel_.backward_tile) {
        HeadPointers rows = head(h);
        rows.out = weights.at((h * p.q_len + first) * p.kv_len * types_.item);
        kernel_.weights(p, rows, first, std::min(kernel_.backward_tile, p.q_len - first), space.get());
      }
    give("weights", weights);
  }

  // the gradients, or their tangents
  void backward(bool tangents) {
    const int64_t q = heads() * p_.q_len * p_.head_dim, k = kv_heads_ * p_.kv_len * p_.head_dim;
    const int64_t v = kv_heads_ * p_.kv_len * p_.v_head_dim, line = 64 / types_.real;
    const int64_t part = p_.group * p_.q_len * ((p_.head_dim + line - 1) / line * line);
    Memory grad_query(q * types_.item), grad_key(k * types_.item), grad_value(v * types_.item);
    Memory grad_mask(p_.mask == MaskKind::floating ? heads() * p_.q_len * p_.kv_len * types_.real : 0);
    Memory grad_sinks(heads() * 8), grad_slopes(heads() * 8), partial(2 * part * types_.real);
    Memory space(tangents ? kernel_.backward_jvp_space(p_) : kernel_.backward_space(p_));
    for (int64_t kv = 0; kv < kv_heads_; kv++) {
      // an item's two parts share the sums of sinks and slopes, the gradient of a mask and, here, those of keys: each
      // key block is of one part
      const int64_t parts = kv % 2 ? 2 : 1;
      std::vector<HeadPointers> pointers;
      std::vector<HeadGradients> gradients;
      std::vector<HeadTangents> directions;
      for (int64_t h = kv * p_.group; h < (kv + 1) * p_.group; h++) {
        HeadGradients g;
        g.query = grad_query.at(h * p_.q_len * p_.head_dim * types_.item), g.query_row = p_.head_dim;
        g.key = grad_key.at(kv * p_.kv_len * p_.head_dim * types_.item), g.key_row = p_.head_dim;
        g.value = grad_value.at(kv * p_.kv_len * p_.v_head_dim * types_.item), g.value_row = p_.v_head_dim;
        if (grad_mask.bytes()) g.mask = grad_mask.at(h * p_.q_len * p_.kv_len * types_.real);
        g.mask_row = p_.kv_len, g.mask_col = 1, g.mask_first = true;
        if (in_.has("sinks")) g.sink = static_cast<double*>(grad_sinks.get()) + h;
        if (p_.alibi) g.slope = static_cast<double*>(grad_slopes.get()) + h;
        gradients.push_back(g);
        pointers.push_back(head(h));
        directions.push_back(direction(h));
      }
      for (int64_t i = 0; i < parts; i++) {
        void* const sums = parts > 1 ? partial.at(i * part * types_.real) : nullptr;
        if (tangents)
          kernel_.backward_jvp(p_, pointers.data(), directions.data(), gradients.data(), i, parts, sums, space.get());
        else
          kernel_.backward(p_, pointers.data(), gradients.data(), i, parts, sums, space.get());
      }
      for (int64_t i = 0; i < p_.group && parts > 1; i++)
        kernel_.sum_parts(p_, partial.at(i * p_.q_len * (part / (p_.group * p_.q_len)) * types_.real), part, parts, 0,
                          p_.q_len, gradients[static_cast<size_t>(i)]);
    }
    const std::string end = tangents ? "_tangent" : "";
    give("grad_query" + end, grad_query), give("grad_key" + end, grad_key), give("grad_value" + end, grad_value);
    if (grad_mask.bytes()) give("grad_attn_mask" + end, grad_mask);
    if (in_.has("sinks")) give("grad_sinks" + end, grad_sinks);
    if (p_.alibi) give("grad_alibi_slopes" + end, grad_slopes);
  }

  void jvp() {
    const int64_t most = kernel_.forward_tile * kernel_.forward_tiles;
    Memory space(kernel_.jvp_space(p_, std::min(most, p_.q_len)));
    for (int64_t h = 0; h < heads(); h++)
      for (int64_t first = 0; first < p_.q_len; first += most)
        kernel_.jvp(p_, head(h), direction(h), first, std::min(most, p_.q_len - first), space.get());
    give("out_tangent", out_tangent_), give("lse_tangent", lse_tangent_);
  }

 private:
  int64_t heads() const { return kv_heads_ * p_.group; }
  // of the tensor `name`, its piece of `numbers` of this index; null if there is no such tensor
  const char* piece(const char* name, int64_t index, int64_t numbers, int64_t item) const {
    const char* t = in_.tensor(name);
    return t ? t + index * numbers * item : nullptr;
  }
  double of_head(const char* name, int64_t h, double otherwise) const {
    const char* t = in_.tensor(name);
    return t ? reinterpret_cast<const double*>(t)[h] : otherwise;
  }

  HeadPointers head(int64_t h) const {
    const int64_t kv = h / p_.group, pairs = p_.q_len * p_.kv_len;
    HeadPointers x;
    x.index = static_cast<uint32_t>(h);
    x.query = piece("query", h, p_.q_len * p_.head_dim, types_.item);
    x.key = piece("key", kv, p_.kv_len * p_.head_dim, types_.item);
    x.value = piece("value", kv, p_.kv_len * p_.v_head_dim, types_.item);
    x.mask = in_.has("bool_mask") ? piece("bool_mask", h, pairs, 1) : piece("mask", h, pairs, types_.item);
    x.out = out_.at(h * p_.q_len * p_.v_head_dim * types_.item);
    x.lse = lse_.at(h * p_.q_len * types_.real);
    x.stats = stats_.at(2 * h * p_.q_len * types_.real);
    x.grad_out = piece("grad_out", h, p_.q_len * p_.v_head_dim, types_.item);
    x.grad_lse = piece("grad_lse", h, p_.q_len, types_.real);
    x.sink = of_head("sinks", h, -__builtin_inf());
    x.slope = of_head("alibi_slopes", h, 0);
    return x;
  }
  HeadTangents direction(int64_t h) const {
    const int64_t kv = h / p_.group;
    HeadTangents d;
    d.query = piece("query_tangent", h, p_.q_len * p_.head_dim, types_.item), d.q_row = p_.head_dim;
    d.key = piece("key_tangent", kv, p_.kv_len * p_.head_dim, types_.item), d.k_row = p_.head_dim;
    d.value = piece("value_tangent", kv, p_.kv_len * p_.v_head_dim, types_.item), d.v_row = p_.v_head_dim;
    d.mask = piece("mask_tangent", h, p_.q_len * p_.kv_len, types_.item), d.mask_row = p_.kv_len, d.mask_col = 1;
    d.grad_out = piece("grad_out_tangent", h, p_.q_len * p_.v_head_dim, types_.item), d.grad_out_row = p_.v_head_dim;
    d.grad_lse = piece("grad_lse_tangent", h, p_.q_len, types_.real);
    d.sink = of_head("sinks_tangent", h, 0);
    d.slope = of_head("alibi_slopes_tangent", h, 0);
    // written by the jvp, read by the derivative of the backward
    d.out = out_tangent_.at(h * p_.q_len * p_.v_head_dim * types_.item), d.out_row = p_.v_head_dim;
    d.lse = lse_tangent_.at(h * p_.q_len * types_.real);
    return d;
  }

  const Inputs& in_;
  const Types types_;
  const AttentionKernels& kernel_;
  AttentionParams p_;
  int64_t kv_heads_ = 0;
  Memory out_, lse_, stats_, out_tangent_, lse_tangent_;
};

}  // namespace

void attention(const Inputs& in, const Types& types) {
  Call call(in, types);
  call.forward();
  call.weights();
  call.backward(false);
  if (!in.has("query_tangent")) return;
  call.jvp();
  call.backward(true);
}

}  // namespace kernel_tests
