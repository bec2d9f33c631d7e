// The rotation of rows (csrc/layers/rotary.h): a thread turns V pairs of one row, or copies V of the numbers behind
// them.
#pragma once
#include "cuda/kernels/common/forward_task.cuh"
#include "cuda/kernels/common/numbers.cuh"

namespace attnjourney {

struct RotaryTask {
  void* x;           // [batch, heads, seq, dim], the last dimension dense
  const void* from;  // what is turned, shaped like x; null: x itself
  const void* cos;   // [batch or 1, seq, half], float, double for double
  const void* sin;
  Strides x_strides, from_strides;
  int64_t table_batch;  // stride of cos and sin
  int64_t positions;    // batch * seq
  int seq, heads, dim, half;
  bool interleaved, inverse;

  // pairs and numbers that a thread takes at once
  __host__ __device__ int units(int v) const { return half / v + (from ? (dim - 2 * half) / v : 0); }
};

constexpr int kRotaryThreads = 128;
// A block takes one position after another with all heads, or several positions that fit its threads.
inline int64_t rotary_blocks(const RotaryTask& task, int v) {
  const int64_t work = int64_t{task.heads} * task.units(v), at_once = work < kRotaryThreads ? kRotaryThreads / work : 1;
  return (task.positions + at_once - 1) / at_once;
}

template <class T, int V>
__device__ __forceinline__ void rotate_pairs(T* to, const T* from, const Compute<T>* cos, const Compute<T>* sin,
                                             const RotaryTask& task, int j) {
  using Real = Compute<T>;
  Real first[V], second[V], c[V], s[V];
  load_numbers<Real, V>(c, cos + j);
  load_numbers<Real, V>(s, sin + j);
  if (task.interleaved) {
    Real both[2 * V];
    if constexpr (V == 1) {
      both[0] = ptx::to_float(from[2 * j]), both[1] = ptx::to_float(from[2 * j + 1]);
    } else {
      load_numbers<T, 2 * V>(both, from + 2 * j);
    }
#pragma unroll
    for (int i = 0; i < V; i++) first[i] = both[2 * i], second[i] = both[2 * i + 1];
  } else {
    load_numbers<T, V>(first, from + j);
    load_numbers<T, V>(second, from + task.half + j);
  }
#pragma unroll
  for (int i = 0; i < V; i++) {
    const Real x1 = first[i], x2 = second[i], turn = task.inverse ? -s[i] : s[i];
    first[i] = x1 * c[i] - x2 * turn;
    second[i] = x2 * c[i] + x1 * turn;
  }
  if (task.interleaved) {
    Real both[2 * V];
#pragma unroll
    for (int i = 0; i < V; i++) both[2 * i] = first[i], both[2 * i + 1] = second[i];
    if constexpr (V == 1) {
      store_one(to + 2 * j, both[0]), store_one(to + 2 * j + 1, both[1]);
    } else {
      store_numbers<T, 2 * V>(to + 2 * j, both);
    }
  } else {
    store_numbers<T, V>(to + j, first);
    store_numbers<T, V>(to + task.half + j, second);
  }
}

// V > 1: rows, half and dim in multiples of V numbers. grid: rotary_blocks(task, V)
template <class T, int V>
__global__ void __launch_bounds__(kRotaryThreads) rotary(const RotaryTask task) {
  const int units = task.units(V), work = task.heads * units, across = min(work, kRotaryThreads);
  const int at_once = kRotaryThreads / across, slot = threadIdx.x / across;
  const int64_t position = int64_t(blockIdx.x) * at_once + slot;
  if (slot >= at_once || position >= task.positions) return;
  const int64_t batch = position / task.seq, row = position - batch * task.seq;
  const auto* cos = static_cast<const Compute<T>*>(task.cos) + batch * task.table_batch + row * task.half;
  const auto* sin = static_cast<const Compute<T>*>(task.sin) + batch * task.table_batch + row * task.half;
  const auto at = [&](const Strides& s, int head) { return batch * s.batch + head * s.head + row * s.row; };
  for (int i = threadIdx.x % across; i < work; i += across) {
    const int head = i / units, unit = i % units;
    T* to = static_cast<T*>(task.x) + at(task.x_strides, head);
    const T* from = task.from ? static_cast<const T*>(task.from) + at(task.from_strides, head) : to;
    if (unit < task.half / V) {
      rotate_pairs<T, V>(to, from, cos, sin, task, unit * V);
    } else {
      const int j = 2 * task.half + (unit - task.half / V) * V;
      Compute<T> numbers[V];
      load_numbers<T, V>(numbers, from + j);
      store_numbers<T, V>(to + j, numbers);
    }
  }
}

}  // namespace attnjourney
