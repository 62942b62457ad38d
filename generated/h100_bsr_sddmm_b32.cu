// Generated from specs/h100_bsr_sddmm_b32.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_bsr_sddmm_b32.yaml
// spec: {"arch":"sm_90a","block":{"cols":32,"rows":32},"copy":"tma","dtype":"fp16","mma":"wgmma","op":"bsr_sddmm","schedule":"cooperative","stages":3,"tile":{"k":64,"m":32,"n":512}}
// spec hash: 92106ff430791e468a1e44051deea09dbb5d1480464ad75e5efcacdfe118478b
// seal: sha256 944cfc6dd4230168196eaeb54edec095a57e5345497960ef22625bc477e194cd

// Sampled product for sm_90a with small blocks: the stored blocks of C = A B^T, with C in block-sparse rows and A, B
// dense and row-major.
//
// The product is computed transposed, C^T = B A^T: a wgmma has 64 rows, a block row has fewer. Rows of B, those of two
// stored blocks, are therefore its M side, rows of A its N side. A block row of height h does at most h FLOPs per
// loaded byte of B, so throughput depends on the loads in flight: the ring takes nearly all of shared memory.
//
// Roles
//   warpgroups 0, 1  consumers. Each accumulates its column groups of a unit in registers; then each of its warps
//                    stores its columns by TMA.
//   the last warp    producer. It finds the rows of the stored blocks and fills the ring by TMA.
//
// Barriers
//   full[i]   producer -> consumers: stage i holds the A tile and the B tile of one step, and counts[i]
//   empty[i]  consumers -> producer: every consumer warp has finished with stage i
//
// Pipeline of a consumer: the products of step s are issued before those of step s - 1 complete. When only those of
// step s can still be running, the stage of step s - 1 is released. The producer runs ahead across units.
//
// Symbols
//   tile         kTileBlocks consecutive stored blocks of C. Tiles are numbered in storage order, so that concurrent
//                thread blocks share block rows of A and of B, which then come from the L2
//   unit         the blocks of a tile that lie in one block row: they share the A tile. Most tiles are one unit; a tile
//                in which a block row ends has several. Missing blocks of a unit are not loaded, and their products
//                are not stored
//   step         kTileK columns of A and B: in shared memory rows of 128 bytes, swizzled
//   column group 64 columns of C, rows of B: the M side of a wgmma
//   piece        of C: 16 of its rows and a warp's 16 columns of a column group
//   accumulators a thread's part of a column group (64 columns x kTileM rows of C): columns c and c + 8 of its warp's
//                16 (c = lane / 4), rows 8 j + 2 (lane % 4) + {0, 1}

using int64 = long long;
using uint32 = unsigned int;

// Stands for CUtensorMap: 128 opaque bytes (PTX ISA, "Tensor-Map"), 64-byte aligned (driver API,
// cuTensorMapEncodeTiled). The comments of parameters of this type give the dimensions, innermost first, the box of one
// copy, and the bytes of the swizzle.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

constexpr int kTileM = 32;  // rows of a tile: those of a stored block of C
constexpr int kBlockCols = 32;  // columns of a stored block of C
constexpr int kTileBlocks = 16;  // most stored blocks per tile
constexpr int kTileK = 64;  // depth of one step
constexpr int kStages = 3;  // depth of the ring of A and B tiles
constexpr int kThreads = 288;  // warpgroups that consume, then one warp that produces
constexpr int kConsumerWarps = 8;  // warps that compute
constexpr int kGroupColumns = 64;  // columns of C of a column group, rows of B: the M side of one wgmma
constexpr int kWarpgroupGroups = 4;  // column groups of a warpgroup's part
constexpr int kAccumulators = 16;  // accumulators per thread and column group
constexpr int kPieceSize = 16;  // rows and columns of a piece of C, which a warp stores at a time
constexpr int kStagingPieces = 2;  // pieces that a warp may have in flight
constexpr int kABytes = 4096;  // bytes of an A tile
constexpr int kBBytes = 65536;  // bytes of a B tile
constexpr int kBBlockBytes = 4096;  // bytes of a B tile per stored block
constexpr int kBGroupBytes = 8192;  // bytes of a B tile per column group
constexpr int kPieceBytes = 512;  // bytes of a piece of C

// Dynamic shared memory: 217148 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 12288 bytes: ring of A tiles, 32 rows of 64 columns
constexpr int kBOffset = 12288;  // 196608 bytes: ring of B tiles, 512 rows of 64 columns
constexpr int kCOffset = 208896;  // 8192 bytes: 2 pieces of C of each warp
constexpr int kBarriersOffset = 217088;  // 48 bytes: mbarriers: full, then empty
constexpr int kCountsOffset = 217136;  // 12 bytes: stored blocks of the unit of each stage

constexpr int kFullBarrier = kBarriersOffset;
constexpr int kEmptyBarrier = kFullBarrier + 8 * kStages;
constexpr int kWarpgroupThreads = 128;
constexpr int kPieceRowBytes = 32;  // bytes of a row of a piece of C in shared memory: the span of the swizzle

// Launch: 288 threads per block, 217148 bytes of dynamic shared memory.
// Grid: one thread block per SM, looping over tiles (persistent), in the order of storage.
struct Params {
  TensorMap a_map;  // A (K, M): box 64 x 32, swizzle 128
  TensorMap b_map;  // B (K, N): box 64 x 32, swizzle 128
  TensorMap c_map;  // stored blocks of C (cols, rows, nnz): box 16 x 16 x 1, swizzle 32
  const int* crow_indices;  // row offsets: first block of each block row, then the end of the last
  const int* col_indices;  // block column of each stored block
  int index_words;  // 32-bit words per index, 1 or 2; the kernel reads the low word
  int block_rows;  // block rows of C
  int block_columns;  // block columns of C
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

// wgmma.mma_async m64n32k16: D = A B, + D if `accumulate`; A in shared memory, K-major, B K-major.
// After p come scale factors of 1 for A and B, then whether A and B are MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n32k16_shared_k_major(
    float (&d)[16], uint32 a, uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %18, 0;\n"
      "mov.b64 a, { %16, %19 };\n"
      "mov.b64 b, { %17, %19 };\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15"
      "}, a, b, p, 1, 1, 0, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorUpperHalf));
}

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

// Block columns of a tile's blocks, one per lane.
__device__ __forceinline__ int load_column(const Params& p, int tile) {
  const int lane = threadIdx.x % 32, block = tile * kTileBlocks + lane;
  return lane < kTileBlocks && block < p.blocks ? load_index(p.col_indices, p.index_words, block) : 0;
}

// First row of B for a block column. For a column outside C it lies so far before B that TMA reads only zeros.
__device__ __forceinline__ int first_b_row(const Params& p, int column) {
  return static_cast<uint32>(column) < static_cast<uint32>(p.block_columns) ? column * kBlockCols : -kBlockCols;
}

// Copies the A tile and the B tile of one step to a stage of the ring, as soon as it is empty.
__device__ __forceinline__ void load_step(const Params& p, uint32 base, int* counts, PipelineState state, int step,
    int count, int a_row, const int (&b_rows)[kTileBlocks]) {
  const uint32 full = base + kFullBarrier + 8 * state.index;
  const uint32 a = base + kAOffset + state.index * kABytes, b = base + kBOffset + state.index * kBBytes;
  mbarrier_wait(base + kEmptyBarrier + 8 * state.index, state.phase ^ 1);
  counts[state.index] = count;
  mbarrier_arrive_expect_tx(full, kABytes + count * kBBlockBytes);
  tma_load_2d(a, &p.a_map, full, step * kTileK, a_row);
#pragma unroll
  for (int i = 0; i < kTileBlocks; ++i) {
    if (i < count) tma_load_2d(b + i * kBBlockBytes, &p.b_map, full, step * kTileK, b_rows[i]);
  }
}

// Producer: one warp fills the ring, unit after unit. Its lanes find rows and columns; one of them issues the copies.
__device__ __forceinline__ void produce(const Params& p, uint32 base, int* counts) {
  PipelineState state;
  int row = 0, next_column = load_column(p, blockIdx.x);

  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int first = tile * kTileBlocks, end = min(first + kTileBlocks, p.blocks);
    const int b_row = first_b_row(p, next_column);
    // Load the next columns well before they are needed.
    next_column = load_column(p, tile + gridDim.x);

    for (int block = first; block < end;) {
      row = find_row(p, block, row);
      // At least one block, even if crow_indices is invalid: the loop must terminate.
      const int count = max(min(load_index(p.crow_indices, p.index_words, row + 1), end) - block, 1);
      int b_rows[kTileBlocks];
#pragma unroll
      for (int i = 0; i < kTileBlocks; ++i) b_rows[i] = __shfl_sync(0xFFFFFFFF, b_row, block - first + i);
#pragma unroll 1
      for (int step = 0; step < p.steps; ++step) {
        if (elect()) load_step(p, base, counts, state, step, count, row * kTileM, b_rows);
        state.advance();
        __syncwarp();
      }
      block += count;
    }
  }
}

// accumulators += B A^T for this warpgroup's column groups of one step (asynchronous).
__device__ __forceinline__ void issue_step(float (&accumulators)[kWarpgroupGroups][kAccumulators],
    uint32 a_descriptor, uint32 b_descriptor) {
#pragma unroll
  for (int group = 0; group < kWarpgroupGroups; ++group) warpgroup_fence_operand(accumulators[group]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileK / 16; ++k) {
    // 16 columns of A and of B are 32 bytes of their 128-byte rows. The operand A of the instruction is B, its operand
    // B is A^T.
#pragma unroll
    for (int group = 0; group < kWarpgroupGroups; ++group) {
      wgmma_m64n32k16_shared_k_major(accumulators[group],
          b_descriptor + ((group * kBGroupBytes + k * 32) >> 4), a_descriptor + (k * 32 >> 4), 1);
    }
  }
  wgmma_commit();
#pragma unroll
  for (int group = 0; group < kWarpgroupGroups; ++group) warpgroup_fence_operand(accumulators[group]);
}

// Consumer: one warpgroup computes its column groups of a unit, unit after unit.
__device__ __forceinline__ void consume(const Params& p, uint32 base, const int* counts, int warpgroup) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool warp_leader = lane == 0;
  const int first_group = warpgroup * kWarpgroupGroups;
  const uint32 a_descriptor = wgmma_descriptor(base + kAOffset, 0);
  const uint32 b_descriptor = wgmma_descriptor(base + kBOffset + first_group * kBGroupBytes, 0);
  // Lanes 8 i to 8 i + 7 address the rows of matrix i of a piece: its upper two side by side, then its lower two. A row
  // is two 16-byte chunks; TMA's swizzle exchanges them every 4 rows.
  const uint32 staging = base + kCOffset + warp * kStagingPieces * kPieceBytes;
  const int staging_row = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2 ^ staging_row / 4 % 2;
  PipelineState state;
  int stored = 0;  // pieces that this warp has stored, modulo kStagingPieces

  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int end = min((tile + 1) * kTileBlocks, p.blocks);
    for (int block = tile * kTileBlocks; block < end;) {
      float accumulators[kWarpgroupGroups][kAccumulators];
#pragma unroll
      for (int group = 0; group < kWarpgroupGroups; ++group) {
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) accumulators[group][i] = 0.0f;
      }

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
#pragma unroll
      for (int group = 0; group < kWarpgroupGroups; ++group) warpgroup_fence_operand(accumulators[group]);
      if (warp_leader) mbarrier_arrive(running);

      // Store C one piece at a time, up to the unit's last block.
#pragma unroll
      for (int group = 0; group < kWarpgroupGroups; ++group) {
        const int column = (first_group + group) * kGroupColumns + warp % 4 * kPieceSize;
        if (column / kBlockCols < count) {
#pragma unroll
          for (int j = 0; j < kTileM / kPieceSize; ++j) {
            // Wait until the previous store from this staging buffer has read it.
            const uint32 buffer = staging + stored * kPieceBytes;
            stored = (stored + 1) % kStagingPieces;
            if (warp_leader) tma_store_wait_read<kStagingPieces - 1>();
            __syncwarp();
            // Fill it, transposed.
            const float* x = accumulators[group] + j * 8;
            stmatrix_x4_trans(buffer + staging_row * kPieceRowBytes + chunk * 16,
                pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
            fence_proxy_async();
            __syncwarp();
            if (warp_leader) {
              tma_store_3d(&p.c_map, buffer, column % kBlockCols, j * kPieceSize, block + column / kBlockCols);
              tma_store_commit();
            }
          }
        }
      }
      block += count;
    }
  }
  // Shared memory must outlive the stores that read it.
  if (warp_leader) tma_store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    h100_bsr_sddmm_b32(const __grid_constant__ Params p) {
  // TMA swizzles by address, with a period of 1024 bytes: swizzled buffers are aligned to that.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  int* const counts = reinterpret_cast<int*>(shared + kCountsOffset);

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

  if (threadIdx.x / 32 == kConsumerWarps) {
    produce(p, base, counts);
  } else {
    consume(p, base, counts, threadIdx.x / kWarpgroupThreads);
  }
}
