// Generated from specs/ladder/l4_tile_copy_cp_async.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/ladder/l4_tile_copy_cp_async.yaml
// spec: {"arch":"sm_89","copy":"cp_async","dtype":"fp16","mma":"none","op":"tile_copy","schedule":"multistage","stages":3,"tile":{"m":64,"n":128}}
// spec hash: fcc51137fc7e0ed6eec7fdad94845a1ed96a3070f0f026a899186cdbd9220207
// seal: sha256 0a8029405c92a71c768234406f643b2c0ceba1fd37a7724e684f55e713445a0f

// Tile copy: out = in, tile by tile through shared memory. It measures one way of loading tiles, and proves the
// contents of shared memory: each warp stores data that another warp, or the copy engine, wrote there.
//
// Roles: a thread block takes every gridDim.x-th tile. All threads load, and all threads store.
//
// Pipeline: a ring of kStages tiles, filled by cp.async kStages - 1 tiles ahead.
//   cp_async_wait   this thread's copies of the tile have landed
//   __syncthreads   so have all threads' copies, and all threads have read the stage that is filled next
//
// Symbols
//   tile   kTileM x kTileN elements. Tiles are numbered from left to right, then downwards
//   chunk  16 bytes, kCopy elements, which one thread moves at a time

using int64 = long long;
using uint32 = unsigned int;

constexpr int kTileM = 64;  // rows of a tile
constexpr int kTileN = 128;  // columns of a tile
constexpr int kStages = 3;  // depth of the ring of tiles
constexpr int kThreads = 256;  // threads per block
constexpr int kCopy = 8;  // elements of a chunk
constexpr int kRowChunks = 16;  // chunks of a row of a tile
constexpr int kCopies = 4;  // chunks per thread and tile
constexpr int kTileBytes = 16384;  // bytes of a tile

// Dynamic shared memory: 49152 bytes. Byte offsets:
constexpr int kTilesOffset = 0;  // 49152 bytes: tiles, 64 rows of 128 elements

// Launch: 256 threads per block, 49152 bytes of dynamic shared memory.
// Grid: 2 thread blocks on an SM, looping over tiles (persistent).
struct Params {
  const unsigned short* in;  // in (rows, columns)
  int64 in_row_stride;  // row stride of in, in elements
  unsigned short* out;  // out (rows, columns)
  int64 out_row_stride;  // row stride of out, in elements
  int rows;  // rows of in and out
  int columns;  // columns of in and out, a multiple of 8
  int column_tiles;  // column tiles
  int tiles;  // all tiles
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

// Position of a tile in the matrix.
struct Place {
  int row, column;

  __device__ __forceinline__ Place(const Params& p, int tile)
      : row(tile / p.column_tiles * kTileM), column(tile % p.column_tiles * kTileN) {}
};

// Copies a tile to shared memory. Elements outside the matrix are zero-filled.
__device__ __forceinline__ void load_tile(const Params& p, int tile, unsigned char* to) {
  const Place place(p, tile);
#pragma unroll
  for (int copy = 0; copy < kCopies; ++copy) {
    const int i = copy * kThreads + threadIdx.x;
    const int row = place.row + i / kRowChunks, column = place.column + i % kRowChunks * kCopy;
    const Element* from = p.in + row * p.in_row_stride + column;
    const bool valid = row < p.rows && column < p.columns;
    cp_async_16(static_cast<uint32>(__cvta_generic_to_shared(to + i * 16)), from, valid);
  }
}

// Stores the part of a tile inside the matrix: each thread stores the data that the same lane of the next warp loaded.
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

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    l4_tile_copy_cp_async(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* tiles = shared + kTilesOffset;
  // Fill all stages but one. Every tile commits one group, empty after the last tile, so one wait count fits all tiles.
  int next = blockIdx.x;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (next < p.tiles) load_tile(p, next, tiles + stage * kTileBytes);
    next += gridDim.x;
    cp_async_commit();
  }
  int stage = 0, free_stage = kStages - 1;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    // Wait for this tile, then refill the stage of the previous tile.
    cp_async_wait<kStages - 2>();
    __syncthreads();
    if (next < p.tiles) load_tile(p, next, tiles + free_stage * kTileBytes);
    next += gridDim.x;
    cp_async_commit();
    store_tile(p, tile, tiles + stage * kTileBytes);
    free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}
