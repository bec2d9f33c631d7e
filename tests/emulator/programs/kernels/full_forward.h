// The kernels of full_forward.cpp, and their instances.
#pragma once
#include "cuda/kernels/sm90/full_forward.cuh"

namespace attnjourney {
INSTANCE(tile_kinds<SHAPE::kKeys>);
INSTANCE(sm90_full_forward<SHAPE>);
}  // namespace attnjourney
