// Functions of CUDA on integers and numbers that C++ has not, and those of expressions that are one instruction.
#include <cfenv>

inline int __clzll(unsigned long long x) { return x == 0 ? 64 : __builtin_clzll(x); }
inline long long __mul64hi(long long a, long long b) { return static_cast<__int128>(a) * b >> 64; }
template <typename Operator>
float rounded_to(int direction, float a, float b, Operator compute) {
  std::fesetround(direction);
  volatile float x = a, y = b;
  volatile float z = compute(x, y);
  std::fesetround(FE_TONEAREST);
  return z;
}
inline float __fadd_rd(float a, float b) {
  return rounded_to(FE_DOWNWARD, a, b, [](volatile float& x, volatile float& y) { return x + y; });
}
inline float __fadd_ru(float a, float b) {
  return rounded_to(FE_UPWARD, a, b, [](volatile float& x, volatile float& y) { return x + y; });
}
inline float __fmul_rd(float a, float b) {
  return rounded_to(FE_DOWNWARD, a, b, [](volatile float& x, volatile float& y) { return x * y; });
}
inline float __fmul_ru(float a, float b) {
  return rounded_to(FE_UPWARD, a, b, [](volatile float& x, volatile float& y) { return x * y; });
}
