// The baseline: one block computes one (query token, head) in three passes over its KV.
//
// Grid:   x = T * H, head fastest. Block: 256 threads.
// Shared: 4 * (2 * 8 + 256 * VEC) bytes, VEC = elements in 128 bits (4 or 8): reductions, then the token groups' merge.
// Global: a float32 row of scores for each block: the softmax is the textbook's, maximum, exponentials, sum.
// Idea:   nothing is shared between heads or query tokens. Every block reads the 576 elements of a visible KV row for
//         its score and the 512 latent ones again for its value: the yardstick for what `tile` and `mma_*` save.
#include "addressing.cuh"

constexpr int BLOCK = 256;
constexpr int NUM_WARPS = BLOCK / WARP;
constexpr int VEC = vector_width<KV_DTYPE>();
constexpr int UNIT_BYTES = 16;
constexpr int UNITS = D / VEC;                             // 128-bit units in a row
constexpr int UNITS_PER_LANE = (UNITS + WARP - 1) / WARP;  // of the scores pass, one warp a token
constexpr int COLUMN_THREADS = DL / VEC;                   // of the values pass
constexpr int TOKEN_GROUPS = BLOCK / COLUMN_THREADS;
constexpr int BATCH = 4;  // KV tokens whose loads are in flight together
// Tokens of a thread that are summed apart: in one sum of 100,000, each would be rounded to the size of all before it.
constexpr int CHUNK = 256;

struct Smem {
  static constexpr u32 REDUCE = 0;                 // [NUM_WARPS] maxima, [NUM_WARPS] sums
  static constexpr u32 MERGE = 2 * NUM_WARPS * 4;  // [BLOCK][VEC] partial values
  static constexpr u32 BYTES = MERGE + BLOCK * VEC * 4;
};

struct Row {
  const VerifyParams& p;
  Request r;
  int token, head;
  int end;        // KV tokens at or past it are invisible
  float* scores;  // [end]
};

// BATCH tokens, STRIDE apart, whose loads are in flight together. A row that may not be read is null.
template <int STRIDE>
DEVICE void find_rows(KvRow (&rows)[BATCH], const Row& row, int first) {
#pragma unroll
  for (int b = 0; b < BATCH; b++) {
    const int kv = first + b * STRIDE;
    rows[b] = {nullptr, nullptr};
    if (kv < row.end && is_visible(row.p, row.r, row.token, kv)) rows[b] = kv_row(row.p, row.r, kv);
  }
}

template <bool ALIGNED>
DEVICE void load_q(Vector<Q_DTYPE> (&q_rmem)[UNITS_PER_LANE], const Row& row, int lane) {
  const u8* nope = q_nope_row(row.p, row.token, row.head);
  const u8* pe = q_pe_row(row.p, row.token, row.head);
#pragma unroll
  for (int i = 0; i < UNITS_PER_LANE; i++) {
    const int unit = lane + i * WARP;
    q_rmem[i] =
        unit < UNITS ? load_vector<Q_DTYPE, ALIGNED>(row_unit<Q_DTYPE>(nope, pe, unit)) : zero_vector<Q_DTYPE>();
  }
}

// Pass 1: one warp a KV token, BATCH of them at a time; returns the largest score this warp saw.
template <bool ALIGNED>
DEVICE float write_scores(const Row& row) {
  const int warp = thread_idx() / WARP, lane = thread_idx() % WARP;
  Vector<Q_DTYPE> q_rmem[UNITS_PER_LANE];
  load_q<ALIGNED>(q_rmem, row, lane);
  float largest = neg_inf();
  for (int first = warp; first < row.end; first += NUM_WARPS * BATCH) {
    KvRow rows[BATCH];
    find_rows<NUM_WARPS>(rows, row, first);
    float dot[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++) dot[b] = 0.0f;
#pragma unroll
    for (int i = 0; i < UNITS_PER_LANE; i++) {
      const int unit = lane + i * WARP;
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        Vector<KV_DTYPE> k = zero_vector<KV_DTYPE>();
        if (unit < UNITS && rows[b].c)
          k = load_vector<KV_DTYPE, ALIGNED>(row_unit<KV_DTYPE>(rows[b].c, rows[b].pe, unit));
#pragma unroll
        for (int j = 0; j < VEC; j++) dot[b] = fma_f32(q_rmem[i].v[j], k.v[j], dot[b]);
      }
    }
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
#pragma unroll
      for (int mask = WARP / 2; mask > 0; mask /= 2) dot[b] += shfl_xor_f32(dot[b], mask);
      if (!rows[b].c) continue;
      const float s = score_log2(row.p, dot[b]);
      if (lane == 0) st_global_f32(row.scores + first + b * NUM_WARPS, s);
      largest = max_f32(largest, s);
    }
  }
  return largest;
}

// Pass 2: scores become exponentials in place; returns this thread's part of their sum.
DEVICE float write_weights(const Row& row, float largest) {
  float sum = 0.0f;
  for (int kv = thread_idx(); kv < row.end; kv += BLOCK) {
    if (!is_visible(row.p, row.r, row.token, kv)) continue;
    const float w = ex2(ld_global_f32(row.scores + kv) - largest);
    st_global_f32(row.scores + kv, w);
    sum += w;
  }
  return sum;
}

// Pass 3: a thread owns VEC columns of every TOKEN_GROUPS-th token.
template <bool ALIGNED>
DEVICE Vector<KV_DTYPE> sum_values(const Row& row) {
  const int unit = thread_idx() % COLUMN_THREADS, group = thread_idx() / COLUMN_THREADS;
  Vector<KV_DTYPE> acc = zero_vector<KV_DTYPE>(), chunk = zero_vector<KV_DTYPE>();
  for (int first = group; first < row.end; first += TOKEN_GROUPS * BATCH) {
    if (first % (TOKEN_GROUPS * CHUNK) == group) {
#pragma unroll
      for (int j = 0; j < VEC; j++) acc.v[j] += chunk.v[j];
      chunk = zero_vector<KV_DTYPE>();
    }
    KvRow rows[BATCH];
    find_rows<TOKEN_GROUPS>(rows, row, first);
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      if (!rows[b].c) continue;
      const Vector<KV_DTYPE> v = load_vector<KV_DTYPE, ALIGNED>(rows[b].c + unit * UNIT_BYTES);
      const float w = ld_global_f32(row.scores + first + b * TOKEN_GROUPS);
#pragma unroll
      for (int j = 0; j < VEC; j++) chunk.v[j] = fma_f32(w, v.v[j], chunk.v[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < VEC; j++) acc.v[j] += chunk.v[j];
  return acc;
}

DEVICE void store_row(const Row& row, const Vector<KV_DTYPE>& acc, float inv_sum, u32 smem) {
  const u32 merge_smem = smem + Smem::MERGE;
#pragma unroll
  for (int j = 0; j < VEC; j++) st_shared_f32(merge_smem + (j * BLOCK + thread_idx()) * 4, acc.v[j]);
  block_sync();  // partial values written above are read below by the threads that own the columns
  for (int column = thread_idx(); column < DL; column += BLOCK) {
    float v = 0.0f;
#pragma unroll
    for (int group = 0; group < TOKEN_GROUPS; group++)
      v += ld_shared_f32(merge_smem + ((column % VEC) * BLOCK + group * COLUMN_THREADS + column / VEC) * 4);
    const i64 index = row.token * row.p.out_stride_t + row.head * row.p.out_stride_h + column;
    store_element<OUT_DTYPE>(element_ptr<OUT_DTYPE>(row.p.out, index), v * inv_sum);
  }
}

template <bool ALIGNED>
DEVICE void attend(const Row& row, u32 smem) {
  const int warp = thread_idx() / WARP, lane = thread_idx() % WARP;
  const float warp_largest = write_scores<ALIGNED>(row);
  if (lane == 0) st_shared_f32(smem + Smem::REDUCE + warp * 4, warp_largest);
  block_sync();  // scores and maxima of every warp are read by every thread below
  float largest = neg_inf();
#pragma unroll
  for (int w = 0; w < NUM_WARPS; w++) largest = max_f32(largest, ld_shared_f32(smem + Smem::REDUCE + w * 4));

  float sum = write_weights(row, largest == neg_inf() ? 0.0f : largest);
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) sum += shfl_xor_f32(sum, mask);
  if (lane == 0) st_shared_f32(smem + Smem::REDUCE + (NUM_WARPS + warp) * 4, sum);
  block_sync();  // weights and sums of every warp are read by every thread below
  sum = 0.0f;
#pragma unroll
  for (int w = 0; w < NUM_WARPS; w++) sum += ld_shared_f32(smem + Smem::REDUCE + (NUM_WARPS + w) * 4);
  // A maximum of NaN alone is -inf as well, which hides them; their sum does not.
  const bool empty = sum == 0.0f;

  store_row(row, sum_values<ALIGNED>(row), empty ? 0.0f : 1.0f / sum, smem);
  if (thread_idx() == 0)
    st_global_f32(row.p.lse + row.token * row.p.lse_stride_t + row.head * row.p.lse_stride_h,
                  empty ? neg_inf() : lse_out(row.p, largest + lg2(sum)));
}

KERNEL(mlaflash_naive, BLOCK, 1) {
  const int token = block_idx_x() / p.num_heads, head = block_idx_x() % p.num_heads;
  const Request r = find_request(p, token);
  const int end = r.index < 0 ? 0 : visible_end(p, r, token);
  const Row row{p, r, token, head, end, p.scores + ((i64)token * p.num_heads + head) * p.max_kv_len};
  if (p.vectorized)
    attend<true>(row, shared_base());
  else
    attend<false>(row, shared_base());
}
