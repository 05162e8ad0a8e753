// Atomics on shared memory: each one acquires what earlier ones on the same word released.
#pragma once
#include "scheduler.h"
#include "shadow.h"

namespace emulator {

OUT_OF_LINE Clock& clock_of_word(Block& block, u32 word) {
  for (u32 i = 0; i < block.num_atomic_words; ++i) {
    if (block.atomic_words[i].word == word) return block.atomic_words[i].released;
  }
  if (block.num_atomic_words == block.atomic_capacity) {
    block.atomic_words = grown(block.atomic_words, block.atomic_capacity);
  }
  AtomicWord& added = block.atomic_words[block.num_atomic_words++];
  memset(&added, 0, sizeof(added));
  added.word = word;
  return added.released;
}

OUT_OF_LINE u32 add_shared(u32 address, u32 value, Site site) {
  Block& block = current_block();
  Warp& warp = current_warp(block);
  yield(block, site);
  ++block.counters.shared_atomics;
  const u32 offset = checked_offset<4>(block, address, "atomic", site);
  Clock& released = clock_of_word(block, offset / 4);
  acquire(warp, released);
  const Epoch epoch = *shadow_of(block, offset);
  if (epoch != warp.trusted) check_writer(block, warp, epoch, offset, false, site);
  stamp_write<4>(block, warp, offset, warp.epoch, site);
  release(warp, released);
  u32 old;
  memcpy(&old, block.shared + offset, 4);
  const u32 sum = old + value;
  memcpy(block.shared + offset, &sum, 4);
  return old;
}

}  // namespace emulator
