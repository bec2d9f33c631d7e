// Runs one WideForward, named by -DKERNEL=...; stdin, stdout: as forward.cpp.
#include "driver.h"
//
#include "cuda/kernels/wide_forward.cuh"

using namespace attnjourney;
using Kernel = KERNEL;
using Real = Kernel::Real;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const bool rows_first = a["rows_first"];
    const driver::Shape q{a["packed"] ? 1 : a["batch"], a["q_heads"], a["q_len"], a["head_dim"], rows_first};
    const driver::Shape k{q.batch, a["kv_heads"], a["kv_len"], q.dim, rows_first};
    const driver::Shape v{q.batch, k.heads, k.length, a["v_head_dim"], rows_first};
    const driver::Shape o{q.batch, q.heads, q.length, v.dim, rows_first};
    emulator::Buffer<Real> query(driver::read<Real>(q.size()), "query"), key(driver::read<Real>(k.size()), "key");
    emulator::Buffer<Real> value(driver::read<Real>(v.size()), "value"), out(o.size(), "out");
    emulator::Buffer<Real> lse(o.size() / o.dim, "lse");
    ForwardTaskOf<Real> p{};
    const driver::Lengths lengths(p, a);
    p.query = query.data, p.key = key.data, p.value = value.data, p.out = out.data, p.lse = lse.data;
    p.query_strides = q.strides<Strides>(), p.key_strides = k.strides<Strides>();
    p.value_strides = v.strides<Strides>(), p.out_strides = o.strides<Strides>();
    p.batch = a["batch"], p.q_heads = q.heads, p.group = q.heads / k.heads;
    p.head_dim = q.dim, p.v_head_dim = v.dim;
    const driver::Options<Real, Real> options(p, a);
    plan_forward(p, Kernel::kRows, sizeof(Real));
    if (a["section"]) p.section = a["section"];
    emulator::launch(wide_forward<Kernel>, dim3(p.total), dim3(Kernel::kThreads), Kernel::kSmemBytes, a.options(), p);
    driver::write(out);
    driver::write(lse);
  });
}
