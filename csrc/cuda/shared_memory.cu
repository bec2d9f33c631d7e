// What the kernels need of shared memory, from their own tile sizes; no kernel is compiled here.
#include "shared_memory.h"

#include <torch/csrc/stable/library.h>

#include "inst/pick.h"
#include "kernels/linear_walk.cuh"
#include "kernels/sm80_mask_gradient.cuh"
#include "kernels/wide_mask_gradient.cuh"

namespace attnjourney {
namespace {

struct {
  template <class Kernel>
  int operator()() const {
    return Kernel::kSmemBytes;
  }
} constexpr bytes_of{};

void check(const char* what, int64_t head_dim, int64_t v_head_dim, int needed, int allowed) {
  check_runtime(needed <= allowed, what, ": head dimensions of ", head_dim, " and (value) ", v_head_dim, " need ",
                (needed + 1023) / 1024, " KB of shared memory for a block on CUDA, this GPU allows ", allowed / 1024);
}

int forward_bytes(int size, int wide_size, ScalarType dtype, bool options) {
  if (dtype == ScalarType::Double) return with_wide_forward<double>(wide_size, bytes_of);
  if (dtype == ScalarType::Float) return with_wide_forward<float>(wide_size, bytes_of);
  return options ? with_sm80_forward<Bf16, true>(size, bytes_of) : with_sm80_forward<Bf16, false>(size, bytes_of);
}

int backward_bytes(int size, ScalarType dtype, bool options, bool small) {
  if (dtype == ScalarType::Double) return with_wide_backward<double>(size, small, bytes_of);
  if (dtype == ScalarType::Float) return with_wide_backward<float>(size, small, bytes_of);
  return options ? with_sm80_options_backward<Bf16, true>(size, small, bytes_of)
                 : with_sm80_backward<Bf16, true>(size, bytes_of);
}

int mask_gradient_bytes(int size, ScalarType dtype) {
  if (dtype == ScalarType::Double) return WideMaskGradient<double>::kSmemBytes;
  if (dtype == ScalarType::Float) return WideMaskGradient<float>::kSmemBytes;
  if (size == 64) return Sm80MaskGradient<Bf16, 64>::kSmemBytes;
  return size == 128 ? Sm80MaskGradient<Bf16, 128>::kSmemBytes : Sm80MaskGradient<Bf16, 256>::kSmemBytes;
}

int walk_bytes(int depth, ScalarType dtype) {
  if (dtype == ScalarType::Double) return LinearWalk<double>::smem_bytes(depth);
  return dtype == ScalarType::Float ? LinearWalk<float>::smem_bytes(depth) : LinearWalk<Bf16>::smem_bytes(depth);
}

}  // namespace

void check_forward_memory(const AttentionCall& c, bool options, int allowed) {
  const auto head_dim = static_cast<int>(c.params.head_dim), v_head_dim = static_cast<int>(c.params.v_head_dim);
  check("attention_forward", head_dim, v_head_dim,
        forward_bytes(forward_size(head_dim, v_head_dim), backward_size(head_dim, v_head_dim), c.dtype, options),
        allowed);
}

void check_backward_memory(const AttentionCall& c, bool options, bool mask_gradient, int allowed) {
  const auto head_dim = static_cast<int>(c.params.head_dim), v_head_dim = static_cast<int>(c.params.v_head_dim);
  const int size = backward_size(head_dim, v_head_dim);
  const int needed = backward_bytes(size, c.dtype, options, allowed < kMiddleShared);
  check("attention_backward", head_dim, v_head_dim,
        mask_gradient ? std::max(needed, mask_gradient_bytes(size, c.dtype)) : needed, allowed);
}

void check_linear_memory(const LinearCall& c, bool backward, int allowed) {
  const auto head_dim = static_cast<int>(c.params.head_dim), v_head_dim = static_cast<int>(c.params.v_head_dim);
  check("linear_attention", head_dim, v_head_dim,
        walk_bytes(backward ? std::max(head_dim, v_head_dim) : head_dim, c.dtype), allowed);
}

}  // namespace attnjourney

// The checks alone, for tensors anywhere and a GPU of whatever memory.
namespace attnjourney {
namespace {

void check_attention_memory(const Tensor& query, const Tensor& key, const Tensor& value,
                            const OptionalTensor& attn_mask, bool backward, int64_t allowed) {
  AttentionOptions options;
  options.attn_mask = attn_mask;
  const AttentionCall c = check_attention(query, key, value, options);
  const int bytes = static_cast<int>(allowed);
  if (backward)
    check_backward_memory(c, backward_takes_options(c, options, bytes), attn_mask.has_value(), bytes);
  else
    check_forward_memory(c, has_options(c, options), bytes);
}
void check_linear_attention_memory(const Tensor& query, const Tensor& key, const Tensor& value, bool backward,
                                   int64_t allowed) {
  check_linear_memory(check_linear_attention({query, key, value}), backward, static_cast<int>(allowed));
}

}  // namespace
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_FRAGMENT(attnjourney, m) {
  m.def(
      "_cuda_attention_memory_check(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool backward, int "
      "allowed) -> ()");
  m.def("_cuda_linear_memory_check(Tensor query, Tensor key, Tensor value, bool backward, int allowed) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  m.impl("_cuda_attention_memory_check", TORCH_BOX(&attnjourney::check_attention_memory));
  m.impl("_cuda_linear_memory_check", TORCH_BOX(&attnjourney::check_linear_attention_memory));
}
