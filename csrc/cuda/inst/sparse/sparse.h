// The launch functions of token-sparse attention for one dtype.
#pragma once
#include "cuda/kernels/sparse/sizes.cuh"
#include "cuda/sparse/launch_sparse.h"
#include "sparse_lists.h"

namespace attnjourney {

template <class Kernel>
int sparse_smem(const SparseTask& t) {
  return Kernel::smem_bytes(static_cast<int>(t.params.head_dim), static_cast<int>(t.params.v_head_dim));
}
// grid of the kernels that take a unit's items in tiles
template <class Kernel>
int64_t sparse_blocks(const SparseTask& t) {
  return int64_t{t.batch} * t.kv_heads * t.blocks * Kernel::tiles(t.group * static_cast<int>(t.params.rows));
}

// f with the kernels of a choice: f.operator()<few, many>, one of which is launched
template <class T, class F>
void with_sparse_sizes(const SparseChoice& c, F&& f) {
  if constexpr (sizeof(T) == 2) {
    if (c.columns == 64) return f.template operator()<SparseSizes<T, 64>>();
    if (c.columns == 128) return f.template operator()<SparseSizes<T, 128>>();
    if (c.columns == 256) return f.template operator()<SparseSizes<T, 256>>();
    if (c.columns && c.small) return f.template operator()<SparseLatentSizes<T, true>>();
    if (c.columns) return f.template operator()<SparseLatentSizes<T, false>>();
  }
  if (c.latent) return f.template operator()<SparseFmaSizes<T, true>>();
  f.template operator()<SparseFmaSizes<T, false>>();
}

template <class Sizes>
constexpr bool kSparseTwo = requires { typename Sizes::ManyForward; };  // sizes for few and for many items

template <class Kernel>
void launch_sparse_forward(const SparseTask& t, cudaStream_t stream) {
  launch_kernel(sparse_forward<Kernel>, sparse_blocks<Kernel>(t), Kernel::kThreads, sparse_smem<Kernel>(t), stream, t);
}
template <class Kernel>
void launch_sparse_query_gradient(const SparseTask& t, cudaStream_t stream) {
  launch_kernel(sparse_query_gradient<Kernel>, sparse_blocks<Kernel>(t), Kernel::kThreads, sparse_smem<Kernel>(t),
                stream, t);
}

template <class Kernel>
struct Sm80SparseKeys : Sm80SparseLists<typename Kernel::Real> {
  void key_gradient(const SparseTask& t, const SparsePairs& p) const {
    const int64_t tiles = (t.params.index_count + Kernel::kKeys - 1) / Kernel::kKeys;
    launch_kernel(sparse_key_gradient<Kernel>, tiles * p.lists.rows * t.batch * t.kv_heads, Kernel::kThreads,
                  sparse_smem<Kernel>(t), this->stream, t, p);
  }
};

// what a kernel needs at most, of the head dimensions that it takes
template <class Kernel, bool Latent>
constexpr int kSparseMost = Kernel::smem_bytes(Latent ? kLatentDim : 256, Latent ? kLatentValueDim : 256);

template <class Sizes, bool Latent, bool Small>
constexpr bool sparse_sizes_fit() {
  if constexpr (kSparseTwo<Sizes>)
    return fits(kSparseMost<typename Sizes::ManyForward, Latent>, Small) &&
           fits(kSparseMost<typename Sizes::FewForward, Latent>, Small) &&
           fits(kSparseMost<typename Sizes::ManyQueryGradient, Latent>, Small) &&
           fits(kSparseMost<typename Sizes::FewQueryGradient, Latent>, Small) &&
           fits(kSparseMost<typename Sizes::KeyGradient, Latent>, Small);
  else
    return fits(kSparseMost<typename Sizes::Forward, Latent>, Small) &&
           fits(kSparseMost<typename Sizes::QueryGradient, Latent>, Small) &&
           fits(kSparseMost<typename Sizes::KeyGradient, Latent>, Small);
}

template <class T>
constexpr SparseLaunches sparse_launches = [] {
  using Real = Compute<T>;
  if constexpr (sizeof(T) == 2)
    static_assert(sparse_sizes_fit<SparseSizes<T, 64>, false, true>() &&
                  sparse_sizes_fit<SparseSizes<T, 128>, false, true>() &&
                  sparse_sizes_fit<SparseSizes<T, 256>, false, true>() &&
                  sparse_sizes_fit<SparseLatentSizes<T, true>, true, true>() &&
                  sparse_sizes_fit<SparseLatentSizes<T, false>, true, false>());
  static_assert(sparse_sizes_fit<SparseFmaSizes<T, false>, false, true>() &&
                sparse_sizes_fit<SparseFmaSizes<T, true>, true, true>());
  return SparseLaunches{
      .forward =
          [](const SparseTask& t, const SparseChoice& c, cudaStream_t stream) {
            with_sparse_sizes<T>(c, [&]<class Sizes>() {
              if constexpr (kSparseTwo<Sizes>)
                c.many ? launch_sparse_forward<typename Sizes::ManyForward>(t, stream)
                       : launch_sparse_forward<typename Sizes::FewForward>(t, stream);
              else
                launch_sparse_forward<typename Sizes::Forward>(t, stream);
            });
          },
      .delta =
          [](const SparseTask& t, cudaStream_t stream) {
            launch_kernel(sparse_delta<T>, sparse_delta_blocks(t), kSparsePassThreads, 0, stream, t);
          },
      .sinks =
          [](const SparseTask& t, int64_t count, cudaStream_t stream) {
            launch_kernel(sparse_sinks<Real>, count, kSparsePassThreads, kSparsePassThreads / 32 * 8, stream, t);
          },
      .query_gradient =
          [](const SparseTask& t, const SparseChoice& c, cudaStream_t stream) {
            with_sparse_sizes<T>(c, [&]<class Sizes>() {
              if constexpr (kSparseTwo<Sizes>)
                c.many ? launch_sparse_query_gradient<typename Sizes::ManyQueryGradient>(t, stream)
                       : launch_sparse_query_gradient<typename Sizes::FewQueryGradient>(t, stream);
              else
                launch_sparse_query_gradient<typename Sizes::QueryGradient>(t, stream);
            });
          },
      .key_gradients =
          [](const SparseTask& t, const SparsePairs& p, const SparseParts& parts, const SparseChoice& c,
             cudaStream_t stream) {
            with_sparse_sizes<T>(c, [&]<class Sizes>() {
              run_key_gradients(t, p, parts, Sm80SparseKeys<typename Sizes::KeyGradient>{{stream}});
            });
          },
      .round =
          [](const float* from, void* to, int64_t count, cudaStream_t stream) {
            launch_kernel(sparse_round<T>, (count + kListThreads - 1) / kListThreads, kListThreads, 0, stream, from,
                          static_cast<T*>(to), count);
          }};
}();

}  // namespace attnjourney
