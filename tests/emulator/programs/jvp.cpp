// Runs one kernel for the derivative in a direction, named by -DKERNEL=... (an Sm80Jvp, with -DFP32 an Fp32Jvp).
// stdin: query, key, value, out, stats, lengths, options as forward_call.h, then the directions that there are: bits of
// `moving`, of query, key, value [.., the other layout], mask [.., keys, rows], sinks and slopes. stdout: the changes
// of out and lse.
#include "directions.h"
//
#include "kernels/jvp.h"

using namespace attnjourney;
using Kernel = KERNEL;
using T = Kernel::T;
using Task = decltype([] {
  if constexpr (sizeof(T) == 8)
    return JvpTaskOf<double>{};
  else
    return JvpTask{};
}());
using Real = std::remove_pointer_t<decltype(Task::lse)>;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    using driver::Shape;
    const Shape q{a["packed"] ? 1 : a["batch"], a["q_heads"], a["q_len"], a["head_dim"], a["rows_first"] != 0};
    const Shape k{q.batch, a["kv_heads"], a["kv_len"], q.dim, q.rows_first};
    const Shape v{q.batch, k.heads, k.length, a["v_head_dim"], q.rows_first};
    const Shape o{q.batch, q.heads, q.length, v.dim, q.rows_first};
    const auto query = driver::held<T>(q.size(), "query"), key = driver::held<T>(k.size(), "key"),
               value = driver::held<T>(v.size(), "value");
    const auto out = driver::held<T>(o.size(), "out");
    const auto stats = driver::held<RowStats<Real>>(o.size() / o.dim, "stats");
    Task p{};
    const driver::Lengths lengths(p, a);
    p.query = query->data, p.key = key->data, p.value = value->data, p.out = out->data, p.stats = stats->data;
    p.query_strides = q.strides<Strides>(), p.key_strides = k.strides<Strides>();
    p.value_strides = v.strides<Strides>(), p.out_strides = o.strides<Strides>();
    p.batch = a["batch"], p.q_heads = q.heads, p.group = q.heads / k.heads, p.head_dim = q.dim, p.v_head_dim = v.dim;
    const driver::Options<T, Real> options(p, a);

    const driver::Directions<T, Real> directions(p, a, q, k, v);

    const emulator::Buffer<T> out_tangent(o.size(), "out_tangent");
    const emulator::Buffer<Real> lse_tangent(o.size() / o.dim, "lse_tangent");
    p.out_tangent = out_tangent.data, p.lse_tangent = lse_tangent.data;
    p.out_tangent_strides = driver::turned(o).strides<Strides>();
    plan_forward(p, Kernel::kRows, sizeof(T));
    emulator::launch(ENTRY<Kernel>, dim3(p.total), dim3(Kernel::kThreads), Kernel::kSmemBytes, a.options(), p);
    driver::write(out_tangent);
    driver::write(lse_tangent);
  });
}
