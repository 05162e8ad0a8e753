// Programs with one planted fault each; `wrong` 0 is the same program without it.
// Block: 64 threads unless the case says otherwise.
#include "ptx.cuh"

struct VerifyParams {
  const void* a;
  void* out;
  i32 op;
  i32 wrong;
};

DEVICE const u8* bytes_of(const void* ptr, int offset) { return (const u8*)ptr + offset; }
DEVICE u8* bytes_of(void* ptr, int offset) { return (u8*)ptr + offset; }
DEVICE int warp_idx() { return thread_idx() / WARP; }
DEVICE void keep(const VerifyParams& p, u32 value) { st_global_u32(bytes_of(p.out, 4 * thread_idx()), value); }

// A thread of the other warp reads what this one wrote. Each word is written beforehand, so that this is no poison.
DEVICE void missing_block_sync(const VerifyParams& p) {
  const u32 own = shared_base() + 4 * thread_idx(), other = shared_base() + 4 * (63 - thread_idx());
  st_shared_u32(own, 0);
  block_sync();
  st_shared_u32(own, 1);
  if (!p.wrong) block_sync();
  keep(p, ld_shared_u32(other));
}

// The slot is written again while the other warp may still read it.
DEVICE void missing_second_sync(const VerifyParams& p) {
  const u32 own = shared_base() + 4 * thread_idx(), other = shared_base() + 4 * (63 - thread_idx());
  u32 sum = 0;
  for (u32 i = 0; i < 3; i++) {
    st_shared_u32(own, i);
    block_sync();
    sum += ld_shared_u32(other);
    if (!p.wrong) block_sync();
  }
  keep(p, sum);
}

DEVICE void unwritten_read(const VerifyParams& p) {
  if (!p.wrong || thread_idx() != 5) st_shared_u32(shared_base() + 4 * thread_idx(), 7);
  warp_sync();
  keep(p, ld_shared_u32(shared_base() + 4 * thread_idx()));
}

DEVICE void copy_own(const VerifyParams& p) {
  cp_async_16(shared_base() + 16 * thread_idx(), bytes_of(p.a, 16 * thread_idx()));
}

DEVICE void read_before_wait(const VerifyParams& p) {
  copy_own(p);
  cp_async_commit();
  if (!p.wrong) cp_async_wait<0>();
  const u32 value = ld_shared_u32(shared_base() + 16 * thread_idx());
  cp_async_wait<0>();
  keep(p, value);
}

// The newest group may still be in flight.
DEVICE void wait_for_too_few(const VerifyParams& p) {
  copy_own(p);
  cp_async_commit();
  cp_async_16(shared_base() + 1024 + 16 * thread_idx(), bytes_of(p.a, 16 * thread_idx()));
  cp_async_commit();
  if (p.wrong) {
    cp_async_wait<1>();
  } else {
    cp_async_wait<0>();
  }
  const u32 value = ld_shared_u32(shared_base() + 1024 + 16 * thread_idx());
  cp_async_wait_all();
  keep(p, value);
}

// Each thread has waited, for its own copies alone.
DEVICE void wait_without_barrier(const VerifyParams& p) {
  copy_own(p);
  cp_async_commit();
  cp_async_wait<0>();
  if (!p.wrong) block_sync();
  const u32 other = shared_base() + 16 * (63 - thread_idx());
  if (p.wrong) {
    // Lets the other warp wait for its copies in any case: what is left is the missing order.
    for (int i = 0; i < 200; i++) warp_sync();
  }
  keep(p, ld_shared_u32(other));
}

DEVICE void write_into_flight(const VerifyParams& p) {
  copy_own(p);
  if (!p.wrong) cp_async_wait_all();
  st_shared_u32(shared_base() + 16 * thread_idx(), 1);
  cp_async_wait_all();
}

DEVICE void return_in_flight(const VerifyParams& p) {
  copy_own(p);
  cp_async_commit();
  if (!p.wrong) cp_async_wait<0>();
}

DEVICE void bulk_in_flight(const VerifyParams& p) {
  if (thread_idx()) return;
  const u32 mbar = shared_base() + 2048;
  mbarrier_init(mbar, 1);
  mbarrier_arrive_expect_tx(mbar, 1024);
  bulk_copy_g2s(shared_base(), p.a, 1024, mbar);
  if (!p.wrong) mbarrier_wait(mbar, 0);
}

// The copy completes on an mbarrier, and one of the readers does not wait for it.
DEVICE void bulk_without_wait(const VerifyParams& p) {
  const u32 mbar = shared_base() + 2048;
  if (thread_idx() == 0) mbarrier_init(mbar, 1);
  block_sync();
  if (thread_idx() == 0) {
    mbarrier_arrive_expect_tx(mbar, 1024);
    bulk_copy_g2s(shared_base(), p.a, 1024, mbar);
    mbarrier_wait(mbar, 0);
  }
  warp_sync();
  if (!p.wrong) mbarrier_wait(mbar, 0);
  keep(p, ld_shared_u32(shared_base() + 16 * thread_idx()));
}

DEVICE void shared_bounds(const VerifyParams& p) {
  if (thread_idx() == 0) st_shared_f32x4(shared_base() + (p.wrong ? 4096 : 4080), f32x4{1, 2, 3, 4});
}
DEVICE void shared_below(const VerifyParams& p) {  // shared_base() was forgotten
  if (thread_idx() == 0) st_shared_u32(p.wrong ? 0 : shared_base(), 1);
}
DEVICE void global_bounds(const VerifyParams& p) { keep(p, ld_global_u32(bytes_of(p.a, p.wrong ? 2048 : 2044))); }
DEVICE void global_before(const VerifyParams& p) { keep(p, ld_global_u32(bytes_of(p.a, p.wrong ? -4 : 0))); }
DEVICE void global_null(const VerifyParams& p) { keep(p, ld_global_u32(p.wrong ? nullptr : p.a)); }
DEVICE void global_read_only(const VerifyParams& p) { st_global_u32(p.wrong ? (void*)p.a : bytes_of(p.out, 0), 1); }
DEVICE void async_bounds(const VerifyParams& p) {
  cp_async_16(shared_base() + 16 * thread_idx(), bytes_of(p.a, 16 * thread_idx() + (p.wrong ? 1040 : 1024)));
  cp_async_wait_all();
}
DEVICE void shared_misaligned(const VerifyParams& p) {
  st_shared_u32x4(shared_base() + 16 * thread_idx() + (p.wrong ? 8 : 0), u32x4{1, 2, 3, 4});
}
DEVICE void global_misaligned(const VerifyParams& p) { keep(p, ld_global_u32x2(bytes_of(p.a, p.wrong ? 4 : 8)).x); }
DEVICE void ldmatrix_misaligned(const VerifyParams& p) {
  for (int i = 0; i < 2; i++) st_shared_u32x4(shared_base() + 1024 * i + 16 * thread_idx(), u32x4{1, 2, 3, 4});
  block_sync();
  u32 r[4];
  ldmatrix_x4(r, shared_base() + 16 * (thread_idx() % WARP) + (p.wrong ? 2 : 0));
  keep(p, r[0]);
}

// An mbarrier for one arrival too few.
DEVICE void mbarrier_over_arrival(const VerifyParams& p) {
  const u32 mbar = shared_base();
  if (thread_idx() == 0) mbarrier_init(mbar, p.wrong ? 63 : 64);
  block_sync();
  if (thread_idx() == 0) {
    mbarrier_arrive_expect_tx(mbar, 16);
    bulk_copy_g2s(shared_base() + 16, p.a, 16, mbar);
  }
  if (p.wrong) {
    // Without its 16 bytes the phase cannot complete, so that every arrival belongs to it.
    if (thread_idx() == 32) mbarrier_arrive_expect_tx(mbar, 16);
  }
  if (thread_idx() != 0 && !(p.wrong && thread_idx() == 32)) mbarrier_arrive(mbar);
  mbarrier_wait(mbar, 0);
}
DEVICE void mbarrier_data_access(const VerifyParams& p) {
  if (thread_idx()) return;
  mbarrier_init(shared_base(), 1);
  st_shared_u32(shared_base() + (p.wrong ? 4 : 8), 1);
}
DEVICE void mbarrier_missing(const VerifyParams& p) {
  if (thread_idx()) return;
  if (!p.wrong) mbarrier_init(shared_base(), 1);
  mbarrier_arrive(shared_base());
}
DEVICE void mbarrier_unordered_init(const VerifyParams& p) {
  if (thread_idx() == 0) mbarrier_init(shared_base(), 64);
  if (!p.wrong) block_sync();
  for (int i = 0; i < 200; i++) warp_sync();
  mbarrier_arrive(shared_base());
}

DEVICE void mbarrier_gone(const VerifyParams& p) {
  if (thread_idx()) return;
  mbarrier_init(shared_base(), 1);
  if (p.wrong) mbarrier_inval(shared_base());
  mbarrier_arrive(shared_base());
}
// Warp 1 may still wait when the mbarrier ends.
DEVICE void mbarrier_ends_early(const VerifyParams& p) {
  if (thread_idx() == 0) mbarrier_init(shared_base(), 1);
  block_sync();
  if (warp_idx() == 1) mbarrier_wait(shared_base(), 0);
  if (thread_idx() == 0) mbarrier_arrive(shared_base());
  if (!p.wrong) block_sync();
  if (thread_idx() == 0) mbarrier_inval(shared_base());
}

DEVICE void named_barrier_count(const VerifyParams& p) { named_barrier_sync(1, p.wrong && warp_idx() ? 32 : 64); }
DEVICE void named_barrier_twice(const VerifyParams& p) {
  if (warp_idx() == 0) {
    named_barrier_arrive(1, 64);
    if (p.wrong) named_barrier_arrive(1, 64);
  } else {
    if (p.wrong) block_sync();
    named_barrier_sync(1, 64);
  }
}
// The second warp never comes.
DEVICE void deadlock_barrier(const VerifyParams& p) {
  if (warp_idx() == 0 || !p.wrong) named_barrier_sync(3, 64);
}
DEVICE void deadlock_mbarrier(const VerifyParams& p) {
  const u32 mbar = shared_base();
  if (thread_idx() == 0) mbarrier_init(mbar, 64);
  block_sync();
  if (thread_idx() || !p.wrong) mbarrier_arrive(mbar);
  mbarrier_wait(mbar, 0);
}
DEVICE void deadlock_try_wait(const VerifyParams& p) {
  const u32 mbar = shared_base();
  if (thread_idx() == 0) mbarrier_init(mbar, 64);
  block_sync();
  if (thread_idx() || !p.wrong) mbarrier_arrive(mbar);
  while (!mbarrier_try_wait(mbar, 0)) {
  }
}
DEVICE void divergent_collective(const VerifyParams& p) {
  if (p.wrong && thread_idx() % 2) {
    keep(p, warp_ballot(true));
  } else {
    keep(p, shfl_u32(1, 0));
  }
}
DEVICE void different_uniform(const VerifyParams& p) { keep(p, make_uniform(p.wrong ? thread_idx() / 40 : 1)); }
DEVICE void return_before_collective(const VerifyParams& p) {
  if (p.wrong && thread_idx() == 40) return;
  warp_sync();
}
DEVICE void divergent_block_sync(const VerifyParams& p) {
  if (p.wrong && thread_idx() % WARP < 3) return;
  block_sync();
}
DEVICE void unordered_atomic(const VerifyParams& p) {
  if (thread_idx() == 0) st_shared_u32(shared_base(), 0);
  if (!p.wrong) block_sync();
  for (int i = 0; i < 200; i++) warp_sync();
  if (warp_idx()) atomic_add_shared_u32(shared_base(), 1);
}
DEVICE u32 deep(u32 depth) {
  volatile u32 frame[1024];
  for (u32 i = 0; i < 1024; i++) frame[i] = depth;
  warp_sync();
  return depth ? deep(depth - 1) + frame[depth] : frame[0];
}
DEVICE void deep_stack(const VerifyParams& p) { keep(p, deep(p.wrong ? 28 : 2)); }

KERNEL(mlaflash_faults, 64, 1) {
  switch (p.op) {
    case 0:
      return missing_block_sync(p);
    case 1:
      return missing_second_sync(p);
    case 2:
      return unwritten_read(p);
    case 3:
      return read_before_wait(p);
    case 4:
      return wait_for_too_few(p);
    case 5:
      return wait_without_barrier(p);
    case 6:
      return write_into_flight(p);
    case 7:
      return return_in_flight(p);
    case 8:
      return bulk_in_flight(p);
    case 9:
      return bulk_without_wait(p);
    case 10:
      return shared_bounds(p);
    case 11:
      return shared_below(p);
    case 12:
      return global_bounds(p);
    case 13:
      return global_before(p);
    case 14:
      return global_null(p);
    case 15:
      return global_read_only(p);
    case 16:
      return async_bounds(p);
    case 17:
      return shared_misaligned(p);
    case 18:
      return global_misaligned(p);
    case 19:
      return ldmatrix_misaligned(p);
    case 20:
      return mbarrier_over_arrival(p);
    case 21:
      return mbarrier_data_access(p);
    case 22:
      return mbarrier_missing(p);
    case 23:
      return mbarrier_unordered_init(p);
    case 24:
      return named_barrier_count(p);
    case 25:
      return named_barrier_twice(p);
    case 26:
      return deadlock_barrier(p);
    case 27:
      return deadlock_mbarrier(p);
    case 28:
      return deadlock_try_wait(p);
    case 29:
      return divergent_collective(p);
    case 30:
      return return_before_collective(p);
    case 31:
      return divergent_block_sync(p);
    case 32:
      return unordered_atomic(p);
    case 33:
      return deep_stack(p);
    case 34:
      return different_uniform(p);
    case 35:
      return mbarrier_gone(p);
    case 36:
      return mbarrier_ends_early(p);
  }
}
