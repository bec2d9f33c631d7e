// From a call of linear attention to its kernels, forward and backward: which products, over which pieces of the
// sequence, from which states. `Launch` runs what it is given, one after the other:
//
//   walk(const LinearTask&)   scan(const LinearScan&)   prepare(const LinearPrepare&)
#pragma once
#include "task.cuh"

namespace attnjourney {

struct LinearProblem {
  int batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_head_dim;
  bool causal, normalize;
  double eps;
  int number_size;                         // bytes of a number of the arithmetic
  int chunk;                               // rows of a chunk: linear_chunk
  LinearRows query, key, value, grad_out;  // query with scale and feature map, key with the map; blocked keys, values
  void *out, *denominator;                 // dense; read by the backward
  // [batch, kv_heads] of [head_dim, v_head_dim] and [head_dim], dense; null: zeros, or not wanted
  void *initial_state, *initial_normalizer, *state, *normalizer;
  void *grad_denominator, *grad_state, *grad_normalizer;                                    // given, or null
  void *grad_query, *grad_key, *grad_value, *grad_initial_state, *grad_initial_normalizer;  // wanted, or null
  void *inverse, *grad;  // [batch, q_heads, q_len] each: scratch of the backward with normalize
  void* states;          // scratch: LinearPlan::states() numbers
  int blocks;            // that a launch should have
};

struct LinearPieces {
  int count, rows;
};

class LinearPlan {
 public:
  explicit LinearPlan(const LinearProblem& problem)
      : p(problem), chunk_(p.chunk), heads_(int64_t{p.batch} * p.kv_heads) {}

  // numbers of scratch
  int64_t states(bool backward) const {
    int64_t count = pieces(p.v_head_dim, p.kv_len).count;
    if (backward) count = most(pieces(p.head_dim, p.kv_len).count, pieces(p.head_dim, p.q_len).count);
    return p.causal && count <= 1 && !backward ? 0 : most(count, 1) * heads_ * slot();
  }

  template <class Launch>
  void forward(Launch&& launch) const {
    LinearTask t = product(p.query, p.key, p.value, p.head_dim, p.v_head_dim, true);
    t.extra = p.normalize ? LinearExtra::value_column : LinearExtra::none;
    t.result = LinearResult::out, t.x = p.out, t.denominator = p.denominator, t.eps = p.eps;
    const auto dense = [&](void* s, void* z) { return LinearState{s, z, 0, matrix(), p.v_head_dim, 1, 0, p.head_dim}; };
    run(launch, t, dense(p.initial_state, p.initial_normalizer), dense(p.state, p.normalizer), p.q_len, p.kv_len);
  }

  template <class Launch>
  void backward(Launch&& launch) const {
    LinearRows grad = p.grad_out;
    if (p.normalize) {
      launch.prepare(LinearPrepare{grad.data, p.out, grad.batch, grad.head, grad.row, p.denominator, p.grad_denominator,
                                   p.inverse, p.grad, p.q_heads, p.q_len, p.v_head_dim,
                                   int64_t{p.batch} * p.q_heads * p.q_len});
      grad.scales = p.inverse;
    }
    const LinearExtra extra = p.normalize ? LinearExtra::depth_column : LinearExtra::none;
    const auto transposed = [&](void* s, void* z) {
      return LinearState{s, z, 0, matrix(), 1, p.v_head_dim, 0, p.head_dim};
    };
    if (p.grad_query) {
      LinearTask t = product(grad, p.value, p.key, p.v_head_dim, p.head_dim, true);
      t.extra = extra, t.a_column = p.grad;
      t.result = LinearResult::grad_query, t.x = p.grad_query, t.slope_of = p.query;
      run(launch, t, transposed(p.initial_state, p.initial_normalizer), {}, p.q_len, p.kv_len);
    }
    if (!p.grad_key && !p.grad_initial_state && !p.grad_initial_normalizer) return;

    LinearTask t = product(p.value, grad, p.query, p.v_head_dim, p.head_dim, false);
    t.extra = extra, t.b_column = p.grad, t.reverse = true;
    t.result = LinearResult::grad_key, t.x = p.grad_key, t.slope_of = p.key;
    const LinearState first = transposed(p.grad_state, p.grad_normalizer);
    const LinearState last = transposed(p.grad_initial_state, p.grad_initial_normalizer);
    const LinearState held = run(launch, t, first, last, p.kv_len, p.q_len);
    if (!p.grad_key) return;

    LinearTask v = product(p.key, p.query, grad, p.head_dim, p.v_head_dim, false);  // T is the transposed of T^T
    v.reverse = true;
    v.result = LinearResult::grad_value, v.x = p.grad_value, v.slope_of = p.value;
    v.before = {held.matrix, nullptr, held.piece, held.head, held.col, held.row, 0, 0};
    walk(launch, v, p.causal ? pieces(p.head_dim, p.q_len) : pieces(p.v_head_dim, p.kv_len), p.kv_len);
  }

 private:
  static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
  int64_t matrix() const { return int64_t{p.head_dim} * p.v_head_dim; }
  int64_t slot() const { return matrix() + most(p.head_dim, p.v_head_dim); }  // numbers of a head's state
  int slices(int cols) const { return cols > chunk_ ? (cols + chunk_ - 1) / chunk_ : 1; }

  // Pieces of at least four chunks, so that their states are small beside the rows; one where heads and slices are
  // enough blocks: then nothing is read twice.
  LinearPieces pieces(int cols, int length) const {
    const int64_t own = heads_ * slices(cols), least = 4 * chunk_;
    int64_t count = own == 0 || 3 * own >= 2 * p.blocks ? 1 : (p.blocks + own - 1) / own;
    if (count > (length + least - 1) / least) count = (length + least - 1) / least;
    if (count <= 1) return {length > 0 ? 1 : 0, length};
    const int64_t rows = ((length + count - 1) / count + chunk_ - 1) / chunk_ * chunk_;
    return {static_cast<int>((length + rows - 1) / rows), static_cast<int>(rows)};
  }

  LinearTask product(const LinearRows& a, const LinearRows& b, const LinearRows& c, int depth, int cols,
                     bool a_grouped) const {
    LinearTask t{};
    t.a = a, t.b = b, t.c = c, t.depth = depth, t.cols = cols;
    t.batch = p.batch, t.kv_heads = p.kv_heads, t.group = p.kv_heads ? p.q_heads / p.kv_heads : 1;
    t.a_grouped = a_grouped, t.causal = p.causal, t.slices = slices(cols);
    return t;
  }

  template <class Launch>
  void walk(Launch&& launch, LinearTask t, const LinearPieces& pieces, int length) const {
    t.length = length, t.pieces = pieces.count, t.piece_rows = pieces.rows;
    if (int64_t{t.pieces} * heads_ > 0) launch.walk(t);
  }

  // The product from state `first`; its last state to `last`. In one piece at once; else, or not causal, from states
  // that sums of pieces give. Returns the states that the pieces of x began with.
  template <class Launch>
  LinearState run(Launch&& launch, LinearTask t, const LinearState& first, const LinearState& last, int a_length,
                  int b_length) const {
    const LinearPieces summed = pieces(t.cols, b_length);
    if (p.causal && summed.count == 1 && t.x) {
      t.before = first, t.after = last;
      walk(launch, t, summed, a_length);
      return first;
    }
    const int64_t step = heads_ * slot();
    LinearState slots{p.states, static_cast<char*>(p.states) + matrix() * p.number_size, step, slot(), t.cols, 1, step,
                      slot()};
    LinearTask sums = t;
    sums.sums = true, sums.after = slots;
    walk(launch, sums, summed, b_length);
    const int vector = t.extra == LinearExtra::none ? 0 : t.extra == LinearExtra::value_column ? t.depth : t.cols;
    if (heads_ > 0)
      launch.scan(LinearScan{first, slots, last, summed.count, static_cast<int>(heads_), t.depth, t.cols, vector,
                             t.reverse, !p.causal});
    if (!p.causal) slots.piece = slots.vector_piece = 0;
    if (!t.x) return slots;
    t.before = slots;
    walk(launch, t, p.causal ? summed : pieces(t.cols, a_length), a_length);
    return slots;
  }

  const LinearProblem& p;
  int chunk_;
  int64_t heads_;
};

}  // namespace attnjourney
