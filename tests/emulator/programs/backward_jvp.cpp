// Runs the kernels for the derivative of the backward in a direction, of -DMATH=... (an Sm80BackwardJvpMath or an
// Fp32BackwardJvpMath). stdin: query, key, value, out, grad_out, stats, grad_lse, lengths, options, then the directions
// of jvp.cpp, with bits for grad_out [.., the other layout] and grad_lse, and those of out [.., the other layout] and
// lse. stdout: the gradients as of attention_backward.cpp.
#include "backward_options.h"
#include "directions.h"
//
#include "kernels/backward_jvp.h"

using namespace attnjourney;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    driver::BackwardInputs<T, Real, BackwardJvpTaskOf<Real>> in(a);
    BackwardJvpTaskOf<Real>& p = in.p;
    driver::Directions<T, Real> directions(p, a, in.q, in.k, in.v);
    directions.rows(64, in.o, "grad_out_tangent", p.grad_out_tangent, p.grad_out_tangent_strides);
    driver::Held<Real> grad_lse;
    const size_t stats = in.o.size() / static_cast<size_t>(in.o.dim);
    if (a["moving"] & 128)
      grad_lse = driver::held<Real>(stats, "grad_lse_tangent"), p.grad_lse_tangent = grad_lse->data;
    directions.rows(~0, in.o, "out_tangent", p.out_tangent, p.out_tangent_strides);
    const auto lse = driver::held<Real>(stats, "lse_tangent");
    p.lse_tangent = lse->data;

    const size_t pairs = static_cast<size_t>(in.q.batch) * p.q_heads;
    p.tile_rows = 1, p.rows = p.cu_q ? p.q_len + p.batch : p.q_len;
    p.key_tiles = p.cu_q ? p.q_len / Kernel::kOwn + p.batch : (p.q_len + Kernel::kOwn - 1) / Kernel::kOwn;
    const size_t rows = pairs * p.rows;
    const emulator::Buffer<RowChange<Real>> changes(rows, "changes");
    const emulator::Buffer<Real> reference(rows, "reference"), inverse(rows, "inverse"), delta(rows, "delta");
    const emulator::Buffer<Real> slope_sum(std::vector<Real>(static_cast<size_t>(p.key_tiles) * p.q_heads * in.q.batch),
                                           "slope_sum");
    p.changes = changes.data;
    if (a["sinks"]) p.reference = reference.data, p.inverse = inverse.data, p.delta = delta.data;
    if (a["slopes"]) p.slope_sum = slope_sum.data;

    const auto count = static_cast<int64_t>(rows);
    emulator::launch(backward_jvp_prepare<T, Real>,
                     dim3(static_cast<unsigned>((count + kChangePassRows - 1) / kChangePassRows)),
                     dim3(kChangePassThreads), 0, a.options(), p, count);
    plan_operands(p);
    for (const Gradient gradient : {Gradient::query, Gradient::key, Gradient::value}) {
      plan_gradient(p, gradient, Kernel::kColumns, Math::kSumSlices);
      emulator::launch(backward_jvp<Kernel>,
                       dim3(static_cast<unsigned>(p.column_blocks * OwnTile::count(p, p.by_keys(), Kernel::kOwn))),
                       dim3(Kernel::kThreads), Kernel::smem_bytes(p.own_places), a.options(), p);
    }
    in.write_gradients();
    driver::head_gradients(by_queries(p), a);
    plan_gradient(p, Gradient::query, Kernel::kColumns, Math::kSumSlices);
    driver::mask_gradient_by(backward_jvp_mask<MaskKernel>, MaskKernel{}, p, a);
  });
}
