// Generated from specs/h100_e4m3_bsr_sddmm_b128.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_e4m3_bsr_sddmm_b128.yaml
// spec: {"arch":"sm_90a","block":{"cols":128,"rows":128},"copy":"tma","dtype":"e4m3","mma":"wgmma","op":"bsr_sddmm","schedule":"cooperative","stages":4,"tile":{"k":128,"m":128,"n":256}}
// spec hash: db7d6b768fb032f533cc0dd7d478e8f8a55cf2bba15acc0f6949e0b1735d7610
// seal: sha256 6316d1eef47071859e4e65e3dc03b2e98f23a91a377d4713261d8904c4967183

// Sampled product in FP8 for sm_90a: the stored blocks of C = A B^T, with C in block-sparse rows and A, B dense and
// row-major. A and B have one scale each.
//
// The product is computed transposed, C^T = B A^T: rows of B are the M side of a wgmma, rows of A its N side.
//
// Roles
//   warpgroup 0      producer. Its first warp finds the rows of the stored blocks and fills the ring by TMA; the others
//                    are idle.
//   warpgroups 1, 2  consumers. Each accumulates its column groups of a unit in registers, then stores them by TMA.
//
// Barriers
//   full[i]   producer -> consumers: stage i holds the A tile and the B tile of one step, and counts[i]
//   empty[i]  consumers -> producer: every consumer warp has finished with stage i
//   named barrier kWarpgroupBarrier + w: the threads of consumer w around its staging of C
//
// Pipeline of a consumer: the tensor core accumulates the products of kAccumulateEvery steps of a column group, which
// are then added to its sums in fp32. Meanwhile, the other consumer's products run. The producer runs ahead across
// units.
//
// Symbols
//   tile         kTileBlocks consecutive stored blocks of C. Tiles are numbered in storage order, so that concurrent
//                thread blocks share block rows of A and of B, which then come from the L2
//   unit         the blocks of a tile that lie in one block row: they share the A tile. Most tiles are one unit; a tile
//                in which a block row ends has several. Missing blocks of a unit are not loaded, and their products
//                are not stored
//   step         kTileK columns of A and B
//   group        64 columns of C, rows of B
//   piece        kPieceRows rows of a group of C, staged through shared memory as boxes, one copy each
//   sums         a thread's part of a group (64 columns x kTileM rows of C): columns c and c + 8 of its warp's 16
//                (c = lane / 4), rows 8 j + 2 (lane % 4) + {0, 1}. Number 4 j + 2 h + e is column
//                c + 8 h, row with {e}

using int64 = long long;
using uint32 = unsigned int;

// Stands for CUtensorMap: 128 opaque bytes (PTX ISA, "Tensor-Map"), 64-byte aligned (driver API,
// cuTensorMapEncodeTiled). The comments of parameters of this type give the dimensions, innermost first, the box of one
// copy, and the bytes of the swizzle.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

constexpr int kTileM = 128;  // rows of a C tile: one block row
constexpr int kTileK = 128;  // depth of one step, bytes of a row of A and of a column of B
constexpr int kStages = 4;  // depth of the ring of A and B tiles
constexpr int kAccumulateEvery = 1;  // steps that the tensor core accumulates before promotion
constexpr int kThreads = 384;  // warpgroup 0 produces, the others consume
constexpr int kConsumerWarps = 8;  // warps that compute
constexpr int kProducerRegisters = 40;  // registers per producer thread
constexpr int kConsumerRegisters = 232;  // registers per consumer thread; 40 + 2 x 232 equals the 3 x 168 at launch
constexpr int kGroupColumns = 64;  // columns of a group: the M side of one wgmma
constexpr int kWarpgroupGroups = 2;  // column groups of a warpgroup
constexpr int kProducts = 64;  // accumulators per thread and column group
constexpr int kABytes = 16384;  // bytes of an A tile
constexpr int kBBytes = 32768;  // bytes of a B tile
constexpr int kBGroupBytes = 8192;  // bytes of the columns of B of one group
constexpr int kPieceRows = 32;  // rows of a piece of C
constexpr int kPieceBytes = 4096;  // bytes of a piece of C
constexpr int kBoxRowBytes = 128;  // bytes of a row of a box of C: the span of its swizzle
constexpr int kBoxColumns = 64;  // columns of a box of C
constexpr int kBoxBytes = 4096;  // bytes of a box of C
constexpr int kStagingPieces = 4;  // pieces of C that a warpgroup may have in flight
constexpr int kBlockCols = 128;  // columns of a stored block of C
constexpr int kTileBlocks = 2;  // most stored blocks per tile
constexpr int kBBlockBytes = 16384;  // bytes of a B tile per stored block
constexpr int kStageBytes = 16384;  // bytes of a stage, excluding those of stored blocks
constexpr int kBlockBytes = 16384;  // bytes of a stage for each stored block

// Dynamic shared memory: 229456 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 65536 bytes: ring of A tiles, 128 rows of 128 bytes
constexpr int kBOffset = 65536;  // 131072 bytes: ring of B tiles, 256 columns of 128 bytes
constexpr int kCOffset = 196608;  // 32768 bytes: 4 pieces of C of each warpgroup
constexpr int kBarriersOffset = 229376;  // 64 bytes: mbarriers: full, then empty
constexpr int kCountsOffset = 229440;  // 16 bytes: stored blocks of the unit of each stage

constexpr int kFullBarrier = kBarriersOffset;
constexpr int kEmptyBarrier = kFullBarrier + 8 * kStages;
constexpr int kWarpgroupThreads = 128;
constexpr int kSlice = 32;            // depth of a wgmma: bytes of a row of its operands
constexpr int kWarpgroupBarrier = 1;  // named barrier of consumer w: kWarpgroupBarrier + w
using Products = float[kProducts];
using Sums = float[kWarpgroupGroups][kProducts];

// Launch: 384 threads per block, 229456 bytes of dynamic shared memory.
// Grid: one thread block per SM, looping over tiles (persistent), in the order of storage.
struct Params {
  TensorMap a_map;  // A (K, M): box 128 x 128, swizzle 128
  TensorMap b_map;  // B (K, N): box 128 x 128, swizzle 128
  TensorMap c_map;  // stored blocks of C (cols, rows, nnz): box 64 x 32 x 1, swizzle 128
  const int* crow_indices;  // row offsets: first block of each block row, then the end of the last
  const int* col_indices;  // block column of each stored block
  int index_words;  // 32-bit words per index, 1 or 2; the kernel reads the low word
  const float* a_scale;  // scale of A: value = code * scale
  const float* b_scale;  // scale of B
  int block_rows;  // block rows of C
  int blocks;  // stored blocks of C
  int steps;  // K / kTileK, rounded up
  int tiles;  // blocks / kTileBlocks, rounded up
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

// cp.async.bulk.tensor.2d: copies the tensor box at (c0, ...) to shared memory, counted by an mbarrier. Elements
// outside the tensor, even before its first element, are zero-filled and counted (PTX ISA, "cp.async.bulk.tensor")
__device__ __forceinline__ void tma_load_2d(
    uint32 to, const TensorMap* map, uint32 barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1) : "memory");
}

// cp.async.bulk.tensor.3d: copies shared memory to the tensor box at (c0, ...), clipped at the tensor's ends
// (PTX ISA, "cp.async.bulk.tensor")
__device__ __forceinline__ void tma_store_3d(const TensorMap* map, uint32 from, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
      ::"l"(map), "r"(from), "r"(c0), "r"(c1), "r"(c2) : "memory");
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

// elect.sync, CUTLASS' elect_one_sync: whether this lane is the elected one of its warp, always the same. Unlike a
// comparison of lanes, it proves to the compiler that a single lane is active, so a copy is issued without a loop over
// lanes (PTX ISA, "elect.sync")
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

// Matrix descriptor of a K-major tile in shared memory whose rows are 128 bytes, with a swizzle of the same width
// (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "Matrix Descriptor Format"). The upper half is
// constant: the swizzle, and 1024 bytes from 8 rows to the next 8 (SBO, the stride byte offset). Descriptors are
// therefore passed and advanced as their lower halves: the address in units of 16 bytes.
constexpr uint32 kDescriptorUpperHalf = 0x40000040;

__device__ __forceinline__ uint32 wgmma_descriptor(uint32 address) { return (address & 0x3FFFF) >> 4; }

// wgmma.mma_async m64n128k32: D = A B, + D if `accumulate`; A in shared memory. 8-bit operands are K-major. After p
// come scale factors of 1 for A and B (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n128k32_shared(
    float (&d)[64], uint32 a, uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "mov.b64 a, { %64, %67 };\n"
      "mov.b64 b, { %65, %67 };\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
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
      "%60, %61, %62, %63"
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
        "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf));
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

// Block row of a stored block: the last row that begins at or before it. The search begins at `row`, which must not
// come after the result. The lanes of a warp probe 32 rows at equal distances, and continue between the last of these
// that begins at or before the block and the next one.
__device__ __forceinline__ int find_row(const Params& p, int block, int row) {
  const int lane = threadIdx.x % 32;
  int end = p.block_rows;
  while (end - row > 1) {
    const int stride = (end - row + 31) / 32;
    const int probe = row + lane * stride;
    const bool begun = lane == 0 || (probe < end && load_index(p.crow_indices, p.index_words, probe) <= block);
    row += (31 - __clz(__ballot_sync(0xFFFFFFFF, begun))) * stride;
    end = min(end, row + stride);
  }
  return row;
}

// Copies the A tile and the B tile of one step to a stage of the ring, as soon as it is empty.
__device__ __forceinline__ void load_step(const Params& p, uint32 base, int* counts, PipelineState state, int k,
    int count, int a_row, const int (&b_rows)[kTileBlocks]) {
  const uint32 full = base + kFullBarrier + 8 * state.index;
  const uint32 a = base + kAOffset + state.index * kABytes, b = base + kBOffset + state.index * kBBytes;
  mbarrier_wait(base + kEmptyBarrier + 8 * state.index, state.phase ^ 1);
  counts[state.index] = count;
  mbarrier_arrive_expect_tx(full, kStageBytes + count * kBlockBytes);
  tma_load_2d(a, &p.a_map, full, k, a_row);
#pragma unroll
  for (int i = 0; i < kTileBlocks; ++i) {
    if (i < count) tma_load_2d(b + i * kBBlockBytes, &p.b_map, full, k, b_rows[i]);
  }
}

// Producer: one warp fills the ring, unit after unit. Its lanes find rows and columns; one of them issues the copies.
__device__ __forceinline__ void produce(const Params& p, uint32 base, int* counts) {
  const int lane = threadIdx.x;
  PipelineState state;
  int row = 0;

  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int first = tile * kTileBlocks, end = min(first + kTileBlocks, p.blocks);
    const int column = first + lane < end ? load_index(p.col_indices, p.index_words, first + lane) : 0;

    for (int block = first; block < end;) {
      row = find_row(p, block, row);
      // At least one block, even if crow_indices is invalid: the loop must terminate.
      const int count = max(min(load_index(p.crow_indices, p.index_words, row + 1), end) - block, 1);
      int b_rows[kTileBlocks];
#pragma unroll
      for (int i = 0; i < kTileBlocks; ++i) {
        b_rows[i] = __shfl_sync(0xFFFFFFFF, column, block - first + i) * kBlockCols;
      }
#pragma unroll 1
      for (int step = 0; step < p.steps; ++step) {
        if (elect()) load_step(p, base, counts, state, step * kTileK, count, row * kTileM, b_rows);
        state.advance();
        __syncwarp();
      }
      block += count;
    }
  }
}

// products = B^T A^T for one column group and one step, or added to those of the previous steps (asynchronous).
__device__ __forceinline__ void issue_group(Products& products, uint32 a_descriptor, uint32 b_descriptor, bool first) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileK; k += kSlice) {
    wgmma_m64n128k32_shared(products, b_descriptor + (k >> 4), a_descriptor + (k >> 4), !first || k > 0);
  }
  wgmma_commit();
}

// sums += the products of all steps of a unit, as they arrive in the ring. The tensor core, whose accumulators have
// about 14 bits, accumulates kAccumulateEvery steps of a column group, which are then added in fp32. While one
// warpgroup adds, the other's products run.
__device__ __forceinline__ void multiply(Sums& sums, uint32 base, PipelineState& state, uint32 a_descriptor,
    uint32 b_descriptor, int steps) {
  const bool warp_leader = threadIdx.x % 32 == 0;
  // The same registers serve all groups: the products of the next one wait until these are added.
  Products products = {};
#pragma unroll 1
  for (int step = 0; step < steps; step += kAccumulateEvery) {
    PipelineState at;
#pragma unroll
    for (int group = 0; group < kWarpgroupGroups; ++group) {
      at = state;
      if (group == 0) mbarrier_wait(base + kFullBarrier + 8 * at.index, at.phase);
#pragma unroll
      for (int i = 0; i < kAccumulateEvery; ++i) {
        if (i > 0 && step + i >= steps) break;
        if (group == 0 && i > 0) mbarrier_wait(base + kFullBarrier + 8 * at.index, at.phase);
        issue_group(products, a_descriptor + (at.index * kABytes >> 4),
            b_descriptor + ((group * kBGroupBytes + at.index * kBBytes) >> 4), i == 0);
        at.advance();
      }
      wgmma_wait<0>();
      warpgroup_fence_operand(products);
      // All data of the stages has been read.
      if (group == kWarpgroupGroups - 1) {
        for (; state.index != at.index; state.advance()) {
          if (warp_leader) mbarrier_arrive(base + kEmptyBarrier + 8 * state.index);
        }
      }
#pragma unroll
      for (int i = 0; i < kProducts; ++i) sums[group][i] += products[i];
    }
  }
}

// bar.sync: waits at named barrier `id` of `threads` threads (PTX ISA, "bar")
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// cvt.rn.bf16x2.f32: converts two floats to a pair of bf16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// stmatrix.x4.trans: stores four 8 x 8 matrices of 16-bit elements, each transposed; each lane holds the address of one
// row in memory, that is, of one column of a matrix (PTX ISA, "stmatrix")
__device__ __forceinline__ void stmatrix_x4_trans(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4 };"
      ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Writes a warpgroup's piece of C, 64 columns of kPieceRows rows, to shared memory: `x` is the thread's part, to be
// multiplied by `scale`. The sums are transposed on the way, 16 rows by the warp's 16 columns at a time. A row of a box
// is 16-byte chunks; TMA's swizzle puts chunk i at position i ^ row % 8 or, in rows of 64 bytes, at i ^ row / 2 % 4.
// Lanes 8 i to 8 i + 7 address the rows of matrix i.
__device__ __forceinline__ void write_piece(uint32 to, const float* x, float scale) {
  const int lane = threadIdx.x % 32, column = threadIdx.x / 32 % 4 * 16 + lane / 8 % 2 * 8;
  const uint32 box = to + column / kBoxColumns * kBoxBytes;
  const int chunk = column % kBoxColumns / 8;
#pragma unroll
  for (int j = 0; j < kPieceRows / 16; ++j, x += 8) {
    const int row = j * 16 + lane / 16 * 8 + lane % 8;
    const int place = chunk ^ (kBoxRowBytes == 128 ? row % 8 : row / 2 % 4);
    stmatrix_x4_trans(box + row * kBoxRowBytes + place * 16, pack(x[0] * scale, x[1] * scale),
        pack(x[2] * scale, x[3] * scale), pack(x[4] * scale, x[5] * scale), pack(x[6] * scale, x[7] * scale));
  }
}

// Staging of a warpgroup's pieces of C in shared memory, one after the other.
struct Staging {
  uint32 base;
  int warpgroup, stored = 0;  // pieces, modulo kStagingPieces

  // Writes a piece to the staging buffer and stores its boxes by `store_box(from, i)`, after the buffer's previous
  // content has been read.
  template <typename StoreBox>
  __device__ __forceinline__ void store(const float* x, float scale, StoreBox store_box) {
    const bool leader = threadIdx.x % kWarpgroupThreads == 0;
    const uint32 piece = base + stored * kPieceBytes;
    stored = (stored + 1) % kStagingPieces;
    if (leader) tma_store_wait_read<kStagingPieces - 1>();
    bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
    write_piece(piece, x, scale);
    fence_proxy_async();
    bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
    if (leader) {
#pragma unroll
      for (int i = 0; i < kPieceBytes / kBoxBytes; ++i) store_box(piece + i * kBoxBytes, i);
      tma_store_commit();
    }
  }
  // Shared memory must outlive the stores that read it.
  __device__ __forceinline__ void wait() const {
    if (threadIdx.x % kWarpgroupThreads == 0) tma_store_wait_read<0>();
  }
};

// Stores a warpgroup's part of a unit of `count` blocks, starting at `block`.
__device__ __forceinline__ void store_c(const Params& p, const Sums& sums, float scale, Staging& staging,
    int first_column, int block, int count) {
#pragma unroll
  for (int group = 0; group < kWarpgroupGroups; ++group) {
    const int column = first_column + group * kGroupColumns;
    if (column / kBlockCols >= count) break;
#pragma unroll
    for (int row = 0; row < kTileM; row += kPieceRows) {
      staging.store(sums[group] + row / 2, scale, [&](uint32 from, int i) {
        const int of_box = column + i * kBoxColumns, number = of_box / kBlockCols;
        if (number < count) tma_store_3d(&p.c_map, from, of_box % kBlockCols, row, block + number);
      });
    }
  }
}

// Consumer: one warpgroup computes its column groups of a unit, unit after unit.
__device__ __forceinline__ void consume(const Params& p, uint32 base, const int* counts, int warpgroup) {
  const int first_column = warpgroup * kWarpgroupGroups * kGroupColumns;
  const uint32 a_descriptor = wgmma_descriptor(base + kAOffset);
  const uint32 b_descriptor = wgmma_descriptor(base + kBOffset + warpgroup * kWarpgroupGroups * kBGroupBytes);
  const float scale = __ldg(p.a_scale) * __ldg(p.b_scale);
  PipelineState state;
  Staging staging{base + kCOffset + warpgroup * kStagingPieces * kPieceBytes, warpgroup};

  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int end = min((tile + 1) * kTileBlocks, p.blocks);
    for (int block = tile * kTileBlocks; block < end;) {
      Sums sums;
#pragma unroll
      for (int group = 0; group < kWarpgroupGroups; ++group) {
#pragma unroll
        for (int i = 0; i < kProducts; ++i) sums[group][i] = 0.0f;
      }
      // The first stage holds the number of blocks of the unit.
      mbarrier_wait(base + kFullBarrier + 8 * state.index, state.phase);
      const int count = read_by_leader(counts + state.index);
      multiply(sums, base, state, a_descriptor, b_descriptor, p.steps);
      store_c(p, sums, scale, staging, first_column, block, count);
      block += count;
    }
  }
  staging.wait();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    h100_e4m3_bsr_sddmm_b128(const __grid_constant__ Params p) {
  // TMA swizzles by address, with a period of 1024 bytes: swizzled buffers are aligned to that.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  int* counts = reinterpret_cast<int*>(shared + kCountsOffset);
  // The shuffle proves to the compiler that it is warp-uniform, so values derived from it go to uniform registers.
  const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / kWarpgroupThreads, 0);

  // One thread initializes the barriers. An empty barrier counts one arrival per consumer warp.
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kFullBarrier + 8 * i, 1);
      mbarrier_init(base + kEmptyBarrier + 8 * i, kConsumerWarps);
    }
    fence_mbarrier_init();
    prefetch_tensormap(&p.a_map);
    prefetch_tensormap(&p.b_map);
    prefetch_tensormap(&p.c_map);
  }
  __syncthreads();

  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x < 32) produce(p, base, counts);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, base, counts, warpgroup - 1);
  }
}
