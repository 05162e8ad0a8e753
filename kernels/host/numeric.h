// Arithmetic as the instructions define it: 16-bit floats, and the approximations that flush subnormals.
#pragma once
#include <cmath>

#include "fiber.h"

namespace emulator {

INLINE float bits_to_f32(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
INLINE u32 f32_to_bits(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}

INLINE u16 round_to_bf16(float value) {
  const u32 bits = f32_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // every NaN becomes this one
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE u16 round_to_f16(float value) {
  const u32 bits = f32_to_bits(value);
  const u32 sign = bits >> 16 & 0x8000;
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return (u16)(sign | 0x7c00);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is a multiple of 2^-24: adding 0.5 lets the float32 addition round there.
    return (u16)(sign | (f32_to_bits(bits_to_f32(magnitude) + 0.5f) - 0x3f000000u));
  }
  return (u16)(sign | ((magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

INLINE float f16_value(u16 half) {
  const u32 sign = (u32)(half & 0x8000) << 16;
  const u32 magnitude = (u32)(half & 0x7fff) << 13;
  if (magnitude > 0x0f800000u) return bits_to_f32(0x7fffffffu);
  if (magnitude == 0x0f800000u) return bits_to_f32(sign | 0x7f800000u);
  // As float32 bits the exponent is too small by 112; the product is exact, subnormals included.
  return bits_to_f32(sign | f32_to_bits(bits_to_f32(magnitude) * 0x1p112f));
}
INLINE u16 e4m3_to_f16(u32 code) {
  const u32 magnitude = code & 0x7f;
  if (magnitude == 0x7f) return 0x7fff;
  const float significand = magnitude >> 3 ? (float)(8 + magnitude % 8) : (float)magnitude;
  const u32 exponent = magnitude >> 3 ? magnitude >> 3 : 1;
  return (u16)((code & 0x80) << 8 | round_to_f16(significand * bits_to_f32((exponent + 117) << 23)));
}
INLINE float bf16_value(u16 bits) { return bits_to_f32((u32)bits << 16); }

INLINE float flushed(float value) { return fabsf(value) < 0x1p-126f ? copysignf(0.0f, value) : value; }

}  // namespace emulator
