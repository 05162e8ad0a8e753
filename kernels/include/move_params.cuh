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
  const void* n;  // entries of the whole list that count, int32 or int64; null: all
  u8* scratch;    // [num_layers, num_moves, row_words] words of WAY == GATHER and SCATTER

  i64 num_rows;    // of a layer
  i64 row_stride;  // bytes

  i32 first_move;   // place of src[0] in the whole list
  i32 num_moves;    // of this launch
  i32 chunk;        // moves of a task: whole groups
  i32 num_layers;   // at most MAX_LAYERS
  i32 row_words;    // of a row that this launch moves, of WORD bytes
  i32 slice_words;  // of a task; row_words but for WAY == STAGED
  i32 wide_src;     // 1: int64
  i32 wide_dst;
  i32 wide_n;

  u64 layers[MAX_LAYERS];  // the first of those words in row 0 of each
};
