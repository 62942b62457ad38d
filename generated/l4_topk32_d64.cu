// Generated from specs/l4_topk32_d64.yaml. Do not edit: change the spec or a template, then run
//     codegen render specs/l4_topk32_d64.yaml
// spec: {"arch":"sm_89","copy":"cp_async","dtype":"fp16","head_dim":64,"lse":true,"mma":"mma","op":"attention","pattern":{"block":{"kv":64,"q":64},"k":32,"kind":"topk"},"schedule":"multistage","stages":4,"tile":{"m":64,"n":64}}
// spec hash: 1f09a626d00df677a03af334fc793ffb8132f86c966c1006f9ed1e0a9b71b3e1
// templates: attention/patterns/topk.cuh.j2, attention/sm89.cu.j2, common/declarations.cuh.j2, ptx/cp_async.cuh.j2, ptx/mma_sync.cuh.j2, ptx/warp.cuh.j2
// seal: sha256 62c4f5949e3b7258589bcfe4922184c61c9419f56ff5e5371bd6f2b426b8e098

// Attention forward for sm_89: O = softmax(scale * Q K^T) V over the key blocks that the pattern lists.
//
// Who does what
//   A thread block computes kTileM queries of one head. Every warp owns 16 of them, S, P and O in registers, and every
//   thread takes part in the copies.
//
// Pipeline
//   K and V blocks pass through one ring of kStages slots in the order of their use: K0 V0 K1 V1 ..., tile t in slot
//   t mod kStages. cp.async (one group a tile) keeps kAhead = kStages - 1 tiles in flight.
//   producer: all threads, cp.async    consumer: all warps, ldmatrix
//   full:  cp.async.wait_group (this thread's part of tile t), then __syncthreads (everybody's part)
//   empty: the same __syncthreads: all warps are done with tile t - 1, whose slot then takes tile t + kAhead
//   Q comes in through the slot that is filled last, and O leaves through the ring.
//
// Symbols
//   s, prob     scores of 16 x kTileN pairs, and their exponentials as 16-bit A operands
//   q           16 x kHeadDim queries as A operands
//   o           output of 16 x kHeadDim, not yet divided by the row sum
//   row_max     running maximum of the raw scores; row_sum: this thread's part of the running sum
//   x[j][i]     a thread holds rows r (i = 0, 1) and r + 8 (i = 2, 3) of its warp's 16, r = lane / 4, columns
//               8 j + 2 (lane % 4) + {0, 1}

using int64 = long long;
using uint32 = unsigned int;

constexpr int kHeadDim = 64;  // elements of a head
constexpr int kTileM = 64;  // query rows of a thread block
constexpr int kTileN = 64;  // keys of one step
constexpr int kStages = 4;  // slots of the ring
constexpr int kAhead = 3;  // K and V blocks in flight while one is read
constexpr int kStreamRows = 64;  // query rows that share a list of key blocks
constexpr int kThreads = 128;  // 4 warps, 16 query rows each
constexpr int kRowBytes = 128;  // bytes of a row of Q, K, V, O
constexpr int kRowChunks = 8;  // 16-byte chunks of a row
constexpr int kPassRows = 16;  // rows that all threads copy at a time, one chunk each
constexpr int kWarpPassRows = 4;  // rows that a warp stores at a time
constexpr int kSlotBytes = 8192;  // bytes of a K or V block
constexpr int kBlockKeys = 64;  // keys of a listed block
constexpr int kBlockSteps = 1;  // steps in a listed block; 1 too where a step holds more than one
constexpr int kStepBlocks = 1;  // listed blocks of a step
constexpr int kTopK = 32;  // key blocks listed for each query block

// Dynamic shared memory: 32768 bytes. Byte offsets:
constexpr int kRingOffset = 0;  // 32768 bytes: 4 slots, each one block of K or V
constexpr int kQOffset = 24576;  // 8192 bytes: Q tile: in the slot that is filled last
constexpr int kOOffset = 0;  // 8192 bytes: O tile on its way out: in the ring once it is idle

static_assert(kStreamRows == kTileM);  // one list of key blocks for each thread block
static_assert(kTileM % kPassRows == 0 && kTileN % kPassRows == 0);  // no thread is left over in a copy
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
constexpr float kLn2 = 0.693147180559945f;

struct Params {
  const unsigned short* q;  // Q (batch, heads, q_len, head_dim)
  long long q_batch_stride;  // elements from one batch to the next
  long long q_head_stride;  // elements from one head to the next
  long long q_row_stride;  // elements from one row to the next
  const unsigned short* k;  // K (batch, kv_heads, kv_len, head_dim)
  long long k_batch_stride;  // elements from one batch to the next
  long long k_head_stride;  // elements from one head to the next
  long long k_row_stride;  // elements from one row to the next
  const unsigned short* v;  // V, as K
  long long v_batch_stride;  // elements from one batch to the next
  long long v_head_stride;  // elements from one head to the next
  long long v_row_stride;  // elements from one row to the next
  unsigned short* o;  // O, as Q
  long long o_batch_stride;  // elements from one batch to the next
  long long o_head_stride;  // elements from one head to the next
  long long o_row_stride;  // elements from one row to the next
  float* lse;  // log-sum-exp, (batch, heads, q_len) contiguous
  const int* kv_indices;  // key blocks of each query block, any order
  long long kv_indices_batch_stride;  // elements from one batch to the next (0: shared)
  long long kv_indices_head_stride;  // elements from one head to the next (0: shared)
  long long kv_indices_row_stride;  // elements from one query block to the next
  int query_blocks;  // query blocks of a head: rows of the lists
  int q_len;  // queries of a head
  int kv_len;  // keys of a head
  int heads;  // query heads
  int heads_per_kv_head;  // query heads that share one K/V head
  int query_tiles;  // tiles of kTileM queries of a head
  int tiles;  // batch * heads * query_tiles
  float scale;  // softmax scale
  float scale_log2;  // scale * log2(e)
};

// cp.async.cg: 16 bytes to shared memory, past the L1; zeros, and no read, unless `valid` (PTX ISA, "cp.async")
__device__ __forceinline__ void cp_async_16(uint32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
      : "memory");
}

// cp.async.commit_group: closes a group of this thread's copies (PTX ISA, "cp.async.commit_group")
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: at most kPending of this thread's groups are still running (PTX ISA, "cp.async.wait_group")
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

// ldmatrix.x4: four 8 x 8 matrices of 16-bit elements; lanes 8 i .. 8 i + 7 give the row addresses of matrix i, and
// each lane gets two neighbours of row lane / 4 of each matrix (PTX ISA, "ldmatrix")
__device__ __forceinline__ void ldmatrix_x4(uint32 (&m)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
      : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

// ldmatrix.x4.trans: as ldmatrix.x4, each matrix transposed on the way (PTX ISA, "ldmatrix")
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

// lg2.approx.ftz: log2(x) (PTX ISA, "lg2")
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Maximum over the four lanes that share a row of an accumulator (shfl.sync.bfly: PTX ISA, "shfl.sync").
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}

// Sum over the four lanes that share a row of an accumulator (shfl.sync.bfly: PTX ISA, "shfl.sync").
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}

// cvt.rn.f16x2.f32: two floats to a pair of fp16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Pattern: each query block has a list of kTopK key blocks, in any order; a block counts as often as it is listed.
struct KeyBlocks {
  int count;        // steps of these queries
  int entries;      // key blocks listed for them
  const int* list;  // their numbers
  int key_blocks;   // key blocks there are
  int chunk;        // 32 entries of the list, one a lane

  __device__ __forceinline__ KeyBlocks(const Params& p, int batch, int head, int first_query) {
    const int row = first_query / kStreamRows;
    list = p.kv_indices + batch * p.kv_indices_batch_stride + head * p.kv_indices_head_stride +
           row * p.kv_indices_row_stride;
    key_blocks = (p.kv_len + kBlockKeys - 1) / kBlockKeys;
    take(0, row < p.query_blocks ? kTopK : 0);
  }
  __device__ __forceinline__ void take(int first, int number) {
    list += first;
    entries = number;
    count = (entries * kBlockSteps + kStepBlocks - 1) / kStepBlocks;
    chunk = 0;
  }
  // Number of the i-th load, in units of its keys; one that holds no key for an entry out of range.
  // All lanes of a warp call this together, i = 0, 1, 2, ...
  __device__ __forceinline__ int at(int i) {
    const int lane = threadIdx.x % 32, entry = i / kBlockSteps;
    if (i % (32 * kBlockSteps) == 0 && entry + lane < entries) chunk = __ldg(list + entry + lane);
    const int block = __shfl_sync(0xFFFFFFFF, chunk, entry % 32);
    const bool known = entry < entries && static_cast<uint32>(block) < static_cast<uint32>(key_blocks);
    return (known ? block : key_blocks) * kBlockSteps + i % kBlockSteps;
  }
};

// Byte offset of a 16-byte chunk of a tile. The XOR puts one chunk of 8 rows in a line into 8 different bank groups.
__device__ __forceinline__ uint32 chunk_offset(int row, int chunk) {
  return row * kRowBytes + (chunk ^ row % 8) * 16;
}

// Starts the copy of kRows rows of a tile; rows from `valid_rows` on become zeros.
template <int kRows>
__device__ __forceinline__ void copy_rows(uint32 to, const unsigned short* from, int64 row_stride, int valid_rows) {
  const int first = threadIdx.x / kRowChunks, chunk = threadIdx.x % kRowChunks;
  from += first * row_stride + chunk * 8;
#pragma unroll
  for (int pass = 0; pass < kRows / kPassRows; ++pass) {
    const int row = first + pass * kPassRows;
    cp_async_16(to + chunk_offset(row, chunk), from, row < valid_rows);
    from += kPassRows * row_stride;
  }
}

// s = Q K^T for this warp's 16 rows and one block of keys.
__device__ __forceinline__ void multiply_scores(float (&s)[kTileN / 8][4], const uint32 (&q)[kHeadDim / 16][4],
    uint32 k_tile) {
  // Matrices of one ldmatrix: keys 0-7 and 8-15 of a group of 16, the two halves of 16 columns of each.
  const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
#pragma unroll
  for (int j = 0; j < kTileN / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
    for (int keys = 0; keys < kTileN; keys += 16) {
      uint32 k[4];
      ldmatrix_x4(k, k_tile + chunk_offset(keys + row, step * 2 + half));
      mma_m16n8k16(s[keys / 8], q[step], k[0], k[1]);
      mma_m16n8k16(s[keys / 8 + 1], q[step], k[2], k[3]);
    }
  }
}

// o += P V for this warp's 16 rows and one block of keys.
__device__ __forceinline__ void multiply_output(float (&o)[kHeadDim / 8][4], const uint32 (&prob)[kTileN / 16][4],
    uint32 v_tile) {
  // Matrices of one ldmatrix: keys 0-7 and 8-15 of a group of 16 for 8 columns, then for the next 8; transposed.
  const int lane = threadIdx.x % 32, row = lane % 16, half = lane / 16;
#pragma unroll
  for (int step = 0; step < kTileN / 16; ++step) {
#pragma unroll
    for (int columns = 0; columns < kHeadDim; columns += 16) {
      uint32 v[4];
      ldmatrix_x4_trans(v, v_tile + chunk_offset(step * 16 + row, columns / 8 + half));
      mma_m16n8k16(o[columns / 8], prob[step], v[0], v[1]);
      mma_m16n8k16(o[columns / 8 + 1], prob[step], v[2], v[3]);
    }
  }
}

// Hides the pairs of a block that lie behind the last key.
__device__ __forceinline__ void hide_pairs(float (&s)[kTileN / 8][4], const Params& p, int block) {
  const int first_key = block * kTileN + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < kTileN / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first_key + j * 8 + i % 2;
      const bool seen = key < p.kv_len;
      if (!seen) s[j][i] = kMinusInfinity;
    }
  }
}

// Online softmax of one block: s becomes 2^(scale_log2 (s - row_max)); o and row_sum follow the new maximum.
__device__ __forceinline__ void softmax(float (&s)[kTileN / 8][4], float (&o)[kHeadDim / 8][4], float (&row_max)[2],
    float (&row_sum)[2], float scale_log2) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float maximum = row_max[row];
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) maximum = fmaxf(maximum, fmaxf(s[j][row * 2], s[j][row * 2 + 1]));
    maximum = quad_max(maximum);
    // A row that has seen no key yet keeps its maximum at -inf; 0 in its place keeps the differences defined.
    const float shift = maximum == kMinusInfinity ? 0.0f : maximum * scale_log2;
    const float rescale = ex2(row_max[row] * scale_log2 - shift);
    row_max[row] = maximum;
    row_sum[row] *= rescale;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
#pragma unroll
      for (int i = row * 2; i < row * 2 + 2; ++i) {
        s[j][i] = ex2(s[j][i] * scale_log2 - shift);
        row_sum[row] += s[j][i];
      }
    }
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      o[j][row * 2] *= rescale;
      o[j][row * 2 + 1] *= rescale;
    }
  }
}

// The accumulators of two 8-column tiles, packed to 16 bits, are the A operand of 16 keys.
__device__ __forceinline__ void pack_probabilities(uint32 (&prob)[kTileN / 16][4], const float (&s)[kTileN / 8][4]) {
#pragma unroll
  for (int step = 0; step < kTileN / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = step * 2 + i / 2, row = i % 2;
      prob[step][i] = pack(s[j][row * 2], s[j][row * 2 + 1]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) l4_topk32_d64(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // Find this block's tile. Late queries go first: where the pattern is causal they have the most key blocks.
  const int row_of_tiles = blockIdx.x / p.query_tiles;
  const int first_query = (p.query_tiles - 1 - static_cast<int>(blockIdx.x) % p.query_tiles) * kTileM;
  const int batch = row_of_tiles / p.heads, head = row_of_tiles % p.heads;
  const int kv_head = head / p.heads_per_kv_head;
  const unsigned short* q_head = p.q + batch * p.q_batch_stride + head * p.q_head_stride;
  const unsigned short* k_head = p.k + batch * p.k_batch_stride + kv_head * p.k_head_stride;
  const unsigned short* v_head = p.v + batch * p.v_batch_stride + kv_head * p.v_head_stride;

  // Two walks over the key blocks: one that loads them, and one behind it that computes with them.
  KeyBlocks loads(p, batch, head, first_query), blocks = loads;
  int first_key = 0;  // of the block that is being loaded

  // Starts the copy of a tile (K of key block tile / 2, or its V) as one group; an empty group after the last tile.
  auto fetch = [&](int tile) {
    if (tile / 2 < loads.count) {
      const uint32 slot = base + kRingOffset + tile % kStages * kSlotBytes;
      if (tile % 2 == 0) {
        first_key = loads.at(tile / 2) * kTileN;
        copy_rows<kTileN>(slot, k_head + first_key * p.k_row_stride, p.k_row_stride, p.kv_len - first_key);
      } else {
        copy_rows<kTileN>(slot, v_head + first_key * p.v_row_stride, p.v_row_stride, p.kv_len - first_key);
      }
    }
    cp_async_commit();
  };
  // Waits until a tile is there and the one before it is done with, refills the latter's slot; returns the tile.
  auto advance_to = [&](int tile) {
    cp_async_wait<kAhead - 1>();
    __syncthreads();
    fetch(tile + kAhead);
    return base + kRingOffset + tile % kStages * kSlotBytes;
  };

  // Start the pipeline: Q, then the first tiles.
  copy_rows<kTileM>(base + kQOffset, q_head + first_query * p.q_row_stride, p.q_row_stride, p.q_len - first_query);
  cp_async_commit();
#pragma unroll
  for (int tile = 0; tile < kAhead; ++tile) fetch(tile);

  // Take this warp's rows of Q into registers.
  cp_async_wait<kAhead>();
  __syncthreads();
  uint32 q[kHeadDim / 16][4];
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    ldmatrix_x4(q[step], base + kQOffset + chunk_offset(warp * 16 + lane % 16, step * 2 + lane / 16));
  }

  // Clear the output and the softmax state.
  const int query = first_query + warp * 16 + lane / 4;
  float o[kHeadDim / 8][4], s[kTileN / 8][4];
  float row_max[2] = {kMinusInfinity, kMinusInfinity}, row_sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o[j][i] = 0.0f;
  }

  // Walk over the key blocks.
  for (int i = 0; i < blocks.count; ++i) {
    const int block = blocks.at(i);
    multiply_scores(s, q, advance_to(i * 2));
    if ((block + 1) * kTileN > p.kv_len) hide_pairs(s, p, block);
    softmax(s, o, row_max, row_sum, p.scale_log2);
    uint32 prob[kTileN / 16][4];
    pack_probabilities(prob, s);
    multiply_output(o, prob, advance_to(i * 2 + 1));
  }

  // Divide by the row sums. A row without keys has sum 0: O = 0, LSE = -inf.
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float sum = quad_sum(row_sum[row]);
    const float inverse = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      o[j][row * 2] *= inverse;
      o[j][row * 2 + 1] *= inverse;
    }
    if (lane % 4 == 0 && query + row * 8 < p.q_len) {
      p.lse[(static_cast<int64>(batch) * p.heads + head) * p.q_len + query + row * 8] =
          sum == 0.0f ? kMinusInfinity : row_max[row] * p.scale + lg2(sum) * kLn2;
    }
  }

  // Stage this warp's rows of O in the ring, once no warp reads it any more.
  __syncthreads();
  unsigned char* staging = shared + kOOffset;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      const uint32 to = chunk_offset(warp * 16 + row * 8 + lane / 4, j) + lane % 4 * 4;
      *reinterpret_cast<uint32*>(staging + to) = pack(o[j][row * 2], o[j][row * 2 + 1]);
    }
  }
  __syncwarp();

  // Store them, 16 bytes a lane, whole rows at a time.
  unsigned short* o_head = p.o + batch * p.o_batch_stride + head * p.o_head_stride;
#pragma unroll
  for (int pass = 0; pass < 16 / kWarpPassRows; ++pass) {
    const int row = warp * 16 + pass * kWarpPassRows + lane / kRowChunks, chunk = lane % kRowChunks;
    if (first_query + row < p.q_len) {
      *reinterpret_cast<uint4*>(o_head + (first_query + row) * p.o_row_stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(staging + chunk_offset(row, chunk));
    }
  }
}
