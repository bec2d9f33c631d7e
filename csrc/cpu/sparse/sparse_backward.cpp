// CPU entry of the gradients of token-sparse attention.
#include "cpu/plan.h"
#include "key_units.h"
#include "sparse_cpu.h"
#include "sparse_rows.h"

namespace attnjourney {
namespace {

constexpr int64_t most_saved = int64_t{8} << 20;  // bytes of a unit

const SparseKernels& sparse_kernels(ScalarType t) { return kernels().sparse->of[static_cast<int>(kernel_dtype(t))]; }

// rows of a unit, few where many keys are kept for each
int64_t unit_rows(const SparseCall& c) {
  int64_t rows = decode_row_block;
  while (rows > 8 && sparse_kernels(c.dtype).saved_space({c.params}, rows, c.params.index_count) > most_saved)
    rows /= 2;
  return rows;
}

class SparseGradient {
 public:
  SparseGradient(const SparseCall& c, const SparseInputs& in, const SparseSaved& saved, const SparseGradients& grads)
      : c_(c),
        saved_(saved),
        grads_(grads),
        work_(c, in, unit_rows(c)),
        kernel_(sparse_kernels(c.dtype)),
        grad_out_(saved.grad_out) {
    SparseKernelParams& p = work_.params;
    p.grad_out_head = grad_out_.kept.stride(1), p.grad_out_row = grad_out_.kept.stride(2);
    p.grad_q_head = p.q_len * p.head_dim, p.grad_q_row = p.head_dim;
    key_ = KeySum(p.head_dim, p.kv_len, kernel_.lanes, item_size(c.lse_dtype), grads.key.has_value());
    value_ = KeySum(p.v_head_dim, p.kv_len, kernel_.lanes, item_size(c.lse_dtype), grads.value.has_value());
    if (grads.sinks) sinks_.assign(static_cast<size_t>(c.batch * c.q_heads * p.q_len), 0);
  }

  void run() {
    const SparseKernelParams& p = work_.params;
    const double flops = 2 * work_.pairs() * static_cast<double>(3 * p.head_dim + 2 * p.v_head_dim);
    const KeyUnits units{.heads = work_.heads(),
                         .of_head = work_.of_head(),
                         .kv_len = p.kv_len,
                         .sums_bytes = key_.bytes + value_.bytes,
                         .saved_bytes = kernel_.saved_space(p, work_.most_rows(), p.index_count),
                         .rows_bytes = kernel_.rows_space(p, work_.most_rows(), p.index_count),
                         .threads = thread_count(std::max(work_.heads(), work_.units()), flops),
                         .keys = grads_.key || grads_.value};
    run_key_units(
        grad_out_.kept, units,
        [&](int64_t i, int64_t bucket, KeptRows& rows, void* saved, void* space) {
          compute(work_.unit(i), bucket, rows, saved, space);
        },
        [&](const KeptRows& rows, int64_t begin, int64_t end, const void* saved, char* sums) {
          kernel_.add_keys(p, rows.in, saved, begin, end, grads_.key ? sums : nullptr,
                           grads_.value ? sums + key_.bytes : nullptr);
        },
        [&](int64_t head, const char* sums, int64_t begin, int64_t end) {
          if (grads_.key) key_.write(kernel_, sums, head, begin, end, *grads_.key);
          if (grads_.value) value_.write(kernel_, sums + key_.bytes, head, begin, end, *grads_.value);
        });
    if (grads_.sinks) write_sinks();
  }

 private:
  void compute(const SparseUnit& u, int64_t bucket, KeptRows& rows, void* saved, void* space) {
    const SparseKernelParams& p = work_.params;
    SparseRows& in = rows.in;
    in = SparseRows{};
    if (u.count == 0) return;
    work_.list(u, bucket, rows.list);
    const int64_t row = (u.batch * c_.q_heads + work_.first_head(u)) * p.q_len + u.begin;
    in.query = work_.query.at(u.batch, work_.first_head(u), u.begin);
    in.grad_out = grad_out_.at(u.batch, work_.first_head(u), u.begin);
    if (saved_.grad_lse) in.grad_lse = number_at(*saved_.grad_lse, row);
    if (grads_.query) in.grad_query = number_at(*grads_.query, row * p.head_dim);
    in.rows = u.rows, in.first = u.first, in.count = u.count;
    in.key = work_.key.at(u.batch, u.head), in.value = work_.value.at(u.batch, u.head);
    in.keys = rows.list.keys.data(), in.n = rows.list.n(), in.whole = rows.list.whole, in.last = rows.list.last;
    in.sinks = work_.sinks_of(u);
    double of_rows[decode_row_block];
    kernel_.rows(p, in, saved, of_rows, space);
    if (!grads_.sinks) return;
    for (int64_t r = 0; r < u.count; r++) {
      const int64_t at = u.first + r;
      sinks_[static_cast<size_t>(row + at / u.rows * p.q_len + at % u.rows)] = of_rows[r];
    }
  }

  void write_sinks() const {
    const int64_t len = work_.params.q_len;
    Tensor each = aten::empty(*grads_.sinks, {c_.batch, c_.q_heads}, ScalarType::Double);
    double* const to = static_cast<double*>(each.mutable_data_ptr());
    for (int64_t h = 0; h < c_.batch * c_.q_heads; h++) {
      to[h] = 0;
      for (int64_t i = 0; i < len; i++) to[h] += sinks_[static_cast<size_t>(h * len + i)];
    }
    Tensor target = *grads_.sinks;
    torch::stable::copy_(target, target.dim() == 1 ? aten::sum(each, {0}) : each);
  }

  const SparseCall& c_;
  const SparseSaved& saved_;
  const SparseGradients& grads_;
  SparseWork work_;
  const SparseKernels& kernel_;
  SparseTensor grad_out_;
  KeySum key_, value_;
  std::vector<double> sinks_;  // [batch][head][row]
};

}  // namespace

void cpu_sparse_backward(const SparseCall& c, const SparseInputs& in, const SparseSaved& saved,
                         const SparseGradients& gradients) {
  SparseGradient(c, in, saved, gradients).run();
}

}  // namespace attnjourney
