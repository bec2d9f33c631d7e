// The options of a call as the kernels take them, and their gradients.
#pragma once
#include "attention/attention.h"
#include "core/constants.h"
#include "cuda/kernels/common/mask_tiles.cuh"
#include "cuda/launch.h"
#include "per_head.h"

namespace attnjourney {

// The unit of scores, and what a difference of them is in log2 units: see ScoresOf.
struct ScoreUnit {
  double scores, exponents;
};
inline ScoreUnit score_unit(const AttentionCall& c) {
  return c.params.mask == MaskKind::floating ? ScoreUnit{1, log2_e} : ScoreUnit{log2_e, 1};
}

// Does the call need the kernels with options? Those without scale scores by a positive number and hide ranges of keys.
inline bool needs_full_kernels(const AttentionCall& c) {
  const auto& [attn_mask, cu_seqlens_q, cu_seqlens_k, block_table, blocks, dropout_p, is_causal, scale, enable_gqa,
               causal_alignment, window, prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes,
               origin, dropout_seed] = c.args.options;
  (void)is_causal, (void)causal_alignment, (void)window, (void)prefix_length;  // ranges of keys
  (void)key_lengths, (void)query_lengths, (void)enable_gqa, (void)origin, (void)dropout_seed, (void)scale;
  (void)block_table;  // has kernels of its own
  return attn_mask || blocks || dropout_p > 0 || softcap > 0 || sinks || alibi_slopes || cu_seqlens_q || cu_seqlens_k ||
         !(c.params.scale > 0);
}
// Does the backward take them? Where shared memory is small, in plain calls too: the others are for large tiles.
inline bool backward_needs_full_kernels(const AttentionCall& c, const Device& device) {
  return needs_full_kernels(c) || (device.small() && (c.dtype == ScalarType::BFloat16 || c.dtype == ScalarType::Half));
}

// Tensors that the kernels read: they live as long as this.
template <class Real>
class OptionInputs {
 public:
  explicit OptionInputs(const AttentionCall& c) {
    const Tensor& query = c.args.query;
    const auto& [attn_mask, cu_seqlens_q, cu_seqlens_k, block_table, blocks, dropout_p, is_causal, scale, enable_gqa,
                 causal_alignment, window, prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes,
                 origin, dropout_seed] = c.args.options;
    (void)is_causal, (void)causal_alignment, (void)window, (void)prefix_length;      // describe
    (void)cu_seqlens_q, (void)cu_seqlens_k, (void)key_lengths, (void)query_lengths;  // Indices
    (void)scale, (void)enable_gqa;                                                   // describe
    (void)block_table;                                                               // PagedKeys
    const ScoreUnit unit = score_unit(c);
    scores_.unit = static_cast<Real>(unit.scores), scores_.exponent = static_cast<Real>(unit.exponents);
    if (softcap > 0) {
      scores_.cap = static_cast<Real>(softcap * unit.scores);
      scores_.cap_factor = static_cast<Real>(2 * log2_e * c.params.scale / softcap);
    }
    constexpr ScalarType type = sizeof(Real) == 8 ? ScalarType::Double : ScalarType::Float;
    const auto numbers = [&](const OptionalTensor& t, OptionalTensor& held) {
      held = per_head(t, {c.batch, c.q_heads}, type, query);
      return held ? static_cast<const Real*>(held->data_ptr()) : nullptr;
    };
    scores_.sinks = numbers(sinks, sinks_), scores_.slopes = numbers(alibi_slopes, slopes_);
    if (blocks) add_blocks(c, *blocks);
    if (attn_mask) {
      scores_.mask = attn_mask->data_ptr();
      scores_.mask_kind = c.params.mask == MaskKind::boolean ? MaskElement::boolean
                          : c.params.mask_fp32               ? MaskElement::fp32
                                                             : MaskElement::same;
      scores_.mask_bytes = static_cast<int>(attn_mask->element_size());
      scores_.mask_row = c.params.mask_row, scores_.mask_col = c.params.mask_col;
    }
    scores_.mask_dims = c.batch_dims;
    for (int d = 0; d < c.batch_dims; d++) {
      scores_.mask_size[d] = static_cast<int>(c.batch_size[d]);
      scores_.mask_batch[d] = c.mask_map.batch_stride[d];
    }
    scores_.mask_head = c.mask_map.head_stride;
    if (dropout_p > 0) {
      seed_ = aten::empty(query, {1}, ScalarType::Long);
      torch::stable::copy_(*seed_, torch::stable::view(*dropout_seed, {1}));
      const Dropout d = Dropout::from(dropout_p, 0);
      scores_.seed = static_cast<const uint64_t*>(seed_->data_ptr());
      scores_.threshold = d.threshold, scores_.keep_scale = static_cast<Real>(d.keep_scale);
      scores_.first_row = static_cast<int>(origin.row), scores_.first_key = static_cast<int>(origin.key);
      scores_.first_head = static_cast<int>(origin.head), scores_.heads = static_cast<int>(c.q_heads);
      if (origin.heads) scores_.heads_between = static_cast<int>(origin.heads - c.q_heads);
    }
  }
  const ScoresOf<Real>& scores() const { return scores_; }

 private:
  // What the lists hold is checked where it is read, by the kernels: a look at it here would wait for the device.
  void add_blocks(const AttentionCall& c, const BlockTensors& blocks) {
    const Tensor& offsets = blocks.offsets;
    check_value(offsets.size(-1) <= 1 || offsets.stride(-1) == 1,
                "block_offsets: expected the last dimension to be dense");
    blocks_ = BlockTensors{.offsets = offsets,
                           .index = aten::contiguous(blocks.index),
                           .partial = aten::contiguous(blocks.partial),
                           .elements = aten::contiguous(blocks.elements)};
    const auto size = static_cast<int>(c.params.block_size);
    scores_.mask = offsets.data_ptr(), scores_.mask_kind = MaskElement::blocks, scores_.mask_bytes = 4;
    scores_.blocks = {.index = static_cast<const int*>(blocks_->index.data_ptr()),
                      .partial = static_cast<const int*>(blocks_->partial.data_ptr()),
                      .elements = static_cast<const unsigned char*>(blocks_->elements.data_ptr()),
                      .size = size,
                      .rows = static_cast<int>((c.params.q_len + size - 1) / size),
                      .count = static_cast<int>(std::min<int64_t>(blocks_->index.size(0), INT32_MAX)),
                      .partial_blocks = static_cast<int>(std::min<int64_t>(blocks_->elements.size(0), INT32_MAX))};
  }
  ScoresOf<Real> scores_{};
  OptionalTensor sinks_, slopes_, seed_;
  std::optional<BlockTensors> blocks_;
};

// Gradients of sinks, slopes and floating mask: in the dtype of lse, and copied where they have another.
template <class Real>
class OptionGradients {
 public:
  // in scratch: parts of the slopes' gradients for every key tile. writes_mask: the kernel may write that of a mask
  // itself; ranged: tiles that no row sees are left as they are
  OptionGradients(const AttentionCall& c, const AttentionGradients& g, BackwardTaskOf<Real>& p, bool writes_mask,
                  bool ranged)
      : dtype_(c.lse_dtype) {
    p.grad_sinks = add(g.sinks);
    p.grad_slopes = add(g.alibi_slopes);
    if (p.grad_slopes) {
      parts_ = aten::empty(*g.alibi_slopes, {c.packed ? 1 : c.batch, p.key_tiles, c.q_heads}, dtype_);
      torch::stable::zero_(*parts_);
      p.slope_sum = static_cast<Real*>(parts_->data_ptr());
    }
    p.sinks_per_item = g.sinks && g.sinks->dim() == 2, p.slopes_per_item = g.alibi_slopes && g.alibi_slopes->dim() == 2;
    if (!g.attn_mask) return;
    MaskGradientOf<Real>& m = p.mask_gradient;
    const HeadMap map = mask_map(c, *g.attn_mask, m.row, m.col);
    m.head = map.head_stride, m.items = 1, m.heads = m.head ? p.q_heads : 1;
    for (int d = 0; d < c.batch_dims; d++) {
      m.batch[d] = map.batch_stride[d];
      if (m.batch[d]) m.items *= static_cast<int>(c.batch_size[d]);
    }
    if constexpr (sizeof(Real) == 4)
      if (Tensor own = *g.attn_mask;
          writes_mask && own.scalar_type() == c.dtype && writes_mask_gradient(p, own.data_ptr())) {
        m.own = own.data_ptr();
        if (ranged) torch::stable::zero_(own);
        return;
      }
    m.sum = add(g.attn_mask);
  }
  void finish() {
    for (auto& [to, from] : copies_) torch::stable::copy_(to, from);
  }

 private:
  Real* add(const OptionalTensor& t) {
    if (!t) return nullptr;
    if (t->scalar_type() == dtype_) return static_cast<Real*>(t->data_ptr());
    copies_.emplace_back(*t, aten::empty(*t, t->sizes(), dtype_));
    return static_cast<Real*>(copies_.back().second.data_ptr());
  }
  ScalarType dtype_;
  std::vector<std::pair<Tensor, Tensor>> copies_;
  OptionalTensor parts_;
};

}  // namespace attnjourney
