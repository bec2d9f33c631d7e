// Rows of numbers to bytes and back: number = byte times the row's scale. The scale takes the row's largest magnitude
// to the largest byte, so that an error is at most half a byte of it: 1/254 of that magnitude with int8, and with e4m3
// 1/16 of each number (and 2^-10 / 448 of that magnitude).
#pragma once
#include "cpu/kernels/common/common.h"

namespace attnjourney {
namespace {

template <class Stored>
struct ByteFormat;
template <>
struct ByteFormat<i8> {
  static constexpr float largest = 127.f;
  static constexpr bool has_nan = false;
};
template <>
struct ByteFormat<e4m3> {
  static constexpr float largest = 448.f;
  static constexpr bool has_nan = true;
};

// T: of the row. Stored: i8 or e4m3.
template <class T, class Stored>
struct QuantizedRows {
  using Format = ByteFormat<Stored>;
  // Returns the scale. Numbers that are not finite: e4m3 has a NaN for them; a row of int8 becomes NaN by its scale.
  static float quantize(const void* row_, int64_t n, void* bytes_) {
    const T* const row = static_cast<const T*>(row_);
    Stored* const bytes = static_cast<Stored*>(bytes_);
    const float top = largest_finite(row, n);
    constexpr float smallest_normal = 0x1p-126f;
    const float wanted = top / Format::largest;
    const float scale = top == 0.f ? 1.f : wanted < smallest_normal ? smallest_normal : wanted;
    for (int64_t i = 0; i < n; i++) store_one(bytes + i, load_one(row + i) / scale);
    return Format::has_nan || all_finite(row, n) ? scale : __builtin_nanf("");
  }
  static void dequantize(const void* bytes_, float scale, int64_t n, void* row_) {
    const Stored* const bytes = static_cast<const Stored*>(bytes_);
    T* const row = static_cast<T*>(row_);
    const Vf factor = Vf::set(scale);
    int64_t i = 0;
    for (; i + Vf::width <= n; i += Vf::width) store(row + i, load(bytes + i) * factor);
    for (; i < n; i++) store_one(row + i, load_one(bytes + i) * scale);
  }

 private:
  static ATTN_INLINE Vf finite_magnitude(Vf x) {  // 0 for what is not finite
    const Vf magnitude = max(x, Vf::zero() - x);
    return select(eq(x - x, Vf::zero()), magnitude, Vf::zero());
  }
  static float largest_finite(const T* row, int64_t n) {
    Vf lanes = Vf::zero();
    int64_t i = 0;
    for (; i + Vf::width <= n; i += Vf::width) lanes = max(finite_magnitude(load(row + i)), lanes);
    float of_lane[Vf::width];
    store(of_lane, lanes);
    float top = 0.f;
    for (int l = 0; l < Vf::width; l++) top = of_lane[l] > top ? of_lane[l] : top;
    for (; i < n; i++) {
      const float x = load_one(row + i), magnitude = x < 0.f ? -x : x;
      if (x - x == 0.f && magnitude > top) top = magnitude;
    }
    return top;
  }
  static bool all_finite(const T* row, int64_t n) {
    float bad = 0.f;  // 0 x is 0 for a finite x, else NaN
    for (int64_t i = 0; i < n; i++) bad += load_one(row + i) * 0.f;
    return bad == 0.f;
  }
};

}  // namespace
}  // namespace attnjourney
