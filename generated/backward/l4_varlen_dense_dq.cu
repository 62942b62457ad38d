// Generated from specs/backward/l4_varlen_dense_dq.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/backward/l4_varlen_dense_dq.yaml
// spec: {"arch":"sm_89","copy":"cp_async","dtype":"fp16","gradients":"dq","head_dim":128,"layout":"varlen","mma":"mma","op":"attention_backward","pattern":{"kind":"dense"},"schedule":"multistage","stages":4,"tile":{"m":128,"n":32}}
// spec hash: 80f374bcf37c10d43dd2485e96a33243800ff04916f98ef9752226c9b6cb77fa
// seal: sha256 9deb8ad3f61bca6163cb5de26d42d1bb2ac41a9fa986dc0b3a2907426102d5d7

// Attention backward for sm_89, gradient of Q
// over the visible keys of the pattern in each sequence:
//   P = exp(scale * Q K^T - LSE),  dS = P (dO V^T - delta),  dQ = scale * dS K
// Each thread block accumulates the contributions of all keys to its queries, in a fixed order and without
// floating-point atomics: results are bitwise reproducible.
//
// Roles
//   Each warp owns 16 queries of the tile, with their Q, dO and dQ in registers, and all threads take part in the
//   copies: S = Q K^T and dP = dO V^T, dQ += dS K with dS in registers, as A operand.
//
// Pipeline
//   Q and dO arrive through the ring's buffer, before it is used. Then K and V pass through a ring of kStages stages,
//   step i in stage i mod kStages. cp.async (one group per step) keeps kStages - 1 steps in flight.
//   producer: all threads, cp.async    consumer: all warps, ldmatrix
//   full:  cp.async.wait_group (this thread's part of a step), then __syncthreads (all threads' parts)
//   empty: the same __syncthreads: all warps have finished the previous step, whose stage is then refilled
//
// Symbols
//   tile        kTileM queries of one head, processed by one thread block
//   step        kTileN keys: a key block. Blocks are numbered from key 0 on
//   q, dout     16 queries of the warp, as A operands
//   s, dp       S and dP: 16 queries of the warp x kTileN keys; ds_frag: dS in 16 bits, as A operand
//   [j][i]      of s, dp and dq: a thread holds rows r (i = 0, 1) and r + 8 (i = 2, 3), r = lane / 4, columns
//               8 j + 2 (lane % 4) + {0, 1}; rows are queries, columns keys or elements of a head

using int64 = long long;
using uint32 = unsigned int;

struct RowStats;
constexpr int kHeadDim = 128;  // elements per head
constexpr int kTileM = 128;  // query rows of a tile
constexpr int kTileN = 32;  // keys per step
constexpr int kStages = 4;  // depth of the ring
constexpr int kThreads = 256;  // 8 warps of 16 rows
constexpr int kRowBytes = 256;  // bytes of a row of a head
constexpr int kLineChunks = 8;  // 16-byte chunks per line, the part of a row that adjacent lanes copy
constexpr int kRowLines = 2;  // lines per row
constexpr int kSwizzleRows = 1;  // consecutive rows with the same swizzle
constexpr int kPassRows = 32;  // rows that all threads copy at a time
constexpr int kWarpPassRows = 4;  // rows that a warp stores at a time
constexpr int kKvBytes = 8192;  // bytes of K, or of V, of a step
constexpr int kStatsRows = 128;  // rows of a block of statistics: those of the largest tile or step
constexpr int kStatsSpare = 2;  // blocks of statistics of a segment, besides those that its tokens fill
constexpr int kPrologueThreads = 1024;  // threads per block of the prologue
constexpr int kRowLanes = 16;  // threads per row in the prologue, 16 bytes each

// Dynamic shared memory: 65580 bytes. Byte offsets:
constexpr int kRingOffset = 0;  // 65536 bytes: 4 stages, each K and V of a step
constexpr int kStepMetaOffset = 65536;  // 16 bytes: metadata of the steps in the ring
constexpr int kSegmentOffset = 65552;  // 28 bytes: segment of the tile
constexpr int kQOffset = 0;  // 32768 bytes: Q of the tile, initially; at the end, staging of dQ
constexpr int kDoutOffset = 32768;  // 32768 bytes: dO of the tile, initially

static_assert(kTileM % kPassRows == 0 && kTileN % kPassRows == 0);  // copies divide evenly among threads
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
constexpr float kLog2E = 1.44269504088896f;

// Launch: 256 threads per block, 65580 bytes of dynamic shared memory.
// Grid: one thread block for each tile, 1 at a time on an SM.
// Prologue, with the same parameters: l4_varlen_dense_dq_prologue, 1024 threads per block.
struct Params {
  const unsigned short* q;  // Q (tokens, heads, head_dim)
  int64 q_head_stride;  // head stride, in elements
  int64 q_row_stride;  // row stride, in elements
  const unsigned short* k;  // K (tokens, kv_heads, head_dim)
  int64 k_head_stride;  // head stride, in elements
  int64 k_row_stride;  // row stride, in elements
  const unsigned short* v;  // V, as K
  int64 v_head_stride;  // head stride, in elements
  int64 v_row_stride;  // row stride, in elements
  unsigned short* dq;  // dQ, as Q
  int64 dq_head_stride;  // head stride, in elements
  int64 dq_row_stride;  // row stride, in elements
  const unsigned short* out;  // O (tokens, heads, head_dim)
  int64 out_head_stride;  // head stride, in elements
  int64 out_row_stride;  // row stride, in elements
  const unsigned short* dout;  // dO, as O
  int64 dout_head_stride;  // head stride, in elements
  int64 dout_row_stride;  // row stride, in elements
  const float* lse;  // log-sum-exp of the forward, (heads, tokens) contiguous
  const float* dlse;  // gradient of the log-sum-exp, as lse; 0 if null
  RowStats* stats;  // statistics of all rows, (heads, padded_q_len)
  const int* cu_seqlens_q;  // bounds of the sequences in q: first tokens, then the end of the last
  const int* cu_seqlens_k;  // bounds of the sequences in k and v
  int q_len;  // queries of all sequences
  int kv_len;  // keys of all sequences
  int sequences;  // sequences: one less than cu_seqlens_q has entries
  int padded_q_len;  // rows of statistics per head: all tokens, and at least 128 rows of padding behind each sequence
  int heads;  // query heads
  int heads_per_kv_head;  // query heads per K/V head
  int query_tiles;  // tiles of kTileM queries per head
  int head_chunks;  // 16-byte chunks per row of a head
  float scale_log2;  // scale * log2(e); the host checks that it is positive
  float scale;  // the softmax scale
};

// A bound of the segments of the tokens of Q or of K: 0, the bounds of the sequences, clamped to the tensor, and its
// end.
__device__ __forceinline__ int bound_of(const Params& p, const int* bounds, int tokens, int index) {
  if (index < 0 || index > p.sequences) return index < 0 ? 0 : tokens;
  return max(0, min(__ldg(bounds + index), tokens));
}

// A segment of the tokens: a sequence; or what lies before the first one (batch -1) or behind the last one (batch
// p.sequences), where no query sees a key. An end below its begin counts as an empty segment.
struct Segment {
  int batch;
  int q_begin, queries;  // tokens in Q
  int kv_begin, keys;    // and in K
  int visible_keys;
  int stats_begin;       // of the statistics of its first query within a head

  __device__ __forceinline__ Segment(const Params& p, const int* q_bounds, const int* k_bounds, int batch)
      : batch(batch) {
    q_begin = bound_of(p, q_bounds, p.q_len, batch);
    queries = max(bound_of(p, q_bounds, p.q_len, batch + 1) - q_begin, 0);
    kv_begin = bound_of(p, k_bounds, p.kv_len, batch);
    keys = max(bound_of(p, k_bounds, p.kv_len, batch + 1) - kv_begin, 0);
    visible_keys = is_sequence(p) ? keys : 0;
    stats_begin = (q_begin / kStatsRows + (batch + 1) * kStatsSpare) * kStatsRows;
  }
  __device__ __forceinline__ bool is_sequence(const Params& p) const { return 0 <= batch && batch < p.sequences; }
  // Index of a query in a (heads, tokens) tensor.
  __device__ __forceinline__ int64 row(const Params& p, int head, int query) const {
    return static_cast<int64>(head) * p.q_len + q_begin + query;
  }
  // Index of the statistics of the first query. Rows of a segment begin at a multiple of kStatsRows, with at least as
  // many rows of padding behind them, so that tiles and steps read no statistics of the next segment.
  __device__ __forceinline__ int64 stats_row(const Params& p, int head) const {
    return static_cast<int64>(head) * p.padded_q_len + stats_begin;
  }
};

// The segment of the thread block's tile, in shared memory: consumers and producer have no registers for it.
__device__ __forceinline__ Segment& tile_segment() {
  extern __shared__ __align__(1024) unsigned char shared_memory[];  // the kernel's `shared`
  return *reinterpret_cast<Segment*>(shared_memory + kSegmentOffset);
}

// Lengths of that segment, or of another one.
struct SeqlenInfo {
  const Segment& segment;

  __device__ __forceinline__ SeqlenInfo(const Params& p, int batch) : segment(tile_segment()) {}
  __device__ __forceinline__ explicit SeqlenInfo(const Segment& segment) : segment(segment) {}
  // Number of queries.
  __device__ __forceinline__ int q_len() const { return segment.queries; }
  // Number of keys.
  __device__ __forceinline__ int kv_len() const { return segment.keys; }
  // Position of a query among the keys: the last query is at the last key.
  __device__ __forceinline__ int position(int query) const { return query + kv_len() - q_len(); }
  // End of the visible keys.
  __device__ __forceinline__ int kv_end() const { return segment.visible_keys; }
};

// Segment of a tile of `rows` tokens of Q or of K, counted from 0, by binary search. The tiles of segment i begin at
// begin / rows + i * kSpare: enough for its tokens, and at least kSpare - 1 more, which have none.
template <int kSpare>
__device__ __forceinline__ int segment_of_tile(const Params& p, const int* bounds, int tile, int rows) {
  int first = 0, count = p.sequences + 2;  // candidates: first to first + count - 1
  while (count > 1) {
    const int half = count / 2, middle = first + half;
    const bool behind = __ldg(bounds + middle - 1) / rows + middle * kSpare <= tile;
    first = behind ? middle : first;
    count = behind ? count - half : half;
  }
  return first;
}

// First token of a tile, counted within its segment; out of range for tiles without tokens.
template <int kSpare>
__device__ __forceinline__ int first_of_tile(
    const Params& p, const int* bounds, int tokens, int tile, int rows, int segment) {
  const int begin = bound_of(p, bounds, tokens, segment - 1);
  const int first = (tile - (begin / rows + segment * kSpare)) * rows;
  return first < 0 ? 1 << 30 : first;
}

// kv_end() of a tile, held in a register.
struct KvEnd {
  int end;

  __device__ __forceinline__ KvEnd(const Params& p, int batch) : end(SeqlenInfo(p, batch).kv_end()) {}
  __device__ __forceinline__ operator int() const { return end; }
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

// Per-query statistics for the main kernel: log-sum-exp times log2(e), and delta, the sum of dO O over its row
// (FlashAttention's LSE_log2 and dPsum), minus the gradient of the log-sum-exp. A query without keys, or a row that
// pads the queries of a segment, has infinity and 0: its weights are 2^-inf = 0.
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
    l4_varlen_dense_dq_prologue(const __grid_constant__ Params p) {
  const int64 place = static_cast<int64>(blockIdx.x) * kPrologueThreads + threadIdx.x, row = place / kRowLanes;
  const int chunk = threadIdx.x % kRowLanes, head = row / p.padded_q_len, row_of_head = row % p.padded_q_len;
  if (head >= p.heads) return;  // whole rows: kRowLanes divides a warp
  const int number = segment_of_tile<kStatsSpare>(p, p.cu_seqlens_q, row_of_head / kStatsRows, kStatsRows);
  const Segment segment(p, p.cu_seqlens_q, p.cu_seqlens_k, number - 1);
  const int query = row - segment.stats_row(p, head);
  const bool exists = segment.is_sequence(p) && 0 <= query && query < segment.queries;
  float delta = 0.0f;
  if (exists && chunk < p.head_chunks) {
    const int64 token = segment.q_begin + query;
    const uint4 o =
        *reinterpret_cast<const uint4*>(p.out + head * p.out_head_stride + token * p.out_row_stride + chunk * 8);
    const uint4 d =
        *reinterpret_cast<const uint4*>(p.dout + head * p.dout_head_stride + token * p.dout_row_stride + chunk * 8);
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
    const float lse = exists ? p.lse[segment.row(p, head, query)] : kMinusInfinity;
    if (exists && p.dlse != nullptr) delta -= p.dlse[segment.row(p, head, query)];
    p.stats[row] = lse > kMinusInfinity ? RowStats{lse * kLog2E, delta} : RowStats{-kMinusInfinity, 0.0f};
  }
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

// A thread block's tile: queries of one head. Consecutive tiles belong to the same head: they read the same keys from
// the L2.
struct Tile {
  int first_query, head, batch;

  __device__ __forceinline__ explicit Tile(const Params& p) {
    // The last tiles go first: late queries of long sequences see the most keys.
    const int index = blockIdx.x, query_tile = p.query_tiles - 1 - index % p.query_tiles;
    head = index / p.query_tiles;
    batch = segment_of_tile<1>(p, p.cu_seqlens_q, query_tile, kTileM) - 1;
    first_query = first_of_tile<1>(p, p.cu_seqlens_q, p.q_len, query_tile, kTileM, batch + 1);
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

// d += A B for this warp's 16 rows and one step: A packed in registers, B transposed on the way from shared memory.
// Matrices of one ldmatrix: rows 0-7 and 8-15 of 16 for 8 columns, then for the next 8.
__device__ __forceinline__ void add_gradient(float (&d)[kHeadDim / 8][4], const uint32 (&a)[kTileN / 16][4],
    uint32 b_lane) {
#pragma unroll
  for (int k = 0; k < kTileN / 16; ++k) {
#pragma unroll
    for (int columns = 0; columns < kHeadDim; columns += 16) {
      uint32 b[4];
      ldmatrix_x4_trans(b, further_on(b_lane, columns / 8) + k * 16 * kRowBytes);
      mma_m16n8k16(d[columns / 8], a[k], b[0], b[1]);
      mma_m16n8k16(d[columns / 8 + 1], a[k], b[2], b[3]);
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
      if (!keep) s[j][i] = kMinusInfinity;
    }
  }
}

// dS = P (dP - delta), packed to 16 bits; P: the weights of a step. The accumulators of two 8-column tiles are the A
// operand of 16 keys.
__device__ __forceinline__ void score_gradients(uint32 (&ds_frag)[kTileN / 16][4], const float (&s)[kTileN / 8][4],
    const float (&dp)[kTileN / 8][4], const RowStats (&stats)[2], float scale_log2) {
#pragma unroll
  for (int k = 0; k < kTileN / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = k * 2 + i / 2, row = i % 2;
      const float low = ex2(s[j][row * 2] * scale_log2 - stats[row].lse_log2);
      const float high = ex2(s[j][row * 2 + 1] * scale_log2 - stats[row].lse_log2);
      ds_frag[k][i] = pack(low * (dp[j][row * 2] - stats[row].delta), high * (dp[j][row * 2 + 1] - stats[row].delta));
    }
  }
}

// Writes a warp's 16 rows of dQ over its rows of Q in the tile at `staging`, then from there to global
// memory: 16 bytes per lane, one line of each of kWarpPassRows rows at a time. `to` is row 0 of the tile, which has
// `rows` rows.
__device__ __forceinline__ void store_gradient(const float (&d)[kHeadDim / 8][4], float factor, unsigned char* staging,
    unsigned short* to, int64 row_stride, int rows, int head_chunks) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32 at = chunk_offset(warp_row + row * 8 + lane / 4, j) + lane % 4 * 4;
      *reinterpret_cast<uint32*>(staging + at) = pack(d[j][row * 2] * factor, d[j][row * 2 + 1] * factor);
    }
  }
  __syncwarp();
#pragma unroll
  for (int pass = 0; pass < 16 / kWarpPassRows; ++pass) {
    const int row = warp_row + pass * kWarpPassRows + lane / kLineChunks;
#pragma unroll
    for (int line = 0; line < kRowLines; ++line) {
      const int chunk = line * kLineChunks + lane % kLineChunks;
      if (row < rows && chunk < head_chunks) {
        *reinterpret_cast<uint4*>(to + row * row_stride + chunk * 8) =
            *reinterpret_cast<const uint4*>(staging + chunk_offset(row, chunk));
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    l4_varlen_dense_dq(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Offset of the row that this lane reads by ldmatrix, for A of scores and B of gradients, from their first row.
  const uint32 lane_offset = chunk_offset(lane % 16, lane / 16);
  const Tile tile(p);
  if (threadIdx.x == 0) tile_segment() = Segment(p, p.cu_seqlens_q, p.cu_seqlens_k, tile.batch);
  __syncthreads();
  const Segment& segment = tile_segment();
  const SeqlenInfo seqlen(p, tile.batch);
  if (tile.first_query >= seqlen.q_len()) return;  // a tile without queries

  // Load Q and dO into registers.
  const int first_row = tile.first_query + copy_row();
  const int64 first_token = segment.q_begin + first_row;
  copy_rows<kTileM>(base + kQOffset,
      p.q + tile.head * p.q_head_stride + first_token * p.q_row_stride + copy_chunk() * 8, p.q_row_stride,
      seqlen.q_len() - first_row, p.head_chunks);
  copy_rows<kTileM>(base + kDoutOffset,
      p.dout + tile.head * p.dout_head_stride + first_token * p.dout_row_stride + copy_chunk() * 8, p.dout_row_stride,
      seqlen.q_len() - first_row, p.head_chunks);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const uint32 my_rows = warp * 16 * kRowBytes + lane_offset;
  uint32 q[kHeadDim / 16][4], dout[kHeadDim / 16][4];
#pragma unroll
  for (int slice = 0; slice < kHeadDim / 16; ++slice) {
    ldmatrix_x4(q[slice], further_on(base + kQOffset + my_rows, slice * 2));
    ldmatrix_x4(dout[slice], further_on(base + kDoutOffset + my_rows, slice * 2));
  }
  __syncthreads();  // Q and dO occupy the ring's buffer

  int* step_meta = reinterpret_cast<int*>(shared + kStepMetaOffset);
  const int kv_head = tile.head / p.heads_per_kv_head;
  const int64 kv_begin = segment.kv_begin;
  const unsigned short* k = p.k + kv_head * p.k_head_stride + kv_begin * p.k_row_stride + copy_chunk() * 8;
  const unsigned short* v = p.v + kv_head * p.v_head_stride + kv_begin * p.v_row_stride + copy_chunk() * 8;
  const KvEnd kv_end(p, tile.batch);
  KvBlockIterator blocks(p, tile.batch, tile.head, tile.first_query);
  // Starts the copy of step `number` as one cp.async group; an empty group after the last step. Steps must be requested
  // in order.
  auto fetch = [&](int number, int stage) {
    if (number < blocks.count) {
      const int step = blocks.at(number), first_key = step * kTileN, row = first_key + copy_row();
      // Complemented, hence negative, if the pattern or the end of the keys masks some pair; lowest bit: the pattern
      // does.
      const bool masked = false;
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
  const RowStats* of_head = p.stats + segment.stats_row(p, tile.head);
  const RowStats stats[2] = {of_head[query], of_head[query + 8]};
  float dq[kHeadDim / 8][4] = {};
  int stage = 0;
#pragma unroll 1
  for (int i = 0; i < blocks.count; ++i) {
    cp_async_wait<kStages - 2>();  // kStages - 1 + i groups are committed: only later steps' may be in flight
    __syncthreads();
    fetch(i + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
    const uint32 k_tile = base + kRingOffset + stage * 2 * kKvBytes;
    float s[kTileN / 8][4], dp[kTileN / 8][4];
    uint32 ds_frag[kTileN / 16][4];
    compute_scores(s, q, k_tile);
    compute_scores(dp, dout, k_tile + kKvBytes);
    const int meta = step_meta[stage];
    if (meta < 0) apply_mask(s, p, tile.batch, ~meta, query, kv_end);
    score_gradients(ds_frag, s, dp, stats, p.scale_log2);
    add_gradient(dq, ds_frag, k_tile + lane_offset);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }

  // Queries without keys have no steps: their gradients are 0. Other warps may still read the ring, where dQ is staged.
  __syncthreads();
  unsigned short* to = p.dq + tile.head * p.dq_head_stride + segment.q_begin * p.dq_row_stride;
  store_gradient(dq, p.scale, shared + kQOffset, to + tile.first_query * p.dq_row_stride, p.dq_row_stride,
      seqlen.q_len() - tile.first_query, p.head_chunks);
}
