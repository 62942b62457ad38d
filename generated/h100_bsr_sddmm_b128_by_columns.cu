// Generated from specs/h100_bsr_sddmm_b128_by_columns.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_bsr_sddmm_b128_by_columns.yaml
// spec: {"a_layout":"column_major","arch":"sm_90a","b_layout":"column_major","block":{"cols":128,"rows":128},"copy":"tma","dtype":"fp16","mma":"wgmma","op":"bsr_sddmm","schedule":"cooperative","stages":4,"tile":{"k":64,"m":128,"n":256}}
// spec hash: 3763128259d5bd79a97b3957199cd77de992db44da9170143c95852937de90f9
// seal: sha256 128cd5e33cb4295f4e1d6a0cb8e2a84d306ee06fd8807d99c96e8885ab4e5408

// Sampled product for sm_90a: the stored blocks of C = A B^T, with C in block-sparse rows and A, B dense.
//
// Roles
//   warpgroup 0      producer. Its first warp finds the rows of the stored blocks and fills the ring by TMA; the others
//                    are idle.
//   warpgroups 1, 2  consumers. Each accumulates its part of a unit in registers, then stores it by TMA.
//
// Barriers
//   full[i]   producer -> consumers: stage i holds the A tile and the B tile of one step, and counts[i]
//   empty[i]  consumers -> producer: every consumer warp has finished with stage i
//   named barrier kWarpgroupBarrier + w: the threads of consumer w around its staging of C
//
// Pipeline of a consumer: the products of step s are issued before those of step s - 1 complete, so the tensor cores
// never wait for the issue. When only those of step s can still be running, the stage of step s - 1 is released. The
// producer runs ahead across units.
//
// Symbols
//   tile         kTileBlocks consecutive stored blocks of C. Tiles are numbered in storage order, so that concurrent
//                thread blocks share block rows of A and of B, which then come from the L2
//   unit         the blocks of a tile that lie in one block row: they share the A tile. Most tiles are one unit; a tile
//                in which a block row ends has several. Missing blocks of a unit are not loaded, and their products
//                are not stored
//   step         kTileK columns of A and B
//   group        64 columns of A, B or C: in shared memory rows of 128 bytes, swizzled
//                of A and B, which are stored by columns: 64 columns of the transpose
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

constexpr int kBlockRows = 128;  // rows of a stored block of C: those of a tile
constexpr int kBlockCols = 128;  // columns of a stored block of C
constexpr int kTileBlocks = 2;  // most stored blocks per tile
constexpr int kTileK = 64;  // depth of one step
constexpr int kStages = 4;  // depth of the ring of A and B tiles
constexpr int kThreads = 384;  // warpgroup 0 produces, the others consume
constexpr int kConsumerWarps = 8;  // warps that compute
constexpr int kProducerRegisters = 40;  // registers per producer thread
constexpr int kConsumerRegisters = 232;  // registers per consumer thread; 40 + 2 x 232 equals the 3 x 168 at launch
constexpr int kGroupColumns = 64;  // columns of a group: one 128-byte swizzled row
constexpr int kWarpgroupRows = 64;  // rows of a warpgroup's part
constexpr int kWarpgroupGroups = 4;  // column groups of a warpgroup's part
constexpr int kStagingGroups = 2;  // column groups that a warpgroup may have in flight
constexpr int kAccumulators = 128;  // accumulators per thread
constexpr int kABytes = 16384;  // bytes of an A tile
constexpr int kBBytes = 32768;  // bytes of a B tile
constexpr int kBBlockBytes = 16384;  // bytes of a B tile per stored block
constexpr int kGroupBytes = 8192;  // bytes of a group of A and of B
constexpr int kCGroupBytes = 8192;  // bytes of one column group of a warpgroup's C

// Dynamic shared memory: 229456 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 65536 bytes: ring of A tiles, 2 column groups of 64 rows of 128 bytes
constexpr int kBOffset = 65536;  // 131072 bytes: ring of B tiles, 4 column groups of 64 rows of 128 bytes
constexpr int kCOffset = 196608;  // 32768 bytes: 2 column groups of C of each warpgroup
constexpr int kBarriersOffset = 229376;  // 64 bytes: mbarriers: full, then empty
constexpr int kCountsOffset = 229440;  // 16 bytes: stored blocks of the unit of each stage

constexpr int kFullBarrier = kBarriersOffset;
constexpr int kEmptyBarrier = kFullBarrier + 8 * kStages;
constexpr int kWarpgroupThreads = 128;
constexpr int kRowBytes = 128;  // bytes of a row of a column group in shared memory: the span of the swizzle
constexpr int kWarpgroupBarrier = 1;  // named barrier of consumer w: kWarpgroupBarrier + w

// Launch: 384 threads per block, 229456 bytes of dynamic shared memory.
// Grid: one thread block per SM, looping over tiles (persistent), in the order of storage.
struct Params {
  TensorMap a_map;  // A, by columns (M, K): box 64 x 64, swizzle 128
  TensorMap b_map;  // B, by columns (N, K): box 64 x 64, swizzle 128
  TensorMap c_map;  // stored blocks of C (cols, rows, nnz): box 64 x 64 x 1, swizzle 128
  const int* crow_indices;  // row offsets: first block of each block row, then the end of the last
  const int* col_indices;  // block column of each stored block
  int index_words;  // 32-bit words per index, 1 or 2; the kernel reads the low word
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

// wgmma.mma_async m64n256k16: D = A B, + D if `accumulate`; A in shared memory, M-major, B MN-major.
// After p come scale factors of 1 for A and B, then whether A and B are MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n256k16_shared_m_major_mn_major(
    float (&d)[128], uint32 a, uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "mov.b64 a, { %128, %131 };\n"
      "mov.b64 b, { %129, %131 };\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, "
      "%72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, "
      "%88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, "
      "%104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, "
      "%120, %121, %122, %123, %124, %125, %126, %127"
      "}, a, b, p, 1, 1, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
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
  mbarrier_wait(base + kEmptyBarrier + 8 * state.index, state.phase ^ 1);
  counts[state.index] = count;
  mbarrier_arrive_expect_tx(full, kABytes + count * kBBlockBytes);
#pragma unroll
  for (int i = 0; i < kBlockRows; i += kGroupColumns) {
    const uint32 a = base + kAOffset + state.index * kABytes + i / kGroupColumns * kGroupBytes;
    tma_load_2d(a, &p.a_map, full, a_row + i, k);
  }
  const uint32 b = base + kBOffset + state.index * kBBytes;
#pragma unroll
  for (int i = 0; i < kTileBlocks; ++i) {
    for (int j = 0; j < kBlockCols && i < count; j += kGroupColumns) {
      tma_load_2d(b + i * kBBlockBytes + j / kGroupColumns * kGroupBytes, &p.b_map, full, b_rows[i] + j, k);
    }
  }
}

// Producer: one warp fills the ring, unit after unit. Its lanes find rows and columns; the first lane issues the
// copies.
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
        if (lane == 0) load_step(p, base, counts, state, step * kTileK, count, row * kBlockRows, b_rows);
        state.advance();
        __syncwarp();
      }
      block += count;
    }
  }
}

// accumulators += A B^T for this warpgroup's part of one step (asynchronous).
__device__ __forceinline__ void issue_step(float (&accumulators)[kAccumulators], uint32 a_descriptor,
    uint32 b_descriptor) {
  warpgroup_fence_operand(accumulators);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileK / 16; ++k) {
    // 16 columns of an operand are 32 bytes of its 128-byte rows or, where it is stored by columns, 16 such rows.
    wgmma_m64n256k16_shared_m_major_mn_major(accumulators, a_descriptor + (k * 16 * kRowBytes >> 4),
        b_descriptor + (k * 16 * kRowBytes >> 4), 1);
  }
  wgmma_commit();
  warpgroup_fence_operand(accumulators);
}

// Consumer: one warpgroup computes its part of a unit, unit after unit.
__device__ __forceinline__ void consume(const Params& p, uint32 base, const int* counts, int warpgroup) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool warp_leader = lane == 0, warpgroup_leader = threadIdx.x % kWarpgroupThreads == 0;
  const int first_row = warpgroup * kWarpgroupRows;
  const uint32 a_descriptor = wgmma_descriptor(base + kAOffset + first_row * kRowBytes, 0);
  const uint32 b_descriptor = wgmma_descriptor(base + kBOffset, kGroupBytes);
  const uint32 staging = base + kCOffset + warpgroup * kStagingGroups * kCGroupBytes;
  const int staging_row = warp * 16 + lane % 16;
  PipelineState state;
  int stored = 0;  // column groups that this warpgroup has stored, modulo kStagingGroups

  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int end = min((tile + 1) * kTileBlocks, p.blocks);
    for (int block = tile * kTileBlocks; block < end;) {
      float accumulators[kAccumulators];
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) accumulators[i] = 0.0f;

      // The first stage holds the number of blocks of the unit.
      mbarrier_wait(base + kFullBarrier + 8 * state.index, state.phase);
      const int count = read_by_leader(counts + state.index);

      // Issue each step, then release the stage of the previous one.
      uint32 running = 0;  // empty barrier of the stage that the last issued step reads
#pragma unroll 1
      for (int step = 0; step < p.steps; ++step) {
        mbarrier_wait(base + kFullBarrier + 8 * state.index, state.phase);
        issue_step(accumulators, a_descriptor + (state.index * kABytes >> 4),
            b_descriptor + (state.index * kBBytes >> 4));
        wgmma_wait<1>();  // the previous step's are complete: its stage has been read
        if (step > 0 && warp_leader) mbarrier_arrive(running);
        running = base + kEmptyBarrier + 8 * state.index;
        state.advance();
      }
      wgmma_wait<0>();
      warpgroup_fence_operand(accumulators);
      if (warp_leader) mbarrier_arrive(running);

      // Store C one column group at a time, up to the unit's last block.
#pragma unroll
      for (int group = 0; group < kWarpgroupGroups; ++group) {
        const int column = group * kGroupColumns;
        if (column / kBlockCols < count) {
          // Wait until the previous store from this staging buffer has read it.
          const uint32 buffer = staging + stored * kCGroupBytes;
          stored = (stored + 1) % kStagingGroups;
          if (warpgroup_leader) tma_store_wait_read<kStagingGroups - 1>();
          bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
          // Fill it. A row is eight 16-byte chunks; TMA's swizzle puts chunk i at position i ^ row % 8. Lanes 8 i to 8
          // i + 7 address the rows of matrix i: rows 0 to 7, 8 to 15, then the same rows one chunk further.
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float* x = accumulators + group * 32 + j * 8;
            const int chunk = j * 2 + lane / 16;
            stmatrix_x4(buffer + staging_row * kRowBytes + (chunk ^ staging_row % 8) * 16,
                pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
          }
          fence_proxy_async();
          bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
          if (warpgroup_leader) {
            tma_store_3d(&p.c_map, buffer, column % kBlockCols, first_row, block + column / kBlockCols);
            tma_store_commit();
          }
        }
      }
      block += count;
    }
  }
  // Shared memory must outlive the stores that read it.
  if (warpgroup_leader) tma_store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    h100_bsr_sddmm_b128_by_columns(const __grid_constant__ Params p) {
  // TMA swizzles by address, with a period of 1024 bytes: swizzled buffers are aligned to that.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  int* counts = reinterpret_cast<int*>(shared + kCountsOffset);
  const int warpgroup = threadIdx.x / kWarpgroupThreads;

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
