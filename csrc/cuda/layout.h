// From tensors of any rank and strides to the layout that kernels take: [batch, heads, length, dim], 16-byte chunks of
// dense rows, one stride over all batch dimensions. What does not lie so is copied. Strides count elements.
#pragma once
#include "attention/attention.h"
#include "cuda/kernels/common/forward_task.cuh"

namespace attnjourney {

struct View {
  Tensor tensor;  // the original, or a copy
  Strides strides;
  void* data() const { return tensor.data_ptr(); }
};

// numbers in a chunk, and dim rounded up to whole ones
inline int64_t chunk_of(const Tensor& t) { return 16 / t.element_size(); }
inline int64_t chunks(int64_t dim, int64_t chunk) { return (dim + chunk - 1) / chunk * chunk; }

inline bool in_chunks(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0; }

// t with `heads` heads, as it lies in memory if a kernel can read that, else nothing
inline std::optional<View> view_in_place(const AttentionCall& c, const Tensor& t, int64_t heads) {
  const int64_t dim = t.size(-1), row = t.stride(c.rank - 2), chunk = chunk_of(t);
  if (dim % chunk || (dim > 1 && t.stride(-1) != 1) || !in_chunks(t)) return std::nullopt;
  const HeadMap m = head_map(c, t, heads);
  if (heads > 1 && (c.rank < 3 || t.size(c.rank - 3) != heads)) return std::nullopt;
  Strides s{0, heads > 1 ? m.head_stride : chunk, t.size(c.rank - 2) > 1 ? row : dim};
  int64_t inner = 1;
  for (int d = c.batch_dims - 1; d >= 0; d--) {
    if (c.batch_size[d] == 1) continue;
    if (inner == 1)
      s.batch = m.batch_stride[d];
    else if (m.batch_stride[d] != s.batch * inner)
      return std::nullopt;
    inner *= c.batch_size[d];
  }
  if (inner == 1) s.batch = chunk;  // not used; TMA wants a multiple of 16 bytes
  for (int64_t stride : {s.batch, s.head, s.row})
    if (stride <= 0 || stride % chunk) return std::nullopt;
  return View{t, s};
}

inline Strides dense_strides(int64_t heads, int64_t length, int64_t dim) {
  return {heads * length * dim, length * dim, dim};
}

// t, repeated to the call's batch and to `heads` heads, in memory of its own if need be; rows end in zeros
inline View view_of(const AttentionCall& c, const Tensor& t, int64_t heads) {
  if (auto v = view_in_place(c, t, heads)) return *v;
  const int64_t own = c.rank >= 3 ? t.size(c.rank - 3) : 1, length = t.size(c.rank - 2), dim = t.size(-1);
  const int64_t padded = chunks(dim, chunk_of(t));
  const HeadMap m = head_map(c, t, own);
  std::vector<int64_t> sizes(c.batch_size, c.batch_size + c.batch_dims);
  std::vector<int64_t> strides(m.batch_stride, m.batch_stride + c.batch_dims);
  sizes.insert(sizes.end(), {own, heads / std::max<int64_t>(1, own), length, dim});
  strides.insert(strides.end(), {m.head_stride, 0, t.stride(c.rank - 2), t.stride(c.rank - 1)});
  Tensor whole = aten::strided_view(t, sizes, strides);
  if (padded > dim)
    whole = torch::stable::pad(whole, {0, padded - dim});
  else
    whole = torch::stable::clone(whole);
  whole = torch::stable::contiguous(whole);
  return {whole, dense_strides(heads, length, padded)};
}

// Where a kernel writes (heads, length, dim): the tensor itself, or memory that finish() copies from.
class Output {
 public:
  Output(const AttentionCall& c, const Tensor& t, int64_t heads) : target_(t) {
    if (auto v = view_in_place(c, t, heads)) {
      view_ = *v;
      return;
    }
    std::vector<int64_t> sizes = shape(t);
    sizes.back() = chunks(t.size(-1), chunk_of(t));
    view_ = {aten::empty(t, sizes), dense_strides(heads, t.size(c.rank - 2), sizes.back())};
    copied_ = true;
  }
  void* data() const { return view_->data(); }
  Strides strides_of(const AttentionCall& c) const {
    Strides s = view_->strides;
    if (c.packed) s.batch = 0;  // sequences lie along the length
    return s;
  }
  const Tensor& tensor() const { return view_->tensor; }  // rows may end in more numbers than the target's
  void finish() {
    if (!copied_) return;
    Tensor narrow = view_->tensor;
    torch::stable::copy_(target_, torch::stable::narrow(narrow, target_.dim() - 1, 0, target_.size(-1)));
  }

 private:
  static std::vector<int64_t> shape(const Tensor& t) {
    std::vector<int64_t> s;
    for (int64_t d = 0; d < t.dim(); d++) s.push_back(t.size(d));
    return s;
  }
  Tensor target_;
  std::optional<View> view_;
  bool copied_ = false;
};

}  // namespace attnjourney
