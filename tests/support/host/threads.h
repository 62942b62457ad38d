// The threads of a block as coroutines of one CPU thread, which wait at barriers and where the lanes of a warp exchange
// values. Shared memory begins as NaN, and warps run as far apart as barriers allow, in an order drawn by a seed: a
// barrier that is missing shows in the result.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
using std::max;
using std::min;
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct int2 {
  int x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
struct Number {
  int x;
};
static Number blockIdx, threadIdx;

// Saves the registers that a function keeps, then goes on with another stack (System V ABI, AMD64).
extern "C" void switch_stack(void** from, void* to);
asm(R"(
.text
.type switch_stack, @function
switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

struct Copy {
  unsigned to;
  const void* from;
  int bytes;  // that are read; the others of 16 become zeros
};
struct Thread {
  void* stack_pointer;
  char* stack;
  bool done;
  int steps;  // waits that it has passed
  std::vector<Copy> open;                 // not yet in a group
  std::vector<std::vector<Copy>> groups;  // still running
};
struct Warp {
  int arrived, rounds;
  const void* given[32];
  void* taken[32];
};
constexpr int kStackBytes = 1 << 17;
static std::vector<Thread> threads;
static std::vector<Warp> warps;
static int current, waiting, barriers;
static void* scheduler;
static std::function<void()> body;
static unsigned char* memory;  // shared
static unsigned memory_bytes, seed;
static bool copies_late;
static std::vector<std::pair<const char*, const char*>> readable;

[[noreturn]] static void fail(const char* what) {
  std::fprintf(stderr, "%s: block %d, thread %d\n", what, blockIdx.x, threadIdx.x);
  std::abort();
}

static void yield() { switch_stack(&threads[current].stack_pointer, scheduler); }

inline void __syncthreads() {
  const int round = barriers;
  if (++waiting == static_cast<int>(threads.size())) {
    waiting = 0;
    ++barriers;
    return;
  }
  while (barriers == round) yield();
  ++threads[current].steps;
}

// Calls exchange(given, taken) once all lanes of the warp are here.
static void of_warp(const void* given, void* taken, void (*exchange)(const void**, void**)) {
  Warp& warp = warps[current / 32];
  warp.given[current % 32] = given;
  warp.taken[current % 32] = taken;
  const int round = warp.rounds;
  if (++warp.arrived == 32) {
    exchange(warp.given, warp.taken);
    warp.arrived = 0;
    ++warp.rounds;
    return;
  }
  while (warp.rounds == round) yield();
  ++threads[current].steps;
}
inline void __syncwarp() {
  of_warp(nullptr, nullptr, [](const void**, void**) {});
}

template <typename T>
T shuffled(T value, int lane) {
  struct Given {
    T value;
    int lane;
  } given{value, lane};
  T taken;
  of_warp(&given, &taken, [](const void** all, void** to) {
    T values[32];
    const auto of = [all](int i) { return static_cast<const Given*>(all[i]); };
    for (int i = 0; i < 32; ++i) values[i] = of(of(i)->lane)->value;
    for (int i = 0; i < 32; ++i) *static_cast<T*>(to[i]) = values[i];
  });
  return taken;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  return shuffled(value, current % 32 / width * width + lane % width);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  return shuffled(value, current % 32 ^ lanes);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int lanes) {
  return shuffled(value, current % 32 >= lanes ? current % 32 - lanes : current % 32);
}
inline unsigned __match_any_sync(unsigned, int value) {
  unsigned same;
  of_warp(&value, &same, [](const void** all, void** to) {
    for (int i = 0; i < 32; ++i) {
      unsigned lanes = 0;
      for (int j = 0; j < 32; ++j) lanes |= (*static_cast<const int*>(all[i]) == *static_cast<const int*>(all[j])) << j;
      *static_cast<unsigned*>(to[i]) = lanes;
    }
  });
  return same;
}
// The upper word of `high` and `low` side by side, shifted to the left by at most 32 bits.
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned bits) {
  return (static_cast<std::uint64_t>(high) << 32 | low) << min(bits, 32u) >> 32;
}
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __clz(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stcg(T* to, T value) {
  *to = value;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}
inline int atomicAdd(int* to, int value) { return std::exchange(*to, *to + value); }
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline std::size_t __cvta_generic_to_shared(const void* at) { return static_cast<const unsigned char*>(at) - memory; }

static void thread_body() {
  ++threads[current].steps;
  body();
  threads[current].done = true;
  yield();
}

// Lets each lane of a warp run until it waits; returns whether one of them got anywhere.
static bool run_warp(int warp) {
  bool moved = false;
  for (int i = warp * 32; i < warp * 32 + 32; ++i) {
    Thread& thread = threads[i];
    if (thread.done) continue;
    const int before = thread.steps;
    current = threadIdx.x = i;
    switch_stack(&scheduler, thread.stack_pointer);
    moved |= thread.done || thread.steps != before;
  }
  return moved;
}

static void run_block(int number) {
  while (static_cast<int>(threads.size()) < number) threads.push_back({nullptr, new char[kStackBytes]});
  while (static_cast<int>(threads.size()) > number) {
    delete[] threads.back().stack;
    threads.pop_back();
  }
  warps.assign(number / 32, Warp{});
  waiting = 0;
  std::memset(memory, 0xFF, memory_bytes);
  for (Thread& thread : threads) {
    thread.done = false;
    thread.steps = 0;
    thread.open.clear();
    thread.groups.clear();
    auto** top = reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(thread.stack + kStackBytes) / 16 * 16);
    *--top = nullptr;  // where a function that never returns would
    *--top = reinterpret_cast<void*>(thread_body);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    thread.stack_pointer = top;
  }
  const auto done = [](const Thread& thread) { return thread.done; };
  for (int idle = 0; !std::all_of(threads.begin(), threads.end(), done);) {
    seed = seed * 1664525u + 1013904223u;
    const int warp = (seed >> 8) % warps.size();
    bool any = false;
    while (run_warp(warp)) any = true;
    idle = any ? 0 : idle + 1;
    if (idle > 1000 * static_cast<int>(warps.size())) fail("every warp waits");
  }
}
