// Fibers, the order in which they run, barriers, and what happens before what.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "state.h"

// Saves the callee-saved registers on the current stack, stores its pointer, adopts another (System V x86-64).
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emulator_switch,.-emulator_switch
)");

namespace emulator {

Stats counts;
Options options;
dim3 grid, block;
uint3 block_index;
uint32_t launch_number;
unsigned char* smem;
size_t smem_bytes, smem_pitch;
std::vector<Cell> shadow;
std::vector<Thread> threads;
std::vector<Warp> warps;
Thread* current;
std::mt19937_64 rng;

namespace {

Barrier barriers[max_cluster][16], of_cluster;
std::vector<char*> stacks;
const std::function<void()>* body;
void* scheduler_stack;
int alive, alive_in[max_cluster];
uint3 cluster_index;  // of its first block
bool failed;
std::string message;

void to_scheduler() { emulator_switch(&current->stack_pointer, scheduler_stack); }

void fiber_main() {
  (*body)();
  Thread& t = *current;
  for (auto& group : t.copies.committed)
    if (!group.empty()) fail(who() + " exits with cp.async in flight, issued at " + at(group[0].site));
  if (!t.copies.open.empty()) fail(who() + " exits with uncommitted cp.async, issued at " + at(t.copies.open[0].site));
  for (auto& group : t.bulk.committed)
    if (!group.empty()) fail(who() + " exits with a bulk store in flight, issued at " + at(group[0].site));
  if (!t.bulk.open.empty()) fail(who() + " exits with an uncommitted bulk store, issued at " + at(t.bulk.open[0].site));
  t.state = State::done;
  alive--, alive_in[t.rank]--;
  to_scheduler();
  abort();
}

void prepare(Thread& t) {
  void** sp = reinterpret_cast<void**>(t.stack + stack_bytes);
  *--sp = nullptr;  // fiber_main's return address, which also aligns its frame
  *--sp = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < 6; i++) *--sp = nullptr;
  t.stack_pointer = sp;
}

uint3 block_of(int rank) { return {cluster_index.x + static_cast<unsigned>(rank), cluster_index.y, cluster_index.z}; }

void resume(Thread& t) {
  current = &t;
  block_index = block_of(t.rank);
  emulator_switch(&scheduler_stack, t.stack_pointer);
  current = nullptr;
  if (failed) throw Error(message);
}

bool run_warp(int warp, const std::vector<int>& lanes) {
  bool ran = false;
  for (int lane : lanes) {
    const size_t i = warp * 32 + lane;
    if (i >= threads.size() || threads[i].state != State::runnable) continue;
    resume(threads[i]);
    ran = true;
  }
  return ran;
}

// every warp but those of the starved warpgroup as far as it gets; true if any ran
bool run_warps(const std::vector<int>& order, const std::vector<int>& lanes, int starved) {
  bool progress = false;
  for (int warp : order) {
    if (warp / 4 == starved) continue;
    while (run_warp(warp, lanes)) {
      progress = true;
      if (options.order == Order::random && rng() % 4 == 0) break;
    }
  }
  return progress;
}

int starved_group() { return static_cast<int>(options.seed % ((threads.size() + 127) / 128)); }

// one step of one thread of the starved warpgroup
bool run_starved(int group) {
  const size_t first = static_cast<size_t>(group) * 128;
  for (size_t i = first; i < std::min(first + 128, threads.size()); i++)
    if (threads[i].state == State::runnable) {
      resume(threads[i]);
      return true;
    }
  return false;
}

[[noreturn]] void report_deadlock() {
  std::string m = format("deadlock in block (%u,%u,%u):", cluster_index.x, cluster_index.y, cluster_index.z);
  int shown = 0;
  for (auto& t : threads) {
    const Thread* before = t.id ? &threads[t.id - 1] : nullptr;
    const bool differs =
        !before || before->state != t.state || (t.state == State::blocked && before->waits_at.line != t.waits_at.line);
    if (!differs || shown++ >= 6) continue;
    if (t.state == State::blocked) m += format(" thread %d waits in %s at ", t.id, t.waits_in) + at(t.waits_at) + ";";
    if (t.state == State::done) m += format(" thread %d has exited;", t.id);
  }
  throw Error(m);
}

void clear(Barrier& b) {
  b.arrived = 0;
  b.waiting.clear();
  b.clock.assign(clock_size(), 0);
  b.proxy = b.clock;
}

void run_cluster() {
  const int own = block.x * block.y * block.z, n = own * options.cluster, warp_count = (n + 31) / 32;
  threads.resize(n);
  warps.assign(warp_count, Warp{});
  reset_memory();
  for (auto& of_block : barriers)
    for (auto& b : of_block) clear(b);
  clear(of_cluster);
  reset_mbarriers();
  reset_wgmma();
  for (int i = 0; i < n; i++) {
    Thread& t = threads[i];
    t = Thread{};
    t.stack = stacks[i];
    t.id = i, t.lane = i % 32, t.warp = i / 32, t.rank = i / own;
    const unsigned at = i % own;
    t.index = {at % block.x, at / block.x % block.y, at / (block.x * block.y)};
    t.clock.assign(clock_size(), 0);
    t.clock[i] = 1;
    t.proxy.assign(clock_size(), 0);
    prepare(t);
  }
  alive = n;
  for (int& count : alive_in) count = own;
  const bool reverse = options.order == Order::reverse, random = options.order == Order::random;
  const int starved = options.order == Order::starve ? starved_group() : -1;
  std::vector<int> order(warp_count), lanes(32);
  for (int i = 0; i < warp_count; i++) order[i] = reverse ? warp_count - 1 - i : i;
  for (int i = 0; i < 32; i++) lanes[i] = reverse ? 31 - i : i;
  while (alive) {
    if (random) {
      std::shuffle(order.begin(), order.end(), rng);
      std::shuffle(lanes.begin(), lanes.end(), rng);
    }
    bool progress = run_warps(order, lanes, starved);
    if (random && rng() % 4 == 0) progress |= land_one_copy();
    if (progress || !alive) continue;
    if (land_one_copy()) continue;
    if (starved < 0 || !run_starved(starved)) report_deadlock();
  }
  counts.blocks += options.cluster;
}

}  // namespace

std::string format(const char* f, ...) {
  char b[1024];
  va_list ap;
  va_start(ap, f);
  vsnprintf(b, sizeof b, f, ap);
  va_end(ap);
  return b;
}
std::string at(Site s) {
  if (!s.file) return line_of_access();
  const char* slash = strrchr(s.file, '/');
  return format("%s:%d", slash ? slash + 1 : s.file, s.line);
}
std::string who(int t) {
  const int own = static_cast<int>(block_threads()), rank = t / own;
  const uint3 b = block_of(rank);
  t %= own;
  return format("block (%u,%u,%u) thread %d (warp %d lane %d)", b.x, b.y, b.z, t, t / 32, t % 32);
}
std::string who() { return who(current->id); }

void fail(const std::string& m) {
  if (!current) throw Error(m);
  message = m;
  failed = true;
  to_scheduler();  // never resumed
  abort();
}

void block_here(const char* what, Site s) {
  current->state = State::blocked;
  current->waits_in = what;
  current->waits_at = s;
  to_scheduler();
}

void let_others_run() {
  if (options.order == Order::starve && current->id / 128 == starved_group()) to_scheduler();  // stays runnable
}

void launch_body(dim3 g, dim3 b, size_t bytes, const std::function<void()>& f, Options o) {
  grid = g, block = b, body = &f, options = o;
  failed = false, current = nullptr, launch_number++;
  rng.seed(o.seed);
  const size_t n = static_cast<size_t>(b.x) * b.y * b.z;
  const auto size = static_cast<size_t>(o.cluster);
  if (n > 1024 || bytes > max_smem) throw Error("launch: block or shared memory too large");
  if (o.cluster < 1 || o.cluster > max_cluster || n * size > 1024 || (o.cluster > 1 && n % 128))
    throw Error("launch: the emulator has no such cluster");
  if (g.x % size) throw Error("launch: the grid is no multiple of its cluster");
  const auto reserve = [](size_t most) {
    return static_cast<char*>(
        mmap(nullptr, most, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  };
  while (stacks.size() < n * size) stacks.push_back(reserve(stack_bytes));
  static unsigned char* area = reinterpret_cast<unsigned char*>(reserve(max_cluster * max_smem + 2 * guard_bytes));
  smem = area + guard_bytes;
  smem_bytes = bytes, smem_pitch = (bytes / 1024 + 1) * 1024;  // the pattern of swizzled tiles is that of the first
  for (unsigned z = 0; z < g.z; z++)
    for (unsigned y = 0; y < g.y; y++)
      for (unsigned x = 0; x < g.x; x += o.cluster) {
        block_index = cluster_index = {x, y, z};
        run_cluster();
      }
}

Stats& stats() { return counts; }
uint3 thread_idx() { return current->index; }
uint3 block_idx() { return block_index; }
dim3 block_dim() { return block; }
dim3 grid_dim() { return grid; }
unsigned char* dynamic_smem() { return smem + in_cluster(0); }
bool has_exited(int rank) { return alive_in[rank] == 0; }

// ---- what happens before what ----

void join(Clock& a, const Clock& b) {
  for (size_t i = 0; i < a.size(); i++) a[i] = std::max(a[i], b[i]);
}
void synchronise(Thread* const* list, size_t count, Clock clock, Clock proxy) {
  for (size_t i = 0; i < count; i++) {
    join(clock, list[i]->clock);
    join(proxy, list[i]->proxy);
  }
  for (size_t i = 0; i < count; i++) {
    list[i]->clock = clock;
    list[i]->proxy = proxy;
    list[i]->clock[list[i]->id]++;
  }
}

namespace {

void open_barrier(Barrier& b, int id, int count, Site s) {
  if (b.arrived == 0) {
    b.expected = count;
    b.site = s;
  }
  if (b.expected != count) fail(format("barrier %d used with %d and %d threads at ", id, b.expected, count) + at(s));
}
void complete(Barrier& b) {
  if (options.check) synchronise(b.waiting.data(), b.waiting.size(), b.clock, b.proxy);
  for (Thread* t : b.waiting) t->state = State::runnable;
  b.waiting.clear();
  b.arrived = 0;
  std::fill(b.clock.begin(), b.clock.end(), 0);
  std::fill(b.proxy.begin(), b.proxy.end(), 0);
}

}  // namespace

void bar_sync(int id, int count, Site s) {
  Barrier& b = barriers[current->rank][id];
  open_barrier(b, id, count ? count : static_cast<int>(block_threads()), s);
  if (id == 0 && b.site.line != s.line)
    fail("divergent __syncthreads: " + who() + " at " + at(s) + ", others at " + at(b.site));
  b.waiting.push_back(current);
  if (++b.arrived < b.expected) return block_here("barrier", s);
  complete(b);
}

void cluster_sync(Site s) {
  of_cluster.expected = static_cast<int>(threads.size());
  of_cluster.waiting.push_back(current);
  if (++of_cluster.arrived < of_cluster.expected) return block_here("cluster barrier", s);
  complete(of_cluster);
}

void bar_arrive(int id, int count, Site s) {
  Barrier& b = barriers[current->rank][id];
  open_barrier(b, id, count, s);
  join(b.clock, current->clock);
  join(b.proxy, current->proxy);
  current->clock[current->id]++;
  if (++b.arrived == b.expected) complete(b);
  let_others_run();
}

// Blocks run one after another here: a turn that has not come waits for a block that may never be scheduled.
void turn_wait(const int* p, int turn, Site s) {
  if (*p != turn)
    fail(format("turn %d has not come (it is %d): blocks wait against their launch order, ", turn, *p) + who() +
         " at " + at(s));
}
void turn_pass(int* p, int next) { *p = next; }

}  // namespace emulator
