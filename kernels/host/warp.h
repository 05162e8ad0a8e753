// Warp collectives: lanes meet, and the last one to arrive computes for all.
#pragma once
#include "scheduler.h"

namespace emulator {

[[noreturn]] [[maybe_unused]] static __attribute__((noinline, cold)) void fault_divergence(Block& block, Warp& warp,
                                                                                           Op op, Site site) {
  if (warp.alive != FULL_WARP) {
    FAULT(site, "divergence", "%s needs the whole warp, and lanes 0x%08x have returned", op_name(op), ~warp.alive);
  }
  const Site other = block.sites[warp.index * WARP + (u32)__builtin_ctz(warp.arrived)];
  FAULT(site, "divergence", "the lane meets %s%s while lanes 0x%08x of its warp wait at %s, %s:%d", op_name(op),
        op == warp.op ? " with other operands" : "", warp.arrived, op_name(warp.op), other.file, other.line);
}

// True for the last lane, which must call part_lanes or make the lanes ready in another way. The others must suspend.
INLINE bool join_lanes(Block& block, Warp& warp, Op op, u64 key, void* arguments, Site site) {
  if (!warp.arrived) {
    warp.op = op;
    warp.op_key = key;
  }
  if (warp.op != op || warp.op_key != key || warp.alive != FULL_WARP) fault_divergence(block, warp, op, site);
  const u32 self = current_thread();
  warp.arguments[self % WARP] = arguments;
  warp.arrived |= lane_bit(self);
  if (warp.arrived != FULL_WARP) return false;
  warp.arrived = 0;
  ++block.counters.collectives;
  return true;
}
// The calling lane goes on; the others may.
INLINE void part_lanes(Warp& warp) { warp.ready |= FULL_WARP & ~lane_bit(current_thread()); }

// `compute` sees what each lane passed, and writes results there.
template <class Arguments, class Compute>
INLINE void collective(Op op, u64 key, Arguments& arguments, Site site, Compute compute) {
  Block& block = current_block();
  Warp& warp = current_warp(block);
  if (join_lanes(block, warp, op, key, &arguments, site)) {
    compute(block, (Arguments* const*)warp.arguments);
    part_lanes(warp);
  } else {
    reschedule(block, site);
  }
}

OUT_OF_LINE void sync_lanes(Site site) {
  char nothing = 0;
  collective(Op::WARP_SYNC, 0, nothing, site,
             [](Block& block, char* const*) { order_lanes(block, current_warp(block)); });
}

struct Shuffled {
  u64 value;
  u32 source;  // lane; one past the warp stands for the own one
};
OUT_OF_LINE u64 shuffle(Op op, u64 value, u32 source, Site site) {
  Shuffled own{value, source};
  collective(op, 0, own, site, [](Block&, Shuffled* const* lanes) {
    u64 values[WARP];
    for (u32 i = 0; i < WARP; ++i) values[i] = lanes[i]->value;
    for (u32 i = 0; i < WARP; ++i) lanes[i]->value = values[lanes[i]->source < WARP ? lanes[i]->source : i];
  });
  return own.value;
}
INLINE u64 shuffle_xor(u64 value, u32 mask, Site site) {
  return shuffle(Op::SHUFFLE_XOR, value, (current_thread() % WARP) ^ mask, site);
}

OUT_OF_LINE u32 vote(bool predicate, Site site) {
  u32 own = predicate;
  collective(Op::VOTE, 0, own, site, [](Block&, u32* const* lanes) {
    u32 ballot = 0;
    for (u32 i = 0; i < WARP; ++i) ballot |= *lanes[i] << i;
    for (u32 i = 0; i < WARP; ++i) *lanes[i] = ballot;
  });
  return own;
}

}  // namespace emulator
