// Attention's forward for few query rows, by the kernels of decoding: which calls go there, and how.
#pragma once
#include "cpu/decode/few_rows.h"
#include "head_inputs.h"

namespace attnjourney {

// whether they are the faster ones (DecodeKernels::few_rows) and have what the call asks for
bool takes_few_rows(const AttentionCall&, const Sequences&);
// the call without its pointers
FewRows few_rows_of(const AttentionCall&, const Sequences&);
// rows that belong to no sequence are left alone
void forward_few_rows(const AttentionCall&, const Sequences&, const HeadInputs&);

}  // namespace attnjourney
