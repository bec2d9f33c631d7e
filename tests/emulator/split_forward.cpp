// float32 on Hopper, as csrc/cuda/attention.cu calls it: planes, the products, and WideForward for what does not split.
// -DDIM: 64 or 128; -DALONE: without WideForward, which takes long to compile. stdin, stdout: as forward.cpp, then
// SplitPlanes::rare; `cut`: sums are cut off.
#include "driver.h"
//
#include "cuda/kernels/sm90_split_forward.cuh"
#include "cuda/kernels/split_planes.cuh"
#ifndef ALONE
#include "cuda/kernels/wide_forward.cuh"
#endif

using namespace attnjourney;
using Kernel = Sm90SplitForward<DIM>;
using S = Kernel::S;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const bool rows_first = a["rows_first"];
    const driver::Shape q{a["batch"], a["q_heads"], a["q_len"], a["head_dim"], rows_first};
    const driver::Shape k{q.batch, a["kv_heads"], a["kv_len"], q.dim, rows_first};
    const driver::Shape v{q.batch, k.heads, k.length, a["v_head_dim"], rows_first};
    const driver::Shape o{q.batch, q.heads, q.length, v.dim, rows_first};
    emulator::Buffer<float> query(driver::read<float>(q.size()), "query"), key(driver::read<float>(k.size()), "key");
    emulator::Buffer<float> value(driver::read<float>(v.size()), "value"), out(o.size(), "out");
    emulator::Buffer<float> lse(o.size() / o.dim, "lse");
    ForwardTask p{};
    const driver::Lengths lengths(p, a);
    p.query = query.data, p.key = key.data, p.value = value.data, p.out = out.data, p.lse = lse.data;
    p.query_strides = q.strides<Strides>(), p.key_strides = k.strides<Strides>();
    p.value_strides = v.strides<Strides>(), p.out_strides = o.strides<Strides>();
    p.batch = q.batch, p.q_heads = q.heads, p.group = q.heads / k.heads;
    p.head_dim = q.dim, p.v_head_dim = v.dim;
    const driver::Options<float> scale(p, a);

    constexpr int kRows = SplitSize<DIM>::kRows;
    const driver::Shape q2{q.batch, q.heads, q.length, 2 * DIM, false}, k2{q.batch, k.heads, k.length, 2 * DIM, false};
    SplitPlanes w{};
    w.kv_heads = k.heads, w.query_tiles = (q.length + kRows - 1) / kRows, w.key_tiles = (k.length + kRows - 1) / kRows;
    emulator::Buffer<unsigned char> queries(2 * q2.size(), "query planes"), keys(2 * k2.size(), "key planes");
    emulator::Buffer<unsigned char> values(2 * k2.size(), "value planes");
    const auto pairs = [&](int heads, int tiles) { return static_cast<size_t>(q.batch) * heads * tiles; };
    emulator::Buffer<float> query_scale(pairs(q.heads, w.query_tiles), "query scales");
    emulator::Buffer<float4> key_scale(pairs(k.heads, w.key_tiles), "key scales");
    emulator::Buffer<uint32_t> rare(std::vector<uint32_t>{0}, "rare");
    w.query = queries.data, w.key = keys.data, w.value = values.data;
    w.query_scale = query_scale.data, w.key_scale = key_scale.data, w.rare = rare.data;

    emulator::Options order = a.options();
    const auto blocks = static_cast<unsigned>(query_scale.size + 2 * key_scale.size);
    emulator::launch(split_planes<DIM>, dim3(blocks), dim3(SplitSize<DIM>::kThreads), SplitSize<DIM>::kSmemBytes, order,
                     p, w);
    plan_forward(p, S::kRows, 4);
    if (a["section"]) p.section = a["section"];
    emulator::Buffer<uint32_t> counter(std::vector<uint32_t>{0, 0}, "counter");
    p.counter = a["counter"] ? counter.data : nullptr;
    const auto map = [](const unsigned char* plane, const driver::Shape& shape, int rows) {
      return shape.map(reinterpret_cast<const Half*>(plane), rows);
    };
    const auto query_map = map(w.query, q2, 64);
    const Sm90ForwardMaps maps{query_map, map(w.key, k2, S::kKeys), map(w.value, k2, S::kKeys),
                               query_map, map(w.value, k2, 8),      map(w.value, k2, 1)};
    order.cut_sums = a["cut"];
    emulator::launch(sm90_split_forward<DIM>, dim3(std::min(a["grid"], p.total)), dim3(S::kThreads), S::kSmemBytes,
                     order, maps, p, w);
    if (counter.data[0] || counter.data[1]) throw emulator::Error("the tile counter was not left at zero");
#ifndef ALONE
    using Wide = WideForwardOf<float, DIM>;
    plan_forward(p, Wide::kRows, 4);
    emulator::launch(wide_forward_rest<Wide>, dim3(std::min(2, p.total)), dim3(Wide::kThreads), Wide::kSmemBytes, order,
                     p, w.rare);
#endif
    driver::write(out);
    driver::write(lse);
    driver::write(rare);
  });
}
