// What the programs that run a backward kernel share: the task, its inputs from stdin and its gradients.
#pragma once
#include "emulator/machine/driver.h"
//
#include "cuda/kernels/common/backward_task.cuh"

namespace driver {

// stdin: query, key, value, out, grad_out, stats, grad_lse, lengths, options
template <class Element, class Real, class Task = attnjourney::BackwardTaskOf<Real>>
struct BackwardInputs {
  Shape q, k, v, o;
  emulator::Buffer<Element> query, key, value, out, grad_out;
  emulator::Buffer<attnjourney::RowStats<Real>> stats;
  emulator::Buffer<Real> grad_lse;
  emulator::Buffer<Element> grad_query, grad_key, grad_value;
  Task p{};
  Lengths lengths;
  Options<Element, Real> given;
  explicit BackwardInputs(const Arguments& a)
      : q{a["packed"] ? 1 : a["batch"], a["q_heads"], a["q_len"], a["head_dim"], a["rows_first"] != 0},
        k{q.batch, a["kv_heads"], a["kv_len"], q.dim, q.rows_first},
        v{q.batch, k.heads, k.length, a["v_head_dim"], q.rows_first},
        o{q.batch, q.heads, q.length, v.dim, q.rows_first},
        query(read<Element>(q.size()), "query"),
        key(read<Element>(k.size()), "key"),
        value(read<Element>(v.size()), "value"),
        out(read<Element>(o.size()), "out"),
        grad_out(read<Element>(o.size()), "grad_out"),
        stats(read<attnjourney::RowStats<Real>>(o.size() / o.dim), "stats"),
        grad_lse(read<Real>(o.size() / o.dim), "grad_lse"),
        grad_query(q.size(), "grad_query"),
        grad_key(k.size(), "grad_key"),
        grad_value(v.size(), "grad_value"),
        lengths(p, a),
        given((describe(a), p), a) {}
  void write_gradients() const {
    write(grad_query);
    write(grad_key);
    write(grad_value);
  }

 private:
  void describe(const Arguments& a) {
    using attnjourney::Strides;
    p.query = query.data, p.key = key.data, p.value = value.data, p.out = out.data, p.grad_out = grad_out.data;
    p.stats = stats.data, p.grad_lse = grad_lse.data;
    p.grad_query = grad_query.data, p.grad_key = grad_key.data, p.grad_value = grad_value.data;
    p.query_strides = p.grad_query_strides = q.template strides<Strides>();
    p.key_strides = p.grad_key_strides = k.template strides<Strides>();
    p.value_strides = p.grad_value_strides = v.template strides<Strides>();
    p.out_strides = p.grad_out_strides = o.template strides<Strides>();
    p.batch = a["batch"], p.q_heads = q.heads, p.kv_heads = k.heads, p.group = q.heads / k.heads;
    p.head_dim = q.dim, p.v_head_dim = v.dim;
  }
};

}  // namespace driver
