// Generated from specs/h100_paged_key_lists64_gqa4.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_paged_key_lists64_gqa4.yaml
// spec: {"arch":"sm_90a","copy":"tma","dtype":"fp16","entry_keys":64,"group":4,"head_dim":128,"layout":"paged","mma":"wgmma","op":"key_lists_forward","schedule":"cooperative","stages":4,"tile":{"m":64,"n":64}}
// spec hash: 9efdf7450888ba3fd4fc516bf03d2ef78080cbb2cb37a1af4b20382617235af4
// seal: sha256 7c1ff9e5fddb559243fd87fb16db4012389408e3b8cc0c3f3bcfa14163e25f3b

// Attention for sm_90a over lists of key blocks, for many queries, with K and V in pages: each query and KV head has
// its own list. A sequence is a request.
// A thread block has the keys of one block and gathers the queries that list it. A query sees no key behind its own.
// Each entry's part of O goes to device memory in 16 bits, with its log-sum-exp, at a place of its own.
// A call has a launch for each slice of its queries, which bounds that memory. A kernel before the first launch
// transposes the lists. Spare warps of a launch combine the parts of the slice before it, and a kernel after the last
// launch those of the last slice. Results are bitwise reproducible.
//
// Roles
//   warpgroup 0      warp 0 fills the ring of queries by TMA, one query of each lane, and loads K and V. The other
//                    warps combine the slice before this one.
//   warpgroup 1      the consumer: S = Q K^T from shared memory, O = P V with P in registers. Two thread blocks fit an
//                    SM: one multiplies while the other one computes weights.
//
// Barriers (full: the data has arrived; empty: the buffer may be overwritten)
//   kv_full                    K and V of the tile
//   q_full[i], q_empty[i]      stage i of the ring: Q, places of its parts, and the last keys that it sees
//
// Symbols
//   row         a query head of a query: the heads of one KV head are adjacent
//   entry       a query that lists the tile
//   tile        the keys of one block and KV head, for the queries of one slice
//   chunk       entries of a tile, in descending order of queries, processed by one thread block
//   step        64 rows: kStepQueries entries of the chunk
//   turn        number of an entry among those that a query sees
//   part        O of an entry: its rows over the keys of the tile
//   s           S: 64 rows x kTileN keys. A thread holds rows r and r + 8 of its warp's 16 (r = lane / 4), and keys
//               8 j + 2 (lane % 4) + {0, 1}; of O, columns instead of keys

using int64 = long long;
using uint32 = unsigned int;

// Stands for CUtensorMap: 128 opaque bytes (PTX ISA, "Tensor-Map"), 64-byte aligned (driver API,
// cuTensorMapEncodeTiled). The comments of parameters of this type give the dimensions, innermost first, the box of one
// copy, and the bytes of the swizzle.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

constexpr int kHeadDim = 128;  // elements per head
constexpr int kGroup = 4;  // query heads per KV head
constexpr int kTileN = 64;  // keys of a tile
constexpr int kStepQueries = 16;  // queries per step
constexpr int kStages = 4;  // depth of the ring
constexpr int kThreads = 256;  // warpgroup 0 produces and combines, the other one consumes
constexpr int kProducerRegisters = 104;  // registers per thread of warpgroup 0
constexpr int kConsumerRegisters = 152;  // registers per consumer thread
constexpr int kGroupColumns = 64;  // columns of a group: one 128-byte swizzled row
constexpr int kGroups = 2;  // column groups per head
constexpr int kQGroupBytes = 8192;  // bytes of one column group of Q
constexpr int kKvGroupBytes = 8192;  // bytes of one column group of K or V
constexpr int kQBytes = 16384;  // bytes of Q of a step
constexpr int kKvBytes = 16384;  // bytes of K, or of V, of a tile
constexpr int kPartBytes = 1024;  // bytes of an entry's part of O
constexpr int kPieceBytes = 512;  // bytes of a part that a warp combines
constexpr int kCombineWarps = 3;  // warps of warpgroup 0 that combine
constexpr int kTurnBatch = 16;  // entries of a query whose loads overlap
constexpr int kRowThreads = 256;  // threads per block of the prologue, and of the epilogue
constexpr int kBatchQueries = 64;  // queries of a thread block of the prologue, of all heads'
constexpr int kPageRows = 16;  // keys per copy from a page
constexpr int kThreadTiles = 8;  // tiles of a thread that finds the first entries of tiles

// Dynamic shared memory: 98908 bytes. Byte offsets:
constexpr int kKOffset = 0;  // 16384 bytes: K of the tile in column groups
constexpr int kVOffset = 16384;  // 16384 bytes: V of the tile
constexpr int kQOffset = 32768;  // 65536 bytes: Q ring
constexpr int kBarriersOffset = 98304;  // 72 bytes: mbarriers
constexpr int kLastKeysOffset = 98376;  // 272 bytes: last key that each query of the ring sees; whether one sees fewer
constexpr int kPlacesOffset = 98648;  // 256 bytes: place of the part of each query of the ring
constexpr int kHiddenPagesOffset = 98904;  // 4 bytes: keys of the tile outside of the cache, kPageRows for each bit

constexpr int kQFullBarrier = kBarriersOffset;
constexpr int kQEmptyBarrier = kQFullBarrier + 8 * kStages;
constexpr int kKvFullBarrier = kQEmptyBarrier + 8 * kStages;
constexpr int kConsumerBarrier = 1;  // named barrier of the consumer; 0: __syncthreads
constexpr int kWarpgroupThreads = 128, kWarpsPerWarpgroup = 4;
constexpr int kRowBytes = 128;  // bytes of a row of a column group in shared memory: the span of the swizzle
constexpr uint32 kAllLanes = 0xFFFFFFFF;
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kNoSequence = -2147483647 - 1;  // position of a token of no sequence
constexpr int kNoPage = -1;  // outside of any cache: its copies are zeros

// Launch: 256 threads per block, 98908 bytes of dynamic shared memory.
// Grid: one thread block for each chunk of a tile's queries.
// Prologue, with the same parameters: h100_paged_key_lists64_gqa4_transpose, 256 threads per block.
// Epilogue, with the same parameters: h100_paged_key_lists64_gqa4_combine, 256 threads per block.
struct Params {
  TensorMap q_map;  // Q (head_dim, q_len, heads, batch): box 64 x 1 x 4 x 1, swizzle 128
  TensorMap k_map;  // K (head_dim, page_size, kv_heads, pages): box 64 x 16 x 1 x 1, swizzle 128
  TensorMap v_map;  // V, as K: box 64 x 16 x 1 x 1, swizzle 128
  const int* lists;  // blocks of each list, (kv_heads or 1, tokens, list_length)
  int64 lists_head_stride;  // head stride; of heads 0 if they share lists
  int64 lists_row_stride;  // row stride; of heads 0 if they share lists
  const int* counts;  // entries that count, (kv_heads or 1, tokens); all if null
  int64 counts_head_stride;  // head stride, likewise
  int64 counts_row_stride;  // row stride, likewise
  const int* cu_seqlens_q;  // first query of each sequence, then the end of the last; none if null
  const int* seq_lens;  // keys of each request; all if null
  int* sync;  // progress of the transposition; 0 between launches
  int* tile_counts;  // entries of each tile; 0 between launches
  int* bounds;  // rising bounds of the sequences in q, then their keys
  int2* carry;  // entries and chunks of the tiles that have been scanned
  int* ranks;  // rank of each entry in its tile, (kv_heads, tokens, list_length); -1 if it is not seen
  int2* entries;  // token and turn of each entry, by tile; tiles by slice, head and keys
  int* offsets;  // first entry of each tile, then the end of the last one
  int4* places;  // request of each tile of a head, its first position, and keys there
  int* chunk_begins;  // first chunk of each tile, then the number of chunks
  int* chunk_tiles;  // tile of each chunk
  int* positions;  // position of each query (tokens,)
  int* turns;  // entries that each query sees, (kv_heads, tokens)
  uint4* parts;  // parts of O of the slice, (kv_heads, slice_tokens, list_length)
  float* part_lse;  // their log-sum-exps to base 2, (..., list_length, group)
  uint4* earlier_parts;  // parts of the slice before; anything without one
  float* earlier_lse;  // their log-sum-exps
  unsigned short* out;  // O (tokens, heads, head_dim)
  int64 out_head_stride;  // head stride, in elements
  int64 out_row_stride;  // row stride, in elements
  float* lse;  // log-sum-exp, (heads, tokens)
  int slice;  // slice of the queries that the launch computes
  int slice_tokens;  // queries of a slice
  int sequences;  // sequences
  const int* block_table;  // pages of each request; if null, each has a page of its own
  int table_stride;  // row stride of the table
  int pages;  // pages of the cache
  int page_shift;  // log2 of the keys of a page
  int page_mask;  // keys of a page, less 1
  int request_queries;  // queries of each request without bounds
  int max_keys;  // keys that a request has room for
  int request_tiles;  // tiles of a request and head
  int tokens;  // queries of all sequences
  int kv_heads;  // heads of K and V
  int list_length;  // entries of a list
  int tiles;  // tiles of a head
  int chunk_entries;  // entries of a chunk
  float scale_log2;  // scale * log2(e); the host checks that it is positive
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

// griddepcontrol.launch_dependents: the next kernel, if it may overlap this one, can start once all thread blocks have
// executed this (PTX ISA, "griddepcontrol")
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// griddepcontrol.wait: waits until the kernels that this one overlaps have completed and their writes are visible (PTX
// ISA, "griddepcontrol")
__device__ __forceinline__ void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

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

__device__ __forceinline__ Chunk chunk_at(const Params& p, int index) {
  Chunk chunk(p, index, __ldg(p.chunk_tiles + index));
  chunk.kv_head %= p.kv_heads;  // tiles of earlier slices come first
  return chunk;
}

// Loads K and V of a tile, kPageRows keys of each lane. Keys of pages outside of the cache are zeros, and hidden.
__device__ __forceinline__ void load_pages(const Params& p, unsigned char* shared, uint32 base, const Chunk& chunk) {
  const int row = threadIdx.x % 32 * kPageRows, key = chunk.first_position + row, request = chunk.first_token;
  const uint32 kv_full = base + kKvFullBarrier;
  int page = kNoPage;
  if (row < chunk.keys) {
    page = p.block_table == nullptr
        ? request
        : __ldg(p.block_table + request * static_cast<int64>(p.table_stride) + (key >> p.page_shift));
  }
  const bool is_hidden = static_cast<uint32>(page) >= static_cast<uint32>(p.pages);
  const uint32 hidden = __ballot_sync(kAllLanes, row < kTileN && is_hidden);
  if (row == 0) {
    *reinterpret_cast<uint32*>(shared + kHiddenPagesOffset) = hidden;
    mbarrier_arrive_expect_tx(kv_full, 2 * kKvBytes);
  }
  __syncwarp();
  if (row >= kTileN) return;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int column = group * kGroupColumns, offset = group * kKvGroupBytes + row * kRowBytes;
    const int from = is_hidden ? kNoPage : page;
    tma_load_4d(base + kKOffset + offset, &p.k_map, kv_full, column, key & p.page_mask, chunk.kv_head, from);
    tma_load_4d(base + kVOffset + offset, &p.v_map, kv_full, column, key & p.page_mask, chunk.kv_head, from);
  }
}

// Producer: one warp, with one query of a step for each lane, which arrives for what it stores and loads. Lanes behind
// the last entry repeat it, for no key: what they load is finite, and their part is not stored.
__device__ __forceinline__ void produce(const Params& p, unsigned char* shared, uint32 base, const Chunk& chunk) {
  const int lane = threadIdx.x % 32, first_head = chunk.kv_head * kGroup;
  load_pages(p, shared, base, chunk);
  int* last_keys = reinterpret_cast<int*>(shared + kLastKeysOffset);
  int* places = reinterpret_cast<int*>(shared + kPlacesOffset);
  const int first_place = chunk.kv_head * p.slice_tokens - p.slice * p.slice_tokens;
#pragma unroll 1
  for (int step = 0; step < chunk.steps(); ++step) {
    const int stage = step % kStages, index = chunk.first + step * kStepQueries + lane;
    const int2 entry = __ldg(p.entries + min(index, chunk.end - 1));  // token, turn
    const int position = __ldg(p.positions + entry.x) - chunk.first_position;
    const int last = index < chunk.end ? min(position, chunk.keys - 1) : -1;
    const bool sees_fewer = __any_sync(kAllLanes, lane < kStepQueries && last < kTileN - 1);
    const uint32 full = base + kQFullBarrier + 8 * stage;
    mbarrier_wait(base + kQEmptyBarrier + 8 * stage, step / kStages % 2 ^ 1);
    if (lane == 0) last_keys[stage * (kStepQueries + 1) + kStepQueries] = sees_fewer;
    if (lane < kStepQueries) {
      last_keys[stage * (kStepQueries + 1) + lane] = last;
      places[stage * kStepQueries + lane] =
          index < chunk.end ? (first_place + entry.x) * p.list_length + entry.y : -1;
      mbarrier_arrive_expect_tx(full, kQBytes / kStepQueries);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int offset = stage * kQBytes + group * kQGroupBytes + lane * (kGroup * kRowBytes);
        tma_load_4d(base + kQOffset + offset, &p.q_map, full, group * kGroupColumns, entry.x, first_head, 0);
      }
    }
  }
}

// Zero-fills the rows of V behind the last key of the tile: their weights are 0, and not even NaN there has an effect.
__device__ __forceinline__ void clear_hidden_rows(unsigned char* shared, int keys) {
  constexpr int kRowChunks = kRowBytes / 16;
  const int thread = threadIdx.x - kWarpgroupThreads;
#pragma unroll 1
  for (int row = keys + thread / kRowChunks; row < kTileN; row += kWarpgroupThreads / kRowChunks) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      unsigned char* place = shared + kVOffset + group * kKvGroupBytes + row * kRowBytes + thread % kRowChunks * 16;
      *reinterpret_cast<uint4*>(place) = make_uint4(0, 0, 0, 0);
    }
  }
  fence_proxy_async();
  bar_sync(kConsumerBarrier, kWarpgroupThreads);
}

// S of a step (asynchronous): 64 rows x kTileN keys.
__device__ __forceinline__ void issue_scores(float (&s)[kTileN / 2], uint32 q, uint32 k) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i) {
    // 16 columns are 32 bytes of a 128-byte row; after four of them the next column group begins.
    const int in_group = i % 4 * 32, group = i / 4;
    const uint32 rows = q + ((group * kQGroupBytes + in_group) >> 4);
    const uint32 keys = k + ((group * kKvGroupBytes + in_group) >> 4);
    if (i == 0) {
      wgmma_m64n64k16_shared_k_major_first(s, rows, keys);
    } else {
      wgmma_m64n64k16_shared_k_major(s, rows, keys, 1);
    }
  }
  wgmma_commit();
  warpgroup_fence_operand(s);
}

// Masks the keys behind the last one that a row's query sees. `row` is this thread's first.
__device__ __forceinline__ void hide_keys(float (&s)[kTileN / 2], const int* last_keys, int row) {
  const int first_key = static_cast<int>(threadIdx.x) % 4 * 2;
  const int last[2] = {last_keys[row / kGroup] - first_key, last_keys[(row + 8) / kGroup] - first_key};
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) {
    if (i / 4 * 8 + i % 2 > last[i / 2 % 2]) s[i] = kMinusInfinity;
  }
}

// Masks the keys of pages outside of the cache, kPageRows for each bit.
__device__ __forceinline__ void hide_pages(float (&s)[kTileN / 2], uint32 hidden) {
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) {
    if (hidden >> (i / 4 * 8 / kPageRows) & 1) s[i] = kMinusInfinity;
  }
}

// P, packed to 16 bits, with the maximum and the sum of each row: 0 if all keys are hidden. The accumulator layout of S
// is the A-operand layout.
__device__ __forceinline__ void weights(
    uint32 (&p_frag)[kTileN / 16][4], const float (&s)[kTileN / 2], float (&top)[2], float (&sum)[2], float scale) {
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
  quad_max(top);
  float shift[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    top[i] *= scale;
    shift[i] = top[i] == kMinusInfinity ? 0.0f : top[i];
  }
#pragma unroll
  for (int k = 0; k < kTileN / 16; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = k * 8 + j * 2;
      const float left = ex2(s[at] * scale - shift[j % 2]), right = ex2(s[at + 1] * scale - shift[j % 2]);
      sum[j % 2] += left + right;
      p_frag[k][j] = pack(left, right);
    }
  }
}

// Stores a row of a part, times `factor`: 16 bytes of each lane. A part has kHeadDim / 32 pieces of kGroup rows, and of
// each row those of its four lanes. `half` is 0 for the thread's first row and 1 for the second one.
__device__ __forceinline__ void store_part(uint4* to, const float (&o)[kHeadDim / 2], int half, float factor) {
#pragma unroll
  for (int i = 0; i < kHeadDim / 32; ++i) {
    const float* from = o + i * 16 + half * 2;
    __stcs(to + i * (kGroup * 4),
        make_uint4(pack(from[0] * factor, from[1] * factor), pack(from[4] * factor, from[5] * factor),
            pack(from[8] * factor, from[9] * factor), pack(from[12] * factor, from[13] * factor)));
  }
}

__device__ __forceinline__ void consume(const Params& p, unsigned char* shared, uint32 base, const Chunk& chunk) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % kWarpsPerWarpgroup * 16 + lane / 4;
  const uint32 k_descriptor = __shfl_sync(kAllLanes, wgmma_descriptor(base + kKOffset, 0), 0);
  const uint32 v_descriptor = __shfl_sync(kAllLanes, wgmma_descriptor(base + kVOffset, kKvGroupBytes), 0);
  const uint32 q_descriptors = __shfl_sync(kAllLanes, wgmma_descriptor(base + kQOffset, 0), 0);
  mbarrier_wait(base + kKvFullBarrier, 0);
  if (chunk.keys < kTileN) clear_hidden_rows(shared, chunk.keys);
  const uint32 hidden = *reinterpret_cast<const uint32*>(shared + kHiddenPagesOffset);
#pragma unroll 1
  for (int step = 0; step < chunk.steps(); ++step) {
    const int stage = step % kStages;
    const int* last_keys = reinterpret_cast<const int*>(shared + kLastKeysOffset) + stage * (kStepQueries + 1);
    const int* places = reinterpret_cast<const int*>(shared + kPlacesOffset) + stage * kStepQueries;
    float s[kTileN / 2], o[kHeadDim / 2] = {}, top[2] = {kMinusInfinity, kMinusInfinity}, sum[2] = {};
    uint32 p_frag[kTileN / 16][4];
    mbarrier_wait(base + kQFullBarrier + 8 * stage, step / kStages % 2);
    issue_scores(s, q_descriptors + (stage * kQBytes >> 4), k_descriptor);
    wgmma_wait<0>();
    warpgroup_fence_operand(s);
    if (last_keys[kStepQueries]) hide_keys(s, last_keys, row);
    if (hidden != 0) hide_pages(s, hidden);
    const int place[2] = {places[row / kGroup], places[(row + 8) / kGroup]};
    mbarrier_arrive(base + kQEmptyBarrier + 8 * stage);
    weights(p_frag, s, top, sum, p.scale_log2);
    warpgroup_fence_operand(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileN / 16; ++k) {
      wgmma_m64n128k16_registers_mn_major(o, p_frag[k], v_descriptor + (k * 16 * kRowBytes >> 4), 1);
    }
    wgmma_commit();
    warpgroup_fence_operand(o);
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] = quad_sum(sum[i]);
    wgmma_wait<0>();
    warpgroup_fence_operand(o);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (place[i] < 0) continue;
      const int64 part = place[i];
      const int row_of_part = (row + i * 8) % kGroup;
      store_part(p.parts + part * (kPartBytes / 16) + row_of_part * 4 + lane % 4, o, i,
          sum[i] == 0.0f ? 0.0f : rcp(sum[i]));
      if (lane % 4 == 0) p.part_lse[part * kGroup + row_of_part] = top[i] + lg2(sum[i]);
    }
  }
}

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

// Combines a piece of a query's parts in the order of its turns, with a warp: kPieceBytes of each part, 16 bytes of
// each lane. A query that sees no key has O = 0 and a log-sum-exp of minus infinity. Tokens of no sequence are left
// out.
__device__ __forceinline__ void combine_piece(
    const Params& p, const uint4* parts, const float* part_lse, int slice, int index) {
  constexpr int kPieces = kPartBytes / kPieceBytes;
  const int tokens = min(p.slice_tokens, p.tokens - slice * p.slice_tokens), query = index / kPieces;
  const int kv_head = query / tokens, place = query % tokens, token = slice * p.slice_tokens + place;
  if (__ldg(p.positions + token) == kNoSequence) return;
  // The layout of store_part.
  const int four = index % kPieces * 32 + threadIdx.x % 32, row = four / 4 % kGroup;
  const int column = four / (4 * kGroup) * 32 + four % 4 * 2, head = kv_head * kGroup + row;
  const int64 first = (static_cast<int64>(kv_head) * p.slice_tokens + place) * p.list_length;
  const uint4* from = parts + first * (kPartBytes / 16) + four;
  const float* lse_from = part_lse + first * kGroup + row;
  const int turns = __ldg(p.turns + static_cast<int64>(kv_head) * p.tokens + token);
  float top = kMinusInfinity, sum = 0.0f, o[8] = {};
#pragma unroll 1
  for (int turn = 0; turn < turns; turn += kTurnBatch) {
    uint4 found[kTurnBatch];
    float lse[kTurnBatch];
#pragma unroll
    for (int i = 0; i < kTurnBatch; ++i) {
      const bool exists = turn + i < turns;
      lse[i] = exists ? __ldcg(lse_from + (turn + i) * kGroup) : kMinusInfinity;
      found[i] = exists ? __ldcg(from + static_cast<int64>(turn + i) * (kPartBytes / 16)) : make_uint4(0, 0, 0, 0);
    }
    float next = top;
#pragma unroll
    for (int i = 0; i < kTurnBatch; ++i) next = fmaxf(next, lse[i]);
    const float shift = next == kMinusInfinity ? 0.0f : next, kept = ex2(top - shift);
    top = next;
    sum *= kept;
#pragma unroll
    for (int i = 0; i < 8; ++i) o[i] *= kept;
#pragma unroll
    for (int i = 0; i < kTurnBatch; ++i) {
      const float weight = ex2(lse[i] - shift);
      const float2 pairs[4] = {unpack(found[i].x), unpack(found[i].y), unpack(found[i].z), unpack(found[i].w)};
      sum += weight;
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        o[pair * 2] += weight * pairs[pair].x;
        o[pair * 2 + 1] += weight * pairs[pair].y;
      }
    }
  }
  const float factor = sum == 0.0f ? 0.0f : rcp(sum);
  unsigned short* to = p.out + head * p.out_head_stride + token * p.out_row_stride + column;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    *reinterpret_cast<uint32*>(to + pair * 8) = pack(o[pair * 2] * factor, o[pair * 2 + 1] * factor);
  }
  const float lse_log2 = sum == 0.0f ? kMinusInfinity : top + lg2(sum);
  if (column == 0 && p.lse != nullptr) p.lse[static_cast<int64>(head) * p.tokens + token] = lse_log2 * kLn2;
}

// Pieces of a slice.
__device__ __forceinline__ int pieces_of(const Params& p, int slice) {
  return min(p.slice_tokens, p.tokens - slice * p.slice_tokens) * p.kv_heads * (kPartBytes / kPieceBytes);
}

// Combines the slice before this one, with the warps of all thread blocks that compute: `index` is the thread block's
// of `number`.
__device__ __forceinline__ void combine_earlier(const Params& p, int index, int number) {
  const int warp = index * kCombineWarps + threadIdx.x / 32 - 1, pieces = pieces_of(p, p.slice - 1);
  wait_for_prerequisites();  // the launch of that slice
  launch_dependents();  // its parts are not those that this launch reads or writes
#pragma unroll 1
  for (int i = warp; i < pieces; i += number * kCombineWarps) {
    combine_piece(p, p.earlier_parts, p.earlier_lse, p.slice - 1, i);
  }
}

// Combines the last slice: one piece of each warp.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    h100_paged_key_lists64_gqa4_combine(const __grid_constant__ Params p) {
  const int index = blockIdx.x * (kRowThreads / 32) + threadIdx.x / 32;
  if (index < pieces_of(p, p.slice)) combine_piece(p, p.parts, p.part_lse, p.slice, index);
}

// ld.acquire.gpu: writes of the thread that stored this value with a release are visible after it (PTX ISA, "ld")
__device__ __forceinline__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// atom.add.acq_rel.gpu: adds to an integer, and returns it as it was. Everything visible to this thread becomes visible
// to the thread that adds next (PTX ISA, "atom")
__device__ __forceinline__ int atomic_add_acq_rel(int* to, int x) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(x) : "memory");
  return before;
}

// Phases of the transposition, in the order in which thread blocks draw them: rising bounds of the sequences; the
// entries of each tile, counted; first entry and first chunk of each tile; entries, written. A thread block waits only
// for those that drew before it. Counters in p.sync: what is drawn, then what is done of each phase.
constexpr int kDrawn = 0, kBounds = 1, kCounted = 2, kScanned = 3, kWritten = 4, kCounters = 5;
constexpr int kRowWarps = kRowThreads / 32, kScanTiles = kRowThreads * kThreadTiles;

// Waits until `number` thread blocks have done a phase.
__device__ __forceinline__ void wait_for(const Params& p, int phase, int number) {
  if (threadIdx.x == 0) {
    while (load_acquire(p.sync + phase) < number) {
    }
  }
  __syncthreads();
}

// Bounds within the tokens: one below an earlier one counts as that one. Without bounds, each sequence has `each`. One
// warp.
__device__ __forceinline__ void rising_bounds(const int* from, int* to, int number, int tokens, int each) {
  int before = 0;
  for (int first = 0; first < number; first += 32) {
    const int i = first + threadIdx.x % 32;
    int bound = i >= number ? 0 : from == nullptr ? i * each : min(max(__ldg(from + i), 0), tokens);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) bound = max(bound, __shfl_up_sync(kAllLanes, bound, lanes));
    bound = max(bound, before);
    if (i < number) to[i] = bound;
    before = __shfl_sync(kAllLanes, bound, 31);
  }
}

// Keys of each request, at most those it has room for. One warp.
__device__ __forceinline__ void find_lengths(const Params& p) {
  for (int i = threadIdx.x % 32; i < p.sequences; i += 32) {
    const int length = p.seq_lens == nullptr ? p.max_keys : min(max(__ldg(p.seq_lens + i), 0), p.max_keys);
    p.bounds[p.sequences + 1 + i] = length;
  }
}

// Last sequence that begins at or before `number`, by ascending begins; -1 before the first one.
template <typename Begin>
__device__ __forceinline__ int sequence_at(int sequences, int number, Begin begin) {
  int low = 0, high = sequences;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (begin(middle) <= number) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

// A query and KV head whose list is transposed.
struct Query {
  int token, position, tile;  // position in the sequence; first tile of that in its slice
  int64 place;  // of its list among all

  __device__ __forceinline__ Query(const Params& p, int index) {
    const int kv_head = index / p.tokens;
    token = index % p.tokens;
    place = static_cast<int64>(index) * p.list_length;
    const int* of_q = p.bounds;
    const int* of_k = p.bounds + p.sequences + 1;
    const int sequence = max(sequence_at(p.sequences, token, [of_q](int i) { return __ldcg(of_q + i); }), 0);
    const int end = __ldcg(of_q + sequence + 1);
    const bool inside = token >= __ldcg(of_q) && token < end;
    tile = (token / p.slice_tokens * p.kv_heads + kv_head) * p.tiles;
    position = inside ? __ldcg(of_k + sequence) - end + token : kNoSequence;
    tile += sequence * p.request_tiles;
  }
};

// Counts the entries of a query in their tiles, and keeps the rank of each among those of its tile; -1: not seen. One
// warp.
__device__ __forceinline__ void count_entries(const Params& p, int index) {
  const Query query(p, index);
  const int lane = threadIdx.x % 32, kv_head = index / p.tokens;
  const int* list = p.lists + kv_head * p.lists_head_stride + query.token * p.lists_row_stride;
  const int counted = p.counts == nullptr
      ? p.list_length
      : __ldg(p.counts + kv_head * p.counts_head_stride + query.token * p.counts_row_stride);
  int turns = 0;
  for (int i = lane; i - lane < min(p.list_length, counted); i += 32) {
    const int entry = i < min(p.list_length, counted) ? __ldg(list + i) : -1;
    const bool sees = entry >= 0 && query.position >= 0 && entry <= query.position / kTileN;
    if (i < p.list_length) p.ranks[query.place + i] = sees ? atomicAdd(p.tile_counts + query.tile + entry, 1) : -1;
    turns += __popc(__ballot_sync(kAllLanes, sees));
  }
  if (lane > 0) return;
  p.turns[index] = turns;
  if (kv_head == 0) p.positions[query.token] = query.position;
}

// Where the keys of a tile of a head are: first key, or request; position; keys.
__device__ __forceinline__ int4 place_of(const Params& p, int tile) {
  const int* of_k = p.bounds + p.sequences + 1;
  const int request = tile / p.request_tiles, position = tile % p.request_tiles * kTileN;
  return make_int4(request, position, max(min(__ldcg(of_k + request) - position, kTileN), 0), 0);
}

// First entry and first chunk of kScanTiles tiles, which continue those of the tiles before. Counts are 0 afterwards.
__device__ __forceinline__ void scan_tiles(const Params& p, int index, int tiles) {
  __shared__ int2 sums[kRowWarps];
  __shared__ int2 before;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = index * kScanTiles + threadIdx.x * kThreadTiles;
  const int end = min(first + kThreadTiles, tiles);
  int entries = 0, chunks = 0;
  for (int tile = first; tile < end; ++tile) {
    const int count = __ldcg(p.tile_counts + tile);
    entries += count;
    chunks += (count + p.chunk_entries - 1) / p.chunk_entries;
  }
  int2 until = make_int2(entries, chunks);
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int x = __shfl_up_sync(kAllLanes, until.x, lanes), y = __shfl_up_sync(kAllLanes, until.y, lanes);
    if (lane >= lanes) until = make_int2(until.x + x, until.y + y);
  }
  if (lane == 31) sums[warp] = until;
  wait_for(p, kScanned, index);
  if (threadIdx.x == 0) before = index == 0 ? make_int2(0, 0) : __ldcg(p.carry);
  __syncthreads();
  int entry = before.x + until.x - entries, chunk = before.y + until.y - chunks;
  for (int i = 0; i < warp; ++i) {
    entry += sums[i].x;
    chunk += sums[i].y;
  }
  for (int tile = first; tile < end; ++tile) {
    const int count = __ldcg(p.tile_counts + tile);
    p.tile_counts[tile] = 0;  // for the next launch
    p.offsets[tile] = entry;
    p.chunk_begins[tile] = chunk;
    if (tile < p.tiles) p.places[tile] = place_of(p, tile);
    for (int rest = count; rest > 0; rest -= p.chunk_entries) p.chunk_tiles[chunk++] = tile;
    entry += count;
  }
  if (threadIdx.x == kRowThreads - 1) {
    *p.carry = make_int2(entry, chunk);
    if (index == (tiles - 1) / kScanTiles) {
      p.offsets[tiles] = entry;
      p.chunk_begins[tiles] = chunk;
    }
  }
}

// Writes the entries of a query to their places. Its turns are in the order of its list. One warp.
__device__ __forceinline__ void write_entries(const Params& p, int index) {
  const Query query(p, index);
  const int lane = threadIdx.x % 32, kv_head = index / p.tokens;
  const int* list = p.lists + kv_head * p.lists_head_stride + query.token * p.lists_row_stride;
  const int turns = __ldcg(p.turns + index);
  int turn = 0;
  for (int i = lane; turn < turns; i += 32) {
    const int rank = i < p.list_length ? __ldcg(p.ranks + query.place + i) : -1;
    const uint32 seen = __ballot_sync(kAllLanes, rank >= 0);
    if (rank >= 0) {
      const int offset = __ldcg(p.offsets + query.tile + __ldg(list + i));
      p.entries[offset + rank] = make_int2(query.token, turn + __popc(seen & (1u << lane) - 1));
    }
    turn += __popc(seen);
  }
}

// One thread block for each ticket.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    h100_paged_key_lists64_gqa4_transpose(const __grid_constant__ Params p) {
  __shared__ int drawn;
  const int warp = threadIdx.x / 32, queries = p.kv_heads * p.tokens;
  const int tiles = (p.tokens + p.slice_tokens - 1) / p.slice_tokens * p.kv_heads * p.tiles;
  const int batches = (queries + kBatchQueries - 1) / kBatchQueries, scans = (tiles + kScanTiles - 1) / kScanTiles;
  if (threadIdx.x == 0) drawn = atomicAdd(p.sync + kDrawn, 1);
  __syncthreads();
  const int index = drawn - 1, batch = index < batches ? index : index - batches - scans;
  int phase = kBounds;
  if (index < 0) {
    if (warp == 0) rising_bounds(p.cu_seqlens_q, p.bounds, p.sequences + 1, p.tokens, p.request_queries);
    if (warp == 1) find_lengths(p);
  } else if (index < batches || index >= batches + scans) {
    phase = index < batches ? kCounted : kWritten;
    wait_for(p, phase - 1, phase == kCounted ? 1 : scans);
    for (int i = warp; i < kBatchQueries && batch * kBatchQueries + i < queries; i += kRowWarps) {
      if (phase == kCounted) {
        count_entries(p, batch * kBatchQueries + i);
      } else {
        write_entries(p, batch * kBatchQueries + i);
      }
    }
  } else {
    phase = kScanned;
    wait_for(p, kCounted, batches);
    scan_tiles(p, index - batches, tiles);
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  const int before = atomic_add_acq_rel(p.sync + phase, 1);
  if (phase == kWritten && before == batches - 1) {
    for (int i = 0; i < kCounters; ++i) p.sync[i] = 0;  // for the next launch
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    h100_paged_key_lists64_gqa4(const __grid_constant__ Params p) {
  // TMA swizzles by address, with a period of 1024 bytes: swizzled buffers are aligned to that.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  // The shuffle proves to the compiler that it is warp-uniform, so values derived from it go to uniform registers
  // (CUTLASS' canonical_warp_idx_sync).
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
  // A launch begins while the one before it ends. The first one needs all of the transposition; of the others, only the
  // warps that combine need the launch before.
  if (p.slice == 0) wait_for_prerequisites();
  const int tiles = p.tiles * p.kv_heads, first_chunk = __ldg(p.chunk_begins + p.slice * tiles);
  const int chunks = __ldg(p.chunk_begins + (p.slice + 1) * tiles) - first_chunk;
  // Thread blocks without a chunk have nothing to do, unless none has one: then all combine.
  const int number = chunks > 0 ? chunks : gridDim.x;
  if (blockIdx.x >= number) return;
  if (threadIdx.x == 0) {
    mbarrier_init(base + kKvFullBarrier, 1);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kQFullBarrier + 8 * i, kStepQueries);
      mbarrier_init(base + kQEmptyBarrier + 8 * i, kWarpgroupThreads);
    }
    fence_mbarrier_init();
    prefetch_tensormap(&p.q_map);
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
  }
  __syncthreads();
  if (warp < kWarpsPerWarpgroup) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp > 0) {
      if (p.slice > 0) {
        combine_earlier(p, blockIdx.x, number);
      } else {
        launch_dependents();
      }
    } else if (chunks > 0) {
      produce(p, shared, base, chunk_at(p, first_chunk + blockIdx.x));
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    if (chunks > 0) consume(p, shared, base, chunk_at(p, first_chunk + blockIdx.x));
  }
}
