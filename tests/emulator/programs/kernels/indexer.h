// The kernels of indexer.cpp, and their instances.
#pragma once
#include "cuda/kernels/sparse/indexer_plan.cuh"
#include "cuda/kernels/sparse/indexer_sizes.cuh"

using namespace attnjourney;
using ScoreColumns = INDEXER::Scores;
using QueryGradient = INDEXER::QueryGradient;
using KeyGradient = INDEXER::KeyGradient;
using Stats = TARGETS::Stats;
using TargetColumns = TARGETS::Target;
using T = ScoreColumns::T;
using C = ScoreColumns::Real;

namespace attnjourney {
INSTANCE(sparse_forward<Stats>);
INSTANCE(indexer_columns<ScoreColumns>);
INSTANCE(indexer_columns<TargetColumns>);
INSTANCE(indexer_loss<C>);
INSTANCE(indexer_query_gradient<QueryGradient>);
INSTANCE(indexer_key_gradient<KeyGradient>);
INSTANCE(sparse_mark<SparseLists>);
INSTANCE(sparse_count<SparseLists>);
INSTANCE(sparse_places<SparseLists>);
INSTANCE(sparse_key_sums<C>);
INSTANCE(sparse_round<T>);
}  // namespace attnjourney
