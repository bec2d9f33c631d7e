// CPU entry of mla_decode: the operator's flat argument list, over csrc/mla_decode.cpp.
#include "../mla_decode.h"

namespace attnjourney {
namespace {

std::tuple<Tensor, Tensor> mla_decode_op(const Tensor& query, const Tensor& latent, const Tensor& lengths,
                                         const Tensor& kv_b_weight, bool is_causal,
                                         const std::vector<int64_t>& window_size, std::optional<double> scale) {
  check_value(window_size.size() == 2, "window_size: expected two numbers, got ", window_size.size());
  return mla_decode(cpu_decode,
                    {query, latent, lengths, kv_b_weight, is_causal, window_size[0], window_size[1], scale});
}

}  // namespace
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) { m.impl("mla_decode", TORCH_BOX(&attnjourney::mla_decode_op)); }
