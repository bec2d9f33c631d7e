#include "mask_gradient.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <numeric>
#include <unordered_map>

namespace attnjourney {
namespace {

int64_t offset_of(const AttentionCall& c, const HeadMap& map, int64_t batch, int64_t head) {
  int64_t offset = head * map.head_stride;
  for (int d = c.batch_dims - 1; d >= 0; d--) {
    offset += batch % c.batch_size[d] * map.batch_stride[d];
    batch /= c.batch_size[d];
  }
  return offset;
}

template <class C>
void sum_copies(C* sums, int64_t copies, int64_t n) {
  for (int64_t k = 1; k < copies; k++)
    for (int64_t i = 0; i < n; i++) sums[i] += sums[k * n + i];
}

// Fresh memory of this size comes page by page from the system, which takes longer than the gradient itself.
void prefer_huge_pages([[maybe_unused]] const Tensor& t) {
#ifdef __linux__
  constexpr uintptr_t page = uintptr_t{2} << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.data_ptr());
  const uintptr_t end = begin + static_cast<uintptr_t>(t.numel() * item_size(t.scalar_type()));
  const uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;
  if (first < last && last - first >= 8 * page) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

MaskGradient::MaskGradient(const AttentionCall& c, const Sequences& sequences, const OptionalTensor& grad,
                           int64_t items)
    : call_(c), grad_(grad) {
  if (grad_) {
    map_ = mask_map(c, *grad_, row_, col_);
    small_ = row_ == 0 || col_ == 0;
    whole_ = !small_ && sequences.uniform() && !c.params.keys.bounded();
    std::unordered_map<int64_t, int64_t> seen;  // first element of an item -> items so far
    for (int64_t i = 0; i < items; i++)
      turn_.push_back(seen[offset_of(c, map_, i / c.kv_heads, i % c.kv_heads * c.params.group)]++);
  }
  const int64_t turns = turn_.empty() ? 1 : *std::max_element(turn_.begin(), turn_.end()) + 1;
  rounds_.resize(static_cast<size_t>(grad_ && !small_ ? turns : 1));
  for (int64_t i = 0; i < items; i++) rounds_[rounds_.size() > 1 ? turn_[i] : 0].push_back(i);
  batch_copies_ = small_ ? turns : 1;
  once_ = grad_ && !small_ && turns == 1 && (c.params.group == 1 || map_.head_stride != 0) &&
          grad_->scalar_type() == c.dtype;
}

void MaskGradient::allocate(int64_t parts) {
  if (!grad_) return;
  parts_ = small_ ? parts : 1;
  const int64_t copies = batch_copies_ * parts_, n = grad_->numel();
  const bool direct = once_ || (copies == 1 && grad_->scalar_type() == call_.lse_dtype);
  sums_ = direct ? *grad_ : aten::empty(*grad_, {copies, n}, call_.lse_dtype);
  prefer_huge_pages(*sums_);
  if (!whole_) torch::stable::zero_(*sums_);
}

void MaskGradient::place(HeadGradients& g, int64_t item, int64_t part, int64_t batch, int64_t head) const {
  if (!grad_) return;
  const int64_t copy = small_ ? turn_[static_cast<size_t>(item)] * parts_ + part : 0;
  g.mask = static_cast<char*>(sums_->data_ptr()) +
           (copy * grad_->numel() + offset_of(call_, map_, batch, head)) * item_size(sums_->scalar_type());
  g.mask_row = row_;
  g.mask_col = col_;
  g.mask_once = once_;
  // the first head of those that share elements, of its turn and within its group, which is walked in order
  g.mask_first =
      !small_ && turn_[static_cast<size_t>(item)] == 0 && (head % call_.params.group == 0 || map_.head_stride != 0);
}

void MaskGradient::finish() {
  if (!grad_ || sums_->data_ptr() == grad_->data_ptr() || grad_->numel() == 0) return;
  const int64_t copies = batch_copies_ * parts_, n = grad_->numel();
  if (call_.lse_dtype == ScalarType::Double)
    sum_copies(static_cast<double*>(sums_->data_ptr()), copies, n);
  else
    sum_copies(static_cast<float*>(sums_->data_ptr()), copies, n);
  Tensor first = torch::stable::narrow(*sums_, 0, 0, 1);
  first = torch::stable::view(first, grad_->sizes());
  torch::stable::copy_(*grad_, first);
}

}  // namespace attnjourney
