// decode for many query rows; the arguments are checked.
#pragma once
#include "decode/decode.h"

namespace attnjourney {

void decode_tiled(const DecodeCall& call, const DecodeInputs& in, const Tensor& query, const Tensor& out,
                  const Tensor& lse);

}  // namespace attnjourney
