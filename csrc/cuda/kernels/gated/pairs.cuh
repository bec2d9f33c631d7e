// Products of a chunk's rows with one another: one block for each chunk, head and query head of its group, or, the last
// one, the key with the delta rule.
//   gated_pairs           P = lower(scale Q W^T); of the key N = strictly lower(K W^T), and of that (1 + N)^-1
//   gated_pair_gradients  dP = lower(dO E^T); of the key dN = - strictly lower(Z E^T)
// all with the gates between the two rows, but the gradients with a gate a channel, which go to rows with theirs.
#pragma once
#include "chunk.cuh"

namespace attnjourney {

template <class T, bool Gradient>
struct GatedPairs : GatedBlock<T> {
  using Base = GatedBlock<T>;
  using Real = typename Base::Real;
  using Products = typename Base::Products;
  using Part = typename Base::Part;
  using RealPart = typename Base::RealPart;
  using Base::column, Base::row_tile, Base::task, Base::warp, Base::batch, Base::head, Base::kThreads, Base::kDepth,
      Base::kRows, Base::kBlocks, Base::kPartPitch, Base::kPairPitch;
  static constexpr int kTiles = kRows / 8 / Base::kColWarps;
  // A, W and gates of 32 columns, or the inverse; the products; by row: factors of A and W, gates, their products from
  // a block's begin and to its end; gates over a block
  static constexpr int kParts = 3 * kRows * kPartPitch;
  static_assert(kParts >= kRows * kPairPitch);
  static constexpr int smem_bytes() {
    return int(sizeof(Real)) * (kParts + kRows * kPairPitch + 5 * kRows + kBlocks * kDepth);
  }

  Real *a, *w, *gates, *inverse, *products, *a_scale, *w_scale, *gate, *up, *tail, *whole;
  GatedChunk chunk;
  int which;
  bool is_key;

  __device__ __forceinline__ explicit GatedPairs(const GatedTask& task_) : Base(task_) {
    inverse = a = reinterpret_cast<Real*>(ptx::dynamic_smem());
    w = a + kRows * kPartPitch, gates = w + kRows * kPartPitch, products = a + kParts;
    a_scale = products + kRows * kPairPitch, w_scale = a_scale + kRows, gate = w_scale + kRows;
    up = gate + kRows, tail = up + kRows, whole = tail + kRows;
    const int block = blockIdx.x, remaining = block / task.products();
    which = block - remaining * task.products();
    const int slot = remaining / task.v_heads;
    head = remaining - slot * task.v_heads;
    chunk = gated_chunk(task, slot, kRows);
    batch = chunk.batch, is_key = which == task.group;
  }
  __device__ __forceinline__ bool channels() const { return !Gradient && task.kind == Gate::channel; }

  __device__ __forceinline__ void scalars() {
    for (int r = threadIdx.x; r < kRows; r += kThreads) {
      const bool there = r < chunk.count;
      const int row = chunk.first + r;
      Real of_a = 0, of_w = 0, g = 1;
      if (there && Gradient) of_a = is_key ? Real(-1) : Real(1), of_w = 1;
      if (there && !Gradient) {
        of_w = this->key_inverse(row);
        of_a = is_key ? of_w : this->query_factor(which, row);
        if (task.delta) of_w *= gated_beta<Real>(task, batch, head, row);
      }
      if (there && task.kind == Gate::head)
        g = gated_exp(
            static_cast<const Real*>(task.gate)[batch * task.gate_batch + head * task.gate_head + row * task.gate_row]);
      a_scale[r] = of_a, w_scale[r] = of_w, gate[r] = g;
    }
    if (task.kind != Gate::head) return;
    __syncthreads();
    for (int r = threadIdx.x; r < kRows; r += kThreads) {
      const int begin = r / kGatedBlock * kGatedBlock;
      Real product = 1;
      for (int i = begin; i <= r; i++) product *= gate[i];
      up[r] = product;
      product = 1;
      for (int i = r + 1; i < begin + kGatedBlock; i++) product *= gate[i];
      tail[r] = product;
    }
  }
  // what a gate a head makes of what row j writes, when row i reads it
  __device__ __forceinline__ Real between(int i, int j) const {
    const int reader = i / kGatedBlock, writer = j / kGatedBlock;
    Real product = 1;
    if (reader == writer) {
      for (int r = j + 1; r <= i; r++) product *= gate[r];
      return product;
    }
    for (int block = writer + 1; block < reader; block++) product *= up[block * kGatedBlock + kGatedBlock - 1];
    return up[i] * product * tail[j];
  }

  template <class Tile, class Rows>
  __device__ __forceinline__ void load(const LinearRows& rows, const Rows& of_head, const Real* scales, int depth,
                                       bool exact, Real* to) const {
    Tile tile;
    tile.fetch(rows, of_head, chunk.first, chunk.first + chunk.count, depth);
    if (exact)
      this->template put<kPartPitch, false>(tile, scales, nullptr, 0, 0, to);
    else
      this->template put<kPartPitch, true>(tile, scales, nullptr, 0, 0, to);
  }
  __device__ __forceinline__ void load_parts(int depth) const {
    if constexpr (Gradient) {
      const int cols = task.v_head_dim;
      const LinearRows errors = this->dense_rows(task.errors, task.v_heads, cols);
      load<RealPart>(errors, LinearHeadRows<Real>(errors, batch, head, task.v_heads, task.len), w_scale, depth, false,
                     w);
      if (is_key) {
        const LinearRows z = this->dense_rows(task.error_grads, task.v_heads, cols);
        load<RealPart>(z, LinearHeadRows<Real>(z, batch, head, task.v_heads, task.len), a_scale, depth, false, a);
      } else {
        const int heads = task.out_heads();
        const LinearHeadRows<T> rows(task.grad_out, batch, this->out_head(which), heads, task.len);
        load<Part>(task.grad_out, rows, a_scale, depth, false, a);
      }
    } else {
      load<Part>(task.key, this->key_rows(), w_scale, depth, channels(), w);
      load<Part>(is_key ? task.key : task.query, is_key ? this->key_rows() : this->query_rows(which), a_scale, depth,
                 channels(), a);
    }
  }

  // ---- a gate a channel ----

  __device__ __forceinline__ void load_gates(int depth) const {
    const Real* from = static_cast<const Real*>(task.gate) + batch * task.gate_batch + head * task.gate_head + depth;
    for (int i = threadIdx.x; i < kRows * kDepth; i += kThreads) {
      const int row = i / kDepth, d = i % kDepth;
      const bool there = row < chunk.count && depth + d < task.head_dim;
      gates[row * kPartPitch + d] = there ? gated_exp(from[int64_t(chunk.first + row) * task.gate_row + d]) : Real(1);
    }
  }
  // Within a block of 16 rows: lane j and j + 16 have row j as the writer, each half of the columns.
  __device__ __forceinline__ void add_block(Real (&sums)[kGatedBlock]) const {
    if (warp >= kBlocks) return;
    const int lane = threadIdx.x % 32, j = lane % kGatedBlock, first = warp * kGatedBlock;
#pragma unroll 1
    for (int n = 0; n < kDepth / 2; n++) {
      const int d = lane / kGatedBlock * (kDepth / 2) + n;
      Real written = w[(first + j) * kPartPitch + d];
#pragma unroll
      for (int i = 0; i < kGatedBlock; i++) {
        if (i < j) continue;
        if (i > j) written *= gates[(first + i) * kPartPitch + d];
        sums[i] += a[(first + i) * kPartPitch + d] * written;
      }
    }
  }
  // rows of A from their block's begin on, those of W to its end
  __device__ __forceinline__ void scale_parts() const {
    for (int i = threadIdx.x; i < kBlocks * kDepth; i += kThreads) {
      const int first = i / kDepth * kGatedBlock, d = i % kDepth;
      Real product = 1;
#pragma unroll 4
      for (int r = 0; r < kGatedBlock; r++) {
        const int at = (first + r) * kPartPitch + d;
        product *= gates[at];
        a[at] = Products::stored(a[at] * product);
      }
      whole[i] = product;
      product = 1;
#pragma unroll 4
      for (int r = kGatedBlock - 1; r >= 0; r--) {
        const int at = (first + r) * kPartPitch + d;
        w[at] *= product;
        product *= gates[at];
      }
    }
  }

  // ---- (1 + N)^-1 ----

  // Blocks of 16 rows on the diagonal by substitution, then those below, a diagonal at a time: T_rc = - T_rr sum over
  // c <= u < r of N_ru T_uc. The sums lie above the diagonal of N. No sum goes beyond its row: a NaN stays below it.
  __device__ __forceinline__ void invert() const {
    for (int i = threadIdx.x; i < kRows * kRows; i += kThreads) {
      const int row = i / kRows, col = i % kRows;
      inverse[row * kPairPitch + col] = row == col ? Real(1) : Real(0);
    }
    __syncthreads();
    for (int col = threadIdx.x; col < kRows; col += kThreads) {
      const int end = col / kGatedBlock * kGatedBlock + kGatedBlock;
      for (int row = col + 1; row < end; row++) {
        Real sum = 0;
        for (int k = col; k < row; k++) sum += products[row * kPairPitch + k] * inverse[k * kPairPitch + col];
        inverse[row * kPairPitch + col] = -sum;
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int below = 1; below < kBlocks; below++) {
      const int count = (kBlocks - below) * kGatedBlock * kGatedBlock;
      for (int i = threadIdx.x; i < count; i += kThreads) {
        const int c = i / (kGatedBlock * kGatedBlock) * kGatedBlock, r = c + below * kGatedBlock;
        const int row = i / kGatedBlock % kGatedBlock, col = i % kGatedBlock;
        Real sum = 0;
        for (int k = c + col; k < r; k++)
          sum += products[(r + row) * kPairPitch + k] * inverse[k * kPairPitch + c + col];
        products[(c + row) * kPairPitch + r + col] = sum;
      }
      __syncthreads();
      for (int i = threadIdx.x; i < count; i += kThreads) {
        const int c = i / (kGatedBlock * kGatedBlock) * kGatedBlock, r = c + below * kGatedBlock;
        const int row = i / kGatedBlock % kGatedBlock, col = i % kGatedBlock;
        Real sum = 0;
        for (int k = 0; k <= row; k++)
          sum += inverse[(r + row) * kPairPitch + r + k] * products[(c + k) * kPairPitch + r + col];
        inverse[(r + row) * kPairPitch + c + col] = -sum;
      }
      __syncthreads();
    }
  }

  __device__ __forceinline__ void run() {
    if (chunk.count == 0) return;
    scalars();
    typename Base::template Sums<kTiles> sums;
    sums.clear();
    Real of_block[kGatedBlock] = {};
    const int cols = Gradient ? task.v_head_dim : task.head_dim;
#pragma unroll 1
    for (int depth = 0; depth < cols; depth += kDepth) {
      __syncthreads();  // @parts_read
      load_parts(depth);
      if (channels()) {
        load_gates(depth);
        __syncthreads();
        if constexpr (!Gradient) add_block(of_block);
        __syncthreads();  // @block_read
        scale_parts();
      }
      __syncthreads();
      const int row = row_tile();
      const auto of_a = [&](int r, int k) { return a[(row + r) * kPartPitch + k]; };
      const auto at = [&](int i) { return column(i); };
      const auto all = [](int, int) { return true; };
      if (channels()) {
        const int reader = row / kGatedBlock;
        this->multiply(
            sums, 0, kDepth, of_a,
            [&](int k, int j) {
              Real x = w[j * kPartPitch + k];
              for (int block = j / kGatedBlock + 1; block < reader; block++) x *= whole[block * kDepth + k];
              return x;
            },
            at, [&](int i) { return column(i) / kGatedBlock < reader; }, all);
      } else {
        this->multiply(
            sums, 0, kDepth, of_a, [&](int k, int j) { return w[j * kPartPitch + k]; }, at,
            [&](int i) { return column(i) <= row + 15; }, all);
      }
    }
    this->each(sums, [&](int i, int j, Real x) {
      const bool seen = is_key ? j < i : j <= i;
      if (channels() && i / kGatedBlock == j / kGatedBlock) return;
      if (seen && task.kind == Gate::head) x *= between(i, j);
      products[i * kPairPitch + j] = seen ? x : Real(0);
    });
    if constexpr (!Gradient) {
      if (channels() && warp < kBlocks) {
        const int lane = threadIdx.x % 32, j = lane % kGatedBlock, first = warp * kGatedBlock;
#pragma unroll
        for (int i = 0; i < kGatedBlock; i++) {
          const Real x = of_block[i] + ptx::shfl_xor(of_block[i], kGatedBlock);
          const bool seen = is_key ? j < i : j <= i;
          if (lane < kGatedBlock) products[(first + i) * kPairPitch + first + j] = seen ? x : Real(0);
        }
      }
    }
    __syncthreads();
    const Real* result = products;
    if constexpr (!Gradient)
      if (is_key) invert(), result = inverse;
    Real* const to = this->pairs_at(chunk.slot, which);
    constexpr int kPer = kRows / kVector<Real>;
    for (int i = threadIdx.x; i < kRows * kPer; i += kThreads) {
      const int row = i / kPer, col = i % kPer * kVector<Real>;
      Real x[kVector<Real>];
      load_numbers<Real, kVector<Real>>(x, result + row * kPairPitch + col);
      store_numbers<Real, kVector<Real>>(to + row * kRows + col, x);
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kGatedThreads, 3) gated_pairs(const GatedTask task) {
  GatedPairs<T, false>(task).run();
}
template <class T>
__global__ void __launch_bounds__(kGatedThreads) gated_pair_gradients(const GatedTask task) {
  GatedPairs<T, true>(task).run();
}

}  // namespace attnjourney
