// The kernel of attention_forward.cpp, and its instances.
#pragma once
#ifdef SHAPE
#include "cuda/kernels/sm90/forward.cuh"
#else
#include "cuda/kernels/sm80/forward.cuh"
#endif

namespace attnjourney {
#ifndef PLAIN
#ifdef SHAPE
INSTANCE(sm90_forward<SHAPE(true)>);
#else
INSTANCE(sm80_forward<KERNEL, true>);
#endif
#endif
#ifndef RANGED
#ifdef SHAPE
INSTANCE(sm90_forward<SHAPE(false)>);
#else
INSTANCE(sm80_forward<KERNEL, false>);
#endif
#endif
}  // namespace attnjourney
