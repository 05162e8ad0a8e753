// Integers whose width, 32 or 64 bits, is known at run time alone.
#pragma once
#include "ptx.cuh"

DEVICE i64 clamp(i64 v, i64 least, i64 most) { return v < least ? least : v > most ? most : v; }

DEVICE i64 load_integer(const void* ptr, bool is_wide, i64 index) {
  return is_wide ? (i64)ld_global_u64((const u64*)ptr + index) : (i64)(i32)ld_global_u32((const u32*)ptr + index);
}
DEVICE void store_integer(void* ptr, bool is_wide, i64 index, i64 v) {
  if (is_wide)
    st_global_u64((u64*)ptr + index, (u64)v);
  else
    st_global_u32((u32*)ptr + index, (u32)v);
}
