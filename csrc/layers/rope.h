// Rotary position embedding as an operator (Su et al. 2021, arXiv 2104.09864).
#pragma once
#include "core/arguments.h"

namespace attnjourney {

struct Backend;

// x (batch, heads, seq, dim); cos, sin ([batch,] seq, rotary_dim / 2), rotary_dim <= dim -> x with the first rotary_dim
// numbers of every row turned, dense. inverse turns back, and carries a gradient.
Tensor rope(const Backend&, Arguments&);

// the same in place, for a key on its way into a cache; the last dimension of x is dense
void rope_in_place(const Backend&, Arguments&);

}  // namespace attnjourney
