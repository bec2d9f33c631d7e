// Runs token-sparse attention, forward and (backward=1) backward, by the kernels -DFORWARD, -DQUERY and -DKEYS. stdin:
// query, key, value (latent=1: the front of key, not given), indices, then as asked for: key_lengths, sinks
// [batch, q_heads]; backward: grad_out, and grad_lse as asked for. stdout: out, lse; the gradients of query, key,
// value, and of the sinks.
#include "emulator/machine/driver.h"
//
#include "kernels/sparse.h"
//
#include "sparse_launch.h"

template <class X>
using Buffer = std::unique_ptr<emulator::Buffer<X>>;
template <class X>
Buffer<X> given(bool there, int64_t count, const char* name) {
  if (!there) return nullptr;
  return std::make_unique<emulator::Buffer<X>>(driver::read<X>(static_cast<size_t>(count)), name);
}
template <class X>
Buffer<X> fresh(int64_t count, const char* name) {
  return std::make_unique<emulator::Buffer<X>>(static_cast<size_t>(count), name);
}
template <class X>
X* data(const Buffer<X>& b) {
  return b ? b->data : nullptr;
}

struct Launch : SparseLaunch {
  void key_gradient(const SparseTask& t, const SparsePairs& p) const {
    const int64_t tiles = (t.params.index_count + KeyGradient::kKeys - 1) / KeyGradient::kKeys;
    run(sparse_key_gradient<KeyGradient>, tiles * p.lists.rows * t.batch * t.kv_heads, KeyGradient::kThreads,
        smem<KeyGradient>(t), t, p);
  }
  template <class Kernel>
  static int smem(const SparseTask& t) {
    return Kernel::smem_bytes(static_cast<int>(t.params.head_dim), static_cast<int>(t.params.v_head_dim));
  }
  template <class Kernel>
  void units(void (*kernel)(SparseTask), const SparseTask& t) const {
    const int64_t units = int64_t{t.batch} * t.kv_heads * t.blocks;
    run(kernel, units * Kernel::tiles(t.group * static_cast<int>(t.params.rows)), Kernel::kThreads, smem<Kernel>(t), t);
  }
};

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const bool rows_first = a["rows_first"], latent = a["latent"];
    const driver::Shape q{a["batch"], a["q_heads"], a["q_len"], a["head_dim"], rows_first};
    const driver::Shape k{q.batch, a["kv_heads"], a["kv_len"], q.dim, rows_first};
    const driver::Shape v{q.batch, k.heads, k.length, a["v_head_dim"], rows_first};
    const driver::Shape o{q.batch, q.heads, q.length, v.dim, rows_first};
    const int index_heads = a["index_heads"], blocks = a["blocks"], count = a["index_count"];
    const int64_t named = int64_t{q.batch} * index_heads * blocks * count, rows = int64_t{q.batch} * q.heads * q.length;
    const auto query = given<T>(true, static_cast<int64_t>(q.size()), "query");
    const auto key = given<T>(true, static_cast<int64_t>(k.size()), "key");
    const auto value = given<T>(!latent, static_cast<int64_t>(v.size()), "value");
    const auto narrow = given<int>(!a["wide"], named, "indices");
    const auto wide = given<int64_t>(a["wide"], named, "indices");
    const auto lengths = given<int>(a["lengths"], q.batch, "key_lengths");
    const auto sinks = given<C>(a["sinks"], int64_t{q.batch} * q.heads, "sinks");
    const auto grad_out = given<T>(a["backward"], static_cast<int64_t>(o.size()), "grad_out");
    const auto grad_lse = given<C>(a["backward"] && a["grad_lse"], rows, "grad_lse");
    const auto out = fresh<T>(rows * v.dim, "out");
    const auto lse = fresh<C>(rows, "lse"), stats = fresh<C>(2 * rows, "stats"), delta = fresh<C>(rows, "delta");

    constexpr double kLog2E = 1.4426950408889634;
    const double scale = a["scale"] / 1000.0, softcap = a["softcap"] / 1000.0;
    SparseTask t{};
    SparseParams& p = t.params;
    p.q_len = q.length, p.kv_len = k.length, p.head_dim = q.dim, p.v_head_dim = v.dim;
    p.group = t.group = q.heads / k.heads, p.rows = a["rows"], p.index_count = count, p.scale = scale;
    p.causal = a["causal"], p.bottom_right = a["bottom_right"];
    t.query = data(query), t.key = data(key), t.value = latent ? data(key) : data(value);
    t.q = q.strides<Strides>(), t.k = k.strides<Strides>(), t.v = latent ? t.k : v.strides<Strides>();
    t.indices = a["wide"] ? static_cast<const void*>(data(wide)) : data(narrow), t.wide = a["wide"];
    const int64_t of_head = int64_t{blocks} * count;
    t.names = {of_head * index_heads, index_heads > 1 ? of_head : 0, count};
    t.key_lengths = data(lengths), t.batch = q.batch, t.kv_heads = k.heads, t.blocks = blocks;
    t.score_scale = scale * kLog2E;
    if (softcap > 0) t.cap = softcap * kLog2E, t.cap_factor = scale / softcap;
    t.sinks = data(sinks), t.out = data(out), t.lse = data(lse), t.stats = data(stats);
    const Launch launch{{a.options()}};
    launch.units<Forward>(sparse_forward<Forward>, t);
    driver::write(*out);
    driver::write(*lse);
    if (!a["backward"]) return;

    const auto grad_query = fresh<T>(static_cast<int64_t>(q.size()), "grad_query");
    const auto grad_key = fresh<C>(static_cast<int64_t>(k.size()), "grad_key");
    const auto grad_value = fresh<C>(static_cast<int64_t>(v.size()), "grad_value");
    const auto grad_sinks = fresh<C>((a["shared_sinks"] ? 1 : q.batch) * q.heads, "grad_sinks");
    t.grad_out = data(grad_out), t.grad_lse = data(grad_lse), t.g = o.strides<Strides>(), t.delta = data(delta);
    t.grad_query = data(grad_query), t.grad_sinks = data(grad_sinks), t.shared_sinks = a["shared_sinks"];
    launch.run(sparse_delta<T>, sparse_delta_blocks(t), kSparsePassThreads, 0, t);
    launch.units<QueryGradient>(sparse_query_gradient<QueryGradient>, t);
    if (t.sinks)
      launch.run(sparse_sinks<C>, static_cast<int64_t>(grad_sinks->size), kSparsePassThreads,
                 kSparsePassThreads / 32 * 8, t);
    const SparseParts parts(t, index_heads, sizeof(C), a["workspace"]);
    const auto masks = fresh<uint32_t>(parts.masks, "masks"), repeats = fresh<uint32_t>(parts.repeats, "repeats");
    const auto begins = fresh<int>(parts.begins, "begins"), totals = fresh<int>(parts.totals, "totals");
    const auto sums = fresh<C>(parts.pairs, "pairs");
    SparsePairs pairs{};
    pairs.lists.index_heads = index_heads, pairs.lists.masks = data(masks), pairs.lists.repeats = data(repeats);
    pairs.lists.begins = data(begins), pairs.lists.totals = data(totals), pairs.pairs = data(sums);
    pairs.key = a["want_key"] ? data(grad_key) : nullptr, pairs.value = data(grad_value);
    run_key_gradients(t, pairs, parts, launch);
    driver::write(*grad_query);
    const auto write = [&](const Buffer<C>& sum, bool there) {
      const auto count_ = static_cast<int64_t>(sum->size);
      if (!there) return;
      if constexpr (sizeof(T) == 2) {
        const auto rounded = fresh<T>(count_, "rounded");
        launch.run(sparse_round<T>, (count_ + kListThreads - 1) / kListThreads, kListThreads, 0,
                   reinterpret_cast<const float*>(data(sum)), data(rounded), count_);
        driver::write(*rounded);
      } else {
        driver::write(*sum);
      }
    };
    write(grad_key, a["want_key"]);
    write(grad_value, true);
    if (t.sinks) driver::write(*grad_sinks);
  });
}
