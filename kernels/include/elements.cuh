// Loads and stores of float32, bfloat16 and float16 elements as float32 values.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

template <int DTYPE>
CONSTANT int element_bytes() {
  return DTYPE == FLOAT32 ? 4 : 2;
}
// Elements in a 128-bit load.
template <int DTYPE>
CONSTANT int vector_width() {
  return 16 / element_bytes<DTYPE>();
}

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
  if constexpr (DTYPE == FLOAT32) return ld_global_f32(ptr);
  else return element_to_f32<DTYPE>(ld_global_u16(ptr));
}

// vector_width() consecutive elements: one 128-bit load where the row is aligned, else element by element.
template <int DTYPE>
DEVICE void load_vector(float (&v)[vector_width<DTYPE>()], const u8* ptr, bool vectorized) {
  if (!vectorized) {
#pragma unroll
    for (int i = 0; i < vector_width<DTYPE>(); i++) v[i] = load_element<DTYPE>(ptr + i * element_bytes<DTYPE>());
    return;
  }
  if constexpr (DTYPE == FLOAT32) {
    const f32x4 x = ld_global_f32x4(ptr);
    v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
  } else {
    const u32x4 x = ld_global_u32x4(ptr);
    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[2 * i] = element_to_f32<DTYPE>((u16)words[i]);
      v[2 * i + 1] = element_to_f32<DTYPE>((u16)(words[i] >> 16));
    }
  }
}

template <int DTYPE>
DEVICE void store_element(u8* ptr, float v) {
  if constexpr (DTYPE == FLOAT32) st_global_f32(ptr, v);
  else st_global_u16(ptr, (u16)pack_elements<DTYPE>(v, 0.0f));
}
