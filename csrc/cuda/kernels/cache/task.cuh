// The parameters of the kernels of the caches (csrc/decode/kv_cache.h says what the operators mean).
#pragma once
#include <cstdint>

#include "cuda/kernels/decode/decode_task.cuh"

namespace attnjourney {

constexpr int kCacheThreads = 256;

// Rows (outer, head, slot) of a tensor; strides in bytes.
struct CacheRows {
  unsigned char* data;
  int64_t outer, head, slot;
  __device__ __forceinline__ unsigned char* at(int64_t o, int64_t h, int64_t s) const {
    return data + o * outer + h * head + s * slot;
  }
};

// Keys and values, or one tensor; rows are `units` pieces of the size that everything is a multiple of.
struct CacheTensors {
  int count;
  CacheRows cache[2];
  int units[2];
};

struct AppendTask {
  CacheTensors to;
  CacheRows fresh[2];     // (batch, heads, tokens)
  int64_t* lengths;       // [batch]
  const int64_t* counts;  // [batch] or null: all tokens; as 0 .. tokens
  int batch, heads, tokens, capacity, parts;
  bool ring;
  // paged: the lengths before (cache/paged.cuh) and the table
  const int64_t* plan;
  const int* table;
  int max_blocks, block_size, blocks;
};

// What an append to caches of bytes has besides: tokens are quantised.
struct AppendBytes {
  ByteKind kind;
  CacheRows scale[2];  // of each cache: one number a slot
  int dim[2];
};

struct ReorderTask {  // of one tensor
  CacheRows rows;
  int units;
  const int64_t *lengths, *index;  // [batch]; sequence b becomes what index[b] was, numbers out of range: itself
  int batch, heads, capacity;
  int width;  // pieces of a head that a block takes of every sequence at once: they pass through shared memory
};

struct GatherTask {
  CacheTensors from;
  CacheRows to[2];  // (sequences, heads, capacity)
  int64_t* held;    // [sequences]: keys that each has there
  DecodeTask cache;
  int first_sequence, heads, parts;
  ByteKind bytes;  // of a cache of bytes, whose rows are expanded: `units` counts numbers
  CacheRows scales[2];
};

struct PagedTask {
  CacheTensors pools;
  int64_t* lengths;
  const int64_t *counts, *new_lengths, *index;  // [batch], of the operator at hand
  int* table;                                   // [batch, max_blocks], -1: none
  uint32_t* refs;                               // [blocks]: sequences that hold a block
  int batch, heads, tokens, blocks, block_size, max_blocks;
  // what an append decides: [batch] the lengths before it; [batch, 4] blocks that are taken, all those of the sequences
  // before, and the block to copy from and to (-1: none); [blocks] free ones
  int64_t* plan;
  int *takes, *free;
};

}  // namespace attnjourney
