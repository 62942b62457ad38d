// The instructions of PTX that kernels of mma.sync have (PTX ISA: "mma", "ldmatrix", "cp.async"). Copies happen as late
// as they may, when they are waited for, or at once: a wait that is missing, or a place that is filled too early, shows
// in the result.
// Elements of 16 bits, as the kernel's type.
inline float of_half(unsigned short bits) {
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return x;
}
inline float widened(unsigned short bits) {
#ifdef BF16
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
#else
  return of_half(bits);
#endif
}
inline unsigned short rounded(float x) {
  unsigned short bits;
#ifdef BF16
  unsigned all;
  std::memcpy(&all, &x, 4);
  bits = std::isnan(x) ? 0x7FFF : (all + 0x7FFF + (all >> 16 & 1)) >> 16;
#else
  const _Float16 half = x;
  std::memcpy(&bits, &half, 2);
#endif
  return bits;
}
inline unsigned pack(float low, float high) { return static_cast<unsigned>(rounded(high)) << 16 | rounded(low); }
inline float ex2(float x) { return std::exp2(x); }
inline float rcp(float x) { return 1.0f / x; }
inline float lg2(float x) { return std::log2(x); }
inline unsigned load_word(const unsigned* from) { return *from; }

inline void run_copy(const Copy& copy) {
  if (copy.to % 16 || copy.to + 16 > memory_bytes) fail("cp.async: address in shared memory");
  std::memset(memory + copy.to, 0, 16);
  if (copy.bytes == 0) return;
  const char* from = static_cast<const char*>(copy.from);
  const bool known = std::any_of(readable.begin(), readable.end(),
      [&](const auto& range) { return from >= range.first && from + copy.bytes <= range.second; });
  if (!known) fail("cp.async: reads outside the tensors");
  std::memcpy(memory + copy.to, from, copy.bytes);
}
inline void cp_async_16_part(unsigned to, const void* from, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16) fail("cp.async: alignment");
  const Copy copy{to, from, bytes};
  if (copies_late) threads[current].open.push_back(copy);
  else run_copy(copy);
}
inline void cp_async_16(unsigned to, const void* from, bool valid) { cp_async_16_part(to, from, valid ? 16 : 0); }
inline void cp_async_commit() {
  Thread& thread = threads[current];
  thread.groups.push_back(std::exchange(thread.open, {}));
}
template <int kPending>
void cp_async_wait() {
  auto& groups = threads[current].groups;
  while (static_cast<int>(groups.size()) > kPending) {
    for (const Copy& copy : groups.front()) run_copy(copy);
    groups.erase(groups.begin());
  }
}

// A thread t of a warp, with r = t / 4 and c = t % 4 * 2, has of A rows r and r + 8, columns c, c + 1 and c + 8, c + 9;
// of B the same rows of column r; of D rows r and r + 8, columns c and c + 1.
inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  struct Given {
    float* d;
    const unsigned* a;
    unsigned b[2];
  } given{d, a, {b0, b1}};
  of_warp(&given, nullptr, [](const void** all, void**) {
    float left[16][16], right[16][8];
    for (int t = 0; t < 32; ++t) {
      const Given& of = *static_cast<const Given*>(all[t]);
      for (int i = 0; i < 8; ++i) {
        left[t / 4 + i / 2 % 2 * 8][t % 4 * 2 + i / 4 * 8 + i % 2] = widened(of.a[i / 2] >> i % 2 * 16);
        if (i < 4) right[t % 4 * 2 + i / 2 * 8 + i % 2][t / 4] = widened(of.b[i / 2] >> i % 2 * 16);
      }
    }
    for (int t = 0; t < 32; ++t) {
      for (int i = 0; i < 4; ++i) {
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += left[t / 4 + i / 2 * 8][k] * right[k][t % 4 * 2 + i % 2];
        static_cast<const Given*>(all[t])->d[i] += sum;
      }
    }
  });
}

template <bool kTransposed>
void load_matrices(unsigned (&m)[4], unsigned address) {
  if (address % 16 || address + 16 > memory_bytes) fail("ldmatrix: address");
  struct Given {
    unsigned* m;
    unsigned address;
  } given{m, address};
  of_warp(&given, nullptr, [](const void** all, void**) {
    for (int i = 0; i < 4; ++i) {
      unsigned short rows[8][8];
      for (int row = 0; row < 8; ++row) {
        std::memcpy(rows[row], memory + static_cast<const Given*>(all[i * 8 + row])->address, 16);
      }
      for (int t = 0; t < 32; ++t) {
        const int row = t / 4, column = t % 4 * 2;
        const unsigned low = kTransposed ? rows[column][row] : rows[row][column];
        const unsigned high = kTransposed ? rows[column + 1][row] : rows[row][column + 1];
        static_cast<const Given*>(all[t])->m[i] = high << 16 | low;
      }
    }
  });
}
inline void ldmatrix_x4(unsigned (&m)[4], unsigned address) { load_matrices<false>(m, address); }
inline void ldmatrix_x4_trans(unsigned (&m)[4], unsigned address) { load_matrices<true>(m, address); }
