// State of one block, and what a launch shares with Python.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fiber.h"

namespace emulator {

constexpr u32 MAX_WARPS = MAX_THREADS / WARP;
constexpr u32 FULL_WARP = 0xffffffffu;
// Whether races among the lanes of a warp are looked for too: a build of its own, because each access then costs more.
#ifdef MLAFLASH_LANE_RACES
constexpr bool LANE_RACES = MLAFLASH_LANE_RACES;
#else
constexpr bool LANE_RACES = false;
#endif
constexpr u32 MAX_MBARRIERS = 128;
constexpr u32 NAMED_BARRIERS = 16;
// Offset of the dynamic shared memory in the window. Not 0, as on a GPU, so that a forgotten shared_base() is seen.
constexpr u32 SHARED_BASE = 1024;

// Where in a kernel's source an instruction was called.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

// --- vector clocks -------------------------------------------------------------------------------------------------
// Agents are the warps of a block and the mbarriers that asynchronous copies complete on.
constexpr u32 AGENT_BITS = 6;
constexpr u32 AGENTS = 1u << AGENT_BITS;
constexpr u32 MAX_CLOCK = (1u << (32 - AGENT_BITS)) - 2;

struct Clock {
  u32 at[AGENTS];
  void join(const Clock& other) {
    for (u32 i = 0; i < AGENTS; ++i) at[i] = at[i] > other.at[i] ? at[i] : other.at[i];
  }
};

// Shadow of one word of shared memory: who wrote it last, and when. Three values are no agent's.
typedef u32 Epoch;
constexpr Epoch NEVER_WRITTEN = 0;
constexpr Epoch IN_FLIGHT = 0xffffffffu;
constexpr Epoch MBARRIER_WORD = 0xfffffffeu;
INLINE constexpr Epoch make_epoch(u32 clock, u32 agent) { return clock << AGENT_BITS | agent; }

// --- counters ------------------------------------------------------------------------------------------------------
// Python reads both structs as arrays of u64; mlaflash/emulator/run.py lists the same names in the same order.
struct Counters {
  u64 races;
  u64 shared_loads, shared_load_bytes, shared_stores, shared_store_bytes;
  u64 ldmatrix, ldmatrix_phases, ldmatrix_extra_wavefronts;
  u64 mma;
  u64 collectives;
  u64 block_barriers, named_barriers, mbarrier_arrivals;
  u64 shared_atomics, global_atomics;
  u64 async_copies, bulk_copies;
  u64 switches;
};
struct ArrayCounters {
  u64 loads, load_bytes, stores, store_bytes, async_bytes;
};

// --- launch --------------------------------------------------------------------------------------------------------
struct Array {
  u64 base, bytes;
  const char* name;
  u64 writable;
};
// Registered arrays may overlap (two views of one buffer). Segments do not: each counts for one array.
struct Segment {
  u64 base, bytes;
  u64 array;
};
constexpr u32 MESSAGE_BYTES = 8192;
constexpr u64 NO_BLOCK = ~0ull;
struct Launch {
  const void* params;
  u64 params_bytes;
  const Array* arrays;
  u64 num_arrays;
  const Segment* segments;
  u64 num_segments;
  u64 grid[3];
  u64 block;
  u64 shared_bytes;
  u64 seed;
  u64 check_races;
  u64 cancelled;  // set by another thread: give up soon
  // From here on shared by all workers.
  u64 next_block;
  u64 lock;
  u64 blocks_done;
  Counters* counters;
  ArrayCounters* array_counters;
  u64 fault_block;  // the least block that failed, so that the report does not depend on the number of workers
  char fault_kind[16];
  char fault_message[MESSAGE_BYTES];
};

// --- block ---------------------------------------------------------------------------------------------------------
// What the lanes of a warp meet at.
enum class Op : u32 {
  NONE,
  WARP_SYNC,
  SHUFFLE,
  SHUFFLE_XOR,
  VOTE,
  LDMATRIX,
  LDMATRIX_TRANS,
  MOVMATRIX,
  MMA_BF16,
  MMA_F16,
  BLOCK_SYNC,
  BARRIER_SYNC,
  BARRIER_ARRIVE,
};
INLINE const char* op_name(Op op) {
  static const char* const NAMES[] = {"nothing",
                                      "warp_sync",
                                      "shfl",
                                      "shfl_xor",
                                      "warp vote",
                                      "ldmatrix_x4",
                                      "ldmatrix_x4_trans",
                                      "movmatrix",
                                      "mma bf16",
                                      "mma f16",
                                      "block_sync",
                                      "named_barrier_sync",
                                      "named_barrier_arrive"};
  return NAMES[(u32)op];
}

// LANE_RACES: who of a warp wrote a word last, and who read it, as segment << 6 | lane. 0 is nobody.
struct LaneAccess {
  u32 writer, reader;
};
constexpr u32 SEVERAL_LANES = WARP;

struct Warp {
  u32 index;
  u32 segment;        // LANE_RACES: number of what lies between two points that order the warp's lanes
  u32 segment_clock;  // and the warp's clock before it
  u32 past;           // LANE_RACES: lanes that have waited in this segment for arrivals of all lanes in it
  u32 ready;          // lanes that may run; the running lane is not among them
  u32 alive;          // lanes that have not returned
  u32 arrived;        // lanes at the open collective
  u32 trying;         // lanes inside mbarrier_try_wait
  Op op;              // the open collective and its immediate operands
  u64 op_key;
  u32 clock;      // own component of `seen`
  Epoch epoch;    // what this warp's writes are stamped with
  Epoch trusted;  // an epoch known to lie before everything this warp does from now on
  void* arguments[WARP];
  Clock seen;
};

struct NamedBarrier {
  u32 expected;       // threads; 0 while nobody has arrived
  u32 arrived;        // threads
  u32 arrived_warps;  // masks
  u32 waiting_warps;
  Clock released;
};

struct Mbarrier {
  u32 offset;
  u32 count, pending;
  i64 tx;
  u32 phase;           // completed phases
  u32 earlier_phases;  // and more, of mbarriers that lay here before
  u32 agent;           // AGENTS: no asynchronous copy has completed here yet
  Epoch init_epoch;
  u32 waiting[MAX_WARPS];
  u32 arrived[MAX_WARPS], arrived_segment[MAX_WARPS];  // LANE_RACES: lanes, in that segment
  u32 whole[MAX_WARPS];  // LANE_RACES: segment in which all lanes arrived in the last complete phase
  Clock open;            // arrivals of the phase that is not complete
  Clock done;            // arrivals of every completed phase
};

// A cp.async that its thread has not waited for.
struct Copy {
  u64 src;
  u32 dst;
  u32 bytes;  // read from src; zeros fill the rest of `size`
  u32 size;
  u32 group;
  u32 serial;
  Mbarrier* tracker;  // the first mbarrier that was told to track it, or null
};
struct CopyList {
  Copy* items;
  u32 count, capacity;
  u32 committed;  // groups
  u32 next_serial;
};

// Something that happens on its own, some time after it was issued.
struct Event {
  Mbarrier* mbarrier;
  u64 src;
  u32 dst, bytes;  // bulk copy; bytes is 0 for the arrival that follows a thread's cp.async
  u32 thread;
  u32 serial_end;
  Site site;
};

struct AtomicWord {
  u32 word;
  Clock released;
};

constexpr u32 SEGMENT_CACHE = 256;

struct Block {
  Launch* launch;
  void (*kernel)(const void* params);
  u32 index[3];
  u32 num_threads, num_warps;
  u64 random;
  bool failed;

  // Scheduler.
  u32 live_warps;
  u32 current_warp;
  u32 pass;  // lanes of the current warp that this pass still may run
  u32 rotation, descending, burst;
  u32 failed_attempts;
  Context main;
  Warp warps[MAX_WARPS];
  Context contexts[MAX_THREADS];
  Site sites[MAX_THREADS];  // where a thread that does not run stopped
  Mbarrier* waits_for[MAX_THREADS];
  u32 wait_parity[MAX_THREADS];

  // Shared memory. A granule of 16 bytes has the epochs of its 4 words, then, warp by warp, the clocks of the last
  // reads.
  u8* shared;
  u32 shared_bytes;
  u32* shadow;
  u32 shadow_stride;
  LaneAccess* lanes;  // LANE_RACES: of each word
  u32 segments;
  u32 num_agents;
  AtomicWord* atomic_words;
  u32 num_atomic_words, atomic_capacity;

  // Barriers.
  NamedBarrier barriers[NAMED_BARRIERS];
  Mbarrier mbarriers[MAX_MBARRIERS];
  u32 num_mbarriers;

  // Asynchronous copies.
  CopyList copies[MAX_THREADS];
  Event* events;
  u32 num_events, event_capacity;

  // Global memory.
  const Segment* segment_cache[SEGMENT_CACHE];
  ArrayCounters* array_counters;

  Counters counters;
  char fault_kind[16];
  char fault_message[MESSAGE_BYTES];
};
static_assert(sizeof(Block) < STACKS_BYTES, "the block's state lies behind the stacks");

INLINE u32 current_thread() { return (u32)(stack_pointer() >> STACK_SHIFT) & (MAX_THREADS - 1); }
INLINE Block& current_block() {
  return *(Block*)(uintptr_t)((stack_pointer() & ~(RESERVATION_BYTES - 1)) + STACKS_BYTES);
}
INLINE Warp& current_warp(Block& block) { return block.warps[current_thread() / WARP]; }
INLINE u32 lane_bit(u32 thread) { return 1u << (thread % WARP); }

// Orders what the warp did until now before whatever acquires `to`.
OUT_OF_LINE void release(Warp& warp, Clock& to) {
  to.join(warp.seen);
  if (warp.clock < MAX_CLOCK) warp.seen.at[warp.index] = ++warp.clock;
  warp.epoch = make_epoch(warp.clock, warp.index);
}
OUT_OF_LINE void acquire(Warp& warp, const Clock& from) { warp.seen.join(from); }

// LANE_RACES: all lanes of the warp have come here, and what they did is ordered before what any of them does next.
INLINE void order_lanes(Block& block, Warp& warp) {
  if (!LANE_RACES) return;
  warp.segment = ++block.segments;
  warp.past = 0;
  warp.segment_clock = warp.clock;
  if (warp.clock < MAX_CLOCK) warp.seen.at[warp.index] = ++warp.clock;
  warp.epoch = make_epoch(warp.clock, warp.index);
}

INLINE u64 mix(u64 x) {  // finalizer of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
INLINE u64 next_random(Block& block) { return mix(block.random += 0x9e3779b97f4a7c15ull); }

template <class T>
INLINE T* grown(T* items, u32& capacity) {
  capacity = capacity ? 2 * capacity : 16;
  return (T*)realloc((void*)items, capacity * sizeof(T));
}

}  // namespace emulator
