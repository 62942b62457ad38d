// The instructions of PTX that kernels for sm_90a have (PTX ISA: "mbarrier", "cp.async.bulk.tensor", "wgmma", "bar").
// Copies of the copy engine happen at once, or as late as they may: when their barrier is waited for. Products happen
// when they are waited for: what is changed too early shows in the result.
#include <map>

#include "bytes.h"
#include "votes.h"

using uint = unsigned;
struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static Number gridDim;
inline int __float_as_int(float x) {
  int bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline void __threadfence() {}
inline bool __all_sync(unsigned lanes, bool value) { return __ballot_sync(lanes, value) == 0xFFFFFFFF; }

// What stands in the 128 bytes of a tensor map here: tests/support/host_sm90a.py writes it.
struct HostMap {
  char* address;
  int rank, element, swizzle, dims[5], box[5];
  int strides[5];  // bytes, of all dimensions but the innermost
};
struct Barrier {
  int count = 0, missing = 0, bytes = 0, phase = 0;
  std::vector<std::function<void()>> late;
};
struct NamedBarrier {
  int arrived = 0, rounds = 0;
};
struct Product {
  float* d;
  const unsigned* a;
  unsigned a_tile, b_tile, b_upper;
  int n;
  bool accumulate, wide_a, wide_b;  // wide: e5m2
  // Of 16 bits: k is 16, and an operand in shared memory may have its rows (of A) or columns (of B) side by side.
  bool halves = false, mn_major_a = false, mn_major_b = false;
};
struct Stored {
  const HostMap* map;
  unsigned from;
  int at[5];
};
static std::map<unsigned, Barrier> mbarriers;
static std::map<int, NamedBarrier> named_barriers;
static std::map<int, std::vector<Product>> open_products;
static std::map<int, std::vector<std::vector<Product>>> product_groups;
static std::map<int, std::vector<Stored>> stores;
static std::map<int, std::vector<std::function<void()>>> bulk_stores;

inline void complete(Barrier& barrier) {
  if (barrier.missing == 0 && barrier.bytes == 0) {
    barrier.missing = barrier.count;
    barrier.phase ^= 1;
  }
}
inline void mbarrier_init(unsigned at, int arrivals) { mbarriers[at] = {arrivals, arrivals}; }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(unsigned at) {
  Barrier& barrier = mbarriers.at(at);
  if (barrier.missing-- == 0) fail("mbarrier: more arrivals than it counts");
  complete(barrier);
}
inline void mbarrier_arrive_expect_tx(unsigned at, int bytes) {
  mbarriers.at(at).bytes += bytes;
  mbarrier_arrive(at);
}
inline void mbarrier_wait(unsigned at, int parity) {
  Barrier& barrier = mbarriers.at(at);
  while (barrier.phase == parity) {
    for (const auto& copy : std::exchange(barrier.late, {})) copy();
    if (barrier.phase == parity) yield();
  }
  ++threads[current].steps;
}
inline void bar_arrive(int id, int number) {
  NamedBarrier& barrier = named_barriers[id];
  if (++barrier.arrived == number) {
    barrier.arrived = 0;
    ++barrier.rounds;
  }
}
inline void bar_sync(int id, int number) {
  NamedBarrier& barrier = named_barriers[id];
  const int round = barrier.rounds;
  bar_arrive(id, number);
  while (barrier.rounds == round) yield();
  ++threads[current].steps;
}

inline unsigned swizzled(unsigned at, int bytes) {
  return bytes == 0 ? at : at ^ (at >> 7 & (bytes / 16 - 1)) << 4;
}
// Calls each(place in the tensor or null, address in shared memory) for the elements of a box.
template <typename Each>
void for_box(const HostMap& map, unsigned shared, const int (&at)[5], Each each) {
  int count = 1;
  for (int i = 0; i < map.rank; ++i) count *= map.box[i];
  for (int number = 0; number < count; ++number) {
    bool inside = true;
    long long offset = 0;
    for (int i = 0, rest = number; i < map.rank; rest /= map.box[i++]) {
      const int index = at[i] + rest % map.box[i];
      inside &= index >= 0 && index < map.dims[i];
      offset += static_cast<long long>(index) * (i == 0 ? map.element : map.strides[i]);
    }
    const unsigned to = swizzled(shared + number * map.element, map.swizzle);
    if (to + map.element > memory_bytes) fail("copy: address in shared memory");
    each(inside ? map.address + offset : nullptr, memory + to);
  }
}
inline void load_box(unsigned to, const void* given, unsigned barrier, const int (&at)[5]) {
  const HostMap map = *static_cast<const HostMap*>(given);
  if (to % 128) fail("copy: alignment in shared memory");
  std::array<int, 5> place{at[0], at[1], at[2], at[3], at[4]};
  const auto copy = [=] {
    const int where[5] = {place[0], place[1], place[2], place[3], place[4]};
    for_box(map, to, where, [&](const char* from, unsigned char* into) {
      if (from == nullptr) std::memset(into, 0, map.element);
      else std::memcpy(into, from, map.element);
      mbarriers.at(barrier).bytes -= map.element;
    });
    complete(mbarriers.at(barrier));
  };
  if (copies_late) mbarriers.at(barrier).late.push_back(copy);
  else copy();
}
template <typename Map>
void tma_load_4d(unsigned to, const Map* map, unsigned barrier, int a, int b, int c, int d) {
  load_box(to, map, barrier, {a, b, c, d, 0});
}
template <typename Map>
void tma_load_5d(unsigned to, const Map* map, unsigned barrier, int a, int b, int c, int d, int e) {
  load_box(to, map, barrier, {a, b, c, d, e});
}
template <typename Map>
void tma_store_4d(const Map* map, unsigned from, int a, int b, int c, int d) {
  stores[current].push_back({reinterpret_cast<const HostMap*>(map), from, {a, b, c, d, 0}});
}
template <typename Map>
void tma_store_5d(const Map* map, unsigned from, int a, int b, int c, int d, int e) {
  stores[current].push_back({reinterpret_cast<const HostMap*>(map), from, {a, b, c, d, e}});
}
// Copies of bytes, and sums: from device memory at once or late, to it when the thread waits for them.
inline bool is_aligned(const void* address) { return reinterpret_cast<unsigned long long>(address) % 16 == 0; }
inline void tma_load_bytes(unsigned to, const void* from, int bytes, unsigned barrier) {
  if (to % 16 || bytes % 16 || to + bytes > memory_bytes || !is_aligned(from)) fail("cp.async.bulk: address");
  const auto copy = [=] {
    std::memcpy(memory + to, from, bytes);
    mbarriers.at(barrier).bytes -= bytes;
    complete(mbarriers.at(barrier));
  };
  if (copies_late) mbarriers.at(barrier).late.push_back(copy);
  else copy();
}
inline void tma_store_bytes(void* to, unsigned from, int bytes) {
  if (from % 16 || bytes % 16 || from + bytes > memory_bytes || !is_aligned(to)) fail("cp.async.bulk: address");
  bulk_stores[current].push_back([=] { std::memcpy(to, memory + from, bytes); });
}
inline void tma_reduce_add(float* to, unsigned from, int bytes) {
  if (from % 16 || bytes % 16 || from + bytes > memory_bytes || !is_aligned(to)) fail("cp.reduce.async.bulk: address");
  bulk_stores[current].push_back([=] {
    for (int i = 0; i < bytes / 4; ++i) {
      float part;
      std::memcpy(&part, memory + from + i * 4, 4);
      to[i] += part;
    }
  });
}
inline void tma_reduce_add_s32(int* to, unsigned from, int bytes) {
  if (from % 16 || bytes % 16 || from + bytes > memory_bytes || !is_aligned(to)) fail("cp.reduce.async.bulk: address");
  bulk_stores[current].push_back([=] {
    for (int i = 0; i < bytes / 4; ++i) {
      unsigned part;
      std::memcpy(&part, memory + from + i * 4, 4);
      to[i] = static_cast<int>(static_cast<unsigned>(to[i]) + part);
    }
  });
}
inline void fence_proxy_async_global() {}
inline int load_acquire(const int* from) { return *from; }
inline void store_release(int* to, int value) { *to = value; }
inline void launch_dependents() {}
inline void wait_for_prerequisites() {}
inline int atomic_add_acq_rel(int* to, int x) { return std::exchange(*to, *to + x); }
inline void tma_store_commit() {}
template <int kPending>
void tma_store_wait_read() {
  for (const auto& store : std::exchange(bulk_stores[current], {})) store();
  for (const Stored& store : std::exchange(stores[current], {})) {
    for_box(*store.map, store.from, store.at, [&](char* to, const unsigned char* from) {
      if (to != nullptr) std::memcpy(to, from, store.map->element);
    });
  }
}
template <int kPending>
void tma_store_wait() {
  tma_store_wait_read<kPending>();
}
template <typename Map>
void prefetch_tensormap(const Map*) {}
inline void fence_proxy_async() {}
template <int>
void setmaxnreg_dec() {}
template <int>
void setmaxnreg_inc() {}

// The byte of a K-major tile in column k of a row, of a descriptor.
inline unsigned char tile_byte(unsigned lower, unsigned upper, int row, int k) {
  const int swizzle = upper >> 30 == 1 ? 128 : 64, row_bytes = swizzle;
  const unsigned at = (lower & 0x3FFF) * 16 + row / 8 * (upper & 0x3FFF) * 16 + row % 8 * row_bytes + k;
  if (at >= memory_bytes) fail("wgmma: address in shared memory");
  return memory[swizzled(at, swizzle)];
}
constexpr unsigned kHostUpperHalf = 0x40000040;
inline void wgmma_fence() {}
inline void wgmma_commit() { product_groups[current].push_back(std::exchange(open_products[current], {})); }
// Element k of a row of A, or of a column of B, of a descriptor whose upper half has the width of the swizzle, which is
// that of rows, and the bytes from 8 rows to the next 8 (SBO). MN-major: a row has some of them for one k; the lower half
// has the bytes from such a group to the next (LBO).
inline float tile_half(unsigned lower, unsigned upper, bool mn_major, int row, int k) {
  const int row_bytes = 256 >> (upper >> 30), eight_rows = (upper & 0x3FFF) * 16, columns = row_bytes / 2;
  const int number = mn_major ? k : row, column = mn_major ? row % columns : k;
  const unsigned in_group = number / 8 * eight_rows + number % 8 * row_bytes + column * 2;
  const unsigned at = (lower & 0x3FFF) * 16 + in_group + (mn_major ? row / columns * (lower >> 16 & 0x3FFF) * 16 : 0);
  if (at + 2 > memory_bytes) fail("wgmma: address in shared memory");
  unsigned short bits;
  std::memcpy(&bits, memory + swizzled(at, row_bytes), 2);
  return widened(bits);
}
inline void multiply_halves(const Product* const (&lanes)[32]) {
  const Product& one = *lanes[0];
  const int first_row = current / 32 % 4 * 16;
  static float left[16][16], right[256][16];
  for (int n = 0; n < one.n; ++n) {
    for (int k = 0; k < 16; ++k) right[n][k] = tile_half(one.b_tile, one.b_upper, one.mn_major_b, n, k);
  }
  for (int t = 0; t < 32; ++t) {
    for (int i = 0; i < 8; ++i) {
      const int row = t / 4 + i / 2 % 2 * 8, k = t % 4 * 2 + i / 4 * 8 + i % 2;
      left[row][k] = one.a != nullptr ? widened(lanes[t]->a[i / 2] >> i % 2 * 16)
                                      : tile_half(one.a_tile, one.b_upper, one.mn_major_a, first_row + row, k);
    }
  }
  for (int t = 0; t < 32; ++t) {
    for (int i = 0; i < one.n / 2; ++i) {
      const int row = t / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
      float sum = one.accumulate ? lanes[t]->d[i] : 0.0f;
      for (int k = 0; k < 16; ++k) sum += left[row][k] * right[column][k];
      lanes[t]->d[i] = sum;
    }
  }
}
inline void multiply(const Product* const (&lanes)[32]) {
  const Product& one = *lanes[0];
  if (one.halves) return multiply_halves(lanes);
  const int first_row = current / 32 % 4 * 16;
  static float left[16][32], right[256][32];
  for (int n = 0; n < one.n; ++n) {
    for (int k = 0; k < 32; ++k) right[n][k] = known_byte(tile_byte(one.b_tile, one.b_upper, n, k), one.wide_b);
  }
  for (int t = 0; t < 32; ++t) {
    for (int i = 0; i < 16; ++i) {
      const int row = t / 4 + i / 4 % 2 * 8, k = t % 4 * 4 + i / 8 * 16 + i % 4;
      const unsigned char byte = one.a != nullptr ? lanes[t]->a[i / 4] >> i % 4 * 8 & 0xFF
                                                  : tile_byte(one.a_tile, kHostUpperHalf, first_row + row, k);
      left[row][k] = known_byte(byte, one.wide_a);
    }
  }
  for (int t = 0; t < 32; ++t) {
    for (int i = 0; i < one.n / 2; ++i) {
      const int row = t / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
      float sum = one.accumulate ? lanes[t]->d[i] : 0.0f;
      for (int k = 0; k < 32; ++k) sum += left[row][k] * right[column][k];
      lanes[t]->d[i] = sum;
    }
  }
}
template <int kPending>
void wgmma_wait() {
  int running = product_groups[current].size();
  of_warp(&running, nullptr, [](const void** all, void**) {
    const int first = current / 32 * 32;
    while (static_cast<int>(product_groups[first].size()) > kPending) {
      for (std::size_t i = 0; i < product_groups[first].front().size(); ++i) {
        const Product* lanes[32];
        for (int t = 0; t < 32; ++t) lanes[t] = &product_groups[first + t].front()[i];
        multiply(lanes);
      }
      for (int t = 0; t < 32; ++t) product_groups[first + t].erase(product_groups[first + t].begin());
    }
  });
}
inline void issue(const Product& product) { open_products[current].push_back(product); }

inline void ldmatrix_x4(unsigned (&m)[4], unsigned address);
template <bool kTransposed>
void store_matrices(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  if (address % 16 || address + 16 > memory_bytes) fail("stmatrix: address");
  struct Given {
    unsigned words[4], address;
  } given{{a, b, c, d}, address};
  of_warp(&given, nullptr, [](const void** all, void**) {
    const auto of = [all](int t) { return static_cast<const Given*>(all[t]); };
    for (int i = 0; i < 4; ++i) {
      for (int t = 0; t < 32; ++t) {
        for (int j = 0; j < 2; ++j) {
          const int row = kTransposed ? t % 4 * 2 + j : t / 4, column = kTransposed ? t / 4 : t % 4 * 2 + j;
          const unsigned short half = of(t)->words[i] >> j * 16;
          std::memcpy(memory + of(i * 8 + row)->address + column * 2, &half, 2);
        }
      }
    }
  });
}
inline void stmatrix_x4(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  store_matrices<false>(address, a, b, c, d);
}
inline void stmatrix_x4_trans(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  store_matrices<true>(address, a, b, c, d);
}
static void reset_hopper() {
  mbarriers.clear();
  named_barriers.clear();
  open_products.clear();
  product_groups.clear();
  stores.clear();
  bulk_stores.clear();
}
