// What an operator throws, with the type that Python is to raise: not every torch hands the types of C++ exceptions on,
// so that the last one of a thread is kept for attnjourney/_errors.py.
#pragma once
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace attnjourney {

// TypeError in Python
struct TypeFault : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// MemoryError in Python
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// ATen's own text of the call through its C interface that has just failed; empty where torch (before 2.13) has none
std::string aten_error_text();

// Keeps the exception that is being handled, and throws it again: with ATen's text where ATen has thrown it.
[[noreturn]] void remember_and_rethrow();

}  // namespace attnjourney
