#include "dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(ATTNJOURNEY_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(ATTNJOURNEY_ARM64) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace attnjourney {
namespace {

#ifdef ATTNJOURNEY_X86
bool avx2_runs() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool avx512_runs() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && avx2_runs();
}
bool avx512_bf16_runs() { return __builtin_cpu_supports("avx512bf16") && avx512_runs(); }
// Linux gives a process the matrix registers when it asks for them (component 18 of its state).
bool amx_runs() {
#ifdef ATTNJOURNEY_AMX_TWIN
  return avx512_bf16_runs();
#elif defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int request_permission = 0x1023, tile_data = 18;
  return __builtin_cpu_supports("amx-bf16") && avx512_bf16_runs() &&
         syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

#ifdef ATTNJOURNEY_ARM64
bool neon_bf16_runs() {
#ifdef __linux__
  constexpr unsigned long has_bf16 = 1 << 14;  // HWCAP2_BF16
  return getauxval(AT_HWCAP2) & has_bf16;
#else
  return false;
#endif
}
#endif

#if defined(ATTNJOURNEY_X86) || defined(ATTNJOURNEY_ARM64)
constexpr int of_bf16 = static_cast<int>(DType::bf16);

template <const PairForward& forward, const PairKernels& pairs, const KernelTable& single>
KernelTable with_pairs() {
  KernelTable t = single;
  t.isa = forward.isa;
  AttentionKernels& attention = t.attention[of_bf16];
  attention.forward_space = [](const AttentionParams& params, int64_t rows) {
    return std::max(forward.space(params, rows), single.attention[of_bf16].forward_space(params, rows));
  };
  attention.forward = [](const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t rows,
                         void* space) {
    if (!forward.run(params, head, first, rows, space))
      single.attention[of_bf16].forward(params, head, first, rows, space);
  };
  attention.jvp_space = [](const AttentionParams& params, int64_t rows) {
    return std::max(pairs.jvp_space(params, rows), single.attention[of_bf16].jvp_space(params, rows));
  };
  attention.jvp = [](const AttentionParams& params, const HeadPointers& head, const HeadTangents& tangents,
                     int64_t first, int64_t rows, void* space) {
    if (!pairs.jvp(params, head, tangents, first, rows, space))
      single.attention[of_bf16].jvp(params, head, tangents, first, rows, space);
  };
  DecodeKernels& decode = t.decode[of_bf16];
  decode.space = pairs.decode_space;
  decode.partial_size = pairs.decode_partial_size;
  decode.chunk = pairs.decode_chunk;
  decode.merge = pairs.decode_merge;
  t.linear[of_bf16] = pairs.linear;
  return t;
}
template <const PairForward& forward, const PairKernels& pairs, const KernelTable& single>
const KernelTable& pair_table() {
  static const KernelTable table = with_pairs<forward, pairs, single>();
  return table;
}
#endif
template <const KernelTable& kernels>
const KernelTable& table() {
  return kernels;
}

// __builtin_cpu_supports looks at CPUID and at XGETBV: the operating system must save the registers, too.
const IsaEntry entries[] = {
#ifdef ATTNJOURNEY_X86
    {pair_table<amx_forward, avx512_bf16_pairs, avx512_kernels>, amx_runs},
    {pair_table<avx512_bf16_forward, avx512_bf16_pairs, avx512_kernels>, avx512_bf16_runs},
    {table<avx512_kernels>, avx512_runs},
    {table<avx2_kernels>, avx2_runs},
#endif
#ifdef ATTNJOURNEY_ARM64
    {pair_table<neon_bf16_forward, neon_bf16_pairs, neon_kernels>, neon_bf16_runs},
    {table<neon_kernels>, [] { return true; }},
#endif
    {table<scalar_kernels>, [] { return true; }},
};
constexpr int entry_count = sizeof(entries) / sizeof(entries[0]);

const KernelTable& choose() {
  const char* forced = std::getenv("ATTNJOURNEY_ISA");
  std::string known;
  for (const IsaEntry& e : entries) {
    if (forced && *forced) {
      known += (known.empty() ? "" : ", ") + std::string(e.table().isa);
      if (std::strcmp(forced, e.table().isa) != 0) continue;
      if (!e.runs())
        throw std::runtime_error("ATTNJOURNEY_ISA: this CPU or operating system cannot run '" + std::string(forced) +
                                 "'");
      return e.table();
    }
    if (e.runs()) return e.table();
  }
  throw std::runtime_error("ATTNJOURNEY_ISA: expected one of " + known + ", got '" + forced + "'");
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable& chosen = choose();
  return chosen;
}

const IsaEntry* isa_list(int& count) {
  count = entry_count;
  return entries;
}

}  // namespace attnjourney
