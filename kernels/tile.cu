// The shared-memory flash kernel: one block computes HT heads of one query token over one split of its KV.
//
// Grid:   x = T * ceil(H / HT), head tile fastest; y = split. Block: 256 threads.
// Shared: 4 * (576 * HT + 576 * TK + HT * TK * (1 + DIM_SLICES) + 3 * HT) + 16 * TK bytes (map in README.md).
// Idea:   a tile of TK KV rows is loaded once and used twice, as keys by all HT heads and, in its first 512 columns, as
//         values. Scores go through shared memory, and the value accumulators stay in registers. `naive` reads 1088
//         elements for each head and token, this kernel 576 for each HT heads.
// Source: the online softmax of Milakov and Gimelshein, arXiv:1805.02867; FlashAttention, arXiv:2205.14135.
#include "addressing.cuh"

constexpr int BLOCK = 256;
constexpr int NUM_WARPS = BLOCK / WARP;
constexpr int VEC = vector_width<KV_DTYPE>();
constexpr int UNITS = D / VEC;  // 128-bit global units in a row
constexpr int QUADS = D / 4;    // groups of four float32 in a row in shared memory

// Scores: a warp is TOKEN_LANES groups of lanes; the lanes of a group split the 576 dims, each holds HEADS x TOKENS
// sums. The q loads are the same for all groups (one wavefront), the k loads the same for all heads.
constexpr int TOKEN_LANES = min_int(4, TK);
constexpr int DIM_LANES = WARP / TOKEN_LANES;
constexpr int HEADS = min_int(8, HT);
constexpr int TOKENS = TK >= 32 ? 2 : 1;
constexpr int SCORE_SETS = (HT / HEADS) * (TK / (TOKEN_LANES * TOKENS));  // warp-sized pieces of the HT x TK scores
constexpr int DIM_SLICES = max_int(1, NUM_WARPS / SCORE_SETS);            // idle warps take a slice of the dims
// Values: a thread owns two neighbouring columns of all heads.
constexpr int COLUMNS = DL / BLOCK;
static_assert(COLUMNS == 2, "values are loaded in pairs");
static_assert(DETERMINISTIC % TK == 0, "chunks are whole tiles");
constexpr int MIN_BLOCKS = HT <= 8 ? 2 : 1;  // two blocks hide each other's loads where 128 registers are enough

struct Smem {
  static constexpr u32 Q = 0;                                        // float32 [HT][576]
  static constexpr u32 KV = Q + HT * D * 4;                          // float32 [TK][576]
  static constexpr u32 PARTIAL = KV + TK * D * 4;                    // float32 [DIM_SLICES][HT][TK] parts of q.k
  static constexpr u32 WEIGHT = PARTIAL + DIM_SLICES * HT * TK * 4;  // float32 [TK][HT]
  static constexpr u32 ROWS = WEIGHT + TK * HT * 4;  // u64 [TK][2] addresses of the tile's rows, 0: invisible
  static constexpr u32 ALPHA = ROWS + TK * 16;       // float32 [HT] factor for what was accumulated so far
  static constexpr u32 MAXIMUM = ALPHA + HT * 4;     // float32 [HT] running maximum, base 2
  static constexpr u32 SUM = MAXIMUM + HT * 4;       // float32 [HT] running sum
  static constexpr u32 BYTES = SUM + HT * 4;
};

struct Split {
  int begin, end;  // KV tokens
};

// Equal runs of whole tiles; the last ones may be empty. DETERMINISTIC: chunk `block_idx_y()`.
DEVICE Split split_range(const VerifyParams& p, int end) {
  if constexpr (DETERMINISTIC) {
    const int begin_token = min_int(block_idx_y() * DETERMINISTIC, end);
    return {begin_token, min_int(begin_token + DETERMINISTIC, end)};
  }
  const int tiles = (end + TK - 1) / TK;
  const int per_split = (tiles + p.num_splits - 1) / p.num_splits;
  const int begin_token = min_int(block_idx_y() * per_split * TK, end);
  return {begin_token, min_int(begin_token + per_split * TK, end)};
}

DEVICE void store_unit(u32 row_smem, int unit, const Vector<KV_DTYPE>& x) {
#pragma unroll
  for (int j = 0; j < VEC; j += 4)
    st_shared_f32x4(row_smem + (unit * VEC + j) * 4, f32x4{x.v[j], x.v[j + 1], x.v[j + 2], x.v[j + 3]});
}

// Heads past the last one are zero rows: they cost time in the last head tile, and nothing else.
template <bool ALIGNED>
DEVICE void load_q(const VerifyParams& p, int token, int head_begin, u32 smem) {
  for (int i = thread_idx(); i < HT * UNITS; i += BLOCK) {
    const int h = i / UNITS, unit = i % UNITS, head = head_begin + h;
    Vector<Q_DTYPE> x = zero_vector<Q_DTYPE>();
    if (head < p.num_heads)
      x = load_vector<Q_DTYPE, ALIGNED>(row_unit<Q_DTYPE>(q_nope_row(p, token, head), q_pe_row(p, token, head), unit));
    store_unit(smem + Smem::Q + h * D * 4, unit, x);
  }
}

// Thread t < TK finds row t of the tile that begins at `kv_begin`.
DEVICE KvRow find_row(const VerifyParams& p, const Request& r, int token, int kv_begin, int kv_end) {
  const int kv = kv_begin + thread_idx();
  if (thread_idx() >= TK || kv >= kv_end || !is_visible(p, r, token, kv)) return {nullptr, nullptr};
  return kv_row(p, r, kv);
}

DEVICE void store_row_address(const KvRow& row, u32 smem) {
  if (thread_idx() >= TK) return;
  const u64 c = (u64)row.c, pe = (u64)row.pe;
  st_shared_u32x4(smem + Smem::ROWS + thread_idx() * 16, u32x4{(u32)c, (u32)(c >> 32), (u32)pe, (u32)(pe >> 32)});
}

// An invisible row is zeros: its weight is 0, and 0 times whatever lies in the cache may be NaN. A batch of loads is in
// flight before the first of them is stored.
template <bool ALIGNED>
DEVICE void load_tile(u32 smem) {
  constexpr int LOADS = (TK * UNITS + BLOCK - 1) / BLOCK;  // of a thread
  constexpr int BATCH = min_int(LOADS, ALIGNED ? 4 : 1);   // more spill at HT = 8
#pragma unroll 1
  for (int first = 0; first < LOADS; first += BATCH) {
    Vector<KV_DTYPE> x[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const int i = (first + b) * BLOCK + thread_idx();
      x[b] = zero_vector<KV_DTYPE>();
      if (i >= TK * UNITS) continue;
      const u32x4 row = ld_shared_u32x4(smem + Smem::ROWS + i / UNITS * 16);
      const u8* c = (const u8*)(row.x | (u64)row.y << 32);
      const u8* pe = (const u8*)(row.z | (u64)row.w << 32);
      if (c) x[b] = load_vector<KV_DTYPE, ALIGNED>(row_unit<KV_DTYPE>(c, pe, i % UNITS));
    }
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const int i = (first + b) * BLOCK + thread_idx();
      if (i < TK * UNITS) store_unit(smem + Smem::KV + i / UNITS * D * 4, i % UNITS, x[b]);
    }
  }
}

DEVICE float dot4(f32x4 a, f32x4 b, float sum) {
  return fma_f32(a.x, b.x, fma_f32(a.y, b.y, fma_f32(a.z, b.z, fma_f32(a.w, b.w, sum))));
}

// Sums v[0 .. HEADS) over the DIM_LANES lanes of a group; head i ends in v[0] of the lanes whose bits spell i. Halving
// the values at each step takes 7 shuffles for 8 heads over 8 lanes where a butterfly for each head takes 24.
DEVICE int reduce_heads(float (&v)[HEADS], int lane) {
  int head = 0;
#pragma unroll
  for (int step = 0; (DIM_LANES >> step) > 1; step++) {
    const int mask = DIM_LANES >> (step + 1), left = HEADS >> step;
    if (left > 1) {
      const bool upper = lane & mask;
#pragma unroll
      for (int i = 0; i < left / 2; i++) {
        const float sent = upper ? v[i] : v[i + left / 2];
        v[i] = (upper ? v[i + left / 2] : v[i]) + shfl_xor_f32(sent, mask);
      }
      head += upper ? left / 2 : 0;
    } else {
      v[0] += shfl_xor_f32(v[0], mask);
    }
  }
  return head;
}

DEVICE void tile_scores(u32 smem) {
  const int warp = thread_idx() / WARP, lane = thread_idx() % WARP;
  const int dim_lane = lane % DIM_LANES, token_lane = lane / DIM_LANES;
  for (int piece = warp; piece < SCORE_SETS * DIM_SLICES; piece += NUM_WARPS) {
    const int slice = piece / SCORE_SETS, set = piece % SCORE_SETS;
    const int h0 = set % (HT / HEADS) * HEADS, t0 = set / (HT / HEADS) * (TOKEN_LANES * TOKENS) + token_lane;
    float sum[TOKENS][HEADS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
#pragma unroll
      for (int h = 0; h < HEADS; h++) sum[t][h] = 0.0f;
#pragma unroll 2
    for (int quad = slice * DIM_LANES + dim_lane; quad < QUADS; quad += DIM_SLICES * DIM_LANES) {
      f32x4 k[TOKENS];
#pragma unroll
      for (int t = 0; t < TOKENS; t++)
        k[t] = ld_shared_f32x4(smem + Smem::KV + ((t0 + t * TOKEN_LANES) * D + quad * 4) * 4);
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        const f32x4 q = ld_shared_f32x4(smem + Smem::Q + ((h0 + h) * D + quad * 4) * 4);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) sum[t][h] = dot4(q, k[t], sum[t][h]);
      }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      const int h = h0 + reduce_heads(sum[t], lane);
      // Lanes that end with the same head hold the same sum: the one with the clear low bits stores it.
      if (dim_lane % (DIM_LANES / HEADS) == 0)
        st_shared_f32(smem + Smem::PARTIAL + ((slice * HT + h) * TK + t0 + t * TOKEN_LANES) * 4, sum[t][0]);
    }
  }
}

// One warp a head: maximum and sum of the tile join the running ones.
DEVICE void tile_softmax(const VerifyParams& p, u32 smem) {
  constexpr int TOKENS_PER_LANE = (TK + WARP - 1) / WARP;
  const int warp = thread_idx() / WARP, lane = thread_idx() % WARP;
  for (int h = warp; h < HT; h += NUM_WARPS) {
    float s[TOKENS_PER_LANE];
    const float old_maximum = ld_shared_f32(smem + Smem::MAXIMUM + h * 4);
    float maximum = old_maximum;
#pragma unroll
    for (int i = 0; i < TOKENS_PER_LANE; i++) {
      const int t = lane + i * WARP;
      s[i] = neg_inf();
      if (t < TK && (ld_shared_u32(smem + Smem::ROWS + t * 16) | ld_shared_u32(smem + Smem::ROWS + t * 16 + 4))) {
        float dot = 0.0f;
#pragma unroll
        for (int slice = 0; slice < DIM_SLICES; slice++)
          dot += ld_shared_f32(smem + Smem::PARTIAL + ((slice * HT + h) * TK + t) * 4);
        s[i] = score_log2(p, dot);
      }
      maximum = max_f32(maximum, s[i]);
    }
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) maximum = max_f32(maximum, shfl_xor_f32(maximum, mask));
    // An integer: alpha below is a power of two, and products with it are exact, whichever of them the compiler fuses
    // with a sum.
    if constexpr (DETERMINISTIC) maximum = ceil_f32(maximum);
    const float base = maximum == neg_inf() ? 0.0f : maximum;  // nothing visible yet: every weight is 2^-inf = 0
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < TOKENS_PER_LANE; i++) {
      const int t = lane + i * WARP;
      const float weight = ex2(s[i] - base);
      if (t < TK) st_shared_f32(smem + Smem::WEIGHT + (t * HT + h) * 4, weight);
      sum += weight;
    }
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) sum += shfl_xor_f32(sum, mask);
    warp_sync();  // every lane has read MAXIMUM before lane 0 replaces it
    if (lane == 0) {
      const float alpha = DETERMINISTIC ? exact_ex2(old_maximum - base) : ex2(old_maximum - base);
      const float old_sum = ld_shared_f32(smem + Smem::SUM + h * 4);
      st_shared_f32(smem + Smem::ALPHA + h * 4, alpha);
      st_shared_f32(smem + Smem::MAXIMUM + h * 4, maximum);
      st_shared_f32(smem + Smem::SUM + h * 4, old_sum * alpha + sum);
    }
  }
}

DEVICE void load_heads(float (&v)[HT], u32 addr) {
  if constexpr (HT >= 4) {
#pragma unroll
    for (int h = 0; h < HT; h += 4) {
      const f32x4 x = ld_shared_f32x4(addr + h * 4);
      v[h] = x.x, v[h + 1] = x.y, v[h + 2] = x.z, v[h + 3] = x.w;
    }
  } else {
#pragma unroll
    for (int h = 0; h < HT; h++) v[h] = ld_shared_f32(addr + h * 4);
  }
}

DEVICE void tile_values(float (&acc)[HT][COLUMNS], u32 smem) {
  const int column = thread_idx() * COLUMNS;
  {
    float alpha[HT];
    load_heads(alpha, smem + Smem::ALPHA);
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int j = 0; j < COLUMNS; j++) acc[h][j] *= alpha[h];
  }
#pragma unroll 2
  for (int t = 0; t < TK; t++) {
    float weight[HT];
    const f32x2 v = ld_shared_f32x2(smem + Smem::KV + (t * D + column) * 4);
    load_heads(weight, smem + Smem::WEIGHT + t * HT * 4);
#pragma unroll
    for (int h = 0; h < HT; h++) {
      acc[h][0] = fma_f32(weight[h], v.x, acc[h][0]);
      acc[h][1] = fma_f32(weight[h], v.y, acc[h][1]);
    }
  }
}

DEVICE void store_heads(const VerifyParams& p, int token, int head_begin, const float (&acc)[HT][COLUMNS], u32 smem) {
  const int column = thread_idx() * COLUMNS;
  const i64 num_rows = (i64)p.num_tokens * p.num_heads;
#pragma unroll
  for (int h = 0; h < HT; h++) {
    const int head = head_begin + h;
    if (head >= p.num_heads) break;
    const float maximum = ld_shared_f32(smem + Smem::MAXIMUM + h * 4);
    const float sum = ld_shared_f32(smem + Smem::SUM + h * 4);
    const bool empty = sum == 0.0f;  // the maximum of scores that are NaN is -inf as well, and would hide them
    const float inv_sum = empty ? 0.0f : 1.0f / sum;
    const float lse = empty ? neg_inf() : maximum + lg2(sum);
    if (p.num_splits == 1) {
#pragma unroll
      for (int j = 0; j < COLUMNS; j++)
        store_element<OUT_DTYPE>(
            element_ptr<OUT_DTYPE>(p.out, token * p.out_stride_t + head * p.out_stride_h + column + j),
            acc[h][j] * inv_sum);
      if (column == 0) st_global_f32(p.lse + token * p.lse_stride_t + head * p.lse_stride_h, lse_out(p, lse));
    } else {
      const i64 row = block_idx_y() * num_rows + (i64)token * p.num_heads + head;
#pragma unroll
      for (int j = 0; j < COLUMNS; j++) {
        if (DETERMINISTIC && empty) break;  // combine loads nothing of it
        store_element<PARTIAL_DTYPE>(element_ptr<PARTIAL_DTYPE>(p.partial_out, row * DL + column + j),
                                     acc[h][j] * inv_sum);
      }
      // The index fits 32 bits, as in mma.cuh.
      if (column == 0)
        st_global_f32(p.partial_lse + ((token * p.num_heads + head) * p.num_splits + block_idx_y()), lse);
    }
  }
}

template <bool ALIGNED>
DEVICE void attend(float (&acc)[HT][COLUMNS], const VerifyParams& p, const Request& r, int token, int head_begin,
                   Split split, u32 smem) {
  load_q<ALIGNED>(p, token, head_begin, smem);
  KvRow row = find_row(p, r, token, split.begin, split.end);
  for (int kv = split.begin; kv < split.end; kv += TK) {
    store_row_address(row, smem);
    block_sync();  // row addresses are written before the loads read them; the last tile's values are read before it
                   // goes
    load_tile<ALIGNED>(smem);
    row = find_row(p, r, token, kv + TK, split.end);  // its loads end under the arithmetic of this tile
    block_sync();  // q (first time), and the tile, are written before the scores read them
    tile_scores(smem);
    block_sync();  // all slices of the scores are written before the softmax sums them
    tile_softmax(p, smem);
    block_sync();  // weights and alpha are written before the values read them, row addresses read before they are
                   // replaced
    tile_values(acc, smem);
  }
}

KERNEL(mlaflash_tile, BLOCK, MIN_BLOCKS) {
  const u32 smem = shared_base();
  const int head_tiles = (p.num_heads + HT - 1) / HT;
  const int token = block_idx_x() / head_tiles, head_begin = block_idx_x() % head_tiles * HT;
  const Request r = find_request(p, token);
  const Split split = split_range(p, r.index < 0 ? 0 : visible_end(p, r, token));

  for (int h = thread_idx(); h < HT; h += BLOCK) {
    st_shared_f32(smem + Smem::MAXIMUM + h * 4, neg_inf());
    st_shared_f32(smem + Smem::SUM + h * 4, 0.0f);
  }
  float acc[HT][COLUMNS];
#pragma unroll
  for (int h = 0; h < HT; h++)
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) acc[h][j] = 0.0f;

  if (p.vectorized)
    attend<true>(acc, p, r, token, head_begin, split, smem);
  else
    attend<false>(acc, p, r, token, head_begin, split, smem);
  block_sync();  // MAXIMUM and SUM, of the initialisation where the split is empty, are written before they are read
  store_heads(p, token, head_begin, acc, smem);
}
