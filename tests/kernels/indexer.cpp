// The lightning indexer: scores of causal rows and those above a threshold; its loss's distributions and gradients.
#include <algorithm>
#include <vector>

#include "cpu/sparse/kernels.h"
#include "program.h"

namespace kernel_tests {

using namespace attnjourney;

// query (heads, L, D), key (S, D), weights (heads, L) in compute precision. Gives scores (L, S) and above (L, S) int32,
// 1 where the score is above the threshold; both are 0 where a row does not see the key.
void indexer(const Inputs& in, const Types& types) {
  const IndexerKernels& kernel = kernels().sparse->indexer[types.dtype];
  IndexerParams p;
  p.heads = in.integer("heads"), p.q_len = in.integer("q_len"), p.kv_len = in.integer("kv_len");
  p.head_dim = in.integer("head_dim"), p.scale = in.real("scale"), p.causal = true;
  const double threshold = in.real("threshold");
  const int64_t most = in.integer("rows"), block = kernel.key_block;
  Memory scores(p.q_len * p.kv_len * types.real), above(p.q_len * p.kv_len * 4);
  Memory found(block * types.real), space(kernel.space(p, most));
  std::vector<int32_t> chosen(static_cast<size_t>(block));
  for (int64_t begin = 0; begin < p.q_len; begin += most) {
    const int64_t rows = std::min(most, p.q_len - begin);
    const IndexerRows given{.query = in.tensor("query") + begin * p.head_dim * types.item,
                            .weights = in.tensor("weights") + begin * types.real,
                            .q_head = p.q_len * p.head_dim,
                            .q_row = p.head_dim,
                            .weights_head = p.q_len};
    kernel.load_rows(p, given, rows, space.get());
    const int64_t end = p.limit(begin + rows - 1, p.kv_len);
    for (int64_t k = 0; k < end; k += block) {
      const int64_t n = std::min(block, end - k);
      int64_t r = 0;
      while (p.limit(begin + r, p.kv_len) <= k) r++;
      kernel.scores(p, r, rows, in.tensor("key") + k * p.head_dim * types.item, p.head_dim, n, space.get());
      for (; r < rows; r++)
        for (const double* limit : {static_cast<const double*>(nullptr), &threshold}) {
          const int64_t seen = std::min(n, p.limit(begin + r, p.kv_len) - k), at = (begin + r) * p.kv_len + k;
          const int64_t count = kernel.filter(p, rows, r, seen, limit, chosen.data(), found.get(), space.get());
          for (int64_t i = 0; i < count; i++) {
            const int64_t to = at + chosen[static_cast<size_t>(i)];
            std::memcpy(scores.at(to * types.real), found.at(i * types.real), static_cast<size_t>(types.real));
            reinterpret_cast<int32_t*>(above.get())[to] = limit != nullptr;
          }
        }
    }
  }
  give("scores", scores), give("above", above);
}

// index_query (heads, L, D), index_key (S, D), weights (L, heads), grad_scores (L, k) in compute precision; query
// (q_heads, L, E), key (S, E); indices (L, k) int32. Gives target and scores (L, k) in double, 0 where there is no key,
// and the derivatives of the scores.
void indexer_loss(const Inputs& in, const Types& types) {
  const IndexerKernels& kernel = kernels().sparse->indexer[types.dtype];
  const SparseKernels& sums = kernels().sparse->of[types.dtype];
  const auto params = [&](const char* heads, const char* dim, const char* scale) {
    SparseKernelParams p;
    p.group = in.integer(heads), p.q_len = in.integer("q_len"), p.kv_len = in.integer("kv_len");
    p.head_dim = in.integer(dim), p.index_count = in.integer("k"), p.scale = in.real(scale);
    p.q_head = p.grad_q_head = p.q_len * p.head_dim, p.q_row = p.grad_q_row = p.k_row = p.head_dim;
    return p;
  };
  const SparseKernelParams index = params("heads", "head_dim", "index_scale");
  const SparseKernelParams attention = params("q_heads", "q_head_dim", "scale");
  const int64_t len = index.q_len, count = index.index_count, some = in.integer("some_heads");
  const auto rows_of = [&](const SparseKernelParams& p, const char* query, const char* key, int64_t row,
                           const std::vector<int32_t>& keys) {
    SparseRows rows;
    rows.query = in.tensor(query) + row * p.head_dim * types.item, rows.key = in.tensor(key);
    rows.count = p.group, rows.keys = keys.data(), rows.n = rows.whole = static_cast<int64_t>(keys.size());
    return rows;
  };
  Memory target(len * count * 8), scores(len * count * 8), grad_weights(len * index.group * types.real);
  Memory grad_query(index.group * len * index.head_dim * types.item);
  Memory grad_key(index.kv_len * index.head_dim * types.item);
  Memory key_sums(index.kv_len * ((index.head_dim + sums.lanes - 1) / sums.lanes * sums.lanes) * types.real);
  Memory space(std::max({kernel.loss_space(index, index.group, count), kernel.loss_space(attention, some, count),
                         sums.rows_space(index, index.group, count)}));
  Memory saved(sums.saved_space(index, index.group, count)), grads(count * types.real);
  for (int64_t row = 0; row < len; row++) {
    const int32_t* const named = reinterpret_cast<const int32_t*>(in.tensor("indices")) + row * count;
    std::vector<int32_t> keys;
    std::vector<int64_t> places;
    for (int64_t j = 0; j < count; j++)
      if (named[j] >= 0) keys.push_back(named[j]), places.push_back(row * count + j);
    if (keys.empty()) continue;
    SparseRows own = rows_of(index, "index_query", "index_key", row, keys);
    SparseRows part = rows_of(attention, "query", "key", row, keys);
    const char* const weights = in.tensor("weights") + row * index.group * types.real;
    std::vector<double> of_target(keys.size()), of_scores(keys.size());
    kernel.index_scores(index, own, weights, of_scores.data(), space.get());
    for (part.first = 0; part.first < attention.group; part.first += some) {
      part.count = std::min(some, attention.group - part.first);
      kernel.target(attention, part, of_target.data(), space.get());
    }
    for (size_t j = 0; j < keys.size(); j++) {
      reinterpret_cast<double*>(target.get())[places[j]] = of_target[j];
      reinterpret_cast<double*>(scores.get())[places[j]] = of_scores[j];
      std::memcpy(grads.at(static_cast<int64_t>(j) * types.real), in.tensor("grad_scores") + places[j] * types.real,
                  static_cast<size_t>(types.real));
    }
    own.grad_query = grad_query.at(row * index.head_dim * types.item);
    kernel.loss_rows(index, own, weights, grads.get(), grad_weights.at(row * index.group * types.real), saved.get(),
                     space.get());
    for (const auto& [from, to] : {std::pair{int64_t{0}, own.n / 3}, {own.n / 3, own.n}})
      sums.add_keys(index, own, saved.get(), from, to, key_sums.get(), nullptr);
  }
  sums.write(key_sums.get(), index.kv_len, index.head_dim, grad_key.get(), index.head_dim);
  give("target", target), give("scores", scores), give("grad_weights", grad_weights);
  give("grad_index_query", grad_query), give("grad_index_key", grad_key);
}

}  // namespace kernel_tests
