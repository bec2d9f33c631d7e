// CPU entry of mla_decode: the products of its heads.
#include <algorithm>

#include "cache_walk.h"
#include "cpu/plan.h"
#include "cpu/threads.h"
#include "decode_cpu.h"

namespace attnjourney {

void cpu_dequantize(const Tensor& bytes, const Tensor& scale, const Tensor& out) {
  const int64_t rows = out.size(0), dim = out.size(1), out_row = dim * item_size(out.scalar_type());
  const auto dequantize = quantized_kernels(out.scalar_type(), bytes.scalar_type()).dequantize;
  const char* const from = static_cast<const char*>(bytes.const_data_ptr());
  const float* const scales = static_cast<const float*>(scale.const_data_ptr());
  char* const to = static_cast<char*>(out.mutable_data_ptr());
  in_ranges(rows, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, dim)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) dequantize(from + i * stride_of(bytes, 0), scales[i], dim, to + i * out_row);
  });
}

void cpu_head_products(const Tensor& x, const Tensor& w, bool transposed, const Tensor& out) {
  HeadProductParams shared;
  shared.rows = x.size(0) * x.size(2), shared.q_len = x.size(2), shared.inner = x.size(3), shared.width = out.size(3);
  if (shared.rows * x.size(1) == 0) return;
  shared.x_batch = stride_of(x, 0), shared.x_row = stride_of(x, 2), shared.w_row = stride_of(w, 1);
  shared.out_batch = stride_of(out, 0), shared.out_row = stride_of(out, 2), shared.transposed = transposed;
  const DecodeKernels& kernel = decode_kernels(x.scalar_type());
  const int64_t item = item_size(x.scalar_type()), heads = x.size(1);
  const auto [from, weight, to] =
      std::tuple{static_cast<const char*>(x.const_data_ptr()), static_cast<const char*>(w.const_data_ptr()),
                 static_cast<char*>(out.mutable_data_ptr())};
  // as in decode: 200 KB or 1 MFLOP are about 10 us
  const double cost = static_cast<double>(heads * shared.inner * shared.width) *
                      std::max(5.0 * static_cast<double>(item), 2.0 * static_cast<double>(shared.rows));
  run_queue(heads, thread_count(heads, cost), kernel.product_space(shared),
            [&, from = from, weight = weight, to = to](int64_t h, void* space) {
              HeadProductParams p = shared;
              p.x = from + h * stride_of(x, 1) * item;
              p.w = weight + h * stride_of(w, 0) * item;
              p.out = to + h * stride_of(out, 1) * item;
              kernel.product(p, space);
            });
}

}  // namespace attnjourney
