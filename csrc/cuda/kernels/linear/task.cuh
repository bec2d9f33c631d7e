// The parameters of the kernels of linear attention. Forward and backward are four uses of one product,
//
//   X_i = sum over the j that row i sees of (A_i . B_j) C_j + A_i S,   S = sum of B_j^T C_j before the chunk,
//
// with Q = scale * phi(query), K = phi(key), dN = grad_out / denominator, dm the gradient of the denominator:
//
//              A         B         C        j      S (depth x cols)
//   out        Q         K         [V, 1]   <= i   S, z            X's last column is the denominator
//   dQ         [dN, dm]  [V, 1]    K        <= i   S^T, z
//   dK         [V, 1]    [dN, dm]  Q        >= i   T^T, t          T = sum q dN^T, t = sum dm q
//   dV         K         Q         dN       >= i   T
//
// Not causal: X_i = A_i S with the S of all j.
#pragma once
#include <cstdint>

#include "linear/params.h"

namespace attnjourney {

constexpr int kLinearDepth = 256;  // columns of A and B at most
// Rows of a chunk and columns of a slice, by the bytes of a number of the arithmetic; small: where 99 KB of shared
// memory have to do for a state of `depth` rows and as many columns.
constexpr int kLinearSmallDepth = 192;
constexpr int linear_chunk(int number_size, bool small, int depth) {
  return number_size == 8 || (small && depth > kLinearSmallDepth) ? 32 : 64;
}

// Rows of A, B or C: factor * phi(x) * scales[row], 0 in blocked rows; columns past `cols` count as 0.
struct LinearRows {
  const void* data;          // [batch, heads, length, cols]
  int64_t batch, head, row;  // strides in elements; columns are dense
  int cols;
  FeatureMap map;
  double factor;
  const void* scales;      // [batch, heads, length] in compute precision, or null
  const uint8_t* blocked;  // [batch, length], or null
  bool chunks;             // every row begins at 16 bytes and is a multiple of them
};

// States in compute precision: matrix [depth][cols], vector [depth] or [cols]; null: zeros, or not wanted.
struct LinearState {
  void *matrix, *vector;
  int64_t piece, head, row, col;      // strides of the matrix
  int64_t vector_piece, vector_head;  // of the vector
};

// what comes with the columns of A, B and C
enum class LinearExtra : int {
  none,
  value_column,  // C has one more column, ones: its product is the denominator, its state z [depth]
  depth_column,  // A and B have one more column, a_column and b_column (null: ones): its state is a vector [cols]
};
// what becomes of X
enum class LinearResult : int { out, grad_query, grad_key, grad_value };

struct LinearTask {
  LinearRows a, b, c;
  LinearExtra extra;
  const void *a_column, *b_column;  // [batch, heads, length] in compute precision
  int depth, cols;                  // columns of A and B, of C
  int batch, kv_heads, group;  // heads [kv_heads] of what `a_grouped` says is not the query heads' [kv_heads * group]
  bool a_grouped;              // A has query heads, and B and C key heads; else the other way round
  bool causal, reverse;        // reverse: j >= i, pieces and chunks from the last to the first
  bool sums;                   // only the sum of B_j^T C_j of each piece, into `after`
  int length;                  // rows of A, or of B and C
  int pieces, piece_rows;      // a piece is walked by one block for each head and slice of columns
  int slices;
  LinearState before, after;  // the state that a piece begins with and ends with
  LinearResult result;
  void* x;            // [batch, heads, length, cols], dense
  void* denominator;  // [batch, heads, length]
  double eps;
  LinearRows slope_of;  // what the gradient goes back through: query or key, as they came
};

// Sums of pieces to the states that the pieces begin with, in place; their total to `last`.
struct LinearScan {
  LinearState first, states, last;  // one vector length for all of them
  int pieces, heads, rows, cols, vector;
  bool reverse;
  bool total;  // states[0] becomes the total, the others stay
};

// r = 1 / denominator and dm = -(grad_out . out) r + grad_denominator of each row
struct LinearPrepare {
  const void *grad_out, *out;  // out is dense
  int64_t batch, head, row;    // strides of grad_out
  const void *denominator, *grad_denominator;
  void *inverse, *grad;  // r, dm
  int q_heads, length, cols;
  int64_t rows;  // batch * q_heads * length
};

}  // namespace attnjourney
