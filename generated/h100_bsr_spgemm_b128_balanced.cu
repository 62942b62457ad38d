// Generated from specs/h100_bsr_spgemm_b128_balanced.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_bsr_spgemm_b128_balanced.yaml
// spec: {"arch":"sm_90a","block":{"cols":128,"rows":128},"copy":"tma","dtype":"fp16","mma":"wgmma","op":"bsr_spgemm","schedule":"cooperative","scheduler":"dynamic","stages":3,"tile":{"k":64,"m":128,"n":128}}
// spec hash: 7f684b4e259ebcc653729d6a49907208ebf8a4832b41b51ead658fc2bd3a0fd3
// seal: sha256 bf0257ff48e0a13e990fdbf6eedb078e9b04d29372982886f6ad4b79d0369440

// BSR x BSR for sm_90a: C = A B with A and B in block-sparse rows and C dense, row-major. Dynamic tile scheduler.
//
// Roles
//   the first kConsumerWarps warps  consumers, four of them a warpgroup, which accumulates 64 rows of the C tile in
//                         registers, then stores them by TMA.
//   the next warp         producer. It fills the ring by TMA with the blocks that the lists name.
//   the last warp         search warp. It takes tiles, and lists the matching blocks of A and B of a tile, ahead of the
//                         producer.
//
// Barriers
//   full[i]     producer -> consumers: stage i holds the A tile and the B tile of one step, and steps[i]
//   empty[i]    consumers -> producer: every consumer warp has finished with stage i
//   list full   search warp -> producer: the list holds the products of one batch, or says that no tiles are left
//   list empty  producer -> search warp: the producer has read the list into registers
//   named barrier kWarpgroupBarrier + w: the threads of consumer w around its staging of C
//
// Search for matching blocks. For a tile in block column j, each lane of the search warp takes one block (i, k) of A's
// row and searches row k of B for column j by binary search. A ballot then gives the list of products. Rows of A with
// more than 32 blocks take several batches of 32, each of which is one list.
//
// Pipeline of a consumer: a stage is released as soon as its products are complete, not when the next step runs.
// Waiting for a step takes longer than multiplying it, and a stage held meanwhile would have no load in flight. The
// tensor cores work on other consumers' steps in between: several thread blocks share an SM.
//
// Dynamic tile scheduler. A thread block first takes the tile of its own index, and then tickets from a counter. Ticket
// t < p.tiles is tile t, and the search warp that takes it classifies the tile: it is short if it has at most half the
// average number of products of the tiles of its block row. A short tile is deferred: its index is appended to the list
// of late tiles, and the next ticket is taken. Ticket p.tiles + l is late tile l. Short tiles therefore come last, and
// thread blocks end at nearly the same time.
//   The holder of ticket p.tiles + l waits until late tile l is written, or until all tiles have been classified and at
//   most l were deferred: then no work is left. The wait terminates: a thread block classifies its tile before it waits
//   for anything else, and one that is not running yet holds no ticket.
//   p.scheduler is all 0 at launch and again at the end. The thread block that takes a late tile clears its entry, and
//   every entry is taken: tickets have no gaps, and a thread block ends only with a ticket past the last late tile. The
//   last thread block to end clears the counters. A launch cut short by a fault leaves them as they are, but a fault
//   also destroys the CUDA context, and its memory is not used again.
//
// Symbols
//   tile         kBlock x kBlock of C; tiles are numbered along block rows
//   product      a block of A in the tile's block row, and the matching block of B in the tile's block column
//   step         kTileK columns of a block of A, kTileK rows of the matching block of B. A tile without products, or
//                one
//                whose last batch has none, ends with a step that has no product
//   batch        32 blocks of a row of A, one for each lane of the searching warp
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

constexpr int kBlock = 128;  // rows and columns of a stored block, and of a C tile
constexpr int kTileK = 64;  // depth of one step
constexpr int kLateTiles = 4;  // counters of the scheduler, stored before its late tiles
constexpr int kStages = 3;  // depth of the ring of A and B tiles
constexpr int kThreads = 320;  // warpgroups that consume, then one warp that produces, and one that searches
constexpr int kConsumerWarps = 8;  // warps that compute
constexpr int kGroupColumns = 64;  // columns of a group: one 128-byte swizzled row
constexpr int kTileGroups = 2;  // column groups of a tile
constexpr int kWarpgroupRows = 64;  // rows of a warpgroup's part of a tile
constexpr int kAccumulators = 64;  // accumulators per thread
constexpr int kABytes = 16384;  // bytes of an A tile
constexpr int kBBytes = 16384;  // bytes of a B tile
constexpr int kBGroupBytes = 8192;  // bytes of one column group of B
constexpr int kCGroupBytes = 8192;  // bytes of one column group of a warpgroup's C

// Dynamic shared memory: 115036 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 49152 bytes: ring of A tiles, 128 rows of 128 bytes
constexpr int kBOffset = 49152;  // 49152 bytes: ring of B tiles, 2 column groups of 64 rows of 128 bytes
constexpr int kCOffset = 98304;  // 16384 bytes: 1 column group of C of each warpgroup
constexpr int kBarriersOffset = 114688;  // 48 bytes: mbarriers: full, then empty
constexpr int kListOffset = 114736;  // 272 bytes: the latest products found
constexpr int kListBarriersOffset = 115008;  // 16 bytes: mbarriers of the list: full, then empty
constexpr int kStepsOffset = 115024;  // 12 bytes: kind of step in each stage

constexpr int kFullBarrier = kBarriersOffset;
constexpr int kEmptyBarrier = kFullBarrier + 8 * kStages;
constexpr int kListFullBarrier = kListBarriersOffset, kListEmptyBarrier = kListFullBarrier + 8;
constexpr int kWarpgroupThreads = 128;
constexpr int kRowBytes = 128;  // bytes of a row of a column group in shared memory: the span of the swizzle
constexpr int kWarpgroupBarrier = 1;  // named barrier of consumer w: kWarpgroupBarrier + w
constexpr int kHasProduct = 1, kEndsTile = 2;  // bits of steps[i]
constexpr int kTileShift = 2;  // above them: the index of the tile
constexpr int kEndsWork = 0;  // the whole of steps[i] after the last tile
constexpr int kNoMoreTiles = -1;

// Launch: 320 threads per block, 115036 bytes of dynamic shared memory.
// Grid: 2 thread blocks per SM; dynamic tile scheduler, short tiles last.
// L2 promotion of a_map, b_map: 128 bytes; of all others: 256 bytes.
struct Params {
  TensorMap a_map;  // stored blocks of A (cols, rows, nnz): box 64 x 128 x 1, swizzle 128
  TensorMap b_map;  // stored blocks of B (cols, rows, nnz): box 64 x 64 x 1, swizzle 128
  TensorMap c_map;  // C (N, M): box 64 x 64, swizzle 128
  const int* a_crow_indices;  // row offsets of A: first block of each block row, then the end of the last
  const int* a_col_indices;  // block column of each stored block of A
  const int* b_crow_indices;  // row offsets of B: first block of each block row, then the end of the last
  const int* b_col_indices;  // block column of each stored block of B, ascending in each row
  int a_index_words;  // 32-bit words per index of A, 1 or 2; the kernel reads the low word
  int b_index_words;  // 32-bit words per index of B
  int inner_blocks;  // block columns of A, block rows of B
  int column_blocks;  // block columns of C
  int tiles;  // block rows of C * column_blocks
  int* scheduler;  // tickets drawn, finished thread blocks, tiles deferred, classified; late tiles: 0 between launches
};

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
// createpolicy.fractional: the L2 evicts these bytes before others (PTX ISA, "createpolicy")
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, uint32 from, int c0, int c1) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], policy;\n"
      "}"
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

// wgmma.mma_async m64n128k16: D = A B, + D if `accumulate`; A in shared memory, K-major, B MN-major.
// After p come scale factors of 1 for A and B, then whether A and B are MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n128k16_shared_mn_major(
    float (&d)[64], uint32 a, uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "mov.b64 a, { %64, %67 };\n"
      "mov.b64 b, { %65, %67 };\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63"
      "}, a, b, p, 1, 1, 0, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf));
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

// Element i of an index tensor: an int32, or the low half of an int64 if `words` is 2. Indices are below 2^31.
__device__ __forceinline__ int load_index(const int* indices, int words, int i) {
  return __ldg(indices + static_cast<int64>(i) * words);
}

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

// Reads a word that the producer wrote, for the whole warp. The lane that reads it also arrives at the empty barrier
// afterwards, so the word is read before it is overwritten.
__device__ __forceinline__ int read_by_leader(const int* word) {
  return __shfl_sync(0xFFFFFFFF, threadIdx.x % 32 == 0 ? *word : 0, 0);
}

// Copies the A tile and the B tile of one step of a product (a block of A and one of B) to a stage of the ring, as soon
// as it is empty.
__device__ __forceinline__ void load_step(const Params& p, uint32 base, int* steps, PipelineState state,
    int tile, int2 product, int k, bool ends_tile) {
  const uint32 full = base + kFullBarrier + 8 * state.index;
  mbarrier_wait(base + kEmptyBarrier + 8 * state.index, state.phase ^ 1);
  steps[state.index] = kHasProduct | (ends_tile ? kEndsTile : 0) | tile << kTileShift;
  mbarrier_arrive_expect_tx(full, kABytes + kBBytes);
  tma_load_3d(base + kAOffset + state.index * kABytes, &p.a_map, full, k, 0, product.x);
  const uint32 b = base + kBOffset + state.index * kBBytes;
#pragma unroll
  for (int group = 0; group < kTileGroups; ++group) {
    tma_load_3d(b + group * kBGroupBytes, &p.b_map, full, group * kGroupColumns, k, product.y);
  }
}

// Passes a step without a product.
__device__ __forceinline__ void pass_empty_step(uint32 base, int* steps, PipelineState state, int step) {
  mbarrier_wait(base + kEmptyBarrier + 8 * state.index, state.phase ^ 1);
  steps[state.index] = step;
  mbarrier_arrive(base + kFullBarrier + 8 * state.index);
}

// The block of B in a block column that matches stored block `block` of A; -1 if there is none, or if `block` is at or
// past `end`, the end of its block row.
__device__ __forceinline__ int find_meeting(const Params& p, int column, int block, int end) {
  if (block >= end) return -1;
  const unsigned k = load_index(p.a_col_indices, p.a_index_words, block);
  if (k >= static_cast<unsigned>(p.inner_blocks)) return -1;
  // The first block of row k at or after the column.
  const int row_end = load_index(p.b_crow_indices, p.b_index_words, k + 1);
  int low = load_index(p.b_crow_indices, p.b_index_words, k), high = row_end;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (load_index(p.b_col_indices, p.b_index_words, middle) < column) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < row_end && load_index(p.b_col_indices, p.b_index_words, low) == column ? low : -1;
}

// Search warp, one lane: draws the next ticket. p.scheduler[0] counts the tickets drawn.
__device__ __forceinline__ int take_ticket(const Params& p) {
  return atomicAdd(p.scheduler, 1) + static_cast<int>(gridDim.x);
}

// p.scheduler[2] and [3], read and updated as one 64-bit word: the low half counts deferred tiles, the high half
// classified tiles. Neither half can overflow: there are fewer than 2^29 tiles.
__device__ __forceinline__ unsigned long long* put_off_and_judged(const Params& p) {
  return reinterpret_cast<unsigned long long*>(p.scheduler + 2);
}

// Search warp, one lane: counts a tile as classified. If it is deferred, writes its index + 1 to the list: an entry of
// 0 has not been written yet.
__device__ __forceinline__ void judge_tile(const Params& p, int tile, bool is_put_off) {
  const unsigned long long before = atomicAdd(put_off_and_judged(p), 1ull << 32 | (is_put_off ? 1 : 0));
  if (is_put_off) atomicExch(p.scheduler + kLateTiles + static_cast<uint32>(before), tile + 1);
}

// Search warp, one lane: late tile `index`, or kNoMoreTiles. Waits until that is known. Every tile is classified,
// except the first one of each thread block.
__device__ __forceinline__ int take_late_tile(const Params& p, uint32 index) {
  const uint32 judged_in_all = p.tiles - gridDim.x;
  while (true) {
    const unsigned long long now = *static_cast<volatile unsigned long long*>(put_off_and_judged(p));
    if (index < static_cast<uint32>(now)) {
      const int entry = atomicExch(p.scheduler + kLateTiles + index, 0);
      if (entry != 0) return entry - 1;
    } else if (static_cast<uint32>(now >> 32) == judged_in_all) {
      return kNoMoreTiles;
    }
    __nanosleep(32);
  }
}

// Search warp, one lane: counts finished thread blocks, in p.scheduler[1]. The last one resets all counters to 0 for
// the next launch.
__device__ __forceinline__ void release_scheduler(const Params& p) {
  __threadfence();
  if (atomicAdd(p.scheduler + 1, 1) == gridDim.x - 1) {
    p.scheduler[0] = 0;
    p.scheduler[1] = 0;
    *put_off_and_judged(p) = 0;
  }
}

// A message from the search warp to the producer: the products of one batch.
struct List {
  int2 products[32];  // block of A, block of B
  int count;          // number of products, or kNoMoreTiles
  int tile;           // the tile that they contribute to
  int ends_tile;      // whether this is the tile's last batch
};
static_assert(kListOffset + sizeof(List) <= kListBarriersOffset, "the list fits its place in shared memory");

// Search warp: passes the products found by the lanes in `hits`, and waits until the producer has taken them.
__device__ __forceinline__ void pass_list(uint32 base, List* list, int phase, unsigned hits, int2 product, int tile,
    bool ends_tile) {
  const int lane = threadIdx.x % 32;
  if (hits >> lane & 1) list->products[__popc(hits & ((1u << lane) - 1))] = product;
  if (lane == 0) {
    list->count = __popc(hits);
    list->tile = tile;
    list->ends_tile = ends_tile;
  }
  mbarrier_arrive(base + kListFullBarrier);
  mbarrier_wait(base + kListEmptyBarrier, phase);
}

// Search warp: takes tiles, defers short ones, and lists the products of the others.
__device__ __forceinline__ void search(const Params& p, uint32 base, List* list) {
  const int lane = threadIdx.x % 32;
  const bool leader = lane == 0;
  const int b_blocks = load_index(p.b_crow_indices, p.b_index_words, p.inner_blocks);
  int phase = 0;

  for (int ticket = blockIdx.x;; ticket = __shfl_sync(0xFFFFFFFF, leader ? take_ticket(p) : 0, 0)) {
    int tile = ticket;
    if (ticket >= p.tiles) {
      tile = __shfl_sync(0xFFFFFFFF, leader ? take_late_tile(p, ticket - p.tiles) : 0, 0);
      if (tile == kNoMoreTiles) break;
    }
    const int row = tile / p.column_blocks, column = tile % p.column_blocks;
    const int first = load_index(p.a_crow_indices, p.a_index_words, row);
    const int end = load_index(p.a_crow_indices, p.a_index_words, row + 1);
    int met = find_meeting(p, column, first + lane, end);
    unsigned hits = __ballot_sync(0xFFFFFFFF, met >= 0);

    // The first tile of a thread block is processed at once, and so is one that has been deferred before.
    if (ticket >= static_cast<int>(gridDim.x) && ticket < p.tiles) {
      // A block of A matches b_blocks / (inner_blocks * column_blocks) blocks in a column of B on average. A tile whose
      // row of A is longer than a batch is not short, whatever its first batch matches.
      const int64 twice = 2ll * __popc(hits) * p.inner_blocks * p.column_blocks;
      const bool is_put_off = end - first <= 32 && twice <= static_cast<int64>(end - first) * b_blocks;
      if (leader) judge_tile(p, tile, is_put_off);
      if (is_put_off) continue;
    }

    // Pass the tile batch by batch. A batch without products is passed only if it ends the tile.
    int batch = first;
    while (true) {
      const bool ends_tile = batch + 32 >= end;
      if (hits != 0 || ends_tile) {
        pass_list(base, list, phase, hits, make_int2(batch + lane, met), tile, ends_tile);
        phase ^= 1;
      }
      if (ends_tile) break;
      batch += 32;
      met = find_meeting(p, column, batch + lane, end);
      hits = __ballot_sync(0xFFFFFFFF, met >= 0);
    }
  }
  if (leader) list->count = kNoMoreTiles;
  mbarrier_arrive(base + kListFullBarrier);
  if (leader) release_scheduler(p);
}

// Producer: one warp fills the ring, list after list. Each lane holds one product; the first lane issues the copies.
__device__ __forceinline__ void produce(const Params& p, uint32 base, int* steps, const List* list) {
  const int lane = threadIdx.x % 32;
  const bool leader = lane == 0;
  PipelineState state;

  for (int phase = 0;; phase ^= 1) {
    // Read the list into registers: the search for the next one runs meanwhile.
    mbarrier_wait(base + kListFullBarrier, phase);
    const int count = list->count, tile = list->tile;
    const bool is_last_list = list->ends_tile;
    const int2 kept = list->products[lane];
    mbarrier_arrive(base + kListEmptyBarrier);
    if (count == kNoMoreTiles) break;

    if (count == 0) {
      if (leader) pass_empty_step(base, steps, state, kEndsTile | tile << kTileShift);
      state.advance();
      __syncwarp();
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int2 product = make_int2(__shfl_sync(0xFFFFFFFF, kept.x, i), __shfl_sync(0xFFFFFFFF, kept.y, i));
#pragma unroll
      for (int k = 0; k < kBlock; k += kTileK) {
        const bool ends_tile = is_last_list && i == count - 1 && k + kTileK == kBlock;
        if (leader) load_step(p, base, steps, state, tile, product, k, ends_tile);
        state.advance();
      }
      __syncwarp();
    }
  }
  if (leader) pass_empty_step(base, steps, state, kEndsWork);
}

// accumulators += A B for this warpgroup's part of one step (asynchronous).
__device__ __forceinline__ void issue_step(float (&accumulators)[kAccumulators], uint32 a_descriptor,
    uint32 b_descriptor) {
  warpgroup_fence_operand(accumulators);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileK / 16; ++k) {
    // 16 columns of A are 32 bytes of its 128-byte rows; 16 rows of B are 16 such rows.
    wgmma_m64n128k16_shared_mn_major(accumulators, a_descriptor + (k * 32 >> 4),
        b_descriptor + (k * 16 * kRowBytes >> 4), 1);
  }
  wgmma_commit();
  warpgroup_fence_operand(accumulators);
}

// Multiplies the steps of a warpgroup's part of a tile, and releases their stages.
__device__ __forceinline__ void multiply_tile(float (&accumulators)[kAccumulators], uint32 base, const int* steps,
    PipelineState& state, uint32 a_descriptor, uint32 b_descriptor, int lane) {
  const bool warp_leader = lane == 0;
  // A tile without products stores these zeros.
#pragma unroll
  for (int j = 0; j < kAccumulators; ++j) accumulators[j] = 0.0f;

  int step = 0;
#pragma unroll 1
  while (!(step & kEndsTile)) {
    mbarrier_wait(base + kFullBarrier + 8 * state.index, state.phase);
    step = read_by_leader(steps + state.index);
    if (step & kHasProduct) {
      issue_step(accumulators, a_descriptor + (state.index * kABytes >> 4),
          b_descriptor + (state.index * kBBytes >> 4));
      wgmma_wait<0>();
      warpgroup_fence_operand(accumulators);
    }
    if (warp_leader) mbarrier_arrive(base + kEmptyBarrier + 8 * state.index);
    state.advance();
  }
}

// Stores a warpgroup's part of a tile one column group at a time.
__device__ __forceinline__ void store_tile(const Params& p, const float (&accumulators)[kAccumulators], uint32 staging,
    int warpgroup, int lane, bool warpgroup_leader, int tile_row, int tile_column) {
  const int staging_row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  const int c_row = tile_row + warpgroup * kWarpgroupRows;
#pragma unroll
  for (int group = 0; group < kTileGroups; ++group) {
    // Wait until the last store has read the staging buffer.
    if (warpgroup_leader) tma_store_wait_read<0>();
    bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
    // Fill it. A row is eight 16-byte chunks; TMA's swizzle puts chunk i at position i ^ row % 8. Lanes 8 i to 8 i + 7
    // address the rows of matrix i: rows 0 to 7, 8 to 15, then the same rows one chunk further.
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* x = accumulators + group * 32 + j * 8;
      const int chunk = j * 2 + lane / 16;
      stmatrix_x4(staging + staging_row * kRowBytes + (chunk ^ staging_row % 8) * 16,
          pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
    }
    fence_proxy_async();
    bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
    if (warpgroup_leader) {
      tma_store_2d(&p.c_map, staging, tile_column + group * kGroupColumns, c_row);
      tma_store_commit();
    }
  }
}

// Consumer: one warpgroup computes its 64 rows of the C tile, tile after tile.
__device__ __forceinline__ void consume(const Params& p, uint32 base, const int* steps, int warpgroup) {
  const int lane = threadIdx.x % 32;
  const bool warpgroup_leader = threadIdx.x % kWarpgroupThreads == 0;
  const uint32 a_descriptor = wgmma_descriptor(base + kAOffset + warpgroup * kWarpgroupRows * kRowBytes, 0);
  const uint32 b_descriptor = wgmma_descriptor(base + kBOffset, kBGroupBytes);
  const uint32 staging = base + kCOffset + warpgroup * kCGroupBytes;
  PipelineState state;

  while (true) {
    // The first step of a tile holds its index, or says that no tiles are left.
    mbarrier_wait(base + kFullBarrier + 8 * state.index, state.phase);
    const int first_step = read_by_leader(steps + state.index);
    if (first_step == kEndsWork) break;
    const int tile = first_step >> kTileShift;
    float accumulators[kAccumulators];
    multiply_tile(accumulators, base, steps, state, a_descriptor, b_descriptor, lane);
    store_tile(p, accumulators, staging, warpgroup, lane, warpgroup_leader, tile / p.column_blocks * kBlock,
        tile % p.column_blocks * kBlock);
  }
  // Shared memory must outlive the stores that read it.
  if (warpgroup_leader) tma_store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    h100_bsr_spgemm_b128_balanced(const __grid_constant__ Params p) {
  // TMA swizzles by address, with a period of 1024 bytes: swizzled buffers are aligned to that.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  int* steps = reinterpret_cast<int*>(shared + kStepsOffset);
  List* list = reinterpret_cast<List*>(shared + kListOffset);

  // One thread initializes the barriers. An empty barrier counts one arrival per consumer warp.
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kFullBarrier + 8 * i, 1);
      mbarrier_init(base + kEmptyBarrier + 8 * i, kConsumerWarps);
    }
    mbarrier_init(base + kListFullBarrier, 32);  // every lane arrives after it has written, or read, its part
    mbarrier_init(base + kListEmptyBarrier, 32);
    fence_mbarrier_init();
    prefetch_tensormap(&p.a_map);
    prefetch_tensormap(&p.b_map);
    prefetch_tensormap(&p.c_map);
  }
  __syncthreads();

  if (threadIdx.x / 32 == kConsumerWarps) {
    produce(p, base, steps, list);
  } else if (threadIdx.x / 32 == kConsumerWarps + 1) {
    search(p, base, list);
  } else {
    consume(p, base, steps, threadIdx.x / kWarpgroupThreads);
  }
}
