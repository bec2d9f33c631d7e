// AVX-512 with products of bfloat16 pairs: the table of AVX-512 but for bfloat16's forward and jvp.
namespace attnjourney {
namespace {
struct MatrixUnit {
  static constexpr bool on = false;
};
}  // namespace
}  // namespace attnjourney
#include "bf16_table.h"

namespace attnjourney {
const KernelTable avx512_bf16_kernels = make_bf16_table("avx512_bf16");
}
