// Work queues over ATen's threads, with per-thread scratch.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "core/errors.h"

namespace attnjourney {

// Grown on demand, one per thread. What one call needed beyond `kept` bytes is given back at the call's end.
class Scratch {
 public:
  static constexpr int64_t kept = int64_t{8} << 20;

  explicit Scratch(int64_t bytes) : buffer_(local()) {
    if (buffer_.size >= bytes) return;
    std::free(buffer_.data);
    buffer_.size = 0;
    bytes = (bytes + 4095) / 4096 * 4096;
    buffer_.data = std::aligned_alloc(4096, static_cast<size_t>(bytes));
    if (!buffer_.data) throw OutOfMemory("cannot allocate " + std::to_string(bytes) + " bytes of scratch memory");
    buffer_.size = bytes;
  }
  ~Scratch() {
    if (buffer_.size > kept) buffer_.release();
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data() const { return buffer_.data; }

 private:
  struct Buffer {
    void* data = nullptr;
    int64_t size = 0;
    void release() {
      std::free(data);
      data = nullptr;
      size = 0;
    }
    ~Buffer() { release(); }
  };
  static Buffer& local() {
    thread_local Buffer buffer;
    return buffer;
  }
  Buffer& buffer_;
};

// Threads worth using for `items` pieces that cost `flops` together: a fork and join costs about 5 us.
inline int64_t thread_count(int64_t items, double flops) {
  constexpr double flops_per_thread = 1e6;  // about 10 us
  if (items <= 1 || flops < 2 * flops_per_thread) return 1;
  const int64_t threads = torch::stable::get_num_threads();
  return std::max<int64_t>(1, std::min({threads, items, static_cast<int64_t>(flops / flops_per_thread)}));
}

// Is this a forked process? The threads of OpenMP's pool do not exist in it, and a parallel region would wait for them.
bool forked();

// f(0) .. f(threads - 1) at once, on ATen's threads; in a forked process on new ones. f does not throw.
template <class F>
void on_threads(int64_t threads, const F& f) {
  if (!forked()) {
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) f(t);
    });
    return;
  }
  std::vector<std::thread> workers;
  workers.reserve(static_cast<size_t>(threads - 1));
  int64_t t = 1;
  try {
    for (; t < threads; t++) workers.emplace_back(f, t);
  } catch (const std::system_error&) {  // no more threads to be had: the rest is done here
    for (; t < threads; t++) f(t);
  }
  f(0);
  for (std::thread& worker : workers) worker.join();
}

// f(begin, end) over [0, count) in even ranges of at least `least`, as many as there are threads
template <class F>
void in_ranges(int64_t count, int64_t least, const F& f) {
  if (count == 0) return;
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), (count + least - 1) / least);
  if (threads <= 1) return f(int64_t{0}, count);
  const int64_t size = (count + threads - 1) / threads;
  on_threads(threads, [&](int64_t t) {
    if (t * size < count) f(t * size, std::min(count, (t + 1) * size));
  });
}

// work(item, scratch) for all items, in order from one queue: the threads take the next one when they are free.
template <class F>
void run_queue(int64_t items, int64_t threads, int64_t scratch_bytes, const F& work) {
  if (items == 0) return;
  if (threads <= 1) {
    const Scratch scratch(scratch_bytes);
    for (int64_t i = 0; i < items; i++) work(i, scratch.data());
    return;
  }
  std::atomic<int64_t> next{0};
  std::exception_ptr error;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  on_threads(threads, [&](int64_t) {
    try {
      const Scratch scratch(scratch_bytes);
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) work(i, scratch.data());
    } catch (...) {
      if (!failed.test_and_set()) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace attnjourney
