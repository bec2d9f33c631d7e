// Gradients of query, key, gate and beta within a chunk: one block for each chunk, head and 32 columns of the keys,
// from the states before and after it, E, Z and the gradients of pairs. With sums over the query heads of a group:
//   dQ = dP W + Qr's gates dO S^T                  dK = dN W - Kr's gates Z S^T + beta dW
//   dW = dP^T (scale Q) + dN^T K + Wl's gates E G^T        dbeta_i = dW_i . k_i
// Row t's gate multiplies whatever goes from before row t to row t or after it. Its gradient: of the state that goes
// through, of what rows j < t add to the state, of reads of the state by rows i >= t, and of pairs j < t <= i, which is
// what rows i >= t read of others less what others read of them. Numbers of each slice of columns are added up later.
#pragma once
#include "chunk.cuh"

namespace attnjourney {

template <class T_>
struct GatedChunkGradients : GatedBlock<T_> {
  using T = T_;
  using Base = GatedBlock<T>;
  using Real = typename Base::Real;
  using Products = typename Base::Products;
  using Part = typename Base::Part;
  using RealPart = typename Base::RealPart;
  using Base::column, Base::row_tile, Base::task, Base::warp, Base::batch, Base::head, Base::kThreads, Base::kDepth,
      Base::kRows, Base::kBlocks, Base::kPairPitch;
  static constexpr int kPitch = Base::kPartPitch, kCols = kGatedDepth, kTiles = kCols / 8 / Base::kColWarps;
  using Sums = typename Base::template Sums<kTiles>;
  // rows of dO, Z or E; the states before and after; pairs; W; queries or keys; by row: factors of keys, of queries,
  // beta; by column: S times G; with a gate a channel: the gates, up to a row from its block's begin, from it to the
  // end, what writers get within blocks, gates over a block
  static constexpr int smem_bytes(bool channels) {
    return int(sizeof(Real)) * (kRows * (3 * kPitch + kPairPitch + 3) + 2 * kCols * kPitch + kCols +
                                (channels ? kRows * 4 * kPitch + kBlocks * kCols : 0));
  }

  Real *a, *before, *after, *pairs, *w, *x, *key_scale, *query_scale, *beta, *through, *gates, *up, *tail, *in_block,
      *whole;
  GatedChunk chunk;
  int slice, first_col;

  __device__ __forceinline__ explicit GatedChunkGradients(const GatedTask& task_) : Base(task_) {
    a = reinterpret_cast<Real*>(ptx::dynamic_smem()), before = a + kRows * kPitch, after = before + kCols * kPitch;
    pairs = after + kCols * kPitch, w = pairs + kRows * kPairPitch, x = w + kRows * kPitch;
    key_scale = x + kRows * kPitch, query_scale = key_scale + kRows, beta = query_scale + kRows;
    through = beta + kRows, gates = through + kCols, up = gates + kRows * kPitch, tail = up + kRows * kPitch;
    in_block = tail + kRows * kPitch, whole = in_block + kRows * kPitch;
    const int slices = gated_slices(task.head_dim), block = blockIdx.x, remaining = block / slices;
    slice = block - remaining * slices, first_col = slice * kCols;
    const int slot = remaining / task.v_heads;
    head = remaining - slot * task.v_heads;
    chunk = gated_chunk(task, slot, kRows), batch = chunk.batch;
  }
  __device__ __forceinline__ bool channels() const { return task.kind == Gate::channel; }

  // ---- rows to shared memory ----

  template <class Tile, bool Round, class Rows>
  __device__ __forceinline__ void load(const LinearRows& rows, const Rows& of_head, const Real* scales, int depth,
                                       Real* to) const {
    Tile tile;
    tile.fetch(rows, of_head, chunk.first, chunk.first + chunk.count, depth);
    this->template put<kPitch, Round>(tile, scales, nullptr, 0, 0, to);
  }
  // 32 columns of E or Z
  __device__ __forceinline__ void load_real(const void* from, int depth) const {
    const LinearRows rows = this->dense_rows(from, task.v_heads, task.v_head_dim);
    load<RealPart, Products::kRound>(rows, LinearHeadRows<Real>(rows, batch, head, task.v_heads, task.len), nullptr,
                                     depth, a);
  }
  // of the slice's rows of a state 32 columns
  __device__ __forceinline__ void load_state(const void* states, int depth, Real* to) const {
    const Real* from = static_cast<const Real*>(states) + this->state_at(chunk.slot);
    for (int i = threadIdx.x; i < kCols * kDepth; i += kThreads) {
      const int row = i / kDepth, col = i % kDepth;
      const bool there = first_col + row < task.head_dim && depth + col < task.v_head_dim;
      to[row * kPitch + col] = there ? from[int64_t(first_col + row) * task.v_head_dim + depth + col] : Real(0);
    }
  }
  __device__ __forceinline__ void begin() {
    for (int r = threadIdx.x; r < kRows; r += kThreads) {
      const bool there = r < chunk.count;
      const int row = chunk.first + r;
      key_scale[r] = there ? this->key_inverse(row) : Real(0);
      beta[r] = there && task.delta ? gated_beta<Real>(task, batch, head, row) : Real(1);
    }
    __syncthreads();
    load<Part, false>(task.key, this->key_rows(), key_scale, first_col, w);
    if (channels()) {
      const Real* from =
          static_cast<const Real*>(task.gate) + batch * task.gate_batch + head * task.gate_head + first_col;
      for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) {
        const int row = i / kCols, d = i % kCols;
        const bool there = row < chunk.count && first_col + d < task.head_dim;
        gates[row * kPitch + d] = there ? gated_exp(from[int64_t(chunk.first + row) * task.gate_row + d]) : Real(1);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) w[i / kCols * kPitch + i % kCols] *= beta[i / kCols];
    for (int i = threadIdx.x; channels() && i < kBlocks * kCols; i += kThreads) {
      const int first = i / kCols * kGatedBlock, d = i % kCols;
      Real product = 1;
      for (int r = first; r < first + kGatedBlock; r++) product *= gates[r * kPitch + d], up[r * kPitch + d] = product;
      whole[i] = product;
      product = 1;
      for (int r = first + kGatedBlock - 1; r >= first; r--)
        tail[r * kPitch + d] = product, product *= gates[r * kPitch + d];
    }
  }
  // gates from row i's chunk's begin up to it, from it to the chunk's end
  __device__ __forceinline__ Real state_gate(const void* gates_of, int row, int col) const {
    if (task.kind == Gate::none || row >= chunk.count) return Real(1);
    const Real* of_rows = static_cast<const Real*>(gates_of);
    const int64_t at = this->head_row() + chunk.first + row;
    if (task.kind == Gate::head) return of_rows[at];
    return first_col + col < task.head_dim ? of_rows[at * task.head_dim + first_col + col] : Real(1);
  }

  // ---- products ----

  // X = A S^T over all columns of the values; load(depth) puts A and the state's columns, `state` being these
  template <class Load>
  __device__ __forceinline__ void times_state(Sums& sums, const Real* state, Load&& load) const {
    sums.clear();
#pragma unroll 1
    for (int depth = 0; depth < task.v_head_dim; depth += kDepth) {
      __syncthreads();  // @tiles_read
      load(depth);
      __syncthreads();
      const int row = row_tile();
      this->multiply(
          sums, 0, kDepth, [&](int r, int k) { return a[(row + r) * kPitch + k]; },
          [&](int k, int j) { return state[j * kPitch + k]; }, [&](int i) { return column(i); },
          [](int) { return true; }, [](int, int) { return true; });
    }
  }
  __device__ __forceinline__ Real between(int writer, int reader, int col) const {
    Real product = 1;
    for (int block = writer + 1; block < reader; block++) product *= whole[block * kCols + col];
    return product;
  }
  // What rows as readers get from pairs[i][j], j < i: W's rows j, with their gates.
  __device__ __forceinline__ void readers(Sums& sums) const {
    const int row = row_tile(), block = row / kGatedBlock;
    const auto at = [&](int i) { return column(i); };
    sums.clear();
    if (channels())
      this->multiply(
          sums, 0, row, [&](int r, int k) { return Products::stored(pairs[(row + r) * kPairPitch + k]); },
          [&](int k, int j) { return w[k * kPitch + j] * tail[k * kPitch + j] * between(k / kGatedBlock, block, j); },
          at, [](int) { return true; }, [](int, int) { return true; });
    else
      this->template add_triangle<false, true>(
          sums,
          [&](int r, int k) { return k < row + r ? Products::stored(pairs[(row + r) * kPairPitch + k]) : Real(0); },
          [&](int k, int j) { return w[k * kPitch + j]; }, at);
  }
  // + what W's rows get from them: the readers' rows in x.
  __device__ __forceinline__ void add_writers(Sums& sums) const {
    const int row = row_tile(), block = row / kGatedBlock;
    const auto at = [&](int i) { return column(i); };
    if (channels())
      this->multiply(
          sums, row + kGatedBlock, kRows,
          [&](int r, int k) { return Products::stored(pairs[k * kPairPitch + row + r]); },
          [&](int k, int j) { return x[k * kPitch + j] * up[k * kPitch + j] * between(block, k / kGatedBlock, j); }, at,
          [](int) { return true; }, [](int, int) { return true; });
    else
      this->template add_triangle<true, true>(
          sums, [&](int r, int k) { return k > row + r ? Products::stored(pairs[k * kPairPitch + row + r]) : Real(0); },
          [&](int k, int j) { return x[k * kPitch + j]; }, at);
  }
  // Both within a block of 16 rows, a gate a channel: a thread for each block and column; readers to `a`, writers are
  // added to `in_block`.
  __device__ __forceinline__ void within_block(bool first_time) const {
    if (threadIdx.x >= kBlocks * kCols) return;
    const int first = threadIdx.x / kCols * kGatedBlock, d = threadIdx.x % kCols;
    Real sums[kGatedBlock] = {};
#pragma unroll 1  // more would spill
    for (int j = 0; j < kGatedBlock; j++) {
      Real gate = 1, writer = 0;
      const Real written = w[(first + j) * kPitch + d];
#pragma unroll
      for (int i = 1; i < kGatedBlock; i++) {
        if (i <= j) continue;
        gate *= gates[(first + i) * kPitch + d];
        const Real factor = pairs[(first + i) * kPairPitch + first + j] * gate;
        sums[i] += factor * written;
        writer += factor * x[(first + i) * kPitch + d];
      }
      Real& sum = in_block[(first + j) * kPitch + d];
      sum = first_time ? writer : sum + writer;
    }
#pragma unroll
    for (int i = 0; i < kGatedBlock; i++) a[(first + i) * kPitch + d] = sums[i];
  }

  // ---- gates and betas ----

  __device__ __forceinline__ Real row_sum(const Real* from, int pitch, int row) const {
    Real sum = 0;
#pragma unroll 4
    for (int d = 0; d < kCols; d++) sum += from[row * pitch + d];
    return sum;
  }
  // reads in x, writes in a: the gradients of gates; w is free
  __device__ __forceinline__ void write_gates() const {
    const int last = chunk.count - 1;
    if (channels()) {
      for (int i = threadIdx.x; i < kBlocks * kCols; i += kThreads) {
        const int first = i / kCols * kGatedBlock, d = i % kCols, end = min(first + kGatedBlock, chunk.count);
        if (first_col + d >= task.head_dim) continue;
        Real written = state_gate(task.reads, last, d) * through[d], read = 0;
        for (int r = 0; r < first; r++) written += a[r * kPitch + d];
        for (int r = chunk.count - 1; r >= end; r--) read += x[r * kPitch + d];
        Real* to =
            static_cast<Real*>(task.grad_gate) + (this->head_row() + chunk.first) * task.head_dim + first_col + d;
        for (int r = end - 1; r >= first; r--) {
          read += x[r * kPitch + d];
          w[r * kPitch + d] = read;
        }
        for (int r = first; r < end; r++) {
          to[int64_t(r) * task.head_dim] = written + w[r * kPitch + d];
          written += a[r * kPitch + d];
        }
      }
      return;
    }
    Real *const reads = query_scale, *const writes = key_scale;
    for (int r = threadIdx.x; r < kRows; r += kThreads)
      reads[r] = row_sum(x, kPitch, r), writes[r] = row_sum(a, kPitch, r);
    __syncthreads();
    Real all = row_sum(through, 0, 0) * state_gate(task.reads, last, 0);
    const int64_t rows = int64_t(task.batch) * task.v_heads * task.len;
    for (int r = threadIdx.x; r < chunk.count; r += kThreads) {
      Real sum = all;
      for (int j = 0; j < r; j++) sum += writes[j];
      for (int i = chunk.count - 1; i >= r; i--) sum += reads[i];
      static_cast<Real*>(task.gate_sums)[slice * rows + this->head_row() + chunk.first + r] = sum;
    }
  }

  __device__ __forceinline__ void run() {
    if (chunk.count == 0) return;
    begin();
    Sums read_sums, of_writers, own_sums, of_state, of_pairs;  // read_sums: rows as readers, times gradients
    read_sums.clear(), of_writers.clear(), own_sums.clear();
    const int readings = task.group + (task.delta ? 1 : 0);
#pragma unroll 1
    for (int g = 0; g < readings; g++) {
      const bool is_key = g == task.group;
      times_state(of_state, before, [&](int depth) {
        load_state(task.states, depth, before);
        if (is_key)
          load_real(task.error_grads, depth);
        else
          load<Part, Products::kRound>(
              task.grad_out, LinearHeadRows<T>(task.grad_out, batch, this->out_head(g), task.out_heads(), task.len),
              nullptr, depth, a);
      });
      this->template put_pairs<false>(this->pairs_at(chunk.slot, g), pairs);
      if (!is_key) {
        for (int r = threadIdx.x; r < kRows; r += kThreads)
          query_scale[r] = r < chunk.count ? this->query_factor(g, chunk.first + r) : Real(0);
        __syncthreads();
        load<Part, false>(task.query, this->query_rows(g), query_scale, first_col, x);
      } else {
        load<Part, false>(task.key, this->key_rows(), key_scale, first_col, x);
      }
      __syncthreads();
      if (channels()) {
        within_block(g == 0);
        __syncthreads();
      }
      readers(of_pairs);
      add_writers(of_writers);
      // dQ of this head, or dK as a reader
      Real* const to = static_cast<Real*>(is_key ? task.key_sums : task.query_sums);
      const int64_t of_head =
          is_key ? this->head_row() : (int64_t(batch) * task.out_heads() + this->out_head(g)) * task.len;
      const int lane = ptx::opaque(threadIdx.x) % 32;
#pragma unroll
      for (int e = 0; e < 4; e++)
#pragma unroll
        for (int i = 0; i < kTiles; i++) {
          const int row = row_tile() + lane / 4 + e / 2 * 8, col = column(i) + 2 * (lane % 4) + e % 2;
          const int at = row * kPitch + col;
          Real pair = of_pairs.acc[i][e], state = state_gate(task.reads, row, col) * of_state.acc[i][e];
          if (channels()) pair = pair * up[at] + a[at];
          if (is_key) state = -state;
          read_sums.acc[i][e] += x[at] * (pair + state);
          Real result = pair + state;
          if (!is_key) {
            const Real own = pairs[row * kPairPitch + row];
            own_sums.acc[i][e] += own * x[at];
            result += own * w[at];
          }
          if (to && row < chunk.count && first_col + col < task.head_dim)
            to[(of_head + chunk.first + row) * task.head_dim + first_col + col] = result;
        }
    }

    // dW, and through it dK
    Real product = 0;  // of this thread's part of a row of S and of G
    const int state_row = threadIdx.x / (kThreads / kCols), state_col = threadIdx.x % (kThreads / kCols);
    constexpr int kPerThread = kDepth * kCols / kThreads;
    times_state(of_state, after, [&](int depth) {
      load_real(task.errors, depth);
      load_state(task.states, depth, before);
      load_state(task.state_grads, depth, after);
      if (task.kind == Gate::none) return;
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kPerThread; j++) {
        const int at = state_row * kPitch + state_col * kPerThread + j;
        product += before[at] * after[at];
      }
    });
    product += ptx::shfl_xor(product, 1);
    product += ptx::shfl_xor(product, 2);
    if (state_col == 0) through[state_row] = product;
    Real* const to = static_cast<Real*>(task.key_sums);
    const int lane = ptx::opaque(threadIdx.x) % 32;
#pragma unroll
    for (int e = 0; e < 4; e++)
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        const int row = row_tile() + lane / 4 + e / 2 * 8, col = column(i) + 2 * (lane % 4) + e % 2;
        const int at = row * kPitch + col;
        Real pair = of_writers.acc[i][e];
        const Real state = state_gate(task.writes, row, col) * of_state.acc[i][e];
        if (channels()) pair = pair * tail[at] + in_block[at];
        const Real written = pair + own_sums.acc[i][e] + state;
        if (to && row < chunk.count && first_col + col < task.head_dim) {
          Real& key = to[(this->head_row() + chunk.first + row) * task.head_dim + first_col + col];
          key = (task.delta ? key : Real(0)) + beta[row] * written;
        }
        if (task.delta) pairs[row * kPairPitch + col] = written * x[at];
        read_sums.acc[i][e] -= w[at] * pair;
        of_state.acc[i][e] = w[at] * state;
      }
    if (task.grad_gate) {
      __syncthreads();  // @rows_used
      this->each(read_sums, [&](int row, int col, Real y) { x[row * kPitch + col] = y; });
      this->each(of_state, [&](int row, int col, Real y) { a[row * kPitch + col] = y; });
      __syncthreads();
      write_gates();
    }
    if (!task.beta_sums) return;
    __syncthreads();
    const int64_t rows = int64_t(task.batch) * task.v_heads * task.len;
    for (int r = threadIdx.x; r < chunk.count; r += kThreads)
      static_cast<Real*>(task.beta_sums)[slice * rows + this->head_row() + chunk.first + r] =
          row_sum(pairs, kPairPitch, r);
  }
};

template <class T>
__global__ void __launch_bounds__(kGatedThreads, 2) gated_gradients(const GatedTask task) {
  GatedChunkGradients<T>(task).run();
}

}  // namespace attnjourney
