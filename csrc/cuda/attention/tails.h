// What the rows of packed tensors past the last sequence hold: written on the device, which alone knows where they
// begin.
#pragma once
#include <bit>

#include "cuda/kernels/common/tails.cuh"
#include "cuda/launch.h"
#include "cuda/layout.h"
#include "sequences.h"

namespace attnjourney {

class PackedTails {
 public:
  // offsets: of the sequences of these rows
  void zeros(const Output& output, const AttentionCall& c, int64_t heads, const OptionalTensor& offsets) {
    const Tensor& t = output.tensor();
    const int64_t size = t.element_size();
    const Strides s = output.strides_of(c);
    add({.data = static_cast<unsigned char*>(output.data()),
         .head = s.head * size,
         .row = s.row * size,
         .heads = static_cast<int>(heads),
         .rows = static_cast<int>(t.size(c.rank - 2)),
         .words = static_cast<int>(t.size(-1) * size / 4)},
        offsets);
  }
  // a dense statistic (heads, rows), `parts` numbers of Real each
  template <class Real>
  void fill(const Tensor& t, int parts, Real value, const AttentionCall& c, const OptionalTensor& offsets) {
    const int64_t bytes = parts * int64_t{sizeof(Real)};
    Tail tail{.data = static_cast<unsigned char*>(t.data_ptr()),
              .head = c.params.q_len * bytes,
              .row = bytes,
              .heads = static_cast<int>(c.q_heads),
              .rows = static_cast<int>(c.params.q_len),
              .words = static_cast<int>(bytes / 4)};
    if constexpr (sizeof(Real) == 8) {
      const auto bits = std::bit_cast<uint64_t>(value);
      tail.even = static_cast<uint32_t>(bits), tail.odd = static_cast<uint32_t>(bits >> 32);
    } else {
      tail.even = tail.odd = std::bit_cast<uint32_t>(value);
    }
    add(tail, offsets);
  }
  void clear(cudaStream_t stream) const {
    if (count_) sm80_clear_tails(tails_, stream);
  }

 private:
  void add(Tail tail, const OptionalTensor& offsets) {
    tail.begin = Indices::data(offsets) + offsets->numel() - 1;
    tails_.tail[count_++] = tail;
  }
  Tails tails_{};
  int count_ = 0;
};

}  // namespace attnjourney
