// The conformance program run by the emulator: its answers are those of the host twins.
#include "emulator/machine/ptx_fp32.h"
#include "emulator/machine/ptx_sm90.h"
//
#include "emulator/conformance/conformance_fp16x2.h"
#include "emulator/conformance/conformance_fp32.h"
#include "emulator/conformance/conformance_fp8.h"

struct EmulatedHost {
  template <class T>
  using Buffer = emulator::Buffer<T>;
  template <class F>
  static void launch(int shared_bytes, F f) {
    emulator::launch([f] { f(); }, dim3(1), dim3(128), static_cast<size_t>(shared_bytes), emulator::Options{});
  }
  template <class F>
  static void launch_pair(int shared_bytes, F f) {
    emulator::Options options;
    options.cluster = 2;
    emulator::launch([f] { f(); }, dim3(2), dim3(128), static_cast<size_t>(shared_bytes), options);
  }
  static emulator::TensorMap map(const uint16_t* data, int heads, int length, int dim, int rows) {
    return emulator::tensor_map(data, {0, int64_t{dim} * length, dim}, 1, heads, length, dim, rows);
  }
};

int main() {
  try {
    conformance::Program<EmulatedHost>::sm80();
    conformance::Fp32Program<EmulatedHost>::run();
    conformance::Fp16x2Program<EmulatedHost>::sm80();
    conformance::Program<EmulatedHost>::sm90();
    conformance::Fp16x2Program<EmulatedHost>::run();
    conformance::Fp8Program<EmulatedHost>::run();
  } catch (const emulator::Error& e) {
    printf("FAIL %s\n", e.what());
    return 1;
  }
  printf("%d of %d as expected\n", conformance::checked - conformance::failed, conformance::checked);
  return conformance::failed != 0;
}
