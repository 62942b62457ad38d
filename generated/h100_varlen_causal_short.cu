// Generated from specs/h100_varlen_causal_short.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_varlen_causal_short.yaml
// spec: {"arch":"sm_90a","copy":"tma","dtype":"fp16","head_dim":128,"layout":"varlen","lse":true,"mma":"wgmma","op":"attention","pattern":{"align":"bottom_right","kind":"causal"},"schedule":"ping_pong","stages":2,"tile":{"m":128,"n":128}}
// spec hash: 10ea3a23ddcf99109746969721e3b498a518926f9d054c81d2cdd0728d835acf
// seal: sha256 f3ef5f5ceb84492d885c2b7332c508d33f760af11d30bcb7217dadd9c9329d40

// Attention forward for sm_90a over the visible keys of the pattern in each sequence:
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
// Q is loaded into registers once per tile, as the A operand of Q K^T: fewer shared-memory reads in each step.
//
// Pipeline of a consumer: S of step i and P V of step i - 1 are issued together (FlashAttention-3's IntraWGOverlap).
// The mask and the maxima of step i overlap that P V; its exponentials overlap the products of
// other warpgroups.
// Ping-pong: the consumers take turns issuing, so that one's softmax overlaps the others' matrix products
// (warp_scheduler_barrier in FlashAttention-3). They share a tile; in CUTLASS' ping-pong each has its own.
//
// Symbols
//   tile        queries of one head that a thread block processes at a time (FlashAttention's m_block); q_len and
//               kv_len are its seqlen_q and seqlen_k
//   step        kTileN keys, its n_block: a key block. Blocks are numbered from the first key
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
constexpr int kTileM = 128;  // query rows of a tile
constexpr int kTileN = 128;  // keys of one step; registers: 192 of s, p_frag, o, q + 32 = 224 of 224
constexpr int kStages = 2;  // depth of the K ring and of the V ring
constexpr int kTileStages = 2;  // depth of the ring of work tiles and of Q
constexpr int kSubTileRows = 128;  // query rows of a sub-tile, here a whole tile
constexpr int kConsumerWarpgroups = 2;  // warpgroups that compute, 64 rows each
constexpr int kThreads = 384;  // warpgroup 0 produces, the others consume
constexpr int kProducerRegisters = 56;  // registers per producer thread
constexpr int kConsumerRegisters = 224;  // registers per consumer thread; 56 + 2 x 224 are the 3 x 168 at launch
constexpr int kGroupColumns = 64;  // columns of a group: one 128-byte swizzled row
constexpr int kGroups = 2;  // column groups of a head
constexpr int kQGroupBytes = 16384;  // bytes of one column group of Q
constexpr int kKvGroupBytes = 16384;  // bytes of one column group of K or V
constexpr int kOGroupBytes = 8192;  // bytes of one column group of a warpgroup's O
constexpr int kQBytes = 32768;  // bytes of a Q tile
constexpr int kKvBytes = 32768;  // bytes of K, or of V, of one step

// Dynamic shared memory: 229504 bytes. Byte offsets:
constexpr int kQOffset = 0;  // 65536 bytes: ring of Q tiles, 128 rows in column groups of 64
constexpr int kKOffset = 65536;  // 65536 bytes: K ring
constexpr int kVOffset = 131072;  // 65536 bytes: V ring
constexpr int kOOffset = 196608;  // 32768 bytes: staging of the O tile
constexpr int kBarriersOffset = 229376;  // 104 bytes: mbarriers
constexpr int kWorkTilesOffset = 229480;  // 16 bytes: ring of work tiles: index, number of steps
constexpr int kBlockMetaOffset = 229496;  // 8 bytes: metadata of the loads in the K rings

constexpr int kQFullBarrier = kBarriersOffset;
constexpr int kQEmptyBarrier = kQFullBarrier + 8 * kTileStages;
constexpr int kKFullBarrier = kQEmptyBarrier + 8 * kTileStages;
constexpr int kKEmptyBarrier = kKFullBarrier + 8 * kStages;
constexpr int kVFullBarrier = kKEmptyBarrier + 8 * kStages;
constexpr int kVEmptyBarrier = kVFullBarrier + 8 * kStages;
constexpr int kVArrivedBarrier = kVEmptyBarrier + 8 * kStages;
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

// Launch: 384 threads per block, 229504 bytes of dynamic shared memory.
// Grid: one thread block per SM, looping over tiles (persistent).
struct Params {
  TensorMap q_map;  // Q (head_dim, q_len, heads, batch): box 64 x 128 x 1 x 1, swizzle 128
  TensorMap k_map;  // K (head_dim, kv_len, kv_heads, batch): box 64 x 128 x 1 x 1, swizzle 128
  TensorMap v_map;  // V, as K: box 64 x 128 x 1 x 1, swizzle 128
  TensorMap o_map;  // O, as Q: box 64 x 64 x 1 x 1, swizzle 128
  unsigned short* o;  // O (tokens, heads, head_dim)
  int64 o_head_stride;  // head stride, in elements
  int64 o_row_stride;  // row stride, in elements
  int head_chunks;  // 16-byte chunks of a row
  float* lse;  // log-sum-exp, (heads, q_len) contiguous; not stored if null
  const int* cu_seqlens_q;  // bounds of the sequences in q: first tokens, then the end of the last
  const int* cu_seqlens_k;  // bounds of the sequences in k and v
  int* scheduler;  // tiles drawn after each thread block's first, finished thread blocks; both are 0 between launches
  int heads_in_l2;  // (batch, query head) pairs whose tiles are scheduled together: their K and V fit the L2
  int q_len;  // queries of all sequences
  int kv_len;  // keys of all sequences
  int sequences;  // sequences: one less than cu_seqlens_q has entries
  int heads;  // query heads
  int heads_per_kv_head;  // query heads per K/V head
  int query_tiles;  // tiles of kTileM queries per head
  int tiles;  // heads * query_tiles
  float scale_log2;  // scale * log2(e); the host checks that it is positive
};

// The sequence of a tile. Bounds are clamped to the tensors, and an end below its begin counts as an empty sequence.
struct SeqlenInfo {
  const Params& p;
  int batch;
  int q_begin, q_end;    // tokens of the sequence in Q
  int kv_begin, keys_end;  // and in K

  __device__ __forceinline__ SeqlenInfo(const Params& p, int batch) : p(p), batch(batch) {
    q_begin = max(0, min(__ldg(p.cu_seqlens_q + batch), p.q_len));
    q_end = max(q_begin, min(__ldg(p.cu_seqlens_q + batch + 1), p.q_len));
    kv_begin = max(0, min(__ldg(p.cu_seqlens_k + batch), p.kv_len));
    keys_end = max(kv_begin, min(__ldg(p.cu_seqlens_k + batch + 1), p.kv_len));
  }
  // Number of queries.
  __device__ __forceinline__ int q_len() const { return q_end - q_begin; }
  // Index of a query in a (heads, tokens) tensor. `batch_head` is batch * heads + head.
  __device__ __forceinline__ int64 row(int64 batch_head, int query) const {
    return (batch_head - static_cast<int64>(batch) * p.heads) * p.q_len + q_begin + query;
  }
  // Number of keys.
  __device__ __forceinline__ int kv_len() const { return keys_end - kv_begin; }
  // Position of a query among the keys: the last query is at the last key.
  __device__ __forceinline__ int position(int query) const { return query + kv_len() - q_len(); }
  // End of the visible keys.
  __device__ __forceinline__ int kv_end() const { return kv_len(); }
};

// Sequence of a query tile, by binary search. The tiles of sequence i begin at cu_seqlens_q[i] / tile_queries + i:
// enough for its queries, and at most one more, which is empty.
__device__ __forceinline__ int sequence_of_tile(const Params& p, int tile, int tile_queries) {
  int first = 0, count = p.sequences;  // candidates: first to first + count - 1
  while (count > 1) {
    const int half = count / 2, middle = first + half;
    const bool behind = __ldg(p.cu_seqlens_q + middle) / tile_queries + middle <= tile;
    first = behind ? middle : first;
    count = behind ? count - half : half;
  }
  return first;
}

// First query of a tile, counted within its sequence; out of range for tiles before the first sequence.
__device__ __forceinline__ int first_query_of_tile(const Params& p, int tile, int tile_queries, int sequence) {
  const int begin = max(0, min(__ldg(p.cu_seqlens_q + sequence), p.q_len));
  const int first = (tile - (begin / tile_queries + sequence)) * tile_queries;
  return first < 0 ? 1 << 30 : first;
}

// kv_end() of a tile, held in a register.
struct KvEnd {
  int end;

  __device__ __forceinline__ KvEnd(const Params& p, int batch) : end(SeqlenInfo(p, batch).kv_end()) {}
  __device__ __forceinline__ operator int() const { return end; }
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

// ldmatrix.x4: loads four 8 x 8 matrices of 16-bit elements. Lanes 8 i to 8 i + 7 hold the row addresses of matrix i;
// each lane gets two neighbors of row lane / 4 of each matrix (PTX ISA, "ldmatrix")
__device__ __forceinline__ void ldmatrix_x4(uint32 (&m)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
      : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

// wgmma.mma_async m64n128k16: D = A B, + D if `accumulate`; A in registers, B K-major.
// After p come scale factors of 1 for A and B, then whether B is MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n128k16_registers_k_major(
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
      "}, { %64, %65, %66, %67 }, b, p, 1, 1, 0;\n"
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

// Pattern: query i sees key j if j <= i + diagonal.
__device__ __forceinline__ int diagonal_of(const SeqlenInfo& seqlen) {
  // Aligned bottom-right, as in FlashAttention: the last query sees the last key. The bounds by kv_len - 1 below
  // therefore matter only to rows past the last query.
  return seqlen.position(0);
}

struct KvBlockIterator {
  int count;           // key blocks visible to these queries
  int first_diagonal;  // last key visible to the first query

  __device__ __forceinline__ KvBlockIterator(const Params& p, int batch, int head, int first_query) {
    const SeqlenInfo seqlen(p, batch);
    const int last_query = min(first_query + kSubTileRows, seqlen.q_len()) - 1;
    const int last_key = min(last_query + diagonal_of(seqlen), seqlen.kv_end() - 1);
    first_diagonal = first_query + diagonal_of(seqlen);
    // first_query < q_len() always holds: every tile has a query. last_key < 0 if all of its queries precede key 0.
    count = first_query < seqlen.q_len() && last_key >= 0 ? last_key / kTileN + 1 : 0;
  }
  // Index of the i-th key block, in descending order: the masked blocks come while the pipeline fills.
  __device__ __forceinline__ int at(int i) { return count - 1 - i; }
  // Whether some pair of the i-th block is masked.
  __device__ __forceinline__ bool masked(int i, int block) { return (block + 1) * kTileN - 1 > first_diagonal; }
};

// Whether a query sees an in-range key:
//   kv_idx <= q_idx + (kv_len - q_len)
__device__ __forceinline__ bool visible(const Params& p, int batch, int query, int key) {
  const SeqlenInfo seqlen(p, batch);
  return key <= query + (seqlen.kv_len() - seqlen.q_len());
}

// One tile of work: kTileM queries of one head.
struct Tile {
  int batch, head, first_query;

  __device__ __forceinline__ Tile(const Params& p, int index) {
    // The last tiles go first: late queries of long sequences see the most keys. Heads are interleaved, but no more of
    // them than have their K and V in the L2 at once.
    const uint32 number = index, query_tiles = p.query_tiles;  // unsigned: cheaper to divide than int
    const uint32 heads_in_l2 = p.heads_in_l2, all_heads = p.heads;
    const uint32 first_head = number / (heads_in_l2 * query_tiles) * heads_in_l2;
    const uint32 in_group = number - first_head * query_tiles;
    const uint32 heads = min(heads_in_l2, all_heads - first_head);
    const int query_tile = query_tiles - 1 - in_group / heads;
    head = first_head + in_group % heads;
    batch = sequence_of_tile(p, query_tile, kTileM);
    first_query = first_query_of_tile(p, query_tile, kTileM, batch);
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

// Metadata of a load of kTileN keys, in one word: twice its index, plus 1 if the pattern masks some of its pairs.
// Complemented, hence negative, if the pattern or the end of the keys masks some pairs.
__device__ __forceinline__ int pack_block_meta(const KvEnd& kv_end, int block, bool masked) {
  const int slot = block * 2 + masked;
  return masked || (block + 1) * kTileN > kv_end ? ~slot : slot;
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
        group * kGroupColumns, SeqlenInfo(p, tile.batch).q_begin + tile.first_query, tile.head, 0);
  }
}

// Copies one step of K or V to shared memory.
__device__ __forceinline__ void load_step(const TensorMap* map, uint32 to, uint32 full, int block, int kv_head,
    int kv_begin) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    tma_load_4d(to + group * kKvGroupBytes, map, full, group * kGroupColumns, kv_begin + block * kTileN, kv_head, 0);
  }
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

// Whether a load of V contains keys behind the end, where the tensor may hold anything.
__device__ __forceinline__ bool has_hidden_values(int block, int kv_end) {
  return (block + 1) * kTileN > kv_end;
}

// Clears what a step of V contains behind the end of the keys, after its copy has arrived, and hands the step to the
// consumers. Not even NaN there then has an effect: weights of hidden keys are 0, but 0 times NaN is NaN. Called by the
// whole warp.
__device__ __forceinline__ void finish_values(unsigned char* v, int block, int kv_end,
    uint32 arrived, int phase, uint32 full) {
  mbarrier_wait(arrived, phase);
  clear_rows<kTileN, kKvGroupBytes>(v, kv_end - block * kTileN);
  hand_over(full);
}

// Producer: one warp fills the rings. It also publishes the work tiles, one ahead; the first is already published.
__device__ __forceinline__ void produce(const Params& p, unsigned char* shared, uint32 base) {
  // The lane that waits and copies. CUTLASS picks it by elect_one_sync; here it also reads and writes the ring's
  // entries.
  const bool leader = threadIdx.x % 32 == 0;
  int* entries = reinterpret_cast<int*>(shared + kWorkTilesOffset);
  int* block_meta = reinterpret_cast<int*>(shared + kBlockMetaOffset);
  const uint32 k_ring = base + kKOffset;
  const uint32 v_ring = base + kVOffset;
  // Work tiles and steps so far: stages and parities follow from these counts.
  uint32 work_tiles = 0, steps = 0;
  int end_phase = 0;  // of the barrier of steps of V that contain the end of the keys

  while (true) {
    const PipelineState<kTileStages> tile_state{work_tiles};
    const WorkTile work = read_work_tile(entries + tile_state.index * kWorkTileWords);
    ++work_tiles;
    if (work.index >= p.tiles) break;
    const Tile tile(p, work.index);
    const int kv_head = static_cast<uint32>(tile.head) / p.heads_per_kv_head;
    const KvEnd kv_end(p, tile.batch);
    const int kv_begin = SeqlenInfo(p, tile.batch).kv_begin;
    KvBlockIterator blocks = kv_blocks_of(p, tile);

    // K of step i goes ahead of V of step i - 1, in the order in which the consumers use them.
    int block = 0, previous;
#pragma unroll 1
    for (int i = 0; i <= blocks.count; ++i) {
      const uint32 k_step = steps + i, v_step = k_step - 1;
      previous = block;
      if (i < blocks.count) block = blocks.at(i);
      if (leader && i < blocks.count) {
        const int stage = k_step % kStages, phase = k_step / kStages % 2;
        const uint32 full = base + kKFullBarrier + 8 * stage;
        mbarrier_wait(base + kKEmptyBarrier + 8 * stage, phase ^ 1);
        block_meta[stage] = pack_block_meta(kv_end, block, blocks.masked(i, block));
        mbarrier_arrive_expect_tx(full, kKvBytes);
        load_step(&p.k_map, k_ring + stage * kKvBytes, full, block, kv_head, kv_begin);
      }
      if (i > 0) {
        const int stage = v_step % kStages, phase = v_step / kStages % 2;
        const uint32 full = base + kVFullBarrier + 8 * stage;
        const bool hides = has_hidden_values(previous, kv_end);
        const uint32 arrived = hides ? base + kVArrivedBarrier : full;
        if (leader) {
          mbarrier_wait(base + kVEmptyBarrier + 8 * stage, phase ^ 1);
          mbarrier_arrive_expect_tx(arrived, kKvBytes);
          load_step(&p.v_map, v_ring + stage * kKvBytes, arrived, previous, kv_head, kv_begin);
        }
        if (hides) {
          finish_values(shared + (v_ring - base) + stage * kKvBytes, previous, kv_end, arrived, end_phase, full);
          end_phase ^= 1;
        }
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

// Loads this warp's 16 rows of Q as A operands of 16 columns each.
__device__ __forceinline__ void load_q_fragments(uint32 (&q)[kHeadDim / 16][4], uint32 q_tile, int warpgroup) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarpsPerWarpgroup;
  const int row = warpgroup * kWarpgroupRows + warp * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    const int chunk = k % 4 * 2 + lane / 16;  // 16 bytes = 8 columns; swizzled to chunk ^ row % 8
    ldmatrix_x4(q[k], q_tile + k / 4 * kQGroupBytes + row * kRowBytes + (chunk ^ row % 8) * 16);
  }
}

// s = Q K^T for this warpgroup's 64 rows and the keys of one step (asynchronous).
__device__ __forceinline__ void issue_qk_gemm(float (&s)[kTileN / 2],
    const uint32 (&q)[kHeadDim / 16][4], uint32 k_descriptor) {
  warpgroup_fence_operand(s);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    // 16 columns are 32 bytes of a 128-byte row; after four of them the next column group begins.
    const int in_group = k % 4 * 32, group = k / 4;
    const uint32 keys = k_descriptor + ((group * kKvGroupBytes + in_group) >> 4);
    wgmma_m64n128k16_registers_k_major(s, q[k], keys, k > 0);
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
  // Whether the pattern or the end of the keys masks some pair: the same in all lanes.
  __device__ __forceinline__ bool needs_mask() const { return __any_sync(0xFFFFFFFF, word < 0); }
};

// Masks the pairs of a step that the pattern or the end of the keys excludes.
__device__ __forceinline__ void apply_mask(float (&s)[kTileN / 2], const Params& p, const BlockMeta& meta,
    int batch, int query) {
  const KvEnd kv_end(p, batch);
  const int word = __shfl_sync(0xFFFFFFFF, meta.word, 0), number = word < 0 ? ~word : word;
  const int first_key = number / 2 * kTileN + threadIdx.x % 4 * 2;  // this thread's first key
  const int keys = kv_end - first_key;
#pragma unroll
  for (int j = 0; j < kTileN / 2; ++j) {  // j: score of a load; i: score of the step
    const int i = j, column = j / 4 * 8 + j % 2;
    bool keep = column < keys;
    const int my_query = query + j / 2 % 2 * 8;
    // The pattern depends only on the distance of query and key. Both are counted from first_key, which makes columns
    // constants.
    const bool in_pattern = visible(p, batch, my_query - first_key, column);
    keep &= in_pattern;
    if (!keep) s[i] = kMinusInfinity;
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

// Stores the in-range rows of a warpgroup from its staging buffer, 16 bytes per access. A TMA store of the whole box
// would overwrite the next sequence.
__device__ __forceinline__ void store_rows(const Params& p, const SeqlenInfo& seqlen, const Tile& tile, int first_query,
    const unsigned char* staging) {
  constexpr int kRowChunks = kHeadDim / 8, kGroupChunks = kGroupColumns / 8;
  const int rows = max(0, min(seqlen.q_len() - first_query, kWarpgroupRows));
  unsigned short* const to = p.o + (seqlen.q_begin + first_query) * p.o_row_stride + tile.head * p.o_head_stride;
  for (int i = threadIdx.x % kWarpgroupThreads; i < rows * kRowChunks; i += kWarpgroupThreads) {
    const int row = i / kRowChunks, chunk = i % kRowChunks;
    if (chunk >= p.head_chunks) continue;
    const int place = chunk / kGroupChunks * kOGroupBytes + row * kRowBytes + (chunk % kGroupChunks ^ row % 8) * 16;
    *reinterpret_cast<uint4*>(to + row * p.o_row_stride + chunk * 8) = *reinterpret_cast<const uint4*>(staging + place);
  }
}

// Writes a warpgroup's O to its staging buffer (128-byte swizzle, as TMA expects) and issues the store.
// Then stores the LSE, if requested. A row without keys has sum 0: O = 0, LSE = -inf.
__device__ __forceinline__ void store_tile(const Params& p, const Tile& tile, int first_query, uint32 staging,
    const unsigned char* shared_staging, int warpgroup, const float (&o)[kHeadDim / 2], const float (&row_max)[2],
    const float (&row_sum)[2]) {
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
  const SeqlenInfo seqlen(p, tile.batch);
  const bool is_whole = first_query + kWarpgroupRows <= seqlen.q_len();
  if (!is_whole) {
    store_rows(p, seqlen, tile, first_query, shared_staging);
    bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);  // all threads have read the staging
  }
  if (is_whole && sender) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      tma_store_4d(&p.o_map, staging + group * kOGroupBytes, group * kGroupColumns, seqlen.q_begin + first_query,
          tile.head, 0);
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

// Consumer: one warpgroup computes its 64 rows
__device__ __forceinline__ void consume(const Params& p, unsigned char* shared, uint32 base, int warpgroup) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarpsPerWarpgroup;
  const int first_row = warpgroup * kWarpgroupRows + warp * 16 + lane / 4;
  const bool warp_leader = lane == 0;
  const int* entries = reinterpret_cast<const int*>(shared + kWorkTilesOffset);
  const int* block_meta = reinterpret_cast<const int*>(shared + kBlockMetaOffset);
  // Descriptors of stage 0 of the rings. The shuffles keep the compiler from recomputing them in each step.
  const uint32 k_descriptors =
      __shfl_sync(0xFFFFFFFF, wgmma_descriptor(base + kKOffset, 0), 0);
  const uint32 v_descriptors =
      __shfl_sync(0xFFFFFFFF, wgmma_descriptor(base + kVOffset, kKvGroupBytes), 0);
  const uint32 staging = base + kOOffset + warpgroup * kGroups * kOGroupBytes;
  PipelineState<kTileStages> tile_state;
  PipelineState<kStages> k_state, v_state;
  const int my_barrier = kWarpSchedulerBarrier + warpgroup;
  const int next_barrier = kWarpSchedulerBarrier + (warpgroup + 1) % kConsumerWarpgroups;
  // Warpgroup 0 has the first turn.
  if (warpgroup == kConsumerWarpgroups - 1) bar_arrive(kWarpSchedulerBarrier, kWarpSchedulerThreads);
  bool fresh = true;  // whether this warpgroup has yet to run a step

  while (true) {
    const WorkTileInfo info = read_work_tile_info(entries, base, tile_state);
    if (info.work.index >= p.tiles) break;
    const Tile tile(p, info.work.index);
    float o[kHeadDim / 2] = {}, s[kTileN / 2];
    uint32 p_frag[kTileN / 16][4];
    float row_max[2] = {kLeastLogit, kLeastLogit}, row_sum[2] = {}, step_max[2], rescale[2];
    uint32 q[kHeadDim / 16][4];
    load_q_fragments(q, base + kQOffset + tile_state.index * kQBytes, warpgroup);
    // Q's buffer is free for another tile when all lanes have loaded.
    __syncwarp();
    if (warp_leader) mbarrier_arrive(base + kQEmptyBarrier + 8 * tile_state.index);

    if (info.count > 0) {
      // First step: scores and softmax.
      mbarrier_wait(base + kKFullBarrier + 8 * k_state.index, k_state.phase);
      BlockMeta step(block_meta, k_state.index, warp_leader);
      // All warpgroups begin their first tile at the same time, so they take turns from the first products on.
      // Later tiles are already staggered.
      if (fresh) bar_sync(my_barrier, kWarpSchedulerThreads);
      issue_qk_gemm(s, q, k_descriptors + (k_state.index * kKvBytes >> 4));
      wgmma_wait<0>();
      warpgroup_fence_operand(s);
      if (fresh) bar_arrive(next_barrier, kWarpSchedulerThreads);
      fresh = false;
      if (warp_leader) mbarrier_arrive(base + kKEmptyBarrier + 8 * k_state.index);
      k_state.advance();
      if (step.needs_mask()) apply_mask(s, p, step, tile.batch, tile.first_query + first_row);
      take_step_max(step_max, s, p.scale_log2);
      raise_row_max(row_max, rescale, step_max);  // O and row_sum are 0: nothing to rescale
      scale_apply_exp2(p_frag, row_sum, s, row_max, p.scale_log2);
      if (info.count > 1) mbarrier_wait(base + kKFullBarrier + 8 * k_state.index, k_state.phase);

      // Scores of step i, together with the output of step i - 1.
      for (int i = 1; i < info.count; ++i) {
        step = BlockMeta(block_meta, k_state.index, warp_leader);
        bar_sync(my_barrier, kWarpSchedulerThreads);
        issue_qk_gemm(s, q, k_descriptors + (k_state.index * kKvBytes >> 4));
        mbarrier_wait(base + kVFullBarrier + 8 * v_state.index, v_state.phase);
        issue_pv_gemm(o, p_frag, v_descriptors + (v_state.index * kKvBytes >> 4));
        bar_arrive(next_barrier, kWarpSchedulerThreads);
        wgmma_wait<1>();
        warpgroup_fence_operand(s);
        if (warp_leader) mbarrier_arrive(base + kKEmptyBarrier + 8 * k_state.index);
        k_state.advance();
        if (step.needs_mask()) apply_mask(s, p, step, tile.batch, tile.first_query + first_row);
        // While P V runs: the step's maximum, which may raise row_max.
        take_step_max(step_max, s, p.scale_log2);
        const bool raises = exceeds_threshold(step_max, row_max);
        if (raises) raise_row_max(row_max, rescale, step_max);
        // Wait for the next K while P V runs, not between the weights and their products.
        if (i + 1 < info.count) mbarrier_wait(base + kKFullBarrier + 8 * k_state.index, k_state.phase);
        // P V still reads `p_frag`, which the new weights overwrite, and adds to `o`, which a raised row_max rescales.
        // FlashAttention-3 computes the exponentials in `s` before this wait and packs them after it. That order was
        // slower here (step 28 of docs/ladder-attention.md).
        wgmma_wait<0>();
        warpgroup_fence_operand(o);
        if (warp_leader) mbarrier_arrive(base + kVEmptyBarrier + 8 * v_state.index);
        v_state.advance();
        if (raises) rescale_rows(o, row_sum, rescale);
        scale_apply_exp2(p_frag, row_sum, s, row_max, p.scale_log2);
      }

      // Output of the last step.
      mbarrier_wait(base + kVFullBarrier + 8 * v_state.index, v_state.phase);
      issue_pv_gemm(o, p_frag, v_descriptors + (v_state.index * kKvBytes >> 4));
      wgmma_wait<0>();
      warpgroup_fence_operand(o);
      if (warp_leader) mbarrier_arrive(base + kVEmptyBarrier + 8 * v_state.index);
      v_state.advance();
    }
    store_tile(p, tile, tile.first_query + warpgroup * kWarpgroupRows, staging, shared + (staging - base), warpgroup,
            o, row_max, row_sum);
    tile_state.advance();
  }
  if (warpgroup == 0) bar_sync(kWarpSchedulerBarrier, kWarpSchedulerThreads);  // last turn, which no warpgroup takes
  // Shared memory must outlive the stores that read it.
  if (threadIdx.x % kWarpgroupThreads == 0) tma_store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    h100_varlen_causal_short(const __grid_constant__ Params p) {
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
    mbarrier_init(base + kVArrivedBarrier, 1);
    fence_mbarrier_init();
    prefetch_tensormap(&p.q_map);
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
    prefetch_tensormap(&p.o_map);
    // Publish the first tile before the warps split into roles.
    publish_work_tile(p, reinterpret_cast<int*>(shared + kWorkTilesOffset), base, {0u}, first_work_tile(p));
  }
  __syncthreads();

  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) produce(p, shared, base);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, shared, base, warpgroup - 1);
  }
}
