// AVX-512 with products of bfloat16 pairs.
namespace attnjourney {
namespace {
struct MatrixUnit {
  static constexpr bool on = false;
};
}  // namespace
}  // namespace attnjourney
#include "bf16_table.h"

namespace attnjourney {
constinit const PairKernels avx512_bf16_pairs = pair_kernels("avx512_bf16");
}
