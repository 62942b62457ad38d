// Generated from specs/l4_bsr_spgemm_wmma.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/l4_bsr_spgemm_wmma.yaml
// spec: {"arch":"sm_89","block":{"cols":128,"rows":128},"copy":"cp_async","dtype":"fp16","mma":"wmma","op":"bsr_spgemm","schedule":"multistage","stages":2,"tile":{"k":32,"m":128,"n":128}}
// spec hash: 2e3d6c337a9db048db0f184a272b7542262e38f646154242c3bffb6c34350643
// seal: sha256 d2813cc0da95ba81603801650e5d229e1d75ec8d0cdafd7326fbb062759ca480

// BSR x BSR by WMMA: C = A B with A and B in block-sparse rows and C dense, row-major.
//
// Roles: a thread block computes the tiles of one run, one after the other. All its threads search and load; all warps
// compute. Warp w has kWarpRows rows and kWarpColumns columns of a tile: part (w / kWarpsN, w % kWarpsN).
//
// Search for matching blocks. For a run, each thread takes one block (i, k) of A's row and searches row k of B for the
// run's columns: a binary search for the first, then a scan of a few entries. It keeps one bit per tile. The threads
// that have a tile's bit list its products, in the order of A's blocks. Rows of A with more than kThreads blocks take
// several batches of kThreads, which are searched again for each tile.
//
// Pipeline of a list of products: a ring of kStages pairs of tiles, filled by cp.async kStages - 1 steps ahead.
//   cp_async_wait   this thread's copies for the step have landed
//   __syncthreads   so have all threads' copies, and all threads have finished with the stage that is filled next
//
// Symbols
//   tile     kBlock x kBlock of C
//   run      kRunTiles tiles of one block row side by side; runs are numbered along block rows
//   product  a block of A and the matching block of B: their indices, .x and .y
//   step     kTileK columns of the former, kTileK rows of the latter
//   a_tile   A of a step, kBlock x kTileK, rows padded to kAStride; b_tile: B of it, kTileK x kBlock, padded to
//            kBStride
//   strip    16 rows of a warp's part of C, staged as floats for the store

#include <cuda_fp16.h>
#include <mma.h>

using int64 = long long;
using uint32 = unsigned int;

constexpr int kBlock = 128;  // rows and columns of a stored block, and of a C tile
constexpr int kTileK = 32;  // depth of one step
constexpr int kRunTiles = 4;  // adjacent C tiles that share one search
constexpr int kStages = 2;  // depth of the ring of A and B tiles
constexpr int kThreads = 128;  // all load and compute
constexpr int kCopy = 8;  // elements of a chunk, one 16-byte copy
constexpr int kATile = 10240;  // bytes of an A tile
constexpr int kBTile = 8704;  // bytes of a B tile
constexpr int kAStride = 40;  // row stride of an A tile, in elements: 8 rows lie in distinct banks
constexpr int kBStride = 136;  // row stride of a B tile, in elements: 8 rows lie in distinct banks
constexpr int kStagingStride = 72;  // row stride of a strip, in floats
constexpr int kWarpsN = 2;  // warps along a row of C
constexpr int kWarpRows = 64;  // rows of C of one warp
constexpr int kWarpColumns = 64;  // columns of C of one warp

// Dynamic shared memory: 38912 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 20480 bytes: A tiles, 128 rows of 32 elements, padded
constexpr int kBOffset = 20480;  // 17408 bytes: B tiles, 32 rows of 128 elements, padded
constexpr int kListOffset = 37888;  // 1024 bytes: products of a tile: block of A, block of B
constexpr int kStagingOffset = 0;  // 18432 bytes: strips of C, one per warp; overlap the tiles
constexpr int kCountsOffset = 18432;  // 16 bytes: products found by each warp; overlaps the tiles after the staging

constexpr int kMma = 16;  // rows, columns and depth of one WMMA product
constexpr int kMmasM = kWarpRows / kMma;
constexpr int kMmasN = kWarpColumns / kMma;
constexpr int kProductSteps = kBlock / kTileK;

// Launch: 128 threads per block, 38912 bytes of dynamic shared memory.
// Grid: one thread block for a run of 4 tiles, 2 at a time on an SM.
struct Params {
  const __half* a;  // stored blocks of A (nnz, rows, cols), contiguous
  const __half* b;  // stored blocks of B (nnz, rows, cols), contiguous
  __half* c;  // C (M, N)
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

namespace wmma = nvcuda::wmma;
using Element = __half;
using FragmentA = wmma::fragment<wmma::matrix_a, kMma, kMma, kMma, Element, wmma::row_major>;
using FragmentB = wmma::fragment<wmma::matrix_b, kMma, kMma, kMma, Element, wmma::row_major>;
using Accumulator = wmma::fragment<wmma::accumulator, kMma, kMma, kMma, float>;

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

// Copies one step of a product to a stage.
__device__ __forceinline__ void load_step(const Params& p, uint32 base, int2 product, int step, int stage) {
  const Element* a = p.a + static_cast<int64>(product.x) * kBlock * kBlock + step * kTileK;
  const Element* b = p.b + (static_cast<int64>(product.y) * kBlock + step * kTileK) * kBlock;
  const uint32 a_to = base + kAOffset + stage * kATile, b_to = base + kBOffset + stage * kBTile;
#pragma unroll
  for (int i = threadIdx.x * kCopy; i < kBlock * kTileK; i += kThreads * kCopy) {
    const int row = i / kTileK, column = i % kTileK;
    cp_async_16(a_to + (row * kAStride + column) * sizeof(Element), a + row * kBlock + column, true);
  }
#pragma unroll
  for (int i = threadIdx.x * kCopy; i < kTileK * kBlock; i += kThreads * kCopy) {
    const int row = i / kBlock, column = i % kBlock;
    cp_async_16(b_to + (row * kBStride + column) * sizeof(Element), b + row * kBlock + column, true);
  }
}

// accumulators += A B for this warp's part of one step; a_tile and b_tile begin at its rows and columns.
__device__ __forceinline__ void multiply_step(Accumulator (&accumulators)[kMmasM][kMmasN], const Element* a_tile,
    const Element* b_tile) {
#pragma unroll
  for (int k = 0; k < kTileK; k += kMma) {
    FragmentA a[kMmasM];
#pragma unroll
    for (int i = 0; i < kMmasM; ++i) wmma::load_matrix_sync(a[i], a_tile + i * kMma * kAStride + k, kAStride);
#pragma unroll
    for (int j = 0; j < kMmasN; ++j) {
      FragmentB b;
      wmma::load_matrix_sync(b, b_tile + k * kBStride + j * kMma, kBStride);
#pragma unroll
      for (int i = 0; i < kMmasM; ++i) wmma::mma_sync(accumulators[i][j], a[i], b, accumulators[i][j]);
    }
  }
}

// accumulators += A B for this warp's part of a list of products. On return, all threads have finished with the list
// and the tiles.
__device__ __forceinline__ void multiply_list(const Params& p, Accumulator (&accumulators)[kMmasM][kMmasN],
    const int2* list, int products, uint32 base, const Element* a_tiles, const Element* b_tiles) {
  const int steps = products * kProductSteps;
  // Fill all stages but one. Every step commits one group, empty after the last step, so one wait count fits all
  // steps.
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < steps) load_step(p, base, list[stage / kProductSteps], stage % kProductSteps, stage);
    cp_async_commit();
  }
  int stage = 0, free_stage = kStages - 1;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    // Wait for this step's tiles, then refill the stage of the previous step.
    cp_async_wait<kStages - 2>();  // of kStages - 1 + step groups, the newest belong to later steps
    __syncthreads();
    const int ahead = step + kStages - 1;
    if (ahead < steps) load_step(p, base, list[ahead / kProductSteps], ahead % kProductSteps, free_stage);
    cp_async_commit();
    multiply_step(accumulators, a_tiles + stage * kATile / sizeof(Element), b_tiles + stage * kBTile / sizeof(Element));
    free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  __syncthreads();
}

// Stores a warp's part of C, strip by strip: the layout of an accumulator is unspecified, that of `strip` is not.
__device__ __forceinline__ void store_part(const Params& p, Accumulator (&accumulators)[kMmasM][kMmasN], float* strip,
    int first_row, int first_column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmasN; ++j) {
      wmma::store_matrix_sync(strip + j * kMma, accumulators[i][j], kStagingStride, wmma::mem_row_major);
    }
    __syncwarp();
#pragma unroll
    for (int chunk = lane; chunk < kMma * kWarpColumns / kCopy; chunk += 32) {
      const int row = chunk * kCopy / kWarpColumns, column = chunk * kCopy % kWarpColumns;
      const float4* from = reinterpret_cast<const float4*>(strip + row * kStagingStride + column);
      const float4 low = from[0], high = from[1];
      Element* to = p.c + (first_row + i * kMma + row) * p.c_row_stride + first_column + column;
      *reinterpret_cast<uint4*>(to) =
          make_uint4(pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y), pack(high.z, high.w));
    }
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    l4_bsr_spgemm_wmma(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  int2* list = reinterpret_cast<int2*>(shared + kListOffset);
  int* counts = reinterpret_cast<int*>(shared + kCountsOffset);
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const int warp = threadIdx.x / 32;
  const int part_row = warp / kWarpsN * kWarpRows, part_column = warp % kWarpsN * kWarpColumns;
  const Element* a_tiles = reinterpret_cast<const Element*>(shared + kAOffset) + part_row * kAStride;
  const Element* b_tiles = reinterpret_cast<const Element*>(shared + kBOffset) + part_column;
  float* strip = reinterpret_cast<float*>(shared + kStagingOffset) + warp * kMma * kStagingStride;

  const Run run(p, blockIdx.x);
  const int first = load_index(p.a_crow_indices, p.a_index_words, run.block_row);
  const int end = load_index(p.a_crow_indices, p.a_index_words, run.block_row + 1);
  Meetings meetings = find_meetings(p, run, first + static_cast<int>(threadIdx.x), end);
  int searched = first;  // first block of the batch that was searched

#pragma unroll 1
  for (int tile = 0; tile < run.count; ++tile) {
    // A tile without products stores these zeros.
    Accumulator accumulators[kMmasM][kMmasN];
#pragma unroll
    for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmasN; ++j) wmma::fill_fragment(accumulators[i][j], 0.0f);
    }
#pragma unroll 1
    for (int batch = first; batch < end; batch += kThreads) {
      const int block = batch + static_cast<int>(threadIdx.x);
      if (batch != searched) {
        meetings = find_meetings(p, run, block, end);
        searched = batch;
      }
      const int products = list_products(meetings, tile, block, list, counts);
      multiply_list(p, accumulators, list, products, base, a_tiles, b_tiles);
    }
    // The staging buffer overlaps the tiles, which are refilled only after all threads have waited for the next list.
    store_part(p, accumulators, strip, run.block_row * kBlock + part_row,
        (run.first + tile) * kBlock + part_column);
  }
}
