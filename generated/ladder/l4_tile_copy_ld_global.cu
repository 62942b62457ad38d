// Generated from specs/ladder/l4_tile_copy_ld_global.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/ladder/l4_tile_copy_ld_global.yaml
// spec: {"arch":"sm_89","copy":"ld_global","dtype":"fp16","mma":"none","op":"tile_copy","schedule":"multistage","stages":1,"tile":{"m":64,"n":128}}
// spec hash: 7aa45b6496714e72922c852ee7052e3d2433827c7fddc8501f87c734cf83acfd
// seal: sha256 13f4c63abff9dd516935a8dce6910f26abc093ad873d02d2f5ab2ba90214105c

// Tile copy: out = in, tile by tile through shared memory. It measures one way of loading tiles, and proves the
// contents of shared memory: each warp stores data that another warp, or the copy engine, wrote there.
//
// Roles: a thread block takes every gridDim.x-th tile. All threads load, and all threads store.
//
// Pipeline: none. A tile is loaded through registers into the only buffer, then stored.
//   __syncthreads   before storing: all parts are in shared memory; after: all threads have read it
//
// Symbols
//   tile   kTileM x kTileN elements. Tiles are numbered from left to right, then downwards
//   chunk  16 bytes, kCopy elements, which one thread moves at a time

using int64 = long long;

constexpr int kTileM = 64;  // rows of a tile
constexpr int kTileN = 128;  // columns of a tile
constexpr int kThreads = 256;  // threads per block
constexpr int kCopy = 8;  // elements of a chunk
constexpr int kRowChunks = 16;  // chunks of a row of a tile
constexpr int kCopies = 4;  // chunks per thread and tile

// Dynamic shared memory: 16384 bytes. Byte offsets:
constexpr int kTilesOffset = 0;  // 16384 bytes: tiles, 64 rows of 128 elements

// Launch: 256 threads per block, 16384 bytes of dynamic shared memory.
// Grid: 5 thread blocks on an SM, looping over tiles (persistent).
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
    uint4 chunk = make_uint4(0, 0, 0, 0);
    if (valid) chunk = __ldg(reinterpret_cast<const uint4*>(from));
    *reinterpret_cast<uint4*>(to + i * 16) = chunk;
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

extern "C" __global__ void __launch_bounds__(kThreads, 5)
    l4_tile_copy_ld_global(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* tiles = shared + kTilesOffset;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    load_tile(p, tile, tiles);
    __syncthreads();
    store_tile(p, tile, tiles);
    __syncthreads();
  }
}
