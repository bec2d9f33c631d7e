// What this CPU can do at most: multiply-adds of each instruction set, and reads from memory. A small C library for
// ceilings.py. A window is a fixed piece of work for every thread at once; its rate is the work of all threads over the
// time from the common start to the last end. The best window counts.
#include <time.h>

#include <atomic>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

double seconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

constexpr long loops = 8000;  // passes over all accumulators in one window: about 50 us

// Every accumulator is a chain of its own: 12 or 24 of them hide the latency (4 cycles x 2 units = 8; bf16 up to twice
// that). They are single variables, since a compiler keeps an array in memory; the empty asm stops it from merging or
// moving them.
#define TWELVE(f, p) f(p##0) f(p##1) f(p##2) f(p##3) f(p##4) f(p##5) f(p##6) f(p##7) f(p##8) f(p##9) f(p##10) f(p##11)
#define LOOP(body)                   \
  for (long i = 0; i < loops; i++) { \
    body                             \
  }

struct Work {
  void (*run)();
  double flop;  // in one call of run
};

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void fma_avx2() {
  const __m256 x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(0.001f);
#define START(a) __m256 a = y;
#define STEP(a)                 \
  a = _mm256_fmadd_ps(a, x, y); \
  asm volatile("" : "+x"(a));
  TWELVE(START, a)  // 16 registers: 12 chains and the two constants
  LOOP(TWELVE(STEP, a))
#undef START
#undef STEP
}
__attribute__((target("avx512f"))) void fma_avx512() {
  const __m512 x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(0.001f);
#define START(a) __m512 a = y;
#define STEP(a)                 \
  a = _mm512_fmadd_ps(a, x, y); \
  asm volatile("" : "+v"(a));
  TWELVE(START, a) TWELVE(START, b) LOOP(TWELVE(STEP, a) TWELVE(STEP, b))
#undef START
#undef STEP
}
__attribute__((target("avx512f,avx512bf16"))) void bf16_avx512() {
  const __m512bh x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80));  // pairs of bf16 1.0
#define START(a) __m512 a = _mm512_setzero_ps();
#define STEP(a)                  \
  a = _mm512_dpbf16_ps(a, x, x); \
  asm volatile("" : "+v"(a));
  TWELVE(START, a) TWELVE(START, b) LOOP(TWELVE(STEP, a) TWELVE(STEP, b))
#undef START
#undef STEP
}
constexpr long tile_flop = 16 * 16 * 32 * 2;  // of one product of two matrix registers

// AMX-BF16: six accumulators of eight matrix registers, written in assembly as compilers differ in their names for it
void bf16_amx() {
#ifdef __linux__
  struct alignas(64) {
    unsigned char palette = 1, rest[15] = {};
    unsigned short bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shape;
  asm volatile("ldtilecfg %0" ::"m"(shape));
#define EIGHT(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7)
#define ZERO(i) asm volatile("tilezero %tmm" #i);
#define PRODUCT(i) asm volatile("tdpbf16ps %tmm7, %tmm6, %tmm" #i);
  EIGHT(ZERO)
  LOOP(PRODUCT(0) PRODUCT(1) PRODUCT(2) PRODUCT(3) PRODUCT(4) PRODUCT(5))
  asm volatile("tilerelease");
#undef EIGHT
#undef ZERO
#undef PRODUCT
#endif
}
bool amx_allowed() {
#ifdef __linux__
  return __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // asks for the registers
#else
  return false;
#endif
}
#elif defined(__aarch64__)
void fma_neon() {
  const float32x4_t x = vdupq_n_f32(0.999f), y = vdupq_n_f32(0.001f);
#define START(a) float32x4_t a = y;
#define STEP(a)           \
  a = vfmaq_f32(y, a, x); \
  asm volatile("" : "+w"(a));
  TWELVE(START, a) TWELVE(START, b) LOOP(TWELVE(STEP, a) TWELVE(STEP, b))
#undef START
#undef STEP
}
#endif

// kind: 0 fp32 with AVX2 (on Arm: NEON), 1 fp32 with AVX-512, 2 bf16 pairs with AVX-512, 3 bf16 with AMX; run is null
// where the CPU has it not
Work work(int kind) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (kind == 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {fma_avx2, 12. * 8 * 2 * loops};
  if (kind == 1 && __builtin_cpu_supports("avx512f")) return {fma_avx512, 24. * 16 * 2 * loops};
  if (kind == 2 && __builtin_cpu_supports("avx512bf16")) return {bf16_avx512, 24. * 32 * 2 * loops};
  if (kind == 3 && amx_allowed()) return {bf16_amx, 6. * tile_flop * loops};
#elif defined(__aarch64__)
  if (kind == 0) return {fma_neon, 24. * 4 * 2 * loops};
#endif
  return {nullptr, 0};
}

// 256 bytes a step, prefetched 4 KiB ahead, sixteen sums
void read_all(const float* p, long n) {
  typedef float vector __attribute__((vector_size(16), aligned(4)));
#define START(a) vector a = {};
  TWELVE(START, s)
#undef START
  vector s12 = {}, s13 = {}, s14 = {}, s15 = {};
  const auto at = [](const float* x) { return *reinterpret_cast<const vector*>(x); };
  for (long i = 0; i + 64 <= n; i += 64) {
    const float* x = p + i;
    for (int line = 0; line < 64; line += 16) __builtin_prefetch(x + 1024 + line);
    s0 += at(x), s1 += at(x + 4), s2 += at(x + 8), s3 += at(x + 12), s4 += at(x + 16), s5 += at(x + 20);
    s6 += at(x + 24), s7 += at(x + 28), s8 += at(x + 32), s9 += at(x + 36), s10 += at(x + 40), s11 += at(x + 44);
    s12 += at(x + 48), s13 += at(x + 52), s14 += at(x + 56), s15 += at(x + 60);
  }
  s0 += s1 + s2 + s3 + s4 + s5 + s6 + s7 + s8 + s9 + s10 + s11 + s12 + s13 + s14 + s15;
  asm volatile("" ::"m"(s0));
}

// f(thread) on all threads at once, again and again for `budget` seconds; the shortest time of one window
template <class F>
double best_window(int threads, double budget, bool cpu_clock, F f) {
  const clockid_t clock = cpu_clock && threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  double best = 1e30;
  const double end = seconds(CLOCK_MONOTONIC) + budget;
  if (threads == 1) {
    do {
      const double start = seconds(clock);
      f(0);
      const double t = seconds(clock) - start;
      best = t < best ? t : best;
    } while (seconds(CLOCK_MONOTONIC) < end);
    return best;
  }
  std::atomic<long> window{0}, done{0};  // workers run window w when `window` reaches w; -1 ends them
  std::vector<std::thread> pool;
  for (int id = 1; id < threads; id++) {
    pool.emplace_back([&, id] {
      for (long next = 1;; next++) {
        long w;
        while ((w = window.load(std::memory_order_acquire)) < next && w >= 0) std::this_thread::yield();
        if (w < 0) return;
        f(id);
        done.fetch_add(1, std::memory_order_release);
      }
    });
  }
  long w = 0;
  do {
    done.store(0, std::memory_order_relaxed);
    const double start = seconds(CLOCK_MONOTONIC);
    window.store(++w, std::memory_order_release);
    f(0);
    while (done.load(std::memory_order_acquire) < threads - 1) std::this_thread::yield();
    const double t = seconds(CLOCK_MONOTONIC) - start;
    best = t < best ? t : best;
  } while (seconds(CLOCK_MONOTONIC) < end);
  window.store(-1, std::memory_order_release);
  for (auto& t : pool) t.join();
  return best;
}

}  // namespace

extern "C" int peak_supported(int kind) { return work(kind).run != nullptr; }

// FLOP/s of all threads together
extern "C" double peak_flops(int kind, int threads, double budget, int cpu_clock) {
  const Work w = work(kind);
  if (!w.run) return 0;
  const int repeat =
      20;  // about 1 ms, as the calls it is compared with: a clock raised for microseconds must not count
  const double t = best_window(threads, budget, cpu_clock != 0, [&](int) {
    for (int i = 0; i < repeat; i++) w.run();
  });
  return w.flop * repeat * threads / t;
}

// bytes/s of all threads together, each reading its share of data[n]
extern "C" double read_bandwidth(const float* data, long n, int threads, double budget, int cpu_clock) {
  const long share = n / threads / 64 * 64;
  const double t = best_window(threads, budget, cpu_clock != 0, [&](int id) { read_all(data + id * share, share); });
  return 4. * static_cast<double>(share) * threads / t;
}
