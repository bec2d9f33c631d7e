#include "tuning_scalar.h"
#include "vec_scalar.h"

// what follows is compiled for these
#include "cpu/kernels/gated/table.h"

namespace attnjourney {
constinit const GatedTable scalar_gated = make_gated_table();
}
