// LinePrefetch::next: not inline, so that one copy of an instruction set, in <isa>.cpp, serves all its files, and the
// linker never picks one that was compiled for a newer processor.
#pragma once
#include "cpu/kernels/decode/line_prefetch.h"

namespace attnjourney {
inline namespace ATTN_ISA {

const char* LinePrefetch::next() {
  while (rows_ == 0) {
    if (left_ == 0) {
      if (part_ == 0 && widths_[1] > 0 && block_.count > 0) {
        part_ = 1;
      } else {
        part_ = 0;
        if (!runs_ || !walk_.next(block_)) {
          rate_ = credit_ = 0;
          return nullptr;
        }
      }
      run_ = block_.run, offset_ = block_.offset, left_ = block_.count;
    }
    if (run_ + pages_before < walk_.size()) touch(runs_[run_ + pages_before]);
    const DecodeRun& r = runs_[run_++];
    rows_ = min_of(left_, r.count - offset_);
    left_ -= rows_;
    stride_ = strides_[part_], width_ = widths_[part_];
    row_ = static_cast<const char*>(part_ ? r.value : r.key) + offset_ * stride_;
    offset_ = 0;
    join_rows();
  }
  const char* p = row_;
  rows_--;
  row_ += stride_;
  end_ = p + width_;
  return p - reinterpret_cast<uintptr_t>(p) % 64;
}

}  // namespace ATTN_ISA
}  // namespace attnjourney
