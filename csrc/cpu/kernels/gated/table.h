// The kernels of gated linear attention of one ISA, which have a source file of their own.
#pragma once
#include "backward.h"
#include "cpu/dispatch.h"
#include "cpu/kernels/shared.h"
#include "step.h"

namespace attnjourney {
namespace {

template <class T>
constexpr GatedKernels gated_kernels() {
  return {
      .lanes = Vec<Compute<T>>::width,
      .step_rows = GatedStep<T>::most_rows,
      .step_space = GatedStep<T>::space,
      .step = GatedStep<T>::run,
      .forward_space = GatedForward<T>::space,
      .forward = GatedForward<T>::run,
      .backward_space = GatedBackward<T>::space,
      .backward = GatedBackward<T>::run,
  };
}

constexpr GatedTable make_gated_table() {
  return {{gated_kernels<double>(), gated_kernels<float>(), gated_kernels<bf16>(), gated_kernels<f16>()}};
}

}  // namespace
}  // namespace attnjourney
