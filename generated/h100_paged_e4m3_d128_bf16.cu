// Generated from specs/h100_paged_e4m3_d128_bf16.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_paged_e4m3_d128_bf16.yaml
// spec: {"arch":"sm_90a","cache":"e4m3","copy":"cp_async","dtype":"bf16","head_dim":128,"mma":"mma","op":"paged_attention","schedule":"multistage","stages":2,"tile":{"m":16,"n":128}}
// spec hash: 9cfffe4f7eb3fff5b63ee33bc7b3da288b45836678f01d12f2474a96aa7aa219
// seal: sha256 72dde610eaece972b84c0caa0af75a034d35f24f86e399eb1b4706bec3444fa0

// Attention of a few queries over K and V in pages, by mma.sync: decoding. Keys of one request are split over thread
// blocks.
//
// The kernel is bound by reading K and V. A fixed grid divides the work of a launch into equal ranges, one for each
// thread block, which finds its range from the lengths in device memory.
//
// Roles: of each step, a warp takes 32 keys. Each warp has its own ring of kStages slots in shared memory, which
// cp.async fills kStages - 1 steps ahead, and its own softmax. No warp waits for another before a run ends.
//
// Symbols
//   request   a sequence of the batch: its queries, its pages, its number of keys
//   row       a query head of a token: heads of one KV head are adjacent, then come those of the next token
//   tile      kTileM rows of a request and a KV head
//   step      kTileN keys of a tile, kWarpKeys for each warp
//   unit      of work: a step, or one of the kTileCost units that a tile counts besides
//   run       the steps of a tile that one thread block computes, without interruption
//   part      the result of a run that is not the whole tile: the last thread block of the tile to finish adds the
//             parts, in the order of the keys
//   entry     an element of a list: 2^entry_shift keys that a query sees
//   lane      has rows r and r + 8 of a product (r = lane / 4), and columns 2 t and 2 t + 1 (t = lane % 4)

using int64 = long long;
using uint32 = unsigned int;

constexpr int kHeadDim = 128;  // elements per head
constexpr int kTileM = 16;  // rows per tile
constexpr int kTileN = 128;  // keys per step
constexpr int kWarps = 4;  // warps, with 32 keys of a step each
constexpr int kStages = 2;  // slots of a warp's ring
constexpr int kKvBytes = 1;  // bytes per element of K and V
constexpr int kTileCost = 2;  // units of work of a tile besides its steps
constexpr int kLeastSteps = 1;  // units of a thread block at least, if there are as many
constexpr int kLeastUnits = 8;  // units of a thread block from which tiles are whole
constexpr int kPartsAtOnce = 8;  // parts of a tile that a thread adds at once
constexpr int kPartSteps = 8;  // steps of a part at least, if most_parts is set

// Dynamic shared memory: 73496 bytes. Byte offsets:
constexpr int kQOffset = 0;  // 4096 bytes: rows of Q
constexpr int kRingOffset = 4096;  // 65536 bytes: e4m3 codes of K and V; a ring per warp, and its sums at the end
constexpr int kKeysOffset = 69632;  // 3200 bytes: positions of the keys in the rings
constexpr int kRowsOffset = 72832;  // 512 bytes: maximum and weight of each row, by warp
constexpr int kPlacesOffset = 73344;  // 128 bytes: token and query head of each row
constexpr int kScanOffset = 73472;  // 24 bytes: sums of units of work

constexpr int kThreads = 32 * kWarps;
constexpr int kMmaRows = 16, kMmaColumns = 8, kMmaDepth = 16;  // of one product
constexpr int kMmas = kTileM / kMmaRows;
constexpr int kDepths = kHeadDim / kMmaDepth, kColumns = kHeadDim / kMmaColumns;  // products of QK and of PV
constexpr int kWarpKeys = kTileN / kWarps, kKeyTiles = kWarpKeys / kMmaColumns;
constexpr int kRowBytes = kHeadDim * kKvBytes, kRowChunks = kRowBytes / 16;  // of a key, or of a value
constexpr int kQRowBytes = kHeadDim * 2, kQRowChunks = kQRowBytes / 16;
constexpr int kHalfBytes = kWarpKeys * kRowBytes, kSlotBytes = 2 * kHalfBytes;  // K, then V
constexpr int kSumStride = kHeadDim + 8;  // floats of a row of a warp's sums: eight rows begin in different banks
constexpr int kPartFloats = kTileM * (kHeadDim + 2);  // of a part: sums, then maximum and weight of each row
constexpr int kRowThreads = kThreads / kTileM;  // of a row of the result
constexpr int kFours = kHeadDim / 4 / kRowThreads, kFourStride = 4 * kRowThreads;  // four columns each, of a thread
constexpr int kFactors = kWarpKeys + 4;  // index beside a slot, behind positions and whether all rows see all keys
constexpr int kKeyInts = kFactors + 2 * kWarpKeys;  // with the factors of keys, then of values
constexpr uint32 kAllLanes = 0xFFFFFFFF;
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Launch: 128 threads per block, 73496 bytes of dynamic shared memory.
// Grid: as many thread blocks as run concurrently, for any lengths.
struct Params {
  const unsigned short* q;  // Q (tokens, heads, head_dim)
  int64 q_token_stride;  // token stride of Q, in elements
  int64 q_head_stride;  // head stride of Q, in elements
  const unsigned char* k_cache;  // K (pages, tokens of a page, kv_heads, head_dim), in any order but for head_dim
  const unsigned char* v_cache;  // V, as K and with the same strides
  int page_chunks;  // page stride of K and V, in 16 bytes
  int token_chunks;  // token stride, likewise
  int head_chunks;  // head stride, likewise
  int pages;  // pages of K; requests if K is not paged
  int page_shift;  // tokens of a page, as a power of two; 31 if K is not paged
  int page_mask;  // tokens of a page, less 1
  const int* block_table;  // pages of each request (batch, most pages), or null: request i has page i
  int64 table_stride;  // row stride of block_table
  const int* seq_lens;  // keys of each request (batch,), or null: max_keys each
  int max_keys;  // keys of a request at most: those of a row of block_table
  const int* cu_seqlens_q;  // first token of each request, then the end of the last, or null
  int request_queries;  // tokens per request without cu_seqlens_q
  int batch;  // requests
  int total_q;  // tokens of all requests
  int kv_heads;  // heads of K and V
  int group;  // query heads per KV head
  int group_reciprocal;  // (2^31 - 1) / group, rounded down
  int window_left;  // keys that a query sees before its own position
  int window_right;  // keys that it sees after its own position
  int sink_keys;  // keys at the beginning that every later query sees
  const int* lists;  // entries of each query (list_heads, tokens, list_length), or null: no lists
  int list_heads;  // KV heads with lists, 1 if all share them
  int64 list_head_stride;  // head stride of lists
  int64 list_token_stride;  // token stride of lists
  int list_length;  // entries of a list
  int entry_shift;  // keys of an entry, as a power of two
  const int* counts;  // entries that count in each list (list_heads, tokens), or null: all but negative ones
  int64 count_head_stride;  // head stride of counts
  int64 count_token_stride;  // token stride of counts
  int list_steps;  // steps of a list
  int token_tiles;  // tiles of the query heads of a token and a KV head
  int list_units;  // units of work of all lists
  int list_blocks;  // thread blocks that have some
  int list_sharers;  // thread blocks of a tile, 0 if their ranges cross tiles
  int list_quota;  // units of a thread block
  int list_extra;  // sharers of a tile, or thread blocks of all, that have one more
  int list_sharers_reciprocal;  // (2^31 - 1) / list_sharers, likewise below
  int tile_units_reciprocal;  // of the units of a tile
  int token_tiles_reciprocal;  // of token_tiles
  int kv_heads_reciprocal;  // of kv_heads
  float scale_log2;  // softmax scale times log2(e)
  float softcap;  // cap of the logits, 0 for none
  const float* sink;  // a logit of each query head that joins its sums (heads,), or null
  const float* k_scale;  // factors of K: of each KV head, or of each token and KV head; or null
  const float* v_scale;  // factors of V, likewise
  int k_scale_stride;  // stride of the factors of K by KV head, 0 if all heads share one
  int v_scale_stride;  // the same of V
  int scale_by_token;  // 1 if each token has its own factors
  int64 scale_page_stride;  // page stride of such factors of K and of V
  int64 scale_token_stride;  // token stride, likewise
  int64 scale_head_stride;  // head stride, likewise
  unsigned short* out;  // result (tokens, heads, head_dim)
  int64 out_token_stride;  // token stride of the result, in elements
  int64 out_head_stride;  // head stride of the result, in elements
  float* lse;  // log-sum-exp (heads, tokens), or null
  int most_parts;  // parts of a tile at most, if its own length alone divides it; otherwise 0
  float* partials;  // sums of parts
  int* counters;  // finished parts of a tile, 0 between launches
};

using Element = unsigned short;  // the bits of one bf16

// cp.async.cg: copies 16 bytes to shared memory, bypassing the L1; zero-fills without a read unless `valid`. L2::128B
// is a hint to fetch 128 bytes into the L2 (PTX ISA, "cp.async")
__device__ __forceinline__ void cp_async_16(uint32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
      : "memory");
}

// cp.async.ca: copies 4 bytes to shared memory; zero-fills without a read unless `valid` (PTX ISA, "cp.async")
__device__ __forceinline__ void cp_async_4(uint32 to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
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

// cvt.rn.f16x2.f32: converts two floats to a pair of fp16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// cvt.rn.f16x2.e4m3x2: converts two e4m3 of 16 bits to a pair of fp16, exactly (PTX ISA, "cvt")
__device__ __forceinline__ uint32 widen_pair(unsigned short codes) {
  uint32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
  return pair;
}

// The low halves of two words, or the high halves: x's below, y's above (prmt: PTX ISA, "prmt")
__device__ __forceinline__ uint32 low_halves(uint32 x, uint32 y) { return __byte_perm(x, y, 0x5410); }
__device__ __forceinline__ uint32 high_halves(uint32 x, uint32 y) { return __byte_perm(x, y, 0x7632); }

// cvt.rn.bf16x2.f32: converts two floats to a pair of bf16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack_out(float low, float high) {
  uint32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Converts the bits of a bf16, the upper half of a float, to that float.
__device__ __forceinline__ float widen(unsigned short bits) {
  return __uint_as_float(static_cast<uint32>(bits) << 16);
}

// atom.add.acq_rel.gpu: adds to an integer, and returns it as it was. Everything visible to this thread becomes visible
// to the thread that adds next (PTX ISA, "atom")
__device__ __forceinline__ int atomic_add_acq_rel(int* to, int x) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(x) : "memory");
  return before;
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

// Sum over the four lanes that share a row of an accumulator (shfl.sync.bfly: PTX ISA, "shfl.sync").
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}

// Maxima of two rows over the four lanes that share them (shfl.sync.bfly: PTX ISA, "shfl.sync").
__device__ __forceinline__ void quad_max(float (&x)[2]) {
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2) {
#pragma unroll
    for (int row = 0; row < 2; ++row) x[row] = fmaxf(x[row], __shfl_xor_sync(0xFFFFFFFF, x[row], lanes));
  }
}

// n / divisor, without signs, which would take longer.
__device__ __forceinline__ int quotient(uint32 n, uint32 divisor) { return n / divisor; }

// n / divisor for n < 2^31, with reciprocal = (2^31 - 1) / divisor: the product is the quotient, or 1 less.
__device__ __forceinline__ int quotient(uint32 n, uint32 divisor, uint32 reciprocal) {
  const uint32 below = __umulhi(2 * n, reciprocal);
  return n - below * divisor < divisor ? below : below + 1;
}

// The queries and keys of a request. Values from device memory are clamped to the tensors.
struct Request {
  int q_begin, q_len;  // tokens
  int kv_len;
  int sink_steps, window_step;  // steps of keys before the window, and the step in which the first window begins
  int steps;  // of a tile; at least 1, so that queries without keys get their result
  int tiles;  // of a KV head
};

__device__ __forceinline__ Request request_of(const Params& p, int index) {
  Request request;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int begin = packed ? __ldg(p.cu_seqlens_q + index) : index * p.request_queries;
  const int end = packed ? __ldg(p.cu_seqlens_q + index + 1) : begin + p.request_queries;
  request.q_begin = max(0, min(begin, p.total_q));
  request.q_len = max(request.q_begin, min(end, p.total_q)) - request.q_begin;
  request.kv_len = p.seq_lens == nullptr ? p.max_keys : max(0, min(__ldg(p.seq_lens + index), p.max_keys));
  const int first_key = max(0, request.kv_len - request.q_len - p.window_left);  // of the first query's window
  const int end_step = (request.kv_len + kTileN - 1) / kTileN;
  request.window_step = min(first_key / kTileN, end_step);
  request.sink_steps = min((p.sink_keys + kTileN - 1) / kTileN, request.window_step);
  request.steps = max(1, request.sink_steps + end_step - request.window_step);
  request.tiles = (request.q_len * p.group + kTileM - 1) / kTileM;
  return request;
}

__device__ __forceinline__ bool has_token(const Request& request, int token) {
  return 0 <= token - request.q_begin && token - request.q_begin < request.q_len;
}

// Units of work of all tiles of a request. A tile has kTileCost units before its steps: its results take time too.
__device__ __forceinline__ int units_of(const Params& p, const Request& request) {
  return request.tiles * p.kv_heads * (kTileCost + request.steps);
}

// Token of a row of a request.
__device__ __forceinline__ int token_of(const Params& p, int row) {
  return quotient(row, p.group, p.group_reciprocal);
}

// Request of a token, by binary search; the last one that begins at or before it.
__device__ __forceinline__ int request_of_token(const Params& p, int token) {
  if (p.cu_seqlens_q == nullptr) return quotient(token, p.request_queries);
  int first = 0, count = p.batch;
  while (count > 1) {
    const int half = count / 2;
    const bool behind = __ldg(p.cu_seqlens_q + first + half) <= token;
    first = behind ? first + half : first;
    count = behind ? count - half : half;
  }
  return first;
}

// Key of a lane among those of a list, or of a request.
__device__ __forceinline__ int lane_key(int step) {
  return step * kTileN + static_cast<int>(threadIdx.x / 32) * kWarpKeys + static_cast<int>(threadIdx.x % kWarpKeys);
}

// A tile of rows.
struct Tile {
  Request request;
  int index;  // of the request
  int kv_head;
  int first_row, rows;  // of the request
  const int* list;  // of its token, or null
  int entries, entry;  // of the list: how many count, and that of the lane's key in the first step of a run
};

// The units of one thread block, counted over all tiles of the launch. If all tiles have the same length, thread blocks
// begin and end with tiles, or a tile has several of them, its sharers. Otherwise, ranges begin and end within tiles.
struct Range {
  int total;  // units
  int sharers, place;  // thread blocks of a tile, 0 if ranges cross tiles; place of this one among those
  int quota, extra;  // units of a thread block; the first `extra` sharers of a tile, or of all, have one more
  int next, end;
  int request, before;  // that of `next`, or one before it, and the units before that request
};

struct Run {
  Tile tile;
  int first, last;  // steps of the tile
  int number, first_unit;  // of the tile: its number in the launch, and the unit of its first step
};

// Parts of the tile of a run.
struct Parts {
  int mine, count;
  int first;  // thread block of the first part, or the tile's number with `most_parts`; its counter has this index too
};

// Divides the units of a launch between its thread blocks, and returns how many have some. If tiles have the same
// length, `tile_units`, thread blocks that begin and end with tiles store fewer parts. This leaves some thread blocks
// without work, one in 16 at most. Ranges of short launches cross tiles: dividing these takes longer than it gains.
__device__ __forceinline__ int divide(Range& range, int tile_units) {
  const int blocks = max(1, min(static_cast<int>(gridDim.x), (range.total + kLeastSteps - 1) / kLeastSteps));
  range.sharers = 0;
  if (tile_units > 0 && range.total >= kLeastUnits * blocks) {
    const int tiles = quotient(range.total, tile_units);
    const bool whole = tiles >= blocks;
    const int each = whole ? quotient(tiles + blocks - 1, blocks) : quotient(blocks, tiles);  // tiles, or sharers
    const int used = whole ? quotient(tiles + each - 1, each) : tiles * each;
    if (16 * (blocks - used) <= blocks) {
      range.sharers = whole ? 1 : each;
      range.quota = whole ? each * tile_units : quotient(tile_units, each);
      range.extra = whole ? 0 : tile_units - range.quota * each;
      return used;
    }
  }
  range.quota = quotient(range.total, blocks);
  range.extra = range.total - range.quota * blocks;
  return blocks;
}

// Finds the range of this thread block; false if it has none. Lists give all tiles the same number of steps: the host
// divides them. Otherwise the threads add those of the requests. If the bounds of requests fall, no thread block has a
// range: together, the requests could have more tokens than q, so that sums overflow and two tiles have one number.
__device__ __forceinline__ bool find_range(const Params& p, Range& range, unsigned char* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;
  const bool listed = p.lists != nullptr;
  int* const sums = reinterpret_cast<int*>(shared + kScanOffset);
  int mine = 0, through = 0;  // units of this thread's requests, and of those up to its last one
  const int share = (p.batch + kThreads - 1) / kThreads;
  const int first = min(p.batch, static_cast<int>(threadIdx.x) * share), last = min(p.batch, first + share);
  int tile = 0;  // of the thread block, if it has sharers
  if (listed) {
    if (block >= p.list_blocks) return false;
    range.total = p.list_units;
    range.sharers = p.list_sharers;
    range.quota = p.list_quota;
    range.extra = p.list_extra;
    if (range.sharers > 1) tile = quotient(block, range.sharers, p.list_sharers_reciprocal);
  } else {
    bool falls = false, differs = false;
    const int steps = request_of(p, 0).steps;
    for (int i = first; i < last; ++i) {
      const Request request = request_of(p, i);
      mine += units_of(p, request);
      falls |= p.cu_seqlens_q != nullptr && __ldg(p.cu_seqlens_q + i) > __ldg(p.cu_seqlens_q + i + 1);
      differs |= request.tiles > 0 && request.steps != steps;
    }
    through = mine;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int lower = __shfl_up_sync(kAllLanes, through, lanes);
      through += lane >= lanes ? lower : 0;
    }
    if (lane == 31) sums[warp] = through;
    const bool even = !__syncthreads_or(falls || differs);
    if (!even && __syncthreads_or(falls)) return false;
    range.total = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      through += i < warp ? sums[i] : 0;
      range.total += sums[i];
    }
    if (block >= divide(range, even ? kTileCost + steps : 0) || range.total == 0) return false;
    if (range.sharers > 1) tile = quotient(block, range.sharers);
  }
  range.place = block - tile * range.sharers;
  range.next = block * range.quota + tile * range.extra + min(range.place, range.extra);
  range.end = min(range.total, range.next + range.quota + (range.place < range.extra ? 1 : 0));
  range.request = 0;
  range.before = 0;
  if (listed || p.batch == 1) return true;
  int before = through - mine;
  if (before <= range.next && range.next < through) {
    int request = first;
    for (int units; before + (units = units_of(p, request_of(p, request))) <= range.next; ++request) before += units;
    sums[kWarps] = before;
    sums[kWarps + 1] = request;
  }
  __syncthreads();
  range.before = sums[kWarps];
  range.request = sums[kWarps + 1];
  return true;
}

// Loads how many entries of a token's list count, and the entry that a lane needs first. Both are in flight together:
// an entry that does not count is dropped later.
__device__ __forceinline__ void load_list(const Params& p, Tile& tile, int64 token, int step) {
  const int64 head = p.list_heads == 1 ? 0 : tile.kv_head;
  tile.list = p.lists + head * p.list_head_stride + token * p.list_token_stride;
  const int64 place = head * p.count_head_stride + token * p.count_token_stride;
  tile.entries = p.counts == nullptr ? p.list_length : min(p.list_length, __ldg(p.counts + place));
  const int i = lane_key(step) >> p.entry_shift;
  tile.entry = i < p.list_length ? __ldg(tile.list + i) : -1;
}

// Tile of the unit `range.next`. Returns the step within the tile, negative in the units before its steps.
__device__ __forceinline__ int find_tile(const Params& p, Range& range, Tile& tile, int& number) {
  if (p.lists != nullptr) {
    const int units = kTileCost + p.list_steps;
    number = quotient(range.next, units, p.tile_units_reciprocal);
    const int step = range.next - number * units - kTileCost;
    const int token_head = quotient(number, p.token_tiles, p.token_tiles_reciprocal);
    const int part = number - token_head * p.token_tiles;
    const int token = quotient(token_head, p.kv_heads, p.kv_heads_reciprocal);
    tile.kv_head = token_head - token * p.kv_heads;
    load_list(p, tile, token, max(0, step));  // before the lengths are waited for
    tile.index = min(token, p.batch - 1);  // if each request has one query
    tile.request = request_of(p, tile.index);
    if (!has_token(tile.request, token)) {
      tile.index = request_of_token(p, token);
      tile.request = request_of(p, tile.index);
    }
    tile.first_row = (token - tile.request.q_begin) * p.group + part * kTileM;
    const bool inside = has_token(tile.request, token);
    tile.rows = inside ? min(kTileM, p.group - part * kTileM) : 0;
    tile.entries = inside ? tile.entries : 0;
    tile.request.steps = p.list_steps;
    return step;
  }
  tile.list = nullptr;
  tile.entries = tile.entry = 0;
  tile.request = request_of(p, range.request);
  for (int units; range.before + (units = units_of(p, tile.request)) <= range.next;) {
    range.before += units;
    tile.request = request_of(p, ++range.request);
  }
  const int units = kTileCost + tile.request.steps, within = range.next - range.before, index = quotient(within, units);
  tile.index = range.request;
  tile.kv_head = tile.request.tiles == 1 ? index : quotient(index, tile.request.tiles);
  const int place = index - tile.kv_head * tile.request.tiles;
  tile.first_row = place * kTileM;
  tile.rows = min(kTileM, tile.request.q_len * p.group - tile.first_row);
  const int64 first_row = static_cast<int64>(tile.request.q_begin) * p.group;
  number = (static_cast<int>(first_row / kTileM) + tile.index + place) * p.kv_heads + tile.kv_head;
  return within - index * units - kTileCost;
}

// Steps of each part but the last, if a tile's own length alone divides it.
__device__ __forceinline__ int part_steps(const Params& p, int steps) {
  return max(kPartSteps, quotient(steps + p.most_parts - 1, p.most_parts));
}

// Moves on to the next run of a range; false at its end. With `most_parts`, a thread block computes the parts that
// begin in its range.
__device__ __forceinline__ bool next_run(const Params& p, Range& range, Run& run) {
  while (range.next < range.end) {
    const int found = find_tile(p, range, run.tile, run.number), steps = run.tile.request.steps;
    run.first = max(0, found);
    range.next += run.first - found;
    run.first_unit = range.next - run.first;
    if (range.next >= range.end) return false;
    int behind = 0;  // the beginning of a part
    if (p.most_parts > 0) {
      const int length = part_steps(p, steps);
      behind = run.first - quotient(run.first, length) * length;
      run.last = min(steps, run.first - behind + length);
    } else {
      run.last = min(steps, run.first + range.end - range.next);
    }
    range.next += run.last - run.first;
    if (behind == 0) return true;
  }
  return false;
}

// Thread block that has a unit, if ranges cross tiles.
__device__ __forceinline__ int owner(const Range& range, int unit) {
  const int behind = unit - range.extra * (range.quota + 1);
  return behind < 0 ? quotient(unit, range.quota + 1) : range.extra + quotient(behind, range.quota);
}

// Finds the parts of a run's tile. With `most_parts`, tiles are divided by their own lengths alone. If a tile has
// sharers, each of them has steps.
static_assert(kLeastUnits > kTileCost);
__device__ __forceinline__ Parts find_parts(const Params& p, const Range& range, const Run& run) {
  const int steps = run.tile.request.steps, block = blockIdx.x;
  if (p.most_parts > 0) {
    const int length = part_steps(p, steps);
    return {quotient(run.first, length), quotient(steps + length - 1, length), run.number};
  }
  if (run.last - run.first == steps) return {0, 1, block};
  if (range.sharers > 0) return {range.place, range.sharers, block - range.place};
  const int first = run.first == 0 ? block : owner(range, run.first_unit);
  const int last = run.last == steps ? block : owner(range, run.first_unit + steps - 1);
  return {block - first, last - first + 1, first};
}

// Place of a part in memory. A thread block has two parts at most: of one tile the first part, of another a later one.
__device__ __forceinline__ int part_slot(const Params& p, const Parts& parts, int part) {
  return p.most_parts > 0 ? parts.first * p.most_parts + part : 2 * (parts.first + part) + (part == 0 ? 1 : 0);
}

// Finds the keys of the steps that a warp loads next; each lane has key lane % kWarpKeys. Entries of lists and pages
// are loaded a step before they are used, which hides their latency.
struct Cursor {
  const Tile& tile;
  int step, last;
  int position, page;  // of the key of `step`; a position of -1 is no key
  int entry;  // of the key of `step` + 1
  int seen_first, seen_last;  // keys that all rows see
  int any_first, any_last;  // keys that some row sees, besides the sinks

  __device__ __forceinline__ Cursor(const Params& p, const Run& run) : tile(run.tile), step(run.first), last(run.last) {
    entry = lane_key(step) >> p.entry_shift < tile.entries ? tile.entry : -1;
    position = position_of(p, step, entry);
    page = load_page(p);
    entry = load_entry(p, step + 1);
    const int place = tile.request.kv_len - tile.request.q_len;
    const int first_token = token_of(p, tile.first_row), last_token = token_of(p, tile.first_row + tile.rows - 1);
    seen_first = place + last_token - p.window_left;
    seen_last = place + first_token + p.window_right;
    any_first = place + first_token - p.window_left;
    any_last = place + last_token + p.window_right;
  }

  __device__ __forceinline__ int load_entry(const Params& p, int step) const {
    const int i = lane_key(step) >> p.entry_shift;
    return step < last && i < tile.entries ? __ldg(tile.list + i) : -1;
  }
  __device__ __forceinline__ int position_of(const Params& p, int step, int entry) const {
    const Request& request = tile.request;
    int position;
    if (p.lists != nullptr) {
      if (entry < 0 || entry > request.kv_len >> p.entry_shift) return -1;
      position = entry << p.entry_shift | (lane_key(step) & (1 << p.entry_shift) - 1);
    } else {
      const bool of_sink = step < request.sink_steps;
      position = lane_key(of_sink ? step : step - request.sink_steps + request.window_step);
    }
    return step < last && position < request.kv_len ? position : -1;
  }
  __device__ __forceinline__ int load_page(const Params& p) const {
    if (position < 0 || p.block_table == nullptr) return tile.index;
    return __ldg(p.block_table + tile.index * p.table_stride + (position >> p.page_shift));
  }
  // Whether some row sees the lane's key. Other keys are not read: an engine may have freed their pages, which may hold
  // NaN. The test follows the load of the page, so that this load does not wait for it.
  __device__ __forceinline__ bool is_seen(const Params& p) const {
    return (position <= any_last) & ((position >= any_first) | (position < p.sink_keys));
  }
  // The 16 bytes of K, and of V, at which the lane's key begins, or kNoKey.
  __device__ __forceinline__ uint32 chunk(const Params& p) const {
    if (position < 0 || !is_seen(p) || static_cast<uint32>(page) >= static_cast<uint32>(p.pages)) return kNoKey;
    const uint32 token = position & p.page_mask;
    return static_cast<uint32>(page) * p.page_chunks + token * p.token_chunks + tile.kv_head * p.head_chunks;
  }
  // Index of the factors of the lane's key, if each key has its own.
  __device__ __forceinline__ int64 factor(const Params& p) const {
    const int token = position & p.page_mask;
    return page * p.scale_page_stride + token * p.scale_token_stride + tile.kv_head * p.scale_head_stride;
  }
  __device__ __forceinline__ void advance(const Params& p) {
    ++step;
    position = position_of(p, step, entry);
    page = load_page(p);
    entry = load_entry(p, step + 1);
  }
  static constexpr uint32 kNoKey = 0xFFFFFFFF;
};

// Place of a 16-byte chunk of a row in shared memory: the chunks of eight rows lie in different banks.
template <int kChunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return (row * kChunks + (chunk ^ (kChunks >= 8 ? row % 8 : row / 2 % 4))) * 16;
}

// Address in shared memory of a chunk `bytes` behind that of a lane, whose chunk number has the low bits of `bytes`
// clear.
__device__ __forceinline__ uint32 along(uint32 mine, int bytes) { return (mine ^ bytes % 128) + bytes / 128 * 128; }

// Token and query head of a row of a tile.
__device__ __forceinline__ int2 row_place(const Params& p, const Tile& tile, int row) {
  const int of_request = tile.first_row + row, token = token_of(p, of_request);
  return {tile.request.q_begin + token, tile.kv_head * p.group + of_request - token * p.group};
}

// Two adjacent elements of Q as fp16.
__device__ __forceinline__ uint32 q_word(uint32 word) {
  return pack(widen(word & 0xFFFF), widen(word >> 16));
}
// A thread's part of Q, 32 bytes of a row at a time. Rows behind the last one are 0.
struct QRows {
  static constexpr int kLoads = (kTileM * kDepths + kThreads - 1) / kThreads;
  uint4 low[kLoads], high[kLoads];

  __device__ __forceinline__ QRows(const Params& p, const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = (threadIdx.x + i * kThreads) / kDepths, depth = (threadIdx.x + i * kThreads) % kDepths;
      low[i] = high[i] = {};
      if (row >= tile.rows) continue;
      const int2 place = row_place(p, tile, row);
      const Element* from = p.q + place.x * p.q_token_stride + place.y * p.q_head_stride + depth * kMmaDepth;
      low[i] = __ldg(reinterpret_cast<const uint4*>(from));
      high[i] = __ldg(reinterpret_cast<const uint4*>(from) + 1);
    }
  }
  // Words of 16 columns are in the order of their e4m3 partners: words 2 t and 2 t + 1 are a lane's words of the two
  // halves of a product's depth.
  __device__ __forceinline__ void store(unsigned char* to) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = (threadIdx.x + i * kThreads) / kDepths, depth = (threadIdx.x + i * kThreads) % kDepths;
      if (row >= kTileM) continue;
      const uint4 first = {q_word(low[i].x), q_word(low[i].z), q_word(high[i].x), q_word(high[i].z)};
      const uint4 second = {q_word(low[i].y), q_word(low[i].w), q_word(high[i].y), q_word(high[i].w)};
      *reinterpret_cast<uint4*>(to + swizzled<kQRowChunks>(row, 2 * depth)) = first;
      *reinterpret_cast<uint4*>(to + swizzled<kQRowChunks>(row, 2 * depth + 1)) = second;
    }
  }
};

// Copies the keys and values of the cursor's step to the next slot of a warp's ring, as one group. Values without a key
// are 0. Beside the slot lie the positions of its keys, then whether all rows see all of them.
__device__ __forceinline__ void load_step(const Params& p, Cursor& cursor, uint32 ring, int* ring_keys, int& slot) {
  const int lane = threadIdx.x % 32;
  if (cursor.step < cursor.last) {
    const uint32 mine = cursor.chunk(p);
    const int position = mine == Cursor::kNoKey ? -1 : cursor.position;
    const bool seen = position >= max(0, cursor.seen_first) && position <= cursor.seen_last;
    const bool all_seen = __all_sync(kAllLanes, seen);
    if (lane < kWarpKeys) ring_keys[slot * kKeyInts + lane] = position;
    if (lane == 0) ring_keys[slot * kKeyInts + kWarpKeys] = all_seen;
    const uint32 to = ring + slot * kSlotBytes;
#pragma unroll
    for (int i = 0; i < kHalfBytes / 16 / 32; ++i) {
      const int key = (lane + 32 * i) / kRowChunks, chunk = (lane + 32 * i) % kRowChunks;
      const uint32 begin = __shfl_sync(kAllLanes, mine, key);
      const bool valid = begin != Cursor::kNoKey;
      const int64 from = static_cast<int64>(valid ? begin : 0) * 16 + chunk * 16;
      const uint32 place = to + swizzled<kRowChunks>(key, chunk);
      cp_async_16(place, p.k_cache + from, valid);
      cp_async_16(place + kHalfBytes, p.v_cache + from, valid);
    }
    if (p.scale_by_token) {
      const bool valid = mine != Cursor::kNoKey;
      const int64 from = valid ? cursor.factor(p) : 0;
      const int* const factors = ring_keys + slot * kKeyInts + kFactors + lane;
      const uint32 place = static_cast<uint32>(__cvta_generic_to_shared(factors));
      cp_async_4(place, p.k_scale + from, valid);
      cp_async_4(place + kWarpKeys * 4, p.v_scale + from, valid);
    }
    cursor.advance(p);
    slot = slot + 1 == kStages ? 0 : slot + 1;
  }
  cp_async_commit();
}

// The keys that a lane's rows see, and the factors of their logits.
struct RowKeys {
  int first[kMmas][2], last[kMmas][2];  // of the window
  float scale;  // to powers of two

  __device__ __forceinline__ bool sees(const Params& p, int m, int row, int key) const {
    return key >= 0 && key <= last[m][row] && (key >= first[m][row] || key < p.sink_keys);
  }
};

__device__ __forceinline__ RowKeys row_keys(const Params& p, const Tile& tile) {
  RowKeys keys;
#pragma unroll
  for (int m = 0; m < kMmas; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * kMmaRows + half * 8 + static_cast<int>(threadIdx.x % 32) / 4;
      const int token = token_of(p, tile.first_row + row);
      const int position = tile.request.kv_len - tile.request.q_len + token;
      keys.first[m][half] = position - p.window_left;
      keys.last[m][half] = row < tile.rows ? position + p.window_right : -1;
    }
  }
  const bool has_factor = p.k_scale != nullptr && !p.scale_by_token;
  keys.scale = p.scale_log2 * (has_factor ? __ldg(p.k_scale + tile.kv_head * p.k_scale_stride) : 1.0f);
  return keys;
}

// Sums of a warp. Of each row, a lane has the weights of its own columns.
struct Sums {
  float o[kMmas][kColumns][4];
  float max[kMmas][2], weight[kMmas][2];
};

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int m = 0; m < kMmas; ++m) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.o[m][j][i] = 0.0f;
    }
    sums.max[m][0] = sums.max[m][1] = kMinusInfinity;
    sums.weight[m][0] = sums.weight[m][1] = 0.0f;
  }
}

// tanh as a call, which keeps the loop short: few calls have a softcap.
__device__ __noinline__ float tanh_of(float x) { return tanhf(x); }

// Multiplies 16 rows by the factors of their columns.
__device__ __forceinline__ void scale_columns(float (&s)[kKeyTiles][4], const int* factors) {
  const float* const mine = reinterpret_cast<const float*>(factors) + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(mine + n * kMmaColumns);
    s[n][0] *= pair.x, s[n][1] *= pair.y, s[n][2] *= pair.x, s[n][3] *= pair.y;
  }
}

// A maximum that can be subtracted, where no key is seen too.
__device__ __forceinline__ float finite(float max) { return max == kMinusInfinity ? 0.0f : max; }

// Turns the logits of a step into weights, and scales the sums to the new maximum.
__device__ __forceinline__ void softmax(const Params& p, Sums& sums, const RowKeys& rows, int m,
    float (&s)[kKeyTiles][4], const int* keys) {
  const int column = 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] *= rows.scale;
  }
  if (p.scale_by_token) scale_columns(s, keys + kFactors);
  if (p.softcap > 0.0f) {
    const float cap = p.softcap * kLog2E;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = cap * tanh_of(s[n][i] / cap);
    }
  }
  if (!keys[kWarpKeys]) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const int2 pair = *reinterpret_cast<const int2*>(keys + n * kMmaColumns + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!rows.sees(p, m, i / 2, i % 2 ? pair.y : pair.x)) s[n][i] = kMinusInfinity;
      }
    }
  }
  float top[2] = {kMinusInfinity, kMinusInfinity};
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
    for (int row = 0; row < 2; ++row) top[row] = fmaxf(top[row], fmaxf(s[n][2 * row], s[n][2 * row + 1]));
  }
  quad_max(top);
  float factor[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float next = fmaxf(sums.max[m][row], top[row]);
    factor[row] = ex2(sums.max[m][row] - finite(next));
    sums.max[m][row] = next;
    sums.weight[m][row] *= factor[row];
  }
  if (__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.o[m][j][i] *= factor[i / 2];
    }
  }
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[n][i] = ex2(s[n][i] - finite(sums.max[m][i / 2]));
      sums.weight[m][i / 2] += s[n][i];
    }
  }
  if (p.scale_by_token) scale_columns(s, keys + kFactors + kWarpKeys);
}

// Q as operands of the products.
struct QOperand {
  uint32 a[kMmas][kDepths][4];

  __device__ __forceinline__ explicit QOperand(uint32 q) {
    const uint32 mine = q + swizzled<kQRowChunks>(threadIdx.x % 16, threadIdx.x % 32 / 16);
#pragma unroll
    for (int m = 0; m < kMmas; ++m) {
#pragma unroll
      for (int depth = 0; depth < kDepths; ++depth) {
        ldmatrix_x4(a[m][depth], along(mine, depth * 32) + m * kMmaRows * kQRowBytes);
      }
    }
  }
  __device__ __forceinline__ void load(uint32 (&to)[4], int m, int depth) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = a[m][depth][i];
  }
};

// Adds a step to the sums of a warp.
__device__ __forceinline__ void compute_step(const Params& p, Sums& sums, const RowKeys& rows, const QOperand& q,
    uint32 slot, const int* keys) {
  const int lane = threadIdx.x % 32;
  float s[kMmas][kKeyTiles][4] = {};
  // Matrices of K: keys 0 to 7 and 8 to 15 of one depth, then of the next one.
  const uint32 k = slot + swizzled<kRowChunks>(lane % 16, lane / 16);
#pragma unroll
  for (int depth = 0; depth < kDepths; depth += 2) {
#pragma unroll
    for (int half = 0; half < kKeyTiles; half += 2) {
      uint32 codes[4];
      ldmatrix_x4(codes, along(k, depth * 16) + half * kMmaColumns * kRowBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32 low = widen_pair(codes[i] & 0xFFFF), high = widen_pair(codes[i] >> 16);
#pragma unroll
        for (int m = 0; m < kMmas; ++m) {
          uint32 a[4];
          q.load(a, m, depth + i / 2);
          mma_m16n8k16(s[m][half + i % 2], a, low, high);
        }
      }
    }
  }
  uint32 weights[kMmas][kKeyTiles / 2][4];
#pragma unroll
  for (int m = 0; m < kMmas; ++m) {
    softmax(p, sums, rows, m, s[m], keys);
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      weights[m][n / 2][n % 2 * 2] = pack(s[m][n][0], s[m][n][1]);
      weights[m][n / 2][n % 2 * 2 + 1] = pack(s[m][n][2], s[m][n][3]);
    }
  }
  const uint32 v = slot + kHalfBytes + swizzled<kRowChunks>(lane % 16, lane / 16);
  // Matrices of V: keys 0 to 7 and 8 to 15 of 16 columns, then of the next 16. Of a code's pair, the first column is in
  // an even product, the second in an odd one.
#pragma unroll
  for (int chunk = 0; chunk < kRowChunks; chunk += 2) {
#pragma unroll
    for (int half = 0; half < kKeyTiles / 2; ++half) {
      uint32 codes[4];
      ldmatrix_x4_trans(codes, along(v, chunk * 16) + half * 16 * kRowBytes);
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        uint32 even[2], odd[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint32 four = codes[2 * next + n];
          const uint32 first = widen_pair(four & 0xFFFF), second = widen_pair(four >> 16);
          even[n] = low_halves(first, second);
          odd[n] = high_halves(first, second);
        }
#pragma unroll
        for (int m = 0; m < kMmas; ++m) {
          mma_m16n8k16(sums.o[m][2 * (chunk + next)], weights[m][half], even[0], even[1]);
          mma_m16n8k16(sums.o[m][2 * (chunk + next) + 1], weights[m][half], odd[0], odd[1]);
        }
      }
    }
  }
}

// A thread's columns of one row: four at a time, kFourStride apart.
struct RowSums {
  float4 o[kFours];
  float max, weight;

  __device__ __forceinline__ RowSums() : max(kMinusInfinity), weight(0.0f) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
};

__device__ __forceinline__ int thread_row() { return threadIdx.x / kRowThreads; }
__device__ __forceinline__ int thread_column() { return threadIdx.x % kRowThreads * 4; }  // the first one

__device__ __forceinline__ void add_scaled(float4& to, float factor, const float4& x, float x_factor) {
  to.x = to.x * factor + x.x * x_factor;
  to.y = to.y * factor + x.y * x_factor;
  to.z = to.z * factor + x.z * x_factor;
  to.w = to.w * factor + x.w * x_factor;
}

// Adds the sums of other keys.
__device__ __forceinline__ void add(RowSums& to, const float4 (&o)[kFours], float2 of_row) {
  const float next = fmaxf(to.max, of_row.x), shift = finite(next);
  const float mine = ex2(to.max - shift), others = ex2(of_row.x - shift);
#pragma unroll
  for (int i = 0; i < kFours; ++i) add_scaled(to.o[i], mine, o[i], others);
  to.weight = to.weight * mine + of_row.y * others;
  to.max = next;
}

// Stores the sums of a warp in its part of the ring, and the maximum and weight of each row.
__device__ __forceinline__ void store_sums(const Sums& sums, unsigned char* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* const o = reinterpret_cast<float*>(shared + kRingOffset + warp * kStages * kSlotBytes);
  float2* const of_rows = reinterpret_cast<float2*>(shared + kRowsOffset) + warp * kTileM;
#pragma unroll
  for (int m = 0; m < kMmas; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * kMmaRows + half * 8 + lane / 4;
      const float weight = quad_sum(sums.weight[m][half]);
      if (lane % 4 == 0) of_rows[row] = {sums.max[m][half], weight};
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) {
        const float* x = sums.o[m][j] + 2 * half;
        const float* y = sums.o[m][j + 1] + 2 * half;
        float* const to = o + row * kSumStride + j * kMmaColumns + 4 * (lane % 4);
        *reinterpret_cast<float4*>(to) = {x[0], y[0], x[1], y[1]};
      }
    }
  }
}

// Adds the sums of all warps.
__device__ __forceinline__ void add_warps(RowSums& sums, const unsigned char* shared) {
#pragma unroll 2
  for (int warp = 0; warp < kWarps; ++warp) {
    const float* const of_warp = reinterpret_cast<const float*>(shared + kRingOffset + warp * kStages * kSlotBytes);
    const float* const from = of_warp + thread_row() * kSumStride + thread_column();
    float4 o[kFours];
#pragma unroll
    for (int i = 0; i < kFours; ++i) o[i] = *reinterpret_cast<const float4*>(from + i * kFourStride);
    add(sums, o, reinterpret_cast<const float2*>(shared + kRowsOffset)[warp * kTileM + thread_row()]);
  }
}

__device__ __forceinline__ float* part_place(const Params& p, const Parts& parts, int part) {
  return p.partials + static_cast<int64>(part_slot(p, parts, part)) * kPartFloats;
}

__device__ __forceinline__ void store_part(const Params& p, const Parts& parts, const RowSums& sums) {
  float* const part = part_place(p, parts, parts.mine);
  float* const to = part + thread_row() * kHeadDim + thread_column();
#pragma unroll
  for (int i = 0; i < kFours; ++i) __stcg(reinterpret_cast<float4*>(to + i * kFourStride), sums.o[i]);
  if (threadIdx.x % kRowThreads == 0) {
    __stcg(reinterpret_cast<float2*>(part + kTileM * kHeadDim) + thread_row(), make_float2(sums.max, sums.weight));
  }
}

// Adds the sums of the other slices of a row to those of the first one.
__device__ __forceinline__ void add_slices(RowSums& sums, int slices, unsigned char* shared) {
  float* const o = reinterpret_cast<float*>(shared + kRingOffset) + thread_column();
  float2* const of_rows = reinterpret_cast<float2*>(shared + kRowsOffset);
  const int row = thread_row(), slice_rows = kTileM / slices;
#pragma unroll
  for (int i = 0; i < kFours; ++i) *reinterpret_cast<float4*>(o + row * kSumStride + i * kFourStride) = sums.o[i];
  if (threadIdx.x % kRowThreads == 0) of_rows[row] = {sums.max, sums.weight};
  __syncthreads();
#pragma unroll 1
  for (int from = row + slice_rows; row < slice_rows && from < kTileM; from += slice_rows) {
    float4 others[kFours];
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      others[i] = *reinterpret_cast<const float4*>(o + from * kSumStride + i * kFourStride);
    }
    add(sums, others, of_rows[from]);
  }
}

// Adds the parts of a tile, in an order that depends on the tile alone, kPartsAtOnce at a time. If a tile with many
// parts has few rows, the threads of the other rows share the work: each of two or four slices of threads adds every
// second or fourth group of parts. Each thread of a row computes the factor of one part of a group. Loads have no
// branches, so they are in flight together.
__device__ __forceinline__ void add_parts(const Params& p, const Parts& parts, int tile_rows, RowSums& sums,
    unsigned char* shared) {
  const int rows = parts.count > kPartsAtOnce ? tile_rows : kTileM;
  const int slices = 4 * rows <= kTileM ? 4 : 2 * rows <= kTileM ? 2 : 1, slice_rows = kTileM / slices;
  const int row = thread_row() % slice_rows, slice = thread_row() / slice_rows, last = parts.count - 1;
#pragma unroll 1
  for (int group = 0; group < parts.count; group += slices * kPartsAtOnce) {
    const int first = group + slice * kPartsAtOnce, mine = first + threadIdx.x % kPartsAtOnce;
    const float* const of_mine = part_place(p, parts, min(mine, last)) + kTileM * kHeadDim;
    float2 of_row = __ldcg(reinterpret_cast<const float2*>(of_mine) + row);
    float4 o[kPartsAtOnce][kFours];
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
      const float* const from = part_place(p, parts, min(first + i, last)) + row * kHeadDim + thread_column();
#pragma unroll
      for (int j = 0; j < kFours; ++j) o[i][j] = __ldcg(reinterpret_cast<const float4*>(from + j * kFourStride));
    }
    if (mine > last) of_row = make_float2(kMinusInfinity, 0.0f);
    float top = fmaxf(sums.max, of_row.x);
#pragma unroll
    for (int lanes = 1; lanes < kPartsAtOnce; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, lanes));
    const float before = ex2(sums.max - finite(top)), factor = ex2(of_row.x - finite(top));
    float weight = factor * of_row.y;
#pragma unroll
    for (int lanes = 1; lanes < kPartsAtOnce; lanes *= 2) weight += __shfl_xor_sync(kAllLanes, weight, lanes);
    sums.weight = sums.weight * before + weight;
    sums.max = top;
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
      const float of_part = __shfl_sync(kAllLanes, factor, i, kPartsAtOnce);
#pragma unroll
      for (int j = 0; j < kFours; ++j) add_scaled(sums.o[j], i == 0 ? before : 1.0f, o[i][j], of_part);
    }
  }
  if (slices > 1) add_slices(sums, slices, shared);
}

// Whether this is the last thread block of a tile to store its part. The counter is 0 again afterwards.
__device__ __forceinline__ bool is_last_part(const Params& p, const Parts& parts, unsigned char* shared) {
  int* const flag = reinterpret_cast<int*>(shared + kScanOffset);
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool last = atomic_add_acq_rel(p.counters + parts.first, 1) == parts.count - 1;
    if (last) p.counters[parts.first] = 0;
    *flag = last;
  }
  __syncthreads();
  return *flag;
}

// Stores a thread's columns of the result.
__device__ __forceinline__ void store_result(const Params& p, const Run& run, RowSums& sums, const int2* places) {
  const int2 place = places[thread_row()];
  if (p.sink != nullptr) {
    const float4 none[kFours] = {};
    add(sums, none, make_float2(__ldg(p.sink + place.y) * kLog2E, 1.0f));
  }
  const bool has_factor = p.v_scale != nullptr && !p.scale_by_token;
  const float v_scale = has_factor ? __ldg(p.v_scale + run.tile.kv_head * p.v_scale_stride) : 1.0f;
  const float factor = sums.weight > 0.0f ? v_scale / sums.weight : 0.0f;
  Element* const to = p.out + place.x * p.out_token_stride + place.y * p.out_head_stride + thread_column();
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const float4 x = sums.o[i];
    const uint2 words = {pack_out(x.x * factor, x.y * factor), pack_out(x.z * factor, x.w * factor)};
    *reinterpret_cast<uint2*>(to + i * kFourStride) = words;
  }
  if (p.lse != nullptr && threadIdx.x % kRowThreads == 0) {
    const float lse = sums.weight > 0.0f ? (sums.max + lg2(sums.weight)) * kLn2 : kMinusInfinity;
    p.lse[static_cast<int64>(place.y) * p.total_q + place.x] = lse;
  }
}

// Adds the sums of all warps. Stores the result, or a part of it; the last thread block then stores the result of all
// parts.
__device__ __forceinline__ void finish_run(const Params& p, const Run& run, const Parts& parts, const Sums& of_warp,
    unsigned char* shared) {
  store_sums(of_warp, shared);
  __syncthreads();
  const bool inside = thread_row() < run.tile.rows;
  RowSums sums;
  add_warps(sums, shared);
  if (parts.count > 1) {
    if (inside) store_part(p, parts, sums);
    if (!is_last_part(p, parts, shared)) return;
    sums = RowSums();
    add_parts(p, parts, run.tile.rows, sums, shared);
  }
  if (inside) store_result(p, run, sums, reinterpret_cast<const int2*>(shared + kPlacesOffset));
}

// Computes a run, and the result of its tile if it is the last part.
__device__ __forceinline__ void compute_run(const Params& p, const Range& range, const Run& run, unsigned char* shared,
    uint32 base) {
  const int warp = threadIdx.x / 32;
  const uint32 ring = base + kRingOffset + warp * kStages * kSlotBytes;
  int* const ring_keys = reinterpret_cast<int*>(shared + kKeysOffset) + warp * kStages * kKeyInts;
  int2* const places = reinterpret_cast<int2*>(shared + kPlacesOffset);
  __syncthreads();  // all threads have read the sums of the previous run
  const QRows q_rows(p, run.tile);
  Cursor cursor(p, run);
  int filled = 0;  // next slot to fill
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) load_step(p, cursor, ring, ring_keys, filled);
  const Parts parts = find_parts(p, range, run);  // while the first keys are in flight
  q_rows.store(shared + kQOffset);
  if (threadIdx.x < kTileM) places[threadIdx.x] = row_place(p, run.tile, threadIdx.x);
  Sums sums;
  clear(sums);
  const RowKeys rows = row_keys(p, run.tile);
  __syncthreads();
  const QOperand q(base + kQOffset);
  int slot = 0;
#pragma unroll 1
  for (int step = run.first; step < run.last; ++step) {
    __syncwarp();  // all lanes have read the slot that is filled next
    load_step(p, cursor, ring, ring_keys, filled);
    cp_async_wait<kStages - 1>();
    __syncwarp();
    compute_step(p, sums, rows, q, ring + slot * kSlotBytes, ring_keys + slot * kKeyInts);
    slot = slot + 1 == kStages ? 0 : slot + 1;
  }
  cp_async_wait<0>();
  __syncwarp();
  finish_run(p, run, parts, sums, shared);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) h100_paged_e4m3_d128_bf16(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  Range range;
  if (!find_range(p, range, shared)) return;
  Run run;
  while (next_run(p, range, run)) compute_run(p, range, run, shared, base);
}
