// The arguments of an operator as the dispatcher hands them over: read one after the other, in the order of the schema.
#pragma once
#include <tuple>

#include "aten.h"
#include "checks.h"

namespace attnjourney {

// A read takes over what it returns: an operator reads all of its arguments before anything can throw.
class Arguments {
 public:
  Arguments(const StableIValue* stack, uint64_t count) : next_(stack), end_(stack + count) {}

  Tensor tensor() { return read<Tensor>(); }
  OptionalTensor optional_tensor() { return read<OptionalTensor>(); }
  int64_t integer() { return read<int64_t>(); }
  std::vector<int64_t> integers() { return read<std::vector<int64_t>>(); }
  double number() { return read<double>(); }
  std::optional<double> optional_number() { return read<std::optional<double>>(); }
  bool flag() { return read<bool>(); }

  bool done() const { return next_ == end_; }

 private:
  template <class T>
  T read() {
    check_runtime(!done(), "the schema has fewer arguments than its operator reads");
    return torch::stable::detail::to<T>(*next_++);
  }
  const StableIValue *next_, *end_;
};

// What an operator returns goes back over its arguments.
inline void write_results(StableIValue* stack, const Tensor& result) { stack[0] = torch::stable::detail::from(result); }
inline void write_results(StableIValue* stack, const std::tuple<Tensor, Tensor>& results) {
  stack[0] = torch::stable::detail::from(std::get<0>(results));
  stack[1] = torch::stable::detail::from(std::get<1>(results));
}
inline void write_results(StableIValue* stack, const std::vector<Tensor>& results) {
  for (const Tensor& result : results) *stack++ = torch::stable::detail::from(result);
}

}  // namespace attnjourney
