// float32 in planes of halves, as csrc/cuda/inst/fp32/fp16x2_backward.cu launches it: the passes, the products, and
// Fp32Backward for what does not split. -DDIM: 64 or 128; -DALONE: without Fp32Backward, which takes long to compile.
// stdin, stdout: as attention_backward.cpp, then Fp16x2BackwardPlanes::needs_fallback; `cut`: sums are cut off.
#include "backward_task.h"
//
#include "kernels/fp16x2_backward.h"

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    driver::BackwardInputs<float, float> in(a);
    BackwardTask& p = in.p;
    constexpr int kWhole = 4096 / DIM, kTile = Fp16x2Size<DIM>::kRows;
    const size_t pairs = static_cast<size_t>(p.batch) * p.q_heads, kv_pairs = static_cast<size_t>(p.batch) * p.kv_heads;
    p.tile_rows = DIM == 64 ? 32 : 16, p.tile_keys = Kernel::kKeys;  // of Fp32Backward
    p.rows = (p.q_len + kWhole - 1) / kWhole * kWhole, p.key_tiles = (p.kv_len + 63) / 64;
    const size_t rows = pairs * p.rows;
    emulator::Buffer<float> reference(rows, "reference"), inverse(rows, "inverse"), lse2(rows, "lse2");
    emulator::Buffer<float> delta(rows, "delta"), query_sum(rows * DIM, "query_sum");
    emulator::Buffer<int> turn(std::vector<int>(2 * rows / 16, 0), "turn");
    p.reference = reference.data, p.inverse = inverse.data, p.lse2 = lse2.data, p.delta = delta.data,
    p.query_sum = query_sum.data;
    if (a["deterministic"]) p.turn = turn.data;
    p.span = a["span"] ? a["span"] : backward_span(p, DIM, a["ranged"], a["deterministic"]);

    Fp16x2BackwardPlanes w{};
    w.query_tiles = (p.q_len + kTile - 1) / kTile, w.key_tiles = (p.kv_len + kTile - 1) / kTile;
    const size_t query_bytes = pairs * p.q_len * 4 * DIM, key_bytes = kv_pairs * p.kv_len * 4 * DIM;
    emulator::Buffer<unsigned char> query(query_bytes, "query planes"), grad_out(query_bytes, "grad_out planes");
    emulator::Buffer<unsigned char> key(key_bytes, "key planes"), value(key_bytes, "value planes");
    emulator::Buffer<float4> query_scale(pairs * w.query_tiles, "query scales");
    emulator::Buffer<float4> key_scale(kv_pairs * w.key_tiles, "key scales");
    emulator::Buffer<uint32_t> needs_fallback(std::vector<uint32_t>{0}, "needs_fallback");
    w.query = query.data, w.grad_out = grad_out.data, w.key = key.data, w.value = value.data;
    w.query_scale = query_scale.data, w.key_scale = key_scale.data, w.needs_fallback = needs_fallback.data;

    emulator::Options order = a.options();
    order.cut_sums = a["cut"];
    const auto count = static_cast<int64_t>(rows);
    const auto pass = [&](auto kernel, int64_t threads, auto... arguments) {
      const dim3 grid(static_cast<unsigned>((threads + kFp32PassThreads - 1) / kFp32PassThreads));
      emulator::launch(kernel, grid, dim3(kFp32PassThreads), 0, order, p, arguments...);
    };
    pass(fp32_prepare<float>, 32 * count, DIM, count);
    const auto tiles = static_cast<unsigned>(2 * (query_scale.size + key_scale.size));
    emulator::launch(fp16x2_backward_planes<DIM>, dim3(tiles), dim3(Fp16x2Size<DIM>::kThreads),
                     Fp16x2Size<DIM>::kSmemBytes, order, p, w);
    const auto blocks = static_cast<unsigned>(p.key_tiles * kv_pairs);
    emulator::launch(fp16x2_backward<Kernel>, dim3(blocks), dim3(Kernel::kThreads), Kernel::kSmemBytes, order, p, w);
#ifndef ALONE
    using Wide = Fp32BackwardOf<float, DIM>;
    emulator::launch(fp32_backward_fallback<Wide>, dim3(p.turn ? blocks : std::min(blocks, 2u)), dim3(Wide::kThreads),
                     Wide::kSmemBytes, order, p, w.needs_fallback, blocks);
#endif
    pass(fp16x2_query<Kernel>, count * (DIM / 4), static_cast<const uint32_t*>(w.needs_fallback), count);
    in.write_gradients();
    driver::write(needs_fallback);
  });
}
