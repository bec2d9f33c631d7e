// Lengths, offsets of packed sequences and ranges of keys as the kernels take them.
#pragma once
#include "attention/attention.h"
#include "cuda/device.h"
#include "cuda/kernels/common/sequence.cuh"

namespace attnjourney {

// inst/common/packed_offsets.cu
void packed_offsets_int32(const int* given, int count, int total, int* out, int* order, cudaStream_t);
void packed_offsets_int64(const int64_t* given, int count, int total, int* out, int* order, cudaStream_t);

// Index tensors as the kernels read them: dense int32. Offsets fit the tensors then; lengths are cut to them where they
// are read. Neither is looked at here: that would wait for the device.
struct Indices {
  OptionalTensor query_lengths, key_lengths, order, cu_q, cu_k;  // order: see SequenceTask
  // ordered: for a kernel that reads SequenceTask::order
  explicit Indices(const AttentionCall& c, bool ordered = false)
      : query_lengths(int32(c.args.options.query_lengths)),
        key_lengths(int32(c.args.options.key_lengths)),
        cu_q(offsets(c.args.options.cu_seqlens_q, c.params.q_len, ordered ? &order : nullptr)),
        cu_k(offsets(c.args.options.cu_seqlens_k, keys_in_all(c))) {}
  static int64_t keys_in_all(const AttentionCall& c) {
    if (!c.args.options.block_table) return c.params.kv_len;
    return std::min<int64_t>(extent(c.batch, c.params.kv_len), INT32_MAX);  // kv_len is what one sequence can have
  }
  static OptionalTensor int32(const OptionalTensor& t) {
    if (!t) return std::nullopt;
    Tensor x = aten::empty(*t, {t->numel()}, ScalarType::Int);
    torch::stable::copy_(x, *t);
    return x;
  }
  static OptionalTensor offsets(const OptionalTensor& t, int64_t total, OptionalTensor* order = nullptr) {
    if (!t) return std::nullopt;
    const Tensor given = aten::contiguous(*t), x = aten::empty(*t, {t->numel()}, ScalarType::Int);
    const cudaStream_t stream = current_stream(t->get_device_index());
    const int count = static_cast<int>(t->numel()), most = static_cast<int>(total);
    int *out = static_cast<int*>(x.data_ptr()), *ordered = nullptr;
    if (order) {
      *order = aten::empty(*t, {2 * t->numel() - 1}, ScalarType::Int);
      ordered = static_cast<int*>((*order)->data_ptr());
    }
    if (given.scalar_type() == ScalarType::Int)
      packed_offsets_int32(static_cast<const int*>(given.data_ptr()), count, most, out, ordered, stream);
    else
      packed_offsets_int64(static_cast<const int64_t*>(given.data_ptr()), count, most, out, ordered, stream);
    return x;
  }
  static const int* data(const OptionalTensor& t) { return t ? static_cast<const int*>(t->data_ptr()) : nullptr; }
};

template <class Real>
void describe_sequences(SequenceTaskOf<Real>& p, const AttentionCall& c, const Indices& indices) {
  p.q_len = static_cast<int>(c.params.q_len), p.kv_len = static_cast<int>(c.params.kv_len);
  p.keys = c.params.keys.narrow(), p.bottom_right = c.bottom_right;
  p.cu_q = Indices::data(indices.cu_q), p.cu_k = Indices::data(indices.cu_k);
  p.order = Indices::data(indices.order);
  p.query_lengths = Indices::data(indices.query_lengths), p.key_lengths = Indices::data(indices.key_lengths);
}

}  // namespace attnjourney
