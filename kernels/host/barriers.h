// block_sync, named barriers and mbarriers.
#pragma once
#include "scheduler.h"
#include "shadow.h"
#include "warp.h"

namespace emulator {

// --- block_sync and named barriers -----------------------------------------------------------------------------------
OUT_OF_LINE void release_waiting_warps(Block& block, NamedBarrier& barrier) {
  for (u32 waiting = barrier.waiting_warps; waiting; waiting &= waiting - 1) {
    Warp& warp = block.warps[__builtin_ctz(waiting)];
    acquire(warp, barrier.released);
    warp.ready = FULL_WARP;
  }
  memset(&barrier, 0, sizeof(barrier));
  block.failed_attempts = 0;
}

// block_sync waits for every warp that has not returned.
OUT_OF_LINE void release_block_barrier(Block& block) {
  NamedBarrier& barrier = block.barriers[0];
  if (barrier.arrived && barrier.arrived == block.live_warps * WARP) release_waiting_warps(block, barrier);
}

// The whole warp arrives at once: hardware counts threads in warps.
OUT_OF_LINE void arrive_on_barrier(Block& block, Warp& warp, u32 id, u32 threads, bool waits, Site site) {
  NamedBarrier& barrier = block.barriers[id];
  if (id && barrier.arrived && barrier.expected != threads) {
    FAULT(site, "barrier", "named barrier %u is asked to count %u threads while %u of %u have arrived", id, threads,
          barrier.arrived, barrier.expected);
  }
  if (barrier.arrived_warps >> warp.index & 1) {
    FAULT(site, "barrier", "the warp arrives twice on named barrier %u before its %u threads have arrived (%u have)",
          id, threads, barrier.arrived);
  }
  barrier.expected = threads;
  barrier.arrived += WARP;
  barrier.arrived_warps |= 1u << warp.index;
  if (waits) barrier.waiting_warps |= 1u << warp.index;
  release(warp, barrier.released);
  if (id == 0) {
    release_block_barrier(block);
  } else if (barrier.arrived == threads) {
    release_waiting_warps(block, barrier);
  }
}

OUT_OF_LINE void barrier(Op op, u32 id, u32 threads, Site site) {
  Block& block = current_block();
  Warp& warp = current_warp(block);
  if (op != Op::BLOCK_SYNC) {
    if (id < 1 || id >= NAMED_BARRIERS) FAULT(site, "barrier", "named barrier %d; allowed are 1 to 15", (i32)id);
    if (!threads || threads % WARP || threads > block.num_threads) {
      FAULT(site, "barrier", "named barrier %u for %d threads; allowed is a multiple of 32 up to the block's %u", id,
            (i32)threads, block.num_threads);
    }
  }
  if (join_lanes(block, warp, op, (u64)id << 32 | threads, nullptr, site)) {
    ++(op == Op::BLOCK_SYNC ? block.counters.block_barriers : block.counters.named_barriers);
    if (op == Op::BARRIER_ARRIVE) {
      arrive_on_barrier(block, warp, id, threads, false, site);
      part_lanes(warp);
      return;
    }
    // This lane's own site stands for the warp's in a deadlock report.
    block.sites[warp.index * WARP] = site;
    arrive_on_barrier(block, warp, id, threads, true, site);
    order_lanes(block, warp);
  }
  reschedule(block, site);
}

// --- mbarriers -----------------------------------------------------------------------------------------------------
OUT_OF_LINE void mbarrier_create(u32 address, u32 count, Site site) {
  Block& block = current_block();
  Warp& warp = current_warp(block);
  const u32 offset = checked_offset<8>(block, address, "mbarrier_init", site);
  if (!count || count >= 1u << 20) FAULT(site, "barrier", "mbarrier count %u; allowed are 1 to 2^20 - 1", count);
  if (*shadow_of(block, offset) == MBARRIER_WORD) {
    FAULT(site, "barrier", "the mbarrier at shared + %u is initialised twice", offset);
  }
  u32 slot = 0;
  while (slot < block.num_mbarriers && block.mbarriers[slot].offset != offset) ++slot;
  if (slot == MAX_MBARRIERS) FAULT(site, "barrier", "more than %u mbarriers", MAX_MBARRIERS);
  stamp_write<8>(block, warp, offset, MBARRIER_WORD, site);
  memcpy(block.shared + offset, &slot, sizeof(slot));
  Mbarrier& mbarrier = block.mbarriers[slot];
  if (slot == block.num_mbarriers) {
    ++block.num_mbarriers;
    memset(&mbarrier, 0, sizeof(mbarrier));
    mbarrier.offset = offset;
    mbarrier.agent = AGENTS;
  }
  mbarrier.count = mbarrier.pending = count;
  mbarrier.init_epoch = warp.epoch;
}

OUT_OF_LINE Mbarrier& find_mbarrier(Block& block, Warp& warp, u32 address, Site site) {
  const u32 offset = checked_offset<8>(block, address, "mbarrier access", site);
  if (*shadow_of(block, offset) != MBARRIER_WORD) {
    FAULT(site, "barrier", "there is no mbarrier at shared + %u; initialise it first", offset);
  }
  u32 slot;
  memcpy(&slot, block.shared + offset, sizeof(slot));
  Mbarrier& mbarrier = block.mbarriers[slot];
  const u32 agent = mbarrier.init_epoch % AGENTS;
  if (warp.seen.at[agent] < mbarrier.init_epoch / AGENTS) report_race(block, offset, false, true, agent, site);
  return mbarrier;
}

// What comes to the same place later is another mbarrier, but of the same agent: its clock goes on.
OUT_OF_LINE void mbarrier_retire(u32 address, Site site) {
  Block& block = current_block();
  Warp& warp = current_warp(block);
  Mbarrier& mbarrier = find_mbarrier(block, warp, address, site);
  for (u32 i = 0; i < block.num_warps; ++i) {
    if (mbarrier.waiting[i]) FAULT(site, "barrier", "warp %u waits on the mbarrier that is invalidated", i);
  }
  for (u32 i = 0; i < block.num_events; ++i) {
    if (block.events[i].mbarrier == &mbarrier)
      FAULT(site, "barrier", "a copy is to arrive on the invalidated mbarrier");
  }
  for (u32 i = 0; i < 2; ++i) shadow_of(block, mbarrier.offset)[i] = warp.epoch;
  mbarrier.earlier_phases += mbarrier.phase + 1;
  mbarrier.phase = 0;
  mbarrier.tx = 0;
}

OUT_OF_LINE void complete_phase_if_due(Block& block, Mbarrier& mbarrier) {
  if (mbarrier.pending || mbarrier.tx) return;
  ++mbarrier.phase;
  mbarrier.pending = mbarrier.count;
  if (mbarrier.agent < AGENTS) mbarrier.open.at[mbarrier.agent] = mbarrier.earlier_phases + mbarrier.phase;
  mbarrier.done.join(mbarrier.open);
  for (u32 i = 0; i < block.num_warps; ++i) {
    block.warps[i].ready |= mbarrier.waiting[i];
    mbarrier.waiting[i] = 0;
    mbarrier.whole[i] = mbarrier.arrived[i] == block.warps[i].alive ? mbarrier.arrived_segment[i] : 0;
    mbarrier.arrived[i] = 0;
  }
}

OUT_OF_LINE void count_arrival(Block& block, Mbarrier& mbarrier, u32 thread, Site site) {
  ++block.counters.mbarrier_arrivals;
  block.failed_attempts = 0;
  if (!mbarrier.pending) {
    fault_of(thread, site, "barrier",
             "over-arrival on the mbarrier at shared + %u: all %u arrivals of phase %u are in, %lld bytes are pending",
             mbarrier.offset, mbarrier.count, mbarrier.phase, mbarrier.tx);
  }
  --mbarrier.pending;
  complete_phase_if_due(block, mbarrier);
}

// LANE_RACES: a lane stands for what the others did before the last point that orders them, and for no more, unless
// all of them arrive. Some may do so while others still wait at that point.
OUT_OF_LINE void release_lane(Warp& warp, Mbarrier& mbarrier) {
  if (!LANE_RACES) return release(warp, mbarrier.open);
  u32& arrived = mbarrier.arrived[warp.index];
  mbarrier.arrived_segment[warp.index] = warp.segment;
  arrived |= lane_bit(current_thread());
  Clock seen = warp.seen;
  if (arrived != warp.alive) seen.at[warp.index] = warp.segment_clock;
  mbarrier.open.join(seen);
  if (warp.clock < MAX_CLOCK) warp.seen.at[warp.index] = ++warp.clock;
  warp.epoch = make_epoch(warp.clock, warp.index);
}

OUT_OF_LINE void mbarrier_arrival(u32 address, u32 expected_bytes, Site site) {
  Block& block = current_block();
  Warp& warp = current_warp(block);
  Mbarrier& mbarrier = find_mbarrier(block, warp, address, site);
  mbarrier.tx += expected_bytes;
  if (mbarrier.tx >= 1 << 20) {
    FAULT(site, "barrier", "%lld pending bytes on the mbarrier at shared + %u; allowed are 2^20 - 1", mbarrier.tx,
          mbarrier.offset);
  }
  release_lane(warp, mbarrier);
  count_arrival(block, mbarrier, current_thread(), site);
  yield_sometimes(block, site);
}

// LANE_RACES: the lane is behind the others' arrivals. What these do between their arrival and their wait is taken to
// be before it as well.
INLINE void acquire_lane(Block& block, Warp& warp, const Mbarrier& mbarrier, u32 lane) {
  if (!LANE_RACES || mbarrier.whole[warp.index] != warp.segment) return;
  warp.past |= lane;
  if (warp.past == warp.alive) order_lanes(block, warp);
}

INLINE bool phase_is_complete(const Mbarrier& mbarrier, u32 parity) { return (mbarrier.phase & 1) != parity; }

OUT_OF_LINE bool mbarrier_attempt(u32 address, u32 parity, bool may_fail, Site site) {
  Block& block = current_block();
  Warp& warp = current_warp(block);
  if (parity > 1) FAULT(site, "barrier", "mbarrier parity %u; allowed are 0 and 1", parity);
  Mbarrier& mbarrier = find_mbarrier(block, warp, address, site);
  const u32 self = current_thread();
  yield_sometimes(block, site);
  while (!phase_is_complete(mbarrier, parity)) {
    block.waits_for[self] = &mbarrier;
    block.wait_parity[self] = parity;
    mbarrier.waiting[warp.index] |= lane_bit(self);
    if (may_fail) warp.trying |= lane_bit(self);
    reschedule(block, site);
    if (!may_fail) continue;
    warp.trying &= ~lane_bit(self);
    mbarrier.waiting[warp.index] &= ~lane_bit(self);
    if (phase_is_complete(mbarrier, parity)) break;
    if (++block.failed_attempts > MAX_FAILED_ATTEMPTS) fault_deadlock(block);
    return false;
  }
  block.waits_for[self] = nullptr;
  acquire(warp, mbarrier.done);
  acquire_lane(block, warp, mbarrier, lane_bit(self));
  return true;
}

}  // namespace emulator
