// Generated from specs/l4_bsr_sddmm_wmma.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/l4_bsr_sddmm_wmma.yaml
// spec: {"arch":"sm_89","block":{"cols":128,"rows":128},"copy":"cp_async","dtype":"fp16","mma":"wmma","op":"bsr_sddmm","schedule":"multistage","stages":2,"tile":{"k":32,"m":128,"n":128}}
// spec hash: 6c1d7dc747408cf93ff74ae36b96e7a92d78ac2e942b599666afffdc6892bb1c
// seal: sha256 a7c96e025323a2c997e5ec82d774d624ad7fdb82239f001b4f6fb5de6cffc3bd

// Sampled product by WMMA: the stored blocks of C = A B^T, with C in block-sparse rows and A, B dense and row-major.
//
// Roles: a thread block computes one tile; all warps load and all compute. Warp w has kWarpRows rows and kWarpColumns
// columns of the tile: part (w / kWarpsN, w % kWarpsN).
//
// Pipeline of a unit: a ring of kStages pairs of tiles, filled by cp.async kStages - 1 steps ahead.
//   cp_async_wait   this thread's copies for the step have landed
//   __syncthreads   so have all threads' copies, and all threads have finished with the stage that is filled next
//
// Symbols
//   tile     kTileBlocks consecutive stored blocks of C, side by side: kTileM x kTileN. Tiles are numbered in storage
//            order, so that concurrent thread blocks share block rows of A and of B
//   unit     the blocks of a tile that lie in one block row: they share the A tile. Most tiles are one unit; a tile in
//            which a block row ends has several, one after the other. Missing blocks of a unit are zeros
//   step     kTileK columns of A and B
//   a_tile   A of a step, kTileM x kTileK; b_tile: B of it, kTileN x kTileK. Rows of both are padded to kAStride,
//            kBStride
//   strip    16 rows of a warp's part of a unit, staged as floats for the store

#include <cuda_fp16.h>
#include <mma.h>

using int64 = long long;
using uint32 = unsigned int;

constexpr int kTileM = 128;  // rows of a tile: those of a stored block of C
constexpr int kTileN = 128;  // columns of a tile
constexpr int kTileK = 32;  // depth of one step
constexpr int kBlockCols = 128;  // columns of a stored block of C
constexpr int kTileBlocks = 1;  // most stored blocks per tile
constexpr int kRowChunks = 4;  // chunks of a row of an A or B tile
constexpr int kPassRows = 32;  // rows of a tile that all threads copy at a time, a chunk each
constexpr int kStages = 2;  // depth of the ring of A and B tiles
constexpr int kThreads = 128;  // all load and compute
constexpr int kCopy = 8;  // elements of a chunk, one 16-byte copy
constexpr int kATile = 10240;  // bytes of an A tile
constexpr int kBTile = 10240;  // bytes of a B tile
constexpr int kAStride = 40;  // row stride of an A tile, in elements: 8 rows lie in distinct banks
constexpr int kBStride = 40;  // row stride of a B tile, in elements: 8 rows lie in distinct banks
constexpr int kStagingStride = 72;  // row stride of a strip, in floats
constexpr int kWarpsN = 2;  // warps along a row of C
constexpr int kWarpRows = 64;  // rows of C of one warp
constexpr int kWarpColumns = 64;  // columns of C of one warp

// Dynamic shared memory: 41472 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 20480 bytes: A tiles, 128 rows of 32 elements, padded
constexpr int kBOffset = 20480;  // 20480 bytes: B tiles, 128 rows of 32 elements, padded
constexpr int kBRowsOffset = 40960;  // 512 bytes: rows of B that a unit needs
constexpr int kStagingOffset = 0;  // 18432 bytes: strips of C, one per warp; overlap the tiles

constexpr int kMma = 16;  // rows, columns and depth of one WMMA product
constexpr int kMmasM = kWarpRows / kMma;
constexpr int kMmasN = kWarpColumns / kMma;

// Launch: 128 threads per block, 41472 bytes of dynamic shared memory.
// Grid: one thread block per tile, 2 at a time on an SM, in the order of storage.
struct Params {
  const __half* a;  // A (M, K)
  const __half* b;  // B (N, K)
  __half* c;  // stored blocks of C (nnz, rows, cols), contiguous
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

namespace wmma = nvcuda::wmma;
using Element = __half;
using FragmentA = wmma::fragment<wmma::matrix_a, kMma, kMma, kMma, Element, wmma::row_major>;
using FragmentB = wmma::fragment<wmma::matrix_b, kMma, kMma, kMma, Element, wmma::col_major>;
using Accumulator = wmma::fragment<wmma::accumulator, kMma, kMma, kMma, float>;

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

// Copies the A and the B tile of one step to a stage: one chunk of every kPassRows-th row. Elements past the last
// column of A and B are zero-filled, and so are out-of-range rows of B.
__device__ __forceinline__ void load_step(const Params& p, uint32 base, int block_row, const int* b_rows, int step,
    int stage) {
  const int first = threadIdx.x / kRowChunks, column = threadIdx.x % kRowChunks * kCopy;
  const int k = step * kTileK + column;
  const int bytes = max(min(p.k - k, kCopy), 0) * static_cast<int>(sizeof(Element));
  const uint32 a_to = base + kAOffset + stage * kATile, b_to = base + kBOffset + stage * kBTile;
  const Element* a = p.a + static_cast<int64>(block_row) * kTileM * p.a_row_stride + k;
#pragma unroll
  for (int row = first; row < kTileM; row += kPassRows) {
    cp_async_16_part(a_to + (row * kAStride + column) * sizeof(Element), a + row * p.a_row_stride, bytes);
  }
#pragma unroll
  for (int row = first; row < kTileN; row += kPassRows) {
    const int b_row = b_rows[row];
    const Element* b = p.b + max(b_row, 0) * p.b_row_stride + k;
    cp_async_16_part(b_to + (row * kBStride + column) * sizeof(Element), b, b_row < 0 ? 0 : bytes);
  }
}

// accumulators += A B^T for this warp's part of one step; a_tile and b_tile begin at its rows and columns.
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
      wmma::load_matrix_sync(b, b_tile + j * kMma * kBStride + k, kBStride);
#pragma unroll
      for (int i = 0; i < kMmasM; ++i) wmma::mma_sync(accumulators[i][j], a[i], b, accumulators[i][j]);
    }
  }
}

// Stores a warp's part of a unit of `count` blocks, strip by strip: the layout of an accumulator is unspecified, that
// of `strip` is not.
__device__ __forceinline__ void store_part(const Params& p, Accumulator (&accumulators)[kMmasM][kMmasN], float* strip,
    int block, int count, int first_row, int first_column) {
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
      const int row = chunk * kCopy / kWarpColumns, in_part = chunk * kCopy % kWarpColumns;
      const float4* from = reinterpret_cast<const float4*>(strip + row * kStagingStride + in_part);
      const float4 low = from[0], high = from[1];
      const int column = first_column + in_part;
      if (column / kBlockCols < count) {
        const int64 c_row = static_cast<int64>(block + column / kBlockCols) * kTileM + first_row + i * kMma + row;
        Element* to = p.c + c_row * kBlockCols + column % kBlockCols;
        *reinterpret_cast<uint4*>(to) =
            make_uint4(pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y), pack(high.z, high.w));
      }
    }
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    l4_bsr_sddmm_wmma(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  int* b_rows = reinterpret_cast<int*>(shared + kBRowsOffset);
  const int warp = threadIdx.x / 32;
  const int part_row = warp / kWarpsN * kWarpRows, part_column = warp % kWarpsN * kWarpColumns;
  const Element* a_tiles = reinterpret_cast<const Element*>(shared + kAOffset) + part_row * kAStride;
  const Element* b_tiles = reinterpret_cast<const Element*>(shared + kBOffset) + part_column * kBStride;
  const int end = min((static_cast<int>(blockIdx.x) + 1) * kTileBlocks, p.blocks);

  int block_row = 0;
#pragma unroll 1
  for (int block = blockIdx.x * kTileBlocks; block < end;) {
    block_row = find_row(p, block, block_row);
    // At least one block, even if crow_indices is invalid: the loop must terminate.
    const int count = max(min(load_index(p.crow_indices, p.index_words, block_row + 1), end) - block, 1);
    find_b_rows(p, block, count, b_rows);
    Accumulator accumulators[kMmasM][kMmasN];
#pragma unroll
    for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmasN; ++j) wmma::fill_fragment(accumulators[i][j], 0.0f);
    }

    // Fill all stages but one. Every step commits one group, empty after the last step, so one wait count fits all
    // steps.
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      if (stage < p.steps) load_step(p, base, block_row, b_rows, stage, stage);
      cp_async_commit();
    }
    int stage = 0, free_stage = kStages - 1;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      // Wait for this step's tiles, then refill the stage of the previous step.
      cp_async_wait<kStages - 2>();  // of kStages - 1 + step groups, the newest belong to later steps
      __syncthreads();
      const int ahead = step + kStages - 1;
      if (ahead < p.steps) load_step(p, base, block_row, b_rows, ahead, free_stage);
      cp_async_commit();
        multiply_step(accumulators, a_tiles + stage * kATile / sizeof(Element),
          b_tiles + stage * kBTile / sizeof(Element));
      free_stage = stage;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    // The staging buffer overlaps the tiles: all threads must finish with one before the other is written.
    __syncthreads();
    float* strip = reinterpret_cast<float*>(shared + kStagingOffset) + warp * kMma * kStagingStride;
    store_part(p, accumulators, strip, block, count, part_row, part_column);
    __syncthreads();
    block += count;
  }
}
