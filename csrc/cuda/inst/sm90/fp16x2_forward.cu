#include "cuda/kernels/fp32/fp16x2_planes.cuh"
#include "cuda/kernels/sm90/fp16x2_forward.cuh"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"

namespace attnjourney {
namespace {

template <int D>
void launch_fp16x2_forward(ForwardTask p, const Fp16x2Planes& w, const Device& device, cudaStream_t stream) {
  using S = typename Sm90Fp16x2Forward<D>::S;
  const int64_t queries = int64_t{p.q_heads} * w.query_tiles, keys = int64_t{w.kv_heads} * w.key_tiles;
  launch_kernel(fp16x2_planes<D>, p.batch * (queries + 2 * keys), Fp16x2Size<D>::kThreads, Fp16x2Size<D>::kSmemBytes,
                stream, p, w);
  plan_forward(p, S::kRows, 4);
  const auto map = [&](const void* plane, int heads, int length, int rows) {
    const Strides dense{int64_t{heads} * length * 2 * D, int64_t{length} * 2 * D, 2 * D};
    return tensor_map(plane, dense, p.batch, heads, length, 2 * D, rows, false);
  };
  Sm90ForwardMaps maps{};
  maps.query = map(w.query, p.q_heads, p.q_len, 64);
  maps.key = map(w.key, w.kv_heads, p.kv_len, S::kKeys), maps.value = map(w.value, w.kv_heads, p.kv_len, S::kKeys);
  maps.value8 = map(w.value, w.kv_heads, p.kv_len, 8), maps.value1 = map(w.value, w.kv_heads, p.kv_len, 1);
  launch_kernel(sm90_fp16x2_forward<D>, p.total < device.multiprocessors ? p.total : device.multiprocessors,
                S::kThreads, S::kSmemBytes, stream, maps, p, w);
}

}  // namespace

void sm90_fp16x2_forward_float(ForwardTask p, const Fp16x2Planes& w, const Device& device, cudaStream_t stream) {
  if (backward_size(p.head_dim, p.v_head_dim) == 64) return launch_fp16x2_forward<64>(p, w, device, stream);
  launch_fp16x2_forward<128>(p, w, device, stream);
}

}  // namespace attnjourney
