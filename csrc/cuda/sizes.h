// What is known of a GPU and of head dimensions before a kernel is chosen: the sizes of kernels and of their tiles.
// Plain C++.
#pragma once
#include <cstdint>

namespace attnjourney {

// Shared memory: a block may have 227 KB on compute capability 9.0 and 10.x, 163 on 8.0 and 8.7, 99 on 8.6, 8.9 and
// 12.x. Every kernel is asserted to fit where it is launched; what needs more than 99 KB has a smaller one besides.
constexpr int kSmallShared = 99 << 10, kMiddleShared = 163 << 10;
struct Device {
  int index, capability;  // 80, 90, ...
  int multiprocessors;
  int shared_bytes, multiprocessor_bytes;  // of shared memory: that a block may have, that a multiprocessor has
  bool small() const { return shared_bytes < kMiddleShared; }
};
// small: the kernel runs where Device::small() is true, too
constexpr bool fits(int bytes, bool small) { return bytes <= (small ? kSmallShared : kMiddleShared); }

// Head dimensions that forward kernels are built for: of query and key, and of value where it is smaller.
enum class HeadSize { none, d64, d128, d192v128, d256, d512 };
// The smallest one that takes these.
constexpr HeadSize forward_size(int head_dim, int v_head_dim) {
  if (head_dim <= 64 && v_head_dim <= 64) return HeadSize::d64;
  if (head_dim <= 128 && v_head_dim <= 128) return HeadSize::d128;
  if (head_dim <= 192 && v_head_dim <= 128) return HeadSize::d192v128;
  const int d = head_dim > v_head_dim ? head_dim : v_head_dim;
  return d <= 256 ? HeadSize::d256 : d <= 512 ? HeadSize::d512 : HeadSize::none;
}
// Keys of a tile of Hopper's forward, but with a floating mask, which no pass over tiles comes before
constexpr int sm90_forward_keys(HeadSize size) { return size == HeadSize::d256 ? 64 : 128; }
// The blocks of Hopper's forward in clusters of two, which share their copies of keys and values, or 0: blocks alone.
// Two neighbouring tiles of rows see the same keys where a key head has an even number of them (tiles: of a query head,
// `group` of which share a key head). Alone, too, where tiles are too few for the device, keys too few for what is read
// of them to count, or where clusters leave more than one multiprocessor idle. resident: blocks in clusters that run at
// a time.
constexpr int blocks_in_pairs(int64_t tiles, int64_t group, int64_t total, int64_t kv_len, int multiprocessors,
                              int resident) {
  const int blocks = (resident < multiprocessors ? resident : multiprocessors) / 2 * 2;
  const bool pairs = tiles * group % 2 == 0, fills = blocks > 0 && blocks + 1 >= multiprocessors;
  return pairs && fills && total >= blocks && kv_len >= 512 ? blocks : 0;
}
// Columns of the other kernels: 64, 128 or 256, of those for 16-bit numbers 512 too; 0: none takes these
constexpr int backward_size(int head_dim, int v_head_dim) {
  const int d = head_dim > v_head_dim ? head_dim : v_head_dim;
  return d <= 64 ? 64 : d <= 128 ? 128 : d <= 256 ? 256 : d <= 512 ? 512 : 0;
}
// Columns of the tiles of token-sparse attention, of 16-bit numbers: 64, 128 or 256; 0: its kernels for any width
constexpr int sparse_columns(int head_dim, int v_head_dim) {
  const int size = backward_size(head_dim, v_head_dim);
  return size <= 256 ? size : 0;
}
// f<64>(), f<128>() or f<256>(); size: as backward_size says, at most 256
template <class F>
void with_size(int size, F&& f) {
  if (size == 64) return f.template operator()<64>();
  if (size == 128) return f.template operator()<128>();
  f.template operator()<256>();
}

// The backward with query and key columns beyond 128 and value columns of at most 128 (multi-head latent attention)
constexpr bool is_d192v128(int head_dim, int v_head_dim) {
  return head_dim > 128 && head_dim <= 192 && v_head_dim <= 128;
}
// Query and key tiles of the backward for 16-bit numbers; full: with all options
constexpr int backward_rows(int size) { return 8192 / size; }
constexpr int backward_keys(int size, bool full, bool small) {
  return size == 256 && small ? 32 : size == 256 || full ? 64 : 128;
}
// Up to so many rows of a query head, its last block turns the sums into dQ (sm90/backward_finish.cuh): 1 MB at most.
constexpr int kShortRows = 2048;
// Decoding: units of rows whose blocks are counted, so that the last one joins what all of them found.
constexpr int kMostArrivals = 1024;
// Query and key tiles of the backward for float and double, `element` bytes
constexpr int fp32_rows(int size, int element, bool small) {
  return size * element == 256 ? 32 : small && element == 8 && size > 64 ? 8 : 16;
}
constexpr int fp32_keys(int size, int element) { return size * element <= 512 ? 64 : size * element == 1024 ? 32 : 16; }
// Most query tiles of the backward for float in planes of halves
constexpr int fp16x2_rows(int size) { return 4096 / size; }
// Short calls gain nothing from planes of halves.
constexpr int kFp16x2Least = 128;

}  // namespace attnjourney
