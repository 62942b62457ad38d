// Generated from specs/h100_bsr_spmm_b32_n8.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_bsr_spmm_b32_n8.yaml
// spec: {"arch":"sm_90a","b_layout":"strided","block":{"cols":32,"rows":32},"copy":"cp_async","dtype":"fp16","mma":"mma","op":"bsr_spmm","schedule":"multistage","stages":3,"tile":{"k":32,"m":16,"n":8}}
// spec hash: e8b2188cb1bfe6984cd23e72906202b9bd63797346a50ad18d84b0ac3c1e1ecc
// seal: sha256 fbd905fa6533063887efe83f794fc1b204d1887ee0f0e3907910a34dca0a0136

// BSR x dense for up to 8 columns, by mma.sync: C = A B with A in block-sparse rows. B and C are dense, with
// any strides.
//
// The kernel is bound by reading A's blocks, so they are read once per 8 columns, in their memory layout.
//
// Roles: a thread block computes one tile of C. Its warps, whose number the launch sets, take the steps of the block
// row in turn (sliced-K); then their partial sums are added through shared memory, in the order of warps.
//
// Pipeline: each warp has a ring of kStages slots in shared memory, which cp.async fills kStages - 1 steps ahead, in
// whole lines of the L2. No warp waits for another before the sums meet. B goes from global memory, mostly the L1, to
// registers one step ahead. Block columns are loaded 32 at a time, 32 to 63 steps ahead.
//
// Symbols
//   tile    kTileM x 8 of C: rows of one block row
//   step    kTileK columns of a block of A, kTileK rows of B
//   part    of a step: kPartDepth columns of A and rows of B
//   chunk   16 bytes of a row of A. In a slot, chunks of odd rows of 128 bytes are swizzled: two rows lie in distinct
//           banks
//   lane    has rows r and r + 8 of each 16 of a tile (r = lane / 4), and column r of B. Of a part, it has kLaneDepth
//           adjacent columns of A, from kLaneDepth t on (t = lane % 4), and the matching rows of B
//   word    two adjacent elements. Words 2 i and 2 i + 1 of a lane are its depths 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 of
//           product i: A and B have their depths in the same order, which changes no sum

using int64 = long long;
using uint32 = unsigned int;

constexpr int kTileM = 16;  // rows of a C tile
constexpr int kTileN = 8;  // columns of a C tile, those of one product
constexpr int kTileK = 32;  // columns of A, and rows of B, of a step
constexpr int kBlockRows = 32;  // rows of a stored block of A
constexpr int kBlockCols = 32;  // columns of a stored block of A
constexpr int kBlockElements = 1024;  // elements of a stored block of A
constexpr int kStages = 3;  // slots of a warp's ring
constexpr int kWarpBytes = 3584;  // bytes of shared memory of a warp

// Dynamic shared memory: 57344 bytes. Byte offsets:
constexpr int kRingOffset = 0;  // 3072 bytes: steps of A, of warp 0
constexpr int kPartialOffset = 3072;  // 512 bytes: fp32 partial sums of a tile of C, of warp 0

constexpr int kMmaRows = 16;  // of C, of one product
constexpr int kMmas = kTileM / kMmaRows;
constexpr int kPartDepth = kTileK < 32 ? kTileK : 32, kParts = kTileK / kPartDepth;
constexpr int kLaneDepth = kPartDepth / 4;  // columns of A, and rows of B, of a lane in a part
constexpr int kWords = kLaneDepth / 2;
constexpr int kChunk = 16 / 2;  // elements
constexpr int kRowChunks = kTileK / kChunk;  // of a row of a slot
constexpr int kCopyRows = 32 / kRowChunks;  // that a warp copies at once
constexpr int kSwizzled = kTileK == 64 ? 4 : 0;  // bit of a chunk's number that odd rows flip
constexpr int kSlotElements = kTileM * kTileK, kSlotBytes = 2 * kSlotElements;
constexpr int kBlockSteps = kBlockCols / kTileK;
constexpr int kPartialFloats = kTileM * kTileN;  // of one warp

// Launch: at most 512 threads per block, 57344 bytes of dynamic shared memory.
// Grid: one thread block per C tile, (M / tile m) * ceil(N / 8), with 1 to 16 warps.
struct Params {
  const unsigned short* a;  // stored blocks of A (nnz, rows, cols), contiguous
  const unsigned short* b;  // B (K, N)
  unsigned short* c;  // C (M, N)
  int64 b_row_stride;  // row stride of B, in elements
  int64 b_column_stride;  // column stride of B, in elements
  int64 c_row_stride;  // row stride of C, in elements
  int64 c_column_stride;  // column stride of C, in elements
  const int* crow_indices;  // row offsets: first block of each block row, then the end of the last
  const int* col_indices;  // block column of each stored block
  int index_words;  // 32-bit words per index, 1 or 2; the kernel reads the low word
  int block_columns;  // block columns of A, block rows of B; blocks outside count as zeros
  int n;  // columns of B and C
  int column_tiles;  // column tiles
};

using Element = unsigned short;  // the bits of one fp16

// cp.async.cg: copies 16 bytes to shared memory, bypassing the L1; zero-fills without a read unless `valid`. L2::128B
// is a hint to fetch 128 bytes into the L2 (PTX ISA, "cp.async")
__device__ __forceinline__ void cp_async_16(uint32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
      : "memory");
}

// cp.async.commit_group: commits this thread's copies as a group (PTX ISA, "cp.async.commit_group")
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: waits until at most kPending of this thread's groups are in flight (PTX ISA,
// "cp.async.wait_group")
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ld.global.nc.v4: loads 16 bytes that are read again (PTX ISA, "ld.global.nc")
__device__ __forceinline__ void load_cached(uint32 (&x)[4], const void* from) {
  asm volatile("ld.global.nc.v4.u32 { %0, %1, %2, %3 }, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(from));
}

// ld.global.nc.u16: the bits of one 16-bit element, which are read again (PTX ISA, "ld.global.nc")
__device__ __forceinline__ unsigned short load_element(const unsigned short* from) {
  unsigned short x;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(from));
  return x;
}

// mma.sync.m16n8k16: D += A B in fp32; A row-major, B column-major f16 (PTX ISA, "mma")
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// cvt.rn.f16x2.f32: converts two floats to a pair of fp16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Element i of an index tensor: an int32, or the low half of an int64. Indices are below 2^31.
__device__ __forceinline__ int load_index(const Params& p, const int* indices, int i) {
  return __ldg(indices + static_cast<int64>(i) * p.index_words);
}

// Whether a lane's rows of B are adjacent in memory and aligned, so that one load brings them.
__device__ __forceinline__ bool has_vectors(const Params& p) {
  constexpr int kBytes = kLaneDepth * sizeof(Element);
  const bool aligned = reinterpret_cast<int64>(p.b) % kBytes == 0 && p.b_column_stride % kLaneDepth == 0;
  return p.b_row_stride == 1 && aligned;
}

// A lane's part of B in a part of a step, by one load.
struct Vector {
  uint32 words[kWords];

  __device__ __forceinline__ void load(const Element* from, int64) { load_cached(words, from); }
  __device__ __forceinline__ uint32 word(int i) const { return words[i]; }
};

// The same, by a load for each element.
struct Elements {
  Element elements[kLaneDepth];

  __device__ __forceinline__ void load(const Element* from, int64 row_stride) {
#pragma unroll
    for (int i = 0; i < kLaneDepth; ++i) elements[i] = load_element(from + i * row_stride);
  }
  __device__ __forceinline__ uint32 word(int i) const {
    return elements[2 * i] | static_cast<uint32>(elements[2 * i + 1]) << 16;
  }
};

using Accumulators = float[kMmas][4];

// Loads a lane's words of a row of A from a slot.
__device__ __forceinline__ void load_slot(uint32 (&x)[kWords], const Element* from) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  x[0] = words.x, x[1] = words.y, x[2] = words.z, x[3] = words.w;
}

// accumulators += A B of one step, whose part of A begins for this lane at `a` in its slot.
template <typename B>
__device__ __forceinline__ void multiply(Accumulators& accumulators, const Element* slot, int a, const B (&b)[kParts]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const Element* from = slot + (a ^ part * kPartDepth);
#pragma unroll
    for (int m = 0; m < kMmas; ++m) {
      uint32 upper[kWords], lower[kWords];
      load_slot(upper, from + m * kMmaRows * kTileK);
      load_slot(lower, from + (m * kMmaRows + kMmaRows / 2) * kTileK);
#pragma unroll
      for (int k = 0; k < kWords; k += 2) {
        const uint32 words[4] = {upper[k], lower[k], upper[k + 1], lower[k + 1]};
        mma_m16n8k16(accumulators[m], words, b[part].word(k), b[part].word(k + 1));
      }
    }
  }
}

// Stores a warp's partial sums in shared memory. A lane has rows r and r + 8 of each 16, columns 2 t and 2 t + 1.
__device__ __forceinline__ void store_partial(float* partial, const Accumulators& accumulators) {
  const int lane = threadIdx.x % 32;
  float* to = partial + lane / 4 * kTileN + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < kMmas; ++m, to += kMmaRows * kTileN) {
    const float* x = accumulators[m];
    *reinterpret_cast<float2*>(to) = {x[0], x[1]};
    *reinterpret_cast<float2*>(to + kMmaRows / 2 * kTileN) = {x[2], x[3]};
  }
}

// Adds the partial sums of all warps, applies the epilogue and stores the tile, one element of a thread at a time.
__device__ __forceinline__ void reduce_partials(const Params& p, const float* partials, int first_row,
    int first_column) {
  const int warps = blockDim.x / 32;
  for (int i = threadIdx.x; i < kPartialFloats; i += blockDim.x) {
    const int row = first_row + i / kTileN, column = first_column + i % kTileN;
    if (column >= p.n) continue;
    float x = 0.0f;
#pragma unroll 4
    for (int warp = 0; warp < warps; ++warp) x += partials[warp * (kWarpBytes / 4) + i];
    p.c[row * p.c_row_stride + column * p.c_column_stride] = static_cast<Element>(pack(x, 0.0f));
  }
}

// The steps of a block row that belong to one warp: w, w + warps, w + 2 warps, ... for warp w. `count` is the same in
// all lanes.
struct Steps {
  const Params& p;
  int first, warps;  // index of the first one in the block row; number of warps
  int begin, count;  // first block of the block row; steps of this warp
  const Element *a, *b;  // this lane's first chunk of the block row, and its first element of B
  uint32 to;             // of this lane's first chunk in the first slot
  int b_row;             // first row of B of a lane's step, among 32
  int next_column;       // block column of a lane's step, among the next 32
  uint32 inside;         // one bit per step: whether its block column is in range for B

  __device__ __forceinline__ Steps(const Params& p, int warp, int row, int first_column, uint32 ring)
      : p(p), first(warp), warps(blockDim.x / 32) {
    const int lane = threadIdx.x % 32, column = first_column + lane / 4;
    const int copy_row = lane / kRowChunks, chunk = lane % kRowChunks;
    begin = load_index(p, p.crow_indices, row / kBlockRows);
    const int end = load_index(p, p.crow_indices, row / kBlockRows + 1);
    count = max(0, (end - begin) * kBlockSteps - first + warps - 1) / warps;
    a = p.a + static_cast<int64>(begin) * kBlockElements + (row % kBlockRows + copy_row) * kBlockCols + chunk * kChunk;
    to = ring + 2 * (copy_row * kTileK + (chunk ^ copy_row % 2 * kSwizzled) * kChunk);
    // Columns beyond B repeat column 0: their sums are not stored.
    b = p.b + lane % 4 * kLaneDepth * p.b_row_stride + (column < p.n ? column : 0) * p.b_column_stride;
    // Keep both in registers: the compiler would recompute them in each step.
    asm volatile("" : "+l"(a), "+l"(b));
    next_column = load_column(0);
  }

  // Index in the block row of a lane's step, among the 32 steps from `step` on.
  __device__ __forceinline__ int number(int step) const {
    return first + (step + static_cast<int>(threadIdx.x % 32)) * warps;
  }

  __device__ __forceinline__ int load_column(int step) const {
    const bool valid = step + static_cast<int>(threadIdx.x % 32) < count;
    return valid ? load_index(p, p.col_indices, begin + number(step) / kBlockSteps) : 0;
  }

  // Locates the 32 steps from `step` on in B.
  __device__ __forceinline__ void find_b(int step) {
    const bool valid = static_cast<uint32>(next_column) < static_cast<uint32>(p.block_columns);
    inside = __ballot_sync(0xFFFFFFFF, valid);
    b_row = valid ? next_column * kBlockCols + number(step) % kBlockSteps * kTileK : 0;
    next_column = load_column(step + 32);
  }

  // Copies a step's part of A to a slot, if there is such a step.
  __device__ __forceinline__ void copy_a(int step, int slot) const {
    if (step < count) {
      const int index = first + step * warps;
      const Element* from = a + index / kBlockSteps * kBlockElements + index % kBlockSteps * kTileK;
#pragma unroll
      for (int row = 0; row < kTileM; row += kCopyRows) {
        cp_async_16(to + slot * kSlotBytes + 2 * row * kTileK, from + row * kBlockCols, true);
      }
    }
    cp_async_commit();  // a group for each step, so that one wait fits all
  }

  template <typename B>
  __device__ __forceinline__ void load_b(B (&x)[kParts], int step) const {
    const Element* from = b + __shfl_sync(0xFFFFFFFF, b_row, step % 32) * p.b_row_stride;
#pragma unroll
    for (int part = 0; part < kParts; ++part) x[part].load(from + part * kPartDepth * p.b_row_stride, p.b_row_stride);
  }
};

// accumulators += A B of all steps of a warp, whose ring this is.
template <typename B>
__device__ __forceinline__ void multiply_steps(Accumulators& accumulators, Steps& steps, const Element* ring) {
  // This lane's first element of a slot.
  const int row = threadIdx.x % 32 / 4;
  const int a = row * kTileK + (threadIdx.x % 4 * kLaneDepth ^ row % 2 * kSwizzled * kChunk);
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) steps.copy_a(step, step);
  B b[kParts];
  steps.find_b(0);
  if (steps.count > 0) steps.load_b(b, 0);
  int slot = 0, next_slot = kStages - 1;
#pragma unroll 1
  for (int step = 0; step < steps.count; ++step) {
    // This step's copies have landed, in all lanes; and all lanes have read the slot that is filled next.
    cp_async_wait<kStages - 2>();
    __syncwarp();
    steps.copy_a(step + kStages - 1, next_slot);
    // Blocks that are in no column of B count as zeros.
    if (steps.inside >> step % 32 & 1) multiply(accumulators, ring + slot * kSlotElements, a, b);
    const int next = step + 1;
    if (next % 32 == 0) steps.find_b(next);
    if (next < steps.count) steps.load_b(b, next);
    next_slot = slot;
    slot = slot + 1 == kStages ? 0 : slot + 1;
  }
}

extern "C" __global__ void __maxnreg__(48)
    h100_bsr_spmm_b32_n8(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), tile = blockIdx.x;
  const int first_row = tile / p.column_tiles * kTileM, first_column = tile % p.column_tiles * kTileN;
  unsigned char* const own = shared + warp * kWarpBytes;
  const Element* const ring = reinterpret_cast<const Element*>(own + kRingOffset);
  Steps steps(p, warp, first_row, first_column, static_cast<uint32>(__cvta_generic_to_shared(ring)));
  Accumulators accumulators = {};
  if (has_vectors(p)) {
    multiply_steps<Vector>(accumulators, steps, ring);
  } else {
    multiply_steps<Elements>(accumulators, steps, ring);
  }
  store_partial(reinterpret_cast<float*>(own + kPartialOffset), accumulators);
  __syncthreads();
  reduce_partials(p, reinterpret_cast<const float*>(shared + kPartialOffset), first_row, first_column);
}
