// Forked processes are known by a handler that fork runs in them.
#include "threads.h"

#include <pthread.h>

namespace attnjourney {
namespace {

bool in_child = false;
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { in_child = true; });

}  // namespace

bool forked() { return in_child; }

}  // namespace attnjourney
