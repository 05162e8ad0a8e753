// mask: packs a tree mask of any FORMAT into words: bit j % 32 of word j / 32 of a token's row says that the token sees
// draft token j of its request.
//
// Grid:   x = max(B, 1), y = tiles of ROW_TILE of a request's rows, at least 1. Block: 256 threads.
// Shared: Smem::BYTES.
// Idea:   a row has at most 32 words, so a warp owns a row and a lane one of its words. Bits that lie apart are
//         gathered by a vote, 32 columns at a time. A tree is walked upwards, once for all lanes: the lane whose word
//         holds an ancestor notes it. No length comes from the host, so a CUDA graph replays with other ones.
// Safety: no value of the input leads out of an array or into an endless loop. What lies outside counts as not visible,
//         a parent that does not come before its child as none, a link out of range as none; loops over links end after
//         q_len steps. The result for such input is the same at every run.
// SHARDED: the draft tokens that lie on this rank are the last ones there, in their order. Their columns are picked out
//         of a row when it is whole, and the lengths of the rank are written beside it.
#include "integers.cuh"
#include "mask_params.cuh"
#include "ptx.cuh"

constexpr int BLOCK = 256;
constexpr int WARPS = BLOCK / WARP;
constexpr int ROW_TILE = 16;
constexpr int MAX_COLUMNS = 32 * WARP;
constexpr int MAX_LEN = 0x7fffffff;
constexpr bool IS_TREE = FORMAT == PARENTS || FORMAT == RETRIEVE;
constexpr bool IS_PACKED_RAGGED = FORMAT == RAGGED || FORMAT == BITS;

struct Smem {
  static constexpr u32 SUMS = 0;                                                   // u64 [WARPS]
  static constexpr u32 TREE = SUMS + (IS_PACKED_RAGGED ? WARPS * 8 : 0);           // i32 [MAX_COLUMNS]: parents
  static constexpr u32 LINKS = TREE + (IS_TREE ? MAX_COLUMNS * 4 : 0);             // i32 [MAX_COLUMNS][2]
  static constexpr u32 BACK = LINKS + (FORMAT == RETRIEVE ? MAX_COLUMNS * 8 : 0);  // i32 [MAX_COLUMNS]
  static constexpr u32 BYTES = BACK + (FORMAT == RETRIEVE ? MAX_COLUMNS * 4 : 0);
};

struct Request {
  int index;
  int begin;         // first query token
  int rows;          // query tokens
  int q_len;         // the same, cut at max_q: columns, and rows that are not empty
  i64 len;           // its entry of lens
  u64 source_begin;  // of RAGGED and BITS
};

// First query token of a request; of request B, the end of the last one.
DEVICE int query_begin(const MaskParams& p, int index) {
  return (int)clamp(p.qo_indptr ? load_integer(p.qo_indptr, false, index) : (i64)index * p.q_len, 0, p.num_tokens);
}

DEVICE Request load_request(const MaskParams& p, int index) {
  if (index >= p.batch) return Request{index, 0, 0, 0, 0, 0};  // the one block of an empty batch
  Request r;
  r.index = index;
  r.begin = query_begin(p, index);
  r.rows = max_int(query_begin(p, index + 1) - r.begin, 0);
  r.q_len = min_int(r.rows, p.max_q);
  r.len = p.lens ? clamp(load_integer(p.lens, p.wide_lens, index), 0, MAX_LEN) : 0;
  r.source_begin = 0;
  return r;
}

// --- RAGGED and BITS -----------------------------------------------------------------------------------------------

// Bytes of a request in the source.
DEVICE u64 source_bytes(const Request& r) {
  return FORMAT == RAGGED ? (u64)r.q_len * (u64)(r.len + r.q_len) : ((u64)r.q_len * (u64)r.len + 7) / 8;
}

// All threads: where the request begins in the source.
DEVICE u64 find_source(const MaskParams& p, const Request& r, u32 smem) {
  if (p.mask_indptr) return r.index < p.batch ? (u64)load_integer(p.mask_indptr, p.wide_indptr, r.index) : 0;
  const int warp = thread_idx() / WARP, lane = thread_idx() % WARP;
  u64 sum = 0;
  for (int other = thread_idx(); other < r.index; other += BLOCK) sum += source_bytes(load_request(p, other));
#pragma unroll
  for (int distance = WARP / 2; distance; distance /= 2) sum += shfl_u64(sum, lane ^ distance);
  if (lane == 0) st_shared_u32x2(smem + Smem::SUMS + warp * 8, {(u32)sum, (u32)(sum >> 32)});
  block_sync();  // orders the writes of the warps' sums before every thread's reads of them
  sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const u32x2 part = ld_shared_u32x2(smem + Smem::SUMS + w * 8);
    sum += (u64)part.y << 32 | part.x;
  }
  return sum;
}

// --- trees ---------------------------------------------------------------------------------------------------------

// An entry of a request's row in an array of parents or links; -1 outside 0 .. q_len - 1.
DEVICE int load_entry(const MaskParams& p, const Request& r, const void* array, i64 stride_request, int token) {
  const int row = (p.is_flat ? r.begin : 0) + token;
  if (row >= p.source_rows) return -1;
  const i64 entry = load_integer(array, p.item_bytes == 8, r.index * stride_request + row * p.source_stride_row);
  return entry >= 0 && entry < r.q_len ? (int)entry : -1;
}

// All threads: parents of the tokens below `end`, each below its child or -1.
DEVICE void stage_parents(const MaskParams& p, const Request& r, int end, u32 smem) {
  for (int token = thread_idx(); token < end; token += BLOCK) {
    const int parent = load_entry(p, r, p.source, p.source_stride_request, token);
    st_shared_u32(smem + Smem::TREE + token * 4, (u32)(parent < token ? parent : -1));
  }
}

// All threads: the link that leads to each token, 2 * from for a sibling's and 2 * from + 1 for the parent's; -1: none.
// Of several, which no tree has, the one from the lowest token counts.
DEVICE void reverse_links(const MaskParams& p, const Request& r, u32 smem) {
  for (int token = thread_idx(); token < r.q_len; token += BLOCK) {
    const int child = load_entry(p, r, p.source, p.source_stride_request, token);
    const int sibling = load_entry(p, r, p.siblings, p.sibling_stride_request, token);
    st_shared_u32x2(smem + Smem::LINKS + token * 8, {(u32)child, (u32)sibling});
  }
  block_sync();  // orders the writes of the links before every thread's reads of them
  for (int token = thread_idx(); token < r.q_len; token += BLOCK) {
    int back = -1;
    for (int from = r.q_len - 1; from >= 0; from--) {
      const u32x2 links = ld_shared_u32x2(smem + Smem::LINKS + from * 8);
      back = links.y == (u32)token ? 2 * from : back;
      back = links.x == (u32)token ? 2 * from + 1 : back;
    }
    // Token 0 is the root, whatever leads to it.
    st_shared_u32(smem + Smem::BACK + token * 4, (u32)(token ? back : -1));
  }
}

// All threads: parents as of stage_parents, from the links. A token's parent is that of its first sibling.
DEVICE void stage_linked_parents(const MaskParams& p, const Request& r, int end, u32 smem) {
  reverse_links(p, r, smem);
  block_sync();  // orders the writes of the reversed links before every thread's reads of them
  for (int token = thread_idx(); token < end; token += BLOCK) {
    int parent = -1;
    for (int step = 0, at = token; step < r.q_len && parent < 0; step++) {
      const int back = (i32)ld_shared_u32(smem + Smem::BACK + at * 4);
      if (back < 0) break;
      at = back / 2;
      if (back & 1) parent = at;
    }
    st_shared_u32(smem + Smem::TREE + token * 4, (u32)(parent < token ? parent : -1));
  }
}

// --- rows ----------------------------------------------------------------------------------------------------------

DEVICE bool byte_at(const MaskParams& p, u64 index) {
  return index < (u64)p.source_size && ld_global_u8((const u8*)p.source + index) != 0;
}

DEVICE bool bit_at(const MaskParams& p, u64 byte, u64 bit) {
  byte += bit / 8;
  if (byte >= (u64)p.source_size) return false;
  const u32 place = (u32)(bit % 8);
  return ld_global_u8((const u8*)p.source + byte) >> (p.is_big ? 7 - place : place) & 1;
}

// Whether a row of DENSE, RAGGED or BITS sees a column, both below q_len.
DEVICE bool sees(const MaskParams& p, const Request& r, int row, int column) {
  if constexpr (FORMAT == DENSE) {
    if (row >= p.source_rows || column >= p.source_columns) return false;
    return ld_global_u8((const u8*)p.source + r.index * p.source_stride_request + row * p.source_stride_row + column);
  } else if constexpr (FORMAT == RAGGED) {
    return byte_at(p, r.source_begin + (u64)row * (u64)(r.len + r.q_len) + (u64)(r.len + column));
  } else {
    const i64 token = r.len - r.q_len + column;  // below 0: the request is shorter than its draft
    return token >= 0 && bit_at(p, r.source_begin, (u64)row * (u64)r.len + (u64)token);
  }
}

DEVICE u32 gather_word(const MaskParams& p, const Request& r, int row, int lane) {
  u32 word = 0;
  for (int first = 0; first < r.q_len; first += WARP) {
    const int column = first + lane;
    const u32 votes = warp_ballot(column < r.q_len && sees(p, r, row, column));
    if (lane == first / WARP) word = votes;
  }
  return word;
}

// Ends: a parent is below its child.
DEVICE u32 path_word(int row, int lane, u32 smem) {
  u32 word = 0;
  for (int token = row; token >= 0; token = (i32)ld_shared_u32(smem + Smem::TREE + token * 4))
    if (token / WARP == lane) word |= 1u << token % WARP;
  return word;
}

// len of WORDS counts the columns, where there is one.
DEVICE u32 copy_word(const MaskParams& p, const Request& r, int row, int lane) {
  if (r.begin + row >= p.source_rows || lane >= p.source_columns) return 0;
  const i64 index = (r.begin + row) * p.source_stride_row + lane;
  const u32 word = p.item_bytes == 1   ? ld_global_u8((const u8*)p.source + index)
                   : p.item_bytes == 2 ? ld_global_u16((const u16*)p.source + index)
                                       : ld_global_u32((const u32*)p.source + index);
  const int columns = (p.lens ? (int)clamp(r.len, 0, p.max_q) : r.q_len) - lane * WARP;
  return columns >= WARP ? word : columns > 0 ? word & ((1u << columns) - 1) : 0;
}

DEVICE u32 causal_word(int row, int lane) {
  const int columns = row + 1 - lane * WARP;
  return columns >= WARP ? ~0u : columns > 0 ? (1u << columns) - 1 : 0;
}

// The lane's word of a row below q_len.
DEVICE u32 row_word(const MaskParams& p, const Request& r, int row, int lane, u32 smem) {
  if constexpr (FORMAT == WORDS)
    return copy_word(p, r, row, lane);
  else if constexpr (FORMAT == CAUSAL)
    return causal_word(row, lane);
  else if constexpr (IS_TREE)
    return path_word(row, lane, smem);
  else
    return gather_word(p, r, row, lane);
}

// --- shards --------------------------------------------------------------------------------------------------------

// What of a request lies on this rank. Tokens are counted in the whole request, `local` ones on the rank.
struct Shard {
  int run_begin, run_end;  // tokens of the rank, where it holds a run
  int draft_begin;         // first token of the draft; below 0: the request is shorter than its draft
  int first;               // first local token that is the draft's
  int len, tail;           // local tokens, and those that are the draft's
};

// How many of the first n tokens of the request lie on the rank.
DEVICE int count_local(const MaskParams& p, const Shard& s, int n) {
  if (p.begins) return max_int(min_int(n, s.run_end) - s.run_begin, 0);
  const int cycle = p.num_ranks * p.interleave;
  return n / cycle * p.interleave + (int)clamp(n % cycle - p.rank * p.interleave, 0, p.interleave);
}

DEVICE int token_of(const MaskParams& p, const Shard& s, int local) {
  if (p.begins) return s.run_begin + local;
  return (local / p.interleave * p.num_ranks + p.rank) * p.interleave + local % p.interleave;
}

DEVICE Shard load_shard(const MaskParams& p, const Request& r) {
  Shard s = {};
  if (r.index >= p.batch) return s;
  if (p.begins) {
    const i64 begin = r.index * p.begin_stride_request + p.rank;
    s.run_begin = (int)clamp(load_integer(p.begins, false, begin), 0, MAX_LEN);
    s.run_end = p.rank + 1 < p.num_ranks ? (int)load_integer(p.begins, false, begin + 1) : MAX_LEN;
  }
  const int kv_len = (int)clamp(load_integer(p.kv_lens, false, r.index), 0, MAX_LEN);
  s.draft_begin = kv_len - r.rows;
  s.first = count_local(p, s, max_int(s.draft_begin, 0));
  s.len = count_local(p, s, kv_len);
  s.tail = min_int(s.len - s.first, p.max_q);
  return s;
}

// The lane's word of a row on this rank, of its word for the whole draft.
DEVICE u32 shard_word(const MaskParams& p, const Request& r, const Shard& s, u32 whole, int lane) {
  u32 word = 0;
  for (int first = 0; first < s.tail; first += WARP) {
    const int column = first + lane;
    const int token = column < s.tail ? token_of(p, s, s.first + column) - s.draft_begin : r.q_len;  // of the draft
    const u32 holder = shfl_u32(whole, token / WARP % WARP);
    const u32 votes = warp_ballot(token < r.q_len && holder >> token % WARP & 1);
    if (lane == first / WARP) word = votes;
  }
  return word;
}

// --- the kernel ----------------------------------------------------------------------------------------------------

DEVICE void store_row(const MaskParams& p, int token, int lane, u32 word) {
  if (lane < p.words_per_row) st_global_u32(p.words + (i64)token * p.words_per_row + lane, word);
}

KERNEL_WITH(MaskParams, mlaflash_mask, BLOCK, 1) {
  const u32 smem = shared_base();
  const int warp = thread_idx() / WARP, lane = thread_idx() % WARP;
  Request r = load_request(p, block_idx_x());
  const int live = query_begin(p, p.batch);
  const int begin = block_idx_y() * ROW_TILE;
  // Rows past the last tile's are those of a request of more than max_q tokens: empty.
  const int end = block_idx_y() == grid_dim_y() - 1 ? r.rows : min_int(begin + ROW_TILE, r.rows);

  if constexpr (IS_PACKED_RAGGED) r.source_begin = find_source(p, r, smem);
  if constexpr (IS_TREE) {
    if constexpr (FORMAT == PARENTS)
      stage_parents(p, r, min_int(end, r.q_len), smem);
    else
      stage_linked_parents(p, r, min_int(end, r.q_len), smem);
    block_sync();  // orders the writes of the parents before every warp's walks over them
  }
  const Shard shard = SHARDED ? load_shard(p, r) : Shard{};
  if (SHARDED && block_idx_y() == 0 && thread_idx() == 0 && r.index < p.batch) {
    st_global_u32(p.shard_lens + r.index, (u32)shard.len);
    st_global_u32(p.shard_tails + r.index, (u32)shard.tail);
  }
  for (int row = begin + warp; row < end; row += WARPS) {
    u32 word = row < r.q_len ? row_word(p, r, row, lane, smem) : 0;
    if constexpr (SHARDED) word = shard_word(p, r, shard, word, lane);
    store_row(p, r.begin + row, lane, word);
  }

  // Padding behind the last request.
  const int block = block_idx_y() * grid_dim_x() + block_idx_x();
  for (i64 token = live + (i64)block * WARPS + warp; token < p.num_tokens;
       token += (i64)grid_dim_x() * grid_dim_y() * WARPS)
    store_row(p, (int)token, lane, 0);
}
