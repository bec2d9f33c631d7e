// float32 on Hopper, as csrc/cuda/attention/attention.cu calls it: planes, the products, and Fp32Forward for what does
// not split. -DDIM: 64 or 128; -DALONE: without Fp32Forward, which takes long to compile. stdin, stdout: as
// forward_call.h, then Fp16x2Planes::needs_fallback; `cut`: sums are cut off.
#include "forward_call.h"
//
#include "kernels/fp16x2_forward.h"

using namespace attnjourney;
using Kernel = Sm90Fp16x2Forward<DIM>;
using S = Kernel::Shape;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    driver::ForwardCall<float, ForwardTask> c(a);
    ForwardTask& p = c.p;
    const auto &q = c.q, &k = c.k;
    constexpr int kRows = Fp16x2Size<DIM>::kRows;
    const driver::Shape q2{q.batch, q.heads, q.length, 2 * DIM, false}, k2{q.batch, k.heads, k.length, 2 * DIM, false};
    Fp16x2Planes w{};
    w.kv_heads = k.heads, w.query_tiles = (q.length + kRows - 1) / kRows, w.key_tiles = (k.length + kRows - 1) / kRows;
    emulator::Buffer<unsigned char> queries(2 * q2.size(), "query planes"), keys(2 * k2.size(), "key planes");
    emulator::Buffer<unsigned char> values(2 * k2.size(), "value planes");
    const auto pairs = [&](int heads, int tiles) { return static_cast<size_t>(q.batch) * heads * tiles; };
    emulator::Buffer<float> query_scale(pairs(q.heads, w.query_tiles), "query scales");
    emulator::Buffer<float4> key_scale(pairs(k.heads, w.key_tiles), "key scales");
    emulator::Buffer<uint32_t> needs_fallback(std::vector<uint32_t>{0}, "needs_fallback");
    w.query = queries.data, w.key = keys.data, w.value = values.data;
    w.query_scale = query_scale.data, w.key_scale = key_scale.data, w.needs_fallback = needs_fallback.data;

    emulator::Options order = a.options();
    const auto blocks = static_cast<unsigned>(query_scale.size + 2 * key_scale.size);
    emulator::launch(fp16x2_planes<DIM>, dim3(blocks), dim3(Fp16x2Size<DIM>::kThreads), Fp16x2Size<DIM>::kSmemBytes,
                     order, p, w);
    c.plan(a, S::kRows);
    const auto map = [](const unsigned char* plane, const driver::Shape& shape, int rows) {
      return shape.map(reinterpret_cast<const Half*>(plane), rows);
    };
    const auto query_map = map(w.query, q2, 64);
    const Sm90ForwardMaps maps{query_map, map(w.key, k2, S::kKeys), map(w.value, k2, S::kKeys),
                               query_map, map(w.value, k2, 8),      map(w.value, k2, 1)};
    order.cut_sums = a["cut"];
    emulator::launch(sm90_fp16x2_forward<DIM>, dim3(std::min(a["grid"], p.total)), dim3(S::kThreads), S::kSmemBytes,
                     order, maps, p, w);
#ifndef ALONE
    using Wide = Fp32ForwardOf<float, DIM>;
    c.plan(a, Wide::kRows);
    emulator::launch(fp32_forward_fallback<Wide>, dim3(std::min(2, p.total)), dim3(Wide::kThreads), Wide::kSmemBytes,
                     order, p, w.needs_fallback);
#endif
    c.finish();
    driver::write(needs_fallback);
  });
}
