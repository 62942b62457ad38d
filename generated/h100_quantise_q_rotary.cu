// Generated from specs/h100_quantise_q_rotary.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_quantise_q_rotary.yaml
// spec: {"arch":"sm_90a","codes":"e4m3","copy":"ld_global","dtype":"fp16","head_dim":128,"mean":"product","mma":"none","op":"quantize","rotary":"half","scales":"row_block","schedule":"multistage","stages":1,"tile":{"m":128}}
// spec hash: 8663b29a3919592b5a8843b764f7656eb8459eee77a7804ad32a251a18b4ae88
// seal: sha256 1a9719c677799457fcf5ff7847ba9eb55b7ce34be18428689f6eb90d95a06ad9

// Quantization of rows: e4m3 codes and fp32 scales, x = code * scale. A thread block has kRows rows of one head. It
// reads their elements once and keeps them in registers until their scale is known.
// The rotary embedding is applied first.
//
// Symbols
//   amax   the largest finite magnitude of a group with one scale
//   chunk  8 elements of a row. A thread has every kRowLanes-th chunk of a row

using int64 = long long;
using uint32 = unsigned int;

constexpr int kHeadDim = 128;  // elements per row
constexpr int kRows = 128;  // rows per thread block
constexpr int kThreadRows = 2;  // rows per thread
constexpr int kThreads = 256;  // threads per block
constexpr int kChunk = 8;  // elements per 16-byte load of a thread
constexpr int kRowLanes = 4;  // threads that share a row
constexpr int kThreadChunks = 4;  // chunks of a row per thread
constexpr float kLargest = 448.0f;  // largest number of e4m3
constexpr float kLeastAmax = 7.888609052210118e-31f;  // smaller magnitudes count as 0

// Dynamic shared memory: 640 bytes. Byte offsets:
constexpr int kRowOffset = 0;  // 512 bytes: statistic of each column
constexpr int kWarpsOffset = 512;  // 128 bytes: largest magnitude of each warp

using Element = unsigned short;  // the bits of one fp16
using Code = unsigned char;      // those of one e4m3
constexpr uint32 kAllLanes = 0xFFFFFFFF;
constexpr float kLargestFloat = 3.402823466e38f;

// Launch: 256 threads per block, 640 bytes of dynamic shared memory.
// Grid: one thread block for 128 rows.
struct Params {
  const unsigned short* x;  // x (batch, heads, length, head_dim)
  int64 x_batch_stride;  // batch stride, in elements
  int64 x_head_stride;  // head stride, in elements
  int64 x_row_stride;  // row stride, in elements
  Code* codes;  // codes, as x
  int64 codes_batch_stride;  // batch stride, in codes
  int64 codes_head_stride;  // head stride, in codes
  int64 codes_row_stride;  // row stride, in codes
  float* scales;  // scales (batch, heads, rows or blocks of them)
  int64 scales_batch_stride;  // batch stride, in scales
  int64 scales_head_stride;  // head stride, in scales
  int64 scales_row_stride;  // row stride, in scales
  const float* mean;  // means of K's columns (batch, kv_heads, head_dim)
  float* product;  // products of rows and means (batch, heads, length)
  int kv_heads;  // K/V heads, each with a mean
  int heads_per_kv_head;  // heads per mean
  const float* cosines;  // cosines (batch or none, length, head_dim / 2)
  int64 cosines_batch_stride;  // batch stride, in elements (0: shared)
  int64 cosines_row_stride;  // row stride, in elements (0: shared)
  const float* sines;  // sines, as cosines
  int64 sines_batch_stride;  // batch stride, in elements (0: shared)
  int64 sines_row_stride;  // row stride, in elements (0: shared)
  int heads;  // heads
  int length;  // rows per head
  int chunks;  // thread blocks per head
};

// cvt.f32.f16: converts the bits of an fp16 to a float (PTX ISA, "cvt")
__device__ __forceinline__ float widen(unsigned short bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
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

// A chunk of a row, rotated.
struct Chunk {
  float x[kChunk];
};

// Rows of a head, and cosines and sines of its batch.
struct Rows {
  const Element* x;
  const float* cosines;
  const float* sines;
};

__device__ __forceinline__ Rows rows_of(const Params& p, int batch, int head) {
  return {p.x + batch * p.x_batch_stride + head * p.x_head_stride, p.cosines + batch * p.cosines_batch_stride,
      p.sines + batch * p.sines_batch_stride};
}

__device__ __forceinline__ void widen_chunk(float (&x)[kChunk], const Chunk& chunk) {
#pragma unroll
  for (int e = 0; e < kChunk; ++e) x[e] = chunk.x[e];
}

// Four cosines or sines.
__device__ __forceinline__ void load_quad(float (&quad)[4], const float* row, int i) {
  const float4 loaded = __ldg(reinterpret_cast<const float4*>(row) + i);
  quad[0] = loaded.x;
  quad[1] = loaded.y;
  quad[2] = loaded.z;
  quad[3] = loaded.w;
}

// Rotates a pair. Each product is rounded, without fma, as in other implementations.
__device__ __forceinline__ void rotate_pair(float& a, float& b, float cosine, float sine) {
  const float rotated = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
  b = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine));
  a = rotated;
}

// Rotates the elements of a row's first half with those of its second half, which belong to the same thread.
__device__ __forceinline__ void rotate_pairs(Chunk (&chunks)[kThreadChunks], const float* cosines,
    const float* sines) {
  constexpr int kHalf = kThreadChunks / 2;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
#pragma unroll
    for (int j = 0; j < kChunk / 4; ++j) {
      const int quad = (i * kRowLanes + threadIdx.x % kRowLanes) * (kChunk / 4) + j;
      float cosine[4], sine[4];
      load_quad(cosine, cosines, quad);
      load_quad(sine, sines, quad);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        rotate_pair(chunks[i].x[j * 4 + e], chunks[i + kHalf].x[j * 4 + e], cosine[e], sine[e]);
      }
    }
  }
}

// Loads and rotates this thread's part of a row.
__device__ __forceinline__ void load_rotated(Chunk (&chunks)[kThreadChunks], const Params& p, const Rows& rows,
    int row) {
  const Element* x = rows.x + row * p.x_row_stride;
#pragma unroll
  for (int i = 0; i < kThreadChunks; ++i) {
    widen_chunk(chunks[i].x, load_chunk(x, i * kRowLanes + threadIdx.x % kRowLanes));
  }
  rotate_pairs(chunks, rows.cosines + row * p.cosines_row_stride, rows.sines + row * p.sines_row_stride);
}

// The elements of a chunk, the i-th of its thread.
__device__ __forceinline__ void centred_chunk(float (&x)[kChunk], const Chunk& chunk, int i, const float* mean) {
  widen_chunk(x, chunk);
}

// A row as kept by a thread until its scale is known: its elements unchanged.
struct KeptRow {
  Chunk chunks[kThreadChunks];
};

__device__ __forceinline__ void keep(KeptRow& kept, const Chunk (&chunks)[kThreadChunks], const float*) {
#pragma unroll
  for (int i = 0; i < kThreadChunks; ++i) kept.chunks[i] = chunks[i];
}

// A chunk of a kept row.
__device__ __forceinline__ void kept_chunk(float (&x)[kChunk], const KeptRow& kept, int i, const float* mean) {
  centred_chunk(x, kept.chunks[i], i, mean);
}

constexpr bool kIsRotated = false;
constexpr float kScaleFactor = 1.0f;  // the magnitude of the elements is unchanged

// The largest magnitude in this thread's part of a row, ignoring NaN and, if `checked`, infinities.
template <bool checked>
__device__ __forceinline__ float magnitude_of(const KeptRow& kept, const float* mean) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreadChunks; ++i) {
    float x[kChunk];
    kept_chunk(x, kept, i, mean);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) amax = fmaxf(amax, !checked || is_finite(x[e]) ? fabsf(x[e]) : 0.0f);
  }
  return amax;
}

// The largest finite magnitude. Rotated rows, which are instruction-bound, check for infinities only if there are any.
__device__ __forceinline__ float amax_of(const KeptRow& kept, const float* mean) {
  const float amax = magnitude_of<!kIsRotated>(kept, mean);
  return is_finite(amax) ? amax : magnitude_of<true>(kept, mean);
}

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

// The product of this thread's part of a row and the mean of K.
__device__ __forceinline__ float product_of(const Chunk (&chunks)[kThreadChunks], const float* mean) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreadChunks; ++i) {
    float x[kChunk];
    widen_chunk(x, chunks[i]);
    const float* of_chunk = mean + (i * kRowLanes + threadIdx.x % kRowLanes) * kChunk;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) sum += x[e] * of_chunk[e];
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    h100_quantise_q_rotary(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* mean = reinterpret_cast<float*>(shared + kRowOffset);
  float* warps = reinterpret_cast<float*>(shared + kWarpsOffset);
  const int batch_head = blockIdx.x / p.chunks, chunk = blockIdx.x % p.chunks;
  const int batch = batch_head / p.heads, head = batch_head % p.heads;
  const Rows x = rows_of(p, batch, head);
  const int lane = threadIdx.x % kRowLanes, first = chunk * kRows + threadIdx.x / kRowLanes;
  Chunk chunks[kThreadRows][kThreadChunks];
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const int row = first + r * (kThreads / kRowLanes);
    load_rotated(chunks[r], p, x, min(row, p.length - 1));  // rows past the last one are not written
  }
  const int kv_head = batch * p.kv_heads + head / p.heads_per_kv_head;
  if (threadIdx.x < kHeadDim) mean[threadIdx.x] = p.mean[static_cast<int64>(kv_head) * kHeadDim + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const int row = first + r * (kThreads / kRowLanes);
    float product = row < p.length ? product_of(chunks[r], mean) : 0.0f;
#pragma unroll
    for (int lanes = 1; lanes < kRowLanes; lanes *= 2) product += __shfl_xor_sync(kAllLanes, product, lanes);
    if (lane == 0 && row < p.length) p.product[static_cast<int64>(batch_head) * p.length + row] = product;
  }
  KeptRow kept[kThreadRows];
  float amax[kThreadRows];
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    keep(kept[r], chunks[r], mean);
    const int row = first + r * (kThreads / kRowLanes);
    amax[r] = row < p.length ? amax_of(kept[r], mean) : 0.0f;
  }

  float* scales = p.scales + batch * p.scales_batch_stride + head * p.scales_head_stride;
  float scale[kThreadRows];  // without kScaleFactor
#pragma unroll
  for (int r = 1; r < kThreadRows; ++r) amax[0] = fmaxf(amax[0], amax[r]);
  // The bits of nonnegative floats have the same order as the floats.
  const uint32 of_warp = __reduce_max_sync(kAllLanes, __float_as_uint(amax[0]));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = __uint_as_float(of_warp);
  __syncthreads();
  float largest = warps[0];
#pragma unroll
  for (int i = 1; i < kThreads / 32; ++i) largest = fmaxf(largest, warps[i]);
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) scale[r] = scale_of(largest);
  if (threadIdx.x == 0) scales[chunk * p.scales_row_stride] = scale[0] * kScaleFactor;
  Code* codes = p.codes + batch * p.codes_batch_stride + head * p.codes_head_stride;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const int row = first + r * (kThreads / kRowLanes);
    if (row < p.length) write_codes(codes + row * p.codes_row_stride, kept[r], 1.0f / scale[r], mean);
  }
}
