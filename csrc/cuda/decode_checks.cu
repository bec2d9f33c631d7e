// The device-neutral half of decoding and of the caches, once more (see attention_checks.cu), and the checks of a CUDA
// call alone, for tensors anywhere.
#include <torch/csrc/stable/library.h>
#pragma push_macro("STABLE_TORCH_LIBRARY_FRAGMENT")
#undef STABLE_TORCH_LIBRARY_FRAGMENT
#define SCHEMAS_OF(name, line) name##line
#define SCHEMAS_AT(name, line) SCHEMAS_OF(name, line)
#define STABLE_TORCH_LIBRARY_FRAGMENT(name, m) \
  template <class Library>                     \
  [[maybe_unused]] static void SCHEMAS_AT(schemas_of_the_cpu_library_, __COUNTER__)(Library & m)
#include "../decode.cpp"
#include "../kv_cache.cpp"
#pragma pop_macro("STABLE_TORCH_LIBRARY_FRAGMENT")

#include "../decode_boxed.h"
#include "decode_cuda.h"

namespace attnjourney {
namespace {
void check(const DecodeCall& c, const DecodeInputs& in, const Tensor&, const Tensor&) { check_decode_served(c, in); }
}  // namespace
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_FRAGMENT(attnjourney, m) {
  m.def(
      "_cuda_decode_check(Tensor query, Tensor key, Tensor value, Tensor lengths, *, Tensor? block_table=None, bool "
      "ring=False, " ATTNJOURNEY_DECODE_OPTIONS ") -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  m.impl("_cuda_decode_check", TORCH_BOX(&attnjourney::boxed_decode<attnjourney::check>));
}
