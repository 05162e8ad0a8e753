// A fault stops the block: the message is kept, every fiber is abandoned, and the worker returns to Python.
#pragma once
#include <cstdarg>

#include "state.h"

namespace emulator {

// Appends to a fixed buffer: a fiber that never runs again must not own memory.
struct Text {
  char* at;
  u32 left;
  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
    va_list list;
    va_start(list, format);
    add_list(format, list);
    va_end(list);
  }
  void add_list(const char* format, va_list list) {
    const int wanted = vsnprintf(at, left, format, list);
    const u32 written = wanted < 0 ? 0 : (u32)wanted < left ? (u32)wanted : left - 1;
    at += written;
    left -= written;
  }
};

[[noreturn]] INLINE void abandon(Block& block, const char* kind) {
  block.failed = true;
  snprintf(block.fault_kind, sizeof(block.fault_kind), "%s", kind);
  context_switch(block.contexts[current_thread()], block.main);
  __builtin_trap();
}

[[noreturn]] [[maybe_unused]] static __attribute__((noinline, cold, format(printf, 4, 5))) void fault_of(
    u32 thread, Site site, const char* kind, const char* format, ...) {
  Block& block = current_block();
  Text text{block.fault_message, MESSAGE_BYTES};
  text.add("%s:%d: block (%u, %u, %u), thread %u (warp %u, lane %u): ", site.file, site.line, block.index[0],
           block.index[1], block.index[2], thread, thread / WARP, thread % WARP);
  va_list list;
  va_start(list, format);
  text.add_list(format, list);
  va_end(list);
  abandon(block, kind);
}
#define FAULT(site, kind, ...) fault_of(current_thread(), site, kind, __VA_ARGS__)

}  // namespace emulator
