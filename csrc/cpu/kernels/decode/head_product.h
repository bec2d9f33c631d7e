// A few rows times one head's weights, which are read once, in their dtype: what absorbs W_UK into queries and takes
// results through W_UV in mla_decode. The two products of decode.h: x W is a weighted sum of W's rows, x W^T the dot
// products with them.
#pragma once
#include "cpu/kernels/common/scratch.h"
#include "decode/params.h"
#include "row_products.h"

namespace attnjourney {
namespace {

template <class T>
struct HeadProduct {
  using Products = RowProducts<T>;
  using Real = Compute<T>;

  static ATTN_INLINE int64_t row_block(const HeadProductParams& params) {  // rows of W in 16 KB
    return max_of(8, 16384 / int64_t(sizeof(T)) / max_of(1, params.transposed ? params.inner : params.width));
  }
  struct Buffers {
    Real* input;   // the rows: [group][inner][R], or [row][inner] against a transposed W
    Real* output;  // [row][width], or of a transposed W one block: [row of W][R]
    Buffers(const HeadProductParams& params, Scratch& scratch) {
      const int64_t rows = round_up(params.rows, Products::max_rows);
      input = scratch.take<Real>(rows * Products::padded(params.inner));
      output =
          scratch.take<Real>(params.transposed ? row_block(params) * Products::max_rows + 2 * Products::sums_at_once
                                               : rows * Products::padded(params.width));
    }
  };
  static int64_t space(const HeadProductParams& params) { return scratch_bytes<Buffers>(params); }

  static ATTN_INLINE const T* x_row(const HeadProductParams& params, int64_t i) {
    return static_cast<const T*>(params.x) + i / params.q_len * params.x_batch + i % params.q_len * params.x_row;
  }
  static ATTN_INLINE T* out_row(const HeadProductParams& params, int64_t i) {
    return static_cast<T*>(params.out) + i / params.q_len * params.out_batch + i % params.q_len * params.out_row;
  }

  static LinePrefetch line_prefetch(const HeadProductParams& params, int64_t groups) {
    const int64_t rows = params.transposed ? params.width : params.inner,
                  width = params.transposed ? params.inner : params.width;
    constexpr int64_t size = sizeof(T);
    LinePrefetch prefetch(params.w, rows, width * size, params.w_row * size);
    prefetch.start(width * size, groups * max_of(1, width / Products::width),
                   groups > 1 ? row_block(params) * width * size : 4096);
    return prefetch;
  }

  // W (inner, width)
  template <int R>
  static void plain(const HeadProductParams& params, const Buffers& buffers) {
    const int64_t groups = (params.rows + R - 1) / R, output_ld = Products::padded(params.width),
                  block = row_block(params);
    Real *const input = buffers.input, *const output = buffers.output;
    for (int64_t i = 0; i < groups * R; i++) {
      Real* column = input + i / R * params.inner * R + i % R;
      for (int64_t k = 0; k < params.inner; k++)
        column[k * R] = i < params.rows ? load_one(x_row(params, i) + k) : Real(0);
    }
    memset(output, 0, sizeof(Real) * size_t(groups * R * output_ld));
    LinePrefetch prefetch = line_prefetch(params, groups);
    for (int64_t k = 0; k < params.inner; k += block) {
      const int64_t n = min_of(block, params.inner - k);
      const T* rows = static_cast<const T*>(params.w) + k * params.w_row;
      for (int64_t g = 0; g < groups; g++)
        Products::template weighted_values<R>(input + (g * params.inner + k) * R, n, rows, params.w_row, params.width,
                                              output + g * R * output_ld, output_ld, prefetch);
    }
    for (int64_t i = 0; i < params.rows; i++)
      for (int64_t d = 0; d < params.width; d++) store_one(out_row(params, i) + d, output[i * output_ld + d]);
  }

  // W (width, inner)
  template <int R>
  static void transposed(const HeadProductParams& params, const Buffers& buffers) {
    const int64_t groups = (params.rows + R - 1) / R, input_ld = Products::padded(params.inner),
                  block = row_block(params);
    Real *const input = buffers.input, *const scores = buffers.output;
    memset(input, 0, sizeof(Real) * size_t(groups * R * input_ld));
    LinePrefetch prefetch = line_prefetch(params, groups);
    for (int64_t i = 0; i < params.rows; i++)
      for (int64_t d = 0; d < params.inner; d++) input[i * input_ld + d] = load_one(x_row(params, i) + d);
    for (int64_t k = 0; k < params.width; k += block) {
      const int64_t n = min_of(block, params.width - k);
      const T* rows = static_cast<const T*>(params.w) + k * params.w_row;
      for (int64_t g = 0; g < groups; g++) {
        Products::template scores<R>(input + g * R * input_ld, input_ld, rows, params.w_row, params.inner, n, scores,
                                     prefetch);
        for (int64_t r = 0; r < min_of(R, params.rows - g * R); r++)
          for (int64_t j = 0; j < n; j++) store_one(out_row(params, g * R + r) + k + j, scores[j * R + r]);
      }
    }
  }

  template <int R>
  static void run_rows(const HeadProductParams& params, const Buffers& buffers) {
    params.transposed ? transposed<R>(params, buffers) : plain<R>(params, buffers);
  }
  static void run(const HeadProductParams& params, void* space) {
    const Buffers buffers = buffers_in<Buffers>(space, params);
    params.rows >= 5   ? run_rows<8>(params, buffers)
    : params.rows >= 3 ? run_rows<4>(params, buffers)
    : params.rows == 2 ? run_rows<2>(params, buffers)
                       : run_rows<1>(params, buffers);
  }
};

}  // namespace
}  // namespace attnjourney
