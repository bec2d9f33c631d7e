// Runs one forward kernel, named by -DKERNEL=... (with SM90: a Sm90ForwardShape but for kRanged, as SHAPE(ranged)).
// stdin: query, key, value, lengths, options; stdout: out, lse. -DRANGED: the kernel that looks at ranges alone.
#include "driver.h"
#ifdef SHAPE
#include "cuda/kernels/sm90_forward.cuh"
#else
#include "cuda/kernels/sm80_forward.cuh"
#endif

using namespace attnjourney;

#ifdef SHAPE
template <bool Ranged>
void launch(ForwardTask p, const driver::Shape& q, const driver::Shape& k, const driver::Shape& v,
            const driver::Shape& out, const driver::Arguments& a) {
  using S = SHAPE(Ranged);
  using T = typename S::T;
  emulator::Buffer<uint32_t> counter(std::vector<uint32_t>{0, 0}, "counter");
  plan_forward(p, S::kRows);
  if (a["section"]) p.section = a["section"];
  p.counter = a["counter"] ? counter.data : nullptr;
  const Sm90ForwardMaps maps{
      q.map(static_cast<const T*>(p.query), 64),       k.map(static_cast<const T*>(p.key), S::kKeys),
      v.map(static_cast<const T*>(p.value), S::kKeys), out.map(static_cast<const T*>(p.out), 16),
      v.map(static_cast<const T*>(p.value), 8),        v.map(static_cast<const T*>(p.value), 1)};
  emulator::launch(sm90_forward<S>, dim3(std::min(a["grid"], p.total)), dim3(S::kThreads), S::kSmemBytes, a.options(),
                   maps, p);
  if (counter.data[0] || counter.data[1]) throw emulator::Error("the tile counter was not left at zero");
}
using Element = SHAPE(false)::T;
#else
template <bool Ranged>
void launch(ForwardTask p, const driver::Shape&, const driver::Shape&, const driver::Shape&, const driver::Shape&,
            const driver::Arguments& a) {
  plan_forward(p, KERNEL::kRows);
  if (a["section"]) p.section = a["section"];
  emulator::launch(sm80_forward<KERNEL, Ranged>, dim3(p.total), dim3(KERNEL::kThreads), KERNEL::kSmemBytes, a.options(),
                   p);
}
using Element = KERNEL::T;
#endif

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const bool rows_first = a["rows_first"];
    const driver::Shape q{a["packed"] ? 1 : a["batch"], a["q_heads"], a["q_len"], a["head_dim"], rows_first};
    const driver::Shape k{q.batch, a["kv_heads"], a["kv_len"], q.dim, rows_first};
    const driver::Shape v{q.batch, k.heads, k.length, a["v_head_dim"], rows_first};
    const driver::Shape o{q.batch, q.heads, q.length, v.dim, rows_first};
    emulator::Buffer<Element> query(driver::read<Element>(q.size()), "query"),
        key(driver::read<Element>(k.size()), "key");
    emulator::Buffer<Element> value(driver::read<Element>(v.size()), "value"), out(o.size(), "out");
    emulator::Buffer<float> lse(o.size() / o.dim, "lse");
    ForwardTask p{};
    const driver::Lengths lengths(p, a);
    p.query = query.data, p.key = key.data, p.value = value.data, p.out = out.data, p.lse = lse.data;
    p.query_strides = q.strides<Strides>(), p.key_strides = k.strides<Strides>();
    p.value_strides = v.strides<Strides>(), p.out_strides = o.strides<Strides>();
    p.batch = a["batch"], p.q_heads = q.heads, p.group = q.heads / k.heads;
    p.head_dim = q.dim, p.v_head_dim = v.dim;
    const driver::Options<Element> options(p, a);
#ifndef RANGED
    if (!a["ranged"])
      launch<false>(p, q, k, v, o, a);
    else
#endif
      launch<true>(p, q, k, v, o, a);
    driver::write(out);
    driver::write(lse);
  });
}
