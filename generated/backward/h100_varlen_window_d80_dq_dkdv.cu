// Generated from specs/backward/h100_varlen_window_d80_dq_dkdv.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/backward/h100_varlen_window_d80_dq_dkdv.yaml
// spec: {"arch":"sm_90a","copy":"tma","dtype":"fp16","gradients":"dq_dkdv","head_dim":80,"layout":"varlen","mma":"wgmma","op":"attention_backward","pattern":{"kind":"sliding_window","left":null,"right":null},"schedule":"cooperative","stages":2,"tile":{"m":64,"n":128}}
// spec hash: f074e4fcec57b4ac1300fe741239518d18c2eaa578e725f110d1fa1500056721
// seal: sha256 7e91fd11ebb05f6b2ff113c3e453d1edd3285bd6411be9d18758095fb51dbb7b

// Attention backward for sm_90a, gradients of Q, K and V
// over the visible keys of the pattern in each sequence:
//   P = exp(scale * Q K^T - LSE),  dS = P (dO V^T - delta),
//   dV = P^T dO,  dK = scale * dS^T Q,  dQ = scale * dS K
// Each thread block accumulates the contributions of all queries to its keys, and adds its part of dQ to an accumulator
// in device memory.
// Thread blocks take turns there, in the order of their tiles: results are bitwise reproducible.
//
// Roles
//   warpgroup 0      warp 0 fills the ring of queries by TMA, and loads K and V. Warps 1 and 2 add to dQ's accumulator,
//                    every other step each: one waits for its addition while the other begins the next.
//   warpgroups 1..   consumers. Each owns 64 keys: S^T = K Q^T and dP^T = V dO^T from shared memory,
//                    dV += P^T dO and dK += dS^T Q with P^T and dS^T in registers, as A operands. dS also goes to
//                    shared memory: dQ^T = K^T dS^T of a step needs all keys of the tile. Each computes half of it.
//
// Barriers (full: the data has arrived; empty: the buffer may be overwritten)
//   kv_full                  K and V of the tile
//   q_full[i], q_empty[i]    stage i of the ring: Q, dO, their statistics and metadata
//   dq_full[i], dq_empty     a step's part of dQ; i: the warp that adds it
//   arrived                  a step that contains the end of a sequence: the producer then clears what is behind
//   dq_semaphore[step]       in device memory: number of tiles that have added their part of the step's dQ
//
// Pipeline of a consumer: the weights are computed while dO's product runs. The products for dV, dQ and dK are issued
// around one barrier, behind each other, and dQ is written while that for dK runs. While a consumer waits for its own
// products, the other warpgroup computes.
//
// Symbols
//   tile        kTileN keys of one K/V head, processed by one thread block
//   step        kTileM queries of one of the heads that share it, in descending order
//   s, dp       S^T and dP^T: 64 keys of the warpgroup x kTileM queries; p_frag, ds_frag: P^T and dS^T in 16 bits
//   A thread holds keys r and r + 8 of its warp's 16 (r = lane / 4), queries 8 j + 2 (lane % 4) + {0, 1}; of dQ^T, it
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
constexpr int kHeadDim = 80;  // elements per head
constexpr int kTileM = 64;  // queries per step
constexpr int kTileN = 128;  // keys of a tile
constexpr int kStages = 2;  // depth of the ring
constexpr int kConsumerWarpgroups = 2;  // warpgroups that compute, 64 keys each
constexpr int kThreads = 384;  // warpgroup 0 produces, the others consume
constexpr int kDqWarps = 2;  // warps that add to dQ
constexpr int kProducerRegisters = 40;  // registers per producer thread
constexpr int kConsumerRegisters = 232;  // registers per consumer thread
constexpr int kGroupColumns = 64;  // columns of a group: one 128-byte swizzled row
constexpr int kGroups = 2;  // column groups per head
constexpr int kQGroupBytes = 8192;  // bytes of one column group of Q, of dO, or of dS
constexpr int kKvGroupBytes = 16384;  // bytes of one column group of K or V
constexpr int kQBytes = 16384;  // bytes of Q, or of dO, of a step
constexpr int kKvBytes = 32768;  // bytes of K, or of V, of a tile
constexpr int kDsBytes = 16384;  // bytes of dS of a step
constexpr int kStatsBytes = 512;  // bytes of the statistics of a step
constexpr int kDqColumnParts = 2;  // parts of 64 columns of dQ, indexed by warpgroup
constexpr int kDqQueries = 64;  // queries of a warpgroup's part of dQ
constexpr int kDqBytes = 20480;  // bytes of a step's dQ, in fp32
constexpr int kDqPartBytes = 16384;  // bytes of the first part of a step's dQ
constexpr int kLastDqThreads = 32;  // threads that have columns of the last part
constexpr int kConvertThreads = 256;  // threads per block of the epilogue
constexpr int kStatsRows = 128;  // rows of a block of statistics: those of the largest tile or step
constexpr int kStatsSpare = 2;  // blocks of statistics of a segment, besides those that its tokens fill
constexpr int kPrologueThreads = 1024;  // threads per block of the prologue
constexpr int kRowLanes = 16;  // threads per row in the prologue, 16 bytes each

// Dynamic shared memory: 185464 bytes. Byte offsets:
constexpr int kKOffset = 0;  // 32768 bytes: K of the tile in column groups; then staging of dK
constexpr int kVOffset = 32768;  // 32768 bytes: V of the tile; then staging of dV
constexpr int kQOffset = 65536;  // 32768 bytes: Q ring
constexpr int kDoutOffset = 98304;  // 32768 bytes: dO ring
constexpr int kDsOffset = 131072;  // 32768 bytes: dS of a step, and of the previous one: column groups of 64 keys
constexpr int kDqOffset = 163840;  // 20480 bytes: staging of a step's part of dQ
constexpr int kStatsOffset = 184320;  // 1024 bytes: statistics of the queries in the ring
constexpr int kBarriersOffset = 185344;  // 64 bytes: mbarriers
constexpr int kTileIndexOffset = 185408;  // 4 bytes: index of the thread block's tile
constexpr int kStepMetaOffset = 185412;  // 8 bytes: metadata of the steps in the ring
constexpr int kSegmentOffset = 185424;  // 28 bytes: segment of the tile
constexpr int kArrivedOffset = 185456;  // 8 bytes: mbarrier of a step that contains the end of a sequence

constexpr int kQFullBarrier = kBarriersOffset;
constexpr int kQEmptyBarrier = kQFullBarrier + 8 * kStages;
constexpr int kKvFullBarrier = kQEmptyBarrier + 8 * kStages;
constexpr int kDqFullBarrier = kKvFullBarrier + 8;
constexpr int kDqEmptyBarrier = kDqFullBarrier + 8 * kDqWarps;
constexpr int kArrivedBarrier = kArrivedOffset;
constexpr int kWarpgroupThreads = 128, kWarpsPerWarpgroup = 4;
constexpr int kWarpgroupRows = 64;  // rows of one wgmma: keys
constexpr int kRowBytes = 128;  // bytes of a row of a column group in shared memory: the span of the swizzle
constexpr int kConsumerBarrier = 1;  // named barrier of all consumers; this + 1 + w: of warpgroup w; 0: __syncthreads
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
constexpr float kLog2E = 1.44269504088896f;

// Launch: 384 threads per block, 185464 bytes of dynamic shared memory.
// Grid: one thread block for each tile.
// Prologue, with the same parameters: h100_varlen_window_d80_dq_dkdv_prologue, 1024 threads per block.
// Epilogue, with the same parameters: h100_varlen_window_d80_dq_dkdv_convert_dq, 256 threads per block.
struct Params {
  TensorMap q_map;  // Q (head_dim, q_len, heads, batch): box 64 x 64 x 1 x 1, swizzle 128
  TensorMap k_map;  // K (head_dim, kv_len, kv_heads, batch): box 64 x 128 x 1 x 1, swizzle 128
  TensorMap v_map;  // V, as K: box 64 x 128 x 1 x 1, swizzle 128
  TensorMap dout_map;  // dO, as Q: box 64 x 64 x 1 x 1, swizzle 128
  TensorMap dk_map;  // dK, as K: box 64 x 64 x 1 x 1, swizzle 128
  TensorMap dv_map;  // dV, as K: box 64 x 64 x 1 x 1, swizzle 128
  unsigned short* dq;  // dQ, as Q
  int64 dq_head_stride;  // head stride, in elements
  int64 dq_row_stride;  // row stride, in elements
  unsigned short* dk;  // dK, as K
  int64 dk_head_stride;  // head stride, in elements
  int64 dk_row_stride;  // row stride, in elements
  unsigned short* dv;  // dV, as K
  int64 dv_head_stride;  // head stride, in elements
  int64 dv_row_stride;  // row stride, in elements
  float* dq_accum;  // sums of dQ, (batch, heads, query_steps, kDqBytes / 4)
  int* dq_semaphore;  // tiles already added to each step of dQ, (batch, heads, query_steps)
  int* scheduler;  // tiles that thread blocks have taken
  int query_steps;  // steps of kTileM queries per head
  int head_group;  // K/V heads whose tiles are interleaved
  int* rising_q;  // cu_seqlens_q, rising and within the tensor
  int* rising_k;  // cu_seqlens_k, rising and within the tensor
  const unsigned short* out;  // O (tokens, heads, head_dim)
  int64 out_head_stride;  // head stride, in elements
  int64 out_row_stride;  // row stride, in elements
  const unsigned short* dout;  // dO, as O
  int64 dout_head_stride;  // head stride, in elements
  int64 dout_row_stride;  // row stride, in elements
  const float* lse;  // log-sum-exp of the forward, (heads, tokens) contiguous
  const float* dlse;  // gradient of the log-sum-exp, as lse; 0 if null
  RowStats* stats;  // statistics of all rows, (heads, padded_q_len)
  const int* cu_seqlens_q;  // bounds of the sequences in q: first tokens, then the end of the last
  const int* cu_seqlens_k;  // bounds of the sequences in k and v
  int window_left;  // keys seen before the query's own position
  int window_right;  // keys seen after the query's own position
  int q_len;  // queries of all sequences
  int kv_len;  // keys of all sequences
  int sequences;  // sequences: one less than cu_seqlens_q has entries
  int padded_q_len;  // rows of statistics per head: all tokens, and at least 128 rows of padding behind each sequence
  int heads;  // query heads
  int heads_per_kv_head;  // query heads per K/V head
  int key_tiles;  // tiles per K/V head
  int head_chunks;  // 16-byte chunks per row of a head
  float scale_log2;  // scale * log2(e); the host checks that it is positive
  float scale;  // the softmax scale
};

// A bound of the segments of the tokens of Q or of K: 0, the bounds of the sequences, clamped to the tensor, and its
// end.
__device__ __forceinline__ int bound_of(const Params& p, const int* bounds, int tokens, int index) {
  if (index < 0 || index > p.sequences) return index < 0 ? 0 : tokens;
  return max(0, min(__ldg(bounds + index), tokens));
}

// A segment of the tokens: a sequence; or what lies before the first one (batch -1) or behind the last one (batch
// p.sequences), where no query sees a key. An end below its begin counts as an empty segment.
struct Segment {
  int batch;
  int q_begin, queries;  // tokens in Q
  int kv_begin, keys;    // and in K
  int visible_keys;
  int stats_begin;       // of the statistics of its first query within a head

  __device__ __forceinline__ Segment(const Params& p, const int* q_bounds, const int* k_bounds, int batch)
      : batch(batch) {
    q_begin = bound_of(p, q_bounds, p.q_len, batch);
    queries = max(bound_of(p, q_bounds, p.q_len, batch + 1) - q_begin, 0);
    kv_begin = bound_of(p, k_bounds, p.kv_len, batch);
    keys = max(bound_of(p, k_bounds, p.kv_len, batch + 1) - kv_begin, 0);
    visible_keys = is_sequence(p) ? keys : 0;
    stats_begin = (q_begin / kStatsRows + (batch + 1) * kStatsSpare) * kStatsRows;
  }
  __device__ __forceinline__ bool is_sequence(const Params& p) const { return 0 <= batch && batch < p.sequences; }
  // Index of a query in a (heads, tokens) tensor.
  __device__ __forceinline__ int64 row(const Params& p, int head, int query) const {
    return static_cast<int64>(head) * p.q_len + q_begin + query;
  }
  // Index of the statistics of the first query. Rows of a segment begin at a multiple of kStatsRows, with at least as
  // many rows of padding behind them, so that tiles and steps read no statistics of the next segment.
  __device__ __forceinline__ int64 stats_row(const Params& p, int head) const {
    return static_cast<int64>(head) * p.padded_q_len + stats_begin;
  }
  // Number of its first step among those of all segments.
  __device__ __forceinline__ int first_step() const { return q_begin / kTileM + batch + 1; }
};

// The segment of the thread block's tile, in shared memory: consumers and producer have no registers for it.
__device__ __forceinline__ Segment& tile_segment() {
  extern __shared__ __align__(1024) unsigned char shared_memory[];  // the kernel's `shared`
  return *reinterpret_cast<Segment*>(shared_memory + kSegmentOffset);
}

// Lengths of that segment, or of another one.
struct SeqlenInfo {
  const Segment& segment;

  __device__ __forceinline__ SeqlenInfo(const Params& p, int batch) : segment(tile_segment()) {}
  __device__ __forceinline__ explicit SeqlenInfo(const Segment& segment) : segment(segment) {}
  // Number of queries.
  __device__ __forceinline__ int q_len() const { return segment.queries; }
  // Number of keys.
  __device__ __forceinline__ int kv_len() const { return segment.keys; }
  // Position of a query among the keys: the last query is at the last key.
  __device__ __forceinline__ int position(int query) const { return query + kv_len() - q_len(); }
  // End of the visible keys.
  __device__ __forceinline__ int kv_end() const { return segment.visible_keys; }
};

// Segment of a tile of `rows` tokens of Q or of K, counted from 0, by binary search. The tiles of segment i begin at
// begin / rows + i * kSpare: enough for its tokens, and at least kSpare - 1 more, which have none.
template <int kSpare>
__device__ __forceinline__ int segment_of_tile(const Params& p, const int* bounds, int tile, int rows) {
  int first = 0, count = p.sequences + 2;  // candidates: first to first + count - 1
  while (count > 1) {
    const int half = count / 2, middle = first + half;
    const bool behind = __ldg(bounds + middle - 1) / rows + middle * kSpare <= tile;
    first = behind ? middle : first;
    count = behind ? count - half : half;
  }
  return first;
}

// First token of a tile, counted within its segment; out of range for tiles without tokens.
template <int kSpare>
__device__ __forceinline__ int first_of_tile(
    const Params& p, const int* bounds, int tokens, int tile, int rows, int segment) {
  const int begin = bound_of(p, bounds, tokens, segment - 1);
  const int first = (tile - (begin / rows + segment * kSpare)) * rows;
  return first < 0 ? 1 << 30 : first;
}

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

// cp.reduce.async.bulk: adds `bytes` bytes of floats in shared memory to those in device memory, elementwise (PTX ISA,
// "cp.reduce.async.bulk")
__device__ __forceinline__ void tma_reduce_add(float* to, uint32 from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
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

// The same without D as an input, so that its registers are free for the compiler until here; A in shared memory, both
// K-major.
__device__ __forceinline__ void wgmma_m64n64k16_shared_k_major_first(float (&d)[32], uint32 a, uint32 b) {
  asm volatile(
      "{\n"
      ".reg .b64 a, b;\n"
      "mov.b64 a, { %32, %34 };\n"
      "mov.b64 b, { %33, %34 };\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, a, b, 0, 1, 1, 0, 0;\n"
      "}\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
        "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]),
        "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]),
        "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31])
      : "r"(a), "r"(b), "n"(kDescriptorUpperHalf));
}

// wgmma.mma_async m64n80k16: D = A B, + D if `accumulate`; A in registers, B MN-major.
// After p come scale factors of 1 for A and B, then whether B is MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n80k16_registers_mn_major(
    float (&d)[40], const uint32 (&a)[4], uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 b;\n"
      "setp.ne.b32 p, %45, 0;\n"
      "mov.b64 b, { %44, %46 };\n"
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39"
      "}, { %40, %41, %42, %43 }, b, p, 1, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf));
}

// wgmma.mma_async m64n64k16: D = A B, + D if `accumulate`; A in shared memory, M-major, B K-major.
// After p come scale factors of 1 for A and B, then whether A and B are MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n64k16_shared_m_major_k_major(
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
      "}, a, b, p, 1, 1, 1, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf));
}

// The same without D as an input, so that its registers are free for the compiler until here; A in shared memory,
// M-major, B K-major.
__device__ __forceinline__ void wgmma_m64n64k16_shared_m_major_k_major_first(float (&d)[32], uint32 a, uint32 b) {
  asm volatile(
      "{\n"
      ".reg .b64 a, b;\n"
      "mov.b64 a, { %32, %34 };\n"
      "mov.b64 b, { %33, %34 };\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, a, b, 0, 1, 1, 1, 0;\n"
      "}\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
        "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]),
        "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]),
        "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31])
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

// stmatrix.x4: stores four 8 x 8 matrices of 16-bit elements; each lane holds one row address (PTX ISA, "stmatrix")
__device__ __forceinline__ void stmatrix_x4(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };"
      ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// stmatrix.x4.trans: stores four 8 x 8 matrices of 16-bit elements, each transposed; each lane holds the address of one
// row in memory, that is, of one column of a matrix (PTX ISA, "stmatrix")
__device__ __forceinline__ void stmatrix_x4_trans(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4 };"
      ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Per-query statistics for the main kernel: log-sum-exp times log2(e), and delta, the sum of dO O over its row
// (FlashAttention's LSE_log2 and dPsum), minus the gradient of the log-sum-exp. A query without keys, or a row that
// pads the queries of a segment, has infinity and 0: its weights are 2^-inf = 0.
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

// Writes bounds of sequences that rise and lie within the tensor: a bound below an earlier one counts as that one.
__device__ __forceinline__ void write_rising(const int* from, int* to, int count, int tokens) {
  __shared__ int of_warps[kPrologueThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (int first = 0; first < count; first += kPrologueThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    int most = i < count ? max(0, min(__ldg(from + i), tokens)) : 0;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFF, most, lanes);
      most = lane >= lanes ? max(most, other) : most;
    }
    if (lane == 31) of_warps[warp] = most;
    __syncthreads();
    most = max(most, before);
    for (int other = 0; other < kPrologueThreads / 32; ++other) {
      before = max(before, of_warps[other]);
      if (other < warp) most = max(most, of_warps[other]);
    }
    if (i < count) to[i] = most;
    __syncthreads();
  }
}

// Statistics: one thread per 16 bytes of a row, kRowLanes adjacent threads per row.
// The first thread block writes the bounds that the main kernel reads.
extern "C" __global__ void __launch_bounds__(kPrologueThreads)
    h100_varlen_window_d80_dq_dkdv_prologue(const __grid_constant__ Params p) {
  if (blockIdx.x == 0) {
    write_rising(p.cu_seqlens_q, p.rising_q, p.sequences + 1, p.q_len);
    write_rising(p.cu_seqlens_k, p.rising_k, p.sequences + 1, p.kv_len);
    return;
  }
  const int64 place = static_cast<int64>(blockIdx.x - 1) * kPrologueThreads + threadIdx.x, row = place / kRowLanes;
  const int chunk = threadIdx.x % kRowLanes, head = row / p.padded_q_len, row_of_head = row % p.padded_q_len;
  if (head >= p.heads) return;  // whole rows: kRowLanes divides a warp
  const int number = segment_of_tile<kStatsSpare>(p, p.cu_seqlens_q, row_of_head / kStatsRows, kStatsRows);
  const Segment segment(p, p.cu_seqlens_q, p.cu_seqlens_k, number - 1);
  const int query = row - segment.stats_row(p, head);
  const bool exists = segment.is_sequence(p) && 0 <= query && query < segment.queries;
  float delta = 0.0f;
  if (exists && chunk < p.head_chunks) {
    const int64 token = segment.q_begin + query;
    const uint4 o =
        *reinterpret_cast<const uint4*>(p.out + head * p.out_head_stride + token * p.out_row_stride + chunk * 8);
    const uint4 d =
        *reinterpret_cast<const uint4*>(p.dout + head * p.dout_head_stride + token * p.dout_row_stride + chunk * 8);
    const uint32 o_pairs[4] = {o.x, o.y, o.z, o.w}, d_pairs[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = unpack(o_pairs[i]), b = unpack(d_pairs[i]);
      delta += a.x * b.x + a.y * b.y;
    }
  }
#pragma unroll
  for (int lanes = kRowLanes / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(0xFFFFFFFF, delta, lanes);
  if (chunk == 0) {
    const float lse = exists ? p.lse[segment.row(p, head, query)] : kMinusInfinity;
    if (exists && p.dlse != nullptr) delta -= p.dlse[segment.row(p, head, query)];
    p.stats[row] = lse > kMinusInfinity ? RowStats{lse * kLog2E, delta} : RowStats{-kMinusInfinity, 0.0f};
  }
}

// Pattern: query i sees the keys from i + diagonal - p.window_left to i + diagonal + p.window_right, with
// diagonal = kv_len - q_len.
struct QueryBlockIterator {
  int count;     // steps of these keys: from the first query that sees one of them to the last one that does
  int first;     // index of the first of them
  int all_from;  // queries from all_from
  int all_to;    // to all_to see all these keys

  __device__ __forceinline__ QueryBlockIterator(const Params& p, int batch, int head, int first_key) {
    const SeqlenInfo seqlen(p, batch);
    const int diagonal = seqlen.position(0), last_key = min(first_key + kTileN, seqlen.kv_len()) - 1;
    const int first_query = max(first_key - diagonal - p.window_right, 0);
    const int last_query = min(last_key - diagonal + p.window_left, seqlen.q_len() - 1);
    all_from = first_key + kTileN - 1 - diagonal - p.window_right;
    all_to = first_key - diagonal + p.window_left;
    first = first_query / kTileM;
    count = last_query >= first_query ? last_query / kTileM - first + 1 : 0;
  }
  // Index of the i-th step, in units of its queries.
  __device__ __forceinline__ int at(int i) { return first + i; }
  // Whether some pair of the i-th step is masked.
  __device__ __forceinline__ bool masked(int i, int step) {
    return step * kTileM < all_from || (step + 1) * kTileM - 1 > all_to;
  }
};

// Whether a query sees an in-range key:
//   kv_idx - (q_idx + kv_len - q_len) >= -window_left and kv_idx - (q_idx + kv_len - q_len) <= window_right
__device__ __forceinline__ bool visible(const Params& p, int batch, int query, int key) {
  const SeqlenInfo seqlen(p, batch);
  const int pair_0 = key - (query + seqlen.kv_len() - seqlen.q_len());
  return (pair_0 >= -p.window_left) & (pair_0 <= p.window_right);
}

// A thread block's tile: keys of one K/V head. The heads of a group are interleaved: their working set stays in the L2,
// and the consecutive tiles of one head start one after another.
struct Tile {
  int number, first_key, kv_head, batch;  // number: index within its segment

  __device__ __forceinline__ Tile(const Params& p, int index) {
    const int group = index / (p.head_group * p.key_tiles), in_group = index % (p.head_group * p.key_tiles);
    const int heads = min(p.head_group, p.heads / p.heads_per_kv_head - group * p.head_group);
    const int key_tile = in_group / heads;
    kv_head = group * p.head_group + in_group % heads;
    batch = segment_of_tile<1>(p, p.rising_k, key_tile, kTileN) - 1;
    first_key = first_of_tile<1>(p, p.rising_k, p.kv_len, key_tile, kTileN, batch + 1);
    number = first_key / kTileN;
  }
};

// cp.async.bulk: copies `bytes` bytes from shared to device memory; all three are multiples of 16 (PTX ISA,
// "cp.async.bulk")
__device__ __forceinline__ void tma_store_bytes(void* to, uint32 from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
      ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

// cp.async.bulk.wait_group: at most kPending groups are still incomplete (PTX ISA, "cp.async.bulk.wait_group")
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// fence.proxy.async: orders generic accesses of device memory and the async proxy's (PTX ISA, "membar / fence")
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ld.acquire.gpu: writes of the thread that stored this value with a release are visible after it (PTX ISA, "ld")
__device__ __forceinline__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// st.release.gpu: a thread that loads this value with an acquire sees everything visible to this thread (PTX ISA, "st")
__device__ __forceinline__ void store_release(int* to, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// The tiles that contribute to dQ of a step: from the one with the first key visible to its first query to the one with
// the last key visible to its last query (last < first: none). They add their parts in index order.
struct AddingTiles {
  int first, last;

  __device__ __forceinline__ AddingTiles(const Params& p, const SeqlenInfo& seqlen, int step) {
    const int diagonal = seqlen.position(0), last_query = min((step + 1) * kTileM, seqlen.q_len()) - 1;
    const int last_key = min(last_query + diagonal + p.window_right, seqlen.kv_end() - 1);
    first = max(step * kTileM + diagonal - p.window_left, 0) / kTileN;
    last = last_key < 0 ? -1 : last_key / kTileN;
  }
};

// The turn of a tile among the additions to dQ of a step.
struct Turn {
  int number;    // number of parts before this one
  bool is_last;  // whether no part comes after it

  __device__ __forceinline__ Turn(const Params& p, int batch, int step, int tile) {
    const AddingTiles tiles(p, SeqlenInfo(p, batch), step);
    number = tile - tiles.first;
    is_last = tile == tiles.last;
  }
};

// Index of the thread block's tile, returned to all its threads after a barrier. Thread blocks need not start in the
// order of their own indices, so they draw tiles in the order in which these add to dQ. A tile that waits for its turn
// then waits only for tiles drawn before it.
__device__ __forceinline__ int take_tile(const Params& p, unsigned char* shared) {
  int* index = reinterpret_cast<int*>(shared + kTileIndexOffset);
  if (threadIdx.x == 0) {
    *index = atomicAdd(p.scheduler, 1);
    if (*index == gridDim.x - 1) *p.scheduler = 0;  // for the next launch
  }
  __syncthreads();
  return *index;
}

// Whether the accumulator holds a sum for a step: it is undefined for steps that no tile sees.
__device__ __forceinline__ bool has_sum(const Params& p, const SeqlenInfo& seqlen, int step) {
  const AddingTiles tiles(p, seqlen, step);
  return tiles.first <= tiles.last;
}

// Adds a tile's part of a step's dQ when its turn has come. The first part is stored, so the accumulator need not be
// cleared. The addition must have completed before the next tile may begin its own.
__device__ __forceinline__ void add_part(const Params& p, uint32 base, const Tile& tile, int step, int64 place) {
  const Turn turn(p, tile.batch, step, tile.number);
  float* to = p.dq_accum + place * (kTileM * kHeadDim);
  if (turn.number == 0) {
    tma_store_bytes(to, base + kDqOffset, kDqBytes);
  } else {
    while (load_acquire(p.dq_semaphore + place) != turn.number) {
    }
    fence_proxy_async_global();  // makes the previous parts visible to the async proxy
    tma_reduce_add(to, base + kDqOffset, kDqBytes);
  }
  tma_store_commit();
  tma_store_wait_read<0>();
  mbarrier_arrive(base + kDqEmptyBarrier);
  tma_store_wait<0>();
  fence_proxy_async_global();
  store_release(p.dq_semaphore + place, turn.is_last ? 0 : turn.number + 1);  // 0: for the next launch
}

// Zero-fills the rows of an operand in shared memory from index `first` on, and those of an equal operand kOther bytes
// behind it, if not 0. Called by a whole warp.
template <int kRows, int kGroupBytes, int kOther = 0>
__device__ __forceinline__ void clear_rows(unsigned char* operand, int first) {
#pragma unroll 1
  for (int i = max(first, 0) * kRowBytes + threadIdx.x % 32 * 16; i < kRows * kRowBytes; i += 32 * 16) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      *reinterpret_cast<uint4*>(operand + group * kGroupBytes + i) = {0, 0, 0, 0};
      if (kOther != 0) *reinterpret_cast<uint4*>(operand + group * kGroupBytes + kOther + i) = {0, 0, 0, 0};
    }
  }
}

// Hands a stage that a warp has changed to the consumers. Called by the whole warp.
__device__ __forceinline__ void hand_over(uint32 full) {
  fence_proxy_async();  // products see the changes
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
}

// Copies rows from index `row` on of an operand, a box of its tensor map in each column group.
template <int kGroupBytes>
__device__ __forceinline__ void load_rows(uint32 to, const TensorMap* map, uint32 barrier, int row, int head,
    int batch) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    tma_load_4d(to + group * kGroupBytes, map, barrier, group * kGroupColumns, row, head, batch);
  }
}

// Producer: one warp. The first lane copies, all lanes clear what a step contains behind the end of the sequence.
// Steps come head by head, in descending order.
__device__ __forceinline__ void produce(const Params& p, unsigned char* shared, uint32 base, const Tile& tile) {
  const bool leader = threadIdx.x % 32 == 0;
  const Segment& segment = tile_segment();
  if (leader) {
    const uint32 full = base + kKvFullBarrier;
    const int row = segment.kv_begin + tile.first_key;
    mbarrier_arrive_expect_tx(full, 2 * kKvBytes);
    load_rows<kKvGroupBytes>(base + kKOffset, &p.k_map, full, row, tile.kv_head, 0);
    load_rows<kKvGroupBytes>(base + kVOffset, &p.v_map, full, row, tile.kv_head, 0);
  }
  int* step_meta = reinterpret_cast<int*>(shared + kStepMetaOffset);  // a step's first query, complemented if masked
  uint32 steps = 0;
  int arrived_phase = 0;  // of the barrier of steps that contain the end of the queries
  for (int i = 0; i < (tile.first_key < SeqlenInfo(p, tile.batch).kv_end() ? p.heads_per_kv_head : 0); ++i) {
    const int head = tile.kv_head * p.heads_per_kv_head + i;
    QueryBlockIterator blocks(p, tile.batch, head, tile.first_key);
#pragma unroll 1
    for (int j = blocks.count - 1; j >= 0; --j, ++steps) {
      const int stage = steps % kStages, step = blocks.at(j), first_query = step * kTileM;
      const uint32 full = base + kQFullBarrier + 8 * stage;
      const int queries = segment.queries - first_query;  // from the step's first to the last of the sequence
      const uint32 arrived = queries < kTileM ? base + kArrivedBarrier : full;
      if (leader) {
        mbarrier_wait(base + kQEmptyBarrier + 8 * stage, steps / kStages % 2 ^ 1);
        step_meta[stage] = blocks.masked(j, step) ? ~first_query : first_query;
        const int row = segment.q_begin + first_query;
        mbarrier_arrive_expect_tx(arrived, 2 * kQBytes + kStatsBytes);
        load_rows<kQGroupBytes>(base + kQOffset + stage * kQBytes, &p.q_map, arrived, row, head, 0);
        load_rows<kQGroupBytes>(base + kDoutOffset + stage * kQBytes, &p.dout_map, arrived, row, head, 0);
        const RowStats* stats = p.stats + segment.stats_row(p, head);
        tma_load_bytes(base + kStatsOffset + stage * kStatsBytes, stats + first_query, kStatsBytes, arrived);
      }
      if (queries < kTileM) {
        mbarrier_wait(arrived, arrived_phase);
        arrived_phase ^= 1;
        clear_rows<kTileM, kQGroupBytes, kDoutOffset - kQOffset>(shared + kQOffset + stage * kQBytes, queries);
        hand_over(full);
      }
      __syncwarp();
    }
  }
}

// Adds the tile's parts of dQ to the accumulator, for every other step: one warp of two.
__device__ __forceinline__ void add_dq(const Params& p, uint32 base, const Tile& tile, int warp) {
  if (threadIdx.x % 32 != 0) return;
  const uint32 full = base + kDqFullBarrier + 8 * warp;
  uint32 steps = 0;
  for (int i = 0; i < (tile.first_key < SeqlenInfo(p, tile.batch).kv_end() ? p.heads_per_kv_head : 0); ++i) {
    const int head = tile.kv_head * p.heads_per_kv_head + i;
    QueryBlockIterator blocks(p, tile.batch, head, tile.first_key);
#pragma unroll 1
    for (int j = blocks.count - 1; j >= 0; --j, ++steps) {
      if (steps % kDqWarps != warp) continue;
      const int step = blocks.at(j);
      mbarrier_wait(full, steps / kDqWarps % 2);
      // Location of the step's part in the accumulator.
      const int64 place = static_cast<int64>(head) * p.query_steps + tile_segment().first_step() + step;
      add_part(p, base, tile, step, place);
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
      wgmma_m64n64k16_shared_k_major_first(d, keys, queries);
    } else {
      wgmma_m64n64k16_shared_k_major(d, keys, queries, 1);
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
    wgmma_m64n80k16_registers_mn_major(d, a[k], b + (k * 16 * kRowBytes >> 4), 1);
  }
  wgmma_commit();
  warpgroup_fence_operand(d);
}

// Masks the pairs of a step that the pattern excludes. `key` and `query` are this thread's first.
__device__ __forceinline__ void apply_mask(float (&s)[kTileM / 2], const Params& p, int batch, int key, int query) {
#pragma unroll
  for (int i = 0; i < kTileM / 2; ++i) {
    if (!visible(p, batch, query + i / 4 * 8 + i % 2, key + i / 2 % 2 * 8)) s[i] = kMinusInfinity;
  }
}

// P^T: the weights of a step, in place, and packed to 16 bits. The accumulator layout of S^T is the A-operand layout.
__device__ __forceinline__ void weights(uint32 (&p_frag)[kTileM / 16][4], float (&s)[kTileM / 2],
    const RowStats* stats, float scale_log2) {
#pragma unroll
  for (int k = 0; k < kTileM / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = k * 16 + i / 2 * 8, at = k * 8 + i * 2;
      s[at] = ex2(s[at] * scale_log2 - stats[query].lse_log2);
      s[at + 1] = ex2(s[at + 1] * scale_log2 - stats[query + 1].lse_log2);
      p_frag[k][i] = pack(s[at], s[at + 1]);
    }
  }
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

// Writes a warpgroup's 64 rows of dK or dV over its rows of K or V, which are no longer needed (128-byte swizzle, as
// TMA expects).
__device__ __forceinline__ void stage_gradient(uint32 staging, const float (&d)[kHeadDim / 2], float factor) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % kWarpsPerWarpgroup * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < kHeadDim / 16; ++j) {
    const int chunk = j % 4 * 2 + lane / 16;  // 16 bytes = 8 columns; swizzled to chunk ^ row % 8
    const uint32 to = staging + j / 4 * kKvGroupBytes + row * kRowBytes + (chunk ^ row % 8) * 16;
    stmatrix_x4(to, pack(d[j * 8] * factor, d[j * 8 + 1] * factor), pack(d[j * 8 + 2] * factor, d[j * 8 + 3] * factor),
        pack(d[j * 8 + 4] * factor, d[j * 8 + 5] * factor), pack(d[j * 8 + 6] * factor, d[j * 8 + 7] * factor));
  }
}

// Stores the first `rows` rows of a warpgroup from its staging buffer, 16 bytes per access. A TMA store of the whole
// box would overwrite the next sequence.
__device__ __forceinline__ void store_rows(unsigned short* to, int64 row_stride, int rows, int head_chunks,
    const unsigned char* staging, int group_bytes) {
  constexpr int kRowChunks = kHeadDim / 8, kGroupChunks = kGroupColumns / 8;
#pragma unroll 1
  for (int i = threadIdx.x % kWarpgroupThreads; i < rows * kRowChunks; i += kWarpgroupThreads) {
    const int row = i / kRowChunks, chunk = i % kRowChunks;
    if (chunk >= head_chunks) continue;
    const int place = chunk / kGroupChunks * group_bytes + row * kRowBytes + (chunk % kGroupChunks ^ row % 8) * 16;
    *reinterpret_cast<uint4*>(to + row * row_stride + chunk * 8) = *reinterpret_cast<const uint4*>(staging + place);
  }
}

// Masks keys from index `keys` on, counted from this thread's first one: they would contribute to dQ.
__device__ __forceinline__ void hide_keys(float (&s)[kTileM / 2], int keys) {
#pragma unroll
  for (int i = 0; i < kTileM / 2; ++i) {
    if (i / 2 % 2 * 8 >= keys) s[i] = kMinusInfinity;
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
      wgmma_m64n64k16_shared_m_major_k_major_first(d, a, b);
    } else {
      wgmma_m64n64k16_shared_m_major_k_major(d, a, b, 1);
    }
  }
  wgmma_commit();
  warpgroup_fence_operand(d);
}

// Stages it in the layout of the accumulator: 16 bytes of each thread, next to those of its neighbors. The last part
// has columns of the first threads only: those of the others are zeros behind the head.
__device__ __forceinline__ void stage_dq(unsigned char* staging, const float (&d)[kDqQueries / 2], int part) {
  const int threads = part < kDqColumnParts - 1 ? kWarpgroupThreads : kLastDqThreads;
  const int thread = threadIdx.x % kWarpgroupThreads;
  if (thread >= threads) return;
#pragma unroll
  for (int j = 0; j < kDqQueries / 8; ++j) {
    float4* to = reinterpret_cast<float4*>(staging + part * kDqPartBytes) + j * threads + thread;
    *to = make_float4(d[j * 4], d[j * 4 + 1], d[j * 4 + 2], d[j * 4 + 3]);
  }
}

// Consumer: one warpgroup computes 64 keys of the tile.
__device__ __forceinline__ void consume(const Params& p, unsigned char* shared, uint32 base, const Tile& tile,
    int warpgroup) {
  const int lane = threadIdx.x % 32;
  int count = 0;
  for (int i = 0; i < (tile.first_key < SeqlenInfo(p, tile.batch).kv_end() ? p.heads_per_kv_head : 0); ++i) {
    count += QueryBlockIterator(p, tile.batch, tile.kv_head * p.heads_per_kv_head + i, tile.first_key).count;
  }
  const uint32 my_rows = warpgroup * kWarpgroupRows * kRowBytes;
  // The shuffles keep the compiler from recomputing the descriptors in each step.
  const uint32 k_descriptor = __shfl_sync(0xFFFFFFFF, wgmma_descriptor(base + kKOffset + my_rows, 0), 0);
  const uint32 v_descriptor = __shfl_sync(0xFFFFFFFF, wgmma_descriptor(base + kVOffset + my_rows, 0), 0);
  const uint32 q_descriptors = __shfl_sync(0xFFFFFFFF, wgmma_descriptor(base + kQOffset, 0), 0);
  const uint32 dout_descriptors = __shfl_sync(0xFFFFFFFF, wgmma_descriptor(base + kDoutOffset, 0), 0);
  const uint32 k_transposed = __shfl_sync(0xFFFFFFFF,
      wgmma_descriptor(base + kKOffset + warpgroup % kDqColumnParts * kKvGroupBytes, 0), 0);
  const uint32 ds_descriptors = __shfl_sync(0xFFFFFFFF,
      wgmma_descriptor(base + kDsOffset + warpgroup / kDqColumnParts * kDqQueries * kRowBytes, 0), 0);
  const uint32 mn_major = wgmma_descriptor(0, kQGroupBytes);  // added to a descriptor for an MN-major operand
  const int* step_meta = reinterpret_cast<const int*>(shared + kStepMetaOffset);
  const int key = tile.first_key + warpgroup * kWarpgroupRows + threadIdx.x / 32 % kWarpsPerWarpgroup * 16 + lane / 4;
  float dk[kHeadDim / 2] = {}, dv[kHeadDim / 2] = {};
  warpgroup_fence_operand(dk);
  warpgroup_fence_operand(dv);
  mbarrier_wait(base + kKvFullBarrier, 0);
  const int keys_there = tile_segment().visible_keys - tile.first_key;
  if (keys_there < kTileN) clear_hidden_rows(shared, max(keys_there, 0), warpgroup);
#pragma unroll 1
  for (uint32 i = 0; i < count; ++i) {
    const int stage = i % kStages;
    const uint32 q_descriptor = q_descriptors + (stage * kQBytes >> 4);
    const uint32 dout_descriptor = dout_descriptors + (stage * kQBytes >> 4);
    const RowStats* stats =
        reinterpret_cast<const RowStats*>(shared + kStatsOffset + stage * kStatsBytes) + lane % 4 * 2;
    float s[kTileM / 2], dp[kTileM / 2];
    uint32 p_frag[kTileM / 16][4], ds_frag[kTileM / 16][4];
    mbarrier_wait(base + kQFullBarrier + 8 * stage, i / kStages % 2);
    issue_scores(s, k_descriptor, q_descriptor);
    issue_scores(dp, v_descriptor, dout_descriptor);
    wgmma_wait<1>();
    warpgroup_fence_operand(s);
    const int meta = step_meta[stage];
    if (meta < 0) apply_mask(s, p, tile.batch, key, ~meta + lane % 4 * 2);
    const int tile_keys = tile_segment().visible_keys - tile.first_key;
    if (tile_keys < kTileN) {
      hide_keys(s, tile_keys - (warpgroup * kWarpgroupRows + threadIdx.x / 32 % kWarpsPerWarpgroup * 16 + lane / 4));
    }
    weights(p_frag, s, stats, p.scale_log2);
    wgmma_wait<0>();
    warpgroup_fence_operand(dp);
    score_gradients(ds_frag, s, dp, stats);
    // One barrier per step is enough, because dS has two buffers: a warpgroup that gets here has finished dQ of the
    // previous step.
    const int ds_place = i % 2 * kDsBytes;
    stage_score_gradients(base + kDsOffset + ds_place + warpgroup * kQGroupBytes, ds_frag);
    issue_gradient(dv, p_frag, dout_descriptor | mn_major);
    fence_proxy_async();
    bar_sync(kConsumerBarrier, kConsumerWarpgroups * kWarpgroupThreads);
    float dq[kDqQueries / 2];
    issue_dq(dq, k_transposed, ds_descriptors + (ds_place >> 4));
    issue_gradient(dk, ds_frag, q_descriptor | mn_major);
    wgmma_wait<1>();
    warpgroup_fence_operand(dv);
    warpgroup_fence_operand(dq);
    mbarrier_wait(base + kDqEmptyBarrier, i % 2 ^ 1);
    stage_dq(shared + kDqOffset, dq, warpgroup);
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(base + kDqFullBarrier + i % kDqWarps * 8);
    wgmma_wait<0>();
    warpgroup_fence_operand(dv);
    warpgroup_fence_operand(dk);
    mbarrier_arrive(base + kQEmptyBarrier + 8 * stage);
  }

  // Keys that no query sees have no steps, and masked keys no weight: their gradients are 0. All warpgroups have
  // finished with K.
  bar_sync(kConsumerBarrier, kConsumerWarpgroups * kWarpgroupThreads);
  stage_gradient(base + kKOffset + my_rows, dk, p.scale);
  stage_gradient(base + kVOffset + my_rows, dv, 1.0f);
  fence_proxy_async();
  bar_sync(kConsumerBarrier + 1 + warpgroup, kWarpgroupThreads);
  const Segment& segment = tile_segment();
  const int first_row = tile.first_key + warpgroup * kWarpgroupRows, rows = segment.keys - first_row;
  const int64 token = segment.kv_begin + first_row;
  if (rows < kWarpgroupRows) {
    store_rows(p.dk + tile.kv_head * p.dk_head_stride + token * p.dk_row_stride, p.dk_row_stride, rows, p.head_chunks,
        shared + kKOffset + my_rows, kKvGroupBytes);
    store_rows(p.dv + tile.kv_head * p.dv_head_stride + token * p.dv_row_stride, p.dv_row_stride, rows, p.head_chunks,
        shared + kVOffset + my_rows, kKvGroupBytes);
  } else if (threadIdx.x % kWarpgroupThreads == 0) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const uint32 from = base + my_rows + group * kKvGroupBytes;
      const int column = group * kGroupColumns;
      tma_store_4d(&p.dk_map, from + kKOffset, column, token, tile.kv_head, 0);
      tma_store_4d(&p.dv_map, from + kVOffset, column, token, tile.kv_head, 0);
    }
    tma_store_commit();
    tma_store_wait_read<0>();  // shared memory must outlive the stores that read it
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    h100_varlen_window_d80_dq_dkdv(const __grid_constant__ Params p) {
  // TMA swizzles by address, with a period of 1024 bytes: swizzled buffers are aligned to that.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  // The shuffle proves to the compiler that both are warp-uniform, so values derived from them go to uniform registers
  // (CUTLASS' canonical_warp_idx_sync).
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), warpgroup = warp / kWarpsPerWarpgroup;
  if (threadIdx.x == 0) {
    mbarrier_init(base + kKvFullBarrier, 1);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kQFullBarrier + 8 * i, 1);
      mbarrier_init(base + kQEmptyBarrier + 8 * i, kConsumerWarpgroups * kWarpgroupThreads);
    }
    for (int i = 0; i < kDqWarps; ++i) {
      mbarrier_init(base + kDqFullBarrier + 8 * i, kConsumerWarpgroups * kWarpsPerWarpgroup);
    }
    mbarrier_init(base + kDqEmptyBarrier, 1);
    mbarrier_init(base + kArrivedBarrier, 1);
    fence_mbarrier_init();
    prefetch_tensormap(&p.q_map);
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
    prefetch_tensormap(&p.dout_map);
    prefetch_tensormap(&p.dk_map);
    prefetch_tensormap(&p.dv_map);
  }
  const Tile tile(p, take_tile(p, shared));
  if (threadIdx.x == 0) tile_segment() = Segment(p, p.rising_q, p.rising_k, tile.batch);
  __syncthreads();
  if (tile.first_key >= tile_segment().keys) return;  // a tile without keys
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) {
      produce(p, shared, base, tile);
    } else if (warp <= kDqWarps) {
      add_dq(p, base, tile, warp - 1);
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, shared, base, tile, warpgroup - 1);
  }
}

// dQ from its accumulator, times the softmax scale, in 16 bits: one thread block per step. Steps that no tile sees are
// zero-filled.
extern "C" __global__ void __launch_bounds__(kConvertThreads)
    h100_varlen_window_d80_dq_dkdv_convert_dq(const __grid_constant__ Params p) {
  constexpr int kPadding = 8;  // padding of a row in shared memory: eight rows start in different banks
  constexpr int kRowChunks = kHeadDim / 8;  // 16 bytes each
  __shared__ __align__(16) unsigned short rows[kTileM][kHeadDim + kPadding];
  const int head = blockIdx.x / p.query_steps, number = blockIdx.x % p.query_steps;  // of a step in all segments
  const int batch = segment_of_tile<1>(p, p.rising_q, number, kTileM) - 1;
  const Segment segment(p, p.rising_q, p.rising_k, batch);
  const SeqlenInfo seqlen(segment);
  const int step = number - segment.first_step();
  if (step * kTileM >= segment.queries) return;
  const bool added = has_sum(p, seqlen, step);
  const float4* from = reinterpret_cast<const float4*>(p.dq_accum) + static_cast<int64>(blockIdx.x) * (kDqBytes / 16);
  for (int i = threadIdx.x; i < kDqBytes / 16; i += kConvertThreads) {
    // The layout of stage_dq: by warpgroup, by 8 queries, by thread.
    const int part = i >= kDqPartBytes / 16, place = i - part * (kDqPartBytes / 16);
    const int threads = part < kDqColumnParts - 1 ? kWarpgroupThreads : kLastDqThreads;
    const int thread = place % threads, lane = thread % 32;
    const int column = part * 64 + thread / 32 * 16 + lane / 4, query = place / threads * 8 + lane % 4 * 2;
    const float4 found = added ? from[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const uint32 left = pack(found.x * p.scale, found.y * p.scale), right = pack(found.z * p.scale, found.w * p.scale);
    rows[query][column] = left;
    rows[query + 1][column] = left >> 16;
    rows[query][column + 8] = right;
    rows[query + 1][column + 8] = right >> 16;
  }
  __syncthreads();
  unsigned short* to = p.dq + head * p.dq_head_stride + segment.q_begin * p.dq_row_stride;
  for (int i = threadIdx.x; i < kTileM * kRowChunks; i += kConvertThreads) {
    const int query = step * kTileM + i / kRowChunks, chunk = i % kRowChunks;
    if (query >= seqlen.q_len() || chunk >= p.head_chunks) continue;
    *reinterpret_cast<uint4*>(to + query * p.dq_row_stride + chunk * 8) =
        *reinterpret_cast<const uint4*>(&rows[i / kRowChunks][chunk * 8]);
  }
}
