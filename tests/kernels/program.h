// The calls that the program knows, one file each.
#pragma once
#include "blobs.h"
#include "cpu/dispatch.h"

namespace kernel_tests {

struct Types {
  int dtype;           // attnjourney::DType
  int64_t item, real;  // bytes of a number of a tensor, and of the arithmetic
};

void attention(const Inputs&, const Types&);
void decode(const Inputs&, const Types&);
void head_product(const Inputs&, const Types&);
void linear(const Inputs&, const Types&);

}  // namespace kernel_tests
