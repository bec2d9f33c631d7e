// The calls that the program knows, one file each.
#pragma once
#include "blobs.h"
#include "cpu/dispatch.h"

namespace kernel_tests {

struct Types {
  int dtype;           // attnjourney::DType
  int64_t item, real;  // bytes of a number of a tensor, and of the arithmetic
};

// the options that attention and decoding share
inline attnjourney::KeyRanges keys_of(const Inputs& in) {
  attnjourney::KeyRanges keys;
  keys.offset = in.integer("offset"), keys.prefix = in.integer("prefix");
  if (in.real("left") >= 0) keys.left = in.integer("left");
  if (in.real("right") >= 0) keys.right = in.integer("right");
  keys.set_length(in.integer("key_length"));
  return keys;
}
inline attnjourney::MaskKind mask_of(const Inputs& in) {
  using attnjourney::MaskKind;
  return in.has("bool_mask") ? MaskKind::boolean : in.has("mask") ? MaskKind::floating : MaskKind::none;
}

void attention(const Inputs&, const Types&);
void decode(const Inputs&, const Types&);
void head_product(const Inputs&, const Types&);
void quantized_row(const Inputs&, const Types&);
void linear(const Inputs&, const Types&);
void gated(const Inputs&, const Types&);
void sparse(const Inputs&, const Types&);
void indexer(const Inputs&, const Types&);
void indexer_loss(const Inputs&, const Types&);

}  // namespace kernel_tests
