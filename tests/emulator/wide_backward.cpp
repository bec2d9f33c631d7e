// Runs one WideBackward with its passes, named by -DKERNEL=...; stdin, stdout: as backward.cpp.
#include "driver.h"
//
#include "cuda/kernels/backward_heads.cuh"
#include "cuda/kernels/wide_backward.cuh"
#include "cuda/kernels/wide_mask_gradient.cuh"
#include "cuda/kernels/wide_passes.cuh"

using namespace attnjourney;
using Kernel = KERNEL;
using Real = Kernel::Real;

// The gradients of sinks and slopes [batch, q_heads] and of a floating mask of mask_count elements.
void options_gradients(BackwardTaskOf<Real> p, const driver::Arguments& a) {
  p.sinks_per_item = p.slopes_per_item = a["per_item"];
  const auto per_head = [&](auto kernel, const char* name, Real*& to) {
    if (!a[name]) return;
    emulator::Buffer<Real> grad(static_cast<size_t>(a["per_item"] ? p.batch : 1) * p.q_heads, name);
    to = grad.data;
    emulator::launch(kernel, dim3(static_cast<unsigned>(grad.size)), dim3(kPassThreads), kHeadsBytes, a.options(), p);
    driver::write(grad);
  };
  per_head(backward_per_head<true, Real>, "sinks", p.grad_sinks);
  per_head(backward_per_head<false, Real>, "slopes", p.grad_slopes);
  if (a["mask"] < 2) return;
  using Gradient = WideMaskGradient<Real>;
  emulator::Buffer<Real> grad(static_cast<size_t>(a["mask_count"]), "grad_mask");
  p.mask_gradient = {grad.data,
                     {a["mask_batch"]},
                     a["mask_head"],
                     a["mask_row"],
                     a["mask_col"],
                     a["mask_batch"] ? p.batch : 1,
                     a["mask_head"] ? p.q_heads : 1};
  emulator::launch(mask_gradient<Gradient, Real>, dim3(static_cast<unsigned>(mask_gradient_blocks<Gradient>(p))),
                   dim3(Gradient::kThreads), Gradient::kSmemBytes, a.options(), p);
  driver::write(grad);
}

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const bool rows_first = a["rows_first"];
    const driver::Shape q{a["packed"] ? 1 : a["batch"], a["q_heads"], a["q_len"], a["head_dim"], rows_first};
    const driver::Shape k{q.batch, a["kv_heads"], a["kv_len"], q.dim, rows_first};
    const driver::Shape v{q.batch, k.heads, k.length, a["v_head_dim"], rows_first};
    const driver::Shape o{q.batch, q.heads, q.length, v.dim, rows_first};
    const auto input = [](size_t size, const char* name) {
      return std::make_unique<emulator::Buffer<Real>>(driver::read<Real>(size), name);
    };
    const auto query = input(q.size(), "query"), key = input(k.size(), "key"), value = input(v.size(), "value");
    const auto out = input(o.size(), "out"), grad_out = input(o.size(), "grad_out");
    const size_t stats = o.size() / o.dim, pairs = static_cast<size_t>(q.batch) * q.heads;
    const auto lse = input(stats, "lse"), grad_lse = input(stats, "grad_lse");
    emulator::Buffer<Real> grad_query(q.size(), "grad_query"), grad_key(k.size(), "grad_key");
    emulator::Buffer<Real> grad_value(v.size(), "grad_value");

    BackwardTaskOf<Real> p{};
    const driver::Lengths lengths(p, a);
    p.query = query->data, p.key = key->data, p.value = value->data, p.out = out->data, p.grad_out = grad_out->data;
    p.lse = lse->data, p.grad_lse = grad_lse->data;
    p.grad_query = grad_query.data, p.grad_key = grad_key.data, p.grad_value = grad_value.data;
    p.query_strides = p.grad_query_strides = q.strides<Strides>();
    p.key_strides = p.grad_key_strides = k.strides<Strides>();
    p.value_strides = p.grad_value_strides = v.strides<Strides>();
    p.out_strides = p.grad_out_strides = o.strides<Strides>();
    p.batch = a["batch"], p.q_heads = q.heads, p.kv_heads = k.heads, p.group = q.heads / k.heads;
    p.head_dim = q.dim, p.v_head_dim = v.dim;
    const driver::Options<Real, Real> given(p, a);
    constexpr int kRows = Kernel::kRows, kKeys = Kernel::kKeys;
    p.tile_rows = kRows, p.tile_keys = kKeys;
    p.rows = p.cu_q ? (q.length / kRows + p.batch) * kRows : (q.length + kRows - 1) / kRows * kRows;
    p.key_tiles = p.cu_q ? k.length / kKeys + p.batch : (k.length + kKeys - 1) / kKeys;
    const size_t rows = pairs * p.rows;
    emulator::Buffer<Real> lse2(rows, "lse2"), delta(rows, "delta"), query_sum(rows * Kernel::kD, "query_sum");
    emulator::Buffer<int> turn(std::vector<int>(2 * rows / kRows, 0), "turn");
    emulator::Buffer<Real> slope_sum(std::vector<Real>(static_cast<size_t>(p.key_tiles) * pairs, 0), "slope_sum");
    p.lse2 = lse2.data, p.delta = delta.data, p.query_sum = query_sum.data;
    if (a["deterministic"]) p.turn = turn.data;
    if (a["slopes"]) p.slope_sum = slope_sum.data;
    p.span = a["span"] ? a["span"] : backward_span(p, Kernel::kD, a["ranged"], a["deterministic"]);

    const auto count = static_cast<int64_t>(rows);
    const auto pass = [&](auto kernel, int64_t threads) {
      const dim3 grid(static_cast<unsigned>((threads + kWidePassThreads - 1) / kWidePassThreads));
      emulator::launch(kernel, grid, dim3(kWidePassThreads), 0, a.options(), p, Kernel::kD, count);
    };
    pass(wide_prepare<Real>, 32 * count);
    emulator::launch(wide_backward<Kernel>, dim3(p.key_tiles * p.kv_heads * (p.cu_q ? 1 : p.batch)),
                     dim3(Kernel::kThreads), Kernel::kSmemBytes, a.options(), p);
    pass(wide_query<Real>, count * (Kernel::kD / kWide<Real>));
    driver::write(grad_query);
    driver::write(grad_key);
    driver::write(grad_value);
    options_gradients(p, a);
  });
}
