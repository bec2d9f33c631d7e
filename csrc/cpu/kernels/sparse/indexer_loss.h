// The loss of the lightning indexer, a row of query at a time, and its gradients: rows of heads against the keys chosen
// for the row, by the products of token-sparse attention's gradients (backward.h), which also add up those of the keys.
#pragma once
#include "backward.h"

namespace attnjourney {
namespace {

template <class T>
struct IndexerLoss {
  using Attention = SparseBackward<T>;
  using Real = Compute<T>;
  using V = Vec<Real>;
  using Products = PassProducts<T>;
  using Shape = typename Attention::Shape;
  using Saved = typename Attention::Saved;
  using Buffers = typename Attention::Buffers;
  static constexpr int width = V::width;

  // of `target` and `scores`
  static int64_t space(const SparseKernelParams& params, int64_t count, int64_t n) {
    return Attention::saved_space(params, count, n) + Attention::rows_space(params, count, n);
  }

  // adds the weights of all rows of a call of attention (without values) to sums[n]
  static void target(const SparseKernelParams& params, const SparseRows& in, double* sums, void* space) {
    const Shape s(params, in.count, in.n);
    const Saved saved = buffers_in<Saved>(space, s);
    const Buffers b = buffers_in<Buffers>(after(space, s), params, s);
    load(params, in, s, saved, b);
    memset(saved.grad_scores, 0, size_t(s.stride) * sizeof(Real));
    double unused[8];
    for (int64_t i = 0; i < s.passes.count; i++)
      s.passes.with([&](auto r) {
        Real* const weights = saved.weights + i * s.stride;
        Attention::template softmax<r.count>(params, in, i * r.count, weights, saved.grad_scores, b.states, unused);
        for (int64_t j = 0; j < in.n; j++) {
          Real sum = 0;
          ATTN_UNROLL for (int k = 0; k < r.count; k++) sum += weights[j * r.count + k];
          sums[j] += double(sum);
        }
      });
  }

  // the indexer's scores of one row: sums[n] = sum_h weights[h] relu(products)
  static void scores(const SparseKernelParams& params, const SparseRows& in, const void* weights, double* sums,
                     void* space) {
    const Shape s(params, in.count, in.n);
    const Saved saved = buffers_in<Saved>(space, s);
    load(params, in, s, saved, buffers_in<Buffers>(after(space, s), params, s));
    const Real* const of_head = static_cast<const Real*>(weights);
    for (int64_t j = 0; j < in.n; j++) {
      Real sum = 0;
      for (int64_t h = 0; h < in.count; h++) {
        const Real product = saved.weights[h / s.passes.rows * s.stride + j * s.passes.rows + h % s.passes.rows];
        sum += of_head[h] * (product < Real(0) ? Real(0) : product);
      }
      sums[j] = double(sum);
    }
  }

  // grad_scores[n]: of one row. What `add_keys` takes is left in `saved`.
  static void rows(const SparseKernelParams& params, const SparseRows& in, const void* weights_,
                   const void* grad_scores, void* grad_weights, void* saved_, void* space) {
    const Shape s(params, in.count, in.n);
    const Saved saved = buffers_in<Saved>(saved_, s);
    const Buffers b = buffers_in<Buffers>(space, params, s);
    load(params, in, s, saved, b);
    *saved.finite = true;  // no row hides a key from another one
    const Real* const weights = static_cast<const Real*>(weights_);
    const Real* const grads = static_cast<const Real*>(grad_scores);
    const int64_t all = round_up(in.n * s.passes.rows, width);
    for (int64_t j = 0; j < in.n; j++)  // each row's number beside its products
      for (int64_t r = 0; r < s.passes.rows; r++) b.states[j * s.passes.rows + r] = grads[j];
    for (int64_t i = in.n * s.passes.rows; i < all + 2 * width; i++) b.states[i] = Real(0);
    for (int64_t i = 0; i < s.passes.count; i++)
      s.passes.with([&](auto r) {
        for (int64_t x = in.n * r.count; x < all; x++) saved.weights[i * s.stride + x] = Real(0);
        row_gradients<r.count>(in, all, i, saved.weights + i * s.stride, b.states, weights,
                               saved.grad_scores + i * s.stride, static_cast<Real*>(grad_weights));
      });
    if (!in.grad_query) return;
    memset(b.grad_query, 0, size_t(s.passes.all() * s.qd) * sizeof(Real));
    Products::sums(s.passes, saved.grad_scores, s.stride, b.key, params.head_dim, params.head_dim, in.n, false,
                   b.grad_query, s.qd);
    for (int64_t h = 0; h < in.count; h++)
      unpack_rows(static_cast<const Real*>(b.grad_query) + h * s.qd, s.qd, 1, params.head_dim, Real(params.scale),
                  static_cast<T*>(in.grad_query) + h * params.grad_q_head, params.head_dim);
  }

 private:
  static void* after(void* space, const Shape& s) { return static_cast<char*>(space) + scratch_bytes<Saved>(s); }

  // gathers the keys; saved.query, and the products in saved.weights
  static void load(const SparseKernelParams& params, const SparseRows& in, const Shape& s, const Saved& saved,
                   const Buffers& b) {
    constexpr int64_t size = sizeof(T);
    gather_rows(in.key, params.k_row * size, params.head_dim * size, in.keys, in.n, b.key);
    Attention::copy_rows(in, in.query, params.q_head, params.q_row, params.head_dim, s, s.qd, Real(params.scale),
                         saved.query);
    Products::dots(s.passes, saved.query, s.qd, b.key, params.head_dim, params.head_dim, in.n, saved.weights, s.stride);
  }

  // of R heads from pass * R on: grads (spread over the rows) -> those of the products, and of the weights
  template <int R>
  static ATTN_NOINLINE void row_gradients(const SparseRows& in, int64_t all, int64_t pass, const Real* products,
                                          const Real* grads, const Real* weights, Real* to, Real* grad_weights) {
    constexpr int period = R > width ? R : width, vectors = period / width;
    const int64_t first = pass * R;
    Real numbers[period];
    V weight[vectors], sum[vectors];
    for (int i = 0; i < period; i++) numbers[i] = first + i % R < in.count ? weights[first + i % R] : Real(0);
    ATTN_UNROLL for (int v = 0; v < vectors; v++) weight[v] = attnjourney::load(numbers + v * width),
                                                  sum[v] = V::zero();
    const V zero = V::zero();
    for (int64_t i = 0; i < all; i += period) ATTN_UNROLL for (int v = 0; v < vectors; v++) {
        const V product = attnjourney::load(products + i + v * width), grad = attnjourney::load(grads + i + v * width);
        const auto off = ge(zero, product);
        store(to + i + v * width, select(off, zero, grad * weight[v]));
        sum[v] = sum[v] + select(off, zero, grad * product);
      }
    if (!grad_weights) return;
    Real of_row[R] = {};
    ATTN_UNROLL for (int v = 0; v < vectors; v++) store(numbers + v * width, sum[v]);
    for (int i = 0; i < period; i++) of_row[i % R] += numbers[i];
    for (int r = 0; r < R && first + r < in.count; r++) grad_weights[first + r] = of_row[r];
  }
};

}  // namespace
}  // namespace attnjourney
