// Runs one backward kernel with its passes, named by -DKERNEL=... (an Sm80Backward, with -DWIDE an Sm80WideBackward) or
// -DSHAPE=... (an Sm90BackwardShape, of the kernel -DENTRY=...; with -DOPTIONS an Sm90FullBackwardShape). stdin: query,
// key, value, out, grad_out, stats, grad_lse, lengths, options; stdout: grad_query, grad_key, grad_value, and of
// options where there are such: grad_sinks, grad_slopes, grad_mask. -DRANGED: as in attention_forward.cpp.
#include "backward_options.h"
#include "tile_kinds_of.h"
//
#include "kernels/attention_backward.h"

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
  const driver::TileKindsOf<Kernel::kKeys> kinds(p, p.q_heads, Kernel::kRows, options);
  Sm90FullBackwardMaps all{maps, {}, mask_in_tiles(p), item != 0, kinds.kinds};
  if (all.mask_tiles) {
    all.mask = emulator::tensor_map(m.mask, {item, m.mask_head, m.mask_row}, item ? p.batch : 1,
                                    m.mask_head ? p.q_heads : 1, p.q_len, p.kv_len, Kernel::kRows);
  }
  emulator::launch(ENTRY<Kernel>, dim3(blocks), dim3(Kernel::kThreads), Kernel::kSmemBytes, options, all, p);
#else
  emulator::launch(ENTRY<Kernel, Ranged>, dim3(blocks), dim3(Kernel::kThreads), Kernel::kSmemBytes, options, maps, p);
#endif
#elif defined(WIDE)
  (void)q, (void)k, (void)v, (void)o;
  emulator::launch(sm80_wide_backward<Kernel>, dim3(blocks), dim3(Kernel::kThreads), Kernel::kSmemBytes, options, p);
#else
  (void)q, (void)k, (void)v, (void)o;
  emulator::launch(sm80_backward<Kernel, Ranged>, dim3(blocks), dim3(Kernel::kThreads), Kernel::kSmemBytes, options, p);
#endif
}

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    driver::BackwardInputs<Element, float> in(a);
    BackwardTask& p = in.p;
    const driver::Shape &q = in.q, &k = in.k;
    const bool deterministic = a["deterministic"];
    const size_t pairs = static_cast<size_t>(q.batch) * q.heads;
    p.tile_rows = Kernel::kRows, p.tile_keys = Kernel::kKeys;
    p.rows = p.cu_q ? (q.length / Kernel::kRows + p.batch) * Kernel::kRows
                    : (q.length + Kernel::kRows - 1) / Kernel::kRows * Kernel::kRows;
    p.key_tiles = p.cu_q ? k.length / Kernel::kKeys + p.batch : (k.length + Kernel::kKeys - 1) / Kernel::kKeys;
    const size_t rows = pairs * p.rows, tile = static_cast<size_t>(Kernel::kKeys) * Kernel::kD;
    emulator::Buffer<float> reference(rows, "reference"), inverse(rows, "inverse"), lse2(rows, "lse2");
    emulator::Buffer<float> delta(rows, "delta"), query_sum(rows * Kernel::kD, "query_sum");
    emulator::Buffer<int> turn(std::vector<int>(2 * rows / Kernel::kRows, 0), "turn");
    const std::vector<float> zeros(2 * tile * p.key_tiles * k.batch * k.heads, 0.f);
    emulator::Buffer<float> key_value_sum(zeros, "key_value_sum");
    p.reference = reference.data, p.inverse = inverse.data, p.lse2 = lse2.data, p.delta = delta.data,
    p.query_sum = query_sum.data, p.turn = deterministic ? turn.data : nullptr;
#ifdef SHAPE
    if (p.group > 1 && !deterministic && !p.cu_q) p.key_value_sum = key_value_sum.data;
    emulator::Buffer<uint32_t> query_blocks(pairs, "query_blocks");
    if (a["finish"]) p.query_blocks = query_blocks.data;
#endif
    emulator::Buffer<float> slope_sum(std::vector<float>(static_cast<size_t>(p.key_tiles) * pairs, 0.f), "slope_sum");
    if (a["slopes"]) p.slope_sum = slope_sum.data;
#ifdef OPTIONS
    p.mask_gradient = driver::mask_gradient_of(p, a);
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
    const auto pass = [&](auto kernel, int64_t length, size_t count, int columns = Kernel::kD) {
      const dim3 grid(static_cast<unsigned>(pass_blocks(length, columns, static_cast<int64_t>(count))));
      emulator::launch(kernel, grid, dim3(kPassThreads), 0, options, p);
    };
    pass(backward_prepare<Element, Kernel::kD>, p.rows, pairs, 8 * kPrepareThreads<Kernel::kD>);
#ifndef RANGED
    if (!a["ranged"])
      launch_main<false>(p, q, k, in.v, in.o, options);
    else
#endif
      launch_main<true>(p, q, k, in.v, in.o, options);
    if (!p.query_blocks) pass(backward_query<Kernel>, p.rows, pairs);
#ifdef SHAPE
    if (p.key_value_sum) pass(backward_key_value<Kernel>, p.key_tiles * Kernel::kKeys, 2u * k.batch * k.heads);
#endif
    in.write_gradients();
#if defined(OPTIONS) && defined(SHAPE)
    driver::options_gradients<OwnMaskGradient>(p, a);
#elif defined(OPTIONS)
    if constexpr (Kernel::kOptions) driver::options_gradients<OwnMaskGradient>(p, a);
#endif
  });
}
