// mbarriers, and what the copy engine does: tile loads and stores, bulk copies and reductions.
#include "state.h"

namespace emulator {
namespace {

struct Mbarrier {
  uint32_t address;
  int count, pending, slot;
  int64_t bytes;          // expected and not yet arrived
  uint32_t phase, epoch;  // phase: parity of the phase in progress
  Clock clock, proxy;     // of those who arrived in this phase
  Clock done_clock, done_proxy;
  std::vector<Thread*> waiting;
};
struct Load {
  uint32_t dst, bar, bytes;
  TensorMap map;
  int coordinates[5];
};
std::vector<Mbarrier> mbarriers;
std::vector<Load> loads;

Mbarrier* find(uint32_t address) {
  for (auto& b : mbarriers)
    if (b.address == address) return &b;
  return nullptr;
}
Mbarrier& mbarrier(uint32_t address, Site s) {
  Mbarrier* b = find(address);
  if (!b) fail(format("mbarrier at offset %u was never initialised, ", address) + who() + " at " + at(s));
  return *b;
}

void complete_if_due(Mbarrier& b) {
  if (b.pending || b.bytes) return;
  b.phase ^= 1;
  b.pending = b.count;
  b.clock[threads.size() + b.slot] = ++b.epoch;
  b.done_clock = b.clock;
  b.done_proxy = b.proxy;
  std::fill(b.clock.begin(), b.clock.end(), 0);
  std::fill(b.proxy.begin(), b.proxy.end(), 0);
  for (Thread* t : b.waiting) {
    join(t->clock, b.done_clock);
    join(t->proxy, b.done_proxy);
    t->state = State::runnable;
  }
  b.waiting.clear();
}

// f(global address or null when outside the tensor, shared offset) for every element of a box
template <class F>
void each_element(const TensorMap& m, const int* coordinates, uint32_t tile, F&& f) {
  uint32_t index[5] = {}, offset = 0;
  for (;;) {
    bool inside = true;
    const unsigned char* p = m.base;
    for (int r = 0; r < m.rank; r++) {
      const int64_t c = static_cast<int64_t>(coordinates[r]) + index[r];
      inside = inside && c >= 0 && c < m.size[r];
      p += c * static_cast<int64_t>(r ? m.stride[r] : m.element);
    }
    f(inside ? p : nullptr, swizzled(tile + offset, m.swizzle));
    offset += m.element;
    int r = 0;
    while (r < m.rank && ++index[r] == m.box[r]) index[r++] = 0;
    if (r == m.rank) return;
  }
}
uint32_t box_bytes(const TensorMap& m) {
  uint32_t bytes = m.element;
  for (int r = 0; r < m.rank; r++) bytes *= m.box[r];
  return bytes;
}
void check_map(const TensorMap& m, uint32_t tile, Site s) {
  // the pattern, of eight rows, follows the address: a single row may lie anywhere in it
  if (tile % (m.swizzle ? m.box[2] == 1 ? 128 : 8 * m.swizzle : 16))
    fail("TMA tile not aligned to its swizzle pattern, " + who() + " at " + at(s));
  if (m.swizzle && static_cast<int>(m.box[0]) * m.element != m.swizzle)
    fail("TMA: the emulator's swizzle wants a box as wide as its rows, at " + at(s));
  if (reinterpret_cast<uintptr_t>(m.base) % 16) fail("TMA: the tensor is not 16-byte aligned, at " + at(s));
  for (int r = 1; r < m.rank; r++)
    if (m.stride[r] % 16) fail("TMA: a stride is not a multiple of 16 bytes, at " + at(s));
}

void land(const Load& o) {
  each_element(o.map, o.coordinates, o.dst, [&](const unsigned char* src, uint32_t dst) {
    if (src)
      memcpy(smem + dst, src, o.map.element);
    else
      memset(smem + dst, 0, o.map.element);
  });
  if (options.cluster > 1 && has_exited(static_cast<int>(o.dst / smem_pitch)))
    fail(format("a copy arrives in shared memory at offset %zu of a block that has exited", o.dst % smem_pitch));
  Mbarrier& b = *find(o.bar);
  if (options.check)
    for (uint32_t i = o.dst / granule; i < (o.dst + o.bytes) / granule; i++) {
      Cell& c = shadow[i];
      c.in_flight = c.ordinary = false;
      c.writer = static_cast<uint16_t>(threads.size() + b.slot);
      c.write_clock = b.epoch + 1;
    }
  b.bytes -= o.bytes;
  complete_if_due(b);
}
void issue(const Load& o, Site s) {
  smem_write(o.dst, o.bytes, true, s);
  counts.copies++;
  if (options.eager_copies)
    land(o);
  else
    loads.push_back(o);
}

void arrive(uint32_t address, uint32_t expect_bytes, Site s) {
  Mbarrier& b = mbarrier(address, s);
  smem_read(*current, address, 8, s);  // its initialisation must happen before
  join(b.clock, current->clock);
  join(b.proxy, current->proxy);
  current->clock[current->id]++;
  b.bytes += expect_bytes;
  if (--b.pending < 0) fail("mbarrier: more arrivals than its count, " + who() + " at " + at(s));
  complete_if_due(b);
  let_others_run();
}

}  // namespace

TensorMap tensor_map(const void* data, const ElementStrides& s, int64_t batch, int64_t heads, int64_t length,
                     int64_t dim, int64_t rows, int element, int line) {
  const auto refuse = [](const char* what, int64_t value) {
    throw Error("cuTensorMapEncodeTiled: " + format("%s %lld", what, static_cast<long long>(value)));
  };
  const int64_t size[4] = {dim, heads, length, batch}, box[4] = {line / element, 1, rows, 1};
  const auto bytes = [&](int64_t items, int64_t stride) { return items > 1 ? element * stride : 16; };
  const int64_t stride[4] = {element, bytes(heads, s.head), bytes(length, s.row), bytes(batch, s.batch)};
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (address == 0 || address % 16) refuse("expected an address that is a multiple of 16, got", int64_t(address));
  for (int r = 0; r < 4; r++) {
    if (size[r] < 1 || size[r] > int64_t{1} << 32) refuse("expected sizes from 1 to 2^32, got", size[r]);
    if (box[r] < 1 || box[r] > 256) refuse("expected boxes from 1 to 256, got", box[r]);
    if (r > 0 && (stride[r] % 16 || stride[r] < 0 || stride[r] >= int64_t{1} << 40))
      refuse("expected strides that are multiples of 16 bytes below 2^40, got", stride[r]);
  }
  TensorMap m{static_cast<const unsigned char*>(data), 4, element, {}, {}, {}, line};
  for (int r = 0; r < 4; r++) {
    m.size[r] = static_cast<uint32_t>(size[r]), m.box[r] = static_cast<uint32_t>(box[r]);
    m.stride[r] = static_cast<uint64_t>(stride[r]);
  }
  return m;
}

void reset_mbarriers() {
  mbarriers.clear();
  loads.clear();
}

bool land_one_copy() {
  if (loads.empty()) return false;
  const size_t i = options.order == Order::random ? rng() % loads.size() : 0;
  const Load o = loads[i];
  loads.erase(loads.begin() + static_cast<ptrdiff_t>(i));
  land(o);
  return true;
}

void mbarrier_init(uint32_t address, int count, Site s) {
  address = in_cluster(address);
  if (address % 8) fail("misaligned mbarrier at " + at(s));
  if (find(address)) fail("mbarrier initialised twice at " + at(s));
  if (mbarriers.size() == static_cast<size_t>(max_mbarriers * options.cluster))
    fail("too many mbarriers for the emulator");
  const Clock zero(clock_size(), 0);
  mbarriers.push_back({address, count, count, static_cast<int>(mbarriers.size()), 0, 0, 0, zero, zero, zero, zero, {}});
  smem_write(address, 8, false, s);
}
void mbarrier_arrive(uint32_t address, uint32_t expect_bytes, Site s) { arrive(in_cluster(address), expect_bytes, s); }
void mbarrier_arrive_at(uint32_t address, int rank, Site s) {
  if (rank < 0 || rank >= options.cluster) fail(format("the cluster has no block %d, ", rank) + who() + " at " + at(s));
  if (has_exited(rank)) fail("arrival at an mbarrier of a block that has exited, " + who() + " at " + at(s));
  arrive(in_cluster(address, rank), 0, s);
}
void mbarrier_wait(uint32_t address, int parity, Site s) {
  address = in_cluster(address);
  Mbarrier& b = mbarrier(address, s);
  smem_read(*current, address, 8, s);
  if (static_cast<int>(b.phase) == parity) {
    b.waiting.push_back(current);
    return block_here("mbarrier wait", s);
  }
  join(current->clock, b.done_clock);
  join(current->proxy, b.done_proxy);
}
void fence_proxy_async() { current->proxy = current->clock; }

void tma_load(uint32_t dst, const TensorMap& m, const int* coordinates, uint32_t bar, Site s) {
  tma_multicast(dst, m, coordinates, bar, 1u << current->rank, s);
}
void tma_multicast(uint32_t dst, const TensorMap& m, const int* coordinates, uint32_t bar, uint32_t blocks, Site s) {
  if (!blocks || blocks >> options.cluster)
    fail(format("the cluster has not the blocks %#x, ", blocks) + who() + " at " + at(s));
  check_map(m, dst, s);
  counts.copied_bytes += box_bytes(m);
  for (int rank = 0; rank < options.cluster; rank++) {
    if (!(blocks >> rank & 1)) continue;
    const uint32_t to = in_cluster(bar, rank);
    mbarrier(to, s);
    if (rank != current->rank) smem_read(*current, to, 8, s);  // its initialisation must happen before
    Load o{in_cluster(dst, rank), to, box_bytes(m), m, {}};
    std::copy(coordinates, coordinates + m.rank, o.coordinates);
    issue(o, s);
  }
}
void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, Site s) {
  mbarrier(in_cluster(bar), s);
  if (dst % 16 || reinterpret_cast<uintptr_t>(src) % 16 || bytes % 16)
    fail("misaligned bulk copy, " + who() + " at " + at(s));
  global_access(src, bytes, Access::read, s);
  counts.copied_bytes += bytes;
  const uint32_t words = bytes / 4;
  const TensorMap line{static_cast<const unsigned char*>(src), 1, 4, {words}, {words}, {4}, 0};
  issue({in_cluster(dst), in_cluster(bar), bytes, line, {}}, s);
}

void tma_store(const TensorMap& m, uint32_t src, const int* coordinates, Site s) {
  check_map(m, src, s);
  src = in_cluster(src);
  BulkOp o{src, box_bytes(m), nullptr, m, {}, s};
  std::copy(coordinates, coordinates + m.rank, o.coordinates);
  smem_read_by_proxy(src, o.bytes, "TMA store", s);
  current->bulk.open.push_back(o);
}
void bulk_reduce_add(float* dst, uint32_t src, uint32_t bytes, Site s) {
  if (src % 16 || reinterpret_cast<uintptr_t>(dst) % 16 || bytes % 16)
    fail("misaligned bulk reduction, " + who() + " at " + at(s));
  src = in_cluster(src);
  counts.atomics += bytes / 4;
  global_access(dst, bytes, Access::atomic, s);
  smem_read_by_proxy(src, bytes, "bulk reduction", s);
  current->bulk.open.push_back({src, bytes, dst, {}, {}, s});
}
void bulk_commit() { current->bulk.commit(); }

// Shared memory is read, and global memory written, as late as the wait allows.
void bulk_wait(int pending) {
  auto& groups = current->bulk.committed;
  while (static_cast<int>(groups.size()) > pending) {
    for (const BulkOp& o : groups.front()) {
      if (o.sum) {
        for (uint32_t i = 0; i < o.bytes / 4; i++) {
          float v;
          memcpy(&v, smem + o.src + 4 * i, 4);
          o.sum[i] += v;
        }
      } else {
        each_element(o.map, o.coordinates, o.src, [&](const unsigned char* dst, uint32_t src) {
          if (!dst) return;
          global_access(dst, o.map.element, Access::write, o.site);
          memcpy(const_cast<unsigned char*>(dst), smem + src, o.map.element);
        });
      }
      smem_release(o.src, o.bytes, *current);
    }
    groups.erase(groups.begin());
  }
}

}  // namespace emulator
