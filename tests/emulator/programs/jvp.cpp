// Runs one kernel for the derivative in a direction, named by -DKERNEL=... (an Sm80Jvp, with -DFP32 an Fp32Jvp).
// stdin: query, key, value, out, stats, lengths, options as forward_call.h, then the directions that there are: bits of
// `moving`, of query, key, value [.., the other layout], mask [.., keys, rows], sinks and slopes. stdout: the changes
// of out and lse.
#include "emulator/machine/driver.h"
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

namespace {

template <class X>
using Held = std::unique_ptr<emulator::Buffer<X>>;
template <class X>
Held<X> held(size_t count, const char* name) {
  return std::make_unique<emulator::Buffer<X>>(driver::read<X>(count), name);
}

}  // namespace

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    using driver::Shape;
    const Shape q{a["packed"] ? 1 : a["batch"], a["q_heads"], a["q_len"], a["head_dim"], a["rows_first"] != 0};
    const Shape k{q.batch, a["kv_heads"], a["kv_len"], q.dim, q.rows_first};
    const Shape v{q.batch, k.heads, k.length, a["v_head_dim"], q.rows_first};
    const Shape o{q.batch, q.heads, q.length, v.dim, q.rows_first};
    const auto turned = [](Shape s) {
      s.rows_first = !s.rows_first;
      return s;
    };
    const auto query = held<T>(q.size(), "query"), key = held<T>(k.size(), "key"), value = held<T>(v.size(), "value");
    const auto out = held<T>(o.size(), "out");
    const auto stats = held<RowStats<Real>>(o.size() / o.dim, "stats");
    Task p{};
    const driver::Lengths lengths(p, a);
    p.query = query->data, p.key = key->data, p.value = value->data, p.out = out->data, p.stats = stats->data;
    p.query_strides = q.strides<Strides>(), p.key_strides = k.strides<Strides>();
    p.value_strides = v.strides<Strides>(), p.out_strides = o.strides<Strides>();
    p.batch = a["batch"], p.q_heads = q.heads, p.group = q.heads / k.heads, p.head_dim = q.dim, p.v_head_dim = v.dim;
    const driver::Options<T, Real> options(p, a);

    const int moving = a["moving"];
    std::vector<Held<T>> rows;
    const auto direction = [&](int bit, const Shape& s, const char* name, const void*& data, Strides& strides) {
      if (!(moving & bit)) return;
      rows.push_back(held<T>(s.size(), name));
      data = rows.back()->data, strides = turned(s).strides<Strides>();
    };
    direction(1, q, "query_tangent", p.query_tangent, p.query_tangent_strides);
    direction(2, k, "key_tangent", p.key_tangent, p.key_tangent_strides);
    direction(4, v, "value_tangent", p.value_tangent, p.value_tangent_strides);
    Held<float> mask_fp32;
    Held<T> mask_same;
    if (moving & 8) {
      const size_t count = static_cast<size_t>(a["mask_count"]);
      if (a["mask"] == 2)
        mask_fp32 = held<float>(count, "mask_tangent"), p.mask_tangent = mask_fp32->data;
      else
        mask_same = held<T>(count, "mask_tangent"), p.mask_tangent = mask_same->data;
      p.mask_tangent_batch[0] = a["mask_batch"], p.mask_tangent_head = a["mask_head"];
      p.mask_tangent_row = a["mask_row"] ? 1 : 0;
      p.mask_tangent_col = a["mask_col"] ? (a["mask_row"] ? p.q_len : 1) : 0;
    }
    const size_t heads = static_cast<size_t>(p.batch) * p.q_heads;
    Held<Real> sinks, slopes;
    if (moving & 16) sinks = held<Real>(heads, "sinks_tangent"), p.sinks_tangent = sinks->data;
    if (moving & 32) slopes = held<Real>(heads, "slopes_tangent"), p.slopes_tangent = slopes->data;

    const emulator::Buffer<T> out_tangent(o.size(), "out_tangent");
    const emulator::Buffer<Real> lse_tangent(o.size() / o.dim, "lse_tangent");
    p.out_tangent = out_tangent.data, p.lse_tangent = lse_tangent.data;
    p.out_tangent_strides = turned(o).strides<Strides>();
    plan_forward(p, Kernel::kRows, sizeof(T));
    emulator::launch(ENTRY<Kernel>, dim3(p.total), dim3(Kernel::kThreads), Kernel::kSmemBytes, a.options(), p);
    driver::write(out_tangent);
    driver::write(lse_tangent);
  });
}
