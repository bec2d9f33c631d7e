#include "sparse_cpu.h"
namespace attnjourney {
namespace {
[[noreturn]] void later(const char* name) { throw std::runtime_error(std::string(name) + ": not implemented yet"); }
}  // namespace
void cpu_indexer_topk(const IndexerCall&, const IndexerInputs&, const OptionalTensor&, const IndexerResults&) {
  later("lightning_indexer");
}
void cpu_indexer_loss(const IndexerCall&, const IndexerInputs&, const IndexerTarget&, const Tensor&, const Tensor&) {
  later("lightning_indexer_loss");
}
void cpu_indexer_loss_backward(const IndexerCall&, const IndexerInputs&, const Tensor&, const Tensor&, const Tensor&,
                               const IndexerGradients&) {
  later("lightning_indexer_loss");
}
}  // namespace attnjourney
