// What kernels of attention over pages need beside threads.h, instructions.h and votes.h. Loads from device memory must
// lie in a tensor of the call.
#include "bytes.h"
#include "votes.h"

#define __noinline__
static Number gridDim;
struct uint2 {
  unsigned x, y;
};
struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline bool __all_sync(unsigned lanes, bool value) { return __ballot_sync(lanes, value) == 0xFFFFFFFF; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= (bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return found;
}
inline int atomic_add_acq_rel(int* to, int x) { return std::exchange(*to, *to + x); }
inline unsigned short half_of(float x) {
  const _Float16 half = x;
  unsigned short bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline unsigned widen_pair(unsigned short codes) {
  return static_cast<unsigned>(half_of(known_byte(codes >> 8, false))) << 16 | half_of(known_byte(codes & 0xFF, false));
}
// Of e4m3 caches with queries in bf16, whose products are in fp16.
inline float widen(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
inline unsigned pack_out(float low, float high) {
  unsigned words[2];
  std::memcpy(&words[0], &low, 4);
  std::memcpy(&words[1], &high, 4);
  for (unsigned& word : words) word = (word + 0x7FFF + (word >> 16 & 1)) >> 16;
  return words[1] << 16 | words[0];
}
inline void check_load(const void* at, std::size_t bytes) {
  const char* from = static_cast<const char*>(at);
  const bool known = std::any_of(readable.begin(), readable.end(),
      [&](const auto& range) { return from >= range.first && from + bytes <= range.second; });
  if (!known) fail("a load outside the tensors");
}
template <typename T>
T checked_load(const T* from) {
  check_load(from, sizeof(T));
  return *from;
}
#define __ldg checked_load
inline void cp_async_4(unsigned to, const void* from, bool valid) {
  if (to % 4 || to + 4 > memory_bytes || reinterpret_cast<std::uintptr_t>(from) % 4) fail("cp.async: address");
  if (valid) check_load(from, 4);
  std::memset(memory + to, 0, 4);
  if (valid) std::memcpy(memory + to, from, 4);
}
