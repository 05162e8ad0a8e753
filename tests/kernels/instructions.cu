// One case for each instruction of the instruction header; tests/test_emulator_instructions.py has the plain loops.
// Block: up to 256 threads. The cases with roles need at least 4 warps.
#include "ptx.cuh"

struct VerifyParams {
  const void* a;
  const void* b;
  void* out;
  u32* counter;
  i32 op;       // the case
  i32 variant;  // which of its instructions, or how many rounds
  i32 threads;  // of a block
};

DEVICE const u8* bytes_of(const void* ptr, int offset) { return (const u8*)ptr + offset; }
DEVICE u8* bytes_of(void* ptr, int offset) { return (u8*)ptr + offset; }

DEVICE void indices(const VerifyParams& p) {
  const int block = (block_idx_z() * grid_dim_y() + block_idx_y()) * grid_dim_x() + block_idx_x();
  u8* row = bytes_of(p.out, (block * p.threads + thread_idx()) * 32);
  st_global_u32x4(row, u32x4{(u32)thread_idx_anew(), (u32)block_idx_x(), (u32)block_idx_y(), (u32)block_idx_z()});
  const u32 lane = shared_base() % 128 + lane_idx_anew();
  st_global_u32x4(row + 16, u32x4{(u32)grid_dim_x(), (u32)grid_dim_y(), (u32)grid_dim_z(), lane});
}

DEVICE void global_copies(const VerifyParams& p) {
  const int t = thread_idx();
  switch (p.variant) {
    case 0:
      st_global_u16(bytes_of(p.out, 2 * t), ld_global_u16(bytes_of(p.a, 2 * t)));
      break;
    case 1:
      st_global_u32(bytes_of(p.out, 4 * t), ld_global_u32(bytes_of(p.a, 4 * t)));
      break;
    case 2: {
      const u64 v = ld_global_u64(bytes_of(p.a, 8 * t));
      st_global_u32x2(bytes_of(p.out, 8 * t), u32x2{(u32)v, (u32)(v >> 32)});
      break;
    }
    case 3:
      st_global_f32(bytes_of(p.out, 4 * t), ld_global_f32(bytes_of(p.a, 4 * t)));
      break;
    case 4:
      st_global_u32x2(bytes_of(p.out, 8 * t), ld_global_u32x2(bytes_of(p.a, 8 * t)));
      break;
    case 5:
      st_global_u32x4(bytes_of(p.out, 16 * t), ld_global_u32x4(bytes_of(p.a, 16 * t)));
      break;
    case 6:
      st_global_f32x2(bytes_of(p.out, 8 * t), ld_global_f32x2(bytes_of(p.a, 8 * t)));
      break;
    case 7:
      st_global_f32x4(bytes_of(p.out, 16 * t), ld_global_f32x4(bytes_of(p.a, 16 * t)));
      break;
    case 8:
      st_global_u32(bytes_of(p.out, 4 * t), ld_global_cg_u32(bytes_of(p.a, 4 * t)));
      break;
    case 9:
      st_global_f32(bytes_of(p.out, 4 * t), ld_global_cg_f32(bytes_of(p.a, 4 * t)));
      break;
    case 10:
      st_global_u32x2(bytes_of(p.out, 8 * t), ld_global_cg_u32x2(bytes_of(p.a, 8 * t)));
      break;
    case 11:
      st_global_u32x4(bytes_of(p.out, 16 * t), ld_global_cg_u32x4(bytes_of(p.a, 16 * t)));
      break;
    case 12:
      st_global_f32x4(bytes_of(p.out, 16 * t), ld_global_cg_f32x4(bytes_of(p.a, 16 * t)));
      break;
    case 13:
      st_global_u32(bytes_of(p.out, 4 * t), ld_global_early_u32(bytes_of(p.a, 4 * t)));
      break;
    case 14:
      st_global_u32(bytes_of(p.out, 4 * t), ld_global_nc_u32(bytes_of(p.a, 4 * t)));
      break;
    case 15:
      st_global_u16(bytes_of(p.out, 2 * t),
                    (u16)(ld_global_u8(bytes_of(p.a, 2 * t)) | ld_global_u8(bytes_of(p.a, 2 * t + 1)) << 8));
      break;
    case 16:
      st_global_u8(bytes_of(p.out, t), ld_global_u8(bytes_of(p.a, t)));
      break;
    case 17:
      st_global_u64(bytes_of(p.out, 8 * t), ld_global_u64(bytes_of(p.a, 8 * t)));
      break;
    case 18:
      st_global_f32(bytes_of(p.out, 4 * t), ld_global_volatile_f32(bytes_of(p.a, 4 * t)));
      break;
    case 19:
      st_global_u32x2(bytes_of(p.out, 8 * t), ld_global_volatile_u32x2(bytes_of(p.a, 8 * t)));
      break;
    case 20:
      st_global_f32x4(bytes_of(p.out, 16 * t), ld_global_volatile_f32x4(bytes_of(p.a, 16 * t)));
      break;
  }
}

// Reverses the order of the threads' units.
DEVICE void shared_copies(const VerifyParams& p) {
  const int t = thread_idx(), r = p.threads - 1 - t;
  const u32 smem = shared_base();
  switch (p.variant) {
    case 0:
      st_shared_u32(smem + 4 * t, ld_global_u32(bytes_of(p.a, 4 * t)));
      block_sync();
      st_global_u32(bytes_of(p.out, 4 * t), ld_shared_u32(smem + 4 * r));
      break;
    case 1:
      st_shared_u32x2(smem + 8 * t, ld_global_u32x2(bytes_of(p.a, 8 * t)));
      block_sync();
      st_global_u32x2(bytes_of(p.out, 8 * t), ld_shared_u32x2(smem + 8 * r));
      break;
    case 2:
      st_shared_u32x4(smem + 16 * t, ld_global_u32x4(bytes_of(p.a, 16 * t)));
      block_sync();
      st_global_u32x4(bytes_of(p.out, 16 * t), ld_shared_u32x4(smem + 16 * r));
      break;
    case 3:
      st_shared_f32(smem + 4 * t, ld_global_f32(bytes_of(p.a, 4 * t)));
      block_sync();
      st_global_f32(bytes_of(p.out, 4 * t), ld_shared_f32(smem + 4 * r));
      break;
    case 4:
      st_shared_f32x2(smem + 8 * t, ld_global_f32x2(bytes_of(p.a, 8 * t)));
      block_sync();
      st_global_f32x2(bytes_of(p.out, 8 * t), ld_shared_f32x2(smem + 8 * r));
      break;
    case 5:
      st_shared_f32x4(smem + 16 * t, ld_global_f32x4(bytes_of(p.a, 16 * t)));
      block_sync();
      st_global_f32x4(bytes_of(p.out, 16 * t), ld_shared_f32x4(smem + 16 * r));
      break;
  }
}

// Row addresses come from b, as byte offsets.
DEVICE void ldmatrix(const VerifyParams& p) {
  const int t = thread_idx();
  for (int i = t; i < 256; i += WARP) st_shared_u32x4(shared_base() + 16 * i, ld_global_u32x4(bytes_of(p.a, 16 * i)));
  warp_sync();
  const u32 addr = shared_base() + ld_global_u32(bytes_of(p.b, 4 * t));
  u32 r[4];
  if (p.variant) {
    ldmatrix_x4_trans(r, addr);
  } else {
    ldmatrix_x4(r, addr);
  }
  st_global_u32x4(bytes_of(p.out, 16 * t), u32x4{r[0], r[1], r[2], r[3]});
}

DEVICE void matrix_transpose(const VerifyParams& p) {
  const int t = thread_idx();
  st_global_u32(bytes_of(p.out, 4 * t), movmatrix(ld_global_u32(bytes_of(p.a, 4 * t))));
}

// a: for each lane four registers of A and two of B (and two unused); b: four of C.
DEVICE void mma(const VerifyParams& p) {
  const int t = thread_idx();
  const u32x4 a = ld_global_u32x4(bytes_of(p.a, 32 * t));
  const u32x4 b = ld_global_u32x4(bytes_of(p.a, 32 * t + 16));
  const f32x4 c = ld_global_f32x4(bytes_of(p.b, 16 * t));
  const u32 fragment[4] = {a.x, a.y, a.z, a.w};
  float sum[4] = {c.x, c.y, c.z, c.w};
  if (p.variant) {
    mma_m16n8k16_f16(sum, fragment, b.x, b.y);
  } else {
    mma_m16n8k16_bf16(sum, fragment, b.x, b.y);
  }
  st_global_f32x4(bytes_of(p.out, 16 * t), f32x4{sum[0], sum[1], sum[2], sum[3]});
}

DEVICE void conversions(const VerifyParams& p) {
  const int i = block_idx_x() * p.threads + thread_idx();
  if (p.variant < 2) {
    const f32x2 v = ld_global_f32x2(bytes_of(p.a, 8 * i));
    st_global_u32(bytes_of(p.out, 4 * i), p.variant ? pack_f16x2(v.x, v.y) : pack_bf16x2(v.x, v.y));
  } else if (p.variant == 4) {
    st_global_u32x2(bytes_of(p.out, 8 * i), e4m3x4_to_f16(ld_global_u32(bytes_of(p.a, 4 * i))));
  } else {
    const u16 v = ld_global_u16(bytes_of(p.a, 2 * i));
    st_global_f32(bytes_of(p.out, 4 * i), p.variant == 2 ? f16_to_f32(v) : bf16_to_f32(v));
  }
}

DEVICE void arithmetic(const VerifyParams& p) {
  const int i = block_idx_x() * p.threads + thread_idx();
  const u32 a = ld_global_u32(bytes_of(p.a, 4 * i)), b = ld_global_u32(bytes_of(p.b, 4 * i));
  const float x = as_f32(a), y = as_f32(b);
  u32 result = 0;
  switch (p.variant) {
    case 0:
      result = as_u32(ex2(x));
      break;
    case 1:
      result = as_u32(lg2(x));
      break;
    case 2:
      result = as_u32(tanh_f32(x));
      break;
    case 3:
      result = as_u32(fma_f32(x, y, 1.0f));
      break;
    case 4:
      result = as_u32(max_f32(x, y));
      break;
    case 5:
      result = mul_hi_u32(a, b);
      break;
    case 6:
      result = (u32)mad_wide_i32((i32)a, (i32)b, (i64)a << 20);
      break;
    case 7:
      result = keep_in_register((u32)(mad_wide_i32((i32)a, (i32)b, (i64)a << 20) >> 32));
      break;
    case 8:
      result = as_u32(ceil_f32(x));
      break;
    case 9:
      result = permute_bytes<0x6420>(a, b) ^ permute_bytes<0x7531>(b, a);
      break;
    case 10:
      result = max_u16x2(a, b);
      break;
  }
  st_global_u32(bytes_of(p.out, 4 * i), result);
}

// Each thread keeps three groups in flight and reads each one when it has waited for it alone.
DEVICE void async_groups(const VerifyParams& p) {
  const int t = thread_idx();
  const u32 own = shared_base() + 64 * t;
  for (int g = 0; g < 3; g++) {
    cp_async_16(own + 16 * g, bytes_of(p.a, 64 * t + 16 * g));
    cp_async_commit();
  }
  cp_async_wait<2>();
  st_global_u32x4(bytes_of(p.out, 64 * t), ld_shared_u32x4(own));
  cp_async_wait<1>();
  st_global_u32x4(bytes_of(p.out, 64 * t + 16), ld_shared_u32x4(own + 16));
  cp_async_16(own + 48, bytes_of(p.a, 64 * t + 48));
  cp_async_wait_all();
  st_global_u32x4(bytes_of(p.out, 64 * t + 32), ld_shared_u32x4(own + 32));
  st_global_u32x4(bytes_of(p.out, 64 * t + 48), ld_shared_u32x4(own + 48));
}

DEVICE void async_words(const VerifyParams& p) {
  const int t = thread_idx();
  cp_async_4(shared_base() + 4 * t, bytes_of(p.a, 4 * t));
  cp_async_wait_all();
  block_sync();
  const int r = p.threads - 1 - t;
  st_global_u32(bytes_of(p.out, 4 * t), ld_shared_u32(shared_base() + 4 * r));
}

// b: how many of the 16 bytes to copy, or of 4. A thread that copies none has no source.
DEVICE void async_fill(const VerifyParams& p) {
  const int t = thread_idx();
  const u32 bytes = ld_global_u32(bytes_of(p.b, 4 * t));
  if (p.variant == 1) {
    cp_async_4_zfill(shared_base() + 4 * t, bytes ? bytes_of(p.a, 4 * t) : nullptr, bytes);
    cp_async_wait_all();
    st_global_u32(bytes_of(p.out, 4 * t), ld_shared_u32(shared_base() + 4 * t));
    return;
  }
  cp_async_16_zfill(shared_base() + 16 * t, bytes ? bytes_of(p.a, 16 * t) : nullptr, bytes);
  cp_async_wait_all();
  st_global_u32x4(bytes_of(p.out, 16 * t), ld_shared_u32x4(shared_base() + 16 * t));
}

// Two slots. Warps 0 and 1 fill them with tiles of 1 KB, warps 2 and 3 write the tiles to out in reverse.
constexpr u32 RING_SLOTS = 2;
constexpr u32 RING_BYTES = 1024;
constexpr u32 RING_FULL = RING_SLOTS * RING_BYTES;
constexpr u32 RING_EMPTY = RING_FULL + RING_SLOTS * 8;

DEVICE void drain_ring(const VerifyParams& p, bool tries) {
  const int t = thread_idx() - 2 * WARP;
  const u32 smem = shared_base();
  for (int i = 0; i < p.variant; i++) {
    const u32 slot = i % RING_SLOTS, parity = i / RING_SLOTS % 2;
    if (tries) {
      while (!mbarrier_try_wait(smem + RING_FULL + 8 * slot, parity)) {
      }
    } else {
      mbarrier_wait(smem + RING_FULL + 8 * slot, parity);
    }
    st_global_u32x4(bytes_of(p.out, i * RING_BYTES + 16 * t),
                    ld_shared_u32x4(smem + slot * RING_BYTES + 16 * (63 - t)));
    mbarrier_arrive(smem + RING_EMPTY + 8 * slot);
  }
}

DEVICE void start_ring(u32 producers) {
  if (thread_idx() == 0) {
    for (u32 slot = 0; slot < RING_SLOTS; slot++) {
      mbarrier_init(shared_base() + RING_FULL + 8 * slot, producers);
      mbarrier_init(shared_base() + RING_EMPTY + 8 * slot, 2 * WARP);
    }
  }
  block_sync();
}

DEVICE void async_ring(const VerifyParams& p) {
  start_ring(2 * WARP);
  const int t = thread_idx();
  const u32 smem = shared_base();
  if (t >= 2 * WARP) return drain_ring(p, false);
  for (int i = 0; i < p.variant; i++) {
    const u32 slot = i % RING_SLOTS, round = i / RING_SLOTS;
    mbarrier_wait(smem + RING_EMPTY + 8 * slot, (round + 1) % 2);
    cp_async_16(smem + slot * RING_BYTES + 16 * t, bytes_of(p.a, i * RING_BYTES + 16 * t));
    cp_async_mbarrier_arrive_noinc(smem + RING_FULL + 8 * slot);
  }
  // The consumers need not have seen the last tiles: their mbarriers say when.
  cp_async_wait_all();
}

// The same ring twice, over memory that holds something else in between.
DEVICE void rings_in_turn(const VerifyParams& p) {
  async_ring(p);
  block_sync();  // orders the waits before the ends of the mbarriers
  if (thread_idx() == 0) {
    for (u32 slot = 0; slot < RING_SLOTS; slot++) {
      mbarrier_inval(shared_base() + RING_FULL + 8 * slot);
      mbarrier_inval(shared_base() + RING_EMPTY + 8 * slot);
      st_shared_u32(shared_base() + RING_FULL + 8 * slot, 7);
    }
  }
  block_sync();  // orders the ends of the mbarriers before their second beginning
  async_ring(p);
}

// One thread fills the ring, in two copies a tile.
DEVICE void bulk_ring(const VerifyParams& p) {
#if defined(MLAFLASH_EMULATOR) || __CUDA_ARCH__ >= 900
  start_ring(1);
  const int t = thread_idx();
  const u32 smem = shared_base();
  if (t >= 2 * WARP) return drain_ring(p, true);
  if (t != 0) return;
  for (int i = 0; i < p.variant; i++) {
    const u32 slot = i % RING_SLOTS, round = i / RING_SLOTS, full = smem + RING_FULL + 8 * slot;
    mbarrier_wait(smem + RING_EMPTY + 8 * slot, (round + 1) % 2);
    mbarrier_arrive_expect_tx(full, RING_BYTES);
    bulk_copy_g2s(smem + slot * RING_BYTES, bytes_of(p.a, i * RING_BYTES), 768, full);
    bulk_copy_g2s(smem + slot * RING_BYTES + 768, bytes_of(p.a, i * RING_BYTES + 768), 256, full);
  }
#endif
}

// Warps 0 and 1 hand tiles of one word a thread to warps 2 and 3; barrier 1 says full, barrier 2 says empty.
DEVICE void named_barriers(const VerifyParams& p) {
  const int t = thread_idx() % (2 * WARP);
  const u32 smem = shared_base();
  if (thread_idx() < 2 * WARP) {
    for (int i = 0; i < p.variant; i++) {
      if (i > 0) named_barrier_sync(2, 4 * WARP);
      st_shared_u32(smem + 4 * t, ld_global_u32(bytes_of(p.a, 4 * (i * 2 * WARP + t))));
      named_barrier_arrive(1, 4 * WARP);
    }
  } else {
    for (int i = 0; i < p.variant; i++) {
      named_barrier_sync(1, 4 * WARP);
      st_global_u32(bytes_of(p.out, 4 * (i * 2 * WARP + t)), ld_shared_u32(smem + 4 * (2 * WARP - 1 - t)));
      if (i + 1 < p.variant) named_barrier_arrive(2, 4 * WARP);
    }
  }
}

// Counts of the 16 values in a, and the order in which the threads came.
DEVICE void shared_atomics(const VerifyParams& p) {
  const int t = thread_idx();
  if (t < 16) st_shared_u32(shared_base() + 4 * t, 0);
  block_sync();
  const u32 old = atomic_add_shared_u32(shared_base() + 4 * ld_global_u32(bytes_of(p.a, 4 * t)), 3);
  st_global_u32(bytes_of(p.out, 64 + 4 * t), old);
  block_sync();
  if (t < 16) st_global_u32(bytes_of(p.out, 4 * t), ld_shared_u32(shared_base() + 4 * t));
}

// The last block to arrive adds what all have stored in b.
DEVICE void global_atomics(const VerifyParams& p) {
  const int t = thread_idx(), blocks = grid_dim_x();
  st_global_u32(bytes_of((void*)p.b, 4 * (block_idx_x() * p.threads + t)),
                ld_global_u32(bytes_of(p.a, 4 * (block_idx_x() * p.threads + t))));
  block_sync();
  if (t == 0) {
    fence_gpu();
    st_shared_u32(shared_base(), atomic_add_global_u32(p.counter, 1));
  }
  block_sync();
  if (ld_shared_u32(shared_base()) != (u32)blocks - 1) return;
  fence_gpu();
  u32 sum = 0;
  for (int i = 0; i < blocks; i++) sum += ld_global_cg_u32(bytes_of(p.b, 4 * (i * p.threads + t)));
  st_global_u32(bytes_of(p.out, 4 * t), sum);
}

// b: lane masks (the same for all lanes) or source lanes.
DEVICE void shuffles(const VerifyParams& p) {
  const int t = thread_idx();
  const u32 v = ld_global_u32(bytes_of(p.a, 8 * t)), w = ld_global_u32(bytes_of(p.a, 8 * t + 4));
  const int lane = (int)ld_global_u32(bytes_of(p.b, 4 * t));
  u64 result = 0;
  switch (p.variant) {
    case 0:
      result = shfl_xor_u32(v, lane);
      break;
    case 1:
      result = as_u32(shfl_xor_f32(as_f32(v), lane));
      break;
    case 2:
      result = shfl_u32(v, lane);
      break;
    case 3:
      result = as_u32(shfl_f32(as_f32(v), lane));
      break;
    case 4:
      result = shfl_u64((u64)w << 32 | v, lane);
      break;
    case 5:
      result = warp_ballot(v % 2);
      break;
    case 6:
      result = warp_any(v % 2);
      break;
    case 7:
      result = make_uniform((u32)lane);
      break;
  }
  st_global_u32x2(bytes_of(p.out, 8 * t), u32x2{(u32)result, (u32)(result >> 32)});
}

// What changes no value: hints, and the ends of a dependent launch.
DEVICE void hints(const VerifyParams& p) {
  wait_prerequisites();
  prefetch_l2(p.a);
  split_code(p.out == nullptr);
  launch_dependents();
  st_global_u32(bytes_of(p.out, 4 * thread_idx()), ld_global_u32(bytes_of(p.a, 4 * thread_idx())));
}

KERNEL(mlaflash_instructions, 256, 1) {
  switch (p.op) {
    case 0:
      return indices(p);
    case 1:
      return global_copies(p);
    case 2:
      return shared_copies(p);
    case 3:
      return ldmatrix(p);
    case 4:
      return matrix_transpose(p);
    case 5:
      return mma(p);
    case 6:
      return conversions(p);
    case 7:
      return arithmetic(p);
    case 8:
      return async_groups(p);
    case 9:
      return async_fill(p);
    case 10:
      return async_ring(p);
    case 11:
      return bulk_ring(p);
    case 12:
      return named_barriers(p);
    case 13:
      return shared_atomics(p);
    case 14:
      return global_atomics(p);
    case 15:
      return shuffles(p);
    case 16:
      return hints(p);
    case 17:
      return async_words(p);
    case 18:
      return rings_in_turn(p);
  }
}
