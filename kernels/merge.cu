// merge: attention over disjoint sets of tokens, one set a rank, becomes that over all of them.
//
//   w[i] = base^(lses[i] - max), out = sum of w[i] * outs[i] over the parts / sum of w[i] over all lses,
//   lse = max + log(sum of w[i] over all lses)
//
// All parts at hand: out is the result. One part of several: it is this rank's share, and the sum of the ranks' shares
// is the result.
//
// Grid:   x = T * H. Block: 128 threads. Shared: none.
// Idea:   a thread owns 4 neighbouring columns of a row. Every thread computes all weights: there is one a rank, and
//         summing them in the order of the ranks gives each rank the same bits.
// Safety: an lse of -inf, or of +inf as some kernels write it, is that of no token: its part is not read.
#include "elements.cuh"
#include "merge_params.cuh"

constexpr int THREADS = DL / 4;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

DEVICE bool is_empty(float lse) { return lse == neg_inf() || lse == -neg_inf(); }

// The logarithm in base 2.
DEVICE float load_lse(const MergeParams& p, const float* lses, int part) {
  const float lse = ld_global_f32(lses + part * p.lses_stride_part);
  return p.lse_base_2 ? lse : lse * LOG2_E;
}

template <int DTYPE>
DEVICE f32x4 load_quad(const u8* ptr) {
  if constexpr (DTYPE == FLOAT32) {
    return ld_global_f32x4(ptr);
  } else {
    const u32x2 v = ld_global_u32x2(ptr);
    return {element_to_f32<DTYPE>((u16)v.x), element_to_f32<DTYPE>((u16)(v.x >> 16)), element_to_f32<DTYPE>((u16)v.y),
            element_to_f32<DTYPE>((u16)(v.y >> 16))};
  }
}

KERNEL_WITH(MergeParams, mlaflash_merge, THREADS, 1) {
  const int token = block_idx_x() / p.num_heads, head = block_idx_x() % p.num_heads, column = thread_idx() * 4;
  const float* lses = p.lses + token * p.lses_stride_t + head * p.lses_stride_h;
  const i64 row = token * p.outs_stride_t + head * p.outs_stride_h + column;

  float max = neg_inf();
  for (int i = 0; i < p.num_lses; i++) {
    const float lse = load_lse(p, lses, i);
    if (!is_empty(lse)) max = max_f32(max, lse);
  }
  f32x4 sum = {0.f, 0.f, 0.f, 0.f};
  float weights = 0.f;
  for (int i = 0; i < p.num_lses; i++) {
    const float lse = load_lse(p, lses, i);
    if (is_empty(lse)) continue;
    const float weight = ex2(lse - max);
    weights += weight;
    const int part = i - p.first_part;
    if (part < 0 || part >= p.num_parts) continue;
    const f32x4 v = load_quad<PARTIAL_DTYPE>(element_ptr<PARTIAL_DTYPE>(p.outs, part * p.outs_stride_part + row));
    sum = {fma_f32(weight, v.x, sum.x), fma_f32(weight, v.y, sum.y), fma_f32(weight, v.z, sum.z),
           fma_f32(weight, v.w, sum.w)};
  }
  const float scale = weights == 0.f ? 0.f : 1.f / weights;
  store_quad<OUT_DTYPE>(element_ptr<OUT_DTYPE>(p.out, token * p.out_stride_t + head * p.out_stride_h + column),
                        {sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale});
  if (column) return;
  const float lse = weights == 0.f ? neg_inf() : max + lg2(weights);
  st_global_f32(p.lse + token * p.lse_stride_t + head * p.lse_stride_h, p.lse_base_2 ? lse : lse * LN_2);
}
