// Generated from specs/l4_bsr_sddmm_b64.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/l4_bsr_sddmm_b64.yaml
// spec: {"arch":"sm_89","block":{"cols":64,"rows":64},"copy":"cp_async","dtype":"fp16","mma":"mma","op":"bsr_sddmm","schedule":"multistage","stages":2,"tile":{"k":32,"m":64,"n":256}}
// spec hash: bbd28140122188b105cd108daa1c1641eab4fc6333eef87580260155d6637ec5
// seal: sha256 71150f964c481c24f83aa70bac53ff5461746e416f67ac9da10e66c058a2a3ec

// Sampled product by mma.sync: the stored blocks of C = A B^T, with C in block-sparse rows and A, B dense and
// row-major.
//
// Roles: a thread block computes one tile; all warps load and all compute. Warp w has kWarpRows rows and kWarpColumns
// columns of the tile: part (w / kWarpsN, w % kWarpsN).
//
// Pipeline of a unit: a ring of kStages pairs of tiles, filled by cp.async, and two sets of fragments in registers:
// while one slice is multiplied, the next one is loaded from shared memory, even across the end of a step.
//   cp_async_wait   this thread's copies for the next step have landed
//   __syncthreads   so have all threads' copies, and all have fetched the last slice of this step: refill its stage
//
// Symbols
//   tile     kTileBlocks consecutive stored blocks of C, side by side: kTileM x kTileN. Tiles are numbered in storage
//            order, so that concurrent thread blocks share block rows of A and of B
//   unit     the blocks of a tile that lie in one block row: they share the A tile. Most tiles are one unit; a tile in
//            which a block row ends has several, one after the other. Missing blocks of a unit are zeros
//   step     kTileK columns of A and B; a slice of it: 16 of them, the depth of one product
//   chunk    16 bytes, 8 elements. Chunks of a row are swizzled: the same chunk of 8 rows lies in distinct banks
//   fragment a lane's part of an operand of a slice. Of 16 x 8 accumulators, a lane has rows r and r + 8
//            (r = lane / 4), columns 2 (lane % 4) + {0, 1}
//   strip    16 rows of a warp's part of a unit, staged for the store

using int64 = long long;
using uint32 = unsigned int;

constexpr int kTileM = 64;  // rows of a tile: those of a stored block of C
constexpr int kTileN = 256;  // columns of a tile
constexpr int kTileK = 32;  // depth of one step
constexpr int kBlockCols = 64;  // columns of a stored block of C
constexpr int kTileBlocks = 4;  // most stored blocks per tile
constexpr int kRowChunks = 4;  // chunks of a row of an A or B tile
constexpr int kPassRows = 32;  // rows of a tile that all threads copy at a time, a chunk each
constexpr int kStages = 2;  // depth of the ring of A and B tiles
constexpr int kThreads = 128;  // all load and compute
constexpr int kCopy = 8;  // elements of a chunk, one 16-byte copy
constexpr int kATile = 4096;  // bytes of an A tile
constexpr int kBTile = 16384;  // bytes of a B tile
constexpr int kWarpsN = 4;  // warps along a row of C
constexpr int kWarpRows = 64;  // rows of C of one warp
constexpr int kWarpColumns = 64;  // columns of C of one warp

// Dynamic shared memory: 41984 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 8192 bytes: A tiles, 64 rows of 32 elements, swizzled
constexpr int kBOffset = 8192;  // 32768 bytes: B tiles, 256 rows of 32 elements, swizzled
constexpr int kBRowsOffset = 40960;  // 1024 bytes: rows of B that a unit needs
constexpr int kStagingOffset = 0;  // 8192 bytes: strips of C, one per warp; overlap the tiles

constexpr int kMmaRows = 16, kMmaColumns = 8, kMmaDepth = 16;  // of one product
constexpr int kSlices = kTileK / kMmaDepth;  // even: the two sets of fragments also alternate across steps
constexpr int kMmasM = kWarpRows / kMmaRows;
constexpr int kPairsN = kWarpColumns / (2 * kMmaColumns);  // B is loaded for two products side by side
constexpr int kChunk = 16;  // bytes
constexpr int kRowBytes = kRowChunks * kChunk;  // of a row of an A or B tile
constexpr int kStripChunks = kWarpColumns / kCopy;

// Launch: 128 threads per block, 41984 bytes of dynamic shared memory.
// Grid: one thread block per tile, 2 at a time on an SM, in the order of storage.
struct Params {
  const unsigned short* a;  // A (M, K)
  const unsigned short* b;  // B (N, K)
  unsigned short* c;  // stored blocks of C (nnz, rows, cols), contiguous
  int64 a_row_stride;  // row stride of A, in elements
  int64 b_row_stride;  // row stride of B, in elements
  const int* crow_indices;  // row offsets: first block of each block row, then the end of the last
  const int* col_indices;  // block column of each stored block
  int index_words;  // 32-bit words per index, 1 or 2; the kernel reads the low word
  int block_rows;  // block rows of C
  int block_columns;  // block columns of C
  int blocks;  // stored blocks of C
  int k;  // columns of A and B
  int steps;  // K / kTileK, rounded up
};

using Element = unsigned short;  // the bits of one fp16

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

// Element i of an index tensor: an int32, or the low half of an int64 if `words` is 2. Indices are below 2^31.
__device__ __forceinline__ int load_index(const int* indices, int words, int i) {
  return __ldg(indices + static_cast<int64>(i) * words);
}

// Block row of a stored block: the last row that begins at or before it. The search begins at `row`, which must not
// come after the result. The lanes of a warp probe 32 rows at equal distances, and continue between the last of these
// that begins at or before the block and the next one.
__device__ __forceinline__ int find_row(const Params& p, int block, int row) {
  const int lane = threadIdx.x % 32;
  int end = p.block_rows;
  while (end - row > 1) {
    const int stride = (end - row + 31) / 32;
    const int probe = row + lane * stride;
    const bool begun = lane == 0 || (probe < end && load_index(p.crow_indices, p.index_words, probe) <= block);
    row += (31 - __clz(__ballot_sync(0xFFFFFFFF, begun))) * stride;
    end = min(end, row + stride);
  }
  return row;
}

// Finds the rows of B that a unit needs; -1 for missing blocks. All threads must have finished with the previous ones.
__device__ __forceinline__ void find_b_rows(const Params& p, int block, int count, int* b_rows) {
  for (int row = threadIdx.x; row < kTileN; row += kThreads) {
    const int i = row / kBlockCols;
    const int block_column = i < count ? load_index(p.col_indices, p.index_words, block + i) : -1;
    const bool known = static_cast<uint32>(block_column) < static_cast<uint32>(p.block_columns);
    b_rows[row] = known ? block_column * kBlockCols + row % kBlockCols : -1;
  }
  __syncthreads();
}

// Byte offset of a chunk of a tile whose rows have kChunks chunks: 2, 4, 8 or 16. Eight chunks span all banks. The same
// chunk of 8 rows, which ldmatrix reads at a time, lies in distinct banks; the pattern repeats after 8 rows.
template <int kChunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int kRowsPerLine = kChunks < 8 ? 8 / kChunks : 1, kPlaces = kChunks < 8 ? kChunks : 8;
  return (row * kChunks + (chunk ^ row / kRowsPerLine % kPlaces)) * kChunk;
}

// This thread's part of the copy of every step of a unit: one chunk of every kPassRows-th row, of A and of B.
struct Loader {
  const Element *a, *b;  // its first chunk of A, and its chunk of B's row 0, in step 0
  const int* b_rows;     // the first of its rows of B
  int column;            // of its chunks in step 0
  uint32 to;             // destination of its first chunk in the first tile of A

  __device__ __forceinline__ Loader(const Params& p, uint32 base, int block_row, const int* unit_rows) {
    const int row = threadIdx.x / kRowChunks, chunk = threadIdx.x % kRowChunks;
    column = chunk * kCopy;
    a = p.a + (static_cast<int64>(block_row) * kTileM + row) * p.a_row_stride + column;
    b = p.b + column;
    b_rows = unit_rows + row;
    to = base + kAOffset + swizzled<kRowChunks>(row, chunk);
  }
  // Copies a step's tiles to a stage. Elements past the last column of A and B are zero-filled, and so are out-of-range
  // rows of B. The swizzle is the same in all rows of this thread.
  __device__ __forceinline__ void load(const Params& p, int step, int stage) const {
    const int k = step * kTileK;
    const int bytes = max(min(p.k - k - column, kCopy), 0) * static_cast<int>(sizeof(Element));
#pragma unroll
    for (int row = 0; row < kTileM; row += kPassRows) {
      cp_async_16_part(to + stage * kATile + row * kRowBytes, a + row * p.a_row_stride + k, bytes);
    }
    const uint32 b_to = to + (kBOffset - kAOffset) + stage * kBTile;
#pragma unroll
    for (int row = 0; row < kTileN; row += kPassRows) {
      const int b_row = b_rows[row];
      cp_async_16_part(b_to + row * kRowBytes, b + max(b_row, 0) * p.b_row_stride + k, b_row < 0 ? 0 : bytes);
    }
  }
};

// A warp's operands of one slice: kMmasM times 16 rows of A, kPairsN times 16 rows of B.
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

// accumulators += A B^T for this warp's part of one slice. Consecutive mma.syncs share their rows of A, the larger
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

// Stores a warp's part of a unit of `count` blocks, strip by strip through shared memory, so that stores cover whole
// lines.
__device__ __forceinline__ void store_part(const Params& p, const float (&accumulators)[kMmasM][2 * kPairsN][4],
    unsigned char* strip, int block, int count, int first_row, int first_column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kMmasM; ++i) {
    stage_strip(strip, accumulators[i]);
    __syncwarp();
#pragma unroll
    for (int copy = lane; copy < kMmaRows * kStripChunks; copy += 32) {
      const int row = copy / kStripChunks, chunk = copy % kStripChunks;
      const int column = first_column + chunk * kCopy;
      if (column / kBlockCols < count) {
        const int64 c_row = static_cast<int64>(block + column / kBlockCols) * kTileM + first_row + i * kMmaRows + row;
        Element* to = p.c + c_row * kBlockCols + column % kBlockCols;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(strip + swizzled<kStripChunks>(row, chunk));
      }
    }
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    l4_bsr_sddmm_b64(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  int* b_rows = reinterpret_cast<int*>(shared + kBRowsOffset);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part_row = warp / kWarpsN * kWarpRows, part_column = warp % kWarpsN * kWarpColumns;
  // Lanes 8 i to 8 i + 7 address matrix i. Of A: rows 0 to 7, rows 8 to 15, then the same rows one chunk further. Of B:
  // rows 0 to 7, the same rows one chunk further, then both for rows 8 to 15.
  const uint32 a_lane = base + kAOffset + swizzled<kRowChunks>(part_row + lane % 16, lane / 16);
  const uint32 b_lane =
      base + kBOffset + swizzled<kRowChunks>(part_column + lane / 16 * kMmaColumns + lane % 8, lane / 8 % 2);
  const int end = min((static_cast<int>(blockIdx.x) + 1) * kTileBlocks, p.blocks);

  int block_row = 0;
#pragma unroll 1
  for (int block = blockIdx.x * kTileBlocks; block < end;) {
    block_row = find_row(p, block, block_row);
    // At least one block, even if crow_indices is invalid: the loop must terminate.
    const int count = max(min(load_index(p.crow_indices, p.index_words, block_row + 1), end) - block, 1);
    find_b_rows(p, block, count, b_rows);
    const Loader loader(p, base, block_row, b_rows);
    float accumulators[kMmasM][2 * kPairsN][4];
#pragma unroll
    for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kPairsN; ++j) {
#pragma unroll
        for (int element = 0; element < 4; ++element) accumulators[i][j][element] = 0.0f;
      }
    }

    // Fill all stages. Every step commits one group, empty after the last step, so one wait count fits all steps.
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (stage < p.steps) loader.load(p, stage, stage);
      cp_async_commit();
    }
    Fragments fragments[2];
    cp_async_wait<kStages - 1>();
    __syncthreads();
    fragments[0].load(a_lane, b_lane, 0);
    int stage = 0;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      // Fetch the next slice, then multiply this one.
#pragma unroll
      for (int slice = 0; slice < kSlices - 1; ++slice) {
        fragments[(slice + 1) % 2].load(a_lane + stage * kATile, b_lane + stage * kBTile, slice + 1);
        multiply(accumulators, fragments[slice % 2]);
      }
      // Advance to the next step's tiles (after the last step, the fetched data is unused), and refill this step's
      // stage.
      const int free_stage = stage;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      cp_async_wait<kStages - 2>();  // of kStages + step groups, the newest belong to steps after the next
      __syncthreads();
      fragments[0].load(a_lane + stage * kATile, b_lane + stage * kBTile, 0);
      if (step + kStages < p.steps) loader.load(p, step + kStages, free_stage);
      cp_async_commit();
      multiply(accumulators, fragments[1]);
    }
    // The staging buffer overlaps the tiles: all threads must finish with one before the other is written.
    __syncthreads();
    unsigned char* strip = shared + kStagingOffset + warp * kMmaRows * kWarpColumns * sizeof(Element);
    store_part(p, accumulators, strip, block, count, part_row, part_column);
    __syncthreads();
    block += count;
  }
}
