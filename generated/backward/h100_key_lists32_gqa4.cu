// Generated from specs/backward/h100_key_lists32_gqa4.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/backward/h100_key_lists32_gqa4.yaml
// spec: {"arch":"sm_90a","copy":"tma","dtype":"fp16","entry_keys":32,"group":4,"head_dim":128,"mma":"wgmma","op":"key_lists_backward","schedule":"cooperative","stages":2,"tile":{"m":48,"n":64}}
// spec hash: 1afb0e7a695f4228fbe6e70e5117ee1a4d39afb42792fa45d93cf7a645d040da
// seal: sha256 551949e5330c6f601e12715e0c6c9def8821f898203a404818ddc5554b8645f8

// Gradients of Q, K and V for sm_90a, of attention of packed sequences over lists of key blocks: each query and KV head
// has its own list.
//   P = exp(scale * Q K^T - LSE),  dS = P (dO V^T - delta),
//   dV = P^T dO,  dK = scale * dS^T Q,  dQ = scale * dS K
// A thread block has the keys of several blocks and gathers the queries that list any of them. A query sees no block
// that it does not list, and no key behind its own.
// It adds its part of a query's dQ to an accumulator in device memory, which is 0 before the launch, in any order.
// The accumulator has integers, so that results are bitwise reproducible: see the scale of a row below.
//
// Roles
//   warpgroup 0      warp 0 fills the ring of queries by TMA, one query of each lane, and loads K and V. Warp 1 adds to
//                    dQ's accumulator, one query of each lane.
//   warpgroups 1..   consumers. Each owns 64 keys: S^T = K Q^T and dP^T = V dO^T from shared memory,
//                    dV += P^T dO and dK += dS^T Q with P^T and dS^T in registers, as A operands. dS also goes to
//                    shared memory: dQ^T = K^T dS^T of a step needs all keys of the tile.
//
// Barriers (full: the data has arrived; empty: the buffer may be overwritten)
//   kv_full                  K and V of the tile
//   q_full[i], q_empty[i]    stage i of the ring: Q, dO, their statistics, and of each query the last key that it sees
//                            and its largest keys
//   part_full, part_empty    a step's part of dQ
//
// Symbols
//   row         a query head of a query: the heads of one KV head are adjacent
//   entry       a query that lists the tile
//   tile        kTileN keys of a sequence and KV head, from a multiple of kTileN on
//   piece       a block of a tile. An entry has a bit for each piece that its query lists. If a query lists a piece
//               several times, the tile has as many entries of that query
//   chunk       entries of a tile, in descending order of queries, processed by one thread block. Thread blocks take
//               the chunks of late queries first: those that run at one time share queries, which stay in the L2 cache
//   step        kTileM rows: kStepQueries entries of the chunk
//   s, dp       S^T and dP^T: 64 keys of the warpgroup x kTileM rows; p_frag, ds_frag: P^T and dS^T in 16 bits
//   A thread holds keys r and r + 8 of its warp's 16 (r = lane / 4), rows 8 j + 2 (lane % 4) + {0, 1}; of dQ^T, it
//   holds columns r and r + 8 instead of keys.

using int64 = long long;
using uint32 = unsigned int;

// Stands for CUtensorMap: 128 opaque bytes (PTX ISA, "Tensor-Map"), 64-byte aligned (driver API,
// cuTensorMapEncodeTiled). The comments of parameters of this type give the dimensions, innermost first, the box of one
// copy, and the bytes of the swizzle.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

struct RowStats;
constexpr int kHeadDim = 128;  // elements per head
constexpr int kGroup = 4;  // query heads per KV head
constexpr int kTileM = 48;  // rows per step
constexpr int kTileN = 64;  // keys of a tile
constexpr int kPieces = 2;  // blocks of a tile
constexpr int kPieceKeys = 32;  // keys of a block
constexpr int kStepPieces = 24;  // queries per step, times the blocks of a tile
constexpr int kStepQueries = 12;  // queries per step
constexpr int kStages = 2;  // depth of the ring
constexpr int kConsumerWarpgroups = 1;  // warpgroups that compute, 64 keys each
constexpr int kThreads = 256;  // warpgroup 0 produces, the others consume
constexpr int kProducerRegisters = 24;  // registers per producer thread
constexpr int kConsumerRegisters = 232;  // registers per consumer thread
constexpr int kGroupColumns = 64;  // columns of a group: one 128-byte swizzled row
constexpr int kGroups = 2;  // column groups per head
constexpr int kQGroupBytes = 6144;  // bytes of one column group of Q, of dO, or of dS
constexpr int kKvGroupBytes = 8192;  // bytes of one column group of K or V
constexpr int kQBytes = 12288;  // bytes of Q, or of dO, of a step
constexpr int kKvBytes = 16384;  // bytes of K, or of V, of a tile
constexpr int kDsBuffers = 1;  // buffers of dS
constexpr int kDsBytes = 6144;  // bytes of dS of a step
constexpr int kStatsBytes = 384;  // bytes of the statistics of a step
constexpr int kNormsBytes = 192;  // bytes of the norms of the rows of a step
constexpr int kDqColumnParts = 2;  // parts of 64 columns of dQ, indexed by warpgroup
constexpr int kDqParts = 2;  // such parts of a warpgroup
constexpr int kDqQueries = 48;  // rows of a warpgroup's part of dQ
constexpr int kPartBytes = 2048;  // bytes of a query's part of dQ
constexpr int kSumFloats = 8192;  // elements of dK, or of dV, of a chunk
constexpr int kRowThreads = 256;  // threads per block of the prologue, and of the epilogue
constexpr int kRowLanes = 16;  // threads per row in the prologue, 16 bytes each

// Dynamic shared memory: 114432 bytes. Byte offsets:
constexpr int kKOffset = 0;  // 16384 bytes: K of the tile in column groups
constexpr int kVOffset = 16384;  // 16384 bytes: V of the tile
constexpr int kQOffset = 32768;  // 24576 bytes: Q ring
constexpr int kDoutOffset = 57344;  // 24576 bytes: dO ring
constexpr int kDsOffset = 81920;  // 6144 bytes: dS of a step: column groups of 64 keys
constexpr int kPartsOffset = 88064;  // 24576 bytes: staging of a step's part of dQ, query by query
constexpr int kStatsOffset = 112640;  // 768 bytes: statistics of the rows in the ring
constexpr int kNormsOffset = 113408;  // 384 bytes: norms of the rows of dO in the ring
constexpr int kBarriersOffset = 113792;  // 56 bytes: mbarriers
constexpr int kLastKeysOffset = 113848;  // 200 bytes: last keys of queries, by piece; whether one sees fewer
constexpr int kLargestOffset = 114048;  // 192 bytes: largest |K| and norm of V of each query of the ring
constexpr int kScalesOffset = 114240;  // 192 bytes: scales of the rows of a step, and of the previous one

constexpr int kQFullBarrier = kBarriersOffset;
constexpr int kQEmptyBarrier = kQFullBarrier + 8 * kStages;
constexpr int kKvFullBarrier = kQEmptyBarrier + 8 * kStages;
constexpr int kPartFullBarrier = kKvFullBarrier + 8;
constexpr int kPartEmptyBarrier = kPartFullBarrier + 8;
constexpr int kWarpgroupThreads = 128, kWarpsPerWarpgroup = 4;
constexpr int kWarpgroupRows = 64;  // rows of one wgmma: keys
constexpr int kRowBytes = 128;  // bytes of a row of a column group in shared memory: the span of the swizzle
constexpr int kConsumerBarrier = 1;  // named barrier of all consumers; this + 1 + w: of warpgroup w; 0: __syncthreads
constexpr uint32 kAllLanes = 0xFFFFFFFF;
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
constexpr float kNan = __builtin_bit_cast(float, 0x7FC00000);
constexpr int kNoSign = 0x7FFFFFFF;
constexpr float kLog2E = 1.44269504088896f;

// Launch: 256 threads per block, 114432 bytes of dynamic shared memory.
// Grid: one thread block for each chunk of a tile's queries.
// Prologue, with the same parameters: h100_key_lists32_gqa4_prologue, 256 threads per block.
// Epilogue, with the same parameters: h100_key_lists32_gqa4_convert, 256 threads per block.
struct Params {
  TensorMap q_map;  // Q (head_dim, q_len, heads, batch): box 64 x 1 x 4 x 1, swizzle 128
  TensorMap k_map;  // K (head_dim, kv_len, kv_heads, batch): box 64 x 64 x 1 x 1, swizzle 128
  TensorMap v_map;  // V, as K: box 64 x 64 x 1 x 1, swizzle 128
  TensorMap dout_map;  // dO, as Q: box 64 x 1 x 4 x 1, swizzle 128
  const unsigned short* k;  // K (key tokens, kv_heads, head_dim)
  int64 k_head_stride;  // head stride, in elements
  int64 k_row_stride;  // row stride, in elements
  const unsigned short* v;  // V, as K
  int64 v_head_stride;  // head stride, in elements
  int64 v_row_stride;  // row stride, in elements
  const unsigned short* out;  // O (tokens, heads, head_dim)
  int64 out_head_stride;  // head stride, in elements
  int64 out_row_stride;  // row stride, in elements
  const unsigned short* dout;  // dO, as O
  int64 dout_head_stride;  // head stride, in elements
  int64 dout_row_stride;  // row stride, in elements
  const float* lse;  // log-sum-exp of the forward, (heads, tokens) contiguous
  const float* dlse;  // gradient of the log-sum-exp, as lse; 0 if null
  RowStats* stats;  // statistics of all rows, (tokens, heads)
  float* norms;  // norms of the rows of dO, as stats
  unsigned char* beyond;  // 1 for rows whose dQ fixed point does not hold, as stats
  int2* largest;  // largest |K| and norm of V of the tiles of a query, (kv_heads, tokens)
  const int* entries;  // token of each entry, by tile
  const unsigned char* pieces;  // pieces of the tile that an entry lists, a bit each
  const int* offsets;  // first entry of each tile, then the end of the last one
  const int4* places;  // first token in K of each tile of a head, its position, and keys there
  const int* chunk_begins;  // first chunk of each tile, then the number of chunks
  const int* chunk_tiles;  // tile of each chunk; none behind the last one
  const int* positions;  // position of each query (tokens,)
  const int* chunk_order;  // chunk of each thread block
  unsigned short* dq;  // dQ, as O
  int64 dq_head_stride;  // head stride, in elements
  int64 dq_row_stride;  // row stride, in elements
  unsigned short* dk;  // dK (key tokens, kv_heads, head_dim)
  int64 dk_head_stride;  // head stride, in elements
  int64 dk_row_stride;  // row stride, in elements
  unsigned short* dv;  // dV, as K
  int64 dv_head_stride;  // head stride, in elements
  int64 dv_row_stride;  // row stride, in elements
  int* accum;  // sums of dQ in fixed point, (kv_heads, tokens, kPartBytes / 4)
  float* partials;  // dK and dV of each chunk
  int tokens;  // queries of all sequences
  int heads;  // query heads
  int kv_heads;  // heads of K and V
  int tiles;  // tiles of a head
  int chunk_entries;  // entries of a chunk
  int row_blocks;  // thread blocks of the prologue that have rows; the others have a tile each
  int dq_blocks;  // thread blocks of the epilogue that convert dQ; the others add up dK and dV
  float scale_log2;  // scale * log2(e); the host checks that it is positive
  float scale;  // the softmax scale
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

// cp.async.bulk.tensor.4d: copies the tensor box at (c0, ...) to shared memory, counted by an mbarrier. Elements
// outside the tensor, even before its first element, are zero-filled and counted (PTX ISA, "cp.async.bulk.tensor")
__device__ __forceinline__ void tma_load_4d(
    uint32 to, const TensorMap* map, uint32 barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// cp.async.bulk: copies `bytes` bytes to shared memory, counted by an mbarrier; addresses and bytes are multiples of 16
// (PTX ISA, "cp.async.bulk")
__device__ __forceinline__ void tma_load_bytes(uint32 to, const void* from, int bytes, uint32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
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

// cp.reduce.async.bulk: adds `bytes` bytes of integers in shared memory to those in device memory, elementwise (PTX
// ISA, "cp.reduce.async.bulk")
__device__ __forceinline__ void tma_reduce_add_s32(int* to, uint32 from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;"
      ::"l"(to), "r"(from), "r"(bytes) : "memory");
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

// wgmma.mma_async m64n48k16: D = A B, + D if `accumulate`; A in shared memory, K-major, B K-major.
// After p come scale factors of 1 for A and B, then whether A and B are MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n48k16_shared_k_major(
    float (&d)[24], uint32 a, uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %26, 0;\n"
      "mov.b64 a, { %24, %27 };\n"
      "mov.b64 b, { %25, %27 };\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23"
      "}, a, b, p, 1, 1, 0, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf));
}

// The same without D as an input, so that its registers are free for the compiler until here; A in shared memory, both
// K-major.
__device__ __forceinline__ void wgmma_m64n48k16_shared_k_major_first(float (&d)[24], uint32 a, uint32 b) {
  asm volatile(
      "{\n"
      ".reg .b64 a, b;\n"
      "mov.b64 a, { %24, %26 };\n"
      "mov.b64 b, { %25, %26 };\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23"
      "}, a, b, 0, 1, 1, 0, 0;\n"
      "}\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
        "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]),
        "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23])
      : "r"(a), "r"(b), "n"(kDescriptorUpperHalf));
}

// wgmma.mma_async m64n128k16: D = A B, + D if `accumulate`; A in registers, B MN-major.
// After p come scale factors of 1 for A and B, then whether B is MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n128k16_registers_mn_major(
    float (&d)[64], const uint32 (&a)[4], uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 b;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "mov.b64 b, { %68, %70 };\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63"
      "}, { %64, %65, %66, %67 }, b, p, 1, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf));
}

// wgmma.mma_async m64n48k16: D = A B, + D if `accumulate`; A in shared memory, M-major, B K-major.
// After p come scale factors of 1 for A and B, then whether A and B are MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n48k16_shared_m_major_k_major(
    float (&d)[24], uint32 a, uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %26, 0;\n"
      "mov.b64 a, { %24, %27 };\n"
      "mov.b64 b, { %25, %27 };\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23"
      "}, a, b, p, 1, 1, 1, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf));
}

// The same without D as an input, so that its registers are free for the compiler until here; A in shared memory,
// M-major, B K-major.
__device__ __forceinline__ void wgmma_m64n48k16_shared_m_major_k_major_first(float (&d)[24], uint32 a, uint32 b) {
  asm volatile(
      "{\n"
      ".reg .b64 a, b;\n"
      "mov.b64 a, { %24, %26 };\n"
      "mov.b64 b, { %25, %26 };\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23"
      "}, a, b, 0, 1, 1, 1, 0;\n"
      "}\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
        "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]),
        "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23])
      : "r"(a), "r"(b), "n"(kDescriptorUpperHalf));
}

// bar.sync: waits at named barrier `id` of `threads` threads (PTX ISA, "bar")
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ex2.approx.ftz: 2^x, relative error 2^-22 (PTX ISA, "ex2")
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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

// Statistics of a row for the main kernel: log-sum-exp times log2(e), and delta, the sum of dO O over the row, minus
// the gradient of the log-sum-exp. A query that sees no key has infinity and 0: its weights are 2^-inf = 0.
struct RowStats {
  float lse_log2, delta;
};

// Unpacks two 16-bit elements to floats.
__device__ __forceinline__ float2 unpack(uint32 pair) {
  float2 found;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 { low, high }, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}\n" : "=f"(found.x), "=f"(found.y) : "r"(pair));
  return found;
}

// Statistics of rows: one thread per 16 bytes, kRowLanes adjacent threads per row; rows of a token are adjacent.
__device__ __forceinline__ void row_statistics(const Params& p) {
  const int64 row = (static_cast<int64>(blockIdx.x) * kRowThreads + threadIdx.x) / kRowLanes;
  const int64 token = row / p.heads;
  if (token >= p.tokens) return;  // whole rows: kRowLanes divides a warp
  const int chunk = threadIdx.x % kRowLanes, head = row % p.heads;
  const uint4 o =
      *reinterpret_cast<const uint4*>(p.out + head * p.out_head_stride + token * p.out_row_stride + chunk * 8);
  const uint4 d =
      *reinterpret_cast<const uint4*>(p.dout + head * p.dout_head_stride + token * p.dout_row_stride + chunk * 8);
  const uint32 o_pairs[4] = {o.x, o.y, o.z, o.w}, d_pairs[4] = {d.x, d.y, d.z, d.w};
  float delta = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a = unpack(o_pairs[i]), b = unpack(d_pairs[i]);
    delta += a.x * b.x + a.y * b.y;
    squares += b.x * b.x + b.y * b.y;
  }
#pragma unroll
  for (int lanes = kRowLanes / 2; lanes > 0; lanes /= 2) {
    delta += __shfl_xor_sync(kAllLanes, delta, lanes);
    squares += __shfl_xor_sync(kAllLanes, squares, lanes);
  }
  if (chunk == 0) {
    const int64 place = static_cast<int64>(head) * p.tokens + token;
    const float lse = p.lse[place];
    if (p.dlse != nullptr) delta -= p.dlse[place];
    p.stats[row] = lse > kMinusInfinity ? RowStats{lse * kLog2E, delta} : RowStats{-kMinusInfinity, 0.0f};
    p.norms[row] = lse < -kMinusInfinity ? sqrtf(squares) : kNan;
  }
}

// Finds the largest |K| and the largest norm of V of a tile. Each query that lists the tile gets the larger of them and
// its own.
__device__ __forceinline__ void bound_tile(const Params& p, int tile) {
  constexpr int kRows = kRowThreads / kRowLanes;
  __shared__ int largest[2];  // bits of numbers of no sign, which are in the order of integers; NaN is the largest
  const int first = __ldg(p.offsets + tile), end = __ldg(p.offsets + tile + 1), kv_head = tile / p.tiles;
  if (first == end) return;
  if (threadIdx.x < 2) largest[threadIdx.x] = 0;
  __syncthreads();
  const int4 place = __ldg(p.places + tile % p.tiles);
  const int chunk = threadIdx.x % kRowLanes;
  int key_bits = 1, norm_bits = 0;  // not 0: a query with a key
#pragma unroll
  for (int at = 0; at < kTileN; at += kRows) {
    const int key = at + threadIdx.x / kRowLanes;
    const int64 token = place.x + min(key, place.z - 1);
    const unsigned short* k_row = p.k + kv_head * p.k_head_stride + token * p.k_row_stride;
    const unsigned short* v_row = p.v + kv_head * p.v_head_stride + token * p.v_row_stride;
    const uint4 k = reinterpret_cast<const uint4*>(k_row)[chunk], v = reinterpret_cast<const uint4*>(v_row)[chunk];
    const uint32 k_pairs[4] = {k.x, k.y, k.z, k.w}, v_pairs[4] = {v.x, v.y, v.z, v.w};
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = unpack(k_pairs[i]), b = unpack(v_pairs[i]);
      key_bits = max(key_bits, __builtin_bit_cast(int, a.x) & kNoSign);
      key_bits = max(key_bits, __builtin_bit_cast(int, a.y) & kNoSign);
      squares += b.x * b.x + b.y * b.y;
    }
#pragma unroll
    for (int lanes = kRowLanes / 2; lanes > 0; lanes /= 2) squares += __shfl_xor_sync(kAllLanes, squares, lanes);
    norm_bits = max(norm_bits, __builtin_bit_cast(int, sqrtf(squares)) & kNoSign);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    key_bits = max(key_bits, __shfl_xor_sync(kAllLanes, key_bits, lanes));
    norm_bits = max(norm_bits, __shfl_xor_sync(kAllLanes, norm_bits, lanes));
  }
  if (threadIdx.x % 32 == 0) {
    atomicMax(&largest[0], key_bits);
    atomicMax(&largest[1], norm_bits);
  }
  __syncthreads();
  key_bits = largest[0];
  norm_bits = largest[1];
  for (int i = first + threadIdx.x; i < end; i += kRowThreads) {
    int2* of_query = p.largest + static_cast<int64>(kv_head) * p.tokens + __ldg(p.entries + i);
    atomicMax(&of_query->x, key_bits);
    atomicMax(&of_query->y, norm_bits);
  }
}

// Thread blocks for all rows, then one for each tile.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    h100_key_lists32_gqa4_prologue(const __grid_constant__ Params p) {
  if (blockIdx.x < p.row_blocks) {
    row_statistics(p);
  } else {
    bound_tile(p, blockIdx.x - p.row_blocks);
  }
}

// dQ is summed in fixed point, because sums of integers have the same bits in any order. A row has one scale, a power
// of two, from a bound of all its elements: the row's weights add up to 1 and |dP| <= |dO| |V|, so that no sum of parts
// exceeds max |K| (max |V| |dO| + |delta|), over the blocks that the query sees. |V| and |dO| are Euclidean norms.
constexpr float kBoundMargin = 2.125f;  // covers dS of 16 bits, up to twice its size if it is tiny, and other roundings
constexpr float kFixedEnd = 2147483648.0f;  // 2^31: what fixed point does not hold
constexpr uint32 kLeastExponent = 31;  // keeps the scale and its inverse normal numbers
constexpr uint32 kNanExponent = 255;  // of infinity and NaN

// Exponent field of a row's bound. `largest` has the largest |K| and the largest norm of V, as bits.
__device__ __forceinline__ uint32 bound_exponent(int2 largest, float norm, float delta) {
  const float k = __builtin_bit_cast(float, largest.x), v = __builtin_bit_cast(float, largest.y);
  const float bound = k * (norm * v + fabsf(delta)) * kBoundMargin;
  return max(__builtin_bit_cast(uint32, bound) >> 23 & kNanExponent, kLeastExponent);
}

// Upper half of the scale of a row: a number below the bound, times the scale, is below 2^31. The lower half is 0.
__device__ __forceinline__ unsigned short fixed_scale(uint32 exponent) { return (284 - exponent) << 7; }

// Its inverse; NaN if an operand of the row is infinite or NaN, or if fixed point did not hold a part of it.
__device__ __forceinline__ float fixed_inverse(uint32 exponent, bool is_beyond) {
  return __builtin_bit_cast(float, exponent == kNanExponent || is_beyond ? 0x7FC00000u : (exponent - 30) << 23);
}

// A thread block's part of the entries of a tile. Chunks of a KV head come in ascending order of keys.
struct Chunk {
  int kv_head, first_token, first_position, keys;  // of the tile; the token is in K, the position in the sequence
  int first, end;  // entries

  __device__ __forceinline__ Chunk(const Params& p, int index, int tile) {
    kv_head = tile / p.tiles;
    const int4 place = __ldg(p.places + tile % p.tiles);
    first_token = place.x;
    first_position = place.y;
    keys = place.z;
    first = __ldg(p.offsets + tile) + (index - __ldg(p.chunk_begins + tile)) * p.chunk_entries;
    end = min(first + p.chunk_entries, __ldg(p.offsets + tile + 1));
  }
  __device__ __forceinline__ int steps() const { return (end - first + kStepQueries - 1) / kStepQueries; }
};

// Adds the chunk's parts of dQ to the accumulator, one query of each lane.
__device__ __forceinline__ void add_parts(const Params& p, uint32 base, const Chunk& chunk) {
  const int lane = threadIdx.x % 32;
  const uint32 part = base + kPartsOffset + lane * kPartBytes;
#pragma unroll 1
  for (int step = 0; step < chunk.steps(); ++step) {
    const int index = chunk.first + step * kStepQueries + lane;
    const bool exists = lane < kStepQueries && index < chunk.end;
    const int token = exists ? __ldg(p.entries + index) : 0;
    mbarrier_wait(base + kPartFullBarrier, step % 2);
    if (exists) {
      const int64 place = static_cast<int64>(chunk.kv_head) * p.tokens + token;
      tma_reduce_add_s32(p.accum + place * (kPartBytes / 4), part, kPartBytes);
      tma_store_commit();
      tma_store_wait_read<0>();
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(base + kPartEmptyBarrier);
  }
}

// Producer: one warp, with one query of a step for each lane, which arrives for what it stores and loads. Lanes behind
// the last entry repeat it, for no key: what they load is finite, and has no weight.
__device__ __forceinline__ void produce(const Params& p, unsigned char* shared, uint32 base, const Chunk& chunk) {
  const int lane = threadIdx.x % 32, first_head = chunk.kv_head * kGroup;
  if (lane == 0) {
    const uint32 kv_full = base + kKvFullBarrier;
    mbarrier_arrive_expect_tx(kv_full, 2 * kKvBytes);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int column = group * kGroupColumns, offset = group * kKvGroupBytes;
      tma_load_4d(base + kKOffset + offset, &p.k_map, kv_full, column, chunk.first_token, chunk.kv_head, 0);
      tma_load_4d(base + kVOffset + offset, &p.v_map, kv_full, column, chunk.first_token, chunk.kv_head, 0);
    }
  }
  int* last_keys = reinterpret_cast<int*>(shared + kLastKeysOffset);
#pragma unroll 1
  for (int step = 0; step < chunk.steps(); ++step) {
    const int stage = step % kStages, index = chunk.first + step * kStepQueries + lane;
    const int token = __ldg(p.entries + min(index, chunk.end - 1));
    const int position = __ldg(p.positions + token) - chunk.first_position;
    const int last = index < chunk.end ? min(position, chunk.keys - 1) : -1;
    const int2 largest = p.largest[static_cast<int64>(chunk.kv_head) * p.tokens + token];
    const uint32 pieces = __ldg(p.pieces + min(index, chunk.end - 1));
    const bool lists_all = pieces == (1u << kPieces) - 1;
    const bool sees_fewer = __any_sync(kAllLanes, lane < kStepQueries && (last < kTileN - 1 || !lists_all));
    const uint32 full = base + kQFullBarrier + 8 * stage;
    mbarrier_wait(base + kQEmptyBarrier + 8 * stage, step / kStages % 2 ^ 1);
    if (lane == 0) last_keys[stage * (kStepPieces + 1) + kStepPieces] = sees_fewer;
    if (lane < kStepQueries) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int sees = pieces >> piece & 1 ? last : -1;
        last_keys[stage * (kStepPieces + 1) + piece * kStepQueries + lane] = sees;
      }
      reinterpret_cast<int2*>(shared + kLargestOffset)[stage * kStepQueries + lane] = largest;
      mbarrier_arrive_expect_tx(full, (2 * kQBytes + kStatsBytes + kNormsBytes) / kStepQueries);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int column = group * kGroupColumns;
        const int offset = stage * kQBytes + group * kQGroupBytes + lane * (kGroup * kRowBytes);
        tma_load_4d(base + kQOffset + offset, &p.q_map, full, column, token, first_head, 0);
        tma_load_4d(base + kDoutOffset + offset, &p.dout_map, full, column, token, first_head, 0);
      }
      const int64 first_row = static_cast<int64>(token) * p.heads + first_head;
      constexpr int kBytes = kStatsBytes / kStepQueries;
      tma_load_bytes(
          base + kStatsOffset + stage * kStatsBytes + lane * kBytes, p.stats + first_row, kBytes, full);
      constexpr int kOfNorms = kNormsBytes / kStepQueries;
      tma_load_bytes(
          base + kNormsOffset + stage * kNormsBytes + lane * kOfNorms, p.norms + first_row, kOfNorms, full);
    }
  }
}

// The products of K or V with the queries of a step (asynchronous): d = A B^T, 64 keys x kTileM queries.
__device__ __forceinline__ void issue_scores(float (&d)[kTileM / 2], uint32 a, uint32 b) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    // 16 columns are 32 bytes of a 128-byte row; after four of them the next column group begins.
    const int in_group = k % 4 * 32, group = k / 4;
    const uint32 keys = a + ((group * kKvGroupBytes + in_group) >> 4);
    const uint32 queries = b + ((group * kQGroupBytes + in_group) >> 4);
    if (k == 0) {
      wgmma_m64n48k16_shared_k_major_first(d, keys, queries);
    } else {
      wgmma_m64n48k16_shared_k_major(d, keys, queries, 1);
    }
  }
  wgmma_commit();
  warpgroup_fence_operand(d);
}

// d += A B for the queries of a step (asynchronous): A is P^T or dS^T, B dO or Q.
__device__ __forceinline__ void issue_gradient(float (&d)[kHeadDim / 2], const uint32 (&a)[kTileM / 16][4], uint32 b) {
  warpgroup_fence_operand(d);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileM / 16; ++k) {
    wgmma_m64n128k16_registers_mn_major(d, a[k], b + (k * 16 * kRowBytes >> 4), 1);
  }
  wgmma_commit();
  warpgroup_fence_operand(d);
}

// dS^T = P^T (dP^T - delta), packed to 16 bits.
__device__ __forceinline__ void score_gradients(uint32 (&ds_frag)[kTileM / 16][4], const float (&weights)[kTileM / 2],
    const float (&dp)[kTileM / 2], const RowStats* stats) {
#pragma unroll
  for (int k = 0; k < kTileM / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = k * 16 + i / 2 * 8, at = k * 8 + i * 2;
      ds_frag[k][i] = pack(weights[at] * (dp[at] - stats[query].delta),
          weights[at + 1] * (dp[at + 1] - stats[query + 1].delta));
    }
  }
}

// P^T: the weights of a step, in place, and packed to 16 bits. The accumulator layout of S^T is the A-operand layout.
__device__ __forceinline__ void weights(uint32 (&p_frag)[kTileM / 16][4], float (&s)[kTileM / 2],
    const RowStats* stats, float scale_log2) {
#pragma unroll
  for (int k = 0; k < kTileM / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = k * 16 + i / 2 * 8, at = k * 8 + i * 2;
      s[at] = ex2(s[at] * scale_log2 - stats[row].lse_log2);
      s[at + 1] = ex2(s[at + 1] * scale_log2 - stats[row + 1].lse_log2);
      p_frag[k][i] = pack(s[at], s[at + 1]);
    }
  }
}

// Masks the keys behind the last one that a query sees. `key` is this thread's first.
__device__ __forceinline__ void hide_keys(float (&s)[kTileM / 2], const int* last_keys, int key) {
#pragma unroll
  for (int j = 0; j < kTileM / 8; ++j) {
    const int last = last_keys[(j * 8 + static_cast<int>(threadIdx.x) % 4 * 2) / kGroup] - key;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i / 2 * 8 > last) s[j * 4 + i] = kMinusInfinity;
    }
  }
}

// Zero-fills the warpgroup's rows of K and V past the end of the batch's keys, so that not even NaN there has an effect
// on dQ. `keys`: number of keys of the tile in range.
__device__ __forceinline__ void clear_hidden_rows(unsigned char* shared, int keys, int warpgroup) {
  constexpr int kRowChunks = kRowBytes / 16;
  const int thread = threadIdx.x % kWarpgroupThreads, end = (warpgroup + 1) * kWarpgroupRows;
#pragma unroll 1
  for (int row = max(keys, end - kWarpgroupRows) + thread / kRowChunks; row < end;
      row += kWarpgroupThreads / kRowChunks) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      unsigned char* place = shared + group * kKvGroupBytes + row * kRowBytes + thread % kRowChunks * 16;
      *reinterpret_cast<uint4*>(place + kKOffset) = make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(place + kVOffset) = make_uint4(0, 0, 0, 0);
    }
  }
  fence_proxy_async();
  bar_sync(kConsumerBarrier + 1 + warpgroup, kWarpgroupThreads);
}

// Stages dS of the warpgroup's keys, transposed back: rows are queries, in a column group of its 64 keys (128-byte
// swizzle).
__device__ __forceinline__ void stage_score_gradients(uint32 staging, const uint32 (&ds_frag)[kTileM / 16][4]) {
  const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 % kWarpsPerWarpgroup * 2 + lane / 8 % 2;
#pragma unroll
  for (int k = 0; k < kTileM / 16; ++k) {
    const int query = k * 16 + lane / 16 * 8 + lane % 8;
    stmatrix_x4_trans(staging + query * kRowBytes + (chunk ^ query % 8) * 16, ds_frag[k][0], ds_frag[k][1],
        ds_frag[k][2], ds_frag[k][3]);
  }
}

// The warpgroup's half of dQ^T of a step (asynchronous), over all keys of the tile: d = K^T dS^T, 64 columns of a head
// x kDqQueries queries.
__device__ __forceinline__ void issue_dq(float (&d)[kDqQueries / 2], uint32 k_transposed, uint32 ds) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileN / 16; ++k) {
    const uint32 a = k_transposed + (k * 16 * kRowBytes >> 4), b = ds + ((k / 4 * kQGroupBytes + k % 4 * 32) >> 4);
    if (k == 0) {
      wgmma_m64n48k16_shared_m_major_k_major_first(d, a, b);
    } else {
      wgmma_m64n48k16_shared_m_major_k_major(d, a, b, 1);
    }
  }
  wgmma_commit();
  warpgroup_fence_operand(d);
}

// Stages a part of dQ^T in fixed point, query by query in the layout of the accumulator: 16 bytes of each thread, next
// to those of its neighbors. `part` has 64 columns of a head; `first_row` is the first of the part's rows. Returns a
// bit for each of the thread's rows: whether fixed point does not hold an element of it.
__device__ __forceinline__ uint32 stage_dq(unsigned char* staging, const float (&d)[kDqQueries / 2],
    const unsigned short* scales, int part, int first_row) {
  const int thread = threadIdx.x % kWarpgroupThreads, lane = thread % 32;
  uint32 beyond = 0;
#pragma unroll
  for (int j = 0; j < kDqQueries / 8; ++j) {
    const int eight = first_row / 8 + j;  // rows of the step
    const int query = eight * 2 + lane / 2 % 2;
    const int place = (query * kDqColumnParts + part) * (kWarpgroupThreads / 2) + thread / 4 * 2 + lane % 2;
    const uint32 pair = *reinterpret_cast<const uint32*>(scales + eight * 8 + lane % 4 * 2);
    const float scale = __uint_as_float(pair << 16), next = __uint_as_float(pair & 0xFFFF0000);
    const float x = d[j * 4] * scale, y = d[j * 4 + 1] * next, z = d[j * 4 + 2] * scale, w = d[j * 4 + 3] * next;
    if (!(fabsf(x) < kFixedEnd && fabsf(z) < kFixedEnd)) beyond |= 1u << j * 2;
    if (!(fabsf(y) < kFixedEnd && fabsf(w) < kFixedEnd)) beyond |= 2u << j * 2;
    reinterpret_cast<int4*>(staging)[place] =
        make_int4(__float2int_rn(x), __float2int_rn(y), __float2int_rn(z), __float2int_rn(w));
  }
  return beyond;
}

// Makes dQ of a step's rows NaN, by marks that only the kernel after this one reads. `beyond` is of stage_dq. The chunk
// is found again: its numbers cost the consumers no registers in other steps.
__device__ __forceinline__ void mark_rows(const Params& p, int index, int step, uint32 beyond, int first_row) {
  const Chunk chunk(p, index, __ldg(p.chunk_tiles + index));
#pragma unroll 1
  for (int i = 0; i < kDqQueries / 4; ++i) {
    const int row = first_row + i / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
    const int entry = chunk.first + step * kStepQueries + row / kGroup;
    if ((beyond >> i & 1) == 0 || entry >= chunk.end) continue;
    const int64 first_of_token = static_cast<int64>(__ldg(p.entries + entry)) * p.heads;
    p.beyond[first_of_token + chunk.kv_head * kGroup + row % kGroup] = 1;
  }
}

// Stores dK or dV of the warpgroup's keys: 16 bytes of each thread, next to those of its neighbors.
__device__ __forceinline__ void store_sums(float* sums, const float (&d)[kHeadDim / 2], int warpgroup) {
  float4* to = reinterpret_cast<float4*>(sums) + warpgroup * (kHeadDim / 8) * kWarpgroupThreads;
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
    to[j * kWarpgroupThreads + threadIdx.x % kWarpgroupThreads] =
        make_float4(d[j * 4], d[j * 4 + 1], d[j * 4 + 2], d[j * 4 + 3]);
  }
}

// Sets the scales of a step's rows, one row of each thread; the step's barrier of all consumers makes them visible.
__device__ __forceinline__ void set_scales(unsigned char* shared, unsigned short* scales, int stage) {
  const int row = static_cast<int>(threadIdx.x) - kWarpgroupThreads;
  if (row >= kTileM) return;
  const float norm = reinterpret_cast<const float*>(shared + kNormsOffset)[stage * kTileM + row];
  const float delta = reinterpret_cast<const RowStats*>(shared + kStatsOffset)[stage * kTileM + row].delta;
  const int2 largest = reinterpret_cast<const int2*>(shared + kLargestOffset)[stage * kStepQueries + row / kGroup];
  scales[row] = fixed_scale(bound_exponent(largest, norm, delta));
}

__device__ __forceinline__ void consume(const Params& p, unsigned char* shared, uint32 base, const Chunk& chunk,
    int index, int warpgroup) {
  const int lane = threadIdx.x % 32;
  const int key = warpgroup * kWarpgroupRows + threadIdx.x / 32 % kWarpsPerWarpgroup * 16 + lane / 4;
  const int first_part = warpgroup % kDqColumnParts, first_row = warpgroup / kDqColumnParts * kDqQueries;
  const uint32 my_rows = warpgroup * kWarpgroupRows * kRowBytes;
  // The shuffles keep the compiler from recomputing the descriptors in each step.
  const uint32 k_descriptor = __shfl_sync(kAllLanes, wgmma_descriptor(base + kKOffset + my_rows, 0), 0);
  const uint32 v_descriptor = __shfl_sync(kAllLanes, wgmma_descriptor(base + kVOffset + my_rows, 0), 0);
  const uint32 q_descriptors = __shfl_sync(kAllLanes, wgmma_descriptor(base + kQOffset, 0), 0);
  const uint32 dout_descriptors = __shfl_sync(kAllLanes, wgmma_descriptor(base + kDoutOffset, 0), 0);
  const uint32 k_transposed =
      __shfl_sync(kAllLanes, wgmma_descriptor(base + kKOffset + first_part * kKvGroupBytes, 0), 0);
  const uint32 ds_descriptors =
      __shfl_sync(kAllLanes, wgmma_descriptor(base + kDsOffset + first_row * kRowBytes, 0), 0);
  const uint32 mn_major = wgmma_descriptor(0, kQGroupBytes);  // added to a descriptor for an MN-major operand
  float dk[kHeadDim / 2] = {}, dv[kHeadDim / 2] = {};
  warpgroup_fence_operand(dk);
  warpgroup_fence_operand(dv);
  mbarrier_wait(base + kKvFullBarrier, 0);
  if (chunk.keys < kTileN) clear_hidden_rows(shared, chunk.keys, warpgroup);
  unsigned short* scales = reinterpret_cast<unsigned short*>(shared + kScalesOffset);
  const uint32 steps = chunk.steps();
#pragma unroll 1
  for (uint32 i = 0; i < steps; ++i) {
    const int stage = i % kStages;
    const uint32 q_descriptor = q_descriptors + (stage * kQBytes >> 4);
    const uint32 dout_descriptor = dout_descriptors + (stage * kQBytes >> 4);
    const RowStats* stats =
        reinterpret_cast<const RowStats*>(shared + kStatsOffset + stage * kStatsBytes) + lane % 4 * 2;
    const int* last_keys = reinterpret_cast<const int*>(shared + kLastKeysOffset) + stage * (kStepPieces + 1);
    float s[kTileM / 2], dp[kTileM / 2];
    uint32 p_frag[kTileM / 16][4], ds_frag[kTileM / 16][4];
    mbarrier_wait(base + kQFullBarrier + 8 * stage, i / kStages % 2);
    issue_scores(s, k_descriptor, q_descriptor);
    issue_scores(dp, v_descriptor, dout_descriptor);
    wgmma_wait<1>();
    warpgroup_fence_operand(s);
    // A warp's keys are in one piece.
    if (last_keys[kStepPieces]) hide_keys(s, last_keys + key / kPieceKeys * kStepQueries, key);
    weights(p_frag, s, stats, p.scale_log2);
    wgmma_wait<0>();
    warpgroup_fence_operand(dp);
    score_gradients(ds_frag, s, dp, stats);
    // A warpgroup that passes a step's barrier has finished dQ of the previous step. With two buffers of dS, that
    // barrier is enough.
    const int ds_place = i % kDsBuffers * kDsBytes;
    if constexpr (kDsBuffers == 1) bar_sync(kConsumerBarrier, kConsumerWarpgroups * kWarpgroupThreads);
    stage_score_gradients(base + kDsOffset + ds_place + warpgroup * kQGroupBytes, ds_frag);
    issue_gradient(dv, p_frag, dout_descriptor | mn_major);
    set_scales(shared, scales + i % 2 * kTileM, stage);
    fence_proxy_async();
    bar_sync(kConsumerBarrier, kConsumerWarpgroups * kWarpgroupThreads);
    float dq[kDqParts][kDqQueries / 2];
#pragma unroll
    for (int part = 0; part < kDqParts; ++part) {
      issue_dq(dq[part], k_transposed + (part * kKvGroupBytes >> 4), ds_descriptors + (ds_place >> 4));
    }
    issue_gradient(dk, ds_frag, q_descriptor | mn_major);
    wgmma_wait<1>();
    warpgroup_fence_operand(dv);
#pragma unroll
    for (int part = 0; part < kDqParts; ++part) warpgroup_fence_operand(dq[part]);
    mbarrier_wait(base + kPartEmptyBarrier, i % 2 ^ 1);
    uint32 beyond = 0;
#pragma unroll
    for (int part = 0; part < kDqParts; ++part) {
      beyond |=
          stage_dq(shared + kPartsOffset, dq[part], scales + i % 2 * kTileM, first_part + part, first_row);
    }
    if (beyond != 0) mark_rows(p, index, i, beyond, first_row);
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(base + kPartFullBarrier);
    wgmma_wait<0>();
    warpgroup_fence_operand(dv);
    warpgroup_fence_operand(dk);
    mbarrier_arrive(base + kQEmptyBarrier + 8 * stage);
  }
  float* sums = p.partials + static_cast<int64>(index) * (2 * kSumFloats);
  store_sums(sums, dk, warpgroup);
  store_sums(sums + kSumFloats, dv, warpgroup);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    h100_key_lists32_gqa4(const __grid_constant__ Params p) {
  // TMA swizzles by address, with a period of 1024 bytes: swizzled buffers are aligned to that.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  // The shuffle proves to the compiler that both are warp-uniform, so values derived from them go to uniform registers
  // (CUTLASS' canonical_warp_idx_sync).
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0), warpgroup = warp / kWarpsPerWarpgroup;
  if (threadIdx.x == 0) {
    mbarrier_init(base + kKvFullBarrier, 1);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kQFullBarrier + 8 * i, kStepQueries);
      mbarrier_init(base + kQEmptyBarrier + 8 * i, kConsumerWarpgroups * kWarpgroupThreads);
    }
    mbarrier_init(base + kPartFullBarrier, kConsumerWarpgroups * kWarpsPerWarpgroup);
    mbarrier_init(base + kPartEmptyBarrier, 1);
    fence_mbarrier_init();
    prefetch_tensormap(&p.q_map);
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
    prefetch_tensormap(&p.dout_map);
  }
  __syncthreads();
  const int index = __ldg(p.chunk_order + blockIdx.x), tile = __ldg(p.chunk_tiles + index);
  if (tile >= p.tiles * p.kv_heads) return;  // there are fewer chunks than thread blocks
  const Chunk chunk(p, index, tile);
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) {
      produce(p, shared, base, chunk);
    } else if (warp == 1) {
      add_parts(p, base, chunk);
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, shared, base, chunk, index, warpgroup - 1);
  }
}

// dQ of kStepQueries queries from the accumulator, times the softmax scale, in 16 bits. Queries that see no key have 0.
__device__ __forceinline__ void convert_dq(const Params& p) {
  constexpr int kPadding = 8;  // padding of a row in shared memory: eight rows start in different banks
  constexpr int kRowChunks = kHeadDim / 8, kPartFours = kPartBytes / 16;  // 16 bytes each
  __shared__ __align__(16) unsigned short rows[kTileM][kHeadDim + kPadding];
  const int64 first = static_cast<int64>(blockIdx.x) * kStepQueries;  // of all heads' queries
  const int64 queries = static_cast<int64>(p.kv_heads) * p.tokens;
  __shared__ float factors[kTileM];
  if (threadIdx.x < kTileM && first + threadIdx.x / kGroup < queries) {
    const int64 place = first + threadIdx.x / kGroup;
    const int64 row = place % p.tokens * p.heads + place / p.tokens * kGroup + threadIdx.x % kGroup;
    const int2 largest = p.largest[place];
    factors[threadIdx.x] = largest.x == 0 ? 0.0f
        : p.scale * fixed_inverse(bound_exponent(largest, p.norms[row], p.stats[row].delta), p.beyond[row] != 0);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTileM * kHeadDim / 4; i += kRowThreads) {
    const int64 place = first + i / kPartFours;
    if (place >= queries) break;
    // The layout of stage_dq.
    const int four = i % kPartFours;
    const int part = four / (kWarpgroupThreads / 2), thread = four % (kWarpgroupThreads / 2);
    const int column = part * 64 + thread / 16 * 16 + thread % 16 / 2, row = thread % 2 * 2;
    const int row_of_step = i / kPartFours * kGroup + row;
    const int4 found = reinterpret_cast<const int4*>(p.accum)[place * kPartFours + four];
    const float factor = factors[row_of_step], other = factors[row_of_step + 1];
    const uint32 left = pack(found.x * factor, found.y * other), right = pack(found.z * factor, found.w * other);
    unsigned short* to = &rows[row_of_step][column];
    to[0] = left;
    to[kHeadDim + kPadding] = left >> 16;
    to[8] = right;
    to[kHeadDim + kPadding + 8] = right >> 16;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTileM * kRowChunks; i += kRowThreads) {
    const int row = i / kRowChunks, chunk = i % kRowChunks;
    const int64 place = first + row / kGroup;
    if (place >= queries) break;
    const int64 head = place / p.tokens * kGroup + row % kGroup, token = place % p.tokens;
    *reinterpret_cast<uint4*>(p.dq + head * p.dq_head_stride + token * p.dq_row_stride + chunk * 8) =
        *reinterpret_cast<const uint4*>(&rows[row][chunk * 8]);
  }
}

// Adds up dK or dV of the chunks of a tile, in order, and converts the sum to 16 bits; 0 without chunks. One thread has
// 4 elements; kSumBlocks thread blocks have those of dK, as many those of dV.
__device__ __forceinline__ void add_chunks(const Params& p, int block) {
  constexpr int kSumBlocks = kSumFloats / 4 / kRowThreads;
  const int tile = block / (2 * kSumBlocks), i = block % kSumBlocks * kRowThreads + threadIdx.x;
  const bool of_dv = block / kSumBlocks % 2 != 0;
  const int4 place = __ldg(p.places + tile % p.tiles);
  const int first = __ldg(p.chunk_begins + tile), end = __ldg(p.chunk_begins + tile + 1);
  const int64 head_stride = of_dv ? p.dv_head_stride : p.dk_head_stride;
  const int64 row_stride = of_dv ? p.dv_row_stride : p.dk_row_stride;
  unsigned short* to = (of_dv ? p.dv : p.dk) + tile / p.tiles * head_stride + place.x * row_stride;
  const float factor = of_dv ? 1.0f : p.scale;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
  for (int chunk = first; chunk < end; ++chunk) {
    const float* from = p.partials + (static_cast<int64>(chunk) * 2 + of_dv) * kSumFloats;
    const float4 part = reinterpret_cast<const float4*>(from)[i];
    sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
  }
  // The layout of store_sums.
  const int thread = i % kWarpgroupThreads, eight = i / kWarpgroupThreads;
  const int column = eight % (kHeadDim / 8) * 8 + thread % 4 * 2;
  const int row = eight / (kHeadDim / 8) * kWarpgroupRows + thread / 32 * 16 + thread % 32 / 4;
  uint32* place_of_row = reinterpret_cast<uint32*>(to + row * row_stride + column);
  if (row < place.z) *place_of_row = pack(sum.x * factor, sum.y * factor);
  if (row + 8 < place.z) place_of_row[row_stride * 4] = pack(sum.z * factor, sum.w * factor);
}

// One thread block for kStepQueries queries, then those of the tiles.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    h100_key_lists32_gqa4_convert(const __grid_constant__ Params p) {
  if (blockIdx.x < p.dq_blocks) {
    convert_dq(p);
  } else {
    add_chunks(p, blockIdx.x - p.dq_blocks);
  }
}
