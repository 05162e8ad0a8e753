// Fibers: one stack per CUDA thread, and the switch between two of them.
//
// The stacks of a block lie in one reservation that is aligned to its own size, so a stack pointer alone says which
// thread runs and where the block's state is. No thread-local variable is needed, and none could go stale.
#pragma once
#include <sys/mman.h>

#include <cstdint>

#if !defined(__linux__) || !(defined(__x86_64__) || defined(__aarch64__)) || defined(MLAFLASH_EMULATOR_UCONTEXT)
#define MLAFLASH_FIBER_UCONTEXT 1
#include <ucontext.h>
#endif

// Out of line on purpose: a kernel has hundreds of calls of these, and inlining them would cost compile time only.
#define OUT_OF_LINE [[maybe_unused]] static __attribute__((noinline))
#define INLINE [[maybe_unused]] static inline

namespace emulator {

// Four at a time, with the operators of C++; both compiler families have them.
typedef i32 Words4 __attribute__((vector_size(16)));
typedef float Floats4 __attribute__((vector_size(16)));

constexpr u32 MAX_THREADS = 1024;
constexpr u32 STACK_SHIFT = 17;
constexpr u64 STACK_BYTES = 1ull << STACK_SHIFT;
constexpr u64 STACKS_BYTES = MAX_THREADS * STACK_BYTES;
constexpr u64 RESERVATION_BYTES = 2 * STACKS_BYTES;
constexpr u64 STACK_CANARY = 0x6d6c61666c617368ull;
// Stacks at one power-of-two distance would meet in the same cache sets: each starts at its own offset.
constexpr u32 STACK_COLOURS = 64;
constexpr u32 STACK_COLOUR_BYTES = 512;

// Pure, so the compiler may keep the value: it changes only within the stack of one fiber.
INLINE u64 stack_pointer() {
#if defined(__x86_64__)
  u64 sp;
  asm("movq %%rsp, %0" : "=r"(sp));
  return sp;
#elif defined(__aarch64__)
  u64 sp;
  asm("mov %0, sp" : "=r"(sp));
  return sp;
#else
  return (u64)(uintptr_t)__builtin_frame_address(0);
#endif
}

#ifdef MLAFLASH_FIBER_UCONTEXT

struct Context {
  ucontext_t state;
};
INLINE void context_switch(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
INLINE void context_init(Context& context, u8* stack, u64 bytes, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = bytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

#else

struct Context {
  void* sp;
};
// Pushes the registers that a call must preserve, stores the stack pointer, takes the other one and pops.
extern "C" __attribute__((visibility("hidden"))) void mlaflash_fiber_switch(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
  .text
  .p2align 4
  .type mlaflash_fiber_switch, @function
mlaflash_fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
  .size mlaflash_fiber_switch, . - mlaflash_fiber_switch
)");
constexpr u32 CONTINUE_WORD = 6;  // index of that address
constexpr u32 FRAME_WORDS = 8;    // one word more, so that the entry sees the alignment that a call leaves
#else
asm(R"(
  .text
  .p2align 4
  .type mlaflash_fiber_switch, %function
mlaflash_fiber_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size mlaflash_fiber_switch, . - mlaflash_fiber_switch
)");
constexpr u32 CONTINUE_WORD = 11;
constexpr u32 FRAME_WORDS = 20;
#endif

INLINE void context_switch(Context& from, Context& to) { mlaflash_fiber_switch(&from.sp, to.sp); }
INLINE void context_init(Context& context, u8* stack, u64 bytes, void (*entry)()) {
  u64* frame = (u64*)(((u64)(uintptr_t)stack + bytes) & ~15ull) - FRAME_WORDS;
  for (u32 i = 0; i < FRAME_WORDS; ++i) frame[i] = 0;
  frame[CONTINUE_WORD] = (u64)(uintptr_t)entry;
  context.sp = frame;
}

#endif

// Address space for the stacks of MAX_THREADS threads and the block's state behind them; null if there is none left.
// Pages take memory when they are first touched.
OUT_OF_LINE u8* reserve_stacks() {
  u8* raw = (u8*)mmap(nullptr, 2 * RESERVATION_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == (u8*)MAP_FAILED) return nullptr;
  u8* aligned = (u8*)(((u64)(uintptr_t)raw + RESERVATION_BYTES - 1) & ~(RESERVATION_BYTES - 1));
  if (aligned > raw) munmap(raw, aligned - raw);
  munmap(aligned + RESERVATION_BYTES, raw + RESERVATION_BYTES - aligned);
  return aligned;
}
INLINE void release_stacks(u8* reservation) { munmap(reservation, RESERVATION_BYTES); }

}  // namespace emulator
