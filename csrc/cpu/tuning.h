// What kernels take from the machine that they run on: its caches and its vendor's cores. Plain numbers, which are
// constant once the kernels are chosen. Sizes that an instruction set gives are Tuning in cpu/isa.
#pragma once
#include <cstdint>

namespace attnjourney {

struct MachineTuning {
  const char* name;
  bool wide_sums;            // sums over keys and queries in register tiles of Tuning::wide_rows x wide_vectors
  int64_t long_block_bytes;  // Tuning::long_forward_keys are a key block where their keys and values take no more
  int64_t apart_bytes;       // rows of keys and values so far apart are copied: in the first-level cache they collide
};
extern MachineTuning machine_tuning;

struct Caches {  // 0: unknown
  int64_t l1_bytes, l1_ways, l2_bytes, l2_ways;
};
Caches caches();       // of data, first and second level
const char* vendor();  // "intel", "amd", "arm" or "other"

// ATTNJOURNEY_TUNING, or "" where nobody asks for one
const char* forced_tuning();
// Sets machine_tuning by vendor and caches, or as ATTNJOURNEY_TUNING says; throws where that is none.
void choose_tuning();

}  // namespace attnjourney
