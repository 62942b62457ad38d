// Generated from specs/l4_select_topk.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/l4_select_topk.yaml
// spec: {"arch":"sm_89","copy":"ld_global","dtype":"fp16","mma":"none","op":"select_topk","schedule":"multistage","stages":1,"tile":{"m":32,"n":64}}
// spec hash: 5b571f834b506b017816df8e5f27cf62dbf810c82d685ae977ea8ca0a541f2c1
// seal: sha256 9abae9c9e86ad24d4dfd2e091f6919f4fde4110bd5300e24f8b4c91bbe1c7d26

// Selection of key blocks: for each block of queries, the indices of the `topk` key blocks whose mean key has the
// largest product with the mean query. Two kernels:
//   l4_select_topk_block_means
//     one thread block for each block of Q and of K, which writes its mean to `means`
//   l4_select_topk
//     each thread block processes query blocks of one head, kWarpRows per warp: products with the means of all key
//     blocks, in fp32, then the indices of the largest ones, in ascending order, padded with -1
//
// Symbols
//   rank       a product as an unsigned integer of the same order. 0: masked, kNaN: NaN, kAlways: always selected
//   threshold  the largest rank that at least the wanted number of key blocks reach. Among blocks of exactly this rank,
//              the first ones are selected

using int64 = long long;
using uint32 = unsigned int;

constexpr int kTileN = 64;  // key blocks per step
constexpr int kLaneBlocks = 2;  // key blocks of a lane in a step
constexpr int kWarpRows = 4;  // query blocks per warp
constexpr int kThreads = 256;  // most threads per block
constexpr int kMeanThreads = 256;  // threads per block of the prologue, which computes means
constexpr int kChunk = 8;  // elements per 16-byte load of a thread
constexpr int kDepth = 32;  // columns of the means of K in shared memory
constexpr int kKStride = 36;  // row stride of these means, in floats
constexpr int kQStride = 256;  // row stride of the means of Q, in floats

// Dynamic shared memory: 101376 bytes. Byte offsets:
constexpr int kKTileOffset = 0;  // 9216 bytes: means of 64 key blocks, 32 columns of them
constexpr int kQRowsOffset = 9216;  // 32768 bytes: means of the query blocks
constexpr int kRanksOffset = 41984;  // 59392 bytes: ranks of all key blocks of a launch

using Element = unsigned short;  // the bits of one fp16
constexpr uint32 kAllLanes = 0xFFFFFFFF;
constexpr uint32 kHidden = 0, kNaN = 1, kAlways = 0xFFFFFFFF;
constexpr int kAlwaysBits = 32;  // blocks from either end that a set of bits covers

// Launch: at most 256 threads per block, 101376 bytes of dynamic shared memory.
// Grid: one thread block for 4 query blocks a warp, with 1 to 8 warps.
// Prologue, with the same parameters: l4_select_topk_block_means, 256 threads per block.
struct Params {
  const unsigned short* q;  // Q (batch, heads, q_len, head_dim)
  int64 q_batch_stride;  // batch stride, in elements
  int64 q_head_stride;  // head stride, in elements
  int64 q_row_stride;  // row stride, in elements
  const unsigned short* k;  // K (batch, kv_heads, kv_len, head_dim)
  int64 k_batch_stride;  // batch stride, in elements
  int64 k_head_stride;  // head stride, in elements
  int64 k_row_stride;  // row stride, in elements
  float* means;  // means of all blocks of Q, then of K: head_dim elements each
  int* kv_indices;  // lists (batch, heads, query_blocks, topk)
  int64 q_blocks;  // query blocks of all heads
  int q_len;  // queries per head
  int kv_len;  // keys per head
  int head_dim;  // elements of a head, a multiple of 8
  int heads;  // query heads
  int kv_heads;  // heads of K
  int heads_per_kv_head;  // query heads per head of K
  int block_q;  // queries per block
  int block_kv;  // keys per block
  int query_blocks;  // query blocks per head
  int key_blocks;  // key blocks per head
  int query_tiles;  // thread blocks per head
  int topk;  // entries per list
  int causal;  // 1 if a query block does not see key blocks after its last query
  int always_first;  // bit mask of key blocks that are always selected, counted from the first key block
  int always_last;  // the same, counted back from the key block at a query block's last query
};

// cvt.f32.f16: converts the bits of an fp16 to a float (PTX ISA, "cvt")
__device__ __forceinline__ float widen(unsigned short bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

// Adds the 8 elements of 16 bytes to as many sums.
__device__ __forceinline__ void add_chunk(float (&sum)[kChunk], const uint4& chunk) {
  const uint32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += widen(words[i] & 0xFFFF);
    sum[2 * i + 1] += widen(words[i] >> 16);
  }
}

// Means of the blocks of Q, then of those of K, one per thread block. Sums are in fp32, each in a fixed order.
extern "C" __global__ void __launch_bounds__(kMeanThreads)
    l4_select_topk_block_means(const __grid_constant__ Params p) {
  __shared__ float sums[kMeanThreads * kChunk];
  const bool of_q = blockIdx.x < p.q_blocks;
  const int number = of_q ? blockIdx.x : blockIdx.x - p.q_blocks;
  const int head_blocks = of_q ? p.query_blocks : p.key_blocks, heads = of_q ? p.heads : p.kv_heads;
  const int length = of_q ? p.q_len : p.kv_len, block_rows = of_q ? p.block_q : p.block_kv;
  const int batch = number / head_blocks / heads, head = number / head_blocks % heads;
  const int first = number % head_blocks * block_rows, rows = min(block_rows, length - first);
  const int64 row_stride = of_q ? p.q_row_stride : p.k_row_stride;
  const Element* from = of_q ? p.q + batch * p.q_batch_stride + head * p.q_head_stride
                             : p.k + batch * p.k_batch_stride + head * p.k_head_stride;

  // Each thread adds 16 bytes of every rows_at_once-th row.
  const int chunks = p.head_dim / kChunk, rows_at_once = kMeanThreads / chunks;
  const int my_row = threadIdx.x / chunks, my_chunk = threadIdx.x % chunks;
  float sum[kChunk] = {};
  if (my_row < rows_at_once) {
    const Element* mine = from + (first + my_row) * row_stride + my_chunk * kChunk;
#pragma unroll 8
    for (int row = my_row; row < rows; row += rows_at_once) {
      add_chunk(sum, __ldg(reinterpret_cast<const uint4*>(mine)));
      mine += rows_at_once * row_stride;
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sums[my_row * p.head_dim + my_chunk * kChunk + i] = sum[i];
  }
  __syncthreads();
  const int column = threadIdx.x;
  if (column < p.head_dim) {
    float total = 0.0f;
    for (int row = 0; row < rows_at_once; ++row) total += sums[row * p.head_dim + column];
    p.means[static_cast<int64>(blockIdx.x) * p.head_dim + column] = total / rows;
  }
}

// Rank of a product.
__device__ __forceinline__ uint32 rank_of(float product) {
  const uint32 bits = __float_as_uint(product);
  if (product != product) return kNaN;
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Key block at the last query of a query block; -1 before the first key.
__device__ __forceinline__ int own_block(const Params& p, int query_block) {
  const int last_query = min((query_block + 1) * p.block_q, p.q_len) - 1;
  const int key = last_query + p.kv_len - p.q_len;  // aligned bottom-right: the last query is at the last key
  return key < 0 ? -1 : key / p.block_kv;
}

// Whether a key block is always selected: counted from the first block, or back from the query block's own one.
__device__ __forceinline__ bool is_always(const Params& p, int block, int own) {
  const int back = own - block;
  return (block < kAlwaysBits && p.always_first >> block & 1) ||
         (back >= 0 && back < kAlwaysBits && p.always_last >> back & 1);
}

// Copies means to rows of shared memory with a stride of `stride` floats. Elements past the last row or column are
// zero-filled.
__device__ __forceinline__ void copy_means(float* to, int stride, const float* means, int rows, int rows_there,
    int first_column, int columns, int head_dim) {
  for (int i = threadIdx.x; i < rows * (columns / 4); i += blockDim.x) {
    const int row = i / (columns / 4), column = i % (columns / 4) * 4;
    float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row < rows_there && first_column + column < head_dim) {
      four = *reinterpret_cast<const float4*>(means + static_cast<int64>(row) * head_dim + first_column + column);
    }
    *reinterpret_cast<float4*>(to + row * stride + column) = four;
  }
}

// Products of the warp's query blocks with kTileN key blocks; each lane has blocks lane, lane + 32, ...
__device__ __forceinline__ void multiply(float (&product)[kWarpRows][kLaneBlocks], float* k_tile, const float* q_rows,
    const float* k_means, int there, int head_dim) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int row = 0; row < kWarpRows; ++row) {
#pragma unroll
    for (int j = 0; j < kLaneBlocks; ++j) product[row][j] = 0.0f;
  }
  for (int first = 0; first < head_dim; first += kDepth) {
    __syncthreads();  // all threads have read the previous columns
    copy_means(k_tile, kKStride, k_means, kTileN, there, first, kDepth, head_dim);
    __syncthreads();
#pragma unroll
    for (int column = 0; column < kDepth; column += 4) {
      float4 k[kLaneBlocks];
#pragma unroll
      for (int j = 0; j < kLaneBlocks; ++j) {
        k[j] = *reinterpret_cast<const float4*>(k_tile + (lane + 32 * j) * kKStride + column);
      }
#pragma unroll
      for (int row = 0; row < kWarpRows; ++row) {
        const float4 q = *reinterpret_cast<const float4*>(q_rows + row * kQStride + first + column);
#pragma unroll
        for (int j = 0; j < kLaneBlocks; ++j) {
          product[row][j] += q.x * k[j].x;
          product[row][j] += q.y * k[j].y;
          product[row][j] += q.z * k[j].z;
          product[row][j] += q.w * k[j].w;
        }
      }
    }
  }
}

// Thresholds of the warp's query blocks, found bit by bit from the highest.
__device__ __forceinline__ void find_thresholds(uint32 (&threshold)[kWarpRows], const uint32* ranks, int key_blocks,
    const int (&wanted)[kWarpRows]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int row = 0; row < kWarpRows; ++row) threshold[row] = 0;
  for (int bit = 31; bit >= 0; --bit) {
    int reached[kWarpRows] = {};
    for (int block = lane; block < key_blocks; block += 32) {
#pragma unroll
      for (int row = 0; row < kWarpRows; ++row) {
        reached[row] += ranks[row * key_blocks + block] >= (threshold[row] | 1u << bit);
      }
    }
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) {
      if (__reduce_add_sync(kAllLanes, reached[row]) >= wanted[row]) threshold[row] |= 1u << bit;
    }
  }
}

// Writes the list of one query block.
__device__ __forceinline__ void write_list(int* list, const uint32* ranks, int key_blocks, uint32 threshold,
    int wanted, int topk) {
  const int lane = threadIdx.x % 32;
  const uint32 lanes_before = (1u << lane) - 1;
  int above = 0;
  for (int block = lane; block < key_blocks; block += 32) above += ranks[block] > threshold;
  const int ties_wanted = wanted - __reduce_add_sync(kAllLanes, above);
  int taken = 0, ties = 0;
  for (int first = 0; first < key_blocks; first += 32) {
    const int block = first + lane;
    const uint32 rank = block < key_blocks ? ranks[block] : kHidden;
    const bool is_tie = rank == threshold;
    const uint32 tied = __ballot_sync(kAllLanes, is_tie);
    const bool takes = rank > threshold || (is_tie && ties + __popc(tied & lanes_before) < ties_wanted);
    const uint32 took = __ballot_sync(kAllLanes, takes);
    if (takes) list[taken + __popc(took & lanes_before)] = block;
    taken += __popc(took);
    ties += __popc(tied);
  }
  for (int i = taken + lane; i < topk; i += 32) list[i] = -1;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    l4_select_topk(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block_rows = blockDim.x / 32 * kWarpRows;
  const int batch_head = blockIdx.x / p.query_tiles, first_of_block = blockIdx.x % p.query_tiles * block_rows;
  const int kv_head = batch_head / p.heads * p.kv_heads + batch_head % p.heads / p.heads_per_kv_head;
  float* k_tile = reinterpret_cast<float*>(shared + kKTileOffset);
  float* q_rows = reinterpret_cast<float*>(shared + kQRowsOffset);
  const float* q_means = p.means + (static_cast<int64>(batch_head) * p.query_blocks + first_of_block) * p.head_dim;
  const float* k_means = p.means + (p.q_blocks + static_cast<int64>(kv_head) * p.key_blocks) * p.head_dim;
  copy_means(q_rows, kQStride, q_means, block_rows, p.query_blocks - first_of_block, 0, kQStride, p.head_dim);
  q_rows += warp * kWarpRows * kQStride;  // read after the first __syncthreads of multiply

  uint32* ranks = reinterpret_cast<uint32*>(shared + kRanksOffset) + warp * kWarpRows * p.key_blocks;
  const int first_row = first_of_block + warp * kWarpRows;
  int own[kWarpRows], visible[kWarpRows], wanted[kWarpRows];
#pragma unroll
  for (int row = 0; row < kWarpRows; ++row) {
    own[row] = own_block(p, first_row + row);
    visible[row] = p.causal ? own[row] + 1 : p.key_blocks;
    wanted[row] = min(p.topk, visible[row]);
  }
  for (int first = 0; first < p.key_blocks; first += kTileN) {
    float product[kWarpRows][kLaneBlocks];
    multiply(product, k_tile, q_rows, k_means + static_cast<int64>(first) * p.head_dim, p.key_blocks - first,
        p.head_dim);
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) {
#pragma unroll
      for (int j = 0; j < kLaneBlocks; ++j) {
        const int block = first + lane + 32 * j;
        if (block >= p.key_blocks) continue;
        uint32 rank = rank_of(product[row][j]);
        if (is_always(p, block, own[row])) rank = kAlways;
        ranks[row * p.key_blocks + block] = block < visible[row] ? rank : kHidden;
      }
    }
  }
  __syncwarp();  // the warp's ranks are visible to all of its lanes
  uint32 threshold[kWarpRows];
  find_thresholds(threshold, ranks, p.key_blocks, wanted);
#pragma unroll
  for (int row = 0; row < kWarpRows; ++row) {
    if (first_row + row >= p.query_blocks) continue;
    int* list = p.kv_indices + (static_cast<int64>(batch_head) * p.query_blocks + first_row + row) * p.topk;
    write_list(list, ranks + row * p.key_blocks, p.key_blocks, threshold[row], wanted[row], p.topk);
  }
}
