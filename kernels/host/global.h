// Global memory: every access lies inside a registered array, is aligned, and is counted for that array.
#pragma once
#include "fault.h"
#include "scheduler.h"

namespace emulator {

[[noreturn]] [[maybe_unused]] static __attribute__((noinline, cold)) void fault_global_bounds(const Launch& launch,
                                                                                              u64 address, u64 bytes,
                                                                                              const char* what,
                                                                                              Site site) {
  const Array* nearest = nullptr;
  u64 least = ~0ull;
  for (u64 i = 0; i < launch.num_arrays; ++i) {
    const Array& array = launch.arrays[i];
    const u64 distance = address < array.base                         ? array.base - address
                         : address + bytes > array.base + array.bytes ? address + bytes - array.base - array.bytes
                                                                      : 0;
    if (distance < least) {
      least = distance;
      nearest = &array;
    }
  }
  if (!address) FAULT(site, "bounds", "%s of %llu bytes through a null pointer", what, bytes);
  if (!nearest) FAULT(site, "bounds", "%s of %llu bytes at %#llx; no array is registered", what, bytes, address);
  FAULT(site, "bounds", "%s of %llu bytes outside every array; the nearest is %s, at byte %lld of its %llu", what,
        bytes, nearest->name, (i64)(address - nearest->base), nearest->bytes);
}

INLINE bool holds(u64 base, u64 size, u64 address, u64 bytes) {
  return address - base < size && size - (address - base) >= bytes;
}

OUT_OF_LINE const Segment& search_segment(Block& block, u64 address, u64 bytes, const char* what, Site site) {
  const Launch& launch = *block.launch;
  bool inside = false;
  for (u64 i = 0; i < launch.num_arrays; ++i) {
    inside |= holds(launch.arrays[i].base, launch.arrays[i].bytes, address, bytes);
  }
  if (!inside) fault_global_bounds(launch, address, bytes, what, site);
  for (u64 i = 0; i < launch.num_segments; ++i) {
    const Segment& segment = launch.segments[i];
    if (!holds(segment.base, segment.bytes, address, 1)) continue;
    block.segment_cache[(address >> 12) % SEGMENT_CACHE] = &segment;
    return segment;
  }
  fault_global_bounds(launch, address, bytes, what, site);
}

// Index of the array that an access counts for.
INLINE u64 find_array(Block& block, u64 address, u64 bytes, const char* what, Site site) {
  const Segment* segment = block.segment_cache[(address >> 12) % SEGMENT_CACHE];
  if (!holds(segment->base, segment->bytes, address, bytes)) {
    segment = &search_segment(block, address, bytes, what, site);
  }
  return segment->array;
}

OUT_OF_LINE void count_load(Block& block, u64 address, u64 bytes, bool is_async, Site site) {
  ArrayCounters& counters = block.array_counters[find_array(block, address, bytes, "read", site)];
  ++counters.loads;
  counters.load_bytes += bytes;
  if (is_async) counters.async_bytes += bytes;
}

INLINE void check_global_alignment(u64 address, u64 bytes, const char* what, Site site) {
  if (address % bytes) {
    FAULT(site, "misaligned", "%s of %llu bytes at %#llx, which is no multiple of it", what, bytes, address);
  }
}

OUT_OF_LINE void check_load(u64 address, u32 bytes, Site site) {
  check_global_alignment(address, bytes, "read", site);
  count_load(current_block(), address, bytes, false, site);
}

OUT_OF_LINE void check_store(u64 address, u32 bytes, Site site) {
  Block& block = current_block();
  check_global_alignment(address, bytes, "write", site);
  const u64 array = find_array(block, address, bytes, "write", site);
  if (!block.launch->arrays[array].writable) {
    FAULT(site, "bounds", "write of %u bytes to %s, which is read-only", bytes, block.launch->arrays[array].name);
  }
  ++block.array_counters[array].stores;
  block.array_counters[array].store_bytes += bytes;
}

template <class T>
INLINE T load_global(const void* ptr, Site site) {
  check_load((u64)(uintptr_t)ptr, sizeof(T), site);
  T value;
  memcpy(&value, ptr, sizeof(T));
  return value;
}

// A load that sees what blocks on other workers wrote. A kernel may poll with it, so it lets others run.
template <class T>
INLINE T load_global_coherent(const void* ptr, Site site) {
  yield_sometimes(current_block(), site);
  check_load((u64)(uintptr_t)ptr, sizeof(T), site);
  u32 words[sizeof(T) / 4];
  for (u32 i = 0; i < sizeof(T) / 4; ++i) words[i] = __atomic_load_n((const u32*)ptr + i, __ATOMIC_RELAXED);
  T value;
  memcpy(&value, words, sizeof(T));
  return value;
}

template <class T>
INLINE void store_global(void* ptr, const T& value, Site site) {
  check_store((u64)(uintptr_t)ptr, sizeof(T), site);
  memcpy(ptr, &value, sizeof(T));
}

OUT_OF_LINE u32 add_global(u32* ptr, u32 value, Site site) {
  Block& block = current_block();
  yield(block, site);
  check_load((u64)(uintptr_t)ptr, 4, site);
  check_store((u64)(uintptr_t)ptr, 4, site);
  ++block.counters.global_atomics;
  return __atomic_fetch_add(ptr, value, __ATOMIC_ACQ_REL);
}

}  // namespace emulator
