// The list of architectures: what each one's kernels serve. A new one (sm_100) is an entry before those it can fall
// back on, with the kernels it has; no other file says what runs where.
#include "architectures.h"

#include "kernels/decode/latent_size.cuh"

namespace attnjourney {
namespace {

constexpr bool is_16_bit(ElementType type) { return type == ElementType::bf16 || type == ElementType::fp16; }

// Hopper's own kernels for 16-bit numbers serve head dimensions up to 256; above, sm_80's run there.
constexpr bool is_wide(const AttentionCase& c) {
  return is_16_bit(c.type) && backward_size(c.head_dim, c.v_head_dim) > 256;
}
constexpr bool serves_sm90(const AttentionCase& c) { return is_16_bit(c.type) && !is_wide(c) && c.kv_len > 0; }
constexpr bool serves_sm90_backward(const AttentionCase& c) {
  return serves_sm90(c) && backward_size(c.head_dim, c.v_head_dim) <= 128;
}
// float32 in planes of halves
constexpr bool serves_fp16x2(const AttentionCase& c) {
  return c.type == ElementType::fp32 && !c.full && backward_size(c.head_dim, c.v_head_dim) <= 128 &&
         c.q_len >= kFp16x2Least && c.kv_len >= kFp16x2Least;
}

template <bool Full>
constexpr BackwardTiles tiles_16_bit(int size, bool small) {
  const int rows = backward_rows(size);
  return {rows, backward_keys(size, Full, small), rows, size};
}
constexpr BackwardTiles wide_tiles(int, bool) { return {16, 32, 16, 512}; }
constexpr BackwardTiles parts_tiles(int, bool) { return {64, 128, 64, 192}; }
constexpr BackwardTiles columns_tiles(int, bool) { return {64, 64, 64, 256}; }
constexpr BackwardTiles fp32_tiles(int size, bool small) {
  const int rows = fp32_rows(size, 4, small);
  return {rows, fp32_keys(size, 4), rows > fp16x2_rows(size) ? rows : fp16x2_rows(size), size};
}
constexpr BackwardTiles fp64_tiles(int size, bool small) {
  const int rows = fp32_rows(size, 8, small);
  return {rows, fp32_keys(size, 8), rows, size};
}

constexpr ForwardKernelOf<float> sm90_forward[] = {
    {"sm90_full_forward", [](const AttentionCase& c) { return c.full && serves_sm90(c); }, launches::sm90_full_forward},
    {"sm90_forward", serves_sm90, launches::sm90_forward},
    {"sm90_fp16x2_forward", serves_fp16x2, launches::sm90_fp16x2_forward},
};
constexpr BackwardKernelOf<float> sm90_backward[] = {
    {.name = "sm90_full_backward",
     .serves = [](const AttentionCase& c) { return c.full && serves_sm90_backward(c); },
     .launch = launches::sm90_full_backward,
     .tiles = tiles_16_bit<false>,
     .one_head_a_block = true,
     .writes_mask_gradient = true},
    {.name = "sm90_full_columns_backward",
     .serves = [](const AttentionCase& c) { return c.full && serves_sm90(c); },
     .launch = launches::sm90_full_backward,
     .tiles = columns_tiles,
     .one_head_a_block = true,
     .writes_mask_gradient = true},
    {.name = "sm90_backward",
     .serves = serves_sm90_backward,
     .launch = launches::sm90_backward,
     .tiles = tiles_16_bit<false>,
     .one_head_a_block = true,
     .finishes_short_rows = true},
    {.name = "sm90_parts_backward",
     .serves =
         [](const AttentionCase& c) { return serves_sm90(c) && !c.full && is_d192v128(c.head_dim, c.v_head_dim); },
     .launch = launches::sm90_parts_backward,
     .tiles = parts_tiles,
     .one_head_a_block = true,
     .finishes_short_rows = true},
    {.name = "sm90_columns_backward",
     .serves = [](const AttentionCase& c) { return !c.full && serves_sm90(c); },
     .launch = launches::sm90_columns_backward,
     .tiles = columns_tiles,
     .one_head_a_block = true,
     .finishes_short_rows = true},
};
constexpr LatentKernel sm90_latents[] = {
    // reads no masks and no bytes, and is for large latents and many rows
    {"sm90_latents",
     [](const LatentCase& c, const Device&) {
       return is_16_bit(c.type) && c.chunked && c.rows > 16 && !c.masked && !c.bytes &&
              c.v_head_dim > kLatentValueDim / 2 && c.near;
     },
     launches::sm90_latents},
};

// mma.sync: every GPU from compute capability 8.0 on
constexpr ForwardKernelOf<float> sm80_forward[] = {
    {"sm80_wide_forward", is_wide, launches::sm80_wide_forward},
    {"sm80_full_forward", [](const AttentionCase& c) { return c.full && is_16_bit(c.type); },
     launches::sm80_full_forward},
    {"sm80_forward", [](const AttentionCase& c) { return is_16_bit(c.type); }, launches::sm80_forward},
    {"fp32_forward", [](const AttentionCase&) { return true; }, launches::fp32_forward},
};
constexpr ForwardKernelOf<double> fp64_forward[] = {
    {"fp64_forward", [](const AttentionCase&) { return true; }, launches::fp64_forward},
};
constexpr BackwardKernelOf<float> sm80_backward[] = {
    {.name = "sm80_wide_backward", .serves = is_wide, .launch = launches::sm80_wide_backward, .tiles = wide_tiles},
    {.name = "sm80_full_backward",
     .serves = [](const AttentionCase& c) { return c.full && is_16_bit(c.type); },
     .launch = launches::sm80_full_backward,
     .tiles = tiles_16_bit<true>},
    {.name = "sm80_backward",
     .serves = [](const AttentionCase& c) { return is_16_bit(c.type); },
     .launch = launches::sm80_backward,
     .tiles = tiles_16_bit<false>},
    {.name = "fp16x2_backward", .serves = serves_fp16x2, .launch = launches::fp16x2_backward, .tiles = fp32_tiles},
    {.name = "fp32_backward",
     .serves = [](const AttentionCase&) { return true; },
     .launch = launches::fp32_backward,
     .tiles = fp32_tiles},
};
constexpr BackwardKernelOf<double> fp64_backward[] = {
    {.name = "fp64_backward",
     .serves = [](const AttentionCase&) { return true; },
     .launch = launches::fp64_backward,
     .tiles = fp64_tiles},
};
constexpr LatentKernel sm80_latents[] = {
    {"sm80_latents_64_rows",
     [](const LatentCase& c, const Device& device) {
       return is_16_bit(c.type) && c.chunked && c.rows > 32 && !device.small();
     },
     launches::sm80_latents_64_rows},
    {"sm80_latents_32_rows", [](const LatentCase& c, const Device&) { return is_16_bit(c.type) && c.chunked; },
     launches::sm80_latents_32_rows},
    {"fma_latents", [](const LatentCase&, const Device&) { return true; }, launches::fma_latents},
};

constexpr Architecture all[] = {
    {.name = "sm90",
     .runs_on = [](const Device& d) { return d.capability == 90; },  // sm_90a is for no other GPU
     .kernels = {sm90_forward, sm90_backward},
     .fp64_kernels = {},
     .latent_kernels = sm90_latents},
    {.name = "sm80",
     .runs_on = [](const Device& d) { return d.capability >= 80; },
     .kernels = {sm80_forward, sm80_backward},
     .fp64_kernels = {fp64_forward, fp64_backward},
     .latent_kernels = sm80_latents},
};

}  // namespace

std::span<const Architecture> architectures() { return all; }

}  // namespace attnjourney
