// The launch function of Hopper's decoding over latents for one dtype.
#pragma once
#include "cuda/inst/decode/latent.h"
#include "cuda/kernels/sm90/latent.cuh"

namespace attnjourney {

template <class T>
constexpr CudaDecode sm90_latent_decode{
    [](int, int, int, bool) {
      return DecodeTiling{Sm90Latent<T>::kRows, Sm90Latent<T>::kKeys, Sm90Latent<T>::kSmemBytes, 1, kRoundKeys};
    },
    [](const DecodeTask& task, bool, cudaStream_t stream) {
      using Kernel = Sm90Latent<T>;
      launch_latent<T>(sm90_latent<Kernel>, task, Kernel::kThreads, Kernel::kSmemBytes, Kernel::kRows, stream);
    }};

}  // namespace attnjourney
