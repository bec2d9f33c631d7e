#include "decode.h"

#include <cmath>

#include "cache_checks.h"

namespace attnjourney {

DecodeCall check_decode(const DecodeInputs& in) {
  const Tensor &q = in.query, &k = in.key, &v = in.value;
  DecodeCall c{};
  check_dim("query", q, 4);
  check_floating("query", q);
  c.batch = q.size(0), c.q_heads = q.size(1), c.q_len = q.size(2), c.head_dim = q.size(3);
  check_value(c.head_dim > 0, "query: expected a head_dim (last dimension) of at least 1, got shape ", shape_text(q));
  const bool paged = in.block_table.has_value();
  check_cache("key", k, paged ? -1 : c.batch, "query", q);
  check_cache("value", v, paged ? -1 : c.batch, "query", q);
  c.kv_heads = k.size(1), c.v_head_dim = v.size(3);
  const bool divides = c.kv_heads > 0 ? c.q_heads % c.kv_heads == 0 : c.q_heads == 0;
  check_value(divides, "key: expected a head count that divides query's, ", c.q_heads, ", got ", c.kv_heads,
              " (key has shape ", shape_text(k), ")");
  c.group = c.kv_heads > 0 ? c.q_heads / c.kv_heads : 1;
  check_value(k.size(3) == c.head_dim, "key: expected the head_dim of query, ", c.head_dim, ", got shape ",
              shape_text(k));
  check_value(v.size(0) == k.size(0) && v.size(1) == k.size(1) && v.size(2) == k.size(2),
              "value: expected the shape of key but for the last dimension (key has shape ", shape_text(k),
              "), got shape ", shape_text(v));
  check_lengths_tensor("lengths", in.lengths, c.batch, "query", q);
  c.capacity = k.size(2);
  if (paged) {
    check_block_table(*in.block_table, c.batch, "query", q);
    c.block_size = k.size(2);
    check_value(c.block_size > 0, "key: expected a block size (dimension 2) of at least 1, got shape ", shape_text(k));
    c.capacity = c.block_size * in.block_table->size(1);
    check_value(!in.ring, "ring: expected False beside a block_table");
  }
  c.ring = in.ring;
  c.scale = in.scale.value_or(1.0 / std::sqrt(static_cast<double>(c.head_dim)));
  check_value(std::isfinite(c.scale), "scale: expected a finite number, got ", c.scale);
  check_value(in.left >= -1 && in.right >= -1, "window_size: expected two numbers of at least -1, got (", in.left, ", ",
              in.right, ")");
  const auto bound = [](int64_t n) { return n < 0 || n > KeyRanges::unbounded ? KeyRanges::unbounded : n; };
  c.left = bound(in.left);
  c.right = in.is_causal ? 0 : bound(in.right);
  if (in.ring) {  // older keys are gone
    check_value(c.left + c.q_len <= c.capacity, "window_size: expected left + query rows of at most the ring's ",
                c.capacity, " keys, got ", in.left < 0 ? "an unbounded left" : text(in.left, " + ", c.q_len));
  }
  return c;
}

std::tuple<Tensor, Tensor> decode(DecodeKernel kernel, const DecodeInputs& in) {
  const DecodeCall c = check_decode(in);
  const ScalarType lse_dtype = in.query.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const Tensor out = aten::empty(in.query, {c.batch, c.q_heads, c.q_len, c.v_head_dim});
  const Tensor lse = aten::empty(in.query, {c.batch, c.q_heads, c.q_len}, lse_dtype);
  kernel(c, in, out, lse);
  return {out, lse};
}

}  // namespace attnjourney

STABLE_TORCH_LIBRARY_FRAGMENT(attnjourney, m) {
  m.def(
      "decode(Tensor query, Tensor key, Tensor value, Tensor lengths, *, Tensor? block_table=None, bool ring=False, "
      "bool is_causal=True, SymInt[2] window_size=[-1, -1], float? scale=None) -> (Tensor out, Tensor lse)");
}
