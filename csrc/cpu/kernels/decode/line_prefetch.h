// The cache lines that a product over few rows will read, prefetched in the order of their turn and at an even pace:
// the hardware's own prefetcher stops at every page and does not know what comes after a block of keys. Lines that come
// in bursts, or too late by the latency of memory, cost a quarter of its bandwidth: an even
// pace took dense float32 from 0.73 to 0.95 of it.
#pragma once
#include "cpu/kernels/common/common.h"
#include "decode/params.h"

namespace attnjourney {
inline namespace ATTN_ISA {

// Keys first .. first + count: from key `offset` of run `run` on, into the runs that follow.
struct DecodeBlock {
  int64_t run, offset, first, count;
};

// The runs of a chunk in blocks of at most `keys` keys without a gap.
class BlockWalk {
 public:
  ATTN_INLINE BlockWalk(const DecodeRun* runs, int64_t n, int64_t keys) : runs_(runs), n_(n), keys_(keys) {}
  ATTN_INLINE bool next(DecodeBlock& b) {
    if (run_ == n_) return false;
    b = {run_, offset_, runs_[run_].first + offset_, 0};
    while (run_ < n_ && b.count < keys_ && runs_[run_].first + offset_ == b.first + b.count) {
      const int64_t n = min_of(runs_[run_].count - offset_, keys_ - b.count);
      b.count += n;
      offset_ += n;
      if (offset_ == runs_[run_].count) run_++, offset_ = 0;
    }
    return true;
  }
  // f(run, offset, count, before) for the pieces of a block; `before` keys of it lie before the piece
  template <class F>
  static ATTN_INLINE void pieces(const DecodeRun* runs, const DecodeBlock& b, F&& f) {
    int64_t u = b.run, k = b.offset;
    for (int64_t done = 0; done < b.count; u++, k = 0) {
      const int64_t n = min_of(runs[u].count - k, b.count - done);
      f(runs[u], k, n, done);
      done += n;
    }
  }

  ATTN_INLINE int64_t size() const { return n_; }

 private:
  const DecodeRun* runs_;
  int64_t n_, keys_, run_ = 0, offset_ = 0;
};

class LinePrefetch {
 public:
  // rows of one matrix
  ATTN_INLINE LinePrefetch(const void* rows, int64_t count, int64_t width, int64_t stride)
      : walk_(nullptr, 0, 0), row_(static_cast<const char*>(rows)), stride_(stride), width_(width), rows_(count) {
    join_rows();
  }
  // the keys of each block of the walk, then its values, unless they are part of the keys; bytes
  ATTN_INLINE LinePrefetch(const DecodeRun* runs, const BlockWalk& walk, int64_t key_width, int64_t key_stride,
                           int64_t value_width, int64_t value_stride)
      : runs_(runs), walk_(walk), widths_{key_width, value_width}, strides_{key_stride, value_stride} {}

  // `bytes` for every `units` of work, the first `lead` bytes immediately
  ATTN_INLINE void start(int64_t bytes, int64_t units, int64_t lead) {
    rate_ = (bytes * (one / 64) + units - 1) / units;
    credit_ = lead * (one / 64);
    step(0);
  }
  ATTN_INLINE void step(int64_t units) {
    const int64_t credit = credit_ + units * rate_;
    credit_ = credit % one;
    const char *p = at_, *end = end_;
    for (int64_t n = credit / one; n > 0; n--) {
      if (p >= end) {
        p = next();
        if (!p) return;
        end = end_;
      }
      __builtin_prefetch(p);
      p += 64;
    }
    at_ = p;
  }

 private:
  static constexpr int64_t one = int64_t{1} << 16;  // credit for a line
  static constexpr int64_t pages_before = 3;        // runs

  const char* next();  // next_line.h
  // blocks of a paged cache lie anywhere: their pages are prefetched (for the TLB) before their lines
  ATTN_INLINE void touch(const DecodeRun& r) const {
    const char* const p = static_cast<const char*>(part_ ? r.value : r.key);
    for (int64_t i = 0; i < r.count * strides_[part_]; i += 4096) __builtin_prefetch(p + i);
  }
  ATTN_INLINE void join_rows() {
    if (stride_ != width_) return;
    width_ *= rows_;
    rows_ = rows_ > 0;
  }

  const DecodeRun* runs_ = nullptr;
  BlockWalk walk_;
  int64_t widths_[2] = {0, 0}, strides_[2] = {0, 0};
  DecodeBlock block_{0, 0, 0, 0};
  int part_ = 0;
  int64_t run_ = 0, offset_ = 0, left_ = 0;  // of the block
  const char* row_ = nullptr;
  int64_t stride_ = 0, width_ = 0, rows_ = 0;  // of the piece
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t rate_ = 0, credit_ = 0;
};

}  // namespace ATTN_ISA
}  // namespace attnjourney
