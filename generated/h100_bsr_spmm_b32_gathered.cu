// Generated from specs/h100_bsr_spmm_b32_gathered.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_bsr_spmm_b32_gathered.yaml
// spec: {"arch":"sm_90a","block":{"cols":32,"rows":32},"copy":"tma","dtype":"fp16","mma":"wgmma","op":"bsr_spmm","schedule":"cooperative","stages":3,"tile":{"k":32,"m":384,"n":128}}
// spec hash: 4ab2eb374f3a3ef0c8e32dcff7fdc22ed06bf84771913746004b1f003ffcb30f
// seal: sha256 686e9cfcf730c92841d58411b9568ebc9ff7d649bc6609add82d0583e0be7f24

// BSR x dense for sm_90a with small blocks: C = A B with A in block-sparse rows and B, C dense and row-major.
//
// The product is computed transposed, C^T = B^T A^T: a wgmma has 64 rows, a block row has fewer. Columns of B are
// therefore its M side, rows of a block its N side.
//
// The rows of B that one block of A needs do little work per byte. A tile therefore has many block rows, and all of
// them that have a block at a loaded column share its rows of B. A preprocessing step groups block rows by their
// overlap, and orders the block columns of each tile in rounds. In a round, every block row takes one of its blocks, at
// a column whose rows of B have been in shared memory since this round or an earlier one. The products of a round are
// thus always the same instructions on the same accumulators; only the address of B differs.
//
// Roles
//   h100_bsr_spmm_b32_gathered_pack_a, launched first, copies the blocks of A to packets, in order of use. It reads only A
//     and entries: if A does not change, it may run once, by itself, for many launches of this kernel
//   warpgroups 0 to 2  consumers. Each has a third of the block rows of a tile, with their products in registers
//   the last warpgroup producer. One of its warps loads packets; the others share the rows of B of a round
//
// Thread blocks form clusters of kCluster, with neighboring column tiles of one group. Each loads its rows of B, and a
// part of every packet for the whole cluster.
//
// Barriers
//   full[i]    producers -> consumers: the packet in stage i and the rows of B of its round have arrived
//   packet[i]  consumers -> producer: every consumer warp of the cluster has finished with the packet
//   rows[i]    consumers -> producers: every consumer warp of this thread block has finished with the rows of B
//   named barrier kWarpgroupBarrier + w: the threads of consumer w around its staging of C
//
// Pipeline of a consumer: it releases a round after its products are complete. Meanwhile, the tensor cores work for the
// other consumers, and the producers are rounds ahead.
//
// Symbols
//   group        the block rows of one tile. Tiles are numbered groups first, so that concurrent thread blocks share
//                columns of B, which then come from the L2
//   record       of a round: the block columns that it loads, their number, the slot in the ring of rows of B for the
//                first of them, the number of slots that have a block, and how many of the ring slots filled last
//                before it are still needed by it or by later rounds
//   slot         position of a block row in its tile: kSlots in each consumer warpgroup. A slot may have no block row,
//                and no block in a round: it then multiplies zeros by zeros
//   round        one block of each slot, and the rows of B of up to kRoundColumns block columns that are loaded for it:
//                those that match its slots and are not left from earlier rounds
//   packet       of a round: the blocks of all slots, and the location of the rows of B for each of them
//   column group 64 columns of B or C: in shared memory rows of 128 bytes, swizzled. A block of A has rows of
//                64 bytes there
//   accumulators a thread's part of a block row and column group: columns c and c + 8 of its warp's 16 (c = lane / 4),
//                rows 8 j + 2 (lane % 4) + {0, 1}. Number 4 j + 2 h + e is column
//                c + 8 h, row with {e}

using int64 = long long;
using uint32 = unsigned int;

// Stands for CUtensorMap: 128 opaque bytes (PTX ISA, "Tensor-Map"), 64-byte aligned (driver API,
// cuTensorMapEncodeTiled). The comments of parameters of this type give the dimensions, innermost first, the box of one
// copy, and the bytes of the swizzle.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

constexpr int kBlockRows = 32;  // rows of a block of A
constexpr int kBlockCols = 32;  // columns of a block of A
constexpr int kTileSlots = 12;  // slots per C tile, one for each block row
constexpr int kTileN = 128;  // columns of a C tile
constexpr int kCluster = 2;  // thread blocks that load A together: neighboring column tiles of a group
constexpr int kStages = 3;  // depth of the ring of packets, one round each
constexpr int kRingColumns = 15;  // slots of the ring of rows of B, one block column each
constexpr int kRoundColumns = 15;  // most block columns per round
constexpr int kRecordWords = 16;  // words per record of a round
constexpr int kRecords = 4;  // records that a producer warp loads ahead
constexpr int kThreads = 512;  // warpgroups that consume, then one that produces
constexpr int kProducerWarps = 4;  // producer warps
constexpr int kColumnWarps = 3;  // producer warps that load rows of B; the last warp loads packets
constexpr int kWarpColumns = 2;  // most columns of a round per such warp
constexpr int kProducerRegisters = 32;  // registers per producer thread
constexpr int kConsumerRegisters = 160;  // registers per consumer thread; 32 + 3 x 160 equals the 4 x 128 at launch
constexpr int kPackThreads = 256;  // threads per block of the prologue that packs A
constexpr int kPackChunks = 6;  // chunks of A per thread of the prologue
constexpr int kBlockChunks = 128;  // 16-byte chunks per block of A
constexpr int kGroupColumns = 64;  // columns of a column group
constexpr int kTileGroups = 2;  // column groups of a tile
constexpr int kABlockBytes = 2048;  // bytes of a block of A
constexpr int kPacketBytes = 24640;  // most bytes per packet
constexpr int kStageBytes = 25088;  // stride between packets in shared memory, in bytes
constexpr int kBColumnBytes = 8192;  // bytes of the rows of B that match a block column
constexpr int kBGroupBytes = 4096;  // bytes per column group of these rows
constexpr int kConsumers = 3;  // warpgroups that compute
constexpr int kSlots = 4;  // slots of a warpgroup
constexpr int kStagingSlots = 1;  // slots stored at a time
constexpr int kAccumulators = 16;  // accumulators per thread, block row and column group
constexpr int kARowBytes = 64;  // bytes of a row of a block of A
constexpr int kARowChunks = 4;  // 16-byte chunks of such a row
constexpr int kCGroupBytes = 4096;  // bytes of one column group of a block row of C

// Dynamic shared memory: 230984 bytes. Byte offsets:
constexpr int kBOffset = 0;  // 122880 bytes: ring of rows of B, 15 x 2 column groups of 32 rows of 128 bytes
constexpr int kZerosOffset = 122880;  // 8192 bytes: rows of zeros, the operand of slots without a block
constexpr int kCOffset = 131072;  // 24576 bytes: staging of C
constexpr int kPacketsOffset = 155648;  // 75264 bytes: ring of packets: blocks of A and locations of their rows of B
constexpr int kBarriersOffset = 230912;  // 72 bytes: mbarriers: full, of packets, of rows of B

constexpr int kFullBarrier = kBarriersOffset;
constexpr int kPacketBarrier = kFullBarrier + 8 * kStages;
constexpr int kRowsBarrier = kPacketBarrier + 8 * kStages;
constexpr int kWarpgroupThreads = 128;
constexpr int kRowBytes = 128;  // bytes of a row of a column group in shared memory: the span of the swizzle
constexpr int kSlotBytes = kTileGroups * kCGroupBytes;  // bytes of a slot of C
constexpr int kWarpgroupBarrier = 1;  // named barrier of consumer w: kWarpgroupBarrier + w

// Launch: 512 threads per block, 230984 bytes of dynamic shared memory, clusters of 2.
// Grid: one thread block per SM, looping over tiles (persistent), groups of block rows fastest.
// Prologue, with the same parameters: h100_bsr_spmm_b32_gathered_pack_a, 256 threads per block.
struct Params {
  TensorMap b_map;  // B (N, K): box 64 x 32, swizzle 128
  TensorMap b_groups_map;  // column groups of B (columns of a group, K, groups): box 64 x 32 x 2, swizzle 128
  TensorMap c_map;  // C (N, M): box 64 x 32, swizzle 128
  const uint4* a;  // stored blocks of A
  const int* rounds;  // records: 15 block columns, then a StepHeader
  const int2* entries;  // for each round and slot: stored block, ring slot of its rows of B; or -1
  const int* round_starts;  // first round of each group, then the end of the last
  const int* slot_rows;  // for each group and slot: block row, or -1
  uint4* packets;  // for each round: blocks of A and the ring slots of their rows of B
  int groups;  // groups of block rows
  int tiles;  // groups * clusters of column tiles
  int n;  // columns of B and C
  int whole_rows;  // leading rows of B for which one copy loads all column groups of a tile
};

// barrier.cluster.arrive: arrives at the cluster's barrier; this thread's earlier writes are visible after it (PTX ISA,
// "barrier.cluster")
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
// barrier.cluster.wait: waits until all threads of the cluster have arrived (PTX ISA, "barrier.cluster")
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// mapa: maps a shared-memory address of this thread block to another one of the cluster (PTX ISA, "mapa")
__device__ __forceinline__ uint32 map_shared(uint32 address, int block) {
  uint32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
  return mapped;
}

// mbarrier.arrive: one arrival at a barrier of any thread block of the cluster. Without `.release.cluster`, which would
// wait for every write of the thread, device-wide; there are none to wait for (PTX ISA, "mbarrier.arrive")
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32 mapped) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}

// mbarrier.init: sets the number of arrivals that complete a phase (PTX ISA, "mbarrier.init")
__device__ __forceinline__ void mbarrier_init(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: makes the initialized barriers visible to the async proxy and to the cluster's other thread
// blocks (PTX ISA, "membar / fence")
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

// cp.async.bulk.multicast::cluster: copies `bytes` contiguous bytes to the same offset in the shared memory of each
// thread block in `blocks`, counted by the mbarrier at the same offset in each; addresses and bytes are multiples of 16
// (PTX ISA, "cp.async.bulk")
__device__ __forceinline__ void tma_load_bytes_multicast(
    uint32 to, const void* from, int bytes, uint32 barrier, unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(blocks) : "memory");
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

// bar.sync: waits at named barrier `id` of `threads` threads (PTX ISA, "bar")
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
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

// Packs a round: the block of each slot, its rows swizzled as by TMA, and the location of its rows of B, in units of 16
// bytes from the start of shared memory. A slot without a block has zeros.
extern "C" __global__ void __launch_bounds__(kPackThreads)
    h100_bsr_spmm_b32_gathered_pack_a(const __grid_constant__ Params p) {
  const int64 round = blockIdx.x;
  const int2* entries = p.entries + round * kTileSlots;
  uint4* packet = p.packets + round * (kPacketBytes / 16);

  // Issue all loads of a thread at once.
  uint4 elements[kPackChunks];
#pragma unroll
  for (int i = 0; i < kPackChunks; ++i) {
    const int chunk = threadIdx.x + i * kPackThreads, block = entries[chunk / kBlockChunks].x;
    elements[i] = make_uint4(0, 0, 0, 0);
    if (block >= 0) elements[i] = p.a[static_cast<int64>(block) * kBlockChunks + chunk % kBlockChunks];
  }
#pragma unroll
  for (int i = 0; i < kPackChunks; ++i) {
    const int chunk = threadIdx.x + i * kPackThreads, row = chunk % kBlockChunks / kARowChunks;
    const int place = chunk % kARowChunks ^ row / (128 / kARowBytes) % kARowChunks;  // position in its row, swizzled
    packet[chunk / kARowChunks * kARowChunks + place] = elements[i];
  }
  if (threadIdx.x < kTileSlots) {
    const int place = entries[threadIdx.x].y;
    const int from = place < 0 ? kZerosOffset : kBOffset + place * kBColumnBytes;
    reinterpret_cast<int*>(packet + kTileSlots * kBlockChunks)[threadIdx.x] = from >> 4;
  }
}

// Position in the ring of packets: the stage, and the parity of the pass over the ring, 0 in the first. Consumers wait
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

// Iterates over the rounds of this cluster's tiles, for a whole warp. The range of the next tile's rounds is loaded one
// tile ahead.
struct RoundWalk {
  int tile, column, round, end;
  int next_group, next_column, next_round, next_end;
  int clusters, group_step, column_step;  // strides from a tile to the next

  __device__ __forceinline__ RoundWalk(const Params& p) : tile(blockIdx.x / kCluster), clusters(gridDim.x / kCluster) {
    group_step = clusters % p.groups;
    column_step = clusters / p.groups;
    next_group = tile % p.groups;
    next_column = tile / p.groups;
    ask(p);
    enter(p);
    settle(p);
  }
  // Loads the range of the next tile's rounds; it is readable even after the last tile.
  __device__ __forceinline__ void ask(const Params& p) {
    next_round = __ldg(p.round_starts + next_group);
    next_end = __ldg(p.round_starts + next_group + 1);
  }
  // Advances to the next tile.
  __device__ __forceinline__ void enter(const Params& p) {
    column = next_column * kCluster + blockIdx.x % kCluster;
    round = next_round;
    end = next_end;
    next_group += group_step;
    next_column += column_step;
    if (next_group >= p.groups) {
      next_group -= p.groups;
      ++next_column;
    }
    ask(p);
  }
  // Skips tiles without rounds.
  __device__ __forceinline__ void settle(const Params& p) {
    while (round == end && tile < p.tiles) {
      tile += clusters;
      enter(p);
    }
  }
  // The record of this round, one word per lane, then the index of the round and the column tile; advances to the next
  // round. After the last round, it is 0.
  __device__ __forceinline__ int take(const Params& p) {
    const int lane = threadIdx.x % 32;
    if (tile >= p.tiles) return 0;
    int word = lane == kRecordWords ? round : column;
    if (lane < kRecordWords) word = __ldg(p.rounds + static_cast<int64>(round) * kRecordWords + lane);
    if (++round == end) settle(p);
    return word;
  }
};

// The last word of the record of a round.
struct StepHeader {
  int word;

  __device__ __forceinline__ int columns() const { return word & 255; }           // block columns that it loads
  __device__ __forceinline__ int first_place() const { return word >> 8 & 255; }  // ring slot of the first one
  __device__ __forceinline__ int kept() const { return word >> 24; }              // earlier columns still needed
};

// Calls `load` with the record of each round of this cluster's tiles, for a whole warp. A record is loaded kRecords
// rounds ahead and stays in its destination register: moving it would wait for it.
template <typename Load>
__device__ __forceinline__ void for_each_round(const Params& p, Load load) {
  PipelineState state;
  RoundWalk walk(p);
  int records[kRecords];
#pragma unroll
  for (int i = 0; i < kRecords; ++i) records[i] = walk.take(p);

  while (true) {
#pragma unroll
    for (int i = 0; i < kRecords; ++i) {
      const int record = records[i];
      records[i] = walk.take(p);
      const int header = __shfl_sync(0xFFFFFFFF, record, kRoundColumns);
      if (header == 0) return;
      load(record, StepHeader{header}, state);
      state.advance();
      __syncwarp();
    }
  }
}

// Occupied slots of the ring of rows of B. Each round takes the slots after those of the previous round, but a group
// begins at the first slot: skipped slots count toward the previous round.
struct ColumnRing {
  int head = 0;    // the slot after the last round's
  int taken = 0;   // slots taken so far, over all passes of the ring
  int begins = 0;  // lane i: number of slots no longer needed when the i-th last round began

  // Takes the slots of a round of `count` columns that begins at slot `first`. This round or later ones need the last
  // `kept` slots taken before. Returns the distance, in rounds, to the round that must finish first: the last one of
  // this stage, or a later one whose slots are needed.
  __device__ __forceinline__ int take(int first, int count, int kept) {
    const int lane = threadIdx.x % 32;
    if (first != head) taken += kRingColumns - head;
    const uint32 needed = __ballot_sync(0xFFFFFFFF, begins < taken + count - kRingColumns);
    const int before = __shfl_up_sync(0xFFFFFFFF, begins, 1);
    begins = lane == 0 ? taken - kept : before;
    taken += count;
    head = first + count < kRingColumns ? first + count : first + count - kRingColumns;
    return __ffs(needed | 1 << (kStages - 1));
  }
};

// Producer of rows of B: each of kColumnWarps warps loads the rows for every kColumnWarps-th column of a round.
// Everything known before a slot is free is computed ahead, for all columns at once, one per lane.
__device__ __forceinline__ void produce_columns(const Params& p, uint32 base, int warp) {
  ColumnRing ring;
  for_each_round(p, [&](int record, StepHeader header, const PipelineState& state) {
    const int count = header.columns(), first = header.first_place(), kept = header.kept();
    const int place = first + static_cast<int>(threadIdx.x % 32);
    const int b_column = __shfl_sync(0xFFFFFFFF, record, kRecordWords + 1) * kTileN;
    const uint32 lane_to = base + kBOffset + (place < kRingColumns ? place : place - kRingColumns) * kBColumnBytes;
    uint32 to[kWarpColumns];
    int b_rows[kWarpColumns];
#pragma unroll
    for (int j = 0; j < kWarpColumns; ++j) {
      to[j] = __shfl_sync(0xFFFFFFFF, lane_to, j * kColumnWarps + warp);
      b_rows[j] = __shfl_sync(0xFFFFFFFF, record * kBlockCols, j * kColumnWarps + warp);
    }
    const int mine = (count + kColumnWarps - 1 - warp) / kColumnWarps;
    const int stage = state.index - ring.take(first, count, kept);
    const bool before = stage < 0;  // in the pass over the stages before this one
    mbarrier_wait(base + kRowsBarrier + 8 * (before ? stage + kStages : stage), state.phase ^ before);
    if (elect()) {
      const uint32 full = base + kFullBarrier + 8 * state.index;
      mbarrier_arrive_expect_tx(full, mine * kBColumnBytes);
      if (b_column + kTileN <= p.n) {  // the case for most tiles
#pragma unroll
        for (int j = 0; j < kWarpColumns; ++j) {
          if (j < mine) tma_load_3d(to[j], &p.b_groups_map, full, 0, b_rows[j], b_column / kGroupColumns);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kWarpColumns; ++j) {
          if (j < mine) load_b(p, to[j], full, b_rows[j], b_column);
        }
      }
    }
  });
}

// Producer of packets, one warp: it loads this thread block's part of each packet to all thread blocks of the cluster.
// Their stages must be free, too: the barrier counts the consumer warps of all of them.
__device__ __forceinline__ void produce_packets(const Params& p, uint32 base) {
  for_each_round(p, [&](int record, StepHeader header, const PipelineState& state) {
    const int64 round = __shfl_sync(0xFFFFFFFF, record, kRecordWords);
    const int part_bytes = kPacketBytes / kCluster;
    const int part = blockIdx.x % kCluster * part_bytes;
    const uint32 full = base + kFullBarrier + 8 * state.index;
    mbarrier_wait(base + kPacketBarrier + 8 * state.index, state.phase ^ 1);
    if (elect()) {
      mbarrier_arrive_expect_tx(full, part_bytes * kCluster);
      tma_load_bytes_multicast(base + kPacketsOffset + state.index * kStageBytes + part,
          p.packets + (round * kPacketBytes + part) / 16, part_bytes, full, (1 << kCluster) - 1);
    }
  });
}

// Producer: one warp for packets, the others for rows of B.
__device__ __forceinline__ void produce(const Params& p, uint32 base, int warp) {
  if (warp < kColumnWarps) {
    produce_columns(p, base, warp);
  } else {
    produce_packets(p, base);
  }
}

// A consumer warp's data of a tile. It is loaded before C of the previous tile is stored; after the last tile, the load
// is unused.
struct TileRows {
  int first_round, end_round;
  int rows;  // lane i: block row of the i-th of the warp's slots; repeats after the last one

  __device__ __forceinline__ void ask(const Params& p, int tile, int lane_slot) {
    const int group = tile % p.groups;
    first_round = __ldg(p.round_starts + group);
    end_round = __ldg(p.round_starts + group + 1);
    rows = __ldg(p.slot_rows + group * kTileSlots + lane_slot);
  }
};

// Address of a lane's arrival when its warp releases the round in stage 0. The first lanes release its packet in each
// thread block of the cluster, as all of them load into it; the next lane releases the rows of B in this thread block,
// whose own addresses are valid cluster addresses (PTX ISA, "State spaces"). Barriers of consecutive stages are 8 bytes
// apart.
__device__ __forceinline__ uint32 hand_back_to(uint32 base) {
  const int lane = threadIdx.x % 32;
  return lane < kCluster ? map_shared(base + kPacketBarrier, lane) : base + kRowsBarrier;
}

// Releases a round, for a whole warp.
__device__ __forceinline__ void consumer_release(uint32 to) {
  __syncwarp();
  if (threadIdx.x % 32 <= kCluster) mbarrier_arrive_cluster(to);
}

// accumulators += B^T A^T for this warpgroup's slots of one round. `from` holds the location of the rows of B of each
// slot, in units of 16 bytes, as in descriptors.
__device__ __forceinline__ void multiply_round(float (&accumulators)[kSlots][kTileGroups][kAccumulators],
    uint32 a_descriptor, uint32 b_descriptor, const uint32 (&from)[kSlots]) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int group = 0; group < kTileGroups; ++group) warpgroup_fence_operand(accumulators[slot][group]);
  }
  wgmma_fence();
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int k = 0; k < kBlockCols / 16; ++k) {
#pragma unroll
      for (int group = 0; group < kTileGroups; ++group) {
        // 16 rows of B are 16 rows of 128 bytes; 16 columns of A are 32 bytes of its rows.
        wgmma_m64n32k16_m_major_narrow(accumulators[slot][group],
            b_descriptor + from[slot] + ((group * kBGroupBytes + k * 16 * kRowBytes) >> 4),
            a_descriptor + ((slot * kABlockBytes + k * 32) >> 4), 1);
      }
    }
  }
  wgmma_commit();
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int group = 0; group < kTileGroups; ++group) warpgroup_fence_operand(accumulators[slot][group]);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int group = 0; group < kTileGroups; ++group) warpgroup_fence_operand(accumulators[slot][group]);
  }
}

// Consumer: one warpgroup computes its block rows of the C tile, tile after tile.
__device__ __forceinline__ void consume(const Params& p, const unsigned char* shared, uint32 base, int warpgroup) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool warpgroup_leader = threadIdx.x % kWarpgroupThreads == 0;
  const int blocks_offset = kPacketsOffset + warpgroup * kSlots * kABlockBytes;
  const int places_offset = kPacketsOffset + kTileSlots * kABlockBytes + warpgroup * kSlots * 4;
  const uint32 a_descriptor = wgmma_descriptor(base + blocks_offset, 0), b_descriptor = wgmma_descriptor(base, 0);
  const uint32 back_to = hand_back_to(base), staging = base + kCOffset + warpgroup * kStagingSlots * kSlotBytes;
  const int lane_slot = warpgroup * kSlots + lane % kSlots, clusters = gridDim.x / kCluster;
  PipelineState state;
  TileRows next_rows;
  next_rows.ask(p, blockIdx.x / kCluster, lane_slot);

  for (int tile = blockIdx.x / kCluster; tile < p.tiles; tile += clusters) {
    const int c_column = (tile / p.groups * kCluster + blockIdx.x % kCluster) * kTileN;
    const int rounds = next_rows.end_round - next_rows.first_round, rows = next_rows.rows;
    // Slots are filled from the first on: a warpgroup whose first slot has no block row has none at all.
    const bool has_rows = __shfl_sync(0xFFFFFFFF, rows, 0) >= 0;
    float accumulators[kSlots][kTileGroups][kAccumulators];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
      for (int group = 0; group < kTileGroups; ++group) {
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) accumulators[slot][group][i] = 0.0f;
      }
    }

#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      mbarrier_wait(base + kFullBarrier + 8 * state.index, state.phase);
      if (has_rows) {
        uint32 from[kSlots];
#pragma unroll
        for (int slot = 0; slot < kSlots; slot += 4) {
          const uint4 four =
              *reinterpret_cast<const uint4*>(shared + places_offset + state.index * kStageBytes + slot * 4);
          from[slot] = four.x;
          from[slot + 1] = four.y;
          from[slot + 2] = four.z;
          from[slot + 3] = four.w;
        }
        multiply_round(accumulators, a_descriptor + (state.index * kStageBytes >> 4), b_descriptor, from);
      }
      consumer_release(back_to + 8 * state.index);
      state.advance();
    }

    next_rows.ask(p, tile + clusters, lane_slot);
    // Store C, kStagingSlots block rows at a time; TMA clips the stores at the ends of C.
#pragma unroll
    for (int first = 0; first < kSlots; first += kStagingSlots) {
      // Wait until the previous stores from the staging buffer have read it.
      if (warpgroup_leader) tma_store_wait_read<0>();
      bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
      // Fill it: transposed, 16 rows of C by this warp's 16 columns at a time. A row is eight 16-byte chunks; TMA's
      // swizzle puts chunk i at position i ^ row % 8. Lanes 8 i to 8 i + 7 address the rows of matrix i.
#pragma unroll
      for (int slot = 0; slot < kStagingSlots; ++slot) {
#pragma unroll
        for (int group = 0; group < kTileGroups; ++group) {
          const uint32 buffer = staging + slot * kSlotBytes + group * kCGroupBytes;
#pragma unroll
          for (int j = 0; j < kBlockRows / 16; ++j) {
            const float* x = accumulators[first + slot][group] + j * 8;
            const int staging_row = j * 16 + lane / 16 * 8 + lane % 8;
            const int chunk = warp * 2 + lane / 8 % 2;
            stmatrix_x4_trans(buffer + staging_row * kRowBytes + (chunk ^ staging_row % 8) * 16,
                pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
          }
        }
      }
      fence_proxy_async();
      bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
#pragma unroll
      for (int slot = 0; slot < kStagingSlots; ++slot) {
        const int row = __shfl_sync(0xFFFFFFFF, rows, first + slot);
        if (warpgroup_leader && row >= 0) {
#pragma unroll
          for (int group = 0; group < kTileGroups; ++group) {
            tma_store_2d(&p.c_map, staging + slot * kSlotBytes + group * kCGroupBytes,
                c_column + group * kGroupColumns, row * kBlockRows);
          }
        }
      }
      if (warpgroup_leader) tma_store_commit();
    }
  }
  // Shared memory must outlive the stores that read it.
  if (warpgroup_leader) tma_store_wait_read<0>();
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    h100_bsr_spmm_b32_gathered(const __grid_constant__ Params p) {
  // TMA swizzles by address, with a period of 1024 bytes: swizzled buffers are aligned to that.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));

  // One thread initializes the barriers. A full barrier counts one arrival per producer warp; the barrier of a packet
  // slot counts all consumer warps of the cluster, that of rows of B the consumer warps of this thread block.
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kFullBarrier + 8 * i, kProducerWarps);
      mbarrier_init(base + kPacketBarrier + 8 * i, kCluster * kConsumers * kWarpgroupThreads / 32);
      mbarrier_init(base + kRowsBarrier + 8 * i, kConsumers * kWarpgroupThreads / 32);
    }
    fence_mbarrier_init();
    prefetch_b(p);
    prefetch_tensormap(&p.c_map);
  }
  for (int i = threadIdx.x; i < kBColumnBytes / 16; i += kThreads) {
    reinterpret_cast<uint4*>(shared + kZerosOffset)[i] = make_uint4(0, 0, 0, 0);
  }
  fence_proxy_async();  // wgmma reads the zeros through the async proxy
  // A thread block of the cluster may receive data only after it has initialized its barriers.
  cluster_arrive();
  cluster_wait();

  // The shuffle proves to the compiler that it is warp-uniform.
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), warpgroup = warp / 4;
  if (warpgroup == kConsumers) {
    setmaxnreg_dec<kProducerRegisters>();
    produce(p, base, warp % 4);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, shared, base, warpgroup);
  }
  // Other thread blocks of the cluster may still arrive at these barriers.
  cluster_arrive();
  cluster_wait();
}
