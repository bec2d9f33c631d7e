// The product of linear/task.cuh, walked in chunks of rows: one block for each piece of the sequence, head and slice of
// columns, four warps. The state of the slice stays in shared memory in compute precision; A and B pass by in parts of
// 32 columns, the next part fetched while this one is multiplied. With `sums` only the piece's own state is made.
#pragma once
#include "products.cuh"

namespace attnjourney {

template <class T_, int Chunk>
struct LinearWalk {
  using T = T_;
  using E = LinearElement<T>;
  using C = typename E::C;
  using P = LinearProducts<T>;
  static constexpr int kRows = Chunk, kCols = Chunk, kDepth = 32, kThreads = 128;
  // warps over the 16-row tiles of a chunk, and over columns
  static constexpr int kRowWarps = kRows / 16, kColWarps = 4 / kRowWarps;
  static constexpr int kTiles = kCols / 8 / kColWarps;  // of X, and of P, which is as wide
  static constexpr int kStateTiles = kCols / 8 / 2;     // of 32 rows of the state: 2 x 2 warps
  // Numbers from row to row of A and B; of P and X, which lie where A and B were; of C and the state. Eight rows of
  // four columns of the former, four rows of eight columns of the latter meet no bank twice; double, whose threads read
  // one row of the latter, is denser, so that 99 KB hold 256 rows of the state.
  static constexpr int kPart = kDepth + 4, kScores = kCols + 4, kFp32Lanes = kCols + (sizeof(C) == 4 ? 8 : 0);
  static_assert(kScores <= 2 * kPart);

  static constexpr bool kAhead = sizeof(T) == 2;  // parts are fetched before they are needed; more would spill

  static constexpr __host__ __device__ int parts(int depth) { return (depth + kDepth - 1) / kDepth; }
  // A and B, or P or X; C; columns of A and B; denominators; the vector; the warps' flags; the state
  static constexpr int kBeforeState = kRows * (2 * kPart + kFp32Lanes + 3) + kLinearDepth + 16;
  static constexpr int smem_bytes(int depth) {
    return int(sizeof(C)) * (kBeforeState + parts(depth) * kDepth * kFp32Lanes);
  }

  const LinearTask& p;
  C *state, *vector, *a, *b, *c, *a_column, *b_column, *denominator;
  uint32_t* flags;
  int warp;
  int batch, kv_head, piece, first_col;
  bool bad = false;  // something is not finite: found by this thread's warp, then known to all

  __device__ __forceinline__ explicit LinearWalk(const LinearTask& task) : p(task) {
    a = reinterpret_cast<C*>(ptx::dynamic_smem()), b = a + kRows * kPart, c = b + kRows * kPart;
    a_column = c + kRows * kFp32Lanes, b_column = a_column + kRows, denominator = b_column + kRows;
    vector = denominator + kRows, flags = reinterpret_cast<uint32_t*>(vector + kLinearDepth);
    state = a + kBeforeState;
    warp = ptx::uniform(threadIdx.x / 32);
    const int block = blockIdx.x, rest = block / p.slices, head = rest % (p.batch * p.kv_heads);
    first_col = (block - rest * p.slices) * kCols;
    piece = rest / (p.batch * p.kv_heads);
    batch = head / p.kv_heads, kv_head = head - batch * p.kv_heads;
  }

  // ---- the state in memory ----

  __device__ __forceinline__ int head() const { return batch * p.kv_heads + kv_head; }
  // numbers of the vector, the first one's place in memory
  __device__ __forceinline__ int vector_begin() const { return p.extra == LinearExtra::depth_column ? first_col : 0; }
  __device__ __forceinline__ int vector_count() const {
    if (p.extra == LinearExtra::none) return 0;
    return p.extra == LinearExtra::depth_column ? min(kCols, p.cols - first_col) : p.depth;
  }

  __device__ __forceinline__ void begin_state() {
    const LinearState& s = p.before;
    const C* matrix = p.sums ? nullptr : static_cast<const C*>(s.matrix);
    const C* given = p.sums ? nullptr : static_cast<const C*>(s.vector);
    C sum = 0;
    for (int i = threadIdx.x; i < parts(p.depth) * kDepth * kCols; i += kThreads) {
      const int row = i / kCols, col = i % kCols;
      const bool there = matrix && row < p.depth && first_col + col < p.cols;
      const C x = there ? matrix[piece * s.piece + head() * s.head + row * s.row + (first_col + col) * s.col] : C(0);
      sum += x - x;
      state[row * kFp32Lanes + col] = x;
    }
    for (int i = threadIdx.x; i < kLinearDepth; i += kThreads) {
      const bool there = given && i < vector_count();
      const C x = there ? given[piece * s.vector_piece + head() * s.vector_head + vector_begin() + i] : C(0);
      sum += x - x;
      vector[i] = x;
    }
    bad = sum != C(0);
  }
  __device__ __forceinline__ void end_state() const {
    const LinearState& s = p.after;
    if (!s.matrix && !s.vector) return;
    __syncthreads();
    if (s.matrix)
      for (int i = threadIdx.x; i < p.depth * kCols; i += kThreads) {
        const int row = i / kCols, col = i % kCols;
        if (first_col + col < p.cols)
          static_cast<C*>(s.matrix)[piece * s.piece + head() * s.head + row * s.row + (first_col + col) * s.col] =
              state[row * kFp32Lanes + col];
      }
    if (!s.vector || (p.extra == LinearExtra::value_column && first_col))
      return;  // one slice's vector is every slice's
    for (int i = threadIdx.x; i < vector_count(); i += kThreads)
      static_cast<C*>(s.vector)[piece * s.vector_piece + head() * s.vector_head + vector_begin() + i] = vector[i];
  }

  // ---- what all threads of the block know ----

  __device__ __forceinline__ void tell() {
    bad = ptx::any(bad);
    if (threadIdx.x % 32 == 0) flags[warp] = bad;
  }
  __device__ __forceinline__ void listen() { bad = flags[0] | flags[1] | flags[2] | flags[3]; }

  // ---- one chunk ----

  // the warp's rows of the chunk and of 32 rows of the state; the first column of its tile i
  __device__ __forceinline__ int row_tile() const { return warp % kRowWarps * 16; }
  __device__ __forceinline__ int column(int i) const { return (i * kColWarps + warp / kRowWarps) * 8; }
  __device__ __forceinline__ int state_row_tile() const { return warp % 2 * 16; }
  __device__ __forceinline__ int state_column(int i) const { return (i * 2 + warp / 2) * 8; }
  __device__ __forceinline__ bool has_ones() const { return p.extra == LinearExtra::value_column; }

  // sums += sum over begin <= k < end; see LinearProducts
  template <bool RoundB, int Tiles, class A, class B, class More, class Columns, class Used, class Seen>
  __device__ __forceinline__ void multiply(typename P::template Sums<Tiles>& sums, int begin, int end, A&& x, B&& y,
                                           bool has_more, More&& more, Columns&& columns, Used&& used,
                                           Seen&& seen) const {
    if constexpr (P::kTensor)
      if (!bad) return P::template on_tensor_cores<RoundB>(sums, begin, end, x, y, has_more, more, columns, used);
    P::one_by_one(sums, begin, end, x, y, has_more, more, columns, seen);
  }

  // P += A B^T
  __device__ __forceinline__ void add_scores(typename P::template Sums<kTiles>& scores, const LinearBand& band) const {
    const int row = row_tile();
    multiply<false>(
        scores, 0, kDepth, [&](int r, int k) { return a[(row + r) * kPart + k]; },
        [&](int k, int j) { return b[j * kPart + k]; }, false, [](int) { return C(0); },
        [&](int i) { return column(i); }, [&](int i) { return band.any(row, column(i)); },
        [](int, int) { return true; });
  }
  // X += A S
  __device__ __forceinline__ void add_state(typename P::template Sums<kTiles>& x, int depth) const {
    const int row = row_tile();
    multiply<true>(
        x, 0, kDepth, [&](int r, int k) { return a[(row + r) * kPart + k]; },
        [&](int k, int j) { return state[(depth + k) * kFp32Lanes + j]; }, has_ones() && warp / kRowWarps == 0,
        [&](int k) { return P::stored(vector[depth + k]); }, [&](int i) { return column(i); }, [](int) { return true; },
        [&](int, int k) { return depth + k < p.depth; });
  }
  // X += P C
  __device__ __forceinline__ void add_values(typename P::template Sums<kTiles>& x, const LinearBand& band) const {
    const int row = row_tile();
    multiply<false>(
        x, band.upper ? row : 0, band.upper ? kRows : row + 16,
        [&](int r, int k) { return a[(row + r) * kScores + k]; }, [&](int k, int j) { return c[k * kFp32Lanes + j]; },
        has_ones() && warp / kRowWarps == 0, [](int) { return C(1); }, [&](int i) { return column(i); },
        [](int) { return true; }, [&](int r, int k) { return band.seen(row + r, k); });
  }
  // B^T C, of 32 rows of the state
  __device__ __forceinline__ void state_of_chunk(typename P::template Sums<kStateTiles>& u) const {
    const int row = state_row_tile();
    multiply<false>(
        u, 0, kRows, [&](int r, int k) { return b[k * kPart + row + r]; },
        [&](int k, int j) { return c[k * kFp32Lanes + j]; }, has_ones() && warp / 2 == 0, [](int) { return C(1); },
        [&](int i) { return state_column(i); }, [](int) { return true; }, [](int, int) { return true; });
  }
  __device__ __forceinline__ void keep_state(const typename P::template Sums<kStateTiles>& u, int depth) {
    const int lane = ptx::opaque(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    C sum = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = depth + state_row_tile() + g + e / 2 * 8;
#pragma unroll
      for (int i = 0; i < kStateTiles; i++) {
        C& s = state[row * kFp32Lanes + state_column(i) + 2 * t + e % 2];
        s += u.acc[i][e];
        sum += s - s;
      }
      if (has_ones() && warp / 2 == 0 && t == 0 && e % 2 == 0) {
        vector[row] += u.more[e];
        sum += vector[row] - vector[row];
      }
    }
    bad |= sum != C(0);
  }

  // P, with what the further column of A and B adds and 0 where hidden, to where A and B were
  __device__ __forceinline__ void keep_scores(const typename P::template Sums<kTiles>& scores, const LinearBand& band) {
    const int lane = ptx::opaque(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    const bool more = p.extra == LinearExtra::depth_column;
    C sum = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = row_tile() + g + e / 2 * 8;
      const C of_row = more ? a_column[row] : C(0);
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        const int col = column(i) + 2 * t + e % 2;
        C x = scores.acc[i][e];
        if (more) x += of_row * b_column[col];
        x = band.seen(row, col) ? x : C(0);
        sum += x - x;
        a[row * kScores + col] = P::stored(x);
      }
    }
    bad |= sum != C(0);
  }

  // X before anything is added: what the further column of A reads of the state
  __device__ __forceinline__ void begin_result(typename P::template Sums<kTiles>& x) const {
    x.clear();
    if (p.extra != LinearExtra::depth_column) return;
    const int lane = ptx::opaque(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const C of_row = a_column[row_tile() + g + e / 2 * 8];
#pragma unroll
      for (int i = 0; i < kTiles; i++) x.acc[i][e] = of_row * vector[column(i) + 2 * t + e % 2];
    }
  }

  // X to memory: through where A and B were, so that whole chunks of rows are written
  __device__ __forceinline__ void write(const typename P::template Sums<kTiles>& x, int head, int heads, int row0,
                                        int end) const {
    const int lane = ptx::opaque(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = row_tile() + g + e / 2 * 8;
#pragma unroll
      for (int i = 0; i < kTiles; i++) a[row * kScores + column(i) + 2 * t + e % 2] = x.acc[i][e];
      if (has_ones() && warp / kRowWarps == 0 && t == 0 && e % 2 == 0) denominator[row] = x.more[e] + C(p.eps);
    }
    __syncthreads();
    const int64_t first = (int64_t(batch) * heads + head) * p.length;
    const LinearHeadRows<T> slope(p.slope_of, batch, head, heads, p.length);
    if (has_ones() && first_col == 0)
      for (int row = threadIdx.x; row < min(kRows, end - row0); row += kThreads)
        static_cast<C*>(p.denominator)[first + row0 + row] = denominator[row];
    constexpr int kPer = kCols / E::kChunk;
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kPer; i += kThreads) {
      const int row = i / kPer, col = i % kPer * E::kChunk, at = row0 + row, left = p.cols - first_col - col;
      if (at >= end || left <= 0) continue;
      C y[E::kChunk];
#pragma unroll
      for (int j = 0; j < E::kChunk; j++) y[j] = a[row * kScores + col + j];
      if (has_ones()) {
        const C d = denominator[row];
#pragma unroll
        for (int j = 0; j < E::kChunk; j++) y[j] = d == C(0) ? C(0) : y[j] / d;  // a row that sees no key
      }
      if (p.result != LinearResult::out) {
        const bool blocked = slope.blocked && slope.blocked[at];
        C s[E::kChunk];
        if (p.result != LinearResult::grad_value && !blocked)
          load_chunk<T>(slope.data, at * p.slope_of.row + first_col + col, left, p.slope_of.chunks, s);
#pragma unroll
        for (int j = 0; j < E::kChunk; j++) {
          if (p.result != LinearResult::grad_value && !blocked)
            y[j] *= feature_slope(p.slope_of.map, s[j]) * C(p.slope_of.factor);
          if (blocked) y[j] = C(0);
        }
      }
      store_chunk<T>(p.x, (first + at) * p.cols + first_col + col, left, p.cols % E::kChunk == 0, y);
    }
  }

  __device__ __forceinline__ void chunk(int row0, int end) {
    using Part = LinearTile<T, kRows, kDepth, kThreads>;
    const LinearBand band{!p.causal, p.reverse};
    const bool joins = p.causal || p.sums;  // B and C are there
    typename P::template Sums<kTiles> x;
#pragma unroll 1
    for (int i = 0; i < p.group; i++) {
      const bool fresh = p.a_grouped || i == 0, done = p.a_grouped || i == p.group - 1;
      const bool moves = joins && (!p.a_grouped || i == p.group - 1);  // @state_moves: by this B and C
      const int query_heads = p.kv_heads * p.group, query_head = kv_head * p.group + i;
      const int a_head = p.a_grouped ? query_head : kv_head, a_heads = p.a_grouped ? query_heads : p.kv_heads;
      const int b_head = p.a_grouped ? kv_head : query_head, b_heads = p.a_grouped ? p.kv_heads : query_heads;
      const auto a_rows = [&] { return LinearHeadRows<T>(p.a, batch, ptx::opaque(a_head), a_heads, p.length); };
      const auto b_rows = [&] { return LinearHeadRows<T>(p.b, batch, ptx::opaque(b_head), b_heads, p.length); };
      Part next_a, next_b;
      const auto fetch = [&](int depth) {
        if (!p.sums) next_a.fetch(p.a, a_rows(), row0, end, depth);
        if (joins) next_b.fetch(p.b, b_rows(), row0, end, depth);
      };

      __syncthreads();  // @chunk_read: all are done with what was there before
      if (joins && (!p.a_grouped || i == 0)) {
        const LinearHeadRows<T> c_rows(p.c, batch, b_head, b_heads, p.length);
        LinearTile<T, kRows, kCols, kThreads> next_c;
        next_c.fetch(p.c, c_rows, row0, end, first_col);
        bad |= !next_c.template put<kFp32Lanes, P::kRound>(p.c, c_rows, row0, first_col, c);
      }
      if (p.extra == LinearExtra::depth_column) {
        for (int r = threadIdx.x; r < kRows; r += kThreads) {
          const auto read = [&](const void* column, int head, int heads) {
            if (row0 + r >= end) return C(0);
            return column ? static_cast<const C*>(column)[(int64_t(batch) * heads + head) * p.length + row0 + r] : C(1);
          };
          if (!p.sums) a_column[r] = read(p.a_column, a_head, a_heads);
          if (joins) b_column[r] = read(p.b_column, b_head, b_heads);
        }
        __syncthreads();
      }
      if (fresh && !p.sums) begin_result(x);
      typename P::template Sums<kTiles> scores;
      scores.clear();
      if (kAhead) fetch(0);
#pragma unroll 1
      for (int depth = 0; depth < p.depth; depth += kDepth) {
        if (!kAhead) fetch(depth);
        if (!p.sums) bad |= !next_a.template put<kPart, P::kRound>(p.a, a_rows(), row0, depth, a);
        if (joins) bad |= !next_b.template put<kPart, P::kRound>(p.b, b_rows(), row0, depth, b);
        tell();
        __syncthreads();
        listen();
        if (kAhead && depth + kDepth < p.depth) fetch(depth + kDepth);
        if (!p.sums) {
          if (p.causal) add_scores(scores, band);
          if (fresh) add_state(x, depth);
        }
        typename P::template Sums<kStateTiles> u;
        u.clear();
        if (moves) state_of_chunk(u);
        __syncthreads();  // @state_read: of these rows, A and B too
        if (moves) keep_state(u, depth);
      }
      if (!p.sums && p.causal) {
        keep_scores(scores, band);
        tell();
        __syncthreads();
        listen();
        add_values(x, band);
      }
      if (p.extra == LinearExtra::depth_column && moves) {
        if (p.depth == 0) __syncthreads();  // C has been put by nobody's barrier yet
        for (int j = threadIdx.x; j < kCols; j += kThreads) {
          C sum = 0;
          for (int r = 0; r < kRows; r++) sum += b_column[r] * c[r * kFp32Lanes + j];
          vector[j] += sum;
          bad |= vector[j] - vector[j] != C(0);
        }
      }
      if (!p.sums && done) write(x, a_head, a_heads, row0, end);
    }
  }

  __device__ __forceinline__ void run() {
    begin_state();
    const int first = piece * p.piece_rows, end = min(p.length, first + p.piece_rows);
    const int chunks = (end - first + kRows - 1) / kRows;
#pragma unroll 1
    for (int n = 0; n < chunks; n++) chunk(first + (p.reverse ? chunks - 1 - n : n) * kRows, end);
    end_state();
  }
};

// grid: pieces * batch * kv_heads * slices
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kAhead ? 3 : 2) linear_walk(const LinearTask p) {
  Kernel(p).run();
}

}  // namespace attnjourney
