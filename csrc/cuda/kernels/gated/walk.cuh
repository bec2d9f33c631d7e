// The walk over the chunks of a sequence, forward and backward: one block for each sequence, head and slice of value's
// columns, four warps. The state of the slice (S, or its gradient G) stays in shared memory in compute precision; keys
// and queries pass by in parts of 32 columns, the next one fetched while this one is multiplied. See task.cuh.
#pragma once
#include "chunk.cuh"

namespace attnjourney {

enum class GatedRows { key_read, key_write, query };

template <class T_, int Cols>
struct GatedWalk : GatedBlock<T_> {
  using T = T_;
  using Base = GatedBlock<T>;
  using Real = typename Base::Real;
  using Products = typename Base::Products;
  using Part = typename Base::Part;
  using Base::column, Base::row_tile, Base::task, Base::warp, Base::batch, Base::head, Base::kThreads, Base::kDepth,
      Base::kRows, Base::kPartPitch, Base::kPairPitch;
  static constexpr int kCols = Cols;
  static constexpr int kTiles = kCols / 8 / Base::kColWarps;  // of 16 rows
  static constexpr int kStateTiles = kCols / 8 / 2;           // of 16 rows of the state: 2 x 2 warps over 32
  static constexpr int kStatePitch = kCols + (sizeof(Real) == 4 ? 8 : 0);
  static_assert(kCols <= kPairPitch);
  static constexpr __host__ __device__ int parts(int depth) { return (depth + kDepth - 1) / kDepth; }
  // keys or queries; P, T or results; E, dO or Z; by row: factors of keys that read, that write, of queries; by row of
  // the state: its gates over the chunk; the state
  static constexpr int kBeforeState = kRows * (kPartPitch + kPairPitch + kStatePitch + 3) + kGatedMost;
  static constexpr int smem_bytes(int depth) {
    return int(sizeof(Real)) * (kBeforeState + parts(depth) * kDepth * kStatePitch);
  }
  using Sums = typename Base::template Sums<kTiles>;

  Real *a, *pairs, *errors, *key_read, *key_write, *query_read, *total, *state;
  int first_col, sequence;
  Part next;

  __device__ __forceinline__ explicit GatedWalk(const GatedTask& task_) : Base(task_) {
    a = reinterpret_cast<Real*>(ptx::dynamic_smem()), pairs = a + kRows * kPartPitch;
    errors = pairs + kRows * kPairPitch, key_read = errors + kRows * kStatePitch, key_write = key_read + kRows;
    query_read = key_write + kRows, total = query_read + kRows, state = total + kGatedMost;
    const int slices = (task.v_head_dim + kCols - 1) / kCols, block = blockIdx.x, remaining = block / slices;
    first_col = (block - remaining * slices) * kCols;
    sequence = remaining / task.v_heads, head = remaining - sequence * task.v_heads;
  }

  // ---- the state in memory ----

  __device__ __forceinline__ void read_state(const void* from) {
    const Real* x = static_cast<const Real*>(from) + this->state_at(sequence) + first_col;
    for (int i = threadIdx.x; i < parts(task.head_dim) * kDepth * kCols; i += kThreads) {
      const int row = i / kCols, col = i % kCols;
      const bool there = from && row < task.head_dim && first_col + col < task.v_head_dim;
      state[row * kStatePitch + col] = there ? x[int64_t(row) * task.v_head_dim + col] : Real(0);
    }
  }
  __device__ __forceinline__ void write_state(void* to, int64_t slot) const {
    if (!to) return;
    Real* x = static_cast<Real*>(to) + this->state_at(slot) + first_col;
    for (int i = threadIdx.x; i < task.head_dim * kCols; i += kThreads) {
      const int row = i / kCols, col = i % kCols;
      if (first_col + col < task.v_head_dim) x[int64_t(row) * task.v_head_dim + col] = state[row * kStatePitch + col];
    }
  }

  // ---- rows ----

  __device__ __forceinline__ void fetch(const GatedChunk& c, GatedRows rows, int g, int part) {
    const bool query = rows == GatedRows::query;
    next.fetch(query ? task.query : task.key, query ? this->query_rows(g) : this->key_rows(), c.first,
               c.first + c.count, part * kDepth);
  }
  __device__ __forceinline__ void put_part(const GatedChunk& c, GatedRows rows, int part) const {
    const Real* scales = rows == GatedRows::query ? query_read : rows == GatedRows::key_read ? key_read : key_write;
    const void* gates = rows == GatedRows::key_write ? task.writes : task.reads;
    const Real* factors =
        task.kind == Gate::channel ? static_cast<const Real*>(gates) + this->head_row() * task.head_dim : nullptr;
    this->template put<kPartPitch, Products::kRound>(next, scales, factors, c.first, part * kDepth, a);
  }
  __device__ __forceinline__ void scalars(const GatedChunk& c) const {
    const bool by_head = task.kind == Gate::head;
    for (int r = threadIdx.x; r < kRows; r += kThreads) {
      Real read = 0, write = 0;
      if (r < c.count) {
        const int row = c.first + r;
        read = write = this->key_inverse(row);
        if (task.delta) write *= gated_beta<Real>(task, batch, head, row);
        if (by_head) {
          read *= static_cast<const Real*>(task.reads)[this->head_row() + row];
          write *= static_cast<const Real*>(task.writes)[this->head_row() + row];
        }
      }
      key_read[r] = read, key_write[r] = write;
    }
    const int64_t last = this->head_row() + c.first + c.count - 1;
    for (int d = threadIdx.x; d < task.head_dim && task.kind != Gate::none; d += kThreads)
      total[d] = static_cast<const Real*>(task.reads)[by_head ? last : last * task.head_dim + d];
  }
  __device__ __forceinline__ void query_scalars(const GatedChunk& c, int g) const {
    for (int r = threadIdx.x; r < kRows; r += kThreads) {
      Real read = 0;
      if (r < c.count) {
        read = this->query_factor(g, c.first + r);
        if (task.kind == Gate::head) read *= static_cast<const Real*>(task.reads)[this->head_row() + c.first + r];
      }
      query_read[r] = read;
    }
  }

  // rows of value or of grad_out to `errors`
  __device__ __forceinline__ void put_rows(const GatedChunk& c, const LinearRows& rows,
                                           const LinearHeadRows<T>& of_head) const {
    constexpr int kPer = kCols / kVector<T>;
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kPer; i += kThreads) {
      const int row = i / kPer, col = i % kPer * kVector<T>;
      Real x[kVector<T>] = {};
      const int left = row < c.count ? rows.cols - first_col - col : 0;
      if (left > 0)
        load_chunk<T>(of_head.data, int64_t(c.first + row) * rows.row + first_col + col, left, rows.chunks, x);
      store_numbers<Real, kVector<T>>(errors + row * kStatePitch + col, x);
    }
  }
  // from shared memory to rows of [..., len, v_head_dim], `first` being row 0 of the head
  template <class To, int Pitch>
  __device__ __forceinline__ void write_rows(const GatedChunk& c, const Real* from, void* to, int64_t first) const {
    constexpr int kPer = kCols / kVector<To>;
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kPer; i += kThreads) {
      const int row = i / kPer, col = i % kPer * kVector<To>, left = task.v_head_dim - first_col - col;
      if (row >= c.count || left <= 0) continue;
      Real x[kVector<To>];
      load_numbers<Real, kVector<To>>(x, from + row * Pitch + col);
      store_chunk<To>(to, (first + c.first + row) * task.v_head_dim + first_col + col, left,
                      task.v_head_dim % kVector<To> == 0, x);
    }
  }

  // ---- products ----

  // X += A S of a part
  __device__ __forceinline__ void add_state(Sums& x, int part) const {
    const int row = row_tile();
    this->multiply(
        x, 0, kDepth, [&](int r, int k) { return a[(row + r) * kPartPitch + k]; },
        [&](int k, int j) { return state[(part * kDepth + k) * kStatePitch + j]; }, [&](int i) { return column(i); },
        [](int) { return true; }, [](int, int) { return true; });
  }
  // S = total S + sign A^T E of a part
  __device__ __forceinline__ void update_state(int part, bool decays, Real sign) const {
    const int row = warp % 2 * 16;
    const auto at = [&](int i) { return (i * 2 + warp / 2) * 8; };
    typename Base::template Sums<kStateTiles> u;
    u.clear();
    this->multiply(
        u, 0, kRows, [&](int r, int k) { return a[k * kPartPitch + row + r]; },
        [&](int k, int j) { return errors[k * kStatePitch + j]; }, at, [](int) { return true; },
        [](int, int) { return true; });
    const int lane = ptx::opaque(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int d = part * kDepth + row + g + e / 2 * 8;
      const Real factor = decays && d < task.head_dim ? total[d] : Real(1);
#pragma unroll
      for (int i = 0; i < kStateTiles; i++) {
        Real& s = state[d * kStatePitch + at(i) + 2 * t + e % 2];
        s = factor * s + sign * u.acc[i][e];
      }
    }
  }
  // X += P E (Transposed: P^T E)
  template <bool Transposed>
  __device__ __forceinline__ void add_pairs(Sums& x) const {
    const int row = row_tile();
    this->template add_triangle<Transposed>(
        x,
        [&](int r, int k) { return Transposed ? pairs[k * kPairPitch + row + r] : pairs[(row + r) * kPairPitch + k]; },
        [&](int k, int j) { return errors[k * kStatePitch + j]; }, [&](int i) { return column(i); });
  }
  __device__ __forceinline__ void keep(Sums& x, Real* to, int pitch) const {
    this->each(x, [&](int row, int col, Real y) { to[row * pitch + col] = y; });
  }
};

// With task.states: no out, but the states before all chunks, and E.
template <class T, int Cols>
struct GatedForward : GatedWalk<T, Cols> {
  using Base = GatedWalk<T, Cols>;
  using Real = typename Base::Real;
  using Base::a, Base::errors, Base::pairs, Base::state, Base::task, Base::head, Base::batch, Base::kPairPitch,
      Base::kStatePitch;
  __device__ __forceinline__ explicit GatedForward(const GatedTask& task_) : Base(task_) {}

  // E = T (V - X)
  __device__ __forceinline__ void correct(typename Base::Sums& x) const {
    this->each(x, [&](int row, int col, Real y) { errors[row * kStatePitch + col] -= y; });
    __syncthreads();  // T is there, too
    x.clear();
    this->template add_pairs<false>(x);
    __syncthreads();  // @errors_read
    this->keep(x, errors, kStatePitch);
  }
  __device__ __forceinline__ void output(const GatedChunk& c, typename Base::Sums& x, int g) const {
    this->template add_pairs<false>(x);
    __syncthreads();  // @pairs_read
    this->keep(x, pairs, kPairPitch);
    __syncthreads();
    const int64_t row = (int64_t(batch) * task.out_heads() + this->out_head(g)) * task.len;
    this->template write_rows<T, kPairPitch>(c, pairs, task.out, row);
  }

  __device__ __forceinline__ void walk_chunk(const GatedChunk& c) {
    const int parts = this->parts(task.head_dim), queries = task.states ? 0 : task.group;
    const int first = task.delta ? 0 : 1, kinds = queries + 2;  // reads of keys, queries, writes
    const auto rows = [&](int kind) {
      return kind == 0 ? GatedRows::key_read : kind == kinds - 1 ? GatedRows::key_write : GatedRows::query;
    };
    __syncthreads();  // @chunk_read: all are done with the chunk before
    this->scalars(c);
    this->write_state(task.states, c.slot);
    this->put_rows(c, task.value, LinearHeadRows<T>(task.value, batch, head, task.v_heads, task.len));
    this->fetch(c, rows(first), 0, 0);
    typename Base::Sums x;
#pragma unroll 1
    for (int kind = first; kind < kinds; kind++) {
      const bool writes = kind == kinds - 1;
      x.clear();
#pragma unroll 1
      for (int part = 0; part < parts; part++) {
        __syncthreads();  // @part_read
        if (part == 0 && !writes) {
          this->put_pairs(this->pairs_at(c.slot, kind == 0 ? task.group : kind - 1), pairs);
          if (kind > 0) {
            this->query_scalars(c, kind - 1);
            __syncthreads();
          }
        }
        this->put_part(c, rows(kind), part);
        __syncthreads();
        const bool last = part + 1 == parts;
        if (!last || !writes) this->fetch(c, rows(kind + last), kind + last - 1, last ? 0 : part + 1);
        if (writes)
          this->update_state(part, task.kind != Gate::none, Real(1));
        else
          this->add_state(x, part);
      }
      if (kind == 0) {
        correct(x);
      } else if (!writes) {
        output(c, x, kind - 1);
      }
      if (task.states && kind == first && !(writes && task.delta)) {
        __syncthreads();
        this->template write_rows<Real, kStatePitch>(c, errors, task.errors, this->head_row());
      }
    }
  }

  __device__ __forceinline__ void run() {
    const GatedSequence s = gated_sequence(task, this->sequence, Base::kRows);
    batch = s.batch;
    this->read_state(task.initial_state);
    for (int at = 0, slot = s.slot; at < s.len; at += Base::kRows, slot++)
      walk_chunk({this->sequence, s.batch, slot, s.first + at, min(Base::kRows, s.len - at)});
    if (!task.state) return;
    __syncthreads();
    this->write_state(task.state, this->sequence);
  }
};

template <class T, int Cols>
struct GatedBackward : GatedWalk<T, Cols> {
  using Base = GatedWalk<T, Cols>;
  using Real = typename Base::Real;
  using Base::errors, Base::pairs, Base::state, Base::task, Base::head, Base::batch, Base::kStatePitch;
  __device__ __forceinline__ explicit GatedBackward(const GatedTask& task_) : Base(task_) {}

  // G = total G
  __device__ __forceinline__ void decay() const {
    for (int i = threadIdx.x; i < task.head_dim * Cols; i += Base::kThreads)
      state[i / Cols * kStatePitch + i % Cols] *= this->total[i / Cols];
  }
  // Z = T^T X, to `errors`; X is what comes through the state after the chunk and through out
  __device__ __forceinline__ void correct(const GatedChunk& c, typename Base::Sums& x) const {
    if (task.delta) {
      __syncthreads();
      this->keep(x, errors, kStatePitch);
      this->put_pairs(this->pairs_at(c.slot, task.group), pairs);
      __syncthreads();
      x.clear();
      this->template add_pairs<true>(x);
    }
    __syncthreads();  // @errors_read_back
    this->keep(x, errors, kStatePitch);
    __syncthreads();
    if (task.grad_value) this->template write_rows<T, kStatePitch>(c, errors, task.grad_value, this->head_row());
    this->template write_rows<Real, kStatePitch>(c, errors, task.error_grads, this->head_row());
  }

  __device__ __forceinline__ void walk_chunk(const GatedChunk& c) {
    const int parts = this->parts(task.head_dim), group = task.group;
    const int kinds = group + (task.delta ? 2 : 1);  // writes of keys, queries, reads
    const auto rows = [&](int kind) {
      return kind == 0 ? GatedRows::key_write : kind <= group ? GatedRows::query : GatedRows::key_read;
    };
    __syncthreads();  // @chunk_read_back
    this->scalars(c);
    this->write_state(task.state_grads, c.slot);
    this->fetch(c, rows(0), 0, 0);
    typename Base::Sums x;
    x.clear();
#pragma unroll 1
    for (int kind = 0; kind < kinds; kind++) {
      const bool query = kind > 0 && kind <= group;
#pragma unroll 1
      for (int part = 0; part < parts; part++) {
        __syncthreads();  // @part_read_back
        if (part == 0 && query) {
          if (kind == 1 && task.kind != Gate::none) decay();
          this->put_pairs(this->pairs_at(c.slot, kind - 1), pairs);
          this->put_rows(c, task.grad_out,
                         LinearHeadRows<T>(task.grad_out, batch, this->out_head(kind - 1), task.out_heads(), task.len));
          this->query_scalars(c, kind - 1);
          __syncthreads();
        }
        this->put_part(c, rows(kind), part);
        __syncthreads();
        const bool last = part + 1 == parts;
        if (!last || kind + 1 < kinds) this->fetch(c, rows(kind + last), kind + last - 1, last ? 0 : part + 1);
        if (kind == 0) {
          this->add_state(x, part);
        } else {
          if (part == 0 && query) this->template add_pairs<true>(x);
          this->update_state(part, false, query ? Real(1) : Real(-1));
        }
      }
      if (kind == group) correct(c, x);
    }
  }

  __device__ __forceinline__ void run() {
    const GatedSequence s = gated_sequence(task, this->sequence, Base::kRows);
    batch = s.batch;
    this->read_state(task.grad_state);
    const int chunks = (s.len + Base::kRows - 1) / Base::kRows;
    for (int n = chunks - 1; n >= 0; n--) {
      const int at = n * Base::kRows;
      walk_chunk({this->sequence, s.batch, s.slot + n, s.first + at, min(Base::kRows, s.len - at)});
    }
    if (!task.grad_initial_state) return;
    __syncthreads();
    this->write_state(task.grad_initial_state, this->sequence);
  }
};

// grid: sequences * v_heads * slices
template <class Kernel>
__global__ void __launch_bounds__(kGatedThreads, 2) gated_walk(const GatedTask task) {
  Kernel(task).run();
}

}  // namespace attnjourney
