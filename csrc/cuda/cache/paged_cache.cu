// CUDA entry of the paged cache: a plan by one block of threads, then copies. Nothing waits for the device.
#include "cache_cuda.h"
#include "caches_cuda.h"

namespace attnjourney {
namespace {

PagedTask paged_task(const PagedTables& tables) {
  const auto& [lengths, table, refs] = tables;
  check_value(refs.size(0) < int64_t{1} << 28 && table.size(1) < int64_t{1} << 28,
              "block_refs: expected fewer than 2^28 blocks on CUDA");
  PagedTask p{};
  p.lengths = numbers(lengths);
  p.table = static_cast<int*>(table.data_ptr()), p.refs = static_cast<uint32_t*>(refs.data_ptr());
  p.batch = static_cast<int>(lengths.size(0)), p.blocks = static_cast<int>(refs.size(0));
  p.max_blocks = static_cast<int>(table.size(1));
  return p;
}

}  // namespace

void cuda_paged_append(const AppendInputs& in, const PagedTables& tables) {
  const auto& [lengths, block_table, block_refs] = tables;
  PagedTask p = paged_task(tables);
  if (p.batch == 0 || in.key.size(2) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(lengths.get_device_index());
  FreshTokens fresh(in);
  AppendTask& t = fresh.task;
  const Tensor plan = aten::empty(lengths, {lengths.size(0)});
  const Tensor takes = aten::empty(block_table, {4 * lengths.size(0) + block_refs.size(0)});
  p.pools = t.to, p.counts = t.counts, p.heads = t.heads, p.tokens = t.tokens, p.block_size = t.capacity;
  p.plan = numbers(plan), p.takes = static_cast<int*>(takes.data_ptr()), p.free = p.takes + 4 * p.batch;
  t.plan = p.plan, t.table = p.table, t.max_blocks = p.max_blocks;
  t.block_size = p.block_size, t.blocks = p.blocks;
  const cudaStream_t stream = current_stream(lengths.get_device_index());
  launch_paged_plan(p, scale_tensors(in.key_scale, in.value_scale), fresh.unit, stream);
  fresh.append(stream);
}

void cuda_paged_truncate(const PagedTables& tables, const Tensor& new_lengths, int64_t block_size) {
  const Tensor& lengths = tables.lengths;
  PagedTask p = paged_task(tables);
  check_value(block_size < int64_t{1} << 28, "block_size: expected a positive number, got ", block_size);
  const torch::stable::accelerator::DeviceGuard guard(lengths.get_device_index());
  p.new_lengths = numbers(new_lengths), p.block_size = static_cast<int>(block_size);
  launch_paged_truncate(p, current_stream(lengths.get_device_index()));
}

void cuda_paged_reorder(const PagedTables& tables, const Tensor& batch_index) {
  const Tensor& lengths = tables.lengths;
  PagedTask p = paged_task(tables);
  check_reorder_batch(lengths.size(0));
  if (p.batch == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(lengths.get_device_index());
  p.index = numbers(batch_index);
  launch_paged_reorder(p, p.lengths, current_stream(lengths.get_device_index()));
}

}  // namespace attnjourney
