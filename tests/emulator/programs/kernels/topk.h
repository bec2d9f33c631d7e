// The kernels of topk.cpp, and their instances.
#pragma once
#include "cuda/kernels/sparse/indexer_plan.cuh"
#include "cuda/kernels/sparse/indexer_sizes.cuh"

using namespace attnjourney;
using Topk = TOPK;
using T = Topk::T;
using C = Topk::Real;

namespace attnjourney {
INSTANCE(indexer_parts<Topk>);
INSTANCE(indexer_select<C>);
}  // namespace attnjourney
