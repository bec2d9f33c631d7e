// How linear attention is shared out over threads: whole heads, or pieces of the sequence, whose states are summed in a
// first pass and chained in a second. The pieces follow from the shape and the sums are the same either way, so that
// results have the same bits for any number of threads.
#pragma once
#include <cstring>
#include <functional>
#include <vector>

#include "core/aten.h"
#include "cpu/dispatch.h"
#include "cpu/threads.h"

namespace attnjourney {

// A block as in kernels/linear/forward.h: [rows][ld], then the last dimension of keys.
struct StateShape {
  StateShape(int64_t rows, int64_t cols, int64_t lanes)
      : rows(rows), ld((cols + lanes - 1) / lanes * lanes), numbers(0) {
    const int64_t tail = (std::max(rows, cols) + lanes - 1) / lanes * lanes;  // z has head_dim numbers
    numbers = (rows * ld + tail + 15) / 16 * 16;
  }
  int64_t rows, ld, numbers;
};

// One walk over the sequence, from its first row or (reverse) its last.
struct Sweep {
  LinearKernels::Sum sum;
  LinearKernels::Sweep step;
  StateShape shape;
  bool reverse;
  int64_t sum_len, step_len;  // rows that are summed, rows that `step` writes; the same where causal
  bool writes;                // whether `step` has anything to write
  std::function<void(int64_t head, void* block)> begin = {};      // the first state
  std::function<void(int64_t head, const void* block)> end = {};  // what to do with the last one; may be empty
};

template <class C>
void add_block(C* to, const C* from, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] += from[i];
}

// Items are (sweep, head) or (sweep, head, piece).
template <class C>
void run_sweeps(const LinearParams& p, const LinearKernels& k, const std::vector<LinearHead>& heads,
                const std::vector<Sweep>& sweeps, const Tensor& like) {
  const int64_t n_heads = static_cast<int64_t>(heads.size()), n_sweeps = static_cast<int64_t>(sweeps.size());
  if (n_heads * n_sweeps == 0) return;
  // pieces of at least 8 chunks, so that states are small next to the sequence; enough of them for 32 threads
  const int64_t longest = std::max({p.q_len, p.kv_len, int64_t{1}}), least = 8 * k.chunk;
  int64_t pieces = std::max<int64_t>(1, std::min((longest + least - 1) / least, (32 + n_heads - 1) / n_heads));
  const int64_t piece = ((longest + pieces - 1) / pieces + k.chunk - 1) / k.chunk * k.chunk;
  pieces = (longest + piece - 1) / piece;

  const double per_row = static_cast<double>(p.group) * 2.0 * static_cast<double>(p.head_dim + k.chunk) *
                         static_cast<double>(2 * p.v_head_dim + p.head_dim);
  const int64_t threads =
      thread_count(n_heads * n_sweeps * pieces, per_row * static_cast<double>(longest * n_heads * n_sweeps));
  const int64_t whole = n_heads * n_sweeps;
  const bool by_head = p.causal && (pieces == 1 || threads == 1 || whole >= 4 * threads || whole % threads == 0);

  int64_t numbers = 0, most = 0;  // of all blocks: pieces + 1 a head and sweep
  std::vector<int64_t> first;
  for (const Sweep& s : sweeps) {
    first.push_back(numbers);
    numbers += n_heads * (pieces + 1) * s.shape.numbers;
    most = std::max(most, s.shape.numbers);
  }
  const Tensor blocks = aten::empty(like, {numbers * int64_t(sizeof(C)) + 64}, ScalarType::Byte);
  C* const base = reinterpret_cast<C*>((reinterpret_cast<uintptr_t>(blocks.mutable_data_ptr()) + 63) / 64 * 64);
  const auto block = [&](int64_t sweep, int64_t head, int64_t i) {
    return base + first[static_cast<size_t>(sweep)] +
           (head * (pieces + 1) + i) * sweeps[static_cast<size_t>(sweep)].shape.numbers;
  };
  const auto rows_of = [&](int64_t i, int64_t length) {
    return std::max<int64_t>(0, std::min(piece, length - i * piece));
  };
  const int64_t space = (k.space(p) + 63) / 64 * 64, scratch = space + most * int64_t(sizeof(C));

  if (by_head) {
    run_queue(whole, threads, scratch, [&](int64_t item, void* memory) {
      const int64_t w = item / n_heads, head = item % n_heads;
      const Sweep& s = sweeps[static_cast<size_t>(w)];
      const size_t bytes = static_cast<size_t>(s.shape.numbers) * sizeof(C);
      s.begin(head, block(w, head, s.reverse ? pieces : 0));
      C* const running = reinterpret_cast<C*>(static_cast<char*>(memory) + space);
      for (int64_t n = 0; n < pieces; n++) {
        const int64_t i = s.reverse ? pieces - 1 - n : n;
        const C* before = block(w, head, s.reverse ? i + 1 : i);
        C* after = block(w, head, s.reverse ? i : i + 1);
        C* also = after;
        std::memcpy(pieces == 1 ? after : running, before, bytes);
        if (pieces == 1)
          also = nullptr;
        else
          std::memset(after, 0, bytes);
        if (const int64_t count = rows_of(i, s.step_len))
          s.step(p, heads[static_cast<size_t>(head)], i * piece, count, also ? running : after, also, memory);
        if (also) add_block(after, before, s.shape.numbers);
      }
      if (s.end) s.end(head, block(w, head, s.reverse ? 0 : pieces));
    });
    return;
  }
  run_queue(whole * pieces, threads, scratch, [&](int64_t item, void* memory) {
    const int64_t w = item / pieces / n_heads, head = item / pieces % n_heads, i = item % pieces;
    const Sweep& s = sweeps[static_cast<size_t>(w)];
    C* const own = block(w, head, s.reverse ? i : i + 1);
    std::memset(own, 0, static_cast<size_t>(s.shape.numbers) * sizeof(C));
    const int64_t count = rows_of(i, s.sum_len);
    if (count) s.sum(p, heads[static_cast<size_t>(head)], i * piece, count, own, memory);
  });
  run_queue(whole, threads, 0, [&](int64_t item, void*) {
    const int64_t w = item / n_heads, head = item % n_heads;
    const Sweep& s = sweeps[static_cast<size_t>(w)];
    s.begin(head, block(w, head, s.reverse ? pieces : 0));
    for (int64_t n = 0; n < pieces; n++)
      add_block(block(w, head, s.reverse ? pieces - 1 - n : n + 1), block(w, head, s.reverse ? pieces - n : n),
                s.shape.numbers);
    if (s.end) s.end(head, block(w, head, s.reverse ? 0 : pieces));
  });
  run_queue(whole * pieces, threads, scratch, [&](int64_t item, void* memory) {
    const int64_t w = item / pieces / n_heads, head = item / pieces % n_heads, i = item % pieces;
    const Sweep& s = sweeps[static_cast<size_t>(w)];
    const int64_t count = rows_of(i, s.step_len);
    if (!s.writes || !count) return;
    C* const running = reinterpret_cast<C*>(static_cast<char*>(memory) + space);
    const int64_t from = p.causal ? (s.reverse ? i + 1 : i) : (s.reverse ? 0 : pieces);
    std::memcpy(running, block(w, head, from), static_cast<size_t>(s.shape.numbers) * sizeof(C));
    s.step(p, heads[static_cast<size_t>(head)], i * piece, count, running, nullptr, memory);
  });
}

}  // namespace attnjourney
