// Which instance a call takes. Shared memory: a block may have 227 KB on compute capability 9.0 and 10.x, 163 on 8.0
// and 8.7, 99 on 8.6, 8.9 and 12.x. Every kernel is asserted to fit where it is launched; what needs more than 99 KB
// has a smaller one besides.
#pragma once
#include "cuda/launch.h"

namespace attnjourney {

// small: the kernel runs where Device::small() is true, too
constexpr bool fits(int bytes, bool small) { return bytes <= (small ? kSmallShared : kMiddleShared); }

// f<64>(), f<128>() or f<256>(); size: as backward_size says
template <class F>
void with_size(int size, F&& f) {
  if (size == 64) return f.template operator()<64>();
  if (size == 128) return f.template operator()<128>();
  f.template operator()<256>();
}

}  // namespace attnjourney
