#include "tuning.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace attnjourney {
namespace {

// Register tiles of 8 x 3 for all products, key blocks of 144: measured on Zen 3 and Zen 5.
MachineTuning generic(const Caches& c) { return {"generic", false, 0, std::max<int64_t>(1024, c.l1_bytes / 32)}; }
// Tiles of 6 x 4 for sums, in which 64 columns are one of them and not two of half the width, and key blocks of 288,
// where the two-port cores add up sums half as often: measured on a Xeon 6. Beside them the second-level cache holds
// the queries and sums of eight tiles.
MachineTuning intel(const Caches& c) {
  MachineTuning t = generic(c);
  t.name = "intel";
  t.wide_sums = true;
  t.long_block_bytes = c.l2_bytes / 6;
  return t;
}

}  // namespace

constinit MachineTuning machine_tuning{"generic", false, 0, 1024};

Caches caches() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  const auto get = [](int name) { return std::max<int64_t>(0, sysconf(name)); };
  return {get(_SC_LEVEL1_DCACHE_SIZE), get(_SC_LEVEL1_DCACHE_ASSOC), get(_SC_LEVEL2_CACHE_SIZE),
          get(_SC_LEVEL2_CACHE_ASSOC)};
#else
  return {0, 0, 0, 0};
#endif
}

const char* vendor() {
#if defined(ATTNJOURNEY_X86)
  return __builtin_cpu_is("intel") ? "intel" : __builtin_cpu_is("amd") ? "amd" : "other";
#elif defined(ATTNJOURNEY_ARM64)
  return "arm";
#else
  return "other";
#endif
}

const char* forced_tuning() {
  const char* const tuning = std::getenv("ATTNJOURNEY_TUNING");
  return tuning ? tuning : "";
}

void choose_tuning() {
  const std::string forced = forced_tuning();
  constexpr Caches xeon{48 << 10, 12, 2 << 20, 16};  // so that a forced one is the same on every machine
  if (forced == "generic")
    machine_tuning = generic(xeon);
  else if (forced == "intel")
    machine_tuning = intel(xeon);
  else if (forced.empty() || forced == "matrix")
    machine_tuning = std::strcmp(vendor(), "intel") == 0 ? intel(caches()) : generic(caches());
  else
    throw std::runtime_error("ATTNJOURNEY_TUNING: expected 'generic', 'intel' or 'matrix', got '" + forced + "'");
}

}  // namespace attnjourney
