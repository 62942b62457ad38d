// Generated from specs/l4_quantise_v.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/l4_quantise_v.yaml
// spec: {"arch":"sm_89","codes":"e4m3","copy":"ld_global","dtype":"fp16","head_dim":128,"mma":"none","op":"quantize","scales":"channel","schedule":"multistage","stages":1,"tile":{"m":128}}
// spec hash: 1078616cf8303868a42eac08d6c5b58adedcdf6fa200242bd836a7cf819f6feb
// seal: sha256 77c0c76353154a1106bbe7851e5ae87074e42d669189d19e86f9014e00e0a9e1

// Quantization of V: e4m3 codes with one scale per column of a head, transposed, with keys in the order of FP8
// attention's operand. Thread blocks with a ticket for columns find the largest magnitudes of kStatisticRows keys each.
// Those with a ticket for kRows keys wait for the head's scales, and then read keys again, from the L2.
//
// Symbols
//   chunk  8 elements of a key
//   quad   four keys whose codes form one word of each column: the t-th quad of each 16 keys holds keys 2t, 2t + 1,
//          8 + 2t, 9 + 2t
//   unit   four quads, 16 bytes of a column

using int64 = long long;
using uint32 = unsigned int;

constexpr int kHeadDim = 128;  // elements per row
constexpr int kRows = 128;  // keys per thread block
constexpr int kKeysTogether = 16;  // keys that are permuted together
constexpr int kLanes = 8;  // threads per row; each loads 8 elements at a time
constexpr int kLaneChunks = 2;  // most chunks per thread
constexpr int kThreads = 256;  // threads per block
constexpr int kChunk = 8;  // elements per 16-byte load of a thread
constexpr int kRowLanes = 4;  // threads that share a row
constexpr int kThreadChunks = 4;  // chunks of a row per thread
constexpr int kStatisticRows = 512;  // rows of a chunk of column statistics
constexpr int kColumnUnroll = 1;  // rows that a thread loads before it reduces them
constexpr int kJoinedRows = 8;  // chunks that are reduced at a time
constexpr float kLargest = 448.0f;  // largest number of e4m3
constexpr float kLeastAmax = 7.888609052210118e-31f;  // smaller magnitudes count as 0

// Dynamic shared memory: 21120 bytes. Byte offsets:
constexpr int kCodesOffset = 0;  // 16384 bytes: codes of a tile, columns of 128 keys
constexpr int kColumnsOffset = 16384;  // 4096 bytes: column statistics of each warp
constexpr int kRowOffset = 20480;  // 512 bytes: statistic of each column
constexpr int kWarpsOffset = 20992;  // 128 bytes: largest magnitude of each warp

using Element = unsigned short;  // the bits of one fp16
using Code = unsigned char;      // those of one e4m3
constexpr uint32 kAllLanes = 0xFFFFFFFF;
constexpr float kLargestFloat = 3.402823466e38f;
constexpr int kQuads = kRows / 4, kUnits = kRows / 16;
static_assert(kThreads == kQuads * kLanes, "a quad of each lane");
static_assert(kLanes == kUnits, "a lane of a column for each unit");

// Launch: 256 threads per block, 21120 bytes of dynamic shared memory.
// Grid: one thread block for 128 rows, preceded by one for each 512 rows whose columns are reduced.
struct Params {
  const unsigned short* x;  // x (batch, heads, length, head_dim)
  int64 x_batch_stride;  // batch stride, in elements
  int64 x_head_stride;  // head stride, in elements
  int64 x_row_stride;  // row stride, in elements
  Code* codes;  // V^T (batch, heads, head_dim, keys): codes
  int64 codes_batch_stride;  // batch stride, in codes
  int64 codes_head_stride;  // head stride, in codes
  int64 codes_column_stride;  // column stride, in codes
  float* statistic;  // scales of the columns (batch, heads, head_dim)
  float* partials;  // partial statistics of each chunk of rows
  int* tickets;  // tickets drawn
  int* heads_done;  // finished thread blocks of each head
  int statistic_chunks;  // chunks of a head's columns; 0 if the caller passes the statistic
  int lead;  // chunks of columns that precede the first rows
  int heads;  // heads
  int all_heads;  // heads of all batches
  int length;  // rows per head
  int chunks;  // thread blocks per head
};

// cvt.f32.f16: converts the bits of an fp16 to a float (PTX ISA, "cvt")
__device__ __forceinline__ float widen(unsigned short bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

// ld.acquire.gpu: writes of the thread that stored this value with a release are visible after it (PTX ISA, "ld")
__device__ __forceinline__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// A 16-byte chunk of a row.
__device__ __forceinline__ uint4 load_chunk(const Element* row, int chunk) {
  return __ldg(reinterpret_cast<const uint4*>(row) + chunk);
}

// Converts the 8 elements of 16 bytes to floats.
__device__ __forceinline__ void widen_chunk(float (&x)[kChunk], const uint4& chunk) {
  const uint32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = widen(words[i] & 0xFFFF);
    x[2 * i + 1] = widen(words[i] >> 16);
  }
}

// Whether a number is finite: scales and means ignore infinities and NaN.
__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= kLargestFloat; }

// Scale of a group with this largest magnitude.
__device__ __forceinline__ float scale_of(float amax) { return amax >= kLeastAmax ? amax / kLargest : 1.0f; }

// cvt.rn.satfinite.e4m3x2.f32: converts two floats to codes, `low` in the lower byte, rounded to nearest even.
// Infinities and out-of-range values saturate; NaN stays NaN (PTX ISA, "cvt")
__device__ __forceinline__ uint32 code_pair(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Converts four floats to a word of codes.
__device__ __forceinline__ uint32 code_word(float a, float b, float c, float d) {
  return code_pair(a, b) | code_pair(c, d) << 16;
}

// The largest magnitude, including one more element of its column.
__device__ __forceinline__ float joined(float amax, float x) { return fmaxf(amax, fabsf(x)); }

// Scale of a column.
__device__ __forceinline__ float statistic_of(float amax, int) { return scale_of(amax); }

// The work of a thread block: it reduces a chunk of columns, or quantizes a chunk of rows.
struct Work {
  int batch_head;  // all_heads or more: no work
  int chunk;
  bool adds_up;
};

// The work of a ticket. Tickets are drawn in order, so any work that one waits for has begun. The columns of `lead`
// chunks come first. After that, each chunk of columns is followed by the rows of one that was reduced much earlier and
// is still in the L2. Within a head, the rows reduced last come first.
__device__ __forceinline__ Work work_of(const Params& p, int ticket) {
  constexpr int kShare = kStatisticRows / kRows;
  if (p.statistic_chunks == 0) return {ticket / p.chunks, ticket % p.chunks, false};
  const int round = (ticket - p.lead) / (kShare + 1), turn = (ticket - p.lead) % (kShare + 1);
  const bool adds_up = ticket < p.lead || turn == 0;
  const int place = ticket < p.lead ? ticket : adds_up ? p.lead + round : round;
  const int batch_head = place / p.statistic_chunks, chunk = place % p.statistic_chunks;
  if (adds_up) return {batch_head, chunk, true};
  const int of_rows = (p.statistic_chunks - 1 - chunk) * kShare + turn - 1;
  return {of_rows < p.chunks ? batch_head : p.all_heads, of_rows, false};
}

// Draws the next ticket for the thread block; the last one resets the counter to 0.
__device__ __forceinline__ int draw_ticket(const Params& p, int* shared_ticket) {
  if (threadIdx.x == 0) {
    const int ticket = atomicAdd(p.tickets, 1);
    if (ticket == gridDim.x - 1) *p.tickets = 0;
    *shared_ticket = ticket;
  }
  __syncthreads();
  return *shared_ticket;
}

// Waits until the statistics of a head's columns are complete. The last thread block to see this resets the counter to
// 0.
__device__ __forceinline__ void wait_for_columns(const Params& p, int batch_head) {
  if (p.statistic_chunks == 0) return;
  if (threadIdx.x == 0) {
    int* counter = p.heads_done + batch_head;
    while (load_acquire(counter) <= p.statistic_chunks) __nanosleep(100);
    if (atomicAdd(counter, 1) == p.statistic_chunks + p.chunks) *counter = 0;
  }
  __syncthreads();
}

// Reduces this thread's part of the columns of a chunk of rows; ignores infinities and NaN if `checked`.
template <bool checked>
__device__ __forceinline__ void add_rows(float (&sums)[kThreadChunks][kChunk], const Params& p, const Element* x,
    int first) {
  const int end = min(first + kStatisticRows, p.length);
#pragma unroll
  for (int i = 0; i < kThreadChunks; ++i) {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) sums[i][e] = 0.0f;
  }
#pragma unroll kColumnUnroll
  for (int row = first + threadIdx.x / kRowLanes; row < end; row += kThreads / kRowLanes) {
#pragma unroll
    for (int i = 0; i < kThreadChunks; ++i) {
      float elements[kChunk];
      widen_chunk(elements, load_chunk(x + row * p.x_row_stride, i * kRowLanes + threadIdx.x % kRowLanes));
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        if (!checked || is_finite(elements[e])) sums[i][e] = joined(sums[i][e], elements[e]);
      }
    }
  }
}

// Reduces the chunks of a head, in a fixed order that does not depend on which one finished last.
__device__ __forceinline__ void join_chunks(const Params& p, const float* partials, float (*columns)[kHeadDim],
    float* statistic) {
  const int part = threadIdx.x / (kHeadDim / 4), column = threadIdx.x % (kHeadDim / 4) * 4;
  if (part < kJoinedRows) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int i = part; i < p.statistic_chunks; i += kJoinedRows) {
      const float4 more = __ldcg(reinterpret_cast<const float4*>(partials + i * kHeadDim + column));
      sum.x = joined(sum.x, more.x);
      sum.y = joined(sum.y, more.y);
      sum.z = joined(sum.z, more.z);
      sum.w = joined(sum.w, more.w);
    }
    *reinterpret_cast<float4*>(&columns[part][column]) = sum;
  }
  __syncthreads();
  if (threadIdx.x < kHeadDim) {
    float total = columns[0][threadIdx.x];
#pragma unroll
    for (int i = 1; i < kJoinedRows; ++i) total = joined(total, columns[i][threadIdx.x]);
    statistic[threadIdx.x] = statistic_of(total, p.length);
  }
}

// Reduces the columns of a chunk of rows. The last thread block to finish reduces the chunks of a head.
__device__ __forceinline__ void add_up_columns(const Params& p, const Element* x, int batch_head, int chunk,
    float (*columns)[kHeadDim], int* shared_last) {
  float sums[kThreadChunks][kChunk];
  add_rows<false>(sums, p, x, chunk * kStatisticRows);
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kThreadChunks; ++i) {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) finite = finite && is_finite(sums[i][e]);
  }
  if (!finite) add_rows<true>(sums, p, x, chunk * kStatisticRows);
#pragma unroll
  for (int i = 0; i < kThreadChunks; ++i) {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
#pragma unroll
      for (int lanes = kRowLanes; lanes < 32; lanes *= 2) {
        sums[i][e] = joined(sums[i][e], __shfl_xor_sync(kAllLanes, sums[i][e], lanes));
      }
      const int lane = threadIdx.x % 32;
      if (lane < kRowLanes) columns[threadIdx.x / 32][(i * kRowLanes + lane) * kChunk + e] = sums[i][e];
    }
  }
  __syncthreads();
  float* partials = p.partials + static_cast<int64>(batch_head) * p.statistic_chunks * kHeadDim;
  if (threadIdx.x < kHeadDim) {
    float total = columns[0][threadIdx.x];
#pragma unroll
    for (int warp = 1; warp < kThreads / 32; ++warp) total = joined(total, columns[warp][threadIdx.x]);
    partials[chunk * kHeadDim + threadIdx.x] = total;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *shared_last = atomicAdd(p.heads_done + batch_head, 1) == p.statistic_chunks - 1;
  __syncthreads();
  if (!*shared_last) return;
  __threadfence();
  join_chunks(p, partials, columns, p.statistic + static_cast<int64>(batch_head) * kHeadDim);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(p.heads_done + batch_head, 1);
}

// Offset of a word of codes in shared memory, in words. Units of a column are permuted by its chunk, so that the lanes
// of a warp write to different banks, and read whole columns.
__device__ __forceinline__ int place_of(int column, int quad) {
  return column * kQuads + ((quad / 4 ^ column / kChunk % kUnits) * 4 + quad % 4);
}

extern "C" __global__ void __launch_bounds__(kThreads, 3)
    l4_quantise_v(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char shared[];
  uint32* codes = reinterpret_cast<uint32*>(shared + kCodesOffset);
  float* inverses = reinterpret_cast<float*>(shared + kRowOffset);
  int* of_block = reinterpret_cast<int*>(shared + kWarpsOffset);
  const Work work = work_of(p, draw_ticket(p, of_block));
  if (work.batch_head >= p.all_heads) return;
  const int batch = work.batch_head / p.heads, head = work.batch_head % p.heads;
  const Element* x = p.x + batch * p.x_batch_stride + head * p.x_head_stride;
  if (work.adds_up) {
    add_up_columns(p, x, work.batch_head, work.chunk, reinterpret_cast<float (*)[kHeadDim]>(shared + kColumnsOffset),
        of_block + 1);
    return;
  }
  const int lane = threadIdx.x % kLanes, quad = threadIdx.x / kLanes;
  const int first = work.chunk * kRows + quad / 4 * kKeysTogether + quad % 4 * 2;
  uint4 chunks[kLaneChunks][4];
#pragma unroll
  for (int i = 0; i < kLaneChunks; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int key = first + j % 2 + j / 2 * (kKeysTogether / 2), chunk = i * kLanes + lane;
      const bool is_there = key < p.length && chunk < kHeadDim / kChunk;
      chunks[i][j] = is_there ? load_chunk(x + key * p.x_row_stride, chunk) : make_uint4(0, 0, 0, 0);
    }
  }
  wait_for_columns(p, work.batch_head);
  const float* scales = p.statistic + static_cast<int64>(work.batch_head) * kHeadDim;
  if (threadIdx.x < kHeadDim) inverses[threadIdx.x] = 1.0f / __ldcg(scales + threadIdx.x);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kLaneChunks; ++i) {
    const int column = (i * kLanes + lane) * kChunk;
    if (column >= kHeadDim) continue;
    float elements[4][kChunk];
#pragma unroll
    for (int j = 0; j < 4; ++j) widen_chunk(elements[j], chunks[i][j]);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      const float inverse = inverses[column + e];
      codes[place_of(column + e, quad)] = code_word(elements[0][e] * inverse, elements[1][e] * inverse,
          elements[2][e] * inverse, elements[3][e] * inverse);
    }
  }
  __syncthreads();
  Code* to = p.codes + batch * p.codes_batch_stride + head * p.codes_head_stride + work.chunk * kRows;
#pragma unroll
  for (int i = 0; i < kHeadDim * kUnits / kThreads; ++i) {
    const int unit = threadIdx.x % kUnits, column = (i * kThreads + threadIdx.x) / kUnits;
    reinterpret_cast<uint4*>(to + column * p.codes_column_stride)[unit] =
        *reinterpret_cast<const uint4*>(codes + place_of(column, unit * 4));
  }
}
