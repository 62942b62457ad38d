// Generated from specs/l4_dense_wmma.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/l4_dense_wmma.yaml
// spec: {"arch":"sm_89","copy":"cp_async","dtype":"fp16","head_dim":128,"lse":true,"mma":"wmma","op":"attention","pattern":{"kind":"dense"},"schedule":"multistage","stages":4,"tile":{"m":64,"n":32},"warp_rows":16}
// spec hash: 09517efdb1c6048a3442b73ecfc07fea775d3303052253351ff388700f097b29
// seal: sha256 9c367e0814b487162a2e2f4c350bc6c0b3dd164390bbbefc2c86e7016785f660

// Attention forward by WMMA, for sm_89: O = softmax(scale * Q K^T) V over the visible keys of the pattern.
//
// Roles
//   A thread block computes kTileM queries of one head. Each warp owns kMma of them, with Q and O in fragments. All
//   threads take part in the copies.
//
// Strips
//   The distribution of a fragment's elements over a warp is unspecified: no thread can tell the row of an element. All
//   data that the softmax handles by rows therefore passes through shared memory, one strip per warp:
//   scores   from accumulators to the strip, as floats; lanes 2 r and 2 r + 1 read row r into registers
//   P        16-bit, over the scores, to be loaded as A operands
//   factors  rescaling factor of each row of O when its maximum rises, repeated 16 times along the row: loaded as an
//            accumulator, each factor lands where O has that row, because fragments of one type have the same layout
//   O        from accumulators to the strip, on its way out
//
// Pipeline
//   K and V of the steps pass through one ring of kStages slots in order of use: K0 V0 K1 V1 ..., tile t in slot t mod
//   kStages. cp.async (one group per tile) keeps kAhead = kStages - 1 tiles in flight.
//   producer: all threads, cp.async    consumer: all warps, wmma::load_matrix_sync
//   full:  cp.async.wait_group (this thread's part of tile t), then __syncthreads (all threads' parts)
//   empty: the same __syncthreads: all warps have finished tile t - 1, whose slot then takes tile t + kAhead
//   Q arrives through the slot that is filled last, and the strips after it.
//   __syncwarp separates the phases of a strip: only its own warp uses it.
//
// Symbols
//   step        kTileN keys: one key block
//   s           this lane's half of a row's scores: columns 8 i + lane_column() + {0, 1, 2, 3}
//   q, o        fragments of kMma queries: kMma columns each. o is not yet divided by the row sum
//   row_max     running maximum of the row's logits times log2(e), for 2^x
//   row_sum     this lane's part of the running sum of the row

#include <cuda_fp16.h>
#include <mma.h>

using int64 = long long;
using uint32 = unsigned int;

constexpr int kHeadDim = 128;  // elements per head
constexpr int kTileM = 64;  // queries per thread block
constexpr int kTileN = 32;  // keys per step
constexpr int kStages = 4;  // slots of the ring
constexpr int kAhead = 3;  // K and V tiles in flight while one is read
constexpr int kSubTileRows = 64;  // queries of a tile, over one range of keys
constexpr int kMma = 16;  // rows, columns and depth of one WMMA product; query rows of a warp
constexpr int kThreads = 128;  // 4 warps
constexpr int kChunk = 8;  // elements of a 16-byte copy
constexpr int kRowChunks = 16;  // 16-byte copies of a row of Q, K, V
constexpr int kRowStride = 136;  // row stride of a tile, in elements: 8 rows lie in distinct banks
constexpr int kPassRows = 8;  // rows that all threads copy at a time
constexpr int kSlot = 4352;  // elements of a slot of the ring
constexpr int kStripStride = 40;  // row stride of scores and of P, in elements, with padding
constexpr int kStripBytes = 2560;  // bytes of a strip
constexpr int kFactorsOffset = 1280;  // offset of the factors in a strip, after P
constexpr int kFactorStride = 20;  // row stride of the factors, in floats, with padding
constexpr int kOutColumns = 32;  // columns of O that pass through a strip at a time
constexpr int kStepBlocks = 1;  // loads per step: its listed blocks, if it has several
constexpr int kLoadKeys = 32;  // keys per load

// Dynamic shared memory: 45056 bytes. Byte offsets:
constexpr int kRingOffset = 0;  // 34816 bytes: 4 slots, each K or V of one step
constexpr int kStripsOffset = 34816;  // 10240 bytes: a strip for each warp, 16 rows of 40 floats
constexpr int kQOffset = 26112;  // 17408 bytes: Q tile: in the slot that is filled last, and the strips after it

static_assert(kSubTileRows == kTileM);  // a thread block walks its key blocks once
static_assert(kTileM % kPassRows == 0 && kLoadKeys % kPassRows == 0);  // copies divide evenly among threads
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
constexpr float kLeastLogit = -1e38f;  // row_max before the first key: less than any logit, but differences are defined
constexpr float kLn2 = 0.693147180559945f;

// Launch: 128 threads per block, 45056 bytes of dynamic shared memory.
// Grid: one thread block for each tile, 2 at a time on an SM.
struct Params {
  const __half* q;  // Q (batch, heads, q_len, head_dim)
  int64 q_batch_stride;  // batch stride, in elements
  int64 q_head_stride;  // head stride, in elements
  int64 q_row_stride;  // row stride, in elements
  const __half* k;  // K (batch, kv_heads, kv_len, head_dim)
  int64 k_batch_stride;  // batch stride, in elements
  int64 k_head_stride;  // head stride, in elements
  int64 k_row_stride;  // row stride, in elements
  const __half* v;  // V, as K
  int64 v_batch_stride;  // batch stride, in elements
  int64 v_head_stride;  // head stride, in elements
  int64 v_row_stride;  // row stride, in elements
  __half* o;  // O, as Q
  int64 o_batch_stride;  // batch stride, in elements
  int64 o_head_stride;  // head stride, in elements
  int64 o_row_stride;  // row stride, in elements
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

namespace wmma = nvcuda::wmma;
using Element = __half;
using FragmentA = wmma::fragment<wmma::matrix_a, kMma, kMma, kMma, Element, wmma::row_major>;
using FragmentK = wmma::fragment<wmma::matrix_b, kMma, kMma, kMma, Element, wmma::col_major>;  // a key is a column
using FragmentV = wmma::fragment<wmma::matrix_b, kMma, kMma, kMma, Element, wmma::row_major>;
using Accumulator = wmma::fragment<wmma::accumulator, kMma, kMma, kMma, float>;

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

// cvt.rn.f16x2.f32: converts two floats to a pair of fp16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
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

// The work of a thread block: kTileM queries of one head. Late queries go first: under a pattern that masks later keys,
// they have the most key blocks, and long tiles should not start last.
struct Tile {
  int batch, head, first_query;

  __device__ __forceinline__ Tile(const Params& p, int index) {
    const int row = index / p.query_tiles;
    batch = row / p.heads;
    head = row % p.heads;
    first_query = (p.query_tiles - 1 - index % p.query_tiles) * kTileM;
  }
};

// This thread's part of the copy of a tensor: chunk `copy_chunk` of rows copy_row, copy_row + kPassRows, ...
__device__ __forceinline__ int copy_row() { return threadIdx.x / kRowChunks; }
__device__ __forceinline__ int copy_chunk() { return threadIdx.x % kRowChunks; }

// Starts this thread's part of the copy of kRows rows of a tile, starting at its first chunk. Rows from `valid_rows` on
// are zero-filled.
template <int kRows>
__device__ __forceinline__ void copy_rows(Element* tile, const Element* from, int64 row_stride, int valid_rows) {
  const uint32 to =
      static_cast<uint32>(__cvta_generic_to_shared(tile + copy_row() * kRowStride + copy_chunk() * kChunk));
#pragma unroll
  for (int row = 0; row < kRows; row += kPassRows) {
    cp_async_16(to + row * kRowStride * sizeof(Element), from, row < valid_rows);
    from += kPassRows * row_stride;
  }
}

// Starts this thread's part of the copy of K or V of a step, load by load, kLoadKeys keys each.
__device__ __forceinline__ void copy_step(Element* tile, const Element* thread_head, int64 row_stride, int kv_len,
    const int (&blocks)[kStepBlocks]) {
#pragma unroll
  for (int load = 0; load < kStepBlocks; ++load) {
    const int first_key = blocks[load] * kLoadKeys;
    copy_rows<kLoadKeys>(tile + load * kLoadKeys * kRowStride, thread_head + first_key * row_stride, row_stride,
        kv_len - copy_row() - first_key);
  }
}

// What a warp needs to mask a step: the index of the block of each load.
struct Step {
  int block[kStepBlocks];

  __device__ __forceinline__ Step(KvBlockIterator& blocks, int i) {
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

// The row of a strip that this lane shares with its neighbor, and the first of its columns in each 8.
__device__ __forceinline__ int lane_row() { return threadIdx.x % 32 / 2; }
__device__ __forceinline__ int lane_column() { return threadIdx.x % 2 * 4; }

// Stores the scores Q K^T of this warp's rows and one step in its strip.
__device__ __forceinline__ void compute_qk_gemm(float* scores, const FragmentA (&q)[kHeadDim / kMma],
    const Element* k_tile) {
  Accumulator sums[kTileN / kMma];
#pragma unroll
  for (int j = 0; j < kTileN / kMma; ++j) wmma::fill_fragment(sums[j], 0.0f);
#pragma unroll
  for (int i = 0; i < kHeadDim / kMma; ++i) {
#pragma unroll
    for (int j = 0; j < kTileN / kMma; ++j) {
      FragmentK k;
      wmma::load_matrix_sync(k, k_tile + j * kMma * kRowStride + i * kMma, kRowStride);
      wmma::mma_sync(sums[j], q[i], k, sums[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < kTileN / kMma; ++j) {
    wmma::store_matrix_sync(scores + j * kMma, sums[j], kStripStride, wmma::mem_row_major);
  }
}

// Reads this lane's scores from the strip.
__device__ __forceinline__ void read_scores(float (&s)[kTileN / 2], const float* scores) {
#pragma unroll
  for (int i = 0; i < kTileN / 8; ++i) {
    const float4 four =
        *reinterpret_cast<const float4*>(scores + lane_row() * kStripStride + i * 8 + lane_column());
    s[i * 4] = four.x;
    s[i * 4 + 1] = four.y;
    s[i * 4 + 2] = four.z;
    s[i * 4 + 3] = four.w;
  }
}

// Masks the keys of a step that are out of range.
__device__ __forceinline__ void apply_mask(float (&s)[kTileN / 2], const KvEnd& kv_end, const Step& step) {
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) {
    const int column = i / 4 * 8 + i % 4, load = column / kLoadKeys;
    const int key = step.block[load] * kLoadKeys + column % kLoadKeys + lane_column();
    const bool seen = key < kv_end;
    if (!seen) s[i] = kMinusInfinity;
  }
}

// Online softmax, first half: updates the running maximum of the row with this step's scores. Returns the factor that
// rescales O and the row sum to the new maximum: exactly 1 if the maximum has not changed.
__device__ __forceinline__ float update_maximum(const float (&s)[kTileN / 2], float& row_max, float scale_log2) {
  float maximum = kMinusInfinity, other = kMinusInfinity;  // two chains: half the latency
#pragma unroll
  for (int i = 0; i < kTileN / 2; i += 2) {
    maximum = fmaxf(maximum, s[i]);
    other = fmaxf(other, s[i + 1]);
  }
  maximum = fmaxf(maximum, other);
  maximum = fmaxf(maximum, __shfl_xor_sync(0xFFFFFFFF, maximum, 1));
  const float before = row_max;
  row_max = fmaxf(before, maximum * scale_log2);
  return ex2(before - row_max);
}

// Second half: writes P = 2^(scale_log2 s - row_max) over the scores in the strip. Returns the sum of this lane's
// weights.
__device__ __forceinline__ float exponentiate(Element* p_frag, const float (&s)[kTileN / 2], float row_max,
    float scale_log2) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kTileN / 8; ++i) {
    float power[4];
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      power[column] = ex2(s[i * 4 + column] * scale_log2 - row_max);
      sum += power[column];
    }
    *reinterpret_cast<uint2*>(p_frag + lane_row() * kStripStride + i * 8 + lane_column()) =
        make_uint2(pack(power[0], power[1]), pack(power[2], power[3]));
  }
  return sum;
}

// Writes a row's factor to all of its columns.
__device__ __forceinline__ void write_factors(float* factors, float factor) {
#pragma unroll
  for (int i = 0; i < kMma / 8; ++i) {
    *reinterpret_cast<float4*>(factors + lane_row() * kFactorStride + i * 8 + lane_column()) =
        make_float4(factor, factor, factor, factor);
  }
}

// Multiplies each row of o by its factor.
__device__ __forceinline__ void rescale_output(Accumulator (&o)[kHeadDim / kMma], const float* factors) {
  Accumulator factor;
  wmma::load_matrix_sync(factor, factors, kFactorStride, wmma::mem_row_major);
#pragma unroll
  for (int j = 0; j < kHeadDim / kMma; ++j) {
#pragma unroll
    for (int i = 0; i < factor.num_elements; ++i) o[j].x[i] *= factor.x[i];
  }
}

// o += P V for this warp's rows and one step.
__device__ __forceinline__ void compute_pv_gemm(Accumulator (&o)[kHeadDim / kMma], const Element* p_frag,
    const Element* v_tile) {
#pragma unroll
  for (int keys = 0; keys < kTileN; keys += kMma) {
    FragmentA p;
    wmma::load_matrix_sync(p, p_frag + keys, kStripStride);
#pragma unroll
    for (int j = 0; j < kHeadDim / kMma; ++j) {
      FragmentV v;
      wmma::load_matrix_sync(v, v_tile + keys * kRowStride + j * kMma, kRowStride);
      wmma::mma_sync(o[j], p, v, o[j]);
    }
  }
}

// Stores this warp's rows of O, kOutColumns columns at a time, each row multiplied by its factor; o_row is this lane's
// row.
__device__ __forceinline__ void store_output(Element* o_row, bool valid, const Accumulator (&o)[kHeadDim / kMma],
    float factor, float* strip) {
#pragma unroll
  for (int first = 0; first < kHeadDim; first += kOutColumns) {
    __syncwarp();  // all lanes have finished with the strip's contents
#pragma unroll
    for (int j = 0; j < kOutColumns / kMma; ++j) {
      wmma::store_matrix_sync(strip + j * kMma, o[first / kMma + j], kStripStride, wmma::mem_row_major);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOutColumns / kMma; ++i) {
      const int column = i * kMma + threadIdx.x % 2 * kChunk;
      const float4* from = reinterpret_cast<const float4*>(strip + lane_row() * kStripStride + column);
      const float4 low = from[0], high = from[1];
      if (valid) {
        *reinterpret_cast<uint4*>(o_row + first + column) =
            make_uint4(pack(low.x * factor, low.y * factor), pack(low.z * factor, low.w * factor),
                pack(high.x * factor, high.y * factor), pack(high.z * factor, high.w * factor));
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    l4_dense_wmma(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Element* const ring = reinterpret_cast<Element*>(shared + kRingOffset);
  const int warp_row = threadIdx.x / 32 * kMma;
  // The strip of this warp, under the types of its contents.
  unsigned char* const strip = shared + kStripsOffset + threadIdx.x / 32 * kStripBytes;
  float* const scores = reinterpret_cast<float*>(strip);
  Element* const p_frag = reinterpret_cast<Element*>(strip);
  float* const factors = reinterpret_cast<float*>(strip + kFactorsOffset);

  const Tile tile(p, blockIdx.x);
  const int query = tile.first_query + warp_row + lane_row();
  // Start of this thread's copies of Q, K and V.
  const int kv_head = tile.head / p.heads_per_kv_head;
  const Element* q_thread = p.q + tile.batch * p.q_batch_stride + tile.head * p.q_head_stride +
      (tile.first_query + copy_row()) * p.q_row_stride + copy_chunk() * kChunk;
  const Element* k_thread = p.k + tile.batch * p.k_batch_stride + kv_head * p.k_head_stride +
      copy_row() * p.k_row_stride + copy_chunk() * kChunk;
  const Element* v_thread = p.v + tile.batch * p.v_batch_stride + kv_head * p.v_head_stride +
      copy_row() * p.v_row_stride + copy_chunk() * kChunk;

  const SeqlenInfo seqlen(p, tile.batch);
  const KvEnd kv_end(p, tile.batch);
  // Two iterators over the key blocks: one for the loads, and one for the computation, which follows.
  KvBlockIterator loads(p, tile.batch, tile.head, tile.first_query), blocks = loads;
  int loading[kStepBlocks] = {};  // blocks of the step being loaded

  // Starts the copy of tile `number` as one cp.async group: K of step number / 2 or, if odd, V; an empty group after
  // the last step.
  auto fetch = [&](int number, int slot) {
    if (number / 2 < loads.count) {
      if (number % 2 == 0) {
#pragma unroll
        for (int i = 0; i < kStepBlocks; ++i) loading[i] = loads.at(number / 2 * kStepBlocks + i);
        copy_step(ring + slot * kSlot, k_thread, p.k_row_stride, kv_end, loading);
      } else {
        copy_step(ring + slot * kSlot, v_thread, p.v_row_stride, kv_end, loading);
      }
    }
    cp_async_commit();
  };
  auto slot_after = [](int slot) { return slot == kStages - 1 ? 0 : slot + 1; };

  // Fill the pipeline: Q, then the first K and V.
  Element* const q_tile = reinterpret_cast<Element*>(shared + kQOffset);
  copy_rows<kTileM>(q_tile, q_thread, p.q_row_stride, seqlen.q_len() - tile.first_query - copy_row());
  cp_async_commit();
#pragma unroll
  for (int number = 0; number < kAhead; ++number) fetch(number, number);

  // Load this warp's rows of Q into fragments, which frees the last slot and strips. Q's group is the oldest: at most
  // the kAhead groups of K and V are still in flight.
  cp_async_wait<kAhead>();
  __syncthreads();
  FragmentA q[kHeadDim / kMma];
#pragma unroll
  for (int i = 0; i < kHeadDim / kMma; ++i) {
    wmma::load_matrix_sync(q[i], q_tile + warp_row * kRowStride + i * kMma, kRowStride);
  }
  __syncthreads();

  // Clear the output and the softmax state.
  Accumulator o[kHeadDim / kMma];
#pragma unroll
  for (int j = 0; j < kHeadDim / kMma; ++j) wmma::fill_fragment(o[j], 0.0f);
  float row_max = kLeastLogit, row_sum = 0.0f;

  // Loop over the steps. A slot is refilled as soon as all warps have finished with it.
  int k_slot, v_slot = kStages - 1;
  for (int i = 0; i < blocks.count; ++i) {
    const Step step(blocks, i);
    cp_async_wait<kAhead - 1>();  // kAhead + 2 i groups are committed: only those after K of this step may be in flight
    __syncthreads();
    fetch(i * 2 + kAhead, v_slot);
    k_slot = slot_after(v_slot);
    compute_qk_gemm(scores, q, ring + k_slot * kSlot);
    __syncwarp();

    // The softmax, by rows.
    float s[kTileN / 2];
    read_scores(s, scores);
    if (step.needs_mask(kv_end)) apply_mask(s, kv_end, step);
    const float rescale = update_maximum(s, row_max, p.scale_log2);
    __syncwarp();  // all lanes have their scores
    row_sum = row_sum * rescale + exponentiate(p_frag, s, row_max, p.scale_log2);
    write_factors(factors, rescale);

    // The barrier also separates the lanes' writes to the strip from the loads of P and of the factors.
    cp_async_wait<kAhead - 1>();
    __syncthreads();
    fetch(i * 2 + 1 + kAhead, k_slot);
    v_slot = slot_after(k_slot);
    rescale_output(o, factors);
    compute_pv_gemm(o, p_frag, ring + v_slot * kSlot);
  }

  // Divide by the row sums. A row without keys has sum 0: O = 0, LSE = -inf.
  const float sum = row_sum + __shfl_xor_sync(0xFFFFFFFF, row_sum, 1);
  const float inverse = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
  if (p.lse != nullptr && threadIdx.x % 2 == 0 && query < seqlen.q_len()) {
    p.lse[seqlen.row(static_cast<int64>(tile.batch) * p.heads + tile.head, query)] =
        sum == 0.0f ? kMinusInfinity : (row_max + lg2(sum)) * kLn2;
  }
  Element* o_row = p.o + tile.batch * p.o_batch_stride + tile.head * p.o_head_stride + query * p.o_row_stride;
  store_output(o_row, query < seqlen.q_len(), o, inverse, scores);
}
