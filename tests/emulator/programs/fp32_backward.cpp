// Runs one Fp32Backward with its passes, named by -DKERNEL=...; stdin, stdout: as attention_backward.cpp.
#include "backward_options.h"
//
#include "kernels/fp32_backward.h"

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    driver::BackwardInputs<Real, Real> in(a);
    BackwardTaskOf<Real>& p = in.p;
    constexpr int kRows = Kernel::kRows, kKeys = Kernel::kKeys;
    const size_t pairs = static_cast<size_t>(in.q.batch) * p.q_heads;
    p.tile_rows = kRows, p.tile_keys = kKeys;
    p.rows = p.cu_q ? (p.q_len / kRows + p.batch) * kRows : (p.q_len + kRows - 1) / kRows * kRows;
    p.key_tiles = p.cu_q ? p.kv_len / kKeys + p.batch : (p.kv_len + kKeys - 1) / kKeys;
    const size_t rows = pairs * p.rows;
    emulator::Buffer<Real> reference(rows, "reference"), inverse(rows, "inverse"), lse2(rows, "lse2");
    emulator::Buffer<Real> delta(rows, "delta"), query_sum(rows * Kernel::kD, "query_sum");
    emulator::Buffer<int> turn(std::vector<int>(2 * rows / kRows, 0), "turn");
    emulator::Buffer<Real> slope_sum(std::vector<Real>(static_cast<size_t>(p.key_tiles) * pairs, 0), "slope_sum");
    p.reference = reference.data, p.inverse = inverse.data, p.lse2 = lse2.data, p.delta = delta.data,
    p.query_sum = query_sum.data;
    if (a["deterministic"]) p.turn = turn.data;
    if (a["slopes"]) p.slope_sum = slope_sum.data;
    p.span = a["span"] ? a["span"] : backward_span(p, Kernel::kD, a["ranged"], a["deterministic"]);

    const auto count = static_cast<int64_t>(rows);
    const auto pass = [&](auto kernel, int64_t threads) {
      const dim3 grid(static_cast<unsigned>((threads + kFp32PassThreads - 1) / kFp32PassThreads));
      emulator::launch(kernel, grid, dim3(kFp32PassThreads), 0, a.options(), p, Kernel::kD, count);
    };
    pass(fp32_prepare<Real>, 32 * count);
    emulator::launch(fp32_backward<Kernel>, dim3(p.key_tiles * p.kv_heads * (p.cu_q ? 1 : p.batch)),
                     dim3(Kernel::kThreads), Kernel::kSmemBytes, a.options(), p);
    pass(fp32_query<Real>, count * (Kernel::kD / kFp32Lanes<Real>));
    in.write_gradients();
    driver::options_gradients<Fp32MaskGradient<Real>>(p, a);
  });
}
