// The baseline: one block computes one (query token, head) in three passes over its KV.
//
// Grid:   x = T * H, head fastest. Block: 256 threads.
// Shared: 4 * (2 * 8 + 256 * VEC) bytes, VEC = elements in 128 bits (4 or 8): reductions, then the merge of the token groups.
// Global: a float32 row of scores for each block, so that the softmax is the textbook's: maximum, exponentials, sum.
// Idea:   nothing is shared between heads or query tokens. Every block reads the 576 elements of a visible KV row for its
//         score and the 512 latent ones again for its value: the yardstick for what `tile` and `mma` save.
#include "addressing.cuh"

constexpr int BLOCK = 256;
constexpr int NUM_WARPS = BLOCK / WARP;
constexpr int VEC = vector_width<KV_DTYPE>();
constexpr int UNITS = D / VEC;                                // 128-bit units in a row
constexpr int UNITS_PER_LANE = (UNITS + WARP - 1) / WARP;     // of the scores pass, one warp a token
constexpr int COLUMN_THREADS = DL / VEC;                      // of the values pass
constexpr int TOKEN_GROUPS = BLOCK / COLUMN_THREADS;

struct Smem {
  static constexpr u32 REDUCE = 0;                            // [NUM_WARPS] maxima, [NUM_WARPS] sums
  static constexpr u32 MERGE = 2 * NUM_WARPS * 4;             // [BLOCK][VEC] partial values
  static constexpr u32 BYTES = MERGE + BLOCK * VEC * 4;
};
constexpr float NEG_INF = -__builtin_huge_valf();

DEVICE void load_q(float (&q_rmem)[UNITS_PER_LANE][VEC], const VerifyParams& p, int token, int head, int lane) {
#pragma unroll
  for (int i = 0; i < UNITS_PER_LANE; i++) {
    const int unit = lane + i * WARP;
#pragma unroll
    for (int j = 0; j < VEC; j++) q_rmem[i][j] = 0.0f;
    if (unit < UNITS)
      load_vector<Q_DTYPE>(q_rmem[i], row_unit<Q_DTYPE>(q_nope_row(p, token, head), q_pe_row(p, token, head), unit),
                           p.vectorized);
  }
}

// Pass 1: one warp a KV token; returns the largest score this warp saw.
DEVICE float write_scores(const VerifyParams& p, const Request& r, int token, int head, float* scores, int end) {
  const int warp = thread_idx() / WARP, lane = thread_idx() % WARP;
  float q_rmem[UNITS_PER_LANE][VEC];
  load_q(q_rmem, p, token, head, lane);
  float largest = NEG_INF;
#pragma unroll 2
  for (int kv = warp; kv < end; kv += NUM_WARPS) {
    if (!is_visible(p, r, token, kv)) continue;
    const KvRow row = kv_row(p, r, kv);
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < UNITS_PER_LANE; i++) {
      const int unit = lane + i * WARP;
      if (unit >= UNITS) break;
      float k[VEC];
      load_vector<KV_DTYPE>(k, row_unit<KV_DTYPE>(row.c, row.pe, unit), p.vectorized);
#pragma unroll
      for (int j = 0; j < VEC; j++) dot = fma_f32(q_rmem[i][j], k[j], dot);
    }
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) dot += shfl_xor_f32(dot, mask);
    const float s = score_log2(p, dot);
    if (lane == 0) st_global_f32(scores + kv, s);
    largest = max_f32(largest, s);
  }
  return largest;
}

// Pass 2: scores become exponentials in place; returns this thread's part of their sum.
DEVICE float write_weights(const VerifyParams& p, const Request& r, int token, float* scores, int end, float largest) {
  float sum = 0.0f;
  for (int kv = thread_idx(); kv < end; kv += BLOCK) {
    if (!is_visible(p, r, token, kv)) continue;
    const float w = ex2(ld_global_f32(scores + kv) - largest);
    st_global_f32(scores + kv, w);
    sum += w;
  }
  return sum;
}

// Pass 3: a thread owns VEC columns of every TOKEN_GROUPS-th token.
DEVICE void sum_values(float (&acc)[VEC], const VerifyParams& p, const Request& r, int token, const float* scores,
                       int end) {
  const int unit = thread_idx() % COLUMN_THREADS, group = thread_idx() / COLUMN_THREADS;
#pragma unroll
  for (int j = 0; j < VEC; j++) acc[j] = 0.0f;
#pragma unroll 4
  for (int kv = group; kv < end; kv += TOKEN_GROUPS) {
    if (!is_visible(p, r, token, kv)) continue;
    const KvRow row = kv_row(p, r, kv);
    float v[VEC];
    load_vector<KV_DTYPE>(v, row.c + unit * 16, p.vectorized);
    const float w = ld_global_f32(scores + kv);
#pragma unroll
    for (int j = 0; j < VEC; j++) acc[j] = fma_f32(w, v[j], acc[j]);
  }
}

DEVICE void store_row(const VerifyParams& p, int token, int head, const float (&acc)[VEC], float inv_sum, u32 smem) {
  const u32 merge_smem = smem + Smem::MERGE;
#pragma unroll
  for (int j = 0; j < VEC; j++) st_shared_f32(merge_smem + (j * BLOCK + thread_idx()) * 4, acc[j]);
  block_sync();  // partial values written above are read below by the threads that own the columns
  for (int column = thread_idx(); column < DL; column += BLOCK) {
    float v = 0.0f;
#pragma unroll
    for (int group = 0; group < TOKEN_GROUPS; group++)
      v += ld_shared_f32(merge_smem + ((column % VEC) * BLOCK + group * COLUMN_THREADS + column / VEC) * 4);
    store_element<OUT_DTYPE>(
        element_ptr<OUT_DTYPE>(p.out, token * p.out_stride_t + head * p.out_stride_h + column), v * inv_sum);
  }
}

KERNEL(mlaflash_naive, BLOCK, 1) {
  const u32 smem = shared_base();
  const int token = block_idx_x() / p.num_heads, head = block_idx_x() % p.num_heads;
  const int warp = thread_idx() / WARP, lane = thread_idx() % WARP;
  const Request r = find_request(p, token);
  const int end = r.index < 0 ? 0 : visible_end(p, r, token);
  float* scores = p.scores + ((i64)token * p.num_heads + head) * p.scores_stride;

  const float warp_largest = write_scores(p, r, token, head, scores, end);
  if (lane == 0) st_shared_f32(smem + Smem::REDUCE + warp * 4, warp_largest);
  block_sync();  // scores and maxima of every warp are read by every thread below
  float largest = NEG_INF;
#pragma unroll
  for (int w = 0; w < NUM_WARPS; w++) largest = max_f32(largest, ld_shared_f32(smem + Smem::REDUCE + w * 4));
  const bool empty = largest == NEG_INF;

  float sum = write_weights(p, r, token, scores, end, empty ? 0.0f : largest);
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) sum += shfl_xor_f32(sum, mask);
  if (lane == 0) st_shared_f32(smem + Smem::REDUCE + (NUM_WARPS + warp) * 4, sum);
  block_sync();  // weights and sums of every warp are read by every thread below
  sum = 0.0f;
#pragma unroll
  for (int w = 0; w < NUM_WARPS; w++) sum += ld_shared_f32(smem + Smem::REDUCE + (NUM_WARPS + w) * 4);

  float acc[VEC];
  sum_values(acc, p, r, token, scores, end);
  store_row(p, token, head, acc, empty ? 0.0f : 1.0f / sum, smem);
  if (thread_idx() == 0)
    st_global_f32(p.lse + token * p.lse_stride_t + head * p.lse_stride_h,
                  empty ? NEG_INF : (largest + lg2(sum)) * LN_2);
}
