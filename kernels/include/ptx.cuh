// The instruction header: every hardware instruction and every access to shared or global memory is one function here.
// Under MLAFLASH_EMULATOR the same names come from the host implementation, which checks and counts each of them.
// Shared memory is addressed by byte offset (u32) in the block's shared window; global memory by pointer.
#pragma once
#include "types.cuh"

#ifdef MLAFLASH_EMULATOR
#include "../host/ptx.h"
#else

#define DEVICE static __device__ __forceinline__
// One block of `threads` threads; at least `min_blocks` of them fit an SM's registers. `Params` is what p is.
#define KERNEL_WITH(Params, name, threads, min_blocks) \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) name(const __grid_constant__ Params p)
#define KERNEL(name, threads, min_blocks) KERNEL_WITH(VerifyParams, name, threads, min_blocks)

// --- indices -------------------------------------------------------------------------------------------------------
DEVICE int thread_idx() { return threadIdx.x; }
// The same, read again: nothing derived from it stays in a register from one use to the next.
DEVICE int thread_idx_anew() {
  int v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v;
}
// Of the lane in its warp, likewise.
DEVICE int lane_idx_anew() {
  int v;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(v));
  return v;
}
DEVICE int block_idx_x() { return blockIdx.x; }
DEVICE int block_idx_y() { return blockIdx.y; }
DEVICE int block_idx_z() { return blockIdx.z; }
DEVICE int grid_dim_x() { return gridDim.x; }
DEVICE int grid_dim_y() { return gridDim.y; }
DEVICE int grid_dim_z() { return gridDim.z; }

// Offset of the dynamic shared memory in the shared window, 128-byte aligned.
DEVICE u32 shared_base() {
  extern __shared__ __align__(128) u8 dynamic_smem[];
  return (u32)__cvta_generic_to_shared(dynamic_smem);
}

// --- global memory -------------------------------------------------------------------------------------------------
DEVICE u8 ld_global_u8(const void* ptr) { return *(const u8*)ptr; }
DEVICE u16 ld_global_u16(const void* ptr) { return *(const u16*)ptr; }
DEVICE u32 ld_global_u32(const void* ptr) { return *(const u32*)ptr; }
DEVICE u64 ld_global_u64(const void* ptr) { return *(const u64*)ptr; }
DEVICE float ld_global_f32(const void* ptr) { return *(const float*)ptr; }
DEVICE u32x2 ld_global_u32x2(const void* ptr) { return *(const u32x2*)ptr; }
DEVICE u32x4 ld_global_u32x4(const void* ptr) { return *(const u32x4*)ptr; }
DEVICE f32x2 ld_global_f32x2(const void* ptr) { return *(const f32x2*)ptr; }
DEVICE f32x4 ld_global_f32x4(const void* ptr) { return *(const f32x4*)ptr; }
// Is issued where it stands: the compiler sinks other loads below the branch that decides whether they are needed.
DEVICE u32 ld_global_early_u32(const void* ptr) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(ptr) : "memory");
  return v;
}
// Of what other multiprocessors wrote. It stays where it stands: ptxas moves other loads behind later branches, and
// behind shuffles, to where their values are used.
DEVICE float ld_global_volatile_f32(const void* ptr) {
  float v;
  asm volatile("ld.volatile.global.f32 %0, [%1];" : "=f"(v) : "l"(ptr) : "memory");
  return v;
}
DEVICE u32x2 ld_global_volatile_u32x2(const void* ptr) {
  u32x2 v;
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(ptr) : "memory");
  return v;
}
DEVICE f32x4 ld_global_volatile_f32x4(const void* ptr) {
  f32x4 v;
  asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(ptr)
               : "memory");
  return v;
}
// Of data that nobody writes while the kernel runs, by an address that need not be traced to a kernel argument.
DEVICE u32 ld_global_nc_u32(const void* ptr) {
  u32 v;
  asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(ptr));
  return v;
}
// Bypasses L1: data that another block or the previous kernel wrote.
DEVICE u32 ld_global_cg_u32(const void* ptr) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(ptr) : "memory");
  return v;
}
DEVICE float ld_global_cg_f32(const void* ptr) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(ptr) : "memory");
  return v;
}
DEVICE u32x2 ld_global_cg_u32x2(const void* ptr) {
  u32x2 v;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(ptr) : "memory");
  return v;
}
DEVICE u32x4 ld_global_cg_u32x4(const void* ptr) {
  u32x4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(ptr)
               : "memory");
  return v;
}
DEVICE f32x4 ld_global_cg_f32x4(const void* ptr) {
  f32x4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(ptr)
               : "memory");
  return v;
}
DEVICE void st_global_u8(void* ptr, u8 v) { *(u8*)ptr = v; }
DEVICE void st_global_u16(void* ptr, u16 v) { *(u16*)ptr = v; }
DEVICE void st_global_u32(void* ptr, u32 v) { *(u32*)ptr = v; }
DEVICE void st_global_u64(void* ptr, u64 v) { *(u64*)ptr = v; }
DEVICE void st_global_f32(void* ptr, float v) { *(float*)ptr = v; }
DEVICE void st_global_u32x2(void* ptr, u32x2 v) { *(u32x2*)ptr = v; }
DEVICE void st_global_u32x4(void* ptr, u32x4 v) { *(u32x4*)ptr = v; }
DEVICE void st_global_f32x2(void* ptr, f32x2 v) { *(f32x2*)ptr = v; }
DEVICE void st_global_f32x4(void* ptr, f32x4 v) { *(f32x4*)ptr = v; }
// Returns the old value; orders this thread's earlier accesses before its later ones at GPU scope.
DEVICE u32 atomic_add_global_u32(u32* ptr, u32 v) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(ptr), "r"(v) : "memory");
  return old;
}
DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// --- shared memory -------------------------------------------------------------------------------------------------
DEVICE u32 ld_shared_u32(u32 addr) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
  return v;
}
DEVICE u32x2 ld_shared_u32x2(u32 addr) {
  u32x2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(addr) : "memory");
  return v;
}
DEVICE u32x4 ld_shared_u32x4(u32 addr) {
  u32x4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(addr)
               : "memory");
  return v;
}
DEVICE float ld_shared_f32(u32 addr) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(addr) : "memory");
  return v;
}
DEVICE f32x2 ld_shared_f32x2(u32 addr) {
  f32x2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(addr) : "memory");
  return v;
}
DEVICE f32x4 ld_shared_f32x4(u32 addr) {
  f32x4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(addr)
               : "memory");
  return v;
}
DEVICE void st_shared_u32(u32 addr, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(addr), "r"(v) : "memory"); }
DEVICE void st_shared_u32x2(u32 addr, u32x2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(addr), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE void st_shared_u32x4(u32 addr, u32x4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
DEVICE void st_shared_f32(u32 addr, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr), "f"(v) : "memory"); }
DEVICE void st_shared_f32x2(u32 addr, f32x2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(addr), "f"(v.x), "f"(v.y) : "memory");
}
DEVICE void st_shared_f32x4(u32 addr, f32x4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
DEVICE u32 atomic_add_shared_u32(u32 addr, u32 v) {
  u32 old;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(addr), "r"(v) : "memory");
  return old;
}

// --- asynchronous copies, global to shared -------------------------------------------------------------------------
DEVICE void cp_async_16(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
// Copies `src_bytes` (0 .. 16) bytes and fills the rest of the 16 with zeros; src is not read when src_bytes is 0.
DEVICE void cp_async_16_zfill(u32 dst, const void* src, u32 src_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(src_bytes)
               : "memory");
}
DEVICE void cp_async_4(u32 dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}
// Copies 4 bytes, or fills with zeros where src_bytes is 0; src is not read then.
DEVICE void cp_async_4_zfill(u32 dst, const void* src, u32 src_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(src_bytes) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of this thread's newest groups are in flight.
template <int PENDING>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Arrives on the mbarrier when all of this thread's earlier cp.async have landed; the arrival is one of the barrier's
// count.
DEVICE void cp_async_mbarrier_arrive_noinc(u32 mbar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(mbar) : "memory");
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// 1-D bulk copy; dst, src and bytes are multiples of 16. Completes `bytes` of the mbarrier's transaction count.
DEVICE void bulk_copy_g2s(u32 dst, const void* src, u32 bytes, u32 mbar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(mbar)
               : "memory");
}
DEVICE void mbarrier_arrive_expect_tx(u32 mbar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbar), "r"(bytes) : "memory");
}
#endif
DEVICE void prefetch_l2(const void* ptr) { asm volatile("prefetch.global.L2 [%0];" ::"l"(ptr)); }

// --- barriers ------------------------------------------------------------------------------------------------------
DEVICE void block_sync() { __syncthreads(); }
DEVICE void warp_sync() { __syncwarp(); }
// `threads` (a multiple of 32) arrive on barrier `id` (1 .. 15; 0 is block_sync) and wait for each other.
DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void mbarrier_init(u32 mbar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbar), "r"(count) : "memory");
}
// The mbarrier is gone; its memory may be written, and become another one.
DEVICE void mbarrier_inval(u32 mbar) { asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(mbar) : "memory"); }
DEVICE void mbarrier_arrive(u32 mbar) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbar) : "memory");
#else
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(mbar) : "memory");
#endif
}
// True if the phase with this parity (0 or 1) has completed. May suspend the thread for a while first.
DEVICE bool mbarrier_try_wait(u32 mbar, u32 parity) {
  u32 done;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(mbar), "r"(parity)
               : "memory");
#else
  // Before sm_90 only the state-token form of test_wait exists with parity since PTX 7.1.
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(mbar), "r"(parity)
               : "memory");
#endif
  return done;
}
// Every lane of the warp calls this together: a divergent wait makes later warp instructions slow.
DEVICE void mbarrier_wait(u32 mbar, u32 parity) {
  while (!mbarrier_try_wait(mbar, parity)) {
  }
}

// --- warp ----------------------------------------------------------------------------------------------------------
DEVICE float shfl_xor_f32(float v, int lane_mask) { return __shfl_xor_sync(0xffffffffu, v, lane_mask); }
DEVICE u32 shfl_xor_u32(u32 v, int lane_mask) { return __shfl_xor_sync(0xffffffffu, v, lane_mask); }
DEVICE u32 shfl_u32(u32 v, int src_lane) { return __shfl_sync(0xffffffffu, v, src_lane); }
DEVICE u64 shfl_u64(u64 v, int src_lane) { return __shfl_sync(0xffffffffu, v, src_lane); }
DEVICE float shfl_f32(float v, int src_lane) { return __shfl_sync(0xffffffffu, v, src_lane); }
// The same value, of which the compiler's front end no longer knows how it came about: it does not compute it again
// elsewhere.
DEVICE u32 keep_in_register(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}
// The same value, which all lanes hold alike: the compiler then knows, and keeps it in a uniform register.
DEVICE u32 make_uniform(u32 v) {
  u32 r;
  asm("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
  return r;
}
DEVICE bool warp_any(bool predicate) { return __any_sync(0xffffffffu, predicate); }
DEVICE u32 warp_ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }

// --- tensor cores --------------------------------------------------------------------------------------------------
// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}
// Transposes an 8x8 matrix of 16-bit elements held one register a lane.
DEVICE u32 movmatrix(u32 a) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}
// c[16x8] += a[16x16] * b[16x8], float32 accumulation.
DEVICE void mma_m16n8k16_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_m16n8k16_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- arithmetic ----------------------------------------------------------------------------------------------------
DEVICE float ex2(float x) {  // 2^x; 2^-inf is 0
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
DEVICE float lg2(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
DEVICE float tanh_f32(float x) { return tanhf(x); }
DEVICE float fma_f32(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float max_f32(float a, float b) { return fmaxf(a, b); }
// Of the halves, each as a number without a sign.
DEVICE u32 max_u16x2(u32 a, u32 b) { return __vmaxu2(a, b); }
DEVICE float ceil_f32(float x) { return ceilf(x); }
DEVICE u32 mul_hi_u32(u32 a, u32 b) { return __umulhi(a, b); }
// a * b + c, the product in 64 bits: one instruction, where the compiler would multiply 64-bit numbers.
DEVICE i64 mad_wide_i32(i32 a, i32 b, i64 c) {
  i64 r;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(r) : "r"(a), "r"(b), "l"(c));
  return r;
}
DEVICE float as_f32(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_u32(float v) { return __float_as_uint(v); }
// Two values to 16-bit floats, round to nearest even, `lo` in the low half.
DEVICE u32 pack_bf16x2(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
DEVICE u32 pack_f16x2(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
DEVICE float f16_to_f32(u16 v) {
  float r;
  asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(r) : "h"(v));
  return r;
}
DEVICE float bf16_to_f32(u16 v) { return as_f32((u32)v << 16); }
// Four e4m3 numbers to float16, exactly: bytes 0 and 1 to x, 2 and 3 to y. From sm_89 on.
DEVICE u32x2 e4m3x4_to_f16(u32 v) {
  u32x2 r;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.rn.f16x2.e4m3x2 %0, lo; cvt.rn.f16x2.e4m3x2 %1, hi; }"
      : "=r"(r.x), "=r"(r.y)
      : "r"(v));
  return r;
}
// Byte i of the result is byte SELECTOR >> 4 i & 7 of (lo, hi).
template <u32 SELECTOR>
DEVICE u32 permute_bytes(u32 lo, u32 hi) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(lo), "r"(hi), "n"(SELECTOR));
  return r;
}

// --- compiler ------------------------------------------------------------------------------------------------------
// Ends a block of code, within which ptxas orders instructions as it likes, by a branch that is never taken. The
// compiler must not know that.
DEVICE void split_code(bool never) {
  if (never) asm volatile("trap;");
}

// --- dependent launch ----------------------------------------------------------------------------------------------
// Both are no-ops unless the next kernel was launched as a programmatic dependent.
DEVICE void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_prerequisites() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif  // MLAFLASH_EMULATOR
