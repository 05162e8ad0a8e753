// Shared memory: bounds, alignment, poison and races.
//
// A race is an access that no barrier orders after an earlier access of another warp to the same word, one of the two
// a write, whatever order this schedule happened to take. Lanes of one warp share a clock. A build with LANE_RACES also
// holds the lanes of a warp against each other: what one writes, and another reads or writes, needs a warp_sync or a
// barrier of the whole warp in between, and a lane that arrives on an mbarrier stands for the others' accesses only up
// to the last of those. Shuffles, votes and matrix instructions order nothing.
#pragma once
#include "fault.h"

namespace emulator {

INLINE u32* shadow_of(Block& block, u32 offset) {
  return block.shadow + (u64)(offset / 16) * block.shadow_stride + offset / 4 % 4;
}

OUT_OF_LINE void describe_copy(Block& block, u32 offset, Text& text) {
  for (u32 t = 0; t < block.num_threads; ++t) {
    for (u32 i = 0; i < block.copies[t].count; ++i) {
      if (offset - block.copies[t].items[i].dst < block.copies[t].items[i].size) {
        text.add("a cp.async of thread %u", t);
        return;
      }
    }
  }
  for (u32 i = 0; i < block.num_events; ++i) {
    const Event& event = block.events[i];
    if (offset - event.dst < event.bytes) {
      text.add("a bulk copy of thread %u (%s:%d)", event.thread, event.site.file, event.site.line);
      return;
    }
  }
}

[[noreturn]] [[maybe_unused]] static __attribute__((noinline, cold)) void fault_in_flight(Block& block, u32 offset,
                                                                                          bool is_write, Site site) {
  char who[256];
  Text text{who, sizeof(who)};
  describe_copy(block, offset, text);
  FAULT(site, is_write ? "race" : "poison",
        "%s of shared + %u, the destination of %s that is still in flight; wait for it first",
        is_write ? "write" : "read", offset, who);
}

[[maybe_unused]] static __attribute__((noinline, cold)) void report_race(Block& block, u32 offset, bool is_write,
                                                                         bool after_write, u32 agent, Site site) {
  ++block.counters.races;
  if (!block.launch->check_races) return;
  char who[128];
  if (agent < block.num_warps) {
    snprintf(who, sizeof(who), "warp %u %s", agent, after_write ? "wrote" : "read");
  } else {
    u32 at = 0;
    for (u32 i = 0; i < block.num_mbarriers; ++i)
      at = block.mbarriers[i].agent == agent ? block.mbarriers[i].offset : at;
    snprintf(who, sizeof(who), "a copy that completes on the mbarrier at shared + %u wrote", at);
  }
  FAULT(site, "race", "%s of shared + %u, which %s with no barrier between the two", is_write ? "write" : "read",
        offset, who);
}

// `epoch` is not the one that the warp checked last.
OUT_OF_LINE void check_writer(Block& block, Warp& warp, Epoch epoch, u32 offset, bool is_write, Site site) {
  if (epoch == NEVER_WRITTEN) {
    if (is_write) return;
    FAULT(site, "poison", "read of shared + %u, which nothing has written yet", offset);
  }
  if (epoch == IN_FLIGHT) fault_in_flight(block, offset, is_write, site);
  if (epoch == MBARRIER_WORD) {
    FAULT(site, "barrier", "%s of shared + %u, which holds an mbarrier", is_write ? "write" : "read", offset);
  }
  const u32 agent = epoch % AGENTS;
  if (warp.seen.at[agent] >= epoch / AGENTS) {
    warp.trusted = epoch;
  } else {
    report_race(block, offset, is_write, true, agent, site);
  }
}

template <u32 BYTES>
INLINE u32 checked_offset(Block& block, u32 address, const char* what, Site site) {
  const u32 offset = address - SHARED_BASE;
  if (address < SHARED_BASE || (u64)offset + BYTES > block.shared_bytes) {
    FAULT(site, "bounds", "%s of %u bytes at shared + %d; the block has %u bytes", what, BYTES,
          (i32)(address - SHARED_BASE), block.shared_bytes);
  }
  if (offset % (BYTES < 16 ? BYTES : 16)) {
    FAULT(site, "misaligned", "%s of %u bytes at shared + %u, which is no multiple of %u", what, BYTES, offset,
          BYTES < 16 ? BYTES : 16);
  }
  return offset;
}

// Whether a word has another writer than the one that the warp checked last.
template <u32 BYTES>
INLINE bool is_news(const u32* writers, Epoch trusted) {
  if constexpr (BYTES == 16) {
    const Words4 differ = *(const Words4*)writers != (i32)trusted;
    return differ[0] | differ[1] | differ[2] | differ[3];
  }
  bool differs = false;
  for (u32 i = 0; i < BYTES / 4; ++i) differs |= writers[i] != trusted;
  return differs;
}

// Whether a warp has read a word later than this warp knows of. `reads` has four clocks for each warp.
template <u32 BYTES>
INLINE bool is_read_unordered(const Block& block, const u32* reads, const Clock& seen) {
  if constexpr (BYTES == 16) {
    Words4 later = {};
    for (u32 k = 0; k < block.num_warps; ++k) later |= ((const Words4*)reads)[k] > (i32)seen.at[k];
    return later[0] | later[1] | later[2] | later[3];
  }
  bool later = false;
  for (u32 k = 0; k < block.num_warps; ++k) {
    for (u32 i = 0; i < BYTES / 4; ++i) later |= reads[4 * k + i] > seen.at[k];
  }
  return later;
}

[[noreturn]] [[maybe_unused]] static __attribute__((noinline, cold)) void report_lanes(u32 offset, bool is_write,
                                                                                       const char* did, u32 lane,
                                                                                       Site site) {
  char who[32];
  if (lane == SEVERAL_LANES)
    snprintf(who, sizeof(who), "other lanes");
  else
    snprintf(who, sizeof(who), "lane %u", lane);
  FAULT(site, "race", "%s of shared + %u, which %s of the warp %s with no warp_sync between the two",
        is_write ? "write" : "read", offset, who, did);
}

// LANE_RACES: holds an access of a lane, or of several at once, against those of the others in its segment.
INLINE void check_lanes(Block& block, const Warp& warp, u32 offset, u32 words, bool is_write, u32 lane, Site site) {
  if (!LANE_RACES) return;
  for (u32 i = 0; i < words; ++i) {
    LaneAccess& access = block.lanes[offset / 4 + i];
    const u32 own = warp.segment << 6 | lane;
    const bool is_past = lane < WARP && warp.past >> lane & 1;
    const bool is_written = !is_past && access.writer >> 6 == warp.segment;
    const bool is_read = !is_past && access.reader >> 6 == warp.segment;
    if (is_written && access.writer != own) report_lanes(offset + 4 * i, is_write, "wrote", access.writer & 63, site);
    if (is_write && is_read && access.reader != own)
      report_lanes(offset + 4 * i, is_write, "read", access.reader & 63, site);
    if (is_write)
      access = {own, 0};
    else
      access.reader = is_read && access.reader != own ? warp.segment << 6 | SEVERAL_LANES : own;
  }
}

template <u32 BYTES>
OUT_OF_LINE const u8* shared_read(u32 address, Site site, u32 lane = current_thread() % WARP) {
  Block& block = current_block();
  Warp& warp = current_warp(block);
  const u32 offset = checked_offset<BYTES>(block, address, "read", site);
  u32* shadow = shadow_of(block, offset);
  if (is_news<BYTES>(shadow, warp.trusted)) {
    for (u32 i = 0; i < BYTES / 4; ++i) {
      if (shadow[i] != warp.trusted) check_writer(block, warp, shadow[i], offset + 4 * i, false, site);
    }
  }
  check_lanes(block, warp, offset, BYTES / 4, false, lane, site);
  u32* reads = shadow + 4 + 4 * warp.index;
  for (u32 i = 0; i < BYTES / 4; ++i) reads[i] = warp.clock;
  return block.shared + offset;
}

// Checks a write of 4, 8 or 16 bytes inside one granule and stamps it with `epoch`.
template <u32 BYTES>
INLINE void stamp_write(Block& block, Warp& warp, u32 offset, Epoch epoch, Site site) {
  u32* shadow = shadow_of(block, offset);
  if (is_news<BYTES>(shadow, warp.trusted)) {
    for (u32 i = 0; i < BYTES / 4; ++i) {
      if (shadow[i] != warp.trusted) check_writer(block, warp, shadow[i], offset + 4 * i, true, site);
    }
  }
  check_lanes(block, warp, offset, BYTES / 4, true, current_thread() % WARP, site);
  if (is_read_unordered<BYTES>(block, shadow + 4, warp.seen)) {
    for (u32 k = 0; k < block.num_warps; ++k) {
      for (u32 i = 0; i < BYTES / 4; ++i) {
        if (shadow[4 + 4 * k + i] > warp.seen.at[k]) report_race(block, offset + 4 * i, true, false, k, site);
      }
    }
  }
  for (u32 i = 0; i < BYTES / 4; ++i) shadow[i] = epoch;
}

template <u32 BYTES>
OUT_OF_LINE u8* shared_write(u32 address, Site site) {
  Block& block = current_block();
  Warp& warp = current_warp(block);
  const u32 offset = checked_offset<BYTES>(block, address, "write", site);
  stamp_write<BYTES>(block, warp, offset, warp.epoch, site);
  return block.shared + offset;
}

template <class T>
INLINE T load_shared(u32 address, Site site) {
  Counters& counters = current_block().counters;
  ++counters.shared_loads;
  counters.shared_load_bytes += sizeof(T);
  T value;
  memcpy(&value, shared_read<sizeof(T)>(address, site), sizeof(T));
  return value;
}
template <class T>
INLINE void store_shared(u32 address, const T& value, Site site) {
  Counters& counters = current_block().counters;
  ++counters.shared_stores;
  counters.shared_store_bytes += sizeof(T);
  memcpy(shared_write<sizeof(T)>(address, site), &value, sizeof(T));
}

}  // namespace emulator
