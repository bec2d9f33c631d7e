// Token-sparse attention: the gradients of causal rows in blocks, each block with its list of keys.
#include <algorithm>
#include <vector>

#include "cpu/sparse/kernels.h"
#include "program.h"

namespace kernel_tests {

using namespace attnjourney;

// query, grad_out (heads, L, E or Ev), key, value (S, E or Ev), indices (blocks, k) int32, sinks (heads) double
void sparse(const Inputs& in, const Types& types) {
  const SparseKernels& kernel = kernels().sparse->of[types.dtype];
  SparseKernelParams p;
  p.group = in.integer("heads"), p.q_len = in.integer("q_len"), p.kv_len = in.integer("kv_len");
  p.head_dim = in.integer("head_dim"), p.v_head_dim = in.integer("v_head_dim"), p.rows = in.integer("rows");
  p.index_count = in.integer("k"), p.scale = in.real("scale"), p.modifier.softcap = in.real("softcap");
  p.q_head = p.grad_q_head = p.q_len * p.head_dim, p.q_row = p.grad_q_row = p.k_row = p.head_dim;
  p.grad_out_head = p.q_len * p.v_head_dim, p.grad_out_row = p.v_row = p.v_head_dim;
  const auto padded = [&](int64_t dim) { return (dim + kernel.lanes - 1) / kernel.lanes * kernel.lanes; };

  Memory grad_query(p.group * p.q_len * p.head_dim * types.item), grad_key(p.kv_len * p.head_dim * types.item);
  Memory grad_value(p.kv_len * p.v_head_dim * types.item), grad_sinks(p.group * 8);
  Memory key_sums(p.kv_len * padded(p.head_dim) * types.real), value_sums(p.kv_len * padded(p.v_head_dim) * types.real);
  const int64_t most = p.group * p.rows;
  Memory saved(kernel.saved_space(p, most, p.index_count)), space(kernel.rows_space(p, most, p.index_count));
  std::vector<double> of_rows(static_cast<size_t>(most));
  for (int64_t block = 0; block * p.rows < p.q_len; block++) {
    SparseRows rows;
    const int64_t begin = block * p.rows;
    rows.rows = std::min(p.rows, p.q_len - begin);
    const int32_t* const named = reinterpret_cast<const int32_t*>(in.tensor("indices")) + block * p.index_count;
    std::vector<int32_t> keys;
    for (const auto& [from, to] : {std::pair{int64_t{0}, begin + 1}, {begin + 1, begin + rows.rows}}) {
      for (int64_t i = 0; i < p.index_count; i++)
        if (named[i] >= from && named[i] < to) keys.push_back(named[i]);
      if (from == 0) rows.whole = static_cast<int64_t>(keys.size());
    }
    rows.query = in.tensor("query") + begin * p.head_dim * types.item;
    rows.grad_out = in.tensor("grad_out") + begin * p.v_head_dim * types.item;
    rows.grad_query = grad_query.at(begin * p.head_dim * types.item);
    rows.key = in.tensor("key"), rows.value = in.tensor("value");
    rows.sinks = reinterpret_cast<const double*>(in.tensor("sinks"));
    rows.keys = keys.data(), rows.n = static_cast<int64_t>(keys.size()), rows.last = begin;
    rows.count = p.group * rows.rows;
    kernel.rows(p, rows, saved.get(), of_rows.data(), space.get());
    for (int64_t i = 0; i < rows.count; i++)
      reinterpret_cast<double*>(grad_sinks.get())[i / rows.rows] += of_rows[static_cast<size_t>(i)];
    for (const auto& [from, to] : {std::pair{int64_t{0}, rows.n / 3}, {rows.n / 3, rows.n}})
      kernel.add_keys(p, rows, saved.get(), from, to, key_sums.get(), value_sums.get());
  }
  kernel.write(key_sums.get(), p.kv_len, p.head_dim, grad_key.get(), p.head_dim);
  kernel.write(value_sums.get(), p.kv_len, p.v_head_dim, grad_value.get(), p.v_head_dim);
  give("grad_query", grad_query), give("grad_key", grad_key);
  give("grad_value", grad_value), give("grad_sinks", grad_sinks);
}

}  // namespace kernel_tests
