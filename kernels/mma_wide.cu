// The tensor-core kernel for many rows: one block computes 16 * ROW_GROUPS packed rows (query token x head) of one
// request over one split of its KV, and reads every KV row once for all of them.
//
// Grid:   x = ceil(max_q_len * H / (16 * ROW_GROUPS)) row tiles, y = split, z = request; PLANNED x = work_blocks.
// Block:  32 * ROW_GROUPS * COLUMN_WARPS threads.
// Shared: STAGES * 18,704 + ROW_GROUPS * COLUMN_WARPS * 2,048 + 144 bytes (struct Smem).
// Idea:   Keys and values are one tile of 16 tokens in a ring that cp.async fills. A warp owns 16 rows x one column
//         warp's share of the 576 dims of q (in registers) and of the 512 output columns; the column warps of a row
//         group add their partial scores through shared memory and all compute the same weights, which never leave
//         registers. The tensor cores get q K of tile n and P V of tile n - 1 as one stream: P V waits for nothing, and
//         fills the gaps that the chain of additions leaves in q K.
// Source: warp layout of FlashAttention-2 (Dao, arXiv:2307.08691, section 3.3), turned to split the reduction dim as
//         well, which V = K[:, :512] invites.
#include "mma.cuh"

static_assert(!DETERMINISTIC, "mma_narrow computes the rows that are to be the same in every call");

constexpr int WARPS = ROW_GROUPS * COLUMN_WARPS;
constexpr int THREADS = WARPS * WARP;
constexpr int ROWS = ROW_GROUPS * 16;

constexpr int ROW_BYTES = D * 2;
constexpr int LATENT_BYTES = DL * 2;
constexpr int PITCH = ROW_BYTES + 16;  // an odd multiple of 16 bytes: the 8 rows of an ldmatrix phase hit all 32 banks
constexpr int STAGE_BYTES = TILE * PITCH + 16;  // a tile and its two mbarriers

constexpr int K_STEPS = D / 16 / COLUMN_WARPS;   // products of 16 dims in a warp's part of q K
constexpr int V_STEPS = DL / 16 / COLUMN_WARPS;  // 16-column pieces of a warp's part of P V
constexpr int O_TILES = DL / 8 / COLUMN_WARPS;
constexpr int STREAM = K_STEPS > V_STEPS ? K_STEPS : V_STEPS;

constexpr int COPY_LANES = 16;                            // lanes that copy one KV row
constexpr int COPY_ROWS = TILE / (THREADS / COPY_LANES);  // rows that such a half-warp copies
constexpr int MASK_WORDS = 32;                            // of mask columns, so tail_len <= 1,024
constexpr int SCORE_BYTES = WARP * 16;                    // one 16 x 8 piece of scores of a warp
constexpr int EXCHANGE_BUFFER = WARPS * 2 * SCORE_BYTES;  // partial scores of a tile

constexpr int Q_STAGE = STAGES - ROW_GROUPS;  // q passes through this one and those behind it

// Two column warps take all registers of a thread. Some features leave none for the lane and the spare stage, which are
// then found anew for each step, and none for what follows from the thread, then found anew for each item of a list.
constexpr bool STEP_ANEW = COLUMN_WARPS == 2 && NEW_KV;
constexpr bool ITEM_ANEW = COLUMN_WARPS == 2 && PLANNED && (SOFT_CAP || NEW_KV || SPLIT_KV);

static_assert(WARPS == 4 || WARPS == 8, "each half-warp copies one or two rows of a tile");
static_assert(REFILL_AT >= 0 && REFILL_AT <= STREAM, "the refill interrupts the stream of products");
static_assert(STAGES >= 3, "two tiles are in use, one at least must be in flight");
static_assert(ROW_GROUPS <= STAGES, "q passes through the ring, 16 rows a stage");
static_assert(!PLANNED || PLANNED_ROWS == ROWS, "the list has row tiles of this kernel");

struct Smem {
  static constexpr u32 RING = 0;                                  // [STAGES]: tile [16][PITCH], before it q; mbarriers
  static constexpr u32 EXCHANGE = RING + STAGES * STAGE_BYTES;    // float32 [2][WARPS][2][32][4] partial scores
  static constexpr u32 COLUMNS = EXCHANGE + 2 * EXCHANGE_BUFFER;  // u32 [MASK_WORDS] mask columns that any row sees
  static constexpr u32 TAIL_BEGIN = COLUMNS + MASK_WORDS * 4;     // i32: the mask columns begin here
  static constexpr u32 ITEM = TAIL_BEGIN + 4;                     // i32, PLANNED: what the block works on
  static constexpr u32 BYTES = TAIL_BEGIN + 16;
  // In a stage.
  static constexpr u32 FULL = TILE * PITCH;  // mbarrier: the tile has landed
  static constexpr u32 EMPTY = FULL + 8;     // mbarrier: all warps are done with it
  static constexpr u32 ID = ROW_BYTES;       // SPARSE_IDS: id of a row's token, in what pads the row to its pitch
};

// --- the ring ------------------------------------------------------------------------------------------------------

// Uniform. Where a tile lies in the ring, and the parity of the phase that its stage's mbarriers are in for it.
struct Stage {
  u32 offset, parity;
};

DEVICE Stage next_stage(Stage s) {
  if (s.offset == (STAGES - 1) * STAGE_BYTES) return {0, s.parity ^ 1};
  return {s.offset + STAGE_BYTES, s.parity};
}

DEVICE Stage previous_stage(Stage s) {
  if (s.offset == 0) return {(STAGES - 1) * STAGE_BYTES, s.parity ^ 1};
  return {s.offset - STAGE_BYTES, s.parity};
}

// Uniform. Where step n finds its tiles: n for the scores, n - 1 for the values, and n - 2, whose stage is free for
// another.
struct Position {
  Stage scores, values, spare;
  i32 token;     // first of tile n
  u32 exchange;  // buffer of the partial scores
};

DEVICE Position first_position(i32 token) {
  return {{0, 0}, {(STAGES - 1) * STAGE_BYTES, 1}, {(STAGES - 2) * STAGE_BYTES, 1}, token, 0};
}
DEVICE Position next_position(const Position& at) {
  return {next_stage(at.scores), at.scores, at.values, at.token + TILE, at.exchange ^ EXCHANGE_BUFFER};
}

// --- the lane's place ----------------------------------------------------------------------------------------------

DEVICE int thread_of_item() { return ITEM_ANEW ? thread_idx_anew() : thread_idx(); }
DEVICE int lane_of_item() { return ITEM_ANEW ? lane_idx_anew() : lane_idx(); }

struct Warp {
  u32 row_group, column;  // uniform: row_group owns rows 16 * row_group ..., column its share of dims and columns
  u32 keys, values;       // address of the lane's ldmatrix row in stage 0
};

DEVICE Warp locate(u32 smem) {
  Warp w;
  const u32 lane = lane_of_item(), warp = make_uniform(thread_of_item() / WARP);
  w.row_group = warp / COLUMN_WARPS;
  w.column = warp % COLUMN_WARPS;
  // Keys: matrices 0, 1 are dims 0-7, 8-15 of tokens 0-7, and 2, 3 those of tokens 8-15: (r0, r1) and (r2, r3) are the
  // B fragments of the two token octets, in neighbouring registers as the tensor cores want them.
  w.keys = keep_in_register(smem + Smem::RING + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16 +
                            w.column * (ROW_BYTES / COLUMN_WARPS));
  // Values, transposed: (r0, r1) is columns 0-7, (r2, r3) columns 8-15 of the 16 tokens.
  w.values = keep_in_register(smem + Smem::RING + lane % 16 * PITCH + lane / 16 * 16 +
                              w.column * (LATENT_BYTES / COLUMN_WARPS));
  return w;
}

// --- filling the ring ----------------------------------------------------------------------------------------------

// Uniform.
struct Source {
  u32 thread;       // not uniform
  const u8* ids;    // the request's page ids
  u32 id_bytes;     // of an id
  i32 end;          // KV tokens of this block end here
  i32 masked_from;  // every row sees every token of the tiles before the one that this token begins; SPARSE_IDS: 0
  i32 cached;       // NEW_KV: tokens from here on are rows of new_kv_c and new_k_pe
  i32 new_row;      // NEW_KV: the row of token 0, were it there
};

DEVICE Source make_source(const VerifyParams& p, const Request& r, const RowTile& rows, const TileRange& tiles) {
  const int masked_from = min_int(max_int(first_masked_tile(p, r, rows), tiles.begin), tiles.end);
  Source s;
  s.thread = keep_in_register(thread_of_item());
  s.id_bytes = p.wide_ids ? 8 : 4;
  const u64 ids = (u64)p.page_ids + r.id_begin * s.id_bytes;
  s.ids = (const u8*)((u64)make_uniform((u32)(ids >> 32)) << 32 | make_uniform((u32)ids));
  s.end = make_uniform(min_int(tiles.end * TILE, visible_end(p, r, rows.q_last)));
  s.masked_from = SPARSE_IDS ? 0 : make_uniform(masked_from * TILE);
  s.cached = NEW_KV ? make_uniform(r.kv_len - r.q_len) : 0;
  s.new_row = NEW_KV ? make_uniform(r.q_begin - (r.kv_len - r.q_len)) : 0;
  return s;
}

// The lane's part of a tile: some of the rows, and of each of them every 16th chunk of 16 bytes.
struct Share {
  u32 row, chunk;
};
DEVICE Share copy_share(u32 thread) { return {thread / COPY_LANES * COPY_ROWS, thread % COPY_LANES}; }

// Where a token's row is.
struct Slot {
  i32 page, offset;  // id of the page, and the token's place in it
};

// The slots of the tokens of the tile that begins at `tile_token`, found one refill before they are used; of tokens
// past the end, the last one's. The low word of a 64-bit id is enough: pools have fewer than 2^31 pages.
DEVICE void find_slots(Slot (&slots)[COPY_ROWS], const VerifyParams& p, const Source& s, i32 tile_token) {
  const i32 first = tile_token + copy_share(s.thread).row;
#pragma unroll
  for (int i = 0; i < COPY_ROWS; i++) {
    const i32 token = min_int(first + i, s.end - 1);
    if (NEW_KV && token >= s.cached) continue;
    const u32 page = page_of(p, token);
    slots[i].offset = SPARSE_IDS ? 0 : token - page * p.page_size;
    slots[i].page = (i32)ld_global_nc_u32(s.ids + page * s.id_bytes);
  }
}

// The 16 bytes `chunk` of the latent and of the rope part of a token's row. Strides of pages and tokens fit 32 bits;
// what they add up to does not.
DEVICE KvRow source_chunk(const VerifyParams& p, const Source& s, i32 token, Slot slot, u32 chunk) {
  const i64 element = chunk * vector_width<KV_DTYPE>();
  if (NEW_KV && token >= s.cached) {
    const i32 row = s.new_row + token;
    return {element_ptr<KV_DTYPE>(p.new_kv_c, mad_wide_i32(row, (i32)p.new_kv_c_stride, element)),
            element_ptr<KV_DTYPE>(p.new_k_pe, mad_wide_i32(row, (i32)p.new_k_pe_stride, element))};
  }
  const i64 c = mad_wide_i32(slot.offset, (i32)p.kv_c_stride_token, element);
  const u8* c_ptr = element_ptr<KV_DTYPE>(p.kv_c, mad_wide_i32(slot.page, (i32)p.kv_c_stride_page, c));
  if (!SPLIT_KV) return {c_ptr, c_ptr + LATENT_BYTES};
  const i64 pe = mad_wide_i32(slot.offset, (i32)p.k_pe_stride_token, element);
  return {c_ptr, element_ptr<KV_DTYPE>(p.k_pe, mad_wide_i32(slot.page, (i32)p.k_pe_stride_page, pe))};
}

// Some row of the row tile sees the token. Others are zeros in the ring: their weight is 0, but 0 times a NaN is not.
DEVICE bool is_seen(const Source& s, u32 smem, i32 token, Slot slot) {
  if (token >= s.end) return false;
  if constexpr (SPARSE_IDS) return slot.page >= 0;
  const int column = token - (i32)ld_shared_u32(smem + Smem::TAIL_BEGIN);
  return column < 0 || ld_shared_u32(smem + Smem::COLUMNS + (column >> 5) * 4) >> (column & 31) & 1;
}

// The lane's part of copying the tile that begins at `tile_token`, and its arrival on the full barrier for when that
// has landed.
DEVICE void copy_tile(const VerifyParams& p, const Source& s, u32 smem, u32 stage_offset, i32 tile_token,
                      const Slot (&slots)[COPY_ROWS]) {
  const Share share = copy_share(s.thread);
  const u32 stage = smem + Smem::RING + stage_offset;
#pragma unroll
  for (int i = 0; i < COPY_ROWS; i++) {
    const i32 token = tile_token + share.row + i;
    const u32 bytes = tile_token < s.masked_from || is_seen(s, smem, token, slots[i]) ? 16 : 0;
    const KvRow row = source_chunk(p, s, token, slots[i], share.chunk);
    const u32 dst = stage + (share.row + i) * PITCH + share.chunk * 16;
#pragma unroll
    for (int c = 0; c < LATENT_BYTES; c += COPY_LANES * 16) cp_async_16_zfill(dst + c, row.c + c, bytes);
    if (share.chunk < DR * 2 / 16) cp_async_16_zfill(dst + LATENT_BYTES, row.pe, bytes);
    if (SPARSE_IDS && share.chunk == COPY_LANES - 1)
      cp_async_4(stage + (share.row + i) * PITCH + Smem::ID, s.ids + min_int(token, s.end - 1) * s.id_bytes);
  }
  cp_async_mbarrier_arrive_noinc(stage + Smem::FULL);
}

// --- before the first tile -----------------------------------------------------------------------------------------

DEVICE void init_barriers(u32 smem) {
  if (thread_idx() != 0) return;
  for (int stage = 0; stage < STAGES; stage++) {
    mbarrier_init(smem + Smem::RING + stage * STAGE_BYTES + Smem::FULL, THREADS);
    mbarrier_init(smem + Smem::RING + stage * STAGE_BYTES + Smem::EMPTY, THREADS);
  }
}

// Their memory may be written again.
DEVICE void retire_barriers(u32 smem) {
  if (thread_idx() != 0) return;
  for (int stage = 0; stage < STAGES; stage++) {
    mbarrier_inval(smem + Smem::RING + stage * STAGE_BYTES + Smem::FULL);
    mbarrier_inval(smem + Smem::RING + stage * STAGE_BYTES + Smem::EMPTY);
  }
}

// Starts the copies of q, 16 rows a stage from Q_STAGE on. Rows past the last one are zeros.
DEVICE void copy_q(const VerifyParams& p, const RowTile& rows, u32 smem) {
  constexpr int ROWS_PER_WARP = ROWS / WARPS;
  const int begin = thread_of_item() / WARP * ROWS_PER_WARP, chunk = lane_of_item() * 16;
  int head = (rows.first + begin) % p.num_heads;
  int token = rows.q_first + (rows.first % p.num_heads + begin) / p.num_heads;
#pragma unroll
  for (int i = 0; i < ROWS_PER_WARP; i++) {
    const int row = begin + i;
    const u32 bytes = rows.first + row < rows.end ? 16 : 0;
    const u32 dst = smem + Smem::RING + (Q_STAGE + row / 16) * STAGE_BYTES + row % 16 * PITCH + chunk;
    const u8* nope = q_nope_row(p, token, head) + chunk;
    cp_async_16_zfill(dst, nope, bytes);
    cp_async_16_zfill(dst + 512, nope + 512, bytes);
    if (chunk < DR * 2) cp_async_16_zfill(dst + LATENT_BYTES, q_pe_row(p, token, head) + chunk, bytes);
    if (++head == p.num_heads) head = 0, token++;
  }
}

// For is_seen(): where the mask columns begin, and which of them any row of the row tile sees.
DEVICE void publish_columns(const VerifyParams& p, const Request& r, const RowTile& rows, u32 smem) {
  const bool is_tree = p.mask_mode == MASK_TREE;
  const int word = thread_idx();
  if (word == 0) st_shared_u32(smem + Smem::TAIL_BEGIN, is_tree ? r.kv_len - r.tail_len : r.kv_len);
  if (!is_tree || word >= MASK_WORDS) return;
  u32 seen = 0;
  for (int q = rows.q_first; q <= rows.q_last; q++) seen |= tree_word(p, q, word);
  st_shared_u32(smem + Smem::COLUMNS + word * 4, seen);
}

// A fragments of the warp's 16 rows and its share of the dims.
DEVICE void load_q(u32 (&q)[K_STEPS][4], const VerifyParams& p, u32 smem, const Warp& w) {
  const int lane = lane_of_item();
  const u32 addr = smem + Smem::RING + (Q_STAGE + w.row_group) * STAGE_BYTES + w.column * (ROW_BYTES / COLUMN_WARPS) +
                   lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
  for (int k = 0; k < K_STEPS; k++) {
    ldmatrix_x4(q[k], addr + k * 32);
#pragma unroll
    for (int i = 0; i < 4; i++) q[k][i] = fold_scale_sign(p, q[k][i]);
  }
}

// --- one step: scores of tile n, values of tile n - 1 ----------------------------------------------------------------

struct Fragments {
  u32 k[LOOKAHEAD + 1][4], v[LOOKAHEAD + 1][4];
};

struct State {
  u32 q[K_STEPS][4];
  float o[O_TILES][4];
  u32 weights[4];  // of tile n - 1, as an A fragment
  Softmax softmax;
};

template <bool SCORES, bool VALUES>
DEVICE void load_fragments(Fragments& f, u32 keys, u32 values, int i) {
  if (SCORES && i < K_STEPS) ldmatrix_x4(f.k[i % (LOOKAHEAD + 1)], keys + i * 32);
  if (VALUES && i < V_STEPS) ldmatrix_x4_trans(f.v[i % (LOOKAHEAD + 1)], values + i * 32);
}

// Steps [FROM, TO) of the stream of products.
template <bool SCORES, bool VALUES, int FROM, int TO>
DEVICE void stream(State& state, float (&s)[2][4], Fragments& f, u32 keys, u32 values) {
#pragma unroll
  for (int i = FROM; i < TO; i++) {
    load_fragments<SCORES, VALUES>(f, keys, values, i + LOOKAHEAD);
    if (SCORES && i < K_STEPS) {
      const u32(&k)[4] = f.k[i % (LOOKAHEAD + 1)];
      mma_16x8x16(s[0], state.q[i], k[0], k[1]);
      mma_16x8x16(s[1], state.q[i], k[2], k[3]);
    }
    if (VALUES && i < V_STEPS) {
      const u32(&v)[4] = f.v[i % (LOOKAHEAD + 1)];
      mma_16x8x16(state.o[2 * i], state.weights, v[0], v[1]);
      mma_16x8x16(state.o[2 * i + 1], state.weights, v[2], v[3]);
    }
  }
}

// Adds the partial scores of the row group's column warps, in pairs: all of them get the same sums, bit for bit.
DEVICE void exchange_scores(float (&s)[2][4], u32 smem, const Warp& w, u32 lane, u32 exchange) {
  const u32 buffer = smem + Smem::EXCHANGE + exchange + w.row_group * (COLUMN_WARPS * 2 * SCORE_BYTES) + lane * 16;
#pragma unroll
  for (int n = 0; n < 2; n++)
    st_shared_f32x4(buffer + (w.column * 2 + n) * SCORE_BYTES, f32x4{s[n][0], s[n][1], s[n][2], s[n][3]});
  // Orders this tile's partial scores before the reads of them below, and, as the buffers alternate, the reads of the
  // tile before this one before the next tile's writes to the same buffer.
  named_barrier_sync(1 + w.row_group, COLUMN_WARPS * WARP);
#pragma unroll
  for (int distance = 1; distance < COLUMN_WARPS; distance *= 2)
#pragma unroll
    for (int n = 0; n < 2; n++) {
      f32x4 sum = ld_shared_f32x4(buffer + ((w.column ^ distance) * 2 + n) * SCORE_BYTES);
#pragma unroll
      for (int other = 1; other < distance; other++) {
        const f32x4 x = ld_shared_f32x4(buffer + ((w.column ^ distance ^ other) * 2 + n) * SCORE_BYTES);
        sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
      }
      s[n][0] += sum.x, s[n][1] += sum.y, s[n][2] += sum.z, s[n][3] += sum.w;
    }
}

struct Block {
  u32 smem;
  float scale;  // of the exponents; uniform
  Warp warp;
  Source source;
  Slot slots[COPY_ROWS] = {};  // of the next tile to copy
  Position at;                 // of the next step; moved on at the end of a step, where nothing waits for it
};

// What the block computes: found again where it is needed, rather than kept in registers through the loop.
struct Place {
  Request request;
  int row_tile;
  int part, next;  // of a WorkItem
};

DEVICE Place find_place(const VerifyParams& p, u32 smem) {
  if constexpr (!PLANNED) return {load_request(p, block_idx_z()), block_idx_x(), 0, 0};
  const WorkItem w = load_work_item(p, (i32)ld_shared_u32(smem + Smem::ITEM));
  return {request_of(w), w.row_tile, w.part, w.next};
}

// Only tiles at the end of what the rows see come here.
DEVICE void mask_tile(const VerifyParams& p, const Block& b, float (&s)[2][4]) {
  const Place place = find_place(p, b.smem);
  const Request& r = place.request;
  const RowTile rows = row_tile(p, r, place.row_tile * ROWS, ROWS);
  const int thread = thread_idx_anew();
  const int row = rows.first + thread / WARP / COLUMN_WARPS * 16 + thread % WARP / 4;
  u32 bits[2];
#pragma unroll
  for (int h = 0; h < 2; h++)
    bits[h] = visible_bits(p, r, min_int(r.q_begin + (row + 8 * h) / p.num_heads, rows.q_last), b.at.token);
  mask_scores(s, bits);
}

// SPARSE_IDS: listed_bits() of the step's tile, from the ids that came with its rows.
DEVICE u32 listed_tokens(const Block& b) {
  const u32 lane = lane_idx_anew();  // here and for the mask: kept, it would take a register that sm_120 has to spill
  const u32 row = b.smem + Smem::RING + b.at.scores.offset + lane % TILE * PITCH;
  return listed_bits(ld_shared_u32(row + Smem::ID), b.at.token + lane % TILE, b.source.end);
}

// In the middle of a step: the stage of tile n - 2 takes tile n - 2 + STAGES. What is copied is also waited for, by
// every thread, so no copy is in flight when the block ends.
DEVICE void refill(const VerifyParams& p, Block& b) {
  const i32 tile_token = b.at.token + (STAGES - 2) * TILE;
  const Stage spare = STEP_ANEW ? previous_stage(b.at.values) : b.at.spare;
  if (tile_token < b.source.end) {
    // Orders every warp's reads of tile n - 2 before the copies over it.
    mbarrier_wait(b.smem + Smem::RING + spare.offset + Smem::EMPTY, spare.parity);
    copy_tile(p, b.source, b.smem, spare.offset, tile_token, b.slots);
  }
  find_slots(b.slots, p, b.source, tile_token + TILE);
}

template <bool SCORES, bool VALUES>
DEVICE void step(const VerifyParams& p, Block& b, State& state) {
  float s[2][4] = {};
  Fragments f;
  const Position at = b.at;
  const u32 keys = b.warp.keys + at.scores.offset, values = b.warp.values + at.values.offset;
  const u32 ring = b.smem + Smem::RING;
  const u32 full = ring + at.scores.offset + Smem::FULL;
  if (SCORES) mbarrier_wait(full, at.scores.parity);  // orders the copies of tile n before its reads
#pragma unroll
  for (int i = 0; i < LOOKAHEAD; i++) load_fragments<SCORES, VALUES>(f, keys, values, i);
  stream<SCORES, VALUES, 0, REFILL_AT>(state, s, f, keys, values);
  if (SCORES && VALUES) refill(p, b);
  stream<SCORES, VALUES, REFILL_AT, STREAM>(state, s, f, keys, values);
  if (!SCORES) return;
  const u32 lane = STEP_ANEW ? lane_idx_anew() : b.source.thread % WARP;
  // Orders the lane's reads of tile n - 1 before the refill, which waits for every lane: racecheck does not see that
  // one may arrive for all after a warp_sync.
  if (VALUES) mbarrier_arrive(ring + at.values.offset + Smem::EMPTY);
  exchange_scores(s, b.smem, b.warp, lane, at.exchange);
  const u32 listed = SPARSE_IDS ? listed_tokens(b) : ~0u;
  soft_cap(p, s);
  if constexpr (SPARSE_IDS) {
    if (listed != ~0u) mask_scores(s, {listed, listed}, lane_idx_anew());
  } else if (at.token >= b.source.masked_from) {
    mask_tile(p, b, s);
  }
  b.at = next_position(at);
  softmax_tile(s, b.scale, state.softmax, state.o, state.weights);
}

// --- the kernel ----------------------------------------------------------------------------------------------------

// Brings a tile's rows to the L2 cache while the ring is still full of q: one lane for each 128 bytes.
DEVICE void prefetch_tile(const VerifyParams& p, const Source& s, i32 tile_token, const Slot (&slots)[COPY_ROWS]) {
  constexpr u32 LINES = LATENT_BYTES / 128;
  const Share share = copy_share(s.thread);
#pragma unroll
  for (int i = 0; i < COPY_ROWS; i++) {
    const i32 token = tile_token + share.row + i;
    if (token >= s.end || share.chunk > LINES || (SPARSE_IDS && slots[i].page < 0)) continue;
    const KvRow row = source_chunk(p, s, token, slots[i], share.chunk % LINES * 8);
    prefetch_l2(share.chunk == LINES ? row.pe : row.c);
  }
}

// q to registers, the first tiles on their way.
DEVICE void start(const VerifyParams& p, const Request& r, const RowTile& rows, Block& b, State& state) {
  constexpr int AHEAD = STAGES - 1;
  constexpr int DIRECT = Q_STAGE;  // tiles whose stages are free of q; where a mask may hide tokens they wait as well
  const i32 first = b.at.token;
  Slot slots[AHEAD][COPY_ROWS] = {};
  init_barriers(b.smem);
  copy_q(p, rows, b.smem);
  if constexpr (DIRECT > 0) cp_async_commit();
#pragma unroll
  for (int i = 0; i < AHEAD; i++) find_slots(slots[i], p, b.source, first + i * TILE);
  const bool are_unmasked = first + DIRECT * TILE <= b.source.masked_from;
  if constexpr (DIRECT > 0) {
    block_sync();  // orders the barriers' initialisation before the arrivals of copies
    if (are_unmasked) {
#pragma unroll
      for (int i = 0; i < DIRECT; i++) copy_tile(p, b.source, b.smem, i * STAGE_BYTES, first + i * TILE, slots[i]);
    }
    cp_async_commit();
  }
#pragma unroll
  for (int i = DIRECT; i < AHEAD; i++) prefetch_tile(p, b.source, first + i * TILE, slots[i]);
  publish_columns(p, r, rows, b.smem);
  if constexpr (DIRECT > 0)
    cp_async_wait<1>();  // for q alone
  else
    cp_async_wait_all();
  block_sync();  // orders the barriers' initialisation, the mask columns, the item and the copies of q before their
                 // uses
  load_q(state.q, p, b.smem, b.warp);
  block_sync();  // orders the reads of q before the KV copies that overwrite it
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (first + i * TILE < b.source.end && (i >= DIRECT || !are_unmasked))
      copy_tile(p, b.source, b.smem, i * STAGE_BYTES, first + i * TILE, slots[i]);
  find_slots(b.slots, p, b.source, first + AHEAD * TILE);
#pragma unroll
  for (int i = 0; i < O_TILES; i++) state.o[i][0] = state.o[i][1] = state.o[i][2] = state.o[i][3] = 0.0f;
  state.softmax = {{neg_inf(), neg_inf()}, {0.0f, 0.0f}};
}

// Returns the block's next item.
DEVICE int finish(const VerifyParams& p, u32 smem, const State& state) {
  const Place place = find_place(p, smem);
  const int warp = thread_idx_anew() / WARP;
  store_results(p, place.request, place.part, place.row_tile * ROWS + warp / COLUMN_WARPS * 16,
                place.request.q_len * p.num_heads, warp % COLUMN_WARPS * (DL / COLUMN_WARPS), state.softmax, state.o);
  return place.next;
}

// One row tile over a run of KV tiles, of which there is one at least. Returns the block's next item.
DEVICE int attend(const VerifyParams& p, const Request& r, const RowTile& rows, const TileRange& range, int item) {
  Block b;
  b.smem = shared_base();
  b.scale = as_f32(make_uniform(as_u32(exponent_scale(p))));
  b.warp = locate(b.smem);
  b.source = make_source(p, r, rows, range);
  b.at = first_position(make_uniform(range.begin * TILE));
  if (PLANNED && thread_idx() == 0) st_shared_u32(b.smem + Smem::ITEM, (u32)item);
  State state;
  start(p, r, rows, b, state);
  step<true, false>(p, b, state);
#pragma unroll 1
  while (b.at.token < b.source.end) step<true, true>(p, b, state);
  step<false, true>(p, b, state);
  return finish(p, b.smem, state);
}

DEVICE int attend_item(const VerifyParams& p, int item) {
  const WorkItem w = load_work_item(p, item);
  if (w.tiles.begin == w.tiles.end) {
    if (w.request != -1) store_empty_item<THREADS>(p, w);
    return w.next;
  }
  const Request r = request_of(w);
  const int next = attend(p, r, row_tile(p, r, w.row_tile * ROWS, ROWS), w.tiles, item);
  block_sync();  // orders this item's reads of shared memory before the next item's writes
  retire_barriers(shared_base());
  return next;
}

KERNEL(mlaflash_mma_wide, THREADS, 1) {
  if constexpr (PLANNED) {
#pragma unroll 1
    for (int item = block_idx_x(); item >= 0;) item = make_uniform(attend_item(p, item));
  } else {
    const Request r = load_request(p, block_idx_z());
    store_padding<THREADS>(p, r);
    const RowTile rows = row_tile(p, r, block_idx_x() * ROWS, ROWS);
    if (rows.end <= rows.first) return;
    const TileRange range = split_tiles(p, r, rows, block_idx_y());
    if (range.begin == range.end) return store_empty<THREADS>(p, r, 0, rows.first, rows.end);
    attend(p, r, rows, range, 0);
  }
  launch_dependents();
}
