// Element types of arrays in global memory: from float32 and back, addressed by element.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

template <int DTYPE>
constexpr int ELEMENT_BYTES = DTYPE == FLOAT32 ? 4 : 2;

// Address of element `index` of an array of DTYPE.
template <int DTYPE>
DEVICE const u8* element(const void* array, i64 index) {
  return (const u8*)array + index * ELEMENT_BYTES<DTYPE>;
}
template <int DTYPE>
DEVICE u8* element(void* array, i64 index) {
  return (u8*)array + index * ELEMENT_BYTES<DTYPE>;
}

// Two neighbours as 16-bit floats, round to nearest even, `lo` in the low half.
template <int DTYPE>
DEVICE u32 pack2(float lo, float hi) {
  static_assert(DTYPE == BFLOAT16 || DTYPE == FLOAT16, "16-bit element types");
  return DTYPE == BFLOAT16 ? pack_bf16x2(lo, hi) : pack_f16x2(lo, hi);
}
template <int DTYPE>
DEVICE f32x2 unpack2(u32 v) {
  static_assert(DTYPE == BFLOAT16 || DTYPE == FLOAT16, "16-bit element types");
  if constexpr (DTYPE == BFLOAT16)
    return {as_f32(v << 16), as_f32(v & 0xffff0000u)};
  else
    return {f16_to_f32((u16)v), f16_to_f32((u16)(v >> 16))};
}

// Four neighbours, of which the first lies on a multiple of four elements. Bypasses L1: another kernel wrote them.
template <int DTYPE>
DEVICE f32x4 ld_global_cg_4(const void* array, i64 index) {
  const u8* ptr = element<DTYPE>(array, index);
  if constexpr (DTYPE == FLOAT32) {
    return ld_global_cg_f32x4(ptr);
  } else {
    const u32x2 v = ld_global_cg_u32x2(ptr);
    const f32x2 a = unpack2<DTYPE>(v.x), b = unpack2<DTYPE>(v.y);
    return {a.x, a.y, b.x, b.y};
  }
}
template <int DTYPE>
DEVICE void st_global_4(void* array, i64 index, f32x4 v) {
  u8* ptr = element<DTYPE>(array, index);
  if constexpr (DTYPE == FLOAT32)
    st_global_f32x4(ptr, v);
  else
    st_global_u32x2(ptr, {pack2<DTYPE>(v.x, v.y), pack2<DTYPE>(v.z, v.w)});
}
