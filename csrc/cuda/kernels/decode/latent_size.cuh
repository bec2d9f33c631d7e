// The largest latents that CUDA's kernels take: those of DeepSeek-V3.
#pragma once

namespace attnjourney {

constexpr int kLatentDim = 576, kLatentValueDim = 512;  // latent and rotary key; latent

}  // namespace attnjourney
