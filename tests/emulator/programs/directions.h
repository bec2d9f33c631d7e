// Directions of derivatives from stdin, of which there are those of the bits of `moving`: query, key, value [.., the
// other layout], mask [.., keys, rows], sinks and slopes.
#pragma once
#include "emulator/machine/driver.h"
//
#include "cuda/kernels/common/jvp_task.cuh"

namespace driver {

template <class X>
using Held = std::unique_ptr<emulator::Buffer<X>>;
template <class X>
Held<X> held(size_t count, const char* name) {
  return std::make_unique<emulator::Buffer<X>>(read<X>(count), name);
}

// the other layout
inline Shape turned(Shape s) {
  s.rows_first = !s.rows_first;
  return s;
}

template <class T, class Real>
class Directions {
 public:
  template <class Task>
  Directions(Task& p, const Arguments& a, const Shape& q, const Shape& k, const Shape& v) : moving_(a["moving"]) {
    rows(1, q, "query_tangent", p.query_tangent, p.query_tangent_strides);
    rows(2, k, "key_tangent", p.key_tangent, p.key_tangent_strides);
    rows(4, v, "value_tangent", p.value_tangent, p.value_tangent_strides);
    if (moving_ & 8) {
      const size_t count = static_cast<size_t>(a["mask_count"]);
      if (a["mask"] == 2)
        mask_fp32_ = held<float>(count, "mask_tangent"), p.mask_tangent = mask_fp32_->data;
      else
        mask_same_ = held<T>(count, "mask_tangent"), p.mask_tangent = mask_same_->data;
      p.mask_tangent_batch[0] = a["mask_batch"], p.mask_tangent_head = a["mask_head"];
      p.mask_tangent_row = a["mask_row"] ? 1 : 0;
      p.mask_tangent_col = a["mask_col"] ? (a["mask_row"] ? p.q_len : 1) : 0;
    }
    const size_t heads = static_cast<size_t>(p.batch) * p.q_heads;
    if (moving_ & 16) sinks_ = held<Real>(heads, "sinks_tangent"), p.sinks_tangent = sinks_->data;
    if (moving_ & 32) slopes_ = held<Real>(heads, "slopes_tangent"), p.slopes_tangent = slopes_->data;
  }
  // one more, of a tensor of this shape
  void rows(int bit, const Shape& s, const char* name, const void*& data, attnjourney::Strides& strides) {
    if (!(moving_ & bit)) return;
    rows_.push_back(held<T>(s.size(), name));
    data = rows_.back()->data, strides = turned(s).strides<attnjourney::Strides>();
  }

 private:
  int moving_;
  std::vector<Held<T>> rows_;
  Held<float> mask_fp32_;
  Held<T> mask_same_;
  Held<Real> sinks_, slopes_;
};

}  // namespace driver
