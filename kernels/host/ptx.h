// The emulator's implementation of the instruction header. Same names, same arguments; see include/ptx.cuh for what
// each one does on a GPU. `SITE` adds the caller's place in the source, which reports name.
#pragma once
#include "async.h"
#include "atomics.h"
#include "barriers.h"
#include "global.h"
#include "tensor.h"
#include "warp.h"

#define DEVICE [[maybe_unused]] static inline
#define SITE emulator::Site site = emulator::Site::here()
#define KERNEL_WITH(Params, name, threads, min_blocks)                                                            \
  static_assert((threads) % WARP == 0 && (threads) > 0 && (threads) <= emulator::MAX_THREADS && (min_blocks) > 0, \
                "a block is 1 to 32 whole warps");                                                                \
  static void name##_thread(const Params& p);                                                                     \
  extern "C" __attribute__((visibility("default"))) int name(emulator::Launch* launch) {                          \
    return emulator::run_worker(launch, threads, sizeof(Params),                                                  \
                                [](const void* p) { name##_thread(*static_cast<const Params*>(p)); });            \
  }                                                                                                               \
  static void name##_thread([[maybe_unused]] const Params& p)
#define KERNEL(name, threads, min_blocks) KERNEL_WITH(VerifyParams, name, threads, min_blocks)

// --- indices -------------------------------------------------------------------------------------------------------
DEVICE int thread_idx() { return (int)emulator::current_thread(); }
DEVICE int thread_idx_anew() { return thread_idx(); }
DEVICE int lane_idx_anew() { return thread_idx() % 32; }
DEVICE int block_idx_x() { return (int)emulator::current_block().index[0]; }
DEVICE int block_idx_y() { return (int)emulator::current_block().index[1]; }
DEVICE int block_idx_z() { return (int)emulator::current_block().index[2]; }
DEVICE int grid_dim_x() { return (int)emulator::current_block().launch->grid[0]; }
DEVICE int grid_dim_y() { return (int)emulator::current_block().launch->grid[1]; }
DEVICE int grid_dim_z() { return (int)emulator::current_block().launch->grid[2]; }

DEVICE u32 shared_base() { return emulator::SHARED_BASE; }

// --- global memory -------------------------------------------------------------------------------------------------
DEVICE u8 ld_global_u8(const void* ptr, SITE) { return emulator::load_global<u8>(ptr, site); }
DEVICE u16 ld_global_u16(const void* ptr, SITE) { return emulator::load_global<u16>(ptr, site); }
DEVICE u32 ld_global_u32(const void* ptr, SITE) { return emulator::load_global<u32>(ptr, site); }
DEVICE u32 ld_global_early_u32(const void* ptr, SITE) { return emulator::load_global<u32>(ptr, site); }
DEVICE float ld_global_volatile_f32(const void* ptr, SITE) { return emulator::load_global<float>(ptr, site); }
DEVICE u32x2 ld_global_volatile_u32x2(const void* ptr, SITE) { return emulator::load_global<u32x2>(ptr, site); }
DEVICE f32x4 ld_global_volatile_f32x4(const void* ptr, SITE) { return emulator::load_global<f32x4>(ptr, site); }
DEVICE u64 ld_global_u64(const void* ptr, SITE) { return emulator::load_global<u64>(ptr, site); }
DEVICE float ld_global_f32(const void* ptr, SITE) { return emulator::load_global<float>(ptr, site); }
DEVICE u32x2 ld_global_u32x2(const void* ptr, SITE) { return emulator::load_global<u32x2>(ptr, site); }
DEVICE u32x4 ld_global_u32x4(const void* ptr, SITE) { return emulator::load_global<u32x4>(ptr, site); }
DEVICE f32x2 ld_global_f32x2(const void* ptr, SITE) { return emulator::load_global<f32x2>(ptr, site); }
DEVICE f32x4 ld_global_f32x4(const void* ptr, SITE) { return emulator::load_global<f32x4>(ptr, site); }
DEVICE u32 ld_global_nc_u32(const void* ptr, SITE) { return emulator::load_global<u32>(ptr, site); }
DEVICE u32 ld_global_cg_u32(const void* ptr, SITE) { return emulator::load_global_coherent<u32>(ptr, site); }
DEVICE float ld_global_cg_f32(const void* ptr, SITE) { return emulator::load_global_coherent<float>(ptr, site); }
DEVICE u32x2 ld_global_cg_u32x2(const void* ptr, SITE) { return emulator::load_global_coherent<u32x2>(ptr, site); }
DEVICE u32x4 ld_global_cg_u32x4(const void* ptr, SITE) { return emulator::load_global_coherent<u32x4>(ptr, site); }
DEVICE f32x4 ld_global_cg_f32x4(const void* ptr, SITE) { return emulator::load_global_coherent<f32x4>(ptr, site); }
DEVICE void st_global_u8(void* ptr, u8 v, SITE) { emulator::store_global(ptr, v, site); }
DEVICE void st_global_u16(void* ptr, u16 v, SITE) { emulator::store_global(ptr, v, site); }
DEVICE void st_global_u32(void* ptr, u32 v, SITE) { emulator::store_global(ptr, v, site); }
DEVICE void st_global_u64(void* ptr, u64 v, SITE) { emulator::store_global(ptr, v, site); }
DEVICE void st_global_f32(void* ptr, float v, SITE) { emulator::store_global(ptr, v, site); }
DEVICE void st_global_u32x2(void* ptr, u32x2 v, SITE) { emulator::store_global(ptr, v, site); }
DEVICE void st_global_u32x4(void* ptr, u32x4 v, SITE) { emulator::store_global(ptr, v, site); }
DEVICE void st_global_f32x2(void* ptr, f32x2 v, SITE) { emulator::store_global(ptr, v, site); }
DEVICE void st_global_f32x4(void* ptr, f32x4 v, SITE) { emulator::store_global(ptr, v, site); }
DEVICE u32 atomic_add_global_u32(u32* ptr, u32 v, SITE) { return emulator::add_global(ptr, v, site); }
DEVICE void fence_gpu() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }

// --- shared memory -------------------------------------------------------------------------------------------------
DEVICE u32 ld_shared_u32(u32 addr, SITE) { return emulator::load_shared<u32>(addr, site); }
DEVICE u32x2 ld_shared_u32x2(u32 addr, SITE) { return emulator::load_shared<u32x2>(addr, site); }
DEVICE u32x4 ld_shared_u32x4(u32 addr, SITE) { return emulator::load_shared<u32x4>(addr, site); }
DEVICE float ld_shared_f32(u32 addr, SITE) { return emulator::load_shared<float>(addr, site); }
DEVICE f32x2 ld_shared_f32x2(u32 addr, SITE) { return emulator::load_shared<f32x2>(addr, site); }
DEVICE f32x4 ld_shared_f32x4(u32 addr, SITE) { return emulator::load_shared<f32x4>(addr, site); }
DEVICE void st_shared_u32(u32 addr, u32 v, SITE) { emulator::store_shared(addr, v, site); }
DEVICE void st_shared_u32x2(u32 addr, u32x2 v, SITE) { emulator::store_shared(addr, v, site); }
DEVICE void st_shared_u32x4(u32 addr, u32x4 v, SITE) { emulator::store_shared(addr, v, site); }
DEVICE void st_shared_f32(u32 addr, float v, SITE) { emulator::store_shared(addr, v, site); }
DEVICE void st_shared_f32x2(u32 addr, f32x2 v, SITE) { emulator::store_shared(addr, v, site); }
DEVICE void st_shared_f32x4(u32 addr, f32x4 v, SITE) { emulator::store_shared(addr, v, site); }
DEVICE u32 atomic_add_shared_u32(u32 addr, u32 v, SITE) { return emulator::add_shared(addr, v, site); }

// --- asynchronous copies, global to shared -------------------------------------------------------------------------
DEVICE void cp_async_16(u32 dst, const void* src, SITE) { emulator::async_copy<16>(dst, src, 16, site); }
DEVICE void cp_async_16_zfill(u32 dst, const void* src, u32 src_bytes, SITE) {
  emulator::async_copy<16>(dst, src, src_bytes, site);
}
DEVICE void cp_async_4(u32 dst, const void* src, SITE) { emulator::async_copy<4>(dst, src, 4, site); }
DEVICE void cp_async_4_zfill(u32 dst, const void* src, u32 src_bytes, SITE) {
  emulator::async_copy<4>(dst, src, src_bytes, site);
}
DEVICE void cp_async_commit(SITE) { emulator::async_commit(site); }
template <int PENDING>
DEVICE void cp_async_wait(SITE) {
  emulator::async_wait(PENDING, site);
}
DEVICE void cp_async_wait_all(SITE) {
  emulator::async_commit(site);
  emulator::async_wait(0, site);
}
DEVICE void cp_async_mbarrier_arrive_noinc(u32 mbar, SITE) { emulator::async_arrive(mbar, site); }
DEVICE void bulk_copy_g2s(u32 dst, const void* src, u32 bytes, u32 mbar, SITE) {
  emulator::bulk_copy(dst, src, bytes, mbar, site);
}
DEVICE void mbarrier_arrive_expect_tx(u32 mbar, u32 bytes, SITE) { emulator::mbarrier_arrival(mbar, bytes, site); }
// Changes nothing that a program can see, and hardware ignores an address that does not exist.
DEVICE void prefetch_l2(const void*) {}

// --- barriers ------------------------------------------------------------------------------------------------------
DEVICE void block_sync(SITE) { emulator::barrier(emulator::Op::BLOCK_SYNC, 0, 0, site); }
DEVICE void warp_sync(SITE) { emulator::sync_lanes(site); }
DEVICE void named_barrier_sync(int id, int threads, SITE) {
  emulator::barrier(emulator::Op::BARRIER_SYNC, (u32)id, (u32)threads, site);
}
DEVICE void named_barrier_arrive(int id, int threads, SITE) {
  emulator::barrier(emulator::Op::BARRIER_ARRIVE, (u32)id, (u32)threads, site);
}
DEVICE void mbarrier_init(u32 mbar, u32 count, SITE) { emulator::mbarrier_create(mbar, count, site); }
DEVICE void mbarrier_inval(u32 mbar, SITE) { emulator::mbarrier_retire(mbar, site); }
DEVICE void mbarrier_arrive(u32 mbar, SITE) { emulator::mbarrier_arrival(mbar, 0, site); }
DEVICE bool mbarrier_try_wait(u32 mbar, u32 parity, SITE) {
  return emulator::mbarrier_attempt(mbar, parity, true, site);
}
DEVICE void mbarrier_wait(u32 mbar, u32 parity, SITE) { emulator::mbarrier_attempt(mbar, parity, false, site); }

// --- warp ----------------------------------------------------------------------------------------------------------
DEVICE u32 shfl_xor_u32(u32 v, int lane_mask, SITE) { return (u32)emulator::shuffle_xor(v, (u32)lane_mask, site); }
DEVICE float shfl_xor_f32(float v, int lane_mask, SITE) {
  return emulator::bits_to_f32((u32)emulator::shuffle_xor(emulator::f32_to_bits(v), (u32)lane_mask, site));
}
DEVICE u64 shfl_u64(u64 v, int src_lane, SITE) {
  return emulator::shuffle(emulator::Op::SHUFFLE, v, (u32)src_lane % WARP, site);
}
DEVICE u32 shfl_u32(u32 v, int src_lane, SITE) { return (u32)shfl_u64(v, src_lane, site); }
DEVICE float shfl_f32(float v, int src_lane, SITE) {
  return emulator::bits_to_f32((u32)shfl_u64(emulator::f32_to_bits(v), src_lane, site));
}
DEVICE u32 make_uniform(u32 v, SITE) {
  const u32 first = shfl_u32(v, 0, site);
  if (emulator::vote(v != first, site) != 0)
    emulator::fault_of(emulator::current_thread(), site, "divergence", "the lanes give make_uniform different values");
  return first;
}
DEVICE bool warp_any(bool predicate, SITE) { return emulator::vote(predicate, site) != 0; }
DEVICE u32 warp_ballot(bool predicate, SITE) { return emulator::vote(predicate, site); }

// --- tensor cores --------------------------------------------------------------------------------------------------
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 addr, SITE) { emulator::load_matrices(false, r, addr, site); }
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 addr, SITE) { emulator::load_matrices(true, r, addr, site); }
DEVICE u32 movmatrix(u32 a, SITE) { return emulator::transpose_matrix(a, site); }
DEVICE void mma_m16n8k16_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, SITE) {
  emulator::multiply_bf16(c, a, b0, b1, site);
}
DEVICE void mma_m16n8k16_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, SITE) {
  emulator::multiply_f16(c, a, b0, b1, site);
}

// --- arithmetic ----------------------------------------------------------------------------------------------------
DEVICE float ex2(float x) { return emulator::flushed(exp2f(emulator::flushed(x))); }
DEVICE float lg2(float x) { return log2f(emulator::flushed(x)); }
DEVICE float tanh_f32(float x) { return tanhf(x); }
DEVICE float fma_f32(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE u32 max_u16x2(u32 a, u32 b) {
  const u32 low = (a & 0xffffu) > (b & 0xffffu) ? a : b, high = a >> 16 > b >> 16 ? a : b;
  return (high & 0xffff0000u) | (low & 0xffffu);
}
// fmaxf may give either zero; the instruction gives the positive one.
DEVICE float max_f32(float a, float b) { return a != b ? fmaxf(a, b) : std::signbit(a) ? b : a; }
DEVICE float ceil_f32(float x) { return ceilf(x); }
DEVICE u32 mul_hi_u32(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
DEVICE i64 mad_wide_i32(i32 a, i32 b, i64 c) { return (i64)a * b + c; }
DEVICE u32 keep_in_register(u32 v) { return v; }
DEVICE float as_f32(u32 bits) { return emulator::bits_to_f32(bits); }
DEVICE u32 as_u32(float v) { return emulator::f32_to_bits(v); }
DEVICE u32 pack_bf16x2(float lo, float hi) {
  return emulator::round_to_bf16(lo) | (u32)emulator::round_to_bf16(hi) << 16;
}
DEVICE u32 pack_f16x2(float lo, float hi) { return emulator::round_to_f16(lo) | (u32)emulator::round_to_f16(hi) << 16; }
DEVICE float f16_to_f32(u16 v) { return emulator::f16_value(v); }
DEVICE float bf16_to_f32(u16 v) { return emulator::bf16_value(v); }
DEVICE u32x2 e4m3x4_to_f16(u32 v) {
  return {emulator::e4m3_to_f16(v) | (u32)emulator::e4m3_to_f16(v >> 8) << 16,
          emulator::e4m3_to_f16(v >> 16) | (u32)emulator::e4m3_to_f16(v >> 24) << 16};
}
template <u32 SELECTOR>
DEVICE u32 permute_bytes(u32 lo, u32 hi) {
  const u64 bytes = (u64)hi << 32 | lo;
  u32 result = 0;
  for (u32 i = 0; i < 4; ++i) result |= (u32)(u8)(bytes >> (SELECTOR >> 4 * i & 7) * 8) << 8 * i;
  return result;
}

// --- compiler ------------------------------------------------------------------------------------------------------
DEVICE void split_code(bool) {}

// --- dependent launch ----------------------------------------------------------------------------------------------
// The emulator runs one kernel after the other.
DEVICE void launch_dependents() {}
DEVICE void wait_prerequisites() {}
