// What sums in fixed point are made with.
#define __shared__ static
struct int4 {
  int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int atomicMax(int* to, int value) { return std::exchange(*to, max(*to, value)); }
inline int __float2int_rn(float x) {
  return x != x ? 0 : x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? INT32_MIN : static_cast<int>(std::nearbyint(x));
}
