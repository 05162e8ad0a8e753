// combine: merges the splits' partial results into out and lse.
//
//   w[s] = 2^(partial_lse[s] - max), out = sum_s w[s] * partial_out[s] / sum_s w[s],
//   lse = ln 2 * (max + log2 sum_s w[s]), or without the factor where it is asked for in base 2
//
// SPLIT_WARPS warps share the splits of one item: 128 columns of one (token, head) row, of which a lane owns 4. A block
// is at least 4 warps: with fewer SPLIT_WARPS it has several items of the same row.
//
// Grid:   x = T * H, y = 4 / items of a block. Block: 32 * max(4, SPLIT_WARPS) threads.
// Shared: 4 * MAX_SPLITS + 520 * max(4, SPLIT_WARPS) bytes, whatever num_splits is: 1 to MAX_SPLITS, at run time.
// Idea:   the kernel is short, so latency decides. It starts beside the split kernel, and finds all addresses before it
//         waits for that one's end. Then the first BATCH partial loads of every warp are in flight before the weights
//         are known. Many splits of few rows take many warps, so that one batch is all; few splits of many rows take
//         one, which needs no sum across warps. FEW_SPLITS: every warp finds the weights of all splits for itself.
//         DETERMINISTIC: splits are chunks, most of them perhaps empty, and nothing is loaded of those. Every sum has
//         an order that does not depend on how many there are: chunk s is in class s % 4, classes are summed from the
//         first chunk to the last one and then added from class 0 to 3, and an empty chunk adds nothing, or exactly 0.
// Source: the merge of split-KV decoding (Flash-Decoding). Rows of out and of the partials start on 16 bytes.
#include "addressing.cuh"

constexpr int WARPS = SPLIT_WARPS < 4 ? 4 : SPLIT_WARPS;
constexpr int THREADS = WARPS * WARP;
constexpr int COLUMNS = 4 * WARP;  // of one item
constexpr int ITEMS = WARPS / SPLIT_WARPS;
constexpr int BATCH = SPLIT_WARPS == 1 ? 4 : 8;               // loads of a batch of a lane
constexpr bool IS_AHEAD = SPLIT_WARPS == 1 || DETERMINISTIC;  // a batch is loaded while the one before it is summed
constexpr int BLOCKS = SPLIT_WARPS == 1 && !DETERMINISTIC ? 8 : 1;  // of an SM at least: 1,024 rows are then one wave
constexpr int MAX_SPLITS = DETERMINISTIC ? 2048 : FEW_SPLITS ? WARP : 1024;
constexpr int CLASSES = DETERMINISTIC ? 4 / SPLIT_WARPS : 1;  // sums of an item that a warp keeps apart
static_assert(!DETERMINISTIC || (CLASSES * SPLIT_WARPS == 4 && BATCH % CLASSES == 0), "four classes, in whole batches");
static_assert(WARPS % SPLIT_WARPS == 0 && DL % (ITEMS * COLUMNS) == 0, "blocks have whole items, rows whole blocks");
static_assert(!FEW_SPLITS || (!DETERMINISTIC && WARP % (BATCH * SPLIT_WARPS) == 0), "a batch has no split past 32");

struct Smem {
  static constexpr u32 WEIGHTS = 0;                            // float32 [MAX_SPLITS]
  static constexpr u32 MAXIMA = WEIGHTS + MAX_SPLITS * 4;      // float32 [WARPS]
  static constexpr u32 WEIGHT_SUMS = MAXIMA + WARPS * 4;       // float32 [WARPS]
  static constexpr u32 COLUMN_SUMS = WEIGHT_SUMS + WARPS * 4;  // float32 [WARPS][WARP][4]
  static constexpr u32 BYTES = COLUMN_SUMS + WARPS * WARP * 16;
};

struct Thread {
  int lane, warp;
  int row;     // token * H + head
  i64 rows;    // T * H
  int column;  // first of the lane's 4
  int first_split;
  const float* lse;  // the first that the thread loads
  u8* out;
  const u8* partial[BATCH];  // not DETERMINISTIC: of the first batch; instead of splits past the last one, that one's
};

DEVICE Thread locate(const VerifyParams& p) {
  Thread t;
  t.lane = thread_idx() % WARP;
  t.warp = thread_idx() / WARP;
  t.row = block_idx_x();
  t.rows = (i64)p.num_tokens * p.num_heads;
  t.column = (block_idx_y() * ITEMS + t.warp / SPLIT_WARPS) * COLUMNS + t.lane * 4;
  t.first_split = t.warp % SPLIT_WARPS;
  const int token = t.row / p.num_heads, head = t.row % p.num_heads, last = p.num_splits - 1;
  t.lse = p.partial_lse + (i64)t.row * p.num_splits + (FEW_SPLITS ? min_int(t.lane, last) : thread_idx());
  t.out = element_ptr<OUT_DTYPE>(p.out, token * p.out_stride_t + head * p.out_stride_h + t.column);
  if constexpr (!DETERMINISTIC) {
    const i64 first = min_int(t.first_split, last), step = SPLIT_WARPS * t.rows * DL * element_bytes<PARTIAL_DTYPE>();
    t.partial[0] = element_ptr<PARTIAL_DTYPE>((const void*)p.partial_out, (first * t.rows + t.row) * DL + t.column);
#pragma unroll
    for (int i = 1; i < BATCH; i++)
      t.partial[i] = t.partial[i - 1] + (t.first_split + i * SPLIT_WARPS <= last ? step : 0);
  }
  return t;
}

// Orders the split kernel's partials before every load that follows, under a programmatic launch. The question, whose
// answer is always yes, keeps the compiler from finding the addresses after the wait.
DEVICE void wait_for_partials(const Thread& t) {
  u64 addresses = (u64)t.lse + (u64)t.out;
  if constexpr (!DETERMINISTIC) addresses += (u64)t.partial[BATCH - 1];
  if (addresses != 0) wait_prerequisites();
}

// Four neighbours, of which the first lies on a multiple of four elements.
template <int DTYPE>
DEVICE f32x4 load_quad(const u8* ptr) {
  if constexpr (DTYPE == FLOAT32) {
    return ld_global_volatile_f32x4(ptr);
  } else {
    const u32x2 v = ld_global_volatile_u32x2(ptr);
    return {element_to_f32<DTYPE>((u16)v.x), element_to_f32<DTYPE>((u16)(v.x >> 16)), element_to_f32<DTYPE>((u16)v.y),
            element_to_f32<DTYPE>((u16)(v.y >> 16))};
  }
}
DEVICE void load_first_batch(f32x4 (&batch)[BATCH], const Thread& t) {
#pragma unroll
  for (int i = 0; i < BATCH; i++) batch[i] = load_quad<PARTIAL_DTYPE>(t.partial[i]);
}
// Splits first, first + SPLIT_WARPS, ... ; zeros past the last one. DETERMINISTIC: zeros for those of weight 0 as well.
DEVICE void load_batch(f32x4 (&batch)[BATCH], const VerifyParams& p, const Thread& t, u32 smem, int first) {
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    const int split = first + i * SPLIT_WARPS;
    batch[i] = {0.f, 0.f, 0.f, 0.f};
    if (split < p.num_splits && (!DETERMINISTIC || ld_shared_f32(smem + Smem::WEIGHTS + split * 4) != 0.f))
      batch[i] = load_quad<PARTIAL_DTYPE>(
          element_ptr<PARTIAL_DTYPE>((const void*)p.partial_out, (split * t.rows + t.row) * DL + t.column));
  }
}

DEVICE float warp_max(float v) {
#pragma unroll
  for (int distance = WARP / 2; distance; distance /= 2) v = max_f32(v, shfl_xor_f32(v, distance));
  return v;
}
DEVICE float warp_sum(float v) {
#pragma unroll
  for (int distance = WARP / 2; distance; distance /= 2) v += shfl_xor_f32(v, distance);
  return v;
}

struct Weights {
  float max;   // of the splits' log2-sum-exp; -inf: every split is empty
  float sum;   // of 2^(lse - max); 0 in the same case
  float lane;  // FEW_SPLITS: of split `lane`; the others' lie in shared memory
};

// All threads: the weights of the row's splits to shared memory.
DEVICE Weights share_weights(const VerifyParams& p, const Thread& t, u32 smem) {
  const u32 weights = smem + Smem::WEIGHTS, maxima = smem + Smem::MAXIMA, sums = smem + Smem::WEIGHT_SUMS;
  float max = neg_inf();
  const float* ptr = t.lse;
#pragma unroll 4
  for (int split = thread_idx(); split < p.num_splits; split += THREADS, ptr += THREADS) {
    const float lse = ld_global_cg_f32(ptr);
    st_shared_f32(weights + split * 4, lse);  // read back below by this thread alone
    max = max_f32(max, lse);
  }
  max = warp_max(max);
  if (t.lane == 0) st_shared_f32(maxima + t.warp * 4, max);
  block_sync();  // orders the writes of the warps' maxima before every thread's reads of them
#pragma unroll
  for (int w = 0; w < WARPS; w++) max = max_f32(max, ld_shared_f32(maxima + w * 4));

  float sum = 0.f;
  for (int split = thread_idx(); split < p.num_splits; split += THREADS) {
    const float lse = ld_shared_f32(weights + split * 4);
    const float weight = lse == neg_inf() ? 0.f : ex2(lse - max);
    st_shared_f32(weights + split * 4, weight);
    sum += weight;
  }
  sum = warp_sum(sum);
  if (t.lane == 0) st_shared_f32(sums + t.warp * 4, sum);
  block_sync();  // orders the writes of the weights and of the warps' sums before every thread's reads of them
  sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += ld_shared_f32(sums + w * 4);
  return {max, sum, 0.f};
}

// The same in registers, by each warp for itself. `lse` is that of split `lane`.
DEVICE Weights warp_weights(const VerifyParams& p, const Thread& t, float lse) {
  if (t.lane >= p.num_splits) lse = neg_inf();
  const float max = warp_max(lse);
  const float weight = lse == neg_inf() ? 0.f : ex2(lse - max);
  return {max, warp_sum(weight), weight};
}

DEVICE float weight_of(int split, const VerifyParams& p, const Weights& weights, u32 smem) {
  if constexpr (FEW_SPLITS) return as_f32(shfl_u32(as_u32(weights.lane), split));
  return split < p.num_splits ? ld_shared_f32(smem + Smem::WEIGHTS + split * 4) : 0.f;
}

DEVICE f32x4 add_quads(f32x4 a, f32x4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Splits first, first + SPLIT_WARPS, ... The question keeps what an empty split left in memory, NaN perhaps, out of the
// sum.
DEVICE void add_batch(f32x4 (&sums)[CLASSES], const f32x4 (&batch)[BATCH], const VerifyParams& p,
                      const Weights& weights, u32 smem, int first) {
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    f32x4& sum = sums[i % CLASSES];
    const float weight = weight_of(first + i * SPLIT_WARPS, p, weights, smem);
    if (weight == 0.f) continue;
    sum.x = fma_f32(weight, batch[i].x, sum.x);
    sum.y = fma_f32(weight, batch[i].y, sum.y);
    sum.z = fma_f32(weight, batch[i].z, sum.z);
    sum.w = fma_f32(weight, batch[i].w, sum.w);
  }
}

// Adds the sums of an item's SPLIT_WARPS warps; the item's first warp gets the total.
DEVICE f32x4 sum_over_warps(f32x4 sum, const Thread& t, u32 smem) {
  if constexpr (SPLIT_WARPS == 1) return sum;
  const u32 mine = smem + Smem::COLUMN_SUMS + thread_idx() * 16;
  st_shared_f32x4(mine, sum);
  block_sync();  // orders the writes of the column sums before the first warps' reads of them
  if (t.first_split != 0) return sum;
#pragma unroll
  for (int w = 1; w < SPLIT_WARPS; w++) {
    const f32x4 other = ld_shared_f32x4(mine + w * WARP * 16);
    sum = add_quads(sum, other);
  }
  return sum;
}

DEVICE void store(const VerifyParams& p, const Thread& t, f32x4 sum, const Weights& weights) {
  const float scale = weights.sum == 0.f ? 0.f : 1.f / weights.sum;
  store_quad<OUT_DTYPE>(t.out, {sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale});
  if (t.column != 0) return;
  const int token = t.row / p.num_heads, head = t.row % p.num_heads;
  st_global_f32(p.lse + token * p.lse_stride_t + head * p.lse_stride_h,
                weights.sum == 0.f ? neg_inf() : lse_out(p, weights.max + lg2(weights.sum)));
}

KERNEL(mlaflash_combine, THREADS, BLOCKS) {
  const u32 smem = shared_base();
  const Thread t = locate(p);
  wait_for_partials(t);

  f32x4 batch[BATCH];
  Weights weights;
  if constexpr (DETERMINISTIC) {
    weights = share_weights(p, t, smem);
    load_batch(batch, p, t, smem, t.first_split);
  } else {
    const float lse = FEW_SPLITS ? ld_global_volatile_f32(t.lse) : 0.f;
    load_first_batch(batch, t);
    weights = FEW_SPLITS ? warp_weights(p, t, lse) : share_weights(p, t, smem);
  }

  f32x4 sums[CLASSES] = {};
#pragma unroll 1
  for (int first = t.first_split; first < p.num_splits; first += BATCH * SPLIT_WARPS) {
    const int later = first + BATCH * SPLIT_WARPS;
    if constexpr (IS_AHEAD) {
      f32x4 next[BATCH];
      load_batch(next, p, t, smem, later);
      add_batch(sums, batch, p, weights, smem, first);
#pragma unroll
      for (int i = 0; i < BATCH; i++) batch[i] = next[i];
    } else {
      add_batch(sums, batch, p, weights, smem, first);
      if (BATCH * SPLIT_WARPS < MAX_SPLITS && later < p.num_splits) load_batch(batch, p, t, smem, later);
    }
  }
  f32x4 sum = sums[0];
#pragma unroll
  for (int c = 1; c < CLASSES; c++) sum = add_quads(sum, sums[c]);
  sum = sum_over_warps(sum, t, smem);
  if (t.first_split == 0) store(p, t, sum, weights);
}
