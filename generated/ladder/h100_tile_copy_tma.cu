// Generated from specs/ladder/h100_tile_copy_tma.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/ladder/h100_tile_copy_tma.yaml
// spec: {"arch":"sm_90a","copy":"tma","dtype":"fp16","mma":"none","op":"tile_copy","schedule":"multistage","stages":3,"tile":{"m":64,"n":128}}
// spec hash: e0a288e4bd9aa5d41e64c92709afd5e2e6d9c7323f24a5515ae48ae8231594e3
// seal: sha256 218c2464e29d243013844538bcf4dde09eacf3824ed44cdb0bfe2cf63858e702

// Tile copy: out = in, tile by tile through shared memory. It measures one way of loading tiles, and proves the
// contents of shared memory: each warp stores data that another warp, or the copy engine, wrote there.
//
// Roles: a thread block takes every gridDim.x-th tile. Its first thread issues the TMA loads; all threads store.
//
// Pipeline: a ring of kStages tiles, filled by TMA kStages - 1 tiles ahead.
//   full[i]         the tile of stage i has landed
//   __syncthreads   all threads have read the stage that is filled next
//
// Symbols
//   tile   kTileM x kTileN elements. Tiles are numbered from left to right, then downwards
//   chunk  16 bytes, kCopy elements, which one thread moves at a time

using int64 = long long;
using uint32 = unsigned int;

// Stands for CUtensorMap: 128 opaque bytes (PTX ISA, "Tensor-Map"), 64-byte aligned (driver API,
// cuTensorMapEncodeTiled). The comments of parameters of this type give the dimensions, innermost first, the box of one
// copy, and the bytes of the swizzle.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

constexpr int kTileM = 64;  // rows of a tile
constexpr int kTileN = 128;  // columns of a tile
constexpr int kStages = 3;  // depth of the ring of tiles
constexpr int kThreads = 256;  // threads per block
constexpr int kCopy = 8;  // elements of a chunk
constexpr int kRowChunks = 16;  // chunks of a row of a tile
constexpr int kCopies = 4;  // chunks per thread and tile
constexpr int kTileBytes = 16384;  // bytes of a tile

// Dynamic shared memory: 49176 bytes. Byte offsets:
constexpr int kTilesOffset = 0;  // 49152 bytes: tiles, 64 rows of 128 elements
constexpr int kFullOffset = 49152;  // 24 bytes: mbarriers: the tile of a stage has arrived

// Launch: 256 threads per block, 49176 bytes of dynamic shared memory.
// Grid: 4 thread blocks on an SM, looping over tiles (persistent).
struct Params {
  TensorMap in_map;  // in (columns, rows): box 128 x 64, swizzle 0
  unsigned short* out;  // out (rows, columns)
  int64 out_row_stride;  // row stride of out, in elements
  int rows;  // rows of in and out
  int columns;  // columns of in and out, a multiple of 8
  int column_tiles;  // column tiles
  int tiles;  // all tiles
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

// Position of a tile in the matrix.
struct Place {
  int row, column;

  __device__ __forceinline__ Place(const Params& p, int tile)
      : row(tile / p.column_tiles * kTileM), column(tile % p.column_tiles * kTileN) {}
};

// Issues the load of a tile. Elements outside the matrix are zero-filled.
__device__ __forceinline__ void load_tile(const Params& p, int tile, uint32 base, int stage) {
  const Place place(p, tile);
  const uint32 full = base + kFullOffset + 8 * stage;
  mbarrier_arrive_expect_tx(full, kTileBytes);
  tma_load_2d(base + kTilesOffset + stage * kTileBytes, &p.in_map, full, place.column, place.row);
}

// Stores the part of a tile inside the matrix, 16 bytes per thread.
__device__ __forceinline__ void store_tile(const Params& p, int tile, const unsigned char* from) {
  const Place place(p, tile);
#pragma unroll
  for (int copy = 0; copy < kCopies; ++copy) {
    const int i = copy * kThreads + (threadIdx.x + 32) % kThreads;
    const int row = place.row + i / kRowChunks, column = place.column + i % kRowChunks * kCopy;
    const uint4 chunk = *reinterpret_cast<const uint4*>(from + i * 16);
    if (row < p.rows && column < p.columns) {
      *reinterpret_cast<uint4*>(p.out + row * p.out_row_stride + column) = chunk;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    h100_tile_copy_tma(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* tiles = shared + kTilesOffset;
  // The first thread initializes the barriers, then fills all stages but one.
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const bool leader = threadIdx.x == 0;
  int next = blockIdx.x;
  if (leader) {
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(base + kFullOffset + 8 * stage, 1);
    fence_mbarrier_init();
    prefetch_tensormap(&p.in_map);
  }
  __syncthreads();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (leader && next < p.tiles) load_tile(p, next, base, stage);
    next += gridDim.x;
  }
  int stage = 0, free_stage = kStages - 1, parity = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    // Wait for this tile and for all threads, then refill the stage of the previous tile.
    mbarrier_wait(base + kFullOffset + 8 * stage, parity);
    __syncthreads();
    if (leader && next < p.tiles) load_tile(p, next, base, free_stage);
    next += gridDim.x;
    store_tile(p, tile, tiles + stage * kTileBytes);
    free_stage = stage;
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}
