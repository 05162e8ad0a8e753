// What the tensor-core kernels share: the masks of a tile, the online softmax on fragments, and the stores of the
// results.
//
// Fragments: of a 16 x 8 accumulator, lane l holds columns 2 (l % 4) and + 1 of row l / 4 in [0] and [1], and the same
// columns of row l / 4 + 8 in [2] and [3]. "Half" h of a lane is its row l / 4 + 8 h. The scores of 16 rows x 16 tokens
// are two such tiles.
#pragma once
#include "work.cuh"

static_assert(Q_DTYPE != FLOAT32 && (KV_DTYPE == Q_DTYPE || FP8), "tensor cores take 16 bits, q and KV alike");

// What the tensor cores multiply: e4m3 numbers become float16, exactly.
constexpr int MMA_DTYPE = FP8 ? FLOAT16 : Q_DTYPE;

DEVICE int lane_idx() { return thread_idx() % WARP; }
DEVICE int warp_idx() { return thread_idx() / WARP; }

DEVICE void mma_16x8x16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (MMA_DTYPE == BFLOAT16)
    mma_m16n8k16_bf16(c, a, b0, b1);
  else
    mma_m16n8k16_f16(c, a, b0, b1);
}

// --- masks ---------------------------------------------------------------------------------------------------------

// Every row of the block sees all tokens of the tiles before this one.
DEVICE int first_masked_tile(const VerifyParams& p, const Request& r, const RowTile& rows) {
  const int end = p.mask_mode == MASK_TREE ? r.kv_len - r.tail_len : visible_end(p, r, rows.q_first);
  return max_int(end, 0) / TILE;
}

// Word `index` of the mask row of query token q: ones to its left (all before the tail is visible), zeros to its right.
DEVICE u32 tree_word(const VerifyParams& p, int q, int index) {
  if (index < 0) return ~0u;
  return index < p.mask_words_per_row ? ld_global_u32(p.mask_words + (i64)q * p.mask_words_per_row + index) : 0u;
}

// Bit i: query token q (absolute), which sees nothing from token `end` on, sees KV token first + i, i < TILE. The mask
// columns begin at `tail_begin`.
DEVICE u32 visible_bits(const VerifyParams& p, int end, int tail_begin, int q, int first) {
  u32 bits = (1u << min_int(max_int(end - first, 0), TILE)) - 1;
  if (p.mask_mode == MASK_TREE) {
    const int column = first - tail_begin;
    const u64 words = (u64)tree_word(p, q, (column >> 5) + 1) << 32 | tree_word(p, q, column >> 5);
    bits &= (u32)(words >> (column & 31));
  }
  return bits;
}
DEVICE u32 visible_bits(const VerifyParams& p, const Request& r, int q, int first) {
  return visible_bits(p, visible_end(p, r, q), r.kv_len - r.tail_len, q, first);
}

// Scores of invisible tokens become -inf; bits[h] are the visible_bits of the lane's half h.
DEVICE void mask_scores(float (&s)[2][4], const u32 (&bits)[2], int lane = lane_idx()) {
  const int column = lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (!(bits[e / 2] >> (n * 8 + column + e % 2) & 1)) s[n][e] = neg_inf();
}

// SPARSE_IDS. Bits i and i + 16: token i of a tile has a slot. Lanes l and l + 16 bring the token l and its id.
DEVICE u32 listed_bits(u32 id, int token, int end) { return warp_ballot(token < end && (i32)id >= 0); }

// --- scale ---------------------------------------------------------------------------------------------------------

// The softmax takes its maxima over raw scores and scales within the exponent, which is right for positive scales. So
// the sign of the scale goes into q, exactly, and a scale of 0 becomes q = 0 and scale 1: masked scores then stay -inf.
DEVICE u32 fold_scale_sign(const VerifyParams& p, u32 q_pair) {
  if (p.sm_scale == 0.0f) return 0;
  return p.sm_scale < 0.0f ? q_pair ^ 0x80008000u : q_pair;
}
DEVICE float scale_magnitude(const VerifyParams& p) {
  return p.sm_scale == 0.0f ? 1.0f : max_f32(p.sm_scale, -p.sm_scale);
}

// s -> tanh(scale * s / cap); exponent_scale() holds the factor cap.
DEVICE void soft_cap(const VerifyParams& p, float (&s)[2][4]) {
  if constexpr (!SOFT_CAP) return;
  const float inner = scale_magnitude(p) / p.logit_cap;
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][e] = tanh_f32(s[n][e] * inner);
}
// Positive factor from scores (soft-capped ones, if so) to base-2 exponents.
DEVICE float exponent_scale(const VerifyParams& p) { return (SOFT_CAP ? p.logit_cap : scale_magnitude(p)) * LOG2_E; }

// --- softmax -------------------------------------------------------------------------------------------------------

// Of the lane's two rows. Four lanes share a row and hold equal bases.
struct Softmax {
  float base[2];  // weights are 2^(score - base); -inf: the row has seen nothing
  float sum[2];   // of the weights of the lane's own columns
};

// A weight may grow to 2^RESCALE_ABOVE before the row's base follows its maximum: it fits float16, and nearly every
// tile is spared the shuffles and the rescaling of the accumulators.
constexpr float RESCALE_ABOVE = 8.0f;

DEVICE float max_over_row(float v) {
  v = max_f32(v, shfl_xor_f32(v, 1));
  return max_f32(v, shfl_xor_f32(v, 2));
}
DEVICE float sum_over_row(float v) {
  v += shfl_xor_f32(v, 1);
  return v + shfl_xor_f32(v, 2);
}
// What to subtract: a row that has seen nothing has scores of -inf, whose weights must be 0 and not 2^NaN.
DEVICE float finite_base(float base) { return base == neg_inf() ? 0.0f : base; }

// DETERMINISTIC: the base of a row whose maximum is `maximum` now. 16 rows share a warp, and the bits of a weight
// depend on its base (the argument of ex2 is rounded, and of float16 weights the subnormal ones are), so it moves only
// where the row itself asks for it. It moves to an integer, so that the factor below is a power of two and rounds
// nothing.
//
// By induction over the tiles of a chunk, base, sum and o of a row are then functions of its own scores and values: a
// token that it does not see asks for no move and has weight 0, and 0 * v is added to a sum exactly. (v is finite, or
// no row of the tile sees it and 0 is there instead. Tensor cores cut the terms of a sum at a place that the largest
// one decides, and a product of 0 does not count, whatever the exponent of v: arXiv:2511.10909.)
DEVICE float own_base(float base, float maximum) { return maximum > base + RESCALE_ABOVE ? ceil_f32(maximum) : base; }

// Moves both bases up to the maxima and scales what was accumulated by 2^(old base - new base).
template <int N>
DEVICE void rescale(Softmax& softmax, float (&o)[N][4], const float (&maxima)[2]) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float maximum = max_over_row(maxima[h]);
    const float base = DETERMINISTIC ? own_base(softmax.base[h], maximum) : max_f32(softmax.base[h], maximum);
    const float change = softmax.base[h] - finite_base(base);
    const float factor = DETERMINISTIC ? exact_ex2(change) : ex2(change);
    softmax.base[h] = base;
    softmax.sum[h] *= factor;
#pragma unroll
    for (int i = 0; i < N; i++) o[i][2 * h] *= factor, o[i][2 * h + 1] *= factor;
  }
}

// Turns the scores of a tile into weights 2^(scale * s - base), packed as the A operand (16 rows x 16 tokens) of the
// product with V. Online softmax: Milakov and Gimelshein, arXiv:1805.02867.
template <int N>
DEVICE void softmax_tile(const float (&s)[2][4], float scale, Softmax& softmax, float (&o)[N][4], u32 (&weights)[4]) {
  float maxima[2];
#pragma unroll
  for (int h = 0; h < 2; h++)
    maxima[h] = scale * max_f32(max_f32(s[0][2 * h], s[0][2 * h + 1]), max_f32(s[1][2 * h], s[1][2 * h + 1]));
  if (warp_any(maxima[0] > softmax.base[0] + RESCALE_ABOVE || maxima[1] > softmax.base[1] + RESCALE_ABOVE))
    rescale(softmax, o, maxima);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float base = finite_base(softmax.base[h]);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float a = ex2(fma_f32(s[n][2 * h], scale, -base)), b = ex2(fma_f32(s[n][2 * h + 1], scale, -base));
      softmax.sum[h] += a + b;
      weights[2 * n + h] = pack_elements<MMA_DTYPE>(a, b);
    }
  }
}

// --- results -------------------------------------------------------------------------------------------------------

// 16 columns of one row, from two neighbouring accumulator tiles: `ptr` is the first column, (a0, a1) the lane's pair
// of the first tile, (b0, b1) of the second. IN_TURN: the first tile holds the even columns, the second the odd ones.
// The four lanes of a row write ascending addresses that fill whole 32-byte
// sectors: other orders were several times slower. All lanes of the warp take part; only those with `exists` store.
template <int DTYPE, bool IN_TURN>
DEVICE void store_16_columns(u8* ptr, bool exists, int quad_lane, float a0, float a1, float b0, float b1) {
  if constexpr (IN_TURN) {
    if (exists) store_quad<DTYPE>(ptr + quad_lane * 4 * element_bytes<DTYPE>(), {a0, b0, a1, b1});
  } else if constexpr (DTYPE == FLOAT32) {
    if (!exists) return;
    st_global_f32x2(ptr + quad_lane * 8, {a0, a1});
    st_global_f32x2(ptr + 32 + quad_lane * 8, {b0, b1});
  } else {
    // Lanes 0 .. 3 hold pairs 0 .. 3 of the first tile and 4 .. 7 of the second; lane k ends up with 2 k and 2 k + 1.
    const u32 first = pack_elements<DTYPE>(a0, a1), second = pack_elements<DTYPE>(b0, b1);
    const bool high = quad_lane & 2, odd = quad_lane & 1;
    const u32 far = shfl_xor_u32(high ? first : second, 2);
    const u32 even_pair = high ? far : first, odd_pair = high ? second : far;
    const u32 near = shfl_xor_u32(odd ? even_pair : odd_pair, 1);
    if (exists) st_global_u32x2(ptr + quad_lane * 8, {odd ? near : even_pair, odd ? odd_pair : near});
  }
}

// Half `half` of the accumulators times `factor`, to 8 N columns from `ptr` on.
template <int DTYPE, bool IN_TURN = false, int N>
DEVICE void store_half(u8* ptr, bool exists, int quad_lane, const float (&o)[N][4], int half, float factor) {
#pragma unroll
  for (int i = 0; i < N; i += 2)
    store_16_columns<DTYPE, IN_TURN>(ptr + i * 8 * element_bytes<DTYPE>(), exists, quad_lane, o[i][2 * half] * factor,
                                     o[i][2 * half + 1] * factor, o[i + 1][2 * half] * factor,
                                     o[i + 1][2 * half + 1] * factor);
}

// The block's results are not final: other blocks have other tokens of these rows. `part` is that of a WorkItem.
DEVICE bool is_partial(const VerifyParams& p, int part) { return PLANNED ? part >= 0 : p.num_splits > 1; }

// Row of the partial results where packed row `row` goes: that of its split; PLANNED of its part, DETERMINISTIC of its
// chunk, which is `part` then.
DEVICE i64 partial_row(const VerifyParams& p, const Request& r, int row, int part) {
  if constexpr (PLANNED) return part_row(part, row);
  const int split = DETERMINISTIC ? part : block_idx_y();
  return (split * (i64)p.num_tokens + r.q_begin) * p.num_heads + row;
}

// Where packed row `row` goes: into out, or into the partial results.
template <int DTYPE>
DEVICE u8* result_row(const VerifyParams& p, const Request& r, int row, int part) {
  if (is_partial(p, part)) return element_ptr<DTYPE>(p.partial_out, partial_row(p, r, row, part) * DL);
  return element_ptr<DTYPE>(p.out,
                            (r.q_begin + row / p.num_heads) * p.out_stride_t + row % p.num_heads * p.out_stride_h);
}

// The same of the log-sum-exp: those of a row lie side by side, for combine, but PLANNED they lie as the rows do. The
// index fits 32 bits, or the rows would take two terabytes.
DEVICE float* partial_lse(const VerifyParams& p, const Request& r, int row, int part) {
  if constexpr (PLANNED) return p.partial_lse + part_row(part, row);
  const int split = DETERMINISTIC ? part : block_idx_y();
  return p.partial_lse + ((r.q_begin * p.num_heads + row) * p.num_splits + split);
}

// `lse` is base 2.
DEVICE void store_lse(const VerifyParams& p, const Request& r, int row, int part, float lse) {
  if (is_partial(p, part))
    st_global_f32(partial_lse(p, r, row, part), lse);
  else
    st_global_f32(p.lse + (r.q_begin + row / p.num_heads) * p.lse_stride_t + row % p.num_heads * p.lse_stride_h,
                  lse_out(p, lse));
}

// A warp's 16 rows from `first` on (those below `end`), 8 N columns from `column` on; that of column 0 writes the lse.
template <bool IN_TURN = false, int N>
DEVICE void store_results(const VerifyParams& p, const Request& r, int part, int first, int end, int column,
                          const Softmax& softmax, const float (&o)[N][4]) {
  const int lane = lane_idx(), quad_lane = lane % 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = first + lane / 4 + 8 * h;
    const float sum = sum_over_row(softmax.sum[h]);
    // Not asked of the maximum: where scores are NaN it stays -inf, and would hide them.
    const bool exists = row < end, empty = sum == 0.0f;
    const float factor = empty ? 0.0f : 1.0f / sum;
    if (OUT_DTYPE == PARTIAL_DTYPE || !is_partial(p, part))
      store_half<OUT_DTYPE, IN_TURN>(result_row<OUT_DTYPE>(p, r, row, part) + column * element_bytes<OUT_DTYPE>(),
                                     exists, quad_lane, o, h, factor);
    else
      store_half<PARTIAL_DTYPE, IN_TURN>(
          result_row<PARTIAL_DTYPE>(p, r, row, part) + column * element_bytes<PARTIAL_DTYPE>(), exists, quad_lane, o, h,
          factor);
    if (exists && column == 0 && quad_lane == 0)
      store_lse(p, r, row, part, empty ? neg_inf() : softmax.base[h] + lg2(sum));
  }
}

template <int DTYPE>
DEVICE void store_zeros(const VerifyParams& p, const Request& r, int row, int part, int quad) {
  u8* ptr = result_row<DTYPE>(p, r, row, part) + quad * 4 * element_bytes<DTYPE>();
  if constexpr (DTYPE == FLOAT32)
    st_global_f32x4(ptr, {0.0f, 0.0f, 0.0f, 0.0f});
  else
    st_global_u32x2(ptr, {0, 0});
}

// Rows [first, end) of a split in which they see nothing: zeros and an lse of -inf. Of several splits the zeros weigh
// nothing, but combine loads them before it knows the weights, and memory that nobody wrote is no thing to load.
template <int THREADS>
DEVICE void store_empty(const VerifyParams& p, const Request& r, int part, int first, int end,
                        int thread = thread_idx()) {
  constexpr int QUADS = DL / 4;
  for (int row = first + thread; row < end; row += THREADS) store_lse(p, r, row, part, neg_inf());
  for (int i = thread; i < (end - first) * QUADS; i += THREADS) {
    if (OUT_DTYPE == PARTIAL_DTYPE || !is_partial(p, part))
      store_zeros<OUT_DTYPE>(p, r, first + i / QUADS, part, i % QUADS);
    else
      store_zeros<PARTIAL_DTYPE>(p, r, first + i / QUADS, part, i % QUADS);
  }
}

// DETERMINISTIC: rows [first, end) see nothing in chunks `chunk` and later, which the grid's blocks share. An lse of
// -inf says so, and combine loads nothing else of such a chunk.
template <int THREADS>
DEVICE void store_absent(const VerifyParams& p, const Request& r, int first, int end, int chunk) {
  for (int c = chunk + block_idx_y(); c < p.num_splits; c += grid_dim_y())
    for (int row = first + thread_idx(); row < end; row += THREADS) store_lse(p, r, row, c, neg_inf());
}

// Query tokens behind the last request belong to nobody and come out empty. The last request's blocks share them;
// PLANNED kernels/combine_planned.cu does that.
template <int THREADS>
DEVICE void store_padding(const VerifyParams& p, Request r) {
  if (r.index != p.batch - 1) return;
  r.q_begin += r.q_len;
  const int rows = (p.num_tokens - r.q_begin) * p.num_heads;
  if (rows == 0) return;  // as nearly always, at no more cost
  const int share = (rows + grid_dim_x() - 1) / grid_dim_x();
  const int first = min_int(block_idx_x() * share, rows);
  const int end = min_int(first + share, rows);
  if constexpr (DETERMINISTIC)
    store_absent<THREADS>(p, r, first, end, 0);
  else
    store_empty<THREADS>(p, r, 0, first, end);
}

// An item whose rows see nothing at all.
template <int THREADS>
DEVICE void store_empty_item(const VerifyParams& p, const WorkItem& w, int thread = thread_idx()) {
  const Request r = request_of(w);
  const int first = w.row_tile * PLANNED_ROWS;
  store_empty<THREADS>(p, r, -1, first, min_int(first + PLANNED_ROWS, r.q_len * p.num_heads), thread);
}
