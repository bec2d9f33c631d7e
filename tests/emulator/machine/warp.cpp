// Collective operations of a warp.
#include "state.h"

namespace emulator {

float value16(uint16_t bits, bool bf16) {
  static const std::vector<float> halves = [] {
    std::vector<float> t(65536);
    for (int i = 0; i < 65536; i++) t[i] = from_half(static_cast<uint16_t>(i));
    return t;
  }();
  return bf16 ? from_bf16(bits) : halves[bits];
}

void sync_warp(Site s) {
  int nothing = 0;
  warp_collective("__syncwarp", nothing, s, [&](int**) {
    if (!options.check) return;
    Thread* list[32];
    for (int l = 0; l < 32; l++) list[l] = &threads[current->warp * 32 + l];
    synchronise(list, 32, Clock(clock_size(), 0), Clock(clock_size(), 0));
  });
}

uint32_t shfl(uint32_t value, int argument, Shuffle mode, Site s) {
  struct Args {
    uint32_t value, result;
    int argument;
  } args{value, 0, argument};
  warp_collective("shfl", args, s, [&](Args** l) {
    for (int i = 0; i < 32; i++)
      l[i]->result = l[(mode == Shuffle::index ? l[i]->argument : i ^ l[i]->argument) & 31]->value;
  });
  return args.result;
}

uint32_t ballot(bool p, Site s) {
  struct Args {
    bool p;
    uint32_t result;
  } args{p, 0};
  warp_collective("ballot", args, s, [&](Args** l) {
    uint32_t r = 0;
    for (int i = 0; i < 32; i++) r |= static_cast<uint32_t>(l[i]->p) << i;
    for (int i = 0; i < 32; i++) l[i]->result = r;
  });
  return args.result;
}

namespace {

// Eight 16-byte rows read or written at once: one phase each time they collide in the banks.
void count_phases(const uint32_t (&rows)[8]) {
  int hits[8] = {}, most = 0;
  for (uint32_t row : rows) most = std::max(most, ++hits[row / 16 % 8]);
  counts.ldmatrix++;
  counts.ldmatrix_phases += most;
}

}  // namespace

void ldmatrix(uint32_t* r, uint32_t addr, int count, bool trans, Site s) {
  struct Args {
    uint32_t *r, addr;
  } args{r, addr};
  warp_collective(trans ? "ldmatrix.trans" : "ldmatrix", args, s, [&](Args** l) {
    for (int m = 0; m < count; m++) {
      uint32_t rows[8];
      for (int i = 0; i < 8; i++) {
        rows[i] = in_cluster(l[m * 8 + i]->addr);
        if (rows[i] % 16)
          fail("misaligned ldmatrix row, lane " + std::to_string(m * 8 + i) + " of " + who() + " at " + at(s));
        // Row i goes to several lanes and nothing promises which of them reads it: check one far from its usual writer.
        smem_read(threads[current->warp * 32 + (4 * i + 17) % 32], rows[i], 16, s);
      }
      count_phases(rows);
      for (int i = 0; i < 32; i++) {
        uint16_t e[2];
        for (int k = 0; k < 2; k++) {
          const int row = trans ? 2 * (i % 4) + k : i / 4, col = trans ? i / 4 : 2 * (i % 4) + k;
          memcpy(&e[k], smem + rows[row] + 2 * col, 2);
        }
        l[i]->r[m] = e[0] | static_cast<uint32_t>(e[1]) << 16;
      }
    }
  });
}

void stmatrix(uint32_t addr, const uint32_t* r, int count, Site s) {
  struct Args {
    const uint32_t* r;
    uint32_t addr;
  } args{r, addr};
  warp_collective("stmatrix", args, s, [&](Args** l) {
    Thread* const self = current;
    for (int m = 0; m < count; m++) {
      uint32_t rows[8];
      for (int i = 0; i < 8; i++) {
        rows[i] = in_cluster(l[m * 8 + i]->addr);
        if (rows[i] % 16)
          fail("misaligned stmatrix row, lane " + std::to_string(m * 8 + i) + " of " + who() + " at " + at(s));
        current = &threads[self->warp * 32 + (4 * i + 17) % 32];  // nothing promises which lane writes a row
        smem_write(rows[i], 16, false, s);
        current = self;
        for (int j = 0; j < 4; j++) memcpy(smem + rows[i] + 4 * j, &l[4 * i + j]->r[m], 4);
      }
      count_phases(rows);
    }
  });
}

void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, bool bf16, Site s) {
  struct Args {
    float* d;
    const uint32_t *a, *b;
  } args{d, a, b};
  warp_collective(bf16 ? "mma.bf16" : "mma.f16", args, s, [&](Args** l) {
    counts.mma++;
    float ma[16][16], mb[16][8], mc[16][8];
    for (int i = 0; i < 32; i++) {
      const int g = i / 4, c = 2 * (i % 4);
      for (int h = 0; h < 2; h++) {
        const auto half = [&](uint32_t pair) { return value16(static_cast<uint16_t>(pair >> 16 * h), bf16); };
        for (int q = 0; q < 4; q++) ma[g + 8 * (q & 1)][c + 8 * (q >> 1) + h] = half(l[i]->a[q]);
        for (int q = 0; q < 2; q++) mb[c + 8 * q + h][g] = half(l[i]->b[q]);
        for (int q = 0; q < 2; q++) mc[g + 8 * q][c + h] = l[i]->d[2 * q + h];
      }
    }
    const auto product = [&](int i, int k, int j) {
      return static_cast<double>(ma[i][k]) * static_cast<double>(mb[k][j]);
    };
    for (int i = 0; i < 16; i++)
      for (int k = 0; k < 16; k += options.cut_sums ? 4 : 1) {
        if (options.cut_sums) {
          for (int j = 0; j < 8; j++)
            mc[i][j] = add_and_cut(mc[i][j], product(i, k, j), product(i, k + 1, j), product(i, k + 2, j),
                                   product(i, k + 3, j));
        } else {
          for (int j = 0; j < 8; j++) mc[i][j] += ma[i][k] * mb[k][j];
        }
      }
    for (int i = 0; i < 32; i++)
      for (int q = 0; q < 4; q++) l[i]->d[q] = mc[i / 4 + 8 * (q >> 1)][2 * (i % 4) + (q & 1)];
  });
}

}  // namespace emulator
