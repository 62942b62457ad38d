// Generated from specs/backward/h100_varlen_window_dkdv.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/backward/h100_varlen_window_dkdv.yaml
// spec: {"arch":"sm_90a","copy":"tma","dtype":"fp16","gradients":"dkdv","head_dim":128,"layout":"varlen","mma":"wgmma","op":"attention_backward","pattern":{"kind":"sliding_window","left":null,"right":null},"schedule":"cooperative","stages":3,"tile":{"m":80,"n":128}}
// spec hash: edff884720157f9ffa0d02be79c89cb96f8271a04c9084e7047722c667c7b401
// seal: sha256 3e87e9cc1ac481bf641add7a4dbf4d7ab52709d82c311e12ecd5d9d1ec7d57e1

// Attention backward for sm_90a, gradients of K and V
// over the visible keys of the pattern in each sequence:
//   P = exp(scale * Q K^T - LSE),  dS = P (dO V^T - delta),  dV = P^T dO,  dK = scale * dS^T Q
// Each thread block accumulates the contributions of all queries to its keys, in a fixed order and without
// floating-point atomics: results are bitwise reproducible.
//
// Roles
//   warpgroup 0      producer. Warp 0 fills the ring of queries by TMA, and loads K and V.
//   warpgroups 1..   consumers. Each owns 64 keys: S^T = K Q^T and dP^T = V dO^T from shared memory,
//                    dV += P^T dO and dK += dS^T Q with P^T and dS^T in registers, as A operands.
//
// Barriers (full: the data has arrived; empty: the buffer may be overwritten)
//   kv_full                  K and V of the tile
//   q_full[i], q_empty[i]    stage i of the ring: Q, dO, their statistics and metadata
//   arrived                  a step that contains the end of a sequence: the producer then clears what is behind
//
// Pipeline of a consumer: the weights are computed while dO's product runs, and dS while the product for dV runs. While
// a consumer waits for its own products, the other warpgroup computes.
//
// Symbols
//   tile        kTileN keys of one K/V head, processed by one thread block
//   step        kTileM queries of one of the heads that share it
//   s, dp       S^T and dP^T: 64 keys of the warpgroup x kTileM queries; p_frag, ds_frag: P^T and dS^T in 16 bits
//   A thread holds keys r and r + 8 of its warp's 16 (r = lane / 4), queries 8 j + 2 (lane % 4) + {0, 1}.

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
constexpr int kTileM = 80;  // queries per step
constexpr int kTileN = 128;  // keys of a tile
constexpr int kStages = 3;  // depth of the ring
constexpr int kConsumerWarpgroups = 2;  // warpgroups that compute, 64 keys each
constexpr int kThreads = 384;  // warpgroup 0 produces, the others consume
constexpr int kProducerRegisters = 24;  // registers per producer thread
constexpr int kConsumerRegisters = 240;  // registers per consumer thread
constexpr int kGroupColumns = 64;  // columns of a group: one 128-byte swizzled row
constexpr int kGroups = 2;  // column groups of a head
constexpr int kQGroupBytes = 10240;  // bytes of one column group of Q, or of dO
constexpr int kKvGroupBytes = 16384;  // bytes of one column group of K or V
constexpr int kQBytes = 20480;  // bytes of Q, or of dO, of a step
constexpr int kKvBytes = 32768;  // bytes of K, or of V, of a tile
constexpr int kStatsBytes = 640;  // bytes of the statistics of a step
constexpr int kStatsRows = 128;  // rows of a block of statistics: those of the largest tile or step
constexpr int kStatsSpare = 2;  // blocks of statistics of a segment, besides those that its tokens fill
constexpr int kPrologueThreads = 1024;  // threads per block of the prologue
constexpr int kRowLanes = 16;  // threads per row in the prologue, 16 bytes each

// Dynamic shared memory: 190448 bytes. Byte offsets:
constexpr int kKOffset = 0;  // 32768 bytes: K of the tile in column groups; then staging of dK
constexpr int kVOffset = 32768;  // 32768 bytes: V of the tile; then staging of dV
constexpr int kQOffset = 65536;  // 61440 bytes: Q ring
constexpr int kDoutOffset = 126976;  // 61440 bytes: dO ring
constexpr int kStatsOffset = 188416;  // 1920 bytes: statistics of the queries in the ring
constexpr int kBarriersOffset = 190336;  // 56 bytes: mbarriers
constexpr int kStepMetaOffset = 190392;  // 12 bytes: metadata of the steps in the ring
constexpr int kSegmentOffset = 190408;  // 28 bytes: segment of the tile
constexpr int kArrivedOffset = 190440;  // 8 bytes: mbarrier of a step that contains the end of a sequence

constexpr int kQFullBarrier = kBarriersOffset;
constexpr int kQEmptyBarrier = kQFullBarrier + 8 * kStages;
constexpr int kKvFullBarrier = kQEmptyBarrier + 8 * kStages;
constexpr int kArrivedBarrier = kArrivedOffset;
constexpr int kWarpgroupThreads = 128, kWarpsPerWarpgroup = 4;
constexpr int kWarpgroupRows = 64;  // rows of one wgmma: keys
constexpr int kRowBytes = 128;  // bytes of a row of a column group in shared memory: the span of the swizzle
constexpr int kWarpgroupBarrier = 1;  // named barrier of consumer warpgroup w: this + w; 0 is __syncthreads
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
constexpr float kLog2E = 1.44269504088896f;

// Launch: 384 threads per block, 190448 bytes of dynamic shared memory.
// Grid: one thread block for each tile.
// Prologue, with the same parameters: h100_varlen_window_dkdv_prologue, 1024 threads per block.
struct Params {
  TensorMap q_map;  // Q (head_dim, q_len, heads, batch): box 64 x 80 x 1 x 1, swizzle 128
  TensorMap k_map;  // K (head_dim, kv_len, kv_heads, batch): box 64 x 128 x 1 x 1, swizzle 128
  TensorMap v_map;  // V, as K: box 64 x 128 x 1 x 1, swizzle 128
  TensorMap dout_map;  // dO, as Q: box 64 x 80 x 1 x 1, swizzle 128
  TensorMap dk_map;  // dK, as K: box 64 x 64 x 1 x 1, swizzle 128
  TensorMap dv_map;  // dV, as K: box 64 x 64 x 1 x 1, swizzle 128
  unsigned short* dk;  // dK, as K
  int64 dk_head_stride;  // head stride, in elements
  int64 dk_row_stride;  // row stride, in elements
  unsigned short* dv;  // dV, as K
  int64 dv_head_stride;  // head stride, in elements
  int64 dv_row_stride;  // row stride, in elements
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

// wgmma.mma_async m64n80k16: D = A B, + D if `accumulate`; A in shared memory, K-major, B K-major.
// After p come scale factors of 1 for A and B, then whether A and B are MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n80k16_shared_k_major(
    float (&d)[40], uint32 a, uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %42, 0;\n"
      "mov.b64 a, { %40, %43 };\n"
      "mov.b64 b, { %41, %43 };\n"
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39"
      "}, a, b, p, 1, 1, 0, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf));
}

// The same without D as an input, so that its registers are free for the compiler until here; A in shared memory, both
// K-major.
__device__ __forceinline__ void wgmma_m64n80k16_shared_k_major_first(float (&d)[40], uint32 a, uint32 b) {
  asm volatile(
      "{\n"
      ".reg .b64 a, b;\n"
      "mov.b64 a, { %40, %42 };\n"
      "mov.b64 b, { %41, %42 };\n"
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39"
      "}, a, b, 0, 1, 1, 0, 0;\n"
      "}\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
        "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]),
        "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]),
        "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31]),
        "=f"(d[32]), "=f"(d[33]), "=f"(d[34]), "=f"(d[35]), "=f"(d[36]), "=f"(d[37]), "=f"(d[38]), "=f"(d[39])
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

// Statistics: one thread per 16 bytes of a row, kRowLanes adjacent threads per row.
extern "C" __global__ void __launch_bounds__(kPrologueThreads)
    h100_varlen_window_dkdv_prologue(const __grid_constant__ Params p) {
  const int64 place = static_cast<int64>(blockIdx.x) * kPrologueThreads + threadIdx.x, row = place / kRowLanes;
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

// A thread block's tile: keys of one K/V head. Consecutive tiles belong to the same head: they read the same queries
// from the L2.
struct Tile {
  int first_key, kv_head, batch;

  __device__ __forceinline__ explicit Tile(const Params& p) {
    const int index = blockIdx.x, key_tile = index % p.key_tiles;
    kv_head = index / p.key_tiles;
    batch = segment_of_tile<1>(p, p.cu_seqlens_k, key_tile, kTileN) - 1;
    first_key = first_of_tile<1>(p, p.cu_seqlens_k, p.kv_len, key_tile, kTileN, batch + 1);
  }
};

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
// Steps come head by head.
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
    for (int j = 0; j < blocks.count; ++j, ++steps) {
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
      wgmma_m64n80k16_shared_k_major_first(d, keys, queries);
    } else {
      wgmma_m64n80k16_shared_k_major(d, keys, queries, 1);
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

// Consumer: one warpgroup computes 64 keys of the tile.
__device__ __forceinline__ void consume(const Params& p, unsigned char* shared, uint32 base, const Tile& tile,
    int warpgroup) {
  const int lane = threadIdx.x % 32;
  const bool warp_leader = lane == 0;
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
  const uint32 mn_major = wgmma_descriptor(0, kQGroupBytes);  // added to a descriptor for an MN-major operand
  const int* step_meta = reinterpret_cast<const int*>(shared + kStepMetaOffset);
  const int key = tile.first_key + warpgroup * kWarpgroupRows + threadIdx.x / 32 % kWarpsPerWarpgroup * 16 + lane / 4;
  float dk[kHeadDim / 2] = {}, dv[kHeadDim / 2] = {};
  warpgroup_fence_operand(dk);
  warpgroup_fence_operand(dv);
  mbarrier_wait(base + kKvFullBarrier, 0);
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
    weights(p_frag, s, stats, p.scale_log2);
    issue_gradient(dv, p_frag, dout_descriptor | mn_major);
    wgmma_wait<1>();
    warpgroup_fence_operand(dp);
    score_gradients(ds_frag, s, dp, stats);
    issue_gradient(dk, ds_frag, q_descriptor | mn_major);
    wgmma_wait<0>();
    warpgroup_fence_operand(dv);
    warpgroup_fence_operand(dk);
    __syncwarp();  // all lanes have read the statistics
    if (warp_leader) mbarrier_arrive(base + kQEmptyBarrier + 8 * stage);
  }

  // Keys that no query sees have no steps: their gradients are 0.
  bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
  stage_gradient(base + kKOffset + my_rows, dk, p.scale);
  stage_gradient(base + kVOffset + my_rows, dv, 1.0f);
  fence_proxy_async();
  bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
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
    h100_varlen_window_dkdv(const __grid_constant__ Params p) {
  // TMA swizzles by address, with a period of 1024 bytes: swizzled buffers are aligned to that.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  // The shuffle proves to the compiler that both are warp-uniform, so values derived from them go to uniform registers
  // (CUTLASS' canonical_warp_idx_sync).
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), warpgroup = warp / kWarpsPerWarpgroup;
  if (threadIdx.x == 0) {
    mbarrier_init(base + kKvFullBarrier, 1);
    mbarrier_init(base + kArrivedBarrier, 1);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kQFullBarrier + 8 * i, 1);
      mbarrier_init(base + kQEmptyBarrier + 8 * i, kConsumerWarpgroups * kWarpsPerWarpgroup);
    }
    fence_mbarrier_init();
    prefetch_tensormap(&p.q_map);
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
    prefetch_tensormap(&p.dout_map);
    prefetch_tensormap(&p.dk_map);
    prefetch_tensormap(&p.dv_map);
  }
  const Tile tile(p);
  if (threadIdx.x == 0) tile_segment() = Segment(p, p.cu_seqlens_q, p.cu_seqlens_k, tile.batch);
  __syncthreads();
  if (tile.first_key >= tile_segment().keys) return;  // a tile without keys
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) produce(p, shared, base, tile);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, shared, base, tile, warpgroup - 1);
  }
}
