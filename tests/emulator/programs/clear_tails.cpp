// Runs clear_tails on [rows, heads, words] and [heads, rows, 2]. stdin: both, and where the rows begin; stdout: both.
// words: of the first; its words are `even` and `odd`, those of the second zeros.
#include "cuda/kernels/common/clear_tails.cuh"
#include "emulator/machine/driver.h"

using namespace attnjourney;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const int rows = a["rows"], heads = a["heads"], words = a["words"];
    const auto size = [&](int n) { return static_cast<size_t>(rows) * heads * n; };
    emulator::Buffer<uint32_t> x(driver::read<uint32_t>(size(words)), "x"), y(driver::read<uint32_t>(size(2)), "y");
    emulator::Buffer<int> begin(driver::read<int>(1), "begin");
    Tails tails{};
    tails.tail[0] = {.data = reinterpret_cast<unsigned char*>(x.data),
                     .head = words * 4,
                     .row = heads * words * 4,
                     .heads = heads,
                     .rows = rows,
                     .words = words,
                     .begin = begin.data,
                     .even = static_cast<uint32_t>(a["even"]),
                     .odd = static_cast<uint32_t>(a["odd"])};
    tails.tail[2] = {.data = reinterpret_cast<unsigned char*>(y.data),
                     .head = rows * 8,
                     .row = 8,
                     .heads = heads,
                     .rows = rows,
                     .words = 2,
                     .begin = begin.data,
                     .even = 0,
                     .odd = 0};
    emulator::launch(clear_tails, dim3(kTails * kTailBlocks), dim3(kTailThreads), 16, a.options(), tails);
    driver::write(x);
    driver::write(y);
  });
}
