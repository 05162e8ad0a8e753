// cp.async groups, their arrivals on mbarriers, and bulk copies.
//
// A destination is in flight from the issue of a copy until something that its readers can wait for: the issuing
// thread's wait_group, or the mbarrier that the copy completes on. A plain copy lands at the wait, as late as it may;
// what completes on an mbarrier lands at a random time and in random order.
#pragma once
#include "barriers.h"
#include "global.h"

namespace emulator {

template <u32 SIZE>
OUT_OF_LINE void open_destination(Block& block, Warp& warp, u32 offset, Site site) {
  stamp_write<SIZE>(block, warp, offset, IN_FLIGHT, site);
  memset(block.shared + offset, 0xff, SIZE);
}

// Of `size` bytes at dst, the first `bytes` come from src and zeros fill the rest.
OUT_OF_LINE void land(Block& block, u32 dst, u64 src, u32 bytes, u32 size, Epoch epoch) {
  memcpy(block.shared + dst, (const void*)(uintptr_t)src, bytes);
  memset(block.shared + dst + bytes, 0, size - bytes);
  u32* shadow = shadow_of(block, dst);
  for (u32 i = 0; i < size / 4; ++i) shadow[i] = epoch;
  if (!LANE_RACES) return;
  // A copy that its thread has waited for is that lane's; one that an mbarrier tracks is nobody's.
  const bool is_own = epoch % AGENTS < block.num_warps;
  const Warp& warp = block.warps[is_own ? epoch % AGENTS : 0];
  const u32 writer = is_own ? warp.segment << 6 | current_thread() % WARP : 0;
  for (u32 i = 0; i < size / 4; ++i) block.lanes[dst / 4 + i] = {writer, 0};
}

// What lands now on behalf of an mbarrier is ordered before the completion of its current phase.
OUT_OF_LINE Epoch epoch_of(Block& block, Mbarrier& mbarrier, u32 thread, Site site) {
  if (mbarrier.agent == AGENTS) {
    if (block.num_agents == AGENTS) {
      fault_of(thread, site, "barrier", "copies complete on more than %u mbarriers, which is all that can be tracked",
               AGENTS - block.num_warps);
    }
    mbarrier.agent = block.num_agents++;
  }
  return make_epoch(mbarrier.earlier_phases + mbarrier.phase + 1, mbarrier.agent);
}

template <u32 SIZE>
OUT_OF_LINE void async_copy(u32 address, const void* src, u32 bytes, Site site) {
  Block& block = current_block();
  Warp& warp = current_warp(block);
  const u32 offset = checked_offset<SIZE>(block, address, "cp.async", site);
  const u64 from = (u64)(uintptr_t)src;
  if (bytes > SIZE) FAULT(site, "bounds", "cp.async of %u bytes; allowed are 0 to %u", bytes, SIZE);
  if (from % SIZE) FAULT(site, "misaligned", "cp.async from %p, which is no multiple of %u", src, SIZE);
  if (bytes) count_load(block, from, bytes, true, site);
  ++block.counters.async_copies;
  open_destination<SIZE>(block, warp, offset, site);
  CopyList& copies = block.copies[current_thread()];
  if (copies.count == copies.capacity) copies.items = grown(copies.items, copies.capacity);
  copies.items[copies.count++] = {from, offset, bytes, SIZE, copies.committed, copies.next_serial++, nullptr};
}

OUT_OF_LINE void async_commit(Site site) {
  Block& block = current_block();
  ++block.copies[current_thread()].committed;
  yield_sometimes(block, site);
}

OUT_OF_LINE void async_wait(u32 pending, Site site) {
  Block& block = current_block();
  Warp& warp = current_warp(block);
  CopyList& copies = block.copies[current_thread()];
  u32 landed = 0;
  while (landed < copies.count && copies.items[landed].group + pending < copies.committed) {
    const Copy& copy = copies.items[landed++];
    Epoch epoch = warp.epoch;
    if (copy.tracker) {
      // Others may wait at the mbarrier for it, and this thread need not.
      epoch = epoch_of(block, *copy.tracker, current_thread(), site);
      u32& seen = warp.seen.at[epoch % AGENTS];
      seen = seen < epoch / AGENTS ? epoch / AGENTS : seen;
    }
    land(block, copy.dst, copy.src, copy.bytes, copy.size, epoch);
  }
  copies.count -= landed;
  if (landed) memmove((void*)copies.items, (const void*)(copies.items + landed), copies.count * sizeof(Copy));
  yield_sometimes(block, site);
}

OUT_OF_LINE void push_event(Block& block, const Event& event) {
  if (block.num_events == block.event_capacity) block.events = grown(block.events, block.event_capacity);
  block.events[block.num_events++] = event;
}

OUT_OF_LINE void async_arrive(u32 address, Site site) {
  Block& block = current_block();
  Mbarrier& mbarrier = find_mbarrier(block, current_warp(block), address, site);
  const u32 self = current_thread();
  CopyList& copies = block.copies[self];
  for (u32 i = copies.count; i > 0 && !copies.items[i - 1].tracker; --i) copies.items[i - 1].tracker = &mbarrier;
  push_event(block, {&mbarrier, 0, 0, 0, self, copies.next_serial, site});
  yield_sometimes(block, site);
}

OUT_OF_LINE void bulk_copy(u32 address, const void* src, u32 bytes, u32 mbarrier_address, Site site) {
  Block& block = current_block();
  Warp& warp = current_warp(block);
  const u64 from = (u64)(uintptr_t)src;
  if (from % 16 || bytes % 16) {
    FAULT(site, "misaligned", "bulk copy of %u bytes from %p; both must be multiples of 16", bytes, src);
  }
  if (!bytes) FAULT(site, "bounds", "bulk copy of 0 bytes");
  const u32 offset = checked_offset<16>(block, address, "bulk copy", site);
  if ((u64)offset + bytes > block.shared_bytes) {
    FAULT(site, "bounds", "bulk copy of %u bytes to shared + %u; the block has %u bytes", bytes, offset,
          block.shared_bytes);
  }
  Mbarrier& mbarrier = find_mbarrier(block, warp, mbarrier_address, site);
  count_load(block, from, bytes, true, site);
  ++block.counters.bulk_copies;
  for (u32 i = 0; i < bytes; i += 16) open_destination<16>(block, warp, offset + i, site);
  push_event(block, {&mbarrier, from, offset, bytes, current_thread(), 0, site});
  yield_sometimes(block, site);
}

OUT_OF_LINE void land_event(Block& block, u32 index) {
  const Event event = block.events[index];
  block.events[index] = block.events[--block.num_events];
  Mbarrier& mbarrier = *event.mbarrier;
  if (event.bytes) {
    const Epoch epoch = epoch_of(block, mbarrier, event.thread, event.site);
    for (u32 i = 0; i < event.bytes; i += 16) land(block, event.dst + i, event.src + i, 16, 16, epoch);
    mbarrier.tx -= event.bytes;
    complete_phase_if_due(block, mbarrier);
    return;
  }
  CopyList& copies = block.copies[event.thread];
  u32 landed = 0;
  // Serial numbers wrap; those of the copies in flight lie close together.
  while (landed < copies.count && (i32)(copies.items[landed].serial - event.serial_end) < 0) {
    const Copy& copy = copies.items[landed++];
    const Epoch epoch = epoch_of(block, *copy.tracker, event.thread, event.site);
    land(block, copy.dst, copy.src, copy.bytes, copy.size, epoch);
    // This arrival also comes after copies that an earlier arrival, still to come, tracks.
    u32& seen = mbarrier.open.at[epoch % AGENTS];
    if (copy.tracker != &mbarrier && seen < epoch / AGENTS) seen = epoch / AGENTS;
  }
  copies.count -= landed;
  if (landed) memmove((void*)copies.items, (const void*)(copies.items + landed), copies.count * sizeof(Copy));
  count_arrival(block, mbarrier, event.thread, event.site);
}

}  // namespace emulator
