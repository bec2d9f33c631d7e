// A call of a forward kernel as the programs read it. stdin: query, key, value, lengths, options; stdout: out, lse,
// stats.
#pragma once
#include "emulator/machine/driver.h"
//
#include "cuda/kernels/common/forward_task.cuh"

namespace driver {

template <class Element, class Task>
struct ForwardCall {
  using Real = std::remove_pointer_t<decltype(Task::lse)>;
  const Shape q, k, v, o;
  emulator::Buffer<Element> query, key, value, out;
  emulator::Buffer<Real> lse;
  emulator::Buffer<attnjourney::RowStats<Real>> stats;
  emulator::Buffer<uint32_t> counter;
  Task p{};
  std::unique_ptr<Lengths> lengths;
  std::unique_ptr<Options<Element, Real>> options;

  explicit ForwardCall(const Arguments& a)
      : q{a["packed"] ? 1 : a["batch"], a["q_heads"], a["q_len"], a["head_dim"], a["rows_first"] != 0},
        k{q.batch, a["kv_heads"], a["kv_len"], q.dim, q.rows_first},
        v{q.batch, k.heads, k.length, a["v_head_dim"], q.rows_first},
        o{q.batch, q.heads, q.length, v.dim, q.rows_first},
        query(read<Element>(q.size()), "query"),
        key(read<Element>(k.size()), "key"),
        value(read<Element>(v.size()), "value"),
        out(o.size(), "out"),
        lse(o.size() / o.dim, "lse"),
        stats(lse.size, "stats"),
        counter(std::vector<uint32_t>{0, 0}, "counter") {
    lengths = std::make_unique<Lengths>(p, a);
    p.query = query.data, p.key = key.data, p.value = value.data, p.out = out.data, p.lse = lse.data;
    p.stats = stats.data;
    p.query_strides = q.strides<decltype(p.query_strides)>(), p.key_strides = k.strides<decltype(p.key_strides)>();
    p.value_strides = v.strides<decltype(p.value_strides)>(), p.out_strides = o.strides<decltype(p.out_strides)>();
    p.batch = a["batch"], p.q_heads = q.heads, p.group = q.heads / k.heads;
    p.head_dim = q.dim, p.v_head_dim = v.dim;
    options = std::make_unique<Options<Element, Real>>(p, a);
    if (a["counter"]) p.counter = counter.data;
  }
  // the kernel's tiles of rows; element: bytes of one
  void plan(const Arguments& a, int rows, int element = sizeof(Element)) {
    plan_forward(p, rows, element);
    if (a["section"]) p.section = a["section"];
  }
  // T: what the tensors hold as TMA takes them; keys: of a tile
  template <class Maps, class T>
  Maps maps(int keys) const {
    const auto at = [](const void* data) { return static_cast<const T*>(data); };
    return {q.map(at(p.query), 64), k.map(at(p.key), keys), v.map(at(p.value), keys),
            o.map(at(p.out), 16),   v.map(at(p.value), 8),  v.map(at(p.value), 1)};
  }
  void finish() const {
    if (counter.data[0] || counter.data[1]) throw emulator::Error("the tile counter was not left at zero");
    write(out);
    write(lse);
    write(stats);
  }
};

}  // namespace driver
