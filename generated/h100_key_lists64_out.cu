// Generated from specs/h100_key_lists64_out.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_key_lists64_out.yaml
// spec: {"arch":"sm_90a","computes":"out","copy":"tma","dtype":"fp16","entry_keys":64,"group":16,"head_dim":128,"mma":"wgmma","op":"key_lists_forward","schedule":"cooperative","stages":4,"tile":{"m":64,"n":64}}
// spec hash: 4d2bea134cfa92bb54e81ffeb37c05a31560c08268e3c173ce273148672c8e43
// seal: sha256 f542e009d0983fd5965632fe39cf2b015c45f771c4da71f6036a51091bb4be05

// Attention for sm_90a of packed sequences over lists of key blocks, for many queries: each query and KV head has its
// own list. The second of two kernels: O = exp(scale * Q K^T - LSE) V, for the log-sum-exp of the first one.
// A thread block has the keys of one block and gathers the queries that list it. A query sees no key behind its own.
// It adds its part of a query's O to an accumulator in device memory when the query's turn has come: results are
// bitwise reproducible.
//
// Roles
//   warpgroup 0      warp 0 fills the ring of queries by TMA, one query of each lane, and loads K and V. Warps 1 and 2
//                    add to O's accumulator, one query of each lane, the steps of one consumer each.
//   warpgroups 1..   consumers, with alternate steps: S = Q K^T from shared memory, O = P V with P in registers.
//
// Barriers (full: the data has arrived; empty: the buffer may be overwritten)
//   kv_full                    K and V of the tile
//   q_full[i], q_empty[i]      stage i of the ring: Q, log-sum-exps and the last keys that they see
//   part_full[w], part_empty[w]  the part of O of consumer w
//   semaphore[query]           in device memory: number of entries whose part of the query's O has been added
//
// Symbols
//   row         a query head of a query: the heads of one KV head are adjacent
//   entry       a query that lists the tile
//   tile        the keys of one block and KV head
//   chunk       entries of a tile, in descending order of queries, processed by one thread block
//   step        64 rows: kStepQueries entries of the chunk
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
constexpr int kGroup = 16;  // query heads per KV head
constexpr int kTileN = 64;  // keys of a tile
constexpr int kStepQueries = 4;  // queries per step
constexpr int kStages = 4;  // depth of the ring
constexpr int kConsumerWarpgroups = 2;  // warpgroups that compute, in alternate steps
constexpr int kThreads = 384;  // warpgroup 0 produces, the others consume
constexpr int kProducerRegisters = 40;  // registers per producer thread
constexpr int kConsumerRegisters = 232;  // registers per consumer thread
constexpr int kGroupColumns = 64;  // columns of a group: one 128-byte swizzled row
constexpr int kGroups = 2;  // column groups per head
constexpr int kQGroupBytes = 8192;  // bytes of one column group of Q
constexpr int kKvGroupBytes = 8192;  // bytes of one column group of K or V
constexpr int kQBytes = 16384;  // bytes of Q of a step
constexpr int kKvBytes = 16384;  // bytes of K, or of V, of a tile
constexpr int kRowThreads = 256;  // threads per block of the epilogue
constexpr int kTileM = 64;  // rows per step
constexpr int kAddWarps = 2;  // warps that add to O, one for each consumer
constexpr int kPartBytes = 8192;  // bytes of a query's part of O, in fp32

// Dynamic shared memory: 165052 bytes. Byte offsets:
constexpr int kKOffset = 0;  // 16384 bytes: K of the tile in column groups
constexpr int kVOffset = 16384;  // 16384 bytes: V of the tile
constexpr int kQOffset = 32768;  // 65536 bytes: Q ring
constexpr int kPartsOffset = 98304;  // 65536 bytes: staging of each consumer's part of O, query by query
constexpr int kRowLseOffset = 163840;  // 1024 bytes: log-sum-exps of the rows in the ring
constexpr int kBarriersOffset = 164864;  // 104 bytes: mbarriers
constexpr int kLastKeysOffset = 164968;  // 80 bytes: last key that each query of the ring sees; whether one sees fewer
constexpr int kChunkIndexOffset = 165048;  // 4 bytes: index of the thread block's chunk

constexpr int kQFullBarrier = kBarriersOffset;
constexpr int kQEmptyBarrier = kQFullBarrier + 8 * kStages;
constexpr int kKvFullBarrier = kQEmptyBarrier + 8 * kStages;
constexpr int kPartFullBarrier = kKvFullBarrier + 8;
constexpr int kPartEmptyBarrier = kPartFullBarrier + 8 * kAddWarps;
constexpr int kConsumerBarrier = 1;  // named barrier of all consumers; 0: __syncthreads
constexpr int kWarpgroupThreads = 128, kWarpsPerWarpgroup = 4;
constexpr int kRowBytes = 128;  // bytes of a row of a column group in shared memory: the span of the swizzle
constexpr uint32 kAllLanes = 0xFFFFFFFF;
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
constexpr int kNoSequence = -2147483647 - 1;  // position of a token of no sequence

// Launch: 384 threads per block, 165052 bytes of dynamic shared memory.
// Grid: one thread block for each chunk of a tile's queries.
// Epilogue, with the same parameters: h100_key_lists64_out_convert, 256 threads per block.
struct Params {
  TensorMap q_map;  // Q (head_dim, q_len, heads, batch): box 64 x 1 x 16 x 1, swizzle 128
  TensorMap k_map;  // K (head_dim, kv_len, kv_heads, batch): box 64 x 64 x 1 x 1, swizzle 128
  TensorMap v_map;  // V, as K: box 64 x 64 x 1 x 1, swizzle 128
  const int2* entries;  // token and turn of each entry, by tile
  const int* offsets;  // first entry of each tile, then the end of the last one
  const int4* places;  // first token in K of each tile of a head, its position, and keys there
  const int* chunk_begins;  // first chunk of each tile, then the number of chunks
  const int* chunk_tiles;  // tile of each chunk; none behind the last one
  const int* positions;  // position of each query (tokens,)
  const int* turns;  // entries that each query sees, (kv_heads, tokens)
  const float* row_lse;  // log-sum-exp to base 2, (tokens, heads)
  float* accum;  // sums of O, (kv_heads, tokens, kPartBytes / 4)
  int* semaphore;  // turns that have passed of each query, (kv_heads, tokens)
  int* scheduler;  // chunks that thread blocks have taken
  unsigned short* out;  // O (tokens, heads, head_dim)
  int64 out_head_stride;  // head stride, in elements
  int64 out_row_stride;  // row stride, in elements
  int tokens;  // queries of all sequences
  int heads;  // query heads
  int kv_heads;  // heads of K and V
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

// Index of the thread block's chunk, returned to all its threads after a barrier. Thread blocks need not start in the
// order of their own indices, so they draw chunks in the order of the turns. A chunk that waits for a turn then waits
// only for chunks drawn before it.
__device__ __forceinline__ int take_chunk(const Params& p, unsigned char* shared) {
  int* index = reinterpret_cast<int*>(shared + kChunkIndexOffset);
  if (threadIdx.x == 0) {
    *index = atomicAdd(p.scheduler, 1);
    if (*index == gridDim.x - 1) *p.scheduler = 0;  // for the next launch
  }
  __syncthreads();
  return *index;
}

// Whether the accumulator holds a sum for a query: it is undefined for a query that sees no entry.
__device__ __forceinline__ bool has_sum(const Params& p, int64 place) { return __ldg(p.turns + place) > 0; }

// Begins to add a query's part when its turn has come. The first part is stored, so the accumulator need not be
// cleared. Returns when the part's shared memory has been read.
__device__ __forceinline__ void begin_part(const Params& p, uint32 part, int64 place, int turn) {
  float* to = p.accum + place * (kPartBytes / 4);
  if (turn == 0) {
    tma_store_bytes(to, part, kPartBytes);
  } else {
    while (load_acquire(p.semaphore + place) != turn) {
    }
    fence_proxy_async_global();  // makes the previous parts visible to the async proxy
    tma_reduce_add(to, part, kPartBytes);
  }
  tma_store_commit();
  tma_store_wait_read<0>();
}

// Waits until a part has been added, and passes the turn on.
__device__ __forceinline__ void finish_part(const Params& p, int64 place, int turn) {
  tma_store_wait<0>();
  fence_proxy_async_global();
  const bool is_last = turn + 1 == __ldg(p.turns + place);
  store_release(p.semaphore + place, is_last ? 0 : turn + 1);  // 0: for the next launch
}

// Adds a step's parts, one query of each lane. A list may repeat a key block: the lanes of one query go one by one.
__device__ __forceinline__ void add_step(
    const Params& p, uint32 parts, uint32 empty, int64 place, int turn, bool exists) {
  const int lane = threadIdx.x % 32;
  const uint32 part = parts + lane * kPartBytes;
  const bool repeated = place == __shfl_up_sync(kAllLanes, place, 1) && lane > 0 && exists;
  if (!__any_sync(kAllLanes, repeated)) {
    if (exists) begin_part(p, part, place, turn);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty);
    if (exists) finish_part(p, place, turn);
    __syncwarp();
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kStepQueries; ++i) {
    if (lane == i && exists) {
      begin_part(p, part, place, turn);
      finish_part(p, place, turn);
    }
    __syncwarp();
  }
  if (lane == 0) mbarrier_arrive(empty);
}

// Adds the chunk's parts to the accumulator, for every other step: one warp of two.
__device__ __forceinline__ void add_parts(const Params& p, uint32 base, const Chunk& chunk, int warp) {
  const int lane = threadIdx.x % 32;
  const uint32 full = base + kPartFullBarrier + 8 * warp, empty = base + kPartEmptyBarrier + 8 * warp;
  const uint32 parts = base + kPartsOffset + warp * (kStepQueries * kPartBytes);
#pragma unroll 1
  for (int step = warp; step < chunk.steps(); step += kAddWarps) {
    const int index = chunk.first + step * kStepQueries + lane;
    const bool exists = lane < kStepQueries && index < chunk.end;
    const int2 entry = exists ? __ldg(p.entries + index) : make_int2(-1, 0);  // token, turn
    mbarrier_wait(full, step / kAddWarps % 2);
    add_step(p, parts, empty, static_cast<int64>(chunk.kv_head) * p.tokens + entry.x, entry.y, exists);
  }
}

// Producer: one warp, with one query of a step for each lane. Lanes behind the last entry repeat it, for no key: what
// they load is finite, and has no weight.
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
    const int2 entry = __ldg(p.entries + min(index, chunk.end - 1));  // token, turn
    const int position = __ldg(p.positions + entry.x) - chunk.first_position;
    const int last = index < chunk.end ? min(position, chunk.keys - 1) : -1;
    const bool sees_fewer = __any_sync(kAllLanes, lane < kStepQueries && last < kTileN - 1);
    const uint32 full = base + kQFullBarrier + 8 * stage;
    mbarrier_wait(base + kQEmptyBarrier + 8 * stage, step / kStages % 2 ^ 1);
    if (lane < kStepQueries) last_keys[stage * (kStepQueries + 1) + lane] = last;
    if (lane == 0) last_keys[stage * (kStepQueries + 1) + kStepQueries] = sees_fewer;
    __syncwarp();
    if (lane == 0) mbarrier_arrive_expect_tx(full, kQBytes + kTileM * 4);
    if (lane < kStepQueries) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int offset = stage * kQBytes + group * kQGroupBytes + lane * (kGroup * kRowBytes);
        tma_load_4d(base + kQOffset + offset, &p.q_map, full, group * kGroupColumns, entry.x, first_head, 0);
      }
      tma_load_bytes(base + kRowLseOffset + (stage * kTileM + lane * kGroup) * 4,
          p.row_lse + static_cast<int64>(entry.x) * p.heads + first_head, kGroup * 4, full);
    }
  }
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

// Zero-fills the rows of V behind the last key of the tile: their weights are 0, and not even NaN there has an effect.
__device__ __forceinline__ void clear_hidden_rows(unsigned char* shared, int keys) {
  constexpr int kRowChunks = kRowBytes / 16, kConsumers = kConsumerWarpgroups * kWarpgroupThreads;
  const int thread = threadIdx.x - kWarpgroupThreads;
#pragma unroll 1
  for (int row = keys + thread / kRowChunks; row < kTileN; row += kConsumers / kRowChunks) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      unsigned char* place = shared + kVOffset + group * kKvGroupBytes + row * kRowBytes + thread % kRowChunks * 16;
      *reinterpret_cast<uint4*>(place) = make_uint4(0, 0, 0, 0);
    }
  }
  fence_proxy_async();
  bar_sync(kConsumerBarrier, kConsumers);
}

// Stages a warp's 16 rows of O, query by query in the layout of the accumulator.
__device__ __forceinline__ void stage_part(unsigned char* staging, const float (&o)[kHeadDim / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarpsPerWarpgroup;
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
    float4* to = reinterpret_cast<float4*>(staging) + (warp * (kHeadDim / 8) + j) * 32 + lane;
    *to = make_float4(o[j * 4], o[j * 4 + 1], o[j * 4 + 2], o[j * 4 + 3]);
  }
}

__device__ __forceinline__ void consume(const Params& p, unsigned char* shared, uint32 base, const Chunk& chunk,
    int warpgroup) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % kWarpsPerWarpgroup * 16 + lane / 4;
  const uint32 k_descriptor = __shfl_sync(kAllLanes, wgmma_descriptor(base + kKOffset, 0), 0);
  const uint32 v_descriptor = __shfl_sync(kAllLanes, wgmma_descriptor(base + kVOffset, kKvGroupBytes), 0);
  const uint32 q_descriptors = __shfl_sync(kAllLanes, wgmma_descriptor(base + kQOffset, 0), 0);
  unsigned char* staging = shared + kPartsOffset + warpgroup * (kTileM * kHeadDim * 4);
  mbarrier_wait(base + kKvFullBarrier, 0);
  if (chunk.keys < kTileN) clear_hidden_rows(shared, chunk.keys);
#pragma unroll 1
  for (int step = warpgroup, i = 0; step < chunk.steps(); step += kConsumerWarpgroups, ++i) {
    const int stage = step % kStages;
    const int* last_keys = reinterpret_cast<const int*>(shared + kLastKeysOffset) + stage * (kStepQueries + 1);
    const float* row_lse = reinterpret_cast<const float*>(shared + kRowLseOffset) + stage * kTileM + row;
    float s[kTileN / 2], o[kHeadDim / 2] = {};
    uint32 p_frag[kTileN / 16][4];
    mbarrier_wait(base + kQFullBarrier + 8 * stage, step / kStages % 2);
    issue_scores(s, q_descriptors + (stage * kQBytes >> 4), k_descriptor);
    wgmma_wait<0>();
    warpgroup_fence_operand(s);
    if (last_keys[kStepQueries]) hide_keys(s, last_keys, row);
    const float lse[2] = {row_lse[0], row_lse[8]};
    mbarrier_arrive(base + kQEmptyBarrier + 8 * stage);
    // P, packed to 16 bits. The accumulator layout of S is the A-operand layout.
#pragma unroll
    for (int k = 0; k < kTileN / 16; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = k * 8 + j * 2;
        p_frag[k][j] = pack(ex2(s[at] * p.scale_log2 - lse[j % 2]), ex2(s[at + 1] * p.scale_log2 - lse[j % 2]));
      }
    }
    warpgroup_fence_operand(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileN / 16; ++k) {
      wgmma_m64n128k16_registers_mn_major(o, p_frag[k], v_descriptor + (k * 16 * kRowBytes >> 4), 1);
    }
    wgmma_commit();
    warpgroup_fence_operand(o);
    wgmma_wait<0>();
    warpgroup_fence_operand(o);
    mbarrier_wait(base + kPartEmptyBarrier + 8 * warpgroup, i % 2 ^ 1);
    stage_part(staging, o);
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(base + kPartFullBarrier + 8 * warpgroup);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    h100_key_lists64_out(const __grid_constant__ Params p) {
  // TMA swizzles by address, with a period of 1024 bytes: swizzled buffers are aligned to that.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  // The shuffle proves to the compiler that both are warp-uniform, so values derived from them go to uniform registers
  // (CUTLASS' canonical_warp_idx_sync).
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0), warpgroup = warp / kWarpsPerWarpgroup;
  if (threadIdx.x == 0) {
    mbarrier_init(base + kKvFullBarrier, 1);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kQFullBarrier + 8 * i, 1);
      mbarrier_init(base + kQEmptyBarrier + 8 * i, kWarpgroupThreads);
    }
    for (int i = 0; i < kAddWarps; ++i) {
      mbarrier_init(base + kPartFullBarrier + 8 * i, kWarpsPerWarpgroup);
      mbarrier_init(base + kPartEmptyBarrier + 8 * i, 1);
    }
    fence_mbarrier_init();
    prefetch_tensormap(&p.q_map);
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
  }
  const int index = take_chunk(p, shared), tile = __ldg(p.chunk_tiles + index);
  if (tile >= p.tiles * p.kv_heads) return;  // there are fewer chunks than thread blocks
  const Chunk chunk(p, index, tile);
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) {
      produce(p, shared, base, chunk);
    } else if (warp <= kAddWarps) {
      add_parts(p, base, chunk, warp - 1);
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, shared, base, chunk, warpgroup - 1);
  }
}

// O from its accumulator in 16 bits: two columns of each thread. Queries that see no key have 0; tokens of no sequence
// are left out.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    h100_key_lists64_out_convert(const __grid_constant__ Params p) {
  constexpr int kPairs = kGroup * kHeadDim / 2;  // of columns of a query
  const int64 index = static_cast<int64>(blockIdx.x) * kRowThreads + threadIdx.x, query = index / kPairs;
  if (query >= static_cast<int64>(p.kv_heads) * p.tokens) return;
  const int64 token = query % p.tokens;
  if (__ldg(p.positions + token) == kNoSequence) return;
  // The layout of stage_part.
  const int pair = index % kPairs;
  const int lane = pair / 2 % 32, eight = pair / 64, row = lane / 4 + pair % 2 * 8;
  const int64 head = query / p.tokens * kGroup + row;
  const float2 found =
      has_sum(p, query) ? reinterpret_cast<const float2*>(p.accum)[index] : make_float2(0.0f, 0.0f);
  unsigned short* to = p.out + head * p.out_head_stride + token * p.out_row_stride + eight * 8 + lane % 4 * 2;
  *reinterpret_cast<uint32*>(to) = pack(found.x, found.y);
}
