#include "mla_decode.h"

#include <algorithm>
#include <cmath>

#include "cache_checks.h"
#include "core/backend.h"

namespace attnjourney {
namespace {

struct MlaDecodeInputs {
  Tensor query;                 // (batch, heads, q_len, nope + rope)
  Tensor latent;                // (batch, capacity, kv_lora + rope); paged: (num_blocks, block_size, kv_lora + rope)
  Tensor lengths;               // (batch,) int64
  Tensor kv_b_weight;           // (heads * (nope + v), kv_lora), a head's nope rows (W_UK) before its v rows (W_UV)
  OptionalTensor latent_scale;  // of latents in bytes, float32 (batch, capacity); paged: (num_blocks, block_size)
  DecodeInputs decode;          // its block_table and options; the default scale is (nope + rope)^-0.5
};

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
  check_cache_dtype("latent", in.latent, "latent_scale", in.latent_scale, "query", q);
  check_same_device("latent", in.latent, "query", q);
  check_value(in.decode.block_table || in.latent.size(0) == s.batch, "latent: expected the batch size of query, ",
              s.batch, ", got shape ", shape_text(in.latent));
  if (in.latent_scale) check_scale_of("latent_scale", *in.latent_scale, "latent", in.latent);
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

std::tuple<Tensor, Tensor> absorbed(const DecodeBackend& backend, const Shape& s, const MlaDecodeInputs& in,
                                    DecodeInputs call, const Tensor& w) {
  const int64_t dim = s.kv_lora + s.rope, per_head = (s.nope + s.v) * s.kv_lora;
  const auto columns = [&](const Tensor& t, int64_t begin, int64_t n) {  // of the last dimension
    return aten::strided_view(t, {t.size(0), t.size(1), t.size(2), n},
                              {t.stride(0), t.stride(1), t.stride(2), t.stride(3)}, begin * t.stride(3));
  };
  const auto weight = [&](int64_t begin, int64_t rows) {  // (heads, rows, kv_lora)
    return aten::strided_view(w, {s.heads, rows, s.kv_lora}, {per_head, s.kv_lora, 1}, begin * s.kv_lora);
  };
  const Tensor query = aten::rows_contiguous(in.query);
  call.query = aten::empty(query, {s.batch, s.heads, s.q_len, dim});
  backend.products(columns(query, 0, s.nope), weight(0, s.nope), false, columns(call.query, 0, s.kv_lora));
  Tensor rope = columns(call.query, s.kv_lora, s.rope);
  if (s.rope > 0) torch::stable::copy_(rope, columns(query, s.nope, s.rope));
  const auto [u, lse] = decode_with(backend.decode_latents, call);
  const Tensor out = aten::empty(query, {s.batch, s.heads, s.q_len, s.v});
  backend.products(u, weight(s.nope, s.v), true, out);
  return {out, lse};
}

// dimension d, counted from the end, cut to [begin, begin + n); left alone where it broadcasts
Tensor cut(Tensor t, int64_t d, int64_t begin, int64_t n) {
  const int64_t at = t.dim() - d;
  return at < 0 || t.size(at) == 1 ? t : torch::stable::narrow(t, at, begin, n);
}

// the first latents of a sequence, (keys, kv_lora + rope), in the dtype of the query
Tensor sequence_of(const DecodeBackend& backend, const MlaDecodeInputs& in, const Tensor& latent, int64_t b,
                   int64_t keys) {
  const int64_t dim = latent.size(2);
  const Tensor own = aten::strided_view(latent, {keys, dim}, {latent.stride(1), 1}, b * latent.stride(0));
  if (!in.latent_scale) return own;
  const Tensor out = aten::empty(in.query, {keys, dim});
  backend.dequantize(own, aten::strided_view(*in.latent_scale, {keys}, {1}, b * in.latent_scale->stride(0)), out);
  return out;
}

// A sequence's heads in pieces, so that their keys and values stay below a limit. Lengths are known on the CPU alone:
// elsewhere all of the capacity is expanded.
std::tuple<Tensor, Tensor> expanded(const DecodeBackend& backend, const Shape& s, const MlaDecodeInputs& in,
                                    const DecodeInputs& call, const Tensor& cache, const Tensor& w) {
  const bool on_cpu = in.query.is_cpu();
  const int64_t most = int64_t{1} << (on_cpu ? 23 : 27);  // numbers
  const int64_t qk = s.nope + s.rope, width = s.nope + s.v;
  const Tensor out = aten::empty(in.query, {s.batch, s.heads, s.q_len, s.v});
  const ScalarType lse_dtype = in.query.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const Tensor lse = aten::empty(in.query, {s.batch, s.heads, s.q_len}, lse_dtype);
  for (int64_t b = 0; b < s.batch; b++) {
    const int64_t keys = on_cpu ? static_cast<const int64_t*>(in.lengths.const_data_ptr())[b] : cache.size(1);
    const Tensor latent = sequence_of(backend, in, cache, b, keys);
    const int64_t piece = std::clamp<int64_t>(most / std::max<int64_t>(1, keys * (qk + s.v)), 1, s.heads);
    const Tensor c = aten::strided_view(latent, {keys, s.kv_lora}, {latent.stride(0), 1});
    const Tensor rope = aten::strided_view(latent, {1, 1, keys, s.rope}, {0, 0, latent.stride(0), 1}, s.kv_lora);
    for (int64_t first = 0; first < s.heads; first += piece) {
      const int64_t n = std::min(piece, s.heads - first);
      const Tensor kv = aten::empty(in.query, {keys, n * width}), key = aten::empty(in.query, {1, n, keys, qk});
      aten::call("aten::mm", "out", c,
                 aten::strided_view(w, {s.kv_lora, n * width}, {1, s.kv_lora}, first * width * s.kv_lora), kv);
      const auto of_key = [&](int64_t begin, int64_t count) {
        return aten::strided_view(key, {1, n, keys, count}, {n * keys * qk, keys * qk, qk, 1}, begin);
      };
      const auto of_kv = [&](int64_t begin, int64_t count) {
        return aten::strided_view(kv, {1, n, keys, count}, {keys * n * width, width, n * width, 1}, begin);
      };
      Tensor key_nope = of_key(0, s.nope), key_rope = of_key(s.nope, s.rope);
      torch::stable::copy_(key_nope, of_kv(0, s.nope));
      if (s.rope > 0) torch::stable::copy_(key_rope, rope);
      DecodeInputs part = call;
      part.query = cut(cut(in.query, 4, b, 1), 3, first, n);
      part.key = key, part.value = of_kv(s.nope, s.v);
      part.key_scale.reset(), part.value_scale.reset();  // expanded in the dtype of the query
      part.lengths = cut(in.lengths, 1, b, 1);
      AttentionOptions& o = part.options;
      if (o.attn_mask)
        o.attn_mask = cut(cut(cut(*o.attn_mask, 4, b, 1), 3, first, n), 1, 0, std::min(keys, o.attn_mask->size(-1)));
      for (OptionalTensor* t : {&o.sinks, &o.alibi_slopes})
        if (*t) *t = cut(cut(**t, 2, b, 1), 1, first, n);
      backend.decode(
          check_decode(part), part,
          aten::strided_view(out, {1, n, s.q_len, s.v}, {n * s.q_len * s.v, s.q_len * s.v, s.v, 1},
                             (b * s.heads + first) * s.q_len * s.v),
          aten::strided_view(lse, {1, n, s.q_len}, {n * s.q_len, s.q_len, 1}, (b * s.heads + first) * s.q_len));
    }
  }
  return {out, lse};
}

std::tuple<Tensor, Tensor> run(const DecodeBackend& backend, MlaDecodeInputs in) {
  const Shape s = check(in);
  if (in.latent_scale) in.latent_scale = aten::rows_contiguous(*in.latent_scale);
  const Tensor latent = aten::rows_contiguous(in.latent), w = aten::contiguous(in.kv_b_weight);
  DecodeInputs call = in.decode;
  call.lengths = in.lengths;
  call.options.scale = call.options.scale.value_or(1.0 / std::sqrt(static_cast<double>(s.nope + s.rope)));
  // the options, as of attention with one key/value head
  const int64_t dim = s.kv_lora + s.rope;
  call.query = aten::strided_view(in.query, {s.batch, s.heads, s.q_len, dim},
                                  {in.query.stride(0), in.query.stride(1), in.query.stride(2), 0});
  call.key = aten::strided_view(latent, {latent.size(0), 1, latent.size(1), dim},
                                {latent.stride(0), latent.stride(0), latent.stride(1), 1});
  call.value = aten::strided_view(call.key, {latent.size(0), 1, latent.size(1), s.kv_lora}, call.key.strides());
  if (in.latent_scale) {
    const Tensor& scale = *in.latent_scale;
    call.key_scale = call.value_scale =
        aten::strided_view(scale, {scale.size(0), 1, scale.size(1)}, {scale.stride(0), scale.stride(0), 1});
  }
  const DecodeCall checked = check_decode(call);
  // multiplications of one head: for a row and a key, and for a key
  const int64_t saved = 2 * s.kv_lora - s.nope - s.v, paid = s.kv_lora * (s.nope + s.v);
  const bool too_wide = std::max(s.nope + s.rope, s.v) > backend.most_head_dim;
  const bool only_absorbed = in.decode.block_table || too_wide || (in.latent_scale && !backend.dequantize);
  if (only_absorbed || s.q_len * saved <= paid) return absorbed(backend, s, in, call, w);
  if (in.query.is_cpu()) check_decode_values(checked, call);
  return expanded(backend, s, in, call, latent, w);
}

}  // namespace

std::tuple<Tensor, Tensor> mla_decode(const Backend& backend, Arguments& arguments) {
  const Tensor query = arguments.tensor(), latent = arguments.tensor(), lengths = arguments.tensor();
  const Tensor kv_b_weight = arguments.tensor();
  DecodeInputs decode{.query = query, .key = query, .value = query, .lengths = lengths};
  decode.block_table = arguments.optional_tensor();
  const OptionalTensor latent_scale = arguments.optional_tensor();
  read_decode_options(arguments, decode.options);
  return run(backend.decode, {.query = query,
                              .latent = latent,
                              .lengths = lengths,
                              .kv_b_weight = kv_b_weight,
                              .latent_scale = latent_scale,
                              .decode = std::move(decode)});
}

}  // namespace attnjourney
