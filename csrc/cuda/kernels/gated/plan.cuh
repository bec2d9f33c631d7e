// From a call of gated linear attention to its kernels. Plain C++ that the emulator runs too, launches and all.
#pragma once
#include "task.cuh"

namespace attnjourney {

class GatedPlan {
 public:
  // number_size: bytes of a number of the arithmetic. Fills in task.slots; the lengths of packed sequences are not
  // known here, but n of them have at most rows / chunk + n chunks together.
  GatedPlan(GatedTask& task, int number_size) : t_(task), size_(number_size) {
    const int rows = gated_rows(size_);
    t_.slots = t_.offsets ? t_.len / rows + t_.sequences : t_.sequences * ((t_.len + rows - 1) / rows);
  }

  // Few rows a sequence, on average where they are packed: one by one.
  bool steps() const {
    const int64_t rows = t_.offsets ? t_.len : int64_t{t_.len} * t_.sequences;
    return rows <= int64_t{kMostSteps} * t_.sequences;
  }
  static constexpr int kMostSteps = 4;

  // Scratch: void* take(how many numbers). Gradients of what is not wanted have none.
  template <class Take>
  void scratch(bool backward, Take&& take) const {
    if (!backward && steps()) return;
    const int64_t rows = int64_t{t_.batch} * t_.len, heads = t_.v_heads, chunk = gated_rows(size_);
    if (t_.norm_eps >= 0) t_.query_inverse = take(rows * t_.q_heads), t_.key_inverse = take(rows * t_.kv_heads);
    const int64_t gates = t_.kind == Gate::channel ? t_.head_dim : 1;
    if (t_.kind != Gate::none) t_.reads = take(rows * heads * gates), t_.writes = take(rows * heads * gates);
    t_.pairs = take(t_.slots * heads * t_.products() * chunk * chunk);
    if (!backward) return;
    const int64_t states = t_.slots * heads * t_.head_dim * t_.v_head_dim, values = rows * heads * t_.v_head_dim;
    t_.states = take(states), t_.state_grads = take(states), t_.errors = take(values), t_.error_grads = take(values);
    if (!in_chunks()) return;
    if (t_.grad_query) t_.query_sums = take(rows * t_.out_heads() * t_.head_dim);
    if (t_.grad_key) t_.key_sums = take(rows * heads * t_.head_dim);
    if (t_.grad_gate && t_.kind == Gate::head) t_.gate_sums = take(slices() * rows * heads);
    if (t_.grad_beta) t_.beta_sums = take(slices() * rows * heads);
  }

  template <class Launch>
  void forward(Launch&& launch) const {
    if (steps()) return launch.step(t_);
    prepare(launch);
    launch.forward(t_);
  }
  template <class Launch>
  void backward(Launch&& launch) const {
    prepare(launch);
    launch.forward(t_);  // task.states are there: no out
    launch.backward(t_);
    if (!in_chunks()) return;
    launch.pair_gradients(t_);
    launch.gradients(t_);
    if (t_.grad_query) launch.finish(t_, false);
    if (t_.grad_key) launch.finish(t_, true);
    if (t_.gate_sums) launch.sum_slices(t_, t_.gate_sums, t_.grad_gate);
    if (t_.beta_sums) launch.sum_slices(t_, t_.beta_sums, t_.grad_beta);
  }

 private:
  template <class Launch>
  void prepare(Launch&& launch) const {
    if (t_.norm_eps >= 0) launch.norms(t_);
    if (t_.kind != Gate::none) launch.decays(t_);
    launch.pairs(t_);
  }
  // gradients other than those of value and of the initial state
  bool in_chunks() const { return t_.grad_query || t_.grad_key || t_.grad_gate || t_.grad_beta; }
  int64_t slices() const { return gated_slices(t_.head_dim); }

  GatedTask& t_;
  int size_;
};

}  // namespace attnjourney
