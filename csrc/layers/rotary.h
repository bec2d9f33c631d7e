// Rotary position embedding (Su et al. 2021, arXiv 2104.09864): each pair of numbers of a query or key row turns by the
// angle of its position. Inside the layer operators on the freshly projected rows, and as the operator `rope`.
#pragma once
#include "core/aten.h"

namespace attnjourney {

// which two of a row's rotary_dim numbers are pair j
enum class RotaryLayout {
  half_split,   // j and j + rotary_dim / 2 (GPT-NeoX, Llama)
  interleaved,  // 2 j and 2 j + 1 (GPT-J, DeepSeek)
};

// The inverse rotation is the transposed one: it carries a gradient back.
enum class RotaryDirection { forward, inverse };

// Checks the tables cos, sin (seq, rotary_dim / 2), or (batch, seq, rotary_dim / 2) where the sequences have positions
// of their own; float32 or the dtype of x, both or neither given. Returns rotary_dim, 0 without tables.
int64_t check_rotary(const OptionalTensor& cos, const OptionalTensor& sin, int64_t batch, int64_t seq,
                     const char* like_name, const Tensor& like);

// What a device supplies. The first rotary_dim numbers of x (batch, heads, seq, dim), any strides with a dense last
// dimension, are turned in place; cos, sin as checked. Computed in float32, float64 for float64.
// With from (like x, other strides), x is written: what is turned, and the rest of a row, come from there.
using RotaryFunction = void (*)(const Tensor& x, const Tensor& cos, const Tensor& sin, RotaryLayout, RotaryDirection,
                                const OptionalTensor& from);

}  // namespace attnjourney
