// CUDA entry of mla_decode: which kernel a call over latents takes. Many rows over expanded keys go to decode.
#include "cuda/attention/launches.h"
#include "cuda/refusals.h"
#include "decode_split.h"
#include "launch_latent.h"
#include "mla_decode_cuda.h"

namespace attnjourney {
namespace {

LatentCase case_of(const DecodeCall& c, const DecodeInputs& in, bool chunked) {
  const int64_t last =
      in.key.size(0) * stride_of(in.key, 0) + in.key.size(2) * stride_of(in.key, 2);  // chunks of 8 numbers
  return {.type = element_type(in.query.scalar_type()),
          .rows = c.q_heads * c.q_len,
          .v_head_dim = c.v_head_dim,
          .chunked = chunked,
          .masked = in.options.attn_mask.has_value(),
          .near = last / 8 < (int64_t{1} << 31),
          .bytes = in.key_scale.has_value()};
}

const LatentDecode& latents(const LatentCase& c) {
  if (c.bytes) return c.type == ElementType::bf16 ? sm80_latent_bytes_bf16 : sm80_latent_bytes_fp16;
  return c.type == ElementType::bf16 ? sm80_latent_bf16 : sm80_latent_fp16;
}

}  // namespace

const CudaDecode& launches::sm90_latents(const LatentCase& c) {
  return c.type == ElementType::bf16 ? sm90_latent_bf16 : sm90_latent_fp16;
}
const CudaDecode& launches::sm80_latents_64_rows(const LatentCase& c) { return latents(c).large; }
const CudaDecode& launches::sm80_latents_32_rows(const LatentCase& c) { return latents(c).small; }
const CudaDecode& launches::fma_latents(const LatentCase& c) {
  if (c.type == ElementType::fp64) return sm80_latent_fp64;
  if (c.type == ElementType::fp32) return c.bytes ? sm80_latent_bytes_fp32 : sm80_latent_fp32;
  return latents(c).fma;
}

void cuda_decode_latents(const DecodeCall& c, const DecodeInputs& in, const Tensor& out, const Tensor& lse) {
  check_latent_served(c, in);
  if (c.batch * c.q_heads * c.q_len == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(in.query.get_device_index());
  const Tensor query = aten::rows_contiguous(in.query);
  const bool chunked = in_chunks(in.key) && in_chunks(in.value) && in.query.element_size() == 2;
  const LatentCase which = case_of(c, in, chunked);
  const CudaDecode& kernel = choose_latents(current_device(in.query), which).kernel(which);
  decode_split(kernel, chunked, c, in, describe_cache(c, in), query, out, lse);
}

void cuda_dequantize(const Tensor& bytes, const Tensor& scale, const Tensor& out) {
  const int64_t rows = out.size(0), dim = out.size(1);
  if (rows * dim == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  launch_dequantize(byte_kind(bytes), static_cast<const unsigned char*>(bytes.data_ptr()), bytes.stride(0),
                    static_cast<const float*>(scale.data_ptr()), out.data_ptr(), number_of(out.scalar_type()),
                    static_cast<int>(rows), static_cast<int>(dim), append_parts(rows * dim),
                    current_stream(out.get_device_index()));
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

}  // namespace attnjourney
