// The arguments of the kernels compact and move.
// mlaflash/kv/compact.py and move.py hold the same structures as NumPy dtypes; a test compares offsets and sizes.
#pragma once
#include "types.cuh"

struct CompactParams {
  const void* out_slots;     // [T], int32 or int64: slots that the verify step wrote, window by window
  const void* accept_index;  // [B, width], int32 or int64: places in out_slots; -1: none
  const void* accept_lens;   // [B], int32 or int64: entries of a row that count; null: all
  const i32* qo_indptr;      // [B + 1]: where windows begin; null: window b is [b * q_len, (b + 1) * q_len)
  void* src;                 // [B * width], of out_slots' type
  void* dst;
  i32* n;

  i64 accept_stride;  // elements

  i32 num_tokens;  // T
  i32 batch;       // B
  i32 width;       // entries of a path
  i32 q_len;
  i32 wide_slots;  // 1: int64
  i32 wide_index;
  i32 wide_lens;
};

constexpr int MAX_LAYERS = 256;

struct MoveParams {
  const void* src;  // [num_moves], int32 or int64
  const void* dst;
  const void* n;  // entries of the list that count, int32 or int64; null: all
  u8* scratch;    // [grid, slab_bytes] of STAGING == SCRATCH

  i64 num_rows;    // of a layer
  i64 row_stride;  // bytes
  i64 slab_bytes;

  i32 num_moves;
  i32 chunk;        // moves of a task: whole groups
  i32 num_layers;   // at most MAX_LAYERS
  i32 row_words;    // words of WORD bytes
  i32 slice_words;  // of a task
  i32 wide_src;     // 1: int64
  i32 wide_dst;
  i32 wide_n;

  u64 layers[MAX_LAYERS];  // where each begins
};
