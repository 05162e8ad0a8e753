// The tensor-core kernel for few rows: one block computes 16 packed rows (query token x head) of one request over one
// split of its KV, and reads every KV row once for all of them.
//
// Grid:   x = ceil(max_q_len * H / 16) row tiles, y = split, z = request; PLANNED x = work_blocks.
// Block:  128 * KV_GROUPS threads.
// Shared: KV_GROUPS * (STAGES * 18,688 + EXCHANGE_BUFFERS * 4,096) bytes (struct Smem).
// Idea:   four warps share the 16 rows of a KV group; each owns 128 latent and 16 rope columns, 288 bytes of a KV row.
//         They are its part of the reduction q K and, as values, its part of the output: so it copies exactly the bytes
//         that it reads, into a ring of its own, and no other warp waits for them. Once a tile of 16 tokens the warps
//         add their partial scores through shared memory. Two KV groups (or two blocks on an SM) take turns and hide
//         each other's latency. DETERMINISTIC: a block computes chunks one after the other, each from nothing.
// Source: the online softmax over KV tiles of FlashAttention (arXiv:2205.14135), split over KV as in Flash-Decoding.
#include "mma.cuh"

constexpr int COLUMN_WARPS = 4;
constexpr int WARPS = KV_GROUPS * COLUMN_WARPS;
constexpr int THREADS = WARPS * WARP;
constexpr int MIN_BLOCKS = KV_GROUPS == 1 ? 2 : 1;

// A warp's slice of a KV row, and of a q row.
constexpr int LATENT_BYTES = DL / COLUMN_WARPS * 2;
constexpr int ROPE_BYTES = DR / COLUMN_WARPS * 2;
constexpr int PITCH = LATENT_BYTES + ROPE_BYTES;
constexpr int K_STEPS = PITCH / 32;         // products of 16 dims in the warp's part of q K
constexpr int V_STEPS = LATENT_BYTES / 32;  // 16-column pieces of its part of P V
constexpr int O_TILES = V_STEPS * 2;
constexpr int FINAL_TILES = O_TILES / KV_GROUPS;  // of them, those that a warp stores
constexpr int K_AHEAD = 2;                        // ldmatrix in flight before the product that uses the first

static_assert(KV_GROUPS == 1 || KV_GROUPS == 2, "two groups exchange halves of their columns");
static_assert(STAGES >= 2, "one tile is read while the next one is copied");
static_assert(KV_GROUPS == 1 || !DETERMINISTIC, "a chunk is one chain of tiles");
static_assert(!PLANNED || PLANNED_ROWS == TILE, "the list has row tiles of this kernel");
static_assert(EXCHANGE_BUFFERS == 1 || EXCHANGE_BUFFERS == 2, "one buffer costs a second barrier a tile");

struct Smem {
  // A stage: 16 rows of a slice, then u32 [16], the page ids of the tile that comes to this stage next.
  static constexpr u32 IDS = TILE * PITCH;
  static constexpr u32 STAGE_BYTES = IDS + TILE * 4;
  static constexpr u32 RING_BYTES = STAGES * STAGE_BYTES;
  static constexpr u32 SCORE_BYTES = WARP * 16;         // 16 x 8 scores, four a lane
  static constexpr u32 SCORES_BYTES = 2 * SCORE_BYTES;  // a warp's 16 x 16
  static constexpr u32 BUFFER_BYTES = WARPS * SCORES_BYTES;
  // [WARPS][STAGES] KV tiles; before them q, after them o.
  static constexpr u32 RINGS = 0;
  // float32 [EXCHANGE_BUFFERS][WARPS][2][32][4] partial scores.
  static constexpr u32 EXCHANGE = RINGS + WARPS * RING_BYTES;
  static constexpr u32 BYTES = EXCHANGE + EXCHANGE_BUFFERS * BUFFER_BYTES;
};
static_assert((FINAL_TILES + 1) * Smem::SCORE_BYTES <= Smem::RING_BYTES,
              "half of o and the softmax state fit a warp's ring");

// A slice in shared memory: rows of PITCH bytes, in which the 16-byte chunk c of row r lies at c ^ (r / 4 % 2). PITCH
// is 8 banks modulo 32, so that rows 0-3 and, moved by a chunk, rows 4-7 of an ldmatrix phase hit all 32 banks.
DEVICE u32 slice_offset(int row, int chunk) { return row * PITCH + (chunk ^ (row >> 2 & 1)) * 16; }

struct Warp {
  int lane, group, column;  // column: which of the COLUMN_WARPS slices
  u32 ring;
  u32 keys;    // the lane's ldmatrix row in stage 0: of K, the B operand of q K
  u32 values;  // of V, transposed, the B operand of P V; and of q, the A operand
  u32 scores;  // the lane's place in exchange buffer 0, column warp 0 of the group
};

DEVICE Warp locate(u32 smem) {
  Warp w;
  w.lane = lane_idx();
  // The shuffle tells the compiler that the warp's number, and every branch on it, is the same for all lanes. Else it
  // guards each shuffle and waits for all loads before each guard.
  const int warp = (int)shfl_u32(warp_idx(), 0);
  w.group = warp / COLUMN_WARPS;
  w.column = warp % COLUMN_WARPS;
  w.ring = smem + Smem::RINGS + warp * Smem::RING_BYTES;
  w.keys = w.ring + slice_offset(w.lane % 8 + w.lane / 16 * 8, w.lane / 8 % 2);
  w.values = w.ring + slice_offset(w.lane % 16, w.lane / 16);
  w.scores = smem + Smem::EXCHANGE + w.group * COLUMN_WARPS * Smem::SCORES_BYTES + w.lane * 16;
  return w;
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

DEVICE void copy_q(const VerifyParams& p, const Request& r, const RowTile& rows, const Warp& w, u32 stage) {
  const int row = rows.first + w.lane % TILE;
  const int token = row / p.num_heads, head = row - token * p.num_heads;
  KvRow q = {nullptr, nullptr};
  if (row < rows.end) q = {q_nope_row(p, r.q_begin + token, head), q_pe_row(p, r.q_begin + token, head)};
  copy_slice<false>(w, stage, q);
}

// Where a group's tiles come from, and how far its copies are.
struct Source {
  const u8* ids;    // the request's page ids
  int last_cached;  // the cache's last token, below 0 for none; those after it are rows of new_kv_c and new_k_pe
  int tile, end;    // next tile to copy; the split's tiles end here
  int masked;       // every row sees all tokens of the tiles before this one, and the cache holds them
  u32 listed[STAGES] = {};  // SPARSE_IDS: listed_bits() of the tiles in the ring, the oldest first
};

DEVICE Source make_source(const VerifyParams& p, const Request& r, const RowTile& rows, const TileRange& tiles,
                          const Warp& w) {
  Source s;
  s.ids = (const u8*)p.page_ids + r.id_begin * (p.wide_ids ? 8 : 4);
  s.last_cached = (NEW_KV ? r.kv_len - r.q_len : r.kv_len) - 1;
  s.tile = tiles.begin + w.group;
  s.end = tiles.end;
  s.masked = min_int(s.end, first_masked_tile(p, r, rows));
  if (NEW_KV) s.masked = min_int(s.masked, max_int(s.last_cached + 1, 0) / TILE);
  return s;
}

DEVICE int token_of(const Warp& w, int tile) { return tile * TILE + w.lane % TILE; }

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
  if (!SPLIT_KV) return {c_ptr, c_ptr + DL * element_bytes<KV_DTYPE>()};
  const i64 pe = mad_wide_i32(page, (i32)p.k_pe_stride_page, mad_wide_i32(slot, (i32)p.k_pe_stride_token, 0));
  return {c_ptr, element_ptr<KV_DTYPE>(p.k_pe, pe)};
}

DEVICE KvRow new_row(const VerifyParams& p, const Request& r, int token) {
  const i64 row = r.q_begin + token - (r.kv_len - r.q_len);
  return {element_ptr<KV_DTYPE>(p.new_kv_c, row * p.new_kv_c_stride),
          element_ptr<KV_DTYPE>(p.new_k_pe, row * p.new_k_pe_stride)};
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
  return NEW_KV && token > s.last_cached ? new_row(p, r, token) : cached_row(p, id, token);
}

// The page id of the lane's token in the next tile, which goes to `stage`: it came with that stage's last copies.
DEVICE u32 copied_id(const Warp& w, const Source& s, u32 stage) {
  return has_ids(s, s.tile) ? ld_shared_u32(stage + Smem::IDS + w.lane % TILE * 4) : 0;
}

// SPARSE_IDS: copies the tile whose listed_bits() are `bits`, and adds them to those of the ring.
DEVICE void copy_listed(const Warp& w, Source& s, u32 stage, KvRow row, u32 bits) {
  if (s.tile < s.end) {
    if (bits == ~0u)
      copy_slice<true>(w, stage, row);
    else
      copy_slice<false>(w, stage, bits >> w.lane & 1 ? row : KvRow{nullptr, nullptr});
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
    copy_listed(w, s, stage, row, listed_bits(id, token, s.last_cached + 1));
  } else if (s.tile < s.masked) {
    copy_slice<true>(w, stage, row);
  } else if (s.tile < s.end) {
    copy_slice<false>(w, stage, masked_row(p, r, rows, s, id, token));
  }
  const int later = s.tile + STAGES * KV_GROUPS;
  if (w.lane < TILE && has_ids(s, later)) cp_async_4(stage + Smem::IDS + w.lane * 4, id_ptr(p, w, s, later));
  cp_async_commit();
  s.tile += KV_GROUPS;
}

// --- one tile ------------------------------------------------------------------------------------------------------

// The warp's part of q K^T: 16 rows x 16 tokens, over its 144 dims; two sums, because an mma waits long for the one
// before it.
DEVICE void partial_scores(const u32 (&q)[K_STEPS][4], u32 keys, float (&sums)[2][2][4]) {
  u32 k[K_AHEAD + 1][4];
#pragma unroll
  for (int i = 0; i < K_AHEAD; i++) ldmatrix_x4(k[i], keys + i * 32);
#pragma unroll
  for (int i = 0; i < K_STEPS; i++) {
    if (i + K_AHEAD < K_STEPS) ldmatrix_x4(k[(i + K_AHEAD) % (K_AHEAD + 1)], keys + (i + K_AHEAD) * 32);
    const u32(&b)[4] = k[i % (K_AHEAD + 1)];
    mma_16x8x16(sums[i % 2][0], q[i], b[0], b[1]);
    mma_16x8x16(sums[i % 2][1], q[i], b[2], b[3]);
  }
}

DEVICE void load_values(u32 values, u32 (&v)[V_STEPS][4]) {
#pragma unroll
  for (int i = 0; i < V_STEPS; i++) ldmatrix_x4_trans(v[i], values + i * 32);
}

DEVICE void publish_scores(const Warp& w, u32 buffer, const float (&sums)[2][2][4], float (&s)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][e] = sums[0][n][e] + sums[1][n][e];
  // Orders the group's reads of the scores of the tile before, in this same buffer, before the writes below. With two
  // buffers the barrier of that tile already did: whoever passed it had read the tile before that one.
  if constexpr (EXCHANGE_BUFFERS == 1) group_sync(w);
#pragma unroll
  for (int n = 0; n < 2; n++)
    st_shared_f32x4(w.scores + buffer + w.column * Smem::SCORES_BYTES + n * Smem::SCORE_BYTES,
                    {s[n][0], s[n][1], s[n][2], s[n][3]});
}

DEVICE void add_scores(const Warp& w, u32 buffer, float (&s)[2][4]) {
  group_sync(w);  // orders the partial scores' writes before the reads of all four warps
#pragma unroll
  for (int c = 1; c < COLUMN_WARPS; c++)
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const u32 other = (w.column + c) % COLUMN_WARPS;
      const f32x4 v = ld_shared_f32x4(w.scores + buffer + other * Smem::SCORES_BYTES + n * Smem::SCORE_BYTES);
      s[n][0] += v.x;
      s[n][1] += v.y;
      s[n][2] += v.z;
      s[n][3] += v.w;
    }
}

DEVICE void mask_tile(const VerifyParams& p, const Request& r, const RowTile& rows, const Warp& w, int tile,
                      float (&s)[2][4]) {
  u32 bits[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int q = r.q_begin + (rows.first + w.lane / 4 + 8 * h) / p.num_heads;
    bits[h] = visible_bits(p, r, min_int(q, rows.q_last), tile * TILE);
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

DEVICE void store(const VerifyParams& p, const Request& r, int part, const RowTile& rows, const Warp& w,
                  Softmax& softmax, const float (&o)[O_TILES][4]) {
  const int column = w.column * (DL / COLUMN_WARPS) + w.group * FINAL_TILES * 8;
  if constexpr (KV_GROUPS == 1) {
    store_results(p, r, part, rows.first, rows.end, column, softmax, o);
  } else {
    float merged[FINAL_TILES][4];
    send_half(w, softmax, o);
    all_sync();  // orders the writes of send_half() before the other group's reads of them
    merge_half(w, softmax, o, merged);
    store_results(p, r, part, rows.first, rows.end, column, softmax, merged);
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
  store_results(p, r, tile / CHUNK_TILES, rows.first, rows.end, w.column * (DL / COLUMN_WARPS), softmax, o);
  reset(softmax, o);
}

// --- the kernel ----------------------------------------------------------------------------------------------------

// The page ids of the first tile of every stage: loaded early, and left with the stages as later ones are.
DEVICE void load_first_ids(const VerifyParams& p, const Warp& w, const Source& s, u32 (&ids)[STAGES]) {
#pragma unroll
  for (int i = 0; i < STAGES; i++)
    if (has_ids(s, s.tile + i * KV_GROUPS)) ids[i] = ld_global_u32(id_ptr(p, w, s, s.tile + i * KV_GROUPS));
}
DEVICE void store_first_ids(const Warp& w, const Source& s, const u32 (&ids)[STAGES]) {
#pragma unroll
  for (int i = 0; i < STAGES; i++)
    if (w.lane < TILE && has_ids(s, s.tile + i * KV_GROUPS))
      st_shared_u32(w.ring + i * Smem::STAGE_BYTES + Smem::IDS + w.lane * 4, ids[i]);
}

// q from the slice at `ring + stage` to registers, as the A operand.
DEVICE void load_q(const VerifyParams& p, const Warp& w, u32 stage, u32 (&q)[K_STEPS][4]) {
#pragma unroll
  for (int i = 0; i < K_STEPS; i++) {
    ldmatrix_x4(q[i], w.values + stage + i * 32);
#pragma unroll
    for (int j = 0; j < 4; j++) q[i][j] = fold_scale_sign(p, q[i][j]);
  }
}

// Fills the ring. q passes through its last stage, while the others already fill with KV.
DEVICE void start(const VerifyParams& p, const Request& r, const RowTile& rows, const Warp& w, Source& source,
                  u32 (&q)[K_STEPS][4]) {
  constexpr u32 LAST = (STAGES - 1) * Smem::STAGE_BYTES;
  u32 ids[STAGES];
  load_first_ids(p, w, source, ids);
  copy_q(p, r, rows, w, w.ring + LAST);
  cp_async_commit();
  store_first_ids(w, source, ids);
  warp_sync();  // orders the writes of the ids before the other lanes' reads
  // A loop, because a short call is mostly start, and its code comes from memory too.
#pragma unroll 1
  for (u32 stage = 0; stage <= LAST; stage += Smem::STAGE_BYTES) {
    if (stage == LAST) {
      cp_async_wait<STAGES - 1>();
      warp_sync();  // orders all lanes' copies of q, which have landed, before the reads
      load_q(p, w, LAST, q);
    }
    copy_tile(p, r, rows, w, source, w.ring + stage, copied_id(w, source, w.ring + stage));
  }
}

// One row tile over a run of KV tiles, of which there is one at least.
DEVICE void attend(const VerifyParams& p, const Request& r, const RowTile& rows, const TileRange& tiles, int part) {
  const Warp w = locate(shared_base());
  Source source = make_source(p, r, rows, tiles, w);
  u32 q[K_STEPS][4];
  start(p, r, rows, w, source, q);

  Softmax softmax = {{neg_inf(), neg_inf()}, {0.0f, 0.0f}};
  float o[O_TILES][4] = {};
  u32 stage = 0, buffer = 0;
#pragma unroll 1
  for (int tile = tiles.begin + w.group; tile < tiles.end; tile += KV_GROUPS) {
    cp_async_wait<STAGES - 1>();
    warp_sync();  // orders all lanes' copies of this tile, which have landed, before the reads
    // K and V go to registers at once: the stage is free for the next copies before the scores are known.
    float sums[2][2][4] = {}, s[2][4];
    u32 v[V_STEPS][4];
    const u32 id = copied_id(w, source, w.ring + stage), listed = SPARSE_IDS ? source.listed[0] : ~0u;
    partial_scores(q, w.keys + stage, sums);
    load_values(w.values + stage, v);
    copy_tile(p, r, rows, w, source, w.ring + stage, id);
    publish_scores(w, buffer, sums, s);
    add_scores(w, buffer, s);
    soft_cap(p, s);
    if constexpr (SPARSE_IDS) {
      if (listed != ~0u) mask_scores(s, {listed, listed});
    } else if (tile >= source.masked) {
      mask_tile(p, r, rows, w, tile, s);
    }
    u32 weights[4];
    softmax_tile(s, exponent_scale(p), softmax, o, weights);
    add_values(weights, v, o);
    if constexpr (DETERMINISTIC) end_chunk(p, r, rows, w, tiles, tile, softmax, o);
    stage = stage == (STAGES - 1) * Smem::STAGE_BYTES ? 0 : stage + Smem::STAGE_BYTES;
    if constexpr (EXCHANGE_BUFFERS == 2) buffer ^= Smem::BUFFER_BYTES;
  }
  cp_async_wait_all();  // nothing is in flight any more
  if constexpr (!DETERMINISTIC) store(p, r, part, rows, w, softmax, o);
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
  const RowTile rows = row_tile(p, r, block_idx_x() * TILE, TILE);
  if (rows.end <= rows.first) return;
  const TileRange tiles = split_tiles(p, r, rows, block_idx_y());
  if constexpr (DETERMINISTIC) {
    store_absent<THREADS>(p, r, rows.first, rows.end, count_chunks(p, r, rows));
    if (tiles.begin == tiles.end) return;
  }
  if (tiles.begin == tiles.end) return store_empty<THREADS>(p, r, 0, rows.first, rows.end);
  attend(p, r, rows, tiles, 0);
}

// Returns the block's next item.
DEVICE int attend_item(const VerifyParams& p, int item) {
  const WorkItem w = load_work_item(p, item);
  const Request r = request_of(w);
  if (w.tiles.begin < w.tiles.end) {
    attend(p, r, row_tile(p, r, w.row_tile * TILE, TILE), w.tiles, w.part);
    block_sync();  // orders this item's reads of shared memory before the next item's writes
  } else if (w.request != -1) {
    store_empty_item<THREADS>(p, w);
  }
  return w.next;
}

KERNEL(mlaflash_mma_narrow, THREADS, MIN_BLOCKS) {
  if constexpr (PLANNED) {
#pragma unroll 1
    for (int item = block_idx_x(); item >= 0;) item = attend_item(p, item);
  } else {
    prefetch_ids(p);
    const Request r = load_request(p, block_idx_z());
    attend_split(p, r);
    store_padding<THREADS>(p, r);
  }
  launch_dependents();
}
