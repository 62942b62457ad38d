// The instructions of PTX that only kernels of BSR x dense have (PTX ISA: "cp.async.bulk.tensor", "ld.global.nc",
// "prmt").
struct uint2 {
  unsigned x, y;
};
template <typename Map>
void tma_load_2d(unsigned to, const Map* map, unsigned barrier, int a, int b) {
  load_box(to, map, barrier, {a, b, 0, 0, 0});
}
template <typename Map>
void tma_load_3d(unsigned to, const Map* map, unsigned barrier, int a, int b, int c) {
  load_box(to, map, barrier, {a, b, c, 0, 0});
}
template <typename Map>
void tma_store_3d(const Map* map, unsigned from, int a, int b, int c) {
  stores[current].push_back({reinterpret_cast<const HostMap*>(map), from, {a, b, c, 0, 0}});
}
template <std::size_t kWords>
void load_cached(unsigned (&x)[kWords], const void* from) {
  if (reinterpret_cast<std::uintptr_t>(from) % sizeof x) fail("ld.global: alignment");
  std::memcpy(x, from, sizeof x);
}
template <std::size_t kWords>
void load_streamed(unsigned (&x)[kWords], const void* from) {
  load_cached(x, from);
}
inline unsigned low_halves(unsigned a, unsigned b) { return (a & 0xFFFF) | b << 16; }
inline unsigned high_halves(unsigned a, unsigned b) { return a >> 16 | (b & 0xFFFF0000); }
inline float widen(unsigned short bits) { return widened(bits); }
