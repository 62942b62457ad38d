// Generated from specs/h100_quantise_k_given_hadamard.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_quantise_k_given_hadamard.yaml
// spec: {"arch":"sm_90a","codes":"e4m3","copy":"ld_global","dtype":"fp16","hadamard":true,"head_dim":128,"mean":"subtract","mma":"none","op":"quantize","scales":"given","schedule":"multistage","stages":1,"tile":{"m":128}}
// spec hash: 0bf679934f80b9caa648a2003dce3d780e53e82b9e22f6de18be64b519662a91
// seal: sha256 8b02f841fc38e6a145617490c3595b7d12aa3f5048a0794c5f1a2da192d17f5e

// Quantization of rows: e4m3 codes and fp32 scales, x = code * scale. A thread block has kRows rows of one head. It
// reads their elements once and keeps them in registers until their scale is known: the given one of their head.
// The mean of each column of a head is subtracted first. Thread blocks with a ticket for columns add kStatisticRows
// rows of them each. Those with a ticket for rows wait for the head's mean, and then read rows again, from the L2.
//
// Symbols
//   chunk  8 elements of a row. A thread has every kRowLanes-th chunk of a row

using int64 = long long;
using uint32 = unsigned int;

constexpr int kHeadDim = 128;  // elements per row
constexpr int kRows = 128;  // rows per thread block
constexpr int kThreadRows = 2;  // rows per thread
constexpr float kInverseNorm = 0.08838834764831843f;  // factor of the rotation, folded into the scales
constexpr int kThreads = 256;  // threads per block
constexpr int kChunk = 8;  // elements per 16-byte load of a thread
constexpr int kRowLanes = 4;  // threads that share a row
constexpr int kThreadChunks = 4;  // chunks of a row per thread
constexpr int kStatisticRows = 512;  // rows of a chunk of column statistics
constexpr int kColumnUnroll = 1;  // rows that a thread loads before it reduces them
constexpr int kJoinedRows = 8;  // chunks that are reduced at a time

// Dynamic shared memory: 4736 bytes. Byte offsets:
constexpr int kColumnsOffset = 0;  // 4096 bytes: column statistics of each warp
constexpr int kRowOffset = 4096;  // 512 bytes: statistic of each column
constexpr int kWarpsOffset = 4608;  // 128 bytes: largest magnitude of each warp

using Element = unsigned short;  // the bits of one fp16
using Code = unsigned char;      // those of one e4m3
constexpr uint32 kAllLanes = 0xFFFFFFFF;
constexpr float kLargestFloat = 3.402823466e38f;

// Launch: 256 threads per block, 4736 bytes of dynamic shared memory.
// Grid: one thread block for 128 rows, preceded by one for each 512 rows whose columns are reduced.
struct Params {
  const unsigned short* x;  // x (batch, heads, length, head_dim)
  int64 x_batch_stride;  // batch stride, in elements
  int64 x_head_stride;  // head stride, in elements
  int64 x_row_stride;  // row stride, in elements
  Code* codes;  // codes, as x
  int64 codes_batch_stride;  // batch stride, in codes
  int64 codes_head_stride;  // head stride, in codes
  int64 codes_row_stride;  // row stride, in codes
  const float* scales;  // scales (batch, heads)
  int64 scales_batch_stride;  // batch stride, in scales
  int64 scales_head_stride;  // head stride, in scales
  float* statistic;  // means of the columns (batch, heads, head_dim)
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

// A sum, including one more element of its column.
__device__ __forceinline__ float joined(float sum, float x) { return sum + x; }

// Mean of a column, whose infinities and NaN count as 0.
__device__ __forceinline__ float statistic_of(float sum, int length) { return sum / static_cast<float>(length); }

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

// The elements of a chunk, the i-th of its thread, minus the mean of their columns.
__device__ __forceinline__ void centred_chunk(float (&x)[kChunk], const uint4& chunk, int i, const float* mean) {
  widen_chunk(x, chunk);
  const float* of_chunk = mean + (i * kRowLanes + threadIdx.x % kRowLanes) * kChunk;
#pragma unroll
  for (int e = 0; e < kChunk; ++e) x[e] -= of_chunk[e];
}

// Signs of the columns, one bit each, 1 for minus.
__constant__ uint32 kSigns[kHeadDim / 32] = {
  0xDB83CFA9,
  0x4BE4F9B2,
  0xA91416A4,
  0x885D59C4,
};

// A row as kept by a thread until its scale is known: rotated.
struct KeptRow {
  float x[kThreadChunks][kChunk];
};

// A butterfly of two elements.
__device__ __forceinline__ void butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// Rotates a chunk of a row as far as possible within the lanes of the row.
__device__ __forceinline__ void rotate_chunk(float (&x)[kChunk], int i) {
  const int lane = threadIdx.x % kRowLanes, column = (i * kRowLanes + lane) * kChunk;
  const uint32 signs = kSigns[column / 32] >> column % 32;
#pragma unroll
  for (int e = 0; e < kChunk; ++e) x[e] = __uint_as_float(__float_as_uint(x[e]) ^ (signs << (31 - e) & 0x80000000));
#pragma unroll
  for (int half = 1; half < kChunk; half *= 2) {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      if (!(e & half)) butterfly(x[e], x[e + half]);
    }
  }
#pragma unroll
  for (int half = 1; half < kRowLanes; half *= 2) {
    const float sign = lane & half ? -1.0f : 1.0f;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) x[e] = sign * x[e] + __shfl_xor_sync(kAllLanes, x[e], half);
  }
}

// Multiplies a row by signs and then by the Hadamard matrix, by butterflies (fast Walsh-Hadamard transform): first
// those within a chunk of a thread, then those between lanes, then those between chunks of a thread. The factor 1 /
// sqrt(kHeadDim) that makes it a rotation is folded into the scale.
__device__ __forceinline__ void keep(KeptRow& kept, const uint4 (&chunks)[kThreadChunks], const float* mean) {
#pragma unroll
  for (int i = 0; i < kThreadChunks; ++i) {
    centred_chunk(kept.x[i], chunks[i], i, mean);
    rotate_chunk(kept.x[i], i);
  }
#pragma unroll
  for (int half = 1; half < kThreadChunks; half *= 2) {
#pragma unroll
    for (int i = 0; i < kThreadChunks; ++i) {
      if (i & half) continue;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) butterfly(kept.x[i][e], kept.x[i + half][e]);
    }
  }
}

// A chunk of a kept row.
__device__ __forceinline__ void kept_chunk(float (&x)[kChunk], const KeptRow& kept, int i, const float*) {
#pragma unroll
  for (int e = 0; e < kChunk; ++e) x[e] = kept.x[i][e];
}

constexpr float kScaleFactor = kInverseNorm;

// Writes the codes of this thread's part of a row.
__device__ __forceinline__ void write_codes(Code* row, const KeptRow& kept, float inverse, const float* mean) {
  uint2* to = reinterpret_cast<uint2*>(row) + threadIdx.x % kRowLanes;
#pragma unroll
  for (int i = 0; i < kThreadChunks; ++i) {
    float x[kChunk];
    kept_chunk(x, kept, i, mean);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) x[e] *= inverse;
    to[i * kRowLanes] = make_uint2(code_word(x[0], x[1], x[2], x[3]), code_word(x[4], x[5], x[6], x[7]));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    h100_quantise_k_given_hadamard(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* mean = reinterpret_cast<float*>(shared + kRowOffset);
  float* warps = reinterpret_cast<float*>(shared + kWarpsOffset);
  const Work work = work_of(p, draw_ticket(p, reinterpret_cast<int*>(warps)));
  const int batch_head = work.batch_head, chunk = work.chunk;
  if (batch_head >= p.all_heads) return;
  const int batch = batch_head / p.heads, head = batch_head % p.heads;
  const Element* x = p.x + batch * p.x_batch_stride + head * p.x_head_stride;
  if (work.adds_up) {
    add_up_columns(p, x, batch_head, chunk, reinterpret_cast<float (*)[kHeadDim]>(shared + kColumnsOffset),
        reinterpret_cast<int*>(warps) + 1);
    return;
  }
  const int lane = threadIdx.x % kRowLanes, first = chunk * kRows + threadIdx.x / kRowLanes;
  uint4 chunks[kThreadRows][kThreadChunks];
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const int row = first + r * (kThreads / kRowLanes);
    const Element* of_row = x + row * p.x_row_stride;
#pragma unroll
    for (int i = 0; i < kThreadChunks; ++i) {
      chunks[r][i] = row < p.length ? load_chunk(of_row, i * kRowLanes + lane) : make_uint4(0, 0, 0, 0);
    }
  }
  wait_for_columns(p, batch_head);
  const float* means = p.statistic + static_cast<int64>(batch_head) * kHeadDim;
  if (threadIdx.x < kHeadDim) mean[threadIdx.x] = __ldcg(means + threadIdx.x);
  __syncthreads();
  // The head's scale, without kScaleFactor.
  const float given = p.scales[batch * p.scales_batch_stride + head * p.scales_head_stride] / kScaleFactor;
  KeptRow kept[kThreadRows];
  float scale[kThreadRows];
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    keep(kept[r], chunks[r], mean);
    scale[r] = given;
  }
  Code* codes = p.codes + batch * p.codes_batch_stride + head * p.codes_head_stride;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const int row = first + r * (kThreads / kRowLanes);
    if (row < p.length) write_codes(codes + row * p.codes_row_stride, kept[r], 1.0f / scale[r], mean);
  }
}
