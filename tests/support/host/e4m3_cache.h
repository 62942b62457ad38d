// Conversions of e4m3 caches. Their products are in fp16, with queries in bf16 too (PTX ISA, "cvt").
inline unsigned short half_of(float x) {
  const _Float16 half = x;
  unsigned short bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline unsigned widen_pair(unsigned short codes) {
  return static_cast<unsigned>(half_of(known_byte(codes >> 8, false))) << 16 | half_of(known_byte(codes & 0xFF, false));
}
inline float widen(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
inline unsigned pack_out(float low, float high) {
  unsigned words[2];
  std::memcpy(&words[0], &low, 4);
  std::memcpy(&words[1], &high, 4);
  for (unsigned& word : words) word = (word + 0x7FFF + (word >> 16 & 1)) >> 16;
  return words[1] << 16 | words[0];
}
