// CUDA entry of the dense and ring caches. Values are on the device, and nothing waits for them: they are clamped.
#include "cache_cuda.h"

namespace attnjourney {
namespace {

void append(const Tensor& key_cache, OptionalTensor value_cache, const Tensor& lengths, const Tensor& key,
            OptionalTensor value, OptionalTensor counts, bool ring) {
  const AppendInputs in{key_cache, std::move(value_cache), lengths, key, std::move(value), std::move(counts)};
  check_append(in, false);
  if (lengths.size(0) * key.size(2) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(lengths.get_device_index());
  FreshTokens fresh(in);
  fresh.task.ring = ring;
  launch_cache_append(fresh.task, fresh.unit, current_stream(lengths.get_device_index()));
}

void truncate(const Tensor& lengths, const Tensor& new_lengths, OptionalTensor lowest) {
  check_truncate(lengths, new_lengths, lowest);
  const torch::stable::accelerator::DeviceGuard guard(lengths.get_device_index());
  launch_cache_truncate(numbers(lengths), numbers(new_lengths), numbers(lowest), static_cast<int>(lengths.size(0)),
                        current_stream(lengths.get_device_index()));
}

void reorder(const Tensor& key_cache, OptionalTensor value_cache, const Tensor& lengths, const Tensor& batch_index) {
  check_reorder(key_cache, value_cache, lengths, batch_index);
  const int64_t batch = lengths.size(0);
  check_reorder_batch(batch);
  if (batch == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(lengths.get_device_index());
  ReorderTask p{};
  int unit = 0;
  const CacheTensors tensors = cache_tensors(key_cache, value_cache, {}, unit);
  p.lengths = numbers(lengths), p.index = numbers(batch_index);
  p.batch = static_cast<int>(batch), p.heads = static_cast<int>(key_cache.size(1));
  p.capacity = static_cast<int>(key_cache.size(2));
  launch_cache_reorder(tensors, p, numbers(lengths), unit, current_stream(lengths.get_device_index()));
}

}  // namespace
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CUDA, m) {
  m.impl("kv_cache_append", TORCH_BOX(&attnjourney::append));
  m.impl("kv_cache_truncate", TORCH_BOX(&attnjourney::truncate));
  m.impl("kv_cache_reorder", TORCH_BOX(&attnjourney::reorder));
}
