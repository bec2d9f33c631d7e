// CPU entry of token-sparse attention. The keys that the rows of a unit see are gathered into one piece, and the
// kernels of decoding run over it: they read each key once for all rows. Few units are cut into chunks of their keys.
#include <atomic>
#include <cstring>

#include "cpu/plan.h"
#include "cpu/rows.h"
#include "sparse_cpu.h"
#include "sparse_rows.h"

namespace attnjourney {
namespace {

constexpr int64_t most_chunk = 2048, least_chunk = 256;  // keys
constexpr int64_t few_units = 64;                        // of the longest chunk, which are cut

int64_t cache_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The pieces of a thread's scratch.
struct ForwardSpace {
  ForwardSpace(int64_t keys, int64_t values, int64_t partials, int64_t kernel)
      : value(cache_lines(keys)), partial(value + cache_lines(values)), rest(partial + cache_lines(partials)) {
    bytes = rest + kernel;
  }
  int64_t value, partial, rest, bytes;
};

// Keys [from, to) of a list, side by side.
struct Gathered {
  const char *key, *value;
  int64_t key_row, value_row;  // numbers
};

class SparseForward {
 public:
  SparseForward(const SparseCall& c, const SparseInputs& in, const SparseResults& results)
      : c_(c), results_(results), work_(c, in, decode_row_block), kernel_(decode_kernels(c.dtype)) {
    const SparseKernelParams& p = work_.params;
    item_ = item_size(c.dtype);
    inside_ = p.k_row == p.v_row && p.v_head_dim <= p.head_dim && c.batch * c.kv_heads > 0 && values_are_inside();
    const int64_t units = work_.units();
    if (units == 0) return;
    chunk_ = most_chunk;
    while (chunk_ > least_chunk && units * p.index_count < few_units * chunk_) chunk_ /= 2;
    chunks_ = std::max<int64_t>(1, (p.index_count + chunk_ - 1) / chunk_);
    split_ = chunk_ < most_chunk && chunks_ > 1;
    slots_ = p.causal && p.rows > 1 ? 2 : 1;
    partial_ = kernel_.partial_size(decode_params(std::min(p.rows, p.q_len)), work_.most_rows());
  }

  void run() {
    const int64_t units = work_.units();
    if (units == 0) return;
    const SparseKernelParams& p = work_.params;
    const int64_t keys = std::min(chunk_, p.index_count), most = std::min(p.rows, p.q_len);
    DecodeParams widest = decode_params(most);
    if (slots_ > 1) widest.mask = MaskKind::boolean;
    const ForwardSpace space(keys * p.head_dim * item_, inside_ ? 0 : keys * p.v_head_dim * item_,
                             split_ ? 0 : chunks_ * slots_ * partial_, kernel_.space(widest, work_.most_rows()));
    std::vector<std::atomic<int64_t>> left(static_cast<size_t>(split_ ? units : 0));
    for (std::atomic<int64_t>& n : left) n.store(chunks_, std::memory_order_relaxed);
    Tensor shared = aten::empty(results_.out, {split_ ? (units * chunks_ * slots_ * partial_ + 64) / item_ : 0});
    char* const partials = reinterpret_cast<char*>(
        cache_lines(static_cast<int64_t>(reinterpret_cast<intptr_t>(shared.mutable_data_ptr()))));
    const double numbers = static_cast<double>(p.head_dim + p.v_head_dim);
    const double gathered = static_cast<double>(units * p.index_count) * 5.0 * static_cast<double>(item_);
    const double cost = numbers * std::max(2.0 * work_.pairs(), gathered);
    const int64_t items = split_ ? units * chunks_ : units;
    run_queue(items, thread_count(items, cost), space.bytes, [&](int64_t i, void* memory) {
      const int64_t unit = split_ ? i / chunks_ : i;
      const SparseUnit u = work_.unit(unit);
      if (u.count == 0) return;
      char* const scratch = static_cast<char*>(memory);
      char* const mine = split_ ? partials + unit * chunks_ * slots_ * partial_ : scratch + space.partial;
      IndexLists::List list;
      work_.list(u, p.kv_len, list);
      for (int64_t n = split_ ? i % chunks_ : 0, end = split_ ? n + 1 : chunks_; n < end; n++)
        chunk(u, list, n, mine, scratch, space);
      if (split_ && left[static_cast<size_t>(unit)].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      if (!kernel_.merge(decode_params(u.rows), decode_rows(u), mine, chunks_ * slots_) && !finite(u)) again(u, list);
    });
  }

 private:
  // every head's values, a part of its keys' rows at the same place
  bool values_are_inside() const {
    const char* const key = work_.key.at(0, 0);
    const int64_t offset = work_.value.at(0, 0) - key;
    for (int64_t b = 0; b < c_.batch; b++)
      for (int64_t h = 0; h < c_.kv_heads; h++)
        if (work_.value.at(b, h) - work_.key.at(b, h) != offset) return false;
    return offset >= 0 && offset + work_.params.v_head_dim * item_ <= work_.params.head_dim * item_;
  }

  DecodeParams decode_params(int64_t rows) const {
    const SparseKernelParams& p = work_.params;
    DecodeParams d;
    d.q_len = rows;
    d.head_dim = p.head_dim, d.v_head_dim = p.v_head_dim;
    d.q_head = p.q_head, d.q_row = p.q_row;
    d.k_row = p.head_dim, d.v_row = inside_ ? p.head_dim : p.v_head_dim;
    d.out_head = p.q_len * p.v_head_dim, d.out_row = p.v_head_dim, d.lse_head = p.q_len;
    d.scale = p.scale, d.modifier = p.modifier;
    return d;
  }
  DecodeRows decode_rows(const SparseUnit& u) const {
    const int64_t head = work_.first_head(u), row = (u.batch * c_.q_heads + head) * work_.params.q_len + u.begin;
    return {.query = work_.query.at(u.batch, head, u.begin),
            .out = number_at(results_.out, row * work_.params.v_head_dim),
            .lse = number_at(results_.lse, row),
            .stats = number_at(results_.stats, 2 * row),
            .first = u.first,
            .count = u.count,
            .sinks = work_.sinks_of(u)};
  }

  // the rows of keys and values that a list names from `from` on
  Gathered gather(const SparseUnit& u, const IndexLists::List& list, int64_t from, int64_t to, char* key,
                  char* value) const {
    const SparseKernelParams& p = work_.params;
    const auto& rows = kernels().sparse->gather;
    const char *const keys = work_.key.at(u.batch, u.head), *const values = work_.value.at(u.batch, u.head);
    const int32_t* const named = list.keys.data() + from;
    rows(keys, p.k_row * item_, p.head_dim * item_, named, to - from, key);
    if (inside_) return {key, key + (values - keys), p.head_dim, p.head_dim};
    rows(values, p.v_row * item_, p.v_head_dim * item_, named, to - from, value);
    return {key, value, p.head_dim, p.v_head_dim};
  }

  // 1 where row r of the block sees the keys [from, to) of a list
  static std::vector<uint8_t> mask_of(const SparseUnit& u, const IndexLists::List& list, int64_t from, int64_t to) {
    const int64_t n = to - from;
    std::vector<uint8_t> mask(static_cast<size_t>(u.rows * n));
    for (int64_t r = 0; r < u.rows; r++)
      for (int64_t j = 0; j < n; j++) mask[r * n + j] = from + j < list.whole || list.keys[from + j] <= list.last + r;
    return mask;
  }

  void attend(const SparseUnit& u, const IndexLists::List& list, int64_t from, int64_t to, const uint8_t* mask,
              char* partial, char* scratch, const ForwardSpace& space) const {
    DecodeParams p = decode_params(u.rows);
    DecodeRows rows = decode_rows(u);
    p.keys.set_length(to - from);
    if (mask) p.mask = MaskKind::boolean, p.mask_row = to - from, p.mask_col = 1, rows.mask = mask;
    const Gathered g = gather(u, list, from, to, scratch, scratch + space.value);
    const DecodeRun run{g.key, g.value, 0, to - from};
    kernel_.chunk(p, rows, &run, to > from ? 1 : 0, partial, scratch + space.rest);
  }

  // Chunk n of a list: the keys that every row sees, and in the next slot those that some do.
  void chunk(const SparseUnit& u, const IndexLists::List& list, int64_t n, char* partials, char* scratch,
             const ForwardSpace& space) const {
    char* const partial = partials + n * slots_ * kernel_.partial_size(decode_params(u.rows), u.count);
    const int64_t from = std::min(n * chunk_, list.n()), to = std::min(from + chunk_, list.n());
    const int64_t whole = std::clamp(list.whole, from, to);
    attend(u, list, from, whole, nullptr, partial, scratch, space);
    if (slots_ == 1) return;
    const std::vector<uint8_t> mask = mask_of(u, list, whole, to);
    attend(u, list, whole, to, mask.data(), partial + kernel_.partial_size(decode_params(u.rows), u.count), scratch,
           space);
  }

  bool finite(const SparseUnit& u) const {
    const int64_t dim = work_.params.v_head_dim;
    bool all = true;
    dispatch_floating(c_.dtype, [&](auto kind) {
      for (int64_t i = u.first; i < u.first + u.count; i++) {
        const auto* const row = static_cast<const decltype(kind)*>(out_row(u, i));
        for (int64_t d = 0; d < dim; d++) {
          const auto x = load_one(row + d);
          all = all && x - x == 0;
        }
      }
    });
    return all;
  }
  const void* out_row(const SparseUnit& u, int64_t i) const {
    const SparseKernelParams& p = work_.params;
    const int64_t head = work_.first_head(u) + i / u.rows, row = u.begin + i % u.rows;
    return number_at(results_.out, ((u.batch * c_.q_heads + head) * p.q_len + row) * p.v_head_dim);
  }

  // Sums of values that are not finite, though their mean may be: by the kernels of attention.
  void again(const SparseUnit& u, const IndexLists::List& list) const {
    const SparseKernelParams& p = work_.params;
    std::vector<char> keys(static_cast<size_t>(list.n() * p.head_dim * item_));
    std::vector<char> values(static_cast<size_t>(inside_ ? 0 : list.n() * p.v_head_dim * item_));
    const Gathered g = gather(u, list, 0, list.n(), keys.data(), values.data());
    const std::vector<uint8_t> mask = mask_of(u, list, 0, list.n());
    const AttentionKernels& tiled = kernels().attention[static_cast<int>(kernel_dtype(c_.dtype))];
    AttentionParams a;
    a.q_len = u.rows, a.kv_len = list.n(), a.head_dim = p.head_dim, a.v_head_dim = p.v_head_dim;
    a.scale = p.scale, a.modifier = p.modifier;
    a.keys.set_length(list.n());
    a.q_row = p.q_row, a.k_row = g.key_row, a.v_row = g.value_row, a.out_row = p.v_head_dim;
    a.mask = MaskKind::boolean, a.mask_row = list.n(), a.mask_col = 1;
    const DecodeParams d = decode_params(u.rows);
    const DecodeRows rows = decode_rows(u);
    const int64_t lse = item_size(c_.lse_dtype);
    const auto at = [](const void* base, int64_t bytes) {
      return const_cast<char*>(static_cast<const char*>(base)) + bytes;
    };
    const Scratch space(tiled.forward_space(a, u.rows));
    for (int64_t i = u.first; i < u.first + u.count;) {
      const int64_t h = i / u.rows, row = i % u.rows, count = std::min(u.rows - row, u.first + u.count - i);
      HeadPointers head;
      head.query = at(rows.query, h * d.q_head * item_), head.key = g.key, head.value = g.value;
      head.mask = mask.data();
      head.out = at(rows.out, h * d.out_head * item_), head.lse = at(rows.lse, h * d.lse_head * lse);
      head.stats = at(rows.stats, 2 * h * d.lse_head * lse);
      if (rows.sinks) head.sink = rows.sinks[h];
      tiled.forward(a, head, row, count, space.data());
      i += count;
    }
  }

  const SparseCall& c_;
  const SparseResults& results_;
  SparseWork work_;
  const DecodeKernels& kernel_;
  int64_t item_ = 4, chunk_ = 0, chunks_ = 1;
  int64_t slots_ = 1, partial_ = 0;  // partial results of a chunk, bytes of one
  bool inside_ = false;              // values are a part of the rows of keys
  bool split_ = false;               // chunks are items
};

}  // namespace

void cpu_sparse_forward(const SparseCall& c, const SparseInputs& in, const SparseResults& results) {
  SparseForward(c, in, results).run();
}

}  // namespace attnjourney
