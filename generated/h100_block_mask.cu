// Generated from specs/h100_block_mask.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_block_mask.yaml
// spec: {"arch":"sm_90a","copy":"ld_global","dtype":"fp16","mma":"none","op":"block_mask","pattern":{"aux":{"kv_doc":"int32[batch, kv_len]","q_doc":"int32[batch, q_len]"},"block":{"kv":128,"q":128},"kind":"block_lists","mask":"q_doc[batch, q_idx] == kv_doc[batch, kv_idx] and q_idx >= kv_idx"},"schedule":"multistage","stages":1,"tile":{"n":256}}
// spec hash: 8ca3b2f4ad79785269c30718c01689aa9650c7f626e51b50ade513ba8d335aac
// seal: sha256 7b78cfdabb8b107d5efa5deefa88f6dd31f39b41851be70ed1aac7e4af0e6f85

// Block lists of a mask: for each block of queries, the indices of the partial key blocks (some of their pairs are
// visible) and of the full ones (all are), in ascending order, padded with -1.
//   h100_block_mask_ranges
//     one warp for each block of queries, and of keys: bounds each term of the mask over the block
//   h100_block_mask
//     one thread block for a block of queries and kThreads blocks of keys. Each thread classifies one whole block by
//     interval arithmetic. If that is inconclusive, it evaluates the pairs in the block's corners. If these agree, all
//     threads evaluate the block's pairs, until one visible and one masked pair are found
//   h100_block_mask_lists
//     one warp for each block of queries: converts bits to lists
//
// Symbols
//   queries, keys  indices of those of a block, from the first to the last
//   row            a block of queries, counted over all lists
//   range          bounds of a value over a block; a truth value is no, yes or either

using int64 = long long;
using uint32 = unsigned int;

// Integers from low to high, 64-bit; an operation that may wrap can give any integer.
struct Range {
  int64 low, high;
};
// The truth values possible over a block, as bits.
using Truth = uint32;
constexpr Truth kNo = 1, kYes = 2, kEither = 3;

constexpr int kBlockQ = 128;  // queries per block
constexpr int kBlockKv = 128;  // keys per block
constexpr int kThreads = 256;  // threads per block
constexpr int kWarps = 8;  // warps per block

// Dynamic shared memory: 32 bytes. Byte offsets:
constexpr int kUndecidedOffset = 0;  // 32 bytes: bits of key blocks that interval arithmetic cannot classify

constexpr uint32 kAllLanes = 0xFFFFFFFF;

// Ranges over a block of the terms of the mask that depend on the query alone.
struct RowRanges {
  Range q_doc;  // q_doc[batch, q_idx]
};
// Ranges over a block of the terms that depend on the key alone.
struct ColumnRanges {
  Range kv_doc;  // kv_doc[batch, kv_idx]
};
// Launch: 256 threads per block, 32 bytes of dynamic shared memory.
// Grid: one thread block for a query block and 256 key blocks.
// Prologue, with the same parameters: h100_block_mask_ranges, 256 threads per block.
// Epilogue, with the same parameters: h100_block_mask_lists, 256 threads per block.
struct Params {
  int* kv_num_blocks;  // (batch, heads, query_blocks): number of partial blocks
  int* kv_indices;  // (batch, heads, query_blocks, key_blocks): partial blocks
  int* full_kv_num_blocks;  // (batch, heads, query_blocks): number of full blocks
  int* full_kv_indices;  // (batch, heads, query_blocks, key_blocks): full blocks
  uint32* partial_blocks;  // (batch, heads, query_blocks, words): bits of partial blocks
  uint32* full_blocks;  // (batch, heads, query_blocks, words): bits of full blocks
  RowRanges* row_ranges;  // (batch, heads, query_blocks)
  ColumnRanges* column_ranges;  // (batch, heads, key_blocks)
  int list_heads;  // heads with their own lists; 1: shared
  int q_len;  // queries per head
  int kv_len;  // keys per head
  int query_blocks;  // query blocks per head
  int key_blocks;  // key blocks per head
  int parts;  // thread blocks per query block
  int words;  // words of bits per query block
  int rows;  // query blocks of all lists
  int blocks;  // query blocks and key blocks of all lists
  const int* aux_kv_doc;  // kv_doc, int32[batch, kv_len]
  int64 aux_kv_doc_stride0;  // stride along i, in elements (0: shared)
  int64 aux_kv_doc_stride1;  // stride along j, in elements (0: shared)
  const int* aux_q_doc;  // q_doc, int32[batch, q_len]
  int64 aux_q_doc_stride0;  // stride along i, in elements (0: shared)
  int64 aux_q_doc_stride1;  // stride along j, in elements (0: shared)
};

// kv_doc: int32[batch, kv_len]
__device__ __forceinline__ int load_kv_doc(const Params& p, int i, int j) {
  return __ldg(p.aux_kv_doc + i * p.aux_kv_doc_stride0 + j * p.aux_kv_doc_stride1);
}

// q_doc: int32[batch, q_len]
__device__ __forceinline__ int load_q_doc(const Params& p, int i, int j) {
  return __ldg(p.aux_q_doc + i * p.aux_q_doc_stride0 + j * p.aux_q_doc_stride1);
}

// Terms of the mask that depend on the query alone.
struct MaskRow {
  int q_doc_of_row;

  __device__ __forceinline__ MaskRow(const Params& p, int batch, int head, int query) {
    q_doc_of_row = load_q_doc(p, batch, query);
  }
};

// Terms of the mask that depend on the key alone.
struct MaskColumn {
  int kv_doc_of_column;

  __device__ __forceinline__ MaskColumn(const Params& p, int batch, int head, int key) {
    kv_doc_of_column = load_kv_doc(p, batch, key);
  }
};

// Whether a query sees a key of a partial block; both must exist:
//   q_doc[batch, q_idx] == kv_doc[batch, kv_idx] and q_idx >= kv_idx
__device__ __forceinline__ bool visible(const Params& p, int batch, int head, int query, int key, const MaskRow& row,
    const MaskColumn& column) {
  const int q_doc_of_row = row.q_doc_of_row;
  const int kv_doc_of_column = column.kv_doc_of_column;
  return (q_doc_of_row == kv_doc_of_column) & (query >= key);
}

constexpr int64 kLeast = -9223372036854775807LL - 1, kLargest = 9223372036854775807LL;

// No if one operand is certainly no; either if it may be no and may be yes.
__device__ __forceinline__ Truth truth_and(Truth a, Truth b) { return (a & b & kYes) | ((a | b) & kNo); }
__device__ __forceinline__ Truth truth_not(Truth a) { return a >> 1 | (a & kNo) << 1; }
// Whether something holds for all values, or for none.
__device__ __forceinline__ Truth truth_known(bool always, bool never) { return always ? kYes : never ? kNo : kEither; }

__device__ __forceinline__ Range range_of(int64 value) { return {value, value}; }
__device__ __forceinline__ bool is_one(Range a) { return a.low == a.high; }
__device__ __forceinline__ Truth range_less(Range a, Range b) { return truth_known(a.high < b.low, a.low >= b.high); }
__device__ __forceinline__ Truth range_equal(Range a, Range b) {
  return truth_known(is_one(a) && is_one(b) && a.low == b.low, a.high < b.low || b.high < a.low);
}
__device__ __forceinline__ Range range_union(Range a, Range b) { return {min(a.low, b.low), max(a.high, b.high)}; }

// q_doc[batch, q_idx]
__device__ __forceinline__ int64 row_q_doc(const Params& p, int batch, int head, int query) {
  const int q_doc_of_row = load_q_doc(p, batch, query);
  return q_doc_of_row;
}
// kv_doc[batch, kv_idx]
__device__ __forceinline__ int64 column_kv_doc(const Params& p, int batch, int head, int key) {
  const int kv_doc_of_column = load_kv_doc(p, batch, key);
  return kv_doc_of_column;
}

// Indices of the queries, or keys, of a block, up to the last valid one.
__device__ __forceinline__ Range indices_of(int block, int block_size, int length) {
  const int64 first = static_cast<int64>(block) * block_size;
  return {first, min(first + block_size, static_cast<int64>(length)) - 1};
}

// Range of a value over indices, computed by a warp; each lane evaluates some of them.
template <typename Value>
__device__ __forceinline__ Range range_over(Range indices, Value value) {
  Range found = {kLargest, kLeast};
  for (int64 i = indices.low + threadIdx.x % 32; i <= indices.high; i += 32) {
    found = range_union(found, range_of(value(static_cast<int>(i))));
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int64 low = __shfl_xor_sync(kAllLanes, found.low, lanes);
    found = range_union(found, {low, __shfl_xor_sync(kAllLanes, found.high, lanes)});
  }
  return found;
}

extern "C" __global__ void __launch_bounds__(kThreads) h100_block_mask_ranges(const __grid_constant__ Params p) {
  const int number = blockIdx.x * kWarps + threadIdx.x / 32;  // the warp's block: those of queries come first
  if (number >= p.blocks) return;
  const bool of_queries = number < p.rows;
  const int place = of_queries ? number : number - p.rows;
  const int blocks = of_queries ? p.query_blocks : p.key_blocks, list = place / blocks;
  const int batch = list / p.list_heads, head = list % p.list_heads;
  if (of_queries) {
    const Range queries = indices_of(place % blocks, kBlockQ, p.q_len);
    RowRanges found;
    found.q_doc = range_over(queries, [&](int query) {
      return row_q_doc(p, batch, head, query);
    });
    if (threadIdx.x % 32 == 0) p.row_ranges[place] = found;
  } else {
    const Range keys = indices_of(place % blocks, kBlockKv, p.kv_len);
    ColumnRanges found;
    found.kv_doc = range_over(keys, [&](int key) {
      return column_kv_doc(p, batch, head, key);
    });
    if (threadIdx.x % 32 == 0) p.column_ranges[place] = found;
  }
}

// The mask over a block: kNo, all pairs are masked; kYes, all are visible; kEither, interval arithmetic is
// inconclusive.
__device__ __forceinline__ Truth truth_of_block(const Params& p, int batch, int head, Range queries,
    Range keys, const RowRanges& rows, const ColumnRanges& columns) {
  const Truth part_0 = range_equal(rows.q_doc, columns.kv_doc);
  const Truth part_1 = truth_not(range_less(queries, keys));
  return truth_and(part_0, part_1);
}

// Whether some pairs in the corners of a block are visible and some are masked: then the block is partial. Threads
// check their blocks in parallel, whereas the evaluation of all pairs needs all threads for one block after another.
__device__ __forceinline__ bool corners_differ(const Params& p, int batch, int head, Range queries, Range keys) {
  bool shows = false, hides = false;
#pragma unroll 1
  for (int corner = 0; corner < 4; ++corner) {
    const int query = static_cast<int>(corner < 2 ? queries.low : queries.high);
    const int key = static_cast<int>(corner % 2 == 0 ? keys.low : keys.high);
    const MaskColumn column(p, batch, head, key);
    const bool seen = visible(p, batch, head, query, key, MaskRow(p, batch, head, query), column);
    shows |= seen;
    hides |= !seen;
  }
  return shows && hides;
}

// The exact classification of a block, by its pairs. All threads of a thread block call it together: a warp evaluates
// every kWarps-th query, a lane every 32nd key. Lanes past the last key evaluate the last key again.
__device__ __forceinline__ Truth truth_of_pairs(const Params& p, int batch, int head, Range queries, Range keys) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  bool shows = false, hides = false;
  for (int64 first = keys.low; first <= keys.high; first += 32) {
    const int key = static_cast<int>(min(first + lane, keys.high));
    const MaskColumn column(p, batch, head, key);
    for (int64 i = queries.low + warp; i <= queries.high && !(shows && hides); i += kWarps) {
      const int query = static_cast<int>(i);
      const bool seen = visible(p, batch, head, query, key, MaskRow(p, batch, head, query), column);
      shows |= __any_sync(kAllLanes, seen);
      hides |= __any_sync(kAllLanes, !seen);
    }
  }
  const bool any_shows = __syncthreads_or(shows), any_hides = __syncthreads_or(hides);
  return (any_shows ? kYes : 0) | (any_hides ? kNo : 0);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) h100_block_mask(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char shared[];
  uint32* undecided = reinterpret_cast<uint32*>(shared + kUndecidedOffset);  // one word per warp
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = blockIdx.x / p.parts, first_block = blockIdx.x % p.parts * kThreads;
  const int list = row / p.query_blocks, batch = list / p.list_heads, head = list % p.list_heads;
  const Range queries = indices_of(row % p.query_blocks, kBlockQ, p.q_len);

  const int key_block = first_block + threadIdx.x;
  Truth truth = kNo;
  bool open = false;
  if (key_block < p.key_blocks) {
    const Range keys = indices_of(key_block, kBlockKv, p.kv_len);
    const RowRanges& rows = p.row_ranges[row];
    const ColumnRanges& columns = p.column_ranges[list * p.key_blocks + key_block];
    truth = truth_of_block(p, batch, head, queries, keys, rows, columns);
    open = truth == kEither && !corners_differ(p, batch, head, queries, keys);
  }
  const uint32 open_blocks = __ballot_sync(kAllLanes, open);
  if (lane == 0) undecided[warp] = open_blocks;
  __syncthreads();

  for (int word = 0; word < kWarps; ++word) {
    for (uint32 left = undecided[word]; left != 0; left &= left - 1) {
      const int thread = word * 32 + __ffs(left) - 1;
      const Range keys = indices_of(first_block + thread, kBlockKv, p.kv_len);
      const Truth found = truth_of_pairs(p, batch, head, queries, keys);
      if (threadIdx.x == thread) truth = found;
    }
  }
  const uint32 partial = __ballot_sync(kAllLanes, truth == kEither);
  const uint32 full = __ballot_sync(kAllLanes, truth == kYes);
  const int64 place = static_cast<int64>(row) * p.words + first_block / 32 + warp;
  if (lane == 0 && first_block / 32 + warp < p.words) {
    p.partial_blocks[place] = partial;
    p.full_blocks[place] = full;
  }
}

// Writes the list of one block of queries.
__device__ __forceinline__ void write_list(int* count, int* list, const uint32* blocks, int key_blocks) {
  const int lane = threadIdx.x % 32;
  const uint32 lanes_before = (1u << lane) - 1;
  int entries = 0;
#pragma unroll 4
  for (int first = 0; first < key_blocks; first += 32) {
    const uint32 listed = blocks[first / 32];
    if (listed >> lane & 1) list[entries + __popc(listed & lanes_before)] = first + lane;
    entries += __popc(listed);
  }
  for (int i = entries + lane; i < key_blocks; i += 32) list[i] = -1;
  if (lane == 0) *count = entries;
}

extern "C" __global__ void __launch_bounds__(kThreads) h100_block_mask_lists(const __grid_constant__ Params p) {
  const int64 row = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int64 words = row * p.words, entries = row * p.key_blocks;
  write_list(p.kv_num_blocks + row, p.kv_indices + entries, p.partial_blocks + words, p.key_blocks);
  write_list(p.full_kv_num_blocks + row, p.full_kv_indices + entries, p.full_blocks + words, p.key_blocks);
}
