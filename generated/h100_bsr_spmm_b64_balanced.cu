// Generated from specs/h100_bsr_spmm_b64_balanced.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_bsr_spmm_b64_balanced.yaml
// spec: {"arch":"sm_90a","block":{"cols":64,"rows":64},"copy":"tma","dtype":"fp16","mma":"wgmma","op":"bsr_spmm","schedule":"cooperative","scheduler":"dynamic","stages":5,"tile":{"k":32,"m":64,"n":512}}
// spec hash: aee6394c00774baa63339233e5541e49106eaf2a7e52f630e422bfeddbbfddd1
// seal: sha256 93669b4f89b1efa76598b5678025cc1adcd3c7ff402527635ba197b8cfcf6fe9

// BSR x dense for sm_90a: C = A B with A in block-sparse rows and B, C dense and row-major.
// The stored result is A B, computed in fp32.
//
// Roles
//   warpgroup 0      producer. Its first warp fills the ring by TMA, the second is the tile scheduler; the others are
//                    idle.
//   warpgroups 1, 2  consumers. Each accumulates its part of the C tile in registers, then stores it by TMA.
//
// Barriers
//   full[i]   producer -> consumers: stage i holds the A tile and the B tile of one step
//   empty[i]  consumers -> producer: every consumer warp has finished with stage i
//   named barrier kWarpgroupBarrier + w: the threads of consumer w around its staging of C
//
// Pipeline of a consumer: the products of step s are issued before those of step s - 1 complete, so the tensor cores
// never wait for the issue. When only those of step s can still be running, the stage of step s - 1 is released. The
// producer runs ahead across tiles.
//
// Symbols
//   tile         kTileM x kTileN of C: one block row, kTileN columns. TilePlace gives their order
//   step         kTileK columns of one block of A, kTileK rows of B
//   group        64 columns of B or C: in shared memory rows of 128 bytes, swizzled
//   accumulators a thread's part of 64 rows: rows r and r + 8 of its warp's 16 (r = lane / 4),
//                columns 8 j + 2 (lane % 4) + {0, 1}. Number 4 j + 2 h + e is row r + 8 h, column with {e}

using int64 = long long;
using uint32 = unsigned int;

// Stands for CUtensorMap: 128 opaque bytes (PTX ISA, "Tensor-Map"), 64-byte aligned (driver API,
// cuTensorMapEncodeTiled). The comments of parameters of this type give the dimensions, innermost first, the box of one
// copy, and the bytes of the swizzle.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

constexpr int kTileM = 64;  // rows of a C tile: one block row
constexpr int kTileN = 512;  // columns of a C tile
constexpr int kTileK = 32;  // depth of one step
constexpr int kBlockCols = 64;  // columns of a stored block of A
constexpr int kStages = 5;  // depth of the ring of A and B tiles
constexpr int kThreads = 384;  // warpgroup 0 produces, the others consume
constexpr int kConsumerWarps = 8;  // warps that compute
constexpr int kProducerRegisters = 40;  // registers per producer thread
constexpr int kConsumerRegisters = 232;  // registers per consumer thread; 40 + 2 x 232 equals the 3 x 168 at launch
constexpr int kGroupColumns = 64;  // columns of a group: one 128-byte swizzled row
constexpr int kTileGroups = 8;  // column groups of a tile
constexpr int kWarpgroupColumns = 256;  // columns of a warpgroup's part
constexpr int kWarpgroupGroups = 4;  // column groups of a warpgroup's part
constexpr int kStagingGroups = 2;  // column groups that a warpgroup may have in flight
constexpr int kAccumulators = 128;  // accumulators per thread
constexpr int kABytes = 4096;  // bytes of an A tile
constexpr int kBBytes = 32768;  // bytes of a B tile
constexpr int kBGroupBytes = 4096;  // bytes of one column group of B
constexpr int kCGroupBytes = 8192;  // bytes of one column group of a warpgroup's C
constexpr int kQueue = 2;  // depth of the queue of tiles that the scheduler publishes
constexpr int kAnnouncementBytes = 144;  // bytes per queue entry

// Dynamic shared memory: 217504 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 20480 bytes: ring of A tiles, 64 rows of 64 bytes
constexpr int kBOffset = 20480;  // 163840 bytes: ring of B tiles, 8 column groups of 32 rows of 128 bytes
constexpr int kCOffset = 184320;  // 32768 bytes: 2 column groups of C of each warpgroup
constexpr int kBarriersOffset = 217088;  // 80 bytes: mbarriers: full, then empty
constexpr int kQueueBarriersOffset = 217168;  // 40 bytes: mbarriers of the queue: requested, then full, then empty
constexpr int kQueueOffset = 217216;  // 288 bytes: published tiles and their first block columns

constexpr int kFullBarrier = kBarriersOffset;
constexpr int kEmptyBarrier = kFullBarrier + 8 * kStages;
constexpr int kWarpgroupThreads = 128;
constexpr int kRowBytes = 128;  // bytes of a row of a column group in shared memory: the span of the swizzle
constexpr int kWarpgroupBarrier = 1;  // named barrier of consumer w: kWarpgroupBarrier + w
constexpr int kRingBlocks = kStages * kTileK / kBlockCols;  // capacity of the ring, in blocks of A
using Accumulators = float[kAccumulators];

// Launch: 384 threads per block, 217504 bytes of dynamic shared memory.
// Grid: one thread block per SM; dynamic tile scheduler, starting with a few of the longest block rows.
// L2 promotion of a_map, b_map, b_groups_map: 128 bytes; of all others: 256 bytes.
struct Params {
  TensorMap a_map;  // stored blocks of A (cols, rows, nnz): box 32 x 64 x 1, swizzle 64
  TensorMap b_map;  // B (N, K): box 64 x 32, swizzle 128
  TensorMap b_groups_map;  // whole column groups of B (columns of a group, K, groups): box 64 x 32 x 8, swizzle 128
  TensorMap c_map;  // C (N, M): box 64 x 64, swizzle 128
  const int* crow_indices;  // row offsets: first block of each block row, then the end of the last
  const int* col_indices;  // block column of each stored block
  int index_words;  // 32-bit words per index, 1 or 2; the kernel reads the low word
  int n;  // columns of B and C
  const int* row_order;  // block rows of A, longest first
  int block_rows;  // block rows of A
  int column_tiles;  // tiles per block row
  int group_tiles;  // column tiles per band: those that thread blocks work on at the same time
  int tiles;  // block_rows * tiles per row
  int* scheduler;  // tiles drawn after each thread block's first, finished thread blocks; both are 0 between launches
};

// TMA swizzles by address, with a period of 1024 bytes: swizzled buffers are aligned to that.
extern __shared__ __align__(1024) unsigned char shared[];

// mbarrier.init: sets the number of arrivals that complete a phase (PTX ISA, "mbarrier.init")
__device__ __forceinline__ void mbarrier_init(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: orders this thread's mbarrier.init before its later operations (PTX ISA, "membar / fence")
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive: one arrival; waiting threads then see this thread's earlier writes (PTX ISA, "mbarrier.arrive")
__device__ __forceinline__ void mbarrier_arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
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

// cp.async.bulk.tensor.2d: copies shared memory to the tensor box at (c0, ...), clipped at the tensor's ends
// (PTX ISA, "cp.async.bulk.tensor")
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, uint32 from, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
      ::"l"(map), "r"(from), "r"(c0), "r"(c1) : "memory");
}

// cp.async.bulk.commit_group: commits the stores as a group (PTX ISA, "cp.async.bulk.commit_group")
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: at most kPending groups have yet to read their shared memory (PTX ISA,
// "cp.async.bulk.wait_group")
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// fence.proxy.async: makes generic shared-memory writes visible to the async proxy (PTX ISA, "membar / fence")
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// setmaxnreg: .dec releases registers of this warpgroup to the thread block, .inc waits until enough are free (PTX ISA,
// "setmaxnreg")
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// wgmma.fence, CUTLASS' warpgroup_arrive: orders register accesses before the first wgmma (PTX ISA, "wgmma.fence")
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// wgmma.commit_group, warpgroup_commit_batch: commits wgmmas as a group (PTX ISA, "wgmma.commit_group")
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// wgmma.wait_group, warpgroup_wait: waits until at most kPending groups are running (PTX ISA, "wgmma.wait_group")
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to the registers of a running wgmma across this point.
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Matrix descriptor of a 128-byte swizzled tile in shared memory (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions", "Matrix Descriptor Format"). The upper half is constant: 128-byte swizzle, 1024 bytes from 8 rows to
// the next 8 (SBO, the stride byte offset). Descriptors are therefore passed and advanced as their lower halves: the
// address and, for an MN-major tile of several groups of 64 columns, the bytes from one group to the next (LBO, the
// leading byte offset), else 0; both in units of 16 bytes.
constexpr uint32 kDescriptorUpperHalf = 0x40000040;

__device__ __forceinline__ uint32 wgmma_descriptor(uint32 address, int group_bytes) {
  return (address & 0x3FFFF) >> 4 | static_cast<uint32>(group_bytes >> 4) << 16;
}

// The same for a K-major tile whose rows are 64 bytes. Upper half: 64-byte swizzle, 512 bytes from 8
// rows to the next 8.
constexpr uint32 kNarrowDescriptorUpperHalf = 0x80000020;

// wgmma.mma_async m64n256k16: D = A B, + D if `accumulate`; A in shared memory, K-major, narrow rows, B MN-major.
// After p come scale factors of 1 for A and B, then whether A and B are MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n256k16_shared_mn_major(
    float (&d)[128], uint32 a, uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "mov.b64 a, { %128, %132 };\n"
      "mov.b64 b, { %129, %131 };\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, "
      "%72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, "
      "%88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, "
      "%104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, "
      "%120, %121, %122, %123, %124, %125, %126, %127"
      "}, a, b, p, 1, 1, 0, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf), "n"(kNarrowDescriptorUpperHalf));
}

// Element i of an index tensor: an int32, or the low half of an int64 if `words` is 2. Indices are below 2^31.
__device__ __forceinline__ int load_index(const int* indices, int words, int i) {
  return __ldg(indices + static_cast<int64>(i) * words);
}

// Order of tiles: those of the longest block rows come first, at least one tile for each thread block, so that none of
// them is left for the end. Among these, and then among the rest, tiles go through groups of column tiles, as many as
// have their part of B in the L2: concurrent thread blocks then share it.
struct TilePlace {
  int row, column;

  __device__ __forceinline__ TilePlace(const Params& p, int tile) {
    const int thread_blocks = gridDim.x;
    const int long_rows = min(p.block_rows, (thread_blocks + p.column_tiles - 1) / p.column_tiles);
    const int long_tiles = long_rows * p.column_tiles;
    const bool is_long = tile < long_tiles;
    const int rows = is_long ? long_rows : p.block_rows - long_rows, number = is_long ? tile : tile - long_tiles;
    const int first = number / (rows * p.group_tiles) * p.group_tiles, in_band = number - first * rows;
    const int width = min(p.group_tiles, p.column_tiles - first);
    row = __ldg(p.row_order + in_band / width + (is_long ? 0 : long_rows));
    column = first + in_band % width;
  }
};

// A tile, and the blocks [first, end) of its block row.
struct Tile {
  int column = -1;  // index of the column tile; -1 past the last tile
  int row = 0, first = 0, end = 0;

  Tile() = default;
  __device__ __forceinline__ Tile(const Params& p, int number) {
    if (number >= p.tiles) return;
    const TilePlace place(p, number);
    column = place.column;
    row = place.row;
    first = load_index(p.crow_indices, p.index_words, row);
    end = load_index(p.crow_indices, p.index_words, row + 1);
  }
  // Block columns of the 32 blocks from `block` on, one per lane; 0 past the end of the row.
  __device__ __forceinline__ int load_columns(const Params& p, int block) const {
    const int mine = block + threadIdx.x % 32;
    return mine < end ? load_index(p.col_indices, p.index_words, mine) : 0;
  }
};

// Position in the ring: the stage, and the parity of the pass over the ring, 0 in the first. Consumers wait
// with this parity until the stage is full. Producers wait with the other parity, that of the previous pass, until the
// stage is free. A fresh barrier counts that pass as completed, so nobody waits in the first pass.
struct PipelineState {
  int index = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kStages) {
      index = 0;
      phase ^= 1;
    }
  }
};

// Copies the rows of B of a step, starting at `row`, to a stage of the ring. Columns beyond B are zero-filled and
// count toward the transaction bytes.
__device__ __forceinline__ void load_b(const Params& p, uint32 to, uint32 full, int row, int column) {
  if (column + kTileN <= p.n) {
    tma_load_3d(to, &p.b_groups_map, full, 0, row, column / kGroupColumns);  // all column groups at once
  } else {
#pragma unroll
    for (int group = 0; group < kTileGroups; ++group) {
      tma_load_2d(to + group * kBGroupBytes, &p.b_map, full, column + group * kGroupColumns, row);
    }
  }
}

// Prefetches the descriptors of B.
__device__ __forceinline__ void prefetch_b(const Params& p) {
  prefetch_tensormap(&p.b_map);
  prefetch_tensormap(&p.b_groups_map);
}

constexpr int kBSliceBytes = 16 * kRowBytes;  // bytes from 16 rows of B to the next, in a column group
constexpr int kBPartBytes = kWarpgroupColumns / kGroupColumns * kBGroupBytes;  // columns of B of a warpgroup

// Descriptor of a B tile that begins at this address.
__device__ __forceinline__ uint32 b_tile_descriptor(uint32 address) { return wgmma_descriptor(address, kBGroupBytes); }

// Copies the A tile and the B tile of one step, `bytes` bytes, to a stage of the ring, as soon as it is empty.
__device__ __forceinline__ void load_step(const Params& p, uint32 base, PipelineState state, int bytes, int block,
    int block_k, int b_row, int b_column) {
  const uint32 full = base + kFullBarrier + 8 * state.index;
  mbarrier_wait(base + kEmptyBarrier + 8 * state.index, state.phase ^ 1);
  mbarrier_arrive_expect_tx(full, bytes);
  tma_load_3d(base + kAOffset + state.index * kABytes, &p.a_map, full, block_k, 0, block);
  load_b(p, base + kBOffset + state.index * kBBytes, full, b_row, b_column);
}

// Producer: loads the steps of block `block`, whose block column is in lane `i`.
__device__ __forceinline__ void load_blocks(const Params& p, uint32 base, PipelineState& state, const Tile& tile,
    int block, int columns, int i) {
  const int b_row = __shfl_sync(0xFFFFFFFF, columns, i) * kBlockCols, b_column = tile.column * kTileN;
  const int bytes = kABytes + kBBytes;
#pragma unroll
  for (int k = 0; k < kBlockCols; k += kTileK) {
    if (threadIdx.x == 0) load_step(p, base, state, bytes, block, k, b_row + k, b_column);
    state.advance();
  }
  __syncwarp();
}

// Barriers of the queue from the scheduler to the other warps. wanted: the producer has requested the next tile,
// because the rest of this one fits the ring; full[i]: entry i is written; empty[i]: every other warp has read it.
constexpr int kWantedBarrier = kQueueBarriersOffset;
constexpr int kQueueFullBarrier = kWantedBarrier + 8;
constexpr int kQueueEmptyBarrier = kQueueFullBarrier + 8 * kQueue;

// Reads a word that the scheduler wrote, for the whole warp. The lane that reads it also arrives at the empty barrier
// afterwards, so the word is read before it is overwritten.
__device__ __forceinline__ int read_by_leader(const int* word) {
  return __shfl_sync(0xFFFFFFFF, threadIdx.x % 32 == 0 ? *word : 0, 0);
}

// A position in the queue: the entry, and the phase of the pass over the queue, used as in the ring.
struct QueueState {
  int entry = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    entry ^= 1;
    phase ^= entry ^ 1;
  }
};

// An entry of the queue: the next work item of the thread block, and its first block columns.
struct Announcement {
  Tile tile;
  int columns[32];
};
static_assert(kQueue == 2 && sizeof(Announcement) == kAnnouncementBytes, "shared memory has room for the queue");

// Entry i of the queue, in shared memory.
__device__ __forceinline__ Announcement& queue_entry(int i) {
  return reinterpret_cast<Announcement*>(shared + kQueueOffset)[i];
}

// One thread initializes the barriers of the queue.
__device__ __forceinline__ void init_queue(uint32 base) {
  for (int i = 0; i < kQueue; ++i) {
    mbarrier_init(base + kQueueFullBarrier + 8 * i, 32);  // all lanes of the scheduler
    // All lanes of the producer, and one lane per consumer warp.
    mbarrier_init(base + kQueueEmptyBarrier + 8 * i, 32 + kConsumerWarps);
  }
  mbarrier_init(base + kWantedBarrier, 1);
}

// The last thread block to end resets the counters to 0 for the next launch.
__device__ __forceinline__ void release_scheduler(const Params& p) {
  __threadfence();
  if (atomicAdd(p.scheduler + 1, 1) == gridDim.x - 1) {
    p.scheduler[0] = 0;
    p.scheduler[1] = 0;
  }
}

// Scheduler: one warp. Finds the next tile while the other warps work, which hides the latency of its dependent
// loads. The first tile of a thread block has the thread block's own index; each further one is the next unassigned
// one, taken when the producer requests it.
__device__ __forceinline__ void schedule(const Params& p, uint32 base) {
  const bool leader = threadIdx.x % 32 == 0;
  QueueState state;
  int phase = 0;
  for (int number = blockIdx.x;;) {
    const Tile tile(p, number);
    const int columns = tile.load_columns(p, tile.first);
    mbarrier_wait(base + kQueueEmptyBarrier + 8 * state.entry, state.phase ^ 1);
    queue_entry(state.entry).columns[threadIdx.x % 32] = columns;
    if (leader) queue_entry(state.entry).tile = tile;
    // Each lane has written a part of the entry, so each arrives.
    mbarrier_arrive(base + kQueueFullBarrier + 8 * state.entry);
    if (tile.column < 0) break;
    state.advance();
    mbarrier_wait(base + kWantedBarrier, phase);
    phase ^= 1;
    const int taken = leader ? atomicAdd(p.scheduler, 1) + static_cast<int>(gridDim.x) : 0;
    number = __shfl_sync(0xFFFFFFFF, taken, 0);
  }
  if (leader) release_scheduler(p);
}

// Producer, the whole warp: the next tile, and its first block columns, one per lane.
__device__ __forceinline__ Tile take_next(uint32 base, QueueState& state, int& columns) {
  mbarrier_wait(base + kQueueFullBarrier + 8 * state.entry, state.phase);
  const Tile tile = queue_entry(state.entry).tile;
  columns = queue_entry(state.entry).columns[threadIdx.x % 32];
  mbarrier_arrive(base + kQueueEmptyBarrier + 8 * state.entry);
  state.advance();
  return tile;
}

// Producer: one warp fills the ring, tile after tile. Its lanes hold block columns; one of them issues the
// copies.
__device__ __forceinline__ void produce(const Params& p, uint32 base) {
  const bool leader = threadIdx.x % 32 == 0;
  PipelineState state;
  QueueState queue_position;

  while (true) {
    int next_columns;
    const Tile tile = take_next(base, queue_position, next_columns);
    if (tile.column < 0) break;
    bool has_asked = false;  // whether it has requested the next tile
    int columns = 0;

#pragma unroll 1
    for (int block = tile.first; block < tile.end; ++block) {
      const int i = (block - tile.first) % 32;
      if (i == 0) {
        columns = next_columns;
        next_columns = tile.load_columns(p, block + 32);
      }
      if (!has_asked && tile.end - block <= kRingBlocks) {
        has_asked = true;
        if (leader) mbarrier_arrive(base + kWantedBarrier);
      }
      load_blocks(p, base, state, tile, block, columns, i);
    }
    if (!has_asked && leader) mbarrier_arrive(base + kWantedBarrier);
  }
}

// Consumer, a whole warp: iterates over the work that the scheduler hands out.
struct TileWalk {
  uint32 base;
  Tile tile;
  QueueState state;

  __device__ __forceinline__ TileWalk(uint32 base) : base(base) {}

  __device__ __forceinline__ bool next() {
    mbarrier_wait(base + kQueueFullBarrier + 8 * state.entry, state.phase);
    const Tile& entry = queue_entry(state.entry).tile;
    tile.column = read_by_leader(&entry.column);
    tile.row = read_by_leader(&entry.row);
    tile.first = read_by_leader(&entry.first);
    tile.end = read_by_leader(&entry.end);
    if (threadIdx.x % 32 == 0) mbarrier_arrive(base + kQueueEmptyBarrier + 8 * state.entry);
    state.advance();
    return tile.column >= 0;
  }
};

// accumulators += A B for this warpgroup's part of one step (asynchronous).
__device__ __forceinline__ void issue_step(Accumulators& accumulators, uint32 a_descriptor, uint32 b_descriptor) {
  warpgroup_fence_operand(accumulators);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileK / 16; ++k) {
    // 16 columns of A are 32 bytes of its rows.
    wgmma_m64n256k16_shared_mn_major(accumulators, a_descriptor + (k * 32 >> 4),
        b_descriptor + (k * kBSliceBytes >> 4), 1);
  }
  wgmma_commit();
  warpgroup_fence_operand(accumulators);
}

// accumulators += the products of all steps of a tile, as they arrive in the ring. Each step is issued, then the stage
// of the previous one is released.
__device__ __forceinline__ void multiply(Accumulators& accumulators, uint32 base, PipelineState& state,
    uint32 a_descriptor, uint32 b_descriptor, int steps) {
  const bool warp_leader = threadIdx.x % 32 == 0;
  uint32 running = 0;  // empty barrier of the stage that the last issued step reads
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(base + kFullBarrier + 8 * state.index, state.phase);
    issue_step(accumulators, a_descriptor + (state.index * kABytes >> 4), b_descriptor + (state.index * kBBytes >> 4));
    wgmma_wait<1>();  // the previous step's are complete: its stage has been read
    if (step > 0 && warp_leader) mbarrier_arrive(running);
    running = base + kEmptyBarrier + 8 * state.index;
    state.advance();
  }
  wgmma_wait<0>();
  warpgroup_fence_operand(accumulators);
  if (steps > 0 && warp_leader) mbarrier_arrive(running);
}

// bar.sync: waits at named barrier `id` of `threads` threads (PTX ISA, "bar")
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// cvt.rn.f16x2.f32: converts two floats to a pair of fp16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// stmatrix.x4: stores four 8 x 8 matrices of 16-bit elements; each lane holds one row address (PTX ISA, "stmatrix")
__device__ __forceinline__ void stmatrix_x4(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };"
      ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Stores a warpgroup's part of C one column group at a time. TMA clips the store at the last column.
__device__ __forceinline__ void store_c(const Params& p, const Accumulators& accumulators, uint32 staging,
    int warpgroup, int c_row, int c_column) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, staging_row = warp * 16 + lane % 16;
  const bool warpgroup_leader = threadIdx.x % kWarpgroupThreads == 0;
#pragma unroll
  for (int group = 0; group < kWarpgroupGroups; ++group) {
    // Wait until the previous store from this staging buffer has read it.
    const uint32 buffer = staging + group % kStagingGroups * kCGroupBytes;
    if (warpgroup_leader) tma_store_wait_read<kStagingGroups - 1>();
    bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
    // Fill it. A row is eight 16-byte chunks; TMA's swizzle puts chunk i at position i ^ row % 8. Lanes 8 i to 8 i + 7
    // address the rows of matrix i: rows 0 to 7, 8 to 15, then the same rows one chunk further.
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* x = accumulators + group * 32 + j * 8;
      const int chunk = j * 2 + lane / 16;
      stmatrix_x4(buffer + staging_row * kRowBytes + (chunk ^ staging_row % 8) * 16,
          pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
    }
    fence_proxy_async();
    bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
    if (warpgroup_leader) {
      tma_store_2d(&p.c_map, buffer, c_column + group * kGroupColumns, c_row);
      tma_store_commit();
    }
  }
}

// Epilogue of a consumer's tiles: finishes their parts of C and stores them through its staging buffer.
struct Epilogue {
  int warpgroup;
  uint32 staging;

  __device__ __forceinline__ Epilogue(uint32 base, int warpgroup) : warpgroup(warpgroup) {
    staging = base + kCOffset + warpgroup * kStagingGroups * kCGroupBytes;
  }
  // Finishes and stores the warpgroup's part of C, whose first element is at this row and column.
  __device__ __forceinline__ void store(const Params& p, Accumulators& accumulators, int c_row, int c_column) {
    store_c(p, accumulators, staging, warpgroup, c_row, c_column);
  }
  // Shared memory must outlive the stores that read it.
  __device__ __forceinline__ void wait() const {
    if (threadIdx.x % kWarpgroupThreads == 0) tma_store_wait_read<0>();
  }
};

// Consumer: one warpgroup computes its part of the C tile, tile after tile.
__device__ __forceinline__ void consume(const Params& p, uint32 base, int warpgroup) {
  const int first_column = warpgroup * kWarpgroupColumns;
  const uint32 a_descriptor = wgmma_descriptor(base + kAOffset, 0);
  const uint32 b_descriptor = b_tile_descriptor(base + kBOffset + warpgroup * kBPartBytes);
  PipelineState state;
  Epilogue epilogue(base, warpgroup);

  for (TileWalk walk(base); walk.next();) {
    const Tile& tile = walk.tile;
    const int steps = (tile.end - tile.first) * (kBlockCols / kTileK);
    const int c_row = tile.row * kTileM;
    const int c_column = tile.column * kTileN + first_column;
    // An empty block row has no steps: it stores these zeros.
    Accumulators accumulators;
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) accumulators[i] = 0.0f;
    multiply(accumulators, base, state, a_descriptor, b_descriptor, steps);
    epilogue.store(p, accumulators, c_row, c_column);
  }
  epilogue.wait();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    h100_bsr_spmm_b64_balanced(const __grid_constant__ Params p) {
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  // The shuffle proves to the compiler that it is warp-uniform, so values derived from it go to uniform registers.
  const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / kWarpgroupThreads, 0);

  // One thread initializes the barriers. An empty barrier counts one arrival per consumer warp.
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kFullBarrier + 8 * i, 1);
      mbarrier_init(base + kEmptyBarrier + 8 * i, kConsumerWarps);
    }
    init_queue(base);
    fence_mbarrier_init();
    prefetch_tensormap(&p.a_map);
    prefetch_b(p);
    prefetch_tensormap(&p.c_map);
  }
  __syncthreads();

  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x < 32) produce(p, base);
    if (threadIdx.x / 32 == 1) schedule(p, base);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, base, warpgroup - 1);
  }
}
