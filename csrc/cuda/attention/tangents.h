// Directions of derivatives as the kernels take them: with strides of their own.
#pragma once
#include "attention/attention.h"
#include "cuda/layout.h"
#include "per_head.h"

namespace attnjourney {

// Tensors that the kernels read: they live as long as this.
template <class Real>
class TangentInputs {
 public:
  TangentInputs(const AttentionCall& c, const AttentionTangents& t) : packed_(c.packed), mask_(t.attn_mask) {
    const auto view = [&](const OptionalTensor& x, int64_t heads) {
      return x ? std::optional<View>(view_of(c, *x, heads)) : std::nullopt;
    };
    query_ = view(t.query, c.q_heads), key_ = view(t.key, c.kv_heads), value_ = view(t.value, c.kv_heads);
    if (mask_) {
      map_ = mask_map(c, *mask_, row_, col_);
      batch_dims_ = c.batch_dims;
    }
    constexpr ScalarType type = sizeof(Real) == 8 ? ScalarType::Double : ScalarType::Float;
    sinks_ = per_head(t.sinks, {c.batch, c.q_heads}, type, c.args.query);
    slopes_ = per_head(t.alibi_slopes, {c.batch, c.q_heads}, type, c.args.query);
  }

  template <class Task>
  void describe(Task& p) const {
    rows(query_, p.query_tangent, p.query_tangent_strides);
    rows(key_, p.key_tangent, p.key_tangent_strides);
    rows(value_, p.value_tangent, p.value_tangent_strides);
    if (mask_) {
      p.mask_tangent = mask_->data_ptr();
      for (int d = 0; d < batch_dims_; d++) p.mask_tangent_batch[d] = map_.batch_stride[d];
      p.mask_tangent_head = map_.head_stride, p.mask_tangent_row = row_, p.mask_tangent_col = col_;
    }
    p.sinks_tangent = sinks_ ? static_cast<const Real*>(sinks_->data_ptr()) : nullptr;
    p.slopes_tangent = slopes_ ? static_cast<const Real*>(slopes_->data_ptr()) : nullptr;
  }

 private:
  void rows(const std::optional<View>& view, const void*& data, Strides& strides) const {
    if (!view) return;
    data = view->data(), strides = view->strides;
    if (packed_) strides.batch = 0;
  }
  bool packed_;
  std::optional<View> query_, key_, value_;
  OptionalTensor mask_, sinks_, slopes_;
  HeadMap map_;
  int64_t row_ = 0, col_ = 0;
  int batch_dims_ = 0;
};

}  // namespace attnjourney
