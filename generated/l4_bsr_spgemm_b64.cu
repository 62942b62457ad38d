// Generated from specs/l4_bsr_spgemm_b64.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/l4_bsr_spgemm_b64.yaml
// spec: {"arch":"sm_89","block":{"cols":64,"rows":64},"copy":"cp_async","dtype":"fp16","mma":"mma","op":"bsr_spgemm","schedule":"multistage","stages":3,"tile":{"k":32,"m":64,"n":64}}
// spec hash: cb409d8c64ccb3091be1d520269d0730794e7b31ec2260f7d10b721cf0aad31e
// seal: sha256 c474070cda8a957f87d1cd3deefeccc37a3e63d395666e12ee096f3e592d5e34

// BSR x BSR by mma.sync: C = A B with A and B in block-sparse rows and C dense, row-major.
//
// Roles: a thread block computes the tiles of one run, one after the other. All its threads search and load; all warps
// compute. Warp w has kWarpRows rows and kWarpColumns columns of a tile: part (w / kWarpsN, w % kWarpsN).
//
// Search for matching blocks. For a run, each thread takes one block (i, k) of A's row and searches row k of B for the
// run's columns: a binary search for the first, then a scan of a few entries. It keeps one bit per tile. The threads
// that have a tile's bit list its products, in the order of A's blocks. Rows of A with more than kThreads blocks take
// several batches of kThreads, which are searched again for each tile.
//
// Pipeline of a list of products: a ring of kStages pairs of tiles, filled by cp.async kStages - 1 steps ahead. Lists
// are short, so several thread blocks share an SM: one multiplies while the others search, load and store.
//   cp_async_wait   this thread's copies for the step have landed
//   __syncthreads   so have all threads' copies, and all threads have finished with the stage that is filled next
//
// Symbols
//   product  a block of A and the matching block of B: their indices, .x and .y
//   step     kTileK columns of the former, kTileK rows of the latter; a slice of it: 16 of them, the depth of one mma
//   product  a block of A and the block of B that it meets: their numbers, .x and .y
//   step     kTileK columns of the one, kTileK rows of the other; a slice of it: 16 of them, the depth of one mma
//   chunk    16 bytes, 8 elements. Chunks of a row are swizzled: the same chunk of 8 rows lies in distinct banks
//   fragment a lane's part of an operand of a slice. Of 16 x 8 accumulators, a lane has rows r and r + 8
//            (r = lane / 4), columns 2 (lane % 4) + {0, 1}
//   strip    16 rows of a warp's part of C, staged for the store

using int64 = long long;
using uint32 = unsigned int;

constexpr int kBlock = 64;  // rows and columns of a stored block, and of a C tile
constexpr int kTileK = 32;  // depth of one step
constexpr int kRunTiles = 4;  // adjacent C tiles that share one search
constexpr int kAPassRows = 32;  // rows of an A tile that all threads copy at a time
constexpr int kBPassRows = 16;  // rows of a B tile that they copy at a time
constexpr int kStages = 3;  // depth of the ring of A and B tiles
constexpr int kThreads = 128;  // all load and compute
constexpr int kCopy = 8;  // elements of a chunk, one 16-byte copy
constexpr int kATile = 4096;  // bytes of an A tile
constexpr int kBTile = 4096;  // bytes of a B tile
constexpr int kWarpsN = 2;  // warps along a row of C
constexpr int kWarpRows = 32;  // rows of C of one warp
constexpr int kWarpColumns = 32;  // columns of C of one warp

// Dynamic shared memory: 25600 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 12288 bytes: A tiles, 64 rows of 32 elements, swizzled
constexpr int kBOffset = 12288;  // 12288 bytes: B tiles, 32 rows of 64 elements, swizzled
constexpr int kListOffset = 24576;  // 1024 bytes: products of a tile: block of A, block of B
constexpr int kStagingOffset = 0;  // 4096 bytes: strips of C, one per warp; overlap the tiles
constexpr int kCountsOffset = 4096;  // 16 bytes: products found by each warp; overlaps the tiles after the staging

constexpr int kMmaRows = 16, kMmaColumns = 8, kMmaDepth = 16;  // of one mma
constexpr int kSlices = kTileK / kMmaDepth;
constexpr int kMmasM = kWarpRows / kMmaRows;
constexpr int kPairsN = kWarpColumns / (2 * kMmaColumns);  // B is loaded for two mmas side by side
constexpr int kProductSteps = kBlock / kTileK;
constexpr int kChunk = 16;  // bytes
constexpr int kAChunks = kTileK / kCopy, kBChunks = kBlock / kCopy, kStripChunks = kWarpColumns / kCopy;
constexpr int kARowBytes = kAChunks * kChunk, kBRowBytes = kBChunks * kChunk;

// Launch: 128 threads per block, 25600 bytes of dynamic shared memory.
// Grid: one thread block for a run of 4 tiles, 3 at a time on an SM.
struct Params {
  const unsigned short* a;  // stored blocks of A (nnz, rows, cols), contiguous
  const unsigned short* b;  // stored blocks of B (nnz, rows, cols), contiguous
  unsigned short* c;  // C (M, N)
  int64 c_row_stride;  // row stride of C, in elements
  const int* a_crow_indices;  // row offsets of A: first block of each block row, then the end of the last
  const int* a_col_indices;  // block column of each stored block of A
  const int* b_crow_indices;  // row offsets of B: first block of each block row, then the end of the last
  const int* b_col_indices;  // block column of each stored block of B, ascending in each row
  int a_index_words;  // 32-bit words per index of A, 1 or 2; the kernel reads the low word
  int b_index_words;  // 32-bit words per index of B
  int inner_blocks;  // block columns of A, block rows of B
  int column_blocks;  // block columns of C
  int row_runs;  // runs per block row: column_blocks / kRunTiles, rounded up
  int runs;  // block rows of C * row_runs
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

// Element i of an index tensor: an int32, or the low half of an int64 if `words` is 2. Indices are below 2^31.
__device__ __forceinline__ int load_index(const int* indices, int words, int i) {
  return __ldg(indices + static_cast<int64>(i) * words);
}

// The tiles [first, first + count) of one block row.
struct Run {
  int block_row, first, count;

  __device__ __forceinline__ Run(const Params& p, int run)
      : block_row(run / p.row_runs),
        first(run % p.row_runs * kRunTiles),
        count(min(kRunTiles, p.column_blocks - first)) {}
};

// The blocks of one row of B in the columns of a run: a bit for each tile, and the first of the blocks.
struct Meetings {
  unsigned tiles = 0;
  int first_block = 0;

  // Block of B in a tile's column, if the tile's bit is set. Columns are ascending, so counting the lower bits gives
  // it.
  __device__ __forceinline__ int block_of(int tile) const { return first_block + __popc(tiles & ((1u << tile) - 1)); }
};

// Finds the blocks of B in a run that match stored block `block` of A; none if `block` is at or past `end`, the end of
// its block row.
__device__ __forceinline__ Meetings find_meetings(const Params& p, const Run& run, int block, int end) {
  Meetings found;
  if (block >= end) return found;
  const unsigned k = load_index(p.a_col_indices, p.a_index_words, block);
  if (k >= static_cast<unsigned>(p.inner_blocks)) return found;
  // The first block of row k at or after the first column of the run.
  const int row_end = load_index(p.b_crow_indices, p.b_index_words, k + 1);
  int low = load_index(p.b_crow_indices, p.b_index_words, k), high = row_end;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (load_index(p.b_col_indices, p.b_index_words, middle) < run.first) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  found.first_block = low;
  for (; low < row_end; ++low) {
    const int tile = load_index(p.b_col_indices, p.b_index_words, low) - run.first;
    if (tile >= kRunTiles) break;
    found.tiles |= 1u << tile;
  }
  return found;
}

// Lists the products of a tile among the matches of the threads' blocks of A, in the order of these blocks, and returns
// their number. All threads must have finished with the previous list and with the tiles, which the counts overlap.
__device__ __forceinline__ int list_products(const Meetings& meetings, int tile, int block, int2* list, int* counts) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool meets = meetings.tiles >> tile & 1;
  const unsigned hits = __ballot_sync(0xFFFFFFFF, meets);
  if (lane == 0) counts[warp] = __popc(hits);
  __syncthreads();
  int before = 0, products = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < warp) before += counts[i];
    products += counts[i];
  }
  if (meets) list[before + __popc(hits & ((1u << lane) - 1))] = make_int2(block, meetings.block_of(tile));
  __syncthreads();
  return products;
}

// Byte offset of a chunk of a tile whose rows have kChunks chunks: 2, 4, 8 or 16. Eight chunks span all banks. The same
// chunk of 8 rows, which ldmatrix reads at a time, lies in distinct banks; the pattern repeats after 8 rows.
template <int kChunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int kRowsPerLine = kChunks < 8 ? 8 / kChunks : 1, kPlaces = kChunks < 8 ? kChunks : 8;
  return (row * kChunks + (chunk ^ row / kRowsPerLine % kPlaces)) * kChunk;
}

// This thread's part of the copy of every step: one chunk of every kAPassRows-th row of A, and of every kBPassRows-th
// row of B.
struct Loader {
  const Element *a, *b;  // its first chunks in block 0 of A and of B
  uint32 a_to, b_to;     // their destinations in stage 0

  __device__ __forceinline__ Loader(const Params& p, uint32 base) {
    const int a_row = threadIdx.x / kAChunks, a_chunk = threadIdx.x % kAChunks;
    const int b_row = threadIdx.x / kBChunks, b_chunk = threadIdx.x % kBChunks;
    a = p.a + a_row * kBlock + a_chunk * kCopy;
    b = p.b + b_row * kBlock + b_chunk * kCopy;
    a_to = base + kAOffset + swizzled<kAChunks>(a_row, a_chunk);
    b_to = base + kBOffset + swizzled<kBChunks>(b_row, b_chunk);
  }
  // Copies one step of a product to a stage. The swizzle is the same in all rows of this thread.
  __device__ __forceinline__ void load(int2 product, int step, int stage) const {
    const Element* a_from = a + static_cast<int64>(product.x) * kBlock * kBlock + step * kTileK;
    const Element* b_from = b + (static_cast<int64>(product.y) * kBlock + step * kTileK) * kBlock;
#pragma unroll
    for (int row = 0; row < kBlock; row += kAPassRows) {
      cp_async_16(a_to + stage * kATile + row * kARowBytes, a_from + row * kBlock, true);
    }
#pragma unroll
    for (int row = 0; row < kTileK; row += kBPassRows) {
      cp_async_16(b_to + stage * kBTile + row * kBRowBytes, b_from + row * kBlock, true);
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

// accumulators += A B for this warp's part of a list of products. On return, all threads have finished with the list
// and the tiles.
__device__ __forceinline__ void multiply_list(float (&accumulators)[kMmasM][2 * kPairsN][4], const int2* list,
    int products, const Loader& loader, uint32 a_lane, uint32 b_lane) {
  const int steps = products * kProductSteps;
  // Fill all stages but one. Every step commits one group, empty after the last step, so one wait count fits all
  // steps.
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < steps) loader.load(list[stage / kProductSteps], stage % kProductSteps, stage);
    cp_async_commit();
  }
  int stage = 0, free_stage = kStages - 1;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    // Wait for this step's tiles, then refill the stage of the previous step.
    cp_async_wait<kStages - 2>();  // of kStages - 1 + step groups, the newest belong to later steps
    __syncthreads();
    const int ahead = step + kStages - 1;
    if (ahead < steps) loader.load(list[ahead / kProductSteps], ahead % kProductSteps, free_stage);
    cp_async_commit();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      Fragments fragments;
      fragments.load(a_lane + stage * kATile, b_lane + stage * kBTile, slice);
      multiply(accumulators, fragments);
    }
    free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  __syncthreads();
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

// Stores a warp's part of C, strip by strip through shared memory, so that neighboring lanes store 16 bytes each of the
// same row.
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
      Element* to = p.c + (first_row + i * kMmaRows + row) * p.c_row_stride + first_column + chunk * kCopy;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(strip + swizzled<kStripChunks>(row, chunk));
    }
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 3)
    l4_bsr_spgemm_b64(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  int2* list = reinterpret_cast<int2*>(shared + kListOffset);
  int* counts = reinterpret_cast<int*>(shared + kCountsOffset);
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part_row = warp / kWarpsN * kWarpRows, part_column = warp % kWarpsN * kWarpColumns;
  // Lanes 8 i to 8 i + 7 address matrix i: rows 0 to 7, rows 8 to 15, then the same rows one chunk further.
  const uint32 a_lane = base + kAOffset + swizzled<kAChunks>(part_row + lane % 16, lane / 16);
  const uint32 b_lane = base + kBOffset + swizzled<kBChunks>(lane % 16, part_column / kCopy + lane / 16);
  unsigned char* strip = shared + kStagingOffset + warp * kMmaRows * kWarpColumns * sizeof(Element);
  const Loader loader(p, base);

  const Run run(p, blockIdx.x);
  const int first = load_index(p.a_crow_indices, p.a_index_words, run.block_row);
  const int end = load_index(p.a_crow_indices, p.a_index_words, run.block_row + 1);
  Meetings meetings = find_meetings(p, run, first + static_cast<int>(threadIdx.x), end);
  int searched = first;  // first block of the batch that was searched

#pragma unroll 1
  for (int tile = 0; tile < run.count; ++tile) {
    // A tile without products stores these zeros.
    float accumulators[kMmasM][2 * kPairsN][4];
#pragma unroll
    for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kPairsN; ++j) {
#pragma unroll
        for (int element = 0; element < 4; ++element) accumulators[i][j][element] = 0.0f;
      }
    }
#pragma unroll 1
    for (int batch = first; batch < end; batch += kThreads) {
      const int block = batch + static_cast<int>(threadIdx.x);
      if (batch != searched) {
        meetings = find_meetings(p, run, block, end);
        searched = batch;
      }
      const int products = list_products(meetings, tile, block, list, counts);
      multiply_list(accumulators, list, products, loader, a_lane, b_lane);
    }
    // The staging buffer overlaps the tiles, which are refilled only after all threads have waited for the next list.
    store_part(p, accumulators, strip, run.block_row * kBlock + part_row,
        (run.first + tile) * kBlock + part_column);
  }
}
