// Generated from specs/l4_block_lists_d256.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/l4_block_lists_d256.yaml
// spec: {"arch":"sm_89","copy":"cp_async","dtype":"fp16","head_dim":256,"lse":true,"mma":"mma","op":"attention","pattern":{"block":{"kv":64,"q":64},"kind":"block_lists","mask":"causal"},"schedule":"multistage","stages":3,"tile":{"m":64,"n":32},"warp_rows":16}
// spec hash: 5f235d4425a0c2305d786c52ed498cd90c40ec6af3d9b0204c046ab92f9ee59b
// seal: sha256 81cf5ea6e9b13bf47642c77ae2b275fb936da2b26f8151e3c0a4f5b9e79834a9

// Attention forward for sm_89 over the listed key blocks of the pattern:
//   O = softmax(scale * Q K^T) V
//
// Roles
//   A thread block computes kTileM queries of one head. Each warp owns kWarpRows of them, with S, P and O in registers.
//   All threads take part in the copies.
//
// Pipeline
//   K and V of the steps pass through one ring of kStages slots in order of use: K0 V0 K1 V1 ..., tile t in slot t mod
//   kStages. cp.async (one group per tile) keeps kAhead = kStages - 1 tiles in flight.
//   producer: all threads, cp.async    consumer: all warps, ldmatrix
//   full:  cp.async.wait_group (this thread's part of tile t), then __syncthreads (all threads' parts)
//   empty: the same __syncthreads: all warps have finished tile t - 1, whose slot then takes tile t + kAhead
//   Q arrives with the first tile and stays in shared memory. O leaves through Q's buffer.
//   The exponentials of all keys of one product, half of a step, come before that product.
//
// Symbols
//   step        kTileN keys: one key block, or an equal part of it
//   s, p_frag   scores of kWarpRows x kTileN pairs; weights of kGroupKeys keys as 16-bit A operands
//   q           kWarpRows queries as A operands, 16 columns at a time
//   tile t      K or V of one step, in the ring. Tile: the queries of a thread block. Row tile: 16 of a warp's rows
//   o           kWarpRows x kHeadDim outputs, not yet divided by the row sum
//   row_max     maximum of a row's logits times log2(e), over the keys so far or up to an earlier key: the reference of
//   the weights
//   row_sum     this thread's part of the running sum of the weights
//   [t][j][i]   of s and o: in row tile t, a thread holds rows r (i = 0, 1) and r + 8 (i = 2, 3), r = lane / 4, columns
//               8 j + 2 (lane % 4) + {0, 1}. [t][0] and [t][1] of row_max and row_sum belong to rows r and r + 8

using int64 = long long;
using uint32 = unsigned int;

constexpr int kHeadDim = 256;  // elements per head
constexpr int kTileM = 64;  // queries of a thread block
constexpr int kTileN = 32;  // keys per step
constexpr int kStages = 3;  // slots of the ring
constexpr int kAhead = 2;  // K and V tiles in flight while one is read
constexpr int kSubTileRows = 64;  // queries of a tile: they share a list of key blocks
constexpr int kWarpRows = 16;  // rows per warp
constexpr int kRowTiles = 1;  // tiles of 16 rows per warp; their products share K and V operands
constexpr int kThreads = 128;  // 4 warps
constexpr int kRowBytes = 512;  // bytes per row of Q, K, V, O
constexpr int kLineChunks = 8;  // 16-byte chunks per line, the part of a row that adjacent lanes copy
constexpr int kRowLines = 4;  // lines per row
constexpr int kSwizzleRows = 1;  // consecutive rows with the same swizzle
constexpr int kPassRows = 16;  // rows that all threads copy at a time
constexpr int kWarpPassRows = 4;  // rows that a warp stores at a time
constexpr int kSlotBytes = 16384;  // bytes of K or V of a step
constexpr int kStepBlocks = 1;  // loads per step: its listed blocks, if it has several
constexpr int kLoadKeys = 32;  // keys per load
constexpr int kGroupKeys = 16;  // keys whose weights are computed together before their product
constexpr int kHalfStep = 1;  // half a step, in groups
constexpr int kStepsAhead = 1;  // steps whose K is requested, starting at the current step
constexpr int kBlockKeys = 64;  // keys of a listed block
constexpr int kBlockSteps = 2;  // steps in a listed block

// Dynamic shared memory: 81920 bytes. Byte offsets:
constexpr int kQOffset = 0;  // 32768 bytes: Q tile
constexpr int kRingOffset = 32768;  // 49152 bytes: 3 slots, each K or V of one step
constexpr int kOOffset = 0;  // 32768 bytes: staging of the O tile: in Q's buffer

static_assert(kSubTileRows == kTileM);  // a thread block walks its key blocks once
static_assert(kTileM % kPassRows == 0 && kLoadKeys % kPassRows == 0);  // copies divide evenly among threads
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
// Initial row_max: finite, so that differences are defined. A row whose logits are all below it counts as a row without
// keys.
constexpr float kLeastLogit = -1e30f;
constexpr float kLn2 = 0.693147180559945f;

// Launch: 128 threads per block, 81920 bytes of dynamic shared memory.
// Grid: one thread block for each tile, 1 at a time on an SM.
struct Params {
  const unsigned short* q;  // Q (batch, heads, q_len, head_dim)
  int64 q_batch_stride;  // batch stride, in elements
  int64 q_head_stride;  // head stride, in elements
  int64 q_row_stride;  // row stride, in elements
  const unsigned short* k;  // K (batch, kv_heads, kv_len, head_dim)
  int64 k_batch_stride;  // batch stride, in elements
  int64 k_head_stride;  // head stride, in elements
  int64 k_row_stride;  // row stride, in elements
  const unsigned short* v;  // V, as K
  int64 v_batch_stride;  // batch stride, in elements
  int64 v_head_stride;  // head stride, in elements
  int64 v_row_stride;  // row stride, in elements
  unsigned short* o;  // O, as Q
  int64 o_batch_stride;  // batch stride, in elements
  int64 o_head_stride;  // head stride, in elements
  int64 o_row_stride;  // row stride, in elements
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

// cp.async.cg: copies 16 bytes to shared memory, bypassing the L1; zero-fills without a read unless `valid`. L2::128B
// is a hint to fetch 128 bytes into the L2 (PTX ISA, "cp.async")
__device__ __forceinline__ void cp_async_16(uint32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
      : "memory");
}

// cp.async.commit_group: commits this thread's copies as a group (PTX ISA, "cp.async.commit_group")
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: waits until at most kPending of this thread's groups are in flight (PTX ISA,
// "cp.async.wait_group")
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// mma.sync.m16n8k16: D += A B in fp32; A row-major, B column-major f16 (PTX ISA, "mma")
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ldmatrix.x4: loads four 8 x 8 matrices of 16-bit elements. Lanes 8 i to 8 i + 7 hold the row addresses of matrix i;
// each lane gets two neighbors of row lane / 4 of each matrix (PTX ISA, "ldmatrix")
__device__ __forceinline__ void ldmatrix_x4(uint32 (&m)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
      : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

// ldmatrix.x4.trans: as ldmatrix.x4, with each matrix transposed (PTX ISA, "ldmatrix")
__device__ __forceinline__ void ldmatrix_x4_trans(uint32 (&m)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
      : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

// mov %ctaid.x: index of this thread block; reread each time, so that derived values need not stay in registers (PTX
// ISA, "%ctaid")
__device__ __forceinline__ int ctaid_x() {
  int x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// ex2.approx.ftz: 2^x, relative error 2^-22 (PTX ISA, "ex2")
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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
    count = entries * kBlockSteps;
    lane_entries = 0;
  }
  // Index of the i-th load, in units of its keys. Points past the last key for an out-of-range entry or past the end of
  // the list. All lanes of a warp call this together, with i = 0, 1, 2, ...
  __device__ __forceinline__ int at(int i) {
    const int entry = i / kBlockSteps, mine = entry + threadIdx.x % 32;
    if (i % (32 * kBlockSteps) == 0 && mine < entries) {
      lane_entries = __ldg(mine < partial ? list + mine : full_list + (mine - partial));
    }
    const int block = __shfl_sync(0xFFFFFFFF, lane_entries, entry % 32);
    const bool known = entry < entries && static_cast<uint32>(block) < static_cast<uint32>(key_blocks);
    return (known ? block : key_blocks) * kBlockSteps + i % kBlockSteps;
  }
  // Whether some pair of the i-th load is masked: partial blocks may be listed that are visible as a whole.
  __device__ __forceinline__ bool masked(int i, int block) {
    return i / kBlockSteps < partial && (block + 1) * (kBlockKeys / kBlockSteps) - 1 > first_diagonal;
  }
};

// Whether a query sees an in-range key:
//   kv_idx <= q_idx + kv_len - q_len
__device__ __forceinline__ bool visible(const Params& p, int batch, int query, int key) {
  return key <= query + p.kv_len - p.q_len;
}

// The work of a thread block: kTileM queries of one head.
// Late queries go first: under a pattern that masks later keys, they have the most key blocks, and long tiles should
// not start last.
struct Tile {
  int batch, head, first_query;

  __device__ __forceinline__ Tile(const Params& p, int index) {
    const int row = index / p.query_tiles;
    batch = row / p.heads;
    head = row % p.heads;
    first_query = (p.query_tiles - 1 - index % p.query_tiles) * kTileM;
  }
};

// Byte offset of a 16-byte chunk of a tile. A row is kRowLines lines of kLineChunks chunks. The XOR maps the same chunk
// of 8 consecutive rows to 8 different bank groups.
__device__ __forceinline__ uint32 chunk_offset(int row, int chunk) {
  return row * kRowBytes + (chunk ^ row / kSwizzleRows % kLineChunks) * 16;
}

// Address of the chunk `chunks` (an even number) after chunk 0 or 1 of a row, given the address of that chunk.
__device__ __forceinline__ uint32 further_on(uint32 address, int chunks) {
  return (address ^ chunks % kLineChunks * 16) + chunks / kLineChunks * kLineChunks * 16;
}

// The lower half of a warp-uniform number. The shuffle proves to the compiler that it is uniform, so that it goes into
// a uniform register.
__device__ __forceinline__ uint32 uniform(int64 x) { return __shfl_sync(0xFFFFFFFF, static_cast<uint32>(x), 0); }

// This thread's part of the copy of a tensor: chunk `copy_chunk` of every line of rows copy_row, copy_row + kPassRows,
// ...
__device__ __forceinline__ int copy_row() { return threadIdx.x / kLineChunks; }
__device__ __forceinline__ int copy_chunk() { return threadIdx.x % kLineChunks; }

// Starts this thread's part of the copy of kRows rows of a tile, starting at its first chunk. Rows from `valid_rows` on
// are zero-filled.
template <int kRows>
__device__ __forceinline__ void copy_rows(uint32 to, const unsigned short* from, int64 row_stride, int valid_rows) {
#pragma unroll
  for (int row = 0; row < kRows; row += kPassRows) {
    const uint32 chunk = to + chunk_offset(copy_row() + row, copy_chunk());
#pragma unroll
    for (int line = 0; line < kRowLines; ++line) {
      cp_async_16(chunk + line * kLineChunks * 16, from + line * kLineChunks * 8, row < valid_rows);
    }
    from += kPassRows * row_stride;
  }
}

// Starts this thread's part of the copy of K or V of a step, load by load, kLoadKeys keys each. The head begins `head`
// chunks into the tensor. Chunk indices are 32-bit: they reach 64 GB and take half the registers of addresses.
__device__ __forceinline__ void copy_step(uint32 to, const unsigned short* tensor, uint32 head, int64 row_stride,
    int kv_len, const int (&blocks)[kStepBlocks]) {
#pragma unroll
  for (int load = 0; load < kStepBlocks; ++load) {
    const int key = blocks[load] * kLoadKeys + copy_row();
    const uint32 chunk = head + static_cast<uint32>(row_stride / 8) * static_cast<uint32>(key) + copy_chunk();
    const unsigned short* from = tensor + static_cast<int64>(chunk) * 8;
    copy_rows<kLoadKeys>(to + load * kLoadKeys * kRowBytes, from, row_stride, kv_len - key);
  }
}

// What a warp needs to mask a step: for each load, the index of its block, and whether the pattern masks some of its
// pairs.
struct Step {
  int block[kStepBlocks];
  bool masked[kStepBlocks];

  __device__ __forceinline__ void take(KvBlockIterator& blocks, int i) {
#pragma unroll
    for (int load = 0; load < kStepBlocks; ++load) {
      block[load] = blocks.at(i * kStepBlocks + load);
      masked[load] = blocks.masked(i * kStepBlocks + load, block[load]);
    }
  }
  // Whether the pattern or the end of the keys masks some pair.
  __device__ __forceinline__ bool needs_mask(const KvEnd& kv_end) const {
    bool some = false;
#pragma unroll
    for (int load = 0; load < kStepBlocks; ++load) {
      some |= masked[load] || (block[load] + 1) * kLoadKeys > kv_end;
    }
    return some;
  }
};

// s = Q K^T for this warp's rows and one step.
__device__ __forceinline__ void compute_qk_gemm(float (&s)[kRowTiles][kTileN / 8][4], uint32 q_lane, uint32 k_tile) {
  // Matrices of one ldmatrix: keys 0-7 and 8-15 of a group of 16, each with the two halves of 16 columns.
  // Matrices of Q: rows 0-7 and 8-15 of 16, first for one half, then for the other.
  const int lane = threadIdx.x % 32;
  const uint32 k_lane = k_tile + chunk_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[tile][j][i] = 0.0f;
    }
  }
#pragma unroll
  for (int slice = 0; slice < kHeadDim / 16; ++slice) {
    uint32 q[kRowTiles][4];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      ldmatrix_x4(q[tile], further_on(q_lane, slice * 2) + tile * 16 * kRowBytes);
    }
#pragma unroll
    for (int keys = 0; keys < kTileN; keys += 16) {
      uint32 k[4];
      ldmatrix_x4(k, further_on(k_lane, slice * 2) + keys * kRowBytes);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        mma_m16n8k16(s[tile][keys / 8], q[tile], k[0], k[1]);
        mma_m16n8k16(s[tile][keys / 8 + 1], q[tile], k[2], k[3]);
      }
    }
  }
}

// Masks the pairs of a step that the pattern or the end of the keys excludes.
__device__ __forceinline__ void apply_mask(float (&s)[kRowTiles][kTileN / 8][4], const Params& p, const Step& step,
    int batch, int first_query, const KvEnd& kv_end) {
#pragma unroll
  for (int j = 0; j < kTileN / 8; ++j) {
    const int load = j * 8 / kLoadKeys;
    const int first_key = step.block[load] * kLoadKeys + j * 8 % kLoadKeys + threadIdx.x % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + i % 2;
        const int query = first_query + tile * 16 + i / 2 * 8;
        const bool seen = key < kv_end && (!step.masked[load] || visible(p, batch, query, key));
        if (!seen) s[tile][j][i] = kMinusInfinity;
      }
    }
  }
}

// Online softmax with lazy rescaling.
// The weight of a pair is 2^(scale_log2 s - row_max). O and row_sum are relative to the same row_max, so row_max may be
// the maximum of earlier steps as long as the weights stay small.

// Threshold, as log2 of a weight. Weight 1 is exact in 16 bits. A key with at least twice the weight of every earlier
// key, which may dominate its row, gets weight 1.
constexpr float kRescaleThreshold = 1.0f;

// Raises row_max to the maximum of a step if it exceeds row_max by the threshold, for all 16 rows of the warp at once,
// and rescales O and row_sum.
__device__ __forceinline__ void raise_row_max(float (&o)[kRowTiles][kHeadDim / 8][4], float (&row_sum)[kRowTiles][2],
    float (&row_max)[kRowTiles][2], const float (&s)[kRowTiles][kTileN / 8][4], float scale_log2) {
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
    float step_max[2] = {kMinusInfinity, kMinusInfinity};
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) step_max[i / 2] = fmaxf(step_max[i / 2], s[tile][j][i]);
    }
    step_max[0] *= scale_log2;
    step_max[1] *= scale_log2;
    const bool rises = step_max[0] - row_max[tile][0] >= kRescaleThreshold ||
                       step_max[1] - row_max[tile][1] >= kRescaleThreshold;
    if (!__any_sync(0xFFFFFFFF, rises)) continue;
    quad_max(step_max);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float before = row_max[tile][row];
      row_max[tile][row] = fmaxf(before, step_max[row]);
      const float rescale = ex2(before - row_max[tile][row]);
      row_sum[tile][row] *= rescale;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        o[tile][j][row * 2] *= rescale;
        o[tile][j][row * 2 + 1] *= rescale;
      }
    }
  }
}

// P of a group of keys: their weights, packed to 16 bits. The accumulators of two 8-column tiles are the A operand of
// 16 keys. row_sum accumulates this thread's weights.
__device__ __forceinline__ void scale_apply_exp2(uint32 (&p_frag)[kRowTiles][kGroupKeys / 16][4],
    float (&row_sum)[kRowTiles][2], const float (&s)[kRowTiles][kTileN / 8][4], int group,
    const float (&row_max)[kRowTiles][2], float scale_log2) {
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
    float sum[2];
#pragma unroll
    for (int k = 0; k < kGroupKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = group * (kGroupKeys / 8) + k * 2 + i / 2, row = i % 2;
        const float low = ex2(s[tile][j][row * 2] * scale_log2 - row_max[tile][row]);
        const float high = ex2(s[tile][j][row * 2 + 1] * scale_log2 - row_max[tile][row]);
        sum[row] = k == 0 && i < 2 ? low + high : sum[row] + (low + high);
        p_frag[tile][k][i] = pack(low, high);
      }
    }
    row_sum[tile][0] += sum[0];
    row_sum[tile][1] += sum[1];
  }
}

// o += P V for this warp's rows and one group of keys.
__device__ __forceinline__ void compute_pv_group(float (&o)[kRowTiles][kHeadDim / 8][4],
    const uint32 (&p_frag)[kRowTiles][kGroupKeys / 16][4], uint32 v_lane) {
  // Matrices of one ldmatrix: keys 0-7 and 8-15 of 16 for 8 columns, then for the next 8; transposed.
#pragma unroll
  for (int k = 0; k < kGroupKeys / 16; ++k) {
#pragma unroll
    for (int columns = 0; columns < kHeadDim; columns += 16) {
      uint32 v[4];
      ldmatrix_x4_trans(v, further_on(v_lane, columns / 8) + k * 16 * kRowBytes);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        mma_m16n8k16(o[tile][columns / 8], p_frag[tile][k], v[0], v[1]);
        mma_m16n8k16(o[tile][columns / 8 + 1], p_frag[tile][k], v[2], v[3]);
      }
    }
  }
}

// o += P V for this warp's rows and groups kFirst to kEnd - 1 of the keys of a step. P is computed from the scores
// first; there is only one group.
template <int kFirst, int kEnd>
__device__ __forceinline__ void compute_pv_gemm(float (&o)[kRowTiles][kHeadDim / 8][4], float (&row_sum)[kRowTiles][2],
    const float (&row_max)[kRowTiles][2], const float (&s)[kRowTiles][kTileN / 8][4], float scale_log2,
    uint32 v_lane) {
  uint32 p_frag[2][kRowTiles][kGroupKeys / 16][4];
#pragma unroll
  for (int group = kFirst; group <= kEnd; ++group) {
    if (group < kEnd) scale_apply_exp2(p_frag[group % 2], row_sum, s, group, row_max, scale_log2);
    if (group > kFirst) compute_pv_group(o, p_frag[(group - 1) % 2], v_lane + (group - 1) * kGroupKeys * kRowBytes);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) l4_block_lists_d256(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp * kWarpRows;
  const uint32 lane_offset = chunk_offset(lane % 16, lane / 16);  // this lane's chunk of Q and V for ldmatrix

  const Tile tile(p, blockIdx.x);
  // Start of this thread's copies of Q.
  const unsigned short* q_thread = p.q + tile.batch * p.q_batch_stride + tile.head * p.q_head_stride +
      (tile.first_query + copy_row()) * p.q_row_stride + copy_chunk() * 8;
  const int kv_head = tile.head / p.heads_per_kv_head;
  const uint32 k_head = uniform((tile.batch * p.k_batch_stride + kv_head * p.k_head_stride) / 8);
  const uint32 v_head = uniform((tile.batch * p.v_batch_stride + kv_head * p.v_head_stride) / 8);

  const SeqlenInfo seqlen(p, tile.batch);
  const KvEnd kv_end(p, tile.batch);
  // Iterator over the key blocks, in the order in which K is loaded, and the steps whose K has been requested, the
  // current one first.
  KvBlockIterator blocks(p, tile.batch, tile.head, tile.first_query);
  Step loaded[kStepsAhead] = {};

  // Starts the copy of tile `number` as one cp.async group: K of step number / 2 or, if odd, V; an empty group after
  // the last step.
  auto fetch = [&](int number, uint32 slot) {
    Step& step = loaded[kStepsAhead - 1];
    if (number % 2 == 0) {
#pragma unroll
      for (int i = 0; i + 1 < kStepsAhead; ++i) loaded[i] = loaded[i + 1];
    }
    if (number / 2 < blocks.count) {
      if (number % 2 == 0) {
        step.take(blocks, number / 2);
        copy_step(slot, p.k, k_head, p.k_row_stride, kv_end, step.block);
      } else {
        copy_step(slot, p.v, v_head, p.v_row_stride, kv_end, step.block);
      }
    }
    cp_async_commit();
  };
  const uint32 ring = base + kRingOffset;
  auto slot_after = [&](uint32 slot) {
    return slot == ring + (kStages - 1) * kSlotBytes ? ring : slot + kSlotBytes;
  };

  // Fill the pipeline: Q, then the first K and V.
  copy_rows<kTileM>(base + kQOffset, q_thread, p.q_row_stride,
                    seqlen.q_len() - tile.first_query - copy_row());
#pragma unroll
  for (int number = 0; number < kAhead; ++number) fetch(number, ring + number * kSlotBytes);
  const uint32 q_lane = base + kQOffset + warp_row * kRowBytes + lane_offset;

  // Clear the output and the softmax state.
  float o[kRowTiles][kHeadDim / 8][4] = {}, s[kRowTiles][kTileN / 8][4];
  float row_max[kRowTiles][2], row_sum[kRowTiles][2] = {};
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) row_max[t][0] = row_max[t][1] = kLeastLogit;

  // Loop over the steps. A slot is refilled as soon as all warps have finished with it: V's before the scores of the
  // next step, K's between two halves of the output, when half of the scores have left their registers.
  uint32 k_slot, v_slot = ring + kAhead * kSlotBytes;
  for (int i = 0; i < blocks.count; ++i) {
    const Step step = loaded[0];
    cp_async_wait<kAhead - 1>();  // kAhead + 2 i groups are committed: only those after K of this step may be in flight
    __syncthreads();
    fetch(i * 2 + kAhead, v_slot);
    k_slot = slot_after(v_slot);
    compute_qk_gemm(s, q_lane, k_slot);
    if (step.needs_mask(kv_end)) {
      const Tile here(p, ctaid_x());  // recomputed, as in the epilogue
      apply_mask(s, p, step, here.batch, here.first_query + warp_row + lane / 4, kv_end);
    }
    raise_row_max(o, row_sum, row_max, s, p.scale_log2);
    cp_async_wait<kAhead - 1>();
    __syncthreads();
    v_slot = slot_after(k_slot);
    const uint32 v_lane = v_slot + lane_offset;
    compute_pv_gemm<0, kHalfStep>(o, row_sum, row_max, s, p.scale_log2, v_lane);
    fetch(i * 2 + 1 + kAhead, k_slot);
    compute_pv_gemm<kHalfStep, kTileN / kGroupKeys>(o, row_sum, row_max, s, p.scale_log2, v_lane);
  }

  // Recomputed: kept from the start, it would occupy registers throughout.
  const Tile end(p, ctaid_x());
  // Divide by the row sums. A row without keys has sum 0: O = 0, LSE = -inf.
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float sum = quad_sum(row_sum[t][row]);
      const float inverse = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
      const float lse = sum == 0.0f ? kMinusInfinity : (row_max[t][row] + lg2(sum)) * kLn2;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        o[t][j][row * 2] *= inverse;
        o[t][j][row * 2 + 1] *= inverse;
      }
      const int query = end.first_query + warp_row + t * 16 + row * 8 + lane / 4;
      if (p.lse != nullptr && lane % 4 == 0 && query < seqlen.q_len()) {
        p.lse[seqlen.row(static_cast<int64>(end.batch) * p.heads + end.head, query)] = lse;
      }
    }
  }

  // Stage this warp's rows of O in place of its rows of Q, after its last lane has read them.
  if (blocks.count == 0) {  // no thread has waited for Q yet
    cp_async_wait<0>();
    __syncthreads();
  }
  __syncwarp();
  unsigned char* staging = shared + kOOffset;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32 to = chunk_offset(warp_row + t * 16 + row * 8 + lane / 4, j) + lane % 4 * 4;
        *reinterpret_cast<uint32*>(staging + to) = pack(o[t][j][row * 2], o[t][j][row * 2 + 1]);
      }
    }
  }
  __syncwarp();

  // Store them: 16 bytes per lane, one line of each of kWarpPassRows rows at a time.
  unsigned short* o_head = p.o + end.batch * p.o_batch_stride + end.head * p.o_head_stride;
#pragma unroll
  for (int pass = 0; pass < kWarpRows / kWarpPassRows; ++pass) {
    const int row = warp_row + pass * kWarpPassRows + lane / kLineChunks;
#pragma unroll
    for (int line = 0; line < kRowLines; ++line) {
      const int chunk = line * kLineChunks + lane % kLineChunks;
      if (end.first_query + row < seqlen.q_len()) {
        *reinterpret_cast<uint4*>(o_head + (end.first_query + row) * p.o_row_stride + chunk * 8) =
            *reinterpret_cast<const uint4*>(staging + chunk_offset(row, chunk));
      }
    }
  }
}
