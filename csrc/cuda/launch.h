// From an entry file to the kernels: one function per path and dtype, defined in inst/, which picks the kernel by
// head_dim and launches it.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda/kernels/common/backward_task.cuh"
#include "cuda/kernels/fp32/fp16x2_task.cuh"
#include "sizes.h"

namespace attnjourney {

inline void cuda_check(cudaError_t e, const char* what) {
  if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
}

void sm80_forward_bf16(ForwardTask, bool ranged, const Device&, cudaStream_t);
void sm80_forward_fp16(ForwardTask, bool ranged, const Device&, cudaStream_t);
void sm80_full_forward_bf16(ForwardTask, bool ranged, const Device&, cudaStream_t);
void sm80_full_forward_fp16(ForwardTask, bool ranged, const Device&, cudaStream_t);
void sm90_forward_bf16(ForwardTask, bool ranged, const Device&, cudaStream_t);
void sm90_forward_fp16(ForwardTask, bool ranged, const Device&, cudaStream_t);

// queries, keys and values in e4m3
struct Fp8Task;
void sm90_fp8_forward_e4m3(Fp8Task, cudaStream_t);

// packed rows over a paged cache, of the sequences that are not decoding's
struct PagedKeys;
void sm80_paged_forward_bf16(ForwardTask, const PagedKeys&, cudaStream_t);
void sm80_paged_forward_fp16(ForwardTask, const PagedKeys&, cudaStream_t);
void fp32_paged_forward_float(ForwardTaskOf<float>, const PagedKeys&, cudaStream_t);
void fp32_paged_forward_double(ForwardTaskOf<double>, const PagedKeys&, cudaStream_t);

// With options; kinds: of tiles of 64 rows, and of 128 keys, in the forward as sm90_forward_keys says.
struct TileKinds;
void sm90_full_forward_bf16(ForwardTask, const TileKinds& kinds, const Device&, cudaStream_t);
void sm90_full_forward_fp16(ForwardTask, const TileKinds& kinds, const Device&, cudaStream_t);

// What a mask does to tiles of rows and keys, for a kernel that walks them (kernels/common/tile_kinds.cuh).
void sm80_tile_kinds(const SequenceTask&, const TileKinds&, int keys, cudaStream_t);

// What rows past the last packed sequence hold (kernels/common/clear_tails.cuh).
struct Tails;
void sm80_clear_tails(const Tails&, cudaStream_t);

// float on Hopper without options, head_dim up to 128: planes first, then the products. Does nothing where numbers do
// not split (Fp16x2Planes::needs_fallback), and then the fallback does all.
void sm90_fp16x2_forward_float(ForwardTask, const Fp16x2Planes&, const Device&, cudaStream_t);
void fp32_forward_fallback_float(ForwardTask, const uint32_t* needs_fallback, const Device&, cudaStream_t);

// float and double: all options, on mma.sync
void fp32_forward_float(ForwardTaskOf<float>, bool ranged, const Device&, cudaStream_t);
void fp32_forward_double(ForwardTaskOf<double>, bool ranged, const Device&, cudaStream_t);
void fp32_backward_float(BackwardTaskOf<float>, bool ranged, const Device&, cudaStream_t);
void fp32_backward_double(BackwardTaskOf<double>, bool ranged, const Device&, cudaStream_t);
// of sinks and slopes, from what a backward has left
void fp32_head_gradients_float(const BackwardTaskOf<float>&, cudaStream_t);
void fp32_head_gradients_double(const BackwardTaskOf<double>&, cudaStream_t);

// the derivative in a direction, all options (kernels/common/jvp_task.cuh)
template <class Real>
struct JvpTaskOf;
void sm80_jvp_bf16(JvpTaskOf<float>, cudaStream_t);
void sm80_jvp_fp16(JvpTaskOf<float>, cudaStream_t);
void fp32_jvp_float(JvpTaskOf<float>, cudaStream_t);
void fp32_jvp_double(JvpTaskOf<double>, cudaStream_t);
// that of the backward (kernels/common/backward_jvp_task.cuh)
template <class Real>
struct BackwardJvpTaskOf;
void sm80_backward_jvp_bf16(BackwardJvpTaskOf<float>, cudaStream_t);
void sm80_backward_jvp_fp16(BackwardJvpTaskOf<float>, cudaStream_t);
void fp32_backward_jvp_float(BackwardJvpTaskOf<float>, cudaStream_t);
void fp32_backward_jvp_double(BackwardJvpTaskOf<double>, cudaStream_t);

// float without options, head_dim up to 128: the same in two steps
void fp16x2_backward_float(const BackwardTask&, const Fp16x2BackwardPlanes&, const Device&, cudaStream_t);
void fp32_backward_fallback_float(const BackwardTask&, const uint32_t* needs_fallback, const Device&, cudaStream_t);

void sm80_backward_bf16(BackwardTask, bool ranged, const Device&, cudaStream_t);
void sm80_backward_fp16(BackwardTask, bool ranged, const Device&, cudaStream_t);
void sm80_full_backward_bf16(BackwardTask, bool ranged, const Device&, cudaStream_t);
void sm80_full_backward_fp16(BackwardTask, bool ranged, const Device&, cudaStream_t);
// head dimensions above 256
void sm80_wide_forward_bf16(ForwardTask, cudaStream_t);
void sm80_wide_forward_fp16(ForwardTask, cudaStream_t);
void sm80_wide_backward_bf16(const BackwardTask&, cudaStream_t);
void sm80_wide_backward_fp16(const BackwardTask&, cudaStream_t);
void sm90_backward_bf16(BackwardTask, bool ranged, const Device&, cudaStream_t);
void sm90_backward_fp16(BackwardTask, bool ranged, const Device&, cudaStream_t);
void sm90_parts_backward_bf16(BackwardTask, bool ranged, const Device&, cudaStream_t);
void sm90_parts_backward_fp16(BackwardTask, bool ranged, const Device&, cudaStream_t);
void sm90_columns_backward_bf16(BackwardTask, bool ranged, const Device&, cudaStream_t);
void sm90_columns_backward_fp16(BackwardTask, bool ranged, const Device&, cudaStream_t);
// kinds: of tiles of tile_rows x tile_keys
void sm90_full_backward_bf16(BackwardTask, const TileKinds& kinds, const Device&, cudaStream_t);
void sm90_full_backward_fp16(BackwardTask, const TileKinds& kinds, const Device&, cudaStream_t);
// of sinks, slopes and a floating mask, after the Hopper kernel, which writes some masks' gradients itself, and after
// that of more than 256 columns
void sm80_option_gradients_bf16(const BackwardTask&, cudaStream_t);
void sm80_option_gradients_fp16(const BackwardTask&, cudaStream_t);

// Allows a kernel its shared memory: a driver call of a microsecond or less.
template <class Kernel>
void allow_shared(Kernel kernel, int shared_bytes) {
  if (shared_bytes > 48 * 1024) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
               (std::to_string(shared_bytes) + " bytes of shared memory for a block").c_str());
  }
}

template <class Kernel, class... Args>
void launch_kernel(Kernel kernel, int64_t blocks, int threads, int shared_bytes, cudaStream_t stream, Args... args) {
  if (blocks == 0) return;
  if (blocks > 0x7fffffff) throw std::invalid_argument("query: too many tiles for one CUDA grid");
  allow_shared(kernel, shared_bytes);
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(args...);
  cuda_check(cudaGetLastError(), "kernel launch");
}

}  // namespace attnjourney
