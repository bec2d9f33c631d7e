#include "tuning_neon.h"
#include "vec_neon.h"

// what follows is compiled for these
#include "cpu/kernels/gated/table.h"

namespace attnjourney {
constinit const GatedTable neon_gated = make_gated_table();
}
