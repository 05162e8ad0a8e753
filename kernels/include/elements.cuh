// Loads and stores of float32, bfloat16 and float16 elements as float32 values.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

template <int DTYPE>
CONSTANT int element_bytes() {
  return DTYPE == FLOAT32 ? 4 : DTYPE == FLOAT8_E4M3 || DTYPE == FP8_DS_MLA ? 1 : 2;
}
// Elements in a 128-bit load.
template <int DTYPE>
CONSTANT int vector_width() {
  return 16 / element_bytes<DTYPE>();
}

// NVRTC has no INFINITY, and an overflowing literal is no constant expression.
DEVICE float neg_inf() { return as_f32(0xff800000u); }

template <int DTYPE>
DEVICE const u8* element_ptr(const void* base, i64 index) {
  return (const u8*)base + index * element_bytes<DTYPE>();
}
template <int DTYPE>
DEVICE u8* element_ptr(void* base, i64 index) {
  return (u8*)base + index * element_bytes<DTYPE>();
}

template <int DTYPE>
DEVICE float element_to_f32(u16 bits) {
  return DTYPE == BFLOAT16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}
template <int DTYPE>
DEVICE u32 pack_elements(float lo, float hi) {
  return DTYPE == BFLOAT16 ? pack_bf16x2(lo, hi) : pack_f16x2(lo, hi);
}

template <int DTYPE>
DEVICE float load_element(const u8* ptr) {
  if constexpr (DTYPE == FLOAT32)
    return ld_global_f32(ptr);
  else
    return element_to_f32<DTYPE>(ld_global_u16(ptr));
}

template <int DTYPE>
struct Vector {
  float v[vector_width<DTYPE>()];
};

template <int DTYPE>
DEVICE Vector<DTYPE> zero_vector() {
  Vector<DTYPE> r;
#pragma unroll
  for (int i = 0; i < vector_width<DTYPE>(); i++) r.v[i] = 0.0f;
  return r;
}

// vector_width() consecutive elements: one 128-bit load where rows are aligned, else element by element.
template <int DTYPE, bool ALIGNED>
DEVICE Vector<DTYPE> load_vector(const u8* ptr) {
  Vector<DTYPE> r;
  if constexpr (!ALIGNED) {
#pragma unroll
    for (int i = 0; i < vector_width<DTYPE>(); i++) r.v[i] = load_element<DTYPE>(ptr + i * element_bytes<DTYPE>());
  } else if constexpr (DTYPE == FLOAT32) {
    const f32x4 x = ld_global_f32x4(ptr);
    r.v[0] = x.x, r.v[1] = x.y, r.v[2] = x.z, r.v[3] = x.w;
  } else {
    const u32x4 x = ld_global_u32x4(ptr);
    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      r.v[2 * i] = element_to_f32<DTYPE>((u16)words[i]);
      r.v[2 * i + 1] = element_to_f32<DTYPE>((u16)(words[i] >> 16));
    }
  }
  return r;
}

template <int DTYPE>
DEVICE void store_element(u8* ptr, float v) {
  if constexpr (DTYPE == FLOAT32)
    st_global_f32(ptr, v);
  else
    st_global_u16(ptr, (u16)pack_elements<DTYPE>(v, 0.0f));
}

// Four neighbours, of which the first lies on a multiple of four elements.
template <int DTYPE>
DEVICE void store_quad(u8* ptr, f32x4 v) {
  if constexpr (DTYPE == FLOAT32)
    st_global_f32x4(ptr, v);
  else
    st_global_u32x2(ptr, {pack_elements<DTYPE>(v.x, v.y), pack_elements<DTYPE>(v.z, v.w)});
}
