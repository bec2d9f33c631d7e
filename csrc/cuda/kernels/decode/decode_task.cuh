// The parameters of the decoding kernels (csrc/decode/decode.h says what they mean), and which keys a block works on:
// a tile of rows of one key head (16 or 64 on mma.sync, 8 in ordinary arithmetic) and its share of the keys that some
// row sees, counted from lengths on the device.
#pragma once
#include <cstdint>

#include "attention/params.h"
#include "core/constants.h"
#include "cuda/kernels/common/bytes.cuh"
#include "cuda/kernels/common/pages.cuh"

namespace attnjourney {

struct CacheStrides {        // in elements; the last dimension is dense
  int64_t outer, head, row;  // outer: of a sequence, or of a block of a paged cache
};

struct DecodeTask {
  const void *query, *key, *value;
  void *out, *lse;  // [batch, q_heads, q_len, v_head_dim], [batch, q_heads, q_len], dense
  int64_t q_batch, q_head, q_row;
  CacheStrides k, v;
  const int64_t* lengths;  // [batch]; they count as 0 .. longest
  int64_t longest;
  const int* table;  // [batch, max_blocks] or null; a number that is no block's stands for keys that no row sees
  int blocks, block_size, max_blocks;
  int capacity;
  bool ring;
  int batch, kv_heads, group, q_len, head_dim, v_head_dim;
  int rows, row_tiles;  // rows that read one key head, group * q_len, and tiles of them
  Ranges keys;          // without a sequence's offset and length
  // Of scores, see natural_scores: softmax scale; of the modifier softcap, 0: none, and scale / softcap.
  double score_scale, cap, cap_factor;
  bool scaled_only;  // neither modifier nor ALiBi nor mask
  const void* mask;
  MaskElement mask_kind;
  int mask_bytes;
  int64_t mask_batch, mask_head, mask_row, mask_col;
  const void *sinks, *slopes;         // float (double for double), or null
  int64_t sinks_batch, slopes_batch;  // strides; heads are dense
  int splits;                         // blocks that share the keys of a sequence; with `shares`: of all
  // splits > 1: [unit, split, row of the tile] outputs before division [v_head_dim], and each row's reference (in
  // the unit of scores) and sum; a unit is (sequence, key head, tile of rows)
  void *part_out, *part_stats;
  // [batch, 2] or null: where blocks share the keys of all sequences (ragged_shares.cuh), which parts each of them has;
  // part_out is [2 * split, tile of rows, row of the tile] then
  int* shares;
  uint32_t* arrivals;  // [unit] zeros, and zeros again afterwards: the last block of a unit joins its parts; or null
  // Packed rows over a paged cache, or null: sequence b has rows cu_q[b] .. of heads of q_len rows, and cu_k[b + 1] -
  // cu_k[b] keys. Sequences of more than few_rows rows are attention's (sm80/forward.cuh). A key head has `tiles` tiles
  // of rows: row_tiles for each sequence or, where that is 0, numbered through, see PackedRows.
  const int *cu_q, *cu_k;
  int few_rows, tiles;
  bool bottom_right;
  int64_t out_head, out_row;  // strides
  // Of caches of bytes: what each key and value is multiplied by, [outer, head, row] like them, rows dense.
  ByteKind bytes;
  const float *key_scale, *value_scale;
  int64_t key_scale_outer, key_scale_head, value_scale_outer, value_scale_head;
};

// With a floating mask scores are natural, for that is added as it is, up to both ends of its range; else they are in
// log2 units.
ATTNJOURNEY_HD bool natural_scores(const DecodeTask& task) { return task.mask_kind > MaskElement::boolean; }

// mask_kind is there
inline void describe_scores(DecodeTask& p, double scale, const ScoreModifier& modifier) {
  const double unit = natural_scores(p) ? 1 : log2_e;
  p.score_scale = scale * unit;
  if (modifier.softcap > 0) p.cap = modifier.softcap * unit, p.cap_factor = scale / modifier.softcap;
}

// One sequence. Keys are numbered from the first one that is there, `origin`.
struct DecodeSequence {
  int64_t origin;
  Ranges keys;  // of all its rows
  int q_begin, q_len;
  SeenKeys seen, whole;  // keys that some row sees, the items; that all rows see
  int total;             // items
  int slot;              // ring: where key 0 lies
  __device__ __forceinline__ int key(int item) const { return seen.key(item); }
  // do all rows see all of `count` items from `item` on?
  __device__ __forceinline__ bool is_whole(int item, int count) const {
    return item + count <= total && seen.one_piece_of(whole, item, count);
  }
  // items in one piece that all rows see
  __device__ __forceinline__ Range whole_items() const { return {seen.number(whole.begin), seen.number(whole.end)}; }
};

// Packed: the call may be one of packed rows.
template <bool Packed>
__device__ __forceinline__ DecodeSequence decode_sequence(const DecodeTask& task, int batch) {
  DecodeSequence sequence;
  const bool packed = Packed && task.cu_q;
  sequence.q_begin = packed ? task.cu_q[batch] : 0;
  sequence.q_len = packed ? task.cu_q[batch + 1] - sequence.q_begin : task.q_len;
  int64_t length = packed ? task.cu_k[batch + 1] - task.cu_k[batch] : task.lengths[batch];
  length = length < 0 ? 0 : length < task.longest ? length : task.longest;
  sequence.origin = task.ring && length > task.capacity ? length - task.capacity : 0;
  sequence.slot = task.ring ? static_cast<int>(sequence.origin % task.capacity) : 0;
  const int there = static_cast<int>(length - sequence.origin);
  sequence.keys = task.keys;
  if (!packed || task.bottom_right) sequence.keys.offset = there - sequence.q_len;
  sequence.keys.set_length(there);
  sequence.seen = sequence.keys.any(0, sequence.q_len - 1);
  sequence.whole = sequence.keys.all(0, sequence.q_len - 1);
  sequence.total = sequence.seen.count();
  return sequence;
}

__device__ __forceinline__ Place place_of_key(const DecodeTask& task, const DecodeSequence& sequence, int batch,
                                              int key) {
  if (task.table)
    return place_in_pages(task.table, task.blocks, task.block_size, static_cast<int64_t>(batch) * task.max_blocks, key);
  const int slot = sequence.slot + key;  // below twice the capacity
  return {batch, task.ring && slot >= task.capacity ? slot - task.capacity : slot};
}
__device__ __forceinline__ Place place_of(const DecodeTask& task, const DecodeSequence& sequence, int batch, int item,
                                          int end) {
  return item < end ? place_of_key(task, sequence, batch, sequence.key(item)) : Place{-1, 0};
}

// Tile `number` of a key head's rows in a packed call: rows row0 .. of the `count` that sequence `batch` has.
struct PackedRows {
  int batch, row0, count;
  __device__ __forceinline__ PackedRows(const DecodeTask& task, int number, int tile_rows) {
    int tile;
    if (task.row_tiles) {
      batch = number / task.row_tiles, tile = number % task.row_tiles;
    } else {  // those of sequence b from cu_q[b] * group / tile_rows + b on
      const auto first = [&](int item) { return task.cu_q[item] * task.group / tile_rows + item; };
      batch = 0;
      for (int high = task.batch; batch + 1 < high;) {
        const int middle = (batch + high) / 2;
        (first(middle) <= number ? batch : high) = middle;
      }
      tile = number - first(batch);
    }
    row0 = tile * tile_rows;
    const int rows = task.cu_q[batch + 1] - task.cu_q[batch];
    count = rows <= task.few_rows ? rows * task.group : 0;
  }
};

// A block's part: tiles of `Keys` items [first, last) for a tile of rows of one key head, which has `rows` of them.
// Packed: the call may be one of packed rows; then there may be nothing to do, where row0 >= rows.
template <int Keys, bool Packed = false>
struct DecodePart {
  int batch, head, row0, rows, split, first, last;
  int64_t unit;
  DecodeSequence sequence;
  __device__ __forceinline__ explicit DecodePart(const DecodeTask& task, int tile_rows)
      : DecodePart(task, tile_rows, blockIdx.x) {}
  __device__ __forceinline__ DecodePart(const DecodeTask& task, int tile_rows, uint32_t block) {
    int i = block;
    if (Packed && task.cu_q) {
      const int number = i % task.tiles;
      i /= task.tiles;
      head = i % task.kv_heads;
      split = i / task.kv_heads;
      const PackedRows packed(task, number, tile_rows);
      batch = packed.batch, row0 = packed.row0, rows = packed.count;
      unit = static_cast<int64_t>(head) * task.tiles + number;
    } else {
      const int tile = i % task.row_tiles;
      i /= task.row_tiles;
      head = i % task.kv_heads;
      i /= task.kv_heads;
      split = i % task.splits;
      batch = i / task.splits;
      row0 = tile * tile_rows, rows = task.rows;
      unit = (static_cast<int64_t>(batch) * task.kv_heads + head) * task.row_tiles + tile;
    }
    sequence = decode_sequence<Packed>(task, batch);
    const int64_t tiles = (sequence.total + Keys - 1) / Keys;
    first = static_cast<int>(tiles * split / task.splits);
    last = static_cast<int>(tiles * (split + 1) / task.splits);
  }
};

// Where row i of those that read a key head goes: numbers from the begin of out and of lse.
struct DecodeResult {
  int64_t out, lse;
  __device__ __forceinline__ DecodeResult(const DecodeTask& task, int batch, int kv_head, int i) {
    if (task.cu_q) {
      const int begin = task.cu_q[batch], q_len = task.cu_q[batch + 1] - begin;
      const int64_t head = kv_head * task.group + i / q_len, row = begin + i % q_len;
      out = head * task.out_head + row * task.out_row, lse = head * task.q_len + row;
    } else {
      lse = (static_cast<int64_t>(batch) * task.kv_heads + kv_head) * task.rows + i, out = lse * task.v_head_dim;
    }
  }
};

}  // namespace attnjourney
