#include "errors.h"

#include <cstring>

// since torch 2.13; with an older one it is null
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace attnjourney {
namespace {

thread_local std::string last_error;  // "ValueError\n" and its text

void remember(const char* type, const char* what) { last_error = std::string(type) + "\n" + what; }

}  // namespace

std::string aten_error_text() {
  const char* const text =
      torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : nullptr;
  return text ? text : "";
}

void remember_and_rethrow() {
  try {
    throw;
  } catch (const TypeFault& e) {
    remember("TypeError", e.what());
    throw;
  } catch (const std::invalid_argument& e) {
    remember("ValueError", e.what());
    throw;
  } catch (const std::bad_alloc& e) {
    remember("MemoryError", e.what());
    throw;
  } catch (const std::runtime_error& e) {
    last_error.clear();
    // torch's headers name the C function that failed and no more
    const std::string text = std::strstr(e.what(), "API call failed at") ? aten_error_text() : "";
    if (text.empty()) throw;
    throw std::runtime_error(text);
  } catch (...) {
    last_error.clear();
    throw;
  }
}

}  // namespace attnjourney

extern "C" __attribute__((visibility("default"))) const char* attnjourney_last_error() {
  return attnjourney::last_error.c_str();
}
