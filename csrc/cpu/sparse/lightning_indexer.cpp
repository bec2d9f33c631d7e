// CPU entry of the lightning indexer: the highest scores of each row, and the loss.
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpu/plan.h"
#include "cpu/rows.h"
#include "key_units.h"
#include "sparse_cpu.h"
#include "sparse_rows.h"

namespace attnjourney {
namespace {

const IndexerKernels& indexer_kernels(ScalarType t) {
  return kernels().sparse->indexer[static_cast<int>(kernel_dtype(t))];
}

template <class Real>
struct Candidate {
  Real score;
  int32_t key;
};

// The highest scores of one row among the keys seen so far. Of equal ones the first key's counts, and a NaN as
// infinity.
template <class Real>
class Highest {
 public:
  explicit Highest(int64_t most) : most_(most) {}
  // whether scores up to the threshold are of no use any more
  const double* threshold() const { return full_ ? &threshold_ : nullptr; }
  void add(const Real* scores, const int32_t* numbers, int64_t count, int64_t first) {
    for (int64_t i = 0; i < count; i++) all_.push_back({scores[i], static_cast<int32_t>(first + numbers[i])});
    if (static_cast<int64_t>(all_.size()) >= 2 * most_ + 512) prune();
  }
  void add(const Highest& other) { all_.insert(all_.end(), other.all_.begin(), other.all_.end()); }
  void prune() {
    if (static_cast<int64_t>(all_.size()) <= most_) return;
    std::nth_element(all_.begin(), all_.begin() + most_ - 1, all_.end(), before);
    all_.resize(static_cast<size_t>(most_));
    threshold_ = static_cast<double>(rank(all_.back().score));
    full_ = true;
  }
  void write(int64_t topk, int32_t* keys, Real* scores) {
    prune();
    std::sort(all_.begin(), all_.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
    const int64_t n = static_cast<int64_t>(all_.size());
    for (int64_t i = 0; i < topk; i++) {
      keys[i] = i < n ? all_[static_cast<size_t>(i)].key : -1;
      scores[i] = i < n ? all_[static_cast<size_t>(i)].score : -std::numeric_limits<Real>::infinity();
    }
  }

 private:
  static Real rank(Real x) { return x == x ? x : std::numeric_limits<Real>::infinity(); }
  static bool before(const Candidate<Real>& a, const Candidate<Real>& b) {
    const Real x = rank(a.score), y = rank(b.score);
    return x != y ? x > y : a.key < b.key;
  }
  std::vector<Candidate<Real>> all_;
  int64_t most_;
  double threshold_ = 0;
  bool full_ = false;
};

template <class Real>
void topk(const IndexerCall& c, const IndexerInputs& in, const std::vector<int64_t>& lengths,
          const IndexerResults& results) {
  const IndexerParams& p = c.params;
  const IndexerKernels& kernel = indexer_kernels(c.dtype);
  if (c.batch * p.q_len == 0) return;
  const Tensor query = aten::rows_contiguous(in.query), key = aten::rows_contiguous(in.key);
  const Tensor weights = aten::contiguous(
      in.weights.scalar_type() == c.score_dtype ? in.weights : torch::stable::to(in.weights, c.score_dtype));
  const int64_t item = item_size(c.dtype), real = static_cast<int64_t>(sizeof(Real));
  // rows of query that a second-level cache holds
  const int64_t fit = 262144 / (std::max<int64_t>(1, p.heads * p.head_dim) * real);
  const int64_t rows = std::clamp<int64_t>(fit, 1, std::min<int64_t>(32, p.q_len));
  const int64_t blocks = (p.q_len + rows - 1) / rows, all = c.batch * blocks;
  // few of them: parts of the keys, of the highest of which the highest are taken
  const int64_t most_parts = std::max<int64_t>(1, p.kv_len / 2048);
  const int64_t parts = std::clamp<int64_t>(64 / all, 1, most_parts);
  const int64_t part_keys =
      ((p.kv_len + parts - 1) / parts + kernel.key_block - 1) / kernel.key_block * kernel.key_block;
  const int64_t most = std::max<int64_t>(1, std::min(p.topk, p.kv_len));
  double pairs = 0;
  for (const int64_t length : lengths)
    for (int64_t i = 0; i < p.q_len; i++) pairs += static_cast<double>(p.limit(i, length));
  const double flops = 2 * pairs * static_cast<double>(p.heads * p.head_dim);
  std::vector<std::vector<Highest<Real>>> found(static_cast<size_t>(parts > 1 ? all * parts : 0));
  std::vector<std::atomic<int64_t>> left(static_cast<size_t>(parts > 1 ? all : 0));
  for (auto& n : left) n.store(parts, std::memory_order_relaxed);

  const auto work = [&](int64_t i, void* space) {
    const int64_t unit = i / parts, part = i % parts, b = unit / blocks;
    const int64_t first = (blocks - 1 - unit % blocks) * rows, count = std::min(rows, p.q_len - first);
    const int64_t length = lengths[static_cast<size_t>(b)];
    const IndexerRows given{
        .query =
            static_cast<const char*>(query.const_data_ptr()) + (b * query.stride(0) + first * query.stride(2)) * item,
        .weights = static_cast<const char*>(weights.const_data_ptr()) + (b * p.heads * p.q_len + first) * real,
        .q_head = query.stride(1),
        .q_row = query.stride(2),
        .weights_head = p.q_len};
    kernel.load_rows(p, given, count, space);
    std::vector<Highest<Real>> highest(static_cast<size_t>(count), Highest<Real>(most));
    std::vector<Real> scores(static_cast<size_t>(kernel.key_block));
    std::vector<int32_t> numbers(static_cast<size_t>(kernel.key_block));
    const int64_t end = std::min((part + 1) * part_keys, p.limit(first + count - 1, length));
    for (int64_t k = part * part_keys; k < end; k += kernel.key_block) {
      const int64_t n = std::min(kernel.key_block, end - k);
      int64_t r = 0;
      while (p.limit(first + r, length) <= k) r++;
      kernel.scores(p, r, count,
                    static_cast<const char*>(key.const_data_ptr()) + (b * key.stride(0) + k * key.stride(1)) * item,
                    key.stride(1), n, space);
      for (; r < count; r++) {
        Highest<Real>& mine = highest[static_cast<size_t>(r)];
        const int64_t seen = std::min(n, p.limit(first + r, length) - k);
        const int64_t got = kernel.filter(p, count, r, seen, mine.threshold(), numbers.data(), scores.data(), space);
        mine.add(scores.data(), numbers.data(), got, k);
      }
    }
    if (parts > 1) {
      for (Highest<Real>& mine : highest) mine.prune();
      found[static_cast<size_t>(i)] = std::move(highest);
      if (left[static_cast<size_t>(unit)].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      highest = std::move(found[static_cast<size_t>(unit * parts)]);
      for (int64_t other = 1; other < parts; other++)
        for (int64_t r = 0; r < count; r++)
          highest[static_cast<size_t>(r)].add(found[static_cast<size_t>(unit * parts + other)][static_cast<size_t>(r)]);
    }
    for (int64_t r = 0; r < count; r++) {
      const int64_t at = (b * p.q_len + first + r) * p.topk;
      highest[static_cast<size_t>(r)].write(p.topk, reinterpret_cast<int32_t*>(number_at(results.indices, at)),
                                            reinterpret_cast<Real*>(number_at(results.scores, at)));
    }
  };
  run_queue(all * parts, thread_count(all * parts, flops), kernel.space(p, rows), work);
}

// The indexer's products as attention of all its heads over one head of keys, without values; the key tensor as one of
// four dimensions.
struct IndexerAsAttention {
  IndexerAsAttention(const IndexerCall& c, const IndexerInputs& in, const Tensor& indices)
      : inputs{.query = in.query,
               .key = aten::strided_view(in.key, {c.batch, 1, c.params.kv_len, c.params.head_dim},
                                         {in.key.stride(0), 0, in.key.stride(1), in.key.stride(2)}),
               .value = in.query,
               .indices = indices,
               .scale = std::nullopt,
               .key_lengths = std::nullopt,
               .sinks = std::nullopt} {
    call.batch = c.batch, call.q_heads = c.params.heads, call.kv_heads = 1, call.blocks = c.params.q_len;
    SparseParams& p = call.params;
    p.q_len = c.params.q_len, p.kv_len = c.params.kv_len, p.head_dim = c.params.head_dim, p.group = c.params.heads;
    p.index_count = indices.size(2), p.scale = in.scale;
    call.dtype = c.dtype, call.lse_dtype = c.score_dtype;
  }
  SparseInputs inputs;
  SparseCall call;
};

struct TargetAsAttention {
  TargetAsAttention(const IndexerCall& c, const IndexerTarget& t)
      : inputs{.query = t.query,
               .key = t.key,
               .value = t.query,
               .indices = t.indices,
               .scale = std::nullopt,
               .key_lengths = std::nullopt,
               .sinks = std::nullopt} {
    call.batch = c.batch, call.q_heads = t.query.size(1), call.kv_heads = t.key.size(1), call.blocks = c.params.q_len;
    SparseParams& p = call.params;
    p.q_len = c.params.q_len, p.kv_len = c.params.kv_len, p.head_dim = t.query.size(3);
    p.group = call.kv_heads ? call.q_heads / call.kv_heads : 1;
    p.index_count = t.indices.size(2), p.scale = t.scale;
    call.dtype = c.dtype, call.lse_dtype = c.score_dtype;
  }
  SparseInputs inputs;
  SparseCall call;
};

// what a unit of all heads of one row reads
SparseRows rows_of(const SparseWork& work, const SparseUnit& u, const IndexLists::List& list) {
  SparseRows in;
  in.query = work.query.at(u.batch, work.first_head(u), u.begin);
  in.key = work.key.at(u.batch, u.head);
  in.rows = 1, in.first = u.first, in.count = u.count;
  in.keys = list.keys.data(), in.n = in.whole = list.n(), in.last = list.last;
  return in;
}

Tensor weights_of(const IndexerCall& c, const IndexerInputs& in) {
  // (batch, q_len, heads): those of a row side by side
  const Tensor rows = aten::strided_view(in.weights, {c.batch, c.params.q_len, c.params.heads},
                                         {in.weights.stride(0), in.weights.stride(2), in.weights.stride(1)});
  return aten::contiguous(rows.scalar_type() == c.score_dtype ? rows : torch::stable::to(rows, c.score_dtype));
}

// KL(target || softmax(scores)) and its derivative by the scores, in double
double divergence(const std::vector<double>& target, const std::vector<double>& scores, std::vector<double>& grads) {
  const size_t n = target.size();
  double all = 0, top = -std::numeric_limits<double>::infinity(), sum = 0, loss = 0;
  for (size_t j = 0; j < n; j++) all += target[j], top = std::max(top, scores[j]);
  for (size_t j = 0; j < n; j++) sum += grads[j] = std::exp(scores[j] - top);
  const double log_sum = top + std::log(sum);
  for (size_t j = 0; j < n; j++) {
    const double p = target[j] / all;
    if (p != 0) loss += p * (std::log(p) - (scores[j] - log_sum));
    grads[j] = grads[j] / sum - p;
  }
  return loss;
}

template <class Real>
void loss_of_rows(const IndexerCall& c, const IndexerInputs& in, const IndexerTarget& target, const Tensor& loss,
                  const Tensor& grad_scores) {
  const IndexerAsAttention index(c, in, target.indices);
  const TargetAsAttention attention(c, target);
  const SparseWork work(index.call, index.inputs, std::max<int64_t>(1, c.params.heads));
  const SparseWork heads(attention.call, attention.inputs, decode_row_block);
  const IndexerKernels& kernel = indexer_kernels(c.dtype);
  const Tensor weights = weights_of(c, in);
  const int64_t count = target.indices.size(2), len = c.params.q_len;
  const auto space_of = [&](const SparseWork& w) {
    return kernel.loss_space(w.params, std::max<int64_t>(1, w.most_rows()), count);
  };
  const double flops = 2 * (work.pairs() * static_cast<double>(c.params.head_dim) +
                            heads.pairs() * static_cast<double>(attention.call.params.head_dim));
  const int64_t items = c.batch * len;
  run_queue(items, thread_count(items, flops), std::max(space_of(work), space_of(heads)), [&](int64_t i, void* space) {
    const int64_t b = i / len, row = i % len;
    const SparseUnit own{
        .batch = b, .head = 0, .block = row, .begin = row, .rows = 1, .first = 0, .count = c.params.heads};
    IndexLists::List list;
    work.list(own, c.params.kv_len, list);
    const size_t n = list.keys.size();
    std::vector<double> p(n, 0), scores(n, 0), grads(n, 0);
    if (n && c.params.heads)
      kernel.index_scores(work.params, rows_of(work, own, list),
                          static_cast<const Real*>(weights.const_data_ptr()) + i * c.params.heads, scores.data(),
                          space);
    const int64_t group = heads.params.group;
    for (int64_t h = 0; n && h < attention.call.kv_heads; h++)
      for (int64_t first = 0; first < group; first += decode_row_block) {
        const SparseUnit u{.batch = b,
                           .head = h,
                           .block = row,
                           .begin = row,
                           .rows = 1,
                           .first = first,
                           .count = std::min(decode_row_block, group - first)};
        kernel.target(heads.params, rows_of(heads, u, list), p.data(), space);
      }
    static_cast<Real*>(loss.mutable_data_ptr())[i] = n ? static_cast<Real>(divergence(p, scores, grads)) : Real(0);
    Real* const to = static_cast<Real*>(grad_scores.mutable_data_ptr()) + i * count;
    for (int64_t j = 0, next = 0; j < count; j++)
      to[j] = work.lists.at(b, 0, row, j) < 0 ? Real(0) : static_cast<Real>(grads[static_cast<size_t>(next++)]);
  });
}

template <class Real>
void loss_gradients(const IndexerCall& c, const IndexerInputs& in, const Tensor& indices, const Tensor& grad_loss,
                    const Tensor& grad_scores, const IndexerGradients& g) {
  const IndexerAsAttention index(c, in, indices);
  SparseWork work(index.call, index.inputs, std::max<int64_t>(1, c.params.heads));
  SparseKernelParams& p = work.params;
  const IndexerKernels& kernel = indexer_kernels(c.dtype);
  const SparseKernels& sums = kernels().sparse->of[static_cast<int>(kernel_dtype(c.dtype))];
  const Tensor weights = weights_of(c, in);
  const int64_t count = indices.size(2), len = c.params.q_len, heads = c.params.heads;
  p.grad_q_head = len * p.head_dim, p.grad_q_row = p.head_dim;
  Tensor of_weights = aten::empty(grad_scores, {g.weights ? c.batch : 0, len, heads});
  const KeySum key(p.head_dim, p.kv_len, sums.lanes, item_size(c.score_dtype), g.key.has_value());
  const int64_t rows = std::max<int64_t>(1, work.most_rows());
  const double flops = 6 * work.pairs() * static_cast<double>(p.head_dim);
  const KeyUnits units{.heads = c.batch,
                       .of_head = len,
                       .kv_len = p.kv_len,
                       .sums_bytes = key.bytes,
                       .saved_bytes = sums.saved_space(p, rows, count),
                       .rows_bytes = sums.rows_space(p, rows, count),
                       .threads = thread_count(std::max<int64_t>(1, c.batch * len), flops),
                       .keys = g.key.has_value()};
  const auto compute = [&](int64_t i, int64_t bucket, KeptRows& kept, void* saved, void* space) {
    const int64_t b = i / len, row = i % len;
    const SparseUnit u{.batch = b, .head = 0, .block = row, .begin = row, .rows = 1, .first = 0, .count = heads};
    work.list(u, p.kv_len, kept.list);
    const size_t n = kept.list.keys.size();
    std::vector<int32_t> order(n), named = kept.list.keys;
    std::iota(order.begin(), order.end(), 0);
    const auto before = [&](int32_t x, int32_t y) { return named[x] / bucket < named[y] / bucket; };
    if (bucket < p.kv_len) std::stable_sort(order.begin(), order.end(), before);
    std::vector<Real> given, grads(n);
    const Real* const from = static_cast<const Real*>(grad_scores.const_data_ptr()) + i * count;
    const Real factor = static_cast<const Real*>(grad_loss.const_data_ptr())[i];
    for (int64_t j = 0; j < count; j++)
      if (work.lists.at(b, 0, row, j) >= 0) given.push_back(from[j] * factor);
    for (size_t j = 0; j < n; j++) kept.list.keys[j] = named[order[j]], grads[j] = given[order[j]];
    kept.in = rows_of(work, u, kept.list);
    if (g.query) kept.in.grad_query = number_at(*g.query, (b * heads * len + row) * p.head_dim);
    Real* const of_row = g.weights ? static_cast<Real*>(of_weights.mutable_data_ptr()) + i * heads : nullptr;
    kernel.loss_rows(p, kept.in, static_cast<const Real*>(weights.const_data_ptr()) + i * heads, grads.data(), of_row,
                     saved, space);
  };
  if (heads)
    run_key_units(
        grad_scores, units, compute,
        [&](const KeptRows& kept, int64_t begin, int64_t end, const void* saved, char* to) {
          sums.add_keys(p, kept.in, saved, begin, end, to, nullptr);
        },
        [&](int64_t b, const char* from, int64_t begin, int64_t end) {
          if (g.key) key.write(sums, from, b, begin, end, *g.key);
        });
  else if (g.key)
    aten::clear(*g.key);
  if (!g.weights) return;
  Tensor to = *g.weights;
  torch::stable::copy_(to, aten::strided_view(of_weights, {c.batch, heads, len}, {len * heads, 1, heads}));
}

}  // namespace

void cpu_indexer_topk(const IndexerCall& c, const IndexerInputs& in, const OptionalTensor& key_lengths,
                      const IndexerResults& results) {
  const std::vector<int64_t> lengths = key_lengths_of(key_lengths, c.batch, c.params.kv_len);
  if (c.score_dtype == ScalarType::Double)
    topk<double>(c, in, lengths, results);
  else
    topk<float>(c, in, lengths, results);
}

void cpu_indexer_loss(const IndexerCall& c, const IndexerInputs& in, const IndexerTarget& target, const Tensor& loss,
                      const Tensor& grad_scores) {
  (c.score_dtype == ScalarType::Double ? loss_of_rows<double> : loss_of_rows<float>)(c, in, target, loss, grad_scores);
}

void cpu_indexer_loss_backward(const IndexerCall& c, const IndexerInputs& in, const Tensor& indices,
                               const Tensor& grad_loss, const Tensor& grad_scores, const IndexerGradients& g) {
  (c.score_dtype == ScalarType::Double ? loss_gradients<double> : loss_gradients<float>)(c, in, indices, grad_loss,
                                                                                         grad_scores, g);
}

}  // namespace attnjourney
