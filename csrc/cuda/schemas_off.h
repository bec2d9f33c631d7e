// From here to schemas_on.h a device-neutral half, which this library compiles once more since the two share no
// symbols, leaves out its schemas: those are the CPU library's.
#include <torch/csrc/stable/library.h>

#pragma push_macro("STABLE_TORCH_LIBRARY")
#pragma push_macro("STABLE_TORCH_LIBRARY_FRAGMENT")
#undef STABLE_TORCH_LIBRARY
#undef STABLE_TORCH_LIBRARY_FRAGMENT
#define STABLE_TORCH_LIBRARY(name, m) ATTNJOURNEY_NO_SCHEMAS(m, __COUNTER__)
#define STABLE_TORCH_LIBRARY_FRAGMENT(name, m) ATTNJOURNEY_NO_SCHEMAS(m, __COUNTER__)
#define ATTNJOURNEY_NO_SCHEMAS(m, number) ATTNJOURNEY_UNUSED_SCHEMAS(m, number)
#define ATTNJOURNEY_UNUSED_SCHEMAS(m, number) \
  template <class Library>                    \
  [[maybe_unused]] static void schemas_of_the_cpu_library_##number(Library& m)
