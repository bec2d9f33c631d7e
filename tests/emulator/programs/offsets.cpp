// Runs packed_offsets. stdin: the offsets, int64 (int32 where int32=1); stdout: int32, then
// the order of the sequences.
#include "cuda/kernels/common/packed_offsets.cuh"
#include "emulator/machine/driver.h"

using namespace attnjourney;

template <class Int>
void offsets(const driver::Arguments& a) {
  const int count = a["count"];
  emulator::Buffer<Int> given(driver::read<Int>(static_cast<size_t>(count)), "given");
  emulator::Buffer<int> out(given.size, "out"), order(2 * given.size - 1, "order");
  emulator::launch(packed_offsets<Int>, dim3(1), dim3(kOffsetsThreads), kOffsetsBytes, a.options(), given.data, count,
                   a["total"], out.data, order.data);
  driver::write(out);
  driver::write(order);
}

int main(int argc, char** argv) {
  return driver::run(argc, argv,
                     [](const driver::Arguments& a) { a["int32"] ? offsets<int>(a) : offsets<int64_t>(a); });
}
