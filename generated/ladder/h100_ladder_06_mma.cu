// Generated from specs/ladder/h100_ladder_06_mma.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/ladder/h100_ladder_06_mma.yaml
// spec: {"arch":"sm_90a","block":{"cols":128,"rows":128},"copy":"cp_async","dtype":"fp16","mma":"mma","op":"bsr_spmm","schedule":"multistage","stages":4,"tile":{"k":64,"m":128,"n":256}}
// spec hash: 4e70de2844f7a5b144a09d899bf9f094ecf2b7b6e0784e2552ac9f488ab156bb
// seal: sha256 48a8c18a0b17cd3df044d8cb4d01bcbd42145ba0034cd386e3b6362a7da1c508

// BSR x dense by mma.sync: C = A B with A in block-sparse rows and B, C dense and row-major.
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
//   slice    of a step: 16 columns of A and rows of B, the depth of one product
//   chunk    16 bytes, 8 elements. Chunks of a row are swizzled: the same chunk of 8 rows lies in distinct banks
//   fragment a lane's part of an operand of a slice. Of 16 x 8 accumulators, a lane has rows r and r + 8
//            (r = lane / 4), columns 2 (lane % 4) + {0, 1}
//   strip    16 rows of a warp's part of C, staged for the store

using int64 = long long;
using uint32 = unsigned int;

constexpr int kTileM = 128;  // rows of a C tile: one block row
constexpr int kTileN = 256;  // columns of a C tile
constexpr int kTileK = 64;  // depth of one step
constexpr int kBlockCols = 128;  // columns of a stored block of A
constexpr int kStages = 4;  // depth of the ring of A and B tiles
constexpr int kThreads = 256;  // all load and compute
constexpr int kCopy = 8;  // elements of a chunk, one 16-byte copy
constexpr int kAChunks = 8;  // chunks of a row of an A tile
constexpr int kBChunks = 32;  // chunks of a row of a B tile
constexpr int kARowsPerLine = 1;  // rows of an A tile that span all banks
constexpr int kAPassRows = 32;  // rows of an A tile that all threads copy at a time, a chunk each
constexpr int kBPassRows = 8;  // rows of a B tile that all threads copy at a time
constexpr int kATile = 16384;  // bytes of an A tile
constexpr int kBTile = 32768;  // bytes of a B tile
constexpr int kWarpsN = 4;  // warps along a row of C
constexpr int kWarpRows = 64;  // rows of C of one warp
constexpr int kWarpColumns = 64;  // columns of C of one warp
constexpr int kStripChunks = 8;  // chunks of a row of a strip of C

// Dynamic shared memory: 196608 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 65536 bytes: A tiles, 128 rows of 64 elements, swizzled
constexpr int kBOffset = 65536;  // 131072 bytes: B tiles, 64 rows of 256 elements, swizzled
constexpr int kStagingOffset = 0;  // 16384 bytes: strips of C, one per warp; overlap the tiles

constexpr int kMmaRows = 16, kMmaColumns = 8;  // of one product
constexpr int kMmaDepth = 16;  // of one product: a slice
constexpr int kSlices = kTileK / kMmaDepth;  // even: the two sets of fragments also alternate across steps
constexpr int kMmasM = kWarpRows / kMmaRows;
constexpr int kPairsN = kWarpColumns / (2 * kMmaColumns);  // B is loaded for two products side by side
constexpr int kChunk = 16;  // bytes

// Launch: 256 threads per block, 196608 bytes of dynamic shared memory.
// Grid: one thread block per tile, 1 at a time on an SM, block rows fastest among 16 MB of them.
struct Params {
  const unsigned short* a;  // stored blocks of A (nnz, rows, cols), contiguous
  const unsigned short* b;  // B (K, N)
  unsigned short* c;  // C (M, N)
  int64 b_row_stride;  // row stride of B, in elements
  int64 c_row_stride;  // row stride of C, in elements
  const int* crow_indices;  // row offsets: first block of each block row, then the end of the last
  const int* col_indices;  // block column of each stored block
  int index_words;  // 32-bit words per index, 1 or 2; the kernel reads the low word
  int block_columns;  // block columns of A, block rows of B
  int block_rows;  // block rows of A
  int n;  // columns of B and C; rows of C are padded to a multiple of 8
  int tiles;  // block_rows * tiles per block row: the grid size
  int group_rows;  // block rows whose blocks fit the L2 together
  int column_tiles;  // tiles per block row
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

// ldmatrix.x4: loads four 8 x 8 matrices of 16-bit elements. Lanes 8 i to 8 i + 7 hold the row addresses of matrix i;
// each lane gets two neighbors of row lane / 4 of each matrix (PTX ISA, "ldmatrix")
__device__ __forceinline__ void ldmatrix_x4(uint32 (&m)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
      : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

// ldmatrix.x4.trans: as ldmatrix.x4, with each matrix transposed (PTX ISA, "ldmatrix")
__device__ __forceinline__ void ldmatrix_x4_trans(uint32 (&m)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
      : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
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

constexpr int kARowBytes = kAChunks * kChunk, kBRowBytes = kBChunks * kChunk, kStripRowBytes = kStripChunks * kChunk;

// Byte offset of a chunk of an A tile. kARowsPerLine of its rows share a line of all banks.
__device__ __forceinline__ int a_offset(int row, int chunk) {
  return row * kARowBytes + (chunk ^ row / kARowsPerLine % kAChunks) * kChunk;
}

// Byte offset of a chunk of a B tile.
__device__ __forceinline__ int b_offset(int row, int chunk) { return row * kBRowBytes + (chunk ^ row % 8) * kChunk; }

// This thread's part of the copy of every step: one chunk of every kAPassRows-th row of A, as far as A has rows, and
// of every kBPassRows-th row of B.
struct Loader {
  const Element *a, *b;  // its first chunk in block 0 of A, and in row 0 of B
  int64 b_pass;          // elements between its consecutive rows of B
  uint32 a_to, b_to;     // destinations of its first chunks in stage 0
  bool in_columns;       // whether its columns of B are in range

  __device__ __forceinline__ Loader(const Params& p, uint32 base, int first_column) {
    const int a_row = threadIdx.x / kAChunks, a_chunk = threadIdx.x % kAChunks;
    const int b_row = threadIdx.x / kBChunks, b_column = first_column + threadIdx.x % kBChunks * kCopy;
    a = p.a + a_row * kBlockCols + a_chunk * kCopy;
    b = p.b + b_row * p.b_row_stride + b_column;
    b_pass = kBPassRows * p.b_row_stride;
    a_to = base + kAOffset + a_offset(a_row, a_chunk);
    b_to = base + kBOffset + b_offset(b_row, threadIdx.x % kBChunks);
    in_columns = b_column < p.n;
  }
  // Copies a step's tiles to a stage. Elements outside B are zero-filled, even for a block column out of range.
  __device__ __forceinline__ void load(const Params& p, const Step& step, int stage) const {
    const Element* a_from = a + static_cast<int64>(step.block) * kTileM * kBlockCols + step.k;
    const Element* b_from = b + (static_cast<int64>(step.column) * kBlockCols + step.k) * p.b_row_stride;
    const bool valid = in_columns && static_cast<uint32>(step.column) < static_cast<uint32>(p.block_columns);
    // The swizzle of A is the same in all rows of this thread. If a pass of B has fewer than 8 rows, that of B differs
    // by the rows of the previous passes.
#pragma unroll
    for (int pass = 0; pass < kTileM / kAPassRows; ++pass) {
      const int row = pass * kAPassRows;
      cp_async_16(a_to + stage * kATile + row * kARowBytes, a_from + row * kBlockCols, true);
    }
#pragma unroll
    for (int pass = 0; pass < kTileK / kBPassRows; ++pass) {
      const int row = pass * kBPassRows;
      cp_async_16((b_to + stage * kBTile ^ row % 8 * kChunk) + row * kBRowBytes, b_from + pass * b_pass, valid);
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
      ldmatrix_x4(a[i], (a_address ^ slice * 2 * kChunk) + i * kMmaRows * kARowBytes);
    }
#pragma unroll
    for (int j = 0; j < kPairsN; ++j) {
      ldmatrix_x4_trans(b[j], (b_address ^ j * 2 * kChunk) + slice * kMmaDepth * kBRowBytes);
    }
  }
};

// Byte offset of a chunk of a strip.
__device__ __forceinline__ int strip_offset(int row, int chunk) {
  return row * kStripRowBytes + (chunk ^ row % 8) * kChunk;
}

// accumulators += A B for this warp's part of one slice. Consecutive mma.syncs share their rows of A, the larger
// operand, which is then read from the registers once.
__device__ __forceinline__ void multiply(float (&accumulators)[kMmasM][2 * kPairsN][4], const Fragments& fragments) {
#pragma unroll
  for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
    for (int j = 0; j < kPairsN; ++j) {
      mma_m16n8k16(accumulators[i][2 * j], fragments.a[i], fragments.b[j][0], fragments.b[j][1]);
      mma_m16n8k16(accumulators[i][2 * j + 1], fragments.a[i], fragments.b[j][2], fragments.b[j][3]);
    }
  }
}

// Stores a warp's part of C, strip by strip through shared memory, so that stores cover whole lines.
__device__ __forceinline__ void store_part(const Params& p, const float (&accumulators)[kMmasM][2 * kPairsN][4],
    unsigned char* strip, int first_row, int first_column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kPairsN; ++j) {
      const float* x = accumulators[i][j];
      uint32* upper = reinterpret_cast<uint32*>(strip + strip_offset(lane / 4, j)) + lane % 4;
      uint32* lower = reinterpret_cast<uint32*>(strip + strip_offset(lane / 4 + 8, j)) + lane % 4;
      *upper = pack(x[0], x[1]);
      *lower = pack(x[2], x[3]);
    }
    __syncwarp();
#pragma unroll
    for (int copy = lane; copy < kMmaRows * kStripChunks; copy += 32) {
      const int row = copy / kStripChunks, chunk = copy % kStripChunks;
      const int column = first_column + chunk * kCopy;
      if (column < p.n) {
        Element* to = p.c + static_cast<int64>(first_row + i * kMmaRows + row) * p.c_row_stride + column;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(strip + strip_offset(row, chunk));
      }
    }
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    h100_ladder_06_mma(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part_row = warp / kWarpsN * kWarpRows, part_column = warp % kWarpsN * kWarpColumns;
  const TilePlace tile(p, blockIdx.x);
  const int row = tile.row, first_column = tile.column * kTileN;
  // Lanes 8 i to 8 i + 7 address matrix i: rows 0 to 7, rows 8 to 15, then the same rows one chunk further.
  const uint32 a_lane = base + kAOffset + a_offset(part_row + lane % 16, lane / 16);
  const uint32 b_lane = base + kBOffset + b_offset(lane % 16, part_column / kCopy + lane / 16);

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
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    // Fetch the next slice, then multiply this one.
#pragma unroll
    for (int slice = 0; slice < kSlices - 1; ++slice) {
      fragments[(slice + 1) % 2].load(a_lane + stage * kATile, b_lane + stage * kBTile, slice + 1);
      multiply(accumulators, fragments[slice % 2]);
    }
    // Advance to the next step's tiles (after the last step, the fetched data is unused), and refill this step's stage.
    const int free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    cp_async_wait<kStages - 2>();  // of kStages + step groups, the newest belong to steps after the next
    __syncthreads();
    fragments[0].load(a_lane + stage * kATile, b_lane + stage * kBTile, 0);
    if (step + kStages < steps) loader.load(p, next, free_stage);
    cp_async_commit();
    multiply(accumulators, fragments[1]);
    next.advance(p);
  }
  // The staging buffer overlaps the tiles, which all threads have finished with.
  __syncthreads();
  unsigned char* strip = shared + kStagingOffset + warp * kMmaRows * kStripRowBytes;
  store_part(p, accumulators, strip, row * kTileM + part_row, first_column + part_column);
}
