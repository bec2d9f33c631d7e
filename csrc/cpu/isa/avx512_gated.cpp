#include "tuning_avx512.h"
#include "vec_avx512.h"

// what follows is compiled for these
#include "cpu/kernels/gated/table.h"

namespace attnjourney {
constinit const GatedTable avx512_gated = make_gated_table();
}
