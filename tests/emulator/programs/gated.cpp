// Runs gated linear attention in -DELEMENT=...: every kernel of a plan, one after the other. stdin: query, key, value,
// as asked for gate, beta, initial state, offsets; backward=1: grad_out, as asked for the gradient of the state.
// stdout: out, state; or the gradients of query, key, value, gate, beta, initial state.
#include "emulator/machine/driver.h"
//
#include "cuda/kernels/gated/plan.cuh"
#include "kernels/gated.h"

struct Launch {
  emulator::Options options;
  template <class Kernel, class... More>
  void run(Kernel kernel, int64_t blocks, int threads, int bytes, const GatedTask& t, More... more) const {
    if (blocks == 0) return;
    const dim3 grid(static_cast<unsigned>(blocks));
    emulator::launch(kernel, grid, dim3(threads), static_cast<size_t>(bytes), options, t, more...);
  }
  static int64_t chunks(const GatedTask& t) { return int64_t{t.slots} * t.v_heads; }
  static int64_t slices(const GatedTask& t, int cols) {
    return int64_t{t.sequences} * t.v_heads * ((t.v_head_dim + cols - 1) / cols);
  }
  template <template <bool> class Kernel>
  void walk(const GatedTask& t) const {
    const auto with = [&]<bool Wide>() {
      using Walk = Kernel<Wide>;
      run(gated_walk<Walk>, slices(t, Walk::kCols), kGatedThreads, Walk::smem_bytes(t.head_dim), t);
    };
    gated_wide(t.head_dim) ? with.template operator()<true>() : with.template operator()<false>();
  }
  void norms(const GatedTask& t) const {
    run(gated_norms<ELEMENT>, gated_pass_blocks(t, t.q_heads + t.kv_heads), kGatedPassThreads, 0, t);
  }
  void decays(const GatedTask& t) const {
    run(gated_decays<C>, chunks(t), kGatedThreads, gated_rows(sizeof(C)) * sizeof(C), t);
  }
  void pairs(const GatedTask& t) const {
    run(gated_pairs<ELEMENT>, chunks(t) * t.products(), kGatedThreads, GatedPairs<ELEMENT, false>::smem_bytes(), t);
  }
  void forward(const GatedTask& t) const { walk<Forward>(t); }
  void backward(const GatedTask& t) const { walk<Backward>(t); }
  void pair_gradients(const GatedTask& t) const {
    run(gated_pair_gradients<ELEMENT>, chunks(t) * t.products(), kGatedThreads, GatedPairs<ELEMENT, true>::smem_bytes(),
        t);
  }
  void gradients(const GatedTask& t) const {
    run(gated_gradients<ELEMENT>, chunks(t) * gated_slices(t.head_dim), kGatedThreads,
        GatedChunkGradients<ELEMENT>::smem_bytes(t.kind == Gate::channel), t);
  }
  void finish(const GatedTask& t, bool of_key) const {
    run(gated_finish<ELEMENT>, gated_pass_blocks(t, of_key ? t.kv_heads : t.q_heads), kGatedPassThreads, 0, t, of_key);
  }
  void sum_slices(const GatedTask& t, const void* sums, void* to) const {
    const int64_t count = int64_t{t.batch} * t.v_heads * t.len;
    run(gated_sum_slices<C>, (count + kGatedPassThreads - 1) / kGatedPassThreads, kGatedPassThreads, 0, t, sums, to);
  }
  void step(const GatedTask& t) const {
    if (gated_wide(t.head_dim))
      run(gated_step<ELEMENT, 64>, slices(t, kGatedStepCols), kGatedThreads, GatedStep<ELEMENT, 64>::smem_bytes(), t);
    else
      run(gated_step<ELEMENT, 32>, slices(t, kGatedStepCols), kGatedThreads, GatedStep<ELEMENT, 32>::smem_bytes(), t);
  }
};

template <class T>
using Buffer = std::unique_ptr<emulator::Buffer<T>>;
template <class T>
Buffer<T> given(size_t count, const char* name) {
  return std::make_unique<emulator::Buffer<T>>(driver::read<T>(count), name);
}
template <class T>
Buffer<T> fresh(size_t count, const char* name) {
  return std::make_unique<emulator::Buffer<T>>(count, name);
}
template <class T>
T* data(const Buffer<T>& b) {
  return b && b->size ? b->data : nullptr;
}

template <class T>
void clear(emulator::Buffer<T>& b) {
  std::memset(static_cast<void*>(b.data), 0, b.size * sizeof(T));
  emulator::mark_initialised(b.data, b.size * sizeof(T));
}

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const bool rows_first = a["rows_first"];
    GatedTask t{};
    t.batch = a["batch"], t.q_heads = a["q_heads"], t.kv_heads = a["kv_heads"], t.v_heads = a["v_heads"];
    t.len = a["len"], t.head_dim = a["head_dim"], t.v_head_dim = a["v_head_dim"];
    t.group = t.q_heads > t.v_heads ? t.q_heads / t.v_heads : 1;
    t.kind = static_cast<Gate>(a["gate"]), t.delta = a["delta"];
    t.scale = a["scale"] / 1000.0, t.norm_eps = a["norm"] ? 1e-6 : -1;
    t.sequences = a["sequences"] ? a["sequences"] : t.batch;
    const driver::Shape q{t.batch, t.q_heads, t.len, t.head_dim, rows_first};
    const driver::Shape k{t.batch, t.kv_heads, t.len, t.head_dim, rows_first};
    const driver::Shape v{t.batch, t.v_heads, t.len, t.v_head_dim, rows_first};
    const driver::Shape o{t.batch, t.out_heads(), t.len, t.v_head_dim, rows_first};
    const driver::Shape g{t.batch, t.v_heads, t.len, t.head_dim, rows_first};
    const auto query = given<ELEMENT>(q.size(), "query"), key = given<ELEMENT>(k.size(), "key");
    const auto value = given<ELEMENT>(v.size(), "value");
    const size_t rows = static_cast<size_t>(t.batch) * t.len, heads = t.v_heads;
    const size_t state_size = t.sequences * heads * t.head_dim * t.v_head_dim;
    const size_t gate_size = t.kind == Gate::channel ? g.size() : rows * heads;
    const auto when = [](bool wanted, size_t count, const char* name) {
      return wanted ? given<C>(count, name) : nullptr;
    };
    const auto gate = when(t.kind != Gate::none, gate_size, "gate"), beta = when(t.delta, rows * heads, "beta");
    const auto initial = when(a["state"], state_size, "initial_state");
    const auto offsets = a["sequences"] ? given<int>(static_cast<size_t>(t.sequences) + 1, "offsets") : nullptr;
    struct Strides {
      int64_t batch, head, row;
    };
    const auto rows_of = [&](const Buffer<ELEMENT>& b, const driver::Shape& s) {
      const auto strides = s.strides<Strides>();
      const bool chunks = s.dim * sizeof(ELEMENT) % 16 == 0;
      return LinearRows{b->data, strides.batch, strides.head, strides.row, s.dim, FeatureMap::identity,
                        1,       nullptr,       nullptr,      chunks};
    };
    t.query = rows_of(query, q), t.key = rows_of(key, k), t.value = rows_of(value, v);
    t.gate = data(gate), t.beta = data(beta), t.offsets = data(offsets), t.initial_state = data(initial);
    const auto gates =
        t.kind == Gate::channel ? g.strides<Strides>() : Strides{static_cast<int64_t>(heads) * t.len, t.len, 1};
    t.gate_batch = gates.batch, t.gate_head = gates.head, t.gate_row = gates.row;
    t.beta_batch = static_cast<int64_t>(heads) * t.len, t.beta_head = t.len, t.beta_row = 1;

    const Launch launch{a.options()};
    std::vector<Buffer<C>> kept;
    const auto take = [&](int64_t count) -> void* {
      kept.push_back(fresh<C>(static_cast<size_t>(count), "scratch"));
      return kept.back()->data;
    };
    const bool backward = a["backward"];
    const GatedPlan plan(t, sizeof(C));
    if (!backward) {
      const auto out = fresh<ELEMENT>(o.size(), "out");
      const auto state = fresh<C>(state_size, "state");
      t.out = data(out), t.state = data(state);
      if (t.offsets) clear(*out);
      plan.scratch(false, take);
      plan.forward(launch);
      driver::write(*out), driver::write(*state);
      return;
    }
    const auto grad_out = given<ELEMENT>(o.size(), "grad_out");
    const auto grad_state = when(a["grad_state"], state_size, "grad_state");
    t.grad_out = rows_of(grad_out, o), t.grad_state = data(grad_state);
    const int need = a["need"];
    const auto wanted = [&]<class T>(int bit, size_t count, const char* name, T) {
      auto b = fresh<T>(need & bit ? count : 0, name);
      if (t.offsets) clear(*b);
      return b;
    };
    const auto grad_query = wanted(1, q.size(), "grad_query", ELEMENT{});
    const auto grad_key = wanted(2, k.size(), "grad_key", ELEMENT{});
    const auto grad_value = wanted(4, v.size(), "grad_value", ELEMENT{});
    const auto grad_gate = wanted(8, gate ? gate_size : 0, "grad_gate", C{});
    const auto grad_beta = wanted(16, beta ? rows * heads : 0, "grad_beta", C{});
    const auto grad_initial = wanted(32, initial ? state_size : 0, "grad_initial_state", C{});
    t.grad_query = data(grad_query), t.grad_key = data(grad_key), t.grad_value = data(grad_value);
    t.grad_gate = data(grad_gate), t.grad_beta = data(grad_beta), t.grad_initial_state = data(grad_initial);
    plan.scratch(true, take);
    plan.backward(launch);
    for (const auto* b : {&grad_query, &grad_key, &grad_value}) driver::write(**b);
    for (const auto* b : {&grad_gate, &grad_beta, &grad_initial}) driver::write(**b);
  });
}
