// From a checked call to the parameters of every kernel.
#pragma once
#include "core/constants.h"
#include "cuda/layout.h"
#include "options.h"
#include "sequences.h"

namespace attnjourney {

// whether a kernel has to look at which keys a row sees
inline bool is_ranged(const AttentionCall& c) {
  const AttentionOptions& o = c.args.options;
  return c.params.keys.bounded() || o.query_lengths || o.key_lengths;
}

// whether no row sees a key, nor a sink in its place
inline bool sees_nothing(const AttentionCall& c) {
  return c.batch * c.q_heads * c.params.q_len == 0 || (c.params.kv_len == 0 && !c.args.options.sinks);
}

template <class Task>
void describe(Task& p, const AttentionCall& c, const Indices& indices, const View& q, const View& k, const View& v) {
  p.query = q.data(), p.key = k.data(), p.value = v.data();
  p.query_strides = q.strides, p.key_strides = k.strides, p.value_strides = v.strides;
  p.batch = static_cast<int>(c.batch), p.q_heads = static_cast<int>(c.q_heads);
  p.group = static_cast<int>(c.params.group);
  describe_sequences(p, c, indices);
  const int64_t chunk = chunk_of(q.tensor);
  p.head_dim = static_cast<int>(chunks(c.params.head_dim, chunk));
  p.v_head_dim = static_cast<int>(chunks(c.params.v_head_dim, chunk));
  if (c.packed) p.query_strides.batch = p.key_strides.batch = p.value_strides.batch = 0;
  p.score_scale = static_cast<decltype(p.score_scale)>(c.params.scale * score_unit(c).scores);
}

}  // namespace attnjourney
