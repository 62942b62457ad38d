// Generated from specs/h100_bsr_spmm_b128_column_major_n16.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_bsr_spmm_b128_column_major_n16.yaml
// spec: {"arch":"sm_90a","b_layout":"column_major","block":{"cols":128,"rows":128},"copy":"tma","ctas_per_sm":2,"dtype":"fp16","mma":"wgmma","op":"bsr_spmm","schedule":"cooperative","stages":6,"tile":{"k":64,"m":128,"n":16}}
// spec hash: e360d724f54371331078e4138ae8ad3b4899daced6c2dac1058689c1d02a4e88
// seal: sha256 72aa2ab6ae2f43345880bfba10a30c39f309ae61587e7f954f2a789e78a361f2

// BSR x dense for sm_90a and few columns: C = A B with A in block-sparse rows and B, C dense, B stored by columns and C
// by rows. The stored result is A B, computed in fp32.
//
// The kernel is bound by reading A's blocks, so they are read once for each column tile, and a tile is as narrow as B.
//
// Roles
//   warpgroups     consumers. Each accumulates 64 rows of the C tile in registers.
//   the next warp  producer. It fills the ring by TMA.
//
// Barriers
//   full[i]   producer -> consumers: stage i holds the A tile and the B tile of one step
//   empty[i]  consumers -> producer: every consumer warp has finished with stage i
//   named barrier kWarpgroupBarrier + w: the threads of consumer w around its partial sums
//
// Pipeline of a consumer: the products of step s are issued before those of step s - 1 complete. When only those of
// step s can still be running, the stage of step s - 1 is released.
//
// Parts: p.row_parts thread blocks divide the stored blocks of a block row. Each stores its sums of the tile, and the
// last one to do so adds those of all, in the order of parts. No thread block waits for another.
//
// Symbols
//   tile         kTileM x kTileN of C: rows of one block row
//   step         kTileK columns of one block of A, kTileK rows of B. In shared memory rows of A and columns of B have
//                128 bytes, swizzled
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

constexpr int kTileM = 128;  // rows of a C tile
constexpr int kTileN = 16;  // columns of a C tile
constexpr int kTileK = 64;  // depth of one step
constexpr int kBlockRows = 128;  // rows of a stored block of A
constexpr int kBlockCols = 128;  // columns of a stored block of A
constexpr int kStages = 6;  // depth of the ring of A and B tiles
constexpr int kThreads = 288;  // warpgroups that consume, then one warp that produces
constexpr int kConsumerWarps = 8;  // warps that compute
constexpr int kAccumulators = 8;  // accumulators per thread
constexpr int kABytes = 16384;  // bytes of an A tile
constexpr int kBBytes = 2048;  // bytes of a B tile
constexpr int kPartialFloats = 1024;  // floats of a warpgroup's partial sum

// Dynamic shared memory: 110696 bytes. Byte offsets:
constexpr int kAOffset = 0;  // 98304 bytes: ring of A tiles, 128 rows of 128 bytes
constexpr int kBOffset = 98304;  // 12288 bytes: ring of B tiles, 16 columns of 128 bytes
constexpr int kBarriersOffset = 110592;  // 96 bytes: mbarriers: full, then empty
constexpr int kIsLastOffset = 110688;  // 8 bytes: whether a warpgroup finished the last part

constexpr int kFullBarrier = kBarriersOffset;
constexpr int kEmptyBarrier = kFullBarrier + 8 * kStages;
constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;
constexpr int kRowBytes = 128;  // bytes of a row of a tile in shared memory: the span of the swizzle
constexpr int kWarpgroupBarrier = 1;  // named barrier of consumer w: kWarpgroupBarrier + w
using Accumulators = float[kAccumulators];
using Element = unsigned short;  // the bits of one fp16

// Launch: 288 threads per block, 110696 bytes of dynamic shared memory.
// Grid: one thread block per C tile and part of its block row, parts fastest, then column tiles.
struct Params {
  TensorMap a_map;  // stored blocks of A (cols, rows, nnz): box 64 x 128 x 1, swizzle 128
  TensorMap b_map;  // B, by columns (K, N): box 64 x 16, swizzle 128
  unsigned short* c;  // C (M, N)
  int64 c_row_stride;  // row stride of C, in elements
  const int* crow_indices;  // row offsets: first block of each block row, then the end of the last
  const int* col_indices;  // block column of each stored block
  int index_words;  // 32-bit words per index, 1 or 2; the kernel reads the low word
  int n;  // columns of B and C
  int column_tiles;  // column tiles
  int row_parts;  // parts of a block row, one for each of as many thread blocks
  int* parts_done;  // finished parts of each tile, by warpgroup; 0 between launches
  float* parts;  // partial sums of C: accumulators of the parts of tiles
};

// TMA swizzles by address, with a period of 1024 bytes: swizzled buffers are aligned to that.
extern __shared__ __align__(1024) unsigned char shared[];

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

// cp.async.bulk.tensor.3d: copies the tensor box at (c0, ...) to shared memory, counted by an mbarrier. Elements
// outside the tensor, even before its first element, are zero-filled and counted (PTX ISA, "cp.async.bulk.tensor")
__device__ __forceinline__ void tma_load_3d(
    uint32 to, const TensorMap* map, uint32 barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2) : "memory");
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

// wgmma.mma_async m64n16k16: D = A B, + D if `accumulate`; A in shared memory, K-major, B K-major.
// After p come scale factors of 1 for A and B, then whether A and B are MN-major (PTX ISA, "wgmma.mma_async")
__device__ __forceinline__ void wgmma_m64n16k16_shared_k_major(
    float (&d)[8], uint32 a, uint32 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %10, 0;\n"
      "mov.b64 a, { %8, %11 };\n"
      "mov.b64 b, { %9, %11 };\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, a, b, p, 1, 1, 0, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
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

// The work of this thread block: a tile, and the blocks [first, end) of its block row, one of p.row_parts parts.
struct Work {
  int tile, part;
  int row, column;  // first ones of the tile
  int first, end;

  __device__ __forceinline__ Work(const Params& p) : tile(blockIdx.x / p.row_parts), part(blockIdx.x % p.row_parts) {
    row = tile / p.column_tiles * kTileM;
    column = tile % p.column_tiles * kTileN;
    const int begin = load_index(p.crow_indices, p.index_words, row / kBlockRows);
    const int64 blocks = load_index(p.crow_indices, p.index_words, row / kBlockRows + 1) - begin;
    first = begin + static_cast<int>(blocks * part / p.row_parts);
    end = begin + static_cast<int>(blocks * (part + 1) / p.row_parts);
  }
  // Block columns of the 32 blocks from `block` on, one per lane; 0 past the end of the part.
  __device__ __forceinline__ int load_columns(const Params& p, int block) const {
    const int mine = block + threadIdx.x % 32;
    return mine < end ? load_index(p.col_indices, p.index_words, mine) : 0;
  }
};

constexpr int kBlockSteps = kBlockCols / kTileK;

// Announces the copies of a step to an empty stage, and copies its A tile.
__device__ __forceinline__ void load_a(const Params& p, uint32 base, const Work& work, int stage, int step) {
  const uint32 full = base + kFullBarrier + 8 * stage;
  mbarrier_arrive_expect_tx(full, kABytes + kBBytes);
  tma_load_3d(base + kAOffset + stage * kABytes, &p.a_map, full, step % kBlockSteps * kTileK, work.row % kBlockRows,
      work.first + step / kBlockSteps);
}

// Producer: one warp fills the ring. Its lanes hold block columns; one of them issues the copies. Those of A for the
// first steps do not wait for block columns. Columns beyond B are zero-filled and count toward the transaction bytes.
__device__ __forceinline__ void produce(const Params& p, uint32 base, const Work& work) {
  const bool issues = threadIdx.x % 32 == 0;
  int columns = 0, next_columns = work.load_columns(p, work.first), step = 0;
  if (issues) {
    const int steps = min((work.end - work.first) * kBlockSteps, kStages);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) load_a(p, base, work, i, i);
  }
  PipelineState state;
#pragma unroll 1
  for (int block = work.first; block < work.end; ++block) {
    const int i = (block - work.first) % 32;
    if (i == 0) {
      columns = next_columns;
      next_columns = work.load_columns(p, block + 32);
    }
    const int b_row = __shfl_sync(0xFFFFFFFF, columns, i) * kBlockCols;
#pragma unroll
    for (int k = 0; k < kBlockCols; k += kTileK) {
      if (issues) {
        if (step >= kStages) {
          mbarrier_wait(base + kEmptyBarrier + 8 * state.index, state.phase ^ 1);
          load_a(p, base, work, state.index, step);
        }
        tma_load_2d(base + kBOffset + state.index * kBBytes, &p.b_map, base + kFullBarrier + 8 * state.index, b_row + k,
            work.column);
      }
      ++step;
      state.advance();
    }
    __syncwarp();
  }
}

// accumulators += A B for this warpgroup's rows of one step (asynchronous).
__device__ __forceinline__ void issue_step(Accumulators& accumulators, uint32 a_descriptor, uint32 b_descriptor) {
  warpgroup_fence_operand(accumulators);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileK / 16; ++k) {
    // 16 elements are 32 bytes of a row of either tile.
    wgmma_m64n16k16_shared_k_major(accumulators, a_descriptor + (k * 32 >> 4), b_descriptor + (k * 32 >> 4), 1);
  }
  wgmma_commit();
  warpgroup_fence_operand(accumulators);
}

// accumulators += the products of all steps of a tile, as they arrive in the ring. Each step is issued, then the stage
// of the previous one is released.
__device__ __forceinline__ void multiply(Accumulators& accumulators, uint32 base, PipelineState& state,
    uint32 a_descriptor, uint32 b_descriptor, int steps) {
  const bool warp_leader = threadIdx.x % 32 == 0;
  uint32 running = 0;  // empty barrier of the stage that the last issued step reads
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(base + kFullBarrier + 8 * state.index, state.phase);
    issue_step(accumulators, a_descriptor + (state.index * kABytes >> 4), b_descriptor + (state.index * kBBytes >> 4));
    wgmma_wait<1>();  // the previous step's are complete: its stage has been read
    if (step > 0 && warp_leader) mbarrier_arrive(running);
    running = base + kEmptyBarrier + 8 * state.index;
    state.advance();
  }
  wgmma_wait<0>();
  warpgroup_fence_operand(accumulators);
  if (steps > 0 && warp_leader) mbarrier_arrive(running);
}

// Where a warpgroup stores its partial sum of a part: the accumulators of each thread, four floats at a time.
__device__ __forceinline__ float4* partial_place(const Params& p, int tile, int part, int warpgroup) {
  const int64 number = (static_cast<int64>(tile) * p.row_parts + part) * (kConsumerWarps / 4) + warpgroup;
  return reinterpret_cast<float4*>(p.parts + number * kPartialFloats) + threadIdx.x % kWarpgroupThreads;
}

// Stores a warpgroup's sums of its part. If all other parts of the tile have done so, adds those of all and returns
// true.
__device__ __forceinline__ bool combine_parts(const Params& p, const Work& work, int warpgroup,
    Accumulators& accumulators) {
  int* const is_last = reinterpret_cast<int*>(shared + kIsLastOffset) + warpgroup;
  float4* const place = partial_place(p, work.tile, work.part, warpgroup);
#pragma unroll
  for (int i = 0; i < kAccumulators; i += 4) {
    const float* x = accumulators + i;
    place[i / 4 * kWarpgroupThreads] = make_float4(x[0], x[1], x[2], x[3]);
  }
  // The last part resets the counter to 0 for the next launch. Each thread's stores come before the count. The sums of
  // other threads are read after it, bypassing the L1 (__ldcg).
  __threadfence();
  bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
  if (threadIdx.x % kWarpgroupThreads == 0) {
    int* const counter = p.parts_done + work.tile * (kConsumerWarps / 4) + warpgroup;
    *is_last = atomicAdd(counter, 1) == p.row_parts - 1;
    if (*is_last) *counter = 0;
    __threadfence();
  }
  bar_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
  if (!*is_last) return false;

#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) accumulators[i] = 0.0f;
#pragma unroll 2
  for (int part = 0; part < p.row_parts; ++part) {
    const float4* const from = partial_place(p, work.tile, part, warpgroup);
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 4) {
      const float4 x = __ldcg(from + i / 4 * kWarpgroupThreads);
      accumulators[i] += x.x;
      accumulators[i + 1] += x.y;
      accumulators[i + 2] += x.z;
      accumulators[i + 3] += x.w;
    }
  }
  return true;
}

// Applies the epilogue to a warpgroup's rows of C, from `first_row` on, and stores them, two columns at a time. Where N
// is odd, the last store also writes an element of C's padding.
__device__ __forceinline__ void store_c(const Params& p, const Accumulators& accumulators, int first_row,
    int first_column) {
  const int lane = threadIdx.x % 32, column = first_column + lane % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + threadIdx.x / 32 % 4 * 16 + h * 8 + lane / 4;
    Element* const to = p.c + row * p.c_row_stride + column;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        x[e] = accumulators[4 * j + 2 * h + e];
      }
      if (column + 8 * j < p.n) *reinterpret_cast<uint32*>(to + 8 * j) = pack(x[0], x[1]);
    }
  }
}

// Consumer: one warpgroup computes its rows of the tile.
__device__ __forceinline__ void consume(const Params& p, uint32 base, const Work& work, int warpgroup) {
  const uint32 a_descriptor = wgmma_descriptor(base + kAOffset + warpgroup * kWarpgroupRows * kRowBytes, 0);
  const uint32 b_descriptor = wgmma_descriptor(base + kBOffset, 0);
  PipelineState state;
  // A part without blocks has no steps: it stores these zeros.
  Accumulators accumulators;
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) accumulators[i] = 0.0f;
  multiply(accumulators, base, state, a_descriptor, b_descriptor, (work.end - work.first) * kBlockSteps);
  if (p.row_parts > 1 && !combine_parts(p, work, warpgroup, accumulators)) return;
  store_c(p, accumulators, work.row + warpgroup * kWarpgroupRows, work.column);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    h100_bsr_spmm_b128_column_major_n16(const __grid_constant__ Params p) {
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const Work work(p);

  // One thread initializes the barriers. An empty barrier counts one arrival per consumer warp.
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kFullBarrier + 8 * i, 1);
      mbarrier_init(base + kEmptyBarrier + 8 * i, kConsumerWarps);
    }
    fence_mbarrier_init();
    prefetch_tensormap(&p.a_map);
    prefetch_tensormap(&p.b_map);
  }
  __syncthreads();

  // The shuffle proves to the compiler that it is warp-uniform, so values derived from it go to uniform registers.
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  if (warp == kConsumerWarps) {
    produce(p, base, work);
  } else {
    consume(p, base, work, warp / 4);
  }
}
