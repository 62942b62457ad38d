// Generated from specs/h100_e4m3_block_lists.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_e4m3_block_lists.yaml
// spec: {"arch":"sm_90a","copy":"tma","dtype":"e4m3","head_dim":128,"lse":true,"mma":"wgmma","op":"attention","pattern":{"block":{"kv":128,"q":128},"kind":"block_lists","mask":"causal"},"schedule":"ping_pong","stages":2,"tile":{"m":128,"n":256}}
// spec hash: 131eb11f255b2199adea279a9d75fe60ee0737a0669a91a37e67d1dc9ed9eadd
// seal: sha256 791fa3df97cce7987d4721eed11c0adda966905c82b6b0ad3361545609db2bb8

// Attention forward for sm_90a over the listed key blocks of the pattern:
//   O = softmax(scale * Q K^T) V
//
// Roles
//   warpgroup 0      producer. Warp 0 fills the rings by TMA, and loads Q.
//   warpgroups 1..   consumers. Each owns 64 query rows:
//                    S = Q K^T, online softmax, O += P V, all in registers.
//   The consumers of a tile share its key blocks and its rings.
//
// Barriers (full: the data has arrived; empty: the buffer may be overwritten). In CUTLASS' terms, a producer's wait for
// an empty barrier is producer_acquire, a consumer's wait for a full one consumer_wait, and its arrival at an empty one
// consumer_release. Consumer warpgroup w is warpgroup w + 1 of the thread block.
//   q_full[i], q_empty[i]        entry i of the ring of work tiles: index of the tile, its steps, its Q
//   k_full[i], k_empty[i]        stage i of the K ring, and the metadata of its loads
//   v_full[i], v_empty[i]        stage i of the V ring
//   named barrier kWarpSchedulerBarrier + w  consumer warpgroup w's turn to issue products
//   named barrier kWarpgroupBarrier + w  consumer warpgroup w, around its store of O
//
// 8-bit operands are K-major: V comes transposed, and each 16 of its keys are permuted so that a thread's scores are an
// A operand as they are. A value is its code times a scale. The scales of Q's rows and of keys join the factor of the
// exponent; the scales of V's columns multiply O at the end.
//
// Pipeline of a consumer: waits for P V of step i - 1 and adds it to O, then issues S of step i and waits for it. The
// mask, maxima and exponentials overlap the products of other warpgroups.
// Ping-pong: the consumers take turns issuing, so that one's softmax overlaps the others' matrix products
// (warp_scheduler_barrier in FlashAttention-3). They share a tile; in CUTLASS' ping-pong each has its own.
//
// Symbols
//   tile        queries of one head that a thread block processes at a time (FlashAttention's m_block); q_len and
//               kv_len are its seqlen_q and seqlen_k
//   step        kTileN keys, its n_block: kStepBlocks listed key blocks
//   s, p_frag   scores of 64 x kTileN pairs, and their weights as an A operand of e4m3
//   part        P V not yet added to O (two-level accumulation, promotion)
//   o           output of 64 x kHeadDim in fp32, not yet divided by the row sum
//   row_max     reference of the weights: maximum of a row's logits times log2(e), over the steps so far or up to an
//               earlier step, minus kWeightShift
//   row_sum     running sum of the weights: this thread's part or, with a row of ones below V^T, from P V
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
constexpr int kTileM = 128;  // query rows of a tile
constexpr int kTileN = 256;  // keys of one step; registers: 196 of s, p_frag, o + 32 = 228 of 232
constexpr int kStages = 2;  // depth of the K ring and of the V ring
constexpr int kTileStages = 2;  // depth of the ring of work tiles and of Q
constexpr int kSubTileRows = 128;  // query rows of a sub-tile, here a whole tile
constexpr int kConsumerWarpgroups = 2;  // warpgroups that compute, 64 rows each
constexpr int kThreads = 384;  // warpgroup 0 produces, the others consume
constexpr int kProducerRegisters = 40;  // registers per producer thread
constexpr int kConsumerRegisters = 232;  // registers per consumer thread; 40 + 2 x 232 are the 3 x 168 at launch
constexpr int kGroupColumns = 128;  // columns of a group: one 128-byte swizzled row
constexpr int kGroups = 1;  // column groups of a head
constexpr int kQGroupBytes = 16384;  // bytes of one column group of Q
constexpr int kKvGroupBytes = 32768;  // bytes of one column group of K or V
constexpr int kOGroupBytes = 8192;  // bytes of one column group of a warpgroup's O
constexpr int kQBytes = 16384;  // bytes of a Q tile
constexpr int kKvBytes = 32768;  // bytes of K, or of V, of one step
constexpr int kStepBlocks = 2;  // loads per step: its listed blocks
constexpr int kLoadKeys = 128;  // keys per load
constexpr int kBlockKeys = 128;  // keys of a listed block
constexpr int kOutputs = 68;  // elements of O per thread
constexpr int kPieces = 1;  // pieces of O's columns; their P V products run one after the other
constexpr int kPieceOutputs = 68;  // elements of a piece per thread
constexpr int kAccumulators = 128;  // registers of scores, or of P V
constexpr int kFirstKeys = 136;  // keys of the first Q K^T product; a second product covers the others
constexpr int kSumColumns = 8;  // columns of P V after those of O
constexpr int kOColumns = 64;  // columns of a group of O: one 128-byte swizzled row
constexpr int kOGroups = 2;  // column groups of O
constexpr int kVGroupKeys = 128;  // keys per group of V^T, one byte each: one swizzled row
constexpr int kVGroups = 2;  // groups of keys of a step
constexpr int kVGroupBytes = 17408;  // bytes per group of V^T
constexpr int kVBytes = 34816;  // bytes of V^T of one step
constexpr int kVLoadBytes = 32768;  // bytes of V^T per step that the copies load
constexpr int kQScaleRows = 128;  // rows of Q that share a scale
constexpr int kKScaleRows = 128;  // rows of K that share a scale
constexpr int kScaleKeys = 128;  // keys of a step that share a scale
constexpr int kScaleParts = 2;  // parts of a step, each with its own scale
constexpr int kFmaGroups = 2;  // groups of 16 keys, of every four, that compute a quarter of 2^x with FMA

// Dynamic shared memory: 200848 bytes. Byte offsets:
constexpr int kQOffset = 0;  // 32768 bytes: ring of Q tiles, 128 rows in column groups of 128
constexpr int kKOffset = 32768;  // 65536 bytes: K ring
constexpr int kVOffset = 98304;  // 69632 bytes: V ring
constexpr int kOOffset = 167936;  // 32768 bytes: staging of the O tile
constexpr int kBarriersOffset = 200704;  // 96 bytes: mbarriers
constexpr int kWorkTilesOffset = 200800;  // 16 bytes: ring of work tiles: index, number of steps
constexpr int kBlockMetaOffset = 200816;  // 16 bytes: metadata of the loads in the K rings
constexpr int kKScalesOffset = 200832;  // 16 bytes: scales of the keys in the K rings

constexpr int kQFullBarrier = kBarriersOffset;
constexpr int kQEmptyBarrier = kQFullBarrier + 8 * kTileStages;
constexpr int kKFullBarrier = kQEmptyBarrier + 8 * kTileStages;
constexpr int kKEmptyBarrier = kKFullBarrier + 8 * kStages;
constexpr int kVFullBarrier = kKEmptyBarrier + 8 * kStages;
constexpr int kVEmptyBarrier = kVFullBarrier + 8 * kStages;
constexpr int kWorkTileWords = 2;  // words of an entry of the ring: index, number of steps
constexpr int kWarpgroupThreads = 128, kWarpsPerWarpgroup = 4;
constexpr int kWarpgroupRows = 64;  // rows of one wgmma
constexpr int kRowBytes = 128;  // bytes of a row of a column group in shared memory: the span of the swizzle
constexpr int kWarpgroupBarrier = 1;  // named barrier of consumer warpgroup w: this + w; 0 is __syncthreads
// Named barrier for warpgroup w's turn: this + w.
constexpr int kWarpSchedulerBarrier = kWarpgroupBarrier + kConsumerWarpgroups;
constexpr int kWarpSchedulerThreads = 2 * kWarpgroupThreads;  // the warpgroup whose turn it is, and the previous one
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
// Initial row_max: finite, so that differences are defined. A row whose logits are all below it counts as a row without
// keys.
constexpr float kLeastLogit = -1e30f;
constexpr float kLn2 = 0.693147180559945f;

// Launch: 384 threads per block, 200848 bytes of dynamic shared memory.
// Grid: one thread block per SM, looping over tiles (persistent).
struct Params {
  TensorMap q_map;  // Q (head_dim, q_len, heads, batch): box 128 x 128 x 1 x 1, swizzle 128
  TensorMap k_map;  // K (head_dim, kv_len, kv_heads, batch): box 128 x 128 x 1 x 1, swizzle 128
  TensorMap v_map;  // V^T (padded_kv_len, head_dim, kv_heads, batch): box 128 x 128 x 1 x 1, swizzle 128
  TensorMap o_map;  // O, as Q: box 64 x 64 x 1 x 1, swizzle 128
  const float* q_scale;  // scales of Q: value = code * scale
  int64 q_scale_batch_stride;  // batch stride, in elements (0: shared)
  int64 q_scale_head_stride;  // head stride, in elements (0: shared)
  int q_scale_row_stride;  // group of rows stride, in elements (0: shared)
  const float* k_scale;  // scales of K: value = code * scale
  int64 k_scale_batch_stride;  // batch stride, in elements (0: shared)
  int64 k_scale_head_stride;  // head stride, in elements (0: shared)
  int k_scale_row_stride;  // group of rows stride, in elements (0: shared)
  const float* v_scale;  // scales of V: value = code * scale
  int64 v_scale_batch_stride;  // batch stride, in elements (0: shared)
  int64 v_scale_head_stride;  // head stride, in elements (0: shared)
  int v_scale_column_stride;  // column stride, in elements (0: shared)
  int last_column;  // last column of a head
  float* lse;  // log-sum-exp, (batch, heads, q_len) contiguous; not stored if null
  const int* kv_num_blocks;  // number of partial key blocks
  int64 kv_num_blocks_batch_stride;  // batch stride, in elements (0: shared)
  int64 kv_num_blocks_head_stride;  // head stride, in elements (0: shared)
  int64 kv_num_blocks_row_stride;  // query block stride, in elements
  const int* kv_indices;  // partial key blocks
  int64 kv_indices_batch_stride;  // batch stride, in elements (0: shared)
  int64 kv_indices_head_stride;  // head stride, in elements (0: shared)
  int64 kv_indices_row_stride;  // query block stride, in elements
  int kv_indices_length;  // entries per list
  const int* full_kv_num_blocks;  // number of full key blocks
  int64 full_kv_num_blocks_batch_stride;  // batch stride, in elements (0: shared)
  int64 full_kv_num_blocks_head_stride;  // head stride, in elements (0: shared)
  int64 full_kv_num_blocks_row_stride;  // query block stride, in elements
  const int* full_kv_indices;  // full key blocks
  int64 full_kv_indices_batch_stride;  // batch stride, in elements (0: shared)
  int64 full_kv_indices_head_stride;  // head stride, in elements (0: shared)
  int64 full_kv_indices_row_stride;  // query block stride, in elements
  int full_kv_indices_length;  // entries per list
  int query_blocks;  // query blocks per head: rows of the lists
  int* scheduler;  // tiles drawn after each thread block's first, finished thread blocks; both are 0 between launches
  int heads_in_l2;  // (batch, query head) pairs whose tiles are scheduled together: their K and V fit the L2
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

// wgmma.mma_async m64n136k32: D = A B, + D if `accumulate`; A in shared memory. 8-bit operands are K-major. After p
// come scale factors of 1 for A and B (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n136k32_shared(
    float (&d)[68], uint32 a, uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %70, 0;\n"
      "mov.b64 a, { %68, %71 };\n"
      "mov.b64 b, { %69, %71 };\n"
      "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, "
      "%4, %5, %6, %7, "
      "%8, %9, %10, %11, "
      "%12, %13, %14, %15, "
      "%16, %17, %18, %19, "
      "%20, %21, %22, %23, "
      "%24, %25, %26, %27, "
      "%28, %29, %30, %31, "
      "%32, %33, %34, %35, "
      "%36, %37, %38, %39, "
      "%40, %41, %42, %43, "
      "%44, %45, %46, %47, "
      "%48, %49, %50, %51, "
      "%52, %53, %54, %55, "
      "%56, %57, %58, %59, "
      "%60, %61, %62, %63, "
      "%64, %65, %66, %67"
      "}, a, b, p, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
        "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
        "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
        "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]),
        "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
        "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf));
}

// wgmma.mma_async m64n120k32: D = A B, + D if `accumulate`; A in shared memory. 8-bit operands are K-major. After p
// come scale factors of 1 for A and B (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n120k32_shared(
    float (&d)[60], uint32 a, uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %62, 0;\n"
      "mov.b64 a, { %60, %63 };\n"
      "mov.b64 b, { %61, %63 };\n"
      "wgmma.mma_async.sync.aligned.m64n120k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, "
      "%4, %5, %6, %7, "
      "%8, %9, %10, %11, "
      "%12, %13, %14, %15, "
      "%16, %17, %18, %19, "
      "%20, %21, %22, %23, "
      "%24, %25, %26, %27, "
      "%28, %29, %30, %31, "
      "%32, %33, %34, %35, "
      "%36, %37, %38, %39, "
      "%40, %41, %42, %43, "
      "%44, %45, %46, %47, "
      "%48, %49, %50, %51, "
      "%52, %53, %54, %55, "
      "%56, %57, %58, %59"
      "}, a, b, p, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
        "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
        "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
        "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]),
        "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf));
}

// The same without D as an input, so that its registers are free for the compiler until here.
__device__ __forceinline__ void wgmma_m64n120k32_shared_first(
    float (&d)[60], uint32 a, uint32 b) {
  asm volatile(
      "{\n"
      ".reg .b64 a, b;\n"
      "mov.b64 a, { %60, %62 };\n"
      "mov.b64 b, { %61, %62 };\n"
      "wgmma.mma_async.sync.aligned.m64n120k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, "
      "%4, %5, %6, %7, "
      "%8, %9, %10, %11, "
      "%12, %13, %14, %15, "
      "%16, %17, %18, %19, "
      "%20, %21, %22, %23, "
      "%24, %25, %26, %27, "
      "%28, %29, %30, %31, "
      "%32, %33, %34, %35, "
      "%36, %37, %38, %39, "
      "%40, %41, %42, %43, "
      "%44, %45, %46, %47, "
      "%48, %49, %50, %51, "
      "%52, %53, %54, %55, "
      "%56, %57, %58, %59"
      "}, a, b, 0, 1, 1;\n"
      "}\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]),
        "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
        "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]),
        "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]),
        "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]),
        "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]),
        "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]),
        "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31]),
        "=f"(d[32]), "=f"(d[33]), "=f"(d[34]), "=f"(d[35]),
        "=f"(d[36]), "=f"(d[37]), "=f"(d[38]), "=f"(d[39]),
        "=f"(d[40]), "=f"(d[41]), "=f"(d[42]), "=f"(d[43]),
        "=f"(d[44]), "=f"(d[45]), "=f"(d[46]), "=f"(d[47]),
        "=f"(d[48]), "=f"(d[49]), "=f"(d[50]), "=f"(d[51]),
        "=f"(d[52]), "=f"(d[53]), "=f"(d[54]), "=f"(d[55]),
        "=f"(d[56]), "=f"(d[57]), "=f"(d[58]), "=f"(d[59])
      : "r"(a), "r"(b), "n"(kDescriptorUpperHalf));
}

// wgmma.mma_async m64n136k32: D = A B, + D if `accumulate`; A in registers. 8-bit operands are K-major. After p
// come scale factors of 1 for A and B (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n136k32_registers_v(
    float (&d)[68], const uint32 (&a)[4], uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 b;\n"
      "setp.ne.b32 p, %73, 0;\n"
      "mov.b64 b, { %72, %74 };\n"
      "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, "
      "%4, %5, %6, %7, "
      "%8, %9, %10, %11, "
      "%12, %13, %14, %15, "
      "%16, %17, %18, %19, "
      "%20, %21, %22, %23, "
      "%24, %25, %26, %27, "
      "%28, %29, %30, %31, "
      "%32, %33, %34, %35, "
      "%36, %37, %38, %39, "
      "%40, %41, %42, %43, "
      "%44, %45, %46, %47, "
      "%48, %49, %50, %51, "
      "%52, %53, %54, %55, "
      "%56, %57, %58, %59, "
      "%60, %61, %62, %63, "
      "%64, %65, %66, %67"
      "}, { %68, %69, %70, %71 }, b, p, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
        "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
        "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
        "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]),
        "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
        "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf));
}

// The same without D as an input, so that its registers are free for the compiler until here.
__device__ __forceinline__ void wgmma_m64n136k32_registers_v_first(
    float (&d)[68], const uint32 (&a)[4], uint32 b) {
  asm volatile(
      "{\n"
      ".reg .b64 b;\n"
      "mov.b64 b, { %72, %73 };\n"
      "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, "
      "%4, %5, %6, %7, "
      "%8, %9, %10, %11, "
      "%12, %13, %14, %15, "
      "%16, %17, %18, %19, "
      "%20, %21, %22, %23, "
      "%24, %25, %26, %27, "
      "%28, %29, %30, %31, "
      "%32, %33, %34, %35, "
      "%36, %37, %38, %39, "
      "%40, %41, %42, %43, "
      "%44, %45, %46, %47, "
      "%48, %49, %50, %51, "
      "%52, %53, %54, %55, "
      "%56, %57, %58, %59, "
      "%60, %61, %62, %63, "
      "%64, %65, %66, %67"
      "}, { %68, %69, %70, %71 }, b, 0, 1, 1;\n"
      "}\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]),
        "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
        "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]),
        "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]),
        "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]),
        "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]),
        "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]),
        "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31]),
        "=f"(d[32]), "=f"(d[33]), "=f"(d[34]), "=f"(d[35]),
        "=f"(d[36]), "=f"(d[37]), "=f"(d[38]), "=f"(d[39]),
        "=f"(d[40]), "=f"(d[41]), "=f"(d[42]), "=f"(d[43]),
        "=f"(d[44]), "=f"(d[45]), "=f"(d[46]), "=f"(d[47]),
        "=f"(d[48]), "=f"(d[49]), "=f"(d[50]), "=f"(d[51]),
        "=f"(d[52]), "=f"(d[53]), "=f"(d[54]), "=f"(d[55]),
        "=f"(d[56]), "=f"(d[57]), "=f"(d[58]), "=f"(d[59]),
        "=f"(d[60]), "=f"(d[61]), "=f"(d[62]), "=f"(d[63]),
        "=f"(d[64]), "=f"(d[65]), "=f"(d[66]), "=f"(d[67])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kDescriptorUpperHalf));
}

// bar.sync: waits at named barrier `id` of `threads` threads (PTX ISA, "bar")
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive: counts this thread at named barrier `id` without waiting (PTX ISA, "bar")
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
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

// cvt.rn.bf16x2.f32: converts two floats to a pair of bf16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// cvt.rn.satfinite.e4m3x2.f32: converts two floats to a pair of e4m3, the second operand in the lower byte; here four
// to a word, the first one lowest (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack_e4m3(float a, float b, float c, float d) {
  uint32 word;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, { low, high };\n"
      "}\n" : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

// stmatrix.x4: stores four 8 x 8 matrices of 16-bit elements; each lane holds one row address (PTX ISA, "stmatrix")
__device__ __forceinline__ void stmatrix_x4(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };"
      ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Pattern: each query block has a list of partial key blocks and, if given, a list of full ones. Predicate of partial
// blocks: causal.
struct KvBlockIterator {
  int count;        // steps of these queries
  int entries;      // key blocks listed for them: partial ones, then full ones
  int partial;      // number of partial ones
  const int* list;       // partial ones
  const int* full_list;  // full ones
  int key_blocks;   // number of key blocks
  int first_diagonal;  // last key that the first query sees
  int lane_entries;  // 32 entries of the concatenated lists, one per lane

  __device__ __forceinline__ KvBlockIterator(const Params& p, int batch, int head, int first_query) {
    const SeqlenInfo seqlen(p, batch);
    const int row = first_query / kSubTileRows;
    list = p.kv_indices + batch * p.kv_indices_batch_stride + head * p.kv_indices_head_stride +
           row * p.kv_indices_row_stride;
    full_list = p.full_kv_indices + batch * p.full_kv_indices_batch_stride +
                head * p.full_kv_indices_head_stride + row * p.full_kv_indices_row_stride;
    key_blocks = (seqlen.kv_end() + kBlockKeys - 1) / kBlockKeys;
    first_diagonal = seqlen.position(first_query);
    partial = 0;
    int full = 0;
    if (row < p.query_blocks) {
      partial = __ldg(p.kv_num_blocks + batch * p.kv_num_blocks_batch_stride +
                      head * p.kv_num_blocks_head_stride + row * p.kv_num_blocks_row_stride);
      partial = max(0, min(partial, p.kv_indices_length));
      if (p.full_kv_num_blocks != nullptr) {
        full = __ldg(p.full_kv_num_blocks + batch * p.full_kv_num_blocks_batch_stride +
                     head * p.full_kv_num_blocks_head_stride + row * p.full_kv_num_blocks_row_stride);
        full = max(0, min(full, p.full_kv_indices_length));
      }
    }
    entries = partial + full;
    count = (entries + kStepBlocks - 1) / kStepBlocks;
    lane_entries = 0;
  }
  // Index of the i-th load, in units of its keys. Points past the last key for an out-of-range entry or past the end of
  // the list. All lanes of a warp call this together, with i = 0, 1, 2, ...
  __device__ __forceinline__ int at(int i) {
    const int entry = i, mine = entry + threadIdx.x % 32;
    if (i % 32 == 0 && mine < entries) {
      lane_entries = __ldg(mine < partial ? list + mine : full_list + (mine - partial));
    }
    const int block = __shfl_sync(0xFFFFFFFF, lane_entries, entry % 32);
    const bool known = entry < entries && static_cast<uint32>(block) < static_cast<uint32>(key_blocks);
    return (known ? block : key_blocks);
  }
  // Whether some pair of the i-th load is masked: partial blocks may be listed that are visible as a whole.
  __device__ __forceinline__ bool masked(int i, int block) {
    return i < partial && (block + 1) * kBlockKeys - 1 > first_diagonal;
  }
};

// Whether a query sees an in-range key:
//   kv_idx <= q_idx + kv_len - q_len
__device__ __forceinline__ bool visible(const Params& p, int batch, int query, int key) {
  return key <= query + p.kv_len - p.q_len;
}

// One tile of work: kTileM queries of one head.
struct Tile {
  int batch, head, first_query;

  __device__ __forceinline__ Tile(const Params& p, int index) {
    // Late queries see the most keys. They go first, so that little work is left for the end. Heads are interleaved,
    // but no more of them than have their K and V in the L2 at once.
    const uint32 number = index, query_tiles = p.query_tiles;  // unsigned: cheaper to divide than int
    const uint32 heads_in_l2 = p.heads_in_l2;
    const uint32 first_head = number / (heads_in_l2 * query_tiles) * heads_in_l2;
    const uint32 in_group = number - first_head * query_tiles;
    const uint32 heads = min(heads_in_l2, p.tiles / query_tiles - first_head);
    const uint32 batch_head = first_head + in_group % heads;
    first_query = (query_tiles - 1 - in_group / heads) * kTileM;
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

__device__ __forceinline__ WorkTile first_work_tile(const Params& p) { return {static_cast<int>(blockIdx.x)}; }

// Takes the next unassigned tile.
__device__ __forceinline__ WorkTile next_work_tile(const Params& p, const WorkTile&) {
  return {atomicAdd(p.scheduler, 1) + static_cast<int>(gridDim.x)};
}

// The last thread block to end resets the counters to 0 for the next launch. The fence orders a thread block's draws
// before its arrival, so none comes after the reset.
__device__ __forceinline__ void release_scheduler(const Params& p) {
  __threadfence();
  if (atomicAdd(p.scheduler + 1, 1) == gridDim.x - 1) {
    p.scheduler[0] = 0;
    p.scheduler[1] = 0;
  }
}

// Key blocks of a work tile.
// Producer and consumers each recompute them, in a few instructions, instead of passing them through shared memory. All
// patterns take the same arguments, used or not.
__device__ __forceinline__ KvBlockIterator kv_blocks_of(
    const Params& p, const Tile& tile) {
  return KvBlockIterator(p, tile.batch, tile.head, tile.first_query);
}

// Metadata of a load of kLoadKeys keys, in one word: twice its index, plus 1 if the pattern masks some of its pairs.
// Complemented, hence negative, if the pattern or the end of the keys masks some pairs.
__device__ __forceinline__ int pack_block_meta(const KvEnd& kv_end, int block, bool masked) {
  const int slot = block * 2 + masked;
  return masked || (block + 1) * kLoadKeys > kv_end ? ~slot : slot;
}

// Lane 0 reads a word that the producer wrote. A consumer's lane 0 arrives at the empty barrier afterwards, and only
// the producer's lane 0 writes the word, so it is read before it changes. The shuffle makes the value uniform.
__device__ __forceinline__ int read_by_leader(const int* word) {
  return __shfl_sync(0xFFFFFFFF, threadIdx.x % 32 == 0 ? *word : 0, 0);
}

// The work tile of an entry of the ring.
__device__ __forceinline__ WorkTile read_work_tile(const int* info) {
  return {read_by_leader(info)};
}

// Publishes a work tile: waits until the consumers have released its entry of the ring, then
// writes the tile's index and its steps, and loads Q. Past the last tile, only the index is written.
// Called by one thread.
__device__ __forceinline__ void publish_work_tile(const Params& p, int* entries, uint32 base,
    const PipelineState<kTileStages>& state, const WorkTile& work) {
  const uint32 full = base + kQFullBarrier + 8 * state.index;
  int* info = entries + state.index * kWorkTileWords;
  mbarrier_wait(base + kQEmptyBarrier + 8 * state.index, state.phase ^ 1);
  info[0] = work.index;
  if (work.index >= p.tiles) {
    mbarrier_arrive(full);
    return;
  }
  const Tile tile(p, work.index);
  info[1] = kv_blocks_of(p, tile).count;
  mbarrier_arrive_expect_tx(full, kQBytes);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    tma_load_4d(base + kQOffset + state.index * kQBytes + group * kQGroupBytes, &p.q_map, full,
        group * kGroupColumns, tile.first_query, tile.head, tile.batch);
  }
}

// Scale of the K rows with this index, clamped to the last.
__device__ __forceinline__ float k_scale_of(const Params& p, int batch, int kv_head, int rows, int last) {
  return __ldg(p.k_scale + batch * p.k_scale_batch_stride + kv_head * p.k_scale_head_stride +
               min(rows, last) * p.k_scale_row_stride);
}

// Copies one step of K or V to shared memory: kStepBlocks loads of kLoadKeys keys.
__device__ __forceinline__ void load_step(const TensorMap* map, uint32 to, uint32 full,
    const int (&blocks)[kStepBlocks], int kv_head, int batch) {
#pragma unroll
  for (int load = 0; load < kStepBlocks; ++load) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      tma_load_4d(to + group * kKvGroupBytes + load * kLoadKeys * kRowBytes, map, full, group * kGroupColumns,
          blocks[load] * kLoadKeys, kv_head, batch);
    }
  }
}

// Copies V^T of one step to shared memory. Keys are its columns; each listed block is a group of them.
__device__ __forceinline__ void load_v_step(const TensorMap* map, uint32 to, uint32 full,
    const int (&blocks)[kStepBlocks], int kv_head, int batch) {
#pragma unroll
  for (int load = 0; load < kStepBlocks; ++load) {
    tma_load_4d(to + load * kVGroupBytes, map, full, blocks[load] * kLoadKeys, 0, kv_head, batch);
  }
}

// Producer: one warp fills the rings. It also publishes the work tiles, one ahead; the first is already published.
__device__ __forceinline__ void produce(const Params& p, unsigned char* shared, uint32 base) {
  // The lane that waits and copies. CUTLASS picks it by elect_one_sync; here it also reads and writes the ring's
  // entries.
  const bool leader = threadIdx.x % 32 == 0;
  int* entries = reinterpret_cast<int*>(shared + kWorkTilesOffset);
  int* block_meta = reinterpret_cast<int*>(shared + kBlockMetaOffset);
  float* const k_scales = reinterpret_cast<float*>(shared + kKScalesOffset);
  const int last_k_scale = (p.kv_len - 1) / kKScaleRows;
  const uint32 k_ring = base + kKOffset;
  const uint32 v_ring = base + kVOffset;
  // Work tiles and steps so far: stages and parities follow from these counts.
  uint32 work_tiles = 0, steps = 0;

  while (true) {
    const PipelineState<kTileStages> tile_state{work_tiles};
    const WorkTile work = read_work_tile(entries + tile_state.index * kWorkTileWords);
    ++work_tiles;
    if (work.index >= p.tiles) break;
    const Tile tile(p, work.index);
    const int kv_head = static_cast<uint32>(tile.head) / p.heads_per_kv_head;
    const KvEnd kv_end(p, tile.batch);
    KvBlockIterator blocks = kv_blocks_of(p, tile);

    // K of step i goes ahead of V of step i - 1, in the order in which the consumers use them.
    int loads[kStepBlocks] = {}, previous[kStepBlocks];
#pragma unroll 1
    for (int i = 0; i <= blocks.count; ++i) {
      const uint32 k_step = steps + i, v_step = k_step - 1;
#pragma unroll
      for (int load = 0; load < kStepBlocks; ++load) {
        previous[load] = loads[load];
        if (i < blocks.count) loads[load] = blocks.at(i * kStepBlocks + load);
      }
      // The scales are in flight while the producer waits for a free stage. Scales of out-of-range keys do not matter.
      float step_scales[kScaleParts];
      if (leader && i < blocks.count) {
#pragma unroll
        for (int part = 0; part < kScaleParts; ++part) {
          constexpr int kLoadParts = kLoadKeys / kScaleKeys;
          const int key = loads[part / kLoadParts] * kLoadKeys + part % kLoadParts * kScaleKeys;
          step_scales[part] = k_scale_of(p, tile.batch, kv_head, key / kKScaleRows, last_k_scale);
        }
      }
      if (leader && i < blocks.count) {
        const int stage = k_step % kStages, phase = k_step / kStages % 2;
        const uint32 full = base + kKFullBarrier + 8 * stage;
        mbarrier_wait(base + kKEmptyBarrier + 8 * stage, phase ^ 1);
#pragma unroll
        for (int load = 0; load < kStepBlocks; ++load) {
          const int block = loads[load];
          block_meta[stage * kStepBlocks + load] =
              pack_block_meta(kv_end, block, blocks.masked(i * kStepBlocks + load, block));
        }
#pragma unroll
        for (int part = 0; part < kScaleParts; ++part) k_scales[stage * kScaleParts + part] = step_scales[part];
        mbarrier_arrive_expect_tx(full, kKvBytes);
        load_step(&p.k_map, k_ring + stage * kKvBytes, full, loads, kv_head, tile.batch);
      }
      if (leader && i > 0) {
        const int stage = v_step % kStages, phase = v_step / kStages % 2;
        const uint32 full = base + kVFullBarrier + 8 * stage;
        mbarrier_wait(base + kVEmptyBarrier + 8 * stage, phase ^ 1);
        mbarrier_arrive_expect_tx(full, kVLoadBytes);
        load_v_step(&p.v_map, v_ring + stage * kVBytes, full, previous, kv_head, tile.batch);
      }
      __syncwarp();  // lane 0 waited and loaded alone: reconverge before the warp's next shuffle or vote
    }
    steps += blocks.count;
    // All loads of this work tile are issued, and at most kStages of its steps are left for the consumers: publish the
    // next.
    if (leader) publish_work_tile(p, entries, base, {work_tiles}, next_work_tile(p, work));
    __syncwarp();  // reconverge; also makes lane 0's entry visible to the warp
  }
  if (leader) release_scheduler(p);
}

// s = Q K^T for this warpgroup's 64 rows and the keys of one step (asynchronous).
//
// The scores of the first kFirstKeys keys reuse the registers of `part`. `zero` is 0, but the compiler does not know:
// it assumes that these registers are read here and therefore finishes their uses first. Without this, it interleaves
// both and runs out of registers.
__device__ __forceinline__ void issue_qk_gemm(float (&s)[kTileN / 2],
    uint32 q_descriptor, uint32 k_descriptor, int zero) {
  wgmma_fence();
  auto& first = reinterpret_cast<float (&)[kFirstKeys / 2]>(s);
  wgmma_m64n136k32_shared(first, q_descriptor, k_descriptor, zero);
#pragma unroll
  for (int k = 1; k < kHeadDim / 32; ++k) {
    // 32 columns are 32 bytes of a 128-byte row; after four of them the next column group begins.
    const int in_group = k % 4 * 32, group = k / 4;
    const uint32 slice = k_descriptor + ((group * kKvGroupBytes + in_group) >> 4);
    wgmma_m64n136k32_shared(first, q_descriptor + ((group * kQGroupBytes + in_group) >> 4), slice, 1);
  }
  auto& others = reinterpret_cast<float (&)[(kTileN - kFirstKeys) / 2]>(s[kFirstKeys / 2]);
  const uint32 other_keys = k_descriptor + (kFirstKeys * kRowBytes >> 4);
  wgmma_m64n120k32_shared_first(others, q_descriptor, other_keys);
#pragma unroll
  for (int k = 1; k < kHeadDim / 32; ++k) {
    const int in_group = k % 4 * 32, group = k / 4;
    const uint32 slice = other_keys + ((group * kKvGroupBytes + in_group) >> 4);
    wgmma_m64n120k32_shared(others, q_descriptor + ((group * kQGroupBytes + in_group) >> 4), slice, 1);
  }
  wgmma_commit();
  warpgroup_fence_operand(s);
}

// part = P V, + part if `before`, for the keys of one step and one piece of O's columns (asynchronous). A row of V^T
// holds the keys of a group, one byte each.
__device__ __forceinline__ void issue_pv_gemm(float (&part)[kPieceOutputs], const uint32 (&p_frag)[kTileN / 32][4],
    uint32 v_descriptor, int piece, int before) {
  wgmma_fence();
  const uint32 rows = v_descriptor + (piece * kPieceOutputs * 2 * kVGroupKeys >> 4);
  if (piece == 0) {
    wgmma_m64n136k32_registers_v_first(part, p_frag[0], rows);
  } else {  // likewise, the uses of the previous piece finish first
    wgmma_m64n136k32_registers_v(part, p_frag[0], rows, before);
  }
#pragma unroll
  for (int k = 1; k < kTileN / 32; ++k) {
    const int in_group = k * 32 % kVGroupKeys, group = k * 32 / kVGroupKeys;
    const uint32 keys = rows + ((group * kVGroupBytes + in_group) >> 4);
    wgmma_m64n136k32_registers_v(part, p_frag[k], keys, 1);
  }
  wgmma_commit();
  warpgroup_fence_operand(part);
}

// What a consumer needs to mask a step: one word for each load. Only a warp's leader, which releases the stage, reads
// them; they are 0 in the other lanes.
struct BlockMeta {
  int word[kStepBlocks];

  __device__ __forceinline__ BlockMeta(const int* block_meta, int stage, bool warp_leader) {
#pragma unroll
    for (int load = 0; load < kStepBlocks; ++load) {
      word[load] = warp_leader ? block_meta[stage * kStepBlocks + load] : 0;
    }
  }
  // Whether the pattern or the end of the keys masks some pair: the same in all lanes.
  __device__ __forceinline__ bool needs_mask() const {
    bool some = false;
#pragma unroll
    for (int load = 0; load < kStepBlocks; ++load) some |= word[load] < 0;
    return __any_sync(0xFFFFFFFF, some);
  }
};

// Masks the pairs of a step that the pattern or the end of the keys excludes.
__device__ __forceinline__ void apply_mask(float (&s)[kTileN / 2], const Params& p, const BlockMeta& meta,
    int batch, int query) {
  const KvEnd kv_end(p, batch);
#pragma unroll
  for (int load = 0; load < kStepBlocks; ++load) {
    const int word = __shfl_sync(0xFFFFFFFF, meta.word[load], 0), number = word < 0 ? ~word : word;
    const int first_key = number / 2 * kLoadKeys + threadIdx.x % 4 * 2;  // this thread's first key
    const int keys = kv_end - first_key;
#pragma unroll
    for (int j = 0; j < kLoadKeys / 2; ++j) {  // j: score of a load; i: score of the step
      const int i = load * (kLoadKeys / 2) + j, column = j / 4 * 8 + j % 2;
      bool keep = column < keys;
      const int my_query = query + j / 2 % 2 * 8;
      // The pattern depends only on the distance of query and key. Both are counted from first_key, which makes columns
      // constants.
      const bool in_pattern = visible(p, batch, my_query - first_key, column);
      keep &= (number % 2 == 0) | in_pattern;
      if (!keep) s[i] = kMinusInfinity;
    }
  }
}

// Online softmax with lazy rescaling (FlashAttention-4's rescale_threshold). The weight of a pair is 2^(logit log2(e) -
// row_max). row_max is the maximum of the row, over its steps so far or up to an earlier step, minus kWeightShift:
// weights then use the range of e4m3, up to 448. A step raises row_max, and rescales O and the sum, only if it exceeds
// row_max by the threshold for some row of the warp.
constexpr float kWeightShift = 7.0f;
constexpr float kRescaleThreshold = 1.8f;  // 2^(7 + 1.8) is below 448

// Factors of the logits of this thread's two rows: the scales of their Q, times scale log2(e). Out-of-range rows use
// the nearest query's. first_query is the warpgroup's.
__device__ __forceinline__ void load_q_factors(float (&factors)[2], const Params& p, const Tile& tile,
    int first_query) {
  const SeqlenInfo seqlen(p, tile.batch);
  const int row = threadIdx.x / 32 % kWarpsPerWarpgroup * 16 + threadIdx.x % 32 / 4;  // in the warpgroup; and row + 8
  const int queries[2] = {min(max(first_query + row + 0 * 8, 0), seqlen.q_len() - 1),
      min(max(first_query + row + 1 * 8, 0), seqlen.q_len() - 1)};
  const int heads[2] = {tile.head, tile.head};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* const place = p.q_scale + tile.batch * p.q_scale_batch_stride +
                               heads[half] * p.q_scale_head_stride +
                               queries[half] / kQScaleRows * p.q_scale_row_stride;
    factors[half] = p.scale_log2 * __ldg(place);
  }
}

// Factors of the logits of a step, one for each part of its keys, for both rows. The scales are words that the producer
// wrote.
__device__ __forceinline__ void take_scales(float (&scales)[kScaleParts][2], const float* k_scales,
    const float (&q_factors)[2]) {
#pragma unroll
  for (int part = 0; part < kScaleParts; ++part) {
    const float of_keys = __int_as_float(read_by_leader(reinterpret_cast<const int*>(k_scales + part)));
    scales[part][0] = q_factors[0] * of_keys;
    scales[part][1] = q_factors[1] * of_keys;
  }
}

// Largest logit times log2(e), minus kWeightShift, of this thread's keys of a step. Scales are positive, so each part
// has it at its largest s.
__device__ __forceinline__ void take_step_max(float (&step_max)[2], const float (&s)[kTileN / 2],
    const float (&scales)[kScaleParts][2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int part = 0; part < kScaleParts; ++part) {
      constexpr int kScores = kScaleKeys / 2;
      float chains[4];  // four chains: a quarter of the latency
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        const float score = s[part * kScores + i / 2 * 4 + row * 2 + i % 2];
        chains[i % 4] = i < 4 ? score : fmaxf(chains[i % 4], score);
      }
      const float most = fmaxf(fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3]));
      const float logit = most * scales[part][row] - kWeightShift;
      step_max[row] = part == 0 ? logit : fmaxf(step_max[row], logit);
    }
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

// Adds the product of one step, which is relative to the raised row_max, to a piece of O.
__device__ __forceinline__ void add_part(float (&o)[kOutputs], const float (&part)[kPieceOutputs],
    const float (&rescale)[2], int piece) {
#pragma unroll
  for (int i = 0; i < kPieceOutputs; ++i) {
    float& sum = o[piece * kPieceOutputs + i];
    sum = sum * rescale[i / 2 % 2] + part[i];
  }
}

// 2^x by FMA and integer instructions, for weights that are rounded to 3 bits: relative error 2^-9, and at least
// 2^-100, which rounds to 0. The special function unit alone would take as long as the products. Adding kRound rounds x
// to an integer, in the lower bits of the sum; 2^f of the remainder, from -1/2 to 1/2, is a polynomial.
__device__ __forceinline__ float ex2_by_fma(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  const float bounded = fmaxf(x, -100.0f);
  const float rounded = bounded + kRound;
  const float f = bounded - (rounded - kRound);
  const float power = (f * 0.23842676f + 0.7034449f) * f + 1.000443f;
  return __int_as_float(__float_as_int(power) + (__float_as_int(rounded) << 23));
}

// P: the weights of a step, in e4m3. For each 16 keys, a thread's scores in two groups of 8 columns are four neighbors
// of the A operand: the keys of V are permuted to match.
__device__ __forceinline__ void scale_apply_exp2(uint32 (&p_frag)[kTileN / 32][4], const float (&s)[kTileN / 2],
    const float (&row_max)[2], const float (&scales)[kScaleParts][2]) {
#pragma unroll
  for (int keys = 0; keys < kTileN / 16; ++keys) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float scale = scales[keys * 16 / kScaleKeys][row];
      float weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = s[keys * 8 + i / 2 * 4 + row * 2 + i % 2] * scale - row_max[row];
        const bool by_fma = i == 3 && keys % 4 < kFmaGroups;
        weights[i] = by_fma ? ex2_by_fma(x) : ex2(x);
      }
      p_frag[keys / 2][keys % 2 * 2 + row] = pack_e4m3(weights[0], weights[1], weights[2], weights[3]);
    }
  }
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

  // The previous tile's store must have finished reading the staging buffer.
  const bool sender = threadIdx.x % kWarpgroupThreads == 0;
  if (sender) tma_store_wait_read<0>();
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
    for (int group = 0; group < kOGroups; ++group) {
      tma_store_4d(&p.o_map, staging + group * kOGroupBytes, group * kOColumns, first_query, tile.head, tile.batch);
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

// A work tile as a consumer sees it: index of the tile, and the steps.
struct WorkTileInfo {
  WorkTile work;
  int count;
};

__device__ __forceinline__ WorkTileInfo read_work_tile_info(const int* entries, uint32 base,
    const PipelineState<kTileStages>& state) {
  mbarrier_wait(base + kQFullBarrier + 8 * state.index, state.phase);
  const int* words = entries + state.index * kWorkTileWords;
  return {read_work_tile(words), read_by_leader(words + 1)};
}

// O times the per-channel scales of V: undoes the quantization of V.
__device__ __forceinline__ void scale_output(float (&out)[kHeadDim / 2], const float (&o)[kOutputs], const Params& p,
    const Tile& tile) {
  const int kv_head = static_cast<uint32>(tile.head) / p.heads_per_kv_head;
  const float* const scales =
      p.v_scale + tile.batch * p.v_scale_batch_stride + kv_head * p.v_scale_head_stride;
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
    if (j % 8 == 0) __syncwarp();  // keeps the compiler from loading all scales at once, which would spill
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = min(j * 8 + threadIdx.x % 4 * 2 + i, p.last_column);
      const float scale = __ldg(scales + column * p.v_scale_column_stride);
      out[j * 4 + i] = o[j * 4 + i] * scale;
      out[j * 4 + 2 + i] = o[j * 4 + 2 + i] * scale;
    }
  }
}

// Consumer: one warpgroup computes its 64 rows
__device__ __forceinline__ void consume(const Params& p, unsigned char* shared, uint32 base, int warpgroup) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarpsPerWarpgroup;
  const int first_row = warpgroup * kWarpgroupRows + warp * 16 + lane / 4;
  const bool warp_leader = lane == 0;
  const int* entries = reinterpret_cast<const int*>(shared + kWorkTilesOffset);
  const float* k_scales = reinterpret_cast<const float*>(shared + kKScalesOffset);
  const int* block_meta = reinterpret_cast<const int*>(shared + kBlockMetaOffset);
  // Descriptors of stage 0 of the rings. The shuffles keep the compiler from recomputing them in each step.
  const uint32 q_descriptors =
      __shfl_sync(0xFFFFFFFF, wgmma_descriptor(base + kQOffset + warpgroup * kWarpgroupRows * kRowBytes, 0), 0);
  const uint32 k_descriptors =
      __shfl_sync(0xFFFFFFFF, wgmma_descriptor(base + kKOffset, 0), 0);
  const uint32 v_descriptors =
      __shfl_sync(0xFFFFFFFF, wgmma_descriptor(base + kVOffset, 0), 0);
  const uint32 staging = base + kOOffset + warpgroup * kOGroups * kOGroupBytes;
  PipelineState<kTileStages> tile_state;
  PipelineState<kStages> k_state, v_state;
  const int my_barrier = kWarpSchedulerBarrier + warpgroup;
  const int next_barrier = kWarpSchedulerBarrier + (warpgroup + 1) % kConsumerWarpgroups;
  // Warpgroup 0 has the first turn.
  if (warpgroup == kConsumerWarpgroups - 1) bar_arrive(kWarpSchedulerBarrier, kWarpSchedulerThreads);
  bool fresh = true;  // whether this warpgroup has yet to run a step
  const int zero = p.tiles < 0;

  while (true) {
    const WorkTileInfo info = read_work_tile_info(entries, base, tile_state);
    if (info.work.index >= p.tiles) break;
    const Tile tile(p, info.work.index);
    float o[kOutputs] = {}, accumulators[kAccumulators];
    auto& s = reinterpret_cast<float (&)[kTileN / 2]>(accumulators);
    auto& part = reinterpret_cast<float (&)[kPieceOutputs]>(accumulators);
    uint32 p_frag[kTileN / 32][4];
    float row_max[2] = {kLeastLogit, kLeastLogit}, row_sum[2] = {}, step_max[2], rescale[2], q_factors[2];
    load_q_factors(q_factors, p, tile, tile.first_query + warpgroup * kWarpgroupRows);
    const uint32 q_descriptor = q_descriptors + (tile_state.index * kQBytes >> 4);

    if (info.count > 0) {
      // First step: scores and softmax.
      mbarrier_wait(base + kKFullBarrier + 8 * k_state.index, k_state.phase);
      BlockMeta step(block_meta, k_state.index, warp_leader);
      float scales[kScaleParts][2];
      take_scales(scales, k_scales + k_state.index * kScaleParts, q_factors);
      // All warpgroups begin their first tile at the same time, so they take turns from the first products on.
      // Later tiles are already staggered.
      if (fresh) bar_sync(my_barrier, kWarpSchedulerThreads);
      issue_qk_gemm(s, q_descriptor, k_descriptors + (k_state.index * kKvBytes >> 4), zero);
      wgmma_wait<0>();
      warpgroup_fence_operand(s);
      if (fresh) bar_arrive(next_barrier, kWarpSchedulerThreads);
      fresh = false;
      if (warp_leader) mbarrier_arrive(base + kKEmptyBarrier + 8 * k_state.index);
      k_state.advance();
      if (step.needs_mask()) apply_mask(s, p, step, tile.batch, tile.first_query + first_row);
      take_step_max(step_max, s, scales);
      raise_row_max(row_max, rescale, step_max);  // O and row_sum are 0: nothing to rescale
      scale_apply_exp2(p_frag, s, row_max, scales);

      // Output of step i - 1, then scores of step i.
      for (int i = 1; i < info.count; ++i) {
        mbarrier_wait(base + kVFullBarrier + 8 * v_state.index, v_state.phase);
        bar_sync(my_barrier, kWarpSchedulerThreads);
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          issue_pv_gemm(part, p_frag, v_descriptors + (v_state.index * kVBytes >> 4), piece, zero);
          wgmma_wait<0>();
          warpgroup_fence_operand(part);
          add_part(o, part, rescale, piece);
        }
        if (warp_leader) mbarrier_arrive(base + kVEmptyBarrier + 8 * v_state.index);
        v_state.advance();
        mbarrier_wait(base + kKFullBarrier + 8 * k_state.index, k_state.phase);
        issue_qk_gemm(s, q_descriptor, k_descriptors + (k_state.index * kKvBytes >> 4), zero);
        bar_arrive(next_barrier, kWarpSchedulerThreads);
        step = BlockMeta(block_meta, k_state.index, warp_leader);
        take_scales(scales, k_scales + k_state.index * kScaleParts, q_factors);
        wgmma_wait<0>();
        warpgroup_fence_operand(s);
        if (warp_leader) mbarrier_arrive(base + kKEmptyBarrier + 8 * k_state.index);
        k_state.advance();
        if (step.needs_mask()) apply_mask(s, p, step, tile.batch, tile.first_query + first_row);
        take_step_max(step_max, s, scales);
        rescale[0] = rescale[1] = 1.0f;
        if (exceeds_threshold(step_max, row_max)) {
          raise_row_max(row_max, rescale, step_max);
        }
        scale_apply_exp2(p_frag, s, row_max, scales);
      }

      // The last scores are complete: Q's buffer is free for the tile after next.
      if (warp_leader) mbarrier_arrive(base + kQEmptyBarrier + 8 * tile_state.index);

      // Output of the last step.
      mbarrier_wait(base + kVFullBarrier + 8 * v_state.index, v_state.phase);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        issue_pv_gemm(part, p_frag, v_descriptors + (v_state.index * kVBytes >> 4), piece, zero);
        wgmma_wait<0>();
        warpgroup_fence_operand(part);
        add_part(o, part, rescale, piece);
      }
      if (warp_leader) mbarrier_arrive(base + kVEmptyBarrier + 8 * v_state.index);
      v_state.advance();
    } else if (warp_leader) {
      mbarrier_arrive(base + kQEmptyBarrier + 8 * tile_state.index);
    }
    float out[kHeadDim / 2];
    scale_output(out, o, p, tile);
    row_sum[0] = o[kHeadDim / 2];  // valid in the first lane of each four; the others hold the zeros beside the ones
    row_sum[1] = o[kHeadDim / 2 + 2];
    store_tile(p, tile, tile.first_query + warpgroup * kWarpgroupRows, staging, warpgroup, out, row_max, row_sum);
    tile_state.advance();
  }
  if (warpgroup == 0) bar_sync(kWarpSchedulerBarrier, kWarpSchedulerThreads);  // last turn, which no warpgroup takes
  // Shared memory must outlive the stores that read it.
  if (threadIdx.x % kWarpgroupThreads == 0) tma_store_wait_read<0>();
}
// Fills the rows of the V ring that no copy writes: below V^T of each group of keys, one row of ones, so that P V also
// sums P, and seven of zeros.
__device__ __forceinline__ void write_ones(unsigned char* shared) {
  constexpr int kWords = kSumColumns * kVGroupKeys / 4, kRowWords = kVGroupKeys / 4;  // words of a group, and of a row
  for (int i = threadIdx.x; i < kStages * kVGroups * kWords; i += kThreads) {
    unsigned char* const group = shared + kVOffset + i / kWords * kVGroupBytes;
    reinterpret_cast<uint32*>(group + kHeadDim * kVGroupKeys)[i % kWords] = i % kWords < kRowWords ? 0x38383838u : 0u;
  }
  fence_proxy_async();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    h100_e4m3_block_lists(const __grid_constant__ Params p) {
  // TMA swizzles by address, with a period of 1024 bytes: swizzled buffers are aligned to that.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  // The shuffle proves to the compiler that both are warp-uniform, so values derived from them go to uniform registers
  // (CUTLASS' canonical_warp_idx_sync).
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), warpgroup = warp / kWarpsPerWarpgroup;

  // One thread initializes the barriers.
  if (threadIdx.x == 0) {
    // A full barrier counts one arrival, an empty one an arrival of each warp that reads the
    // buffer. One lane arrives for its warp, after wgmma_wait or __syncwarp:
    // all lanes have finished by then.
    for (int i = 0; i < kTileStages; ++i) {
      mbarrier_init(base + kQFullBarrier + 8 * i, 1);
      mbarrier_init(base + kQEmptyBarrier + 8 * i, kConsumerWarpgroups * kWarpsPerWarpgroup);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kKFullBarrier + 8 * i, 1);
      mbarrier_init(base + kKEmptyBarrier + 8 * i, kConsumerWarpgroups * kWarpsPerWarpgroup);
      mbarrier_init(base + kVFullBarrier + 8 * i, 1);
      mbarrier_init(base + kVEmptyBarrier + 8 * i, kConsumerWarpgroups * kWarpsPerWarpgroup);
    }
    fence_mbarrier_init();
    prefetch_tensormap(&p.q_map);
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
    prefetch_tensormap(&p.o_map);
    // Publish the first tile before the warps split into roles.
    publish_work_tile(p, reinterpret_cast<int*>(shared + kWorkTilesOffset), base, {0u}, first_work_tile(p));
  }
  write_ones(shared);
  __syncthreads();

  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) produce(p, shared, base);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, shared, base, warpgroup - 1);
  }
}
