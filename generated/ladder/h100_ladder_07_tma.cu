// Generated from specs/ladder/h100_ladder_07_tma.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/ladder/h100_ladder_07_tma.yaml
// spec: {"arch":"sm_90a","block":{"cols":128,"rows":256},"copy":"tma","dtype":"fp16","mma":"wmma","op":"bsr_spmm","schedule":"multistage","stages":3,"tile":{"k":64,"m":256,"n":128}}
// spec hash: 0f9a6ddef3413adf10f63008d35c176358c8e8fe73ca5b306274e1890b9a264e
// seal: sha256 a73023285e9d159f1505e4904638edbec1753b93d2c1f86587f22f6b3d3b44ec

// BSR x dense by WMMA: C = A B with A in block-sparse rows and B, C dense and row-major.
//
// Roles: a thread block computes one tile of C. The first thread issues the TMA loads, all warps compute.
// Warp w has kWarpRows rows and kWarpColumns columns of the tile: part (w / kWarpsN, w % kWarpsN).
//
// Symbols
//   tile     kTileM x kTileN of C: one block row, kTileN columns. Tiles are numbered block rows first, so that
//            concurrent
//            thread blocks share columns of B, which then come from the L2
//   step     kTileK columns of one block of A, kTileK rows of B
//   a_tile   A of a step, kTileM rows of kTileK elements, with a row stride of kAStride
//   b_tile   B of a step, kTileK rows of kTileN elements, with a stride of kBStride
//            The copy engine cannot pad, so it reads longer rows of both than needed; the surplus is ignored
//   strip    16 rows of a warp's part of C, staged as floats for the store

#include <cuda_fp16.h>
#include <mma.h>

using int64 = long long;
using uint32 = unsigned int;

// Stands for CUtensorMap: 128 opaque bytes (PTX ISA, "Tensor-Map"), 64-byte aligned (driver API,
// cuTensorMapEncodeTiled). The comments of parameters of this type give the dimensions, innermost first, the box of one
// copy, and the bytes of the swizzle.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

constexpr int kTileM = 256;  // rows of a C tile: one block row
constexpr int kTileN = 128;  // columns of a C tile
constexpr int kTileK = 64;  // depth of one step
constexpr int kBlockCols = 128;  // columns of a stored block of A
constexpr int kThreads = 256;  // all load and compute
constexpr int kCopy = 8;  // elements of a 16-byte copy
constexpr int kAStride = 72;  // row stride of an A tile, in elements, with padding
constexpr int kBStride = 136;  // row stride of a B tile, in elements, with padding
constexpr int kWarpsN = 2;  // warps along a row of C
constexpr int kWarpRows = 64;  // rows of C of one warp
constexpr int kWarpColumns = 64;  // columns of C of one warp
constexpr int kStagingStride = 72;  // row stride of the staging buffer, in floats, with padding
constexpr int kStages = 3;  // depth of the ring of A and B tiles
constexpr int kATile = 18432;  // elements of an A tile, padding included
constexpr int kBTile = 8704;  // elements of a B tile, padding included

// Dynamic shared memory: 162840 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 110592 bytes: A tiles, 256 rows of 72 elements
constexpr int kBOffset = 110592;  // 52224 bytes: B tiles, 64 rows of 136 elements
constexpr int kFullOffset = 162816;  // 24 bytes: mbarriers: the tiles of a stage have arrived
constexpr int kStagingOffset = 0;  // 36864 bytes: float strips of C, one per warp, overlapping the tiles

constexpr int kMma = 16;  // rows, columns and depth of one WMMA product
constexpr int kMmasM = kWarpRows / kMma;
constexpr int kMmasN = kWarpColumns / kMma;

// Launch: 256 threads per block, 162840 bytes of dynamic shared memory.
// Grid: one thread block per tile, block rows fastest.
struct Params {
  TensorMap a_map;  // stored blocks of A (cols, rows, nnz): box 72 x 256 x 1, swizzle 0
  TensorMap b_map;  // B (N, K): box 136 x 64, swizzle 0
  __half* c;  // C (M, N)
  int64 c_row_stride;  // row stride of C, in elements
  const int* crow_indices;  // row offsets: first block of each block row, then the end of the last
  const int* col_indices;  // block column of each stored block
  int index_words;  // 32-bit words per index, 1 or 2; the kernel reads the low word
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

// mbarrier.init: sets the number of arrivals that complete a phase (PTX ISA, "mbarrier.init")
__device__ __forceinline__ void mbarrier_init(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: orders this thread's mbarrier.init before its later operations (PTX ISA, "membar / fence")
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive.expect_tx: one arrival; the phase also needs `bytes` bytes from the copy engine to complete. They may
// come earlier: the phase does not complete without the arrival (PTX ISA, "mbarrier.arrive")
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// mbarrier.try_wait.parity: waits until the phase of this parity has completed (PTX ISA, "mbarrier.try_wait")
__device__ __forceinline__ void mbarrier_wait(uint32 barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// prefetch.tensormap: prefetches a descriptor (PTX ISA, "prefetch")
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp.async.bulk.tensor.2d: copies the tensor box at (c0, ...) to shared memory, counted by an mbarrier. Elements
// outside the tensor, even before its first element, are zero-filled and counted (PTX ISA, "cp.async.bulk.tensor")
__device__ __forceinline__ void tma_load_2d(
    uint32 to, const TensorMap* map, uint32 barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1) : "memory");
}

// cp.async.bulk.tensor.3d: copies the tensor box at (c0, ...) to shared memory, counted by an mbarrier. Elements
// outside the tensor, even before its first element, are zero-filled and counted (PTX ISA, "cp.async.bulk.tensor")
__device__ __forceinline__ void tma_load_3d(
    uint32 to, const TensorMap* map, uint32 barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// Issues the loads of the A tile and the B tile of one step. Elements outside B are zero-filled, even for a block
// column out of range.
__device__ __forceinline__ void load_step(const Params& p, const Step& step, int first_column, uint32 base,
    int stage) {
  const uint32 full = base + kFullOffset + 8 * stage;
  mbarrier_arrive_expect_tx(full, (kATile + kBTile) * sizeof(Element));
  tma_load_3d(base + kAOffset + stage * kATile * sizeof(Element), &p.a_map, full, step.k, 0, step.block);
  const int b_row = step.column * kBlockCols + step.k;
  tma_load_2d(base + kBOffset + stage * kBTile * sizeof(Element), &p.b_map, full, first_column, b_row);
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
    h100_ladder_07_tma(const __grid_constant__ Params p) {
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

  // Pipeline: a ring of kStages pairs of tiles, filled by TMA kStages - 1 steps ahead.
  //   full[i]         stage i holds the A tile and the B tile of one step
  //   __syncthreads   all threads have finished with the stage that is filled next
  // The first thread initializes the barriers, then fills all stages but one.
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const bool leader = threadIdx.x == 0;
  if (leader) {
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(base + kFullOffset + 8 * stage, 1);
    fence_mbarrier_init();
    prefetch_tensormap(&p.a_map);
    prefetch_tensormap(&p.b_map);
  }
  __syncthreads();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (leader && stage < steps) load_step(p, next, first_column, base, stage);
    next.advance(p);
  }
  int stage = 0, free_stage = kStages - 1, parity = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    // Wait for this step's tiles and for all threads, then refill the stage of the previous step.
    mbarrier_wait(base + kFullOffset + 8 * stage, parity);
    __syncthreads();
    if (leader && step + kStages - 1 < steps) load_step(p, next, first_column, base, free_stage);
    next.advance(p);
    multiply_step(accumulators, a_tiles + stage * kATile + part_row * kAStride,
        b_tiles + stage * kBTile + b_part);
    free_stage = stage;
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __syncthreads();

  // The staging buffer overlaps the tiles, which all threads have finished with.
  float* strip = reinterpret_cast<float*>(shared + kStagingOffset) + warp * kMma * kStagingStride;
  store_part(p, accumulators, strip, row * kTileM + part_row, first_column + part_column);
}
