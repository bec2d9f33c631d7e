// CUDA entry of the dense and ring caches. Values are on the device, and nothing waits for them: they are clamped.
#include "cache_cuda.h"
#include "caches_cuda.h"

namespace attnjourney {

void cuda_cache_append(const AppendInputs& in, bool ring) {
  const Tensor& lengths = in.lengths;
  if (lengths.size(0) * in.key.size(2) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(lengths.get_device_index());
  FreshTokens fresh(in);
  fresh.task.ring = ring;
  fresh.append(current_stream(lengths.get_device_index()));
}

void cuda_cache_truncate(const Tensor& lengths, const Tensor& new_lengths, const OptionalTensor& lowest) {
  const torch::stable::accelerator::DeviceGuard guard(lengths.get_device_index());
  launch_cache_truncate(numbers(lengths), numbers(new_lengths), numbers(lowest), static_cast<int>(lengths.size(0)),
                        current_stream(lengths.get_device_index()));
}

void cuda_cache_reorder(const ReorderInputs& in) {
  const auto& [key_cache, value_cache, lengths, batch_index, key_scale, value_scale] = in;
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
  launch_cache_reorder(tensors, scale_tensors(key_scale, value_scale), p, numbers(lengths), unit,
                       current_stream(lengths.get_device_index()));
}

}  // namespace attnjourney
