// The one argument of the kernel merge.
// mlaflash/distributed/merging.py holds the same structure as a NumPy dtype; a test compares offsets and size.
#pragma once
#include "types.cuh"

// Rows are (token, head). Strides count elements.
struct MergeParams {
  const void* outs;   // [num_parts, T, H, 512] of PARTIAL_DTYPE: parts first_part .. first_part + num_parts - 1
  const float* lses;  // [num_lses, T, H]
  void* out;          // [T, H, 512] of OUT_DTYPE; may be the one part
  float* lse;         // [T, H]

  i64 outs_stride_part, outs_stride_t, outs_stride_h;
  i64 lses_stride_part, lses_stride_t, lses_stride_h;
  i64 out_stride_t, out_stride_h;
  i64 lse_stride_t, lse_stride_h;

  i32 num_heads;
  i32 num_lses;
  i32 first_part;
  i32 num_parts;
  i32 lse_base_2;  // 1: lses and lse are in base 2; 0: in base e
  i32 padding;
};
