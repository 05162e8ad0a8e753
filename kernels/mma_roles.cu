// The tensor-core kernel for 64 rows with a division of labour: score warps multiply q with K and own the softmax,
// value warps multiply its weights with V and own the output. Like mma_wide, one block computes 64 packed rows (query
// token x head) of one request over one split of its KV, and reads every KV row once for all of them. Over e4m3, whose
// tiles take half of the room, it may also be 32 rows in two groups of warps, each over half of the split.
//
// Grid:   x = ceil(max_q_len * H / (16 ROW_TILES)) row tiles, y = split, z = request; PLANNED x = work_blocks.
// Block:  384 threads: 4 score warps, 8 value warps; of two groups half of them each.
// Shared: 16 bits STAGES * 18,704 + SHARED_STEPS * 4,096 + 10,144 bytes (struct Smem).
// Idea:   A score warp holds 32 rows x half of the dims of q, so that an operand of K feeds four products; the two
//         warps of a pair swap the partial scores of 16 rows each, and each of them weighs 16 rows. It does so for tile
//         n - 1 between its products for tile n. A value warp holds 64 rows x 64 columns of the output, or 32 x 128, so
//         that an operand of V feeds eight products, or four, and no two warps read the same one. Weights go from the
//         former to the latter through shared memory. Every scheduler has one score warp and two value warps, whose
//         products fill the gaps that are left. A stage of the ring is free as soon as its K is multiplied and its V is
//         in registers. At the end the second group hands its output to the first.
#include "mma_fp8.cuh"

static_assert(!DETERMINISTIC, "mma_narrow computes the rows that are to be the same in every call");
static_assert(!SPARSE_IDS, "mma_wide attends over lists of slots, mma_narrow over lists of 8-bit ones");
static_assert(!TOKEN_SCALES, "mma_narrow reads rows with scales of their own");
static_assert(!FP8 || !NEW_KV, "mma_narrow takes new rows beside 8 bits");

constexpr int GROUPS = 4 / ROW_TILES;   // of warps, each with a part of the KV, a ring and all else of its own
constexpr int SCORE_WARPS = ROW_TILES;  // of a group; each weighs one row tile of 16
constexpr int VALUE_WARPS = 2 * ROW_TILES;
constexpr int GROUP_THREADS = (SCORE_WARPS + VALUE_WARPS) * WARP;
constexpr int THREADS = GROUPS * GROUP_THREADS;
constexpr int ROWS = ROW_TILES * 16;

constexpr int ROW_BYTES = D * 2;  // in 16 bits
constexpr int LATENT_BYTES = DL * 2;
// Odd multiples of 16 bytes: the 8 rows of an ldmatrix phase hit all 32 banks.
constexpr int Q_PITCH = ROW_BYTES + 16;
constexpr int PITCH = FP8 ? D + 16 : Q_PITCH;                // of KV rows
constexpr int STAGE_BYTES = TILE * PITCH + 16;               // a tile and its two mbarriers
constexpr int Q_BYTES = FP8 ? TILE * Q_PITCH : STAGE_BYTES;  // 16 rows of q, before they are in registers

constexpr int K_STEPS = D / 16 / 2;                     // products of 16 dims in a score warp's half of q K
constexpr int K_LOADS = FP8 ? K_STEPS / 2 : K_STEPS;    // ldmatrix of K for them
constexpr int VALUE_COLUMNS = DL / VALUE_WARPS;         // of a value warp
constexpr int V_STEPS = 4;                              // 16-column pieces of them whose V is in registers at a time
constexpr int V_PARTS = VALUE_COLUMNS / 16 / V_STEPS;   // times that it is loaded
constexpr int O_TILES = VALUE_COLUMNS / 8;              // 8-column tiles
constexpr int REGISTER_STEPS = K_STEPS - SHARED_STEPS;  // the rest of q comes from shared memory, tile by tile

constexpr int LOADERS = VALUE_WARPS * WARP;                   // threads that copy q and KV
constexpr int COPY_LANES = FP8 ? LOADERS / TILE : 8;          // lanes that copy 16 bytes each of a row at a time
constexpr int COPIES = LATENT_BYTES / 2 / (COPY_LANES * 16);  // of a thread, in its half of a row's latent part
constexpr int MASK_WORDS = 32;                                // of mask columns, so tail_len <= 1,024
constexpr int FRAGMENT_BYTES = WARP * 16;                     // a fragment of four registers, lane by lane

// Steps of q K after which a score warp goes on with the tile before: it takes over the partner's scores, takes maxima,
// looks whether a base rises, and stores the weights.
constexpr int TAKE_AT = 3, MAXIMA_AT = 6, RAISE_AT = 8, STORE_AT = 13;

static_assert(SHARED_STEPS >= 0 && SHARED_STEPS <= K_STEPS, "steps of q in shared memory");
static_assert(K_LOADS % (LOOKAHEAD + 1) == 0, "the buffers of K take turns across tiles");
static_assert(FP8 || STAGES >= ROW_TILES, "q passes through the ring, 16 rows a stage");
static_assert(ROW_TILES == 4 || (ROW_TILES == 2 && FP8), "two row tiles over 16 bits are mma_narrow's");
static_assert(!PLANNED || PLANNED_ROWS == ROWS, "the list has row tiles of this kernel");

// What some builds have no registers for: what follows from the lane, found anew for each tile; and the end of the
// tokens, which is read from shared memory.
constexpr bool LANE_ANEW = SPLIT_KV || (FP8 && (PLANNED || GROUPS > 1));
constexpr bool END_IN_SHARED = FP8 && SPLIT_KV;

// At first q lies in the ring as it comes. Over 8 bits it takes more room, and leaves free the first stages.
constexpr int EARLY_STAGES = FP8 ? 2 : 0;
constexpr int RAW_Q_TILES = ROW_TILES / GROUPS;        // row tiles of it in the memory of a group
constexpr u32 OUTPUT_PITCH = VALUE_WARPS * WARP * 16;  // from one 8-column tile of OUTPUT to the next

struct Smem {
  static constexpr u32 KEPT_Q_BYTES = SHARED_STEPS * SCORE_WARPS * 2 * FRAGMENT_BYTES;
  // Of a group.
  static constexpr u32 RING = 0;  // [STAGES]: tile [16][PITCH]; mbarriers
  static constexpr u32 RING_END = RING + STAGES * STAGE_BYTES;
  static constexpr u32 EXCHANGE = RING_END + (GROUPS == 1 ? KEPT_Q_BYTES : 0);  // [SCORE_WARPS][2] fragments
  static constexpr u32 WEIGHTS = EXCHANGE + SCORE_WARPS * 2 * FRAGMENT_BYTES;   // [ROW_TILES][2] fragments
  static constexpr u32 WEIGHTS_END = WEIGHTS + ROW_TILES * 2 * FRAGMENT_BYTES;
  // At first, over what is not early: [RAW_Q_TILES] row tiles [16][Q_PITCH]
  static constexpr u32 RAW_Q = RING + EARLY_STAGES * STAGE_BYTES;
  static constexpr u32 HANDOVER = max_int(WEIGHTS_END, RAW_Q + RAW_Q_TILES * Q_BYTES);  // [2]: what follows below
  static constexpr u32 FACTORS = 0;                                                     // float32 [ROWS]
  static constexpr u32 RAISED = FACTORS + ROWS * 4;     // u32 [ROW_TILES] not 0: the factors of these rows count
  static constexpr u32 READY = RAISED + ROW_TILES * 4;  // mbarrier: the weights of a tile are there
  static constexpr u32 TAKEN = READY + 8;               // mbarrier: all value warps have them in registers
  static constexpr u32 GAP = (TAKEN + 8 + 15) / 16 * 16;
  // The rest lies behind that, or with fewer rows in the gaps between.
  static constexpr u32 HANDOVER_END = HANDOVER + 2 * FRAGMENT_BYTES;
  static constexpr u32 RECIPROCALS = GROUPS == 1 ? HANDOVER_END : HANDOVER + GAP;  // float32 [ROWS] of sums of weights
  static constexpr u32 UNITS = RECIPROCALS;  // 8 bits, float32 [ROWS]: see scale_q(); until the sums are known
  // [ROWS]: visible_end() of a row, and its query token
  static constexpr u32 VIEWS = GROUPS == 1 ? RECIPROCALS + ROWS * 4 : HANDOVER + FRAGMENT_BYTES + GAP;
  static constexpr u32 STATES = VIEWS;  // after the KV, of groups [ROWS]: RowState
  // u32 [MASK_WORDS] mask columns that any row sees
  static constexpr u32 COLUMNS = GROUPS == 1 ? VIEWS + ROWS * 8 : RECIPROCALS + ROWS * 4;
  static constexpr u32 SOURCE = COLUMNS + MASK_WORDS * 4;  // struct Source without its end
  static constexpr u32 FIRST_ID = SOURCE + 4;              // of Source
  static constexpr u32 TAIL_BEGIN = SOURCE + 16;           // i32: the mask columns begin here
  static constexpr u32 MASKED_FROM = TAIL_BEGIN + 4;       // i32: every row sees every token of the tiles before
  static constexpr u32 ITEM = MASKED_FROM + 4;             // i32, PLANNED: what the block works on
  static constexpr u32 END = ITEM + 4;                     // i32, END_IN_SHARED: tokens_end()
  static constexpr u32 MEETING = SOURCE + 32;              // of the first group: mbarrier of roles_sync()
  static constexpr u32 GROUP_BYTES = GROUPS == 1 ? SOURCE + 48 : HANDOVER_END;
  static_assert(GROUPS == 1 || (MEETING + 8 <= HANDOVER + FRAGMENT_BYTES && VIEWS + ROWS * 8 <= HANDOVER_END), "gaps");
  // Of the block: [SHARED_STEPS][SCORE_WARPS][2] fragments, the same ones for all groups.
  static constexpr u32 Q = GROUPS == 1 ? RING_END : GROUPS * GROUP_BYTES;
  // After the KV, float32 [O_TILES][VALUE_WARPS * WARP][4] of the second group, of a row tile in each group's memory.
  static constexpr u32 OUTPUT = RING;
  static_assert(GROUPS == 1 || OUTPUT + O_TILES * OUTPUT_PITCH <= HANDOVER, "output of a row tile");
  // In a row of a stage.
  static constexpr u32 ID = PITCH - 16;  // i32, IDS_IN_RING: of the page of the row that takes this one's place
  // In a stage.
  static constexpr u32 FULL = TILE * PITCH;  // mbarrier: the tile has landed
  static constexpr u32 EMPTY = FULL + 8;     // mbarrier: all warps have read it
};

// --- groups ---------------------------------------------------------------------------------------------------------

// The thread's number in its group, read again.
DEVICE u32 group_thread() {
  const u32 thread = thread_idx_anew();
  return GROUPS == 1 || thread < GROUP_THREADS ? thread : thread - GROUP_THREADS;
}
// Uniform.
DEVICE u32 group_idx() { return GROUPS == 1 ? 0 : make_uniform((u32)(thread_idx_anew() >= GROUP_THREADS)); }
DEVICE u32 group_base(u32 group) { return shared_base() + group * Smem::GROUP_BYTES; }
DEVICE u32 raw_q(u32 row_tile) {
  return group_base(row_tile / RAW_Q_TILES) + Smem::RAW_Q + row_tile % RAW_Q_TILES * Q_BYTES;
}

// --- turns ---------------------------------------------------------------------------------------------------------

// All uniform. Where a tile lies in the ring; carried from tile to tile.
DEVICE u32 next_stage(u32 stage) { return stage == (STAGES - 1) * STAGE_BYTES ? 0 : stage + STAGE_BYTES; }

// Where its weights lie, and the parities of the phases that the mbarriers of both are in for it: found from its first
// token, which takes fewer registers than to carry them along.
DEVICE u32 handover_of(u32 token) { return token / TILE % 2 * FRAGMENT_BYTES; }
DEVICE u32 stage_parity(u32 token) { return token / TILE / STAGES % 2; }
DEVICE u32 handover_parity(u32 token) { return token / TILE / 2 % 2; }

// All threads, in alternate phases of one mbarrier. The two roles meet at two places of the code, which
// compute-sanitizer takes for an error of a full barrier, though PTX allows it.
DEVICE void roles_sync(u32 parity) {
  const u32 meeting = keep_in_register(shared_base()) + Smem::MEETING;  // computed anew, for want of a register
  mbarrier_arrive(meeting);
  mbarrier_wait(meeting, parity);
}

// --- what the block computes ----------------------------------------------------------------------------------------

// Found again where it is needed, rather than kept in registers through the loops.
struct Place {
  Request request;
  RowTile rows;
  int part, next;  // of a WorkItem
};

DEVICE Place find_place(const VerifyParams& p, u32 smem) {
  if constexpr (!PLANNED) {
    const Request r = load_request(p, block_idx_z());
    return {r, row_tile(p, r, block_idx_x() * ROWS, ROWS), 0, 0};
  }
  const WorkItem w = load_work_item(p, (i32)ld_shared_u32(smem + Smem::ITEM));
  const Request r = request_of(w);
  return {r, row_tile(p, r, w.row_tile * ROWS, ROWS), w.part, w.next};
}

// One row tile over a run of KV tiles. KV tokens are counted from the first one of the run, whose place is all that
// page tables need to know.
struct Piece {
  Request request;  // its lengths as if it began there
  RowTile rows;
  int begin, tiles;  // where that is; tiles of the run
};

DEVICE Piece make_piece(const Request& r, const RowTile& rows, const TileRange& range) {
  Piece piece = {r, rows, range.begin * TILE, range.end - range.begin};
  piece.request.kv_len -= piece.begin;
  return piece;
}

DEVICE i32 tokens_end(const VerifyParams& p, const Piece& piece) {
  return make_uniform(min_int(piece.tiles * TILE, visible_end(p, piece.request, piece.rows.q_last)));
}

// Some row does not see every token of the tile that begins at `token`, or of one before it. The warp asks together.
DEVICE bool is_masked(u32 smem, i32 token) { return warp_any(token >= (i32)ld_shared_u32(smem + Smem::MASKED_FROM)); }

// --- filling the ring: the value warps ------------------------------------------------------------------------------

// Uniform.
struct Source {
  i32 end;        // KV tokens of this block end here
  i32 begin;      // of the request's tokens, the one that is 0 here
  i32 first_id;   // the request's page ids begin here
  i32 new_begin;  // NEW_KV: tokens from here on are rows new_shift + token of new_kv_c and new_k_pe
  i32 new_shift;
};

DEVICE Source make_source(const VerifyParams& p, const Piece& piece) {
  const Request& r = piece.request;
  const i32 first_id = make_uniform((u32)r.id_begin), begin = make_uniform(piece.begin), end = tokens_end(p, piece);
  return {end, begin, first_id, r.kv_len - r.q_len, r.q_begin - (r.kv_len - r.q_len)};
}

// No registers are left through the loop for `first_id`, and where a row is in two pieces, or of two places, none but
// for its end.
constexpr bool SOURCE_IN_SHARED = NEW_KV || SPLIT_KV || FP8;

DEVICE void publish_source(const Piece& piece, u32 smem) {
  const Request& r = piece.request;
  const i32 new_begin = r.kv_len - r.q_len;
  st_shared_u32x4(smem + Smem::SOURCE,
                  {(u32)piece.begin, (u32)r.id_begin, (u32)new_begin, (u32)(r.q_begin - new_begin)});
}
DEVICE Source load_source(const Source& s, u32 smem) {
  if (!SOURCE_IN_SHARED) return s;
  const u32x4 x = ld_shared_u32x4(smem + Smem::SOURCE);
  return {s.end, (i32)x.x, (i32)x.y, (i32)x.z, (i32)x.w};
}

// What the thread copies of a tile: half of a row's latent part, and some threads the rope part. Found anew for each
// tile, for want of registers.
struct Share {
  u32 row, element;  // `element` is the first one of the first 16 bytes
};
DEVICE Share copy_share() {
  const u32 thread = group_thread() - SCORE_WARPS * WARP;
  if constexpr (FP8) return {thread / COPY_LANES, thread % COPY_LANES * 16};
  const u32 half = thread / (TILE * COPY_LANES);
  return {thread / COPY_LANES % TILE, (half * (COPIES * COPY_LANES) + thread % COPY_LANES) * vector_width<KV_DTYPE>()};
}

// Of the two threads at the same place of a row's halves, the one of the first half. Uniform.
DEVICE bool copies_rope(u32 element) { return warp_any(element < LATENT_BYTES / 2 / element_bytes<KV_DTYPE>()); }

// The token that a thread of row `row` copies of a tile: past the end, the last one.
DEVICE i32 source_token(const Source& s, i32 tile_token, u32 row) { return min_int(tile_token + (i32)row, s.end - 1); }

// Whether pages are of a power of two is found anew, for want of a predicate through the loop.
DEVICE u32 find_page_index(const VerifyParams& p, u32 token) {
  return page_of(p, token, FP8 && PLANNED ? keep_in_register(p.page_magic) : p.page_magic);
}

// Id of the page of that token. There are fewer than 2^31 ids, and the low word of a 64-bit id is enough: pools have
// fewer than 2^31 pages.
DEVICE const u8* id_ptr(const VerifyParams& p, const Source& s, i32 token) {
  const i32 index = s.first_id + find_page_index(p, s.begin + token);
  return (const u8*)mad_wide_i32(index, 4 << p.wide_ids, (i64)p.page_ids);
}
DEVICE i32 find_page(const VerifyParams& p, const Source& s, i32 tile_token, u32 row) {
  const i32 token = source_token(s, tile_token, row);
  if (NEW_KV && token >= s.new_begin) return 0;
  return (i32)ld_global_nc_u32(id_ptr(p, s, token));
}

// From `element` of the latent and of the rope part of a token's row on. Strides of pages and tokens fit 32 bits; what
// they add up to does not.
DEVICE KvRow cached_row(const VerifyParams& p, i32 token_of_request, i32 page_id, u32 element) {
  const i32 offset = token_of_request - (i32)find_page_index(p, token_of_request) * p.page_size;
  const i64 c = mad_wide_i32(offset, (i32)p.kv_c_stride_token, element);
  const u8* c_ptr = element_ptr<KV_DTYPE>(p.kv_c, mad_wide_i32(page_id, (i32)p.kv_c_stride_page, c));
  if (!SPLIT_KV) return {c_ptr, c_ptr + DL * element_bytes<KV_DTYPE>()};
  const i64 pe = mad_wide_i32(offset, (i32)p.k_pe_stride_token, element);
  return {c_ptr, element_ptr<KV_DTYPE>(p.k_pe, mad_wide_i32(page_id, (i32)p.k_pe_stride_page, pe))};
}
DEVICE KvRow source_row(const VerifyParams& p, const Source& s, i32 tile_token, i32 page_id, const Share& share) {
  const i32 token = source_token(s, tile_token, share.row);
  if (!NEW_KV || token < s.new_begin) return cached_row(p, s.begin + token, page_id, share.element);
  const i32 row = s.new_shift + token;
  return {element_ptr<Q_DTYPE>(p.new_kv_c, mad_wide_i32(row, (i32)p.new_kv_c_stride, share.element)),
          element_ptr<Q_DTYPE>(p.new_k_pe, mad_wide_i32(row, (i32)p.new_k_pe_stride, share.element))};
}

// Some row of the row tile sees the token. Others are zeros in the ring: their weight is 0, but 0 times a NaN is not.
DEVICE bool is_seen(const Source& s, u32 smem, i32 token) {
  if (token >= s.end) return false;
  const int column = token - (i32)ld_shared_u32(smem + Smem::TAIL_BEGIN);
  return column < 0 || ld_shared_u32(smem + Smem::COLUMNS + (column >> 5) * 4) >> (column & 31) & 1;
}

// Behind a row of the ring goes the page id of the row that takes its place: a register that is loaded a tile ahead is
// waited for where a row has a page of its own. That takes more registers where a row is in two pieces; and one group
// over 8 bits, whose tiles take as long as those of 16, does not wait.
constexpr bool IDS_IN_RING = !SPLIT_KV && (!FP8 || GROUPS > 1);

// WHOLE: `s` is.
template <bool WHOLE>
DEVICE void copy_id(const VerifyParams& p, Source s, u32 smem, u32 dst, i32 tile_token, u32 row) {
  if (SOURCE_IN_SHARED && !WHOLE)
    s = load_source(s, smem);
  else if (!WHOLE)
    s.first_id = (i32)ld_shared_u32(smem + Smem::FIRST_ID);
  const i32 token = source_token(s, tile_token, row);
  if constexpr (NEW_KV)
    cp_async_4_zfill(dst, id_ptr(p, s, token), token < s.new_begin ? 4 : 0);
  else
    cp_async_4(dst, id_ptr(p, s, token));
}

template <bool VALUE>
struct Bool {
  static constexpr bool value = VALUE;
};

// The thread's part of copying the tile that begins at `tile_token`, and its arrival on the full barrier for when that
// has landed. `find_row` returns from where on; it is asked again for the rope part where two addresses at a time take
// more registers than there are. EARLY: every row sees all of the tile, and `s` is whole; in shared memory there is
// nothing yet.
template <bool EARLY = false, typename FindRow>
DEVICE void copy_tile(const VerifyParams& p, const Source& s, u32 smem, u32 stage_offset, i32 tile_token,
                      const FindRow& find_row) {
  const Share share = copy_share();
  const u32 stage = smem + Smem::RING + stage_offset;
  const u32 dst = stage + share.row * PITCH + share.element * element_bytes<KV_DTYPE>();
  KvRow row = find_row();
  const u32 bytes = EARLY || !is_masked(smem, tile_token) || is_seen(s, smem, tile_token + share.row) ? 16 : 0;
  if constexpr (FP8) {
#pragma unroll
    for (int i = 0; i < DL; i += COPY_LANES * 16) cp_async_16_zfill(dst + i, row.c + i, bytes);
    if (SPLIT_KV) row = find_row();
    if (share.element < DR) cp_async_16_zfill(dst + DL, row.pe, bytes);
  } else {
#pragma unroll
    for (int i = 0; i < COPIES; i++) cp_async_16_zfill(dst + i * COPY_LANES * 16, row.c + i * COPY_LANES * 16, bytes);
    if (copies_rope(share.element)) cp_async_16_zfill(dst + LATENT_BYTES, row.pe, bytes);
  }
  if (IDS_IN_RING && share.element == 0)
    copy_id<EARLY>(p, s, smem, dst + Smem::ID, tile_token + STAGES * TILE, share.row);
  cp_async_mbarrier_arrive_noinc(stage + Smem::FULL);
}

// Brings a tile's rows to the L2 cache while the ring is still full of q: one thread for each 128 bytes.
DEVICE void prefetch_tile(const VerifyParams& p, const Source& s, i32 tile_token, const Share& share, i32 page_id) {
  if constexpr (FP8) {
    const u32 line = share.element / 16;
    if (line > DL / 128 || tile_token + (i32)share.row >= s.end) return;
    const KvRow row = source_row(p, s, tile_token, page_id, {share.row, line % (DL / 128) * 128});
    return prefetch_l2(line == DL / 128 ? row.pe : row.c);
  }
  const u32 line = share.element / vector_width<KV_DTYPE>() % COPY_LANES;
  const bool is_latent = copies_rope(share.element);
  if (tile_token + (i32)share.row >= s.end || (!is_latent && line > 0)) return;
  const u32 element = is_latent ? line * (128 / element_bytes<KV_DTYPE>()) : 0;
  const KvRow row = source_row(p, s, tile_token, page_id, {share.row, element});
  prefetch_l2(is_latent ? row.c : row.pe);
}

// Starts the copies of q. Rows past the last one are zeros.
DEVICE void copy_q(const VerifyParams& p, const RowTile& rows) {
  constexpr int ROWS_PER_WARP = ROWS / VALUE_WARPS / GROUPS;
  const u32 thread = group_thread();
  const int warp = thread / WARP - SCORE_WARPS + group_idx() * VALUE_WARPS;
  const int begin = warp * ROWS_PER_WARP, chunk = thread % WARP * 16;
  int head = (rows.first + begin) % p.num_heads;
  int token = rows.q_first + (rows.first % p.num_heads + begin) / p.num_heads;
#pragma unroll
  for (int i = 0; i < ROWS_PER_WARP; i++) {
    const int row = begin + i;
    const u32 bytes = rows.first + row < rows.end ? 16 : 0;
    const u32 dst = raw_q(row / 16) + row % 16 * Q_PITCH + chunk;
    const u8* nope = q_nope_row(p, token, head) + chunk;
    cp_async_16_zfill(dst, nope, bytes);
    cp_async_16_zfill(dst + 512, nope + 512, bytes);
    if (chunk < DR * 2) cp_async_16_zfill(dst + LATENT_BYTES, q_pe_row(p, token, head) + chunk, bytes);
    if (++head == p.num_heads) head = 0, token++;
  }
}

constexpr float LEAST_UNIT = 1.17549435e-38f;  // the least float32 that is not subnormal

// 8 bits: brings q to float16 in shared memory, each row by a power of two, and leaves there by what the scores of the
// row are to be multiplied. All warps take part, each of them with whole rows.
DEVICE void scale_q(const VerifyParams& p) {
  constexpr int CHUNKS = ROW_BYTES / 16, LOADS = (CHUNKS + WARP - 1) / WARP;
  constexpr u32 AT_ONCE = 3, WARPS = THREADS / WARP;  // rows of a warp, which hide each other's latency
  const u32 lane = lane_idx_anew();
  // Of what the scores are to be multiplied by q takes the sign, or the 0 of sm_scale.
  const float unit = cache_scale(p) * score_factor(p), unit_sign = unit < 0.0f ? -1.0f : 1.0f;
  const float sign = p.sm_scale == 0.0f ? 0.0f : p.sm_scale < 0.0f ? -unit_sign : unit_sign;
#pragma unroll 1
  for (u32 first = make_uniform(thread_idx_anew() / WARP); first < ROWS; first += AT_ONCE * WARPS) {
    u32 q[AT_ONCE][LOADS][4] = {};
    u32 most[AT_ONCE] = {};  // magnitudes of 16-bit numbers are in the order of their bits
    const auto chunk = [&](u32 n, int i) {
      const u32 row = first + n * WARPS;
      return raw_q(row / 16) + row % 16 * Q_PITCH + (i * WARP + lane) * 16;
    };
    const auto has_chunk = [&](u32 n, int i) { return first + n * WARPS < ROWS && i * WARP + lane < CHUNKS; };
#pragma unroll
    for (u32 n = 0; n < AT_ONCE; n++)
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        u32x4 x = {0, 0, 0, 0};
        if (has_chunk(n, i)) x = ld_shared_u32x4(chunk(n, i));
        q[n][i][0] = x.x, q[n][i][1] = x.y, q[n][i][2] = x.z, q[n][i][3] = x.w;
#pragma unroll
        for (int j = 0; j < 4; j++) most[n] = max_u16x2(most[n], q[n][i][j] & 0x7fff7fffu);
      }
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2)
#pragma unroll
      for (u32 n = 0; n < AT_ONCE; n++) most[n] = max_u16x2(most[n], shfl_xor_u32(most[n], distance));
    warp_sync();  // orders the lanes' reads of the rows before the writes over them
#pragma unroll
    for (u32 n = 0; n < AT_ONCE; n++) {
      const f32x2 pair = unpack_pair<Q_DTYPE>(most[n]);
      const PowerOfTwo power = to_f16_range(max_f32(pair.x, pair.y));
      const float factor = sign * power.value;
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        if (!has_chunk(n, i)) continue;
        u32(&x)[4] = q[n][i];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const f32x2 pair = unpack_pair<Q_DTYPE>(x[j]);
          x[j] = pack_f16x2(pair.x * factor, pair.y * factor);
        }
        // Of each 16 dims the pairs 0, 2, 4, 6 come first: the order that key_operand() has.
        const u32 place = chunk(n, i) - lane % 2 * 8;
        st_shared_u32x2(place, {x[0], x[2]});
        st_shared_u32x2(place + 16, {x[1], x[3]});
      }
      const u32 row = first + n * WARPS;
      if (lane < GROUPS && row < ROWS) {
        const float left = power.reciprocal * (unit_sign * unit);
        // Not 0, as masked scores of -inf are multiplied by it.
        st_shared_f32(group_base(lane) + Smem::UNITS + row * 4, left < LEAST_UNIT ? LEAST_UNIT : left);
      }
    }
  }
  roles_sync(1);  // orders the writes before the score warps' reads
}

// --- score warps ----------------------------------------------------------------------------------------------------

// Of a score warp. Row tile 0 is its own one, row tile 1 its partner's.
struct Scorer {
  u32 q[REGISTER_STEPS][2][4];  // A fragments of its half of the dims, but for the last SHARED_STEPS steps
  Softmax softmax;              // of its own row tile
  u32 keys;                     // address of the lane's ldmatrix row in stage 0
  u32 fragments;                // the lane's place in the warp's first pair of fragments, were they at 0
  // Uniform.
  float scale;   // of the exponents
  u32 warp;      // among the score warps of the block
  u32 q_offset;  // of q in shared memory, from `fragments` on
  i32 end;       // as in Source
};
// The one of its group that a score warp weighs.
DEVICE u32 row_tile_of(u32 warp) { return GROUPS == 1 ? warp : warp % SCORE_WARPS; }

// Of stages [FROM, TO) of the thread's group.
template <int FROM, int TO>
DEVICE void init_stages(u32 smem) {
  if (group_thread() != 0) return;
  for (int stage = FROM; stage < TO; stage++) {
    // Every lane arrives for itself: racecheck does not see that one may do so for all after a warp_sync.
    mbarrier_init(smem + Smem::RING + stage * STAGE_BYTES + Smem::FULL, LOADERS);
    mbarrier_init(smem + Smem::RING + stage * STAGE_BYTES + Smem::EMPTY, GROUP_THREADS);
  }
}
DEVICE void init_handover(u32 smem) {
  if (group_thread() != 0) return;
  for (int i = 0; i < 2; i++) {
    mbarrier_init(smem + Smem::HANDOVER + i * FRAGMENT_BYTES + Smem::READY, SCORE_WARPS * WARP);
    mbarrier_init(smem + Smem::HANDOVER + i * FRAGMENT_BYTES + Smem::TAKEN, VALUE_WARPS * WARP);
  }
}

// Their memory may be written again.
DEVICE void retire_barriers(u32 smem) {
  if (group_thread() != 0) return;
  for (int stage = 0; stage < STAGES; stage++) {
    mbarrier_inval(smem + Smem::RING + stage * STAGE_BYTES + Smem::FULL);
    mbarrier_inval(smem + Smem::RING + stage * STAGE_BYTES + Smem::EMPTY);
  }
  for (int i = 0; i < 2; i++) {
    mbarrier_inval(smem + Smem::HANDOVER + i * FRAGMENT_BYTES + Smem::READY);
    mbarrier_inval(smem + Smem::HANDOVER + i * FRAGMENT_BYTES + Smem::TAKEN);
  }
}

// For is_seen(): where the mask columns begin, and which of them any row of the row tile sees. For mask_tile(): what
// the rows see.
DEVICE void publish_masks(const VerifyParams& p, const Piece& piece, u32 smem) {
  const Request& r = piece.request;
  const RowTile& rows = piece.rows;
  const bool is_tree = p.mask_mode == MASK_TREE;
  const int thread = group_thread();
  if (thread == 0) st_shared_u32(smem + Smem::TAIL_BEGIN, is_tree ? r.kv_len - r.tail_len : r.kv_len);
  if (thread == 0) st_shared_u32(smem + Smem::MASKED_FROM, first_masked_tile(p, r, rows) * TILE);
  if (thread == 0) publish_source(piece, smem);
  if (thread < ROWS) {
    const int q = min_int(r.q_begin + (rows.first + thread) / p.num_heads, rows.q_last);
    st_shared_u32x2(smem + Smem::VIEWS + thread * 8, {(u32)visible_end(p, r, q), (u32)q});
  }
  if (!is_tree || thread >= MASK_WORDS) return;
  u32 seen = 0;
  for (int q = rows.q_first; q <= rows.q_last; q++) seen |= tree_word(p, q, thread);
  st_shared_u32(smem + Smem::COLUMNS + thread * 4, seen);
}

DEVICE u32 q_in_shared(const Scorer& s, int step, int row_tile) {
  return s.fragments + s.q_offset + ((step - REGISTER_STEPS) * SCORE_WARPS * 2 + row_tile) * FRAGMENT_BYTES;
}

DEVICE void keep_q(const Scorer& s, int step, int row_tile, const u32 (&q)[4]) {
  st_shared_u32x4(q_in_shared(s, step, row_tile), {q[0], q[1], q[2], q[3]});
}

DEVICE void load_q(const VerifyParams& p, Scorer& s) {
  // The last steps stay in shared memory, where the lane that writes them is one that reads them. Of 8 bits and one
  // group, their memory still holds other warps' q; of two groups the first one writes them.
  constexpr bool LATER = FP8 && GROUPS == 1;
  const u32 lane = group_thread() % WARP;
  const u32 at = (GROUPS == 1 ? raw_q(0) : 0) + s.warp % 2 * (ROW_BYTES / 2) + lane % 16 * Q_PITCH + lane / 16 * 16;
  const auto raw = [&](int row_tile) {
    return GROUPS == 1 ? at + (s.warp ^ row_tile) * Q_BYTES : at + raw_q(row_tile_of(s.warp) ^ row_tile);
  };
  u32 kept[LATER ? SHARED_STEPS : 1][2][4];
  if (GROUPS > 1 && group_idx() == 0)
#pragma unroll
    for (int k = REGISTER_STEPS; k < K_STEPS; k++)
#pragma unroll
      for (int m = 0; m < 2; m++) {
        ldmatrix_x4(kept[0][m], raw(m) + k * 32);
        keep_q(s, k, m, kept[0][m]);
      }
#pragma unroll
  for (int k = 0; k < (GROUPS == 1 ? K_STEPS : REGISTER_STEPS); k++)
#pragma unroll
    for (int m = 0; m < 2; m++) {
      u32 q[4];
      ldmatrix_x4(q, raw(m) + k * 32);
#pragma unroll
      for (int i = 0; i < 4; i++) q[i] = FP8 ? q[i] : fold_scale_sign(p, q[i]);  // FP8: scale_q() did
      if (k >= REGISTER_STEPS && !LATER) {
        keep_q(s, k, m, q);
      } else {
        u32(&to)[4] = k < REGISTER_STEPS ? s.q[k < REGISTER_STEPS ? k : 0][m]
                                         : kept[LATER ? max_int(k - REGISTER_STEPS, 0) : 0][m];
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = q[i];
      }
    }
  roles_sync(FP8 ? 0 : 1);  // orders the reads of q before what is written over it
  if constexpr (LATER)
#pragma unroll
    for (int k = 0; k < SHARED_STEPS; k++)
#pragma unroll
      for (int m = 0; m < 2; m++) keep_q(s, REGISTER_STEPS + k, m, kept[k][m]);
}

// What a score warp's next products take from shared memory.
struct Operands {
  u32 k[LOOKAHEAD + 1][4];
  u32 b[2][4];  // FP8: operands of K, those of the next step as well
  u32 q[2][2][4];
};

// Load i of the tile at `keys`; loads from K_LOADS on are the first ones of the tile at `next_keys`.
DEVICE void load_keys(Operands& operands, u32 keys, u32 next_keys, int i) {
  ldmatrix_x4(operands.k[i % (LOOKAHEAD + 1)], i < K_LOADS ? keys + i * 32 : next_keys + (i - K_LOADS) * 32);
}

// FP8: half of the operands of K of step i, one token octet. They are made a step ahead: a conversion takes as long
// as the products of a step leave.
DEVICE void convert_keys(Operands& operands, int i, int octet) {
  const Operand of = key_operand(operands.k[i / 2 % (LOOKAHEAD + 1)][i % 2 * 2 + octet]);
  u32(&b)[4] = operands.b[i % 2];
  b[2 * octet] = of.b0, b[2 * octet + 1] = of.b1;
}

DEVICE void load_shared_q(Operands& operands, const Scorer& scorer, int i) {
  if (i < REGISTER_STEPS || i >= K_STEPS) return;
#pragma unroll
  for (int m = 0; m < 2; m++) {
    const u32x4 q = ld_shared_u32x4(q_in_shared(scorer, i, m));
    u32(&a)[4] = operands.q[i % 2][m];
    a[0] = q.x, a[1] = q.y, a[2] = q.z, a[3] = q.w;
  }
}

// Steps [FROM, TO) of the partial scores of 2 x 16 rows and 16 tokens, over half of the dims.
template <int FROM, int TO>
DEVICE void multiply_q_k(float (&s)[2][2][4], const Scorer& scorer, Operands& operands, u32 keys, u32 next_keys) {
#pragma unroll
  for (int i = FROM; i < TO; i++) {
    if (!FP8) load_keys(operands, keys, next_keys, i + LOOKAHEAD);
    if (FP8 && i % 2 == 0) load_keys(operands, keys, next_keys, i / 2 + LOOKAHEAD);
    load_shared_q(operands, scorer, i + 1);
    const u32(&b)[4] = FP8 ? operands.b[i % 2] : operands.k[i % (LOOKAHEAD + 1)];
    const auto a = [&](int m) -> const u32(&)[4] {
      const u32(&shared)[4] = operands.q[i % 2][m];
      return i < REGISTER_STEPS ? scorer.q[i < REGISTER_STEPS ? i : 0][m] : shared;
    };
    mma_16x8x16(s[1][0], a(1), b[0], b[1]);
    if (FP8) convert_keys(operands, i, 1);
    mma_16x8x16(s[0][0], a(0), b[0], b[1]);
    mma_16x8x16(s[1][1], a(1), b[2], b[3]);
    if (FP8) convert_keys(operands, i + 1, 0);
    mma_16x8x16(s[0][1], a(0), b[2], b[3]);
  }
}

// The exchange of a pair. Named barriers, each one with a warp that arrives and a partner that waits.
DEVICE int given_barrier(u32 warp) { return 1 + warp; }  // the warp's scores of its partner's rows are there
DEVICE int taken_barrier(u32 warp) { return 1 + GROUPS * SCORE_WARPS + warp; }  // it has read what its partner gave

// A warp's number that is found anew takes no register from tile to tile, where there is none.
DEVICE u32 partner_of(const Scorer& scorer) {
  return (FP8 && SPLIT_KV && PLANNED && GROUPS == 1 ? group_thread() / WARP : scorer.warp) ^ 1;
}

DEVICE void give_scores(const float (&s)[2][4], const Scorer& scorer) {
  // Orders the partner's reads of the tile before this one before the writes.
  named_barrier_sync(taken_barrier(partner_of(scorer)), 2 * WARP);
  const bool is_odd = keep_in_register(scorer.warp) & 1;  // computed anew for each tile, for want of a register
  const u32 partner = scorer.fragments + (is_odd ? 0 : 4 * FRAGMENT_BYTES) - 2 * FRAGMENT_BYTES;
#pragma unroll
  for (int n = 0; n < 2; n++)
    st_shared_f32x4(partner + Smem::EXCHANGE + n * FRAGMENT_BYTES, f32x4{s[n][0], s[n][1], s[n][2], s[n][3]});
  named_barrier_arrive(given_barrier(scorer.warp), 2 * WARP);  // orders the writes before the partner's reads
}

// Leaves in `scales` by what the scores of both rows are to be multiplied yet.
DEVICE void take_scores(float (&s)[2][4], float (&scales)[2], const Scorer& scorer, u32 smem) {
  named_barrier_sync(given_barrier(partner_of(scorer)), 2 * WARP);  // orders the partner's writes before the reads
#pragma unroll
  for (int h = 0; h < 2; h++)
    scales[h] = FP8 ? ld_shared_f32(smem + Smem::UNITS + (scorer.fragments - smem) / 64 * 4 + h * 32) : scorer.scale;
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const f32x4 x = ld_shared_f32x4(scorer.fragments + Smem::EXCHANGE + n * FRAGMENT_BYTES);
    s[n][0] += x.x, s[n][1] += x.y, s[n][2] += x.z, s[n][3] += x.w;
    // To what soft-capping takes.
    if (FP8 && SOFT_CAP) s[n][0] *= scales[0], s[n][1] *= scales[0], s[n][2] *= scales[1], s[n][3] *= scales[1];
  }
  if (FP8 && SOFT_CAP) scales[0] = scales[1] = scorer.scale;
}

// Only tiles at the end of what the rows see come here. A lane looks at one row, the next one at the other of the two
// that both have scores of: that takes fewer registers.
DEVICE void mask_tile(const VerifyParams& p, float (&s)[2][4], i32 token, u32 smem) {
  const u32 thread = group_thread(), lane = thread % WARP;
  const u32 row = thread / WARP * 16 + lane / 4 + lane % 2 * 8;
  const u32x2 view = ld_shared_u32x2(smem + Smem::VIEWS + row * 8);
  const i32 tail_begin = ld_shared_u32(smem + Smem::TAIL_BEGIN);
  const u32 seen = visible_bits(p, view.x, tail_begin, view.y, token);
  mask_scores(s, {shfl_u32(seen, lane & ~1), shfl_u32(seen, lane | 1)}, lane);
}

// Moves the bases of the lane's two rows up to the maxima, and publishes what that makes of the output so far.
DEVICE void raise_bases(Softmax& softmax, const float (&maxima)[2], u32 factors) {
  const int lane = group_thread() % WARP;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float base = max_f32(softmax.base[h], max_over_row(maxima[h]));
    const float factor = ex2(softmax.base[h] - finite_base(base));
    softmax.base[h] = base;
    softmax.sum[h] *= factor;
    if (lane % 4 == 0) st_shared_f32(factors + (lane / 4 + 8 * h) * 4, factor);
  }
}

DEVICE void find_maxima(float (&maxima)[2], const float (&s)[2][4], const float (&scales)[2]) {
#pragma unroll
  for (int h = 0; h < 2; h++)
    maxima[h] = scales[h] * max_f32(max_f32(s[0][2 * h], s[0][2 * h + 1]), max_f32(s[1][2 * h], s[1][2 * h + 1])) -
                (FP8 ? WEIGHT_LIFT : 0.0f);
}

DEVICE void weigh(u32 (&weights)[4], const float (&s)[2][4], const float (&scales)[2], Scorer& scorer) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float base = finite_base(scorer.softmax.base[h]);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float a = ex2(fma_f32(s[n][2 * h], scales[h], -base));
      const float b = ex2(fma_f32(s[n][2 * h + 1], scales[h], -base));
      scorer.softmax.sum[h] += a + b;
      weights[2 * n + h] = pack_elements<MMA_DTYPE>(a, b);
    }
  }
}

DEVICE void hand_over(const u32 (&weights)[4], bool raised, const Scorer& scorer, u32 smem, u32 weights_offset) {
  if (LANE_ANEW) smem = scorer.fragments - (lane_idx_anew() + row_tile_of(scorer.warp) * 2 * WARP) * 16;
  const u32 buffer = smem + Smem::HANDOVER + weights_offset;
  st_shared_u32x4(scorer.fragments + Smem::WEIGHTS + weights_offset, {weights[0], weights[1], weights[2], weights[3]});
  if (lane_idx_anew() == 0) st_shared_u32(buffer + Smem::RAISED + row_tile_of(scorer.warp) * 4, raised);
  mbarrier_arrive(buffer + Smem::READY);  // orders the lane's writes before the value warps' reads
}

// What the output accumulates is counted in this.
DEVICE float output_unit(const VerifyParams& p) {
  if constexpr (!FP8) return 1.0f;
  return cache_scale(p);
}

// A row's weights so far.
struct RowState {
  float base, sum;
};

// What both groups' weights come to: brings `own` to that, and returns by what the group's output is to be multiplied.
DEVICE float merge_state(RowState& own, u32 others) {
  const u32x2 x = ld_shared_u32x2(others);
  const RowState other = {as_f32(x.x), as_f32(x.y)};
  const float base = max_f32(own.base, other.base), finite = finite_base(base), factor = ex2(own.base - finite);
  own = {base, own.sum * factor + other.sum * ex2(other.base - finite)};
  return factor;
}

// The reciprocal sums for the value warps; the lse to where it belongs. Returns the block's next item.
DEVICE int finish_scores(const VerifyParams& p, const Scorer& scorer, u32 smem) {
  const Place place = find_place(p, smem);
  const int first = place.rows.first, lane = group_thread() % WARP, begin = row_tile_of(scorer.warp) * 16 + lane / 4;
  RowState states[2];
  float factors[2] = {1.0f, 1.0f};
  const u32 group = group_idx();
#pragma unroll
  for (int h = 0; h < 2; h++) states[h] = {scorer.softmax.base[h], sum_over_row(scorer.softmax.sum[h])};
  if constexpr (FP8) warp_sync();  // orders the lanes' reads of the units and views before the writes over them
  if constexpr (GROUPS > 1) {
#pragma unroll
    for (int h = 0; h < 2; h++)
      if (lane % 4 == 0)
        st_shared_u32x2(smem + Smem::STATES + (begin + 8 * h) * 8, {as_u32(states[h].base), as_u32(states[h].sum)});
    roles_sync(0);  // orders the writes before the other group's reads, and all uses of the rings before their end
    retire_barriers(smem);
    const u32 others = group_base(group ^ 1) + Smem::STATES;
#pragma unroll
    for (int h = 0; h < 2; h++) factors[h] = merge_state(states[h], others + (begin + 8 * h) * 8);
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = begin + 8 * h;
    // Not asked of the maximum: where scores are NaN it stays -inf, and would hide them.
    const bool empty = states[h].sum == 0.0f;
    if (lane % 4 != 0) continue;
    st_shared_f32(smem + Smem::RECIPROCALS + row * 4,
                  empty ? 0.0f : output_unit(p) * factors[h] * (1.0f / states[h].sum));
    if (first + row < place.rows.end && group == 0)
      store_lse(p, place.request, first + row, place.part, empty ? neg_inf() : states[h].base + lg2(states[h].sum));
  }
  return place.next;
}

// Products for the tile that begins at `token`, and meanwhile the scores of the tile before to weights: `own` are the
// warp's partial scores of its own rows, at first of the tile before and then of this one. Returns whether a tile
// follows.
template <bool PRODUCTS, bool WEIGHTS>
DEVICE bool score_step(const VerifyParams& p, Scorer& scorer, Operands& operands, float (&own)[2][4], i32 token,
                       u32& stage, u32 smem) {
  float s[2][2][4] = {};
  const u32 ring = smem + Smem::RING;
  const u32 keys = scorer.keys + stage, weights_offset = handover_of(token - TILE);
  const u32 handover = smem + Smem::HANDOVER + weights_offset;
  // After the last tile the same one again: its phase is over, and its operands come to nothing.
  const bool has_next =
      END_IN_SHARED ? warp_any(token + TILE < (i32)ld_shared_u32(smem + Smem::END)) : token + TILE < scorer.end;
  const u32 next = has_next ? next_stage(stage) : stage;
  if (PRODUCTS) multiply_q_k<0, TAKE_AT>(s, scorer, operands, keys, 0);
  float scales[2];
  if (WEIGHTS) take_scores(own, scales, scorer, smem);
  if (PRODUCTS && WEIGHTS) named_barrier_arrive(taken_barrier(scorer.warp), 2 * WARP);
  if (PRODUCTS) multiply_q_k<TAKE_AT, MAXIMA_AT>(s, scorer, operands, keys, 0);
  float maxima[2];
  bool raised = false;
  if (WEIGHTS) {
    FP8 ? cap_scores(own) : soft_cap(p, own);
    if (is_masked(smem, token - TILE)) mask_tile(p, own, token - TILE, smem);
    find_maxima(maxima, own, scales);
    const Softmax& softmax = scorer.softmax;
    raised = warp_any(maxima[0] > softmax.base[0] + RESCALE_ABOVE || maxima[1] > softmax.base[1] + RESCALE_ABOVE);
  }
  if (PRODUCTS) multiply_q_k<MAXIMA_AT, RAISE_AT>(s, scorer, operands, keys, 0);
  // Orders the copies of the next tile before its reads.
  if (PRODUCTS) mbarrier_wait(ring + next + Smem::FULL, stage_parity(has_next ? token + TILE : token));
  u32 weights[4];
  if (WEIGHTS) {
    // Orders the value warps' reads of the weights of two tiles ago before the writes.
    mbarrier_wait(handover + Smem::TAKEN, handover_parity(token - TILE) ^ 1);
    if (raised) raise_bases(scorer.softmax, maxima, handover + Smem::FACTORS + row_tile_of(scorer.warp) * 64);
    weigh(weights, own, scales, scorer);
  }
  if (PRODUCTS) multiply_q_k<RAISE_AT, STORE_AT>(s, scorer, operands, keys, 0);
  if (WEIGHTS) hand_over(weights, raised, scorer, smem, weights_offset);
  if (!PRODUCTS) return false;
  multiply_q_k<STORE_AT, K_STEPS>(s, scorer, operands, keys, scorer.keys + next);
  mbarrier_arrive(ring + stage + Smem::EMPTY);  // orders the lane's reads of the tile before its refill
  give_scores(s[1], scorer);
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) own[n][e] = s[0][n][e];
  stage = next;
  return has_next;
}

// Of one tile at least.
DEVICE void score_run(const VerifyParams& p, Scorer& scorer, u32 smem) {
  Operands operands;
  float own[2][4];
  named_barrier_arrive(taken_barrier(scorer.warp), 2 * WARP);  // the first tile's scores need not wait
  mbarrier_wait(smem + Smem::RING + Smem::FULL, 0);            // orders the first tile's copies before its reads
#pragma unroll
  for (int i = 0; i < LOOKAHEAD; i++) load_keys(operands, scorer.keys, scorer.keys, i);
  if constexpr (FP8) convert_keys(operands, 0, 0);
  u32 stage = 0;
  bool more = score_step<true, false>(p, scorer, operands, own, 0, stage, smem);
  i32 token = TILE;
#pragma unroll 1
  for (; more; token += TILE) more = score_step<true, true>(p, scorer, operands, own, token, stage, smem);
  score_step<false, true>(p, scorer, operands, own, token, stage, smem);
}

// Returns the block's next item.
DEVICE int score_tiles(const VerifyParams& p, const Piece& piece, u32 smem) {
  Scorer scorer;
  // Read anew, so that nothing of it is kept from item to item.
  const u32 thread = group_thread(), lane = thread % WARP;
  scorer.warp = make_uniform(thread / WARP) + group_idx() * SCORE_WARPS;
  scorer.scale = FP8 && !SOFT_CAP ? 1.0f : as_f32(make_uniform(as_u32(FP8 ? capped_scale(p) : exponent_scale(p))));
  scorer.fragments = keep_in_register(smem + (lane + row_tile_of(scorer.warp) * 2 * WARP) * 16);
  // Matrices 0, 1 are dims 0-7, 8-15 of tokens 0-7, and 2, 3 those of tokens 8-15: (r0, r1) and (r2, r3) are the B
  // fragments of the two token octets, in neighbouring registers as the tensor cores want them.
  // Of codes 0, 1 are dims 0-15 of tokens 0-7 and 8-15, and 2, 3 dims 16-31.
  const u32 key = FP8 ? lane % 16 * PITCH + lane / 16 * 16 : (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
  scorer.keys = keep_in_register(smem + Smem::RING + key + scorer.warp % 2 * (FP8 ? D / 2 : ROW_BYTES / 2));
  scorer.softmax = {{neg_inf(), neg_inf()}, {0.0f, 0.0f}};
  scorer.end = tokens_end(p, piece);
  scorer.q_offset = Smem::Q - group_idx() * Smem::GROUP_BYTES;
  init_handover(smem);
  init_stages<0, FP8 ? 0 : STAGES>(smem);
  publish_masks(p, piece, smem);
  if (END_IN_SHARED && thread == 0) st_shared_u32(smem + Smem::END, (u32)scorer.end);
  roles_sync(0);  // orders the barriers' initialisation, the masks, the item and q before their uses
  if constexpr (FP8) scale_q(p);
  load_q(p, scorer);
  if constexpr (FP8) {
    init_stages<EARLY_STAGES, STAGES>(smem);  // where q was
    roles_sync(1);                            // orders the barriers' initialisation, and of groups q, before their uses
  }
  if (GROUPS == 1 || scorer.end > 0) score_run(p, scorer, smem);
  const int next = finish_scores(p, scorer, smem);
  roles_sync(GROUPS > 1);         // orders the reciprocal sums before the value warps' reads
  if (GROUPS > 1) roles_sync(0);  // as the value warps do
  return next;
}

// --- value warps ----------------------------------------------------------------------------------------------------

struct Output {
  float o[ROW_TILES][O_TILES][4];
};

DEVICE void rescale_rows(float (&o)[O_TILES][4], u32 factors) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float factor = ld_shared_f32(factors + (group_thread() % WARP / 4 + 8 * h) * 4);
#pragma unroll
    for (int i = 0; i < O_TILES; i++) o[i][2 * h] *= factor, o[i][2 * h + 1] *= factor;
  }
}

DEVICE void load_weights(u32 (&weights)[4], u32 fragments, int row_tile) {
  const u32x4 x = ld_shared_u32x4(fragments + Smem::WEIGHTS + row_tile * 2 * FRAGMENT_BYTES);
  weights[0] = x.x, weights[1] = x.y, weights[2] = x.z, weights[3] = x.w;
}

// 64 columns of a tile as B operands, two of 8 columns in each piece: the lower and the upper ones, or FP8 the even
// and the odd ones, which still have to be made of codes.
struct Values {
  u32 codes[V_STEPS / 2][4];
  u32 v[V_STEPS][4];
};
DEVICE void load_values(Values& values, u32 at) {
#pragma unroll
  for (int i = 0; i < (FP8 ? V_STEPS / 2 : V_STEPS); i++) {
    if constexpr (FP8)
      ldmatrix_x4_trans(values.codes[i], at + i * 32);
    else
      ldmatrix_x4_trans(values.v[i], at + i * 32);
  }
}
DEVICE void convert_values(Values& values) {
  if constexpr (!FP8) return;
#pragma unroll
  for (int i = 0; i < V_STEPS; i++) {
    const u32 first = values.codes[i / 2][i % 2 * 2], last = values.codes[i / 2][i % 2 * 2 + 1];
    const Operand even = even_columns(first, last), odd = odd_columns(first, last);
    u32(&v)[4] = values.v[i];
    v[0] = even.b0, v[1] = even.b1, v[2] = odd.b0, v[3] = odd.b1;
  }
}

DEVICE u32x4 load_raised(u32 handover) {
  if (ROW_TILES == 4) return ld_shared_u32x4(handover + Smem::RAISED);
  const u32x2 raised = ld_shared_u32x2(handover + Smem::RAISED);
  return {raised.x, raised.y, 0, 0};
}
// Brings the output to the bases of the weights, which hardly ever differ from those of the tile before.
DEVICE void rescale_output(Output& output, u32x4 raised, u32 handover) {
  if (!(raised.x | raised.y | raised.z | raised.w)) return;
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++)
    if (m == 0 ? raised.x : m == 1 ? raised.y : m == 2 ? raised.z : raised.w)
      rescale_rows(output.o[m], handover + Smem::FACTORS + m * 64);
}

// Part PART of the columns of one row tile.
template <int PART>
DEVICE void multiply_p_v(float (&o)[O_TILES][4], const u32 (&weights)[4], const u32 (&v)[V_STEPS][4]) {
#pragma unroll
  for (int i = 0; i < V_STEPS; i++) {
    mma_16x8x16(o[2 * (PART * V_STEPS + i)], weights, v[i][0], v[i][1]);
    mma_16x8x16(o[2 * (PART * V_STEPS + i) + 1], weights, v[i][2], v[i][3]);
  }
}

// Multiplies rows by their reciprocal sums.
DEVICE void normalize(Output& output, u32 smem) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++) rescale_rows(output.o[m], smem + Smem::RECIPROCALS + m * 64);
}

// Where the thread's part of a row tile of the second group's output goes: into the first group's memory, or its own.
DEVICE u32 output_in_shared(int row_tile) {
  return group_base(row_tile) + Smem::OUTPUT + (group_thread() - SCORE_WARPS * WARP) * 16;
}

DEVICE void give_output(const Output& output) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
    for (int i = 0; i < O_TILES; i++) {
      const float (&o)[4] = output.o[m][i];
      st_shared_f32x4(output_in_shared(m) + i * OUTPUT_PITCH, f32x4{o[0], o[1], o[2], o[3]});
    }
}

// Row tile m of both groups' output together. It is added as it is stored: all of it at once takes more registers than
// there are.
template <int DTYPE>
DEVICE void store_both(const VerifyParams& p, const Place& place, const Output& output, int m) {
  const int lane = group_thread() % WARP, column = (group_thread() / WARP - SCORE_WARPS) * VALUE_COLUMNS;
  const int row = place.rows.first + m * 16 + lane / 4;
  u8* ptrs[2];
#pragma unroll
  for (int h = 0; h < 2; h++)
    ptrs[h] = result_row<DTYPE>(p, place.request, row + 8 * h, place.part) + column * element_bytes<DTYPE>();
#pragma unroll
  for (int i = 0; i < O_TILES; i += 2) {
    float o[2][4];
    warp_sync();  // keeps the compiler from loading more of it at once
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const f32x4 x = ld_shared_f32x4(output_in_shared(m) + (i + n) * OUTPUT_PITCH);
      const float (&own)[4] = output.o[m][i + n];
      o[n][0] = own[0] + x.x, o[n][1] = own[1] + x.y, o[n][2] = own[2] + x.z, o[n][3] = own[3] + x.w;
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
      store_half<DTYPE, FP8>(ptrs[h] + i * 8 * element_bytes<DTYPE>(), row + 8 * h < place.rows.end, lane % 4, o, h,
                             1.0f);
  }
}

// Returns the block's next item.
DEVICE int finish_values(const VerifyParams& p, Output& output, u32 smem) {
  const Place place = find_place(p, smem);
  if constexpr (GROUPS > 1) {
    const bool is_first = group_idx() == 0;
    normalize(output, smem);
    if (!is_first) give_output(output);
    roles_sync(0);  // orders the second group's writes before the first one's reads
    if (!is_first) return place.next;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
      if (OUT_DTYPE == PARTIAL_DTYPE || !is_partial(p, place.part))
        store_both<OUT_DTYPE>(p, place, output, m);
      else
        store_both<PARTIAL_DTYPE>(p, place, output, m);
    return place.next;
  }
  const Request& r = place.request;
  const int first = place.rows.first, part = place.part;
  const int lane = group_thread() % WARP, column = (group_thread() / WARP - SCORE_WARPS) * VALUE_COLUMNS;
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = m * 16 + lane / 4 + 8 * h;
      const bool exists = first + row < place.rows.end;
      const float factor = ld_shared_f32(smem + Smem::RECIPROCALS + row * 4);
      if (OUT_DTYPE == PARTIAL_DTYPE || !is_partial(p, part))
        store_half<OUT_DTYPE, FP8>(result_row<OUT_DTYPE>(p, r, first + row, part) + column * element_bytes<OUT_DTYPE>(),
                                   exists, lane % 4, output.o[m], h, factor);
      else
        store_half<PARTIAL_DTYPE, FP8>(
            result_row<PARTIAL_DTYPE>(p, r, first + row, part) + column * element_bytes<PARTIAL_DTYPE>(), exists,
            lane % 4, output.o[m], h, factor);
    }
  return place.next;
}

// Where a thread reads what.
struct Lane {
  u32 fragments;  // its place in a pair of them, were they at 0
  u32 values;     // its ldmatrix row of the warp's columns in stage 0
};
DEVICE Lane locate_lane(u32 smem) {
  const u32 thread = group_thread(), lane = LANE_ANEW ? lane_idx_anew() : thread % WARP;
  const u32 fragments = smem + lane * 16;
  // Transposed: (r0, r1) is columns 0-7, (r2, r3) columns 8-15 of the 16 tokens.
  return {fragments, smem + Smem::RING + lane % 16 * PITCH + lane / 16 * 16 +
                         (thread / WARP - SCORE_WARPS) * ((FP8 ? DL : LATENT_BYTES) / VALUE_WARPS)};
}

// Returns the block's next item.
DEVICE int value_tiles(const VerifyParams& p, const Piece& piece, u32 smem) {
  const Source source = make_source(p, piece);
  i32 page_id = 0;  // of the next tile to copy
  {
    const Share share = copy_share();
    const bool has_tiles = GROUPS == 1 || source.end > 0;
    i32 first[STAGES];
    copy_q(p, piece.rows);
    if constexpr (FP8) cp_async_commit();
#pragma unroll
    for (int i = 0; i < STAGES; i++) first[i] = has_tiles ? find_page(p, source, i * TILE, share.row) : 0;
    const auto copy = [&](auto early, int i) {
      if (i * TILE >= source.end) return;
      const KvRow row = source_row(p, source, i * TILE, first[i], share);
      copy_tile<decltype(early)::value>(p, source, smem, i * STAGE_BYTES, i * TILE, [&] { return row; });
    };
    // What the rows see of the tiles is not known yet; only short contexts do not see all of the first ones.
    const bool is_early =
        EARLY_STAGES > 0 && !SPLIT_KV && first_masked_tile(p, piece.request, piece.rows) >= EARLY_STAGES;
    if (is_early)
#pragma unroll
      for (int i = 0; i < EARLY_STAGES; i++) copy(Bool<true>{}, i);
#pragma unroll
    for (int i = 0; i < STAGES; i++)
      if (!is_early) prefetch_tile(p, source, i * TILE, share, first[i]);
    if constexpr (FP8) {
      cp_async_commit();
      cp_async_wait<1>();  // for q alone
    } else {
      cp_async_wait_all();
    }
    roles_sync(0);  // orders the barriers' initialisation, the masks, the item and q before their uses
    if constexpr (FP8) scale_q(p);
    roles_sync(FP8 ? 0 : 1);           // orders the reads of q before the KV copies that overwrite it
    if constexpr (FP8) roles_sync(1);  // orders the barriers' initialisation before their uses
#pragma unroll
    for (int i = 0; i < STAGES; i++)
      if (i >= EARLY_STAGES || !is_early) copy(Bool<false>{}, i);
    if (!IDS_IN_RING && has_tiles) page_id = find_page(p, source, STAGES * TILE, share.row);
  }
  // Read anew, so that nothing of it is kept from item to item.
  Lane at = locate_lane(smem);
  at = {keep_in_register(at.fragments), keep_in_register(at.values)};
  Output output;
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
    for (int i = 0; i < O_TILES; i++)
      output.o[m][i][0] = output.o[m][i][1] = output.o[m][i][2] = output.o[m][i][3] = 0.0f;

  u32 stage = 0;
#pragma unroll 1
  for (i32 token = 0; token < source.end; token += TILE, stage = next_stage(stage)) {
    if (LANE_ANEW) at = locate_lane(smem);
    const u32 full = smem + Smem::RING + stage + Smem::FULL, empty = full + Smem::EMPTY - Smem::FULL;
    const u32 handover = smem + Smem::HANDOVER + handover_of(token);
    Values values;
    u32 weights[2][4];
    mbarrier_wait(full, stage_parity(token));  // orders the copies before the reads
    load_values(values, at.values + stage);
    convert_values(values);
    mbarrier_wait(handover + Smem::READY, handover_parity(token));  // orders the score warps' writes before the reads
    const u32x4 raised = load_raised(handover);
    load_weights(weights[0], at.fragments + handover_of(token), 0);
    load_weights(weights[1], at.fragments + handover_of(token), 1);
    rescale_output(output, raised, handover);
    if (IDS_IN_RING) page_id = (i32)ld_shared_u32(smem + Smem::RING + stage + copy_share().row * PITCH + Smem::ID);
    if (V_PARTS == 1) mbarrier_arrive(empty);  // orders the lane's reads of the tile before its refill
    multiply_p_v<0>(output.o[0], weights[0], values.v);
    if (ROW_TILES == 4) load_weights(weights[0], at.fragments + handover_of(token), 2);
    multiply_p_v<0>(output.o[1], weights[1], values.v);
    if (ROW_TILES == 4) load_weights(weights[1], at.fragments + handover_of(token), 3);
    if (V_PARTS == 2) {
      load_values(values, at.values + stage + V_STEPS * 16);
      mbarrier_arrive(empty);  // as above
    }
    mbarrier_arrive(handover + Smem::TAKEN);  // orders the lane's reads of the weights before the next writes
    // The stage takes the tile that is STAGES ahead. What is copied is also waited for, so no copy is in flight when
    // the block ends.
    const i32 tile_token = token + STAGES * TILE;
    // Found before the wait, which hides how long that takes; but two addresses leave no registers for it.
    constexpr bool EARLY = !SPLIT_KV;
    const auto find_row = [&] {
      return source_row(p, load_source(source, smem), tile_token, keep_in_register(page_id), copy_share());
    };
    KvRow row = {};
    if (EARLY) row = find_row();
    if (tile_token < source.end) {
      mbarrier_wait(empty, stage_parity(token));  // orders all reads of the tile before the copies
      copy_tile(p, source, smem, stage, tile_token, [&] { return EARLY ? row : find_row(); });
    }
    if (V_PARTS == 2) convert_values(values);
    constexpr int LAST = V_PARTS == 2 ? 0 : ROW_TILES - 2;
    multiply_p_v<V_PARTS - 1>(output.o[LAST], weights[0], values.v);
    if (!IDS_IN_RING) page_id = find_page(p, load_source(source, smem), tile_token + TILE, copy_share().row);
    multiply_p_v<V_PARTS - 1>(output.o[LAST + 1], weights[1], values.v);
  }
  if (GROUPS > 1) roles_sync(0);  // as the score warps do
  roles_sync(GROUPS > 1);         // orders the reciprocal sums, and the end of barriers, before what follows
  return finish_values(p, output, smem);
}

// The group's part of what the block computes. Returns the block's next item.
DEVICE int attend(const VerifyParams& p, const Piece& piece, int item) {
  const u32 smem = group_base(group_idx());
  if (PLANNED && group_thread() == 0) st_shared_u32(smem + Smem::ITEM, (u32)item);
  if (make_uniform(group_thread() / WARP) < SCORE_WARPS) return score_tiles(p, piece, smem);
  return value_tiles(p, piece, smem);
}

// The group's part of a run of tiles; of a single one the second group has none.
DEVICE TileRange group_range(const TileRange& range) {
  if (GROUPS == 1) return range;
  const int middle = range.begin + (range.end - range.begin + 1) / 2;
  return group_idx() == 0 ? TileRange{range.begin, middle} : TileRange{middle, range.end};
}

DEVICE int attend_item(const VerifyParams& p, int item) {
  const WorkItem w = load_work_item(p, item);
  if (w.tiles.begin == w.tiles.end) {
    if (w.request != -1) store_empty_item<THREADS>(p, w);
    return w.next;
  }
  const Request r = request_of(w);
  const RowTile rows = row_tile(p, r, w.row_tile * ROWS, ROWS);
  const int next = attend(p, make_piece(r, rows, group_range(w.tiles)), item);
  roles_sync(1);  // orders this item's reads of shared memory before the next item's writes
  const u32 smem = group_base(group_idx());
  if (GROUPS == 1) retire_barriers(smem);
  init_stages<0, EARLY_STAGES>(smem);
  if constexpr (FP8) block_sync();  // orders that before the next item's copies
  return next;
}

KERNEL(mlaflash_mma_roles, THREADS, 1) {
  if (thread_idx_anew() == 0) mbarrier_init(shared_base() + Smem::MEETING, THREADS);
  init_stages<0, EARLY_STAGES>(group_base(group_idx()));
  block_sync();  // orders the initialisation before the first use
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
    attend(p, make_piece(r, rows, group_range(range)), 0);
  }
  launch_dependents();
}
