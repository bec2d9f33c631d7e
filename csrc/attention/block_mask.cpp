#include "block_mask.h"

#include <algorithm>

namespace attnjourney {
namespace {

void check_list(const char* name, const Tensor& t, ScalarType dtype, int64_t dim, const Tensor& query) {
  check_dtype(dtype_of(t) == dtype, name, t, "dtype ", dtype_text(dtype));
  if (dim) check_dim(name, t, dim);
  check_same_device(name, t, "query", query);
}

}  // namespace

void check_blocks(AttentionCall& c, const BlockTensors& b, const Tensor& query) {
  AttentionParams& p = c.params;
  check_value(!c.packed, "attn_mask: packed sequences take none");
  check_list("block_offsets", b.offsets, ScalarType::Int, 0, query);
  check_list("block_index", b.index, ScalarType::Int, 1, query);
  check_list("block_partial", b.partial, ScalarType::Int, 1, query);
  check_list("block_elements", b.elements, ScalarType::Bool, 3, query);
  p.block_size = b.elements.size(1);
  check_value(
      p.block_size > 0 && p.block_size % 16 == 0 && p.block_size <= (1 << 20) && b.elements.size(2) == p.block_size,
      "block_elements: expected shape (blocks, size, size), size a multiple of 16, got ", shape_text(b.elements));
  check_value(b.partial.size(0) == b.index.size(0), "block_partial: expected the shape of block_index, (",
              b.index.size(0), ",), got ", shape_text(b.partial));

  // as a mask tensor, with the offsets of a head in place of its rows and columns
  const int64_t rows = (p.q_len + p.block_size - 1) / p.block_size, dim = b.offsets.dim();
  std::vector<int64_t> want = c.leading();
  want.push_back(rows + 1);
  const int64_t extra = static_cast<int64_t>(want.size()) - dim;
  bool ok = dim >= 1 && extra >= 0 && b.offsets.size(dim - 1) == rows + 1;
  for (int64_t d = 0; ok && d + 1 < dim; d++)
    ok = b.offsets.size(d) == 1 || b.offsets.size(d) == want[static_cast<size_t>(d + extra)];
  check_value(ok, "block_offsets: expected a shape that broadcasts to ", list_text(want), " for blocks of ",
              p.block_size, ", got ", shape_text(b.offsets));
  const auto stride = [&](int64_t from_end) { return stride_of(b.offsets, dim - from_end); };
  if (c.rank >= 3) c.mask_map.head_stride = stride(2);
  for (int d = 0; d < c.batch_dims; d++) c.mask_map.batch_stride[d] = stride(c.rank - 1 - d);

  p.mask = MaskKind::blocks;
  const double heads = static_cast<double>(std::max<int64_t>(1, b.offsets.numel() / (rows + 1)));
  const double pairs =
      static_cast<double>(std::max<int64_t>(1, p.q_len)) * static_cast<double>(std::max<int64_t>(1, p.kv_len)) * heads;
  const double area = static_cast<double>(p.block_size) * static_cast<double>(p.block_size);
  p.density = std::min(1.0, static_cast<double>(b.index.size(0)) * area / pairs);
}

}  // namespace attnjourney
