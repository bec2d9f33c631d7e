// The masks of mha become the one mask of attention, and its gradient becomes theirs.
// In mha True is a key that may NOT be seen; in attention True is a key that may. Floating masks are added in both.
#pragma once
#include <limits>

#include "attention/attention.h"

namespace attnjourney {

struct MhaMasks {
  OptionalTensor attn;     // (q_len, kv_len) or (batch * heads, q_len, kv_len)
  OptionalTensor padding;  // (batch, kv_len)
  int64_t batch = 0, heads = 0, q_len = 0, kv_len = 0;
  ScalarType sum_dtype = ScalarType::Float;  // of two floating masks

  static bool is_floating(const OptionalTensor& mask) { return mask && !is_bool(*mask); }

  void check(const Tensor& query) const {
    if (attn) {
      check_mask_dtype("attn_mask", *attn, query);
      const bool same_for_all = attn->dim() == 2 && attn->size(0) == q_len && attn->size(1) == kv_len;
      const bool per_head =
          attn->dim() == 3 && attn->size(0) == batch * heads && attn->size(1) == q_len && attn->size(2) == kv_len;
      check_value(same_for_all || per_head, "attn_mask: expected shape (q_len, kv_len) = (", q_len, ", ", kv_len,
                  ") or (batch * num_heads, q_len, kv_len) = (", batch * heads, ", ", q_len, ", ", kv_len, "), got ",
                  shape_text(*attn));
    }
    if (padding) {
      check_mask_dtype("key_padding_mask", *padding, query);
      check_value(padding->dim() == 2 && padding->size(0) == batch && padding->size(1) == kv_len,
                  "key_padding_mask: expected shape (batch, kv_len) = (", batch, ", ", kv_len, "), got ",
                  shape_text(*padding));
    }
  }

  // What attention takes: broadcasts to (batch, heads, q_len, kv_len), expanded only where the two masks force it.
  OptionalTensor combined() const {
    if (!attn && !padding) return std::nullopt;
    if (!attn || !padding) {
      const Tensor mask = attn ? attn_view() : padding_view();
      return is_bool(mask) ? aten::call("aten::logical_not", "", mask) : mask;
    }
    const Tensor a = attn_view(), p = padding_view();
    if (is_bool(a) && is_bool(p)) return aten::call("aten::logical_not", "", aten::call("aten::logical_or", "", a, p));
    if (!is_bool(a) &&
        !is_bool(p))  // a + p: add has no stable spelling. Not in 16 bits, and in float64 next to float64
      return torch::stable::subtract(a, torch::stable::to(p, sum_dtype), -1.0);
    const Tensor& bias = is_bool(a) ? p : a;
    Tensor hidden = aten::empty(bias, {});
    torch::stable::fill_(hidden, -std::numeric_limits<double>::infinity());
    return aten::call("aten::masked_fill", "Tensor", bias, is_bool(a) ? a : p, hidden);
  }

  // Where the gradient of combined() goes: the smallest shape that holds what is wanted of it.
  Tensor empty_grad(bool want_attn, bool want_padding) const {
    if (!want_padding && attn->dim() == 2) return aten::empty(*attn, {q_len, kv_len});
    if (!want_padding) return aten::empty(*attn, {batch, heads, q_len, kv_len});
    if (!want_attn) return aten::empty(*padding, {batch, 1, 1, kv_len});
    return aten::empty(*attn, {batch, attn->dim() == 2 ? 1 : heads, q_len, kv_len}, sum_dtype);
  }
  Tensor attn_grad(const Tensor& grad) const {
    if (grad.dim() == 2) return grad;
    if (attn->dim() == 2) return torch::stable::to(aten::sum(grad, {0, 1}), attn->scalar_type());
    return torch::stable::to(aten::strided_view(grad, {batch * heads, q_len, kv_len}, {q_len * kv_len, kv_len, 1}),
                             attn->scalar_type());
  }
  Tensor padding_grad(const Tensor& grad) const {
    return torch::stable::to(aten::sum(grad, {1, 2}), padding->scalar_type());
  }

 private:
  static bool is_bool(const Tensor& mask) { return mask.scalar_type() == ScalarType::Bool; }

  static void check_mask_dtype(const char* name, const Tensor& mask, const Tensor& query) {
    const ScalarType t = dtype_of(mask), own = dtype_of(query);
    check_dtype(t == ScalarType::Bool || t == own || t == ScalarType::Float, name, mask, "dtype torch.bool",
                own == ScalarType::Float ? " or " : ", ", OrFloat32{own, "query"});
    check_same_device(name, mask, "query", query);
  }

  // (q_len, kv_len) as it is, (batch * heads, q_len, kv_len) as (batch, heads, q_len, kv_len)
  Tensor attn_view() const {
    if (attn->dim() == 2) return *attn;
    const int64_t head = attn->stride(0);
    return aten::strided_view(*attn, {batch, heads, q_len, kv_len},
                              {heads * head, head, attn->stride(1), attn->stride(2)});
  }
  // (batch, 1, 1, kv_len)
  Tensor padding_view() const {
    const int64_t item = padding->stride(0);
    return aten::strided_view(*padding, {batch, 1, 1, kv_len}, {item, item, item, padding->stride(1)});
  }
};

}  // namespace attnjourney
