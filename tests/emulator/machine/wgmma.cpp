// wgmma m64nNk16 (of e4m3 m64nNk32) and setmaxnreg: collective operations of a warpgroup.
#include "state.h"

namespace emulator {
namespace {

struct Product {
  float* d[128];
  std::vector<float> before;  // the accumulators as they were at the issue, [thread][n / 2]; empty: from the queue
  uint32_t a[128][4];
  bool a_registers, accumulate, a_mn_major, b_mn_major;
  Element element;
  uint64_t desc_a, desc_b;
  int rank;  // of its block in the cluster
  int n;
  int size() const { return element == Element::e4m3 ? 1 : 2; }  // bytes of an element
  int depth() const { return 32 / size(); }
};
struct Warpgroup {
  int arrived;
  const char* what;
  Site site;
  void* args[128];
  bool fenced;
  int registers;
  Groups<Product> products;
};
Warpgroup groups[8];

template <class A, class F>
void collective(const char* what, A& args, Site s, F&& work) {
  const int first = current->id / 128 * 128;
  Warpgroup& w = groups[current->id / 128];
  if (w.arrived == 0) {
    w.what = what;
    w.site = s;
  } else if (w.what != what || w.site.line != s.line) {
    fail(std::string("divergent warpgroup: ") + what + " at " + at(s) + " meets " + w.what + " at " + at(w.site) +
         ", " + who());
  }
  w.args[current->id - first] = &args;
  if (++w.arrived < 128) return block_here(what, s);
  w.arrived = 0;
  work(w, reinterpret_cast<A**>(w.args));
  for (int i = 0; i < 128; i++) threads[first + i].state = State::runnable;
}

// The bytes of the swizzle that a descriptor names in bits 62 and 63; 0: one that is not modelled.
int swizzle_of(uint64_t desc) { return desc >> 62 == 1 ? 128 : desc >> 62 == 2 ? 64 : 0; }
// What is modelled of the descriptors of the PTX ISA (Asynchronous Warpgroup Level Matrix Shared Memory Layout):
// K-major rows of 128 or 64 bytes in groups of eight, a group `stride` after the other, 16-byte chunks of a row
// exchanged by the bits of the address above it; MN-major, of 16-bit numbers alone, panels of 64 x 8 with 128-byte
// swizzle. A step along K adds its bytes to the start, within a row; the pattern itself begins at a multiple of its
// eight rows (base offset 0).
uint32_t operand_offset(const Product& o, uint64_t desc, int mn, int k, bool mn_major) {
  const uint32_t start = (desc & 0x3fff) << 4, lead = (desc >> 16 & 0x3fff) << 4, stride = (desc >> 32 & 0x3fff) << 4;
  const int line = swizzle_of(desc);
  const uint32_t own = mn_major ? start + mn / 64 * lead + k / 8 * stride + k % 8 * 128 + mn % 64 * 2
                                : start + mn / 8 * stride + mn % 8 * line + k * o.size();
  return in_cluster(swizzled(own, line), o.rank);
}
template <class F>
void each_operand(const Product& o, F&& f) {
  for (int k = 0; k < o.depth(); k += 2 / o.size()) {  // two bytes at a time
    for (int i = 0; i < 64 && !o.a_registers; i++) f(operand_offset(o, o.desc_a, i, k, o.a_mn_major));
    for (int j = 0; j < o.n; j++) f(operand_offset(o, o.desc_b, j, k, o.b_mn_major));
  }
}
// The sum of the accumulator and 32 products of e4m3 as Hopper adds them: terms keep 13 bits below the largest one
// (DeepSeek-V3, arXiv 2412.19437, counts about 14 bits), the rest is cut off.
float add_and_cut_e4m3(float sum, const float* a, const float* b, int b_step) {
  int top = sum != 0 ? std::ilogb(sum) : -1000;
  float product[32];
  for (int k = 0; k < 32; k++) {
    product[k] = a[k] * b[k * b_step];  // exact
    if (product[k] != product[k] || std::isinf(product[k])) return product[k];
    if (product[k] != 0) top = std::max(top, std::ilogb(product[k]));
  }
  if (sum != sum || std::isinf(sum) || top == -1000) return sum;
  double total = std::trunc(std::ldexp(static_cast<double>(sum), 13 - top));
  for (float x : product) total += std::trunc(std::ldexp(static_cast<double>(x), 13 - top));
  return static_cast<float>(std::ldexp(total, top - 13));
}
// element e of thread i's accumulator in the 64 x n tile
int accumulator_offset(int i, int e, int n) {
  return (i / 32 * 16 + i % 32 / 4 + 8 * (e >> 1 & 1)) * n + e / 4 * 8 + 2 * (i % 4) + (e & 1);
}

void run(const Product& o, int first) {
  const bool bytes = o.element == Element::e4m3, bf16 = o.element == Element::bf16;
  const int depth = o.depth(), per_word = 4 / o.size();
  std::vector<float> a(64 * depth), b(depth * o.n), c(64 * o.n);
  const auto value = [&](uint32_t bits) {
    return bytes ? from_e4m3(static_cast<uint8_t>(bits)) : value16(static_cast<uint16_t>(bits), bf16);
  };
  const auto load = [&](uint32_t offset) {
    uint16_t e = 0;
    memcpy(&e, smem + offset, o.size());
    return value(e);
  };
  for (int k = 0; k < depth; k++) {
    for (int i = 0; i < 64 && !o.a_registers; i++)
      a[i * depth + k] = load(operand_offset(o, o.desc_a, i, k, o.a_mn_major));
    for (int j = 0; j < o.n; j++) b[k * o.n + j] = load(operand_offset(o, o.desc_b, j, k, o.b_mn_major));
  }
  for (int i = 0; i < 128 && o.a_registers; i++)
    for (int q = 0; q < 4; q++)
      for (int h = 0; h < per_word; h++)
        a[(i / 32 * 16 + i % 32 / 4 + 8 * (q & 1)) * depth + per_word * (i % 4 + 4 * (q >> 1)) + h] =
            value(o.a[i][q] >> 32 / per_word * h);
  const int per = o.n / 2;
  if (o.accumulate)
    for (int i = 0; i < 128; i++)
      for (int e = 0; e < per; e++)
        c[accumulator_offset(i, e, o.n)] = o.before.empty() ? o.d[i][e] : o.before[i * per + e];
  if (options.cut_sums && bytes) {
    for (int i = 0; i < 64; i++)
      for (int j = 0; j < o.n; j++) c[i * o.n + j] = add_and_cut_e4m3(c[i * o.n + j], &a[i * 32], &b[j], o.n);
  } else if (options.cut_sums) {
    const auto product = [&](int i, int k, int j) {
      return static_cast<double>(a[i * 16 + k]) * static_cast<double>(b[k * o.n + j]);
    };
    for (int i = 0; i < 64; i++)
      for (int j = 0; j < o.n; j++)
        for (int k = 0; k < 16; k += 4) {
          float& sum = c[i * o.n + j];
          sum = add_and_cut(sum, product(i, k, j), product(i, k + 1, j), product(i, k + 2, j), product(i, k + 3, j));
        }
  } else {
    for (int i = 0; i < 64; i++)
      for (int k = 0; k < depth; k++)
        for (int j = 0; j < o.n; j++) c[i * o.n + j] += a[i * depth + k] * b[k * o.n + j];
  }
  for (int i = 0; i < 128; i++)
    for (int e = 0; e < per; e++) o.d[i][e] = c[accumulator_offset(i, e, o.n)];
  each_operand(o, [&](uint32_t offset) {
    smem_release(offset, 2, threads[first]);
    for (int w = 1; w < 4 && options.check; w++)
      shadow[offset / granule].read_clock[first / 32 + w] = threads[first + w * 32].clock[first + w * 32] << 5;
  });
}

}  // namespace

void reset_wgmma() {
  for (auto& w : groups) w = Warpgroup{};
}

void wgmma_fence(Site s) {
  int nothing = 0;
  collective("wgmma.fence", nothing, s, [](Warpgroup& w, int**) { w.fenced = true; });
}

void wgmma(float* d, int n, const uint32_t* a, uint64_t desc_a, uint64_t desc_b, bool accumulate, bool a_mn_major,
           bool b_mn_major, Element element, Site s) {
  struct Args {
    float* d;
    const uint32_t* a;
    uint64_t desc_a, desc_b;
    bool accumulate;
  } args{d, a, desc_a, desc_b, accumulate};
  collective("wgmma", args, s, [&](Warpgroup& w, Args** l) {
    if (!w.fenced) fail("wgmma without wgmma.fence since the last wait, " + who() + " at " + at(s));
    counts.mma++;
    Product o{};
    o.a_registers = a != nullptr, o.accumulate = accumulate, o.a_mn_major = a_mn_major, o.b_mn_major = b_mn_major;
    o.element = element, o.desc_a = desc_a, o.desc_b = desc_b, o.rank = current->rank, o.n = n;
    for (uint64_t desc : {a ? desc_b : desc_a, desc_b}) {
      const int line = swizzle_of(desc);
      if (!line || (desc >> 49 & 7) || ((a_mn_major || b_mn_major) && line != 128))
        fail("wgmma: only descriptors with 128-byte swizzle, or 64-byte K-major, and base offset 0 are modelled, at " +
             at(s));
      if (element != Element::e4m3) continue;
      if (a_mn_major || b_mn_major) fail("wgmma: operands of e4m3 are K-major, at " + at(s));
      // a step of 32 bytes stays within a row; groups of eight rows follow each other without a gap
      const uint32_t start = (desc & 0x3fff) << 4, stride = (desc >> 32 & 0x3fff) << 4;
      if (start % (8 * line) > static_cast<uint32_t>(line - 32) || stride != static_cast<uint32_t>(8 * line))
        fail("wgmma: a descriptor of e4m3 that leaves its rows, at " + at(s));
    }
    for (int i = 0; i < 128; i++) {
      if (l[i]->desc_a != desc_a || l[i]->desc_b != desc_b || l[i]->accumulate != accumulate)
        fail("wgmma: the threads of a warpgroup disagree on its operands, at " + at(s));
      o.d[i] = l[i]->d;
      if (a) memcpy(o.a[i], l[i]->a, sizeof o.a[i]);
    }
    each_operand(o, [&](uint32_t offset) { smem_read_by_proxy(offset, 2, "wgmma", s); });
    // In flight, the accumulators are nobody's: NaN until the wait. Chained products carry on from the queue.
    bool chained = false;
    for (auto& group : w.products.committed)
      for (auto& p : group) chained |= p.d[0] == o.d[0];
    for (auto& p : w.products.open) chained |= p.d[0] == o.d[0];
    if (!chained) {
      const int per = n / 2;
      o.before.resize(128 * per);
      for (int i = 0; i < 128; i++) {
        memcpy(&o.before[i * per], o.d[i], per * sizeof(float));
        memset(o.d[i], 0xff, per * sizeof(float));
      }
    }
    w.products.open.push_back(std::move(o));
  });
}

void wgmma_commit(Site s) {
  int nothing = 0;
  collective("wgmma.commit_group", nothing, s, [](Warpgroup& w, int**) { w.products.commit(); });
}

void wgmma_wait(int pending, Site s) {
  int nothing = 0;
  collective("wgmma.wait_group", nothing, s, [&](Warpgroup& w, int**) {
    auto& committed = w.products.committed;
    while (static_cast<int>(committed.size()) > pending) {
      for (auto& o : committed.front()) run(o, current->id / 128 * 128);
      committed.erase(committed.begin());
    }
    w.fenced = false;
  });
}

void setmaxnreg(int registers, Site s) {
  int mine = registers;
  collective("setmaxnreg", mine, s, [&](Warpgroup& w, int** l) {
    for (int i = 0; i < 128; i++)
      if (*l[i] != registers) fail("setmaxnreg differs within a warpgroup at " + at(s));
    if (registers % 8 || registers < 24 || registers > 256) fail("setmaxnreg value out of range at " + at(s));
    w.registers = registers;
    int sum = 0;
    const size_t own = block_threads() / 128, first = own * static_cast<size_t>(current->rank);
    for (size_t g = first; g < first + own; g++) sum += groups[g].registers * 128;
    if (sum > 65536) fail("setmaxnreg: the block's warpgroups ask for more than 64K registers, at " + at(s));
  });
}

}  // namespace emulator
