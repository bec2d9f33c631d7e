// Runs the kernel that writes weights, named by -DKERNEL=... (an AttentionWeights). stdin: query, key, lse, stats,
// rows, heads, lengths, options; stdout: weights.
#include "emulator/machine/driver.h"
//
#include "kernels/weights.h"

using namespace attnjourney;
using Kernel = KERNEL;
using Element = Kernel::T;
using C = Kernel::C;
struct Strides {
  int64_t batch, head, row;
};

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const driver::Shape q{a["batch"], a["q_heads"], a["q_len"], a["head_dim"], a["rows_first"] != 0};
    const driver::Shape k{q.batch, a["kv_heads"], a["kv_len"], q.dim, q.rows_first};
    emulator::Buffer<Element> query(driver::read<Element>(q.size()), "query"),
        key(driver::read<Element>(k.size()), "key");
    emulator::Buffer<C> lse(driver::read<C>(q.size() / q.dim), "lse");
    emulator::Buffer<RowStats<C>> stats(driver::read<RowStats<C>>(a["stats"] ? lse.size : 0), "stats");
    const auto n_rows = static_cast<size_t>(a["n_rows"]), n_heads = static_cast<size_t>(a["n_heads"]);
    emulator::Buffer<int64_t> rows(driver::read<int64_t>(n_rows), "rows"),
        heads(driver::read<int64_t>(n_heads), "heads");
    emulator::Buffer<Element> out(q.batch * n_heads * n_rows * k.length, "out");
    WeightsTask<C> p{};
    const driver::Lengths lengths(p, a);
    const auto operand = [](const void* data, const driver::Shape& s, int group) {
      const Strides strides = s.strides<Strides>();
      return WeightsOperand{data, {strides.batch}, strides.head, strides.row, group};
    };
    p.query = operand(query.data, q, 1), p.key = operand(key.data, k, q.heads / k.heads);
    p.lse = lse.data, p.stats = a["stats"] ? stats.data : nullptr, p.rows = rows.data, p.heads = heads.data,
    p.out = out.data;
    p.batch = q.batch, p.q_heads = q.heads, p.head_dim = q.dim;
    p.n_rows = a["n_rows"], p.n_heads = a["n_heads"];
    const driver::Options<Element> options(p, a);
    constexpr double kLog2E = 1.4426950408889634;
    const double unit = a["mask"] > 1 ? 1 : kLog2E, softcap = a["softcap"] / 1000.0;
    if (softcap > 0)
      p.cap_factor =
          static_cast<C>(a["scale"] ? a["scale"] / 1000.0 / softcap : 1 / std::sqrt(double(p.head_dim)) / softcap);
    p.unit = static_cast<C>(unit), p.exponent = static_cast<C>(kLog2E / unit);
    p.softcap = static_cast<C>(softcap * unit);
    p.scale = static_cast<C>((a["scale"] ? a["scale"] / 1000.0 : 1 / std::sqrt(double(p.head_dim))) * unit);
    std::vector<double> slopes(static_cast<size_t>(p.batch) * p.q_heads);
    if (p.scores.slopes) std::copy_n(p.scores.slopes, slopes.size(), slopes.begin());
    emulator::Buffer<double> wide(slopes, "slopes");
    if (p.scores.slopes) p.slopes = wide.data;
    p.scores.slopes = nullptr;
    const auto blocks = weights_blocks(p.n_rows, p.kv_len, int64_t{p.batch} * p.n_heads);
    emulator::launch(attention_weights<Kernel>, dim3(static_cast<unsigned>(blocks)), dim3(Kernel::kThreads),
                     Kernel::kSmemBytes, a.options(), p);
    driver::write(out);
  });
}
