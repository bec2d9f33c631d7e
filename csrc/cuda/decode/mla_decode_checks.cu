// mla_decode of this library for tensors on the CPU, to be tested without a GPU: the checks of a CUDA call and its
// products, then the CPU's `decode` in place of kernels. Tests give it its schema, which is that of mla_decode.
#include <vector>

#include "decode/mla_decode_boxed.h"
#include "mla_decode_cuda.h"

namespace attnjourney {
namespace {

void cpu_decode_operator(const DecodeCall& c, const DecodeInputs& in, const Tensor& out, const Tensor& lse) {
  const std::vector<int64_t> window = {in.left, in.right};
  std::vector<StableIValue> stack;
  const auto push = [&](const auto&... args) { (stack.push_back(torch::stable::detail::from(args)), ...); };
  push(in.query, in.key, in.value, in.lengths, in.block_table, in.ring, in.is_causal, window,
       std::optional<double>(c.scale), in.attn_mask, in.prefix_length, in.softcap, in.sinks, in.alibi_slopes);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("attnjourney::decode", "", stack.data(), TORCH_ABI_VERSION));
  Tensor to[] = {out, lse};
  for (int i = 0; i < 2; i++) torch::stable::copy_(to[i], torch::stable::detail::to<Tensor>(stack[i]));
}

void latents(const DecodeCall& c, const DecodeInputs& in, const Tensor& out, const Tensor& lse) {
  check_latent_served(c, in);
  cpu_decode_operator(c, in, out, lse);
}

constexpr MlaDecodeBackend checked_mla_decode{latents, cpu_decode_operator, aten_head_products, 256};

}  // namespace
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  m.impl("_cuda_mla_decode", TORCH_BOX(&attnjourney::boxed_mla_decode<attnjourney::checked_mla_decode>));
}
