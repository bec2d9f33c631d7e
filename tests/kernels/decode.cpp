// Decoding, the keys of each head in chunks of several runs, and the products of MLA's heads.
#include <algorithm>
#include <cstring>
#include <vector>

#include "program.h"

namespace kernel_tests {

using namespace attnjourney;

// query (Hq, L, E), key (Hk, S, E), value (Hk, S, Ev); `chunk` keys at a time, in runs of `run`. `bytes` 1: keys and
// values of int8, 2: of e4m3, beside key_scale and value_scale (Hk, S).
void decode(const Inputs& in, const Types& types) {
  const bool quantized = in.has("bytes");
  const DecodeKernels& kernel =
      quantized ? kernels().quantized[types.dtype - 1][in.integer("bytes") - 1].decode : kernels().decode[types.dtype];
  const int64_t cached = quantized ? 1 : types.item;
  const auto scale_of = [&](const char* name, int64_t at) {
    return quantized ? reinterpret_cast<const float*>(in.tensor(name)) + at : nullptr;
  };
  const int64_t kv_heads = in.integer("kv_heads"), group = in.integer("group"), kv_len = in.integer("kv_len");
  DecodeParams p;
  p.q_len = in.integer("q_len"), p.head_dim = in.integer("head_dim"), p.v_head_dim = in.integer("v_head_dim");
  p.q_row = p.k_row = p.head_dim, p.v_row = p.out_row = p.v_head_dim;
  p.q_head = p.q_len * p.head_dim, p.out_head = p.q_len * p.v_head_dim, p.lse_head = p.q_len;
  p.scale = in.real("scale"), p.modifier.softcap = in.real("softcap"), p.alibi = in.has("alibi_slopes");
  p.mask = mask_of(in);
  p.mask_head = p.q_len * kv_len, p.mask_row = kv_len, p.mask_col = 1;
  p.keys = keys_of(in);

  const int64_t rows = group * p.q_len, all = kv_heads * rows, chunk = in.integer("chunk"), run = in.integer("run");
  Memory out(all * p.v_head_dim * types.item), lse(all * types.real), stats(2 * all * types.real);
  Memory space(kernel.space(p, rows));
  const VisibleKeys seen = p.keys.any(0, p.q_len - 1);
  const int64_t end = std::max(seen.prefix, seen.end), chunks = std::max<int64_t>(1, (end + chunk - 1) / chunk);
  const int64_t partial = kernel.partial_size(p, rows);
  Memory partials(chunks * partial);
  for (int64_t kv = 0; kv < kv_heads; kv++) {
    DecodeRows r;
    r.query = in.tensor("query") + kv * rows * p.head_dim * types.item;
    r.out = out.at(kv * rows * p.v_head_dim * types.item);
    r.lse = lse.at(kv * rows * types.real), r.stats = stats.at(2 * kv * rows * types.real);
    r.count = rows;
    const int64_t pairs = rows * kv_len;
    if (p.mask == MaskKind::boolean) r.mask = in.tensor("bool_mask") + kv * pairs;
    if (p.mask == MaskKind::floating) r.mask = in.tensor("mask") + kv * pairs * types.item;
    if (in.has("sinks")) r.sinks = reinterpret_cast<const double*>(in.tensor("sinks")) + kv * group;
    if (p.alibi) r.slopes = reinterpret_cast<const double*>(in.tensor("alibi_slopes")) + kv * group;
    for (int64_t c = 0; c < chunks; c++) {
      std::vector<DecodeRun> runs;
      for (int64_t k = c * chunk; k < std::min(end, (c + 1) * chunk); k += run)
        runs.push_back({.key = in.tensor("key") + (kv * kv_len + k) * p.head_dim * cached,
                        .value = in.tensor("value") + (kv * kv_len + k) * p.v_head_dim * cached,
                        .first = k,
                        .count = std::min({run, end - k, (c + 1) * chunk - k}),
                        .key_scale = scale_of("key_scale", kv * kv_len + k),
                        .value_scale = scale_of("value_scale", kv * kv_len + k)});
      kernel.chunk(p, r, runs.data(), static_cast<int64_t>(runs.size()), partials.at(c * partial), space.get());
    }
    if (!kernel.merge(p, r, partials.get(), chunks)) throw std::runtime_error("merge: rows are to be computed again");
  }
  give("out", out), give("lse", lse);
}

// x (rows, inner) times w (inner, width), or with `transposed` w (width, inner)
void head_product(const Inputs& in, const Types& types) {
  const DecodeKernels& kernel = kernels().decode[types.dtype];
  HeadProductParams p;
  p.rows = in.integer("rows"), p.inner = in.integer("inner"), p.width = in.integer("width");
  p.transposed = in.integer("transposed") != 0;
  p.x = in.tensor("x"), p.w = in.tensor("w");
  p.x_batch = p.inner, p.out_batch = p.width, p.w_row = p.transposed ? p.inner : p.width;
  Memory out(p.rows * p.width * types.item), space(kernel.product_space(p));
  p.out = out.get();
  kernel.product(p, space.get());
  give("out", out);
}

// row (n,) to bytes (1: int8, 2: e4m3) and their scale, and these back to numbers
void quantized_row(const Inputs& in, const Types& types) {
  const QuantizedKernels& kernel = kernels().quantized[types.dtype - 1][in.integer("bytes") - 1];
  const int64_t n = in.integer("n");
  Memory bytes(n), scale(sizeof(float)), row(n * types.item);
  const float factor = kernel.quantize(in.tensor("row"), n, bytes.get());
  memcpy(scale.get(), &factor, sizeof factor);
  kernel.dequantize(bytes.get(), factor, n, row.get());
  give("bytes", bytes), give("scale", scale), give("row", row);
}

}  // namespace kernel_tests
