// The kernels of attention_backward.cpp, and their instances.
#pragma once
#include <type_traits>

#ifdef SHAPE
#include "cuda/kernels/sm90/backward_columns.cuh"
#include "cuda/kernels/sm90/backward_parts.cuh"
#ifndef ENTRY
#ifdef OPTIONS
#define ENTRY sm90_full_backward
#else
#define ENTRY sm90_backward
#endif
#endif
#else
#define OPTIONS
#endif
#ifdef OPTIONS
#ifdef SHAPE
#include "cuda/kernels/common/mask_tiles.cuh"
#include "cuda/kernels/sm90/full_backward_columns.cuh"
#endif
#include "cuda/kernels/common/backward_heads.cuh"
#include "cuda/kernels/common/mask_gradient.cuh"
#ifdef WIDE
#include "cuda/kernels/sm80/wide_backward.cuh"
#else
#include "cuda/kernels/sm80/backward.cuh"
#endif
#include "cuda/kernels/sm80/mask_gradient.cuh"
#endif

using namespace attnjourney;
#ifdef SHAPE
using Kernel = SHAPE;
#else
using Kernel = KERNEL;
#endif
using Element = Kernel::T;

namespace attnjourney {
INSTANCE(backward_prepare<Element, Kernel::kD>);
INSTANCE(backward_query<Kernel>);
#ifdef SHAPE
INSTANCE(backward_key_value<Kernel>);
#endif
#ifdef OPTIONS
using OwnMaskGradient = Sm80MaskGradient<Element, (Kernel::kD < 256 ? Kernel::kD : 256)>;
#ifdef SHAPE
using MaskGradientTiles = OwnMaskGradient;
#else
struct NoGradient {  // of a kernel without options
  static void run(const BackwardTask&) {}
};
using MaskGradientTiles = std::conditional_t<Kernel::kOptions, OwnMaskGradient, NoGradient>;
#endif
INSTANCE(mask_gradient<MaskGradientTiles, float>);
INSTANCE(backward_per_head<true, float>);
INSTANCE(backward_per_head<false, float>);
#endif
#if defined(SHAPE) && defined(OPTIONS)
INSTANCE(tile_kinds<Kernel::kKeys>);
INSTANCE(ENTRY<Kernel>);
#elif defined(SHAPE)
INSTANCE(ENTRY<Kernel, true>);
#elif defined(WIDE)
INSTANCE(sm80_wide_backward<Kernel>);
#else
INSTANCE(sm80_backward<Kernel, true>);
#endif
#ifndef RANGED
#ifdef SHAPE
INSTANCE(ENTRY<Kernel, false>);
#else
INSTANCE(sm80_backward<Kernel, false>);
#endif
#endif
}  // namespace attnjourney
