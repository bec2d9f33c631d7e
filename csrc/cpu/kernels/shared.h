// Products that several files of an instruction set call: <isa>.cpp has them (table.h), the others declare them alone,
// which is a sixth of their compilation. The types that they name are not in an unnamed namespace either.
#pragma once
#include "cpu/kernels/attention/band.h"
#include "cpu/kernels/decode/row_products.h"

namespace attnjourney {
inline namespace ATTN_ISA {

// RowProducts<T>::scores<R> and weighted_values<R>
template <class T, int R>
ATTN_NOINLINE void row_scores(const Compute<T>* query, int64_t query_ld, const T* key, int64_t k_row, int64_t dim,
                              int64_t n, Compute<T>* scores, LinePrefetch& prefetch) {
  RowProducts<T>::template scores<R>(query, query_ld, key, k_row, dim, n, scores, prefetch);
}
template <class T, int R>
ATTN_NOINLINE void row_sums(const Compute<T>* weights, int64_t n, const T* value, int64_t v_row, int64_t dim,
                            Compute<T>* output, int64_t output_ld, LinePrefetch& prefetch) {
  RowProducts<T>::template weighted_values<R>(weights, n, value, v_row, dim, output, output_ld, prefetch);
}

}  // namespace ATTN_ISA
}  // namespace attnjourney

#define ATTN_INSTANCE(where, ...) where template decltype(__VA_ARGS__) __VA_ARGS__;
#define ATTN_ROW_PRODUCTS_OF(where, T, R) \
  ATTN_INSTANCE(where, row_scores<T, R>)  \
  ATTN_INSTANCE(where, row_sums<T, R>)
#define ATTN_ROW_PRODUCTS(where, T) \
  ATTN_ROW_PRODUCTS_OF(where, T, 1) \
  ATTN_ROW_PRODUCTS_OF(where, T, 2) \
  ATTN_ROW_PRODUCTS_OF(where, T, 4) \
  ATTN_ROW_PRODUCTS_OF(where, T, 8)
// `where`: extern, or nothing where they are
#define ATTN_SHARED(where)                      \
  namespace attnjourney {                       \
  ATTN_INSTANCE(where, multiply<false, float>)  \
  ATTN_INSTANCE(where, multiply<true, float>)   \
  ATTN_INSTANCE(where, multiply<false, double>) \
  ATTN_INSTANCE(where, multiply<true, double>)  \
  ATTN_ROW_PRODUCTS(where, double)              \
  ATTN_ROW_PRODUCTS(where, float)               \
  ATTN_ROW_PRODUCTS(where, bf16)                \
  ATTN_ROW_PRODUCTS(where, f16)                 \
  }

ATTN_SHARED(extern)
