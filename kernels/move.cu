// move: rows of all layers from the slots src to the slots dst, as if all were read before any is written.
//
// Grid:   x = any number of blocks of 256 threads, which share the tasks.
// Shared: of WAY == STAGED chunk * slice_words staged words of max(WORD, 4) bytes, else none.
// Idea:   the list is cut into groups, and no move writes a slot that a move of another group reads or writes. A task
//         is a chunk of whole groups in one layer.
//         STAGED:  of each row a task has one slice of columns, so that no task touches what another one touches. It
//                  reads everything into shared memory, then writes everything, so that overlaps, chains and cycles
//                  are right in any order. Long groups get narrow slices, down to a sector.
//         DIRECT:  groups of one move: no row that is written is read, and words go straight from row to row.
//         GATHER, SCATTER: groups that no shared memory holds. One launch copies all rows to scratch, the next one
//                  from there; what lies between them is the barrier.
// Safety: an id that is no row of the pool, such as -1, makes an entry that is skipped.
#include "integers.cuh"
#include "move_params.cuh"
#include "ptx.cuh"

#if !defined(MLAFLASH_WORD) || !defined(MLAFLASH_WAY)
#error "MLAFLASH_WORD or MLAFLASH_WAY is missing: compile kernels through mlaflash.jit or mlaflash.emulator"
#endif
constexpr int STAGED = 0;
constexpr int DIRECT = 1;
constexpr int GATHER = 2;
constexpr int SCATTER = 3;
constexpr int WORD = MLAFLASH_WORD;  // bytes: divides all addresses and the row
constexpr int WAY = MLAFLASH_WAY;
static_assert(WORD == 16 || WORD == 4 || WORD == 1, "WORD is 16, 4 or 1");
static_assert(WAY >= STAGED && WAY <= SCATTER, "WAY is STAGED, DIRECT, GATHER or SCATTER");

constexpr int BLOCK = 256;
constexpr int WARPS = BLOCK / WARP;
constexpr int UNROLL = 4;                       // STAGED: words of a thread whose ids are loaded together
constexpr int SLOT = WORD < 4 ? 4 : (int)WORD;  // STAGED: bytes of a word in shared memory
// The other ways: words of a thread that are on their way together. With 3 or 4 blocks an SM, and rows of 1,152 bytes
// (72 words, so that the third one is there for a quarter of the lanes), that is 55 to 74 KB; bandwidth times latency
// of an H200 is about 36 KB an SM.
constexpr int ROWS = 2;
constexpr int COLUMNS = 3;

// How words of each size are read and written, and staged in shared memory.
template <int BYTES>
struct Io;
template <>
struct Io<16> {
  typedef u32x4 Word;
  DEVICE Word load(const u8* ptr) { return ld_global_u32x4(ptr); }
  DEVICE void store(u8* ptr, Word v) { st_global_u32x4(ptr, v); }
  DEVICE void put(u32 slot, const u8* from) { cp_async_16(slot, from); }
  DEVICE Word take(u32 slot) { return ld_shared_u32x4(slot); }
};
template <>
struct Io<4> {
  typedef u32 Word;
  DEVICE Word load(const u8* ptr) { return ld_global_u32(ptr); }
  DEVICE void store(u8* ptr, Word v) { st_global_u32(ptr, v); }
  DEVICE void put(u32 slot, const u8* from) { cp_async_4(slot, from); }
  DEVICE Word take(u32 slot) { return ld_shared_u32(slot); }
};
template <>
struct Io<1> {
  typedef u8 Word;
  DEVICE Word load(const u8* ptr) { return ld_global_u8(ptr); }
  DEVICE void store(u8* ptr, Word v) { st_global_u8(ptr, v); }
  DEVICE void put(u32 slot, const u8* from) { st_shared_u32(slot, ld_global_u8(from)); }
  DEVICE Word take(u32 slot) { return (Word)ld_shared_u32(slot); }
};
typedef Io<WORD> Words;
typedef Words::Word Word;

struct Task {
  u8* base;     // the slice's columns of row 0
  u8* scratch;  // where its rows lie there
  int first;    // move
  int moves;
  int width;  // words of the slice
};

DEVICE Task find_task(const MoveParams& p, i64 index, int live, int chunks, int slices) {
  const int slice = (int)(index % slices);
  const int chunk = (int)(index / slices % chunks);
  const int layer = (int)(index / slices / chunks);
  const int column = slice * p.slice_words;
  Task task;
  task.base = (u8*)p.layers[layer] + (i64)column * WORD;
  task.first = chunk * p.chunk;
  task.scratch = p.scratch + ((i64)layer * p.num_moves + task.first) * p.row_words * WORD;
  task.moves = min_int(p.chunk, live - task.first);
  task.width = min_int(p.slice_words, p.row_words - column);
  return task;
}

// From the slice's first column in row 0, in bytes; -1: the row stays.
struct Offsets {
  i64 src, dst;
};

DEVICE Offsets find_row(const MoveParams& p, const Task& task, int move) {
  if (move >= task.moves) return {-1, -1};
  const i64 src = load_integer(p.src, p.wide_src, task.first + move);
  const i64 dst = load_integer(p.dst, p.wide_dst, task.first + move);
  if (src < 0 || src >= p.num_rows || dst < 0 || dst >= p.num_rows || src == dst) return {-1, -1};
  return {src * p.row_stride, dst * p.row_stride};
}

// Word k of all that the task moves.
DEVICE Offsets find_word(const MoveParams& p, const Task& task, int k) {
  const Offsets row = find_row(p, task, k / task.width);
  if (row.src < 0) return row;
  const int byte = k % task.width * WORD;
  return {row.src + byte, row.dst + byte};
}

DEVICE void gather(const MoveParams& p, const Task& task, u32 stage) {
  for (int begin = thread_idx(); begin < task.moves * task.width; begin += UNROLL * BLOCK) {
    i64 from[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) from[u] = find_word(p, task, begin + u * BLOCK).src;
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (from[u] >= 0) Words::put(stage + (begin + u * BLOCK) * SLOT, task.base + from[u]);
  }
  cp_async_wait_all();
}

// A thread takes the words that it put there itself.
DEVICE void scatter(const MoveParams& p, const Task& task, u32 stage) {
  for (int begin = thread_idx(); begin < task.moves * task.width; begin += UNROLL * BLOCK) {
    i64 to[UNROLL];
    Word words[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) to[u] = find_word(p, task, begin + u * BLOCK).dst;
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (to[u] >= 0) words[u] = Words::take(stage + (begin + u * BLOCK) * SLOT);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (to[u] >= 0) Words::store(task.base + to[u], words[u]);
  }
}

struct Ends {
  const u8* from;
  u8* to;  // null: the row stays
};

DEVICE Ends find_ends(const MoveParams& p, const Task& task, int move) {
  const Offsets row = find_row(p, task, move);
  u8* const kept = task.scratch + (i64)move * task.width * WORD;
  if (row.src < 0) return {nullptr, nullptr};
  return {WAY == SCATTER ? kept : task.base + row.src, WAY == GATHER ? kept : task.base + row.dst};
}

// A warp copies some rows at a time, a lane every 32nd word of them.
DEVICE void copy_rows(const MoveParams& p, const Task& task) {
  const int warp = thread_idx() / WARP, lane = thread_idx() % WARP;
  for (int move = warp * ROWS; move < task.moves; move += WARPS * ROWS) {
    Ends rows[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) rows[r] = find_ends(p, task, move + r);
    for (int begin = lane; begin < task.width; begin += COLUMNS * WARP) {
      Word words[ROWS][COLUMNS];
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          if (rows[r].to && begin + c * WARP < task.width)
            words[r][c] = Words::load(rows[r].from + (begin + c * WARP) * WORD);
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          if (rows[r].to && begin + c * WARP < task.width)
            Words::store(rows[r].to + (begin + c * WARP) * WORD, words[r][c]);
    }
  }
}

KERNEL_WITH(MoveParams, mlaflash_move, BLOCK, 1) {
  const i64 counted = p.n ? load_integer(p.n, p.wide_n, 0) - p.first_move : p.num_moves;
  const int live = (int)clamp(counted, 0, p.num_moves);
  const int chunks = live / p.chunk + (live % p.chunk != 0);
  const int slices = p.row_words / p.slice_words + (p.row_words % p.slice_words != 0);
  const i64 tasks = (i64)chunks * slices * p.num_layers;
  for (i64 index = block_idx_x(); index < tasks; index += grid_dim_x()) {
    const Task task = find_task(p, index, live, chunks, slices);
    if constexpr (WAY == STAGED) {
      gather(p, task, shared_base());
      block_sync();  // orders all reads of the task's rows before every thread's writes to them
      scatter(p, task, shared_base());
      block_sync();  // orders the reads of the stage before the next task's copies into it
    } else {
      copy_rows(p, task);
    }
  }
}
