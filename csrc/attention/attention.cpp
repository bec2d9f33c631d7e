#include "attention.h"

#include <algorithm>
#include <cmath>

#include "block_mask.h"
#include "decode/cache_checks.h"
#include "fp8.h"

namespace attnjourney {
namespace {

// the head dimension is the third from the end; rank 2 has none
int64_t heads_of(const Tensor& t) { return t.dim() >= 3 ? t.size(t.dim() - 3) : 1; }

void check_rank(const char* name, const Tensor& t, const Tensor& query) {
  check_tensor(t.dim() >= 2, name, t, ": expected at least 2 dimensions (..., length, head_dim), got shape ",
               shape_text(t));
  check_value(t.dim() == query.dim(), name, ": expected the rank of query, ", query.dim(), " (query has shape ",
              shape_text(query), "), got shape ", shape_text(t));
}

// no heads at all go with no heads only
bool divides(int64_t part, int64_t whole) { return part > 0 ? whole > 0 && whole % part == 0 : whole == 0; }

// heads of the call: equal, broadcast from 1, or grouped under enable_gqa
void check_heads(AttentionCall& c, const Tensor& query, const Tensor& key, const Tensor& value, bool enable_gqa) {
  const int64_t hq = heads_of(query), hk = heads_of(key), hv = heads_of(value);
  if (enable_gqa && query.dim() >= 3) {
    check_value(divides(hk, hq), "key: expected a head count that divides query's, ", hq, ", got ", hk,
                " (key has shape ", shape_text(key), ")");
    check_value(divides(hv, hq), "value: expected a head count that divides query's, ", hq, ", got ", hv,
                " (value has shape ", shape_text(value), ")");
    c.q_heads = hq;
  } else {
    const int64_t h = hq != 1 ? hq : hk != 1 ? hk : hv;
    check_value(hk == h || hk == 1, "key: expected ", h, " heads (dimension -3) or 1, got ", hk, " (shape ",
                shape_text(key), "); grouped heads need enable_gqa=True");
    check_value(hv == h || hv == 1, "value: expected ", h, " heads (dimension -3) or 1, got ", hv, " (shape ",
                shape_text(value), "); grouped heads need enable_gqa=True");
    c.q_heads = h;
  }
  // The finer of the two decides the grouping; the other one repeats through head_div. A group must divide both.
  c.kv_heads = c.q_heads == 0 ? 0 : std::max(hk, hv);
  if (c.kv_heads > 0 && (c.kv_heads % hk || c.kv_heads % hv)) c.kv_heads = c.q_heads;
  c.params.group = c.kv_heads > 0 ? c.q_heads / c.kv_heads : 1;
}

void check_batch(AttentionCall& c, const Tensor& query, const Tensor& key, const Tensor& value) {
  c.batch_dims = std::max(0, c.rank - 3);
  check_value(c.batch_dims <= max_batch_dims, "query: expected at most ", max_batch_dims + 3, " dimensions, got ",
              c.rank);
  for (int d = 0; d < c.batch_dims; d++) {
    const int64_t q = query.size(d), k = key.size(d), v = value.size(d), n = q != 1 ? q : k != 1 ? k : v;
    check_value(k == n || k == 1, "key: expected size ", n, " or 1 in batch dimension ", d, " (query has shape ",
                shape_text(query), "), got shape ", shape_text(key));
    check_value(v == n || v == 1, "value: expected size ", n, " or 1 in batch dimension ", d, " (query has shape ",
                shape_text(query), "), got shape ", shape_text(value));
    c.batch_size[d] = n;
    check_value(extent(c.batch, n) <= most_numbers,
                "query, key, value: expected batch dimensions of at most 2^56 items ", "(query has shape ",
                shape_text(query), ", key ", shape_text(key), ")");
    c.batch *= n;
  }
}

bool is_index(const Tensor& t) { return dtype_of(t) == ScalarType::Int || dtype_of(t) == ScalarType::Long; }

void check_mask(AttentionCall& c, const Tensor& mask, const Tensor& query) {
  std::vector<int64_t> want = c.leading();
  want.push_back(c.params.q_len);
  want.push_back(c.params.kv_len);
  check_mask_tensor(mask, want, query);
  const ScalarType t = mask.scalar_type();
  c.params.mask = t == ScalarType::Bool ? MaskKind::boolean : MaskKind::floating;
  c.params.mask_fp32 = t == ScalarType::Float && query.scalar_type() != ScalarType::Float;
  c.mask_map = mask_map(c, mask, c.params.mask_row, c.params.mask_col);
}

void check_packed(AttentionCall& c, const AttentionOptions& o, const Tensor& query) {
  check_value(!o.attn_mask, "attn_mask: packed sequences take none");
  for (const auto& [name, t] : {std::pair{"cu_seqlens_q", o.cu_seqlens_q}, std::pair{"cu_seqlens_k", o.cu_seqlens_k}})
    check_tensor(t->dim() == 1 && t->size(0) >= 1, name, *t, ": expected shape (sequences + 1,), got ", shape_text(*t));
  c.batch = o.cu_seqlens_q->size(0) - 1;
  check_lengths("cu_seqlens_q", o.cu_seqlens_q, c.batch + 1, query);
  check_value(o.cu_seqlens_k->size(0) == c.batch + 1, "cu_seqlens_k: expected the shape of cu_seqlens_q, (",
              c.batch + 1, ",), got ", shape_text(*o.cu_seqlens_k));
  check_lengths("cu_seqlens_k", o.cu_seqlens_k, c.batch + 1, query);
  c.packed = true;
}

// which keys are visible, and what is done to the scores
void check_scores(AttentionCall& c, const AttentionOptions& o, const Tensor& query) {
  AttentionParams& p = c.params;
  check_alignment(o.causal_alignment);
  c.bottom_right = o.causal_alignment == 1;
  const auto [left, right] = o.window;
  check_value(left >= -1 && right >= -1, "window_size: expected two numbers from -1 (unbounded), got (", left, ", ",
              right, ")");
  check_prefix_length(o.prefix_length);
  p.keys.left = window_bound(left);
  p.keys.right = o.is_causal ? 0 : window_bound(right);
  p.keys.prefix = std::min(o.prefix_length, p.kv_len);
  p.keys.key_length = p.kv_len;
  p.keys.offset = c.bottom_right ? p.kv_len - p.q_len : o.origin.row - o.origin.key;
  check_lengths("key_lengths", o.key_lengths, c.batch, query);
  check_lengths("query_lengths", o.query_lengths, c.batch, query);
  p.modifier = check_score_options(o, c.batch, c.q_heads, query);
  p.alibi = o.alibi_slopes.has_value();
}

void check_origin(const Origin& o, const AttentionCall& c) {
  const auto is_position = [](int64_t n) { return n >= 0 && n < KeyRanges::unbounded; };
  check_value(is_position(o.row) && is_position(o.key) && o.head >= 0 && o.heads >= 0,
              "origin: expected numbers from 0, positions below 2^40, got (", o.row, ", ", o.key, ", ", o.head, ", ",
              o.heads, ")");
  const auto most = int64_t{UINT32_MAX} + 1;  // dropout's counter
  check_value(o.head < most && o.heads < most && o.head + c.batch * std::max(o.heads, c.q_heads) <= most,
              "origin: expected at most 2^32 heads in the whole, got (", o.row, ", ", o.key, ", ", o.head, ", ",
              o.heads, ") for ", c.batch, " batch items");
  check_value(o.heads == 0 || o.heads >= c.q_heads, "origin: expected at least the call's ", c.q_heads,
              " heads in the whole or 0, got ", o.heads);
  const bool from_first = !c.bottom_right && !c.packed;
  check_value(from_first || (o.row == 0 && o.key == 0),
              "origin: expected positions of 0 beside causal_alignment 1 and packed sequences, got (", o.row, ", ",
              o.key, ")");
}

void check_query_dim(const Tensor& query) {
  check_value(query.size(query.dim() - 1) > 0, "query: expected a head_dim (last dimension) of at least 1, got shape ",
              shape_text(query));
}

// key and value like query, (batch dims..., heads, length, dim)
void check_tensors(AttentionCall& c) {
  const auto& [query, key, value, options, fp8] = c.args;
  AttentionParams& p = c.params;
  check_rank("key", key, query);
  check_rank("value", value, query);
  if (fp8)
    check_e4m3("query", query);
  else
    check_floating("query", query);
  check_same_dtype("key", key, "query", query);
  check_same_dtype("value", value, "query", query);
  check_same_device("key", key, "query", query);
  check_same_device("value", value, "query", query);
  check_heads(c, query, key, value, options.enable_gqa);
  check_batch(c, query, key, value);
  p.q_len = query.size(c.rank - 2);
  p.kv_len = key.size(c.rank - 2);
  p.head_dim = query.size(c.rank - 1);
  p.v_head_dim = value.size(c.rank - 1);
  check_query_dim(query);
  check_value(key.size(c.rank - 1) == p.head_dim, "key: expected the head_dim of query, ", p.head_dim, ", got ",
              key.size(c.rank - 1), " (key has shape ", shape_text(key), ")");
  check_value(value.size(c.rank - 2) == p.kv_len, "value: expected the length of key, ", p.kv_len, ", got ",
              value.size(c.rank - 2), " (value has shape ", shape_text(value), ")");
  check_value(p.v_head_dim > 0, "value: expected a head_dim (last dimension) of at least 1, got shape ",
              shape_text(value));
}

// query (heads, total_q, head_dim) over caches; kv_len is what a sequence can have
void check_paged(AttentionCall& c) {
  const auto& [query, key, value, options, fp8] = c.args;
  const Tensor& table = *options.block_table;
  AttentionParams& p = c.params;
  check_floating("query", query);
  c.q_heads = heads_of(query);
  p.q_len = query.size(1), p.head_dim = query.size(2);
  check_query_dim(query);
  check_same_dtype("key", key, "query", query);
  check_same_dtype("value", value, "query", query);
  check_caches(key, value, -1, query, c.q_heads, p.head_dim);
  c.kv_heads = heads_of(key);
  p.group = c.kv_heads > 0 ? c.q_heads / c.kv_heads : 1;
  p.v_head_dim = value.size(3);
  check_packed(c, options, query);
  check_block_table(table, c.batch, "query", query);
  p.page_size = key.size(2);
  check_block_size("key: expected a block size (dimension 2)", p.page_size, table);
  p.kv_len = p.page_size * table.size(1);
  p.k_page = stride_of(key, 0), p.v_page = stride_of(value, 0);
}

}  // namespace

void check_mask_tensor(const Tensor& mask, const std::vector<int64_t>& want, const Tensor& query) {
  const ScalarType t = dtype_of(mask), own = dtype_of(query);
  check_dtype(t == ScalarType::Bool || t == own || t == ScalarType::Float, "attn_mask", mask, "dtype torch.bool",
              own == ScalarType::Float ? " or " : ", ", OrFloat32{own, "query"});
  check_same_device("attn_mask", mask, "query", query);
  const int64_t extra = static_cast<int64_t>(want.size()) - mask.dim();
  bool ok = extra >= 0;
  for (int64_t d = 0; ok && d < mask.dim(); d++) ok = mask.size(d) == want[d + extra] || mask.size(d) == 1;
  check_value(ok, "attn_mask: expected a shape that broadcasts to ", list_text(want), ", got ", shape_text(mask));
}

void check_per_head(const char* name, const OptionalTensor& t, int64_t batch, int64_t heads, const Tensor& query) {
  if (!t) return;
  const ScalarType own = dtype_of(*t), wanted = dtype_of(query);
  check_dtype(own == wanted || own == ScalarType::Float, name, *t, "dtype ", OrFloat32{wanted, "query"});
  const bool per_head = t->dim() == 1 && t->size(0) == heads;
  const bool per_item = t->dim() == 2 && t->size(0) == batch && t->size(1) == heads;
  check_value(per_head || per_item, name, ": expected shape (", heads, ",) or (", batch, ", ", heads,
              ") (heads of query, or batch and heads), got ", shape_text(*t));
  check_same_device(name, *t, "query", query);
}

double check_scale(const std::optional<double>& given, int64_t head_dim) {
  const double scale = given.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  check_value(std::isfinite(scale), "scale: expected a finite number, got ", scale);
  return scale;
}

void check_alignment(int64_t causal_alignment) {
  check_value(causal_alignment == 0 || causal_alignment == 1,
              "causal_alignment: expected 0 (top-left) or 1 (bottom-right), got ", causal_alignment);
}
void check_lengths(const char* name, const OptionalTensor& t, int64_t count, const Tensor& query) {
  if (!t) return;
  check_dtype(is_index(*t), name, *t, "dtype torch.int64 or torch.int32");
  check_value(t->dim() == 1 && t->size(0) == count, name, ": expected shape (", count, ",), one number for each ",
              "sequence, got ", shape_text(*t));
  check_same_device(name, *t, "query", query);
}
void check_prefix_length(int64_t n) { check_value(n >= 0, "prefix_length: expected a number from 0, got ", n); }

ScoreModifier check_score_options(const AttentionOptions& o, int64_t batch, int64_t heads, const Tensor& query) {
  check_value(o.softcap >= 0 && std::isfinite(o.softcap), "softcap: expected a finite number from 0, got ", o.softcap);
  check_per_head("sinks", o.sinks, batch, heads, query);
  check_per_head("alibi_slopes", o.alibi_slopes, batch, heads, query);
  return {.softcap = o.softcap};
}

HeadMap mask_map(const AttentionCall& c, const Tensor& mask, int64_t& row, int64_t& col) {
  HeadMap m;
  const auto stride = [&](int64_t from_end) { return stride_of(mask, mask.dim() - from_end); };
  col = stride(1);
  row = stride(2);
  if (c.rank >= 3) m.head_stride = stride(3);
  for (int d = 0; d < c.batch_dims; d++) m.batch_stride[d] = stride(c.rank - d);
  return m;
}

std::vector<int64_t> AttentionCall::leading() const {
  std::vector<int64_t> s(batch_size, batch_size + batch_dims);
  if (rank >= 3) s.push_back(q_heads);
  return s;
}

HeadMap head_map(const AttentionCall& call, const Tensor& t, int64_t heads) {
  HeadMap m;
  const int64_t own = heads_of(t);
  m.head_div = own > 0 ? std::max<int64_t>(1, heads / own) : 1;
  m.head_stride = stride_of(t, t.dim() - 3);
  for (int d = 0; d < call.batch_dims; d++) m.batch_stride[d] = stride_of(t, d);
  return m;
}

AttentionCall check_attention(AttentionArgs args) {
  AttentionCall c{.args = std::move(args)};
  auto& [query, key, value, options, fp8] = c.args;
  const auto& [attn_mask, cu_seqlens_q, cu_seqlens_k, block_table, blocks, dropout_p, is_causal, scale, enable_gqa,
               causal_alignment, window, prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes,
               origin, dropout_seed] = options;
  c.rank = static_cast<int>(query.dim());
  check_rank("query", query, query);
  if (block_table)
    check_paged(c);
  else
    check_tensors(c);
  AttentionParams& p = c.params;
  check_value(extent(c.batch, c.q_heads, p.q_len, p.v_head_dim) <= most_numbers &&
                  extent(c.batch, c.q_heads, p.q_len, p.head_dim) <= most_numbers &&
                  extent(c.batch, c.q_heads, p.kv_len, p.head_dim) <= most_numbers &&
                  extent(c.batch, c.q_heads, p.kv_len, p.v_head_dim) <= most_numbers &&
                  std::max(p.q_len, p.kv_len) < KeyRanges::unbounded,
              "query, key, value: expected lengths below 2^40 and at most 2^56 numbers, got shapes ", shape_text(query),
              ", ", shape_text(key), " and ", shape_text(value));

  check_dropout(dropout_p);
  p.scale = check_scale(scale, p.head_dim);
  if (cu_seqlens_q && !block_table) check_packed(c, options, query);
  (void)cu_seqlens_k;  // with cu_seqlens_q
  // which keys are visible, and what is done to the scores
  (void)is_causal, (void)causal_alignment, (void)window, (void)prefix_length, (void)key_lengths, (void)query_lengths;
  (void)softcap, (void)sinks, (void)alibi_slopes;
  check_scores(c, options, query);
  if (dropout_p > 0) {
    check_value(dropout_seed.has_value(), "dropout_seed: expected an int64 tensor when dropout_p > 0, got None");
    check_runtime(dtype_of(*dropout_seed) == ScalarType::Long && dropout_seed->numel() == 1,
                  "dropout_seed: expected one torch.int64 number, got ", dtype_text(dtype_of(*dropout_seed)),
                  " of shape ", shape_text(*dropout_seed));
  }
  check_origin(origin, c);
  if (fp8) check_fp8_scales(c);
  if (attn_mask) check_mask(c, *attn_mask, query);
  if (blocks) check_blocks(c, *blocks, query);

  for (Tensor* t : {&query, &key, &value})
    if (!aten::has_dense_rows(*t)) *t = torch::stable::contiguous(*t);
  p.q_row = stride_of(query, c.rank - 2);
  p.k_row = stride_of(key, key.dim() - 2);
  p.v_row = stride_of(value, value.dim() - 2);
  c.query_map = head_map(c, query, c.q_heads);
  c.key_map = head_map(c, key, c.q_heads);
  c.value_map = head_map(c, value, c.q_heads);
  c.dtype = fp8 ? fp8->out_dtype : query.scalar_type();
  c.lse_dtype = c.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  return c;
}

}  // namespace attnjourney
