// The tensor-core kernel for few rows: one block computes 16 or 32 packed rows (query token x head) of
// one request over one split of its KV, and reads every KV row once for all of them.
//
// Grid:   x = ceil(max_q_len * H / ROWS) row tiles, y = split, z = request; PLANNED x = work_blocks.
// Block:  32 * COLUMN_WARPS * KV_GROUPS threads.
// Shared: in 16 bits KV_GROUPS * (STAGES * 18,688 + EXCHANGE_BUFFERS * 4,096) bytes, and 10,784 more for 32 rows in two
//         groups (struct Smem).
// Idea:   four warps share the 16 rows of a KV group; each owns 128 latent and 16 rope columns, 288 bytes of a KV row.
//         They are its part of the reduction q K and, as values, its part of the output: so it copies exactly the bytes
//         that it reads, into a ring of its own, and no other warp waits for them. Once a tile of 16 tokens the warps
//         add their partial scores through shared memory. Two KV groups (or two blocks on an SM) take turns and hide
//         each other's latency. DETERMINISTIC: a block computes chunks one after the other, each from nothing.
// Source: the online softmax over KV tiles of FlashAttention (arXiv:2205.14135), split over KV as in Flash-Decoding.
#include "mma_fp8.cuh"

constexpr int WARPS = KV_GROUPS * COLUMN_WARPS;
constexpr int THREADS = WARPS * WARP;
constexpr int STEP = STEP_TILES * TILE;  // tokens that a group takes at once
constexpr int ROWS = ROW_TILES * TILE;
constexpr bool TALL_16 = ROW_TILES == 2 && !FP8;  // needs every register that a thread can have

// A warp's slice of a q row, and of a KV row where that has 16 bits.
constexpr int Q_LATENT_BYTES = DL / COLUMN_WARPS * 2;
constexpr int Q_ROPE_BYTES = DR / COLUMN_WARPS * 2;
constexpr int Q_PITCH = Q_LATENT_BYTES + Q_ROPE_BYTES;
// Its slice of a KV row. In 8 bits its pitch is an odd multiple of 16 bytes, so that the 8 rows of an ldmatrix phase
// hit all 32 banks; with TOKEN_SCALES the last 16 bytes hold the token's scale of the warp's columns.
constexpr int LATENT_BYTES = Q_LATENT_BYTES / (FP8 ? 2 : 1);
constexpr int ROPE_BYTES = Q_ROPE_BYTES / (KV_DTYPE == FLOAT8_E4M3 ? 2 : 1);
constexpr int SLICE_BYTES = LATENT_BYTES + ROPE_BYTES + (TOKEN_SCALES ? 16 : 0);
constexpr int PITCH = SLICE_BYTES + (FP8 && SLICE_BYTES / 16 % 2 == 0 ? 16 : 0);
constexpr int K_STEPS = Q_PITCH / 32;         // products of 16 dims in the warp's part of q K
constexpr int V_STEPS = Q_LATENT_BYTES / 32;  // 16-column pieces of its part of P V
constexpr int Q_STEPS = K_STEPS + (TOKEN_SCALES && Q_DTYPE == FLOAT16 ? 1 : 0);  // operands of q, see load_q_fp8()
constexpr int O_TILES = V_STEPS * 2;
constexpr int FINAL_TILES = O_TILES / KV_GROUPS;  // of them, those that a warp stores
constexpr int K_AHEAD = 2;                        // ldmatrix in flight before the product that uses the first
constexpr int V_AHEAD = 2;                        // the same of values, for two row tiles of 16 bits

static_assert(KV_GROUPS == 1 || KV_GROUPS == 2, "two groups exchange halves of their columns");
static_assert(STAGES >= 2, "one tile is read while the next one is copied");
static_assert(STEP_TILES == 1 || (STEP_TILES == 2 && FP8), "two tiles of 16 bits leave no registers");
static_assert(!DETERMINISTIC || (!FP8 && ROW_TILES == 1), "no such build");
static_assert(ROW_TILES == 1 || (ROW_TILES == 2 && !TOKEN_SCALES && STEP_TILES == 1), "no such build");
static_assert(!TALL_16 || !SPARSE_IDS, "a list is that of one row tile");
static_assert(ROW_TILES == 1 || (COLUMN_WARPS == 4 && EXCHANGE_BUFFERS == 1),
              "a lane of a group weighs four scores of one of 32 rows");
static_assert(COLUMN_WARPS == 4 || (COLUMN_WARPS == 2 && KV_DTYPE == FLOAT8_E4M3 && STEP_TILES * ROW_TILES == 1),
              "half of the columns of 16 bits, or of two tiles, leave no registers");
static_assert(SHARED_STEPS == 0 || (FP8 && ROW_TILES * 4 / COLUMN_WARPS == 2 && SHARED_STEPS < V_STEPS),
              "steps of q in shared memory");
static_assert(!TOKEN_SCALES || SCALED_COLUMNS == DL / COLUMN_WARPS, "a warp's columns share a scale");
static_assert(KV_GROUPS == 1 || !DETERMINISTIC, "a chunk is one chain of tiles");
static_assert(!PLANNED || PLANNED_ROWS == ROWS, "the list has row tiles of this kernel");
static_assert(EXCHANGE_BUFFERS == 1 || EXCHANGE_BUFFERS == 2, "one buffer costs a second barrier a tile");

struct Smem {
  // A stage: rows of a slice, then u32 [STEP], the page ids of the tokens that come to this stage next.
  static constexpr u32 IDS = STEP * PITCH;
  static constexpr u32 STAGE_BYTES = IDS + STEP * 4;
  static constexpr u32 RING_BYTES = STAGES * STAGE_BYTES;
  static constexpr u32 SCORE_BYTES = WARP * 16;                                  // 16 x 8 scores, four a lane
  static constexpr u32 SCORES_BYTES = ROW_TILES * STEP_TILES * 2 * SCORE_BYTES;  // a warp's
  static constexpr u32 BUFFER_BYTES = WARPS * SCORES_BYTES;
  // [WARPS][STAGES] KV tiles; before them q in 16 bits, after them new rows beside an 8-bit cache, and o.
  static constexpr u32 RINGS = 0;
  // float32 [EXCHANGE_BUFFERS][WARPS][ROW_TILES][STEP_TILES][2][32][4] partial scores.
  static constexpr u32 EXCHANGE = RINGS + WARPS * RING_BYTES;
  // [COLUMN_WARPS][SHARED_STEPS][ROW_TILES][32] steps of q, 16 bytes a lane.
  static constexpr u32 Q = EXCHANGE + EXCHANGE_BUFFERS * BUFFER_BYTES;
  // Two row tiles, of each group: [ROW_TILES][32] weights, 16 bytes a lane, before them float32 [COLUMN_WARPS][ROWS]
  // magnitudes of q and after them float32 [ROWS][2], see join_softmax(); then what follows below.
  static constexpr u32 WEIGHTS = Q + COLUMN_WARPS * SHARED_STEPS * ROW_TILES * SCORE_BYTES;
  static constexpr u32 FACTORS = ROW_TILES * SCORE_BYTES;  // float32 [ROWS], where a base has risen
  // float32 [ROWS]: Scales::scores; in 16 bits i32 [4][2]: of each warp q_begin and the end of the rows,
  // PLACE_IN_SHARED.
  static constexpr u32 UNITS = FACTORS + ROWS * 4;
  static constexpr u32 RAISED = UNITS + ROWS * 4;  // u32 [COLUMN_WARPS]: whose factors count
  static constexpr u32 HANDOVER_BYTES = RAISED + COLUMN_WARPS * 4;
  static constexpr u32 BYTES = WEIGHTS + (ROW_TILES == 2 ? KV_GROUPS * HANDOVER_BYTES : 0);
};
constexpr bool IS_LARGE = ROW_TILES * 4 / COLUMN_WARPS == 2;  // a lane has 128 numbers of o
// As many blocks as registers allow; three of four warps where an sm_120 has room for them.
constexpr int MIN_BLOCKS = FP8 && WARPS == 4 && !IS_LARGE && 3 * (Smem::BYTES + 1024) <= 102400 ? 3 : 8 / WARPS;
// These builds have no registers to keep, through the loop over the cache, what can be found again after it; and those
// with new rows beside two row tiles none for what follows from the lane, which they find anew for each tile.
constexpr bool LOCATE_AGAIN = FP8 && NEW_KV && ROW_TILES == 2;
constexpr bool FIND_AGAIN =
    LOCATE_AGAIN || (TALL_16 && NEW_KV && !PLANNED && !SOFT_CAP) || (SPARSE_IDS && COLUMN_WARPS == 2);
// Here shared memory has room for what is needed: from global memory it would come 2 us later.
constexpr bool PLACE_IN_SHARED = TALL_16 && !NEW_KV && !PLANNED && !SOFT_CAP;
static_assert(KV_GROUPS == 1 || (FINAL_TILES + 1) * Smem::SCORE_BYTES <= Smem::RING_BYTES,
              "half of o and the softmax state fit a warp's ring");

// A 16-bit slice in shared memory: rows of Q_PITCH bytes, in which the 16-byte chunk c of row r lies at c ^ (r / 4 %
// 2). Q_PITCH is 8 banks modulo 32, so that rows 0-3 and, moved by a chunk, rows 4-7 of an ldmatrix phase hit all 32
// banks.
constexpr int PITCH_16 = COLUMN_WARPS == 4 ? Q_PITCH : Q_PITCH + 16;  // wider slices lie an odd multiple of 16 apart
DEVICE u32 slice_offset_16(int row, int chunk) {
  return row * PITCH_16 + (COLUMN_WARPS == 4 ? chunk ^ (row >> 2 & 1) : chunk) * 16;
}
DEVICE u32 slice_offset(int row, int chunk) { return FP8 ? row * PITCH + chunk * 16 : slice_offset_16(row, chunk); }

struct Warp {
  int lane, group, column;  // column: which of the COLUMN_WARPS slices
  u32 ring;
  u32 keys;      // the lane's ldmatrix row in stage 0: of K, the B operand of q K; in 8 bits of its rope columns
  u32 values;    // of V, transposed, the B operand of P V; and of q, the A operand; in 8 bits of K
  u32 scores;    // the lane's place in exchange buffer 0, column warp 0 of the group
  u32 handover;  // two row tiles: Smem::WEIGHTS of the group
};

DEVICE Warp locate(u32 smem) {
  Warp w;
  // PLANNED two row tiles leave no registers for what is derived of it once for all items.
  w.lane = LOCATE_AGAIN ? lane_idx_anew() : PLANNED && ROW_TILES == 2 ? (int)keep_in_register(lane_idx()) : lane_idx();
  // The shuffle tells the compiler that the warp's number, and every branch on it, is the same for all lanes. Else it
  // guards each shuffle and waits for all loads before each guard.
  const int warp = (int)shfl_u32(LOCATE_AGAIN ? thread_idx_anew() / WARP : warp_idx(), 0);
  w.group = warp / COLUMN_WARPS;
  w.column = warp % COLUMN_WARPS;
  w.ring = smem + Smem::RINGS + warp * Smem::RING_BYTES;
  w.keys = w.ring + slice_offset(w.lane % 8 + w.lane / 16 * 8, w.lane / 8 % 2);
  w.values = w.ring + slice_offset(w.lane % 16, w.lane / 16);
  w.scores = smem + Smem::EXCHANGE + w.group * COLUMN_WARPS * Smem::SCORES_BYTES + w.lane * 16;
  w.handover = smem + Smem::WEIGHTS + w.group * Smem::HANDOVER_BYTES;
  return w;
}
DEVICE Warp locate_again(const Warp& w) { return LOCATE_AGAIN ? locate(shared_base()) : w; }

// What a block computes: one row tile over a run of KV tiles, of which there is one at least.
struct Piece {
  Request request;
  RowTile rows;
  TileRange tiles;
  int part, item;  // PLANNED: `part` of a WorkItem, and which one it is
};

DEVICE Piece find_again(const VerifyParams& p, const Piece& piece) {
  if constexpr (!FIND_AGAIN) return piece;
  if constexpr (!PLANNED) {
    const Request r = load_request(p, block_idx_z());
    const RowTile rows = row_tile(p, r, block_idx_x() * ROWS, ROWS);
    return {r, rows, split_tiles(p, r, rows, block_idx_y()), 0, 0};
  }
  const WorkItem w = load_work_item(p, piece.item);
  const int first = w.row_tile * ROWS, end = min_int(first + ROWS, w.q_len * p.num_heads);
  return {piece.request, {first, end, piece.rows.q_first, piece.rows.q_last}, w.tiles, w.part, piece.item};
}

// The barrier of both groups. compute-sanitizer's racecheck does not see the first full barrier that follows named ones
// of other warps: the second is for it alone.
DEVICE void all_sync() {
  block_sync();
  block_sync();
}

// The barrier of the group's four warps.
DEVICE void group_sync(const Warp& w) { named_barrier_sync(1 + w.group, COLUMN_WARPS * WARP); }

// --- copies --------------------------------------------------------------------------------------------------------

// Starts the copies of the warp's slice of 16 rows. Lanes l and l + 16 hold the addresses of row l; without ALL a null
// row is not read and becomes zeros.
template <bool ALL>
DEVICE void copy_slice(const Warp& w, u32 stage, KvRow row) {
  constexpr int LANES = 8;  // that copy the latent half of a row, 128 bytes at once
  const u32 even = stage + slice_offset(w.lane / LANES, w.lane % LANES);  // rows 0-3 and 8-11
  const u32 odd = stage + slice_offset(w.lane / LANES + 4, w.lane % LANES) - 4 * PITCH;
#pragma unroll
  for (int i = 0; i < TILE * LANES / WARP; i++) {
    const u64 base = shfl_u64((u64)row.c, i * (WARP / LANES) + w.lane / LANES);
    const u8* src = (const u8*)base + w.column * LATENT_BYTES + w.lane % LANES * 16;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 dst = (i % 2 ? odd : even) + i * (WARP / LANES) * PITCH + half * 128;
      if constexpr (ALL)
        cp_async_16(dst, src + half * 128);
      else
        cp_async_16_zfill(dst, src + half * 128, base ? 16 : 0);
    }
  }
  const u64 base = shfl_u64((u64)row.pe, w.lane / 2);
  const u8* src = (const u8*)base + w.column * ROPE_BYTES + w.lane % 2 * 16;
  const u32 dst = stage + slice_offset(w.lane / 2, LATENT_BYTES / 16 + w.lane % 2);
  if constexpr (ALL)
    cp_async_16(dst, src);
  else
    cp_async_16_zfill(dst, src, base ? 16 : 0);
}

template <bool ALL>
DEVICE void copy_16(u32 dst, const u8* row, int offset) {
  if constexpr (ALL)
    cp_async_16(dst, row + offset);
  else
    cp_async_16_zfill(dst, row + offset, row ? 16 : 0);
}

// The same in 8 bits, of STEP rows: lane l holds the addresses of row l % STEP.
template <bool ALL>
DEVICE void copy_slice_fp8(const Warp& w, u32 stage, KvRow row) {
  constexpr int LANES = LATENT_BYTES / 16, ROPE_LANES = ROPE_BYTES / 16;
#pragma unroll
  for (int i = 0; i < STEP * LANES / WARP; i++) {
    const int copied = i * (WARP / LANES) + w.lane / LANES;
    copy_16<ALL>(stage + slice_offset(copied, w.lane % LANES), (const u8*)shfl_u64((u64)row.c, copied),
                 w.column * LATENT_BYTES + w.lane % LANES * 16);
  }
#pragma unroll
  for (int i = 0; i < (STEP * ROPE_LANES + WARP - 1) / WARP; i++) {
    const int copied = i * (WARP / ROPE_LANES) + w.lane / ROPE_LANES;
    const u8* pe = ROPE_LANES == 1 ? row.pe : (const u8*)shfl_u64((u64)row.pe, copied);
    if (copied < STEP)
      copy_16<ALL>(stage + slice_offset(copied, LATENT_BYTES / 16 + w.lane % ROPE_LANES), pe,
                   w.column * ROPE_BYTES + w.lane % ROPE_LANES * 16);
  }
  if (TOKEN_SCALES && w.lane < STEP)
    cp_async_4_zfill(stage + w.lane * PITCH + LATENT_BYTES + ROPE_BYTES, row.c + SCALE_OFFSET + w.column * 4,
                     row.c ? 4 : 0);
}

DEVICE void copy_q(const VerifyParams& p, const Request& r, const RowTile& rows, int row_tile, const Warp& w,
                   u32 stage) {
  const int row = rows.first + row_tile * TILE + w.lane % TILE;
  const int token = row / p.num_heads, head = row - token * p.num_heads;
  KvRow q = {nullptr, nullptr};
  if (row < rows.end) q = {q_nope_row(p, r.q_begin + token, head), q_pe_row(p, r.q_begin + token, head)};
  copy_slice<false>(w, stage, q);
}

// Where a group's tiles come from, and how far its copies are.
struct Source {
  const u8* ids;    // the request's page ids
  int last_cached;  // the cache's last token, below 0 for none; those after it are rows of new_kv_c and new_k_pe
  int tile, end;    // next tile to copy; the split's tiles end here; in 8 bits those that the cache holds
  int masked;       // every row sees all tokens of the tiles before this one, and the cache holds them
  u32 listed[STAGES] = {};  // SPARSE_IDS: listed_bits() of the tiles in the ring, the oldest first
};

DEVICE Source make_source(const VerifyParams& p, const Request& r, const RowTile& rows, const TileRange& tiles,
                          const Warp& w) {
  Source s;
  s.ids = (const u8*)p.page_ids + r.id_begin * (p.wide_ids ? 8 : 4);
  s.last_cached = (NEW_KV ? r.kv_len - r.q_len : r.kv_len) - 1;
  s.tile = tiles.begin + w.group * STEP_TILES;
  s.end = tiles.end;
  s.masked = min_int(s.end, first_masked_tile(p, r, rows));
  if (NEW_KV) s.masked = min_int(s.masked, max_int(s.last_cached + 1, 0) / TILE);
  if (NEW_KV && FP8) s.end = min_int(s.end, (s.last_cached + TILE) / TILE);
  return s;
}

DEVICE int token_of(const Warp& w, int tile) { return tile * TILE + w.lane % STEP; }

// Where the page id of the lane's token in a tile is; past the last cached token, that of the last one: some id can
// always be read. The low word of a 64-bit id is enough: pools have fewer than 2^31 pages.
DEVICE const u8* id_ptr(const VerifyParams& p, const Warp& w, const Source& s, int tile) {
  return s.ids + (u64)page_of(p, min_int(token_of(w, tile), s.last_cached)) * (p.wide_ids ? 8 : 4);
}

DEVICE bool has_ids(const Source& s, int tile) { return tile < s.end && s.last_cached >= 0; }

// Strides of pages and tokens fit 32 bits; what they add up to does not.
DEVICE KvRow cached_row(const VerifyParams& p, u32 id, int token) {
  const i32 page = (i32)id, slot = token - (i32)page_of(p, token) * p.page_size;
  const i64 c = mad_wide_i32(page, (i32)p.kv_c_stride_page, mad_wide_i32(slot, (i32)p.kv_c_stride_token, 0));
  const u8* c_ptr = element_ptr<KV_DTYPE>(p.kv_c, c);
  if (TOKEN_SCALES) return {c_ptr, c_ptr + ROPE_OFFSET};
  if (!SPLIT_KV) return {c_ptr, c_ptr + DL * element_bytes<KV_DTYPE>()};
  const i64 pe = mad_wide_i32(page, (i32)p.k_pe_stride_page, mad_wide_i32(slot, (i32)p.k_pe_stride_token, 0));
  return {c_ptr, element_ptr<KV_DTYPE>(p.k_pe, pe)};
}

DEVICE KvRow new_row(const VerifyParams& p, const Request& r, int token) {
  const i64 row = r.q_begin + token - (r.kv_len - r.q_len);
  return {element_ptr<Q_DTYPE>(p.new_kv_c, row * p.new_kv_c_stride),
          element_ptr<Q_DTYPE>(p.new_k_pe, row * p.new_k_pe_stride)};
}

// Some row of the block sees the token. Others become zeros: their weight is 0, but 0 times a NaN is not.
DEVICE bool is_seen(const VerifyParams& p, const Request& r, const RowTile& rows, int token) {
  if (token >= visible_end(p, r, rows.q_last)) return false;
  for (int q = rows.q_first; q <= rows.q_last; q++)
    if (is_visible(p, r, q, token)) return true;
  return false;
}

DEVICE KvRow masked_row(const VerifyParams& p, const Request& r, const RowTile& rows, const Source& s, u32 id,
                        int token) {
  if (!is_seen(p, r, rows, token)) return {nullptr, nullptr};
  if (FP8) return token <= s.last_cached && token < s.end * TILE ? cached_row(p, id, token) : KvRow{nullptr, nullptr};
  return NEW_KV && token > s.last_cached ? new_row(p, r, token) : cached_row(p, id, token);
}

// The page id of the lane's token in the next tile, which goes to `stage`: it came with that stage's last copies.
DEVICE u32 copied_id(const Warp& w, const Source& s, u32 stage) {
  return has_ids(s, s.tile) ? ld_shared_u32(stage + Smem::IDS + w.lane % STEP * 4) : 0;
}

template <bool ALL>
DEVICE void copy_rows(const Warp& w, u32 stage, KvRow row) {
  if constexpr (FP8)
    copy_slice_fp8<ALL>(w, stage, row);
  else
    copy_slice<ALL>(w, stage, row);
}

// The tokens that the ring takes end here.
DEVICE int cached_end(const Source& s) {
  return STEP_TILES == 1 ? s.last_cached + 1 : min_int(s.last_cached + 1, s.end * TILE);
}

// SPARSE_IDS: copies the tile whose listed_bits() are `bits`, and adds them to those of the ring.
DEVICE void copy_listed(const Warp& w, Source& s, u32 stage, KvRow row, u32 bits) {
  if (s.tile < s.end) {
    if (bits == ~0u)
      copy_rows<true>(w, stage, row);
    else
      copy_rows<false>(w, stage, bits >> w.lane & 1 ? row : KvRow{nullptr, nullptr});
  }
#pragma unroll
  for (int i = 1; i < STAGES; i++) s.listed[i - 1] = s.listed[i];
  s.listed[STAGES - 1] = bits;
}

// Copies the next tile to `stage`, and the ids of the tile that comes there after it. They land together, so that no id
// is waited for. Past the end nothing is copied, but the cp.async group is still closed: the waits count groups.
DEVICE void copy_tile(const VerifyParams& p, const Request& r, const RowTile& rows, const Warp& w, Source& s, u32 stage,
                      u32 id) {
  const int token = token_of(w, s.tile);
  // Before any branch, so that its arithmetic runs beside the products that come before.
  const KvRow row = cached_row(p, id, token);
  warp_sync();  // orders all lanes' reads of the stage before the copies that overwrite it
  if constexpr (SPARSE_IDS) {
    copy_listed(w, s, stage, row, listed_bits(id, token, cached_end(s)));
  } else if (s.tile + STEP_TILES - 1 < s.masked) {
    copy_rows<true>(w, stage, row);
  } else if (s.tile < s.end) {
    copy_rows<false>(w, stage, masked_row(p, r, rows, s, id, token));
  }
  const int later = s.tile + STAGES * KV_GROUPS * STEP_TILES;
  if (w.lane < STEP && has_ids(s, later)) cp_async_4(stage + Smem::IDS + w.lane * 4, id_ptr(p, w, s, later));
  cp_async_commit();
  s.tile += KV_GROUPS * STEP_TILES;
}

// --- one tile ------------------------------------------------------------------------------------------------------

// The warp's operands of K, one after the other to multiply(step, operand).
template <class Multiply>
DEVICE void stream_keys(u32 keys, Multiply multiply) {
  u32 k[K_AHEAD + 1][4];
#pragma unroll
  for (int i = 0; i < K_AHEAD; i++) ldmatrix_x4(k[i], keys + i * 32);
#pragma unroll
  for (int i = 0; i < K_STEPS; i++) {
    if (i + K_AHEAD < K_STEPS) ldmatrix_x4(k[(i + K_AHEAD) % (K_AHEAD + 1)], keys + (i + K_AHEAD) * 32);
    multiply(i, k[i % (K_AHEAD + 1)]);
  }
}

// The warp's part of q K^T: 16 rows x 16 tokens, over its 144 dims; two sums, because an mma waits long for the one
// before it.
DEVICE void partial_scores(const u32 (&q)[Q_STEPS][4], u32 keys, float (&sums)[2][2][4]) {
  stream_keys(keys, [&](int i, const u32(&b)[4]) {
    mma_16x8x16(sums[i % 2][0], q[i], b[0], b[1]);
    mma_16x8x16(sums[i % 2][1], q[i], b[2], b[3]);
  });
}

DEVICE void load_values(u32 values, u32 (&v)[V_STEPS][4]) {
#pragma unroll
  for (int i = 0; i < V_STEPS; i++) ldmatrix_x4_trans(v[i], values + i * 32);
}

DEVICE void add_chains(const float (&sums)[2][2][4], float (&s)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][e] = sums[0][n][e] + sums[1][n][e];
}

template <int R, int N>
DEVICE void publish_scores(const Warp& w, u32 buffer, const float (&s)[R][N][2][4]) {
  // Orders the group's reads of the scores of the tile before, in this same buffer, before the writes below. With two
  // buffers the barrier of that tile already did: whoever passed it had read the tile before that one.
  if constexpr (EXCHANGE_BUFFERS == 1) group_sync(w);
#pragma unroll
  for (int i = 0; i < 2 * R * N; i++) {
    const float (&x)[4] = s[i / (2 * N)][i / 2 % N][i % 2];
    st_shared_f32x4(w.scores + buffer + w.column * Smem::SCORES_BYTES + i * Smem::SCORE_BYTES,
                    {x[0], x[1], x[2], x[3]});
  }
}

template <int R, int N>
DEVICE void add_scores(const Warp& w, u32 buffer, float (&s)[R][N][2][4]) {
  group_sync(w);  // orders the partial scores' writes before the reads of all four warps
#pragma unroll
  for (int c = 1; c < COLUMN_WARPS; c++)
#pragma unroll
    for (int i = 0; i < 2 * R * N; i++) {
      const u32 other = (w.column + c) % COLUMN_WARPS;
      const f32x4 v = ld_shared_f32x4(w.scores + buffer + other * Smem::SCORES_BYTES + i * Smem::SCORE_BYTES);
      float (&x)[4] = s[i / (2 * N)][i / 2 % N][i % 2];
      x[0] += v.x;
      x[1] += v.y;
      x[2] += v.z;
      x[3] += v.w;
    }
}

// Of the 16 rows from `first` on, and of the tokens those that `among` has a bit of.
DEVICE void mask_tile(const VerifyParams& p, const Request& r, const RowTile& rows, const Warp& w, int first, int tile,
                      u32 among, float (&s)[2][4]) {
  u32 bits[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int q = r.q_begin + (first + w.lane / 4 + 8 * h) / p.num_heads;
    bits[h] = visible_bits(p, r, min_int(q, rows.q_last), tile * TILE) & among;
  }
  mask_scores(s, bits);
}

// o += weights (16 rows x 16 tokens) x V (16 tokens x the warp's 128 columns).
DEVICE void add_values(const u32 (&weights)[4], const u32 (&v)[V_STEPS][4], float (&o)[O_TILES][4]) {
#pragma unroll
  for (int i = 0; i < V_STEPS; i++) {
    mma_16x8x16(o[2 * i], weights, v[i][0], v[i][1]);
    mma_16x8x16(o[2 * i + 1], weights, v[i][2], v[i][3]);
  }
}

// --- one step over an 8-bit cache ------------------------------------------------------------------------------------

// What an 8-bit build keeps from step to step besides, of a row tile.
struct Scales {
  float scores[2];  // of the lane's rows, from q K as multiplied to exponents, or to what soft-capping takes
  Gain gain;
};

template <int N>
DEVICE void scale_scores(const Scales& scales, float unit, float (&s)[N][2][4]) {
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[i][n][e] *= scales.scores[e / 2] * unit;
}

// q as the A operand. Its first SHARED_STEPS steps stay in shared memory for want of registers, for both groups.
struct Query {
  u32 of[ROW_TILES][Q_STEPS - SHARED_STEPS][4];
  u32 shared;  // the lane's place there
};

DEVICE void query_operand(const Query& q, int row_tile, int step, u32 (&a)[4]) {
  if (step < SHARED_STEPS) {
    const u32x4 x = ld_shared_u32x4(q.shared + (step * ROW_TILES + row_tile) * Smem::SCORE_BYTES);
    a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
  } else {
#pragma unroll
    for (int j = 0; j < 4; j++) a[j] = q.of[row_tile][step < SHARED_STEPS ? 0 : step - SHARED_STEPS][j];
  }
}

constexpr int CODE_LOADS = LATENT_BYTES / 32;                   // ldmatrix of 16 tokens x 32 columns
constexpr int ROPE_LOADS = TOKEN_SCALES ? 0 : ROPE_BYTES / 32;  // of its rope columns
constexpr bool LATE_VALUES = IS_LARGE;                          // they are read from the ring as they are multiplied
constexpr int CODES_AHEAD = IS_LARGE ? 1 : K_AHEAD;

// The warp's part of q K^T of each tile. With TOKEN_SCALES the scales multiply what the latent columns give; then come
// the rope columns, in bfloat16.
DEVICE void partial_scores_fp8(const Query& q, const Warp& w, u32 stage, const float (&token_scales)[STEP_TILES][2][2],
                               float (&s)[ROW_TILES][STEP_TILES][2][4]) {
  constexpr int LOADS = (CODE_LOADS + ROPE_LOADS) * STEP_TILES;
  // Two sums where an mma would wait for the one before it, and registers allow them.
  constexpr bool IS_FULL = IS_LARGE && (SOFT_CAP || PLANNED);
  constexpr int CHAINS = ROW_TILES * STEP_TILES == 1 && !IS_FULL ? 2 : 1;
  float sums[CHAINS][ROW_TILES][STEP_TILES][2][4] = {};
  u32 k[CODES_AHEAD + 1][4];
  const u32 keys = w.values + stage;
#pragma unroll
  for (int i = 0; i < CODES_AHEAD; i++) ldmatrix_x4(k[i], keys + i % STEP_TILES * (TILE * PITCH) + i / STEP_TILES * 32);
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int next = i + CODES_AHEAD, tile = i % STEP_TILES, step = i / STEP_TILES * 2;
    if (next < LOADS)
      ldmatrix_x4(k[next % (CODES_AHEAD + 1)], keys + next % STEP_TILES * (TILE * PITCH) + next / STEP_TILES * 32);
    const u32(&codes)[4] = k[i % (CODES_AHEAD + 1)];  // tokens 0-7 and 8-15 of 16 dims, then of 16 more
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const Operand b[2] = {key_operand(codes[j]), key_operand(codes[j + 1])};
#pragma unroll
      for (int t = 0; t < ROW_TILES; t++) {
        u32 a[4];
        query_operand(q, t, step + j / 2, a);
#pragma unroll
        for (int n = 0; n < 2; n++) mma_16x8x16(sums[CHAINS == 2 ? j / 2 : 0][t][tile][n], a, b[n].b0, b[n].b1);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < STEP_TILES; i++) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          float& sum = s[t][i][n][e];
          sum = CHAINS == 2 ? sums[0][t][i][n][e] + sums[CHAINS - 1][t][i][n][e] : sums[0][t][i][n][e];
          if constexpr (TOKEN_SCALES) sum *= token_scales[i][n][e % 2];
        }
    if constexpr (TOKEN_SCALES) {
      u32 b[4];
      ldmatrix_x4(b, w.keys + stage + i * (TILE * PITCH) + LATENT_BYTES);
#pragma unroll
      for (int j = K_STEPS - 1; j < Q_STEPS; j++)
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
          mma_m16n8k16_bf16(s[t][i][0], q.of[t][j - SHARED_STEPS], b[0], b[1]);
          mma_m16n8k16_bf16(s[t][i][1], q.of[t][j - SHARED_STEPS], b[2], b[3]);
        }
    } else {
#pragma unroll
      for (int j = V_STEPS + 2 * ROPE_LOADS; j < K_STEPS; j++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const u32 codes = w.ring + stage + (i * TILE + n * 8 + w.lane / 4) * PITCH + LATENT_BYTES;
          const Operand b = key_operand(ld_shared_u32(codes + (j - V_STEPS) * 16 + w.lane % 4 * 4));
#pragma unroll
          for (int t = 0; t < ROW_TILES; t++) mma_16x8x16(s[t][i][n], q.of[t][j - SHARED_STEPS], b.b0, b.b1);
        }
    }
  }
}

// The scales that the tokens of the lane's columns have.
DEVICE void load_token_scales(const Warp& w, u32 scales, u32 pitch, float (&of)[2][2]) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) of[n][e] = ld_shared_f32(scales + (n * 8 + w.lane % 4 * 2 + e) * pitch);
}

// Of one tile.
DEVICE void load_values_fp8(u32 values, u32 (&v)[CODE_LOADS][4]) {
#pragma unroll
  for (int i = 0; i < CODE_LOADS; i++) ldmatrix_x4_trans(v[i], values + i * 32);
}

// o += weights (16 rows x 16 tokens, of each row tile) x V (16 tokens x 32 of the warp's columns, from 32 `load` on).
DEVICE void add_values_fp8(const u32 (&weights)[ROW_TILES][STEP_TILES][4], int tile, const u32 (&v)[4], int load,
                           float (&o)[ROW_TILES][O_TILES][4]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const Operand even = even_columns(v[2 * i], v[2 * i + 1]), odd = odd_columns(v[2 * i], v[2 * i + 1]);
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
      mma_16x8x16(o[t][4 * load + 2 * i], weights[t][tile], even.b0, even.b1);
      mma_16x8x16(o[t][4 * load + 2 * i + 1], weights[t][tile], odd.b0, odd.b1);
    }
  }
}

// Scores of N tiles, complete and masked, to packed weights of what `unit` values count.
template <int N>
DEVICE void weigh_step(const VerifyParams& p, float (&s)[N][2][4], const float (&token_scales)[N][2][2], float unit,
                       Softmax& softmax, Scales& scales, float (&o)[O_TILES][4], u32 (&weights)[N][4]) {
  const float before[2] = {softmax.base[0], softmax.base[1]};
  weigh(s, capped_scale(p), softmax, o);
  if constexpr (TOKEN_SCALES) scale_weights(s, token_scales, before, softmax, scales.gain, o);
#pragma unroll
  for (int i = 0; i < N; i++) pack_weights(s[i], unit, weights[i]);
}

// Bit i: the ring holds token first + i, i < TILE.
DEVICE u32 cached_bits(const Source& s, int first) {
  return (1u << min_int(max_int(min_int(s.last_cached + 1, s.end * TILE) - first, 0), TILE)) - 1;
}

// --- the softmax of two row tiles ------------------------------------------------------------------------------------

// Each warp of a group weighs the same number of rows for all of them: a lane has four scores of one row. Partial
// scores go to who weighs them, weights back to all.
constexpr bool SPLIT_SOFTMAX = ROW_TILES == 2;
constexpr int OWN_ROWS = ROWS / COLUMN_WARPS;  // of a warp, four lanes each

struct Weigher {
  int row;              // of the block's rows
  u32 scores, weights;  // where its scores lie, those of column warp 0, and where its weights go
  float unit;           // Scales::scores of its row
  float base, sum;      // as in Softmax; the sum of the lane's own weights
};

DEVICE int own_row(const Warp& w) { return w.column * OWN_ROWS + w.lane / 4; }

DEVICE Weigher make_weigher(const Warp& w) {
  Weigher own;
  own.row = own_row(w);
  const u32 lane = own.row % 8 * 4 + w.lane % 4;  // that has computed part of these scores, and takes the weights
  const u32 first = w.scores - w.lane * 16;
  own.scores = first + own.row / 8 * Smem::SCORE_BYTES + lane * 16;
  own.weights = w.handover + own.row / TILE * Smem::SCORE_BYTES + lane * 16 + own.row / 8 % 2 * 4;
  own.unit = FP8 ? ld_shared_f32(w.handover + Smem::UNITS + own.row * 4) : 1.0f;
  own.base = neg_inf();
  own.sum = 0.0f;
  return own;
}

// Half rows of the row tiles.
template <int N>
DEVICE void publish_halves(const Warp& w, const float (&s)[ROW_TILES][N][2][4]) {
  const u32 mine = w.scores + w.column * Smem::SCORES_BYTES;
#pragma unroll
  for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float (&x)[2][4] = s[t][0];
      st_shared_f32x4(mine + (t * 2 + h) * Smem::SCORE_BYTES,
                      {x[0][2 * h], x[0][2 * h + 1], x[1][2 * h], x[1][2 * h + 1]});
    }
}

// The lane's scores, complete: of tokens 2 i, 2 i + 1, 2 i + 8, 2 i + 9, i = lane % 4.
DEVICE void collect_scores(const Weigher& own, float unit, float (&s)[4]) {
  const f32x4 first = ld_shared_f32x4(own.scores);
  s[0] = first.x, s[1] = first.y, s[2] = first.z, s[3] = first.w;
#pragma unroll
  for (int c = 1; c < COLUMN_WARPS; c++) {
    const f32x4 x = ld_shared_f32x4(own.scores + c * Smem::SCORES_BYTES);
    s[0] += x.x, s[1] += x.y, s[2] += x.z, s[3] += x.w;
  }
  if constexpr (!FP8) return;
#pragma unroll
  for (int e = 0; e < 4; e++) s[e] *= own.unit * unit;
}

// Bit i of `bits`: the row sees token i of the tile.
DEVICE void mask_own_scores(const Warp& w, u32 bits, float (&s)[4]) {
#pragma unroll
  for (int e = 0; e < 4; e++)
    if (!(bits >> (w.lane % 4 * 2 + e / 2 * 8 + e % 2) & 1)) s[e] = neg_inf();
}

DEVICE void cap_own_scores(const VerifyParams& p, float (&s)[4]) {
  if constexpr (!SOFT_CAP) return;
  const float inner = FP8 ? 1.0f : scale_magnitude(p) / p.logit_cap;
#pragma unroll
  for (int e = 0; e < 4; e++) s[e] = tanh_f32(s[e] * inner);
}

// visible_bits() of the lane's row.
DEVICE u32 own_bits(const VerifyParams& p, const Request& r, const RowTile& rows, const Weigher& own, int tile) {
  const int q = r.q_begin + (rows.first + own.row) / p.num_heads;
  return visible_bits(p, r, min_int(q, rows.q_last), tile * TILE);
}

// The scores to weights of what `unit` values count, and these to all warps.
DEVICE void weigh_own(const VerifyParams& p, const Warp& w, Weigher& own, float unit, const float (&s)[4]) {
  const float scale = FP8 ? capped_scale(p) : exponent_scale(p);
  const float maximum = fma_f32(scale, max_f32(max_f32(s[0], s[1]), max_f32(s[2], s[3])), FP8 ? -WEIGHT_LIFT : 0.0f);
  const bool raised = warp_any(maximum > own.base + RESCALE_ABOVE);
  if (raised) {
    const float base = max_f32(own.base, max_over_row(maximum)), factor = ex2(own.base - finite_base(base));
    own.base = base;
    own.sum *= factor;
    if (w.lane % 4 == 0) st_shared_f32(w.handover + Smem::FACTORS + own.row * 4, factor);
  }
  if (w.lane == 0) st_shared_u32(w.handover + Smem::RAISED + w.column * 4, raised);
  const float base = finite_base(own.base);
  float weights[4];
#pragma unroll
  for (int e = 0; e < 4; e++) weights[e] = ex2(fma_f32(s[e], scale, -base));
  own.sum += (weights[0] + weights[1]) + (weights[2] + weights[3]);
  st_shared_u32(own.weights, pack_elements<MMA_DTYPE>(weights[0] * unit, weights[1] * unit));
  st_shared_u32(own.weights + 8, pack_elements<MMA_DTYPE>(weights[2] * unit, weights[3] * unit));
}

// All weights as A operands; and o to the bases that they have, which have hardly ever risen.
template <int N>
DEVICE void take_weights(const Warp& w, u32 (&weights)[ROW_TILES][N][4], float (&o)[ROW_TILES][O_TILES][4]) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; t++) {
    const u32x4 x = ld_shared_u32x4(w.handover + t * Smem::SCORE_BYTES + w.lane * 16);
    u32(&a)[4] = weights[t][0];
    a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
  }
  const u32x4 raised = ld_shared_u32x4(w.handover + Smem::RAISED);
  if (!(raised.x | raised.y | raised.z | raised.w)) return;
  const int lane = TALL_16 && (NEW_KV || PLANNED) ? lane_idx_anew() : w.lane;  // nothing of this is kept for then
#pragma unroll
  for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = t * TILE + lane / 4 + 8 * h;
      float factor = 1.0f;
      if (ld_shared_u32(w.handover + Smem::RAISED + row / OWN_ROWS * 4))
        factor = ld_shared_f32(w.handover + Smem::FACTORS + row * 4);
#pragma unroll
      for (int i = 0; i < O_TILES; i++) o[t][i][2 * h] *= factor, o[t][i][2 * h + 1] *= factor;
    }
}

// What all warps know of their rows from then on.
DEVICE void join_softmax(const Warp& w, const Weigher& own, Softmax (&softmax)[ROW_TILES]) {
  const int row = LOCATE_AGAIN ? own_row(w) : own.row;
  const float sum = sum_over_row(own.sum);
  group_sync(w);  // orders the reads of the last weights before the writes over them
  if (w.lane % 4 == 0) st_shared_f32x2(w.handover + row * 8, {own.base, sum});
  group_sync(w);  // orders the writes before the reads
#pragma unroll
  for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const f32x2 x = ld_shared_f32x2(w.handover + (t * TILE + w.lane / 4 + 8 * h) * 8);
      softmax[t].base[h] = x.x;
      softmax[t].sum[h] = w.lane % 4 == 0 ? x.y : 0.0f;  // it counts once
    }
}

// --- one tile of 16 bits for two row tiles --------------------------------------------------------------------------

DEVICE void partial_scores_of_both(const u32 (&q)[ROW_TILES][Q_STEPS][4], u32 keys, float (&s)[ROW_TILES][1][2][4]) {
  stream_keys(keys, [&](int i, const u32(&b)[4]) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
      mma_16x8x16(s[t][0][0], q[t][i], b[0], b[1]);
      mma_16x8x16(s[t][0][1], q[t][i], b[2], b[3]);
    }
  });
}

// The first V_AHEAD operands of `v` are there.
DEVICE void add_values_to_both(const u32 (&weights)[ROW_TILES][1][4], u32 values, u32 (&v)[V_AHEAD + 1][4],
                               float (&o)[ROW_TILES][O_TILES][4]) {
#pragma unroll
  for (int i = 0; i < V_STEPS; i++) {
    if (i + V_AHEAD < V_STEPS) ldmatrix_x4_trans(v[(i + V_AHEAD) % (V_AHEAD + 1)], values + (i + V_AHEAD) * 32);
    const u32(&b)[4] = v[i % (V_AHEAD + 1)];
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
      mma_16x8x16(o[t][2 * i], weights[t][0], b[0], b[1]);
      mma_16x8x16(o[t][2 * i + 1], weights[t][0], b[2], b[3]);
    }
  }
}

// --- new rows beside an 8-bit cache ----------------------------------------------------------------------------------

// They are as precise as q, so they have a 16-bit slice of a tile of their own where the ring was: float16, divided by
// the power of two in the scale of the cache, or with TOKEN_SCALES by one for each row, which follows the slice. Of
// each 16 columns the even ones come first: that is how accumulators hold them. With TOKEN_SCALES rope columns stay
// what they are.
constexpr int NEW_SCALES = TILE * PITCH_16;
static_assert(NEW_SCALES + (TOKEN_SCALES ? TILE * 4 : 0) <= (int)Smem::RING_BYTES, "new rows fit a warp's ring");

DEVICE void store_new_8(u32 slice, int row, int chunk, const float (&x)[8]) {
  const u32x2 even = {pack_f16x2(x[0], x[2]), pack_f16x2(x[4], x[6])};
  const u32x2 odd = {pack_f16x2(x[1], x[3]), pack_f16x2(x[5], x[7])};
  // Lanes of later chunks begin with the odd ones, so that all banks are hit.
  const int late = chunk / 8 & 1;
  const u32 at = slice + chunk % 2 * 8;
  st_shared_u32x2(at + slice_offset_16(row, chunk / 2 * 2 + late), late ? odd : even);
  st_shared_u32x2(at + slice_offset_16(row, chunk / 2 * 2 + 1 - late), late ? even : odd);
}

DEVICE void copy_new_tile(const VerifyParams& p, const Request& r, const RowTile& rows, const Warp& w, int tile,
                          float cache_scale) {
  constexpr int CHUNKS = Q_LATENT_BYTES / 16, ROPE_CHUNKS = Q_ROPE_BYTES / 16;
#pragma unroll 1
  for (int i = 0; i < TILE; i += WARP / CHUNKS) {
    const int row = i + w.lane / CHUNKS, chunk = w.lane % CHUNKS, token = tile * TILE + row;
    KvRow source = {nullptr, nullptr};
    if (token >= r.kv_len - r.q_len && is_seen(p, r, rows, token)) source = new_row(p, r, token);
    Vector<Q_DTYPE> x = zero_vector<Q_DTYPE>();
    if (source.c) x = load_vector<Q_DTYPE, true>(source.c + w.column * Q_LATENT_BYTES + chunk * 16);
    float factor = 1.0f / floor_power(cache_scale);
    if constexpr (TOKEN_SCALES) {
      float largest = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; j++) largest = max_f32(largest, max_f32(x.v[j], -x.v[j]));
#pragma unroll
      for (int distance = 1; distance < CHUNKS; distance *= 2)
        largest = max_f32(largest, shfl_xor_f32(largest, distance));
      const PowerOfTwo power = to_f16_range(largest);
      factor = power.value;
      if (chunk == 0) st_shared_f32(w.ring + NEW_SCALES + row * 4, power.reciprocal);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) x.v[j] *= factor;
    store_new_8(w.ring, row, chunk, x.v);
    if (chunk >= ROPE_CHUNKS) continue;
    const u8* pe = source.pe + w.column * Q_ROPE_BYTES + chunk * 16;
    if constexpr (TOKEN_SCALES) {
      st_shared_u32x4(w.ring + slice_offset_16(row, CHUNKS + chunk),
                      source.pe ? ld_global_u32x4(pe) : u32x4{0, 0, 0, 0});
    } else {
      x = zero_vector<Q_DTYPE>();
      if (source.pe) x = load_vector<Q_DTYPE, true>(pe);
#pragma unroll
      for (int j = 0; j < 8; j++) x.v[j] *= factor;
      store_new_8(w.ring, row, CHUNKS + chunk, x.v);
    }
  }
}

// The q of new rope columns, which they meet in q's own element type.
DEVICE void rope_operand(const Query& q, int row_tile, u32 (&rope)[4]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    rope[j] = q.of[row_tile][K_STEPS - 1 - SHARED_STEPS][j];
    if constexpr (Q_STEPS > K_STEPS) {
      const f32x2 high = unpack_pair<BFLOAT16>(rope[j]);
      const f32x2 low = unpack_pair<BFLOAT16>(q.of[row_tile][K_STEPS - SHARED_STEPS][j]);
      rope[j] = pack_f16x2(high.x + low.x, high.y + low.y);
    }
  }
}

DEVICE void partial_scores_new(const Query& q, u32 keys, const float (&token_scales)[1][2][2],
                               float (&s)[ROW_TILES][1][2][4]) {
#pragma unroll
  for (int i = 0; i < K_STEPS; i++) {
    u32 k[4];
    ldmatrix_x4(k, keys + i * 32);
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
      if (TOKEN_SCALES && i == K_STEPS - 1) {
        u32 rope[4];
        rope_operand(q, t, rope);
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
          for (int e = 0; e < 4; e++) s[t][0][n][e] *= token_scales[0][n][e % 2];
          if constexpr (Q_DTYPE == BFLOAT16)
            mma_m16n8k16_bf16(s[t][0][n], rope, k[2 * n], k[2 * n + 1]);
          else
            mma_m16n8k16_f16(s[t][0][n], rope, k[2 * n], k[2 * n + 1]);
        }
      } else {
        u32 a[4];
        query_operand(q, t, i, a);
        // Dims 4 j, 4 j + 2 and 4 j + 1, 4 j + 3 to the order that q has.
#pragma unroll
        for (int n = 0; n < 2; n++)
          mma_16x8x16(s[t][0][n], a, permute_bytes<0x5410>(k[2 * n], k[2 * n + 1]),
                      permute_bytes<0x7632>(k[2 * n], k[2 * n + 1]));
      }
    }
  }
}

// After the cached tokens, those of new rows. The ring is empty.
DEVICE void attend_new_rows(const VerifyParams& p, const Piece& piece, const Warp& located, const Query& q,
                            Softmax (&softmax)[ROW_TILES], Scales (&scales)[ROW_TILES],
                            float (&o)[ROW_TILES][O_TILES][4], u32 buffer, Weigher& own) {
  const Request& r = piece.request;
  const RowTile& rows = piece.rows;
  const int first_new = r.kv_len - r.q_len;
  const float scale = cache_scale(p), unit = floor_power(scale) / scale;  // of new rows, in that of the cache's
#pragma unroll 1
  for (int tile = max_int(piece.tiles.begin, first_new / TILE); tile < piece.tiles.end; tile++) {
    const Warp w = locate_again(located);
    const u32 keys = w.ring + slice_offset_16(w.lane % 8 + w.lane / 16 * 8, w.lane / 8 % 2);
    const u32 values = w.ring + slice_offset_16(w.lane % 16, w.lane / 16);
    if (tile % KV_GROUPS != w.group) continue;
    warp_sync();  // orders the lanes' reads of the ring, or of the tile before, before the writes
    copy_new_tile(p, r, rows, w, tile, scale);
    warp_sync();  // orders the lanes' writes before the reads
    float s[ROW_TILES][1][2][4] = {}, token_scales[1][2][2] = {};
    u32 weights[ROW_TILES][1][4];
    if constexpr (TOKEN_SCALES) load_token_scales(w, w.ring + NEW_SCALES, 4, token_scales[0]);
    partial_scores_new(q, keys, token_scales, s);
    const u32 among = ~((1u << min_int(max_int(first_new - tile * TILE, 0), TILE)) - 1);
    if constexpr (SPLIT_SOFTMAX) {
      publish_halves(w, s);
      group_sync(w);  // orders the partial scores' writes before the reads
      float mine[4];
      collect_scores(own, unit, mine);
      cap_own_scores(p, mine);
      mask_own_scores(w, own_bits(p, r, rows, own, tile) & among, mine);
      weigh_own(p, w, own, unit, mine);
      group_sync(w);  // orders the weights' and factors' writes before the reads, and these reads before the next ones
      take_weights(w, weights, o);
    } else {
      scale_scores(scales[0], unit, s[0]);
      publish_scores(w, buffer, s);
      add_scores(w, buffer, s);
      cap_scores(s[0][0]);
      mask_tile(p, r, rows, w, rows.first, tile, among, s[0][0]);
      weigh_step(p, s[0], token_scales, unit, softmax[0], scales[0], o[0], weights[0]);
    }
#pragma unroll
    for (int i = 0; i < V_STEPS; i++) {
      u32 v[4];
      ldmatrix_x4_trans(v, values + i * 32);
#pragma unroll
      for (int t = 0; t < ROW_TILES; t++) {
        mma_16x8x16(o[t][2 * i], weights[t][0], v[0], v[1]);
        mma_16x8x16(o[t][2 * i + 1], weights[t][0], v[2], v[3]);
      }
    }
    if constexpr (EXCHANGE_BUFFERS == 2) buffer ^= Smem::BUFFER_BYTES;
  }
  warp_sync();  // orders the lanes' reads of the last tile before what send_half() writes
}

// --- the end -------------------------------------------------------------------------------------------------------

// Half of o and the softmax state of a group, for the other group, in the ring of each warp: only that warp reads its
// ring, and it has read all of it.
DEVICE void send_half(const Warp& w, const Softmax& softmax, const float (&o)[O_TILES][4]) {
  const u32 mine = w.ring + w.lane * 16;
#pragma unroll
  for (int i = 0; i < FINAL_TILES; i++) {
    const float (&sent)[4] = o[i + FINAL_TILES], (&kept)[4] = o[i];
    const bool lower = w.group;  // group 0 keeps its lower half, group 1 its upper one
    st_shared_f32x4(mine + i * Smem::SCORE_BYTES, {lower ? kept[0] : sent[0], lower ? kept[1] : sent[1],
                                                   lower ? kept[2] : sent[2], lower ? kept[3] : sent[3]});
  }
  st_shared_f32x4(mine + FINAL_TILES * Smem::SCORE_BYTES,
                  {softmax.base[0], softmax.sum[0], softmax.base[1], softmax.sum[1]});
}

// Adds what the other group sent to the half that this one kept.
DEVICE void merge_half(const Warp& w, Softmax& softmax, const float (&o)[O_TILES][4], float (&merged)[FINAL_TILES][4]) {
  const u32 other = w.ring + (w.group ? -1 : 1) * COLUMN_WARPS * (int)Smem::RING_BYTES + w.lane * 16;
  const f32x4 state = ld_shared_f32x4(other + FINAL_TILES * Smem::SCORE_BYTES);
  const float other_base[2] = {state.x, state.z}, other_sum[2] = {state.y, state.w};
  float own_factor[2], other_factor[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float base = max_f32(softmax.base[h], other_base[h]);
    own_factor[h] = ex2(softmax.base[h] - finite_base(base));
    other_factor[h] = ex2(other_base[h] - finite_base(base));
    softmax.base[h] = base;
    softmax.sum[h] = softmax.sum[h] * own_factor[h] + other_sum[h] * other_factor[h];
  }
#pragma unroll
  for (int i = 0; i < FINAL_TILES; i++) {
    const f32x4 v = ld_shared_f32x4(other + i * Smem::SCORE_BYTES);
    const float received[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float own = w.group ? o[i + FINAL_TILES][e] : o[i][e];
      merged[i][e] = own * own_factor[e / 2] + received[e] * other_factor[e / 2];
    }
  }
}

// The 16 rows from `first` on.
DEVICE void store(const VerifyParams& p, const Request& r, int part, int first, int end, const Warp& w,
                  Softmax& softmax, const float (&o)[O_TILES][4]) {
  const int column = w.column * (DL / COLUMN_WARPS) + w.group * FINAL_TILES * 8;
  if constexpr (KV_GROUPS == 1) {
    store_results<FP8>(p, r, part, first, end, column, softmax, o);
  } else {
    float merged[FINAL_TILES][4];
    send_half(w, softmax, o);
    all_sync();  // orders the writes of send_half() before the other group's reads of them
    merge_half(w, softmax, o, merged);
    store_results<FP8>(p, r, part, first, end, column, softmax, merged);
  }
}

DEVICE void reset(Softmax& softmax, float (&o)[O_TILES][4]) {
  softmax = {{neg_inf(), neg_inf()}, {0.0f, 0.0f}};
#pragma unroll
  for (int i = 0; i < O_TILES; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
}

// DETERMINISTIC, after a tile: stores the chunk that it ends, and begins the next one.
DEVICE void end_chunk(const VerifyParams& p, const Request& r, const RowTile& rows, const Warp& w,
                      const TileRange& tiles, int tile, Softmax& softmax, float (&o)[O_TILES][4]) {
  if (tile + 1 != tiles.end && (tile + 1) % CHUNK_TILES != 0) return;
  store_results<false>(p, r, tile / CHUNK_TILES, rows.first, rows.end, w.column * (DL / COLUMN_WARPS), softmax, o);
  reset(softmax, o);
}

// --- the kernel ----------------------------------------------------------------------------------------------------

// The page ids of the first tile of every stage: loaded early, and left with the stages as later ones are.
DEVICE void load_first_ids(const VerifyParams& p, const Warp& w, const Source& s, u32 (&ids)[STAGES]) {
#pragma unroll
  for (int i = 0; i < STAGES; i++)
    if (has_ids(s, s.tile + i * KV_GROUPS * STEP_TILES))
      ids[i] = ld_global_u32(id_ptr(p, w, s, s.tile + i * KV_GROUPS * STEP_TILES));
    else if (LOCATE_AGAIN || TALL_16)
      ids[i] = 0;  // registers would keep from item to item what is not set
}
DEVICE void store_first_ids(const Warp& w, const Source& s, const u32 (&ids)[STAGES]) {
#pragma unroll
  for (int i = 0; i < STAGES; i++)
    if (w.lane < STEP && has_ids(s, s.tile + i * KV_GROUPS * STEP_TILES))
      st_shared_u32(w.ring + i * Smem::STAGE_BYTES + Smem::IDS + w.lane * 4, ids[i]);
}

// q from the slice at `ring + stage` to registers, as the A operand.
DEVICE void load_q(const VerifyParams& p, const Warp& w, u32 stage, u32 (&q)[Q_STEPS][4]) {
#pragma unroll
  for (int i = 0; i < K_STEPS; i++) {
    ldmatrix_x4(q[i], w.values + stage + i * 32);
#pragma unroll
    for (int j = 0; j < 4; j++) q[i][j] = fold_scale_sign(p, q[i][j]);
  }
}

// Two row tiles: of a row's largest magnitudes in each warp's columns, the largest, by which all of them then go.
DEVICE void join_magnitudes(const Warp& w, int row_tile, float (&magnitudes)[2]) {
  const u32 place = w.handover + (row_tile * TILE + w.lane / 4) * 4;
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (w.lane % 4 == 0) st_shared_f32(place + (w.column * ROWS + 8 * h) * 4, magnitudes[h]);
  group_sync(w);  // orders the four warps' writes before the reads
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int c = 0; c < COLUMN_WARPS; c++)
      magnitudes[h] = max_f32(magnitudes[h], ld_shared_f32(place + (c * ROWS + 8 * h) * 4));
}

// The same from memory, for an 8-bit cache: in the order of dims that key_operand() has, as float16. With TOKEN_SCALES
// the rope columns, in their own order, as bfloat16; a float16 number is the sum of two such, of which the second one
// follows.
DEVICE void load_q_fp8(const VerifyParams& p, const Request& r, const RowTile& rows, int row_tile, const Warp& w,
                       u32 (&q)[Q_STEPS][4], Scales& scales) {
  const int first = rows.first + row_tile * TILE, end = rows.end;
  const int quad_lane = w.lane % 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = first + w.lane / 4 + 8 * h;
    const bool exists = row < end;
    const int token = r.q_begin + row / p.num_heads, head = row % p.num_heads;
    const u8* nope = q_nope_row(p, token, head) + w.column * Q_LATENT_BYTES + quad_lane * 8;
    const u8* pe = q_pe_row(p, token, head) + w.column * Q_ROPE_BYTES;
#pragma unroll
    for (int i = 0; i < K_STEPS; i++) {
      u32x2 x = {0, 0};
      if (exists && i < V_STEPS) x = ld_global_u32x2(nope + i * 32);
      if (exists && i >= V_STEPS && !TOKEN_SCALES) x = ld_global_u32x2(pe + (i - V_STEPS) * 32 + quad_lane * 8);
      if (exists && i == V_STEPS && TOKEN_SCALES)
        x = {ld_global_u32(pe + quad_lane * 4), ld_global_u32(pe + 16 + quad_lane * 4)};
      q[i][h] = x.x;
      q[i][2 + h] = x.y;
    }
  }
  float magnitudes[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < K_STEPS; i++)
#pragma unroll
      for (int j = h; j < 4; j += 2) largest = max_magnitude(largest, unpack_pair<Q_DTYPE>(q[i][j]));
    magnitudes[h] = max_over_row(largest);
  }
  if constexpr (SPLIT_SOFTMAX) join_magnitudes(w, row_tile, magnitudes);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const PowerOfTwo power = to_f16_range(magnitudes[h]);
    scales.scores[h] = power.reciprocal * cache_scale(p) * score_factor(p);
    if (SPLIT_SOFTMAX && w.column == 0 && quad_lane == 0)
      st_shared_f32(w.handover + Smem::UNITS + (row_tile * TILE + w.lane / 4 + 8 * h) * 4, scales.scores[h]);
    const float factor = p.sm_scale == 0.0f ? 0.0f : p.sm_scale < 0.0f ? -power.value : power.value;
#pragma unroll
    for (int i = 0; i < K_STEPS; i++)
#pragma unroll
      for (int j = h; j < 4; j += 2) {
        const f32x2 x = unpack_pair<Q_DTYPE>(q[i][j]);
        if (TOKEN_SCALES && i == K_STEPS - 1) {
          q[i][j] = pack_bf16x2(x.x * factor, x.y * factor);
          const f32x2 high = unpack_pair<BFLOAT16>(q[i][j]);
          if constexpr (Q_STEPS > K_STEPS)
            q[K_STEPS][j] = pack_bf16x2(fma_f32(x.x, factor, -high.x), fma_f32(x.y, factor, -high.y));
        } else {
          q[i][j] = pack_f16x2(x.x * factor, x.y * factor);
        }
      }
  }
}

DEVICE void load_query(const VerifyParams& p, const Request& r, const RowTile& rows, const Warp& w, Query& q,
                       Scales (&scales)[ROW_TILES]) {
  q.shared = shared_base() + Smem::Q + w.column * (SHARED_STEPS * ROW_TILES * Smem::SCORE_BYTES) + w.lane * 16;
#pragma unroll
  for (int t = 0; t < ROW_TILES; t++) {
    u32 all[Q_STEPS][4];
    load_q_fp8(p, r, rows, t, w, all, scales[t]);
#pragma unroll
    for (int i = 0; i < Q_STEPS; i++) {
      const u32(&x)[4] = all[i];
      if (i < SHARED_STEPS) {
        if (w.group == 0) st_shared_u32x4(q.shared + (i * ROW_TILES + t) * Smem::SCORE_BYTES, {x[0], x[1], x[2], x[3]});
      } else {
#pragma unroll
        for (int j = 0; j < 4; j++) q.of[t][i < SHARED_STEPS ? 0 : i - SHARED_STEPS][j] = x[j];
      }
    }
  }
  if (SPLIT_SOFTMAX) group_sync(w);                      // orders the writes of the rows' units before the reads
  if (SHARED_STEPS > 0 && KV_GROUPS == 2) block_sync();  // orders the first group's writes before the other's reads
}

// Fills the ring. q passes through its last stages, while the others already fill with KV; for an 8-bit cache it does
// not.
DEVICE void start(const VerifyParams& p, const Request& r, const RowTile& rows, const Warp& w, Source& source,
                  u32 (&q)[ROW_TILES][Q_STEPS][4]) {
  constexpr u32 LAST = (STAGES - 1) * Smem::STAGE_BYTES;
  constexpr u32 Q_STAGE = (STAGES - ROW_TILES) * Smem::STAGE_BYTES;
  u32 ids[STAGES];
  load_first_ids(p, w, source, ids);
  if constexpr (!FP8) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) copy_q(p, r, rows, t, w, w.ring + Q_STAGE + t * Smem::STAGE_BYTES);
    cp_async_commit();
  }
  store_first_ids(w, source, ids);
  warp_sync();  // orders the writes of the ids before the other lanes' reads
  // A loop, because a short call is mostly start, and its code comes from memory too.
#pragma unroll 1
  for (u32 stage = 0; stage <= LAST; stage += Smem::STAGE_BYTES) {
    if (!FP8 && stage == Q_STAGE) {
      cp_async_wait<STAGES - ROW_TILES>();
      warp_sync();  // orders all lanes' copies of q, which have landed, before the reads
#pragma unroll
      for (int t = 0; t < ROW_TILES; t++) load_q(p, w, Q_STAGE + t * Smem::STAGE_BYTES, q[t]);
    }
    copy_tile(p, r, rows, w, source, w.ring + stage, copied_id(w, source, w.ring + stage));
  }
}

DEVICE void attend_16_bit(const VerifyParams& p, const Piece& piece) {
  const Request& r = piece.request;
  const RowTile& rows = piece.rows;
  const TileRange& tiles = piece.tiles;
  const Warp w = locate(shared_base());
  Source source = make_source(p, r, rows, tiles, w);
  u32 q[ROW_TILES][Q_STEPS][4];
  start(p, r, rows, w, source, q);

  Softmax softmax = {{neg_inf(), neg_inf()}, {0.0f, 0.0f}};
  float o[O_TILES][4] = {};
  u32 stage = 0, buffer = 0;
#pragma unroll 1
  for (int tile = tiles.begin + w.group; tile < tiles.end; tile += KV_GROUPS) {
    cp_async_wait<STAGES - 1>();
    warp_sync();  // orders all lanes' copies of this tile, which have landed, before the reads
    // K and V go to registers at once: the stage is free for the next copies before the scores are known.
    float sums[2][2][4] = {}, s[1][1][2][4];
    u32 v[V_STEPS][4];
    const u32 id = copied_id(w, source, w.ring + stage), listed = SPARSE_IDS ? source.listed[0] : ~0u;
    partial_scores(q[0], w.keys + stage, sums);
    load_values(w.values + stage, v);
    copy_tile(p, r, rows, w, source, w.ring + stage, id);
    add_chains(sums, s[0][0]);
    publish_scores(w, buffer, s);
    add_scores(w, buffer, s);
    soft_cap(p, s[0][0]);
    if constexpr (SPARSE_IDS) {
      if (listed != ~0u) mask_scores(s[0][0], {listed, listed});
    } else if (tile >= source.masked) {
      mask_tile(p, r, rows, w, rows.first, tile, ~0u, s[0][0]);
    }
    u32 weights[4];
    softmax_tile(s[0][0], exponent_scale(p), softmax, o, weights);
    add_values(weights, v, o);
    if constexpr (DETERMINISTIC) end_chunk(p, r, rows, w, tiles, tile, softmax, o);
    stage = stage == (STAGES - 1) * Smem::STAGE_BYTES ? 0 : stage + Smem::STAGE_BYTES;
    if constexpr (EXCHANGE_BUFFERS == 2) buffer ^= Smem::BUFFER_BYTES;
  }
  cp_async_wait_all();  // nothing is in flight any more
  if constexpr (!DETERMINISTIC) store(p, r, piece.part, rows.first, rows.end, w, softmax, o);
}

// The same for two row tiles: each operand of K and V is loaded once for both, and each warp weighs a quarter of the
// rows.
DEVICE void attend_32_rows(const VerifyParams& p, const Piece& piece) {
  const Request& r = piece.request;
  const RowTile& rows = piece.rows;
  const TileRange& tiles = piece.tiles;
  const Warp w = locate(shared_base());
  Source source = make_source(p, r, rows, tiles, w);
  u32 q[ROW_TILES][Q_STEPS][4];
  start(p, r, rows, w, source, q);
  const u32 place = w.handover + Smem::UNITS + w.column * 8;
  if (PLACE_IN_SHARED && w.lane == 0) st_shared_u32x2(place, {(u32)r.q_begin, (u32)rows.end});

  Weigher own = make_weigher(w);
  float o[ROW_TILES][O_TILES][4] = {};
  u32 stage = 0;
#pragma unroll 1
  for (int tile = tiles.begin + w.group; tile < tiles.end; tile += KV_GROUPS) {
    cp_async_wait<STAGES - 1>();
    warp_sync();  // orders all lanes' copies of this tile, which have landed, before the reads
    float s[ROW_TILES][1][2][4] = {}, mine[4];
    u32 weights[ROW_TILES][1][4], v[V_AHEAD + 1][4];
    partial_scores_of_both(q, w.keys + stage, s);
    publish_halves(w, s);
    group_sync(w);  // orders the partial scores' writes before the reads
    collect_scores(own, 1.0f, mine);
    cap_own_scores(p, mine);
    if (tile >= source.masked) mask_own_scores(w, own_bits(p, r, rows, own, tile), mine);
    weigh_own(p, w, own, 1.0f, mine);
#pragma unroll
    for (int i = 0; i < V_AHEAD; i++) ldmatrix_x4_trans(v[i], w.values + stage + i * 32);
    group_sync(w);  // orders the weights' and factors' writes before the reads, and these reads before the next ones
    take_weights(w, weights, o);
    add_values_to_both(weights, w.values + stage, v, o);
    copy_tile(p, r, rows, w, source, w.ring + stage, copied_id(w, source, w.ring + stage));
    stage = stage == (STAGES - 1) * Smem::STAGE_BYTES ? 0 : stage + Smem::STAGE_BYTES;
  }
  cp_async_wait_all();  // nothing is in flight any more
  Piece same = find_again(p, piece);
  Softmax softmax[ROW_TILES];
  join_softmax(w, own, softmax);  // its barriers order lane 0's write of the place before the reads as well
  if constexpr (PLACE_IN_SHARED) {
    const u32x2 found = ld_shared_u32x2(place);
    same.request.q_begin = (int)found.x, same.rows.first = block_idx_x() * ROWS, same.rows.end = (int)found.y;
  }
#pragma unroll
  for (int t = 0; t < ROW_TILES; t++) {
    if (KV_GROUPS == 2 && t > 0) all_sync();  // orders the other group's reads of the rings before the next writes
    store(p, same.request, same.part, same.rows.first + t * TILE, same.rows.end, w, softmax[t], o[t]);
  }
}

// The same over an 8-bit cache.
DEVICE void attend_fp8(const VerifyParams& p, const Piece& piece) {
  const Request& r = piece.request;
  const RowTile& rows = piece.rows;
  const Warp located = locate(shared_base());
  Source source = make_source(p, r, rows, piece.tiles, located);
  Scales scales[ROW_TILES] = {};
  u32 unused[ROW_TILES][Q_STEPS][4];
  start(p, r, rows, located, source, unused);
  Query q;
  load_query(p, r, rows, located, q, scales);

  Softmax softmax[ROW_TILES];
  float o[ROW_TILES][O_TILES][4];
#pragma unroll
  for (int t = 0; t < ROW_TILES; t++) reset(softmax[t], o[t]);
  u32 stage = 0, buffer = 0;
  Weigher own = {};
  if constexpr (SPLIT_SOFTMAX) own = make_weigher(located);
#pragma unroll 1
  for (int tile = piece.tiles.begin + located.group * STEP_TILES; tile < source.end; tile += KV_GROUPS * STEP_TILES) {
    const Warp w = locate_again(located);
    cp_async_wait<STAGES - 1>();
    warp_sync();  // orders all lanes' copies of these tiles, which have landed, before the reads
    // The codes of V go to registers as those of K do, and become float16 when their weights are there.
    float s[ROW_TILES][STEP_TILES][2][4], token_scales[STEP_TILES][2][2] = {};
    u32 v[STEP_TILES][CODE_LOADS][4], weights[ROW_TILES][STEP_TILES][4];
    const u32 listed = SPARSE_IDS ? source.listed[0] : ~0u;
#pragma unroll
    for (int i = 0; i < STEP_TILES; i++)
      if constexpr (TOKEN_SCALES)
        load_token_scales(w, w.ring + stage + i * (TILE * PITCH) + LATENT_BYTES + ROPE_BYTES, PITCH, token_scales[i]);
    const bool is_masked = tile + STEP_TILES - 1 >= source.masked;
    if constexpr (!LATE_VALUES) {
      const u32 id = copied_id(w, source, w.ring + stage);
      partial_scores_fp8(q, w, stage, token_scales, s);
#pragma unroll
      for (int i = 0; i < STEP_TILES; i++) load_values_fp8(w.values + stage + i * (TILE * PITCH), v[i]);
      copy_tile(p, r, rows, w, source, w.ring + stage, id);
    } else {
      partial_scores_fp8(q, w, stage, token_scales, s);
    }
    if constexpr (SPLIT_SOFTMAX) {
      publish_halves(w, s);
      group_sync(w);  // orders the partial scores' writes before the reads
      float mine[4];
      collect_scores(own, 1.0f, mine);
      cap_own_scores(p, mine);
      if constexpr (SPARSE_IDS) {
        if (listed != ~0u) mask_own_scores(w, listed, mine);
      } else if (is_masked) {
        mask_own_scores(w, own_bits(p, r, rows, own, tile) & cached_bits(source, tile * TILE), mine);
      }
      weigh_own(p, w, own, 1.0f, mine);
      ldmatrix_x4_trans(v[0][0], w.values + stage);
      group_sync(w);  // orders the weights' and factors' writes before the reads, and these reads before the next ones
      take_weights(w, weights, o);
    } else {
      scale_scores(scales[0], 1.0f, s[0]);
      publish_scores(w, buffer, s);
      add_scores(w, buffer, s);
#pragma unroll
      for (int i = 0; i < STEP_TILES; i++) {
        cap_scores(s[0][i]);
        if constexpr (SPARSE_IDS) {
          const u32 bits = listed >> i * TILE;
          if (listed != ~0u) mask_scores(s[0][i], {bits, bits});
        } else if (is_masked) {
          mask_tile(p, r, rows, w, rows.first, tile + i, cached_bits(source, (tile + i) * TILE), s[0][i]);
        }
      }
      weigh_step(p, s[0], token_scales, 1.0f, softmax[0], scales[0], o[0], weights[0]);
    }
    if constexpr (!LATE_VALUES) {
#pragma unroll
      for (int i = 0; i < STEP_TILES; i++)
#pragma unroll
        for (int j = 0; j < CODE_LOADS; j++) add_values_fp8(weights, i, v[i][j], j, o);
    } else {
      const u32 values = w.values + stage;
      if constexpr (!SPLIT_SOFTMAX) ldmatrix_x4_trans(v[0][0], values);
#pragma unroll
      for (int j = 0; j < CODE_LOADS; j++) {
        if (j + 1 < CODE_LOADS) ldmatrix_x4_trans(v[0][(j + 1) % 2], values + (j + 1) * 32);
        add_values_fp8(weights, 0, v[0][j % 2], j, o);
        // Else ptxas puts each conversion right in front of its product.
        if (j == 0 && !SPLIT_SOFTMAX) split_code(p.num_heads == 0);
      }
      copy_tile(p, r, rows, w, source, w.ring + stage, copied_id(w, source, w.ring + stage));
    }
    stage = stage == (STAGES - 1) * Smem::STAGE_BYTES ? 0 : stage + Smem::STAGE_BYTES;
    if constexpr (EXCHANGE_BUFFERS == 2) buffer ^= Smem::BUFFER_BYTES;
  }
  cp_async_wait_all();  // nothing is in flight any more
  const float scale = cache_scale(p);
  const Piece same = find_again(p, piece);
  if constexpr (NEW_KV) attend_new_rows(p, same, located, q, softmax, scales, o, buffer, own);
  const Warp w = locate_again(located);
  if constexpr (SPLIT_SOFTMAX) join_softmax(w, own, softmax);
#pragma unroll
  for (int t = 0; t < ROW_TILES; t++) {
#pragma unroll
    for (int i = 0; i < O_TILES; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) o[t][i][e] *= TOKEN_SCALES ? ex2(-scales[t].gain.of[e / 2]) : scale;
    if (KV_GROUPS == 2 && t > 0) all_sync();  // orders the other group's reads of the rings before the next writes
    store(p, same.request, same.part, same.rows.first + t * TILE, same.rows.end, w, softmax[t], o[t]);
  }
}

DEVICE void attend(const VerifyParams& p, const Piece& piece) {
  if constexpr (FP8)
    attend_fp8(p, piece);
  else if constexpr (TALL_16)
    attend_32_rows(p, piece);
  else
    attend_16_bit(p, piece);
}

// Brings the page ids of the block's first tiles to the level-2 cache while the request's lengths are on their way, in
// case it has the greatest length that it may have: a short call is mostly latency.
DEVICE void prefetch_ids(const VerifyParams& p) {
  const int all = ((int)p.max_kv_len + TILE - 1) / TILE, per_split = (all + grid_dim_y() - 1) / grid_dim_y();
  const int token = (block_idx_y() * per_split + thread_idx() / TILE) * TILE + thread_idx() % TILE;
  if (token >= p.max_kv_len || (p.kv_indptr && block_idx_z() > 0)) return;
  const i64 id = block_idx_z() * p.block_table_stride + page_of(p, token);
  prefetch_l2((const u8*)p.page_ids + id * (p.wide_ids ? 8 : 4));
}

DEVICE void attend_split(const VerifyParams& p, const Request& r) {
  const RowTile rows = row_tile(p, r, block_idx_x() * ROWS, ROWS);
  if (rows.end <= rows.first) return;
  const TileRange tiles = split_tiles(p, r, rows, block_idx_y());
  if constexpr (DETERMINISTIC) {
    store_absent<THREADS>(p, r, rows.first, rows.end, count_chunks(p, r, rows));
    if (tiles.begin == tiles.end) return;
  }
  if (tiles.begin == tiles.end) return store_empty<THREADS>(p, r, 0, rows.first, rows.end);
  attend(p, {r, rows, tiles, 0, 0});
}

// Returns the block's next item.
DEVICE int attend_item(const VerifyParams& p, int item) {
  const WorkItem w = load_work_item(p, item);
  const Request r = request_of(w);
  if (w.tiles.begin < w.tiles.end) {
    attend(p, {r, row_tile(p, r, w.row_tile * ROWS, ROWS), w.tiles, w.part, item});
    if constexpr (FP8) block_sync();  // as in all_sync()
    block_sync();                     // orders this item's reads of shared memory before the next item's writes
  } else if (w.request != -1) {
    // Anew, or registers keep what follows from it from item to item.
    store_empty_item<THREADS>(p, w, TALL_16 ? thread_idx_anew() : thread_idx());
  }
  return FIND_AGAIN ? load_work_item(p, item).next : w.next;
}

KERNEL(mlaflash_mma_narrow, THREADS, MIN_BLOCKS) {
  if constexpr (PLANNED) {
#pragma unroll 1
    for (int item = block_idx_x(); item >= 0;) item = attend_item(p, item);
  } else {
    prefetch_ids(p);
    const Request r = load_request(p, block_idx_z());
    if (PLACE_IN_SHARED) store_padding<THREADS>(p, r);  // no register keeps the request
    attend_split(p, r);
    if (!PLACE_IN_SHARED) store_padding<THREADS>(p, FIND_AGAIN ? load_request(p, block_idx_z()) : r);
  }
  launch_dependents();
}
