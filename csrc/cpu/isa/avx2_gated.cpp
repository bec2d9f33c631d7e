#include "tuning_avx2.h"
#include "vec_avx2.h"

// what follows is compiled for these
#include "cpu/kernels/gated/table.h"

namespace attnjourney {
constinit const GatedTable avx2_gated = make_gated_table();
}
