// Shadow memory: what every access is checked against. Never compiled with -fsanitize=thread itself.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <map>

#include "state.h"

namespace emulator {
namespace {

struct GlobalCell {  // shadow of one granule of global memory; blocks are numbered from 1 within a launch
  uint32_t launch, block, write_clock, reader_block;
  uint16_t writer;
  bool initialised, atomic, read;
};
struct Region {
  unsigned char *map, *begin;
  size_t map_bytes, bytes, cell;  // cell: bytes of a GlobalCell
  std::string name;
  std::vector<GlobalCell> cells;
};
std::vector<std::unique_ptr<Region>> regions;
Region* last_region;
const void* access_pc;

// Blocks are ordered by a fence, a count in one and, of the same counter, a later count and a fence in the other.
std::map<const void*, std::vector<Release>> releases;  // of a launch
uint32_t releases_of;
struct Acquired {
  int thread;  // which fenced, and when
  uint32_t clock;
  Release release;
};
std::vector<Acquired> acquired;  // of the current block

uint32_t block_number() { return 1 + block_index.x + grid.x * (block_index.y + grid.y * block_index.z); }

bool ordered(const Thread& t, int other, uint32_t clock) { return other == t.id || clock <= t.clock[other]; }

bool ordered_across(const Thread& t, const GlobalCell& c) {
  for (const Acquired& a : acquired)
    if (a.release.block == c.block && c.write_clock <= a.release.clock[c.writer] && ordered(t, a.thread, a.clock))
      return true;
  return false;
}

[[noreturn]] void race(const char* kind, size_t offset, int other, Site s) {
  fail(format("shared-memory race (%s) at offset %zu: ", kind, offset) + who() + " and thread " +
       std::to_string(other) + ", no barrier between; at " + at(s));
}
void check_range(uint32_t offset, size_t bytes, Site s) {
  if (const size_t own = offset % smem_pitch; own + bytes > smem_bytes)
    fail(format("shared-memory access out of bounds: offset %zu + %zu > %zu, ", own, bytes, smem_bytes) + who() +
         " at " + at(s));
}
template <class F>
void each_cell(uint32_t offset, size_t bytes, F&& f) {
  for (size_t i = offset / granule; i <= (offset + bytes - 1) / granule; i++) f(shadow[i], i * granule);
}

Region* region_of(const void* a) {
  auto* p = static_cast<const unsigned char*>(a);
  const auto inside = [p](const Region& r) { return p >= r.map && p < r.map + r.map_bytes; };
  if (last_region && inside(*last_region)) return last_region;
  for (auto& r : regions)
    if (inside(*r)) return last_region = r.get();
  return nullptr;
}

void region_access(Region& r, const void* a, size_t bytes, Access mode, Site s) {
  const ptrdiff_t offset = static_cast<const unsigned char*>(a) - r.begin;
  if (offset < 0 || offset + bytes > r.bytes)
    fail(std::string("global ") + (mode == Access::read ? "read" : "write") +
         format(" out of bounds of '%s': byte %td of %zu, ", r.name.c_str(), offset, r.bytes) + who() + " at " + at(s));
  if (!options.check) return;
  const uint32_t here = block_number();
  for (size_t i = offset / r.cell; i <= (offset + bytes - 1) / r.cell; i++) {
    GlobalCell& c = r.cells[i];
    if (c.launch != launch_number) {
      const bool initialised = c.initialised;
      c = GlobalCell{};
      c.launch = launch_number, c.initialised = initialised;
    }
    const auto conflict = [&](const char* kind) {
      fail(format("global-memory race (%s) on '%s' byte %zu with block #%u thread %d: ", kind, r.name.c_str(),
                  i * r.cell, c.block - 1, c.writer) +
           who() + " at " + at(s));
    };
    const bool after_write =
        !c.block || (c.block == here ? ordered(*current, c.writer, c.write_clock) : ordered_across(*current, c));
    if (mode == Access::read) {
      if (!c.initialised)
        fail(format("read of uninitialised global memory '%s' byte %zu, ", r.name.c_str(), i * r.cell) + who() +
             " at " + at(s));
      if (!after_write) conflict("read after write");
      c.read = true;
      c.reader_block = c.reader_block && c.reader_block != here ? ~0u : here;
    } else {
      if (!after_write && !(c.atomic && mode == Access::atomic)) conflict("write after write");
      if (c.read && c.reader_block != here) conflict("write after another block's read");
      c.block = here, c.writer = current->id, c.write_clock = current->clock[current->id];
      c.initialised = true, c.atomic = mode == Access::atomic;
    }
  }
}

// Every plain access of the kernel's file arrives here.
void access(const void* a, size_t bytes, bool write, bool aligned, const void* pc) {
  if (!current || !options.check) return;
  counts.accesses++;
  access_pc = pc;
  const Site s{nullptr, 0};
  auto* p = static_cast<const unsigned char*>(a);
  auto* stack = reinterpret_cast<unsigned char*>(current->stack);
  if (p >= stack && p < stack + stack_bytes) return;
  const unsigned char* const own = smem + in_cluster(0);
  const bool in_smem = p >= smem - guard_bytes && p < smem + smem_pitch * options.cluster + guard_bytes;
  Region* r = in_smem ? nullptr : region_of(a);
  if (!in_smem && !r) return;  // parameters, constants
  if (aligned && bytes <= 16 && (bytes & (bytes - 1)) == 0 && reinterpret_cast<uintptr_t>(p) % bytes)
    fail(format("misaligned %zu-byte access, ", bytes) + who() + " at " + at(s));
  if (r) return region_access(*r, a, bytes, write ? Access::write : Access::read, s);
  if (p < own) fail("shared-memory access below its start, " + who() + " at " + at(s));
  const auto offset = in_cluster(static_cast<uint32_t>(p - own));
  if (write)
    smem_write(offset, bytes, false, s);
  else
    smem_read(*current, offset, bytes, s);
}

}  // namespace

std::string line_of_access() {
  Dl_info info;
  if (!dladdr(access_pc, &info)) return "?";
  const auto offset = reinterpret_cast<uintptr_t>(access_pc) - 1 - reinterpret_cast<uintptr_t>(info.dli_fbase);
  std::string line;
  const std::string command =
      format("addr2line -e '%s' 0x%zx 2>/dev/null", info.dli_fname, static_cast<size_t>(offset));
  if (FILE* p = popen(command.c_str(), "r")) {
    char b[512];
    if (fgets(b, sizeof b, p)) line = b;
    pclose(p);
  }
  while (!line.empty() && line.back() == '\n') line.pop_back();
  return line.substr(line.rfind('/') + 1);
}

void reset_memory() {
  const size_t bytes = smem_pitch * static_cast<size_t>(options.cluster - 1) + smem_bytes;
  memset(smem, 0xff, bytes);
  acquired.clear();
  if (options.check) shadow.assign((bytes + granule - 1) / granule, Cell{});
}

uint32_t smem_addr(const void* p, Site s) {
  const ptrdiff_t offset = static_cast<const unsigned char*>(p) - smem - in_cluster(0);
  if (offset < 0 || offset > static_cast<ptrdiff_t>(smem_bytes))
    fail("smem_addr of a pointer outside shared memory, " + who() + " at " + at(s));
  return static_cast<uint32_t>(offset);
}

void smem_read(Thread& t, uint32_t offset, size_t bytes, Site s) {
  check_range(offset, bytes, s);
  if (!options.check) return;
  each_cell(offset, bytes, [&](Cell& c, size_t where) {
    if (c.in_flight)
      fail(format("read of shared memory at offset %zu while a copy to it is in flight, ", where) + who(t.id) + " at " +
           at(s));
    if (!c.written)
      fail(format("read of uninitialised shared memory at offset %zu, ", where) + who(t.id) + " at " + at(s));
    if (c.write_clock && !ordered(t, c.writer, c.write_clock)) race("read after write", where, c.writer, s);
    c.read_clock[t.warp] = t.clock[t.id] << 5 | t.lane;
  });
}

void smem_write(uint32_t offset, size_t bytes, bool async, Site s) {
  check_range(offset, bytes, s);
  if (!options.check) return;
  each_cell(offset, bytes, [&](Cell& c, size_t where) {
    if (c.in_flight)
      fail(format("write to shared memory at offset %zu while a copy to it is in flight, ", where) + who() + " at " +
           at(s));
    if (c.async_readers)
      fail(format("write to shared memory at offset %zu while an asynchronous operation still reads it, ", where) +
           who() + " at " + at(s));
    if (c.write_clock && !ordered(*current, c.writer, c.write_clock)) race("write after write", where, c.writer, s);
    for (size_t w = 0; w < warps.size(); w++) {
      if (!c.read_clock[w]) continue;
      const int other = static_cast<int>(w * 32 + (c.read_clock[w] & 31));
      if (!ordered(*current, other, c.read_clock[w] >> 5)) race("write after read", where, other, s);
    }
    c.writer = current->id;
    c.write_clock = current->clock[current->id];
    c.written = c.ordinary = true;
    c.in_flight = async;
  });
}

void smem_read_by_proxy(uint32_t offset, size_t bytes, const char* what, Site s) {
  smem_read(*current, offset, bytes, s);
  if (!options.check) return;
  each_cell(offset, bytes, [&](Cell& c, size_t where) {
    if (c.ordinary && c.write_clock > current->proxy[c.writer])
      fail(format("%s reads shared memory at offset %zu written by ordinary stores without fence.proxy.async, ", what,
                  where) +
           who() + " at " + at(s));
    c.async_readers++;
  });
}
void smem_release(uint32_t offset, size_t bytes, const Thread& reader) {
  if (!options.check) return;
  each_cell(offset, bytes, [&](Cell& c, size_t) {
    c.async_readers--;
    c.read_clock[reader.warp] = reader.clock[reader.id] << 5 | reader.lane;
  });
}

void global_access(const void* p, size_t bytes, Access mode, Site s) {
  Region* r = region_of(p);
  if (!r) fail("access to unknown global memory, " + who() + " at " + at(s));
  region_access(*r, p, bytes, mode, s);
}

void* device_alloc(size_t bytes, const char* name, size_t cell) {
  auto r = std::make_unique<Region>();
  const size_t page = 4096, body = (bytes + page - 1) / page * page;
  r->map_bytes = body + 2 * guard_bytes;
  r->map = static_cast<unsigned char*>(
      mmap(nullptr, r->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  mprotect(r->map + guard_bytes, body, PROT_READ | PROT_WRITE);
  r->begin = r->map + guard_bytes + (body - (bytes + 15) / 16 * 16);  // ends at the guard, 16-byte aligned
  r->bytes = bytes;
  r->name = name;
  r->cell = cell;
  r->cells.resize((bytes + cell - 1) / cell);
  memset(r->begin, 0xff, bytes);
  regions.push_back(std::move(r));
  return regions.back()->begin;
}
void device_free(void* p) {
  last_region = nullptr;
  for (size_t i = 0; i < regions.size(); i++)
    if (regions[i]->begin == p) {
      munmap(regions[i]->map, regions[i]->map_bytes);
      regions.erase(regions.begin() + static_cast<ptrdiff_t>(i));
      return;
    }
}
void mark_initialised(const void* p, size_t bytes) {
  if (!bytes) return;
  Region* r = region_of(p);
  const size_t offset = static_cast<const unsigned char*>(p) - r->begin;
  for (size_t i = offset / r->cell; i < (offset + bytes + r->cell - 1) / r->cell; i++) r->cells[i].initialised = true;
}

// ---- cp.async and global reductions ----

void cp_async(uint32_t dst, const void* src, int bytes, int valid, Site s) {
  counts.copies++;
  counts.copied_bytes += valid;
  if (dst % bytes || (valid && reinterpret_cast<uintptr_t>(src) % bytes))
    fail("misaligned cp.async, " + who() + " at " + at(s));
  if (valid) global_access(src, valid, Access::read, s);
  dst = in_cluster(dst);
  smem_write(dst, bytes, true, s);
  const Copy c{dst, static_cast<const unsigned char*>(src), bytes, valid, s};
  if (options.eager_copies) {
    memcpy(smem + dst, src, valid);
    memset(smem + dst + valid, 0, bytes - valid);
  }
  current->copies.open.push_back(c);
}
void cp_async_commit() { current->copies.commit(); }
void cp_async_wait(int pending) {
  auto& groups = current->copies.committed;
  while (static_cast<int>(groups.size()) > pending) {
    for (const Copy& c : groups.front()) {
      if (!options.eager_copies) {
        memcpy(smem + c.dst, c.src, c.valid);
        memset(smem + c.dst + c.valid, 0, c.bytes - c.valid);
      }
      if (!options.check) continue;
      each_cell(c.dst, c.bytes, [](Cell& cell, size_t) {
        cell.in_flight = false;
        cell.write_clock = current->clock[current->id];
      });
    }
    groups.erase(groups.begin());
  }
}

void reduce_add(float* p, const float* values, int count, Site s) {
  counts.atomics += count;
  if (reinterpret_cast<uintptr_t>(p) % (4 * count)) fail("misaligned vector reduction, " + who() + " at " + at(s));
  global_access(p, 4 * count, Access::atomic, s);
  for (int i = 0; i < count; i++) p[i] += values[i];
}
uint32_t atomic_add(uint32_t* p, uint32_t value, Site s) {
  counts.atomics++;
  global_access(p, 4, Access::atomic, s);
  const uint32_t old = *p;
  *p = old + value;
  if (!options.check) return old;
  if (releases_of != launch_number) releases.clear();
  releases_of = launch_number;
  auto& before = releases[p];
  current->observed.insert(current->observed.end(), before.begin(), before.end());
  if (!current->fenced.empty()) before.push_back({block_number(), current->fenced});
  return old;
}
uint32_t atomic_or(uint32_t* p, uint32_t value, Site s) {
  counts.atomics++;
  global_access(p, 4, Access::atomic, s);
  const uint32_t old = *p;
  *p = old | value;
  return old;
}
void thread_fence() {
  if (!options.check) return;
  current->fenced = current->clock;
  for (Release& r : current->observed) acquired.push_back({current->id, current->clock[current->id], std::move(r)});
  current->observed.clear();
}

}  // namespace emulator

// The hooks that -fsanitize=thread calls, in place of its runtime.
#define EMULATOR_HOOK(N)                                                                                        \
  void __tsan_read##N(void* p) { emulator::access(p, N, false, true, __builtin_return_address(0)); }            \
  void __tsan_write##N(void* p) { emulator::access(p, N, true, true, __builtin_return_address(0)); }            \
  void __tsan_unaligned_read##N(void* p) { emulator::access(p, N, false, false, __builtin_return_address(0)); } \
  void __tsan_unaligned_write##N(void* p) { emulator::access(p, N, true, false, __builtin_return_address(0)); }
extern "C" {
EMULATOR_HOOK(1)
EMULATOR_HOOK(2)
EMULATOR_HOOK(4)
EMULATOR_HOOK(8)
EMULATOR_HOOK(16)
void __tsan_read_range(void* p, size_t n) { emulator::access(p, n, false, true, __builtin_return_address(0)); }
void __tsan_write_range(void* p, size_t n) { emulator::access(p, n, true, true, __builtin_return_address(0)); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
