// The product of linear/task.cuh, walked in chunks of rows: one block for each piece of the sequence, head and slice of
// columns, four warps. The state of the slice stays in shared memory in compute precision; A and B pass by in parts of
// 32 columns, the next part fetched while this one is multiplied. With `sums` only the piece's own state is made.
// With few heads a sequence has several pieces, whose sums are made first and chained by a scan (passes.cuh).
#pragma once
#include "products.cuh"

namespace attnjourney {

template <class T_, int Chunk>
struct LinearWalk {
  using T = T_;
  using Element = LinearElement<T>;
  using Real = typename Element::Real;
  using Products = LinearProducts<T>;
  static constexpr int kRows = Chunk, kCols = Chunk, kDepth = 32, kThreads = 128;
  // warps over the 16-row tiles of a chunk, and over columns
  static constexpr int kRowWarps = kRows / 16, kColWarps = 4 / kRowWarps;
  static constexpr int kTiles = kCols / 8 / kColWarps;  // of X, and of P, which is as wide
  static constexpr int kStateTiles = kCols / 8 / 2;     // of 32 rows of the state: 2 x 2 warps
  // Numbers from row to row of A and B; of P and X, which lie where A and B were; of C and the state. Eight rows of
  // four columns of the former, four rows of eight columns of the latter meet no bank twice; double, whose threads read
  // one row of the latter, is denser, so that 99 KB hold 256 rows of the state.
  static constexpr int kPartPitch = kDepth + 4, kScorePitch = kCols + 4,
                       kStatePitch = kCols + (sizeof(Real) == 4 ? 8 : 0);
  static_assert(kScorePitch <= 2 * kPartPitch);

  static constexpr bool kPrefetch = sizeof(T) == 2;  // parts are fetched before they are needed; more would spill

  static constexpr __host__ __device__ int parts(int depth) { return (depth + kDepth - 1) / kDepth; }
  // A and B, or P or X; C; columns of A and B; denominators; the vector; the warps' flags; the state
  static constexpr int kBeforeState = kRows * (2 * kPartPitch + kStatePitch + 3) + kLinearDepth + 16;
  static constexpr int smem_bytes(int depth) {
    return int(sizeof(Real)) * (kBeforeState + parts(depth) * kDepth * kStatePitch);
  }

  const LinearTask& task;
  Real *state, *vector, *a, *b, *c, *a_column, *b_column, *denominator;
  uint32_t* flags;
  int warp;
  int batch, kv_head, piece, first_col;
  bool bad = false;  // something is not finite: found by this thread's warp, then known to all

  __device__ __forceinline__ explicit LinearWalk(const LinearTask& task_) : task(task_) {
    a = reinterpret_cast<Real*>(ptx::dynamic_smem()), b = a + kRows * kPartPitch, c = b + kRows * kPartPitch;
    a_column = c + kRows * kStatePitch, b_column = a_column + kRows, denominator = b_column + kRows;
    vector = denominator + kRows, flags = reinterpret_cast<uint32_t*>(vector + kLinearDepth);
    state = a + kBeforeState;
    warp = ptx::uniform(threadIdx.x / 32);
    const int block = blockIdx.x, remaining = block / task.slices, head = remaining % (task.batch * task.kv_heads);
    first_col = (block - remaining * task.slices) * kCols;
    piece = remaining / (task.batch * task.kv_heads);
    batch = head / task.kv_heads, kv_head = head - batch * task.kv_heads;
  }

  // ---- the state in memory ----

  __device__ __forceinline__ int head() const { return batch * task.kv_heads + kv_head; }
  // numbers of the vector, the first one's place in memory
  __device__ __forceinline__ int vector_begin() const {
    return task.extra == LinearExtra::depth_column ? first_col : 0;
  }
  __device__ __forceinline__ int vector_count() const {
    if (task.extra == LinearExtra::none) return 0;
    return task.extra == LinearExtra::depth_column ? min(kCols, task.cols - first_col) : task.depth;
  }

  __device__ __forceinline__ void begin_state() {
    const LinearState& s = task.before;
    const Real* matrix = task.sums ? nullptr : static_cast<const Real*>(s.matrix);
    const Real* given = task.sums ? nullptr : static_cast<const Real*>(s.vector);
    Real sum = 0;
    for (int i = threadIdx.x; i < parts(task.depth) * kDepth * kCols; i += kThreads) {
      const int row = i / kCols, col = i % kCols;
      const bool there = matrix && row < task.depth && first_col + col < task.cols;
      const Real x =
          there ? matrix[piece * s.piece + head() * s.head + row * s.row + (first_col + col) * s.col] : Real(0);
      sum += x - x;
      state[row * kStatePitch + col] = x;
    }
    for (int i = threadIdx.x; i < kLinearDepth; i += kThreads) {
      const bool there = given && i < vector_count();
      const Real x = there ? given[piece * s.vector_piece + head() * s.vector_head + vector_begin() + i] : Real(0);
      sum += x - x;
      vector[i] = x;
    }
    bad = sum != Real(0);
  }
  __device__ __forceinline__ void end_state() const {
    const LinearState& s = task.after;
    if (!s.matrix && !s.vector) return;
    __syncthreads();
    if (s.matrix)
      for (int i = threadIdx.x; i < task.depth * kCols; i += kThreads) {
        const int row = i / kCols, col = i % kCols;
        if (first_col + col < task.cols)
          static_cast<Real*>(s.matrix)[piece * s.piece + head() * s.head + row * s.row + (first_col + col) * s.col] =
              state[row * kStatePitch + col];
      }
    if (!s.vector || (task.extra == LinearExtra::value_column && first_col))
      return;  // one slice's vector is every slice's
    for (int i = threadIdx.x; i < vector_count(); i += kThreads)
      static_cast<Real*>(s.vector)[piece * s.vector_piece + head() * s.vector_head + vector_begin() + i] = vector[i];
  }

  // ---- whether any thread of the block has found a number that is not finite ----

  __device__ __forceinline__ void write_flag() {
    bad = ptx::any(bad);
    if (threadIdx.x % 32 == 0) flags[warp] = bad;
  }
  __device__ __forceinline__ void read_flags() { bad = flags[0] | flags[1] | flags[2] | flags[3]; }

  // ---- one chunk ----

  // the warp's rows of the chunk and of 32 rows of the state; the first column of its tile i
  __device__ __forceinline__ int row_tile() const { return warp % kRowWarps * 16; }
  __device__ __forceinline__ int column(int i) const { return (i * kColWarps + warp / kRowWarps) * 8; }
  __device__ __forceinline__ int state_row_tile() const { return warp % 2 * 16; }
  __device__ __forceinline__ int state_column(int i) const { return (i * 2 + warp / 2) * 8; }
  __device__ __forceinline__ bool has_ones() const { return task.extra == LinearExtra::value_column; }

  // sums += sum over begin <= k < end; see LinearProducts
  template <bool RoundB, int Tiles, class A, class B, class More, class Columns, class Used, class Seen>
  __device__ __forceinline__ void multiply(typename Products::template Sums<Tiles>& sums, int begin, int end, A&& x,
                                           B&& y, bool has_more, More&& more, Columns&& columns, Used&& used,
                                           Seen&& seen) const {
    if constexpr (Products::kTensor)
      if (!bad)
        return Products::template on_tensor_cores<RoundB>(sums, begin, end, x, y, has_more, more, columns, used);
    Products::one_by_one(sums, begin, end, x, y, has_more, more, columns, seen);
  }

  // P += A B^T
  __device__ __forceinline__ void add_scores(typename Products::template Sums<kTiles>& scores,
                                             const LinearBand& band) const {
    const int row = row_tile();
    multiply<false>(
        scores, 0, kDepth, [&](int r, int k) { return a[(row + r) * kPartPitch + k]; },
        [&](int k, int j) { return b[j * kPartPitch + k]; }, false, [](int) { return Real(0); },
        [&](int i) { return column(i); }, [&](int i) { return band.any(row, column(i)); },
        [](int, int) { return true; });
  }
  // X += A S
  __device__ __forceinline__ void add_state(typename Products::template Sums<kTiles>& x, int depth) const {
    const int row = row_tile();
    multiply<true>(
        x, 0, kDepth, [&](int r, int k) { return a[(row + r) * kPartPitch + k]; },
        [&](int k, int j) { return state[(depth + k) * kStatePitch + j]; }, has_ones() && warp / kRowWarps == 0,
        [&](int k) { return Products::stored(vector[depth + k]); }, [&](int i) { return column(i); },
        [](int) { return true; }, [&](int, int k) { return depth + k < task.depth; });
  }
  // X += P C
  __device__ __forceinline__ void add_values(typename Products::template Sums<kTiles>& x,
                                             const LinearBand& band) const {
    const int row = row_tile();
    multiply<false>(
        x, band.upper ? row : 0, band.upper ? kRows : row + 16,
        [&](int r, int k) { return a[(row + r) * kScorePitch + k]; },
        [&](int k, int j) { return c[k * kStatePitch + j]; }, has_ones() && warp / kRowWarps == 0,
        [](int) { return Real(1); }, [&](int i) { return column(i); }, [](int) { return true; },
        [&](int r, int k) { return band.seen(row + r, k); });
  }
  // B^T C, of 32 rows of the state
  __device__ __forceinline__ void state_of_chunk(typename Products::template Sums<kStateTiles>& u) const {
    const int row = state_row_tile();
    multiply<false>(
        u, 0, kRows, [&](int r, int k) { return b[k * kPartPitch + row + r]; },
        [&](int k, int j) { return c[k * kStatePitch + j]; }, has_ones() && warp / 2 == 0, [](int) { return Real(1); },
        [&](int i) { return state_column(i); }, [](int) { return true; }, [](int, int) { return true; });
  }
  __device__ __forceinline__ void keep_state(const typename Products::template Sums<kStateTiles>& u, int depth) {
    const int lane = ptx::opaque(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    Real sum = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = depth + state_row_tile() + g + e / 2 * 8;
#pragma unroll
      for (int i = 0; i < kStateTiles; i++) {
        Real& s = state[row * kStatePitch + state_column(i) + 2 * t + e % 2];
        s += u.acc[i][e];
        sum += s - s;
      }
      if (has_ones() && warp / 2 == 0 && t == 0 && e % 2 == 0) {
        vector[row] += u.more[e];
        sum += vector[row] - vector[row];
      }
    }
    bad |= sum != Real(0);
  }

  // P, with what the further column of A and B adds and 0 where hidden, to where A and B were
  __device__ __forceinline__ void keep_scores(const typename Products::template Sums<kTiles>& scores,
                                              const LinearBand& band) {
    const int lane = ptx::opaque(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    const bool more = task.extra == LinearExtra::depth_column;
    Real sum = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = row_tile() + g + e / 2 * 8;
      const Real of_row = more ? a_column[row] : Real(0);
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        const int col = column(i) + 2 * t + e % 2;
        Real x = scores.acc[i][e];
        if (more) x += of_row * b_column[col];
        x = band.seen(row, col) ? x : Real(0);
        sum += x - x;
        a[row * kScorePitch + col] = Products::stored(x);
      }
    }
    bad |= sum != Real(0);
  }

  // X before anything is added: what the further column of A reads of the state
  __device__ __forceinline__ void begin_result(typename Products::template Sums<kTiles>& x) const {
    x.clear();
    if (task.extra != LinearExtra::depth_column) return;
    const int lane = ptx::opaque(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const Real of_row = a_column[row_tile() + g + e / 2 * 8];
#pragma unroll
      for (int i = 0; i < kTiles; i++) x.acc[i][e] = of_row * vector[column(i) + 2 * t + e % 2];
    }
  }

  // X to memory: through where A and B were, so that whole chunks of rows are written
  __device__ __forceinline__ void write(const typename Products::template Sums<kTiles>& x, int head, int heads,
                                        int row0, int end) const {
    const int lane = ptx::opaque(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = row_tile() + g + e / 2 * 8;
#pragma unroll
      for (int i = 0; i < kTiles; i++) a[row * kScorePitch + column(i) + 2 * t + e % 2] = x.acc[i][e];
      if (has_ones() && warp / kRowWarps == 0 && t == 0 && e % 2 == 0) denominator[row] = x.more[e] + Real(task.eps);
    }
    __syncthreads();
    const int64_t first = (int64_t(batch) * heads + head) * task.length;
    const LinearHeadRows<T> slope(task.slope_of, batch, head, heads, task.length);
    if (has_ones() && first_col == 0)
      for (int row = threadIdx.x; row < min(kRows, end - row0); row += kThreads)
        static_cast<Real*>(task.denominator)[first + row0 + row] = denominator[row];
    constexpr int kPer = kCols / Element::kChunk;
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kPer; i += kThreads) {
      const int row = i / kPer, col = i % kPer * Element::kChunk, at = row0 + row, left = task.cols - first_col - col;
      if (at >= end || left <= 0) continue;
      Real y[Element::kChunk];
#pragma unroll
      for (int j = 0; j < Element::kChunk; j++) y[j] = a[row * kScorePitch + col + j];
      if (has_ones()) {
        const Real d = denominator[row];
#pragma unroll
        for (int j = 0; j < Element::kChunk; j++) y[j] = d == Real(0) ? Real(0) : y[j] / d;  // a row that sees no key
      }
      if (task.result != LinearResult::out) {
        const bool blocked = slope.blocked && slope.blocked[at];
        Real s[Element::kChunk];
        if (task.result != LinearResult::grad_value && !blocked)
          load_chunk<T>(slope.data, at * task.slope_of.row + first_col + col, left, task.slope_of.chunks, s);
#pragma unroll
        for (int j = 0; j < Element::kChunk; j++) {
          if (task.result != LinearResult::grad_value && !blocked)
            y[j] *= feature_slope(task.slope_of.map, s[j]) * Real(task.slope_of.factor);
          if (blocked) y[j] = Real(0);
        }
      }
      store_chunk<T>(task.x, (first + at) * task.cols + first_col + col, left, task.cols % Element::kChunk == 0, y);
    }
  }

  __device__ __forceinline__ void chunk(int row0, int end) {
    using Part = LinearTile<T, kRows, kDepth, kThreads>;
    const LinearBand band{!task.causal, task.reverse};
    const bool joins = task.causal || task.sums;  // B and C are there
    typename Products::template Sums<kTiles> x;
#pragma unroll 1
    for (int i = 0; i < task.group; i++) {
      const bool fresh = task.a_grouped || i == 0, done = task.a_grouped || i == task.group - 1;
      const bool moves = joins && (!task.a_grouped || i == task.group - 1);  // @state_moves: by this B and C
      const int query_heads = task.kv_heads * task.group, query_head = kv_head * task.group + i;
      const int a_head = task.a_grouped ? query_head : kv_head, a_heads = task.a_grouped ? query_heads : task.kv_heads;
      const int b_head = task.a_grouped ? kv_head : query_head, b_heads = task.a_grouped ? task.kv_heads : query_heads;
      const auto a_rows = [&] { return LinearHeadRows<T>(task.a, batch, ptx::opaque(a_head), a_heads, task.length); };
      const auto b_rows = [&] { return LinearHeadRows<T>(task.b, batch, ptx::opaque(b_head), b_heads, task.length); };
      Part next_a, next_b;
      const auto fetch = [&](int depth) {
        if (!task.sums) next_a.fetch(task.a, a_rows(), row0, end, depth);
        if (joins) next_b.fetch(task.b, b_rows(), row0, end, depth);
      };

      __syncthreads();  // @chunk_read: all are done with what was there before
      if (joins && (!task.a_grouped || i == 0)) {
        const LinearHeadRows<T> c_rows(task.c, batch, b_head, b_heads, task.length);
        LinearTile<T, kRows, kCols, kThreads> next_c;
        next_c.fetch(task.c, c_rows, row0, end, first_col);
        bad |= !next_c.template put<kStatePitch, Products::kRound>(task.c, c_rows, row0, first_col, c);
      }
      if (task.extra == LinearExtra::depth_column) {
        for (int r = threadIdx.x; r < kRows; r += kThreads) {
          const auto read = [&](const void* column, int head, int heads) {
            if (row0 + r >= end) return Real(0);
            return column ? static_cast<const Real*>(column)[(int64_t(batch) * heads + head) * task.length + row0 + r]
                          : Real(1);
          };
          if (!task.sums) a_column[r] = read(task.a_column, a_head, a_heads);
          if (joins) b_column[r] = read(task.b_column, b_head, b_heads);
        }
        __syncthreads();
      }
      if (fresh && !task.sums) begin_result(x);
      typename Products::template Sums<kTiles> scores;
      scores.clear();
      if (kPrefetch) fetch(0);
#pragma unroll 1
      for (int depth = 0; depth < task.depth; depth += kDepth) {
        if (!kPrefetch) fetch(depth);
        if (!task.sums) bad |= !next_a.template put<kPartPitch, Products::kRound>(task.a, a_rows(), row0, depth, a);
        if (joins) bad |= !next_b.template put<kPartPitch, Products::kRound>(task.b, b_rows(), row0, depth, b);
        write_flag();
        __syncthreads();
        read_flags();
        if (kPrefetch && depth + kDepth < task.depth) fetch(depth + kDepth);
        if (!task.sums) {
          if (task.causal) add_scores(scores, band);
          if (fresh) add_state(x, depth);
        }
        typename Products::template Sums<kStateTiles> u;
        u.clear();
        if (moves) state_of_chunk(u);
        __syncthreads();  // @state_read: of these rows, A and B too
        if (moves) keep_state(u, depth);
      }
      if (!task.sums && task.causal) {
        keep_scores(scores, band);
        write_flag();
        __syncthreads();
        read_flags();
        add_values(x, band);
      }
      if (task.extra == LinearExtra::depth_column && moves) {
        if (task.depth == 0) __syncthreads();  // no barrier yet since C was put
        for (int j = threadIdx.x; j < kCols; j += kThreads) {
          Real sum = 0;
          for (int r = 0; r < kRows; r++) sum += b_column[r] * c[r * kStatePitch + j];
          vector[j] += sum;
          bad |= vector[j] - vector[j] != Real(0);
        }
      }
      if (!task.sums && done) write(x, a_head, a_heads, row0, end);
    }
  }

  __device__ __forceinline__ void run() {
    begin_state();
    const int first = piece * task.piece_rows, end = min(task.length, first + task.piece_rows);
    const int chunks = (end - first + kRows - 1) / kRows;
#pragma unroll 1
    for (int n = 0; n < chunks; n++) chunk(first + (task.reverse ? chunks - 1 - n : n) * kRows, end);
    end_state();
  }
};

// grid: pieces * batch * kv_heads * slices
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kPrefetch ? 3 : 2) linear_walk(const LinearTask task) {
  Kernel(task).run();
}

}  // namespace attnjourney
