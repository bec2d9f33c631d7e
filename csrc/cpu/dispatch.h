// Which CPU kernels run: one table per ISA, one ordered list (best first), picked once per process.
#pragma once
#include <cstdint>

#include "attention/params.h"
#include "decode/params.h"
#include "linear/gated_params.h"
#include "linear/params.h"

namespace attnjourney {

enum class DType : int8_t { f64, f32, bf16, f16 };
constexpr int dtype_count = 4;
enum class ByteDType : int8_t { int8, e4m3 };
constexpr int byte_dtype_count = 2;

// Attention in one dtype. Spaces are bytes of 64-byte aligned scratch for one thread.
struct AttentionKernels {
  int64_t forward_tile;                                  // query rows
  int64_t forward_tiles;                                 // the most tiles that one forward call takes
  int64_t (*forward_key_block)(const AttentionParams&);  // keys
  int64_t backward_tile, backward_key_block;
  int64_t (*forward_space)(const AttentionParams&, int64_t rows);
  void (*forward)(const AttentionParams&, const HeadPointers&, int64_t first_row, int64_t rows, void* space);
  int64_t (*backward_space)(const AttentionParams&);
  // the share `part` of `parts` of one key/value head; see kernels/attention/walk.h
  void (*backward)(const AttentionParams&, const HeadPointers* group, const HeadGradients* gradients, int64_t part,
                   int64_t parts, void* partial_query, void* space);
  void (*sum_parts)(const AttentionParams&, const void* partial_query, int64_t part_stride, int64_t parts,
                    int64_t first_row, int64_t rows, const HeadGradients&);
  // the weights of up to backward_tile rows; see kernels/attention/weights.h
  int64_t (*weights_space)(const AttentionParams&);
  void (*weights)(const AttentionParams&, const HeadPointers&, int64_t first_row, int64_t rows, void* space);
  // derivatives in a direction; see kernels/attention/jvp.h and kernels/attention/backward_jvp.h
  int64_t (*jvp_space)(const AttentionParams&, int64_t rows);
  void (*jvp)(const AttentionParams&, const HeadPointers&, const HeadTangents&, int64_t first_row, int64_t rows,
              void* space);
  int64_t (*backward_jvp_space)(const AttentionParams&);
  void (*backward_jvp)(const AttentionParams&, const HeadPointers* group, const HeadTangents* tangents,
                       const HeadGradients* gradients, int64_t part, int64_t parts, void* partial_query, void* space);
};

// Decoding in one dtype, see kernels/decode/decode.h. Sizes are bytes; scratch and partials are 64-byte aligned.
struct DecodeKernels {
  int64_t few_rows;  // query rows of a head up to which they are faster than AttentionKernels::forward
  int64_t (*space)(const DecodeParams&, int64_t rows);
  int64_t (*partial_size)(const DecodeParams&, int64_t rows);
  void (*chunk)(const DecodeParams&, const DecodeRows&, const DecodeRun* runs, int64_t n_runs, void* partial,
                void* space);
  bool (*merge)(const DecodeParams&, const DecodeRows&, void* partials, int64_t chunks);
  int64_t (*product_space)(const HeadProductParams&);
  void (*product)(const HeadProductParams&, void* space);
};

// Caches of bytes with a scale for each row, see kernels/decode/quantized_rows.h; `decode` in the dtype of the query.
struct QuantizedKernels {
  DecodeKernels decode;
  float (*quantize)(const void* row, int64_t n, void* bytes);  // returns the scale
  void (*dequantize)(const void* bytes, float scale, int64_t n, void* row);
};

// Linear attention in one dtype: see kernels/linear/forward.h and kernels/linear/backward.h. Blocks and
// scratch (bytes, for any of the functions) are 64-byte aligned.
struct LinearKernels {
  int64_t chunk;  // rows
  int64_t lanes;  // what the rows of a block are rounded up to
  int64_t (*space)(const LinearParams&);
  using Sum = void (*)(const LinearParams&, const LinearHead&, int64_t first, int64_t count, void* block, void* space);
  using Sweep = void (*)(const LinearParams&, const LinearHead&, int64_t first, int64_t count, void* running,
                         void* also, void* space);
  Sum sum_keys;
  Sweep forward;
  Sum sum_keys_transposed;
  Sweep backward_query;
  Sum sum_queries;
  Sweep backward_key;
};

// Gated linear attention in one dtype, a state head at a time: see kernels/gated/forward.h. Scratch is in bytes.
struct GatedKernels {
  int64_t lanes;      // what the columns of a part of a head are a multiple of
  int64_t step_rows;  // sequences of up to so many rows are `step`'s
  int64_t (*step_space)(const GatedParams&, int64_t cols);
  void (*step)(const GatedParams&, const GatedHead&, void* space);
  int64_t (*forward_space)(const GatedParams&, int64_t cols);
  void (*forward)(const GatedParams&, const GatedHead&, void* space);
  int64_t (*backward_space)(const GatedParams&, int64_t cols, int64_t len);
  void (*backward)(const GatedParams&, const GatedHead&, void* space);
};

struct GatedTable {
  GatedKernels of[dtype_count];
};

struct SparseTable;  // of cpu/sparse/kernels.h

struct KernelTable {
  const char* isa;
  AttentionKernels attention[dtype_count];
  AttentionKernels attention_fp8[dtype_count - 1];  // inputs in e4m3, outputs of every dtype but f64: forward alone
  DecodeKernels decode[dtype_count];
  QuantizedKernels quantized[dtype_count - 1][byte_dtype_count];  // of every dtype but the first, f64
  LinearKernels linear[dtype_count];
  const GatedTable* gated;
  const SparseTable* sparse;
};

// What products of bfloat16 pairs change in a table, all of it for bfloat16. `plain`: the table's own forward, for rows
// with scores so large that their last bits matter, which are there those of the backward. The jvp returns false if
// there is such a row.
struct PairForward {
  const char* isa;
  decltype(AttentionKernels::forward_space) space;
  void (*run)(const AttentionParams&, const HeadPointers&, int64_t first_row, int64_t rows, void* space,
              decltype(AttentionKernels::forward) plain);
};
struct PairKernels {
  decltype(AttentionKernels::jvp_space) jvp_space;
  bool (*jvp)(const AttentionParams&, const HeadPointers&, const HeadTangents&, int64_t first_row, int64_t rows,
              void* space);
  decltype(DecodeKernels::space) decode_space;
  decltype(DecodeKernels::partial_size) decode_partial_size;
  decltype(DecodeKernels::chunk) decode_chunk;
  decltype(DecodeKernels::merge) decode_merge;
  LinearKernels linear;
};

// What a matrix unit changes for one dtype. `plain`: the table's own, for rows that numbers reach which are out of
// range, and rows with scores so large that their last bits matter.
struct MatrixKernels {
  int64_t backward_key_block;
  decltype(AttentionKernels::forward_space) forward_space;
  void (*forward)(const AttentionParams&, const HeadPointers&, int64_t first_row, int64_t rows, void* space,
                  decltype(AttentionKernels::forward) plain);
  decltype(AttentionKernels::backward_space) backward_space;
  void (*backward)(const AttentionParams&, const HeadPointers* group, const HeadGradients* gradients, int64_t part,
                   int64_t parts, void* partial_query, void* space, decltype(AttentionKernels::backward) plain);
  decltype(AttentionKernels::weights_space) weights_space;
  void (*weights)(const AttentionParams&, const HeadPointers&, int64_t first_row, int64_t rows, void* space,
                  decltype(AttentionKernels::weights) plain);
};

// Decoding of many rows on a matrix unit, for queries in bfloat16. chunk: false, and nothing written, where a number is
// out of range.
struct MatrixDecodeKernels {
  bool (*takes)(int64_t rows);
  decltype(DecodeKernels::space) space;
  bool (*chunk)(const DecodeParams&, const DecodeRows&, const DecodeRun* runs, int64_t n_runs, void* partial,
                void* space);
};

// Constants, all of them: code that ran when the library is loaded would be code of an ISA that the machine may lack.
extern const KernelTable scalar_kernels;
extern const GatedTable scalar_gated;
extern const SparseTable scalar_sparse;
#ifdef ATTNJOURNEY_X86
extern const KernelTable avx2_kernels, avx512_kernels;
extern const GatedTable avx2_gated, avx512_gated;
extern const SparseTable avx2_sparse, avx512_sparse;
extern const PairKernels avx512_bf16_pairs;
extern const PairForward avx512_bf16_forward;
extern const MatrixKernels amx_matrix[dtype_count];                 // none for float64
extern const MatrixKernels amx_fp16_matrix[dtype_count];            // of float16
extern const MatrixKernels avx512_bf16_matrix[dtype_count];         // the backward of bfloat16
extern const MatrixDecodeKernels amx_decode[1 + byte_dtype_count];  // of bfloat16, int8, e4m3
#endif
#ifdef ATTNJOURNEY_ARM64
extern const KernelTable neon_kernels;
extern const GatedTable neon_gated;
extern const SparseTable neon_sparse;
extern const PairKernels neon_bf16_pairs;
extern const PairForward neon_bf16_forward;
#endif

// The best table this machine can run, or the one ATTNJOURNEY_ISA names; throws where that one cannot run.
const KernelTable& kernels();

struct IsaEntry {
  const KernelTable& (*table)();
  bool (*runs)();            // CPU and operating system
  bool (*pays)() = nullptr;  // whether it is as fast as what follows it; null: always
};
// best first; the last always runs
const IsaEntry* isa_list(int& count);

}  // namespace attnjourney
