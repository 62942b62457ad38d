// Generated from specs/h100_bsr_spmm_b32_n32.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_bsr_spmm_b32_n32.yaml
// spec: {"arch":"sm_90a","block":{"cols":32,"rows":32},"copy":"ld_global","dtype":"fp16","mma":"mma","op":"bsr_spmm","schedule":"multistage","stages":2,"tile":{"k":32,"m":32,"n":32}}
// spec hash: 69f9b0f033f4eaa24d7e48e83516e59cc673b7fd895eab640e4d13ed3a59aa0c
// templates: bsr_spmm/sm90a_few_columns.cu.j2, common/declarations.cuh.j2, ptx/ld_global.cuh.j2, ptx/mma_sync.cuh.j2, ptx/prmt.cuh.j2, ptx/warp.cuh.j2
// seal: sha256 3984870d41b14314cbfde1565fa471e67dff6baed5d0811be67ad735bc3ddc1b

// BSR x dense for few columns, by mma.sync: C = A B with A in block-sparse rows and B, C dense and row-major.
//
// The time is that of reading A's blocks, so these are read once, as they lie in memory. Nothing passes through shared
// memory but the last sums: A and B go from global memory straight to the registers that mma.sync reads. B's rows,
// which are read again for each block row, come from the L1 and the L2.
//
// Who does what: a thread block computes one tile of C. Its warps, 1 to kMostWarps of them, take the steps of the block
// row by turns (sliced-K); then their partial sums are added up, in the order of warps, through shared memory.
//
// Pipeline: a warp has kStages steps in registers, or on their way there. Block columns are asked for 32 steps ahead.
//
// Symbols
//   tile    kTileM x kTileN of C: rows of one block row
//   step    kTileK columns of a block of A, kTileK rows of B
//   strip   16 rows of a tile
//   A lane has rows r and r + 8 of a strip (r = lane / 4), and of each kLaneDepth columns of a step side by side, so that
//   it reads whole words: of A's columns kLaneDepth t and up (t = lane % 4). Of B it has the rows that meet these, and
//   of each kLaneColumns columns side by side, kLaneColumns r and up. What a product takes for its columns of A, rows of
//   B and columns of B are these; C's columns are put back when it is stored.

using int64 = long long;
using uint32 = unsigned int;

constexpr int kTileM = 32;  // rows of a C tile
constexpr int kTileN = 32;  // columns of a C tile
constexpr int kTileK = 32;  // columns of A, and rows of B, of a step
constexpr int kBlockRows = 32;  // rows of a stored block of A
constexpr int kBlockCols = 32;  // columns of a stored block of A
constexpr int kBlockElements = 1024;  // elements of a stored block of A
constexpr int kStages = 2;  // steps that a warp has in registers, or on their way there
constexpr int kMostWarps = 8;  // of a thread block: all load and compute
constexpr int kPartialStride = 40;  // floats from one row of partial sums to the next

constexpr int kStripRows = 16, kMmaColumns = 8;  // of one product
constexpr int kStrips = kTileM / kStripRows;
constexpr int kMmas = kTileN / kMmaColumns;  // of a strip, side by side
constexpr int kLaneDepth = kTileK / 4;  // columns of A, and rows of B, of a lane in a step
constexpr int kLaneColumns = kMmas;  // columns of B of a lane
constexpr int kAWords = kLaneDepth / 2, kBWords = kLaneColumns / 2;  // words of a lane's part of a row
constexpr int kBlockSteps = kBlockCols / kTileK;
constexpr int kPartialFloats = kTileM * kPartialStride;  // of one warp

// Launch: 256 threads a block, 40960 bytes of dynamic shared memory.
// Grid: one thread block, of 1 to 8 warps, per C tile: (M / tile m) * (N / tile n).
struct Params {
  const unsigned short* a;  // stored blocks of A (nnz, rows, cols), contiguous
  const unsigned short* b;  // B (K, N)
  unsigned short* c;  // C (M, N)
  int64 b_row_stride;  // elements from one row of B to the next
  int64 c_row_stride;  // elements from one row of C to the next
  const int* crow_indices;  // first block of each block row, and one more
  const int* col_indices;  // block column of each block
  int index_words;  // 32-bit words of an index: 1 or 2, the low one is read
  int block_columns;  // blocks across A, block rows of B; what lies outside counts as zeros
  int n;  // columns of B and C; rows of both have room for the next multiple of 8
  int column_tiles;  // tiles side by side
};

using Element = unsigned short;  // the bits of one fp16

// ld.global.nc.v4: 16 bytes that are read once, so that the L1 keeps none of them (PTX ISA,
// "ld.global.nc")
__device__ __forceinline__ void load_streamed(uint32 (&x)[4], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 { %0, %1, %2, %3 }, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(from));
}

// ld.global.nc.v2: 8 bytes that are read again (PTX ISA, "ld.global.nc")
__device__ __forceinline__ void load_cached(uint32 (&x)[2], const void* from) {
  asm volatile("ld.global.nc.v2.u32 { %0, %1 }, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(from));
}

// The low halves of two words, and the high ones: x's below, y's above (prmt: PTX ISA, "prmt")
__device__ __forceinline__ uint32 low_halves(uint32 x, uint32 y) { return __byte_perm(x, y, 0x5410); }
__device__ __forceinline__ uint32 high_halves(uint32 x, uint32 y) { return __byte_perm(x, y, 0x7632); }

// mma.sync.m16n8k16: D += A B in fp32; A row-major, B column-major f16 (PTX ISA, "mma")
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// cvt.rn.f16x2.f32: two floats to a pair of fp16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Element i of an index tensor, int32 or the low half of an int64. Indices are below 2^31.
__device__ __forceinline__ int load_index(const Params& p, const int* indices, int i) {
  return __ldg(indices + static_cast<int64>(i) * p.index_words);
}

// What a lane has of a step.
struct Step {
  uint32 upper[kStrips][kAWords], lower[kStrips][kAWords];  // rows r and r + 8 of A
  uint32 b[kLaneDepth][kBWords];  // rows of B

  __device__ __forceinline__ void load_a(const Element* a) {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      load_streamed(upper[strip], a + strip * kStripRows * kBlockCols);
      load_streamed(lower[strip], a + (strip * kStripRows + 8) * kBlockCols);
    }
  }

  // Rows outside B, where `row` is null, are zeros.
  __device__ __forceinline__ void load_b(const Element* row, int64 row_stride) {
#pragma unroll
    for (int i = 0; i < kLaneDepth; ++i) {
      if (row != nullptr) {
        load_cached(b[i], row + i * row_stride);
      } else {
#pragma unroll
        for (int word = 0; word < kBWords; ++word) b[i][word] = 0;
      }
    }
  }
};

using Accumulators = float[kStrips][kMmas][4];

// accumulators += A B of one step. Columns 2 i and 2 i + 1 of a lane's columns of B are those of products 2 i, 2 i + 1.
__device__ __forceinline__ void multiply(Accumulators& accumulators, const Step& x) {
#pragma unroll
  for (int k = 0; k < kAWords; k += 2) {
#pragma unroll
    for (int word = 0; word < kBWords; ++word) {
      const uint32 *b0 = x.b[2 * k], *b1 = x.b[2 * k + 1], *b2 = x.b[2 * k + 2], *b3 = x.b[2 * k + 3];
      const uint32 even0 = low_halves(b0[word], b1[word]), even1 = low_halves(b2[word], b3[word]);
      const uint32 odd0 = high_halves(b0[word], b1[word]), odd1 = high_halves(b2[word], b3[word]);
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        const uint32* upper = x.upper[strip] + k;
        const uint32* lower = x.lower[strip] + k;
        const uint32 a[4] = {upper[0], lower[0], upper[1], lower[1]};
        mma_m16n8k16(accumulators[strip][2 * word], a, even0, even1);
        mma_m16n8k16(accumulators[strip][2 * word + 1], a, odd0, odd1);
      }
    }
  }
}

// Leaves a warp's partial sums in shared memory. Of product i, column c of C is kLaneColumns c + i.
__device__ __forceinline__ void store_partial(float* partial, const Accumulators& accumulators) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
    float* to = partial + (strip * kStripRows + lane / 4) * kPartialStride + lane % 4 * 2 * kLaneColumns;
#pragma unroll
    for (int i = 0; i < kMmas; i += 2) {
      const float *x = accumulators[strip][i], *y = accumulators[strip][i + 1];
      *reinterpret_cast<float2*>(to + i) = {x[0], y[0]};
      *reinterpret_cast<float2*>(to + kLaneColumns + i) = {x[1], y[1]};
      *reinterpret_cast<float2*>(to + 8 * kPartialStride + i) = {x[2], y[2]};
      *reinterpret_cast<float2*>(to + 8 * kPartialStride + kLaneColumns + i) = {x[3], y[3]};
    }
  }
}

// Adds up the partial sums of all warps and stores the tile. A thread has four columns of a row at a time.
__device__ __forceinline__ void reduce_partials(const Params& p, const float* partials, int first_row, int first_column) {
  constexpr int kRowThreads = kTileN / 4;
  const int threads = blockDim.x;
  for (int i = threadIdx.x; i < kTileM * kRowThreads; i += threads) {
    const int row = i / kRowThreads, in_row = i % kRowThreads * 4;
    if (first_column + in_row >= p.n) continue;
    const float* from = partials + row * kPartialStride + in_row;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int warp = 0; warp < threads / 32; ++warp, from += kPartialFloats) {
      const float4 x = *reinterpret_cast<const float4*>(from);
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    Element* to = p.c + (first_row + row) * p.c_row_stride + first_column + in_row;
    *reinterpret_cast<uint2*>(to) = {pack(sum.x, sum.y), pack(sum.z, sum.w)};
  }
}

// The steps of a block row that are one warp's: as many lie between two of them as there are other warps.
struct Steps {
  const Params& p;
  int first, warps;  // the first one's number in the block row, and warps that take turns
  int begin, count;  // first block of the block row; steps of this warp
  const Element *a, *b;  // this lane's first element of the block row, and of B for block column 0
  int columns, next_columns;  // a lane's: block columns of 32 steps, and of the next 32

  __device__ __forceinline__ Steps(const Params& p, int warp, int row, int first_column)
      : p(p), first(warp), warps(blockDim.x / 32) {
    const int lane = threadIdx.x % 32, column = first_column + lane / 4 * kLaneColumns;
    begin = load_index(p, p.crow_indices, row / kBlockRows);
    const int end = load_index(p, p.crow_indices, row / kBlockRows + 1);
    count = max(0, (end - begin) * kBlockSteps - first + warps - 1) / warps;
    a = p.a + static_cast<int64>(begin) * kBlockElements + (row % kBlockRows + lane / 4) * kBlockCols +
        lane % 4 * kLaneDepth;
    // Columns beyond B are others' again, and are not stored.
    b = p.b + lane % 4 * kLaneDepth * p.b_row_stride + (column < p.n ? column : 0);
    next_columns = load_columns(0);
    advance(0);
  }

  __device__ __forceinline__ int load_columns(int step) const {
    step += threadIdx.x % 32;
    return step < count ? load_index(p, p.col_indices, begin + number(step) / kBlockSteps) : 0;
  }

  // The number in the block row of this warp's step `step`.
  __device__ __forceinline__ int number(int step) const { return first + step * warps; }

  // Goes on to the block columns from step `step` on, a multiple of 32.
  __device__ __forceinline__ void advance(int step) {
    columns = next_columns;
    next_columns = load_columns(step + 32);
  }

  __device__ __forceinline__ void load_a(Step& x, int step) const {
    x.load_a(a + number(step) / kBlockSteps * kBlockElements + number(step) % kBlockSteps * kTileK);
  }

  __device__ __forceinline__ void load_b(Step& x, int step) const {
    const int column = __shfl_sync(0xFFFFFFFF, columns, step % 32);
    const bool valid = static_cast<uint32>(column) < static_cast<uint32>(p.block_columns);
    const int row = column * kBlockCols + number(step) % kBlockSteps * kTileK;
    x.load_b(valid ? b + row * p.b_row_stride : nullptr, p.b_row_stride);
  }
};

extern "C" __global__ void __launch_bounds__(32 * kMostWarps, 2)
    h100_bsr_spmm_b32_n32(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  float* const partials = reinterpret_cast<float*>(shared);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), tile = blockIdx.x;
  const int first_row = tile / p.column_tiles * kTileM, first_column = tile % p.column_tiles * kTileN;
  Steps steps(p, warp, first_row, first_column);

  // A's part does not wait for block columns.
  Step stages[kStages];
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < steps.count) steps.load_a(stages[stage], stage);
  }
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < steps.count) steps.load_b(stages[stage], stage);
  }

  Accumulators accumulators = {};
#pragma unroll 1
  for (int step = 0; step < steps.count; step += kStages) {
    const int next = step + kStages;
    if (next % 32 == 0) steps.advance(next);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (step + stage < steps.count) {
        multiply(accumulators, stages[stage]);
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
