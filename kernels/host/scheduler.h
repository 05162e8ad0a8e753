// Which fiber runs next, and the life of a block.
//
// A fiber runs until it has to wait, or to an instruction where another thread could overtake it. Warps and the order
// of the lanes are drawn from a generator that is seeded with the launch's seed and the block's index alone.
#pragma once
#include "fault.h"

namespace emulator {

constexpr u64 SMALLEST_FREE_STACK = 8192;
// Failed mbarrier_try_wait with no arrival, barrier or return of a warp in between, before that counts as a deadlock.
constexpr u32 MAX_FAILED_ATTEMPTS = 10000000;

OUT_OF_LINE void land_event(Block& block, u32 event);  // async.h
OUT_OF_LINE void release_block_barrier(Block& block);  // barriers.h

OUT_OF_LINE void describe_lanes(u32 lanes, Text& text) {
  if (lanes == FULL_WARP) {
    text.add("every lane");
  } else {
    text.add("lanes 0x%08x", lanes);
  }
}

[[noreturn]] [[maybe_unused]] static __attribute__((noinline, cold)) void fault_deadlock(Block& block) {
  Text text{block.fault_message, MESSAGE_BYTES};
  text.add("block (%u, %u, %u): no thread can go on and no copy is in flight", block.index[0], block.index[1],
           block.index[2]);
  for (u32 i = 0; i < block.num_warps; ++i) {
    const Warp& warp = block.warps[i];
    text.add("\n  warp %u: ", i);
    if (!warp.alive) text.add("has returned");
    if (warp.arrived) {
      describe_lanes(warp.arrived, text);
      const Site site = block.sites[i * WARP + (u32)__builtin_ctz(warp.arrived)];
      text.add(" at %s, %s:%d; ", op_name(warp.op), site.file, site.line);
    }
    for (u32 id = 0; id < NAMED_BARRIERS; ++id) {
      const NamedBarrier& barrier = block.barriers[id];
      if (!(barrier.waiting_warps >> i & 1)) continue;
      const Site site = block.sites[i * WARP];
      if (id == 0) {
        text.add("every lane at block_sync, %s:%d; ", site.file, site.line);
      } else {
        text.add("every lane at named barrier %u (%u of %u threads have arrived), %s:%d; ", id, barrier.arrived,
                 barrier.expected, site.file, site.line);
      }
    }
    for (u32 m = 0; m < block.num_mbarriers; ++m) {
      for (u32 parity = 0; parity < 2; ++parity) {
        u32 lanes = 0;
        for (u32 t = i * WARP; t < (i + 1) * WARP; ++t) {
          const bool waits = block.waits_for[t] == &block.mbarriers[m] && block.wait_parity[t] == parity;
          if (waits && (warp.alive & ~warp.arrived & lane_bit(t))) lanes |= lane_bit(t);
        }
        if (!lanes) continue;
        describe_lanes(lanes, text);
        const Mbarrier& mbarrier = block.mbarriers[m];
        const Site site = block.sites[i * WARP + (u32)__builtin_ctz(lanes)];
        text.add(
            " at the mbarrier at shared + %u for parity %u (%u phases complete, %u of %u arrivals and %lld bytes "
            "pending), %s:%d; ",
            mbarrier.offset, parity, mbarrier.phase, mbarrier.pending, mbarrier.count, mbarrier.tx, site.file,
            site.line);
      }
    }
  }
  abandon(block, "deadlock");
}

OUT_OF_LINE void start_pass(Block& block) {
  const u64 random = next_random(block);
  if (__atomic_load_n(&block.launch->cancelled, __ATOMIC_RELAXED)) abandon(block, "cancelled");
  if (block.num_events && random % 4 == 0) land_event(block, (u32)(random >> 33) % block.num_events);
  // An attempt may fail at any time before the phase completes.
  const bool wake_trying = (random >> 5) % 8 == 0;
  u32 candidates = 0;
  u32 trying = 0;
  for (;;) {
    for (u32 i = 0; i < block.num_warps; ++i) {
      candidates |= (u32)(block.warps[i].ready != 0) << i;
      trying |= block.warps[i].trying;
    }
    if (candidates || !block.num_events) break;
    land_event(block, (u32)(random >> 33) % block.num_events);
  }
  if (trying && (wake_trying || !candidates)) {
    for (u32 i = 0; i < block.num_warps; ++i) {
      Warp& warp = block.warps[i];
      warp.ready |= warp.trying;
      warp.trying = 0;
      candidates |= (u32)(warp.ready != 0) << i;
    }
  }
  if (!candidates) fault_deadlock(block);
  if (block.burst && (candidates >> block.current_warp & 1)) {
    --block.burst;
  } else {
    const u32 first = (u32)(random >> 8) % MAX_WARPS;
    const u32 later = candidates & ~((1u << first) - 1);
    block.current_warp = (u32)__builtin_ctz(later ? later : candidates);
    block.burst = (u32)(random >> 16) % 8;
  }
  block.pass = block.warps[block.current_warp].ready;
  // Now and then only some of the lanes, so that a warp also meets others half way.
  const u32 some = block.pass & (u32)(random >> 24);
  if ((random >> 20) % 8 == 0 && some) block.pass = some;
  block.rotation = (u32)(random >> 56) % WARP;
  block.descending = (u32)(random >> 62) & 1;
}

INLINE u32 next_thread(Block& block) {
  while (!block.pass) start_pass(block);
  const u32 r = block.rotation;
  const u32 rotated = block.pass >> r | block.pass << ((32 - r) & 31);
  const u32 lane = ((block.descending ? 31 - (u32)__builtin_clz(rotated) : (u32)__builtin_ctz(rotated)) + r) % WARP;
  block.pass &= ~(1u << lane);
  block.warps[block.current_warp].ready &= ~(1u << lane);
  return block.current_warp * WARP + lane;
}

// Lets others run. Returns when the calling thread's ready bit, which the caller or somebody else sets, is drawn.
OUT_OF_LINE void reschedule(Block& block, Site site) {
  const u32 self = current_thread();
  block.sites[self] = site;
  if (stack_pointer() % STACK_BYTES < SMALLEST_FREE_STACK) FAULT(site, "stack", "the fiber's stack is nearly full");
  const u32 next = next_thread(block);
  if (next == self) return;
  ++block.counters.switches;
  context_switch(block.contexts[self], block.contexts[next]);
}
INLINE void yield(Block& block, Site site) {
  current_warp(block).ready |= lane_bit(current_thread());
  reschedule(block, site);
}
// At instructions that other threads may overtake, but where a switch every time would only cost.
INLINE void yield_sometimes(Block& block, Site site) {
  if (next_random(block) % 4 == 0) yield(block, site);
}

INLINE u64* canary_of(u32 thread) {
  return (u64*)(uintptr_t)((stack_pointer() & ~(RESERVATION_BYTES - 1)) + thread * STACK_BYTES);
}

[[noreturn]] OUT_OF_LINE void finish_thread(Block& block) {
  const u32 self = current_thread();
  Warp& warp = current_warp(block);
  const Site site = block.sites[self];
  if (*canary_of(self) != STACK_CANARY) FAULT(site, "stack", "the fiber's stack has overflowed");
  if (block.copies[self].count) {
    FAULT(site, "async", "the thread returns with %u cp.async in flight, the first to shared + %u; wait for them",
          block.copies[self].count, block.copies[self].items[0].dst);
  }
  warp.alive &= ~lane_bit(self);
  if (warp.arrived) {
    const Site other = block.sites[warp.index * WARP + (u32)__builtin_ctz(warp.arrived)];
    FAULT(site, "divergence", "the lane returns while lanes 0x%08x of its warp wait for it at %s, %s:%d", warp.arrived,
          op_name(warp.op), other.file, other.line);
  }
  if (!warp.alive) {
    --block.live_warps;
    block.failed_attempts = 0;
    release_block_barrier(block);
  }
  if (!block.live_warps) {
    if (block.num_events) {
      const Event& event = block.events[0];
      fault_of(event.thread, event.site, "async", "the block returns with %u asynchronous copies or arrivals in flight",
               block.num_events);
    }
    context_switch(block.contexts[self], block.main);
  }
  context_switch(block.contexts[self], block.contexts[next_thread(block)]);
  __builtin_trap();
}

[[noreturn]] OUT_OF_LINE void thread_main() {
  Block& block = current_block();
  block.kernel(block.launch->params);
  finish_thread(block);
}

OUT_OF_LINE void start_block(Block& block, u8* reservation, u64 index) {
  const Launch& launch = *block.launch;
  block.index[0] = (u32)(index % launch.grid[0]);
  block.index[1] = (u32)(index / launch.grid[0] % launch.grid[1]);
  block.index[2] = (u32)(index / launch.grid[0] / launch.grid[1]);
  block.random = mix(launch.seed * 0x9e3779b97f4a7c15ull + mix(index + 1));
  block.failed = false;
  block.live_warps = block.num_warps;
  // The first pass is set up here: `start_pass` needs a fiber's stack to report faults from.
  block.current_warp = (u32)(next_random(block) % block.num_warps);
  block.pass = FULL_WARP;
  block.burst = block.rotation = block.descending = block.failed_attempts = 0;
  block.num_agents = block.num_warps;
  block.num_atomic_words = block.num_mbarriers = block.num_events = 0;
  memset(block.barriers, 0, sizeof(block.barriers));
  memset(&block.counters, 0, sizeof(block.counters));
  memset(block.array_counters, 0, launch.num_arrays * sizeof(ArrayCounters));
  memset(block.shared, 0xff, block.shared_bytes);
  memset(block.shadow, 0, (u64)(block.shared_bytes + 15) / 16 * block.shadow_stride * sizeof(u32));
  if (LANE_RACES) memset(block.lanes, 0, (u64)(block.shared_bytes / 4 + 4) * sizeof(LaneAccess));
  block.segments = block.num_warps;
  for (u32 i = 0; i < block.num_warps; ++i) {
    Warp& warp = block.warps[i];
    memset(&warp, 0, sizeof(warp));
    warp.index = i;
    warp.ready = warp.alive = FULL_WARP;
    warp.clock = warp.seen.at[i] = 1;
    warp.epoch = warp.trusted = make_epoch(1, i);
    warp.segment = i + 1;
  }
  for (u32 t = 0; t < block.num_threads; ++t) {
    u8* stack = reservation + t * STACK_BYTES;
    *(u64*)stack = STACK_CANARY;
    context_init(block.contexts[t], stack, STACK_BYTES - t % STACK_COLOURS * STACK_COLOUR_BYTES, thread_main);
    block.sites[t] = Site{"kernel", 0};
    block.waits_for[t] = nullptr;
    block.copies[t].count = block.copies[t].committed = block.copies[t].next_serial = 0;
  }
}

OUT_OF_LINE void run_block(Block& block, u8* reservation, u64 index) {
  start_block(block, reservation, index);
  // Comes back when the last thread has returned, or at a fault.
  context_switch(block.main, block.contexts[next_thread(block)]);
}

INLINE void lock(u64& word) {
  while (__atomic_exchange_n(&word, 1, __ATOMIC_ACQUIRE)) {
  }
}
INLINE void unlock(u64& word) { __atomic_store_n(&word, 0, __ATOMIC_RELEASE); }

INLINE void add_counters(u64* to, const u64* from, u64 count) {
  for (u64 i = 0; i < count; ++i) to[i] += from[i];
}

OUT_OF_LINE void publish(Block& block, u64 index) {
  Launch& launch = *block.launch;
  const u64 num_array_counters = launch.num_arrays * (sizeof(ArrayCounters) / sizeof(u64));
  lock(launch.lock);
  if (!block.failed) {
    ++launch.blocks_done;
    if (launch.fault_block == NO_BLOCK) {
      add_counters((u64*)launch.counters, (const u64*)&block.counters, sizeof(Counters) / sizeof(u64));
      add_counters((u64*)launch.array_counters, (const u64*)block.array_counters, num_array_counters);
    }
  } else if (index < launch.fault_block) {
    __atomic_store_n(&launch.fault_block, index, __ATOMIC_RELAXED);
    memcpy(launch.fault_kind, block.fault_kind, sizeof(launch.fault_kind));
    memcpy(launch.fault_message, block.fault_message, MESSAGE_BYTES);
    // From now on the counters are those of the failing block alone.
    memcpy(launch.counters, &block.counters, sizeof(Counters));
    memcpy(launch.array_counters, block.array_counters, launch.num_arrays * sizeof(ArrayCounters));
  }
  unlock(launch.lock);
}

enum Status : int { DONE = 0, NO_MEMORY = 1, PARAMS_SIZE = 2, BLOCK_SIZE = 3 };

// Runs blocks until none is left. Any number of threads of the process may do so for one launch.
OUT_OF_LINE int run_worker(Launch* launch, u64 max_threads, u64 params_bytes, void (*kernel)(const void*)) {
  if (launch->params_bytes != params_bytes) return PARAMS_SIZE;
  if (launch->block > max_threads) return BLOCK_SIZE;
  u8* reservation = reserve_stacks();
  if (!reservation) return NO_MEMORY;
  Block& block = *(Block*)(reservation + STACKS_BYTES);  // zero: the pages are new
  block.launch = launch;
  block.kernel = kernel;
  block.num_threads = (u32)launch->block;
  block.num_warps = block.num_threads / WARP;
  block.shared_bytes = (u32)launch->shared_bytes;
  block.shadow_stride = 4 * (1 + block.num_warps);
  block.shared = (u8*)malloc(block.shared_bytes + 16);
  block.shadow = (u32*)malloc(((u64)block.shared_bytes / 16 + 1) * block.shadow_stride * sizeof(u32));
  block.lanes = LANE_RACES ? (LaneAccess*)malloc((u64)(block.shared_bytes / 4 + 4) * sizeof(LaneAccess)) : nullptr;
  block.array_counters = (ArrayCounters*)calloc(launch->num_arrays + 1, sizeof(ArrayCounters));
  static const Segment NOWHERE = {0, 0, 0};
  for (u32 i = 0; i < SEGMENT_CACHE; ++i) block.segment_cache[i] = &NOWHERE;
  int status = NO_MEMORY;
  if (block.shared && block.shadow && block.array_counters && (block.lanes || !LANE_RACES)) {
    const u64 blocks = launch->grid[0] * launch->grid[1] * launch->grid[2];
    for (;;) {
      const u64 index = __atomic_fetch_add(&launch->next_block, 1, __ATOMIC_RELAXED);
      if (index >= blocks || index > __atomic_load_n(&launch->fault_block, __ATOMIC_RELAXED)) break;
      run_block(block, reservation, index);
      publish(block, index);
    }
    status = DONE;
  }
  for (u32 t = 0; t < block.num_threads; ++t) free(block.copies[t].items);
  free(block.atomic_words);
  free(block.events);
  free(block.array_counters);
  free(block.lanes);
  free(block.shadow);
  free(block.shared);
  release_stacks(reservation);
  return status;
}

}  // namespace emulator
