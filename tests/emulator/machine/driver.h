// What the programs that run one kernel share: arguments as name=value, tensors of 16-bit floats and floats on stdin
// and stdout one after another, errors on stderr with exit status 3.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "emulator.h"

namespace driver {

struct Arguments {
  std::map<std::string, int> values;
  Arguments(int argc, char** argv);
  int operator[](const char* name) const;
  emulator::Options options() const;
};

// [batch, heads, length, dim]; stored [batch, length, heads, dim] when rows_first
struct Shape {
  int batch, heads, length, dim;
  bool rows_first;
  size_t size() const { return static_cast<size_t>(batch) * heads * length * dim; }
  template <class Strides>
  Strides strides() const {
    const int64_t d = dim, whole = batch > 1 ? static_cast<int64_t>(heads) * length * dim : 0;  // packed: one item
    return rows_first ? Strides{whole, d, d * heads} : Strides{whole, d * length, d};
  }
  // 64 columns by `rows` rows of one head
  template <class T>
  emulator::TensorMap map(const T* p, int rows) const {
    return emulator::tensor_map(p, strides<emulator::ElementStrides>(), batch, heads, length, dim, rows);
  }
};

// SequenceTask::order
std::vector<int> ordered(const int* offsets, int items);

template <class T>
std::vector<T> read(size_t count) {
  std::vector<T> v(count);
  if (fread(static_cast<void*>(v.data()), sizeof(T), count, stdin) != count) throw emulator::Error("short input");
  return v;
}
// The lengths of a task and the keys that its rows see; lengths of the batch items follow on stdin where lengths=1.
struct Lengths {
  std::unique_ptr<emulator::Buffer<int>> query, key, order;  // packed: offsets of the sequences
  template <class Task>
  Lengths(Task& p, const Arguments& a) {
    using Ranges = decltype(p.keys);
    const auto bound = [](int x) { return x < 0 ? Ranges::unbounded : x; };
    p.q_len = a["q_len"], p.kv_len = a["kv_len"];
    p.keys.left = bound(a["left"]), p.keys.right = bound(a["right"]), p.keys.prefix = a["prefix"];
    p.keys.key_length = p.kv_len, p.keys.offset = a["offset"], p.bottom_right = a["bottom_right"];
    const auto lengths = [&](const char* name, int more = 0) {
      return std::make_unique<emulator::Buffer<int>>(read<int>(static_cast<size_t>(a["batch"] + more)), name);
    };
    if (a["packed"]) {
      query = lengths("cu_q", 1), key = lengths("cu_k", 1);
      p.cu_q = query->data, p.cu_k = key->data;
      order = std::make_unique<emulator::Buffer<int>>(ordered(p.cu_q, a["batch"]), "order");
      p.order = order->data;
    }
    if (!a["lengths"]) return;
    query = lengths("query_lengths"), key = lengths("key_lengths");
    p.query_lengths = query->data, p.key_lengths = key->data;
  }
};

// What options do to scores (csrc/cuda/kernels/common/sequence.cuh); numbers are given in thousandths. On stdin: sinks
// and slopes [batch, q_heads], the mask of `mask_count` elements, which is read through its strides, or the tensors of
// a mask of blocks, of whose offsets there are mask_count.
template <class Element, class Real = float>
struct Options {
  std::unique_ptr<emulator::Buffer<Real>> sinks, slopes;
  std::unique_ptr<emulator::Buffer<float>> mask_fp32;
  std::unique_ptr<emulator::Buffer<unsigned char>> mask_bool;
  std::unique_ptr<emulator::Buffer<int>> offsets, index, partial;
  std::unique_ptr<emulator::Buffer<Element>> mask_same;
  emulator::Buffer<uint64_t> seed;
  template <class Task>
  Options(Task& p, const Arguments& a) : seed(std::vector<uint64_t>{static_cast<uint64_t>(a["seed"])}, "seed") {
    constexpr double kLog2E = 1.4426950408889634;
    const auto thousandth = [&](const char* name) { return a[name] / 1000.0; };
    const double scale = a["scale"] ? thousandth("scale") : 1 / std::sqrt(static_cast<double>(a["head_dim"]));
    const double unit = a["mask"] > 1 ? 1 : kLog2E, exponent = a["mask"] > 1 ? kLog2E : 1;
    if constexpr (requires { p.score_scale; }) p.score_scale = static_cast<Real>(scale * unit);
    if constexpr (requires { p.scale; }) p.scale = static_cast<decltype(p.scale)>(scale);
    auto& s = p.scores;
    s.unit = static_cast<decltype(s.unit)>(unit), s.exponent = static_cast<decltype(s.unit)>(exponent);
    if (a["softcap"]) {
      s.cap = static_cast<Real>(thousandth("softcap") * unit);
      s.cap_factor = static_cast<Real>(2 * kLog2E * scale / thousandth("softcap"));
    }
    const auto numbers = [&](std::unique_ptr<emulator::Buffer<Real>>& to, const Real*& at, const char* name) {
      if (!a[name]) return;
      to = std::make_unique<emulator::Buffer<Real>>(read<Real>(static_cast<size_t>(p.batch) * p.q_heads), name);
      at = to->data;
    };
    numbers(sinks, s.sinks, "sinks");
    numbers(slopes, s.slopes, "slopes");
    const auto mask = [&](auto& to) {
      using Buffer = typename std::remove_reference_t<decltype(to)>::element_type;
      using X = std::remove_pointer_t<decltype(Buffer::data)>;
      to = std::make_unique<Buffer>(read<X>(static_cast<size_t>(a["mask_count"])), "mask");
      s.mask = to->data, s.mask_bytes = sizeof(X);
    };
    s.mask_kind = static_cast<decltype(s.mask_kind)>(a["mask"]);
    if (a["mask"] == 1) mask(mask_bool);
    if (a["mask"] == 2) mask(mask_fp32);
    if (a["mask"] == 3) mask(mask_same);
    if (a["mask"] == -1) {
      mask(offsets);
      const auto more = [](auto& to, int count, const char* name) {
        using Buffer = typename std::remove_reference_t<decltype(to)>::element_type;
        to = std::make_unique<Buffer>(read<std::remove_pointer_t<decltype(Buffer::data)>>(count), name);
        return to->data;
      };
      const int size = a["block_size"], count = a["block_count"], partials = a["block_partials"];
      s.blocks.index = more(index, count, "block_index");
      s.blocks.partial = more(partial, count, "block_partial");
      s.blocks.elements = more(mask_bool, partials * size * size, "block_elements");
      s.blocks.size = size, s.blocks.rows = (p.q_len + size - 1) / size;
      s.blocks.count = count, s.blocks.partial_blocks = partials;
    }
    s.mask_dims = 1, s.mask_size[0] = p.batch, s.mask_batch[0] = a["mask_batch"];
    s.mask_head = a["mask_head"], s.mask_row = a["mask_row"], s.mask_col = a["mask_col"];
    if (!a["dropout"]) return;
    s.seed = seed.data;
    s.threshold = static_cast<uint32_t>(thousandth("dropout") * 65536 + .5);
    s.keep_scale = a["dropout"] < 1000 ? static_cast<Real>(1 / (1 - thousandth("dropout"))) : 0;
    s.first_row = a["first_row"], s.first_key = a["first_key"], s.first_head = a["first_head"], s.heads = p.q_heads;
    s.heads_between = a["heads_of_whole"] ? a["heads_of_whole"] - p.q_heads : 0;
  }
};

template <class T>
void write(const emulator::Buffer<T>& b) {
  fwrite(static_cast<const void*>(b.data), sizeof(T), b.size, stdout);
}

// Calls body with the arguments; prints the counts, or the error, and returns the exit status.
int run(int argc, char** argv, const std::function<void(const Arguments&)>& body);

}  // namespace driver
