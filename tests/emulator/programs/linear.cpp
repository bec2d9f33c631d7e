// Runs linear attention in -DELEMENT=..., chunks of -DCHUNK=... rows, forward and (backward=1) backward: every kernel
// of a plan, one after the other. stdin: query, key, value, then as asked for: mask, initial state and normalizer;
// backward: grad_out, and as asked for the gradients of denominator, state, normalizer. stdout: out, denominator,
// state, normalizer; the gradients.
#include "emulator/machine/driver.h"
//
#include "cuda/kernels/linear/plan.cuh"
#include "kernels/linear.h"

struct Launch {
  emulator::Options options;
  static dim3 grid(int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); }
  void walk(const LinearTask& t) const {
    const int64_t blocks = int64_t{t.pieces} * t.batch * t.kv_heads * t.slices;
    emulator::launch(linear_walk<Walk>, grid(blocks), dim3(Walk::kThreads),
                     static_cast<size_t>(Walk::smem_bytes(t.depth)), options, t);
  }
  void scan(const LinearScan& t) const {
    emulator::launch(linear_scan<C>, grid(linear_scan_blocks(t)), dim3(kLinearPassThreads), 0, options, t);
  }
  void prepare(const LinearPrepare& t) const {
    emulator::launch(linear_prepare<ELEMENT>, grid(linear_prepare_blocks(t)), dim3(kLinearPassThreads), 0, options, t);
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
void* data(const Buffer<T>& b) {
  return b && b->size ? b->data : nullptr;
}

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const bool rows_first = a["rows_first"], normalize = a["normalize"], backward = a["backward"];
    const driver::Shape q{a["batch"], a["q_heads"], a["q_len"], a["head_dim"], rows_first};
    const driver::Shape k{q.batch, a["kv_heads"], a["kv_len"], q.dim, rows_first};
    const driver::Shape v{q.batch, k.heads, k.length, a["v_head_dim"], rows_first};
    const driver::Shape o{q.batch, q.heads, q.length, v.dim, rows_first};
    const auto query = given<ELEMENT>(q.size(), "query"), key = given<ELEMENT>(k.size(), "key");
    const auto value = given<ELEMENT>(v.size(), "value");
    const size_t heads = static_cast<size_t>(q.batch) * k.heads,
                 rows = static_cast<size_t>(q.batch) * q.heads * q.length;
    const size_t matrix = heads * q.dim * v.dim, vector = normalize ? heads * q.dim : 0;
    const auto when = [](bool wanted, size_t count, const char* name) {
      return wanted && count ? given<C>(count, name) : nullptr;
    };
    const auto mask = a["mask"] ? given<uint8_t>(static_cast<size_t>(q.batch) * k.length, "mask") : nullptr;
    const auto initial_state = when(a["state"], matrix, "initial_state");
    const auto initial_normalizer = when(a["state"], vector, "initial_normalizer");
    const auto out = fresh<ELEMENT>(o.size(), "out");
    const auto denominator = fresh<C>(normalize ? rows : 0, "denominator"), state = fresh<C>(matrix, "state");
    const auto normalizer = fresh<C>(vector, "normalizer");

    const auto rows_of = [&](const Buffer<ELEMENT>& b, const driver::Shape& s, FeatureMap map, double factor,
                             const uint8_t* blocked) {
      struct Strides {
        int64_t batch, head, row;
      } strides = s.strides<Strides>();
      const bool chunks = s.dim * sizeof(ELEMENT) % 16 == 0;
      return LinearRows{b->data, strides.batch, strides.head, strides.row, s.dim,
                        map,     factor,        nullptr,      blocked,     chunks};
    };
    const auto map = static_cast<FeatureMap>(a["feature_map"]);
    const auto* blocked = static_cast<const uint8_t*>(data(mask));
    LinearProblem p{};
    p.batch = q.batch, p.q_heads = q.heads, p.kv_heads = k.heads, p.q_len = q.length, p.kv_len = k.length;
    p.head_dim = q.dim, p.v_head_dim = v.dim, p.causal = a["causal"], p.normalize = normalize;
    p.eps = a["eps"] / 1000.0, p.number_size = sizeof(C), p.chunk = CHUNK, p.blocks = a["blocks"];
    p.query = rows_of(query, q, map, a["scale"] / 1000.0, nullptr), p.key = rows_of(key, k, map, 1, blocked);
    p.value = rows_of(value, v, FeatureMap::identity, 1, blocked);
    p.out = data(out), p.denominator = data(denominator), p.state = data(state), p.normalizer = data(normalizer);
    p.initial_state = data(initial_state), p.initial_normalizer = data(initial_normalizer);
    const auto states = [&](bool of_backward) {
      auto s = fresh<C>(static_cast<size_t>(LinearPlan(p).states(of_backward)), "states");
      p.states = data(s);
      return s;
    };
    const Launch launch{a.options()};
    {
      const auto scratch = states(false);
      LinearPlan(p).forward(launch);
    }
    driver::write(*out);
    for (const auto* b : {&denominator, &state, &normalizer}) driver::write(**b);
    if (!backward) return;

    const auto grad_out = given<ELEMENT>(o.size(), "grad_out");
    const auto grad_denominator = when(a["grads"], normalize ? rows : 0, "grad_denominator");
    const auto grad_state = when(a["grads"], matrix, "grad_state");
    const auto grad_normalizer = when(a["grads"], vector, "grad_normalizer");
    const int need = a["need"];
    const auto wanted = [&]<class T>(int bits, size_t count, const char* name, T) {
      return fresh<T>(need & bits ? count : 0, name);
    };
    const auto grad_query = wanted(1, q.size(), "grad_query", ELEMENT{});
    const auto grad_key = wanted(2, k.size(), "grad_key", ELEMENT{});
    const auto grad_value = wanted(2, v.size(), "grad_value", ELEMENT{});
    const auto grad_initial_state = wanted(4, matrix, "grad_initial_state", C{});
    const auto grad_initial_normalizer = wanted(4, vector, "grad_initial_normalizer", C{});
    p.grad_out = rows_of(grad_out, o, FeatureMap::identity, 1, nullptr);
    p.grad_denominator = data(grad_denominator), p.grad_state = data(grad_state);
    p.grad_normalizer = data(grad_normalizer);
    p.grad_query = data(grad_query), p.grad_key = data(grad_key), p.grad_value = data(grad_value);
    p.grad_initial_state = data(grad_initial_state), p.grad_initial_normalizer = data(grad_initial_normalizer);
    const auto inverse = fresh<C>(rows, "inverse"), grad = fresh<C>(rows, "grad");
    p.inverse = data(inverse), p.grad = data(grad);
    const auto scratch = states(true);
    LinearPlan(p).backward(launch);
    for (const auto* b : {&grad_query, &grad_key, &grad_value}) driver::write(**b);
    for (const auto* b : {&grad_initial_state, &grad_initial_normalizer}) driver::write(**b);
  });
}
