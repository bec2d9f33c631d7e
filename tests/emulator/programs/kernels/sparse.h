// The kernels of sparse.cpp, and their instances.
#pragma once
#include "cuda/kernels/sparse/plan.cuh"
#include "cuda/kernels/sparse/sizes.cuh"

using namespace attnjourney;
using Forward = FORWARD;
using QueryGradient = QUERY;
using KeyGradient = KEYS;
using T = Forward::T;
using C = Forward::Real;

namespace attnjourney {
INSTANCE(sparse_forward<Forward>);
INSTANCE(sparse_delta<T>);
INSTANCE(sparse_sinks<C>);
INSTANCE(sparse_query_gradient<QueryGradient>);
INSTANCE(sparse_key_gradient<KeyGradient>);
INSTANCE(sparse_mark<SparseLists>);
INSTANCE(sparse_count<SparseLists>);
INSTANCE(sparse_places<SparseLists>);
INSTANCE(sparse_key_sums<C>);
INSTANCE(sparse_round<T>);
}  // namespace attnjourney
