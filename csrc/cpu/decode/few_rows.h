// Few query rows against many keys, as in decoding: sequences, heads and chunks of keys over threads. Every key and
// value is read once for all rows of its group (kernels/decode/decode.h).
#pragma once
#include <functional>
#include <vector>

#include "core/aten.h"
#include "decode/params.h"

namespace attnjourney {

struct FewRows {
  ScalarType dtype, cache_dtype;  // of queries and results, of keys and values
  int64_t kv_heads, group;
  std::vector<DecodeParams> sequences = {};  // one a batch item; their q_len may differ
  // what the query heads of a key/value head read and write; its first and count are not read
  std::function<DecodeRows(int64_t batch, int64_t kv_head)> rows = {};
  // appends where the keys [from, to) of a key/value head lie
  std::function<void(int64_t batch, int64_t kv_head, int64_t from, int64_t to, std::vector<DecodeRun>&)> runs = {};
  // Computes rows of the group again that DecodeKernels::merge is not good enough for; may be empty.
  std::function<void(int64_t batch, int64_t kv_head, const DecodeRows&, void* scratch)> again = {};
  int64_t again_space = 0;  // its bytes of scratch
  bool one_by_one = false;  // `runs` finds every key by itself
};

struct FewRowsPlan {
  int64_t items, threads;
  int64_t chunk;         // keys of an item
  int64_t rows;          // the most of an item
  int64_t space;         // bytes of scratch for a thread, of which
  int64_t gathered = 0;  // these in front are for keys copied side by side
};
FewRowsPlan plan_few_rows(const FewRows&);  // reads no pointers

// `like`: a tensor of the call's dtype and device
void run_few_rows(const FewRows&, const Tensor& like);

}  // namespace attnjourney
