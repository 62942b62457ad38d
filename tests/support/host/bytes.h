// Numbers of 8 bits, as inputs and weights in FP8 are.
// A byte as a number: e4m3, or if `wide` e5m2.
inline float of_byte(unsigned char bits, bool wide) {
  const int mantissa_bits = wide ? 2 : 3, bias = wide ? 15 : 7;
  const int exponent = (bits & 0x7F) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
  const float sign = bits & 0x80 ? -1.0f : 1.0f;
  if (wide ? exponent == 31 : (bits & 0x7F) == 0x7F) return wide && mantissa == 0 ? sign / 0.0f : NAN;
  const float fraction = (exponent == 0 ? 0 : 1) + static_cast<float>(mantissa) / (1 << mantissa_bits);
  return sign * std::ldexp(fraction, max(exponent, 1) - bias);
}
inline float known_byte(unsigned char bits, bool wide) {
  static const std::vector<float> table = [] {
    std::vector<float> all(512);
    for (int i = 0; i < 512; ++i) all[i] = of_byte(i, i >= 256);
    return all;
  }();
  return table[bits + wide * 256];
}
// A number that is not negative to e4m3, ties to even, at most 448.
inline unsigned to_e4m3(float x) {
  if (std::isnan(x)) return 0x7F;
  int exponent = 0;
  std::frexp(x, &exponent);
  const int quantum = max(exponent - 1, -6) - 3;
  const float rounded = std::min(std::ldexp(std::nearbyint(std::ldexp(x, -quantum)), quantum), 448.0f);
  if (rounded == 0.0f) return 0;
  std::frexp(rounded, &exponent);
  const int power = max(exponent - 1, -6);
  const int steps = static_cast<int>(std::ldexp(rounded, 3 - power));  // 8 to 15, fewer below the normal numbers
  return (power + 6) * 8 + steps;
}
inline unsigned pack_e4m3(float a, float b, float c, float d) {
  return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | to_e4m3(d) << 24;
}
