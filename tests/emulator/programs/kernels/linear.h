// The kernels of linear.cpp, and their instances.
#pragma once
#include "cuda/kernels/linear/passes.cuh"
#include "cuda/kernels/linear/walk.cuh"

using namespace attnjourney;
using Walk = LinearWalk<ELEMENT, CHUNK>;
using C = Walk::Real;

namespace attnjourney {
INSTANCE(linear_walk<Walk>);
INSTANCE(linear_scan<C>);
INSTANCE(linear_prepare<ELEMENT>);
}  // namespace attnjourney
