// Generated from specs/l4_e4m3_bsr_spmm_b128_block_scales.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/l4_e4m3_bsr_spmm_b128_block_scales.yaml
// spec: {"arch":"sm_89","b_layout":"column_major","block":{"cols":128,"rows":128},"copy":"cp_async","dtype":"e4m3","mma":"mma","op":"bsr_spmm","scales":"block","schedule":"multistage","stages":3,"tile":{"k":64,"m":128,"n":128}}
// spec hash: 13056eed7b9f75d3fa64c32ed3be0c1b17445a9863c21a676c2153a99a996e15
// seal: sha256 66294c73bfc7ae9eb533513bb4777fcef92e697cecfc631b83c92a6d907876cf

// BSR x dense in FP8 by mma.sync: C = A B, A in block-sparse rows and B, C dense, B stored by columns and C by rows.
// A has a scale for each stored block, B one for each 128 rows of a column.
//
// Roles: a thread block computes one tile of C; all warps load and all compute. Warp w has kWarpRows rows and
// kWarpColumns columns of the tile: part (w / kWarpsN, w % kWarpsN).
//
// Pipeline: a ring of kStages pairs of tiles, filled by cp.async, and two sets of fragments in registers: while one
// slice is multiplied, the next one is loaded from shared memory, even across the end of a step.
//   cp_async_wait   this thread's copies for the next step have landed
//   __syncthreads   so have all threads' copies, and all have fetched the last slice of this step: refill its stage
//
// Symbols
//   tile     kTileM x kTileN of C: one block row, kTileN columns
//   step     kTileK columns of one block of A, kTileK rows of B
//   slice    of a step: 32 columns of A and rows of B, the depth of one product
//   tile row kTileK elements, a row of a tile in shared memory: a row of A, or a column of B, as stored in memory
//   chunk    16 bytes, 16 codes. Chunks of a row are swizzled: the same chunk of 8 rows lies in distinct banks
//   fragment a lane's part of an operand of a slice. Of 16 x 8 accumulators, a lane has rows r and r + 8
//            (r = lane / 4), columns 2 (lane % 4) + {0, 1}
//   strip    16 rows of a warp's part of C, staged for the store

using int64 = long long;
using uint32 = unsigned int;

constexpr int kTileM = 128;  // rows of a C tile: one block row
constexpr int kTileN = 128;  // columns of a C tile
constexpr int kTileK = 64;  // depth of one step
constexpr int kBlockCols = 128;  // columns of a stored block of A
constexpr int kStages = 3;  // depth of the ring of A and B tiles
constexpr int kThreads = 256;  // all load and compute
constexpr int kCopy = 16;  // elements of a chunk, one 16-byte copy
constexpr int kRowChunks = 4;  // chunks of a tile row: of a row of A, of a column of B
constexpr int kPassRows = 64;  // tile rows that all threads copy at a time, a chunk each
constexpr int kATile = 8192;  // bytes of an A tile
constexpr int kBTile = 8192;  // bytes of a B tile
constexpr int kBScaleBytes = 512;  // bytes of the scales of a B tile
constexpr int kWarpsN = 4;  // warps along a row of C
constexpr int kWarpRows = 64;  // rows of C of one warp
constexpr int kWarpColumns = 32;  // columns of C of one warp
constexpr int kStripChunks = 4;  // chunks of a row of a strip of C

// Dynamic shared memory: 50688 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 24576 bytes: A tiles, 128 rows of 64 elements, swizzled
constexpr int kBOffset = 24576;  // 24576 bytes: B tiles, 128 columns of 64 elements, swizzled
constexpr int kBScalesOffset = 49152;  // 1536 bytes: scales of the 128 columns of each stage
constexpr int kStagingOffset = 0;  // 8192 bytes: strips of C, one per warp; overlap the tiles

constexpr int kMmaRows = 16, kMmaColumns = 8;  // of one product
constexpr int kMmaDepth = 32;  // of one product: a slice
constexpr int kSlices = kTileK / kMmaDepth;  // even: the two sets of fragments also alternate across steps
constexpr int kMmasM = kWarpRows / kMmaRows;
constexpr int kPairsN = kWarpColumns / (2 * kMmaColumns);  // B is loaded for two products side by side
constexpr int kChunk = 16;  // bytes
constexpr int kStripCopy = kChunk / sizeof(unsigned short);  // elements of a chunk of C

// Launch: 256 threads per block, 50688 bytes of dynamic shared memory.
// Grid: one thread block per tile, 1 at a time on an SM, block rows fastest among 16 MB of them.
struct Params {
  const unsigned char* a;  // stored blocks of A (nnz, rows, cols), contiguous
  const unsigned char* b;  // B, by columns (K, N)
  unsigned short* c;  // C (M, N)
  int64 b_column_stride;  // column stride of B, in elements
  int64 c_row_stride;  // row stride of C, in elements
  const int* crow_indices;  // row offsets: first block of each block row, then the end of the last
  const int* col_indices;  // block column of each stored block
  int index_words;  // 32-bit words per index, 1 or 2; the kernel reads the low word
  int block_columns;  // block columns of A, block rows of B
  int block_rows;  // block rows of A
  int n;  // columns of B and C; rows of C are padded to a multiple of 8
  int tiles;  // block_rows * tiles per block row: the grid size
  const float* a_scale;  // scales of the stored blocks of A (nnz,)
  const float* b_scale;  // scales of B (K / 128, N), one for each 128 rows of a column
  int64 b_scale_stride;  // stride between the scales of adjacent groups of 128 rows of B, in elements
  int group_rows;  // block rows whose blocks fit the L2 together
  int column_tiles;  // tiles per block row
};

using Element = unsigned char;  // one e4m3 code

// cp.async.cg: copies 16 bytes to shared memory, bypassing the L1; zero-fills without a read unless `valid`. L2::128B
// is a hint to fetch 128 bytes into the L2 (PTX ISA, "cp.async")
__device__ __forceinline__ void cp_async_16(uint32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
      : "memory");
}

// cp.async.cg: copies the first `bytes` of 16 bytes to shared memory, bypassing the L1, and zero-fills the others; no
// read if `bytes` is 0. L2::128B is a hint to fetch 128 bytes into the L2 (PTX ISA, "cp.async")
__device__ __forceinline__ void cp_async_16_part(uint32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// cp.async.commit_group: commits this thread's copies as a group (PTX ISA, "cp.async.commit_group")
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: waits until at most kPending of this thread's groups are in flight (PTX ISA,
// "cp.async.wait_group")
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ldmatrix.x4: loads four 8 x 8 matrices of 16-bit elements. Lanes 8 i to 8 i + 7 hold the row addresses of matrix i;
// each lane gets two neighbors of row lane / 4 of each matrix (PTX ISA, "ldmatrix")
__device__ __forceinline__ void ldmatrix_x4(uint32 (&m)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
      : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

// Order of tiles: p.group_rows block rows at a time, as many as have their blocks of A in the L2; within these down the
// block rows, then on to the next column tile. Concurrent thread blocks then share columns of B, and reuse the same
// blocks of A.
struct TilePlace {
  int row, column;  // block row, index of the column tile

  __device__ __forceinline__ TilePlace(const Params& p, int tile) {
    const int first = tile / (p.group_rows * p.column_tiles) * p.group_rows;
    const int in_group = tile - first * p.column_tiles, rows = min(p.group_rows, p.block_rows - first);
    row = first + in_group % rows;
    column = in_group / rows;
  }
};

// Element i of an index tensor, int32 or the low half of an int64. Indices are below 2^31.
__device__ __forceinline__ int load_index(const Params& p, const int* indices, int i) {
  return __ldg(indices + static_cast<int64>(i) * p.index_words);
}

// The next step of a block row to load.
struct Step {
  int block, end;           // block of A, and the end of the block row
  int k;                    // first column within the block
  int column, next_column;  // block column of this block and of the next, loaded one block ahead

  __device__ __forceinline__ Step(const Params& p, int row) {
    block = load_index(p, p.crow_indices, row);
    end = load_index(p, p.crow_indices, row + 1);
    k = 0;
    column = load_column(p, block);
    next_column = load_column(p, block + 1);
  }
  __device__ __forceinline__ int load_column(const Params& p, int i) const {
    return i < end ? load_index(p, p.col_indices, i) : 0;
  }
  __device__ __forceinline__ void advance(const Params& p) {
    k += kTileK;
    if (k == kBlockCols) {
      k = 0;
      ++block;
      column = next_column;
      next_column = load_column(p, block + 1);
    }
  }
};

constexpr int kRowBytes = kRowChunks * kChunk, kStripRowBytes = kStripChunks * kChunk;

// Byte offset of a chunk of a tile whose rows have kChunks chunks: 2, 4, 8 or 16. Eight chunks span all banks. The same
// chunk of 8 rows, which ldmatrix reads at a time, lies in distinct banks; the pattern repeats after 8 rows.
template <int kChunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int kRowsPerLine = kChunks < 8 ? 8 / kChunks : 1, kPlaces = kChunks < 8 ? kChunks : 8;
  return (row * kChunks + (chunk ^ row / kRowsPerLine % kPlaces)) * kChunk;
}

// This thread's part of the copy of every step: one chunk of every kPassRows-th row of A, as far as A has rows, and of
// every kPassRows-th column of B.
struct Loader {
  const Element *a, *b;  // its first chunk in block 0 of A, and in the first kTileK rows of B
  int64 b_pass;          // elements between its consecutive columns of B
  uint32 a_to, b_to;     // destinations of its first chunks in stage 0
  int columns;           // columns of B, from its first one to the end
  const float* b_scales;  // scales of 4 columns, for the first 128 rows of B; only the first threads copy them
  uint32 b_scales_to;     // their destination in stage 0
  int scale_bytes;        // valid bytes of these 16

  __device__ __forceinline__ Loader(const Params& p, uint32 base, int first_column) {
    const int row = threadIdx.x / kRowChunks, chunk = threadIdx.x % kRowChunks;  // of both tiles
    a = p.a + row * kBlockCols + chunk * kCopy;
    b = p.b + (first_column + row) * p.b_column_stride + chunk * kCopy;
    b_pass = kPassRows * p.b_column_stride;
    a_to = base + kAOffset + swizzled<kRowChunks>(row, chunk);
    b_to = base + kBOffset + swizzled<kRowChunks>(row, chunk);
    columns = p.n - first_column - row;
    const int scaled_column = first_column + 4 * static_cast<int>(threadIdx.x);
    b_scales = p.b_scale + scaled_column;
    b_scales_to = base + kBScalesOffset + threadIdx.x * kChunk;
    scale_bytes = max(min(p.n - scaled_column, 4), 0) * static_cast<int>(sizeof(float));
  }
  // Copies a step's tiles to a stage. Elements outside B are zero-filled, even for a block column out of range. The
  // swizzle is the same in all tile rows of this thread.
  __device__ __forceinline__ void load(const Params& p, const Step& step, int stage) const {
    const Element* a_from = a + static_cast<int64>(step.block) * kTileM * kBlockCols + step.k;
    const Element* b_from = b + static_cast<int64>(step.column) * kBlockCols + step.k;
    const int valid_columns = static_cast<uint32>(step.column) < static_cast<uint32>(p.block_columns) ? columns : 0;
#pragma unroll
    for (int row = 0; row < kTileM; row += kPassRows) {
      cp_async_16(a_to + stage * kATile + row * kRowBytes, a_from + row * kBlockCols, true);
    }
#pragma unroll
    for (int pass = 0; pass < kTileN / kPassRows; ++pass) {
      const int row = pass * kPassRows;
      cp_async_16(b_to + stage * kBTile + row * kRowBytes, b_from + pass * b_pass, row < valid_columns);
    }
    if (threadIdx.x < kTileN / 4) {
      const bool is_there = static_cast<uint32>(step.column) < static_cast<uint32>(p.block_columns);
      const float* from = b_scales + step.column * p.b_scale_stride;
      cp_async_16_part(b_scales_to + stage * kBScaleBytes, from, is_there ? scale_bytes : 0);
    }
  }
};

// A warp's operands of one slice: kMmasM times 16 rows of A, kPairsN times 16 columns of B.
struct Fragments {
  uint32 a[kMmasM][4], b[kPairsN][4];

  // `a_address` and `b_address` are the lane's addresses in the first slice of a stage. The swizzle flips bits of the
  // chunk index, and so does advancing by pairs of chunks: the advance is an exclusive or.
  __device__ __forceinline__ void load(uint32 a_address, uint32 b_address, int slice) {
#pragma unroll
    for (int i = 0; i < kMmasM; ++i) {
      ldmatrix_x4(a[i], (a_address ^ slice * 2 * kChunk) + i * kMmaRows * kRowBytes);
    }
#pragma unroll
    for (int j = 0; j < kPairsN; ++j) {
      ldmatrix_x4(b[j], (b_address ^ slice * 2 * kChunk) + j * 2 * kMmaColumns * kRowBytes);
    }
  }
};

// mma.sync.m16n8k32: D += A B in fp32; A row-major e4m3, B column-major e4m3 (PTX ISA, "mma")
__device__ __forceinline__ void mma_e4m3_e4m3(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Factors of a step's products: the scale of A's block times those of this lane's columns of B, two of each product.
struct Scales {
  float2 of_columns[2 * kPairsN];

  // `columns` points to the stage's scales, at this lane's first column.
  __device__ __forceinline__ Scales(const float* columns, float of_block) {
#pragma unroll
    for (int j = 0; j < 2 * kPairsN; ++j) {
      const float2 of_b = *reinterpret_cast<const float2*>(columns + j * kMmaColumns);
      of_columns[j] = make_float2(of_block * of_b.x, of_block * of_b.y);
    }
  }
};

// accumulators += A B, times its scales, for this warp's part of one slice. Each product is added to the sum in fp32.
// Consecutive mma.syncs share their rows of A.
__device__ __forceinline__ void multiply(float (&accumulators)[kMmasM][2 * kPairsN][4], const Fragments& fragments,
    const Scales& scales) {
#pragma unroll
  for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kPairsN; ++j) {
      const uint32* b = fragments.b[j / 2] + j % 2 * 2;
      const float2 scale = scales.of_columns[j];
      float product[4] = {};
      mma_e4m3_e4m3(product, fragments.a[i], b[0], b[1]);
#pragma unroll
      for (int element = 0; element < 4; ++element) {
        accumulators[i][j][element] += product[element] * (element % 2 == 0 ? scale.x : scale.y);
      }
    }
  }
}
// cvt.rn.bf16x2.f32: converts two floats to a pair of bf16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Writes 16 rows of a warp's part of C to its strip.
__device__ __forceinline__ void stage_strip(unsigned char* strip, const float (&accumulators)[2 * kPairsN][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 2 * kPairsN; ++j) {
    const float* x = accumulators[j];
    uint32* upper = reinterpret_cast<uint32*>(strip + swizzled<kStripChunks>(lane / 4, j)) + lane % 4;
    uint32* lower = reinterpret_cast<uint32*>(strip + swizzled<kStripChunks>(lane / 4 + 8, j)) + lane % 4;
    *upper = pack(x[0], x[1]);
    *lower = pack(x[2], x[3]);
  }
}
// Stores a warp's part of C, strip by strip through shared memory, so that stores cover whole lines.
__device__ __forceinline__ void store_part(const Params& p, const float (&accumulators)[kMmasM][2 * kPairsN][4],
    unsigned char* strip, int first_row, int first_column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kMmasM; ++i) {
    stage_strip(strip, accumulators[i]);
    __syncwarp();
#pragma unroll
    for (int copy = lane; copy < kMmaRows * kStripChunks; copy += 32) {
      const int row = copy / kStripChunks, chunk = copy % kStripChunks;
      const int column = first_column + chunk * kStripCopy;
      if (column < p.n) {
        auto* to = p.c + static_cast<int64>(first_row + i * kMmaRows + row) * p.c_row_stride + column;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(strip + swizzled<kStripChunks>(row, chunk));
      }
    }
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    l4_e4m3_bsr_spmm_b128_block_scales(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part_row = warp / kWarpsN * kWarpRows, part_column = warp % kWarpsN * kWarpColumns;
  const TilePlace tile(p, blockIdx.x);
  const int row = tile.row, first_column = tile.column * kTileN;
  // Lanes 8 i to 8 i + 7 address matrix i. Of A: tile rows 0 to 7, rows 8 to 15, then the same rows one chunk further.
  // Of B: tile rows 0 to 7, the same rows one chunk further, then both for rows 8 to 15.
  const uint32 a_lane = base + kAOffset + swizzled<kRowChunks>(part_row + lane % 16, lane / 16);
  const uint32 b_lane =
      base + kBOffset + swizzled<kRowChunks>(part_column + lane / 16 * kMmaColumns + lane % 8, lane / 8 % 2);

  // An empty block row has no steps: it stores these zeros.
  float accumulators[kMmasM][2 * kPairsN][4];
#pragma unroll
  for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kPairsN; ++j) {
#pragma unroll
      for (int element = 0; element < 4; ++element) accumulators[i][j][element] = 0.0f;
    }
  }
  const Loader loader(p, base, first_column);
  Step next(p, row);
  const int first_block = next.block;
  const int steps = (next.end - next.block) * (kBlockCols / kTileK);

  // Fill all stages. Every step commits one group, empty after the last step, so one wait count fits all steps.
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < steps) loader.load(p, next, stage);
    next.advance(p);
    cp_async_commit();
  }
  Fragments fragments[2];
  if (steps > 0) {
    cp_async_wait<kStages - 1>();
    __syncthreads();
    fragments[0].load(a_lane, b_lane, 0);
  }
  int stage = 0;
  constexpr int kBlockSteps = kBlockCols / kTileK;
  const float* b_scales = reinterpret_cast<const float*>(shared + kBScalesOffset) + part_column + 2 * (lane % 4);
  float next_scale = steps > 0 ? __ldg(p.a_scale + first_block) : 0.0f;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    // Factors of this step's products; load the scale of the next step's block.
    const Scales scales(b_scales + stage * kTileN, next_scale);
    if (step + 1 < steps) next_scale = __ldg(p.a_scale + first_block + (step + 1) / kBlockSteps);
    // Fetch the next slice, then multiply this one.
#pragma unroll
    for (int slice = 0; slice < kSlices - 1; ++slice) {
      fragments[(slice + 1) % 2].load(a_lane + stage * kATile, b_lane + stage * kBTile, slice + 1);
      multiply(accumulators, fragments[slice % 2], scales);
    }
    // Advance to the next step's tiles (after the last step, the fetched data is unused), and refill this step's stage.
    const int free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    cp_async_wait<kStages - 2>();  // of kStages + step groups, the newest belong to steps after the next
    __syncthreads();
    fragments[0].load(a_lane + stage * kATile, b_lane + stage * kBTile, 0);
    if (step + kStages < steps) loader.load(p, next, free_stage);
    cp_async_commit();
    multiply(accumulators, fragments[1], scales);
    next.advance(p);
  }
  // The staging buffer overlaps the tiles, which all threads have finished with.
  __syncthreads();
  unsigned char* strip = shared + kStagingOffset + warp * kMmaRows * kStripRowBytes;
  store_part(p, accumulators, strip, row * kTileM + part_row, first_column + part_column);
}
