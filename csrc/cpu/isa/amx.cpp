// AVX-512 with a matrix unit (AMX-BF16): the table of AVX-512 but for bfloat16's forward and jvp.
#include "amx_unit.h"
#include "bf16_table.h"

namespace attnjourney {
const KernelTable amx_kernels = make_bf16_table("amx");
}
