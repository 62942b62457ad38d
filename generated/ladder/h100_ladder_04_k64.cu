// Generated from specs/ladder/h100_ladder_04_k64.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/ladder/h100_ladder_04_k64.yaml
// spec: {"arch":"sm_90a","block":{"cols":128,"rows":256},"copy":"cp_async","dtype":"fp16","mma":"wmma","op":"bsr_spmm","schedule":"multistage","stages":3,"tile":{"k":64,"m":256,"n":128}}
// spec hash: 32b20c2831725d30bbf1b2a64279b3e11e579c6823231ccaef5372373f238104
// seal: sha256 a65a1b84880f2fd41cb6fac47475fe0de94c024666b33991baed76e4ba72164d

// BSR x dense by WMMA: C = A B with A in block-sparse rows and B, C dense and row-major.
//
// Roles: a thread block computes one tile of C. All warps load, all warps compute.
// Warp w has kWarpRows rows and kWarpColumns columns of the tile: part (w / kWarpsN, w % kWarpsN).
//
// Symbols
//   tile     kTileM x kTileN of C: one block row, kTileN columns. Tiles are numbered block rows first, so that
//            concurrent
//            thread blocks share columns of B, which then come from the L2
//   step     kTileK columns of one block of A, kTileK rows of B
//   a_tile   A of a step, kTileM rows of kTileK elements, with a row stride of kAStride
//   b_tile   B of a step, kTileK rows of kTileN elements, with a stride of kBStride
//   strip    16 rows of a warp's part of C, staged as floats for the store

#include <cuda_fp16.h>
#include <mma.h>

using int64 = long long;
using uint32 = unsigned int;

constexpr int kTileM = 256;  // rows of a C tile: one block row
constexpr int kTileN = 128;  // columns of a C tile
constexpr int kTileK = 64;  // depth of one step
constexpr int kBlockCols = 128;  // columns of a stored block of A
constexpr int kThreads = 256;  // all load and compute
constexpr int kCopy = 8;  // elements of a 16-byte copy
constexpr int kACopies = 8;  // copies per thread for an A tile
constexpr int kBCopies = 4;  // copies per thread for a B tile
constexpr int kAStride = 72;  // row stride of an A tile, in elements, with padding
constexpr int kBStride = 136;  // row stride of a B tile, in elements, with padding
constexpr int kWarpsN = 2;  // warps along a row of C
constexpr int kWarpRows = 64;  // rows of C of one warp
constexpr int kWarpColumns = 64;  // columns of C of one warp
constexpr int kStagingStride = 72;  // row stride of the staging buffer, in floats, with padding
constexpr int kStages = 3;  // depth of the ring of A and B tiles
constexpr int kATile = 18432;  // elements of an A tile, padding included
constexpr int kBTile = 8704;  // elements of a B tile, padding included

// Dynamic shared memory: 162816 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 110592 bytes: A tiles, 256 rows of 72 elements
constexpr int kBOffset = 110592;  // 52224 bytes: B tiles, 64 rows of 136 elements
constexpr int kStagingOffset = 0;  // 36864 bytes: float strips of C, one per warp, overlapping the tiles

constexpr int kMma = 16;  // rows, columns and depth of one WMMA product
constexpr int kMmasM = kWarpRows / kMma;
constexpr int kMmasN = kWarpColumns / kMma;

// Launch: 256 threads per block, 162816 bytes of dynamic shared memory.
// Grid: one thread block per tile, block rows fastest.
struct Params {
  const __half* a;  // stored blocks of A (nnz, rows, cols), contiguous
  const __half* b;  // B (K, N)
  __half* c;  // C (M, N)
  int64 b_row_stride;  // row stride of B, in elements
  int64 c_row_stride;  // row stride of C, in elements
  const int* crow_indices;  // row offsets: first block of each block row, then the end of the last
  const int* col_indices;  // block column of each stored block
  int index_words;  // 32-bit words per index, 1 or 2; the kernel reads the low word
  int block_columns;  // block columns of A, block rows of B
  int block_rows;  // block rows of A
  int n;  // columns of B and C; rows of C are padded to a multiple of 8
  int tiles;  // block_rows * tiles per block row: the grid size
};

namespace wmma = nvcuda::wmma;
using Element = __half;
using FragmentA = wmma::fragment<wmma::matrix_a, kMma, kMma, kMma, Element, wmma::row_major>;
using FragmentB = wmma::fragment<wmma::matrix_b, kMma, kMma, kMma, Element, wmma::row_major>;
using Accumulator = wmma::fragment<wmma::accumulator, kMma, kMma, kMma, float>;

// cvt.rn.f16x2.f32: converts two floats to a pair of fp16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

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

// Copies 16 bytes to shared memory; zeros unless `valid`.
__device__ __forceinline__ void copy_16(Element* to, const Element* from, bool valid) {
  cp_async_16(static_cast<uint32>(__cvta_generic_to_shared(to)), from, valid);
}

// Copies the A tile and the B tile of one step to shared memory. Elements outside B are zero-filled, even for a block
// column out of range.
__device__ __forceinline__ void load_step(const Params& p, const Step& step, int first_column, Element* a_tile,
    Element* b_tile) {
  const Element* a = p.a + static_cast<int64>(step.block) * kTileM * kBlockCols + step.k;
  const Element* b = p.b + (static_cast<int64>(step.column) * kBlockCols + step.k) * p.b_row_stride + first_column;
  const bool in_range = static_cast<uint32>(step.column) < static_cast<uint32>(p.block_columns);
#pragma unroll
  for (int copy = 0; copy < kACopies; ++copy) {
    const int i = (copy * kThreads + threadIdx.x) * kCopy;
    const int row = i / kTileK, column = i % kTileK;
    copy_16(a_tile + row * kAStride + column, a + row * kBlockCols + column, true);
  }
#pragma unroll
  for (int copy = 0; copy < kBCopies; ++copy) {
    const int i = (copy * kThreads + threadIdx.x) * kCopy;
    const int row = i / kTileN, column = i % kTileN;
    const bool valid = in_range && first_column + column < p.n;
    copy_16(b_tile + row * kBStride + column, b + row * p.b_row_stride + column, valid);
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
      if (first_column + column < p.n) {
        Element* to = p.c + static_cast<int64>(first_row + i * kMma + row) * p.c_row_stride + first_column + column;
        *reinterpret_cast<uint4*>(to) =
            make_uint4(pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y), pack(high.z, high.w));
      }
    }
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    h100_ladder_04_k64(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Element* a_tiles = reinterpret_cast<Element*>(shared + kAOffset);
  Element* b_tiles = reinterpret_cast<Element*>(shared + kBOffset);
  const int warp = threadIdx.x / 32;
  const int part_row = warp / kWarpsN * kWarpRows, part_column = warp % kWarpsN * kWarpColumns;
  const int b_part = part_column;  // start of this warp's columns in a B tile
  const int row = blockIdx.x % p.block_rows, first_column = blockIdx.x / p.block_rows * kTileN;

  // An empty block row has no steps: it stores these zeros.
  Accumulator accumulators[kMmasM][kMmasN];
#pragma unroll
  for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmasN; ++j) wmma::fill_fragment(accumulators[i][j], 0.0f);
  }
  Step next(p, row);
  const int steps = (next.end - next.block) * (kBlockCols / kTileK);

  // Pipeline: a ring of kStages pairs of tiles, filled by cp.async kStages - 1 steps ahead.
  //   cp_async_wait   this thread's copies for the step have landed
  //   __syncthreads   so have all threads' copies, and all threads have finished with the stage that is filled next
  // Fill all stages but one. Every step commits one group, empty after the last step, so one wait count fits all
  // steps.
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < steps) load_step(p, next, first_column, a_tiles + stage * kATile, b_tiles + stage * kBTile);
    next.advance(p);
    cp_async_commit();
  }
  int stage = 0, free_stage = kStages - 1;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    // Wait for this step's tiles, then refill the stage of the previous step.
    cp_async_wait<kStages - 2>();  // of kStages - 1 + step groups, the newest belong to later steps
    __syncthreads();
    if (step + kStages - 1 < steps) {
      load_step(p, next, first_column, a_tiles + free_stage * kATile, b_tiles + free_stage * kBTile);
    }
    next.advance(p);
    cp_async_commit();
    multiply_step(accumulators, a_tiles + stage * kATile + part_row * kAStride,
        b_tiles + stage * kBTile + b_part);
    free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  __syncthreads();

  // The staging buffer overlaps the tiles, which all threads have finished with.
  float* strip = reinterpret_cast<float*>(shared + kStagingOffset) + warp * kMma * kStagingStride;
  store_part(p, accumulators, strip, row * kTileM + part_row, first_column + part_column);
}
