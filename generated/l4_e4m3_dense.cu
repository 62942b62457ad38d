// Generated from specs/l4_e4m3_dense.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/l4_e4m3_dense.yaml
// spec: {"arch":"sm_89","copy":"cp_async","dtype":"e4m3","head_dim":128,"lse":true,"mma":"mma","op":"attention","pattern":{"kind":"dense"},"schedule":"multistage","stages":4,"tile":{"m":64,"n":64},"warp_rows":16}
// spec hash: d3a6e94516d9b242405fa39a2eb7082e7051a726a9ee7368c060e5f07e6ee77c
// seal: sha256 0710be9eec01b8fa26189c09c8c73132a5df37c61c4697bbf262702e6d319d55

// Attention forward for sm_89 over the visible keys of the pattern:
//   O = softmax(scale * Q K^T) V
//
// Roles
//   A thread block computes kTileM queries of one head. Each warp owns kWarpRows of them, with S, P and O in registers.
//   All threads take part in the copies.
//
// Pipeline
//   K and V of the steps pass through one ring of kStages slots in order of use: K0 V0 K1 V1 ..., tile t in slot t mod
//   kStages. cp.async (one group per tile) keeps kAhead = kStages - 2 tiles in flight: whole steps.
//   producer: all threads, cp.async    consumer: all warps, ldmatrix
//   full:  cp.async.wait_group (this thread's part of K and V of a step), then __syncthreads (all threads' parts)
//   empty: the same __syncthreads: all warps have finished the previous step, whose two slots then take the next tiles
//   Q arrives through the slots that are filled last and stays in registers. O leaves through
//   the
//   ring.
//   The exponentials of all keys of one product, those of a step, come before that product.
//
// Symbols
//   step        kTileN keys: one key block
//   s, p_frag   scores of kWarpRows x kTileN pairs; weights of kTileN keys as 8-bit A operands
//   q           kWarpRows queries as A operands
//   tile t      K or V of one step, in the ring. Tile: the queries of a thread block. Row tile: 16 of a warp's rows
//   o           kWarpRows x kHeadDim outputs, not yet divided by the row sum
//   row_max     maximum of a row's logits times log2(e), over the keys so far or up to an earlier key: the reference of
//   the weights
//   row_sum     this thread's part of the running sum of the weights
//   [t][j][i]   of s and o: in row tile t, a thread holds rows r (i = 0, 1) and r + 8 (i = 2, 3), r = lane / 4, columns
//               8 j + 2 (lane % 4) + {0, 1}. [t][0] and [t][1] of row_max and row_sum belong to rows r and r + 8

using int64 = long long;
using uint32 = unsigned int;

constexpr int kHeadDim = 128;  // elements per head
constexpr int kTileM = 64;  // queries of a thread block
constexpr int kTileN = 64;  // keys per step
constexpr int kStages = 4;  // slots of the ring
constexpr int kAhead = 2;  // K and V tiles in flight while the two of a step are read
constexpr int kSubTileRows = 64;  // queries of a tile, over one range of keys
constexpr int kWarpRows = 16;  // rows per warp
constexpr int kRowTiles = 1;  // tiles of 16 rows per warp; their products share K and V operands
constexpr int kThreads = 128;  // 4 warps
constexpr int kRowBytes = 128;  // bytes per row of Q and K
constexpr int kLineChunks = 8;  // 16-byte chunks per line, the part of a row that adjacent lanes copy
constexpr int kRowLines = 1;  // lines per row
constexpr int kSwizzleRows = 1;  // consecutive rows with the same swizzle
constexpr int kPassRows = 16;  // rows that all threads copy at a time
constexpr int kWarpPassRows = 4;  // rows that a warp stores at a time
constexpr int kSlotBytes = 8192;  // bytes of K or V of a step
constexpr int kStepBlocks = 1;  // loads per step: its listed blocks, if it has several
constexpr int kLoadKeys = 64;  // keys per load
constexpr int kVChunks = 4;  // 16-byte chunks of a row of V^T: the keys of a step, one byte each
constexpr int kVSwizzleRows = 2;  // consecutive rows of V^T with the same swizzle
constexpr int kORowBytes = 256;  // bytes of a row of O
constexpr int kOLineChunks = 8;  // 16-byte chunks of a line of O
constexpr int kORowLines = 2;  // lines of a row of O
constexpr int kOSwizzleRows = 1;  // consecutive rows of O with the same swizzle
constexpr int kSumColumns = 8;  // columns of the product that sums P's rows
constexpr int kQScaleRows = 128;  // rows of Q that share a scale
constexpr int kKScaleRows = 128;  // rows of K that share a scale
constexpr int kScaleKeys = 64;  // keys of a step that share a scale
constexpr int kScaleParts = 1;  // parts of a step, each with its own scale

// Dynamic shared memory: 32768 bytes. Byte offsets:
constexpr int kRingOffset = 0;  // 32768 bytes: 4 slots, each K or V of one step
constexpr int kQOffset = 16384;  // 8192 bytes: Q tile: in the slots that are filled last
constexpr int kOOffset = 0;  // 16384 bytes: staging of the O tile: in the ring, once it is idle

static_assert(kSubTileRows == kTileM);  // a thread block walks its key blocks once
static_assert(kTileM % kPassRows == 0 && kLoadKeys % kPassRows == 0);  // copies divide evenly among threads
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
// Initial row_max: finite, so that differences are defined. A row whose logits are all below it counts as a row without
// keys.
constexpr float kLeastLogit = -1e30f;
constexpr float kLn2 = 0.693147180559945f;

// Launch: 128 threads per block, 32768 bytes of dynamic shared memory.
// Grid: one thread block for each tile, 2 at a time on an SM.
struct Params {
  const unsigned char* q;  // Q (batch, heads, q_len, head_dim)
  int64 q_batch_stride;  // batch stride, in elements
  int64 q_head_stride;  // head stride, in elements
  int64 q_row_stride;  // row stride, in elements
  const unsigned char* k;  // K (batch, kv_heads, kv_len, head_dim)
  int64 k_batch_stride;  // batch stride, in elements
  int64 k_head_stride;  // head stride, in elements
  int64 k_row_stride;  // row stride, in elements
  const unsigned char* v;  // V^T (batch, kv_heads, head_dim, kv_len rounded up to 16, in the order of KEY_ORDER)
  int64 v_batch_stride;  // batch stride, in elements
  int64 v_head_stride;  // head stride, in elements
  int64 v_row_stride;  // row stride, in elements
  unsigned short* o;  // O, as Q, in bf16
  int64 o_batch_stride;  // batch stride, in elements
  int64 o_head_stride;  // head stride, in elements
  int64 o_row_stride;  // row stride, in elements
  const float* q_scale;  // scales of Q: value = code * scale
  int64 q_scale_batch_stride;  // batch stride, in elements (0: shared)
  int64 q_scale_head_stride;  // head stride, in elements (0: shared)
  int q_scale_row_stride;  // group of rows stride, in elements (0: shared)
  const float* k_scale;  // scales of K: value = code * scale
  int64 k_scale_batch_stride;  // batch stride, in elements (0: shared)
  int64 k_scale_head_stride;  // head stride, in elements (0: shared)
  int k_scale_row_stride;  // group of rows stride, in elements (0: shared)
  const float* v_scale;  // scales of V: value = code * scale
  int64 v_scale_batch_stride;  // batch stride, in elements (0: shared)
  int64 v_scale_head_stride;  // head stride, in elements (0: shared)
  int v_scale_column_stride;  // column stride, in elements (0: shared)
  float* lse;  // log-sum-exp, (batch, heads, q_len) contiguous; not stored if null
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

// mma.sync.m16n8k32: D += A B in fp32; A row-major e4m3, B column-major e4m3 (PTX ISA, "mma")
__device__ __forceinline__ void mma_e4m3_e4m3(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
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

// cvt.rn.bf16x2.f32: converts two floats to a pair of bf16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// cvt.rn.satfinite.e4m3x2.f32: converts two floats to a pair of e4m3, the second operand in the lower byte; here four
// to a word, the first one lowest (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack_e4m3(float a, float b, float c, float d) {
  uint32 word;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, { low, high };\n"
      "}\n" : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

// Pattern: every query sees every key.
struct KvBlockIterator {
  int count;  // key blocks visible to these queries

  __device__ __forceinline__ KvBlockIterator(const Params& p, int batch, int head, int first_query) {
    const SeqlenInfo seqlen(p, batch);
    // first_query < q_len() always holds: every tile has a query.
    count = first_query < seqlen.q_len() ? (seqlen.kv_end() + kTileN - 1) / kTileN : 0;
  }
  // Index of the i-th key block, in descending order: the block that may be incomplete comes while the pipeline fills.
  __device__ __forceinline__ int at(int i) { return count - 1 - i; }
};

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
__device__ __forceinline__ void copy_rows(uint32 to, const unsigned char* from, int64 row_stride, int valid_rows) {
#pragma unroll
  for (int row = 0; row < kRows; row += kPassRows) {
    const uint32 chunk = to + chunk_offset(copy_row() + row, copy_chunk());
#pragma unroll
    for (int line = 0; line < kRowLines; ++line) {
      cp_async_16(chunk + line * kLineChunks * 16, from + line * kLineChunks * 16, row < valid_rows);
    }
    from += kPassRows * row_stride;
  }
}

// Starts this thread's part of the copy of K of a step, load by load, kLoadKeys keys each. The head begins `head`
// chunks into the tensor. Chunk indices are 32-bit: they reach 64 GB and take half the registers of addresses.
__device__ __forceinline__ void copy_step(uint32 to, const unsigned char* tensor, uint32 head, int64 row_stride,
    int kv_len, const int (&blocks)[kStepBlocks]) {
#pragma unroll
  for (int load = 0; load < kStepBlocks; ++load) {
    const int key = blocks[load] * kLoadKeys + copy_row();
    const uint32 chunk = head + static_cast<uint32>(row_stride / 16) * static_cast<uint32>(key) + copy_chunk();
    const unsigned char* from = tensor + static_cast<int64>(chunk) * 16;
    copy_rows<kLoadKeys>(to + load * kLoadKeys * kRowBytes, from, row_stride, kv_len - key);
  }
}

// What a warp needs to mask a step: the index of the block of each load.
struct Step {
  int block[kStepBlocks];

  __device__ __forceinline__ void take(KvBlockIterator& blocks, int i) {
#pragma unroll
    for (int load = 0; load < kStepBlocks; ++load) {
      block[load] = blocks.at(i * kStepBlocks + load);
    }
  }
  // Whether some key of the step is out of range.
  __device__ __forceinline__ bool needs_mask(const KvEnd& kv_end) const {
    bool some = false;
#pragma unroll
    for (int load = 0; load < kStepBlocks; ++load) {
      some |= (block[load] + 1) * kLoadKeys > kv_end;
    }
    return some;
  }
};

// s = Q K^T for this warp's rows and one step.
__device__ __forceinline__ void compute_qk_gemm(float (&s)[kRowTiles][kTileN / 8][4],
    const uint32 (&q)[kRowTiles][kHeadDim / 32][4], uint32 k_tile) {
  // Matrices of one ldmatrix: keys 0-7 and 8-15 of a group of 16, each with the two halves of 32 columns.
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
  for (int slice = 0; slice < kHeadDim / 32; ++slice) {
#pragma unroll
    for (int keys = 0; keys < kTileN; keys += 16) {
      uint32 k[4];
      ldmatrix_x4(k, further_on(k_lane, slice * 2) + keys * kRowBytes);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        mma_e4m3_e4m3(s[tile][keys / 8], q[tile][slice], k[0], k[1]);
        mma_e4m3_e4m3(s[tile][keys / 8 + 1], q[tile][slice], k[2], k[3]);
      }
    }
  }
}

// Masks the keys of a step that are out of range.
__device__ __forceinline__ void apply_mask(
    float (&s)[kRowTiles][kTileN / 8][4], const KvEnd& kv_end, const Step& step) {
#pragma unroll
  for (int j = 0; j < kTileN / 8; ++j) {
    const int load = j * 8 / kLoadKeys;
    const int first_key = step.block[load] * kLoadKeys + j * 8 % kLoadKeys + threadIdx.x % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + i % 2;
        const bool seen = key < kv_end;
        if (!seen) s[tile][j][i] = kMinusInfinity;
      }
    }
  }
}

// Byte offsets of 16-byte chunks, as chunk_offset, of V^T (one row spans the keys of a step) and of O.
__device__ __forceinline__ uint32 v_chunk_offset(int row, int chunk) {
  return row * kTileN + (chunk ^ row / kVSwizzleRows % kVChunks) * 16;
}
__device__ __forceinline__ uint32 o_chunk_offset(int row, int chunk) {
  return row * kORowBytes + (chunk ^ row / kOSwizzleRows % kOLineChunks) * 16;
}

// Starts this thread's part of the copy of V^T of a step, load by load. A row is one column of V. Chunks whose 16 keys
// are all out of range are zero-filled; V^T itself is zero beyond the last key.
__device__ __forceinline__ void copy_v_step(uint32 to, const unsigned char* tensor, uint32 head, int64 row_stride,
    int kv_len, const int (&blocks)[kStepBlocks]) {
  constexpr int kChunks = kLoadKeys / 16, kLoadChunks = kHeadDim * kChunks;
#pragma unroll
  for (int load = 0; load < kStepBlocks; ++load) {
    const int first_key = blocks[load] * kLoadKeys;
#pragma unroll
    for (int pass = 0; pass < kLoadChunks; pass += kThreads) {
      const int number = pass + static_cast<int>(threadIdx.x), row = number / kChunks, chunk = number % kChunks;
      if (kLoadChunks % kThreads != 0 && number >= kLoadChunks) break;
      const uint32 from = head + static_cast<uint32>(row_stride / 16) * static_cast<uint32>(row) +
                          static_cast<uint32>(first_key / 16 + chunk);
      cp_async_16(to + v_chunk_offset(row, load * kChunks + chunk), tensor + static_cast<int64>(from) * 16,
          chunk * 16 < kv_len - first_key);
    }
  }
}

// Scales of Q for this thread's rows. Out-of-range rows use the last query's. `row` is the first row, relative to the
// tile.
__device__ __forceinline__ void load_q_scales(float (&scales)[kRowTiles][2], const Params& p, const Tile& tile,
    int row) {
  const SeqlenInfo seqlen(p, tile.batch);
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    const int queries[2] = {min(tile.first_query + row + t * 16 + 0 * 8, seqlen.q_len() - 1),
        min(tile.first_query + row + t * 16 + 1 * 8, seqlen.q_len() - 1)};
    const int heads[2] = {tile.head, tile.head};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scales[t][half] = __ldg(p.q_scale + tile.batch * p.q_scale_batch_stride +
                              heads[half] * p.q_scale_head_stride +
                              queries[half] / kQScaleRows * p.q_scale_row_stride);
    }
  }
}

// Scales of K for a step, one for each part of its keys. Out-of-range blocks use the nearest block's.
__device__ __forceinline__ void load_k_scales(float (&scales)[kScaleParts], const float* of_head, const Params& p,
    const SeqlenInfo& seqlen, const int (&blocks)[kStepBlocks]) {
#pragma unroll
  for (int part = 0; part < kScaleParts; ++part) {
    const int key = blocks[part * kScaleKeys / kLoadKeys] * kLoadKeys + part * kScaleKeys % kLoadKeys;
    scales[part] = __ldg(of_head + min(max(key, 0), seqlen.kv_len() - 1) / kKScaleRows * p.k_scale_row_stride);
  }
}

// Undoes the quantization of s.
__device__ __forceinline__ void dequantize(float (&s)[kRowTiles][kTileN / 8][4],
    const float (&q_scales)[kRowTiles][2], const float (&k_scales)[kScaleParts]) {
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[tile][j][i] *= q_scales[tile][i / 2] * k_scales[j * 8 / kScaleKeys];
    }
  }
}

// Online softmax with lazy rescaling.
// The weight of a pair is 2^(scale_log2 s - row_max). row_max is the maximum of the row, over its steps so far or up to
// an earlier step, minus kWeightShift: weights then use the range of e4m3, up to 448.
constexpr float kWeightShift = 7.0f;
constexpr float kRescaleThreshold = 1.8f;  // as log2 of a weight: 2^(7 + 1.8) is below 448

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
    step_max[0] = step_max[0] * scale_log2 - kWeightShift;
    step_max[1] = step_max[1] * scale_log2 - kWeightShift;
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

// P: the weights of a step, in e4m3. For each 16 keys, a thread's scores in two groups of 8 columns are four neighbors
// of the A operand: the keys of V are permuted to match.
__device__ __forceinline__ void scale_apply_exp2(uint32 (&p_frag)[kRowTiles][kTileN / 32][4],
    const float (&s)[kRowTiles][kTileN / 8][4], const float (&row_max)[kRowTiles][2], float scale_log2) {
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int keys = 0; keys < kTileN / 16; ++keys) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float weights[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weights[i] = ex2(s[tile][keys * 2 + i / 2][row * 2 + i % 2] * scale_log2 - row_max[tile][row]);
        }
        p_frag[tile][keys / 2][keys % 2 * 2 + row] = pack_e4m3(weights[0], weights[1], weights[2], weights[3]);
      }
    }
  }
}

// o += P V for this warp's rows and one step, accumulated in fp32. row_sum accumulates the sums of P as
// rounded: the first lane of each four holds those of its rows, the others add zeros.
__device__ __forceinline__ void compute_pv_gemm(float (&o)[kRowTiles][kHeadDim / 8][4], float (&row_sum)[kRowTiles][2],
    const float (&row_max)[kRowTiles][2], const float (&s)[kRowTiles][kTileN / 8][4], float scale_log2,
    uint32 v_tile) {
  uint32 p_frag[kRowTiles][kTileN / 32][4];
  scale_apply_exp2(p_frag, s, row_max, scale_log2);
  const int lane = threadIdx.x % 32;
  // Column 0 of B holds ones, the other columns zeros: the first lane of each four holds column 0 of the product.
  const uint32 ones = lane < 4 ? 0x38383838u : 0u;
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
    float sums[kSumColumns / 2] = {};
#pragma unroll
    for (int k = 0; k < kTileN / 32; ++k) mma_e4m3_e4m3(sums, p_frag[tile][k], ones, ones);
    row_sum[tile][0] += sums[0];
    row_sum[tile][1] += sums[2];
  }
  // Matrices of one ldmatrix: columns 0-7 and 8-15 of 16 columns of O, each with the two halves of 32 keys.
  const uint32 v_lane = v_tile + v_chunk_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int columns = 0; columns < kHeadDim; columns += 16) {
    float part[kRowTiles][2][4] = {};
#pragma unroll
    for (int k = 0; k < kTileN / 32; ++k) {
      uint32 v[4];
      ldmatrix_x4(v, (v_lane ^ k * 32) + columns * kTileN);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        mma_e4m3_e4m3(part[tile][0], p_frag[tile][k], v[0], v[1]);
        mma_e4m3_e4m3(part[tile][1], p_frag[tile][k], v[2], v[3]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 8; ++i) o[tile][columns / 8 + i / 4][i % 4] += part[tile][i / 4][i % 4];
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) l4_e4m3_dense(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp * kWarpRows;
  const uint32 lane_offset = chunk_offset(lane % 16, lane / 16);  // this lane's chunk of Q for ldmatrix

  const Tile tile(p, blockIdx.x);
  // Start of this thread's copies of Q.
  const unsigned char* q_thread = p.q + tile.batch * p.q_batch_stride + tile.head * p.q_head_stride +
      (tile.first_query + copy_row()) * p.q_row_stride + copy_chunk() * 16;
  const int kv_head = tile.head / p.heads_per_kv_head;
  const uint32 k_head = uniform((tile.batch * p.k_batch_stride + kv_head * p.k_head_stride) / 16);
  const uint32 v_head = uniform((tile.batch * p.v_batch_stride + kv_head * p.v_head_stride) / 16);

  const SeqlenInfo seqlen(p, tile.batch);
  const KvEnd kv_end(p, tile.batch);
  // Iterator over the key blocks. It computes a step from its index, so any step can be requested at any time.
  KvBlockIterator blocks(p, tile.batch, tile.head, tile.first_query);

  // Starts the copy of tile `number` as one cp.async group: K of step number / 2 or, if odd, V; an empty group after
  // the last step.
  auto fetch = [&](int number, uint32 slot) {
    if (number / 2 < blocks.count) {
      Step step;
      step.take(blocks, number / 2);
      if (number % 2 == 0) {
        copy_step(slot, p.k, k_head, p.k_row_stride, kv_end, step.block);
      } else {
        copy_v_step(slot, p.v, v_head, p.v_row_stride, kv_end, step.block);
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
  cp_async_commit();
#pragma unroll
  for (int number = 0; number < kAhead; ++number) fetch(number, ring + number * kSlotBytes);

  // Load this warp's rows of Q into registers. Q's group is the oldest: at most the kAhead groups of K and V are still
  // in flight. The next __syncthreads comes before Q's slot is refilled.
  cp_async_wait<kAhead>();
  __syncthreads();
  uint32 q[kRowTiles][kHeadDim / 32][4];
  const uint32 q_lane = base + kQOffset + warp_row * kRowBytes + lane_offset;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int slice = 0; slice < kHeadDim / 32; ++slice) {
      ldmatrix_x4(q[t][slice], further_on(q_lane, slice * 2) + t * 16 * kRowBytes);
    }
  }

  // Clear the output and the softmax state.
  float o[kRowTiles][kHeadDim / 8][4] = {}, s[kRowTiles][kTileN / 8][4];
  float row_max[kRowTiles][2], row_sum[kRowTiles][2] = {};
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) row_max[t][0] = row_max[t][1] = kLeastLogit;

  float q_scales[kRowTiles][2];
  load_q_scales(q_scales, p, tile, warp_row + lane / 4);
  const float* k_scales_of_head = p.k_scale + tile.batch * p.k_scale_batch_stride + kv_head * p.k_scale_head_stride;
  // Loop over the steps. When all warps have finished a step, its two slots are refilled.
  uint32 k_slot = ring;
  for (int i = 0; i < blocks.count; ++i) {
    Step step;
    step.take(blocks, i);
    cp_async_wait<kAhead - 2>();  // kAhead + 2 i groups are committed: only those after this step may be in flight
    __syncthreads();
    const uint32 refill = k_slot == ring ? ring + kAhead * kSlotBytes : k_slot - 2 * kSlotBytes;
    fetch(i * 2 + kAhead, refill);
    fetch(i * 2 + kAhead + 1, refill + kSlotBytes);
    const uint32 v_slot = k_slot + kSlotBytes;
    float k_scales[kScaleParts];  // loaded before the products, used after them
    load_k_scales(k_scales, k_scales_of_head, p, seqlen, step.block);
    compute_qk_gemm(s, q, k_slot);
    dequantize(s, q_scales, k_scales);
    if (step.needs_mask(kv_end)) apply_mask(s, kv_end, step);
    raise_row_max(o, row_sum, row_max, s, p.scale_log2);
    compute_pv_gemm(o, row_sum, row_max, s, p.scale_log2, v_slot);
    k_slot = slot_after(v_slot);
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

  // Each column of V has its own scale.
  const float* v_scales = p.v_scale + end.batch * p.v_scale_batch_stride +
                          end.head / p.heads_per_kv_head * p.v_scale_head_stride;
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scale = __ldg(v_scales + (j * 8 + lane % 4 * 2 + i) * p.v_scale_column_stride);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        o[t][j][i] *= scale;
        o[t][j][2 + i] *= scale;
      }
    }
  }

  // Stage this warp's rows of O in the ring, after all warps have finished reading it.
  __syncthreads();
  unsigned char* staging = shared + kOOffset;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32 to = o_chunk_offset(warp_row + t * 16 + row * 8 + lane / 4, j) + lane % 4 * 4;
        *reinterpret_cast<uint32*>(staging + to) = pack(o[t][j][row * 2], o[t][j][row * 2 + 1]);
      }
    }
  }
  __syncwarp();

  // Store them: 16 bytes per lane, one line of each of kWarpPassRows rows at a time.
  unsigned short* o_head = p.o + end.batch * p.o_batch_stride + end.head * p.o_head_stride;
#pragma unroll
  for (int pass = 0; pass < kWarpRows / kWarpPassRows; ++pass) {
    const int row = warp_row + pass * kWarpPassRows + lane / kOLineChunks;
#pragma unroll
    for (int line = 0; line < kORowLines; ++line) {
      const int chunk = line * kOLineChunks + lane % kOLineChunks;
      if (end.first_query + row < seqlen.q_len()) {
        *reinterpret_cast<uint4*>(o_head + (end.first_query + row) * p.o_row_stride + chunk * 8) =
            *reinterpret_cast<const uint4*>(staging + o_chunk_offset(row, chunk));
      }
    }
  }
}
