// The one argument of the kernel mask, and its constants.
// mlaflash/mask_pack.py holds the same structure as a NumPy dtype; a test compares offsets and size.
#pragma once
#include "types.cuh"

// How the source says which draft token sees which. Positions are counted inside the request.
// u8 [B, S, S], strided: not 0 where token i of a request sees token j.
constexpr int DENSE = 0;
// u8, for each request q_len rows of len + q_len, the first len of which are not looked at.
constexpr int RAGGED = 1;
// Bits, for each request q_len rows of len from a byte of its own on; the last q_len of a row are the draft's.
constexpr int BITS = 2;
// i32 or i64, [T] or [B, S]: each token's parent. A token sees itself and its ancestors.
constexpr int PARENTS = 3;
// Two of i32 or i64 [B, S]: each token's first child and next sibling. Seen is the same.
constexpr int RETRIEVE = 4;
// u8 or u16 [T], or u32 [T, source_columns]: packed already.
constexpr int WORDS = 5;
// No source: a token sees itself and every earlier one.
constexpr int CAUSAL = 6;

struct MaskParams {
  const void* source;
  const void* siblings;     // of RETRIEVE: next_sibling
  const i32* qo_indptr;     // [B + 1]; null: request b owns tokens [b * q_len, (b + 1) * q_len)
  const void* lens;         // [B], int32 or int64: len of RAGGED (null: 0) and BITS; columns of WORDS (null: q_len)
  const void* mask_indptr;  // [B + 1], int32 or int64: where requests of RAGGED and BITS begin, in bytes; null: they
                            // follow each other
  u32* words;               // [T, words_per_row]
  // Of SHARDED:
  const i32* kv_lens;  // [B]: tokens of each request on all ranks, its q_len new ones included
  const i32* begins;   // first token of each rank, where a rank holds a run; null: tokens are dealt out in turn
  i32* shard_lens;     // [B] result: tokens of each request on this rank
  i32* shard_tails;    // [B] result: those of them that are the draft's, which are the last ones

  i64 source_size;             // of RAGGED and BITS, bytes
  i64 source_stride_request;   // elements
  i64 source_stride_row;       // elements
  i64 sibling_stride_request;  // elements
  i64 begin_stride_request;    // elements of begins; 0: the same for every request

  i32 source_rows;     // S; T if is_flat
  i32 source_columns;  // S of DENSE; items of a row of WORDS
  i32 item_bytes;      // of an element of the source
  i32 is_flat;         // 1: the source has a row for each query token of the batch; 0: S rows for each request
  i32 num_tokens;      // T, padding behind the last request included
  i32 batch;           // B
  i32 q_len;           // of every request, where qo_indptr is null
  i32 max_q;           // columns of the result, at most MAX_COLUMNS
  i32 words_per_row;
  i32 wide_lens;    // 1: lens are int64
  i32 wide_indptr;  // 1: mask_indptr is int64
  i32 is_big;       // of BITS, 1: the first bit of a byte is its most significant
  i32 num_ranks;    // of SHARDED
  i32 rank;         // this one
  i32 interleave;   // tokens that a rank takes in turn, where begins is null
};

#ifndef MLAFLASH_FORMAT
#error "MLAFLASH_FORMAT is missing: compile kernels through mlaflash.jit or mlaflash.emulator"
#endif
constexpr int FORMAT = MLAFLASH_FORMAT;
static_assert(FORMAT >= DENSE && FORMAT <= CAUSAL, "FORMAT is one of the above");

// 1: the KV is spread over ranks by tokens, and the columns of the result are the draft tokens that lie on this rank.
#ifdef MLAFLASH_SHARDED
constexpr int SHARDED = MLAFLASH_SHARDED;
#else
constexpr int SHARDED = 0;
#endif
