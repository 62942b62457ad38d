// Generated from specs/h100_topk32_b64_ordered.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_topk32_b64_ordered.yaml
// spec: {"arch":"sm_90a","copy":"tma","dtype":"fp16","head_dim":128,"lse":true,"mma":"wgmma","op":"attention","pattern":{"block":{"kv":64,"q":64},"k":32,"kind":"topk"},"query_grouping":"given","schedule":"cooperative","share_kv_loads":true,"stages":4,"tile":{"m":192,"n":64}}
// spec hash: 924ae0d4f6901e0d7e32f9f8efe5c268e5b145df55fd4a0ea35214560662ea48
// seal: sha256 6cac6cded8ec2690bda3e106239eb53f72a2c870603f722614ca93ce6c5a9bba

// Attention forward for sm_90a over the listed key blocks of the pattern:
//   O = softmax(scale * Q K^T) V
//
// Roles
//   warpgroup 0      producer. Warp 0 fills the K ring by TMA, load by load, and warp 1 the V ring. Warp 2 runs
//                    one tile ahead: it compares the lists of the tile's query blocks and schedules the loads.
//   warpgroups 1..   consumers. Each owns the 64 rows of one query block, which has its own list: S = Q K^T, online
//                    softmax, O += P V. It issues the load of its Q itself.
//   A sub-tile is one of the tile's query blocks, with its list and its warpgroup.
//
// Barriers (full: the data has arrived; empty: the buffer may be overwritten). In CUTLASS' terms, a producer's wait for
// an empty barrier is producer_acquire, a consumer's wait for a full one consumer_wait, and its arrival at an empty one
// consumer_release. Consumer warpgroup w is warpgroup w + 1 of the thread block.
//   q_full[w]                      Q of warpgroup w
//   order_full[i], order_empty[i]  slot i of the ring of schedules:
//                                  the loads of a tile, the steps of each warpgroup
//   k_full[u][j], k_empty[i]       j-th of kStages loads for set u of warpgroups; slot i of the K ring
//   v_full[u][j], v_empty[i]       the same for the V ring
//   A load serves a set of one or more warpgroups. Full barriers are numbered within the loads of a set: a warpgroup
//   waits only for its own loads, one after the other, regardless of the others. Slots are numbered over all loads. An
//   empty barrier counts kArrivals arrivals for each of four warps: each of the n users of a load arrives kArrivals / n
//   times per warp.
//
// Order of the loads of a tile: in turns, each of which gives every list one step, or two. LoadGroups of one load and
// of several are spread over the tile, which keeps the load rate even. The r-th of equal entries of a list shares its
// load with the r-th of another list, so every entry of every list is processed exactly once. Softmax does not depend
// on the order of keys. No list gets ahead of another, so few loads come between two of the same warpgroup: with
// kStages >= kSubTiles, the rings cannot fill up with loads whose users wait for the other ring.
//
// Pipeline of a consumer: S of step i and P V of step i - 1 are issued together (FlashAttention-3's IntraWGOverlap).
// The mask and the maxima of step i overlap that P V; its exponentials overlap the products of
// other warpgroups.
// Cooperative: the consumers share a tile, and their matrix products are unordered.
//
// Symbols
//   tile        queries of one head that a thread block processes at a time (FlashAttention's m_block); q_len and
//               kv_len are its seqlen_q and seqlen_k
//   step        kTileN keys, its n_block: one listed key block
//   s, p_frag   scores of 64 x kTileN pairs, and their weights as a 16-bit A operand
//   o           output of 64 x kHeadDim, not yet divided by the row sum
//   row_max     reference of the weights: maximum of a row's logits times log2(e), over the steps so far or up to an
//               earlier step
//   row_sum     this thread's part of the running sum of the weights
//   A thread holds rows r and r + 8 of its warp's 16 (r = lane / 4), columns 8 j + 2 (lane % 4) + {0, 1}.

using int64 = long long;
using uint32 = unsigned int;

// Stands for CUtensorMap: 128 opaque bytes (PTX ISA, "Tensor-Map"), 64-byte aligned (driver API,
// cuTensorMapEncodeTiled). The comments of parameters of this type give the dimensions, innermost first, the box of one
// copy, and the bytes of the swizzle.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

constexpr int kHeadDim = 128;  // elements per head
constexpr int kTileM = 192;  // query rows of a tile
constexpr int kTileN = 64;  // keys of one step; registers: 112 of s, p_frag, o + 28 = 140 of 160
constexpr int kStages = 4;  // depth of the K ring and of the V ring
constexpr int kTileStages = 2;  // depth of the ring of schedules
constexpr int kArrivals = 6;  // arrivals that release a slot of a ring, for each warp of a warpgroup
constexpr int kQPlaces = 2;  // Q buffers of each warpgroup
constexpr int kSubTiles = 3;  // sub-tiles of a tile: query blocks, each with its own list
constexpr int kSubTileRows = 64;  // query rows of a sub-tile, a part of a tile with its own key blocks
constexpr int kConsumerWarpgroups = 3;  // warpgroups that compute, 64 rows each
constexpr int kThreads = 512;  // warpgroup 0 produces, the others consume
constexpr int kProducerRegisters = 32;  // registers per producer thread
constexpr int kConsumerRegisters = 160;  // registers per consumer thread; 32 + 3 x 160 are the 4 x 128 at launch
constexpr int kGroupColumns = 64;  // columns of a group: one 128-byte swizzled row
constexpr int kGroups = 2;  // column groups of a head
constexpr int kQGroupBytes = 8192;  // bytes of one column group of Q
constexpr int kKvGroupBytes = 8192;  // bytes of one column group of K or V
constexpr int kOGroupBytes = 8192;  // bytes of one column group of a warpgroup's O
constexpr int kQBytes = 16384;  // bytes of a warpgroup's Q
constexpr int kKvBytes = 16384;  // bytes of K, or of V, of one step
constexpr int kBlockKeys = 64;  // keys of a listed block
constexpr int kTopK = 32;  // key blocks listed for each query block

// Dynamic shared memory: 232368 bytes. Byte offsets:
constexpr int kQOffset = 0;  // 98304 bytes: Q of each warpgroup, 64 rows in column groups of 64, then O
constexpr int kKOffset = 98304;  // 65536 bytes: K ring
constexpr int kVOffset = 163840;  // 65536 bytes: V ring
constexpr int kBarriersOffset = 229376;  // 568 bytes: mbarriers
constexpr int kBlockMetaOffset = 229944;  // 16 bytes: metadata of the loads in the K ring
constexpr int kLoadsOffset = 229960;  // 768 bytes: ring of schedules: key blocks of a tile in load order
constexpr int kStepsOffset = 230728;  // 768 bytes: ring of schedules: encoded steps of each warpgroup
constexpr int kNumbersOffset = 231496;  // 8 bytes: ring of schedules: loads per tile
constexpr int kBlocksOffset = 231504;  // 384 bytes: key block lists of the tile that is being scheduled
constexpr int kGroupedOffset = 231888;  // 384 bytes: key blocks that this tile loads, grouped by the lists they serve
constexpr int kSetsOffset = 232272;  // 96 bytes: set of lists that each entry is loaded for

constexpr int kSets = (1 << kSubTiles) - 1;  // sets of warpgroups that a load can serve: bit w for consumer w
constexpr int kQFullBarrier = kBarriersOffset;
constexpr int kOrderFullBarrier = kQFullBarrier + 8 * kSubTiles;
constexpr int kOrderEmptyBarrier = kOrderFullBarrier + 8 * kTileStages;
constexpr int kKFullBarrier = kOrderEmptyBarrier + 8 * kTileStages;
constexpr int kKEmptyBarrier = kKFullBarrier + 8 * kSets * kStages;
constexpr int kVFullBarrier = kKEmptyBarrier + 8 * kStages;
constexpr int kVEmptyBarrier = kVFullBarrier + 8 * kSets * kStages;
constexpr int kLoaders = 2;                 // warps that load: one for K, one for V
constexpr int kEntries = kSubTiles * kTopK;  // entries of all lists of a tile
constexpr int kLoadGroupKinds = 2 + kSubTiles;  // kinds of turns in which a tile loads
constexpr uint32 kBarrierRange = 64;        // a load's code: key block times this, plus full barrier (below 7 x 8)
constexpr int kWarpgroupThreads = 128, kWarpsPerWarpgroup = 4;
constexpr int kRowBytes = 128;  // bytes of a row of a column group in shared memory: the span of the swizzle
constexpr int kWarpgroupBarrier = 1;  // named barrier of consumer warpgroup w: this + w; 0 is __syncthreads
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
// Initial row_max: finite, so that differences are defined. A row whose logits are all below it counts as a row without
// keys.
constexpr float kLeastLogit = -1e30f;
constexpr float kLn2 = 0.693147180559945f;

// Launch: 512 threads per block, 232368 bytes of dynamic shared memory.
// Grid: one thread block per SM, looping over tiles (persistent).
struct Params {
  TensorMap q_map;  // Q (head_dim, q_len, heads, batch): box 64 x 64 x 1 x 1, swizzle 128
  TensorMap k_map;  // K (head_dim, kv_len, kv_heads, batch): box 64 x 64 x 1 x 1, swizzle 128
  TensorMap v_map;  // V, as K: box 64 x 64 x 1 x 1, swizzle 128
  TensorMap o_map;  // O, as Q: box 64 x 64 x 1 x 1, swizzle 128
  float* lse;  // log-sum-exp, (batch, heads, q_len) contiguous; not stored if null
  const int* kv_indices;  // key blocks of each query block, in any order
  int64 kv_indices_batch_stride;  // batch stride, in elements (0: shared)
  int64 kv_indices_head_stride;  // head stride, in elements (0: shared)
  int64 kv_indices_row_stride;  // query block stride, in elements
  const int* query_order;  // query blocks, grouped by tile
  int64 query_order_batch_stride;  // batch stride, in elements (0: shared)
  int64 query_order_head_stride;  // head stride, in elements (0: shared)
  int64 query_order_row_stride;  // query block stride, in elements
  int query_blocks;  // query blocks per head: rows of the lists
  int q_len;  // queries per head
  int kv_len;  // keys per head
  int heads;  // query heads
  int heads_per_kv_head;  // query heads per K/V head
  int query_tiles;  // tiles of kTileM queries per head
  int tiles;  // batch * heads * query_tiles
  float scale_log2;  // scale * log2(e); the host checks that it is positive
};

// Lengths of the sequences of a batch. They are read where they are used: constant memory takes no registers.
struct SeqlenInfo {
  const Params& p;

  __device__ __forceinline__ SeqlenInfo(const Params& p, int batch) : p(p) {}
  // Number of queries.
  __device__ __forceinline__ int q_len() const { return p.q_len; }
  // Index of a query in a (batch, heads, q_len) tensor.
  __device__ __forceinline__ int64 row(int64 batch_head, int query) const { return batch_head * p.q_len + query; }
  // Number of keys.
  __device__ __forceinline__ int kv_len() const { return p.kv_len; }
  // Position of a query among the keys: the last query is at the last key.
  __device__ __forceinline__ int position(int query) const { return query + p.kv_len - p.q_len; }
  // End of the visible keys.
  __device__ __forceinline__ int kv_end() const { return p.kv_len; }
};

// kv_end() of a tile, read from constant memory.
struct KvEnd {
  const Params& p;

  __device__ __forceinline__ KvEnd(const Params& p, int batch) : p(p) {}
  __device__ __forceinline__ operator int() const { return p.kv_len; }
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

// mbarrier.arrive with a count: several arrivals at once (PTX ISA, "mbarrier.arrive")
__device__ __forceinline__ void mbarrier_arrive(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
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

// cp.async.bulk.tensor.4d: copies shared memory to the tensor box at (c0, ...), clipped at the tensor's ends
// (PTX ISA, "cp.async.bulk.tensor")
__device__ __forceinline__ void tma_store_4d(const TensorMap* map, uint32 from, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
      ::"l"(map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
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

// wgmma.mma_async m64n64k16: D = A B, + D if `accumulate`; A in shared memory, K-major, B K-major.
// After p come scale factors of 1 for A and B, then whether A and B are MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n64k16_shared_k_major(
    float (&d)[32], uint32 a, uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "mov.b64 a, { %32, %35 };\n"
      "mov.b64 b, { %33, %35 };\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, a, b, p, 1, 1, 0, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf));
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

// rcp.approx.ftz: 1 / x, relative error 2^-23; 0 for infinity (PTX ISA, "rcp")
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx.ftz: log2(x) (PTX ISA, "lg2")
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Maxima of two rows over the four lanes that share them (shfl.sync.bfly: PTX ISA, "shfl.sync").
__device__ __forceinline__ void quad_max(float (&x)[2]) {
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2) {
#pragma unroll
    for (int row = 0; row < 2; ++row) x[row] = fmaxf(x[row], __shfl_xor_sync(0xFFFFFFFF, x[row], lanes));
  }
}

// Sum over the four lanes that share a row of an accumulator (shfl.sync.bfly: PTX ISA, "shfl.sync").
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
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

// Pattern: each query block has a list of kTopK key blocks, in any order. A block listed several times
// counts that often.
struct KvBlockIterator {
  int entries;      // listed key blocks of these queries, one step each
  const int* list;  // their indices
  int key_blocks;   // number of key blocks
  bool backwards = false;  // whether to walk the list from its end

  __device__ __forceinline__ KvBlockIterator(const Params& p, int batch, int head, int first_query) {
    const SeqlenInfo seqlen(p, batch);
    const int row = first_query / kSubTileRows;
    list = p.kv_indices + batch * p.kv_indices_batch_stride + head * p.kv_indices_head_stride +
           row * p.kv_indices_row_stride;
    key_blocks = (seqlen.kv_end() + kBlockKeys - 1) / kBlockKeys;
    entries = row < p.query_blocks ? kTopK : 0;
  }
  // The i-th entry of the list: a key block, or the one past the last for an out-of-range entry.
  __device__ __forceinline__ int entry(int i) const {
    const int block = i < entries ? __ldg(list + (backwards ? entries - 1 - i : i)) : -1;
    return static_cast<uint32>(block) < static_cast<uint32>(key_blocks) ? block : key_blocks;
  }
};

// One tile of work: kSubTiles query blocks of one head, in the order of query_order. first_query counts in that order.
struct Tile {
  int batch, head, first_query;

  __device__ __forceinline__ Tile(const Params& p, int index) {
    // Head by head, so that concurrent thread blocks share the K and V of a few heads, which then stay in the L2.
    const uint32 number = index, query_tiles = p.query_tiles;  // unsigned: cheaper to divide than int
    const uint32 batch_head = number / query_tiles;
    first_query = number % query_tiles * kTileM;
    batch = batch_head / p.heads;
    head = batch_head % p.heads;
  }
};

// Position in a ring: the stage, and the parity of the pass over the ring, 0 in the first. A wait for a full barrier
// uses this parity; a wait for an empty barrier uses the other one, that of the previous pass, which a fresh barrier
// counts as completed.
template <int kDepth>
struct PipelineState {
  int index = 0, phase = 0;

  PipelineState() = default;
  // State of the n-th use of the ring.
  __device__ __forceinline__ PipelineState(uint32 n) : index(n % kDepth), phase(n / kDepth % 2) {}
  __device__ __forceinline__ void advance() {
    if (++index == kDepth) {
      index = 0;
      phase ^= 1;
    }
  }
};

// A work tile, as assigned by the scheduler: the index of a tile. Tile computes its batch, head and queries.
struct WorkTile {
  int index;  // index of the tile
};

// All tiles are equally long: each thread block takes every gridDim.x-th one.
__device__ __forceinline__ WorkTile first_work_tile(const Params& p) { return {static_cast<int>(blockIdx.x)}; }

__device__ __forceinline__ WorkTile next_work_tile(const Params& p, const WorkTile& work) {
  return {work.index + static_cast<int>(gridDim.x)};
}

// First query of the tile's query block with this index. It lies past the last query if the tile has no such block or
// query_order names none: Q is then zeros and none of its rows is stored.
__device__ __forceinline__ int first_query_of(const Params& p, const Tile& tile, int number) {
  const int place = tile.first_query / kSubTileRows + number;
  const int* order = p.query_order + tile.batch * p.query_order_batch_stride + tile.head * p.query_order_head_stride;
  const uint32 none = p.query_blocks;
  const uint32 block = place < p.query_blocks ? __ldg(order + place * p.query_order_row_stride) : none;
  return min(block, none) * kSubTileRows;
}

// Key blocks of one sub-tile of a work tile.
// Producer and consumers each recompute them, in a few instructions, instead of passing them through shared memory. All
// patterns take the same arguments, used or not.
__device__ __forceinline__ KvBlockIterator kv_blocks_of(
    const Params& p, const WorkTile& work, const Tile& tile, int sub_tile) {
  KvBlockIterator blocks(p, tile.batch, tile.head, first_query_of(p, tile, sub_tile));
  // Thread blocks walk their lists in parallel, forwards in one tile and backwards in the next. Sorted lists then begin
  // with the keys used most recently, which are still in the L2 even if it cannot hold all keys of a head.
  blocks.backwards = work.index / gridDim.x % 2 == 1;
  return blocks;
}

// Metadata of a load of kTileN keys, in one word: its index. Complemented, hence negative, if the load reaches past
// the last key, as out-of-range entries do.
__device__ __forceinline__ int pack_block_meta(const KvEnd& kv_end, int block) {
  return (block + 1) * kTileN > kv_end ? ~block : block;
}

// Lane 0 reads a word that the producer wrote. A consumer's lane 0 arrives at the empty barrier afterwards, and only
// the producer's lane 0 writes the word, so it is read before it changes. The shuffle makes the value uniform.
__device__ __forceinline__ int read_by_leader(const int* word) {
  return __shfl_sync(0xFFFFFFFF, threadIdx.x % 32 == 0 ? *word : 0, 0);
}

using uint64 = unsigned long long;

// Number of loads of a tile, or of a part of it, by the set of lists that they serve: byte u counts those for set u.
// Each set has at most kTopK loads.
struct LoadsOfSets {
  uint64 bytes = 0;

  __device__ __forceinline__ int operator[](int set) const { return static_cast<int>(bytes >> 8 * set & 0xFF); }
  __device__ __forceinline__ void count(int set) { bytes += 1ull << 8 * set; }
  __device__ __forceinline__ int all() const {
    int sum = 0;
#pragma unroll
    for (int set = 1; set <= kSets; ++set) sum += (*this)[set];
    return sum;
  }
  // Sum over all lanes of the warp.
  __device__ __forceinline__ LoadsOfSets of_warp() const {
    const uint64 high = __reduce_add_sync(0xFFFFFFFF, static_cast<uint32>(bytes >> 32));
    return {high << 32 | __reduce_add_sync(0xFFFFFFFF, static_cast<uint32>(bytes))};
  }
};

// Number of the first `entries` entries of a list that equal `block`.
__device__ __forceinline__ int count_equal(const int* list, int entries, int block) {
  int equal = 0;
#pragma unroll 8
  for (int i = 0; i < entries; ++i) equal += list[i] == block;
  return equal;
}

// Which lists each entry of a tile's lists is loaded for: a bit for each list, or 0 if an earlier list of the tile
// already loads it. The r-th of equal entries of a list shares its load with the r-th of another list. Called by the
// whole warp.
// A tile at the end of the queries, or one from query_order, may have fewer query blocks: the missing ones use the
// first one's list, if any, and their rows are not stored.
__device__ __forceinline__ LoadsOfSets match_lists(const Params& p, const WorkTile& work, const Tile& tile,
    int* blocks, unsigned char* sets) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int list = 0; list < kSubTiles; ++list) {
    KvBlockIterator listed = kv_blocks_of(p, work, tile, list);
    if (listed.entries == 0) listed = kv_blocks_of(p, work, tile, 0);
    for (int i = lane; i < kTopK; i += 32) blocks[list * kTopK + i] = listed.entry(i);
  }
  __syncwarp();
  LoadsOfSets loads;
#pragma unroll 1
  for (int list = 0; list < kSubTiles; ++list) {
    const int* mine = blocks + list * kTopK;
#pragma unroll 1
    for (int first = 0; first < kTopK; first += 32) {
      const int i = first + lane, block = i < kTopK ? mine[i] : -1 - lane;  // past the end: equal to no other
      const uint32 equal = __match_any_sync(0xFFFFFFFF, block);
      // Earlier entries of its list that equal this one.
      const int before = count_equal(mine, first, block) + __popc(equal & ((1u << lane) - 1));
      int set = 1 << list;
#pragma unroll
      for (int j = 1; j < kSubTiles; ++j) {
        const int other = list + j < kSubTiles ? list + j : list + j - kSubTiles;
        if (count_equal(blocks + other * kTopK, kTopK, block) > before) set |= 1 << other;
      }
      if ((set & ((1 << list) - 1)) != 0) set = 0;
      if (i < kTopK) {
        sets[list * kTopK + i] = set;
        if (set != 0) loads.count(set);
      }
    }
  }
  __syncwarp();
  return loads.of_warp();
}

// Groups the key blocks of a tile's loads by set; within a set, the order of the lists is kept. Called by the whole
// warp.
__device__ __forceinline__ void group_loads(const LoadsOfSets& in_tile, const int* blocks, const unsigned char* sets,
    int* grouped) {
  const int lane = threadIdx.x % 32;
  LoadsOfSets done;
#pragma unroll 1
  for (int first = 0; first < kEntries; first += 32) {
    const int set = first + lane < kEntries ? sets[first + lane] : 0;
    const uint32 those = __match_any_sync(0xFFFFFFFF, set);  // lanes with loads for the same set
    int at = done[set] + __popc(those & ((1u << lane) - 1));
#pragma unroll
    for (int before = 1; before < kSets; ++before) at += before < set ? in_tile[before] : 0;
    if (set != 0) grouped[at] = blocks[first + lane];
    LoadsOfSets mine;
    if (set != 0) mine.count(set);
    done.bytes += mine.of_warp().bytes;
  }
  __syncwarp();
}

// Loads before a tile: slots, barriers and phases of its own loads follow from these counts.
struct LoadCounts {
  uint32 all = 0;
  uint32 of_set = 0;  // in lane u: loads for set u
};

// LoadGroups of a tile: groups of loads that give each list one step, or two. Kinds:
//   0        one load for all lists
//   1, 2, 3  one load for two lists, and one for the third, which is list 0, 1 or 2
//   4        of the remaining loads: three for one list each, or three for two lists each, which are two steps
// The turns of each kind are spread evenly over the tile: the i-th of n comes at (2 i + 1) / 2 n of it. If several
// coincide, the kind with the lower number comes first.
struct LoadGroups {
  int of_kind[kLoadGroupKinds];
  bool pairs_are_left;  // whether the remaining loads serve two lists each, instead of one

  __device__ __forceinline__ explicit LoadGroups(const LoadsOfSets& in_tile) {
    of_kind[0] = in_tile[kSets];
    // Lists are equally long, so the remaining loads are equally many for each list, or for each pair of lists.
#pragma unroll
    for (int third = 0; third < kSubTiles; ++third) {
      const int alone = in_tile[1 << third], pairs = in_tile[kSets ^ 1 << third];
      of_kind[1 + third] = min(alone, pairs);
      of_kind[1 + kSubTiles] = max(alone, pairs) - min(alone, pairs);
      pairs_are_left = pairs > alone;
    }
  }

  // Counts, for each kind, the turns that come before turn `turn` of kind `kind`.
  __device__ __forceinline__ void count_before(int (&before)[kLoadGroupKinds], int kind, int turn) const {
    int number = 1;
#pragma unroll
    for (int i = 0; i < kLoadGroupKinds; ++i) number = i == kind ? of_kind[i] : number;
    const float unit = 1.0f / number;
#pragma unroll
    for (int i = 0; i < kLoadGroupKinds; ++i) {
      // Number of j with (2 j + 1) * number <= `most`. Rounding the quotient down is exact: it is less than 256 and at
      // least 1 / 256 away from the next integer.
      const int most = (2 * turn + 1) * of_kind[i] - (i >= kind);
      before[i] = (static_cast<int>((most + 0.5f) * unit) + 1) / 2;
    }
  }
};

// Orders the loads of a tile and writes the steps of each warpgroup. Returns the number of loads. Called by the whole
// warp.
__device__ __forceinline__ int schedule_loads(LoadCounts& before, const LoadsOfSets& in_tile, const int* grouped,
    uint32* loads, uint32* steps) {
  const int lane = threadIdx.x % 32, number = in_tile.all();
  const LoadGroups turns(in_tile);
#pragma unroll 1
  for (int first = 0; first < number; first += 32) {
    int set = 0, rank = first + lane;  // the set that a load serves, and its rank among the loads for that set
#pragma unroll
    for (int i = 1; i <= kSets; ++i) {
      if (set == 0 && rank < in_tile[i]) set = i;
      if (set == 0) rank -= in_tile[i];
    }
    const uint32 of_set = __shfl_sync(0xFFFFFFFF, before.of_set, set);
    if (set == 0) continue;

    // Its turn, and its position among the loads of the turn.
    int kind = 0, turn = rank, place_in_turn = 0;
    int earlier[kLoadGroupKinds];
    const bool is_pair = __popc(set) == 2;
    const int third_list = (is_pair ? kSets ^ set : set) >> 1;  // the single list, or the one missing from the pair
    if (set != kSets) {
      const int beside = min(in_tile[set], in_tile[kSets ^ set]);
      const bool is_left = rank >= beside;
      kind = is_left ? 1 + kSubTiles : 1 + third_list;
      turn = is_left ? rank - beside : rank;
      // The remaining pairs come in the order: lists 0 and 1, 0 and 2, 1 and 2.
      place_in_turn = !is_left ? !is_pair : is_pair ? kSubTiles - 1 - third_list : third_list;
    }
    turns.count_before(earlier, kind, turn);
    const int twos = earlier[1] + earlier[2] + earlier[3], threes = earlier[4];
    const int at = earlier[0] + 2 * twos + 3 * threes + place_in_turn;
    const int step = earlier[0] + twos + (turns.pairs_are_left ? 2 * threes : threes);
    // Loads for a set can come in turns of two kinds: the rank among both.
    int in_order = turn;
    if (kind == 1 + kSubTiles) in_order += third_list == 0 ? earlier[1] : third_list == 1 ? earlier[2] : earlier[3];
    if (kind > 0 && kind <= kSubTiles && is_pair == turns.pairs_are_left) in_order += threes;
    const PipelineState<kStages> place(before.all + at), uses(of_set + in_order);
    const uint32 full = (set - 1) * kStages + uses.index, arrivals = kArrivals / __popc(set);
    // Bits 0 to 7: slot; 8 to 15: full barrier; 16: its parity; 17 and up: arrivals of each warp.
    const uint32 note = place.index | full << 8 | uses.phase << 16 | arrivals << 17;
    loads[at] = grouped[first + lane - rank + in_order] * kBarrierRange + full;
#pragma unroll
    for (int list = 0; list < kSubTiles; ++list) {
      // Whether it is the second of the two steps that three pairs give this list.
      const int second = kind == 1 + kSubTiles && is_pair && third_list < (list == 2 ? 1 : 2);
      if (set >> list & 1) steps[list * kTopK + step + second] = note;
    }
  }
  before.of_set += lane == 0 || lane > kSets ? 0 : in_tile[lane];
  before.all += number;
  return number;
}

// Producer, one warp: writes the schedule of one tile after the other, as soon as a slot is free.
__device__ __forceinline__ void order_tiles(const Params& p, unsigned char* shared, uint32 base) {
  int* blocks = reinterpret_cast<int*>(shared + kBlocksOffset);
  unsigned char* sets = shared + kSetsOffset;
  int* grouped = reinterpret_cast<int*>(shared + kGroupedOffset);
  uint32* loads = reinterpret_cast<uint32*>(shared + kLoadsOffset);
  uint32* steps = reinterpret_cast<uint32*>(shared + kStepsOffset);
  int* numbers = reinterpret_cast<int*>(shared + kNumbersOffset);
  PipelineState<kTileStages> state;
  LoadCounts before;
  for (WorkTile work = first_work_tile(p); work.index < p.tiles; work = next_work_tile(p, work)) {
    const int at = state.index * kEntries;
    const LoadsOfSets in_tile = match_lists(p, work, Tile(p, work.index), blocks, sets);
    group_loads(in_tile, blocks, sets, grouped);
    mbarrier_wait(base + kOrderEmptyBarrier + 8 * state.index, state.phase ^ 1);
    const int number = schedule_loads(before, in_tile, grouped, loads + at, steps + at);
    if (threadIdx.x % 32 == 0) numbers[state.index] = number;
    // Each lane has written a part of the schedule, so each arrives.
    mbarrier_arrive(base + kOrderFullBarrier + 8 * state.index);
    __syncwarp();
    state.advance();
  }
}

// Copies one step of K or V to shared memory.
__device__ __forceinline__ void load_step(const TensorMap* map, uint32 to, uint32 full, int block, int kv_head,
    int batch) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    tma_load_4d(to + group * kKvGroupBytes, map, full, group * kGroupColumns, block * kTileN, kv_head, batch);
  }
}

// Producer, one thread for each ring: fills the K ring or the V ring, tile after tile. A load takes the slot of the
// load kStages before it, after all users of that load have released it.
__device__ __forceinline__ void produce(const Params& p, unsigned char* shared, uint32 base, bool is_k) {
  const TensorMap* map = is_k ? &p.k_map : &p.v_map;
  const uint32 ring = base + (is_k ? kKOffset : kVOffset);
  const uint32 full_barriers = base + (is_k ? kKFullBarrier : kVFullBarrier);
  const uint32 empty_barriers = base + (is_k ? kKEmptyBarrier : kVEmptyBarrier);
  const uint32* loads = reinterpret_cast<const uint32*>(shared + kLoadsOffset);
  const int* numbers = reinterpret_cast<const int*>(shared + kNumbersOffset);
  int* block_meta = reinterpret_cast<int*>(shared + kBlockMetaOffset);
  PipelineState<kTileStages> state;
  PipelineState<kStages> place;
  for (WorkTile work = first_work_tile(p); work.index < p.tiles; work = next_work_tile(p, work)) {
    const Tile tile(p, work.index);
    const int kv_head = static_cast<uint32>(tile.head) / p.heads_per_kv_head;
    mbarrier_wait(base + kOrderFullBarrier + 8 * state.index, state.phase);
    const KvEnd kv_end(p, tile.batch);
    const int number = numbers[state.index];
#pragma unroll 1
    for (int i = 0; i < number; ++i) {
      const uint32 load = loads[state.index * kEntries + i];
      const int block = load / kBarrierRange;
      const uint32 full = full_barriers + 8 * (load % kBarrierRange);
      mbarrier_wait(empty_barriers + 8 * place.index, place.phase ^ 1);
      if (is_k) block_meta[place.index] = pack_block_meta(kv_end, block);
      mbarrier_arrive_expect_tx(full, kKvBytes);
      load_step(map, ring + place.index * kKvBytes, full, block, kv_head, tile.batch);
      place.advance();
    }
    mbarrier_arrive(base + kOrderEmptyBarrier + 8 * state.index);
    state.advance();
  }
}

// s = Q K^T for this warpgroup's 64 rows and the keys of one step (asynchronous).
__device__ __forceinline__ void issue_qk_gemm(float (&s)[kTileN / 2],
    uint32 q_descriptor, uint32 k_descriptor) {
  warpgroup_fence_operand(s);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    // 16 columns are 32 bytes of a 128-byte row; after four of them the next column group begins.
    const int in_group = k % 4 * 32, group = k / 4;
    const uint32 keys = k_descriptor + ((group * kKvGroupBytes + in_group) >> 4);
    wgmma_m64n64k16_shared_k_major(s, q_descriptor + ((group * kQGroupBytes + in_group) >> 4), keys, k > 0);
  }
  wgmma_commit();
  warpgroup_fence_operand(s);
}

// o += P V for the keys of one step (asynchronous).
__device__ __forceinline__ void issue_pv_gemm(float (&o)[kHeadDim / 2], const uint32 (&p_frag)[kTileN / 16][4],
    uint32 v_descriptor) {
  warpgroup_fence_operand(o);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileN / 16; ++k) {
    wgmma_m64n128k16_registers_mn_major(o, p_frag[k], v_descriptor + (k * 16 * kRowBytes >> 4), 1);
  }
  wgmma_commit();
  warpgroup_fence_operand(o);
}

// What a consumer needs to mask a step, in one word. Only a warp's leader, which releases the stage, reads it; it is 0
// in the other lanes.
struct BlockMeta {
  int word;

  __device__ __forceinline__ BlockMeta(const int* block_meta, int stage, bool warp_leader)
      : word(warp_leader ? block_meta[stage] : 0) {}
  // Whether some key is out of range: the same in all lanes.
  __device__ __forceinline__ bool needs_mask() const { return __any_sync(0xFFFFFFFF, word < 0); }
};

// Masks the keys of a step that are out of range.
__device__ __forceinline__ void apply_mask(float (&s)[kTileN / 2], const Params& p, int batch, const BlockMeta& meta) {
  const KvEnd kv_end(p, batch);
  const int word = __shfl_sync(0xFFFFFFFF, meta.word, 0), number = word < 0 ? ~word : word;
  const int first_key = number * kTileN + threadIdx.x % 4 * 2;  // this thread's first key
  const int keys = kv_end - first_key;
#pragma unroll
  for (int j = 0; j < kTileN / 2; ++j) {  // j: score of a load; i: score of the step
    const int i = j, column = j / 4 * 8 + j % 2;
    if (column >= keys) s[i] = kMinusInfinity;
  }
}

// Online softmax with lazy rescaling (FlashAttention-4's rescale_threshold). The weight of a pair is 2^(scale_log2 s -
// row_max). O and row_sum are relative to the same row_max, so row_max may be the maximum of earlier steps as long as
// the weights stay small. A step raises it, and rescales O and row_sum, for all rows of the warp, only if it exceeds
// row_max by the threshold.
//
// Threshold, as log2 of a weight. With 1, a key with at least twice the weight of each earlier key gets weight 1, which
// is exact in 16 bits. With 15, the most that fp16 can hold, fewer steps rescale, but the largest error of O rises from
// 1.0e-3 to 1.7e-3 (logits of standard deviation 4).
constexpr float kRescaleThreshold = 1.0f;

// Largest logit times log2(e) of this thread's keys of a step. scale_log2 is positive, so that is the largest s.
__device__ __forceinline__ void take_step_max(float (&step_max)[2], const float (&s)[kTileN / 2], float scale_log2) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float even = s[row * 2], odd = s[row * 2 + 1];  // two chains: half the latency
#pragma unroll
    for (int i = row * 2 + 4; i < kTileN / 2; i += 4) {
      even = fmaxf(even, s[i]);
      odd = fmaxf(odd, s[i + 1]);
    }
    step_max[row] = fmaxf(even, odd) * scale_log2;
  }
}

// Whether a step exceeds row_max by the threshold for one of the warp's rows: the same in all lanes. step_max is the
// maximum over a lane's part of its rows.
__device__ __forceinline__ bool exceeds_threshold(const float (&step_max)[2], const float (&row_max)[2]) {
  const bool rises = step_max[0] - row_max[0] >= kRescaleThreshold || step_max[1] - row_max[1] >= kRescaleThreshold;
  return __any_sync(0xFFFFFFFF, rises);
}

// Raises row_max to the maximum of a step over all lanes of a row. `rescale` becomes the factor for values relative to
// the previous row_max.
__device__ __forceinline__ void raise_row_max(float (&row_max)[2], float (&rescale)[2], float (&step_max)[2]) {
  quad_max(step_max);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float before = row_max[row];
    row_max[row] = fmaxf(before, step_max[row]);
    rescale[row] = ex2(before - row_max[row]);
  }
}

// Rescales O and row_sum to the raised row_max.
__device__ __forceinline__ void rescale_rows(float (&o)[kHeadDim / 2], float (&row_sum)[2], const float (&rescale)[2]) {
  row_sum[0] *= rescale[0];
  row_sum[1] *= rescale[1];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= rescale[i / 2 % 2];
}

// P: the weights of a step, packed to 16 bits. The accumulator layout of S is the A-operand layout of P. row_sum
// accumulates this thread's weights.
__device__ __forceinline__ void scale_apply_exp2(uint32 (&p_frag)[kTileN / 16][4], float (&row_sum)[2],
    const float (&s)[kTileN / 2], const float (&row_max)[2], float scale_log2) {
  float sum[2], odd_sum[2];  // two chains per row: half the latency
#pragma unroll
  for (int k = 0; k < kTileN / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float even = ex2(s[k * 8 + i * 2] * scale_log2 - row_max[i % 2]);
      const float odd = ex2(s[k * 8 + i * 2 + 1] * scale_log2 - row_max[i % 2]);
      const bool first = k == 0 && i < 2;  // first of a chain: avoids an addition to 0
      sum[i % 2] = first ? even : sum[i % 2] + even;
      odd_sum[i % 2] = first ? odd : odd_sum[i % 2] + odd;
      p_frag[k][i] = pack(even, odd);
    }
  }
  row_sum[0] += sum[0] + odd_sum[0];
  row_sum[1] += sum[1] + odd_sum[1];
}

// Stores the LSE of a row of a warpgroup, if the row is in range.
__device__ __forceinline__ void store_lse(const Params& p, const Tile& tile, int first_query, int row, float lse) {
  const SeqlenInfo seqlen(p, tile.batch);
  const int query = first_query + row;
  const int64 head = static_cast<int64>(tile.batch) * p.heads + tile.head;
  if (query < seqlen.q_len()) p.lse[seqlen.row(head, query)] = lse;
}

// Writes a warpgroup's O to its staging buffer (128-byte swizzle, as TMA expects) and issues the store.
// Then stores the LSE, if requested. A row without keys has sum 0: O = 0, LSE = -inf.
__device__ __forceinline__ void store_tile(const Params& p, const Tile& tile, int first_query, uint32 staging,
    int warpgroup, const float (&o)[kHeadDim / 2], const float (&row_max)[2], const float (&row_sum)[2]) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % kWarpsPerWarpgroup * 16;
  float sums[2], inverse[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    sums[row] = quad_sum(row_sum[row]);
    inverse[row] = sums[row] == 0.0f ? 0.0f : rcp(sums[row]);
  }

  // O is staged in place of this warpgroup's rows of Q: all its warps must have finished with them.
  const bool sender = threadIdx.x % kWarpgroupThreads == 0;
  bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
  const int row = warp_row + lane % 16;
#pragma unroll
  for (int j = 0; j < kHeadDim / 16; ++j) {
    const int chunk = j % 4 * 2 + lane / 16;  // 16 bytes = 8 columns; swizzled to chunk ^ row % 8
    const uint32 to = staging + j / 4 * kOGroupBytes + row * kRowBytes + (chunk ^ row % 8) * 16;
    stmatrix_x4(to, pack(o[j * 8] * inverse[0], o[j * 8 + 1] * inverse[0]),
        pack(o[j * 8 + 2] * inverse[1], o[j * 8 + 3] * inverse[1]),
        pack(o[j * 8 + 4] * inverse[0], o[j * 8 + 5] * inverse[0]),
        pack(o[j * 8 + 6] * inverse[1], o[j * 8 + 7] * inverse[1]));
  }
  fence_proxy_async();
  bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
  if (sender) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      tma_store_4d(&p.o_map, staging + group * kOGroupBytes, group * kGroupColumns, first_query, tile.head, tile.batch);
    }
    tma_store_commit();
  }
  if (p.lse != nullptr && lane % 4 == 0) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float lse = sums[row] == 0.0f ? kMinusInfinity : (row_max[row] + lg2(sums[row])) * kLn2;
      store_lse(p, tile, first_query, warp_row + lane / 4 + row * 8, lse);
    }
  }
}

// A load of K and of V, as seen by a warpgroup that uses it.
struct Load {
  int stage;     // its slot in the rings
  int full;      // index of its full barrier in each ring
  int phase;     // phase of that barrier
  int arrivals;  // arrivals per warp when it releases the slot

  // Unpacks the schedule's word for one step of a warpgroup.
  __device__ __forceinline__ explicit Load(const uint32* step) {
    const uint32 note = read_by_leader(reinterpret_cast<const int*>(step));
    stage = note & 0xFF;
    full = note >> 8 & 0xFF;
    phase = note >> 16 & 1;
    arrivals = note >> 17;
  }
};

// Offset of a warpgroup's Q buffer, from which its O also leaves.
__device__ __forceinline__ int queries_offset(int place, int warpgroup) {
  return kQOffset + (place * kSubTiles + warpgroup) * kQBytes;
}

// Issues the load of a warpgroup's rows of Q of a tile, if the tile exists. Called by one thread of the warpgroup.
__device__ __forceinline__ void request_queries(const Params& p, uint32 base, int place, int warpgroup,
    const WorkTile& work) {
  if (work.index >= p.tiles) return;
  const Tile tile(p, work.index);
  const uint32 full = base + kQFullBarrier + 8 * warpgroup;
  const int first_query = first_query_of(p, tile, warpgroup);
  mbarrier_arrive_expect_tx(full, kQBytes);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    tma_load_4d(base + queries_offset(place, warpgroup) + group * kQGroupBytes, &p.q_map, full,
        group * kGroupColumns, first_query, tile.head, tile.batch);
  }
}

// Consumer: one warpgroup computes its 64 rows, tile after tile.
__device__ __forceinline__ void consume(const Params& p, unsigned char* shared, uint32 base, int warpgroup) {
  const bool warp_leader = threadIdx.x % 32 == 0, sender = threadIdx.x % kWarpgroupThreads == 0;
  const int* block_meta = reinterpret_cast<const int*>(shared + kBlockMetaOffset);
  const uint32* orders = reinterpret_cast<const uint32*>(shared + kStepsOffset) + warpgroup * kTopK;
  // Descriptors of the first slots. The shuffles keep the compiler from recomputing them in each step.
  const uint32 q_descriptors =
      __shfl_sync(0xFFFFFFFF, wgmma_descriptor(base + queries_offset(0, warpgroup), 0), 0);
  const uint32 k_descriptors = __shfl_sync(0xFFFFFFFF, wgmma_descriptor(base + kKOffset, 0), 0);
  const uint32 v_descriptors = __shfl_sync(0xFFFFFFFF, wgmma_descriptor(base + kVOffset, kKvGroupBytes), 0);
  PipelineState<kTileStages> state;
  int q_phase = 0;
  if (sender) request_queries(p, base, 0, warpgroup, first_work_tile(p));

  for (WorkTile work = first_work_tile(p); work.index < p.tiles; work = next_work_tile(p, work)) {
    const Tile tile(p, work.index);
    const int first_query = first_query_of(p, tile, warpgroup);
    float o[kHeadDim / 2] = {}, s[kTileN / 2];
    uint32 p_frag[kTileN / 16][4];
    float row_max[2] = {kLeastLogit, kLeastLogit}, row_sum[2] = {}, step_max[2], rescale[2];
    mbarrier_wait(base + kQFullBarrier + 8 * warpgroup, q_phase);
    const int q_place = q_phase % kQPlaces;
    const uint32 q_descriptor = q_descriptors + (q_place * kSubTiles * kQBytes >> 4);
    mbarrier_wait(base + kOrderFullBarrier + 8 * state.index, state.phase);
    const uint32* steps = orders + state.index * kEntries;

    // First step: scores and softmax.
    Load k(steps), next(steps + min(1, kTopK - 1));
    mbarrier_wait(base + kKFullBarrier + 8 * k.full, k.phase);
    BlockMeta step(block_meta, k.stage, warp_leader);
    issue_qk_gemm(s, q_descriptor, k_descriptors + (k.stage * kKvBytes >> 4));
    wgmma_wait<0>();
    warpgroup_fence_operand(s);
    if (warp_leader) mbarrier_arrive(base + kKEmptyBarrier + 8 * k.stage, k.arrivals);
    if (step.needs_mask()) apply_mask(s, p, tile.batch, step);
    take_step_max(step_max, s, p.scale_log2);
    raise_row_max(row_max, rescale, step_max);  // O and row_sum are 0: nothing to rescale
    scale_apply_exp2(p_frag, row_sum, s, row_max, p.scale_log2);
    // Waits for the store of the previous tile's O, which has most likely finished. Its buffer takes the Q of the next
    // tile.
    if (sender) {
      tma_store_wait_read<0>();
      request_queries(p, base, 1 - q_place, warpgroup, next_work_tile(p, work));
    }

    // Scores of step i, together with the output of step i - 1.
#pragma unroll 1
    for (int i = 1; i < kTopK; ++i) {
      const Load v = k;
      k = next;
      mbarrier_wait(base + kKFullBarrier + 8 * k.full, k.phase);
      step = BlockMeta(block_meta, k.stage, warp_leader);
      issue_qk_gemm(s, q_descriptor, k_descriptors + (k.stage * kKvBytes >> 4));
      mbarrier_wait(base + kVFullBarrier + 8 * v.full, v.phase);
      issue_pv_gemm(o, p_frag, v_descriptors + (v.stage * kKvBytes >> 4));
      next = Load(steps + min(i + 1, kTopK - 1));  // the last step has no next load; the value is unused then
      wgmma_wait<1>();
      warpgroup_fence_operand(s);
      if (warp_leader) mbarrier_arrive(base + kKEmptyBarrier + 8 * k.stage, k.arrivals);
      if (step.needs_mask()) apply_mask(s, p, tile.batch, step);
      // While P V runs: the step's maximum, which may raise row_max.
      take_step_max(step_max, s, p.scale_log2);
      const bool raises = exceeds_threshold(step_max, row_max);
      if (raises) raise_row_max(row_max, rescale, step_max);
      // P V still reads `p_frag`, which the new weights overwrite, and adds to `o`, which a raised row_max rescales.
      // FlashAttention-3 computes the exponentials in `s` before this wait and packs them after it. That order was
      // slower here (step 28 of docs/ladder-attention.md).
      wgmma_wait<0>();
      warpgroup_fence_operand(o);
      if (warp_leader) mbarrier_arrive(base + kVEmptyBarrier + 8 * v.stage, v.arrivals);
      if (raises) rescale_rows(o, row_sum, rescale);
      scale_apply_exp2(p_frag, row_sum, s, row_max, p.scale_log2);
    }

    // Output of the last step.
    mbarrier_wait(base + kVFullBarrier + 8 * k.full, k.phase);
    issue_pv_gemm(o, p_frag, v_descriptors + (k.stage * kKvBytes >> 4));
    // This tile's schedule is no longer needed.
    if (warp_leader) mbarrier_arrive(base + kOrderEmptyBarrier + 8 * state.index);
    wgmma_wait<0>();
    warpgroup_fence_operand(o);
    if (warp_leader) mbarrier_arrive(base + kVEmptyBarrier + 8 * k.stage, k.arrivals);
    const uint32 staging = base + queries_offset(q_place, warpgroup);
    store_tile(p, tile, first_query, staging, warpgroup, o, row_max, row_sum);
    state.advance();
    q_phase ^= 1;
  }
  // Shared memory must outlive the stores that read it.
  if (sender) tma_store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    h100_topk32_b64_ordered(const __grid_constant__ Params p) {
  // TMA swizzles by address, with a period of 1024 bytes: swizzled buffers are aligned to that.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  // The shuffle proves to the compiler that both are warp-uniform, so values derived from them go to uniform registers
  // (CUTLASS' canonical_warp_idx_sync).
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), warpgroup = warp / kWarpsPerWarpgroup;

  // One thread initializes the barriers.
  if (threadIdx.x == 0) {
    // The empty barriers of K and V count kArrivals arrivals for each of four warps (see Load); order_empty counts one
    // arrival per consumer warp and one per loader.
    for (int i = 0; i < kSubTiles; ++i) mbarrier_init(base + kQFullBarrier + 8 * i, 1);
    for (int i = 0; i < kTileStages; ++i) {
      mbarrier_init(base + kOrderFullBarrier + 8 * i, 32);  // all lanes of the warp that schedules loads
      mbarrier_init(base + kOrderEmptyBarrier + 8 * i, kConsumerWarpgroups * kWarpsPerWarpgroup + kLoaders);
    }
    for (int i = 0; i < kSets * kStages; ++i) {
      mbarrier_init(base + kKFullBarrier + 8 * i, 1);
      mbarrier_init(base + kVFullBarrier + 8 * i, 1);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kKEmptyBarrier + 8 * i, kArrivals * kWarpsPerWarpgroup);
      mbarrier_init(base + kVEmptyBarrier + 8 * i, kArrivals * kWarpsPerWarpgroup);
    }
    fence_mbarrier_init();
    prefetch_tensormap(&p.q_map);
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
    prefetch_tensormap(&p.o_map);
  }
  __syncthreads();

  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == kLoaders) {
      order_tiles(p, shared, base);
    } else if (warp < kLoaders && threadIdx.x % 32 == 0) {
      produce(p, shared, base, warp == 0);
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, shared, base, warpgroup - 1);
  }
}
