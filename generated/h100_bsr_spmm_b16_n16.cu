// Generated from specs/h100_bsr_spmm_b16_n16.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_bsr_spmm_b16_n16.yaml
// spec: {"arch":"sm_90a","block":{"cols":16,"rows":16},"copy":"ld_global","dtype":"fp16","mma":"mma","op":"bsr_spmm","schedule":"multistage","stages":8,"tile":{"k":2048,"m":960,"n":16}}
// spec hash: edfc3e74e83378f391c4e90beb715f61bf61c6e771f403b771d4441c80aa3e7e
// templates: bsr_spmm/sm90a_few_columns.cu.j2, common/declarations.cuh.j2, ptx/cluster.cuh.j2, ptx/cp_async.cuh.j2, ptx/ld_global.cuh.j2, ptx/mma_sync.cuh.j2, ptx/warp.cuh.j2
// seal: sha256 d00030d9cdc74f76847022f665dba88eea859c4618643ddf0ae53c1802bf5afe

// BSR x dense for few columns, by mma.sync: C = A B with A in block-sparse rows and B, C dense and row-major.
//
// Who does what: a cluster of thread blocks computes tiles of C, one after the other. Each thread block keeps a slice
// of B's rows in shared memory, and multiplies the blocks of A whose columns lie in it. A warp has 16 rows of a tile, a
// strip: it reads their part of these blocks from global memory straight into registers, each byte once. Then each
// thread block adds up the partial sums of all slices for its share of the tile's rows, which it reads from the others'
// shared memory: split-K over a cluster, reduced through distributed shared memory.
//
// Barriers of the cluster, by turns
//   partial sums are there   before they are added up
//   they have been read      before those of the next tile take their place; the products of that tile come first
//
// Symbols
//   slice    p.slice_blocks block rows of B
//   step     kStepColumns columns of a strip's part of a block of A
//   list     steps of a strip that lie in the slice, in the order of A's blocks
//   A lane has rows r and r + 8 of a strip (r = lane / 4), and of a step kLaneColumns columns of each, side by side, so
//   that it reads whole words. In a product its columns stand for others; B's rows are kept in the order that fits.

using int64 = long long;
using uint32 = unsigned int;

constexpr int kTileN = 16;  // columns of a C tile
constexpr int kBlockRows = 16;  // rows of a stored block of A
constexpr int kBlockCols = 16;  // columns of a stored block of A
constexpr int kBlockElements = 256;  // elements of a stored block of A
constexpr int kStepColumns = 16;  // columns of A of a step
constexpr int kLaneColumns = 4;  // of these, side by side, those of a lane
constexpr int kStages = 8;  // steps of A that a warp has in registers, or on their way there
constexpr int kCluster = 8;  // slices of B's rows: thread blocks of a cluster
constexpr int kThreads = 640;  // all load and compute
constexpr int kLaneIndices = 4;  // block columns that a lane looks at, at a time
constexpr int kEntries = 128;  // entries of a warp's list
constexpr int kGroupBytes = 32768;  // bytes of a column group of B
constexpr int kPartialStride = 24;  // floats from one row of partial sums to the next

// Dynamic shared memory: 178176 bytes. Byte offsets:
constexpr int kBOffset = 0;  // 65536 bytes: 2048 rows of B in column groups of 8: 16 bytes a row
constexpr int kPartialOffset = 65536;  // 92160 bytes: fp32 partial sums of a tile of C, over this slice of B
constexpr int kEntriesOffset = 157696;  // 20480 bytes: lists of steps, one a warp

constexpr int kStripRows = 16, kMmaColumns = 8;  // rows of a warp, and columns, of one product
constexpr int kWarps = kThreads / 32;
constexpr int kRoundIndices = 32 * kLaneIndices;  // block columns that a warp looks at, at a time
constexpr int kChunk = 16;  // bytes: 8 columns of a row of B

// Launch: 640 threads a block, 178176 bytes of dynamic shared memory, clusters of 8.
// Grid: clusters of 8 thread blocks, as many as run at once.
struct Params {
  const unsigned short* a;  // stored blocks of A (nnz, rows, cols), contiguous
  const unsigned short* b;  // B (K, N)
  unsigned short* c;  // C (M, N)
  int64 b_row_stride;  // elements from one row of B to the next
  int64 c_row_stride;  // elements from one row of C to the next
  const int* crow_indices;  // first block of each block row, and one more
  const int* col_indices;  // block column of each block
  int index_words;  // 32-bit words of an index: 1 or 2, the low one is read
  int block_rows;  // block rows of A
  int block_columns;  // blocks across A, block rows of B
  int slice_blocks;  // of these, those of a slice
  int n;  // columns of B and C; rows of C have room for the next multiple of 8
  int tile_strips;  // strips of a tile, whole block rows
  int row_tiles;  // tiles of so many
  int row_clusters;  // clusters that divide them, each having every row_clusters-th
};

using Element = unsigned short;  // the bits of one fp16
using StepWords = uint2;  // what a lane has of one row of a step

// barrier.cluster.arrive: this thread has come to the cluster's barrier; what it wrote before can be seen after it
// (PTX ISA, "barrier.cluster")
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
// barrier.cluster.wait: all threads of the cluster have come (PTX ISA, "barrier.cluster")
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// barrier.cluster.arrive.relaxed: this thread has come to the cluster's barrier, without writes that others must see
// (PTX ISA, "barrier.cluster")
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

// mapa: where a shared-memory address of this thread block is in another one of the cluster (PTX ISA, "mapa")
__device__ __forceinline__ uint32 map_shared(uint32 address, int block) {
  uint32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
  return mapped;
}

// ld.shared::cluster.v4: four floats from the shared memory of a thread block of the cluster (PTX ISA, "ld")
__device__ __forceinline__ float4 load_cluster(uint32 mapped) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 { %0, %1, %2, %3 }, [%4];"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(mapped) : "memory");
  return x;
}

// cp.async.cg: 16 bytes to shared memory, not through the L1; zeros, and no read, unless `valid`. L2::128B is a hint to
// fetch 128 bytes into the L2 (PTX ISA, "cp.async")
__device__ __forceinline__ void cp_async_16(uint32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
      : "memory");
}

// cp.async.commit_group: closes a group of this thread's copies (PTX ISA, "cp.async.commit_group")
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: at most kPending of this thread's groups are still running (PTX ISA, "cp.async.wait_group")
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ld.global.nc.v2: 8 bytes that are read once, so that the L1 keeps none of them, and that this
// launch does not write (PTX ISA, "ld.global.nc")
__device__ __forceinline__ uint2 load_streamed(const void* from) {
  uint2 x;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 { %0, %1 }, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
  return x;
}

// ldmatrix.x4.trans: four 8 x 8 matrices of 16-bit elements, each transposed on the way; lanes 8 i .. 8 i + 7 give
// the row addresses of matrix i (PTX ISA, "ldmatrix")
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

// cvt.rn.f16x2.f32: two floats to a pair of fp16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Element i of an index tensor, int32 or the low half of an int64. Indices are below 2^31.
__device__ __forceinline__ int load_index(const Params& p, const int* indices, int i) {
  return __ldg(indices + static_cast<int64>(i) * p.index_words);
}

// The row of B, among kStepColumns, that is kept in a place. What the product takes as its columns of A 2 t, 2 t + 1,
// 2 t + 8 and 2 t + 9 (t = lane % 4) lies side by side in A.
__device__ __forceinline__ int row_of_place(int place) {
  const int lane = place / 2 % 4, half = place / 8 % 2;
  return lane * kLaneColumns + half * 2 + place % 2;
}

// Copies a thread block's slice of B to shared memory, kTileN columns from `first_column` on. What lies outside B is
// zeros. Threads side by side write 16 places that follow each other, in two column groups: in distinct banks, and
// whole sectors are read.
__device__ __forceinline__ void copy_b(const Params& p, uint32 to, int first_row, int rows, int first_column) {
#pragma unroll 1
  for (int pair = 0; pair < kTileN / (2 * kMmaColumns); ++pair) {
    const int group = 2 * pair + static_cast<int>(threadIdx.x) % 2, column = first_column + group * kMmaColumns;
    const bool valid = column < p.n;
    const Element* from = p.b + first_row * p.b_row_stride + (valid ? column : 0);
#pragma unroll 4
    for (int place = static_cast<int>(threadIdx.x) / 2; place < rows; place += kThreads / 2) {
      const int row = place / kStepColumns * kStepColumns + row_of_place(place % kStepColumns);
      cp_async_16(to + group * kGroupBytes + place * kChunk, from + row * p.b_row_stride, valid);
    }
  }
}

// The blocks of a block row.
struct BlockRow {
  int begin, end;

  // That of the warp's strip in a turn; none beyond the tile, or beyond C.
  __device__ __forceinline__ BlockRow(const Params& p, int tile, int turn) {
    const int strip = turn * kWarps + static_cast<int>(threadIdx.x) / 32;
    const int row = (tile * p.tile_strips + strip) * kStripRows / kBlockRows;
    const bool valid = strip < p.tile_strips && row < p.block_rows;
    begin = valid ? load_index(p, p.crow_indices, row) : 0;
    end = valid ? load_index(p, p.crow_indices, row + 1) : 0;
  }
};

// This lane's block columns of blocks begin, begin + 1, ...; -1 where there is none.
__device__ __forceinline__ void load_columns(int (&columns)[kLaneIndices], const Params& p, int begin, int end) {
#pragma unroll
  for (int i = 0; i < kLaneIndices; ++i) {
    const int block = begin + i * 32 + static_cast<int>(threadIdx.x % 32);
    columns[i] = block < end ? load_index(p, p.col_indices, block) : -1;
  }
}

// An entry of a list: where the step begins in A, in elements from the round's first block; its first row in the slice.
struct Entry {
  int a, b_row;
};

// What one warp works on: the steps of its strip that are in the list, kStages of them in registers or on their way.
struct Strip {
  Entry* entries;       // of this warp's list
  int count;            // how many it has
  const Element* from;  // this lane's first element of the round's first block
  StepWords upper[kStages], lower[kStages];  // rows r and r + 8

  // Lists the steps of a round that lie in the slice, and asks for the first ones.
  __device__ __forceinline__ void begin(const Params& p, const Element* lane_a, int first_block,
      const int (&columns)[kLaneIndices], int slice_first, int slice_blocks) {
    const int lane = threadIdx.x % 32;
    from = lane_a + static_cast<int64>(first_block) * kBlockElements;
    count = 0;
    __syncwarp();  // all have read the list of the round before
#pragma unroll
    for (int i = 0; i < kLaneIndices; ++i) {
      const int in_slice = columns[i] - slice_first;
      const bool listed = in_slice >= 0 && in_slice < slice_blocks;
      const uint32 lanes = __ballot_sync(0xFFFFFFFF, listed);
      if (listed) {
        entries[count + __popc(lanes & ((1u << lane) - 1))] = {
            (i * 32 + lane) * kBlockElements, in_slice * kBlockCols};
      }
      count += __popc(lanes);
    }
    __syncwarp();
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (stage < count) load(stage, stage);
    }
  }

  // Asks for a step.
  __device__ __forceinline__ void load(int stage, int step) {
    const Element* row = from + entries[step].a;
    upper[stage] = load_streamed(row);
    lower[stage] = load_streamed(row + 8 * kBlockCols);
  }

  // accumulators += all steps of the list times their rows of B.
  __device__ __forceinline__ void multiply(float (&accumulators)[kTileN / kMmaColumns][4], uint32 lane_b) {
#pragma unroll 1
    for (int first = 0; first < count; first += kStages) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        if (first + stage < count) {
          const uint32 b = lane_b + entries[first + stage].b_row * kChunk;
          multiply_rows(accumulators, {upper[stage].x, lower[stage].x, upper[stage].y, lower[stage].y}, b);
          if (first + stage + kStages < count) load(stage, first + stage + kStages);
        }
      }
    }
  }

  // accumulators += 16 columns of A times 16 rows of B.
  static __device__ __forceinline__ void multiply_rows(
      float (&accumulators)[kTileN / kMmaColumns][4], const uint32 (&a)[4], uint32 b) {
#pragma unroll
    for (int pair = 0; pair < kTileN / (2 * kMmaColumns); ++pair) {
      uint32 rows[4];
      ldmatrix_x4_trans(rows, b + pair * 2 * kGroupBytes);
      mma_m16n8k16(accumulators[2 * pair], a, rows[0], rows[1]);
      mma_m16n8k16(accumulators[2 * pair + 1], a, rows[2], rows[3]);
    }
  }
};

// Leaves a strip's partial sums in shared memory, where `partial` says.
__device__ __forceinline__ void store_partial(float* partial, const float (&accumulators)[kTileN / kMmaColumns][4]) {
  const int lane = threadIdx.x % 32;
  float* to = partial + lane / 4 * kPartialStride + lane % 4 * 2;
#pragma unroll
  for (int group = 0; group < kTileN / kMmaColumns; ++group) {
    const float* x = accumulators[group];
    *reinterpret_cast<float2*>(to + group * kMmaColumns) = {x[0], x[1]};
    *reinterpret_cast<float2*>(to + 8 * kPartialStride + group * kMmaColumns) = {x[2], x[3]};
  }
}

// Split-K reduction: adds up the partial sums of all slices, in their order, for every kCluster-th row of a tile, and
// stores the result. A thread has four columns of a row at a time.
__device__ __forceinline__ void reduce_partials(
    const Params& p, uint32 partial, int slice, int tile, int first_column) {
  constexpr int kRowThreads = kTileN / 4;
  const int column = static_cast<int>(threadIdx.x) % kRowThreads * 4;
  const int first_row = tile * p.tile_strips * kStripRows;
  const int rows = min(p.tile_strips * kStripRows, p.block_rows * kBlockRows - first_row);
  if (first_column + column >= p.n) return;
  for (int row = static_cast<int>(threadIdx.x) / kRowThreads * kCluster + slice; row < rows;
      row += kThreads / kRowThreads * kCluster) {
    const uint32 from = partial + (row * kPartialStride + column) * 4;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int other = 0; other < kCluster; ++other) {
      const float4 x = load_cluster(map_shared(from, other));
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    Element* to = p.c + (first_row + row) * p.c_row_stride + first_column + column;
    *reinterpret_cast<uint2*>(to) = {pack(sum.x, sum.y), pack(sum.z, sum.w)};
  }
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    h100_bsr_spmm_b16_n16(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  const int slice = blockIdx.x % kCluster, cluster = blockIdx.x / kCluster;
  const int first_tile = cluster % p.row_clusters, first_column = cluster / p.row_clusters * kTileN;
  const int slice_first = slice * p.slice_blocks;
  const int slice_blocks = max(0, min(p.slice_blocks, p.block_columns - slice_first));
  float* const partial = reinterpret_cast<float*>(shared + kPartialOffset);
  // Lanes 8 i to 8 i + 7 address matrix i: rows 0 to 7 of a column group, rows 8 to 15, then both of the next group.
  const uint32 lane_b = base + kBOffset + lane / 16 * kGroupBytes + lane % 16 * kChunk;
  // Tiles, and the strips of a turn, are whole block rows: this lane's place in a block is the same in all of them.
  const int row_in_block = warp * kStripRows % kBlockRows + lane / 4;
  const Element* const lane_a = p.a + row_in_block * kBlockCols + lane % 4 * kLaneColumns;
  const int turns = (p.tile_strips + kWarps - 1) / kWarps;

  copy_b(p, base + kBOffset, slice_first * kBlockCols, slice_blocks * kBlockCols, first_column);
  cp_async_commit();
  // What is known first of a strip is asked for while the one before it, or that before, is worked on.
  int tile = first_tile, turn = 0, next_tile = tile, next_turn = 0;  // of the strip after the next
  const auto advance = [&]() {
    if (++next_turn == turns) next_turn = 0, next_tile += p.row_clusters;
  };
  int columns[kLaneIndices];
  BlockRow row(p, tile, 0);
  advance();
  BlockRow next_row(p, next_tile, next_turn);
  load_columns(columns, p, row.begin, row.end);
  Strip strip;
  strip.entries = reinterpret_cast<Entry*>(shared + kEntriesOffset) + warp * kEntries;
  strip.begin(p, lane_a, row.begin, columns, slice_first, slice_blocks);
  cp_async_wait<0>();
  __syncthreads();

  for (; tile < p.row_tiles; tile += p.row_clusters) {
    for (turn = 0; turn < turns; ++turn) {
      load_columns(columns, p, next_row.begin, next_row.end);
      advance();
      const BlockRow row_after(p, next_tile, next_turn);
      float accumulators[kTileN / kMmaColumns][4] = {};
      strip.multiply(accumulators, lane_b);
      for (int block = row.begin + kRoundIndices; block < row.end; block += kRoundIndices) {
        int further[kLaneIndices];
        load_columns(further, p, block, row.end);
        strip.begin(p, lane_a, block, further, slice_first, slice_blocks);
        strip.multiply(accumulators, lane_b);
      }
      if (turn == 0 && tile != first_tile) cluster_wait();  // the partial sums of the tile before have been read
      const int in_tile = turn * kWarps + warp;
      if (in_tile < p.tile_strips) store_partial(partial + in_tile * kStripRows * kPartialStride, accumulators);
      if (turn + 1 == turns) cluster_arrive();
      row = next_row;
      next_row = row_after;
      strip.begin(p, lane_a, row.begin, columns, slice_first, slice_blocks);
    }
    cluster_wait();
    reduce_partials(p, base + kPartialOffset, slice, tile, first_column);
    cluster_arrive_relaxed();  // nothing was written for others
  }
  // Shared memory must outlive the loads of others.
  cluster_wait();
}
