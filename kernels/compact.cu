// compact: which rows to move where, so that a request's accepted path lies at the front of its window.
//
// Grid:   1 block of 512 threads; a thread takes every 512th entry.
// Shared: Smem::BYTES.
// Idea:   entry j of request b's path moves to place j of b's window. Entries keep their places in the list, and what
//         need not move is -1: each request's moves are a group of `width` entries that touches its own window alone.
// Safety: a path has its j-th token at place j of the window or behind it, since parents come before their children.
//         Entries that say otherwise, or lie outside the window, are none: whatever the input, no slot of another
//         request is touched.
#include "integers.cuh"
#include "move_params.cuh"
#include "ptx.cuh"

constexpr int BLOCK = 512;
constexpr int WARPS = BLOCK / WARP;

struct Smem {
  static constexpr u32 ENDS = 0;  // i32 [WARPS]
  static constexpr u32 BYTES = ENDS + WARPS * 4;
};

// First place of a window; of window B, the end of the last one.
DEVICE i64 window_begin(const CompactParams& p, int request) {
  return clamp(p.qo_indptr ? load_integer(p.qo_indptr, false, request) : (i64)request * p.q_len, 0, p.num_tokens);
}

// Writes entry i of the list; whether it moves something.
DEVICE bool plan_entry(const CompactParams& p, int i) {
  const int request = i / p.width, j = i % p.width;
  const i64 index = load_integer(p.accept_index, p.wide_index, request * p.accept_stride + j);
  const i64 begin = window_begin(p, request), end = window_begin(p, request + 1);
  i64 src = -1, dst = -1;
  if ((!p.accept_lens || j < load_integer(p.accept_lens, p.wide_lens, request)) && index > begin + j && index < end) {
    src = load_integer(p.out_slots, p.wide_slots, index);
    dst = load_integer(p.out_slots, p.wide_slots, begin + j);
  }
  const bool moves = src >= 0 && dst >= 0 && src != dst;
  store_integer(p.src, p.wide_slots, i, moves ? src : -1);
  store_integer(p.dst, p.wide_slots, i, moves ? dst : -1);
  return moves;
}

KERNEL_WITH(CompactParams, mlaflash_compact, BLOCK, 1) {
  const u32 smem = shared_base();
  const int warp = thread_idx() / WARP, lane = thread_idx() % WARP;
  int end = 0;  // of the entries that move something
  for (int i = thread_idx(); i < p.batch * p.width; i += BLOCK)
    if (plan_entry(p, i)) end = i + 1;
#pragma unroll
  for (int distance = WARP / 2; distance; distance /= 2) end = max_int(end, (int)shfl_xor_u32((u32)end, distance));
  if (lane == 0) st_shared_u32(smem + Smem::ENDS + warp * 4, (u32)end);
  block_sync();  // orders the writes of the warps' ends before thread 0's reads of them
  if (thread_idx()) return;
  for (int w = 0; w < WARPS; w++) end = max_int(end, (int)ld_shared_u32(smem + Smem::ENDS + w * 4));
  st_global_u32(p.n, (u32)end);
}
