// From a call of linear attention to its kernels, forward and backward: which products, over which pieces of the
// sequence, from which states. Plain C++ that the emulator runs too, launches and all. `Launch` runs what it is given,
// one after the other:
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
  explicit LinearPlan(const LinearProblem& problem_in)
      : problem(problem_in), chunk_(problem.chunk), heads_(int64_t{problem.batch} * problem.kv_heads) {}

  // numbers of scratch
  int64_t states(bool backward) const {
    int64_t count = pieces(problem.v_head_dim, problem.kv_len).count;
    if (backward)
      count = most(pieces(problem.head_dim, problem.kv_len).count, pieces(problem.head_dim, problem.q_len).count);
    return problem.causal && count <= 1 && !backward ? 0 : most(count, 1) * heads_ * slot();
  }

  template <class Launch>
  void forward(Launch&& launch) const {
    LinearTask task = product(problem.query, problem.key, problem.value, problem.head_dim, problem.v_head_dim, true);
    task.extra = problem.normalize ? LinearExtra::value_column : LinearExtra::none;
    task.result = LinearResult::out, task.x = problem.out, task.denominator = problem.denominator,
    task.eps = problem.eps;
    const auto dense = [&](void* s, void* z) { return state(s, z, problem.v_head_dim, 1); };
    run(launch, task, dense(problem.initial_state, problem.initial_normalizer),
        dense(problem.state, problem.normalizer), problem.q_len, problem.kv_len);
  }

  template <class Launch>
  void backward(Launch&& launch) const {
    LinearRows grad = problem.grad_out;
    if (problem.normalize) {
      launch.prepare(LinearPrepare{.grad_out = grad.data,
                                   .out = problem.out,
                                   .batch = grad.batch,
                                   .head = grad.head,
                                   .row = grad.row,
                                   .denominator = problem.denominator,
                                   .grad_denominator = problem.grad_denominator,
                                   .inverse = problem.inverse,
                                   .grad = problem.grad,
                                   .q_heads = problem.q_heads,
                                   .length = problem.q_len,
                                   .cols = problem.v_head_dim,
                                   .rows = int64_t{problem.batch} * problem.q_heads * problem.q_len});
      grad.scales = problem.inverse;
    }
    const LinearExtra extra = problem.normalize ? LinearExtra::depth_column : LinearExtra::none;
    const auto transposed = [&](void* s, void* z) { return state(s, z, 1, problem.v_head_dim); };
    if (problem.grad_query) {
      LinearTask task = product(grad, problem.value, problem.key, problem.v_head_dim, problem.head_dim, true);
      task.extra = extra, task.a_column = problem.grad;
      task.result = LinearResult::grad_query, task.x = problem.grad_query, task.slope_of = problem.query;
      run(launch, task, transposed(problem.initial_state, problem.initial_normalizer), {}, problem.q_len,
          problem.kv_len);
    }
    if (!problem.grad_key && !problem.grad_initial_state && !problem.grad_initial_normalizer) return;

    LinearTask task = product(problem.value, grad, problem.query, problem.v_head_dim, problem.head_dim, false);
    task.extra = extra, task.b_column = problem.grad, task.reverse = true;
    task.result = LinearResult::grad_key, task.x = problem.grad_key, task.slope_of = problem.key;
    const LinearState first = transposed(problem.grad_state, problem.grad_normalizer);
    const LinearState last = transposed(problem.grad_initial_state, problem.grad_initial_normalizer);
    const LinearState held = run(launch, task, first, last, problem.kv_len, problem.q_len);
    if (!problem.grad_key) return;

    LinearTask v = product(problem.key, problem.query, grad, problem.head_dim, problem.v_head_dim,
                           false);  // T is the transposed of T^T
    v.reverse = true;
    v.result = LinearResult::grad_value, v.x = problem.grad_value, v.slope_of = problem.value;
    v.before = {.matrix = held.matrix,
                .vector = nullptr,
                .piece = held.piece,
                .head = held.head,
                .row = held.col,
                .col = held.row,
                .vector_piece = 0,
                .vector_head = 0};
    walk(launch, v,
         problem.causal ? pieces(problem.head_dim, problem.q_len) : pieces(problem.v_head_dim, problem.kv_len),
         problem.kv_len);
  }

 private:
  static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
  int64_t matrix() const { return int64_t{problem.head_dim} * problem.v_head_dim; }
  // a dense state of one piece, with these strides of the matrix
  LinearState state(void* matrix_data, void* vector_data, int64_t row, int64_t col) const {
    return {.matrix = matrix_data,
            .vector = vector_data,
            .piece = 0,
            .head = matrix(),
            .row = row,
            .col = col,
            .vector_piece = 0,
            .vector_head = problem.head_dim};
  }
  int64_t slot() const { return matrix() + most(problem.head_dim, problem.v_head_dim); }  // numbers of a head's state
  int slices(int cols) const { return cols > chunk_ ? (cols + chunk_ - 1) / chunk_ : 1; }

  // Pieces of at least four chunks, so that their states are small next to the rows; one where heads and slices are
  // enough blocks: then nothing is read twice.
  LinearPieces pieces(int cols, int length) const {
    const int64_t own = heads_ * slices(cols), least = 4 * chunk_;
    int64_t count = own == 0 || 3 * own >= 2 * problem.blocks ? 1 : (problem.blocks + own - 1) / own;
    if (count > (length + least - 1) / least) count = (length + least - 1) / least;
    if (count <= 1) return {length > 0 ? 1 : 0, length};
    const int64_t rows = ((length + count - 1) / count + chunk_ - 1) / chunk_ * chunk_;
    return {static_cast<int>((length + rows - 1) / rows), static_cast<int>(rows)};
  }

  LinearTask product(const LinearRows& a, const LinearRows& b, const LinearRows& c, int depth, int cols,
                     bool a_grouped) const {
    LinearTask task{};
    task.a = a, task.b = b, task.c = c, task.depth = depth, task.cols = cols;
    task.batch = problem.batch, task.kv_heads = problem.kv_heads,
    task.group = problem.kv_heads ? problem.q_heads / problem.kv_heads : 1;
    task.a_grouped = a_grouped, task.causal = problem.causal, task.slices = slices(cols);
    return task;
  }

  template <class Launch>
  void walk(Launch&& launch, LinearTask task, const LinearPieces& pieces, int length) const {
    task.length = length, task.pieces = pieces.count, task.piece_rows = pieces.rows;
    if (int64_t{task.pieces} * heads_ > 0) launch.walk(task);
  }

  // The product from state `first`; its last state to `last`. In one piece at once; else, or not causal, from states
  // that sums of pieces give. Returns the states that the pieces of x began with.
  template <class Launch>
  LinearState run(Launch&& launch, LinearTask task, const LinearState& first, const LinearState& last, int a_length,
                  int b_length) const {
    const LinearPieces summed = pieces(task.cols, b_length);
    if (problem.causal && summed.count == 1 && task.x) {
      task.before = first, task.after = last;
      walk(launch, task, summed, a_length);
      return first;
    }
    const int64_t step = heads_ * slot();
    LinearState slots{.matrix = problem.states,
                      .vector = static_cast<char*>(problem.states) + matrix() * problem.number_size,
                      .piece = step,
                      .head = slot(),
                      .row = task.cols,
                      .col = 1,
                      .vector_piece = step,
                      .vector_head = slot()};
    LinearTask sums = task;
    sums.sums = true, sums.after = slots;
    walk(launch, sums, summed, b_length);
    const int vector = task.extra == LinearExtra::none           ? 0
                       : task.extra == LinearExtra::value_column ? task.depth
                                                                 : task.cols;
    if (heads_ > 0)
      launch.scan(LinearScan{.first = first,
                             .states = slots,
                             .last = last,
                             .pieces = summed.count,
                             .heads = static_cast<int>(heads_),
                             .rows = task.depth,
                             .cols = task.cols,
                             .vector = vector,
                             .reverse = task.reverse,
                             .total = !problem.causal});
    if (!problem.causal) slots.piece = slots.vector_piece = 0;
    if (!task.x) return slots;
    task.before = slots;
    walk(launch, task, problem.causal ? summed : pieces(task.cols, a_length), a_length);
    return slots;
  }

  const LinearProblem& problem;
  int chunk_;
  int64_t heads_;
};

}  // namespace attnjourney
