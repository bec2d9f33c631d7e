// The kernels of gated.cpp, and their instances.
#pragma once
#include "cuda/kernels/gated/gradients.cuh"
#include "cuda/kernels/gated/pairs.cuh"
#include "cuda/kernels/gated/rows.cuh"
#include "cuda/kernels/gated/step.cuh"
#include "cuda/kernels/gated/walk.cuh"

using namespace attnjourney;
using C = Compute<ELEMENT>;
template <bool Wide>
using Forward = GatedForward<ELEMENT, gated_cols(sizeof(C), Wide)>;
template <bool Wide>
using Backward = GatedBackward<ELEMENT, gated_cols(sizeof(C), Wide)>;

namespace attnjourney {
INSTANCE(gated_norms<ELEMENT>);
INSTANCE(gated_decays<C>);
INSTANCE(gated_pairs<ELEMENT>);
INSTANCE(gated_walk<Forward<false>>);
INSTANCE(gated_walk<Forward<true>>);
INSTANCE(gated_walk<Backward<false>>);
INSTANCE(gated_walk<Backward<true>>);
INSTANCE(gated_pair_gradients<ELEMENT>);
INSTANCE(gated_gradients<ELEMENT>);
INSTANCE(gated_finish<ELEMENT>);
INSTANCE(gated_sum_slices<C>);
INSTANCE(gated_step<ELEMENT, 32>);
INSTANCE(gated_step<ELEMENT, 64>);
}  // namespace attnjourney
