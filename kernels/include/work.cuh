// What a block of a tensor-core kernel computes: one row tile of one request over a run of its KV tiles. Either the
// grid says which, or a list that kernels/plan.cu made on the device (PLANNED).
//
// Packed rows: row r of a request is (query token r / H, head r % H), so that all heads of all its query tokens read
// one KV stream.
#pragma once
#include "addressing.cuh"

constexpr int TILE = 16;  // tokens of a KV tile; rows of an MMA tile

struct RowTile {
  int first, end;       // packed rows [first, end) of the request; end <= first: the request has no such rows
  int q_first, q_last;  // absolute query tokens of the first and of the last row
};

DEVICE RowTile row_tile(const VerifyParams& p, const Request& r, int first, int rows) {
  RowTile t;
  t.first = first;
  t.end = min_int(first + rows, r.q_len * p.num_heads);
  t.q_first = r.q_begin + first / p.num_heads;
  t.q_last = r.q_begin + min_int((first + rows - 1) / p.num_heads, r.q_len - 1);  // divides while q_len is on its way
  return t;
}

struct TileRange {
  int begin, end;  // KV tiles
};

// Tiles in which some row of the row tile sees a token.
DEVICE int num_tiles(const VerifyParams& p, const Request& r, const RowTile& rows) {
  return (visible_end(p, r, rows.q_last) + TILE - 1) / TILE;
}

static_assert(DETERMINISTIC % TILE == 0, "chunks are whole tiles");
constexpr int CHUNK_TILES = DETERMINISTIC ? DETERMINISTIC / TILE : 1;

// DETERMINISTIC: chunks in which some row of the row tile sees a token.
DEVICE int count_chunks(const VerifyParams& p, const Request& r, const RowTile& rows) {
  return (visible_end(p, r, rows.q_last) + CHUNK_TILES * TILE - 1) / (CHUNK_TILES * TILE);
}

// Split `split` of the tiles in which some row of the block sees a token: equal runs, the last ones may be empty.
// DETERMINISTIC: runs of whole chunks, one for each block that the grid has.
DEVICE TileRange split_tiles(const VerifyParams& p, const Request& r, const RowTile& rows, int split) {
  const int all = num_tiles(p, r, rows);
  const int per_split = DETERMINISTIC ? (count_chunks(p, r, rows) + grid_dim_y() - 1) / grid_dim_y() * CHUNK_TILES
                                      : (all + p.num_splits - 1) / p.num_splits;
  const int begin = min_int(split * per_split, all);
  return {begin, min_int(begin + per_split, all)};
}

// --- lists made by kernels/plan.cu ---------------------------------------------------------------------------------

// A piece of work. In memory: three u32x4, in this order.
struct WorkItem {
  int request, row_tile;  // request -1: nothing to do
  TileRange tiles;
  int q_begin, q_len, kv_len, tail_len;  // of the request
  i64 id_begin;
  int part;  // of the partial results; -1: the row tile has one piece, whose result is final
  int next;  // the block's next item; -1: none
};
constexpr int WORK_ITEM_BYTES = 48;

DEVICE WorkItem load_work_item(const VerifyParams& p, int index) {
  const u8* ptr = (const u8*)p.work_items + (i64)index * WORK_ITEM_BYTES;
  const u32x4 a = ld_global_u32x4(ptr), b = ld_global_u32x4(ptr + 16), c = ld_global_u32x4(ptr + 32);
  return {(i32)a.x, (i32)a.y, {(i32)a.z, (i32)a.w},        (i32)b.x, (i32)b.y,
          (i32)b.z, (i32)b.w, (i64)((u64)c.y << 32 | c.x), (i32)c.z, (i32)c.w};
}
DEVICE void store_work_item(const VerifyParams& p, int index, const WorkItem& w) {
  u8* ptr = (u8*)p.work_items + (i64)index * WORK_ITEM_BYTES;
  st_global_u32x4(ptr, {(u32)w.request, (u32)w.row_tile, (u32)w.tiles.begin, (u32)w.tiles.end});
  st_global_u32x4(ptr + 16, {(u32)w.q_begin, (u32)w.q_len, (u32)w.kv_len, (u32)w.tail_len});
  st_global_u32x4(ptr + 32, {(u32)w.id_begin, (u32)((u64)w.id_begin >> 32), (u32)w.part, (u32)w.next});
}

DEVICE Request request_of(const WorkItem& w) {
  return {w.request, w.q_begin, w.q_len, w.kv_len, w.tail_len, w.id_begin};
}

// Which blocks hold the partial results of a row tile, written with the piece that is not its first. In memory: two
// u32x4. Block first_block's part is 2 * first_block + 1, that of a later block b is 2 * b.
struct WorkMerge {
  int first_block, last_block;  // first_block -1: nothing to merge
  int q_begin;                  // first query token of the request
  int first_row, end_row;       // packed rows of the row tile
};
constexpr int WORK_MERGE_BYTES = 32;

DEVICE WorkMerge load_work_merge(const VerifyParams& p, int block) {
  const u8* ptr = (const u8*)p.work_merges + block * WORK_MERGE_BYTES;
  const u32x4 a = ld_global_u32x4(ptr);
  return {(i32)a.x, (i32)a.y, (i32)a.z, (i32)a.w, (i32)ld_global_u32(ptr + 16)};
}
DEVICE void store_work_merge(const VerifyParams& p, int block, const WorkMerge& m) {
  u8* ptr = (u8*)p.work_merges + block * WORK_MERGE_BYTES;
  st_global_u32x4(ptr, {(u32)m.first_block, (u32)m.last_block, (u32)m.q_begin, (u32)m.first_row});
  st_global_u32x4(ptr + 16, {(u32)m.end_row, 0, 0, 0});
}

// Row `row` of the partial results of a part.
DEVICE i64 part_row(int part, int row) { return (i64)part * PLANNED_ROWS + row % (PLANNED ? PLANNED_ROWS : 1); }
