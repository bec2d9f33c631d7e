// Runs decoding, kernel and merge: -DKERNEL=DecodeMma<...>, or -DNUMBER=... for the kernel with ordinary arithmetic;
// -DBYTES: over caches of bytes. stdin: lengths, block table, query, key, value, their scales, sinks, slopes, mask;
// stdout: out, lse.
#include "emulator/machine/driver.h"
//
#include "kernels/decode.h"

#ifdef KERNEL
constexpr int kTileRows = KERNEL::kRows;
#else
constexpr int kTileRows = DecodeFma<T>::kRows;
#endif
using C = Compute<T>;
using Stored = std::conditional_t<kBytes, unsigned char, T>;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const auto count = [&](const char* name) { return static_cast<size_t>(a[name]); };
    const auto bound = [](int x) { return x < 0 ? Ranges::unbounded : x; };
    DecodeTask p{};
    p.batch = a["batch"], p.kv_heads = a["kv_heads"], p.group = a["group"], p.q_len = a["q_len"];
    p.head_dim = a["head_dim"], p.v_head_dim = a["v_head_dim"];
    p.rows = p.group * p.q_len, p.row_tiles = (p.rows + kTileRows - 1) / kTileRows;
    const emulator::Buffer<int64_t> lengths(driver::read<int64_t>(count("batch")), "lengths");
    const emulator::Buffer<int> table(driver::read<int>(count("batch") * count("max_blocks")), "block_table");
    const emulator::Buffer<T> query(driver::read<T>(count("query_size")), "query");
    const emulator::Buffer<Stored> key(driver::read<Stored>(count("key_size")), "key");
    const emulator::Buffer<Stored> value(driver::read<Stored>(count("value_size")), "value");
    const emulator::Buffer<float> key_scale(driver::read<float>(count("key_scale_size")), "key_scale");
    const emulator::Buffer<float> value_scale(driver::read<float>(count("value_scale_size")), "value_scale");
    p.bytes = static_cast<ByteKind>(a["bytes"]), p.key_scale = key_scale.data, p.value_scale = value_scale.data;
    p.key_scale_outer = a["ks_outer"], p.key_scale_head = a["ks_head"];
    p.value_scale_outer = a["vs_outer"], p.value_scale_head = a["vs_head"];
    const int heads = p.kv_heads * p.group;
    const emulator::Buffer<C> sinks(driver::read<C>(a["sinks"] ? count("batch") * heads : 0), "sinks");
    const emulator::Buffer<C> slopes(driver::read<C>(a["slopes"] ? count("batch") * heads : 0), "slopes");
    const emulator::Buffer<unsigned char> mask(driver::read<unsigned char>(count("mask_size")), "mask");
    p.query = query.data, p.key = key.data, p.value = value.data, p.lengths = lengths.data;
    p.q_row = p.head_dim, p.q_head = p.q_len * p.q_row, p.q_batch = heads * p.q_head;
    p.k = {a["k_outer"], a["k_head"], a["k_row"]}, p.v = {a["v_outer"], a["v_head"], a["v_row"]};
    p.capacity = a["capacity"], p.ring = a["ring"], p.longest = p.ring ? int64_t{1} << 40 : p.capacity;
    if (a["longest"]) p.longest = a["longest"];
    p.max_blocks = a["max_blocks"], p.blocks = a["blocks"], p.block_size = a["block_size"];
    if (p.max_blocks) p.table = table.data;
    p.keys.left = bound(a["left"]), p.keys.right = bound(a["right"]), p.keys.prefix = a["prefix"];
    p.sinks_batch = p.slopes_batch = heads;
    if (a["sinks"]) p.sinks = sinks.data;
    if (a["slopes"]) p.slopes = slopes.data;
    p.mask_kind = static_cast<MaskElement>(a["mask"]), p.mask = mask.data;
    p.mask_bytes = p.mask_kind == MaskElement::boolean ? 1 : p.mask_kind == MaskElement::fp32 ? 4 : sizeof(T);
    p.mask_batch = a["mask_batch"], p.mask_head = a["mask_head"], p.mask_row = a["mask_row"];
    p.mask_col = a["mask_col"];
    describe_scores(p, a["scale"] / 1e6, {.softcap = a["softcap"] / 1e3});
    p.scaled_only = !p.slopes && p.cap == 0 && p.mask_kind == MaskElement::none;
    p.splits = a["splits"];

    const int units = p.batch * p.kv_heads * p.row_tiles, rows = p.batch * heads * p.q_len;
    const size_t parts = static_cast<size_t>(units) * p.splits * kTileRows;
    emulator::Buffer<T> out(static_cast<size_t>(rows) * p.v_head_dim, "out");
    emulator::Buffer<C> lse(rows, "lse"), part_out(parts * p.v_head_dim, "part_out"), stats(parts * 2, "part_stats");
    p.out = out.data, p.lse = lse.data, p.part_out = part_out.data, p.part_stats = stats.data;
    emulator::Buffer<uint32_t> arrivals(std::vector<uint32_t>(static_cast<size_t>(units), 0), "arrivals");
    if (a["joins"]) p.arrivals = arrivals.data;
#ifdef KERNEL
    emulator::launch(decode_mma<KERNEL>, dim3(units * p.splits), dim3(KERNEL::kThreads), KERNEL::kSmemBytes,
                     a.options(), p);
#else
#ifdef BYTES
    constexpr auto decode = decode_bytes_fma<T>;
#else
    constexpr auto decode = decode_fma<T>;
#endif
    const DecodeFmaShape<T, kBytes> shape(p.head_dim, p.v_head_dim);
    emulator::launch(decode, dim3(units * p.splits), dim3(shape.kThreads), shape.bytes(), a.options(), p,
                     a["chunked"] != 0);
#endif
    for (int i = 0; i < units; i++)
      if (arrivals.data[i]) throw emulator::Error("counts of arrivals were not left at zero");
    if (p.splits > 1 && !p.arrivals)
      emulator::launch(decode_merge<T>, dim3(rows), dim3(kMergeThreads), merge_smem<C>(p.splits, p.v_head_dim),
                       a.options(), p, kTileRows);
    driver::write(out);
    driver::write(lse);
  });
}
