// Generated from specs/h100_bsr_spmm_b32_few_columns.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_bsr_spmm_b32_few_columns.yaml
// spec: {"arch":"sm_90a","block":{"cols":32,"rows":32},"copy":"tma","ctas_per_sm":2,"dtype":"fp16","mma":"wgmma","op":"bsr_spmm","schedule":"cooperative","stages":5,"tile":{"k":64,"m":32,"n":128}}
// spec hash: a145ea1e5985c6e20558ede91936f6911c33b3eb0ff59d8e5fe8771cb1908fe9
// seal: sha256 2dd0cbee83dc0b2176dacde1acf9145e596711aa254e88198bf39f431efdf520

// BSR x dense for sm_90a with small blocks: C = A B with A in block-sparse rows and
// B, C dense and row-major.
// The stored result is A B, computed in fp32.
//
// The product is computed transposed, C^T = B^T A^T: a wgmma has 64 rows, a block row has fewer. Columns of B are
// therefore its M side, rows of a block its N side. A block row of height h does at most h FLOPs per loaded byte of B,
// so throughput depends on the loads in flight: the ring is deep, and a step has several blocks.
//
// Roles
//   warpgroups 0, 1  consumers. Each accumulates its column groups of the C tile in registers, then stores them by TMA.
//   the next warp    producer. It fills the ring by TMA.
//
// Barriers
//   full[i]   producer -> consumers: stage i holds the blocks of A of one step, and the B tile of each
//   empty[i]  consumers -> producer: every consumer warp has finished with stage i
//   named barrier kWarpgroupBarrier + w: the threads of consumer w, around its staging of C
//
// Pipeline of a consumer: the products of step s are issued before those of step s - 1 complete. When only those of
// step s can still be running, the stage of step s - 1 is released. The producer runs ahead across tiles.
//
// Symbols
//   tile         kTileM x kTileN of C: one block row, kTileN columns
//   step         kStepBlocks blocks, or fewer, of A, and the matching kBlockCols rows of B of each
//   group        64 columns of B or C: in shared memory rows of 128 bytes, swizzled. A block of A has rows of
//                64 bytes there
//   accumulators a thread's part of a group (64 columns x kTileM rows of C): columns c and c + 8 of its warp's 16
//                (c = lane / 4), rows 8 j + 2 (lane % 4) + {0, 1}. Number 4 j + 2 h + e is column
//                c + 8 h, row with {e}

using int64 = long long;
using uint32 = unsigned int;

// Stands for CUtensorMap: 128 opaque bytes (PTX ISA, "Tensor-Map"), 64-byte aligned (driver API,
// cuTensorMapEncodeTiled). The comments of parameters of this type give the dimensions, innermost first, the box of one
// copy, and the bytes of the swizzle.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

constexpr int kTileM = 32;  // rows of a C tile: one block row
constexpr int kTileN = 128;  // columns of a C tile
constexpr int kBlockCols = 32;  // columns of a stored block of A
constexpr int kStepBlocks = 2;  // most blocks of A per step
constexpr int kStages = 5;  // depth of the ring of A and B tiles
constexpr int kThreads = 288;  // warpgroups that consume, then one warp that produces
constexpr int kConsumerWarps = 8;  // warps that compute
constexpr int kGroupColumns = 64;  // columns of a group: the M side of one wgmma
constexpr int kTileGroups = 2;  // column groups of a tile
constexpr int kWarpgroupGroups = 1;  // column groups of a warpgroup
constexpr int kStagingGroups = 1;  // column groups that a warpgroup may have in flight
constexpr int kAccumulators = 16;  // accumulators per thread and column group
constexpr int kABytes = 4096;  // bytes of the blocks of A of one step
constexpr int kABlockBytes = 2048;  // bytes per such step
constexpr int kBBytes = 16384;  // bytes of the B tiles of one step
constexpr int kBBlockBytes = 8192;  // bytes of the B tile of one block of A
constexpr int kBGroupBytes = 4096;  // bytes of one column group of B
constexpr int kCGroupBytes = 4096;  // bytes of one column group of C

// Dynamic shared memory: 110672 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 20480 bytes: ring of blocks of A, 32 rows of 64 bytes
constexpr int kBOffset = 20480;  // 81920 bytes: ring of B tiles, 2 x 2 column groups of 32 rows of 128 bytes
constexpr int kCOffset = 102400;  // 8192 bytes: 1 column group of C of each warpgroup
constexpr int kBarriersOffset = 110592;  // 80 bytes: mbarriers: full, then empty

constexpr int kFullBarrier = kBarriersOffset;
constexpr int kEmptyBarrier = kFullBarrier + 8 * kStages;
constexpr int kWarpgroupThreads = 128;
constexpr int kRowBytes = 128;  // bytes of a row of a column group in shared memory: the span of the swizzle
constexpr int kWarpgroupBarrier = 1;  // named barrier of consumer w: kWarpgroupBarrier + w
using Accumulators = float[kWarpgroupGroups][kAccumulators];

// Launch: 288 threads per block, 110672 bytes of dynamic shared memory.
// Grid: 2 thread blocks per SM, looping over tiles (persistent), block rows fastest.
struct Params {
  TensorMap a_map;  // stored blocks of A (cols, rows, nnz): box 32 x 32 x 2, swizzle 64
  TensorMap b_map;  // B (N, K): box 64 x 32, swizzle 128
  TensorMap b_groups_map;  // column groups of B (columns of a group, K, groups): box 64 x 32 x 2, swizzle 128
  TensorMap c_map;  // C (N, M): box 64 x 32, swizzle 128
  const int* crow_indices;  // row offsets: first block of each block row, then the end of the last
  const int* col_indices;  // block column of each stored block
  int index_words;  // 32-bit words per index, 1 or 2; the kernel reads the low word
  int n;  // columns of B and C
  int whole_rows;  // leading rows of B for which one copy loads all column groups of a tile
  int block_rows;  // block rows of A
  int tiles;  // tiles of C: block_rows * tiles per block row
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

// wgmma.mma_async m64n32k16: D = A B, + D if `accumulate`; both in shared memory, A M-major with 128-byte rows, B
// K-major with narrow rows. A and B are the instruction's operands. After p come scale factors of 1 for A and B, then
// whether A and B are MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n32k16_m_major_narrow(
    float (&d)[16], uint32 a, uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %18, 0;\n"
      "mov.b64 a, { %16, %19 };\n"
      "mov.b64 b, { %17, %20 };\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15"
      "}, a, b, p, 1, 1, 1, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf), "n"(kNarrowDescriptorUpperHalf));
}

// The same for all accumulators of a thread.
__device__ __forceinline__ void warpgroup_fence_operand(Accumulators& accumulators) {
#pragma unroll
  for (int group = 0; group < kWarpgroupGroups; ++group) warpgroup_fence_operand(accumulators[group]);
}

// Element i of an index tensor: an int32, or the low half of an int64 if `words` is 2. Indices are below 2^31.
__device__ __forceinline__ int load_index(const int* indices, int words, int i) {
  return __ldg(indices + static_cast<int64>(i) * words);
}

// Order of tiles: column by column, so that concurrent thread blocks share columns of B, which come from the L2. Each
// column begins 5/8 of the rows, made odd, further down. A thread block takes every gridDim.x-th tile: if the number of
// rows divides gridDim.x, it would otherwise get the same row in each column, and no short row would balance a long
// one.
struct TilePlace {
  int row, column;

  __device__ __forceinline__ TilePlace(const Params& p, int tile) {
    const uint32 rows = p.block_rows;
    column = tile / rows;
    row = (tile + column * (rows * 5 / 8 | 1)) % rows;
  }
};

// A tile, and the blocks [first, end) of its block row.
struct Tile {
  int column = -1;  // index of the column tile; -1 past the last tile
  int row = 0, first = 0, end = 0;

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

// stmatrix.x4.trans: stores four 8 x 8 matrices of 16-bit elements, each transposed; each lane holds the address of one
// row in memory, that is, of one column of a matrix (PTX ISA, "stmatrix")
__device__ __forceinline__ void stmatrix_x4_trans(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4 };"
      ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Stores a warpgroup's part of C one column group at a time. TMA clips the store at the last column.
__device__ __forceinline__ void store_c(const Params& p, const Accumulators& accumulators, uint32 staging,
    int warpgroup, int c_row, int c_column) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool warpgroup_leader = threadIdx.x % kWarpgroupThreads == 0;
#pragma unroll
  for (int group = 0; group < kWarpgroupGroups; ++group) {
    // Wait until the previous store from this staging buffer has read it.
    const uint32 buffer = staging + group % kStagingGroups * kCGroupBytes;
    if (warpgroup_leader) tma_store_wait_read<kStagingGroups - 1>();
    bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
    // Fill it: transposed, 16 rows of C by this warp's 16 columns at a time. A row is eight 16-byte chunks; TMA's
    // swizzle puts chunk i at position i ^ row % 8. Lanes 8 i to 8 i + 7 address the rows of matrix i.
#pragma unroll
    for (int j = 0; j < kTileM / 16; ++j) {
      const float* x = accumulators[group] + j * 8;
      const int staging_row = j * 16 + lane / 16 * 8 + lane % 8;
      const int piece = warp * 2 + lane / 8 % 2;
      stmatrix_x4_trans(buffer + staging_row * kRowBytes + (piece ^ staging_row % 8) * 16,
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

// Copies the rows of B that match a block column of A, starting at `row`, to `to`. One copy loads all column groups;
// those beyond B are zero-filled and count toward the transaction bytes. If B's last columns do not fill a group, the
// copy fills the rest from the data that follows in memory, the next row; the store of C clips its products. From row
// p.whole_rows on, too few rows follow: each group is a separate copy, in which columns beyond B are zero-filled.
__device__ __forceinline__ void load_b(const Params& p, uint32 to, uint32 full, int row, int column) {
  if (column + kTileN <= p.n || row < p.whole_rows) {
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

// elect.sync, CUTLASS' elect_one_sync: whether this lane is the elected one of its warp, always the same. Unlike a
// comparison of lanes, it proves to the compiler that a single lane is active, so a copy is issued without a loop over
// lanes (PTX ISA, "elect.sync")
__device__ __forceinline__ bool elect() {
  uint32 picked;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n" : "=r"(picked));
  return picked != 0;
}

// Copies `count` blocks of A, starting at `block`, and the B tile of each to a stage of the ring, as soon as it is
// empty.
__device__ __forceinline__ void load_step(const Params& p, uint32 base, PipelineState state, int block, int count,
    const int (&b_rows)[kStepBlocks], int b_column) {
  const uint32 full = base + kFullBarrier + 8 * state.index;
  const uint32 b = base + kBOffset + state.index * kBBytes;
  mbarrier_wait(base + kEmptyBarrier + 8 * state.index, state.phase ^ 1);
  mbarrier_arrive_expect_tx(full, kABytes + count * kBBlockBytes);
  // Blocks are stored in list order, so one copy loads them. Any further blocks that it loads are unused.
  tma_load_3d(base + kAOffset + state.index * kABytes, &p.a_map, full, 0, 0, block);
#pragma unroll
  for (int i = 0; i < kStepBlocks; ++i) {
    if (i < count) load_b(p, b + i * kBBlockBytes, full, b_rows[i], b_column);
  }
}

// Producer: loads the step that begins with block `block`, whose block column is in lane `i`.
__device__ __forceinline__ void load_blocks(const Params& p, uint32 base, PipelineState& state,
    const Tile& tile, int block, int columns, int i) {
  int b_rows[kStepBlocks];
#pragma unroll
  for (int j = 0; j < kStepBlocks; ++j) b_rows[j] = __shfl_sync(0xFFFFFFFF, columns, i + j) * kBlockCols;
  const int count = min(kStepBlocks, tile.end - block);
  if (elect()) load_step(p, base, state, block, count, b_rows, tile.column * kTileN);
  state.advance();
  __syncwarp();
}

// accumulators += B^T A^T for this warpgroup's column groups and kBlocks blocks of a step (asynchronous).
template <int kBlocks>
__device__ __forceinline__ void issue_blocks(Accumulators& accumulators, uint32 a_descriptor, uint32 b_descriptor) {
  warpgroup_fence_operand(accumulators);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int k = 0; k < kBlockCols / 16; ++k) {
#pragma unroll
      for (int group = 0; group < kWarpgroupGroups; ++group) {
        // 16 rows of B are 16 rows of 128 bytes; 16 columns of A are 32 bytes of its rows.
        wgmma_m64n32k16_m_major_narrow(accumulators[group],
            b_descriptor + ((i * kBBlockBytes + group * kBGroupBytes + k * 16 * kRowBytes) >> 4),
            a_descriptor + ((i * kABlockBytes + k * 32) >> 4), 1);
      }
    }
  }
  wgmma_commit();
  warpgroup_fence_operand(accumulators);
}

// accumulators += the products of the blocks of A of a chunk or row, as they arrive in the ring: whole steps, each
// issued before the stage of the previous one is released; and a shorter step for the remaining blocks.
__device__ __forceinline__ void multiply(Accumulators& accumulators, uint32 base, PipelineState& state,
    uint32 a_descriptor, uint32 b_descriptor, int blocks) {
  const bool warp_leader = threadIdx.x % 32 == 0;
  const int steps = blocks / kStepBlocks, left = blocks % kStepBlocks;
  uint32 running = 0;  // empty barrier of the stage that the last issued step reads
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(base + kFullBarrier + 8 * state.index, state.phase);
    issue_blocks<kStepBlocks>(accumulators, a_descriptor + (state.index * kABytes >> 4),
        b_descriptor + (state.index * kBBytes >> 4));
    wgmma_wait<1>();  // the previous step's are complete: its stage has been read
    if (step > 0 && warp_leader) mbarrier_arrive(running);
    running = base + kEmptyBarrier + 8 * state.index;
    state.advance();
  }
  if (left > 0) mbarrier_wait(base + kFullBarrier + 8 * state.index, state.phase);
#pragma unroll 1
  for (int i = 0; i < left; ++i) {
    issue_blocks<1>(accumulators, a_descriptor + ((state.index * kABytes + i * kABlockBytes) >> 4),
        b_descriptor + ((state.index * kBBytes + i * kBBlockBytes) >> 4));
  }
  wgmma_wait<0>();
  warpgroup_fence_operand(accumulators);
  if (steps > 0 && warp_leader) mbarrier_arrive(running);
  if (left > 0) {
    if (warp_leader) mbarrier_arrive(base + kEmptyBarrier + 8 * state.index);
    state.advance();
  }
}

// Producer: one warp fills the ring, tile after tile. Its lanes hold block columns; one of them issues the copies.
__device__ __forceinline__ void produce(const Params& p, uint32 base) {
  PipelineState state;
  Tile tile(p, blockIdx.x);
  int next_columns = tile.load_columns(p, tile.first);

  for (int number = blockIdx.x; number < p.tiles; number += gridDim.x) {
    // Load the next tile and, below, the next columns well before they are needed.
    const Tile next_tile(p, number + gridDim.x);
    int columns = 0;

#pragma unroll 1
    for (int block = tile.first; block < tile.end; block += kStepBlocks) {
      const int i = (block - tile.first) % 32;
      if (i == 0) {
        columns = next_columns;
        next_columns = tile.load_columns(p, block + 32);
      }
      load_blocks(p, base, state, tile, block, columns, i);
    }
    tile = next_tile;
    next_columns = tile.load_columns(p, tile.first);
  }
}

// Consumer: iterates over the tiles. The next one is loaded while the current one is computed, so that it starts
// without waiting for its block row.
struct TileWalk {
  const Params& p;
  int number;
  Tile tile, next_tile;  // `tile` is invalid before the first call of next()

  __device__ __forceinline__ TileWalk(const Params& p)
      : p(p), number(blockIdx.x - gridDim.x), tile(p, p.tiles), next_tile(p, blockIdx.x) {}

  __device__ __forceinline__ bool next() {
    number += gridDim.x;
    tile = next_tile;
    if (number >= p.tiles) return false;
    next_tile = Tile(p, number + gridDim.x);
    return true;
  }
};

// Consumer: one warpgroup computes its column groups of the C tile, tile after tile.
__device__ __forceinline__ void consume(const Params& p, uint32 base, int warpgroup) {
  const int first_group = warpgroup * kWarpgroupGroups;
  const uint32 a_descriptor = wgmma_descriptor(base + kAOffset, 0);
  const uint32 b_descriptor = wgmma_descriptor(base + kBOffset + first_group * kBGroupBytes, 0);
  PipelineState state;
  Epilogue epilogue(base, warpgroup);

  for (TileWalk walk(p); walk.next();) {
    const Tile& tile = walk.tile;
    const int c_row = tile.row * kTileM, c_column = tile.column * kTileN + first_group * kGroupColumns;
    // An empty block row has no steps: it stores these zeros.
    Accumulators accumulators;
#pragma unroll
    for (int group = 0; group < kWarpgroupGroups; ++group) {
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) accumulators[group][i] = 0.0f;
    }
    multiply(accumulators, base, state, a_descriptor, b_descriptor, tile.end - tile.first);
    epilogue.store(p, accumulators, c_row, c_column);
  }
  epilogue.wait();
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    h100_bsr_spmm_b32_few_columns(const __grid_constant__ Params p) {
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));

  // One thread initializes the barriers. An empty barrier counts one arrival per consumer warp.
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kFullBarrier + 8 * i, 1);
      mbarrier_init(base + kEmptyBarrier + 8 * i, kConsumerWarps);
    }
    fence_mbarrier_init();
    prefetch_tensormap(&p.a_map);
    prefetch_b(p);
    prefetch_tensormap(&p.c_map);
  }
  __syncthreads();

  // The shuffle proves to the compiler that it is warp-uniform, so values derived from it go to uniform registers.
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  if (warp == kConsumerWarps) {
    produce(p, base);
  } else {
    consume(p, base, warp / 4);
  }
}
