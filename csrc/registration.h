// The operators over one device's backend. Each takes the backend and reads its own arguments; what is missing from a
// backend is not registered.
#pragma once
#include <string>

#include "attention/fp8.h"
#include "attention/operators.h"
#include "core/backend.h"
#include "layers/gpt_attention.h"
#include "layers/gqa.h"
#include "layers/mha.h"
#include "layers/mla.h"
#include "layers/rope.h"

namespace attnjourney {

// op(backend, arguments, which...) as the dispatcher calls it: void, a tensor, a pair or a vector of them.
template <const Backend& backend, auto op, auto... which>
void boxed(StableIValue* stack, uint64_t arguments, uint64_t results) try {
  Arguments in(stack, arguments);
  using Result = decltype(op(backend, in, which...));
  if constexpr (std::is_void_v<Result>) {
    op(backend, in, which...);
  } else {
    const Result result = op(backend, in, which...);
    if constexpr (std::is_same_v<Result, std::vector<Tensor>>)
      check_runtime(result.size() == results, "the schema has ", results, " results, its operator ", result.size());
    write_results(stack, result);
  }
  check_runtime(in.done(), "the schema has more arguments than its operator reads");
} catch (...) {
  remember_and_rethrow();
}

template <const Backend& backend>
class Registration {
 public:
  Registration(torch::stable::detail::StableLibrary& library, std::string prefix)
      : library_(library), prefix_(std::move(prefix)) {}

  void all() {
    attention<MaskArguments::dense>("attention", "_attention_weights");
    attention<MaskArguments::packed>("varlen_attention", "");
    add("attention_fp8", boxed<backend, attention_fp8>);
    add("paged_attention", boxed<backend, paged_attention>);
    attention<MaskArguments::blocks>("block_attention", "_block_attention_weights");
    add("decode", boxed<backend, decode>);
    add("mla_decode", boxed<backend, mla_decode>);
    if (supplied(backend.caches.append)) caches();
    add("linear_attention_forward", boxed<backend, linear_attention_forward>);
    add("linear_attention_backward", boxed<backend, linear_attention_backward>);
    if (supplied(backend.gated.forward)) {
      add("gated_linear_attention_forward", boxed<backend, gated_linear_attention_forward>);
      add("gated_linear_attention_backward", boxed<backend, gated_linear_attention_backward>);
    }
    if (supplied(backend.sparse.forward)) {
      add("sparse_attention_forward", boxed<backend, sparse_attention_forward>);
      add("sparse_attention_backward", boxed<backend, sparse_attention_backward>);
    }
    if (supplied(backend.indexer.topk)) add("lightning_indexer", boxed<backend, lightning_indexer>);
    if (supplied(backend.indexer.loss)) {
      add("lightning_indexer_loss_forward", boxed<backend, lightning_indexer_loss_forward>);
      add("lightning_indexer_loss_backward", boxed<backend, lightning_indexer_loss_backward>);
    }
    layers();
  }

 private:
  using Function = void (*)(StableIValue*, uint64_t, uint64_t);
  template <class F>
  static bool supplied(F* function) {
    return function != nullptr;
  }
  void add(const std::string& name, Function function) { library_.impl((prefix_ + name).c_str(), function); }

  template <MaskArguments masks>
  void attention(const std::string& name, const std::string& weights) {
    add(name + "_forward", boxed<backend, attention_forward, masks>);
    add(name + "_backward", boxed<backend, attention_backward, masks>);
    if (supplied(backend.attention.jvp)) add(name + "_jvp", boxed<backend, attention_jvp, masks>);
    if (supplied(backend.attention.backward_jvp))
      add(name + "_backward_jvp", boxed<backend, attention_backward_jvp, masks>);
    if (supplied(backend.attention.weights) && !weights.empty()) add(weights, boxed<backend, attention_weights, masks>);
  }

  void caches() {
    add("kv_cache_append", boxed<backend, kv_cache_append>);
    add("kv_cache_truncate", boxed<backend, kv_cache_truncate>);
    add("kv_cache_reorder", boxed<backend, kv_cache_reorder>);
    add("paged_cache_append", boxed<backend, paged_cache_append>);
    add("paged_cache_truncate", boxed<backend, paged_cache_truncate>);
    add("paged_cache_reorder", boxed<backend, paged_cache_reorder>);
  }

  void layers() {
    add("rope", boxed<backend, rope>);
    add("rope_", boxed<backend, rope_in_place>);
    add("mha_forward", boxed<backend, mha_forward>);
    add("mha_backward", boxed<backend, mha_backward>);
    add("gpt_attention_forward", boxed<backend, gpt_attention_forward>);
    add("gpt_attention_backward", boxed<backend, gpt_attention_backward>);
    add("gqa_forward", boxed<backend, gqa_forward>);
    add("gqa_backward", boxed<backend, gqa_backward>);
    add("mla_forward", boxed<backend, mla_forward>);
    add("mla_backward", boxed<backend, mla_backward>);
  }

  torch::stable::detail::StableLibrary& library_;
  const std::string prefix_;
};

// prefix: of the operators' names, for tests
template <const Backend& backend>
void register_operators(torch::stable::detail::StableLibrary& library, const std::string& prefix = "") {
  Registration<backend>(library, prefix).all();
}

}  // namespace attnjourney
