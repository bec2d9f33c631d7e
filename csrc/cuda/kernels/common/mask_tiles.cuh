// Floating masks whose tiles Hopper's kernels take as they lie, by TMA, and the backward writes the gradients of.
#pragma once
#include "backward_task.cuh"

namespace attnjourney {

// The batch stride of a mask that has one over all batch dimensions, or -1.
template <class Real>
inline int64_t single_batch_stride(const ScoresOf<Real>& s, const int64_t (&strides)[kMaskDims]) {
  int64_t stride = 0, inner = 1;
  for (int d = s.mask_dims - 1; d >= 0; d--) {
    if (s.mask_size[d] == 1) continue;
    if (inner == 1)
      stride = strides[d];
    else if (strides[d] != stride * inner)
      return -1;
    inner *= s.mask_size[d];
  }
  return stride;
}
// Can TMA bring the tiles of the mask? It wants rows of whole 16-byte chunks; one row for all (mask_row 0) will do.
inline bool tma_takes_mask(const Scores& s) {
  if (s.mask_kind <= MaskElement::boolean || s.mask_col != 1) return false;
  const int64_t item = single_batch_stride(s, s.mask_batch), chunk = 16 / s.mask_bytes;
  return s.mask_row >= 0 && s.mask_row % chunk == 0 && s.mask_head % chunk == 0 && item >= 0 && item % chunk == 0 &&
         reinterpret_cast<uintptr_t>(s.mask) % 16 == 0;
}
// The backward's: in 16 bits, of several rows
inline bool mask_in_tiles(const BackwardTask& p) {
  return p.scores.mask_kind == MaskElement::same && p.scores.mask_row > 0 && tma_takes_mask(p.scores);
}
// Are the gradients of scores that of the mask, and are there tiles to write them through to `own`?
inline bool writes_mask_gradient(const BackwardTask& p, const void* own) {
  const MaskGradient& m = p.mask_gradient;
  if (!mask_in_tiles(p) || p.scores.modified() || m.items != p.batch || m.heads != p.q_heads) return false;
  for (int d = 0; d < p.scores.mask_dims; d++)
    if (m.batch[d] % 8) return false;
  return m.col == 1 && m.row % 8 == 0 && m.row > 0 && m.head % 8 == 0 && reinterpret_cast<uintptr_t>(own) % 16 == 0;
}

}  // namespace attnjourney
