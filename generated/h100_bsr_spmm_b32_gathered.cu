// Generated from specs/h100_bsr_spmm_b32_gathered.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_bsr_spmm_b32_gathered.yaml
// spec: {"arch":"sm_90a","block":{"cols":32,"rows":32},"copy":"tma","dtype":"fp16","mma":"wgmma","op":"bsr_spmm","schedule":"cooperative","stages":3,"tile":{"k":32,"m":384,"n":128}}
// spec hash: 4ab2eb374f3a3ef0c8e32dcff7fdc22ed06bf84771913746004b1f003ffcb30f
// seal: sha256 1c50ecf5e39a74ea4bf05bbfc0e7282ed71849f81fe259c817b4c08737f2dc5b

// BSR x dense for sm_90a with small blocks: C = A B with A in block-sparse rows and B, C dense and row-major.
//
// The product is computed transposed, C^T = B^T A^T: a wgmma is 64 rows high, a block row is not. So columns of B are
// its M side, rows of a block its N side.
//
// Rows of B that one block of A needs do little work for their bytes. So a tile has many block rows, and what it loads
// of B is used by all of them that have a block there. Which block rows have how much in common was found out before,
// with the order in which a tile goes through their block columns: in rounds, in each of which every block row takes
// one of its blocks, at a column whose rows of B are in shared memory, since this round or an earlier one. So the
// products of a round are always the same instructions on the same accumulators, and only where they read B differs.
//
// Who does what
//   h100_bsr_spmm_b32_gathered_pack_a, launched before, copies the blocks of A to packets, in order of use. It
//     reads A and entries alone: where A stays as it is, it may run once, by itself, for many launches of this
//   warpgroups 0 to 2  consumers. Each has a third of the block rows of a tile, and keeps their products in registers
//   the last warpgroup producer. One of its warps loads packets, the others share the rows of B of a round
//
// Thread blocks form clusters of kCluster, with neighbouring column tiles of one group. Each loads its rows of B, and a
// part of every packet for all of them.
//
// Which barrier guards what
//   full[i]    producers -> consumers: the packet in stage i and the rows of B of its round have come
//   packet[i]  consumers -> producer: every consumer warp of the cluster is done with the packet
//   rows[i]    consumers -> producers: every consumer warp of this thread block is done with the rows of B
//   named barrier kWarpgroupBarrier + w: the threads of consumer w around its staging of C
//
// Pipeline of a consumer: the products of a round have ended before it is released. Meanwhile the tensor cores work
// for the other consumers, and the producers are rounds ahead.
//
// Symbols
//   group        the block rows of one tile. Tiles are numbered groups first, so that the thread blocks at work share
//                columns of B, which then come from the L2
//   record       of a round: the block columns that it loads, how many they are, the place in the ring of rows of B
//                that those of the first one have, how many slots have a block, and how many of the places taken
//                before it, the last ones, it or rounds behind it need
//   slot         of a block row in its tile: kSlots in each consumer warpgroup. A slot may have no block row, and no
//                block in a round: it then multiplies zeros by zeros
//   round        one block of each slot, and the rows of B of up to kRoundColumns block columns that are loaded for it:
//                those that its slots meet and that are not there from earlier rounds
//   packet       of a round: the blocks of all slots, and for each of them where its rows of B are
//   column group 64 columns of B or C: in shared memory rows of 128 bytes, swizzled. A block of A has rows of
//                64 bytes there
//   accumulators a thread's part of a block row and column group: columns c and c + 8 of its warp's 16 (c = lane / 4),
//                rows 8 j + 2 (lane % 4) + {0, 1}. Number 4 j + 2 h + e is column
//                c + 8 h, row with {e}

using int64 = long long;
using uint32 = unsigned int;

// Stands for CUtensorMap: 128 opaque bytes (PTX ISA, "Tensor-Map"), 64-byte aligned (driver API,
// cuTensorMapEncodeTiled). Parameters of this type have in their comments the dimensions, innermost first, the box of
// one copy, and the bytes of the swizzle.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

constexpr int kBlockRows = 32;  // rows of a block of A
constexpr int kBlockCols = 32;  // columns of a block of A
constexpr int kTileSlots = 12;  // slots of a C tile, each for a block row
constexpr int kTileN = 128;  // columns of a C tile
constexpr int kCluster = 2;  // thread blocks that load A together: neighboring column tiles of a group
constexpr int kStages = 3;  // rounds whose packets have a place
constexpr int kRingColumns = 15;  // block columns whose rows of B have a place
constexpr int kRoundColumns = 15;  // block columns of a round, at most
constexpr int kRecordWords = 16;  // words of the record of a round
constexpr int kRecords = 4;  // records that a producer warp has asked for before it needs them
constexpr int kThreads = 512;  // warpgroups that consume, then one that produces
constexpr int kProducerWarps = 4;  // warps that load
constexpr int kColumnWarps = 3;  // of these, those that load rows of B; the last one loads packets
constexpr int kWarpColumns = 2;  // columns of a round for each, at most
constexpr int kProducerRegisters = 32;  // registers a producer thread keeps
constexpr int kConsumerRegisters = 160;  // registers a consumer thread takes; 32 + 3 x 160 are 4 x 128, those at launch
constexpr int kPackThreads = 256;  // threads of a block that packs
constexpr int kPackChunks = 6;  // chunks of A for each of them
constexpr int kBlockChunks = 128;  // chunks of 16 bytes of a block of A
constexpr int kGroupColumns = 64;  // columns of a column group
constexpr int kTileGroups = 2;  // column groups of a tile
constexpr int kABlockBytes = 2048;  // bytes of a block of A
constexpr int kPacketBytes = 24640;  // bytes of a packet, at most
constexpr int kStageBytes = 25088;  // bytes from one packet to the next in shared memory
constexpr int kBColumnBytes = 8192;  // bytes of the rows of B that meet a block column
constexpr int kBGroupBytes = 4096;  // bytes of one column group of them
constexpr int kConsumers = 3;  // warpgroups that compute
constexpr int kSlots = 4;  // slots of a warpgroup
constexpr int kStagingSlots = 1;  // of these, how many leave at a time
constexpr int kAccumulators = 16;  // accumulators of a thread for one block row and column group
constexpr int kARowBytes = 64;  // bytes of a row of a block of A
constexpr int kARowChunks = 4;  // chunks of 16 bytes of one
constexpr int kCGroupBytes = 4096;  // bytes of one column group of a block row of C

// Dynamic shared memory: 230984 bytes. Byte offsets:
constexpr int kBOffset = 0;  // 122880 bytes: ring of rows of B, 15 x 2 column groups of 32 rows of 128 bytes
constexpr int kZerosOffset = 122880;  // 8192 bytes: rows of zeros: what a slot without a block multiplies
constexpr int kCOffset = 131072;  // 24576 bytes: C on its way out
constexpr int kPacketsOffset = 155648;  // 75264 bytes: ring of packets: blocks of A, where they find rows of B
constexpr int kBarriersOffset = 230912;  // 72 bytes: mbarriers: full, of packets, of rows of B

constexpr int kFullBarrier = kBarriersOffset;
constexpr int kPacketBarrier = kFullBarrier + 8 * kStages;
constexpr int kRowsBarrier = kPacketBarrier + 8 * kStages;
constexpr int kWarpgroupThreads = 128;
constexpr int kRowBytes = 128;  // bytes of a row of a column group in shared memory: what the swizzle spans
constexpr int kSlotBytes = kTileGroups * kCGroupBytes;  // of C
constexpr int kWarpgroupBarrier = 1;  // named barrier of consumer w: kWarpgroupBarrier + w

// Launch: 512 threads a block, 230984 bytes of dynamic shared memory, clusters of 2.
// Grid: one thread block per SM, looping over tiles (persistent), groups of block rows fastest.
// Before it, with the same parameters: h100_bsr_spmm_b32_gathered_pack_a, 256 threads a block.
struct Params {
  TensorMap b_map;  // B (N, K): box 64 x 32, swizzle 128
  TensorMap b_groups_map;  // column groups of B (columns of a group, K, groups): box 64 x 32 x 2, swizzle 128
  TensorMap c_map;  // C (N, M): box 64 x 32, swizzle 128
  const uint4* a;  // stored blocks of A
  const int* rounds;  // records: 15 block columns, then a StepHeader
  const int2* entries;  // of each round and slot: stored block, place of the rows of B that it meets; or -1
  const int* round_starts;  // first round of each group, and one more
  const int* slot_rows;  // of each group and slot: block row, or -1
  uint4* packets;  // of each round: blocks of A and the places of their rows of B
  int groups;  // groups of block rows
  int tiles;  // groups * clusters of column tiles
  int n;  // columns of B and C
  int whole_rows;  // rows of B, from the first, of which one copy brings all column groups of a tile
};

// barrier.cluster.arrive: this thread has come to the cluster's barrier; what it wrote before can be seen after it
// (PTX ISA, "barrier.cluster")
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
// barrier.cluster.wait: all threads of the cluster have come (PTX ISA, "barrier.cluster")
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// mapa: where a shared-memory address of this thread block is in another one of the cluster (PTX ISA, "mapa")
__device__ __forceinline__ uint32 map_shared(uint32 address, int block) {
  uint32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
  return mapped;
}

// mbarrier.arrive: one arrival at a barrier of any thread block of the cluster. Not with `.release.cluster`: that waits
// for every write of the thread, device-wide, and there is none to wait for (PTX ISA, "mbarrier.arrive")
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32 mapped) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}

// mbarrier.init: sets the number of arrivals that complete a phase (PTX ISA, "mbarrier.init")
__device__ __forceinline__ void mbarrier_init(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: makes the initialised barriers visible to the copy engine and to the cluster's other thread
// blocks (PTX ISA, "membar / fence")
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive.expect_tx: one arrival; the phase also needs `bytes` bytes from the copy engine to complete. They may
// come before this: without the arrival it does not complete (PTX ISA, "mbarrier.arrive")
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// mbarrier.try_wait.parity: returns once the phase of this parity has completed
// (PTX ISA, "mbarrier.try_wait")
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

// prefetch.tensormap: brings a descriptor into its cache (PTX ISA, "prefetch")
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp.async.bulk.tensor.2d: tensor box at (c0, ...) to shared memory, counted by an mbarrier. What of the box
// lies outside the tensor, before its first element too, comes as zeros, and counts (PTX ISA, "cp.async.bulk.tensor")
__device__ __forceinline__ void tma_load_2d(
    uint32 to, const TensorMap* map, uint32 barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1) : "memory");
}

// cp.async.bulk.tensor.3d: tensor box at (c0, ...) to shared memory, counted by an mbarrier. What of the box
// lies outside the tensor, before its first element too, comes as zeros, and counts (PTX ISA, "cp.async.bulk.tensor")
__device__ __forceinline__ void tma_load_3d(
    uint32 to, const TensorMap* map, uint32 barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// cp.async.bulk.multicast::cluster: `bytes` bytes that follow each other to the same place in the shared memory of each
// thread block in `blocks`, counted by the mbarrier that each has in the same place; addresses and bytes are multiples
// of 16 (PTX ISA, "cp.async.bulk")
__device__ __forceinline__ void tma_load_bytes_multicast(
    uint32 to, const void* from, int bytes, uint32 barrier, unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(blocks) : "memory");
}

// cp.async.bulk.tensor.2d: shared memory to the tensor box at (c0, ...), clipped at the tensor's ends
// (PTX ISA, "cp.async.bulk.tensor")
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, uint32 from, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
      ::"l"(map), "r"(from), "r"(c0), "r"(c1) : "memory");
}

// cp.async.bulk.commit_group: closes a group of stores (PTX ISA, "cp.async.bulk.commit_group")
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: at most kPending groups have not read their shared memory yet
// (PTX ISA, "cp.async.bulk.wait_group")
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// fence.proxy.async: ordinary shared-memory writes become visible to the copy engine (PTX ISA, "membar / fence")
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// wgmma.fence, CUTLASS's warpgroup_arrive: orders register accesses before the first wgmma (PTX ISA, "wgmma.fence")
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// wgmma.commit_group, warpgroup_commit_batch: closes a group of wgmma (PTX ISA, "wgmma.commit_group")
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// wgmma.wait_group, warpgroup_wait: at most kPending groups are still running (PTX ISA, "wgmma.wait_group")
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses of registers that a running wgmma owns across this point.
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Matrix descriptor of a 128-byte swizzled tile in shared memory (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions", "Matrix Descriptor Format"). The upper half is always the same: 128-byte swizzle, 1024 bytes from 8
// rows to the next 8 (SBO, the stride byte offset). So descriptors are passed, and moved on, as their lower halves: the
// address and, for an MN-major tile of several groups of 64 columns, the bytes from one group to the next (LBO, the
// leading byte offset), else 0; both in units of 16 bytes.
constexpr uint32 kDescriptorUpperHalf = 0x40000040;

__device__ __forceinline__ uint32 wgmma_descriptor(uint32 address, int group_bytes) {
  return (address & 0x3FFFF) >> 4 | static_cast<uint32>(group_bytes >> 4) << 16;
}

// The same for a K-major tile whose rows are 64 bytes. Upper half: 64-byte swizzle, 512 bytes from 8 rows to
// the next 8.
constexpr uint32 kNarrowDescriptorUpperHalf = 0x80000020;

// wgmma.mma_async m64n32k16: D = A B, + D if `accumulate`; in shared memory A M-major, 128-byte rows, B K-major,
// narrow rows. A and B are the instruction's operands. After p come factors 1 of A and B, then whether A and B are
// MN-major (PTX ISA, "wgmma.mma_async")
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

// setmaxnreg: .dec gives registers of this warpgroup back to the thread block, .inc waits until there are so many
// (PTX ISA, "setmaxnreg")
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// bar.sync: named barrier `id` of `threads` threads (PTX ISA, "bar")
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// elect.sync, CUTLASS's elect_one_sync: whether this lane is the one that is picked of its warp, always the same. After
// this, unlike after a comparison of lanes, the compiler knows that one lane is at work, and issues a copy without a
// loop over lanes (PTX ISA, "elect.sync")
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

// cvt.rn.f16x2.f32: two floats to a pair of fp16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// stmatrix.x4.trans: four 8 x 8 matrices of 16-bit elements, each stored transposed; each lane gives the address of one
// row in memory, that is, of one column of a matrix (PTX ISA, "stmatrix")
__device__ __forceinline__ void stmatrix_x4_trans(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4 };"
      ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Packs a round: the block of each slot, its rows swizzled as TMA does it, and where its rows of B will be, in units of
// 16 bytes from the beginning of shared memory. A slot without a block has zeros.
extern "C" __global__ void __launch_bounds__(kPackThreads)
    h100_bsr_spmm_b32_gathered_pack_a(const __grid_constant__ Params p) {
  const int64 round = blockIdx.x;
  const int2* entries = p.entries + round * kTileSlots;
  uint4* packet = p.packets + round * (kPacketBytes / 16);

  // A thread asks for all its elements at once.
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
    const int place = chunk % kARowChunks ^ row / (128 / kARowBytes) % kARowChunks;  // in its row, swizzled
    packet[chunk / kARowChunks * kARowChunks + place] = elements[i];
  }
  if (threadIdx.x < kTileSlots) {
    const int place = entries[threadIdx.x].y;
    const int from = place < 0 ? kZerosOffset : kBOffset + place * kBColumnBytes;
    reinterpret_cast<int*>(packet + kTileSlots * kBlockChunks)[threadIdx.x] = from >> 4;
  }
}

// Position in the ring of packets: the stage, and the parity of the pass over the ring, 0 in the first.
// Consumers wait with this parity until the stage is full. Producers wait with the other, that of the pass before,
// until it is free; a fresh barrier counts that pass as ended: in the first pass nobody waits.
struct PipelineState {
  int index = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kStages) {
      index = 0;
      phase ^= 1;
    }
  }
};

// Copies the rows of B that a block column of A meets, from `row` on, to `to`. One copy brings all column groups; those
// beyond B come as zeros, and count as bytes. Where B's last columns do not fill a group, the copy takes the others
// from what follows them in memory, the row below, and the store of C leaves their products out. From row p.whole_rows
// on there are too few rows below: each group is a copy of its own, in which columns beyond B are zeros.
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

// Brings the descriptors of B into their cache.
__device__ __forceinline__ void prefetch_b(const Params& p) {
  prefetch_tensormap(&p.b_map);
  prefetch_tensormap(&p.b_groups_map);
}

// Walks through the rounds of this cluster's tiles, for a whole warp. Where the next tile's rounds are is asked for a
// tile ahead.
struct RoundWalk {
  int tile, column, round, end;
  int next_group, next_column, next_round, next_end;
  int clusters, group_step, column_step;  // from a tile to the next

  __device__ __forceinline__ RoundWalk(const Params& p) : tile(blockIdx.x / kCluster), clusters(gridDim.x / kCluster) {
    group_step = clusters % p.groups;
    column_step = clusters / p.groups;
    next_group = tile % p.groups;
    next_column = tile / p.groups;
    ask(p);
    enter(p);
    settle(p);
  }
  // Asks for the rounds of the next tile; there are some after the last tile, too.
  __device__ __forceinline__ void ask(const Params& p) {
    next_round = __ldg(p.round_starts + next_group);
    next_end = __ldg(p.round_starts + next_group + 1);
  }
  // Makes the next tile this one.
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
  // The record of this round, a word a lane, and then the number of the round and the column tile; goes to the next
  // round. After the last one it is 0.
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
  __device__ __forceinline__ int first_place() const { return word >> 8 & 255; }  // of the ring: where the first goes
  __device__ __forceinline__ int kept() const { return word >> 24; }              // columns before that are needed yet
};

// Calls `load` with the record of each round of this cluster's tiles, for a whole warp. A record is asked for kRecords
// rounds ahead, and stays in the register that it comes to: to move it would be to wait for it.
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

// Which places of the ring of rows of B are taken. Each round has those after the places of the round before, but a
// group begins at the first place: places that are skipped count to the round before.
struct ColumnRing {
  int head = 0;    // the place after the last round's
  int taken = 0;   // places taken until now, in all passes over the ring
  int begins = 0;  // lane i: how many nobody needed any more when the last round but i began

  // Takes the places of a round of `count` columns that begins at place `first`. It or rounds behind it need the last
  // `kept` of those that were taken before. Returns how many rounds back the one is that must be done before: the last
  // one of this stage, or a later one whose places are needed.
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

// Producer of rows of B: each of kColumnWarps warps brings what every kColumnWarps-th column of a round needs. What can
// be known before there is room is worked out before, for all columns at once, each by one lane.
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
      if (b_column + kTileN <= p.n) {  // as most tiles do
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

// Producer of packets, one warp: it loads this thread block's part of each, for all thread blocks of the cluster. Their
// stages are free, too: the barrier counts the consumer warps of all of them.
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

// What a consumer warp has to know of a tile. It is asked for before C of the tile before is stored; in vain after the
// last tile.
struct TileRows {
  int first_round, end_round;
  int rows;  // lane i: block row of the i-th of the warp's slots, and of these again behind the last one

  __device__ __forceinline__ void ask(const Params& p, int tile, int lane_slot) {
    const int group = tile % p.groups;
    first_round = __ldg(p.round_starts + group);
    end_round = __ldg(p.round_starts + group + 1);
    rows = __ldg(p.slot_rows + group * kTileSlots + lane_slot);
  }
};

// Where a lane's arrival goes when its warp hands back the round in stage 0: the first lanes hand back its packet, in
// each thread block of the cluster, as all of them load into it, the next one the rows of B in this one, whose own
// addresses are among those of the cluster (PTX ISA, "State spaces"). Barriers of other stages are 8 bytes further on
// each.
__device__ __forceinline__ uint32 hand_back_to(uint32 base) {
  const int lane = threadIdx.x % 32;
  return lane < kCluster ? map_shared(base + kPacketBarrier, lane) : base + kRowsBarrier;
}

// A warp hands a round back.
__device__ __forceinline__ void consumer_release(uint32 to) {
  __syncwarp();
  if (threadIdx.x % 32 <= kCluster) mbarrier_arrive_cluster(to);
}

// accumulators += B^T A^T for this warpgroup's slots of one round. `from` says where the rows of B of each slot are, in
// units of 16 bytes, as descriptors do.
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
        // 16 rows of B are 16 rows of 128 bytes, 16 columns of A are 32 bytes of its rows.
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
    // Slots are filled from the first: a warpgroup whose first slot has no block row has none.
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
    // Store C, kStagingSlots block rows at a time; the ends of C clip the stores.
#pragma unroll
    for (int first = 0; first < kSlots; first += kStagingSlots) {
      // Wait until the stores that last used the staging have read it.
      if (warpgroup_leader) tma_store_wait_read<0>();
      bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
      // Fill it: transposed, 16 rows of C and this warp's 16 columns at a time. A row is eight 16-byte chunks, of which
      // TMA's swizzle puts number i at place i ^ row % 8. Lanes 8 i to 8 i + 7 give the rows of the i-th matrix.
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
  // TMA's swizzle goes by addresses and repeats every 1024 bytes: what it applies to begins at a multiple of that.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));

  // One thread prepares the barriers. A full barrier counts one arrival of each producer warp, one of a packet's place
  // those of all consumer warps of the cluster, one of rows of B those of this thread block.
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
  fence_proxy_async();  // wgmma reads the zeros as the copy engine would
  // No thread block of the cluster may be sent anything before its barriers are there.
  cluster_arrive();
  cluster_wait();

  // Taken from one lane, so that the compiler knows that it is the same in all.
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), warpgroup = warp / 4;
  if (warpgroup == kConsumers) {
    setmaxnreg_dec<kProducerRegisters>();
    produce(p, base, warp % 4);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, shared, base, warpgroup);
  }
  // The others of the cluster may still send arrivals here.
  cluster_arrive();
  cluster_wait();
}
