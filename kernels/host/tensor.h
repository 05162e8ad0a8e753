// ldmatrix, movmatrix and mma.
#pragma once
#include "numeric.h"
#include "shadow.h"
#include "warp.h"

namespace emulator {

// Rows of a phase that lie in the same four banks, at different addresses, cost one more wavefront each.
INLINE u32 extra_wavefronts(const u32* addresses) {
  u32 most = 1;
  for (u32 bank = 0; bank < 8; ++bank) {
    u32 distinct = 0;
    for (u32 i = 0; i < 8; ++i) {
      if (addresses[i] / 16 % 8 != bank) continue;
      bool is_new = true;
      for (u32 k = 0; k < i; ++k) is_new &= addresses[k] != addresses[i];
      distinct += is_new;
    }
    most = distinct > most ? distinct : most;
  }
  return most - 1;
}

struct Matrices {
  u32* registers;
  u32 address;
};
OUT_OF_LINE void load_matrices(bool transposed, u32* registers, u32 address, Site site) {
  Matrices own{registers, address};
  const Op op = transposed ? Op::LDMATRIX_TRANS : Op::LDMATRIX;
  collective(op, 0, own, site, [transposed, site](Block& block, Matrices* const* lanes) {
    ++block.counters.ldmatrix;
    for (u32 matrix = 0; matrix < 4; ++matrix) {
      u32 addresses[8];
      u16 rows[8][8];
      for (u32 i = 0; i < 8; ++i) {
        addresses[i] = lanes[matrix * 8 + i]->address;
        memcpy(rows[i], shared_read<16>(addresses[i], site, SEVERAL_LANES), 16);
      }
      ++block.counters.ldmatrix_phases;
      block.counters.ldmatrix_extra_wavefronts += extra_wavefronts(addresses);
      for (u32 lane = 0; lane < WARP; ++lane) {
        const u32 i = lane / 4;
        const u32 k = lane % 4 * 2;
        const u32 low = transposed ? rows[k][i] : rows[i][k];
        const u32 high = transposed ? rows[k + 1][i] : rows[i][k + 1];
        lanes[lane]->registers[matrix] = low | high << 16;
      }
    }
  });
}

OUT_OF_LINE u32 transpose_matrix(u32 value, Site site) {
  u32 own = value;
  collective(Op::MOVMATRIX, 0, own, site, [](Block&, u32* const* lanes) {
    u16 rows[8][8];
    for (u32 lane = 0; lane < WARP; ++lane) memcpy(&rows[lane / 4][lane % 4 * 2], lanes[lane], 4);
    for (u32 lane = 0; lane < WARP; ++lane) {
      *lanes[lane] = rows[lane % 4 * 2][lane / 4] | (u32)rows[lane % 4 * 2 + 1][lane / 4] << 16;
    }
  });
  return own;
}

struct Fragments {
  float* c;
  const u32* a;
  u32 b[2];
};
template <float (*VALUE)(u16)>
INLINE void multiply_fragments(Op op, float* c, const u32* a, u32 b0, u32 b1, Site site) {
  Fragments own{c, a, {b0, b1}};
  collective(op, 0, own, site, [](Block& block, Fragments* const* lanes) {
    ++block.counters.mma;
    float a[16][16];
    union {
      float at[8];
      Floats4 half[2];
    } b[16], sum[16];
    for (u32 lane = 0; lane < WARP; ++lane) {
      const u32 group = lane / 4;
      const u32 pair = lane % 4 * 2;
      for (u32 r = 0; r < 4; ++r) {
        const u32 bits = lanes[lane]->a[r];
        float* row = &a[group + r % 2 * 8][pair + r / 2 * 8];
        row[0] = VALUE((u16)bits);
        row[1] = VALUE((u16)(bits >> 16));
      }
      for (u32 r = 0; r < 2; ++r) {
        const u32 bits = lanes[lane]->b[r];
        b[pair + r * 8].at[group] = VALUE((u16)bits);
        b[pair + r * 8 + 1].at[group] = VALUE((u16)(bits >> 16));
      }
    }
    for (u32 i = 0; i < 16; ++i) {
      Floats4 low = {};
      Floats4 high = {};
      for (u32 k = 0; k < 16; ++k) {
        low += a[i][k] * b[k].half[0];
        high += a[i][k] * b[k].half[1];
      }
      sum[i].half[0] = low;
      sum[i].half[1] = high;
    }
    for (u32 lane = 0; lane < WARP; ++lane) {
      for (u32 r = 0; r < 4; ++r) lanes[lane]->c[r] += sum[lane / 4 + r / 2 * 8].at[lane % 4 * 2 + r % 2];
    }
  });
}
OUT_OF_LINE void multiply_bf16(float* c, const u32* a, u32 b0, u32 b1, Site site) {
  multiply_fragments<bf16_value>(Op::MMA_BF16, c, a, b0, b1, site);
}
OUT_OF_LINE void multiply_f16(float* c, const u32* a, u32 b0, u32 b1, Site site) {
  multiply_fragments<f16_value>(Op::MMA_F16, c, a, b0, b1, site);
}

}  // namespace emulator
