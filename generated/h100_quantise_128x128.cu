// Generated from specs/h100_quantise_128x128.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_quantise_128x128.yaml
// spec: {"arch":"sm_90a","codes":"e4m3","copy":"ld_global","dtype":"fp16","head_dim":128,"mma":"none","op":"quantize","scales":"row_block","schedule":"multistage","stages":1,"tile":{"m":128}}
// spec hash: c3d45b12667345b06f85e1dc47b6b571c230dc6bd18b53887ecf76516a581940
// seal: sha256 47e55441299b2db48d250c35788d575e361abdda0142c95bc010177ad46ea43d

// Quantization of rows: e4m3 codes and fp32 scales, x = code * scale. A thread block has kRows rows of one head. It
// reads their elements once and keeps them in registers until their scale is known.
//
// Symbols
//   amax   the largest finite magnitude of a group with one scale
//   chunk  8 elements of a row. A thread has every kRowLanes-th chunk of a row

using int64 = long long;
using uint32 = unsigned int;

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

// The elements of a chunk, the i-th of its thread.
__device__ __forceinline__ void centred_chunk(float (&x)[kChunk], const uint4& chunk, int i, const float* mean) {
  widen_chunk(x, chunk);
}

// A row as kept by a thread until its scale is known: its elements unchanged.
struct KeptRow {
  uint4 chunks[kThreadChunks];
};

__device__ __forceinline__ void keep(KeptRow& kept, const uint4 (&chunks)[kThreadChunks], const float*) {
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

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    h100_quantise_128x128(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* mean = reinterpret_cast<float*>(shared + kRowOffset);
  float* warps = reinterpret_cast<float*>(shared + kWarpsOffset);
  const int batch_head = blockIdx.x / p.chunks, chunk = blockIdx.x % p.chunks;
  const int batch = batch_head / p.heads, head = batch_head % p.heads;
  const Element* x = p.x + batch * p.x_batch_stride + head * p.x_head_stride;
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
