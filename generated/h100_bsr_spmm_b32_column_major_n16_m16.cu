// Generated from specs/h100_bsr_spmm_b32_column_major_n16_m16.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_bsr_spmm_b32_column_major_n16_m16.yaml
// spec: {"arch":"sm_90a","b_layout":"column_major","block":{"cols":32,"rows":32},"copy":"ld_global","dtype":"fp16","mma":"mma","op":"bsr_spmm","schedule":"multistage","stages":2,"tile":{"k":32,"m":16,"n":16}}
// spec hash: f62b0980c9370b8697637fa9a22d58c49db641557444ea1383ebfa031714b2ca
// seal: sha256 5756a1b8dce51cf687576a3ea2ba8ad4086dd43b335706abd45b3d343499059a

// BSR x dense for few columns, by mma.sync: C = A B with A in block-sparse rows and B, C dense, B stored by columns and
// C by rows.
//
// The kernel is bound by reading A's blocks, so they are read once for each column tile, in their memory layout. Only
// the final sums pass through shared memory: A and B go from global memory straight to the registers of mma.sync. B's
// rows, which are reread for each block row, come from the L1 and the L2.
//
// Roles: a thread block computes one tile of C. Its warps, whose number the launch sets, take the steps of the block
// row in turn (sliced-K); then their partial sums are added through shared memory, in the order of warps.
//
// Pipeline: a warp has kStages steps in registers or in flight. Block columns are loaded 32 at a time, 32 to 63 steps
// ahead.
//
// Symbols
//   tile    kTileM x kTileN of C: rows of one block row
//   step    kTileK columns of a block of A, kTileK rows of B
//   lane    has rows r and r + 8 of each 16 of a tile (r = lane / 4). Of a step, it has kLaneDepth adjacent columns of
//           A, from kLaneDepth t on (t = lane % 4), so that it reads whole words, and the matching rows of B; of the
//           columns of B, kLaneColumns adjacent ones, from kLaneColumns r on
//   product C^T = B^T A^T, operands swapped: a lane's words of A are an operand as loaded. Its depths 2 t, 2 t + 1,
//           2 t + 8, 2 t + 9 stand for four adjacent columns of A and rows of B of the lane, which changes no sum; its
//           rows r and r + 8 stand for two adjacent columns of C of the lane

using int64 = long long;
using uint32 = unsigned int;

constexpr int kTileM = 16;  // rows of a C tile
constexpr int kTileN = 16;  // columns of a C tile
constexpr int kTileK = 32;  // columns of A, and rows of B, of a step
constexpr int kBlockRows = 32;  // rows of a stored block of A
constexpr int kBlockCols = 32;  // columns of a stored block of A
constexpr int kBlockElements = 1024;  // elements of a stored block of A
constexpr int kStages = 2;  // steps of a warp in registers or in flight; a divisor of 32
constexpr int kPartialStride = 24;  // row stride of the partial sums, in floats

// Dynamic shared memory: 12288 bytes. Byte offsets:
constexpr int kPartialOffset = 0;  // 12288 bytes: fp32 partial sums of a tile of C, for each warp

constexpr int kMmaColumns = 16, kMmaRows = 8;  // of C, of one product
constexpr int kMmasN = kTileN / kMmaColumns, kMmasM = kTileM / kMmaRows;
constexpr int kLaneDepth = kTileK / 4;  // columns of A, and rows of B, of a lane in a step
constexpr int kLaneColumns = kTileN / 8;  // columns of B of a lane
constexpr int kAWords = kLaneDepth / 2;  // words of a lane's part of a row of A, and of a column of B
constexpr int kBlockSteps = kBlockCols / kTileK;
constexpr int kPartialFloats = kTileM * kPartialStride;  // of one warp

// Launch: at most 256 threads per block, 12288 bytes of dynamic shared memory.
// Grid: one thread block per C tile, (M / tile m) * ceil(N / tile n), with 1 to 8 warps.
struct Params {
  const unsigned short* a;  // stored blocks of A (nnz, rows, cols), contiguous
  const unsigned short* b;  // B (K, N)
  unsigned short* c;  // C (M, N)
  int64 b_column_stride;  // column stride of B, in elements; its rows are adjacent
  int64 c_row_stride;  // row stride of C, in elements
  const int* crow_indices;  // row offsets: first block of each block row, then the end of the last
  const int* col_indices;  // block column of each stored block
  int index_words;  // 32-bit words per index, 1 or 2; the kernel reads the low word
  int block_columns;  // block columns of A, block rows of B; blocks outside count as zeros
  int n;  // columns of B and C; their rows are padded to a multiple of 8, and the kernel overwrites C's padding
  int column_tiles;  // column tiles
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

// A lane's part of a step.
struct Step {
  uint32 a[kMmasM][kAWords];        // row r of each 8 rows of A
  uint32 b[kLaneColumns][kAWords];  // columns of B
  bool in_b;  // whether these rows of B are in range; otherwise the block counts as zeros. Warp-uniform

  __device__ __forceinline__ void load_a(const Element* from) {
#pragma unroll
    for (int i = 0; i < kMmasM; ++i) load_streamed(a[i], from + i * kMmaRows * kBlockCols);
  }

  // Columns beyond the last one, `last`, repeat it: their sums are not stored, or are stored in C's padding.
  __device__ __forceinline__ void load_b(const Element* column, int64 column_stride, int last) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      load_cached(b[i], column);
      if (i < last) column += column_stride;
    }
  }
};

using Accumulators = float[kMmasM][kMmasN][4];

// accumulators += (A B)^T of one step. Columns 2 i and 2 i + 1 of a lane are columns r and r + 8 of product i.
__device__ __forceinline__ void multiply(Accumulators& accumulators, const Step& x) {
#pragma unroll
  for (int k = 0; k < kAWords; k += 2) {
#pragma unroll
    for (int n = 0; n < kMmasN; ++n) {
      const uint32 b[4] = {x.b[2 * n][k], x.b[2 * n + 1][k], x.b[2 * n][k + 1], x.b[2 * n + 1][k + 1]};
#pragma unroll
      for (int m = 0; m < kMmasM; ++m) mma_m16n8k16(accumulators[m][n], b, x.a[m][k], x.a[m][k + 1]);
    }
  }
}

// Writes a warp's partial sums to shared memory. A lane has rows 2 t and 2 t + 1 of each 8, and columns from
// kLaneColumns r on.
__device__ __forceinline__ void store_partial(float* partial, const Accumulators& accumulators) {
  const int lane = threadIdx.x % 32;
  float* to = partial + lane % 4 * 2 * kPartialStride + lane / 4 * kLaneColumns;
#pragma unroll
  for (int m = 0; m < kMmasM; ++m) {
#pragma unroll
    for (int n = 0; n < kMmasN; ++n) {
      const float* x = accumulators[m][n];
      float* row = to + m * kMmaRows * kPartialStride + 2 * n;
      *reinterpret_cast<float2*>(row) = {x[0], x[2]};
      *reinterpret_cast<float2*>(row + kPartialStride) = {x[1], x[3]};
    }
  }
}

// Adds the partial sums of all warps and stores the tile. A thread has four columns of a row at a time.
__device__ __forceinline__ void reduce_partials(const Params& p, const float* partials, int first_row,
    int first_column) {
  constexpr int kRowThreads = kTileN / 4;
  const int threads = blockDim.x;
  for (int i = threadIdx.x; i < kTileM * kRowThreads; i += threads) {
    const int row = i / kRowThreads, column = i % kRowThreads * 4;
    if (first_column + column >= p.n) continue;
    const float* from = partials + row * kPartialStride + column;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int warp = 0; warp < threads / 32; ++warp, from += kPartialFloats) {
      const float4 x = *reinterpret_cast<const float4*>(from);
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    Element* to = p.c + (first_row + row) * p.c_row_stride + first_column + column;
    *reinterpret_cast<uint2*>(to) = {pack(sum.x, sum.y), pack(sum.z, sum.w)};
  }
}

// The steps of a block row that belong to one warp: w, w + warps, w + 2 warps, ... for warp w. The locations of 32 of
// them are computed at once, one per lane. `count` is the same in all lanes.
struct Steps {
  const Params& p;
  int first, warps;  // index of the first one in the block row; number of warps
  int begin, count;  // first block of the block row; steps of this warp
  const Element *a, *b;  // this lane's first element of the block row, and of B's first kTileK rows
  int last_column;       // index of B's last column, counted from this lane's first one
  int a_offset;          // offset of a lane's step from a, in elements
  int b_row;             // its first row of B
  int next_column;       // block column of a lane's step, among the next 32
  uint32 inside;         // one bit per step: whether its block column is in range for B

  __device__ __forceinline__ Steps(const Params& p, int warp, int row, int first_column)
      : p(p), first(warp), warps(blockDim.x / 32) {
    const int lane = threadIdx.x % 32, column = first_column + lane / 4 * kLaneColumns;
    begin = load_index(p, p.crow_indices, row / kBlockRows);
    const int end = load_index(p, p.crow_indices, row / kBlockRows + 1);
    count = max(0, (end - begin) * kBlockSteps - first + warps - 1) / warps;
    a = p.a + static_cast<int64>(begin) * kBlockElements + (row % kBlockRows + lane / 4) * kBlockCols +
        lane % 4 * kLaneDepth;
    // A lane whose columns are all beyond B has the last one. C stores none of them.
    last_column = max(p.n - 1 - column, 0);
    b = p.b + lane % 4 * kLaneDepth + min(column, p.n - 1) * p.b_column_stride;
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

  __device__ __forceinline__ void load_a(Step& x, int step) const {
    x.load_a(a + __shfl_sync(0xFFFFFFFF, a_offset, step % 32));
  }
  __device__ __forceinline__ void load_b(Step& x, int step) const {
    x.load_b(b + __shfl_sync(0xFFFFFFFF, b_row, step % 32), p.b_column_stride, last_column);
    x.in_b = inside >> step % 32 & 1;
  }
};

extern "C" __global__ void __maxnreg__(72)
    h100_bsr_spmm_b32_column_major_n16_m16(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  float* const partials = reinterpret_cast<float*>(shared + kPartialOffset);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), tile = blockIdx.x;
  const int first_row = tile / p.column_tiles * kTileM, first_column = tile % p.column_tiles * kTileN;
  Steps steps(p, warp, first_row, first_column);

  // The loads of A do not wait for block columns.
  Step stages[kStages];
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

  Accumulators accumulators = {};
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
  store_partial(partials + warp * kPartialFloats, accumulators);
  __syncthreads();
  reduce_partials(p, partials, first_row, first_column);
}
