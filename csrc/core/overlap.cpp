#include "overlap.h"

#include <algorithm>
#include <utility>

#include "checks.h"

namespace attnjourney {
namespace {

// first byte and the one behind the last
std::pair<const char*, const char*> bytes_of(const Tensor& t) {
  const char* const begin = static_cast<const char*>(t.const_data_ptr());
  if (t.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  return {begin, begin + (last + 1) * static_cast<int64_t>(t.element_size())};
}

bool may_share(const Tensor& a, const Tensor& b) {
  const auto [a_begin, a_end] = bytes_of(a);
  const auto [b_begin, b_end] = bytes_of(b);
  return a_begin < b_end && b_begin < a_end;
}

// Every dimension steps over all that the smaller steps reach. `dense`: and leaves nothing out.
bool nested(const Tensor& t, bool dense) {
  if (t.numel() == 0) return true;
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride, size
  for (int64_t d = 0; d < t.dim(); d++)
    if (t.size(d) > 1) steps.emplace_back(t.stride(d), t.size(d));
  std::sort(steps.begin(), steps.end());
  int64_t reached = 1;
  for (const auto& [stride, size] : steps) {
    if (dense ? stride != reached : stride < reached) return false;
    reached = stride * (size - 1) + reached;
  }
  return true;
}

// Certainly the same memory: the ranges of interleaved tensors meet too, though they share nothing.
bool share(const Tensor& a, const Tensor& b) {
  return may_share(a, b) && (a.const_data_ptr() == b.const_data_ptr() || (nested(a, true) && nested(b, true)));
}

}  // namespace

void check_apart(const std::vector<Written>& written) {
  for (const Written& w : written) {
    check_runtime(nested(w.tensor, false), w.name,
                  ": unsupported operation: more than one element of the written-to tensor refers to a single memory "
                  "location, expected a tensor that does not overlap itself, got shape ",
                  shape_text(w.tensor), ": clone() it before");
    for (const Written* other = written.data(); other != &w; other++)
      check_runtime(!share(w.tensor, other->tensor), w.name, ": unsupported operation: expected memory apart from ",
                    other->name, ", which is written too, got a tensor that shares memory with it: clone() it before");
  }
}

Tensor apart_from(const Tensor& read, const std::vector<Written>& written) {
  for (const Written& w : written)
    if (may_share(read, w.tensor)) return torch::stable::clone(read);
  return read;
}

}  // namespace attnjourney
