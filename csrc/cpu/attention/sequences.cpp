#include "sequences.h"

#include <algorithm>

#include "cpu/kernels/common/common.h"
#include "decode/cache_checks.h"

namespace attnjourney {

int64_t item_size(ScalarType t) {
  switch (t) {
    case ScalarType::Double:
    case ScalarType::Long:
      return 8;
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    case ScalarType::Bool:
    case ScalarType::Char:
    case ScalarType::Float8_e4m3fn:
      return 1;
    default:
      return 2;
  }
}

std::vector<int64_t> index_values(const Tensor& t_) {
  const Tensor t = aten::contiguous(t_);
  std::vector<int64_t> x(static_cast<size_t>(t.numel()));
  for (size_t i = 0; i < x.size(); i++)
    x[i] = t.scalar_type() == ScalarType::Long ? static_cast<const int64_t*>(t.const_data_ptr())[i]
                                               : static_cast<const int32_t*>(t.const_data_ptr())[i];
  return x;
}

std::vector<double> per_head(const OptionalTensor& t_, int64_t batch, int64_t heads) {
  std::vector<double> x;
  if (!t_) return x;
  const Tensor t = aten::contiguous(*t_);
  x.resize(static_cast<size_t>(batch * heads));
  const bool per_item = t.dim() == 2;
  const auto read = [&](auto kind) {
    const auto* data = static_cast<const decltype(kind)*>(t.const_data_ptr());
    for (int64_t i = 0; i < batch * heads; i++) x[i] = load_one(data + (per_item ? i : i % heads));
  };
  switch (t.scalar_type()) {
    case ScalarType::Double:
      read(double{});
      break;
    case ScalarType::BFloat16:
      read(bf16{});
      break;
    case ScalarType::Half:
      read(f16{});
      break;
    default:
      read(float{});
  }
  return x;
}

double visible_pairs(const AttentionParams& p) {
  constexpr int64_t samples = 32;
  if (p.q_len == 0) return 0;
  if (!p.keys.bounded()) return p.density * static_cast<double>(p.q_len) * static_cast<double>(p.keys.key_length);
  const int64_t n = std::min(samples, p.q_len);
  double seen = 0;
  for (int64_t i = 0; i < n; i++) {
    const int64_t row = (2 * i + 1) * p.q_len / (2 * n);
    seen += static_cast<double>(p.keys.row(row).count());
  }
  return p.density * seen / static_cast<double>(n) * static_cast<double>(p.q_len);
}

Sequences::Sequences(const AttentionCall& c) : call_(c) {
  const AttentionOptions& o = c.args.options;
  const AttentionParams& p = c.params;
  if (c.packed) {
    const std::vector<int64_t> q = index_values(*o.cu_seqlens_q), k = index_values(*o.cu_seqlens_k);
    const auto check = [](const char* name, const std::vector<int64_t>& x, int64_t total) {
      bool ok = x.front() == 0 && x.back() <= total;
      for (size_t i = 1; i < x.size(); i++) ok = ok && x[i] >= x[i - 1];
      if (ok) return;
      std::string s;
      for (int64_t n : x) s += (s.empty() ? "" : ", ") + std::to_string(n);
      check_value(false, name, ": expected offsets that begin with 0, never fall and end at ", total,
                  " or below, got [", s, "]");
    };
    const bool paged = o.block_table.has_value();
    check("cu_seqlens_q", q, p.q_len);
    check("cu_seqlens_k", k, paged ? extent(c.batch, p.kv_len) : p.kv_len);
    for (size_t i = 0; i + 1 < q.size(); i++) {
      const int64_t keys = k[i + 1] - k[i], b = static_cast<int64_t>(i);
      if (paged) {
        check_value(keys <= p.kv_len, "cu_seqlens_k: expected sequences of at most the cache's capacity, ", p.kv_len,
                    ", got ", keys, " for batch row ", b);
        check_blocks_of(*o.block_table, b, keys, c.args.key);
      }
      list_.push_back({q[i], q[i + 1] - q[i], paged ? 0 : k[i], keys, keys});
    }
    used_q_ = q.back();
    used_k_ = k.back();
    return;
  }
  if (!o.key_lengths && !o.query_lengths) return;
  const auto read = [&](const char* name, const OptionalTensor& t, int64_t most) {
    if (!t) return std::vector<int64_t>(static_cast<size_t>(c.batch), most);
    const std::vector<int64_t> x = index_values(*t);
    for (size_t i = 0; i < x.size(); i++)
      check_value(x[i] >= 0 && x[i] <= most, name, ": expected numbers from 0 to ", most, ", got ", x[i], " at ", i);
    return x;
  };
  const std::vector<int64_t> k = read("key_lengths", o.key_lengths, p.kv_len);
  const std::vector<int64_t> q = read("query_lengths", o.query_lengths, p.q_len);
  for (size_t i = 0; i < k.size(); i++) list_.push_back({0, q[i], 0, p.kv_len, k[i]});
}

AttentionParams Sequences::params(int64_t batch) const {
  AttentionParams p = call_.params;
  if (uniform()) return p;
  const Item& s = list_[static_cast<size_t>(batch)];
  p.q_len = s.q_len;
  p.kv_len = s.kv_len;
  p.keys.set_length(s.key_length);
  if (call_.bottom_right) p.keys.offset = s.key_length - s.q_len;
  return p;
}

AttentionParams Sequences::largest() const {
  AttentionParams p = call_.params;
  if (!call_.packed) return p;
  p.q_len = p.kv_len = 0;
  for (const Item& s : list_) {
    p.q_len = std::max(p.q_len, s.q_len);
    p.kv_len = std::max(p.kv_len, s.kv_len);
  }
  p.keys.set_length(p.kv_len);
  return p;
}

}  // namespace attnjourney
