// What a device supplies: one Backend per library, over which registration.h registers every operator.
#pragma once
#include "attention/attention.h"
#include "decode/kv_cache.h"
#include "decode/mla_decode.h"
#include "layers/rms_norm.h"
#include "layers/rotary.h"
#include "linear/gated_linear_attention.h"
#include "linear/linear_attention.h"
#include "sparse/lightning_indexer.h"
#include "sparse/sparse_attention.h"

namespace attnjourney {

struct Backend {
  AttentionBackend attention;
  DecodeBackend decode;
  CacheBackend caches;
  LinearBackend linear;
  GatedBackend gated;
  SparseBackend sparse;
  IndexerBackend indexer;
  RotaryFunction rotary;
  RmsNormBackend rms_norm;
};

}  // namespace attnjourney
