// Lengths of the batch items, and the keys that their rows see: csrc/core/mask.h in 32 bits, and in tiles.
#pragma once
#include <cmath>

#include "core/mask.h"

namespace attnjourney {

using Ranges = KeyRangesOf<int>;
using Range = KeyRangeOf<int>;
using SeenKeys = VisibleKeysOf<int>;
constexpr int kMaskDims = 16;

// same: the dtype of query; blocks: there are BlockLists, and `mask` is their offsets, int [.., row blocks + 1]
enum class MaskElement : int { blocks = -1, none, boolean, fp32, same };

// A mask of blocks of size x size pairs (BlockRows, csrc/attention/params.h).
struct BlockLists {
  const int *index, *partial;             // [count]
  const unsigned char* elements;          // [partial_blocks, size, size]
  int size, rows, count, partial_blocks;  // rows: of blocks
};

// What the options of attention do to scores; the kernels of plain calls do not look at it. Real: what scores are
// computed in, double for float64 and float for everything else.
template <class Real>
struct ScoresOf {
  // Of scores: log2(e), so that a weight is 2^score; with a floating mask 1, for that is then added as it is, up to
  // both ends of its range, and differences of scores are multiplied by `exponent`, log2(e), else 1.
  Real unit, exponent;
  Real cap, cap_factor;        // of the modifier: softcap * unit, 2 log2(e) scale / softcap; 0: none
  const Real *sinks, *slopes;  // [batch, q_heads] or null
  const void* mask;            // read through strides, in elements: 0 where it broadcasts
  MaskElement mask_kind;
  int mask_bytes, mask_dims;  // of an element; batch dimensions
  int mask_size[kMaskDims];   // of the batch, the last one fastest
  int64_t mask_batch[kMaskDims], mask_head, mask_row, mask_col;
  BlockLists blocks;
  const uint64_t* seed;  // of dropout; null: none
  uint32_t threshold;    // dropped where 16 bits are below
  Real keep_scale;       // 1 / (1 - p)
  // Where dropout's counter has row 0, key 0 and head 0 of the call. Its items have `heads` heads, and so many lie
  // between the last of one item and the first of the next.
  int first_row, first_key, first_head, heads, heads_between;

  ATTNJOURNEY_HD bool modified() const { return cap > 0; }
  ATTNJOURNEY_HD void leave_unmodified() { cap = 0; }
};
using Scores = ScoresOf<float>;

// The same without mask and dropout, which are not there.
template <class Real>
ATTNJOURNEY_HD ScoresOf<Real> unmasked_scores(const ScoresOf<Real>& s) {
  ScoresOf<Real> x{};
  x.unit = s.unit, x.exponent = s.exponent, x.cap = s.cap, x.cap_factor = s.cap_factor;
  x.sinks = s.sinks, x.slopes = s.slopes;
  return x;
}

// What the softmax of a row comes to, as the forward leaves it: a weight is inverse * 2^(score - reference), both in
// the unit of scores. Exact where scores are the same numbers again, however large: the rounding of lse is not part of
// it.
template <class Real>
struct alignas(2 * sizeof(Real)) RowStats {
  Real reference, inverse;  // 0, 0: no key is visible
};

// 16-bit kernels without options take 2^(score * scale - reference) in one fused multiply-add. What it does not round
// of the scores shows in weights where scores are large: from here on these are rounded first, in forward and backward,
// which near this limit differ by 2^-17 in the exponent.
__device__ __forceinline__ bool is_far(float reference) {
  const float size = reference < 0.f ? -reference : reference;
  return size > 256.f && size < INFINITY;
}

template <class Real>
struct SequenceTaskOf {
  int q_len, kv_len;                       // of the tensors
  Ranges keys;                             // of the call
  const int *query_lengths, *key_lengths;  // [batch] or null; beyond the tensors' lengths they count as these
  bool bottom_right;                       // the last row stands at the last key
  // Packed sequences, [sequences + 1] or null: the batch items are rows cu_q[i] .. of one item, keys cu_k[i] .. . Their
  // tiles are numbered through: those of item i from cu[i] / tile + i on, which leaves room for a last one in part.
  const int *cu_q, *cu_k;
  ScoresOf<Real> scores;
};
using SequenceTask = SequenceTaskOf<float>;

// One batch item: rows from q_len on see nothing, keys from keys.key_length on are seen by none.
struct Sequence {
  int q_len;
  Ranges keys;
  int rows, k_rows;      // that are in memory
  int q_begin, k_begin;  // of packed sequences
};

// The item whose tile has this number.
__device__ __forceinline__ int packed_item(const int* cu, int items, int tile, int number) {
  int low = 0;
  for (int high = items; low + 1 < high;) {
    const int middle = (low + high) / 2;
    (cu[middle] / tile + middle <= number ? low : high) = middle;
  }
  return low;
}
__device__ __forceinline__ int first_packed_tile(const int* cu, int tile, int item) { return cu[item] / tile + item; }

template <bool Packed = false, class Real>
__device__ __forceinline__ Sequence sequence_of(const SequenceTaskOf<Real>& p, int batch) {
  Sequence s{p.q_len, p.keys, p.q_len, p.kv_len, 0, 0};
  int k_len = p.kv_len;
  if (Packed && p.cu_q) {  // never beyond the tensors, whatever cu says
    s.q_begin = max(0, min(p.cu_q[batch], p.q_len)), s.k_begin = max(0, min(p.cu_k[batch], p.kv_len));
    s.q_len = s.rows = max(0, min(p.cu_q[batch + 1], p.q_len) - s.q_begin);
    k_len = s.k_rows = max(0, min(p.cu_k[batch + 1], p.kv_len) - s.k_begin);
  }
  if (p.query_lengths) s.q_len = max(0, min(p.query_lengths[batch], p.q_len));
  if (p.key_lengths) k_len = max(0, min(p.key_lengths[batch], p.kv_len));
  s.keys.set_length(k_len);
  if (p.bottom_right) s.keys.offset = k_len - s.q_len;
  return s;
}

// Tiles of keys that some rows see: numbers [0, prefix) and [begin, end). Those in [whole_begin, whole_end) hide
// nothing from any of the rows. No row sees a key from key_end on.
struct KeyTiles {
  int prefix, begin, end, whole_begin, whole_end, key_end;
  __device__ __forceinline__ int count() const { return prefix + end - begin; }
  // the tile after, before tile n; end and -1 are the last ones
  __device__ __forceinline__ int above(int n) const { return n + 1 == prefix ? begin : n + 1; }
  __device__ __forceinline__ int below(int n) const { return n == begin ? prefix - 1 : n - 1; }
  __device__ __forceinline__ int first() const { return prefix > 0 ? 0 : begin; }
  // how many come before tile n
  __device__ __forceinline__ int number(int n) const { return n >= begin ? n - begin + prefix : n; }
  // all of it is evaluated: branches would cost registers
  __device__ __forceinline__ bool has(int n) const { return (n < prefix) | ((n >= begin) & (n < end)); }
  __device__ __forceinline__ bool whole(int n) const { return n >= whole_begin && n < whole_end; }
};

template <int Keys>
__device__ __forceinline__ KeyTiles tiles_of(const SeenKeys& some) {
  KeyTiles t;
  t.key_end = some.end;
  t.begin = some.begin / Keys;
  t.end = (t.key_end + Keys - 1) / Keys;
  t.prefix = min(t.begin, (some.prefix + Keys - 1) / Keys);
  if (t.prefix == t.begin) t.prefix = t.begin = 0;
  return t;
}

// How many of these tiles come after tile n: less work than to make KeyTiles.
template <int Keys>
__device__ __forceinline__ int tiles_after(const SeenKeys& some, int n) {
  const int begin = some.begin / Keys, end = (some.end + Keys - 1) / Keys, prefix = (some.prefix + Keys - 1) / Keys;
  if (n >= begin) return end - 1 - n;
  return (some.begin < some.end ? min(prefix, begin) + end - begin : prefix) - 1 - n;
}

// Rows first .. last of a sequence. Not Ranged: they see all keys of the tensor.
template <int Keys, bool Ranged, class Real>
__device__ __forceinline__ KeyTiles key_tiles_of(const SequenceTaskOf<Real>& p, const Sequence& s, int first,
                                                 int last) {
  if (!Ranged) return {0, 0, (p.kv_len + Keys - 1) / Keys, 0, p.kv_len / Keys, p.kv_len};
  const bool cut = last >= s.q_len && s.q_len < p.q_len;  // there are rows that see nothing
  last = min(last, s.q_len - 1);
  if (first > last) return {0, 0, 0, 0, 0, 0};
  const Range every = s.keys.all(first, last).last();
  SeenKeys some = s.keys.any(first, last);
  if (some.begin == some.end) some.begin = some.end = some.prefix;
  KeyTiles t = tiles_of<Keys>(some);
  t.whole_begin = (every.begin + Keys - 1) / Keys;
  t.whole_end = cut ? 0 : every.end / Keys;
  return t;
}

// The keys that one row sees, the rows that see one key.
__device__ __forceinline__ SeenKeys row_keys_of(const Sequence& s, int row) {
  if (row >= s.q_len) return {0, 0, 0};
  return s.keys.row(row);
}
__device__ __forceinline__ Range key_rows_of(const Sequence& s, int key) { return s.keys.rows(key, key, s.q_len); }

}  // namespace attnjourney
