// transpose: a rank's q is laid where it is gathered, head by head, each head with all its tokens.
//
// Grid:   x = T * H * 72 words of 16 bytes over 256 threads. Block: 256 threads. Shared: none.
// Idea:   a thread copies one word. Neighbours have neighbouring words of a row, then rows of one head: what is written
//         is one run for each group of heads.
#include "ptx.cuh"
#include "transpose_params.cuh"

constexpr int BLOCK = 256;
constexpr int WORD = 16;
constexpr int LATENT_WORDS = DL * 2 / WORD;
constexpr int ROW_WORDS = D * 2 / WORD;

KERNEL_WITH(TransposeParams, mlaflash_transpose, BLOCK, 1) {
  const i64 index = (i64)block_idx_x() * BLOCK + thread_idx();
  const i64 row = index / ROW_WORDS;
  if (row >= (i64)p.num_tokens * p.num_heads) return;
  const int word = (int)(index % ROW_WORDS);
  const int head = (int)(row / p.num_tokens), token = (int)(row % p.num_tokens);
  const int group = head / p.group_heads;
  const u8* src = word < LATENT_WORDS
                      ? p.latent + token * p.latent_stride_t + head * p.latent_stride_h + word * WORD
                      : p.rope + token * p.rope_stride_t + head * p.rope_stride_h + (word - LATENT_WORDS) * WORD;
  const i64 first = (i64)group * p.group_heads * p.num_tokens;  // row of the group's first head
  u8* dst = p.dst + group * p.group_stride + ((row - first) * ROW_WORDS + word) * WORD;
  st_global_u32x4(dst, ld_global_u32x4(src));
}
