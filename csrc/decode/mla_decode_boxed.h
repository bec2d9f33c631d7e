// The operator `mla_decode` over what a device supplies: to be registered with TORCH_BOX.
#pragma once
#include "mla_decode.h"

namespace attnjourney {

template <const MlaDecodeBackend& backend>
std::tuple<Tensor, Tensor> boxed_mla_decode(const Tensor& query, const Tensor& latent, const Tensor& lengths,
                                            const Tensor& kv_b_weight, OptionalTensor block_table, bool is_causal,
                                            const std::vector<int64_t>& window_size, std::optional<double> scale,
                                            OptionalTensor attn_mask, int64_t prefix_length, double softcap,
                                            OptionalTensor sinks, OptionalTensor alibi_slopes) {
  check_value(window_size.size() == 2, "window_size: expected two numbers, got ", window_size.size());
  MlaDecodeInputs in{query, latent, lengths, kv_b_weight, {query, query, query, lengths}};
  DecodeInputs& options = in.decode;
  options.block_table = std::move(block_table);
  options.is_causal = is_causal, options.left = window_size[0], options.right = window_size[1], options.scale = scale;
  options.attn_mask = std::move(attn_mask), options.prefix_length = prefix_length, options.softcap = softcap;
  options.sinks = std::move(sinks), options.alibi_slopes = std::move(alibi_slopes);
  return mla_decode(backend, in);
}

}  // namespace attnjourney
