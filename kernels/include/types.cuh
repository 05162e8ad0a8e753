// Fixed-width names and small vectors. NVRTC offers no <cstdint>, and the host compiler sees the same text.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// A function of compile-time constants, callable from kernels.
#ifdef MLAFLASH_EMULATOR
#define CONSTANT static constexpr
#else
#define CONSTANT static constexpr __host__ __device__
#endif

struct alignas(8) u32x2 {
  u32 x, y;
};
struct alignas(16) u32x4 {
  u32 x, y, z, w;
};
struct alignas(8) f32x2 {
  float x, y;
};
struct alignas(16) f32x4 {
  float x, y, z, w;
};

// Width of one KV row: 512 latent columns (the value), then 64 rope columns.
constexpr int DL = 512;
constexpr int DR = 64;
constexpr int D = DL + DR;

constexpr int WARP = 32;

CONSTANT int min_int(int a, int b) { return a < b ? a : b; }
CONSTANT int max_int(int a, int b) { return a > b ? a : b; }
