#include "dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "tuning.h"

#ifdef ATTNJOURNEY_X86
#include <cpuid.h>
#endif
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
// Intel's cores multiply pairs at a quarter of the rate that AMD's have, at half that of float32 numbers.
bool pairs_pay() { return !__builtin_cpu_is("intel"); }
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
bool amx_fp16_runs() {
#ifndef ATTNJOURNEY_AMX_TWIN
  unsigned a = 0, b, c, d;  // compilers before g++ 13 do not know its name
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1 << 21)) return false;
#endif
  return amx_runs();
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
    forward.run(params, head, first, rows, space, single.attention[of_bf16].forward);
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
#ifdef ATTNJOURNEY_ARM64
const KernelTable& neon_bf16_table() {
  static const KernelTable table = with_pairs<neon_bf16_forward, neon_bf16_pairs, neon_kernels>();
  return table;
}
#endif
#ifdef ATTNJOURNEY_X86
// ATTNJOURNEY_TUNING=matrix: on the matrix unit whatever can be, for tests
bool matrix_everywhere() {
  static const bool everywhere = std::strcmp(forced_tuning(), "matrix") == 0;
  return everywhere;
}
// From so many rows and keys a row on attention is faster there, measured on a Xeon 6; with fewer, packing costs more
// than products.
struct Least {
  int64_t rows, keys;
};
constexpr Least of_one_part{32, 40}, of_two_parts{64, 96}, of_three_parts{128, 400};
constexpr Least of_pairs{32, 64};  // the backward by pairs of bfloat16

// Known of a call, not of its parts: all kernels of a call then have the same scores.
bool matrix_pays(const AttentionParams& p, const Least& least) {
  if (matrix_everywhere()) return true;
  if (p.q_len < least.rows) return false;
  const auto seen = [&](int64_t row) { return static_cast<double>(std::max<int64_t>(0, p.keys.row(row).count())); };
  return p.density * (seen(0) + 2 * seen(p.q_len / 2) + seen(p.q_len - 1)) / 4 >= static_cast<double>(least.keys);
}
// Whether it does for calls of up to these sizes: for their scratch memory.
bool matrix_may_pay(const AttentionParams& p, const Least& least) {
  return matrix_everywhere() || (p.q_len >= least.rows && p.kv_len >= least.keys);
}

// the table's own for as many rows as a call on the matrix unit takes
template <int dtype>
void plain_forward(const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t rows, void* space) {
  constexpr const AttentionKernels& plain = avx512_kernels.attention[dtype];
  const int64_t most = plain.forward_tile * plain.forward_tiles;
  for (int64_t done = 0; done < rows; done += most)
    plain.forward(params, head, first + done, std::min(most, rows - done), space);
}
template <int dtype, const MatrixKernels (&matrix)[dtype_count], const Least& least>
void take_matrix_backward(AttentionKernels& attention) {
  attention.backward_key_block = matrix[dtype].backward_key_block;
  attention.backward_space = [](const AttentionParams& params) {
    const int64_t plain = avx512_kernels.attention[dtype].backward_space(params);
    return matrix_may_pay(params, least) ? std::max(plain, matrix[dtype].backward_space(params)) : plain;
  };
  attention.backward = [](const AttentionParams& params, const HeadPointers* heads, const HeadGradients* gradients,
                          int64_t part, int64_t parts, void* partial, void* space) {
    const auto plain = avx512_kernels.attention[dtype].backward;
    if (matrix_pays(params, least))
      matrix[dtype].backward(params, heads, gradients, part, parts, partial, space, plain);
    else
      plain(params, heads, gradients, part, parts, partial, space);
  };
}
// the attention of one dtype on the matrix unit
template <int dtype, const MatrixKernels (&matrix)[dtype_count], const Least& least>
void take_matrix(KernelTable& t) {
  AttentionKernels& attention = t.attention[dtype];
  attention.forward_space = [](const AttentionParams& params, int64_t rows) {
    const AttentionKernels& table = avx512_kernels.attention[dtype];
    const int64_t plain = table.forward_space(params, std::min(rows, table.forward_tile * table.forward_tiles));
    return matrix_may_pay(params, least) ? std::max(plain, matrix[dtype].forward_space(params, rows)) : plain;
  };
  attention.forward = [](const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t rows,
                         void* space) {
    if (matrix_pays(params, least))
      matrix[dtype].forward(params, head, first, rows, space, plain_forward<dtype>);
    else
      plain_forward<dtype>(params, head, first, rows, space);
  };
  take_matrix_backward<dtype, matrix, least>(attention);
  attention.weights_space = [](const AttentionParams& params) {
    const int64_t plain = avx512_kernels.attention[dtype].weights_space(params);
    return matrix_may_pay(params, least) ? std::max(plain, matrix[dtype].weights_space(params)) : plain;
  };
  attention.weights = [](const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t rows,
                         void* space) {
    const auto plain = avx512_kernels.attention[dtype].weights;
    if (matrix_pays(params, least))
      matrix[dtype].weights(params, head, first, rows, space, plain);
    else
      plain(params, head, first, rows, space);
  };
}
const KernelTable& avx512_bf16_table() {
  static const KernelTable table = [] {
    KernelTable t = with_pairs<avx512_bf16_forward, avx512_bf16_pairs, avx512_kernels>();
    take_matrix_backward<of_bf16, avx512_bf16_matrix, of_pairs>(t.attention[of_bf16]);
    return t;
  }();
  return table;
}
constexpr const DecodeKernels& plain_decode(int stored) {
  return stored == 0 ? avx512_kernels.decode[of_bf16] : avx512_kernels.quantized[of_bf16 - 1][stored - 1].decode;
}
// decoding by bfloat16 queries on the matrix unit, where there are many rows
template <int stored>
void take_matrix_decode(DecodeKernels& t) {
  t.space = [](const DecodeParams& params, int64_t rows) {
    const int64_t plain = plain_decode(stored).space(params, rows);
    return amx_decode[stored].takes(rows) ? std::max(plain, amx_decode[stored].space(params, rows)) : plain;
  };
  t.chunk = [](const DecodeParams& params, const DecodeRows& rows, const DecodeRun* runs, int64_t n_runs, void* partial,
               void* space) {
    if (!amx_decode[stored].takes(rows.count) || !amx_decode[stored].chunk(params, rows, runs, n_runs, partial, space))
      plain_decode(stored).chunk(params, rows, runs, n_runs, partial, space);
  };
}
const KernelTable& amx_table() {
  static const KernelTable table = [] {
    KernelTable t = avx512_kernels;
    t.isa = "amx";
    take_matrix<static_cast<int>(DType::f32), amx_matrix, of_three_parts>(t);
    take_matrix<of_bf16, amx_matrix, of_one_part>(t);
    take_matrix<static_cast<int>(DType::f16), amx_matrix, of_two_parts>(t);
    take_matrix_decode<0>(t.decode[of_bf16]);
    take_matrix_decode<1>(t.quantized[of_bf16 - 1][0].decode);
    take_matrix_decode<2>(t.quantized[of_bf16 - 1][1].decode);
    return t;
  }();
  return table;
}
const KernelTable& amx_fp16_table() {
  static const KernelTable table = [] {
    KernelTable t = amx_table();
    t.isa = "amx_fp16";
    take_matrix<static_cast<int>(DType::f16), amx_fp16_matrix, of_one_part>(t);
    return t;
  }();
  return table;
}
#endif
#endif
template <const KernelTable& kernels>
const KernelTable& table() {
  return kernels;
}

// __builtin_cpu_supports looks at CPUID and at XGETBV: the operating system must save the registers, too.
const IsaEntry entries[] = {
#ifdef ATTNJOURNEY_X86
    {amx_fp16_table, amx_fp16_runs},
    {amx_table, amx_runs},
    {avx512_bf16_table, avx512_bf16_runs, pairs_pay},
    {table<avx512_kernels>, avx512_runs},
    {table<avx2_kernels>, avx2_runs},
#endif
#ifdef ATTNJOURNEY_ARM64
    {neon_bf16_table, neon_bf16_runs},
    {table<neon_kernels>, [] { return true; }},
#endif
    {table<scalar_kernels>, [] { return true; }},
};
constexpr int entry_count = sizeof(entries) / sizeof(entries[0]);

const KernelTable& choose() {
  choose_tuning();
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
    if (e.runs() && (!e.pays || e.pays())) return e.table();
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
