// flush: reads a buffer larger than the level-2 cache, so that the launch after it finds nothing of its own there.
//
// Grid:   any x; block: any. Shared: none.
// Idea:   reading leaves clean lines. A buffer that is written would be written back during the launch that is timed.
//         Passes after the first only take time: while they run, the host enqueues that launch.

// data:  [count] 16-byte words
// sink:  [1], written in no case that occurs; it keeps the compiler from dropping the loads
extern "C" __global__ void mlaflash_flush(const uint4* data, unsigned long long count, unsigned passes,
                                          unsigned* sink) {
  const unsigned long long first = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
  const unsigned long long step = gridDim.x * (unsigned long long)blockDim.x;
  uint4 bits = {0, 0, 0, 0};
  for (unsigned pass = 0; pass < passes; pass++) {
    for (unsigned long long i = first; i < count; i += step) {
      uint4 word;
      // volatile: a later pass reads memory again; .cg: level 2 is the cache that matters.
      asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                   : "l"(data + i));
      bits = {bits.x | word.x, bits.y | word.y, bits.z | word.z, bits.w | word.w};
    }
  }
  if (bits.x | bits.y | bits.z | bits.w) *sink = 1;
}
