// ceilings: rates that bound every kernel of this library, one block after another of nothing but the instruction in
// question.
//
// Grid:   any x; block: 256. Shared: none.
// LIMIT:  0 fused multiply-adds of float32, 1 mma.sync m16n8k16 bfloat16 with float32 accumulation. Streaming reads are
//         timed with flush.cu.
// Idea:   eight independent chains a thread cover the latency of each, so that the issue rate is what is measured.
constexpr int CHAINS = 8;

static __device__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sink:  [1], written in no case that occurs; it keeps the compiler from dropping the work
extern "C" __global__ void __launch_bounds__(256, 1) mlaflash_ceilings(unsigned steps, float seed, float* sink) {
  float total = 0.0f;
  if constexpr (MLAFLASH_LIMIT == 0) {
    float acc[CHAINS];
    for (int c = 0; c < CHAINS; c++) acc[c] = seed * (float)(c + threadIdx.x);
    for (unsigned step = 0; step < steps; step++) {
#pragma unroll
      for (int c = 0; c < CHAINS; c++) acc[c] = __fmaf_rn(acc[c], seed, acc[c]);
    }
    for (int c = 0; c < CHAINS; c++) total += acc[c];
  } else {
    float acc[CHAINS][4] = {};
    const unsigned bits = __float_as_uint(seed) + threadIdx.x;
    const unsigned a[4] = {bits, bits * 3, bits * 5, bits * 7};
    for (unsigned step = 0; step < steps; step++) {
#pragma unroll
      for (int c = 0; c < CHAINS; c++) mma(acc[c], a, bits + c, bits * 11 + c);
    }
    for (int c = 0; c < CHAINS; c++) total += acc[c][0] + acc[c][1] + acc[c][2] + acc[c][3];
  }
  if (total == 12345.678f) *sink = total;
}
