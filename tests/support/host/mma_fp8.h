// mma.sync of FP8 (PTX ISA, "mma.m16n8k32"), which threads.h and instructions.h come before.
#include "bytes.h"
#include "votes.h"

// A thread t of a warp, with r = t / 4 and c = t % 4 * 4, has of A rows r and r + 8, columns c to c + 3 and c + 16 to
// c + 19; of B the same rows of column r; of D rows r and r + 8, columns t % 4 * 2 and the next one. Sums are in fp32
// here, which they are not on a GPU.
template <bool kWideLeft, bool kWideRight>
void mma_m16n8k32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  struct Given {
    float* d;
    const unsigned* a;
    unsigned b[2];
  } given{d, a, {b0, b1}};
  of_warp(&given, nullptr, [](const void** all, void**) {
    float left[16][32], right[8][32];
    for (int t = 0; t < 32; ++t) {
      const Given& of = *static_cast<const Given*>(all[t]);
      for (int i = 0; i < 16; ++i) {
        const int column = t % 4 * 4 + i / 8 * 16 + i % 4;
        left[t / 4 + i / 4 % 2 * 8][column] = known_byte(of.a[i / 4] >> i % 4 * 8 & 0xFF, kWideLeft);
        if (i / 4 % 2 == 0) right[t / 4][column] = known_byte(of.b[i / 8] >> i % 4 * 8 & 0xFF, kWideRight);
      }
    }
    for (int t = 0; t < 32; ++t) {
      for (int i = 0; i < 4; ++i) {
        float sum = 0.0f;
        for (int k = 0; k < 32; ++k) sum += left[t / 4 + i / 2 * 8][k] * right[t % 4 * 2 + i % 2][k];
        static_cast<const Given*>(all[t])->d[i] += sum;
      }
    }
  });
}
inline void mma_e4m3_e4m3(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  mma_m16n8k32<false, false>(d, a, b0, b1);
}
inline void mma_e4m3_e5m2(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  mma_m16n8k32<false, true>(d, a, b0, b1);
}
inline void mma_e5m2_e5m2(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  mma_m16n8k32<true, true>(d, a, b0, b1);
}
inline float __fdividef(float x, float y) { return x / y; }
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
static int ctaid_x() { return blockIdx.x; }
static int tid_x() { return threadIdx.x; }
