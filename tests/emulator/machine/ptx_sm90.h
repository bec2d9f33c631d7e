// Host twins of csrc/cuda/ptx/sm90_device.cuh and wgmma_device.cuh.
#pragma once
#include "ptx_sm80.h"

namespace attnjourney::ptx {

using TensorMap = emulator::TensorMap;

inline void mbarrier_init(uint32_t bar, int count, Site s = Site::here()) { emulator::mbarrier_init(bar, count, s); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint32_t bar, Site s = Site::here()) { emulator::mbarrier_arrive(bar, 0, s); }
inline void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes, Site s = Site::here()) {
  emulator::mbarrier_arrive(bar, bytes, s);
}
inline void mbarrier_wait(uint32_t bar, int parity, Site s = Site::here()) { emulator::mbarrier_wait(bar, parity, s); }
inline void mbarrier_arrive_at(uint32_t bar, int rank, Site s = Site::here()) {
  emulator::mbarrier_arrive_at(bar, rank, s);
}
inline void cluster_sync(Site s = Site::here()) { emulator::cluster_sync(s); }

inline void tma_load_4d(uint32_t dst, const TensorMap* map, int c0, int c1, int c2, int c3, uint32_t bar,
                        Site s = Site::here()) {
  const int c[4] = {c0, c1, c2, c3};
  emulator::tma_load(dst, *map, c, bar, s);
}
inline void tma_multicast_4d(uint32_t dst, const TensorMap* map, int c0, int c1, int c2, int c3, uint32_t bar,
                             uint32_t blocks, Site s = Site::here()) {
  const int c[4] = {c0, c1, c2, c3};
  emulator::tma_multicast(dst, *map, c, bar, blocks, s);
}
inline void tma_store_4d(const TensorMap* map, uint32_t src, int c0, int c1, int c2, int c3, Site s = Site::here()) {
  const int c[4] = {c0, c1, c2, c3};
  emulator::tma_store(*map, src, c, s);
}
inline void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, Site s = Site::here()) {
  emulator::bulk_load(dst, src, bytes, bar, s);
}
inline void bulk_reduce_add(float* dst, uint32_t src, uint32_t bytes, Site s = Site::here()) {
  emulator::bulk_reduce_add(dst, src, bytes, s);
}
inline void bulk_commit() { emulator::bulk_commit(); }
template <int Pending>
void bulk_wait_read() {
  emulator::bulk_wait(Pending);
}
template <int Pending>
void bulk_wait() {
  emulator::bulk_wait(Pending);
}
inline void reduce_add_v4(float* p, float a, float b, float c, float d, Site s = Site::here()) {
  const float v[4] = {a, b, c, d};
  emulator::reduce_add(p, v, 4, s);
}
inline void stmatrix_x4(uint32_t addr, const uint32_t (&r)[4], Site s = Site::here()) {
  emulator::stmatrix(addr, r, 4, s);
}
inline void fence_proxy_async() { emulator::fence_proxy_async(); }

template <int Registers>
void setmaxnreg_inc(Site s = Site::here()) {
  emulator::setmaxnreg(Registers, s);
}
template <int Registers>
void setmaxnreg_dec(Site s = Site::here()) {
  emulator::setmaxnreg(Registers, s);
}

inline void wgmma_fence(Site s = Site::here()) { emulator::wgmma_fence(s); }
inline void wgmma_commit(Site s = Site::here()) { emulator::wgmma_commit(s); }
template <int Pending>
void wgmma_wait(Site s = Site::here()) {
  emulator::wgmma_wait(Pending, s);
}
template <int N>
void keep(float (&)[N]) {}
template <class T, int N, int TransA, int TransB>
void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate, Site s = Site::here()) {
  emulator::wgmma(d, N, nullptr, a, b, accumulate, TransA, TransB, emulator::element_of<T>, s);
}
template <class T, int N, int TransA, int TransB>
void wgmma_ss_new(float (&d)[N / 2], uint64_t a, uint64_t b, Site s = Site::here()) {
  emulator::wgmma(d, N, nullptr, a, b, false, TransA, TransB, emulator::element_of<T>, s);
}
template <class T, int N, int TransB>
void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate, Site s = Site::here()) {
  emulator::wgmma(d, N, a, 0, b, accumulate, false, TransB, emulator::element_of<T>, s);
}
template <int N>
void wgmma_e4m3_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate, Site s = Site::here()) {
  emulator::wgmma(d, N, nullptr, a, b, accumulate, false, false, emulator::Element::e4m3, s);
}
template <int N>
void wgmma_e4m3_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, Site s = Site::here()) {
  emulator::wgmma(d, N, a, 0, b, true, false, false, emulator::Element::e4m3, s);
}
inline uint32_t pack4_e4m3(float a, float b, float c, float d) {
  const auto at = [](float x, int byte) { return static_cast<uint32_t>(emulator::to_e4m3(x)) << 8 * byte; };
  return at(a, 0) | at(b, 1) | at(c, 2) | at(d, 3);
}
template <uint32_t Selector>
uint32_t select_bytes(uint32_t low, uint32_t high) {
  const uint64_t both = low | static_cast<uint64_t>(high) << 32;
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) r |= static_cast<uint32_t>(both >> 8 * (Selector >> 4 * i & 7) & 0xff) << 8 * i;
  return r;
}

}  // namespace attnjourney::ptx
