// What the tensor-core kernels need besides for caches in 8 bits. Numbers in e4m3 become float16, which is exact; q
// becomes float16 after each row was multiplied by a power of two, which is exact as well, save for what is 2^-29 of
// the row's largest element or less. Weights are float16 as always.
#pragma once
#include "mma.cuh"

// In memory, bytes from the beginning of a cache row on: of the rope columns, and of the scales with TOKEN_SCALES.
constexpr int ROPE_OFFSET = TOKEN_SCALES ? DL + 4 * (int)sizeof(float) : DL;
constexpr int SCALE_OFFSET = DL;
constexpr int SCALED_COLUMNS = 128;  // that share a scale

// Weights lie below 2^(WEIGHT_LIFT + RESCALE_ABOVE) instead of 2^RESCALE_ABOVE: as many small ones more stay exact.
constexpr float WEIGHT_LIFT = 7.0f;

DEVICE float cache_scale(const VerifyParams& p) {
  if constexpr (TOKEN_SCALES) return 1.0f;
  return p.kv_scale ? ld_global_f32(p.kv_scale) : p.kv_scale_value;
}

// --- scale ---------------------------------------------------------------------------------------------------------

// Scores are multiplied once, row by row, by all that is due: by this, the scale of the cache and what scaled q.
DEVICE float score_factor(const VerifyParams& p) {
  if constexpr (!SOFT_CAP) return scale_magnitude(p) * LOG2_E;
  // Divided for each item of a list anew: else the quotient stays in a register from the first one on.
  const float cap = PLANNED ? as_f32(keep_in_register(as_u32(p.logit_cap))) : p.logit_cap;
  return scale_magnitude(p) * (1.0f / cap);
}
// s -> tanh(s); capped_scale() holds the factor cap.
DEVICE void cap_scores(float (&s)[2][4]) {
  if constexpr (!SOFT_CAP) return;
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][e] = tanh_f32(s[n][e]);
}
// From such scores to base-2 exponents.
DEVICE float capped_scale(const VerifyParams& p) { return SOFT_CAP ? p.logit_cap * LOG2_E : 1.0f; }

// --- powers of two -------------------------------------------------------------------------------------------------

struct PowerOfTwo {
  float value, reciprocal;
};

// Brings `largest` (not negative) into [2^14, 2^15), where float16 has its last binade but one. Below 2^-113 that takes
// a greater factor than there is, and the reciprocal is 0.
DEVICE PowerOfTwo to_f16_range(float largest) {
  const u32 exponent = as_u32(largest) >> 23, factor = exponent > 14 ? 268 - exponent : 254;
  return {as_f32(factor << 23), as_f32((254 - factor) << 23)};
}

// The greatest power of two up to x, which is positive and not subnormal.
DEVICE float floor_power(float x) { return as_f32(as_u32(x) & 0x7f800000u); }

template <int DTYPE>
DEVICE f32x2 unpack_pair(u32 pair) {
  return {element_to_f32<DTYPE>((u16)pair), element_to_f32<DTYPE>((u16)(pair >> 16))};
}
DEVICE float max_magnitude(float a, f32x2 pair) {
  return max_f32(a, max_f32(max_f32(pair.x, -pair.x), max_f32(pair.y, -pair.y)));
}

// --- operands ------------------------------------------------------------------------------------------------------

// Of K, 16 dims of 8 tokens in one register, as ldmatrix or a plain load leaves them: a lane has dims 4 i .. 4 i + 3 of
// a token, i = lane % 4, in place of the 2 i, 2 i + 1, 2 i + 8, 2 i + 9 that are due. It does not matter as long as q
// has them in the same order.
struct Operand {
  u32 b0, b1;
};
DEVICE Operand key_operand(u32 codes) {
  const u32x2 r = e4m3x4_to_f16(codes);
  return {r.x, r.y};
}

// Of V, 16 columns of 16 tokens in two registers, as a transposing ldmatrix of byte pairs leaves them: tokens 0-7 and
// 8-15, bytes in turn of even and odd columns. An accumulator tile takes the even columns, its neighbour the odd ones.
DEVICE Operand even_columns(u32 codes_0, u32 codes_8) {
  const u32x2 r = e4m3x4_to_f16(permute_bytes<0x6420>(codes_0, codes_8));
  return {r.x, r.y};
}
DEVICE Operand odd_columns(u32 codes_0, u32 codes_8) {
  const u32x2 r = e4m3x4_to_f16(permute_bytes<0x7531>(codes_0, codes_8));
  return {r.x, r.y};
}

// --- softmax -------------------------------------------------------------------------------------------------------

// TOKEN_SCALES: what accumulates is 2^gain * weight * scale of the token * V, for each of the lane's rows, so that the
// factor before V fits float16 whatever the scales are.
struct Gain {
  float of[2];
};

// The scores of N tiles to weights, in float32.
template <int N, int M>
DEVICE void weigh(float (&s)[N][2][4], float scale, Softmax& softmax, float (&o)[M][4]) {
  float maxima[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float most = s[0][0][2 * h];
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int n = 0; n < 2; n++) most = max_f32(most, max_f32(s[i][n][2 * h], s[i][n][2 * h + 1]));
    maxima[h] = fma_f32(scale, most, -WEIGHT_LIFT);
  }
  if (warp_any(maxima[0] > softmax.base[0] + RESCALE_ABOVE || maxima[1] > softmax.base[1] + RESCALE_ABOVE))
    rescale(softmax, o, maxima);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float base = finite_base(softmax.base[h]);
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float (&pair)[4] = s[i][n];
        pair[2 * h] = ex2(fma_f32(pair[2 * h], scale, -base));
        pair[2 * h + 1] = ex2(fma_f32(pair[2 * h + 1], scale, -base));
        softmax.sum[h] += pair[2 * h] + pair[2 * h + 1];
      }
  }
}

// The largest product of a weight and a scale that float16 is given.
constexpr float LARGEST_FACTOR = 32768.0f;

// TOKEN_SCALES: multiplies weights by the scales of their tokens and by the gain. The latter falls where the product
// would become too large, and rises as far as o allows when the bases do. `before` are the bases of the tile before.
template <int N, int M>
DEVICE void scale_weights(float (&s)[N][2][4], const float (&scales)[N][2][2], const float (&before)[2],
                          const Softmax& softmax, Gain& gain, float (&o)[M][4]) {
  float largest[2] = {0.0f, 0.0f}, factor[2] = {ex2(gain.of[0]), ex2(gain.of[1])};
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s[i][n][e] *= scales[i][n][e % 2];
        largest[e / 2] = max_f32(largest[e / 2], max_f32(s[i][n][e], -s[i][n][e]));
      }
  if (warp_any(largest[0] * factor[0] > LARGEST_FACTOR || largest[1] * factor[1] > LARGEST_FACTOR ||
               before[0] != softmax.base[0] || before[1] != softmax.base[1])) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      // That brings the largest product to a quarter of the limit; what the bases have already scaled down o, it may be
      // scaled up again.
      const int exponent = (int)(as_u32(max_over_row(largest[h])) << 1 >> 24) - 127;  // a zero may have a sign
      const float wanted = 12 - max_int(exponent, -100);
      const float allowed = gain.of[h] + (finite_base(softmax.base[h]) - before[h]);
      const float next = wanted < allowed ? wanted : allowed, change = ex2(next - gain.of[h]);
      gain.of[h] = next;
      factor[h] = ex2(next);
#pragma unroll
      for (int i = 0; i < M; i++) o[i][2 * h] *= change, o[i][2 * h + 1] *= change;
    }
  }
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[i][n][e] *= factor[e / 2];
}

// Weights of a tile, times `unit`, as an A operand.
DEVICE void pack_weights(const float (&s)[2][4], float unit, u32 (&weights)[4]) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int h = 0; h < 2; h++) weights[2 * n + h] = pack_f16x2(s[n][2 * h] * unit, s[n][2 * h + 1] * unit);
}
