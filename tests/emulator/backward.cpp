// Runs one backward kernel with its passes, named by -DKERNEL=... (an Sm80Backward) or -DSHAPE=... (an
// Sm90BackwardShape; with -DOPTIONS an Sm90OptionsBackwardShape). stdin: query, key, value, out, grad_out, lse,
// grad_lse, lengths, options; stdout: grad_query, grad_key, grad_value, and of options where there are such:
// grad_sinks, grad_slopes, grad_mask. -DRANGED: as in forward.cpp.
#include "driver.h"
#ifdef SHAPE
#include "cuda/kernels/sm90_backward.cuh"
#else
#define OPTIONS
#endif
#ifdef OPTIONS
#include "cuda/kernels/backward_heads.cuh"
#ifdef SHAPE
#include "cuda/kernels/mask_tiles.cuh"
#include "cuda/kernels/sm90_options_backward.cuh"
#endif
#include "cuda/kernels/sm80_backward.cuh"
#include "cuda/kernels/sm80_mask_gradient.cuh"
#endif

using namespace attnjourney;
#ifdef SHAPE
using Kernel = SHAPE;
#else
using Kernel = KERNEL;
#endif
using Element = Kernel::T;

template <bool Ranged>
void launch_main(const BackwardTask& p, const driver::Shape& q, const driver::Shape& k, const driver::Shape& v,
                 const driver::Shape& o, emulator::Options options) {
  const int blocks = p.key_tiles * (p.key_value_sum ? p.q_heads : p.kv_heads) * (p.cu_q ? 1 : p.batch);
#ifdef SHAPE
  const auto map = [](const driver::Shape& s, const void* x, int rows) {
    return s.map(static_cast<const Element*>(x), rows);
  };
  const Sm90BackwardMaps maps{map(q, p.query, Kernel::kRows),
                              map(k, p.key, Kernel::kKeys),
                              map(v, p.value, Kernel::kKeys),
                              map(o, p.grad_out, Kernel::kRows),
                              map(q, p.query, 8),
                              map(k, p.key, 8),
                              map(v, p.value, 8),
                              map(o, p.grad_out, 8),
                              map(q, p.query, 1),
                              map(k, p.key, 1),
                              map(v, p.value, 1),
                              map(o, p.grad_out, 1)};
#ifdef OPTIONS
  const Scores& m = p.scores;
  const int64_t item = single_batch_stride(m, m.mask_batch);
  Sm90OptionsBackwardMaps all{maps, {}, mask_in_tiles(p), item != 0};
  if (all.mask_tiles) {
    const auto u = [](int64_t x) { return static_cast<uint32_t>(x); };
    const auto bytes = [](int64_t x) { return static_cast<uint64_t>(x ? 2 * x : 16); };
    all.mask = {static_cast<const unsigned char*>(m.mask),
                4,
                2,
                {u(p.kv_len), u(m.mask_head ? p.q_heads : 1), u(p.q_len), u(item ? p.batch : 1), 0},
                {64, 1, u(Kernel::kRows), 1, 0},
                {2, bytes(m.mask_head), bytes(m.mask_row), bytes(item), 0},
                true};
  }
  emulator::launch(sm90_options_backward<Kernel>, dim3(blocks), dim3(Kernel::kThreads), Kernel::kSmemBytes, options,
                   all, p);
#else
  emulator::launch(sm90_backward<Kernel, Ranged>, dim3(blocks), dim3(Kernel::kThreads), Kernel::kSmemBytes, options,
                   maps, p);
#endif
#else
  (void)q, (void)k, (void)v, (void)o;
  emulator::launch(sm80_backward<Kernel, Ranged>, dim3(blocks), dim3(Kernel::kThreads), Kernel::kSmemBytes, options, p);
#endif
}

#ifdef OPTIONS
// The gradients of sinks and slopes [batch, q_heads] and of a floating mask of mask_count elements, which a Hopper
// kernel may have written to `own`.
void options_gradients(BackwardTask p, const driver::Arguments& a, const emulator::Buffer<Element>& own) {
  p.sinks_per_item = p.slopes_per_item = a["per_item"];
  const auto per_head = [&](auto kernel, const char* name, float*& to) {
    if (!a[name]) return;
    emulator::Buffer<float> grad(static_cast<size_t>(a["per_item"] ? p.batch : 1) * p.q_heads, name);
    to = grad.data;
    emulator::launch(kernel, dim3(static_cast<unsigned>(grad.size)), dim3(kPassThreads), kHeadsBytes, a.options(), p);
    driver::write(grad);
  };
  per_head(backward_per_head<true, float>, "sinks", p.grad_sinks);
  per_head(backward_per_head<false, float>, "slopes", p.grad_slopes);
  if (a["mask"] < 2) return;
  using Gradient = Sm80MaskGradient<Element, Kernel::kD>;
  emulator::Buffer<float> grad(static_cast<size_t>(a["mask_count"]), "grad_mask");
#ifdef SHAPE
  if (p.mask_gradient.own) {
    for (size_t i = 0; i < grad.size; i++) grad.data[i] = ptx::to_float(own.data[i]);
    return driver::write(grad);
  }
#endif
  (void)own;
  p.mask_gradient.sum = grad.data;
  emulator::launch(mask_gradient<Gradient, float>, dim3(static_cast<unsigned>(mask_gradient_blocks<Gradient>(p))),
                   dim3(Gradient::kThreads), Gradient::kSmemBytes, a.options(), p);
  driver::write(grad);
}
#endif

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const bool rows_first = a["rows_first"];
    const driver::Shape q{a["packed"] ? 1 : a["batch"], a["q_heads"], a["q_len"], a["head_dim"], rows_first};
    const driver::Shape k{q.batch, a["kv_heads"], a["kv_len"], q.dim, rows_first};
    const driver::Shape v{q.batch, k.heads, k.length, a["v_head_dim"], rows_first};
    const driver::Shape o{q.batch, q.heads, q.length, v.dim, rows_first};
    const auto input = [](const driver::Shape& s, const char* name) {
      return std::make_unique<emulator::Buffer<Element>>(driver::read<Element>(s.size()), name);
    };
    const auto query = input(q, "query"), key = input(k, "key"), value = input(v, "value");
    const auto out = input(o, "out"), grad_out = input(o, "grad_out");
    const size_t stats = o.size() / o.dim, pairs = static_cast<size_t>(q.batch) * q.heads;
    emulator::Buffer<float> lse(driver::read<float>(stats), "lse"), grad_lse(driver::read<float>(stats), "grad_lse");
    emulator::Buffer<Element> grad_query(q.size(), "grad_query"), grad_key(k.size(), "grad_key");
    emulator::Buffer<Element> grad_value(v.size(), "grad_value");

    const bool deterministic = a["deterministic"];
    BackwardTask p{};
    const driver::Lengths lengths(p, a);
    p.query = query->data, p.key = key->data, p.value = value->data, p.out = out->data, p.grad_out = grad_out->data;
    p.lse = lse.data, p.grad_lse = grad_lse.data;
    p.grad_query = grad_query.data, p.grad_key = grad_key.data, p.grad_value = grad_value.data;
    p.query_strides = p.grad_query_strides = q.strides<Strides>();
    p.key_strides = p.grad_key_strides = k.strides<Strides>();
    p.value_strides = p.grad_value_strides = v.strides<Strides>();
    p.out_strides = p.grad_out_strides = o.strides<Strides>();
    p.batch = a["batch"], p.q_heads = q.heads, p.kv_heads = k.heads, p.group = q.heads / k.heads;
    p.head_dim = q.dim, p.v_head_dim = v.dim;
    const driver::Options<Element> given(p, a);
    p.tile_rows = Kernel::kRows, p.tile_keys = Kernel::kKeys;
    p.rows = p.cu_q ? (q.length / Kernel::kRows + p.batch) * Kernel::kRows
                    : (q.length + Kernel::kRows - 1) / Kernel::kRows * Kernel::kRows;
    p.key_tiles = p.cu_q ? k.length / Kernel::kKeys + p.batch : (k.length + Kernel::kKeys - 1) / Kernel::kKeys;
    const size_t rows = pairs * p.rows, tile = static_cast<size_t>(Kernel::kKeys) * Kernel::kD;
    emulator::Buffer<float> lse2(rows, "lse2"), delta(rows, "delta"), query_sum(rows * Kernel::kD, "query_sum");
    emulator::Buffer<int> turn(std::vector<int>(2 * rows / Kernel::kRows, 0), "turn");
    const std::vector<float> zeros(2 * tile * p.key_tiles * k.batch * k.heads, 0.f);
    emulator::Buffer<float> key_value_sum(zeros, "key_value_sum");
    p.lse2 = lse2.data, p.delta = delta.data, p.query_sum = query_sum.data, p.turn = turn.data;
#ifdef SHAPE
    if (p.group > 1 && !deterministic && !p.cu_q) p.key_value_sum = key_value_sum.data;
    emulator::Buffer<uint32_t> query_blocks(pairs, "query_blocks");
    if (a["finish"]) p.query_blocks = query_blocks.data;
#endif
    emulator::Buffer<float> slope_sum(std::vector<float>(static_cast<size_t>(p.key_tiles) * pairs, 0.f), "slope_sum");
    if (a["slopes"]) p.slope_sum = slope_sum.data;
#ifdef OPTIONS
    p.mask_gradient = {nullptr,
                       {a["mask_batch"]},
                       a["mask_head"],
                       a["mask_row"],
                       a["mask_col"],
                       a["mask_batch"] ? p.batch : 1,
                       a["mask_head"] ? p.q_heads : 1,
                       nullptr};
    emulator::Buffer<Element> own(static_cast<size_t>(a["mask"] == 3 ? a["mask_count"] : 1), "own grad_mask");
    if (a["left"] >= 0 || a["right"] >= 0 || a["lengths"]) {  // tiles that no row sees are not written
      memset(static_cast<void*>(own.data), 0, own.size * sizeof(Element));
      emulator::mark_initialised(own.data, own.size * sizeof(Element));
    }
#ifdef SHAPE
    if (a["mask"] == 3 && writes_mask_gradient(p, own.data)) p.mask_gradient.own = own.data;
#endif
#endif
    p.span = a["span"] ? a["span"] : backward_span(p, Kernel::kD, a["ranged"], deterministic);

    const auto options = a.options();
    const auto pass = [&](auto kernel, int64_t length, size_t count) {
      const dim3 grid(static_cast<unsigned>(pass_blocks(length, Kernel::kD, static_cast<int64_t>(count))));
      emulator::launch(kernel, grid, dim3(kPassThreads), 0, options, p);
    };
    pass(backward_prepare<Element, Kernel::kD>, p.rows, pairs);
#ifndef RANGED
    if (!a["ranged"])
      launch_main<false>(p, q, k, v, o, options);
    else
#endif
      launch_main<true>(p, q, k, v, o, options);
    if (!p.query_blocks) pass(backward_query<Kernel>, p.rows, pairs);
#ifdef SHAPE
    if (p.key_value_sum) pass(backward_key_value<Kernel>, p.key_tiles * Kernel::kKeys, 2u * k.batch * k.heads);
#endif
    driver::write(grad_query);
    driver::write(grad_key);
    driver::write(grad_value);
#ifdef SHAPE
#ifdef OPTIONS
    options_gradients(p, a, own);
#endif
#else
    if constexpr (Kernel::kOptions) options_gradients(p, a, own);
#endif
  });
}
