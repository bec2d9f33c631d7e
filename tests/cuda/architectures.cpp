// What csrc/cuda/architectures.cu chooses, how decoding is cut up and when blocks are in clusters, for
// test_architectures.py: reads cases, writes names and numbers. The launches that the list names are not linked:
// nothing is launched.
#include "cuda/architectures.h"
#include "cuda/decode/decode_tiling.h"

#include <iostream>
#include <string>

using namespace attnjourney;

template <class Real>
void attention(const Device& device, const AttentionCase& c) {
  const BackwardKernelOf<Real>& backward = choose_backward<Real>(device, c);
  const auto [rows, keys, scratch_rows, columns] =
      backward.tiles(backward_size(c.head_dim, c.v_head_dim), device.small());
  std::cout << choose_forward<Real>(device, c).name << " " << backward.name << " " << rows << " " << keys << " "
            << scratch_rows << " " << columns << "\n";
}

int main() {
  std::string what;
  for (int capability, kilobytes, type; std::cin >> what >> capability >> kilobytes >> type;) {
    const Device device{.index = 0,
                        .capability = capability,
                        .multiprocessors = 100,
                        .shared_bytes = kilobytes << 10,
                        .multiprocessor_bytes = (kilobytes + 1) << 10};
    if (what == "attention") {
      AttentionCase c{.type = static_cast<ElementType>(type)};
      std::cin >> c.head_dim >> c.v_head_dim >> c.q_len >> c.kv_len >> c.full;
      c.type == ElementType::fp64 ? attention<double>(device, c) : attention<float>(device, c);
    } else if (what == "splits") {
      int64_t units, keys;
      DecodeTiling tiling{.rows = 16, .keys = 16};
      std::cin >> units >> keys >> tiling.smem_bytes >> tiling.blocks;
      std::cout << decode_splits(units, keys, tiling, device) << "\n";
    } else if (what == "groups") {
      int64_t batch, row_tiles, keys;
      const DecodeTiling tiling{.rows = 64, .keys = 64};
      std::cin >> batch >> row_tiles >> keys;
      std::cout << decode_groups(batch, row_tiles, keys, tiling, device) << "\n";
    } else if (what == "joins") {
      int64_t units, rows, v_head_dim;
      int splits;
      DecodeTiling tiling{.rows = 16, .keys = 16};
      std::cin >> units >> rows >> splits >> v_head_dim >> tiling.joins;
      std::cout << last_blocks_join(units, rows, splits, v_head_dim, tiling) << "\n";
    } else if (what == "many") {
      int64_t pairs, group, q_len, keys;
      std::cin >> pairs >> group >> q_len >> keys;
      std::cout << many_rows_are_split(pairs, group, q_len, keys, device) << "\n";
    } else if (what == "sparse") {
      int head_dim, v_head_dim;
      std::cin >> head_dim >> v_head_dim;
      std::cout << sparse_columns(head_dim, v_head_dim) << "\n";
    } else if (what == "pairs") {
      int64_t tiles, group, total, kv_len;
      int resident;
      std::cin >> tiles >> group >> total >> kv_len >> resident;
      std::cout << blocks_in_pairs(tiles, group, total, kv_len, device.multiprocessors, resident) << "\n";
    } else {
      LatentCase c{.type = static_cast<ElementType>(type)};
      std::cin >> c.rows >> c.v_head_dim >> c.chunked >> c.masked >> c.near >> c.bytes;
      std::cout << choose_latents(device, c).name << "\n";
    }
  }
}
