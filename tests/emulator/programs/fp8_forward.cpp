// Runs the Hopper forward over e4m3 of the Sm90Fp8Shape -DSHAPE=... . stdin: query, key, value as bytes, lengths,
// options, scales of query, key and value: [batch, heads, blocks], or with one_scale [batch, heads]. stdout: out
// (out_type 0 bfloat16, 1 float16, 2 float32), lse, stats.
#include "emulator/machine/driver.h"
//
#include "kernels/fp8_forward.h"

using namespace attnjourney;
using S = SHAPE;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    using Bytes = emulator::Buffer<unsigned char>;
    const driver::Shape q{a["batch"], a["q_heads"], a["q_len"], a["head_dim"], a["rows_first"] != 0};
    const driver::Shape k{q.batch, a["kv_heads"], a["kv_len"], q.dim, q.rows_first};
    const driver::Shape v{q.batch, k.heads, k.length, a["v_head_dim"], q.rows_first};
    const driver::Shape o{q.batch, q.heads, q.length, v.dim, q.rows_first};
    const auto bytes = [](const driver::Shape& s) { return driver::read<unsigned char>(s.size()); };
    const Bytes query(bytes(q), "query"), key(bytes(k), "key"), value(bytes(v), "value");
    const int item = a["out_type"] == 2 ? 4 : 2;
    const emulator::Buffer<uint16_t> out(o.size() * item / 2, "out");
    const emulator::Buffer<float> lse(o.size() / o.dim, "lse");
    const emulator::Buffer<RowStats<float>> stats(lse.size, "stats");
    Fp8Task p{};
    const driver::Lengths lengths(p, a);
    p.query = query.data, p.key = key.data, p.value = value.data, p.out = out.data, p.lse = lse.data;
    p.stats = stats.data;
    p.query_strides = q.strides<Strides>(), p.key_strides = k.strides<Strides>();
    p.value_strides = v.strides<Strides>(), p.out_strides = o.strides<Strides>();
    p.batch = q.batch, p.q_heads = q.heads, p.group = q.heads / k.heads;
    p.head_dim = q.dim, p.v_head_dim = p.value_columns = v.dim;
    p.out_type = static_cast<Fp8Out>(a["out_type"]);
    const driver::Options<unsigned char> options(p, a);
    const auto scales = [&](const driver::Shape& s, Fp8Scale& to, const char* name) {
      const int64_t blocks = a["one_scale"] ? 1 : (s.length + kFp8ScaleRows - 1) / kFp8ScaleRows;
      const size_t count = static_cast<size_t>(s.batch * s.heads * blocks);
      auto buffer = std::make_unique<emulator::Buffer<float>>(driver::read<float>(count), name);
      to = {buffer->data, s.heads * blocks, blocks, a["one_scale"] ? 0 : 1};
      return buffer;
    };
    const auto query_scale = scales(q, p.query_scale, "query_scale");
    const auto key_scale = scales(k, p.key_scale, "key_scale");
    const auto value_scale = scales(v, p.value_scale, "value_scale");
    plan_forward(p, S::kRows, 1);
    if (a["section"]) p.section = a["section"];
    const auto map = [](const driver::Shape& s, const void* data, int rows) {
      return emulator::tensor_map(data, s.strides<emulator::ElementStrides>(), s.batch, s.heads, s.length, s.dim, rows,
                                  1, S::kLine);
    };
    const Sm90Fp8Maps maps{map(q, p.query, 64), map(k, p.key, S::kKeys), map(v, p.value, S::kKeys)};
    emulator::Options how = a.options();
    how.cut_sums = a["cut"] != 0;
    emulator::launch(sm90_fp8_forward<S>, dim3(p.total), dim3(S::kThreads), S::kSmemBytes, how, maps, p);
    driver::write(out);
    driver::write(lse);
    driver::write(stats);
  });
}
