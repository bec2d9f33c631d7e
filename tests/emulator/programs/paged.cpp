// Runs packed rows over a paged cache as csrc/cuda/attention/paged.cu does: the forward over pages, -DKERNEL=... (with
// -DFP32 one of fp32/forward.cuh), then decoding and its merge, -DDECODE=DecodeMma<...> or else in ordinary arithmetic.
// stdin: offsets of rows and keys, block table, query, key, value, sinks, slopes; stdout: out, lse.
#include "emulator/machine/driver.h"
//
#include "kernels/paged.h"

#ifdef DECODE
constexpr int kTileRows = DECODE::kRows;
#else
constexpr int kTileRows = DecodeFma<T>::kRows;
#endif
using Real = Compute<T>;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const auto count = [&](const char* name) { return static_cast<size_t>(a[name]); };
    const int total = a["q_len"], heads = a["q_heads"], kv_heads = a["kv_heads"], dim = a["head_dim"];
    const int v_dim = a["v_head_dim"], lanes = 16 / static_cast<int>(sizeof(T));
    const auto padded = [&](int d) { return (d + lanes - 1) / lanes * lanes; };
    ForwardTaskOf<Real> p{};
    const driver::Lengths offsets(p, a);
    const emulator::Buffer<int> table(driver::read<int>(count("batch") * count("max_blocks")), "block_table");
    const emulator::Buffer<T> query(driver::read<T>(static_cast<size_t>(total) * heads * padded(dim)), "query");
    const emulator::Buffer<T> key(driver::read<T>(count("key_size")), "key");
    const emulator::Buffer<T> value(driver::read<T>(count("value_size")), "value");
    p.batch = a["batch"], p.q_heads = heads, p.group = heads / kv_heads;
    const driver::Options<T, Real> options(p, a);
    emulator::Buffer<T> out(static_cast<size_t>(total) * heads * padded(v_dim), "out");
    emulator::Buffer<Real> lse(static_cast<size_t>(total) * heads, "lse");
    emulator::Buffer<RowStats<Real>> stats(lse.size, "stats");
    p.query = query.data, p.key = key.data, p.value = value.data, p.out = out.data, p.lse = lse.data;
    p.stats = stats.data, p.head_dim = padded(dim), p.v_head_dim = padded(v_dim);
    p.query_strides = {0, p.head_dim, int64_t{heads} * p.head_dim};
    p.out_strides = {0, p.v_head_dim, int64_t{heads} * p.v_head_dim};
    p.key_strides = {0, a["k_head"], a["k_row"]}, p.value_strides = {0, a["v_head"], a["v_row"]};
    const PagedKeys pages{table.data,   a["blocks"], a["block_size"], a["max_blocks"],   a["k_outer"],
                          a["v_outer"], dim,         v_dim,           a["chunked"] != 0, a["few_rows"]};
    plan_forward(p, KERNEL::kRows, sizeof(T));
#ifdef FP32
    constexpr auto forward = fp32_paged_forward<KERNEL>;
#else
    constexpr auto forward = sm80_paged_forward<KERNEL>;
#endif
    emulator::launch(forward, dim3(p.total), dim3(KERNEL::kThreads), KERNEL::kSmemBytes, a.options(), p, pages);

    DecodeTask d{};
    d.query = p.query, d.key = p.key, d.value = p.value, d.out = p.out, d.lse = p.lse;
    d.q_head = p.query_strides.head, d.q_row = p.query_strides.row;
    d.out_head = p.out_strides.head, d.out_row = p.out_strides.row;
    d.k = {pages.key_block, p.key_strides.head, p.key_strides.row};
    d.v = {pages.value_block, p.value_strides.head, p.value_strides.row};
    d.longest = d.capacity = p.kv_len, d.table = table.data, d.blocks = pages.blocks;
    d.block_size = pages.block_size, d.max_blocks = pages.max_blocks;
    d.batch = p.batch, d.kv_heads = kv_heads, d.group = p.group, d.q_len = total, d.head_dim = dim;
    d.v_head_dim = v_dim, d.keys = p.keys, d.bottom_right = p.bottom_right;
    d.mask_kind = MaskElement::none;
    describe_scores(d, a["scale"] ? a["scale"] / 1000.0 : 1 / std::sqrt(static_cast<double>(dim)),
                    {.softcap = a["softcap"] / 1000.0});
    d.sinks = p.scores.sinks, d.slopes = p.scores.slopes, d.sinks_batch = d.slopes_batch = heads;
    d.scaled_only = !d.slopes && d.cap == 0;
    d.cu_q = p.cu_q, d.cu_k = p.cu_k, d.few_rows = pages.few_rows, d.splits = a["splits"];
    if (a["through"]) {
      d.tiles = d.group * total / kTileRows + d.batch;
    } else {
      d.row_tiles = (d.group * std::min(d.few_rows, total) + kTileRows - 1) / kTileRows,
      d.tiles = d.row_tiles * d.batch;
    }
    const int tiles = kv_heads * d.tiles;
    const size_t rows = static_cast<size_t>(tiles) * d.splits * kTileRows;
    emulator::Buffer<Real> part_out(rows * v_dim, "part_out"), part_stats(rows * 2, "part_stats");
    d.part_out = part_out.data, d.part_stats = part_stats.data;
#ifdef DECODE
    emulator::launch(decode_mma<DECODE>, dim3(tiles * d.splits), dim3(DECODE::kThreads), DECODE::kSmemBytes,
                     a.options(), d);
#else
    const DecodeFmaShape<T> shape(dim, v_dim);
    emulator::launch(decode_fma<T>, dim3(tiles * d.splits), dim3(shape.kThreads), shape.bytes(), a.options(), d,
                     a["chunked"] != 0);
#endif
    if (d.splits > 1)
      emulator::launch(decode_merge<T>, dim3(tiles * kTileRows), dim3(kMergeThreads), merge_smem<Real>(d.splits, v_dim),
                       a.options(), d, kTileRows);
    driver::write(out);
    driver::write(lse);
  });
}
