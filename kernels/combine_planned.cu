// combine_planned: merges the parts of row tiles that kernels/plan.cu gave to several blocks, into out and lse; and
// empties the rows of query tokens behind the last request, which belong to nobody.
//
//   w[i] = 2^(partial_lse[i] - max), out = sum_i w[i] * partial_out[i] / sum_i w[i],
//   lse = ln 2 * (max + log2 sum_i w[i])
//
// Grid:   x = work_blocks, y = any. Block: 512 threads.
// Shared: 8,256 bytes (struct Smem).
// Idea:   a row tile in n + 1 parts is merged by the n grid columns of the blocks that hold its later parts: whatever
//         the lengths, each column reads at most twice the rows that a part has, and columns without one end at once.
//         An item is 128 columns of a row, four a lane. With few parts a warp takes an item alone, with many the warps
//         of the block share one: which, only the device knows.
// Source: the merge of split-KV decoding (Flash-Decoding). Rows of out and of the partials start on 16 bytes.
#include "work.cuh"

constexpr int WARPS = 16;
constexpr int THREADS = WARPS * WARP;
constexpr int COLUMNS = 4 * WARP;  // of an item
constexpr int ITEMS_PER_ROW = DL / COLUMNS;
constexpr int BATCH = PARTIAL_DTYPE == FLOAT32 ? 5 : 10;  // parts that a lane has in flight, in 64 registers

struct Smem {
  static constexpr u32 SUMS = 0;                           // float32 [WARPS][WARP][4] of columns
  static constexpr u32 WEIGHT_SUMS = SUMS + THREADS * 16;  // float32 [WARPS]
  static constexpr u32 BYTES = WEIGHT_SUMS + WARPS * 4;
};

// Warps that share an item: where they can, they have all loads of it in flight at once.
DEVICE int warps_per_item(int parts) {
  int warps = 1;
  while (warps < WARPS && warps * BATCH < parts) warps *= 2;
  return warps;
}

struct Item {
  int row;     // packed
  int column;  // first of the lane's 4
};

// Row of the partial results that part `i` of a row has.
DEVICE i64 row_of_part(const WorkMerge& m, int i, int row) {
  return part_row(i == 0 ? 2 * m.first_block + 1 : 2 * (m.first_block + i), row);
}

// Four neighbours as they are in memory; the first lies on a multiple of four elements.
template <int DTYPE>
struct Quad {
  u32x2 bits;
};
template <>
struct Quad<FLOAT32> {
  f32x4 bits;
};
template <int DTYPE>
DEVICE Quad<DTYPE> load_quad(const u8* ptr) {
  if constexpr (DTYPE == FLOAT32)
    return {ld_global_cg_f32x4(ptr)};
  else
    return {ld_global_cg_u32x2(ptr)};
}
template <int DTYPE>
DEVICE f32x4 unpack(const Quad<DTYPE>& quad) {
  if constexpr (DTYPE == FLOAT32) {
    return quad.bits;
  } else {
    const u32x2 v = quad.bits;
    return {element_to_f32<DTYPE>((u16)v.x), element_to_f32<DTYPE>((u16)(v.x >> 16)), element_to_f32<DTYPE>((u16)v.y),
            element_to_f32<DTYPE>((u16)(v.y >> 16))};
  }
}
// Greatest log2-sum-exp of the parts of a row; a warp together.
DEVICE float max_lse(const VerifyParams& p, const WorkMerge& m, int parts, int row) {
  constexpr int LOADS = 8;  // in flight
  float max = neg_inf();
  for (int first = thread_idx() % WARP; first < parts; first += LOADS * WARP) {
    float lse[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int part = first + i * WARP;
      lse[i] = part < parts ? ld_global_cg_f32(p.partial_lse + row_of_part(m, part, row)) : neg_inf();
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) max = max_f32(max, lse[i]);
  }
#pragma unroll
  for (int distance = WARP / 2; distance; distance /= 2) max = max_f32(max, shfl_xor_f32(max, distance));
  return max;
}

// Every `step`th part, BATCH of them: the lane's columns, and the log2-sum-exp; -inf past the last part.
struct Batch {
  Quad<PARTIAL_DTYPE> columns[BATCH];
  float lse[BATCH];
};

DEVICE void load_batch(Batch& batch, const VerifyParams& p, const WorkMerge& m, int parts, const Item& item, int first,
                       int step) {
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    batch.lse[i] = neg_inf();
    batch.columns[i] = {};
    if (first + i * step >= parts) continue;
    const i64 row = row_of_part(m, first + i * step, item.row);
    batch.lse[i] = ld_global_cg_f32(p.partial_lse + row);
    batch.columns[i] =
        load_quad<PARTIAL_DTYPE>(element_ptr<PARTIAL_DTYPE>((const void*)p.partial_out, row * DL + item.column));
  }
}

struct Sum {
  f32x4 columns;
  float weights;
};

// The test keeps what a part without tokens left in memory, NaN perhaps, out of the sum.
DEVICE void add_batch(Sum& sum, const Batch& batch, float max) {
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    if (batch.lse[i] == neg_inf()) continue;
    const float weight = ex2(batch.lse[i] - max);
    const f32x4 columns = unpack(batch.columns[i]);
    sum.weights += weight;
    sum.columns.x = fma_f32(weight, columns.x, sum.columns.x);
    sum.columns.y = fma_f32(weight, columns.y, sum.columns.y);
    sum.columns.z = fma_f32(weight, columns.z, sum.columns.z);
    sum.columns.w = fma_f32(weight, columns.w, sum.columns.w);
  }
}

// Parts first, first + step, ... of an item. The first batch is in flight before the greatest lse is known.
DEVICE Sum sum_parts(const VerifyParams& p, const WorkMerge& m, int parts, const Item& item, int first, int step,
                     float& max) {
  Sum sum = {{0.f, 0.f, 0.f, 0.f}, 0.f};
  Batch batch;
  load_batch(batch, p, m, parts, item, first, step);
  max = max_lse(p, m, parts, item.row);
#pragma unroll 1
  for (int next = first + BATCH * step;; next += BATCH * step) {
    add_batch(sum, batch, max);
    if (next >= parts) return sum;
    load_batch(batch, p, m, parts, item, next, step);
  }
}

// Adds the sums of the warps that share an item; the first of them gets the total. All threads of the block.
DEVICE void add_warps(Sum& sum, int warps, u32 smem) {
  const int warp = thread_idx() / WARP;
  const u32 columns = smem + Smem::SUMS + thread_idx() * 16, weights = smem + Smem::WEIGHT_SUMS + warp * 4;
  block_sync();  // orders the reads of the items before this one before the writes below
  st_shared_f32x4(columns, sum.columns);
  if (thread_idx() % WARP == 0) st_shared_f32(weights, sum.weights);
  block_sync();  // orders the writes of the sums before the first warps' reads of them
  if (warp % warps) return;
  for (int w = 1; w < warps; w++) {
    const f32x4 other = ld_shared_f32x4(columns + w * WARP * 16);
    sum.columns = {sum.columns.x + other.x, sum.columns.y + other.y, sum.columns.z + other.z, sum.columns.w + other.w};
    sum.weights += ld_shared_f32(weights + w * 4);
  }
}

DEVICE void store(const VerifyParams& p, int q_begin, const Item& item, const Sum& sum, float max) {
  const int token = q_begin + item.row / p.num_heads, head = item.row % p.num_heads;
  const float scale = sum.weights == 0.f ? 0.f : 1.f / sum.weights;
  store_quad<OUT_DTYPE>(element_ptr<OUT_DTYPE>(p.out, token * p.out_stride_t + head * p.out_stride_h + item.column),
                        {sum.columns.x * scale, sum.columns.y * scale, sum.columns.z * scale, sum.columns.w * scale});
  if (item.column == 0)
    st_global_f32(p.lse + token * p.lse_stride_t + head * p.lse_stride_h,
                  sum.weights == 0.f ? neg_inf() : lse_out(p, max + lg2(sum.weights)));
}

// This block's share of the rows behind the last request.
DEVICE void store_padding(const VerifyParams& p, int q_end) {
  const int blocks = grid_dim_x() * grid_dim_y(), block = block_idx_y() * grid_dim_x() + block_idx_x();
  const int rows = (p.num_tokens - q_end) * p.num_heads;
  for (int i = block * WARPS + thread_idx() / WARP; i < rows * ITEMS_PER_ROW; i += blocks * WARPS) {
    const Item item = {i / ITEMS_PER_ROW, i % ITEMS_PER_ROW * COLUMNS + thread_idx() % WARP * 4};
    store(p, q_end, item, {{0.f, 0.f, 0.f, 0.f}, 0.f}, neg_inf());
  }
}

KERNEL(mlaflash_combine_planned, THREADS, 2) {
  const WorkMerge m = load_work_merge(p, block_idx_x());
  store_padding(p, load_work_merge(p, p.work_blocks).q_begin);
  wait_prerequisites();  // orders the parts before every load of them, under a programmatic launch
  if (m.first_block < 0) return;
  const int parts = m.last_block - m.first_block + 1, warps = warps_per_item(parts), per_block = WARPS / warps;
  const int items = (m.end_row - m.first_row) * ITEMS_PER_ROW;
  const int grid_columns = parts - 1, column = block_idx_x() - m.first_block - 1;
  const int warp = thread_idx() / WARP, first = (column * grid_dim_y() + block_idx_y()) * per_block;
  for (int base = first; base < items; base += grid_columns * grid_dim_y() * per_block) {
    const int index = base + warp / warps;
    const Item item = {m.first_row + index / ITEMS_PER_ROW, index % ITEMS_PER_ROW * COLUMNS + thread_idx() % WARP * 4};
    float max = neg_inf();
    Sum sum = {{0.f, 0.f, 0.f, 0.f}, 0.f};
    if (index < items) sum = sum_parts(p, m, parts, item, warp % warps, warps, max);
    if (warps > 1) add_warps(sum, warps, shared_base());
    if (index < items && warp % warps == 0) store(p, m.q_begin, item, sum, max);
  }
}
