// Which kernel serves a call on which GPU: an ordered list of architectures, the newest first, each with its kernels in
// the order in which they are asked. What an architecture does not serve is left to the next. Plain C++, so that
// tests/cuda/test_architectures.py can look at every choice without a GPU.
#pragma once
#include <span>
#include <stdexcept>

#include "sizes.h"

namespace attnjourney {

enum class ElementType : int8_t { bf16, fp16, fp32, fp64 };

// What the choice depends on, besides the GPU.
struct AttentionCase {
  ElementType type;
  int head_dim, v_head_dim, q_len, kv_len;
  bool full;  // asks for kernels with all options: not for a positive scale and ranges of keys alone
};
struct LatentCase {  // decoding over latents
  ElementType type;
  int64_t rows, v_head_dim;  // rows of one sequence: heads * queries
  bool chunked;              // rows of the cache are whole 16-byte chunks
  bool masked;               // by a mask tensor
  bool near;                 // chunks of the cache count in 32 bits
  bool bytes;                // the latents are bytes
};

template <class Real>
struct ForwardTaskOf;
template <class Real>
struct BackwardTaskOf;
struct LaunchContext;  // attention/launches.h
struct CudaDecode;     // decode/launch_decode.h

template <class Real>
struct ForwardKernelOf {
  const char* name;
  bool (*serves)(const AttentionCase&);
  void (*launch)(ForwardTaskOf<Real>, const LaunchContext&);
};

struct BackwardTiles {
  int rows, keys;    // of a tile
  int scratch_rows;  // sums and statistics have whole tiles of so many rows
  int columns;       // of the sums
};
template <class Real>
struct BackwardKernelOf {
  const char* name;
  bool (*serves)(const AttentionCase&);
  void (*launch)(const BackwardTaskOf<Real>&, const LaunchContext&);
  BackwardTiles (*tiles)(int size, bool small);  // size: as backward_size says; small: Device::small()
  bool one_head_a_block = false;                 // heads of a group add dK and dV up in memory, unless deterministic
  bool finishes_short_rows = false;              // up to kShortRows the last block makes dQ, unless deterministic
  bool writes_mask_gradient = false;             // of some masks (kernels/common/mask_tiles.cuh)
};

struct LatentKernel {
  const char* name;
  bool (*serves)(const LatentCase&, const Device&);
  const CudaDecode& (*kernel)(const LatentCase&);
};

template <class Real>
struct AttentionKernelsOf {
  std::span<const ForwardKernelOf<Real>> forward;
  std::span<const BackwardKernelOf<Real>> backward;
};
struct Architecture {
  const char* name;
  bool (*runs_on)(const Device&);
  AttentionKernelsOf<float> kernels;  // bf16, fp16, fp32
  AttentionKernelsOf<double> fp64_kernels;
  std::span<const LatentKernel> latent_kernels;
  template <class Real>
  const AttentionKernelsOf<Real>& attention() const {
    if constexpr (sizeof(Real) == 8)
      return fp64_kernels;
    else
      return kernels;
  }
};
std::span<const Architecture> architectures();

// The first kernel in kernels_of(architecture) that serves the call, of the architectures that run on the GPU.
template <class KernelsOf, class... Case>
const auto& first_that_serves(const Device& device, KernelsOf&& kernels_of, const Case&... c) {
  for (const Architecture& a : architectures()) {
    if (!a.runs_on(device)) continue;
    for (const auto& kernel : kernels_of(a))
      if (kernel.serves(c...)) return kernel;
  }
  throw std::logic_error("no CUDA kernel serves this call");
}
template <class Real>
const ForwardKernelOf<Real>& choose_forward(const Device& device, const AttentionCase& c) {
  return first_that_serves(device, [](const Architecture& a) { return a.attention<Real>().forward; }, c);
}
template <class Real>
const BackwardKernelOf<Real>& choose_backward(const Device& device, const AttentionCase& c) {
  return first_that_serves(device, [](const Architecture& a) { return a.attention<Real>().backward; }, c);
}
inline const LatentKernel& choose_latents(const Device& device, const LatentCase& c) {
  return first_that_serves(device, [](const Architecture& a) { return a.latent_kernels; }, c, device);
}

// What the kernels' entries are launched by: attention/launches.cu, decode/mla_decode.cu.
namespace launches {
void sm90_forward(ForwardTaskOf<float>, const LaunchContext&);
void sm90_full_forward(ForwardTaskOf<float>, const LaunchContext&);
void sm90_fp16x2_forward(ForwardTaskOf<float>, const LaunchContext&);
void sm80_forward(ForwardTaskOf<float>, const LaunchContext&);
void sm80_full_forward(ForwardTaskOf<float>, const LaunchContext&);
void sm80_wide_forward(ForwardTaskOf<float>, const LaunchContext&);
void fp32_forward(ForwardTaskOf<float>, const LaunchContext&);
void fp64_forward(ForwardTaskOf<double>, const LaunchContext&);

void sm90_backward(const BackwardTaskOf<float>&, const LaunchContext&);
void sm90_parts_backward(const BackwardTaskOf<float>&, const LaunchContext&);
void sm90_columns_backward(const BackwardTaskOf<float>&, const LaunchContext&);
void sm90_full_backward(const BackwardTaskOf<float>&, const LaunchContext&);
void sm80_backward(const BackwardTaskOf<float>&, const LaunchContext&);
void sm80_full_backward(const BackwardTaskOf<float>&, const LaunchContext&);
void sm80_wide_backward(const BackwardTaskOf<float>&, const LaunchContext&);
void fp16x2_backward(const BackwardTaskOf<float>&, const LaunchContext&);
void fp32_backward(const BackwardTaskOf<float>&, const LaunchContext&);
void fp64_backward(const BackwardTaskOf<double>&, const LaunchContext&);

const CudaDecode& sm90_latents(const LatentCase&);
const CudaDecode& sm80_latents_64_rows(const LatentCase&);
const CudaDecode& sm80_latents_32_rows(const LatentCase&);
const CudaDecode& fma_latents(const LatentCase&);
}  // namespace launches

}  // namespace attnjourney
