// Generated from specs/h100_bsr_spmm_b16_balanced.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_bsr_spmm_b16_balanced.yaml
// spec: {"arch":"sm_90a","block":{"cols":16,"rows":16},"copy":"tma","ctas_per_sm":2,"dtype":"fp16","mma":"wgmma","op":"bsr_spmm","schedule":"cooperative","scheduler":"dynamic","stages":6,"tile":{"k":16,"m":16,"n":512}}
// spec hash: 67195872cdccc436b58ddec2ac39f3690a8473da11621b2e41141a8777310f24
// seal: sha256 9b1c692d144c61e9dd3c9903fbad15c91b13f833b76e8ac5b6d3a133ba4d1154

// BSR x dense for sm_90a with small blocks: C = A B with A in block-sparse rows and
// B, C dense and row-major.
// The stored result is A B, computed in fp32.
//
// The product is computed transposed, C^T = B^T A^T: a wgmma has 64 rows, a block row has fewer. Columns of B are
// therefore its M side, rows of a block its N side. A block row of height h does at most h FLOPs per loaded byte of B,
// so throughput depends on the loads in flight: the ring is deep and the tile wide.
//
// Roles
//   warpgroups 0, 1  consumers. Each accumulates its column groups of the C tile in registers, then stores them by TMA.
//   the next warp    producer. It fills the ring by TMA; the last warp is the scheduler of units.
//
// Barriers
//   full[i]   producer -> consumers: stage i holds the block of A and the B tile of one step
//   empty[i]  consumers -> producer: every consumer warp has finished with stage i
//   named barrier kWarpgroupBarrier + w: the threads of consumer w, around its staging of C and of its partial results
//
// Pipeline of a consumer: the products of step s are issued before those of step s - 1 complete. When only those of
// step s can still be running, the stage of step s - 1 is released. The producer runs ahead across units.
//
// Symbols
//   tile         kTileM x kTileN of C: one block row, kTileN columns
//   step         one block of A, and the matching kBlockCols rows of B of it
//   group        64 columns of B or C: in shared memory rows of 128 bytes, swizzled. A block of A has rows of
//                32 bytes there
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

constexpr int kTileM = 16;  // rows of a C tile: one block row
constexpr int kTileN = 512;  // columns of a C tile
constexpr int kBlockCols = 16;  // columns of a stored block of A
constexpr int kStages = 6;  // depth of the ring of A and B tiles
constexpr int kThreads = 320;  // warpgroups that consume, then one warp that produces, one that schedules
constexpr int kConsumerWarps = 8;  // warps that compute
constexpr int kGroupColumns = 64;  // columns of a group: the M side of one wgmma
constexpr int kTileGroups = 8;  // column groups of a tile
constexpr int kWarpgroupGroups = 4;  // column groups of a warpgroup
constexpr int kStagingGroups = 2;  // column groups that a warpgroup may have in flight
constexpr int kAccumulators = 8;  // accumulators per thread and column group
constexpr int kABytes = 512;  // bytes of a block of A
constexpr int kBBytes = 16384;  // bytes of a B tile
constexpr int kBGroupBytes = 2048;  // bytes of one column group of B
constexpr int kCGroupBytes = 2048;  // bytes of one column group of C
constexpr int kQueue = 2;  // depth of the queue of units that the scheduler publishes
constexpr int kAnnouncementBytes = 152;  // bytes per queue entry
constexpr int kPartialFloats = 4096;  // floats of a warpgroup's partial sum

// Dynamic shared memory: 110024 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 3072 bytes: ring of blocks of A, 16 rows of 32 bytes
constexpr int kBOffset = 3072;  // 98304 bytes: ring of B tiles, 8 column groups of 16 rows of 128 bytes
constexpr int kCOffset = 101376;  // 8192 bytes: 2 column groups of C of each warpgroup
constexpr int kBarriersOffset = 109568;  // 96 bytes: mbarriers: full, then empty
constexpr int kQueueBarriersOffset = 109664;  // 40 bytes: mbarriers of the queue: requested, then full, then empty
constexpr int kQueueOffset = 109712;  // 304 bytes: published units and their first block columns
constexpr int kIsLastOffset = 110016;  // 8 bytes: whether a warpgroup finished the last chunk

constexpr int kFullBarrier = kBarriersOffset;
constexpr int kEmptyBarrier = kFullBarrier + 8 * kStages;
constexpr int kWarpgroupThreads = 128;
constexpr int kRowBytes = 128;  // bytes of a row of a column group in shared memory: the span of the swizzle
constexpr int kWarpgroupBarrier = 1;  // named barrier of consumer w: kWarpgroupBarrier + w
using Accumulators = float[kWarpgroupGroups][kAccumulators];

// Launch: 320 threads per block, 110024 bytes of dynamic shared memory.
// Grid: 2 thread blocks per SM; dynamic scheduler of units (chunk of a block row, column tile), columns outermost.
struct Params {
  TensorMap a_map;  // stored blocks of A (cols, rows, nnz): box 16 x 16 x 1, swizzle 32
  TensorMap b_map;  // B (N, K): box 64 x 16, swizzle 128
  TensorMap b_groups_map;  // column groups of B (columns of a group, K, groups): box 64 x 16 x 8, swizzle 128
  TensorMap c_map;  // C (N, M): box 64 x 16, swizzle 128
  const int* crow_indices;  // row offsets: first block of each block row, then the end of the last
  const int* col_indices;  // block column of each stored block
  int index_words;  // 32-bit words per index, 1 or 2; the kernel reads the low word
  int n;  // columns of B and C
  int whole_rows;  // leading rows of B for which one copy loads all column groups of a tile
  const int4* chunks;  // for each chunk: block row, first block, end block, first chunk of the row or -1
  const int* chunk_count;  // number of chunks of all block rows
  int chunk_blocks;  // most blocks per chunk
  int column_tiles;  // tiles per block row
  int group_tiles;  // column tiles whose parts of B fit the L2 together
  int* scheduler;  // units taken, finished thread blocks; both are 0 between launches
  int* chunks_done;  // finished chunks of each tile of a split block row, by warpgroup; 0 between launches
  float* parts;  // partial sums of C: accumulators of the chunks of split block rows
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

// The same for a K-major tile whose rows are 32 bytes. Upper half: 32-byte swizzle, 256 bytes from 8
// rows to the next 8.
constexpr uint32 kNarrowDescriptorUpperHalf = 0xC0000010;

// wgmma.mma_async m64n16k16: D = A B, + D if `accumulate`; both in shared memory, A M-major with 128-byte rows, B
// K-major with narrow rows. A and B are the instruction's operands. After p come scale factors of 1 for A and B, then
// whether A and B are MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n16k16_m_major_narrow(
    float (&d)[8], uint32 a, uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %10, 0;\n"
      "mov.b64 a, { %8, %11 };\n"
      "mov.b64 b, { %9, %12 };\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, a, b, p, 1, 1, 1, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
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

// Block rows have very different lengths. Long ones are therefore split into chunks of at most p.chunk_blocks blocks,
// and thread blocks draw units: a chunk of a block row, for one column tile. All thread blocks then end at about the
// same time. Units are ordered so that p.group_tiles column tiles, as many as have their columns of B in the L2
// together, are finished before the next ones begin: concurrent thread blocks then share them. Within these, the chunks
// of the longest block rows come first.
struct Unit {
  int column = -1;  // index of the column tile; -1 past the last unit
  int row = 0, first = 0, end = 0;  // block row, and the blocks [first, end) of the chunk
  int chunk = 0, first_chunk = -1;  // index of the chunk, and of its row's first chunk; -1 if it is the only one

  Unit() = default;
  __device__ __forceinline__ Unit(const Params& p, int unit) {
    const int chunks = __ldg(p.chunk_count);
    if (unit >= chunks * p.column_tiles) return;
    const int first_column = unit / (chunks * p.group_tiles) * p.group_tiles;
    const int in_band = unit - first_column * chunks, width = min(p.group_tiles, p.column_tiles - first_column);
    column = first_column + in_band % width;
    chunk = in_band / width;
    const int4 entry = __ldg(p.chunks + chunk);
    row = entry.x;
    first = entry.y;
    end = entry.z;
    first_chunk = entry.w;
  }
  // Block columns of 32 blocks starting at `block`, one per lane.
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

// Copies the block of A and the B tile of one step to a stage of the ring, as soon as it is empty.
__device__ __forceinline__ void load_step(const Params& p, uint32 base, PipelineState state, int block, int b_row,
    int b_column) {
  const uint32 full = base + kFullBarrier + 8 * state.index;
  mbarrier_wait(base + kEmptyBarrier + 8 * state.index, state.phase ^ 1);
  mbarrier_arrive_expect_tx(full, kABytes + kBBytes);
  tma_load_3d(base + kAOffset + state.index * kABytes, &p.a_map, full, 0, 0, block);
  load_b(p, base + kBOffset + state.index * kBBytes, full, b_row, b_column);
}

constexpr int kRingBlocks = kStages;  // capacity of the ring, in blocks of A

// Producer: loads block `block`, whose block column is in lane `i`.
__device__ __forceinline__ void load_blocks(const Params& p, uint32 base, PipelineState& state,
    const Unit& unit, int block, int columns, int i) {
  const int b_row = __shfl_sync(0xFFFFFFFF, columns, i) * kBlockCols;
  if (elect()) load_step(p, base, state, block, b_row, unit.column * kTileN);
  state.advance();
  __syncwarp();
}

// accumulators += B^T A^T for this warpgroup's column groups of one step (asynchronous).
__device__ __forceinline__ void issue_step(Accumulators& accumulators, uint32 a_descriptor, uint32 b_descriptor) {
  warpgroup_fence_operand(accumulators);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kBlockCols / 16; ++k) {
#pragma unroll
    for (int group = 0; group < kWarpgroupGroups; ++group) {
      // 16 rows of B are 16 rows of 128 bytes; 16 columns of A are 32 bytes of its rows.
      wgmma_m64n16k16_m_major_narrow(accumulators[group],
          b_descriptor + ((group * kBGroupBytes + k * 16 * kRowBytes) >> 4), a_descriptor + (k * 32 >> 4), 1);
    }
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

// Barriers of the queue from the scheduler to the other warps. wanted: the producer has requested the next unit,
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
  Unit unit;
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

// Scheduler: one warp. Finds the next unit while the other warps work, which hides the latency of its dependent
// loads. The first unit of a thread block has the thread block's own index; each further one is the next unassigned
// one, taken when the producer requests it.
__device__ __forceinline__ void schedule(const Params& p, uint32 base) {
  const bool leader = threadIdx.x % 32 == 0;
  QueueState state;
  int phase = 0;
  for (int number = blockIdx.x;;) {
    const Unit unit(p, number);
    const int columns = unit.load_columns(p, unit.first);
    mbarrier_wait(base + kQueueEmptyBarrier + 8 * state.entry, state.phase ^ 1);
    queue_entry(state.entry).columns[threadIdx.x % 32] = columns;
    if (leader) queue_entry(state.entry).unit = unit;
    // Each lane has written a part of the entry, so each arrives.
    mbarrier_arrive(base + kQueueFullBarrier + 8 * state.entry);
    if (unit.column < 0) break;
    state.advance();
    mbarrier_wait(base + kWantedBarrier, phase);
    phase ^= 1;
    const int taken = leader ? atomicAdd(p.scheduler, 1) + static_cast<int>(gridDim.x) : 0;
    number = __shfl_sync(0xFFFFFFFF, taken, 0);
  }
  if (leader) release_scheduler(p);
}

// Producer, the whole warp: the next unit, and its first block columns, one per lane.
__device__ __forceinline__ Unit take_next(uint32 base, QueueState& state, int& columns) {
  mbarrier_wait(base + kQueueFullBarrier + 8 * state.entry, state.phase);
  const Unit unit = queue_entry(state.entry).unit;
  columns = queue_entry(state.entry).columns[threadIdx.x % 32];
  mbarrier_arrive(base + kQueueEmptyBarrier + 8 * state.entry);
  state.advance();
  return unit;
}

// Producer: one warp fills the ring, unit after unit. Its lanes hold block columns; one of them issues the
// copies.
__device__ __forceinline__ void produce(const Params& p, uint32 base) {
  const bool leader = threadIdx.x % 32 == 0;
  PipelineState state;
  QueueState queue_position;

  while (true) {
    int next_columns;
    const Unit unit = take_next(base, queue_position, next_columns);
    if (unit.column < 0) break;
    bool has_asked = false;  // whether it has requested the next unit
    int columns = 0;

#pragma unroll 1
    for (int block = unit.first; block < unit.end; ++block) {
      const int i = (block - unit.first) % 32;
      if (i == 0) {
        columns = next_columns;
        next_columns = unit.load_columns(p, block + 32);
      }
      if (!has_asked && unit.end - block <= kRingBlocks) {
        has_asked = true;
        if (leader) mbarrier_arrive(base + kWantedBarrier);
      }
      load_blocks(p, base, state, unit, block, columns, i);
    }
    if (!has_asked && leader) mbarrier_arrive(base + kWantedBarrier);
  }
}

// Consumer, a whole warp: iterates over the work that the scheduler hands out.
struct UnitWalk {
  uint32 base;
  Unit unit;
  QueueState state;

  __device__ __forceinline__ UnitWalk(uint32 base) : base(base) {}

  __device__ __forceinline__ bool next() {
    mbarrier_wait(base + kQueueFullBarrier + 8 * state.entry, state.phase);
    const Unit& entry = queue_entry(state.entry).unit;
    unit.column = read_by_leader(&entry.column);
    unit.row = read_by_leader(&entry.row);
    unit.first = read_by_leader(&entry.first);
    unit.end = read_by_leader(&entry.end);
    unit.chunk = read_by_leader(&entry.chunk);
    unit.first_chunk = read_by_leader(&entry.first_chunk);
    if (threadIdx.x % 32 == 0) mbarrier_arrive(base + kQueueEmptyBarrier + 8 * state.entry);
    state.advance();
    return unit.column >= 0;
  }
};

// A partial result is the contribution of one of several chunks of a block row to a tile of C, in fp32. A warpgroup
// stores its column groups of it here: the accumulators of each thread, four floats at a time.
__device__ __forceinline__ float4* partial_place(const Params& p, int chunk, int column, int warpgroup) {
  const int64 part = (static_cast<int64>(chunk) * p.column_tiles + column) * (kConsumerWarps / 4) + warpgroup;
  return reinterpret_cast<float4*>(p.parts + part * kPartialFloats) + threadIdx.x % kWarpgroupThreads;
}

// Stores a warpgroup's column groups of a partial result in global memory. If it is the last chunk of the block row,
// adds all of them and returns true. They are added in chunk order, so the result does not depend on which one finishes
// last.
__device__ __forceinline__ bool combine_partials(const Params& p, const Unit& unit, int warpgroup,
    Accumulators& accumulators) {
  int* const is_last = reinterpret_cast<int*>(shared + kIsLastOffset) + warpgroup;  // last chunk of the block row
  float4* const place = partial_place(p, unit.chunk, unit.column, warpgroup);
#pragma unroll
  for (int group = 0; group < kWarpgroupGroups; ++group) {
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 4) {
      const float* x = accumulators[group] + i;
      place[(group * kAccumulators + i) / 4 * kWarpgroupThreads] = make_float4(x[0], x[1], x[2], x[3]);
    }
  }

  // Counts the finished chunks; the last one resets the counter to 0 for the next launch. Each thread's stores come
  // before the count. The partial results of other threads are read after it, bypassing the L1 (__ldcg).
  const int blocks = load_index(p.crow_indices, p.index_words, unit.row + 1) -
                     load_index(p.crow_indices, p.index_words, unit.row);
  const int chunks = (blocks + p.chunk_blocks - 1) / p.chunk_blocks;
  __threadfence();
  bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
  if (threadIdx.x % kWarpgroupThreads == 0) {
    // Counters of split block rows are indexed by the first chunk of their row.
    const int counted = unit.first_chunk * p.column_tiles + unit.column;
    int* const counter = p.chunks_done + counted * (kConsumerWarps / 4) + warpgroup;
    *is_last = atomicAdd(counter, 1) == chunks - 1;
    if (*is_last) *counter = 0;
    __threadfence();
  }
  bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
  if (!*is_last) return false;

#pragma unroll
  for (int group = 0; group < kWarpgroupGroups; ++group) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) accumulators[group][i] = 0.0f;
  }
#pragma unroll 1
  for (int chunk = unit.first_chunk; chunk < unit.first_chunk + chunks; ++chunk) {
    const float4* const from = partial_place(p, chunk, unit.column, warpgroup);
#pragma unroll
    for (int group = 0; group < kWarpgroupGroups; ++group) {
#pragma unroll
      for (int i = 0; i < kAccumulators; i += 4) {
        const float4 part = __ldcg(from + (group * kAccumulators + i) / 4 * kWarpgroupThreads);
        accumulators[group][i] += part.x;
        accumulators[group][i + 1] += part.y;
        accumulators[group][i + 2] += part.z;
        accumulators[group][i + 3] += part.w;
      }
    }
  }
  return true;
}

// Consumer: one warpgroup computes its column groups of the C tile, unit after unit.
__device__ __forceinline__ void consume(const Params& p, uint32 base, int warpgroup) {
  const int first_group = warpgroup * kWarpgroupGroups;
  const uint32 a_descriptor = wgmma_descriptor(base + kAOffset, 0);
  const uint32 b_descriptor = wgmma_descriptor(base + kBOffset + first_group * kBGroupBytes, 0);
  PipelineState state;
  Epilogue epilogue(base, warpgroup);

  for (UnitWalk walk(base); walk.next();) {
    const Unit& unit = walk.unit;
    const int c_row = unit.row * kTileM, c_column = unit.column * kTileN + first_group * kGroupColumns;
    // An empty block row has no steps: it stores these zeros.
    Accumulators accumulators;
#pragma unroll
    for (int group = 0; group < kWarpgroupGroups; ++group) {
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) accumulators[group][i] = 0.0f;
    }
    multiply(accumulators, base, state, a_descriptor, b_descriptor, unit.end - unit.first);
    if (unit.first_chunk >= 0 && !combine_partials(p, unit, warpgroup, accumulators)) continue;

    epilogue.store(p, accumulators, c_row, c_column);
  }
  epilogue.wait();
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    h100_bsr_spmm_b16_balanced(const __grid_constant__ Params p) {
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));

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

  // The shuffle proves to the compiler that it is warp-uniform, so values derived from it go to uniform registers.
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  if (warp == kConsumerWarps) {
    produce(p, base);
  } else if (warp == kConsumerWarps + 1) {
    schedule(p, base);
  } else {
    consume(p, base, warp / 4);
  }
}
