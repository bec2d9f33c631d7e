// From a chosen kernel (architectures.h) to its instances (inst/), with the memory that it needs of its own: it is
// given back in the order of the stream, after the kernel.
#include "launches.h"

#include "fp16x2_backward.h"
#include "fp16x2_forward.h"
#include "tile_kinds.h"

namespace attnjourney {
namespace {

bool is_bf16(const LaunchContext& l) { return l.type == ElementType::bf16; }

}  // namespace

void launches::sm90_forward(ForwardTask p, const LaunchContext& l) {
  if (l.ranged && forward_size(p.head_dim, p.v_head_dim) == HeadSize::d256) return sm90_full_forward(p, l);
  OptionalTensor memory;
  p.counter = tile_counter(l.query, l.device.index, l.stream, memory);
  (is_bf16(l) ? sm90_forward_bf16 : sm90_forward_fp16)(p, l.ranged, l.device, l.stream);
}
void launches::sm90_full_forward(ForwardTask p, const LaunchContext& l) {
  OptionalTensor memory, kinds_memory;
  p.counter = tile_counter(l.query, l.device.index, l.stream, memory);
  const int keys = sm90_forward_keys(forward_size(p.head_dim, p.v_head_dim));
  const TileKinds kinds = tile_kinds(p, p.q_heads, 64, keys, l.query, l.stream, kinds_memory);
  (is_bf16(l) ? sm90_full_forward_bf16 : sm90_full_forward_fp16)(p, kinds, l.device, l.stream);
}
void launches::sm90_fp16x2_forward(ForwardTask p, const LaunchContext& l) {
  OptionalTensor memory;
  p.counter = tile_counter(l.query, l.device.index, l.stream, memory);
  fp16x2_forward(p, l.query, l.device, l.stream);
}
void launches::sm80_forward(ForwardTask p, const LaunchContext& l) {
  (is_bf16(l) ? sm80_forward_bf16 : sm80_forward_fp16)(p, l.ranged, l.device, l.stream);
}
void launches::sm80_full_forward(ForwardTask p, const LaunchContext& l) {
  (is_bf16(l) ? sm80_full_forward_bf16 : sm80_full_forward_fp16)(p, l.ranged, l.device, l.stream);
}
void launches::sm80_wide_forward(ForwardTask p, const LaunchContext& l) {
  (is_bf16(l) ? sm80_wide_forward_bf16 : sm80_wide_forward_fp16)(p, l.stream);
}
void launches::fp32_forward(ForwardTask p, const LaunchContext& l) {
  fp32_forward_float(p, l.ranged, l.device, l.stream);
}
void launches::fp64_forward(ForwardTaskOf<double> p, const LaunchContext& l) {
  fp32_forward_double(p, l.ranged, l.device, l.stream);
}

void launches::sm90_backward(const BackwardTask& p, const LaunchContext& l) {
  (is_bf16(l) ? sm90_backward_bf16 : sm90_backward_fp16)(p, l.ranged, l.device, l.stream);
}
void launches::sm90_parts_backward(const BackwardTask& p, const LaunchContext& l) {
  (is_bf16(l) ? sm90_parts_backward_bf16 : sm90_parts_backward_fp16)(p, l.ranged, l.device, l.stream);
}
void launches::sm90_columns_backward(const BackwardTask& p, const LaunchContext& l) {
  (is_bf16(l) ? sm90_columns_backward_bf16 : sm90_columns_backward_fp16)(p, l.ranged, l.device, l.stream);
}
void launches::sm90_full_backward(const BackwardTask& p, const LaunchContext& l) {
  OptionalTensor memory;
  const TileKinds kinds = tile_kinds(p, p.q_heads, p.tile_rows, p.tile_keys, l.query, l.stream, memory);
  (is_bf16(l) ? sm90_full_backward_bf16 : sm90_full_backward_fp16)(p, kinds, l.device, l.stream);
}
void launches::sm80_backward(const BackwardTask& p, const LaunchContext& l) {
  (is_bf16(l) ? sm80_backward_bf16 : sm80_backward_fp16)(p, l.ranged, l.device, l.stream);
}
void launches::sm80_full_backward(const BackwardTask& p, const LaunchContext& l) {
  (is_bf16(l) ? sm80_full_backward_bf16 : sm80_full_backward_fp16)(p, l.ranged, l.device, l.stream);
}
void launches::sm80_wide_backward(const BackwardTask& p, const LaunchContext& l) {
  (is_bf16(l) ? sm80_wide_backward_bf16 : sm80_wide_backward_fp16)(p, l.stream);
}
void launches::fp16x2_backward(const BackwardTask& p, const LaunchContext& l) {
  attnjourney::fp16x2_backward(p, l.query, l.device, l.stream);
}
void launches::fp32_backward(const BackwardTask& p, const LaunchContext& l) {
  fp32_backward_float(p, l.ranged, l.device, l.stream);
}
void launches::fp64_backward(const BackwardTaskOf<double>& p, const LaunchContext& l) {
  fp32_backward_double(p, l.ranged, l.device, l.stream);
}

}  // namespace attnjourney
