// Generated from specs/h100_bsr_spmm_b64_n8_registers.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_bsr_spmm_b64_n8_registers.yaml
// spec: {"arch":"sm_90a","b_layout":"strided","block":{"cols":64,"rows":64},"copy":"ld_global","dtype":"fp16","mma":"mma","op":"bsr_spmm","schedule":"multistage","stages":2,"tile":{"k":32,"m":16,"n":8}}
// spec hash: 9499566df1f61abef441dac65d958e820389907b30b46580c1f5c733a1c23d69
// seal: sha256 23fa4b876d74f4a87a1257b0e76b19abfd6bd26b1ab9d716290bf6ac81710c8f

// BSR x dense for up to 8 columns, by mma.sync: C = A B with A in block-sparse rows. B and C are dense, with any
// strides.
//
// The kernel is bound by reading A's blocks, so they are read once per 8 columns, in their memory layout. Only the
// final sums pass through shared memory: A and B go from global memory straight to the registers of mma.sync.
//
// Roles: a thread block computes one tile of C. Its warps, whose number the launch sets, take the steps of the block
// row in turn (sliced-K); then their partial sums are added through shared memory, in the order of warps.
//
// Pipeline: a warp has kStages steps in registers or in flight. Block columns are loaded 32 at a time, 32 to 63 steps
// ahead.
//
// Symbols
//   tile    kTileM x 8 of C: rows of one block row
//   step    kTileK columns of a block of A, kTileK rows of B
//   lane    has rows r and r + 8 of each 16 of a tile (r = lane / 4), and column r of B. Of a step, it has kLaneDepth
//           adjacent columns of A, from kLaneDepth t on (t = lane % 4), and the matching rows of B
//   word    two adjacent elements. Words 2 i and 2 i + 1 of a lane are its depths 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 of
//           product i: A and B have their depths in the same order, which changes no sum

using int64 = long long;
using uint32 = unsigned int;

constexpr int kTileM = 16;  // rows of a C tile
constexpr int kTileN = 8;  // columns of a C tile, those of one product
constexpr int kTileK = 32;  // columns of A, and rows of B, of a step
constexpr int kBlockRows = 64;  // rows of a stored block of A
constexpr int kBlockCols = 64;  // columns of a stored block of A
constexpr int kBlockElements = 4096;  // elements of a stored block of A
constexpr int kStages = 2;  // steps that a warp has in registers, or on their way there; divides 32

// Dynamic shared memory: 8192 bytes. Byte offsets:
constexpr int kPartialOffset = 0;  // 8192 bytes: fp32 partial sums of a tile of C, of each warp

constexpr int kMmaRows = 16;  // of C, of one product
constexpr int kMmas = kTileM / kMmaRows;
constexpr int kLaneDepth = kTileK / 4;  // columns of A, and rows of B, of a lane in a step
constexpr int kWords = kLaneDepth / 2;
constexpr int kBlockSteps = kBlockCols / kTileK;
constexpr int kPartialFloats = kTileM * kTileN;  // of one warp

// Launch: at most 512 threads per block, 8192 bytes of dynamic shared memory.
// Grid: one thread block per C tile, (M / tile m) * ceil(N / 8), with 1 to 16 warps.
struct Params {
  const unsigned short* a;  // stored blocks of A (nnz, rows, cols), contiguous
  const unsigned short* b;  // B (K, N)
  unsigned short* c;  // C (M, N)
  int64 b_row_stride;  // elements from one row of B to the next
  int64 b_column_stride;  // elements from one column of B to the next
  int64 c_row_stride;  // elements from one row of C to the next
  int64 c_column_stride;  // elements from one column of C to the next
  const int* crow_indices;  // first block of each block row, and one more
  const int* col_indices;  // block column of each block
  int index_words;  // 32-bit words of an index: 1 or 2, the low one is read
  int block_columns;  // blocks across A, block rows of B; what lies outside counts as zeros
  int n;  // columns of B and C
  int column_tiles;  // tiles side by side
};

using Element = unsigned short;  // the bits of one fp16

// ld.global.nc.v4: loads 16 bytes that are read once, without allocation in the L1 (PTX ISA,
// "ld.global.nc")
__device__ __forceinline__ void load_streamed(uint32 (&x)[4], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 { %0, %1, %2, %3 }, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(from));
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

// A lane's part of B in a step, by one load.
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

// A lane's part of a step.
template <typename B>
struct Step {
  uint32 a[2 * kMmas][kWords];  // row r of each 8 rows of A
  B b;
  bool in_b;  // whether these rows of B are in range; otherwise the block counts as zeros. Warp-uniform

  __device__ __forceinline__ void load_a(const Element* from) {
#pragma unroll
    for (int i = 0; i < 2 * kMmas; ++i) load_streamed(a[i], from + i * kMmaRows / 2 * kBlockCols);
  }
};

using Accumulators = float[kMmas][4];

// accumulators += A B of one step.
template <typename B>
__device__ __forceinline__ void multiply(Accumulators& accumulators, const Step<B>& x) {
#pragma unroll
  for (int k = 0; k < kWords; k += 2) {
    const uint32 b0 = x.b.word(k), b1 = x.b.word(k + 1);
#pragma unroll
    for (int m = 0; m < kMmas; ++m) {
      const uint32 a[4] = {x.a[2 * m][k], x.a[2 * m + 1][k], x.a[2 * m][k + 1], x.a[2 * m + 1][k + 1]};
      mma_m16n8k16(accumulators[m], a, b0, b1);
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
    for (int warp = 0; warp < warps; ++warp) x += partials[warp * kPartialFloats + i];
    p.c[row * p.c_row_stride + column * p.c_column_stride] = static_cast<Element>(pack(x, 0.0f));
  }
}

// The steps of a block row that belong to one warp: w, w + warps, w + 2 warps, ... for warp w. The locations of 32 of
// them are computed at once, one per lane. `count` is the same in all lanes.
struct Steps {
  const Params& p;
  int first, warps;  // index of the first one in the block row; number of warps
  int begin, count;  // first block of the block row; steps of this warp
  const Element *a, *b;  // this lane's first element of the block row, and of B's first row
  int a_offset;          // offset of a lane's step from a, in elements
  int b_row;             // its first row of B
  int next_column;       // block column of a lane's step, among the next 32
  uint32 inside;         // one bit per step: whether its block column is in range for B

  __device__ __forceinline__ Steps(const Params& p, int warp, int row, int first_column)
      : p(p), first(warp), warps(blockDim.x / 32) {
    const int lane = threadIdx.x % 32, column = first_column + lane / 4;
    begin = load_index(p, p.crow_indices, row / kBlockRows);
    const int end = load_index(p, p.crow_indices, row / kBlockRows + 1);
    count = max(0, (end - begin) * kBlockSteps - first + warps - 1) / warps;
    a = p.a + static_cast<int64>(begin) * kBlockElements + (row % kBlockRows + lane / 4) * kBlockCols +
        lane % 4 * kLaneDepth;
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

  // Locates the 32 steps from `step` on in A and in B.
  __device__ __forceinline__ void find_a(int step) {
    a_offset = number(step) / kBlockSteps * kBlockElements + number(step) % kBlockSteps * kTileK;
  }
  __device__ __forceinline__ void find_b(int step) {
    const bool valid = static_cast<uint32>(next_column) < static_cast<uint32>(p.block_columns);
    inside = __ballot_sync(0xFFFFFFFF, valid);
    b_row = valid ? next_column * kBlockCols + number(step) % kBlockSteps * kTileK : 0;
    next_column = load_column(step + 32);
  }

  template <typename B>
  __device__ __forceinline__ void load_a(Step<B>& x, int step) const {
    x.load_a(a + __shfl_sync(0xFFFFFFFF, a_offset, step % 32));
  }
  template <typename B>
  __device__ __forceinline__ void load_b(Step<B>& x, int step) const {
    x.b.load(b + __shfl_sync(0xFFFFFFFF, b_row, step % 32) * p.b_row_stride, p.b_row_stride);
    x.in_b = inside >> step % 32 & 1;
  }
};

// accumulators += A B of all steps of a warp.
template <typename B>
__device__ __forceinline__ void multiply_steps(Accumulators& accumulators, Steps& steps) {
  // The loads of A do not wait for block columns.
  Step<B> stages[kStages];
  steps.find_a(0);
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < steps.count) steps.load_a(stages[stage], stage);
  }
  steps.find_b(0);
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < steps.count) steps.load_b(stages[stage], stage);
  }

#pragma unroll 1
  for (int step = 0; step < steps.count; step += kStages) {
    const int next = step + kStages;
    if (next % 32 == 0) {
      steps.find_a(next);
      steps.find_b(next);
    }
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (step + stage < steps.count) {
        if (stages[stage].in_b) multiply(accumulators, stages[stage]);
        if (next + stage < steps.count) {
          steps.load_a(stages[stage], next + stage);
          steps.load_b(stages[stage], next + stage);
        }
      }
    }
  }
}

extern "C" __global__ void __maxnreg__(72)
    h100_bsr_spmm_b64_n8_registers(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  float* const partials = reinterpret_cast<float*>(shared + kPartialOffset);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), tile = blockIdx.x;
  const int first_row = tile / p.column_tiles * kTileM, first_column = tile % p.column_tiles * kTileN;
  Steps steps(p, warp, first_row, first_column);
  Accumulators accumulators = {};
  if (has_vectors(p)) {
    multiply_steps<Vector>(accumulators, steps);
  } else {
    multiply_steps<Elements>(accumulators, steps);
  }
  store_partial(partials + warp * kPartialFloats, accumulators);
  __syncthreads();
  reduce_partials(p, partials, first_row, first_column);
}
