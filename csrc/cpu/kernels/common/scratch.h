// A kernel's scratch: its buffers take pieces of one allocation, and counting them is the same code without memory.
#pragma once
#include "common.h"

namespace attnjourney {
namespace {

class Scratch {
 public:
  explicit Scratch(void* memory) : memory_(static_cast<char*>(memory)) {}

  // `count` numbers, from a cache line on
  template <class X>
  ATTN_INLINE X* take(int64_t count) {
    char* const piece = memory_ ? memory_ + used_ : nullptr;
    used_ += round_up(count * int64_t(sizeof(X)), 64);
    return reinterpret_cast<X*>(piece);
  }
  int64_t used() const { return used_; }  // bytes

 private:
  char* memory_;
  int64_t used_ = 0;
};

// Buffers(args..., scratch) in memory, and the bytes that they take
template <class Buffers, class... Args>
ATTN_INLINE Buffers buffers_in(void* memory, const Args&... args) {
  Scratch scratch(memory);
  return Buffers(args..., scratch);
}
template <class Buffers, class... Args>
int64_t scratch_bytes(const Args&... args) {
  Scratch counting(nullptr);
  static_cast<void>(Buffers(args..., counting));
  return counting.used();
}

}  // namespace
}  // namespace attnjourney
