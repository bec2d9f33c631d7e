// Attention's forward for few query rows, by the kernels of decoding: which calls go there, and how.
#pragma once
#include "cpu/decode/few_rows.h"
#include "head_inputs.h"

namespace attnjourney {

// The batch items, ascending, for which they are the faster ones (DecodeKernels::few_rows) and have what the call asks
// for. Short sequences beside long ones go there, too.
std::vector<int64_t> few_row_items(const AttentionCall&, const Sequences&);
// the call of these items without its pointers
FewRows few_rows_of(const AttentionCall&, const Sequences&, const std::vector<int64_t>& items);
// rows that belong to no sequence are left alone
void forward_few_rows(const AttentionCall&, const Sequences&, const std::vector<int64_t>& items, const HeadInputs&);

}  // namespace attnjourney
