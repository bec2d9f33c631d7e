// What the forward and the backward of token-sparse attention on the CPU share: pointers to heads, and units of work.
#pragma once
#include <algorithm>

#include "cpu/attention/sequences.h"
#include "decode/params.h"
#include "index_lists.h"
#include "kernels.h"
#include "sparse/sparse_attention.h"

namespace attnjourney {

// (batch, heads, len, dim) with dense rows; kept, for what is given may be a copy that nobody else holds
struct SparseTensor {
  explicit SparseTensor(const Tensor& t) : kept(aten::rows_contiguous(t)), item(item_size(kept.scalar_type())) {}
  char* at(int64_t batch, int64_t head, int64_t row = 0) const {
    return static_cast<char*>(const_cast<void*>(kept.const_data_ptr())) +
           (batch * kept.stride(0) + head * kept.stride(1) + row * kept.stride(2)) * item;
  }
  Tensor kept;
  int64_t item;
};

// a number of a dense tensor
inline char* number_at(const Tensor& t, int64_t i) {
  return static_cast<char*>(const_cast<void*>(t.const_data_ptr())) + i * item_size(t.scalar_type());
}

// Sums for every key of a head, in compute precision, which become rows of a gradient (..., kv_len, dim).
struct KeySum {
  KeySum() = default;
  KeySum(int64_t dim, int64_t kv_len, int64_t lanes, int64_t item, bool wanted)
      : dim(dim), kv_len(kv_len), row((dim + lanes - 1) / lanes * lanes * item) {
    if (wanted) bytes = (kv_len * row + 63) / 64 * 64;
  }
  void write(const SparseKernels& kernel, const char* sums, int64_t head, int64_t begin, int64_t end,
             const Tensor& to) const {
    kernel.write(sums + begin * row, end - begin, dim, number_at(to, (head * kv_len + begin) * dim), dim);
  }
  int64_t dim = 0, kv_len = 0, row = 0, bytes = 0;  // row in bytes
};

// Some rows that read one key/value head and one row of the indices: row i is row i % rows of the block and of head
// i / rows of the group.
struct SparseUnit {
  int64_t batch, head, block;
  int64_t begin, rows;   // the block's rows of query
  int64_t first, count;  // rows of the unit
};

// One call, cut into units: a key/value head's come one after the other, ascending.
struct SparseWork {
  SparseWork(const SparseCall& c, const SparseInputs& in, int64_t most_rows)
      : c(c),
        query(in.query),
        key(in.key),
        value(in.value),
        lengths(key_lengths_of(in.key_lengths, c.batch, c.params.kv_len)),
        lists(in.indices, c.batch, c.indices_per_head ? c.kv_heads : 1, c.blocks, c.params.kv_len),
        sinks(per_head(in.sinks, c.batch, c.q_heads)),
        params{c.params},
        most(most_rows) {
    params.q_head = query.kept.stride(1), params.q_row = query.kept.stride(2);
    params.k_row = key.kept.stride(2), params.v_row = value.kept.stride(2);
    of_block = (params.group * std::min(params.rows, params.q_len) + most - 1) / most;
  }
  int64_t heads() const { return c.batch * c.kv_heads; }
  int64_t of_head() const { return c.blocks * of_block; }
  int64_t units() const { return params.group ? heads() * of_head() : 0; }
  int64_t most_rows() const { return std::min(most, params.group * std::min(params.rows, params.q_len)); }
  SparseUnit unit(int64_t i) const {
    const int64_t bh = i / of_head(), block = i % of_head() / of_block, begin = block * params.rows;
    SparseUnit u{.batch = bh / c.kv_heads,
                 .head = bh % c.kv_heads,
                 .block = block,
                 .begin = begin,
                 .rows = std::min(params.rows, params.q_len - begin),
                 .first = i % of_block * most,
                 .count = 0};
    u.count = std::max<int64_t>(0, std::min(most, params.group * u.rows - u.first));
    return u;
  }
  void list(const SparseUnit& u, int64_t bucket, IndexLists::List& to) const {
    lists.list(params, u.batch, u.head, u.block, lengths[static_cast<size_t>(u.batch)], u.begin, u.rows, bucket, to);
  }
  int64_t first_head(const SparseUnit& u) const { return u.head * params.group; }
  const double* sinks_of(const SparseUnit& u) const {
    return sinks.empty() ? nullptr : &sinks[static_cast<size_t>(u.batch * c.q_heads + first_head(u))];
  }
  // of query and key, as if every index named a key
  double pairs() const {
    return static_cast<double>(c.batch * c.q_heads * params.q_len) * static_cast<double>(params.index_count);
  }

  const SparseCall& c;
  SparseTensor query, key, value;
  std::vector<int64_t> lengths;
  IndexLists lists;
  std::vector<double> sinks;
  SparseKernelParams params;  // with the strides of the call
  int64_t most, of_block = 1;
};

}  // namespace attnjourney
