// move: rows of all layers from the slots src to the slots dst, as if all were read before any is written.
//
// Grid:   x = any number of blocks of 256 threads, which share the tasks; of STAGING == SCRATCH, one for each slab.
// Shared: chunk * slice_words staged words of max(WORD, 4) bytes; of STAGING == SCRATCH none.
// Idea:   the list is cut into groups, and no move writes a slot that a move of another group reads or writes. A task
//         is a chunk of whole groups, in one layer, and of each row one slice of columns: no task touches what another
//         one touches. Inside a task everything is read, then everything is written, so that overlaps, chains and
//         cycles are right in any order. Long groups get narrow slices, which keeps a task in shared memory; where that
//         is not enough it goes through a slab of scratch memory.
// Safety: an id that is no row of the pool, such as -1, makes an entry that is skipped.
#include "integers.cuh"
#include "move_params.cuh"
#include "ptx.cuh"

#if !defined(MLAFLASH_WORD) || !defined(MLAFLASH_STAGING)
#error "MLAFLASH_WORD or MLAFLASH_STAGING is missing: compile kernels through mlaflash.jit or mlaflash.emulator"
#endif
constexpr int SHARED = 0;
constexpr int SCRATCH = 1;
constexpr int WORD = MLAFLASH_WORD;        // bytes: divides all addresses and the row
constexpr int STAGING = MLAFLASH_STAGING;  // where a task keeps what it has read
static_assert(WORD == 16 || WORD == 4 || WORD == 1, "WORD is 16, 4 or 1");
static_assert(STAGING == SHARED || STAGING == SCRATCH, "STAGING is SHARED or SCRATCH");

constexpr int BLOCK = 256;
constexpr int UNROLL = 4;                       // words of a thread whose ids are loaded together
constexpr int SLOT = WORD < 4 ? 4 : (int)WORD;  // bytes of a staged word in shared memory

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

// Where a block keeps the words that it has read. A thread takes back those that it put there itself.
struct Stage {
  u32 smem;
  u8* slab;
};
DEVICE void put(const Stage& stage, int k, const u8* from) {
  if constexpr (STAGING == SHARED)
    Words::put(stage.smem + k * SLOT, from);
  else
    Words::store(stage.slab + (i64)k * WORD, Words::load(from));
}
DEVICE Word take(const Stage& stage, int k) {
  if constexpr (STAGING == SHARED)
    return Words::take(stage.smem + k * SLOT);
  else
    return Words::load(stage.slab + (i64)k * WORD);
}

struct Task {
  u8* base;   // the slice's columns of row 0
  int first;  // move
  int width;  // words of the slice
  int words;  // of all moves of the chunk
};

DEVICE Task find_task(const MoveParams& p, i64 index, int live, int chunks, int slices) {
  const int slice = (int)(index % slices);
  const int chunk = (int)(index / slices % chunks);
  const int layer = (int)(index / slices / chunks);
  const int column = slice * p.slice_words;
  Task task;
  task.base = (u8*)p.layers[layer] + (i64)column * WORD;
  task.first = chunk * p.chunk;
  task.width = min_int(p.slice_words, p.row_words - column);
  task.words = min_int(p.chunk, live - task.first) * task.width;
  return task;
}

// From the slice's first column in row 0, in bytes; -1: the word stays.
struct Offsets {
  i64 src, dst;
};

DEVICE Offsets find_word(const MoveParams& p, const Task& task, int k) {
  if (k >= task.words) return {-1, -1};
  const int move = task.first + k / task.width;
  const i64 src = load_integer(p.src, p.wide_src, move), dst = load_integer(p.dst, p.wide_dst, move);
  if (src < 0 || src >= p.num_rows || dst < 0 || dst >= p.num_rows || src == dst) return {-1, -1};
  const int byte = k % task.width * WORD;
  return {src * p.row_stride + byte, dst * p.row_stride + byte};
}

DEVICE void gather(const MoveParams& p, const Task& task, const Stage& stage) {
  for (int begin = thread_idx(); begin < task.words; begin += UNROLL * BLOCK) {
    i64 from[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) from[u] = find_word(p, task, begin + u * BLOCK).src;
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (from[u] >= 0) put(stage, begin + u * BLOCK, task.base + from[u]);
  }
  if constexpr (STAGING == SHARED) cp_async_wait_all();
}

DEVICE void scatter(const MoveParams& p, const Task& task, const Stage& stage) {
  for (int begin = thread_idx(); begin < task.words; begin += UNROLL * BLOCK) {
    i64 to[UNROLL];
    Word words[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) to[u] = find_word(p, task, begin + u * BLOCK).dst;
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (to[u] >= 0) words[u] = take(stage, begin + u * BLOCK);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (to[u] >= 0) Words::store(task.base + to[u], words[u]);
  }
}

KERNEL_WITH(MoveParams, mlaflash_move, BLOCK, 1) {
  const int live = (int)clamp(p.n ? load_integer(p.n, p.wide_n, 0) : p.num_moves, 0, p.num_moves);
  const int chunks = live / p.chunk + (live % p.chunk != 0);
  const int slices = p.row_words / p.slice_words + (p.row_words % p.slice_words != 0);
  const i64 tasks = (i64)chunks * slices * p.num_layers;
  const Stage stage{shared_base(), p.scratch + block_idx_x() * p.slab_bytes};
  for (i64 index = block_idx_x(); index < tasks; index += grid_dim_x()) {
    const Task task = find_task(p, index, live, chunks, slices);
    gather(p, task, stage);
    block_sync();  // orders all reads of the task's rows before every thread's writes to them
    scatter(p, task, stage);
    block_sync();  // orders the reads of the stage before the next task's copies into it
  }
}
