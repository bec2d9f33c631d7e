// CUDA entry of mla_decode: which kernel a call over latents takes. Its device-neutral half, once more, is below; many
// rows over expanded keys go to decode.
#include "decode_split.h"
#include "launch_latent.h"
#include "mla_decode_cuda.h"

namespace attnjourney {
namespace {

// Hopper's own kernel reads no masks, and is for large latents.
bool serves_latents_sm90(const DecodeCall& c, const DecodeInputs& in) {
  const int64_t last =
      in.key.size(0) * in.key.stride(0) + in.key.size(2) * in.key.stride(2);  // chunks count in 32 bits
  return !in.attn_mask && c.v_head_dim > kLatentValueDim / 2 && last / 8 < (int64_t{1} << 31);
}

const CudaDecode& latent_kernel(const DecodeCall& c, const DecodeInputs& in, bool chunked, const Device& device) {
  const ScalarType type = in.query.scalar_type();
  if (type == ScalarType::Double) return sm80_latent_fp64;
  if (type == ScalarType::Float) return sm80_latent_fp32;
  const bool bf16 = type == ScalarType::BFloat16;
  const LatentDecode& kernels = bf16 ? sm80_latent_bf16 : sm80_latent_fp16;
  if (!chunked) return kernels.fma;
  const int64_t rows = c.q_heads * c.q_len;
  if (device.capability == 90 && rows > 16 && serves_latents_sm90(c, in))
    return bf16 ? sm90_latent_bf16 : sm90_latent_fp16;
  const bool fits = kernels.large.tiling(0, 0, 0, true).smem_bytes <= device.shared_bytes;
  return rows > 32 && fits ? kernels.large : kernels.small;
}

}  // namespace

void cuda_decode_latents(const DecodeCall& c, const DecodeInputs& in, const Tensor& out, const Tensor& lse) {
  check_latent_served(c, in);
  if (c.batch * c.q_heads * c.q_len == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(in.query.get_device_index());
  const Tensor query = aten::rows_contiguous(in.query);
  const bool chunked = in_chunks(in.key) && in_chunks(in.value) && in.query.element_size() == 2;
  const CudaDecode& kernel = latent_kernel(c, in, chunked, current_device(in.query));
  decode_split(kernel, chunked, c, in, describe_cache(c, in), query, out, lse);
}

namespace {

// (batch, heads, rows, n) as (heads, batch * rows, n), where there is such a view
std::optional<Tensor> rows_of_heads(const Tensor& t) {
  const int64_t batch = t.size(0), rows = t.size(2);
  if (batch > 1 && rows > 1 && t.stride(0) != rows * t.stride(2)) return std::nullopt;
  return aten::strided_view(t, {t.size(1), batch * rows, t.size(3)},
                            {t.stride(1), rows > 1 ? t.stride(2) : t.stride(0), t.stride(3)});
}

}  // namespace

void aten_head_products(const Tensor& x, const Tensor& w, bool transposed, const Tensor& out) {
  const auto heads_first = [](const Tensor& t) {
    return aten::strided_view(t, {t.size(1), t.size(0), t.size(2), t.size(3)},
                              {t.stride(1), t.stride(0), t.stride(2), t.stride(3)});
  };
  const int64_t heads = x.size(1), rows = x.size(0) * x.size(2), inner = x.size(3), width = out.size(3);
  OptionalTensor left = rows_of_heads(x);
  if (!left) left = torch::stable::view(torch::stable::clone(aten::contiguous(heads_first(x))), {heads, rows, inner});
  const Tensor right =
      transposed ? aten::strided_view(w, {heads, inner, width}, {w.stride(0), w.stride(2), w.stride(1)}) : w;
  if (const OptionalTensor to = rows_of_heads(out)) {
    aten::call("aten::bmm", "out", *left, right, *to);
    return;
  }
  const Tensor product = aten::empty(out, {heads, rows, width});
  aten::call("aten::bmm", "out", *left, right, product);
  Tensor target = heads_first(out);
  torch::stable::copy_(target, torch::stable::view(product, target.sizes()));
}

extern const MlaDecodeBackend cuda_mla_decode;
const MlaDecodeBackend cuda_mla_decode{cuda_decode_latents, cuda_decode, aten_head_products, 256};

}  // namespace attnjourney

#include "cuda/schemas_off.h"
//
#include "decode/mla_decode.cpp"
//
#include "cuda/schemas_on.h"

#include "decode/mla_decode_boxed.h"

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CUDA, m) {
  m.impl("mla_decode", TORCH_BOX(&attnjourney::boxed_mla_decode<attnjourney::cuda_mla_decode>));
}
