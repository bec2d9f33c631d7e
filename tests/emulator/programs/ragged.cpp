// How blocks share out all sequences of a call (decode/ragged_shares.cuh). stdin: lengths; stdout: of each group where
// its share begins and ends.
#include "emulator/machine/driver.h"
//
#include "kernels/ragged.h"

using namespace attnjourney;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    DecodeTask p{};
    p.batch = a["batch"], p.splits = a["groups"], p.q_len = 1, p.rows = 1;
    p.capacity = a["capacity"], p.longest = p.capacity;
    p.keys.left = Ranges::unbounded, p.keys.right = Ranges::unbounded;
    emulator::Buffer<int64_t> lengths(driver::read<int64_t>(static_cast<size_t>(p.batch)), "lengths");
    p.lengths = lengths.data;
    emulator::Buffer<int> cuts(static_cast<size_t>(4 * p.splits), "cuts");
    emulator::launch(ragged_shares<DecodeTask>, dim3(static_cast<unsigned>(p.splits)), dim3(kRaggedThreads), 256,
                     a.options(), p, cuts.data);
    driver::write(cuts);
  });
}
