// The one argument of the kernel transpose.
// mlaflash/distributed/transposing.py holds the same structure as a NumPy dtype; a test compares offsets and size.
#pragma once
#include "types.cuh"

// q is [T, H, 576] of 2-byte elements, its latent and rope columns anywhere. Strides count bytes, multiples of 16.
struct TransposeParams {
  const u8* latent;
  const u8* rope;
  u8* dst;  // of the first group of heads: [group_heads, T, 576]

  i64 latent_stride_t, latent_stride_h;
  i64 rope_stride_t, rope_stride_h;
  i64 group_stride;  // from a group's heads to those of the next

  i32 num_tokens;
  i32 num_heads;
  i32 group_heads;
  i32 padding;
};
