// The layer operators over what a device supplies, under their names or, for the checks, under others.
#pragma once
#include <string>

#include "layers/gpt_attention.h"
#include "layers/gqa_boxed.h"
#include "layers/layers.h"
#include "layers/mha.h"
#include "layers/mla_boxed.h"

namespace attnjourney {

template <const AttentionBackend& attention, const GqaBackend& gqa, const MlaBackend& mla>
struct LayerOperators {
  static constexpr auto mha_forward_ = &layer::On<attention, mha_forward>::call;
  static constexpr auto mha_backward_ = &layer::On<attention, mha_backward>::call;
  static constexpr auto gpt_attention_forward_ = &layer::On<attention, gpt_attention_forward>::call;
  static constexpr auto gpt_attention_backward_ = &layer::On<attention, gpt_attention_backward>::call;

  template <class Library>
  static void register_in(Library& m, const std::string& prefix) {
    const auto implement = [&](const char* name, auto function) { m.impl((prefix + name).c_str(), function); };
    implement("mha_forward", TORCH_BOX(mha_forward_));
    implement("mha_backward", TORCH_BOX(mha_backward_));
    implement("gpt_attention_forward", TORCH_BOX(gpt_attention_forward_));
    implement("gpt_attention_backward", TORCH_BOX(gpt_attention_backward_));
    implement("gqa_forward", TORCH_BOX(&GqaOperators<gqa>::forward));
    implement("gqa_backward", TORCH_BOX(&GqaOperators<gqa>::backward));
    implement("mla_forward", TORCH_BOX(&MlaOperators<mla>::forward));
    implement("mla_backward", TORCH_BOX(&MlaOperators<mla>::backward));
  }
};

}  // namespace attnjourney
