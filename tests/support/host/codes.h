// What quantize kernels ask beside threads.h: votes, fences, and conversions to FP8 (PTX ISA, "cvt").
#define __constant__ static const
struct uint2 {
  unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static Number gridDim;
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
// Each is rounded: the host's compiler is told not to contract.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float rcp(float x) { return 1.0f / x; }
inline void __threadfence() {}
inline void __nanosleep(unsigned) { fail("waits for a thread block that comes later"); }
inline int load_acquire(const int* from) { return *from; }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  unsigned largest;
  of_warp(&value, &largest, [](const void** all, void** to) {
    unsigned found = 0;
    for (int i = 0; i < 32; ++i) found = max(found, *static_cast<const unsigned*>(all[i]));
    for (int i = 0; i < 32; ++i) *static_cast<unsigned*>(to[i]) = found;
  });
  return largest;
}
inline float widen(unsigned short bits) {
#ifdef BF16
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
#else
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return x;
#endif
}
// One number of `kDigits` digits behind the point, rounded to nearest even; what is too large becomes the largest one.
template <int kDigits, int kBias, int kMostBits>
unsigned code_of(float x) {
  if (std::isnan(x)) return 0x7F;
  const unsigned sign = std::signbit(x) ? 0x80 : 0;
  const int exponent = max(std::isinf(x) ? 99 : x == 0.0f ? -99 : std::ilogb(x), 1 - kBias);
  const float steps = std::nearbyint(std::ldexp(std::fabs(x), kDigits - exponent));  // may be the next power of two
  const float bits = steps + static_cast<float>((exponent + kBias - 1) << kDigits);
  return sign | (bits > kMostBits ? kMostBits : static_cast<unsigned>(bits));
}
inline unsigned code_pair(float low, float high) {
#ifdef E5M2
  return code_of<2, 15, 0x7B>(low) | code_of<2, 15, 0x7B>(high) << 8;
#else
  return code_of<3, 7, 0x7E>(low) | code_of<3, 7, 0x7E>(high) << 8;
#endif
}
