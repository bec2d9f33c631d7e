// The options at the end of the schemas of attention and of what is derived from it.
#pragma once

#define ATTNJOURNEY_VARLEN_OPTIONS                                                                      \
  "int causal_alignment=0, SymInt[2] window_size=[-1, -1], SymInt prefix_length=0, float softcap=0.0, " \
  "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? dropout_seed=None"
#define ATTNJOURNEY_ATTENTION_OPTIONS                                                                          \
  "int causal_alignment=0, SymInt[2] window_size=[-1, -1], SymInt prefix_length=0, Tensor? key_lengths=None, " \
  "Tensor? query_lengths=None, float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None, "             \
  "Tensor? dropout_seed=None"
