// The one argument of every kernel, and the only place that reads MLAFLASH_* macros.
// mlaflash/schedule.py holds the same structure as a NumPy dtype; a test compares offsets and size.
#pragma once
#include "types.cuh"

// Element types of q, of the KV cache, of the splits' partial outputs and of out. The last two are of the cache alone;
// q and new rows are 16-bit then.
constexpr int FLOAT32 = 0;
constexpr int BFLOAT16 = 1;
constexpr int FLOAT16 = 2;
constexpr int FLOAT8_E4M3 = 3;  // 576 numbers, times one scale for the whole cache
constexpr int FP8_DS_MLA = 4;   // 656 bytes: 512 numbers in e4m3, the float32 scales of 128 each, 64 bfloat16 numbers

// What a query token may see. Everything before the request's last tokens is always visible.
constexpr int MASK_NONE = 0;
constexpr int MASK_CAUSAL = 1;
constexpr int MASK_TREE = 2;

struct VerifyParams {
  // Queries: [T, H, 512] and [T, H, 64], in Q_DTYPE. A fused [T, H, 576] array gives two pointers into it.
  const void* q_nope;
  const void* q_pe;
  // Cache rows: [pages, page_size, 512] and [pages, page_size, 64], in KV_DTYPE.
  const void* kv_c;
  const void* k_pe;
  // The last q_len tokens of each request, [T, 512] and [T, 64]; null: they are in the cache.
  const void* new_kv_c;
  const void* new_k_pe;
  const float* kv_scale;  // FLOAT8_E4M3: one float32; null: kv_scale_value
  const i32* qo_indptr;   // [B + 1]; null: request b owns tokens [b * max_q_len, (b + 1) * max_q_len)
  const i32* kv_lens;     // [B]; null, with SPARSE_IDS: max_kv_len each
  const void* kv_indptr;  // [B + 1], int32 or int64; null: page ids are rows of a block table
  const void* page_ids;   // [sum of pages] or [B, block_table_stride], int32 or int64
  const u32* mask_words;  // [T, mask_words_per_row]; bit j of row i: draft token i sees draft token j
  const i32* tail_lens;   // [B] tokens that the mask columns describe; null: q_len
  void* out;              // [T, H, 512] in OUT_DTYPE
  float* lse;             // [T, H], natural logarithm, or base 2
  void* partial_out;      // [num_splits, T * H, 512] in PARTIAL_DTYPE, each split normalised by its own sum
  float* partial_lse;     // [T * H, num_splits], base 2; -inf where a split saw nothing
  float* scores;          // naive only: [T, H, max_kv_len]
  u32* counters;          // zero on entry and on exit: arrivals of splits, for a reduction by the last block

  // Strides in elements; in bytes where KV_DTYPE is FP8_DS_MLA.
  i64 q_nope_stride_t, q_nope_stride_h;
  i64 q_pe_stride_t, q_pe_stride_h;
  i64 kv_c_stride_page, kv_c_stride_token;
  i64 k_pe_stride_page, k_pe_stride_token;
  i64 new_kv_c_stride, new_k_pe_stride;
  i64 block_table_stride;
  i64 out_stride_t, out_stride_h;
  i64 lse_stride_t, lse_stride_h;
  i64 max_kv_len;  // no request has more tokens

  i32 num_tokens;  // T
  i32 num_heads;   // H
  i32 batch;       // B
  i32 max_q_len;
  i32 page_size;
  u32 page_magic;  // token / page_size == umulhi(token, page_magic) >> page_shift, or token >> page_shift if magic is 0
  i32 page_shift;
  i32 mask_words_per_row;
  i32 num_splits;
  i32 mask_mode;    // MASK_*
  i32 wide_ids;     // 1: page_ids are int64
  i32 wide_indptr;  // 1: kv_indptr is int64
  i32 vectorized;   // 1: every q and KV row starts on 16 bytes, so 128-bit loads are legal
  float sm_scale;
  float logit_cap;  // 0: no soft-cap
  float kv_scale_value;

  // Schedules made on the device: the kernel plan writes them, kernels with PLANNED_ROWS follow them.
  void* work_items;    // WorkItem [work_blocks + row tiles of the batch]; a block's first item is the one of its index
  void* work_merges;   // WorkMerge [work_blocks + 1]; the last says where the query tokens of requests end
  void* work_scratch;  // of plan alone
  i32 work_blocks;     // blocks of the kernel that follows
  i32 work_row_tiles;  // most row tiles of a request
  i32 work_start_tiles;  // what starting on a row tile costs, in KV tiles
  i32 work_least_tiles;  // fewest KV tiles of a block while others have none

  i32 lse_base_2;  // 1: lse is a logarithm in base 2
};

#ifndef MLAFLASH_Q_DTYPE
#error "MLAFLASH_* constants are missing: compile kernels through mlaflash.jit or mlaflash.emulator"
#endif
constexpr int Q_DTYPE = MLAFLASH_Q_DTYPE;
constexpr int KV_DTYPE = MLAFLASH_KV_DTYPE;
constexpr bool FP8 = KV_DTYPE == FLOAT8_E4M3 || KV_DTYPE == FP8_DS_MLA;
constexpr bool TOKEN_SCALES = KV_DTYPE == FP8_DS_MLA;  // they come with the rows
constexpr int OUT_DTYPE = MLAFLASH_OUT_DTYPE;
constexpr int PARTIAL_DTYPE = MLAFLASH_PARTIAL_DTYPE;

// Tokens of a chunk, where a row's bits may depend on its own tokens alone (mlaflash/schedule.py says how); else 0.
// Chunks begin at multiples of it, and split `i` is chunk i whatever block computes it.
#ifdef MLAFLASH_DETERMINISTIC
constexpr int DETERMINISTIC = MLAFLASH_DETERMINISTIC;
#else
constexpr int DETERMINISTIC = 0;
#endif

// tile: heads and KV tokens of a tile, powers of two.
#ifdef MLAFLASH_HT
constexpr int HT = MLAFLASH_HT;
constexpr int TK = MLAFLASH_TK;
static_assert(HT > 0 && (HT & (HT - 1)) == 0, "HT must be a positive power of two");
static_assert(TK > 0 && (TK & (TK - 1)) == 0, "TK must be a positive power of two");
#endif

// combine: warps that share the splits of 128 columns of a row.
#ifdef MLAFLASH_SPLIT_WARPS
constexpr int SPLIT_WARPS = MLAFLASH_SPLIT_WARPS;
#endif

// combine: no more splits than a warp has lanes.
#ifdef MLAFLASH_FEW_SPLITS
constexpr bool FEW_SPLITS = MLAFLASH_FEW_SPLITS;
#else
constexpr bool FEW_SPLITS = false;
#endif

// mma_wide: warps are ROW_GROUPS x COLUMN_WARPS; a row group owns 16 packed rows, a column warp its share of the
// columns.
#ifdef MLAFLASH_ROW_GROUPS
constexpr int ROW_GROUPS = MLAFLASH_ROW_GROUPS;
#endif
#ifdef MLAFLASH_COLUMN_WARPS
constexpr int COLUMN_WARPS = MLAFLASH_COLUMN_WARPS;
#endif
// Tiles in the KV ring; how many ldmatrix a warp issues ahead of the products that use them; before which product it
// refills the ring.
#ifdef MLAFLASH_STAGES
constexpr int STAGES = MLAFLASH_STAGES;
#endif
#ifdef MLAFLASH_LOOKAHEAD
constexpr int LOOKAHEAD = MLAFLASH_LOOKAHEAD;
#endif
#ifdef MLAFLASH_REFILL_AT
constexpr int REFILL_AT = MLAFLASH_REFILL_AT;
#endif

// mma_roles, mma_narrow: of a warp's steps through its dims of q, those that stay in shared memory.
#ifdef MLAFLASH_SHARED_STEPS
constexpr int SHARED_STEPS = MLAFLASH_SHARED_STEPS;
#endif

// Tensor-core kernels. SOFT_CAP 1: logit_cap is positive. NEW_KV 1: new_kv_c and new_k_pe hold the last q_len tokens.
#ifdef MLAFLASH_SOFT_CAP
constexpr int SOFT_CAP = MLAFLASH_SOFT_CAP;
#endif
#ifdef MLAFLASH_NEW_KV
constexpr int NEW_KV = MLAFLASH_NEW_KV;
#endif
// SPLIT_KV 0: the rope columns of a cache row follow its latent ones; k_pe and its strides say nothing new. 1: they lie
// elsewhere.
#ifdef MLAFLASH_SPLIT_KV
constexpr int SPLIT_KV = MLAFLASH_SPLIT_KV;
#endif

// All kernels but combine. SPARSE_IDS 1: each query token is a request of its own, and its page ids are the slots that
// it sees, in any order; a negative one is none. Pages are slots, there is no mask, no qo_indptr, no kv_indptr.
#ifdef MLAFLASH_SPARSE_IDS
constexpr int SPARSE_IDS = MLAFLASH_SPARSE_IDS;
#else
constexpr int SPARSE_IDS = 0;
#endif

// Tensor-core kernels and combine. 0: the grid says what a block computes. Else the list of the kernel plan does, whose
// row tiles have this many rows.
#ifdef MLAFLASH_PLANNED_ROWS
constexpr int PLANNED_ROWS = MLAFLASH_PLANNED_ROWS;
#else
constexpr int PLANNED_ROWS = 0;
#endif
constexpr bool PLANNED = PLANNED_ROWS > 0;

// mma_roles, mma_narrow: row tiles of 16 of a block.
#ifdef MLAFLASH_ROW_TILES
constexpr int ROW_TILES = MLAFLASH_ROW_TILES;
#endif

// mma_narrow: groups of four warps that take turns at the KV tiles, buffers for the scores that a group's warps
// exchange, tiles that a group takes at once.
#ifdef MLAFLASH_KV_GROUPS
constexpr int KV_GROUPS = MLAFLASH_KV_GROUPS;
constexpr int EXCHANGE_BUFFERS = MLAFLASH_EXCHANGE_BUFFERS;
constexpr int STEP_TILES = MLAFLASH_STEP_TILES;
#endif
