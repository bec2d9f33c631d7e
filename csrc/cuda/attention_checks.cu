// The device-neutral half of attention, once more: the libraries share no symbols. Its schemas are the CPU library's.
#include <torch/csrc/stable/library.h>
#undef STABLE_TORCH_LIBRARY
#define STABLE_TORCH_LIBRARY(name, m) \
  template <class Library>            \
  [[maybe_unused]] static void schemas_of_the_cpu_library(Library& m)
#include "../attention.cpp"
#include "../attention_operators.cpp"
