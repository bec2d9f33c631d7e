// The emulator's own state, shared by its files.
#pragma once
#include <memory>
#include <random>
#include <string>

#include "emulator.h"

namespace emulator {

constexpr size_t stack_bytes = 256 << 10, guard_bytes = 1 << 20;
constexpr size_t granule = 2;                                       // bytes of memory per shadow cell
constexpr int max_warps = 32, max_mbarriers = 32, max_cluster = 2;  // mbarriers: of a block
constexpr size_t max_smem = 227 << 10;

// What a thread has synchronised with: one entry per thread, and one per mbarrier for the copies that complete on it.
using Clock = std::vector<uint32_t>;

struct Copy {  // cp.async
  uint32_t dst;
  const unsigned char* src;
  int bytes, valid;
  Site site;
};
struct BulkOp {  // shared -> global by TMA: a tile store, or a reduction when `sum` is set
  uint32_t src, bytes;
  float* sum;
  TensorMap map;
  int coordinates[5];
  Site site;
};
template <class Op>
struct Groups {  // operations issued, and groups committed, oldest first
  std::vector<Op> open;
  std::vector<std::vector<Op>> committed;
  void commit() {
    committed.push_back(std::move(open));
    open.clear();
  }
};

struct Release {  // what a block's count after a fence tells the blocks that count after it
  uint32_t block;
  Clock clock;
};
enum class State { runnable, blocked, done };
struct alignas(64) Thread {
  void* stack_pointer;
  char* stack;
  uint3 index;
  int id, lane, warp;  // in the cluster
  int rank;            // of its block
  State state;
  const char* waits_in;  // for deadlock reports
  Site waits_at;
  Groups<Copy> copies;
  Groups<BulkOp> bulk;
  Clock clock;
  Clock proxy;                    // the part of clock that a fence.proxy.async made visible to TMA and wgmma
  Clock fenced;                   // the clock of its last fence for the whole device
  std::vector<Release> observed;  // what its counts since then found
};
struct Warp {  // at most one collective operation in flight
  uint32_t arrived;
  const char* what;
  Site site;
  void* args[32];
};
struct Barrier {
  int arrived, expected;
  Site site;
  std::vector<Thread*> waiting;
  Clock clock, proxy;  // of threads that arrived without waiting
};
struct Cell {  // shadow of one granule of shared memory
  uint32_t write_clock;
  uint16_t writer;
  bool written, in_flight;
  bool ordinary;                   // last written by an ordinary store, not by TMA
  uint16_t async_readers;          // wgmma or bulk stores that still read it
  uint32_t read_clock[max_warps];  // per warp: last reader, clock << 5 | lane
};

extern Stats counts;
extern Options options;
extern dim3 grid, block;
extern uint3 block_index;  // of the current thread
extern uint32_t launch_number;
extern unsigned char* smem;  // of the cluster's blocks, smem_pitch bytes each, of which smem_bytes are there
extern size_t smem_bytes, smem_pitch;
extern std::vector<Cell> shadow;
extern std::vector<Thread> threads;
extern std::vector<Warp> warps;
extern Thread* current;
extern std::mt19937_64 rng;

// scheduler.cpp
std::string format(const char* f, ...) __attribute__((format(printf, 1, 2)));
std::string at(Site);
std::string who(int thread);
std::string who();  // the current thread
[[noreturn]] void fail(const std::string&);
void block_here(const char* what, Site);
void let_others_run();  // a place where the starving order takes the thread off
void join(Clock&, const Clock&);
void synchronise(Thread* const* list, size_t count, Clock clock, Clock proxy);
inline size_t clock_size() { return threads.size() + static_cast<size_t>(max_mbarriers * options.cluster); }
inline size_t block_threads() { return threads.size() / static_cast<size_t>(options.cluster); }
bool has_exited(int rank);  // a block

// Offsets within a block are what a kernel knows; those in the cluster are what the emulator reckons with.
inline uint32_t in_cluster(uint32_t offset, int rank) {
  if (offset >= smem_pitch) fail(format("shared-memory access out of bounds: offset %u, ", offset) + who());
  return offset + static_cast<uint32_t>(static_cast<size_t>(rank) * smem_pitch);
}
inline uint32_t in_cluster(uint32_t offset) { return in_cluster(offset, current->rank); }

// memory.cpp. A Site without a file stands for the plain access being checked.
std::string line_of_access();
void reset_memory();
void smem_read(Thread&, uint32_t offset, size_t bytes, Site);
void smem_write(uint32_t offset, size_t bytes, bool async, Site);
void smem_read_by_proxy(uint32_t offset, size_t bytes, const char* what, Site);  // checks and counts async_readers
void smem_release(uint32_t offset, size_t bytes, const Thread& reader);          // the asynchronous read is over
enum class Access { read, write, atomic };
void global_access(const void*, size_t bytes, Access, Site);

// tma.cpp, wgmma.cpp
void reset_mbarriers();
void reset_wgmma();
bool land_one_copy();  // time passes: one TMA load in flight arrives
// chunks of 16 bytes exchanged within rows of `line` bytes, 128, 64 or 0 (none)
inline uint32_t swizzled(uint32_t a, int line) { return line ? a ^ (a >> 7 & (line / 16 - 1)) << 4 : a; }
float value16(uint16_t bits, bool bf16);

// warp.cpp: a collective operation of a warp; the last lane to arrive does the work for all.
template <class A, class F>
void warp_collective(const char* what, A& args, Site s, F&& work) {
  Warp& w = warps[current->warp];
  if (!w.arrived) {
    w.what = what;
    w.site = s;
  } else if (w.what != what || w.site.line != s.line) {
    fail(std::string("divergent warp: ") + what + " at " + at(s) + " meets " + w.what + " at " + at(w.site) + ", " +
         who());
  }
  w.args[current->lane] = &args;
  w.arrived |= 1u << current->lane;
  if (w.arrived != ~0u) return block_here(what, s);
  w.arrived = 0;
  work(reinterpret_cast<A**>(w.args));
  for (int l = 0; l < 32; l++) threads[current->warp * 32 + l].state = State::runnable;
}

float add_and_cut(float sum, double a, double b, double c, double d);  // machine/fp32.cpp

}  // namespace emulator
