// What every function of csrc/cuda/ptx does, on inputs whose answers are known: run on the device (conformance.cu) it
// shows that the emulator's twins model the instructions rightly; run by the emulator (conformance.cpp), that the
// answers are those of the twins. One warpgroup a test; `host` supplies Buffer, launch and map.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace conformance {

namespace ptx = attnjourney::ptx;
using attnjourney::Bf16;
using attnjourney::Half;

inline int checked = 0, failed = 0;

inline void compare(const std::string& name, const float* got, const std::vector<float>& want, float tolerance = 0) {
  checked++;
  for (size_t i = 0; i < want.size(); i++) {
    const float d = got[i] > want[i] ? got[i] - want[i] : want[i] - got[i];
    if (got[i] == want[i] || d <= tolerance * (want[i] < 0 ? -want[i] : want[i])) continue;
    failed++;
    printf("FAIL %s: element %zu is %g, expected %g\n", name.c_str(), i, static_cast<double>(got[i]),
           static_cast<double>(want[i]));
    return;
  }
}

// small whole numbers: sums of their products are exact in every order
__host__ __device__ inline int small(int i, int j) { return (3 * i + 5 * j) % 7 - 3; }

template <class T>
__device__ uint16_t bits_of(int v) {
  return static_cast<uint16_t>(ptx::pack2<T>(static_cast<float>(v), 0.f));
}
template <class T>
__device__ float value_of(uint16_t bits) {
  return ptx::unpack2<T>(bits).x;
}
// element (row, col) of a panel of 64 columns with 128-byte swizzle
__device__ inline uint16_t* in_panel(unsigned char* panel, int row, int col) {
  return reinterpret_cast<uint16_t*>(panel + row * 128 + ((col / 8 ^ (row & 7)) << 4)) + col % 8;
}
__device__ inline uint64_t descriptor(uint32_t addr, int panel) {
  return uint64_t(addr >> 4 | uint32_t(panel >> 4) << 16) | uint64_t(1u << 30 | 1024 >> 4) << 32;
}

struct CopyAsync {
  const float* in;
  float* out;
  __device__ void operator()() const {
    const int t = threadIdx.x;
    ptx::cp_async_16(ptx::smem_addr(ptx::dynamic_smem()) + 16 * t, in + 4 * t, t % 2 == 0);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    for (int i = 0; i < 4; i++) out[4 * t + i] = reinterpret_cast<float*>(ptx::dynamic_smem())[4 * t + i];
  }
};

struct CopyAsync4 {
  const float* in;
  float* out;
  __device__ void operator()() const {
    const int t = threadIdx.x;
    ptx::cp_async_4(ptx::smem_addr(ptx::dynamic_smem()) + 4 * t, in + t, t % 2 == 0);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    out[t] = reinterpret_cast<float*>(ptx::dynamic_smem())[t];
  }
};

struct Matrices {  // ldmatrix, transposed or not, and stmatrix: four 8 x 8 matrices a warp; element number as value
  float* out;
  int kind;  // 0 ldmatrix, 1 ldmatrix.trans, 2 stmatrix
  __device__ void operator()() const {
    if (threadIdx.x >= 32) return;
    const int t = threadIdx.x;
    uint16_t* at = reinterpret_cast<uint16_t*>(ptx::dynamic_smem());
    const uint32_t row = ptx::smem_addr(at) + 16 * t;
    uint32_t r[4];
    if (kind == 2) {
      for (int i = 0; i < 4; i++)
        r[i] = static_cast<uint32_t>(64 * i + 2 * t) | static_cast<uint32_t>(64 * i + 2 * t + 1) << 16;
      ptx::stmatrix_x4(row, r);
      __syncwarp();
      for (int i = 0; i < 8; i++) out[8 * t + i] = at[8 * t + i];
      return;
    }
    for (int i = 0; i < 8; i++) at[8 * t + i] = static_cast<uint16_t>(8 * t + i);
    __syncwarp();
    if (kind)
      ptx::ldmatrix_x4_trans(r, row);
    else
      ptx::ldmatrix_x4(r, row);
    for (int i = 0; i < 4; i++) {
      out[64 * i + 2 * t] = static_cast<float>(r[i] & 0xffff);
      out[64 * i + 2 * t + 1] = static_cast<float>(r[i] >> 16);
    }
  }
};

template <class T>
struct Mma {
  float* out;  // [16][8]
  __device__ void operator()() const {
    if (threadIdx.x >= 32) return;
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const auto pair = [](int a, int b) { return ptx::pack2<T>(static_cast<float>(a), static_cast<float>(b)); };
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; i++) {
      const int row = g + 8 * (i & 1), k = 2 * t + 8 * (i >> 1);
      a[i] = pair(small(row, k), small(row, k + 1));
    }
    for (int i = 0; i < 2; i++) b[i] = pair(small(2 * t + 8 * i, g), small(2 * t + 8 * i + 1, g));
    float d[4] = {1, 1, 1, 1};
    ptx::mma_m16n8k16<T>(d, a, b[0], b[1]);
    for (int i = 0; i < 4; i++) out[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = d[i];
  }
};

struct Scalars {
  const float* in;
  float* out;
  __device__ void operator()() const {
    const int t = threadIdx.x;
    out[t] = ptx::exp2(in[t]);
    out[128 + t] = ptx::log2(in[t] * in[t] + 1.f);
    out[256 + t] = static_cast<float>(ptx::pack2<Bf16>(in[t], 1.f) & 0xffff);
    out[384 + t] = static_cast<float>(ptx::pack2<Half>(in[t], 1.f) & 0xffff);
    out[512 + t] = ptx::unpack2<Bf16>(0x40404000u).y + ptx::unpack2<Half>(0x44004200u).x;
    out[640 + t] = ptx::shfl_xor(static_cast<float>(t), 5);
    out[768 + t] = static_cast<float>(ptx::uniform(t));
    out[896 + t] = (ptx::any(t == 33) ? .5f : 1.f) * static_cast<float>(ptx::ballot(t == 33));
    out[1024 + t] = ptx::reciprocal(in[t] * in[t] + 1.f);
    out[1152 + t] = static_cast<float>(ptx::shfl(static_cast<uint32_t>(t), (t % 32 & ~3) | 2));
    out[1280 + t] = static_cast<float>(ptx::first_bit(ptx::ballot(t % 32 == 5 + t / 32 || t % 32 > 20)));
    // number t of e4m3, the first ones of which are subnormal in T too; t - 128
    const float2 b = ptx::unpack2<Bf16>(ptx::fma2<Bf16>(0x43000000u | t << 16 | t << 4, 0x3f807b80u, 0xc3808000u));
    const float2 h = ptx::unpack2<Half>(ptx::fma2<Half>(0x64000000u | t << 16 | t << 7, 0x3c005c00u, 0xe4808000u));
    out[1408 + t] = b.x, out[1536 + t] = h.x, out[1664 + t] = b.y, out[1792 + t] = h.y;
    out[1920 + t] = static_cast<float>(ptx::byte_permute(0x03020100u + t, 0x4243u));
  }
};

struct Additions {
  float* out;         // [0] sum, [4..8) vector sum, [8] of the last to come, [9] of the one that sets the last bit
  uint32_t* counter;  // and bits
  __device__ void operator()() const {
    ptx::reduce_add(out, 1.f);
    ptx::reduce_add_v4(out + 4, 1.f, 2.f, 3.f, 4.f);
    if (ptx::atomic_add(counter, 2) == 254) out[8] = 1.f;
    const uint32_t bit = 1u << threadIdx.x % 32, before = ptx::atomic_or(counter + 1, bit);
    if (ptx::count_bits(before) == 31 && !(before & bit)) out[9] = 1.f;
  }
};

struct Barriers {  // warps 0 and 1 hand a row to warps 2 and 3
  float* out;
  __device__ void operator()() const {
    float* row = reinterpret_cast<float*>(ptx::dynamic_smem());
    const int t = threadIdx.x;
    if (t < 64) {
      row[t] = static_cast<float>(t);
      ptx::bar_arrive(3, 128);
    } else {
      ptx::bar_sync(3, 128);
      out[t - 64] = row[127 - t];
    }
  }
};

template <class Map>
struct TmaLoad {  // 16 rows from row 8 on, columns from 64 on, of head 1; single: row by row, each by a box of its own
  Map map;
  float* out;  // [16][64]
  bool single;
  __device__ void operator()() const {
    unsigned char* panel = ptx::dynamic_smem();
    const uint32_t to = ptx::smem_addr(panel), bar = to + 2048;
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(bar, 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(bar, 2048);
      if (single)
        for (int r = 0; r < 16; r++) ptx::tma_load_4d(to + r * 128, &map, 64, 1, 8 + r, 0, bar);
      else
        ptx::tma_load_4d(to, &map, 64, 1, 8, 0, bar);
    }
    ptx::mbarrier_wait(bar, 0);
    for (int i = threadIdx.x; i < 1024; i += 128) out[i] = *in_panel(panel, i / 64, i % 64);
  }
};

template <class Map>
struct Multicast {  // the rows of TmaLoad in both blocks of a cluster, each of which brings eight; then both meet
  Map map;          // boxes of eight rows
  float* out;       // [2][16][64]
  __device__ void operator()() const {
    unsigned char* panel = ptx::dynamic_smem();
    const uint32_t to = ptx::smem_addr(panel), full = to + 2048, read = full + 8;
    const int rank = static_cast<int>(blockIdx.x);
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(full, 1);
      ptx::mbarrier_init(read, 2);
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(full, 2048);
      ptx::tma_multicast_4d(to + rank * 1024, &map, 64, 1, 8 + 8 * rank, 0, full, 3);
    }
    ptx::mbarrier_wait(full, 0);
    for (int i = threadIdx.x; i < 1024; i += 128) out[rank * 1024 + i] = *in_panel(panel, i / 64, i % 64);
    __syncthreads();
    if (threadIdx.x == 0)
      for (int r = 0; r < 2; r++) ptx::mbarrier_arrive_at(read, r);
    ptx::mbarrier_wait(read, 0);
  }
};

template <class Map>
struct TmaStore {
  Map map;
  __device__ void operator()() const {
    unsigned char* panel = ptx::dynamic_smem();
    for (int i = threadIdx.x; i < 1024; i += 128) *in_panel(panel, i / 64, i % 64) = static_cast<uint16_t>(5000 + i);
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::tma_store_4d(&map, ptx::smem_addr(panel), 64, 1, 8, 0);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
  }
};

struct Bulk {
  const float* in;
  float* out;  // out[i] += 2 in[i]
  __device__ void operator()() const {
    float* row = reinterpret_cast<float*>(ptx::dynamic_smem());
    const uint32_t to = ptx::smem_addr(row), bar = to + 512;
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(bar, 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(bar, 512);
      ptx::bulk_load(to, in, 512, bar);
    }
    ptx::mbarrier_wait(bar, 0);
    row[threadIdx.x] *= 2;
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::bulk_reduce_add(out, to, 512);
      ptx::bulk_commit();
      ptx::bulk_wait<0>();
    }
  }
};

// d[m][n] = 1 + sum over 64 k of a(m, k) b(n, k). TransA, TransB: stored with k as rows. FromRegisters: A is.
template <class T, int N, int TransA, int TransB, bool FromRegisters>
struct Wgmma {
  float* out;  // [64][N]
  __device__ void operator()() const {
    const int tid = threadIdx.x, g = tid % 32 / 4, t = tid % 4, row = tid / 32 * 16 + g;
    unsigned char *a = ptx::dynamic_smem(), *b = a + 8192;
    for (int i = tid; i < 64 * 64; i += 128)
      *in_panel(a, i / 64, i % 64) = bits_of<T>(TransA ? small(i % 64, i / 64) : small(i / 64, i % 64));
    for (int i = tid; i < N * 64; i += 128) {
      const int n = i / 64, k = i % 64;
      uint16_t* at = TransB ? in_panel(b + n / 64 * 8192, k, n % 64) : in_panel(b, n, k);
      *at = bits_of<T>(small(n + 2, k));
    }
    ptx::fence_proxy_async();
    __syncthreads();
    const uint64_t da = descriptor(ptx::smem_addr(a), 8192), db = descriptor(ptx::smem_addr(b), 8192);
    constexpr int kStepA = TransA ? 128 : 2, kStepB = TransB ? 128 : 2;
    float d[N / 2];
    for (int i = 0; i < N / 2; i++) d[i] = 1.f;
    uint32_t regs[4][4];
    for (int kk = 0; kk < 4; kk++)
      for (int q = 0; q < 4; q++) {
        const int r = row + 8 * (q & 1), k = 16 * kk + 2 * t + 8 * (q >> 1);
        regs[kk][q] = ptx::pack2<T>(static_cast<float>(small(r, k)), static_cast<float>(small(r, k + 1)));
      }
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; kk++) {
      if constexpr (FromRegisters)
        ptx::wgmma_rs<T, N, TransB>(d, regs[kk], db + kk * kStepB, true);
      else
        ptx::wgmma_ss<T, N, TransA, TransB>(d, da + kk * kStepA, db + kk * kStepB, true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::keep(d);
    for (int i = 0; i < N / 2; i++) out[(row + 8 * (i >> 1 & 1)) * N + i / 4 * 8 + 2 * t + (i & 1)] = d[i];
  }
};

template <class Host>
struct Program {
  template <class T>
  using Buffer = typename Host::template Buffer<T>;

  static std::vector<float> iota(int n) {
    std::vector<float> x(static_cast<size_t>(n));
    for (int i = 0; i < n; i++) x[static_cast<size_t>(i)] = static_cast<float>(i);
    return x;
  }
  template <class T, int N, int TransA, int TransB, bool FromRegisters>
  static void wgmma(const char* name) {
    Buffer<float> out(std::vector<float>(64 * N, 0.f), "out");
    Host::launch(8192 + 128 * N, Wgmma<T, N, TransA, TransB, FromRegisters>{out.data});
    std::vector<float> want;
    for (int m = 0; m < 64; m++)
      for (int n = 0; n < N; n++) {
        int sum = 1;
        for (int k = 0; k < 64; k++) sum += small(m, k) * small(n + 2, k);
        want.push_back(static_cast<float>(sum));
      }
    compare(name, out.data, want);
  }
  template <class T>
  static void mma(const char* name) {
    Buffer<float> out(std::vector<float>(128, 0.f), "out");
    Host::launch(0, Mma<T>{out.data});
    std::vector<float> want;
    for (int m = 0; m < 16; m++)
      for (int n = 0; n < 8; n++) {
        int sum = 1;
        for (int k = 0; k < 16; k++) sum += small(m, k) * small(k, n);
        want.push_back(static_cast<float>(sum));
      }
    compare(name, out.data, want);
  }

  static void sm80() {
    Buffer<float> in(iota(512), "in"), out(std::vector<float>(2048, -1.f), "out");
    Host::launch(2048, CopyAsync{in.data, out.data});
    std::vector<float> want;
    for (int i = 0; i < 512; i++) want.push_back(i / 4 % 2 ? 0.f : static_cast<float>(i));
    compare("cp.async", out.data, want);
    Host::launch(512, CopyAsync4{in.data, out.data});
    want.clear();
    for (int i = 0; i < 128; i++) want.push_back(i % 2 ? 0.f : static_cast<float>(i));
    compare("cp.async, 4 bytes", out.data, want);

    for (int kind = 0; kind < 2; kind++) {
      Host::launch(512, Matrices{out.data, kind});
      want.clear();
      for (int i = 0; i < 4; i++)
        for (int t = 0; t < 32; t++)
          for (int e = 0; e < 2; e++) {
            const int r = kind ? t % 4 * 2 + e : t / 4, c = kind ? t / 4 : t % 4 * 2 + e;
            want.push_back(static_cast<float>(64 * i + 8 * r + c));
          }
      compare(kind ? "ldmatrix.trans" : "ldmatrix", out.data, want);
    }
    mma<Bf16>("mma bf16");
    mma<Half>("mma f16");
    std::vector<float> x;
    for (int i = 0; i < 128; i++) x.push_back((static_cast<float>(i) - 100.f) / 7.f);
    x[0] = 1.00390625f, x[1] = 1.01171875f, x[2] = 1.00048828125f, x[3] = 65520.f;  // ties; the end of fp16
    Buffer<float> numbers(x, "numbers");
    Host::launch(0, Scalars{numbers.data, out.data});
    std::vector<float> power, logarithm, pairs, shuffled, first, found, inverse, third, lowest, bytes, whole, moved;
    for (int i = 0; i < 128; i++) {
      power.push_back(static_cast<float>(std::exp2(static_cast<double>(x[static_cast<size_t>(i)]))));
      logarithm.push_back(static_cast<float>(std::log2(
          static_cast<double>(x[static_cast<size_t>(i)]) * static_cast<double>(x[static_cast<size_t>(i)]) + 1.0)));
      pairs.push_back(6.f);
      shuffled.push_back(static_cast<float>(i ^ 5));
      first.push_back(static_cast<float>(i / 32 * 32));
      found.push_back(i / 32 == 1 ? 1.f : 0.f);
      const float number = x[static_cast<size_t>(i)];
      inverse.push_back(1.f / (number * number + 1.f));
      third.push_back(static_cast<float>(i / 4 * 4 + 2));
      lowest.push_back(static_cast<float>(5 + i / 32));
      const float fraction = static_cast<float>(i % 8) / 8.f;
      bytes.push_back(i < 8 ? fraction / 64.f : std::ldexp(1.f + fraction, i / 8 - 7));
      whole.push_back(static_cast<float>(i - 128));
      moved.push_back(static_cast<float>(0x00020003));
    }
    power[3] = HUGE_VALF;
    compare("ex2.approx", out.data, power, 1e-6f);
    compare("lg2.approx", out.data + 128, logarithm, 2e-6f);
    compare("cvt bf16, ties to even", out.data + 256, {0x3f80, 0x3f82});
    compare("cvt f16, ties to even, overflow", out.data + 386, {0x3c00, 0x7c00});
    compare("unpack", out.data + 512, pairs);
    compare("shfl.bfly", out.data + 640, shuffled);
    compare("shfl.idx", out.data + 768, first);
    compare("vote.any", out.data + 896, found);
    compare("rcp.approx", out.data + 1024, inverse, 1e-6f);
    compare("shfl.idx of a lane", out.data + 1152, third);
    compare("vote.ballot, its first bit", out.data + 1280, lowest);
    compare("fma.bf16x2, subnormal", out.data + 1408, bytes);
    compare("fma.f16x2, subnormal", out.data + 1536, bytes);
    compare("fma.bf16x2", out.data + 1664, whole);
    compare("fma.f16x2", out.data + 1792, whole);
    compare("prmt", out.data + 1920, moved);

    Buffer<float> sums(std::vector<float>(12, 0.f), "sums");
    Buffer<uint32_t> counter(std::vector<uint32_t>{0, 0}, "counter");
    Host::launch(0, Additions{sums.data, counter.data});
    compare("additions", sums.data, {128, 0, 0, 0, 128, 256, 384, 512, 1, 1});
    Host::launch(256, Barriers{out.data});
    want.clear();
    for (int i = 0; i < 64; i++) want.push_back(static_cast<float>(63 - i));
    compare("bar.arrive, bar.sync", out.data, want);
  }

  static void sm90() {
    Buffer<float> out(std::vector<float>(1024, -1.f), "out");
    Host::launch(512, Matrices{out.data, 2});
    std::vector<float> want;
    for (int i = 0; i < 256; i++) want.push_back(static_cast<float>(i));
    compare("stmatrix", out.data, want);

    constexpr int kHeads = 2, kLength = 20, kDim = 72;
    std::vector<uint16_t> numbers(kHeads * kLength * kDim);
    for (size_t i = 0; i < numbers.size(); i++) numbers[i] = static_cast<uint16_t>(i + 1);
    Buffer<uint16_t> tensor(numbers, "tensor");
    want.clear();
    for (int i = 0; i < 1024; i++) {
      const int row = 8 + i / 64, col = 64 + i % 64;
      const bool inside = row < kLength && col < kDim;
      want.push_back(inside ? static_cast<float>((kLength + row) * kDim + col + 1) : 0.f);
    }
    const auto map = [&](int rows) { return Host::map(tensor.data, kHeads, kLength, kDim, rows); };
    using Map = decltype(map(1));
    Host::launch(2048 + 8, TmaLoad<Map>{map(16), out.data, false});
    compare("TMA load", out.data, want);
    Host::launch(2048 + 8, TmaLoad<Map>{map(1), out.data, true});
    compare("TMA load of single rows", out.data, want);
    Buffer<float> both(std::vector<float>(2048, -1.f), "both");
    Host::launch_pair(2048 + 16, Multicast<Map>{map(8), both.data});
    std::vector<float> twice = want;
    twice.insert(twice.end(), want.begin(), want.end());
    compare("TMA load to a cluster", both.data, twice);
    Host::launch(2048, TmaStore<Map>{map(16)});
    checked++;
    for (int h = 0, i = 0; h < kHeads; h++)
      for (int r = 0; r < kLength; r++)
        for (int c = 0; c < kDim; c++, i++) {
          const bool written = h == 1 && r >= 8 && c >= 64;
          const int expected = written ? 5000 + (r - 8) * 64 + c - 64 : i + 1;
          if (tensor.data[i] == expected) continue;
          failed++;
          printf("FAIL TMA store: element %d is %d, expected %d\n", i, tensor.data[i], expected);
          return;
        }

    Buffer<float> in(iota(128), "in"), sum(iota(128), "sum");
    Host::launch(512 + 8, Bulk{in.data, sum.data});
    want.clear();
    for (int i = 0; i < 128; i++) want.push_back(static_cast<float>(3 * i));
    compare("bulk load, bulk reduction", sum.data, want);

    wgmma<Bf16, 32, 0, 0, false>("wgmma SS bf16 n32");
    wgmma<Half, 32, 0, 0, false>("wgmma SS f16 n32");
    wgmma<Bf16, 64, 0, 0, false>("wgmma SS bf16 n64");
    wgmma<Half, 128, 0, 0, false>("wgmma SS f16 n128");
    wgmma<Bf16, 64, 1, 1, false>("wgmma SS, both MN-major");
    wgmma<Half, 64, 0, 1, true>("wgmma RS n64");
    wgmma<Bf16, 128, 0, 1, true>("wgmma RS n128");
  }
};

}  // namespace conformance
