// CPU entry of linear attention: which sweeps a call takes, and their states before and after.
#include <cstring>

#include "cpu/plan.h"
#include "linear_cpu.h"
#include "sweeps.h"

namespace attnjourney {
namespace {

// (batch, heads, len, dim) with a dense last dimension; kept, for what is given may be a copy that nobody else holds
struct Rows {
  explicit Rows(const Tensor& t) : kept(aten::rows_contiguous(t)), base(static_cast<char*>(kept.data_ptr())) {
    item = t.scalar_type() == ScalarType::Double ? 8 : t.scalar_type() == ScalarType::Float ? 4 : 2;
  }
  char* at(int64_t b, int64_t h) const {
    return base ? base + (b * stride_of(kept, 0) + h * stride_of(kept, 1)) * item : nullptr;
  }
  Tensor kept;
  char* base;
  int64_t item;
};

// The pointers of every key/value head. `grads` and `gradients`: of the backward.
struct Heads {
  Heads(const LinearCall& call, const LinearInputs& in, const Tensor& out, const Tensor& denominator,
        const LinearGradientInputs* grads, const LinearGradients* gradients)
      : params(call.params),
        query(in.query),
        key(in.key),
        value(in.value),
        outs(out),
        grad_out(grads ? grads->grad_out : out),
        denominators(denominator) {
    params.q_head = stride_of(query.kept, 1), params.q_row = stride_of(query.kept, 2);
    params.k_row = stride_of(key.kept, 2), params.v_row = stride_of(value.kept, 2);
    params.grad_out_head = stride_of(grad_out.kept, 1), params.grad_out_row = stride_of(grad_out.kept, 2);
    if (grads && grads->grad_denominator && params.normalize) den_grad = aten::contiguous(*grads->grad_denominator);
    if (in.key_padding_mask) mask = aten::contiguous(*in.key_padding_mask);
    const int64_t state_item = call.state_dtype == ScalarType::Double ? 8 : 4;
    const auto start = [](const Tensor& t, int64_t offset) -> void* {
      return t.numel() ? static_cast<char*>(t.data_ptr()) + offset : nullptr;
    };
    for (int64_t b = 0; b < call.batch; b++)
      for (int64_t h = 0; h < call.kv_heads; h++) {
        LinearHead head;
        const int64_t q = h * params.group, rows = (b * call.q_heads + q) * params.q_len;
        const int64_t keys = (b * call.kv_heads + h) * params.kv_len;
        head.query = query.at(b, q);
        head.key = key.at(b, h);
        head.value = value.at(b, h);
        if (mask) head.blocked = static_cast<const uint8_t*>(mask->data_ptr()) + b * params.kv_len;
        head.out = outs.at(b, q);
        head.denominator = start(denominators, rows * state_item);
        if (grads) {
          const auto& [grad_query, grad_key, grad_value, s, z] = *gradients;
          head.grad_out = grad_out.at(b, q);
          if (den_grad) head.grad_denominator = start(*den_grad, rows * state_item);
          head.grad_query = start(grad_query, rows * params.head_dim * query.item);
          head.grad_key = start(grad_key, keys * params.head_dim * query.item);
          head.grad_value = start(grad_value, keys * params.v_head_dim * query.item);
        }
        all.push_back(head);
      }
  }
  LinearParams params;
  Rows query, key, value, outs, grad_out;
  Tensor denominators;
  OptionalTensor mask, den_grad;
  std::vector<LinearHead> all;
};

// S (head_dim, v_head_dim) and z of a head between tensors and blocks. Absent tensors read as 0.
struct States {
  const void *state = nullptr, *normalizer = nullptr;
  Tensor kept_state, kept_normalizer;
  States(const OptionalTensor& s, const OptionalTensor& z) {
    if (s) kept_state = aten::contiguous(*s), state = kept_state.data_ptr();
    if (z && z->numel()) kept_normalizer = aten::contiguous(*z), normalizer = kept_normalizer.data_ptr();
  }
};

template <class C>
void read_state(const LinearParams& p, const States& from, int64_t head, bool transposed, const StateShape& shape,
                C* block) {
  std::memset(block, 0, static_cast<size_t>(shape.numbers) * sizeof(C));
  const int64_t D = p.head_dim, Dv = p.v_head_dim, ld = shape.ld;
  if (from.state) {
    const C* s = static_cast<const C*>(from.state) + head * D * Dv;
    for (int64_t d = 0; d < D; d++)
      if (transposed)
        for (int64_t e = 0; e < Dv; e++) block[e * ld + d] = s[d * Dv + e];
      else
        std::copy_n(s + d * Dv, Dv, block + d * ld);
  }
  if (from.normalizer) std::copy_n(static_cast<const C*>(from.normalizer) + head * D, D, block + shape.rows * ld);
}

template <class C>
void write_state(const LinearParams& p, const C* block, const StateShape& shape, int64_t head, const Tensor& state,
                 const Tensor& normalizer) {
  const int64_t D = p.head_dim, Dv = p.v_head_dim;
  if (state.numel())
    for (int64_t d = 0; d < D; d++)
      std::copy_n(block + d * shape.ld, Dv, static_cast<C*>(state.data_ptr()) + (head * D + d) * Dv);
  if (normalizer.numel()) std::copy_n(block + D * shape.ld, D, static_cast<C*>(normalizer.data_ptr()) + head * D);
}

// f(C{}) with the type of the arithmetic
template <class F>
void dispatch_compute(const LinearCall& c, const F& f) {
  c.state_dtype == ScalarType::Double ? f(double{}) : f(float{});
}

}  // namespace

void cpu_linear_forward(const LinearCall& c, const LinearInputs& in, const Tensor& out, const Tensor& denominator,
                        const Tensor& state, const Tensor& normalizer) {
  const LinearKernels& k = kernels().linear[static_cast<int>(kernel_dtype(c.dtype))];
  const Heads heads(c, in, out, denominator, nullptr, nullptr);
  const LinearParams& p = heads.params;
  const States initial(in.initial_state, in.initial_normalizer);
  const StateShape shape(p.head_dim, p.v_head_dim, k.lanes);
  dispatch_compute(c, [&](auto type) {
    using C = decltype(type);
    Sweep sweep{.sum = k.sum_keys,
                .step = k.forward,
                .shape = shape,
                .reverse = false,
                .sum_len = p.kv_len,
                .step_len = p.q_len,
                .writes = true};
    sweep.begin = [&](int64_t head, void* block) {
      read_state(p, initial, head, false, shape, static_cast<C*>(block));
    };
    sweep.end = [&](int64_t head, const void* block) {
      write_state(p, static_cast<const C*>(block), shape, head, state, normalizer);
    };
    run_sweeps<C>(p, k, heads.all, {sweep}, in.query);
  });
}

void cpu_linear_backward(const LinearCall& c, const LinearInputs& in, const LinearGradientInputs& grads,
                         const LinearGradients& gradients) {
  const LinearKernels& k = kernels().linear[static_cast<int>(kernel_dtype(c.dtype))];
  const auto& [grad_query, grad_key, grad_value, grad_state, grad_normalizer] = gradients;
  const bool wants_keys = grad_key.dim() == 4, wants_state = grad_state.dim() == 4 || grad_normalizer.dim() == 3;
  const Heads heads(c, in, aten::contiguous(grads.out), aten::contiguous(grads.denominator), &grads, &gradients);
  const LinearParams& p = heads.params;
  const States initial(in.initial_state, in.initial_normalizer), last(grads.grad_state, grads.grad_normalizer);
  const StateShape plain(p.head_dim, p.v_head_dim, k.lanes), transposed(p.v_head_dim, p.head_dim, k.lanes);
  dispatch_compute(c, [&](auto type) {
    using C = decltype(type);
    std::vector<Sweep> sweeps;
    if (grad_query.dim() == 4) {
      Sweep sweep{.sum = k.sum_keys_transposed,
                  .step = k.backward_query,
                  .shape = transposed,
                  .reverse = false,
                  .sum_len = p.kv_len,
                  .step_len = p.q_len,
                  .writes = true};
      sweep.begin = [&](int64_t head, void* block) {
        read_state(p, initial, head, true, transposed, static_cast<C*>(block));
      };
      sweeps.push_back(sweep);
    }
    if (wants_keys || wants_state) {
      Sweep sweep{.sum = k.sum_queries,
                  .step = k.backward_key,
                  .shape = plain,
                  .reverse = true,
                  .sum_len = p.q_len,
                  .step_len = p.kv_len,
                  .writes = wants_keys};
      sweep.begin = [&](int64_t head, void* block) { read_state(p, last, head, false, plain, static_cast<C*>(block)); };
      sweep.end = [&](int64_t head, const void* block) {
        write_state(p, static_cast<const C*>(block), plain, head, grad_state, grad_normalizer);
      };
      sweeps.push_back(sweep);
    }
    run_sweeps<C>(p, k, heads.all, sweeps, in.query);
  });
}

}  // namespace attnjourney
