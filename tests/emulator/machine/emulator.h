// Runs CUDA kernels on the CPU, to prove them: one block, or one cluster of blocks, at a time, one fiber per thread.
//
// A kernel file is compiled by g++ against the host twins of csrc/cuda/ptx (ptx_sm80.h, ptx_sm90.h) with
// -fsanitize=thread, whose hooks are ours (memory.cpp): every plain load and store reaches a shadow memory with vector
// clocks. Reported, with file and line: shared and global races, accesses out of bounds, reads of what nobody wrote and
// of copies in flight, ordinary stores that TMA or wgmma cannot see yet, divergent collectives, misused barriers,
// deadlocks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "cuda_types.h"

namespace emulator {

struct Site {  // where in the kernel an operation was called
  const char* file;
  int line;
  static constexpr Site here(const char* f = __builtin_FILE(), int l = __builtin_LINE()) { return {f, l}; }
};

struct Error : std::runtime_error {
  using runtime_error::runtime_error;
};

// forward, reverse: each warp runs as far as it can before the next one starts. random: warps and lanes interleave.
// starve: one warpgroup, seed modulo their number, runs only when no other can and no copy is on its way, and then one
// thread's step at a time.
enum class Order { forward, reverse, random, starve };
struct Options {
  Order order = Order::forward;
  uint64_t seed = 1;
  bool eager_copies = false;  // asynchronous copies land when issued instead of when waited for
  bool check = true;          // shadow memory
  int cluster = 1;            // blocks that run side by side and reach each other's shared memory; they differ in x
  bool cut_sums = false;  // products of halves add as the coarsest tensor core would (add_and_cut), instead of rounding
};

struct Stats {  // copied_bytes: read by copies, those of a multicast once
  uint64_t blocks, mma, ldmatrix, ldmatrix_phases, copies, copied_bytes, atomics, accesses;
};
Stats& stats();

// Global memory: guard pages around it, filled with 0xff bytes (NaN), named in reports.
void* device_alloc(size_t bytes, const char* name, size_t cell);  // cell: bytes that are checked together
void device_free(void*);
void mark_initialised(const void*, size_t bytes);

template <class T>
struct Buffer {
  T* data;
  size_t size;
  Buffer(size_t count, const char* name)
      : data(static_cast<T*>(device_alloc(count * sizeof(T), name, sizeof(T) == 1 ? 1 : 2))), size(count) {}
  Buffer(const std::vector<T>& values, const char* name) : Buffer(values.size(), name) {
    std::copy(values.begin(), values.end(), data);
    mark_initialised(data, size * sizeof(T));
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { device_free(data); }
};

// Of a kernel with several faults (host/planted.py), whether this is the one it has; 0 is none.
bool planted(int fault);
void plant(int fault);

void launch_body(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body, Options);

template <class Kernel, class... Args>
void launch(Kernel kernel, dim3 grid, dim3 block, size_t shared_bytes, Options options, Args... args) {
  launch_body(grid, block, shared_bytes, [=] { kernel(args...); }, options);
}

// ---- what the twins call: sm_80 ----
uint3 thread_idx();
uint3 block_idx();
dim3 block_dim();
dim3 grid_dim();
unsigned char* dynamic_smem();
uint32_t smem_addr(const void*, Site);
void bar_sync(int id, int count, Site);  // count 0: the whole block
void bar_arrive(int id, int count, Site);
void sync_warp(Site);
enum class Shuffle { index, exclusive_or };
uint32_t shfl(uint32_t value, int argument, Shuffle, Site);
uint32_t ballot(bool, Site);
void cp_async(uint32_t dst, const void* src, int bytes, int valid, Site);
void cp_async_commit();
void cp_async_wait(int pending_groups);
void ldmatrix(uint32_t* r, uint32_t addr, int count, bool trans, Site);
void stmatrix(uint32_t addr, const uint32_t* r, int count, Site);
void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, bool bf16, Site);
void reduce_add(float*, const float* values, int count, Site);
uint32_t atomic_add(uint32_t*, uint32_t, Site);
uint32_t atomic_or(uint32_t*, uint32_t, Site);  // orders nothing
void thread_fence();
void turn_wait(const int*, int turn, Site);
void turn_pass(int*, int next);

// ---- sm_90 ----
struct TensorMap {  // what an encoded CUtensorMap holds; innermost dimension first
  const unsigned char* base;
  int rank, element;  // element: bytes
  uint32_t size[5], box[5];
  uint64_t stride[5];  // bytes; stride[0] == element
  int swizzle;         // bytes of its pattern's rows: 128, 64, or 0 for none
};
struct ElementStrides {
  int64_t batch, head, row;
};
// Of numbers [batch, heads, length, dim] of `element` bytes in boxes of `line` bytes by `rows` rows of one head, as
// csrc/cuda/tensor_map.h encodes it; an Error where the driver refuses.
TensorMap tensor_map(const void* data, const ElementStrides&, int64_t batch, int64_t heads, int64_t length, int64_t dim,
                     int64_t rows, int element = 2, int line = 128);
void mbarrier_init(uint32_t bar, int count, Site);
void mbarrier_arrive(uint32_t bar, uint32_t expect_bytes, Site);
void mbarrier_arrive_at(uint32_t bar, int rank, Site);  // of the cluster's block of that rank
void cluster_sync(Site);
void mbarrier_wait(uint32_t bar, int parity, Site);
void fence_proxy_async();
void tma_load(uint32_t dst, const TensorMap&, const int* coordinates, uint32_t bar, Site);
// blocks: bits of the ranks of the cluster's blocks that it goes to, at the same places
void tma_multicast(uint32_t dst, const TensorMap&, const int* coordinates, uint32_t bar, uint32_t blocks, Site);
void tma_store(const TensorMap&, uint32_t src, const int* coordinates, Site);
void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, Site);
void bulk_reduce_add(float* dst, uint32_t src, uint32_t bytes, Site);
void bulk_commit();
void bulk_wait(int pending_groups);
void wgmma_fence(Site);
enum class Element { bf16, half, e4m3 };
template <class T>
inline constexpr Element element_of = std::is_same_v<T, Bf16> ? Element::bf16 : Element::half;
// d (+)= A B; a null: A in shared memory too
void wgmma(float* d, int n, const uint32_t* a, uint64_t desc_a, uint64_t desc_b, bool accumulate, bool a_mn_major,
           bool b_mn_major, Element, Site);
void wgmma_commit(Site);
void wgmma_wait(int pending_groups, Site);
void setmaxnreg(int registers, Site);

}  // namespace emulator

#define threadIdx (::emulator::thread_idx())
#define blockIdx (::emulator::block_idx())
#define blockDim (::emulator::block_dim())
#define gridDim (::emulator::grid_dim())
inline void __syncthreads(emulator::Site s = emulator::Site::here()) { emulator::bar_sync(0, 0, s); }
inline void __syncwarp(emulator::Site s = emulator::Site::here()) { emulator::sync_warp(s); }
