// Generated from specs/backward/h100_causal_alibi_daux.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/backward/h100_causal_alibi_daux.yaml
// spec: {"arch":"sm_90a","aux_gradients":["slope"],"copy":"cp_async","dtype":"fp16","gradients":"daux","head_dim":128,"mma":"mma","op":"attention_backward","pattern":{"align":"bottom_right","kind":"causal"},"schedule":"multistage","score":{"aux":{"slope":"fp32[heads]"},"value":"score + slope[head] * (kv_idx - q_idx)"},"stages":2,"tile":{"m":64,"n":32}}
// spec hash: b2dfe4cf476efc95c92b18117249af5c6dba6626a75a92642c45e1ca55616733
// seal: sha256 05f8b07901e98f34b661e17391768e3ad664f1c63ef52414b476efe073ab34bf

// Attention backward for sm_90a, gradients of tensors of the score over the visible keys of the pattern:
//   P = exp(score(scale * Q K^T) - LSE),  dS = P (dO V^T - delta)
//   daux_slope: sums of a query of dS times the score's derivative, for slope[head]
// Each thread block accumulates the contributions of its queries, in a fixed order and without atomics: results are
// bitwise reproducible. A later reduction adds the sums of thread blocks, and of pairs that share an element.
//
// Roles
//   A thread block processes every splits-th tile of a head. Each warp owns 16 queries of a tile, with their Q and dO
//   in registers, and all threads take part in the copies: S = Q K^T and dP = dO V^T. The sums of a query stay in its
//   warp. The sums of a key or a distance go through shared memory, where one thread adds them up.
//
// Pipeline
//   Q and dO of a tile arrive through the ring's buffer. Then K and V pass through a ring of kStages stages, step i in
//   stage i mod kStages. cp.async (one group per step) keeps kStages - 1 steps in flight.
//   producer: all threads, cp.async    consumer: all warps, ldmatrix
//   full:  cp.async.wait_group (this thread's part of a step), then __syncthreads (all threads' parts)
//   empty: the same __syncthreads: all warps have finished the previous step, whose stage is then refilled
//
// Symbols
//   tile        kTileM queries of one head
//   step        kTileN keys: a key block. Blocks are numbered from key 0 on
//   q, dout     16 queries of the warp, as A operands
//   s, ds       S; dP, then dS: 16 queries of the warp x kTileN keys
//   [j][i]      of s and ds: a thread holds rows r (i = 0, 1) and r + 8 (i = 2, 3), r = lane / 4, columns
//               8 j + 2 (lane % 4) + {0, 1}; rows are queries, columns keys

using int64 = long long;
using uint32 = unsigned int;

struct RowStats;
constexpr int kHeadDim = 128;  // elements per head
constexpr int kTileM = 64;  // query rows of a tile
constexpr int kTileN = 32;  // keys per step
constexpr int kSubTileRows = 64;  // queries of a tile, over one range of keys
constexpr int kStages = 2;  // depth of the ring
constexpr int kThreads = 128;  // 4 warps of 16 rows
constexpr int kRowBytes = 256;  // bytes of a row of a head
constexpr int kLineChunks = 8;  // 16-byte chunks per line, the part of a row that adjacent lanes copy
constexpr int kRowLines = 2;  // lines per row
constexpr int kSwizzleRows = 1;  // consecutive rows with the same swizzle
constexpr int kPassRows = 16;  // rows that all threads copy at a time
constexpr int kKvBytes = 8192;  // bytes of K, or of V, of a step
constexpr int kPrologueThreads = 1024;  // threads per block of the prologue
constexpr int kRowLanes = 16;  // threads per row in the prologue, 16 bytes each

// Dynamic shared memory: 32776 bytes. Byte offsets:
constexpr int kRingOffset = 0;  // 32768 bytes: 2 stages, each K and V of a step
constexpr int kStepMetaOffset = 32768;  // 8 bytes: metadata of the steps in the ring
constexpr int kQOffset = 0;  // 16384 bytes: Q of the tile, initially
constexpr int kDoutOffset = 16384;  // 16384 bytes: dO of the tile, initially

static_assert(kTileM % kPassRows == 0 && kTileN % kPassRows == 0);  // copies divide evenly among threads
static_assert(kTileN + kTileM - 1 <= kThreads);  // each diagonal, or column, of a step has a thread
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
constexpr float kLog2E = 1.44269504088896f;

// Launch: 128 threads per block, 32776 bytes of dynamic shared memory.
// Grid: up to 512 thread blocks, each with tiles of one head, 2 at a time on an SM.
// Prologue, with the same parameters: h100_causal_alibi_daux_prologue, 1024 threads per block.
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
  float* daux_slope;  // sums of its rows, (batch, heads, q_len)
  int splits;  // thread blocks that share the tiles of a head
  const unsigned short* out;  // O (batch, heads, q_len, head_dim)
  int64 out_batch_stride;  // batch stride, in elements
  int64 out_head_stride;  // head stride, in elements
  int64 out_row_stride;  // row stride, in elements
  const unsigned short* dout;  // dO, as O
  int64 dout_batch_stride;  // batch stride, in elements
  int64 dout_head_stride;  // head stride, in elements
  int64 dout_row_stride;  // row stride, in elements
  const float* lse;  // log-sum-exp of the forward, (batch, heads, q_len) contiguous
  RowStats* stats;  // statistics of all rows, (batch, heads, padded_q_len)
  const float* aux_slope;  // slope, fp32[heads]
  int64 aux_slope_stride0;  // stride along i, in elements (0: shared)
  int q_len;  // queries per head
  int padded_q_len;  // rows of statistics per head: q_len and at least 128 rows of padding
  int kv_len;  // keys per head
  int heads;  // query heads
  int heads_per_kv_head;  // query heads per K/V head
  int batch_heads;  // batch * heads
  int query_tiles;  // tiles of kTileM queries per head
  int head_chunks;  // 16-byte chunks per row of a head
  float scale_log2;  // scale * log2(e); the host checks that it is positive
  float scale;  // the softmax scale
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

// ex2.approx.ftz: 2^x, relative error 2^-22 (PTX ISA, "ex2")
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Sum over the four lanes that share a row of an accumulator (shfl.sync.bfly: PTX ISA, "shfl.sync").
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}

// Per-query statistics for the main kernel: log-sum-exp times log2(e), and delta, the sum of dO O over its row
// (FlashAttention's LSE_log2 and dPsum). A query without keys, or a row that pads a head's queries, has infinity and 0:
// its weights are 2^-inf = 0.
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
    h100_causal_alibi_daux_prologue(const __grid_constant__ Params p) {
  const int64 place = static_cast<int64>(blockIdx.x) * kPrologueThreads + threadIdx.x, row = place / kRowLanes;
  const int chunk = threadIdx.x % kRowLanes, query = row % p.padded_q_len;
  const int64 batch_head = row / p.padded_q_len;
  if (batch_head >= p.batch_heads) return;  // whole rows: kRowLanes divides a warp
  const int head = batch_head % p.heads, batch = batch_head / p.heads;
  const SeqlenInfo seqlen(p, batch);
  float delta = 0.0f;
  if (query < seqlen.q_len() && chunk < p.head_chunks) {
    const uint4 o = *reinterpret_cast<const uint4*>(
        p.out + batch * p.out_batch_stride + head * p.out_head_stride + query * p.out_row_stride + chunk * 8);
    const uint4 d = *reinterpret_cast<const uint4*>(
        p.dout + batch * p.dout_batch_stride + head * p.dout_head_stride + query * p.dout_row_stride + chunk * 8);
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
    const float lse = query < seqlen.q_len() ? p.lse[seqlen.row(batch_head, query)] : kMinusInfinity;
    p.stats[row] = lse > kMinusInfinity ? RowStats{lse * kLog2E, delta} : RowStats{-kMinusInfinity, 0.0f};
  }
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
  return key <= query + (p.kv_len - p.q_len);
}

struct Tile {
  int first_query, head, batch;
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

// This thread's part of the copy of a tensor: chunk `copy_chunk` of every line of rows copy_row, copy_row + kPassRows,
// ...
__device__ __forceinline__ int copy_row() { return threadIdx.x / kLineChunks; }
__device__ __forceinline__ int copy_chunk() { return threadIdx.x % kLineChunks; }

// Starts this thread's part of the copy of kRows rows of a tile, starting at its first chunk. Rows from `valid_rows` on
// are zero-filled, and so are chunks from `head_chunks` on.
template <int kRows>
__device__ __forceinline__ void copy_rows(uint32 to, const unsigned short* from, int64 row_stride, int valid_rows,
    int head_chunks) {
  int rows[kRowLines];  // rows that have this thread's chunk of a line
#pragma unroll
  for (int line = 0; line < kRowLines; ++line) {
    rows[line] = line * kLineChunks + copy_chunk() < head_chunks ? valid_rows : 0;
  }
#pragma unroll
  for (int row = 0; row < kRows; row += kPassRows) {
    const uint32 chunk = to + chunk_offset(copy_row() + row, copy_chunk());
#pragma unroll
    for (int line = 0; line < kRowLines; ++line) {
      cp_async_16(chunk + line * kLineChunks * 16, from + line * kLineChunks * 8, row < rows[line]);
    }
    from += kPassRows * row_stride;
  }
}

// d = A B^T for this warp's 16 queries and one step: A in registers, B the keys of the step.
__device__ __forceinline__ void compute_scores(float (&d)[kTileN / 8][4], const uint32 (&a)[kHeadDim / 16][4],
    uint32 b_tile) {
  // Matrices of one ldmatrix of B: rows 0-7 and 8-15 of a group of 16, each with the two halves of 16 columns.
  const int lane = threadIdx.x % 32;
  const uint32 b_lane = b_tile + chunk_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int j = 0; j < kTileN / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[j][i] = 0.0f;
  }
#pragma unroll
  for (int slice = 0; slice < kHeadDim / 16; ++slice) {
#pragma unroll
    for (int row = 0; row < kTileN; row += 16) {
      uint32 b[4];
      ldmatrix_x4(b, further_on(b_lane, slice * 2) + row * kRowBytes);
      mma_m16n8k16(d[row / 8], a[slice], b[0], b[1]);
      mma_m16n8k16(d[row / 8 + 1], a[slice], b[2], b[3]);
    }
  }
}

// Masks the pairs of a step that the pattern or the end of the keys excludes. `query` is this thread's first.
__device__ __forceinline__ void apply_mask(float (&s)[kTileN / 8][4], const Params& p, int batch, int meta,
    int query, const KvEnd& kv_end) {
  const int first_key = meta / 2 * kTileN + threadIdx.x % 4 * 2;  // this thread's first key
#pragma unroll
  for (int j = 0; j < kTileN / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first_key + j * 8 + i % 2;
      bool keep = key < kv_end;
      keep &= meta % 2 == 0 || visible(p, batch, query + i / 2 * 8, key);
      if (!keep) s[j][i] = kMinusInfinity;
    }
  }
}

// slope: fp32[heads]
__device__ __forceinline__ float load_slope(const Params& p, int i) {
  return __ldg(p.aux_slope + i * p.aux_slope_stride0);
}

// Terms of the score that depend on the query alone, for keys counted from first_key.
struct ScoreRow {
  float slope_of_row;
  float row_0;
  float row_1;

  __device__ __forceinline__ ScoreRow(const Params& p, int batch, int head, int query, int first_key) {
    slope_of_row = load_slope(p, head);
    row_0 = 1.442695f * slope_of_row;
    row_1 = row_0 * static_cast<float>(first_key - query);
  }
};

// log2(e) times the score of a pair, for 2^x; qk is q.k before scaling. The score is
//   score + slope[head] * (kv_idx - q_idx)
__device__ __forceinline__ float score_log2(const Params& p, int batch, int head, int query, int key, float column,
    float qk, const ScoreRow& row) {
  const float row_0 = row.row_0;
  const float row_1 = row.row_1;
  return qk * p.scale_log2 + (row_0 * column + row_1);
}

// dS = P (dP - delta), in place of dP. s: q.k; -infinity for a masked pair, whatever its score. Out-of-range queries
// use the terms of the last query and have weight 0.
__device__ __forceinline__ void score_gradients(float (&ds)[kTileN / 8][4], const float (&s)[kTileN / 8][4],
    const Params& p, int batch, int head, int first_key, const int (&queries)[2], const RowStats (&stats)[2]) {
  // Opaque to the compiler, so that it computes values derived from these here. Hoisted out of the loop, they would
  // occupy registers throughout.
  asm volatile("" : "+r"(batch), "+r"(head));
  const SeqlenInfo seqlen(p, batch);
  const ScoreRow rows[2] = {ScoreRow(p, batch, head, queries[0], first_key),
      ScoreRow(p, batch, head, queries[1], first_key)};
#pragma unroll
  for (int c = 0; c < kTileN / 4; ++c) {  // columns of this thread, two rows each
    const int column = c / 2 * 8 + c % 2, key = first_key + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float qk = s[c / 2][half * 2 + c % 2];
      float& d = ds[c / 2][half * 2 + c % 2];
      const float logit = score_log2(p, batch, head, queries[half], key, column, qk, rows[half]);
      const bool counts = qk != kMinusInfinity && stats[half].lse_log2 != -kMinusInfinity;
      d = counts ? ex2(logit - stats[half].lse_log2) * (d - stats[half].delta) : 0.0f;
    }
  }
}

// Terms of that derivative that depend on the query alone, for keys counted from first_key.
struct Slope0Row {
  float row_0;

  __device__ __forceinline__ Slope0Row(const Params& p, int batch, int head, int query, int first_key) {
    row_0 = static_cast<float>(first_key - query);
  }
};

// The derivative of the score by slope[head]:
//   float(kv_idx - q_idx)
__device__ __forceinline__ float slope_0(const Params& p, int batch, int head, int query, int key, float column,
    float qk, const Slope0Row& row) {
  const float row_0 = row.row_0;
  return column + row_0;
}

// parts = dS times that derivative: the contributions of a step's pairs to daux_slope. Masked pairs contribute 0,
// whatever their derivative.
__device__ __forceinline__ void parts_0(float (&parts)[kTileN / 8][4], const float (&ds)[kTileN / 8][4],
    const float (&s)[kTileN / 8][4], const Params& p, int batch, int head, int first_key, const int (&queries)[2]) {
  asm volatile("" : "+r"(batch), "+r"(head));  // as above
  const SeqlenInfo seqlen(p, batch);
  const Slope0Row rows[2] = {Slope0Row(p, batch, head, queries[0], first_key),
      Slope0Row(p, batch, head, queries[1], first_key)};
#pragma unroll
  for (int c = 0; c < kTileN / 4; ++c) {
    const int column = c / 2 * 8 + c % 2, key = first_key + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = c / 2, i = half * 2 + c % 2;
      const float slope = slope_0(p, batch, head, queries[half], key, column, s[j][i], rows[half]);
      parts[j][i] = ds[j][i] == 0.0f ? 0.0f : ds[j][i] * slope;
    }
  }
}

// Adds the pairs of a step to the sums of this thread's two queries.
__device__ __forceinline__ void add_rows(float (&sums)[2], const float (&parts)[kTileN / 8][4]) {
#pragma unroll
  for (int c = 0; c < kTileN / 4; ++c) {
#pragma unroll
    for (int half = 0; half < 2; ++half) sums[half] += parts[c / 2][half * 2 + c % 2];
  }
}

// Stores the sums of a warp's 16 queries. `query` is this thread's first; four lanes share it.
__device__ __forceinline__ void store_rows(float* to, const float (&sums)[2], int query, int q_len) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(sums[half]);
    if (threadIdx.x % 4 == 0 && query + half * 8 < q_len) to[query + half * 8] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    h100_causal_alibi_daux(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int batch_head = blockIdx.x / p.splits;
  const SeqlenInfo seqlen(p, batch_head / p.heads);
  // Address of the row that this lane reads by ldmatrix, for A operands.
  const uint32 my_rows = warp * 16 * kRowBytes + chunk_offset(lane % 16, lane / 16);
  int* step_meta = reinterpret_cast<int*>(shared + kStepMetaOffset);
  float* daux_slope = p.daux_slope + static_cast<int64>(batch_head) * seqlen.q_len();

#pragma unroll 1
  for (int index = blockIdx.x % p.splits; index < p.query_tiles; index += p.splits) {
    const Tile tile{index * kTileM, batch_head % p.heads, batch_head / p.heads};

    // Load Q and dO into registers.
    const int first_row = tile.first_query + copy_row();
    __syncthreads();  // the ring may still be in use by the previous tile
    copy_rows<kTileM>(base + kQOffset,
        p.q + tile.batch * p.q_batch_stride + tile.head * p.q_head_stride + first_row * p.q_row_stride +
            copy_chunk() * 8,
        p.q_row_stride, seqlen.q_len() - first_row, p.head_chunks);
    copy_rows<kTileM>(base + kDoutOffset,
        p.dout + tile.batch * p.dout_batch_stride + tile.head * p.dout_head_stride + first_row * p.dout_row_stride +
            copy_chunk() * 8,
        p.dout_row_stride, seqlen.q_len() - first_row, p.head_chunks);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    uint32 q[kHeadDim / 16][4], dout[kHeadDim / 16][4];
#pragma unroll
    for (int slice = 0; slice < kHeadDim / 16; ++slice) {
      ldmatrix_x4(q[slice], further_on(base + kQOffset + my_rows, slice * 2));
      ldmatrix_x4(dout[slice], further_on(base + kDoutOffset + my_rows, slice * 2));
    }
    __syncthreads();  // Q and dO occupy the ring's buffer

    const int kv_head = tile.head / p.heads_per_kv_head;
    const unsigned short* k = p.k + tile.batch * p.k_batch_stride + kv_head * p.k_head_stride + copy_chunk() * 8;
    const unsigned short* v = p.v + tile.batch * p.v_batch_stride + kv_head * p.v_head_stride + copy_chunk() * 8;
    const KvEnd kv_end(p, tile.batch);
    KvBlockIterator blocks(p, tile.batch, tile.head, tile.first_query);
    // Starts the copy of step `number` as one cp.async group; an empty group after the last step. Steps must be
    // requested in order.
    auto fetch = [&](int number, int stage) {
      if (number < blocks.count) {
        const int step = blocks.at(number), first_key = step * kTileN, row = first_key + copy_row();
        // Complemented, hence negative, if some pair is masked; lowest bit: whether the pattern masks some.
        const bool masked = blocks.masked(number, step);
        const int meta = step * 2 + masked;
        if (threadIdx.x == 0) step_meta[stage] = masked || first_key + kTileN > kv_end ? ~meta : meta;
        const uint32 to = base + kRingOffset + stage * 2 * kKvBytes;
        copy_rows<kTileN>(to, k + row * p.k_row_stride, p.k_row_stride, kv_end - row, p.head_chunks);
        copy_rows<kTileN>(to + kKvBytes, v + row * p.v_row_stride, p.v_row_stride, kv_end - row, p.head_chunks);
      }
      cp_async_commit();
    };
#pragma unroll
    for (int number = 0; number < kStages - 1; ++number) fetch(number, number);

    const int query = tile.first_query + warp * 16 + lane / 4;  // and query + 8
    const int queries[2] = {min(query, seqlen.q_len() - 1), min(query + 8, seqlen.q_len() - 1)};
    const RowStats* of_head = p.stats + static_cast<int64>(batch_head) * p.padded_q_len;
    const RowStats stats[2] = {of_head[query], of_head[query + 8]};
    float rows_0[2] = {0.0f, 0.0f};
    int stage = 0;
#pragma unroll 1
    for (int i = 0; i < blocks.count; ++i) {
      cp_async_wait<kStages - 2>();  // kStages - 1 + i groups are committed: only later steps' may be in flight
      __syncthreads();
      fetch(i + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
      const uint32 k_tile = base + kRingOffset + stage * 2 * kKvBytes;
      float s[kTileN / 8][4], ds[kTileN / 8][4];
      compute_scores(s, q, k_tile);
      compute_scores(ds, dout, k_tile + kKvBytes);
      const int meta = step_meta[stage];
      if (meta < 0) apply_mask(s, p, tile.batch, ~meta, query, kv_end);
      const int step_key = (meta < 0 ? ~meta : meta) / 2 * kTileN, first_key = step_key + lane % 4 * 2;  // the thread's
      score_gradients(ds, s, p, tile.batch, tile.head, first_key, queries, stats);
      float parts_of_0[kTileN / 8][4];
      parts_0(parts_of_0, ds, s, p, tile.batch, tile.head, first_key, queries);
      add_rows(rows_0, parts_of_0);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    store_rows(daux_slope, rows_0, query, seqlen.q_len());
  }
}
