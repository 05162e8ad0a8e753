// The tensor-core kernel for 64 rows with a division of labour: score warps multiply q with K and own the softmax,
// value warps multiply its weights with V and own the output. Like mma_wide, one block computes 64 packed rows (query
// token x head) of one request over one split of its KV, and reads every KV row once for all of them.
//
// Grid:   x = ceil(max_q_len * H / 64) row tiles, y = split, z = request.
// Block:  384 threads: 4 score warps, 8 value warps.
// Shared: STAGES * 18,704 + SHARED_STEPS * 4,096 + 13,264 bytes (struct Smem).
// Idea:   A score warp holds 32 rows x half of the dims of q, so that an operand of K feeds four products; the two
// warps
//         of a pair swap the partial scores of 16 rows each, and each of them weighs 16 rows. A value warp holds 64
//         rows x 64 columns of the output, so that an operand of V feeds eight products and no two warps read the same
//         one. Weights go from the former to the latter through shared memory, one tile ahead. Every scheduler has one
//         score warp and two value warps, whose products fill the gaps that softmax and barriers leave.
#include "mma.cuh"

constexpr int SCORE_WARPS = 4;
constexpr int VALUE_WARPS = 8;
constexpr int THREADS = (SCORE_WARPS + VALUE_WARPS) * WARP;
constexpr int ROW_TILES = 4;  // of 16 rows
constexpr int ROWS = ROW_TILES * 16;

constexpr int ROW_BYTES = D * 2;
constexpr int LATENT_BYTES = DL * 2;
constexpr int PITCH = ROW_BYTES + 16;  // an odd multiple of 16 bytes: the 8 rows of an ldmatrix phase hit all 32 banks
constexpr int STAGE_BYTES = TILE * PITCH + 16;  // a tile and its two mbarriers

constexpr int K_STEPS = D / 16 / 2;                     // products of 16 dims in a score warp's half of q K
constexpr int V_STEPS = DL / 16 / VALUE_WARPS;          // 16-column pieces of a value warp's part of P V
constexpr int O_TILES = 2 * V_STEPS;                    // 8-column tiles of it
constexpr int REGISTER_STEPS = K_STEPS - SHARED_STEPS;  // the rest of q comes from shared memory, tile by tile

constexpr int LOADERS = VALUE_WARPS * WARP;                        // threads that copy q and KV
constexpr int COPY_LANES = 16;                                     // lanes that copy one KV row
constexpr int COPY_ROWS = TILE / (LOADERS / COPY_LANES);           // rows that such a half-warp copies
constexpr int MASK_WORDS = 32;                                     // of mask columns, so tail_len <= 1,024
constexpr int FRAGMENT_BYTES = WARP * 16;                          // a fragment of four registers, lane by lane
constexpr int EXCHANGE_BUFFER = SCORE_WARPS * 2 * FRAGMENT_BYTES;  // partial scores of a tile

static_assert(SHARED_STEPS >= 0 && SHARED_STEPS <= K_STEPS, "steps of q in shared memory");
static_assert(STAGES >= ROW_TILES, "q passes through the ring, 16 rows a stage");

struct Smem {
  static constexpr u32 RING = 0;                         // [STAGES]: tile [16][PITCH], before it q; mbarriers
  static constexpr u32 Q = RING + STAGES * STAGE_BYTES;  // [SCORE_WARPS][SHARED_STEPS][2] fragments
  static constexpr u32 EXCHANGE = Q + SCORE_WARPS * SHARED_STEPS * 2 * FRAGMENT_BYTES;  // [2][SCORE_WARPS][2] fragments
  static constexpr u32 HANDOVER = EXCHANGE + 2 * EXCHANGE_BUFFER;                       // [2]: what follows below
  static constexpr u32 WEIGHTS = 0;                                                     // [ROW_TILES] fragments
  static constexpr u32 FACTORS = WEIGHTS + ROW_TILES * FRAGMENT_BYTES;                  // float32 [ROWS]
  static constexpr u32 RAISED = FACTORS + ROWS * 4;     // u32 [ROW_TILES] not 0: the factors of these rows count
  static constexpr u32 READY = RAISED + ROW_TILES * 4;  // mbarrier: the weights of a tile are there
  static constexpr u32 TAKEN = READY + 8;               // mbarrier: all value warps have them in registers
  static constexpr u32 HANDOVER_BYTES = TAKEN + 8;
  static constexpr u32 RECIPROCALS = HANDOVER + 2 * HANDOVER_BYTES;  // float32 [ROWS] of the sums of weights
  static constexpr u32 COLUMNS = RECIPROCALS + ROWS * 4;             // u32 [MASK_WORDS] mask columns that any row sees
  static constexpr u32 TAIL_BEGIN = COLUMNS + MASK_WORDS * 4;        // i32: the mask columns begin here
  static constexpr u32 BYTES = TAIL_BEGIN + 16;
  // In a stage.
  static constexpr u32 FULL = TILE * PITCH;  // mbarrier: the tile has landed
  static constexpr u32 EMPTY = FULL + 8;     // mbarrier: all value warps are done with it, and so the score warps
};

// --- turns ---------------------------------------------------------------------------------------------------------

// Uniform. A buffer of a ring, and the parity of the phase that its mbarriers are in for this turn.
struct Turn {
  u32 offset, parity;
};

template <u32 BYTES, u32 COUNT>
DEVICE Turn next_turn(Turn t) {
  if (t.offset == (COUNT - 1) * BYTES) return {0, t.parity ^ 1};
  return {t.offset + BYTES, t.parity};
}
DEVICE Turn next_stage(Turn t) { return next_turn<STAGE_BYTES, STAGES>(t); }
DEVICE Turn next_handover(Turn t) { return next_turn<Smem::HANDOVER_BYTES, 2>(t); }

// --- filling the ring: the value warps ------------------------------------------------------------------------------

// Uniform.
struct Source {
  u32 thread;       // of the loaders; not uniform
  const u8* ids;    // the request's page ids
  u32 id_bytes;     // of an id
  i32 end;          // KV tokens of this block end here
  i32 masked_from;  // every row sees every token of the tiles before the one that this token begins
  i32 cached;       // NEW_KV: tokens from here on are rows of new_kv_c and new_k_pe
  i32 new_row;      // NEW_KV: the row of token 0, were it there
};

DEVICE Source make_source(const VerifyParams& p, const Request& r, const RowTile& rows, const TileRange& tiles) {
  const int masked_from = min_int(max_int(first_masked_tile(p, r, rows), tiles.begin), tiles.end);
  Source s;
  s.thread = keep_in_register(thread_idx() - SCORE_WARPS * WARP);
  s.id_bytes = p.wide_ids ? 8 : 4;
  const u64 ids = (u64)p.page_ids + r.id_begin * s.id_bytes;
  s.ids = (const u8*)((u64)make_uniform((u32)(ids >> 32)) << 32 | make_uniform((u32)ids));
  s.end = make_uniform(min_int(tiles.end * TILE, visible_end(p, r, rows.q_last)));
  s.masked_from = make_uniform(masked_from * TILE);
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
    slots[i].offset = token - page * p.page_size;
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
DEVICE bool is_seen(const Source& s, u32 smem, i32 token) {
  if (token >= s.end) return false;
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
    const u32 bytes = tile_token < s.masked_from || is_seen(s, smem, token) ? 16 : 0;
    const KvRow row = source_chunk(p, s, token, slots[i], share.chunk);
    const u32 dst = stage + (share.row + i) * PITCH + share.chunk * 16;
#pragma unroll
    for (int c = 0; c < LATENT_BYTES; c += COPY_LANES * 16) cp_async_16_zfill(dst + c, row.c + c, bytes);
    if (share.chunk < DR * 2 / 16) cp_async_16_zfill(dst + LATENT_BYTES, row.pe, bytes);
  }
  cp_async_mbarrier_arrive_noinc(stage + Smem::FULL);
}

// Brings a tile's rows to the L2 cache while the ring is still full of q: one lane for each 128 bytes.
DEVICE void prefetch_tile(const VerifyParams& p, const Source& s, i32 tile_token, const Slot (&slots)[COPY_ROWS]) {
  constexpr u32 LINES = LATENT_BYTES / 128;
  const Share share = copy_share(s.thread);
#pragma unroll
  for (int i = 0; i < COPY_ROWS; i++) {
    const i32 token = tile_token + share.row + i;
    if (token >= s.end || share.chunk > LINES) continue;
    const KvRow row = source_chunk(p, s, token, slots[i], share.chunk % LINES * 8);
    prefetch_l2(share.chunk == LINES ? row.pe : row.c);
  }
}

// Starts the copies of q, 16 rows a stage. Rows past the last one are zeros.
DEVICE void copy_q(const VerifyParams& p, const RowTile& rows, u32 smem) {
  constexpr int ROWS_PER_WARP = ROWS / VALUE_WARPS;
  const int begin = (warp_idx() - SCORE_WARPS) * ROWS_PER_WARP, chunk = lane_idx() * 16;
  int head = (rows.first + begin) % p.num_heads;
  int token = rows.q_first + (rows.first % p.num_heads + begin) / p.num_heads;
#pragma unroll
  for (int i = 0; i < ROWS_PER_WARP; i++) {
    const int row = begin + i;
    const u32 bytes = rows.first + row < rows.end ? 16 : 0;
    const u32 dst = smem + Smem::RING + row / 16 * STAGE_BYTES + row % 16 * PITCH + chunk;
    const u8* nope = q_nope_row(p, token, head) + chunk;
    cp_async_16_zfill(dst, nope, bytes);
    cp_async_16_zfill(dst + 512, nope + 512, bytes);
    if (chunk < DR * 2) cp_async_16_zfill(dst + LATENT_BYTES, q_pe_row(p, token, head) + chunk, bytes);
    if (++head == p.num_heads) head = 0, token++;
  }
}

// --- score warps ----------------------------------------------------------------------------------------------------

// Of a score warp. Row tile 0 is its own one, row tile 1 its partner's.
struct Scorer {
  u32 q[REGISTER_STEPS][2][4];  // A fragments of its half of the dims, from step SHARED_STEPS on
  Softmax softmax;              // of its own row tile
  u32 keys;                     // address of the lane's ldmatrix row in stage 0
  u32 fragments;                // the lane's place in fragment 0 of the block
  float scale;                  // of the exponents; uniform
  u32 warp;                     // uniform
};

DEVICE void init_barriers(u32 smem) {
  if (thread_idx() != 0) return;
  for (int stage = 0; stage < STAGES; stage++) {
    mbarrier_init(smem + Smem::RING + stage * STAGE_BYTES + Smem::FULL, LOADERS);
    mbarrier_init(smem + Smem::RING + stage * STAGE_BYTES + Smem::EMPTY, VALUE_WARPS);
  }
  for (int i = 0; i < 2; i++) {
    mbarrier_init(smem + Smem::HANDOVER + i * Smem::HANDOVER_BYTES + Smem::READY, SCORE_WARPS);
    mbarrier_init(smem + Smem::HANDOVER + i * Smem::HANDOVER_BYTES + Smem::TAKEN, VALUE_WARPS);
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

DEVICE u32 q_in_shared(const Scorer& s, int step, int row_tile) {
  return s.fragments + Smem::Q + ((s.warp * SHARED_STEPS + step) * 2 + row_tile) * FRAGMENT_BYTES;
}

// The first steps of q stay in shared memory, where the lane that writes them is the one that reads them.
DEVICE void load_q(const VerifyParams& p, u32 smem, Scorer& s) {
  const int lane = lane_idx();
  const u32 addr = smem + Smem::RING + s.warp % 2 * (ROW_BYTES / 2) + lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
  for (int k = 0; k < K_STEPS; k++)
#pragma unroll
    for (int m = 0; m < 2; m++) {
      u32 q[4];
      ldmatrix_x4(q, addr + (s.warp ^ m) * STAGE_BYTES + k * 32);
#pragma unroll
      for (int i = 0; i < 4; i++) q[i] = fold_scale_sign(p, q[i]);
      if (k < SHARED_STEPS) {
        st_shared_u32x4(q_in_shared(s, k, m), {q[0], q[1], q[2], q[3]});
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++) s.q[k < SHARED_STEPS ? 0 : k - SHARED_STEPS][m][i] = q[i];
      }
    }
}

// Partial scores of 2 x 16 rows and 16 tokens, over half of the dims.
DEVICE void multiply_q_k(float (&s)[2][2][4], const Scorer& scorer, u32 keys) {
  u32 k[LOOKAHEAD + 1][4];
#pragma unroll
  for (int i = 0; i < LOOKAHEAD; i++) ldmatrix_x4(k[i], keys + i * 32);
#pragma unroll
  for (int i = 0; i < K_STEPS; i++) {
    if (i + LOOKAHEAD < K_STEPS) ldmatrix_x4(k[(i + LOOKAHEAD) % (LOOKAHEAD + 1)], keys + (i + LOOKAHEAD) * 32);
    const u32(&b)[4] = k[i % (LOOKAHEAD + 1)];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      u32 a[4];
      if (i < SHARED_STEPS) {
        const u32x4 q = ld_shared_u32x4(q_in_shared(scorer, i, m));
        a[0] = q.x, a[1] = q.y, a[2] = q.z, a[3] = q.w;
      } else {
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = scorer.q[i < SHARED_STEPS ? 0 : i - SHARED_STEPS][m][r];
      }
      mma_16x8x16(s[m][0], a, b[0], b[1]);
      mma_16x8x16(s[m][1], a, b[2], b[3]);
    }
  }
}

// Gives the partner the partial scores of its rows, and completes those of the warp's own.
DEVICE void exchange_scores(float (&s)[2][2][4], const Scorer& scorer, u32 exchange) {
  const u32 buffer = scorer.fragments + Smem::EXCHANGE + exchange;
#pragma unroll
  for (int n = 0; n < 2; n++)
    st_shared_f32x4(buffer + ((scorer.warp ^ 1) * 2 + n) * FRAGMENT_BYTES,
                    f32x4{s[1][n][0], s[1][n][1], s[1][n][2], s[1][n][3]});
  // Orders this tile's partial scores before the reads of them below, and, as the buffers alternate, the reads of the
  // tile before this one before the next tile's writes to the same buffer.
  named_barrier_sync(1 + scorer.warp / 2, 2 * WARP);
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const f32x4 x = ld_shared_f32x4(buffer + (scorer.warp * 2 + n) * FRAGMENT_BYTES);
    s[0][n][0] += x.x, s[0][n][1] += x.y, s[0][n][2] += x.z, s[0][n][3] += x.w;
  }
}

// Only tiles at the end of what the rows see come here, so the request is read again instead of kept in registers.
DEVICE void mask_tile(const VerifyParams& p, float (&s)[2][4], i32 token) {
  const Request r = load_request(p, block_idx_z());
  const RowTile rows = row_tile(p, r, block_idx_x() * ROWS, ROWS);
  const int thread = thread_idx_anew();
  const int row = rows.first + thread / WARP * 16 + thread % WARP / 4;
  u32 bits[2];
#pragma unroll
  for (int h = 0; h < 2; h++)
    bits[h] = visible_bits(p, r, min_int(r.q_begin + (row + 8 * h) / p.num_heads, rows.q_last), token);
  mask_scores(s, bits);
}

// Moves the bases of the lane's two rows up to the maxima, and publishes what that makes of the output so far.
DEVICE void raise_bases(Softmax& softmax, const float (&maxima)[2], u32 factors) {
  const int lane = lane_idx();
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float base = max_f32(softmax.base[h], max_over_row(maxima[h]));
    const float factor = ex2(softmax.base[h] - finite_base(base));
    softmax.base[h] = base;
    softmax.sum[h] *= factor;
    if (lane % 4 == 0) st_shared_f32(factors + (lane / 4 + 8 * h) * 4, factor);
  }
}

// Scores of a tile to weights, for the value warps.
DEVICE void hand_over(float (&s)[2][4], Scorer& scorer, u32 smem, Turn turn) {
  const u32 buffer = smem + Smem::HANDOVER + turn.offset;
  Softmax& softmax = scorer.softmax;
  float maxima[2];
#pragma unroll
  for (int h = 0; h < 2; h++)
    maxima[h] = scorer.scale * max_f32(max_f32(s[0][2 * h], s[0][2 * h + 1]), max_f32(s[1][2 * h], s[1][2 * h + 1]));
  const bool raised =
      warp_any(maxima[0] > softmax.base[0] + RESCALE_ABOVE || maxima[1] > softmax.base[1] + RESCALE_ABOVE);
  // Orders the value warps' reads of the weights of two tiles ago before this tile's writes.
  mbarrier_wait(buffer + Smem::TAKEN, turn.parity ^ 1);
  if (raised) raise_bases(softmax, maxima, buffer + Smem::FACTORS + scorer.warp * 64);
  u32 weights[4];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float base = finite_base(softmax.base[h]);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float a = ex2(fma_f32(s[n][2 * h], scorer.scale, -base));
      const float b = ex2(fma_f32(s[n][2 * h + 1], scorer.scale, -base));
      softmax.sum[h] += a + b;
      weights[2 * n + h] = pack_elements<Q_DTYPE>(a, b);
    }
  }
  st_shared_u32x4(scorer.fragments + Smem::HANDOVER + turn.offset + Smem::WEIGHTS + scorer.warp * FRAGMENT_BYTES,
                  {weights[0], weights[1], weights[2], weights[3]});
  const bool is_first_lane = lane_idx() == 0;
  if (is_first_lane) st_shared_u32(buffer + Smem::RAISED + scorer.warp * 4, raised);
  warp_sync();  // orders the lanes' writes before the arrival
  if (is_first_lane) mbarrier_arrive(buffer + Smem::READY);
}

// The reciprocal sums for the value warps; the lse to where it belongs.
DEVICE void finish_scores(const VerifyParams& p, const Scorer& scorer, u32 smem) {
  const Request r = load_request(p, block_idx_z());
  const RowTile rows = row_tile(p, r, block_idx_x() * ROWS, ROWS);
  const int lane = lane_idx();
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = scorer.warp * 16 + lane / 4 + 8 * h;
    const float sum = sum_over_row(scorer.softmax.sum[h]);
    // Not asked of the maximum: where scores are NaN it stays -inf, and would hide them.
    const bool empty = sum == 0.0f;
    if (lane % 4 != 0) continue;
    st_shared_f32(smem + Smem::RECIPROCALS + row * 4, empty ? 0.0f : 1.0f / sum);
    if (rows.first + row < rows.end)
      store_lse(p, r, rows.first + row, empty ? neg_inf() : scorer.softmax.base[h] + lg2(sum));
  }
}

DEVICE void score_tiles(const VerifyParams& p, const Request& r, const RowTile& rows, const TileRange& range,
                        u32 smem) {
  const Source source = make_source(p, r, rows, range);
  Scorer scorer;
  const int lane = lane_idx();
  scorer.warp = make_uniform(warp_idx());
  scorer.scale = as_f32(make_uniform(as_u32(exponent_scale(p))));
  scorer.fragments = keep_in_register(smem + lane * 16);
  // Matrices 0, 1 are dims 0-7, 8-15 of tokens 0-7, and 2, 3 those of tokens 8-15: (r0, r1) and (r2, r3) are the B
  // fragments of the two token octets, in neighbouring registers as the tensor cores want them.
  scorer.keys = keep_in_register(smem + Smem::RING + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16 +
                                 scorer.warp % 2 * (ROW_BYTES / 2));
  scorer.softmax = {{neg_inf(), neg_inf()}, {0.0f, 0.0f}};
  init_barriers(smem);
  publish_columns(p, r, rows, smem);
  block_sync();  // orders the barriers' initialisation, the mask columns and the copies of q before their uses
  load_q(p, smem, scorer);
  block_sync();  // orders the reads of q before the KV copies that overwrite it

  Turn stage = {0, 0}, turn = {0, 0};
  u32 exchange = 0;
#pragma unroll 1
  for (i32 token = make_uniform(range.begin * TILE); token < source.end; token += TILE) {
    float s[2][2][4] = {};
    mbarrier_wait(smem + Smem::RING + stage.offset + Smem::FULL, stage.parity);  // orders the copies before the reads
    multiply_q_k(s, scorer, scorer.keys + stage.offset);
    exchange_scores(s, scorer, exchange);
    soft_cap(p, s[0]);
    if (token >= source.masked_from) mask_tile(p, s[0], token);
    hand_over(s[0], scorer, smem, turn);
    stage = next_stage(stage), turn = next_handover(turn), exchange ^= EXCHANGE_BUFFER;
  }
  finish_scores(p, scorer, smem);
  block_sync();  // orders the reciprocal sums before the value warps' reads
}

// --- value warps ----------------------------------------------------------------------------------------------------

struct Output {
  float o[ROW_TILES][O_TILES][4];
};

DEVICE void rescale_rows(float (&o)[O_TILES][4], u32 factors) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float factor = ld_shared_f32(factors + (lane_idx() / 4 + 8 * h) * 4);
#pragma unroll
    for (int i = 0; i < O_TILES; i++) o[i][2 * h] *= factor, o[i][2 * h + 1] *= factor;
  }
}

// The weights of a tile, and the output brought to their bases.
DEVICE void take_over(u32 (&weights)[ROW_TILES][4], Output& output, u32 smem, u32 lane, Turn turn) {
  const u32 buffer = smem + Smem::HANDOVER + turn.offset;
  mbarrier_wait(buffer + Smem::READY, turn.parity);  // orders the score warps' writes before the reads
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++) {
    const u32x4 x = ld_shared_u32x4(buffer + Smem::WEIGHTS + m * FRAGMENT_BYTES + lane * 16);
    weights[m][0] = x.x, weights[m][1] = x.y, weights[m][2] = x.z, weights[m][3] = x.w;
  }
  const u32x4 raised = ld_shared_u32x4(buffer + Smem::RAISED);
  if (warp_any(raised.x | raised.y | raised.z | raised.w)) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
      if (m == 0 ? raised.x : m == 1 ? raised.y : m == 2 ? raised.z : raised.w)
        rescale_rows(output.o[m], buffer + Smem::FACTORS + m * 64);
  }
  warp_sync();  // orders the lanes' reads before the arrival
  if (lane == 0) mbarrier_arrive(buffer + Smem::TAKEN);
}

DEVICE void multiply_p_v(Output& output, const u32 (&weights)[ROW_TILES][4], u32 values) {
  u32 v[2][4];
  ldmatrix_x4_trans(v[0], values);
#pragma unroll
  for (int i = 0; i < V_STEPS; i++) {
    if (i + 1 < V_STEPS) ldmatrix_x4_trans(v[(i + 1) % 2], values + (i + 1) * 32);
    const u32(&b)[4] = v[i % 2];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
      mma_16x8x16(output.o[m][2 * i], weights[m], b[0], b[1]);
      mma_16x8x16(output.o[m][2 * i + 1], weights[m], b[2], b[3]);
    }
  }
}

DEVICE void finish_values(const VerifyParams& p, const Output& output, u32 smem) {
  const Request r = load_request(p, block_idx_z());
  const RowTile rows = row_tile(p, r, block_idx_x() * ROWS, ROWS);
  const int lane = thread_idx_anew() % WARP, column = (thread_idx_anew() / WARP - SCORE_WARPS) * (DL / VALUE_WARPS);
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = m * 16 + lane / 4 + 8 * h;
      const bool exists = rows.first + row < rows.end;
      const float factor = ld_shared_f32(smem + Smem::RECIPROCALS + row * 4);
      if (OUT_DTYPE == PARTIAL_DTYPE || p.num_splits == 1)
        store_half<OUT_DTYPE>(result_row<OUT_DTYPE>(p, r, rows.first + row) + column * element_bytes<OUT_DTYPE>(),
                              exists, lane % 4, output.o[m], h, factor);
      else
        store_half<PARTIAL_DTYPE>(
            result_row<PARTIAL_DTYPE>(p, r, rows.first + row) + column * element_bytes<PARTIAL_DTYPE>(), exists,
            lane % 4, output.o[m], h, factor);
    }
}

DEVICE void value_tiles(const VerifyParams& p, const Request& r, const RowTile& rows, const TileRange& range,
                        u32 smem) {
  constexpr int AHEAD = STAGES;
  const Source source = make_source(p, r, rows, range);
  const u32 lane = keep_in_register(lane_idx());
  // Transposed: (r0, r1) is columns 0-7, (r2, r3) columns 8-15 of the 16 tokens.
  const u32 values = keep_in_register(smem + Smem::RING + lane % 16 * PITCH + lane / 16 * 16 +
                                      (warp_idx() - SCORE_WARPS) * (LATENT_BYTES / VALUE_WARPS));
  i32 token = make_uniform(range.begin * TILE);
  Slot slots[COPY_ROWS] = {};  // of the next tile to copy
  {
    Slot first[AHEAD][COPY_ROWS] = {};
    copy_q(p, rows, smem);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) find_slots(first[i], p, source, token + i * TILE);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) prefetch_tile(p, source, token + i * TILE, first[i]);
    cp_async_wait_all();
    block_sync();  // orders the barriers' initialisation, the mask columns and the copies of q before their uses
    block_sync();  // orders the reads of q before the KV copies that overwrite it
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (token + i * TILE < source.end) copy_tile(p, source, smem, i * STAGE_BYTES, token + i * TILE, first[i]);
    find_slots(slots, p, source, token + AHEAD * TILE);
  }
  Output output;
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
    for (int i = 0; i < O_TILES; i++)
      output.o[m][i][0] = output.o[m][i][1] = output.o[m][i][2] = output.o[m][i][3] = 0.0f;

  Turn stage = {0, 0}, turn = {0, 0};
#pragma unroll 1
  while (true) {
    u32 weights[ROW_TILES][4];
    take_over(weights, output, smem, lane, turn);
    multiply_p_v(output, weights, values + stage.offset);
    warp_sync();  // orders the lanes' reads of the tile before the arrival, on which the refill waits
    const u32 empty = smem + Smem::RING + stage.offset + Smem::EMPTY;
    if (lane == 0) mbarrier_arrive(empty);
    // The stage takes the tile that is STAGES ahead. What is copied is also waited for, so no copy is in flight when
    // the block ends.
    const i32 tile_token = token + STAGES * TILE;
    if (tile_token < source.end) {
      mbarrier_wait(empty, stage.parity);  // orders every value warp's reads of the tile before the copies over it
      copy_tile(p, source, smem, stage.offset, tile_token, slots);
      find_slots(slots, p, source, tile_token + TILE);
    }
    token += TILE;
    if (token >= source.end) break;
    stage = next_stage(stage), turn = next_handover(turn);
  }
  block_sync();  // orders the reciprocal sums before the reads
  finish_values(p, output, smem);
}

KERNEL(mlaflash_mma_roles, THREADS, 1) {
  const Request r = load_request(p, block_idx_z());
  store_padding<THREADS>(p, r);
  const RowTile rows = row_tile(p, r, block_idx_x() * ROWS, ROWS);
  if (rows.end <= rows.first) return;
  const TileRange range = split_tiles(p, r, rows, block_idx_y());
  if (range.begin == range.end) return store_empty<THREADS>(p, r, rows.first, rows.end);

  if (make_uniform(warp_idx()) < SCORE_WARPS)
    score_tiles(p, r, rows, range, shared_base());
  else
    value_tiles(p, r, rows, range, shared_base());
  launch_dependents();
}
