// What a program is given and gives back: named pieces of memory on stdin and stdout, each as its name, a zero, the
// number of its bytes (8 bytes) and these.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace kernel_tests {

// 64-byte aligned, zeros
class Memory {
 public:
  explicit Memory(int64_t bytes = 0) : bytes_(bytes) {
    const size_t size = (static_cast<size_t>(bytes) + 127) / 64 * 64;
    data_ = std::aligned_alloc(64, size);
    std::memset(data_, 0, size);
  }
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory() { std::free(data_); }
  void* get() const { return data_; }
  char* at(int64_t byte) const { return static_cast<char*>(data_) + byte; }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_;
  int64_t bytes_;
};

class Inputs {
 public:
  Inputs() {
    for (std::string name; read_name(name);) {
      int64_t bytes = 0;
      read(&bytes, 8);
      Memory blob(bytes);
      read(blob.get(), bytes);
      blobs_.emplace(name, std::move(blob));
    }
  }
  bool has(const std::string& name) const { return blobs_.count(name) != 0; }
  // null if it is not there
  const char* tensor(const std::string& name) const {
    const auto found = blobs_.find(name);
    return found == blobs_.end() ? nullptr : static_cast<const char*>(found->second.get());
  }
  double real(const std::string& name) const {
    if (!has(name)) throw std::runtime_error("no input " + name);
    double x;
    std::memcpy(&x, tensor(name), 8);
    return x;
  }
  int64_t integer(const std::string& name) const { return static_cast<int64_t>(real(name)); }

 private:
  static bool read_name(std::string& name) {
    name.clear();
    for (int c; (c = std::getchar()) != EOF;) {
      if (c == 0) return true;
      name += static_cast<char>(c);
    }
    return false;
  }
  static void read(void* to, int64_t bytes) {
    if (std::fread(to, 1, static_cast<size_t>(bytes), stdin) != static_cast<size_t>(bytes))
      throw std::runtime_error("the input ends early");
  }
  std::map<std::string, Memory> blobs_;
};

inline void give(const std::string& name, const Memory& blob) {
  const int64_t bytes = blob.bytes();
  std::fwrite(name.c_str(), 1, name.size() + 1, stdout);
  std::fwrite(&bytes, 1, 8, stdout);
  std::fwrite(blob.get(), 1, static_cast<size_t>(bytes), stdout);
}

}  // namespace kernel_tests
