// What kernels of attention over pages need beside threads.h, instructions.h and votes.h. Loads from device memory must
// lie in a tensor of the call.
#include "bytes.h"
#include "e4m3_cache.h"
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
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<std::uint64_t>(x) * y >> 32; }
inline bool __all_sync(unsigned lanes, bool value) { return __ballot_sync(lanes, value) == 0xFFFFFFFF; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= (bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return found;
}
inline int atomic_add_acq_rel(int* to, int x) { return std::exchange(*to, *to + x); }
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
