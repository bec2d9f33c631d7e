// Between natural logarithms and those to base 2, in which kernels keep scores. Host and device.
#pragma once

namespace attnjourney {

constexpr double log2_e = 1.4426950408889634074, ln_2 = 0.69314718055994530942;

}  // namespace attnjourney
