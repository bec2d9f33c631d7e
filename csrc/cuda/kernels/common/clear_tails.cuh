// Writes what Tails say.
#pragma once
#include "cuda/ptx/sm80.cuh"
#include "tails.cuh"

namespace attnjourney {

constexpr int kTailThreads = 256, kTailBlocks = 64;

// grid: kTailBlocks for each tail
__global__ void __launch_bounds__(kTailThreads) clear_tails(const Tails tails) {
  const Tail& t = tails.tail[blockIdx.x / kTailBlocks];
  if (t.rows == 0) return;
  const int first = *t.begin, width = t.heads * t.words;
  const int64_t count = int64_t{t.rows - first} * width;
  for (int64_t i = blockIdx.x % kTailBlocks * kTailThreads + threadIdx.x; i < count; i += kTailBlocks * kTailThreads) {
    const auto row = static_cast<int>(i / width), rest = static_cast<int>(i % width);
    const int head = rest / t.words, word = rest % t.words;
    *reinterpret_cast<uint32_t*>(t.data + (first + row) * t.row + head * t.head + word * 4) = word % 2 ? t.odd : t.even;
  }
}

}  // namespace attnjourney
