#include "aten.h"

#include <iomanip>

#include "checks.h"

namespace attnjourney::aten {

void refuse_allocation(const Tensor& like, IntHeaderOnlyArrayRef sizes, std::optional<ScalarType> dtype) {
  const std::string why = aten_error_text();
  const ScalarType own = dtype.value_or(dtype_of(like));
  double bytes = own == ScalarType::Byte ? 1 : own == ScalarType::Double ? 8 : own == ScalarType::Float ? 4 : 2;
  for (const int64_t size : sizes) bytes *= static_cast<double>(size);
  std::ostringstream number;
  number << std::fixed << std::setprecision(0) << bytes;
  throw std::runtime_error(text("out of memory: cannot allocate a tensor of shape ", list_text(sizes), " and ",
                                dtype_text(own), ", ", number.str(), " bytes", why.empty() ? "" : ": ", why));
}

}  // namespace attnjourney::aten
