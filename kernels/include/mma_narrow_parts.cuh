// What the tensor-core kernels share: the rows and the KV range of a block, the masks of a 16-token tile, the softmax on
// fragments, and the stores of output rows.
//
// Fragments of a 16 x 8 accumulator tile: lane l holds columns 2 * (l % 4) and + 1 of row l / 4 in [0] and [1], and the same
// columns of row l / 4 + 8 in [2] and [3]. The scores of 16 rows x 16 tokens are two such tiles.
#pragma once
#include "addressing.cuh"

constexpr int TILE = 16;  // tokens of a KV tile; rows of an MMA tile
constexpr float NEG_INF = -__builtin_huge_valf();

template <int DTYPE>
DEVICE void mma_16x8x16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  static_assert(DTYPE == BFLOAT16 || DTYPE == FLOAT16, "tensor cores take 16-bit elements");
  if constexpr (DTYPE == BFLOAT16) mma_m16n8k16_bf16(c, a, b0, b1);
  else mma_m16n8k16_f16(c, a, b0, b1);
}

// --- rows and tokens of a block ------------------------------------------------------------------------------------

// Row r of a request is head r % H of its query token r / H.
struct RowTile {
  int first, end;        // rows [first, end) of the request
  int q_first, q_last;   // query tokens (absolute) of the first and of the last row
};

DEVICE RowTile row_tile(const VerifyParams& p, const Request& r, int first, int rows) {
  const int all = r.q_len * p.num_heads;
  RowTile t;
  t.first = first;
  t.end = first + rows < all ? first + rows : all;
  t.q_first = r.q_begin + first / p.num_heads;
  t.q_last = r.q_begin + (t.end - 1) / p.num_heads;
  return t;
}

struct Tiles {
  int begin, end;
};

// Split `split` of the tiles in which some row of the block sees a token: equal runs, the last ones may be empty.
DEVICE Tiles split_tiles(const VerifyParams& p, const Request& r, const RowTile& rows, int split) {
  const int all = (visible_end(p, r, rows.q_last) + TILE - 1) / TILE;
  const int per_split = (all + p.num_splits - 1) / p.num_splits;
  const int begin = split * per_split < all ? split * per_split : all;
  return {begin, begin + per_split < all ? begin + per_split : all};
}

// --- masks ---------------------------------------------------------------------------------------------------------

// Every row of the block sees all tokens of the tiles before this one.
DEVICE int first_masked_tile(const VerifyParams& p, const Request& r, const RowTile& rows) {
  const int end = p.mask_mode == MASK_TREE ? r.kv_len - r.tail_len : visible_end(p, r, rows.q_first);
  return end > 0 ? end / TILE : 0;
}

// Word `index` of the mask row of query token q, continued by ones to the left (before the tail) and by zeros to the right.
DEVICE u32 tree_word(const VerifyParams& p, int q, int index) {
  if (index < 0) return ~0u;
  return index < p.mask_words_per_row ? ld_global_u32(p.mask_words + (i64)q * p.mask_words_per_row + index) : 0u;
}

// Bit i: query token q sees KV token first + i, i < TILE.
DEVICE u32 visible_bits(const VerifyParams& p, const Request& r, int q, int first) {
  const int count = visible_end(p, r, q) - first;
  u32 bits = count >= TILE ? (1u << TILE) - 1 : count > 0 ? (1u << count) - 1 : 0u;
  if (p.mask_mode == MASK_TREE) {
    const int column = first - (r.kv_len - r.tail_len);
    const u64 words = (u64)tree_word(p, q, (column >> 5) + 1) << 32 | tree_word(p, q, column >> 5);
    bits &= (u32)(words >> (column & 31));
  }
  return bits;
}

// Whether some row of the block sees the token. A token that none sees must not be read: its bits may be NaN.
DEVICE bool any_row_sees(const VerifyParams& p, const Request& r, const RowTile& rows, int token) {
  if (token >= visible_end(p, r, rows.q_last)) return false;
  bool seen = is_visible(p, r, rows.q_first, token);
  for (int q = rows.q_first + 1; q <= rows.q_last && !seen; q++) seen = is_visible(p, r, q, token);
  return seen;
}

// Scores of invisible tokens become -inf. `upper` and `lower` are the visible_bits of the lane's rows l / 4 and l / 4 + 8.
DEVICE void mask_scores(float (&s)[2][4], u32 upper, u32 lower, int lane) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const u32 bits = e < 2 ? upper : lower;
      if (!(bits >> (n * 8 + (lane % 4) * 2 + e % 2) & 1)) s[n][e] = NEG_INF;
    }
}

// --- softmax -------------------------------------------------------------------------------------------------------

// Scaled, soft-capped scores in base 2. The mask comes after: a scale of 0 or below must not touch -inf.
template <bool SOFT_CAPPED>
DEVICE void scale_scores(const VerifyParams& p, float (&s)[2][4]) {
  const float inner = SOFT_CAPPED ? p.sm_scale / p.logit_cap : p.sm_scale * LOG2_E;
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      s[n][e] *= inner;
      if constexpr (SOFT_CAPPED) s[n][e] = p.logit_cap * LOG2_E * tanh_f32(s[n][e]);
    }
}

// Of the lane's rows l / 4 and l / 4 + 8. Four lanes share a row and hold equal bases.
struct Softmax {
  float base[2];  // weights are 2^(score - base); -inf: the row has seen nothing
  float sum[2];   // of the weights of the lane's own columns
};

// A weight may grow to 2^RESCALE_ABOVE before the row's base follows its maximum: it fits float16, and the accumulators are
// rescaled a few times instead of once a tile. (Online softmax: Milakov and Gimelshein, arXiv:1805.02867.)
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
DEVICE float finite_base(float base) { return base == NEG_INF ? 0.0f : base; }

// Moves both bases up to the maxima and scales what was accumulated by 2^(old base - new base).
template <int N>
DEVICE void rescale(Softmax& softmax, float (&o)[N][4], float max_upper, float max_lower) {
  const float maxima[2] = {max_over_row(max_upper), max_over_row(max_lower)};
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float base = max_f32(softmax.base[h], maxima[h]);
    factor[h] = ex2(softmax.base[h] - finite_base(base));
    softmax.base[h] = base;
    softmax.sum[h] *= factor[h];
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    o[i][0] *= factor[0];
    o[i][1] *= factor[0];
    o[i][2] *= factor[1];
    o[i][3] *= factor[1];
  }
}

// Turns the scores of a tile into weights, packed as the A operand (16 rows x 16 tokens) of the product with V.
template <int DTYPE, int N>
DEVICE void softmax_tile(const float (&s)[2][4], Softmax& softmax, float (&o)[N][4], u32 (&weights)[4]) {
  const float max_upper = max_f32(max_f32(s[0][0], s[0][1]), max_f32(s[1][0], s[1][1]));
  const float max_lower = max_f32(max_f32(s[0][2], s[0][3]), max_f32(s[1][2], s[1][3]));
  if (warp_any(max_upper > softmax.base[0] + RESCALE_ABOVE || max_lower > softmax.base[1] + RESCALE_ABOVE))
    rescale(softmax, o, max_upper, max_lower);
  const float base[2] = {finite_base(softmax.base[0]), finite_base(softmax.base[1])};
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float a = ex2(s[n][2 * h] - base[h]), b = ex2(s[n][2 * h + 1] - base[h]);
      softmax.sum[h] += a + b;
      weights[2 * n + h] = pack_elements<DTYPE>(a, b);
    }
}

// --- output --------------------------------------------------------------------------------------------------------

// 16 columns of one row, from two neighbouring accumulator tiles: `ptr` is the first column, (a0, a1) the lane's pair of the
// first tile, (b0, b1) of the second. The four lanes of a row write ascending addresses that fill whole 32-byte sectors:
// other orders were several times slower. All lanes of the warp take part; only those with `exists` store.
template <int DTYPE>
DEVICE void store_16_columns(u8* ptr, bool exists, int lane, float a0, float a1, float b0, float b1) {
  const int quad_lane = lane % 4;
  if constexpr (DTYPE == FLOAT32) {
    if (!exists) return;
    st_global_f32x2(ptr + quad_lane * 8, {a0, a1});
    st_global_f32x2(ptr + 32 + quad_lane * 8, {b0, b1});
  } else {
    // Pairs 0-3 of the first tile and 4-7 of the second; lane k ends up with pairs 2k and 2k + 1.
    const u32 first = pack_elements<DTYPE>(a0, a1), second = pack_elements<DTYPE>(b0, b1);
    const bool high = quad_lane & 2, odd = quad_lane & 1;
    const u32 far = shfl_xor_u32(high ? first : second, 2);
    const u32 even_pair = high ? far : first, odd_pair = high ? second : far;
    const u32 near = shfl_xor_u32(odd ? even_pair : odd_pair, 1);
    if (exists) st_global_u32x2(ptr + quad_lane * 8, {odd ? near : even_pair, odd ? odd_pair : near});
  }
}
