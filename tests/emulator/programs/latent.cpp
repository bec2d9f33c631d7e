// Runs one kernel of decoding over latents, named by -DKERNEL=... and, where the keys are shared out, what joins the
// parts (-DSHARES_ALL: splits are groups of blocks, which share the keys of all sequences). stdin: query [batch, heads,
// q_len, dim], latents [batch or blocks, capacity or block size, dim], lengths, table, sinks and slopes, mask; stdout:
// out, lse. -DBYTES: latents are bytes, and their scales follow them.
#include "emulator/machine/driver.h"
//
#include "kernels/latent.h"

using C = Compute<T>;
#ifdef BYTES
using Stored = unsigned char;
#else
using Stored = T;
#endif

template <class X>
struct Optional {  // of stdin
  std::unique_ptr<emulator::Buffer<X>> buffer;
  const X* read(bool there, int64_t count, const char* name) {
    if (!there) return nullptr;
    buffer = std::make_unique<emulator::Buffer<X>>(driver::read<X>(static_cast<size_t>(count)), name);
    return buffer->data;
  }
};

template <class K>
void run(const driver::Arguments& a, const DecodeTask& p) {
#ifdef SHARES_ALL
  const int units = p.row_tiles;
#else
  const int units = p.batch * p.row_tiles;
#endif
  const dim3 grid(static_cast<unsigned>(units * p.splits)), block(K::kThreads);
  if constexpr (requires { K::smem_bytes(0); })
    emulator::launch(FUNCTION<K>, grid, block, static_cast<size_t>(K::smem_bytes(p.head_dim)), a.options(), p);
  else
    emulator::launch(FUNCTION<K>, grid, block, K::kSmemBytes, a.options(), p);
}

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    DecodeTask p{};
    p.batch = a["batch"], p.kv_heads = 1, p.group = a["heads"], p.q_len = a["q_len"];
    p.head_dim = a["dim"], p.v_head_dim = a["v_dim"], p.rows = p.group * p.q_len;
    p.row_tiles = (p.rows + Kernel::kRows - 1) / Kernel::kRows, p.splits = a["splits"];
    p.capacity = a["capacity"], p.longest = p.capacity;
    const int64_t rows = int64_t{p.batch} * p.rows, pitch = a["pitch"];  // of a row of latents
    p.blocks = a["blocks"], p.block_size = a["block_size"], p.max_blocks = a["max_blocks"];
    const int64_t outer = p.blocks ? p.blocks : p.batch, inner = p.blocks ? p.block_size : p.capacity;
    emulator::Buffer<T> query(driver::read<T>(static_cast<size_t>(rows * p.head_dim)), "query");
    emulator::Buffer<Stored> latent(driver::read<Stored>(static_cast<size_t>(outer * inner * pitch)), "latent");
    Optional<float> scale;
    p.bytes = static_cast<ByteKind>(a["bytes"]);
    p.key_scale = p.value_scale = scale.read(a["bytes"], outer * inner, "latent_scale");
    p.key_scale_outer = p.value_scale_outer = inner;
    emulator::Buffer<int64_t> lengths(driver::read<int64_t>(static_cast<size_t>(p.batch)), "lengths");
    Optional<int> table;
    Optional<C> sinks, slopes;
    p.table = table.read(p.blocks > 0, int64_t{p.batch} * p.max_blocks, "table");
    p.query = query.data, p.key = p.value = latent.data, p.lengths = lengths.data;
    p.q_row = p.head_dim, p.q_head = p.q_row * p.q_len, p.q_batch = p.q_head * p.group;
    p.k = p.v = {inner * pitch, 0, pitch};
    const auto bound = [](int x) { return x < 0 ? Ranges::unbounded : x; };
    p.keys.left = bound(a["left"]), p.keys.right = bound(a["right"]), p.keys.prefix = a["prefix"];
    p.sinks = sinks.read(a["sinks"], int64_t{p.batch} * p.group, "sinks");
    p.slopes = slopes.read(a["slopes"], int64_t{p.batch} * p.group, "slopes");
    p.sinks_batch = p.slopes_batch = p.group;
    Optional<unsigned char> mask_bool;
    Optional<float> mask_fp32;
    Optional<T> mask_same;
    p.mask_kind = static_cast<MaskElement>(a["mask"]);
    const int64_t count = a["mask_count"];
    if (a["mask"] == 1) p.mask = mask_bool.read(true, count, "mask"), p.mask_bytes = 1;
    if (a["mask"] == 2) p.mask = mask_fp32.read(true, count, "mask"), p.mask_bytes = 4;
    if (a["mask"] == 3) p.mask = mask_same.read(true, count, "mask"), p.mask_bytes = sizeof(T);
    p.mask_batch = a["mask_batch"], p.mask_head = a["mask_head"], p.mask_row = a["mask_row"],
    p.mask_col = a["mask_col"];
    describe_scores(p, a["scale"] / 1000.0, {.softcap = a["softcap"] / 1000.0});
    p.scaled_only = !p.slopes && !p.mask && p.cap == 0;

    emulator::Buffer<T> out(static_cast<size_t>(rows * p.v_head_dim), "out");
    emulator::Buffer<C> lse(static_cast<size_t>(rows), "lse");
    p.out = out.data, p.lse = lse.data;
#ifdef SHARES_ALL
    emulator::Buffer<int> shares(static_cast<size_t>(2 * p.batch), "shares");
    p.shares = shares.data;
    const auto parts = static_cast<size_t>(int64_t{2} * p.row_tiles * p.splits * Kernel::kRows);
#else
    const auto parts = static_cast<size_t>(int64_t{p.batch} * p.row_tiles * p.splits * Kernel::kRows);
#endif
    emulator::Buffer<C> part_out(parts * static_cast<size_t>(p.v_head_dim), "part_out"), stats(2 * parts, "part_stats");
    p.part_out = part_out.data, p.part_stats = stats.data;
    run<Kernel>(a, p);
#ifdef SHARES_ALL
    if (p.splits > 1)
      emulator::launch(ragged_merge<T>, dim3(static_cast<unsigned>((rows + kRaggedMergeRows - 1) / kRaggedMergeRows)),
                       dim3(kRaggedMergeThreads), 0, a.options(), p, Kernel::kRows);
#else
    if (p.splits > 1)
      emulator::launch(decode_merge<T>, dim3(static_cast<unsigned>(rows)), dim3(kMergeThreads),
                       static_cast<size_t>(merge_smem<C>(p.splits, p.v_head_dim)), a.options(), p, Kernel::kRows);
#endif
    driver::write(out);
    driver::write(lse);
  });
}
