#include "mla_decode.h"

#include <cmath>

#include "cache_checks.h"

namespace attnjourney {
namespace {

struct Shape {
  int64_t batch, heads, q_len, nope, rope, kv_lora, v;
};

Shape check(const MlaDecodeInputs& in) {
  const Tensor &q = in.query, &w = in.kv_b_weight;
  Shape s{};
  check_dim("query", q, 4);
  check_floating("query", q);
  s.batch = q.size(0), s.heads = q.size(1), s.q_len = q.size(2);
  check_dim("latent", in.latent, 3);
  check_same_dtype("latent", in.latent, "query", q);
  check_same_device("latent", in.latent, "query", q);
  check_value(in.latent.size(0) == s.batch, "latent: expected the batch size of query, ", s.batch, ", got shape ",
              shape_text(in.latent));
  check_dim("kv_b_weight", w, 2);
  check_same_dtype("kv_b_weight", w, "query", q);
  check_same_device("kv_b_weight", w, "query", q);
  s.kv_lora = w.size(1);
  check_value(s.kv_lora > 0, "kv_b_weight: expected at least one column, got shape ", shape_text(w));
  s.rope = in.latent.size(2) - s.kv_lora;
  check_value(s.rope >= 0, "latent: expected a last dimension of at least kv_b_weight's columns, ", s.kv_lora,
              ", got shape ", shape_text(in.latent));
  s.nope = q.size(3) - s.rope;
  check_value(s.nope > 0, "query: expected a last dimension above the rotary part of latent, ", s.rope, ", got shape ",
              shape_text(q));
  check_value(s.heads > 0 && w.size(0) % s.heads == 0 && w.size(0) / s.heads > s.nope,
              "kv_b_weight: expected query's heads, ", s.heads, ", times (nope + v) rows, nope is ", s.nope,
              ", got shape ", shape_text(w));
  s.v = w.size(0) / s.heads - s.nope;
  return s;
}

}  // namespace

std::tuple<Tensor, Tensor> mla_decode(DecodeKernel kernel, const MlaDecodeInputs& in) {
  const Shape s = check(in);
  const Tensor w = aten::contiguous(in.kv_b_weight), latent = aten::rows_contiguous(in.latent);
  const int64_t dim = s.kv_lora + s.rope, rows = s.batch * s.q_len, per_head = (s.nope + s.v) * s.kv_lora;

  // absorbed queries, (heads, batch, q_len, kv_lora + rope)
  const Tensor absorbed = aten::empty(in.query, {s.heads, s.batch, s.q_len, dim});
  const auto by_head = [&](const Tensor& t) {  // (batch, heads, q_len, n) -> (heads, batch, q_len, n), a view
    return aten::strided_view(t, {t.size(1), t.size(0), t.size(2), t.size(3)},
                              {t.stride(1), t.stride(0), t.stride(2), t.stride(3)});
  };
  const Tensor query = by_head(in.query);
  const auto columns = [&](const Tensor& t, int64_t begin, int64_t n) {  // of the last dimension
    return aten::strided_view(t, {t.size(0), t.size(1), t.size(2), n},
                              {t.stride(0), t.stride(1), t.stride(2), t.stride(3)}, begin * t.stride(3));
  };
  const Tensor nope = aten::contiguous(columns(query, 0, s.nope));
  const Tensor w_uk = aten::strided_view(w, {s.heads, s.nope, s.kv_lora}, {per_head, s.kv_lora, 1});
  const Tensor w_uv_t = aten::strided_view(w, {s.heads, s.kv_lora, s.v}, {per_head, 1, s.kv_lora}, s.nope * s.kv_lora);
  const Tensor front = aten::strided_view(absorbed, {s.heads, rows, s.kv_lora}, {rows * dim, dim, 1});
  if (rows > 0)
    aten::call("aten::bmm", "out", aten::strided_view(nope, {s.heads, rows, s.nope}, {rows * s.nope, s.nope, 1}), w_uk,
               front);
  Tensor rope = columns(absorbed, s.kv_lora, s.rope);
  if (s.rope > 0) torch::stable::copy_(rope, columns(query, s.nope, s.rope));

  const auto cache = [&](int64_t n) {  // one key/value head
    return aten::strided_view(latent, {s.batch, 1, latent.size(1), n},
                              {latent.stride(0), latent.stride(0), latent.stride(1), 1});
  };
  const double scale = in.scale.value_or(1.0 / std::sqrt(static_cast<double>(s.nope + s.rope)));
  const auto [u, lse] = decode(kernel, {by_head(absorbed), cache(dim), cache(s.kv_lora), in.lengths, std::nullopt,
                                        false, in.is_causal, in.left, in.right, scale});
  const Tensor u_heads = aten::contiguous(by_head(u));
  const Tensor out_heads = aten::empty(in.query, {s.heads, rows, s.v});
  if (rows > 0)
    aten::call("aten::bmm", "out",
               aten::strided_view(u_heads, {s.heads, rows, s.kv_lora}, {rows * s.kv_lora, s.kv_lora, 1}), w_uv_t,
               out_heads);
  Tensor out = aten::empty(in.query, {s.batch, s.heads, s.q_len, s.v});
  torch::stable::copy_(
      out, aten::strided_view(out_heads, {s.batch, s.heads, s.q_len, s.v}, {s.q_len * s.v, rows * s.v, s.v, 1}));
  return {out, lse};
}

}  // namespace attnjourney

STABLE_TORCH_LIBRARY_FRAGMENT(attnjourney, m) {
  m.def(
      "mla_decode(Tensor query, Tensor latent, Tensor lengths, Tensor kv_b_weight, *, bool is_causal=True, "
      "SymInt[2] window_size=[-1, -1], float? scale=None) -> (Tensor out, Tensor lse)");
}
