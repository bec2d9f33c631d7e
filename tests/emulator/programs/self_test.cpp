// The emulator itself: each lambda is a kernel with a known outcome, in every order. Prints one line per failure.
#include <cstdio>
#include <string>

#include "emulator/machine/ptx_sm90.h"

namespace ptx = attnjourney::ptx;
using emulator::Order;

static int checked, failed;

// wanted: texts of which one must appear, with | between them
static bool matches(const std::string& got, std::string wanted) {
  for (size_t bar; (bar = wanted.find('|')) != std::string::npos; wanted.erase(0, bar + 1))
    if (got.find(wanted.substr(0, bar)) != std::string::npos) return true;
  return got.find(wanted) != std::string::npos;
}

template <class Kernel>
void expect(const char* name, const char* want, dim3 grid, dim3 block, size_t shared_bytes, Kernel kernel,
            int cluster = 1) {
  for (auto order : {Order::forward, Order::reverse, Order::random, Order::starve}) {
    std::string got = "ok";
    emulator::Options options;
    options.order = order, options.cluster = cluster;
    try {
      emulator::launch(kernel, grid, block, shared_bytes, options);
    } catch (const emulator::Error& e) {
      got = e.what();
    }
    checked++;
    if (matches(got, want)) continue;
    failed++;
    printf("FAIL %s, order %d: expected '%s', got '%s'\n", name, static_cast<int>(order), want, got.c_str());
  }
}

int main() {
  emulator::Buffer<float> x(std::vector<float>(256, 1.f), "x"), raw(256, "raw");
  float *px = x.data, *pr = raw.data;
  const auto floats = [] { return reinterpret_cast<float*>(ptx::dynamic_smem()); };

  expect("reductions from two blocks", "ok", 2, 64, 0, [=] { ptx::reduce_add(px, 1.f); });
  expect("reduction and plain store", "global-memory race", 2, 64, 0, [=] {
    if (blockIdx.x)
      px[0] = 1;
    else
      ptx::reduce_add(px, 1.f);
  });
  expect("two blocks store one word", "global-memory race", 2, 32, 0, [=] { px[threadIdx.x] = 2; });
  expect("one block reads another's store", "global-memory race", 2, 32, 0, [=] {
    if (blockIdx.x)
      px[threadIdx.x + 64] = px[threadIdx.x];
    else
      px[threadIdx.x] = 2;
  });
  expect("uninitialised global", "uninitialised global", 1, 32, 0, [=] { px[threadIdx.x] = pr[threadIdx.x]; });
  expect("out of bounds", "out of bounds of 'x'", 1, 32, 0, [=] { px[256 - 31 + threadIdx.x] = 1; });
  expect("uninitialised shared", "uninitialised shared", 1, 32, 256, [=] { px[threadIdx.x] = floats()[threadIdx.x]; });
  expect("past the end of shared memory", "shared-memory access out of bounds", 1, 32, 64,
         [=] { floats()[8 + threadIdx.x] = 1; });
  expect("a kilobyte past it", "shared-memory access out of bounds", 1, 32, 64,
         [=] { floats()[256 + threadIdx.x] = 1; });

  expect("exchange with a barrier", "ok", 1, 64, 256, [=] {
    floats()[threadIdx.x] = 1;
    __syncthreads();
    px[threadIdx.x] = floats()[63 - threadIdx.x];
  });
  expect("exchange without", "hared", 1, 64, 256, [=] {
    floats()[threadIdx.x] = 1;
    px[threadIdx.x] = floats()[63 - threadIdx.x];
  });
  expect("lanes exchange with syncwarp", "ok", 1, 32, 128, [=] {
    floats()[threadIdx.x] = 1;
    __syncwarp();
    px[threadIdx.x] = floats()[31 - threadIdx.x];
  });
  expect("lanes exchange with only a shuffle", "race", 1, 32, 128, [=] {
    floats()[threadIdx.x] = 1;
    ptx::shfl_xor(0.f, 1);
    px[threadIdx.x] = floats()[31 - threadIdx.x];
  });

  const auto pipeline = [=](bool wait_for_empty) {  // warp 0 fills one buffer twice, warp 1 reads it: full 1, empty 2
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 2; i++)
      if (threadIdx.x < 32) {
        if (i && wait_for_empty) ptx::bar_sync(2, 64);
        floats()[lane] = static_cast<float>(i);
        ptx::bar_arrive(1, 64);
      } else {
        ptx::bar_sync(1, 64);
        px[lane] = floats()[lane ^ 1];
        if (!i && wait_for_empty) ptx::bar_arrive(2, 64);
      }
  };
  expect("pipeline over named barriers", "ok", 1, 64, 128, [=] { pipeline(true); });
  expect("the same without 'empty'", "race|deadlock", 1, 64, 128, [=] { pipeline(false); });
  expect("named barrier with two counts", "barrier 1 used with", 1, 96, 0,
         [=] { ptx::bar_sync(1, threadIdx.x < 32 ? 64 : 96); });
  expect("exit before __syncthreads", "deadlock", 1, 64, 0, [=] {
    if (threadIdx.x == 5) return;
    __syncthreads();
  });
  expect("divergent __syncthreads", "divergent __syncthreads", 1, 64, 0, [=] {
    if (threadIdx.x < 32)
      __syncthreads();
    else
      ptx::bar_sync(0, 64);
  });
  expect("divergent warp", "divergent warp", 1, 32, 0, [=] {
    if (threadIdx.x < 16)
      ptx::shfl_xor(0.f, 1);
    else
      __syncwarp();
  });

  const auto copy = [=](bool wait) {
    const uint32_t dst = ptx::smem_addr(ptx::dynamic_smem());
    ptx::cp_async_16(dst + 16 * threadIdx.x, px + 4 * threadIdx.x, true);
    ptx::cp_async_commit();
    if (wait) ptx::cp_async_wait<0>();
    const float v = floats()[4 * threadIdx.x];
    if (!wait) ptx::cp_async_wait<0>();
    if (v != v) px[0] = v;
  };
  expect("cp.async", "ok", 1, 32, 512, [=] { copy(true); });
  expect("cp.async read before its wait", "in flight", 1, 32, 512, [=] { copy(false); });

  // one bulk load that completes on an mbarrier; `bytes` is what the barrier is told to expect
  const auto bulk = [=](bool wait, uint32_t bytes) {
    const uint32_t base = ptx::smem_addr(ptx::dynamic_smem()), bar = base + 512;
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(bar, 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(bar, bytes);
      ptx::bulk_load(base, px, 512, bar);
    }
    if (wait) ptx::mbarrier_wait(bar, 0);
    if (threadIdx.x >= 32 && floats()[threadIdx.x] < 0) px[0] = 0;
  };
  expect("bulk load", "ok", 1, 64, 520, [=] { bulk(true, 512); });
  expect("bulk load read before its barrier", "in flight|uninitialised", 1, 64, 520, [=] { bulk(false, 512); });
  expect("transaction count too large", "deadlock", 1, 64, 520, [=] { bulk(true, 528); });

  const auto bulk_out = [=](bool fence, bool wait) {
    const uint32_t base = ptx::smem_addr(ptx::dynamic_smem());
    floats()[threadIdx.x] = 0;
    if (fence) ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::bulk_reduce_add(px, base, 128);
      ptx::bulk_commit();
      if (wait) ptx::bulk_wait_read<0>();
    }
    __syncthreads();
    floats()[threadIdx.x] = 1;
    if (threadIdx.x == 0 && !wait) ptx::bulk_wait_read<0>();
  };
  expect("bulk reduction", "ok", 1, 32, 128, [=] { bulk_out(true, true); });
  expect("bulk reduction without the proxy fence", "without fence.proxy.async", 1, 32, 128,
         [=] { bulk_out(false, true); });
  expect("bulk source rewritten too early", "still reads it", 1, 32, 128, [=] { bulk_out(true, false); });

  // A B = 16 for ones of 64 x 16 and 16 x 64
  const auto product = [=](bool fence, bool wait, uint32_t b = 8192) {
    const uint32_t base = ptx::smem_addr(ptx::dynamic_smem());
    for (int i = 0; i < 32; i++)
      reinterpret_cast<uint32_t*>(ptx::dynamic_smem())[i * 128 + threadIdx.x] = ptx::pack2<attnjourney::Bf16>(1, 1);
    if (fence) ptx::fence_proxy_async();
    __syncthreads();
    const auto desc = [](uint32_t a) { return uint64_t{a >> 4} | uint64_t{64} << 32 | uint64_t{1} << 62; };
    float d[32];
    ptx::wgmma_fence();
    ptx::wgmma_ss_new<attnjourney::Bf16, 64, 0, 0>(d, desc(base), desc(base + b));
    ptx::wgmma_commit();
    if (wait) ptx::wgmma_wait<0>();
    if (!(d[5] == 16)) px[threadIdx.x + 256] = 0;
    if (!wait) ptx::wgmma_wait<0>();
  };
  expect("wgmma", "ok", 1, 128, 16384, [=] { product(true, true); });
  expect("wgmma without the proxy fence", "without fence.proxy.async", 1, 128, 16384, [=] { product(false, true); });
  expect("accumulator read before the wait", "out of bounds of 'x'", 1, 128, 16384, [=] { product(true, false); });
  for (uint32_t b : {16u << 10, 17u << 10, 34u << 10})
    expect("wgmma of what is past the end", "shared-memory access out of bounds", 1, 128, 16384,
           [=] { product(true, true, b); });

  // Two blocks of a cluster fill one row of each from two halves, twice. meet: before the first copy; release: the row,
  // before the second; stay: until that is there in both
  const emulator::TensorMap halves{reinterpret_cast<unsigned char*>(px), 1, 4, {128}, {64}, {4}, 0};
  const auto pair = [=](bool meet, bool release, bool stay, uint32_t blocks = 3) {
    const uint32_t base = ptx::smem_addr(ptx::dynamic_smem()), full = base + 512, empty = full + 8;
    const auto copy = [=] {
      const int rank = blockIdx.x % 2, c[4] = {rank * 64};
      ptx::mbarrier_arrive_expect_tx(full, 512);
      emulator::tma_multicast(base + rank * 256, halves, c, full, blocks, ptx::Site::here());
    };
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(full, 1);
      ptx::mbarrier_init(empty, 2);
    }
    if (meet)
      ptx::cluster_sync();
    else
      __syncthreads();
    if (threadIdx.x == 0) copy();
    if (threadIdx.x == 32) {
      ptx::mbarrier_wait(full, 0);
      if (floats()[100] != 1) px[256] = 0;
      for (int rank = 0; rank < 2; rank++) ptx::mbarrier_arrive_at(empty, rank);
    }
    if (threadIdx.x == 0) {
      ptx::mbarrier_wait(full, 0);
      if (release) ptx::mbarrier_wait(empty, 0);
      copy();
    }
    if (stay || blockIdx.x == 0) ptx::mbarrier_wait(full, 1);
    if (stay) ptx::cluster_sync();
  };
  expect("a cluster", "ok", 2, 128, 528, [=] { pair(true, true, true); }, 2);
  expect("four blocks in clusters", "ok", 4, 128, 528, [=] { pair(true, true, true); }, 2);
  expect("a block that has not started", "never initialised|race", 2, 128, 528, [=] { pair(false, true, true); }, 2);
  expect(
      "a stage of the other block filled too early", "race|in flight", 2, 128, 528, [=] { pair(true, false, true); },
      2);
  expect(
      "a half for one block alone", "deadlock|race|never initialised", 2, 128, 528, [=] { pair(true, true, true, 1); },
      2);
  expect(
      "a half for a third block", "the cluster has not the blocks 0x4", 2, 128, 528, [=] { pair(true, true, true, 4); },
      2);
  expect("a half for no block", "the cluster has not the blocks 0", 2, 128, 528, [=] { pair(true, true, true, 0); }, 2);
  expect("three blocks in clusters", "no multiple of its cluster", 3, 128, 528, [=] { pair(true, true, true); }, 2);
  expect(
      "arrival at a third block", "the cluster has no block 2", 2, 128, 528,
      [=] { ptx::mbarrier_arrive_at(ptx::smem_addr(ptx::dynamic_smem()), 2); }, 2);
  expect(
      "past the end of the first block", "shared-memory access out of bounds", 2, 128, 512,
      [=] { floats()[128 + 256 * (threadIdx.x / 64)] = 1; }, 2);

  // what the driver refuses
  const auto refused = [&](const char* name, const char* want, const auto& call) {
    std::string got = "ok";
    try {
      call();
    } catch (const emulator::Error& e) {
      got = e.what();
    }
    checked++;
    if (matches(got, want)) return;
    failed++;
    printf("FAIL %s: expected '%s', got '%s'\n", name, want, got.c_str());
  };
  const auto map = [=](const char* name, const char* want, int64_t offset, emulator::ElementStrides strides,
                       int64_t batch, int64_t length, int64_t rows) {
    refused(name, want, [=] {
      emulator::tensor_map(reinterpret_cast<const char*>(px) + offset, strides, batch, 2, length, 64, rows);
    });
  };
  map("a tensor map", "ok", 0, {0, 64, 128}, 1, 5, 64);
  map("no rows", "sizes from 1 to 2^32, got 0", 0, {0, 64, 128}, 1, 0, 64);
  map("an address between", "multiple of 16", 2, {0, 64, 128}, 1, 5, 64);
  map("strides of 8 bytes", "multiples of 16 bytes below 2^40, got 136", 0, {0, 68, 128}, 1, 5, 64);
  map("a stride of a terabyte", "below 2^40", 0, {int64_t{1} << 39, 64, 128}, 2, 5, 64);
  map("the stride of one item", "ok", 0, {3, 64, 128}, 1, 5, 64);
  map("boxes of 257 rows", "boxes from 1 to 256, got 257", 0, {0, 64, 128}, 1, 500, 257);
  refused("a block of a cluster that has exited", "has exited", [=] {  // in that order
    emulator::Options options;
    options.cluster = 2;
    emulator::launch([=] { pair(true, true, false); }, 2, 128, 528, options);
  });
  refused("1025 threads", "block or shared memory too large",
          [] { emulator::launch([] {}, 1, 1025, 0, emulator::Options{}); });
  refused("228 KB", "block or shared memory too large",
          [] { emulator::launch([] {}, 1, 32, 228 * 1024, emulator::Options{}); });

  printf("%d checked, %d failed\n", checked, failed);
  return failed != 0;
}
