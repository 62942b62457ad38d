// Generated from specs/h100_paged_d64.yaml. Do not edit:
// change the spec or a template, then run
//     codegen render specs/h100_paged_d64.yaml
// spec: {"arch":"sm_90a","copy":"cp_async","dtype":"fp16","head_dim":64,"mma":"mma","op":"paged_attention","schedule":"multistage","stages":6,"tile":{"m":16,"n":64}}
// spec hash: 1e7359bdf61085dec334314d94acc2638f33aa18a181221399de01e62155beac
// seal: sha256 dcfa60587387c7e8864a8a9f96356ceccad8f8175b1fded675bf1cada6f81bc3

// Attention of a few queries over K and V in pages, by mma.sync: decoding. Keys of one request are split over thread
// blocks.
//
// The kernel is bound by reading K and V. A fixed grid divides all steps of a launch into equal ranges, one for each
// thread block, which finds its range from the lengths in device memory.
//
// Roles: the warps of a thread block take 16 keys of each step. Each warp has its own ring of kStages slots in shared
// memory, which cp.async fills kStages - 1 steps ahead, and its own softmax. No warp waits for another before a run
// ends.
//
// Symbols
//   request   a sequence of the batch: its queries, its pages, its number of keys
//   row       a query head of a token: heads of one KV head are adjacent, then come those of the next token
//   tile      kTileM rows of a request and a KV head
//   step      kTileN keys of a tile, 16 for each warp
//   run       the steps of a tile that one thread block computes, without interruption
//   part      the result of a run that is not the whole tile: the last thread block of the tile to finish adds the
//             parts, in the order of the keys
//   entry     an element of a list: 2^entry_shift keys that a query sees
//   lane      has rows r and r + 8 of a product (r = lane / 4), and columns 2 t and 2 t + 1 (t = lane % 4)

using int64 = long long;
using uint32 = unsigned int;

constexpr int kHeadDim = 64;  // elements per head
constexpr int kTileM = 16;  // rows per tile
constexpr int kTileN = 64;  // keys per step
constexpr int kWarps = 4;  // warps, with 16 keys of a step each
constexpr int kStages = 6;  // slots of a warp's ring
constexpr int kKvBytes = 2;  // bytes per element of K and V
constexpr int kLeastSteps = 4;  // steps of a thread block at least, if there are as many
constexpr int kPartSteps = 16;  // steps of a part at least, if most_parts is set

// Dynamic shared memory: 102448 bytes. Byte offsets:
constexpr int kQOffset = 0;  // 2048 bytes: rows of Q
constexpr int kRingOffset = 2048;  // 98304 bytes: elements of K and V; a ring per warp, and its sums at the end
constexpr int kKeysOffset = 100352;  // 1536 bytes: positions of the keys in the rings
constexpr int kRowsOffset = 101888;  // 512 bytes: maximum and weight of each row, by warp
constexpr int kScanOffset = 102400;  // 48 bytes: sums of steps

constexpr int kThreads = 32 * kWarps;
constexpr int kMmaRows = 16, kMmaColumns = 8, kMmaDepth = 16;  // of one product
constexpr int kMmas = kTileM / kMmaRows;
constexpr int kDepths = kHeadDim / kMmaDepth, kColumns = kHeadDim / kMmaColumns;  // products of QK and of PV
constexpr int kWarpKeys = 16;  // of a step
constexpr int kRowBytes = kHeadDim * kKvBytes, kRowChunks = kRowBytes / 16;  // of a key, or of a value
constexpr int kQRowBytes = kHeadDim * 2, kQRowChunks = kQRowBytes / 16;
constexpr int kHalfBytes = kWarpKeys * kRowBytes, kSlotBytes = 2 * kHalfBytes;  // K, then V
constexpr int kSumStride = kHeadDim + 8;  // floats of a row of a warp's sums: eight rows begin in different banks
constexpr int kPartFloats = kTileM * (kHeadDim + 2);  // of a part: sums, then maximum and weight of each row
constexpr uint32 kAllLanes = 0xFFFFFFFF;
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000);
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Launch: 128 threads per block, 102448 bytes of dynamic shared memory.
// Grid: as many thread blocks as run concurrently, for any lengths.
struct Params {
  const unsigned short* q;  // Q (tokens, heads, head_dim)
  int64 q_token_stride;  // token stride of Q, in elements
  int64 q_head_stride;  // head stride of Q, in elements
  const unsigned char* k;  // K (pages, tokens of a page, kv_heads, head_dim), in any order but for head_dim
  const unsigned char* v;  // V, as K and with the same strides
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
  float scale_log2;  // softmax scale times log2(e)
  float softcap;  // cap of the logits, 0 for none
  const float* sink;  // a logit of each query head that joins its sums (heads,), or null
  const float* k_scale;  // factor of K of each KV head, or null
  int k_scale_stride;  // its stride, 0 if all heads share it
  const float* v_scale;  // factor of V, likewise
  int v_scale_stride;  // its stride
  unsigned short* out;  // result (tokens, heads, head_dim)
  int64 out_token_stride;  // token stride of the result, in elements
  int64 out_head_stride;  // head stride of the result, in elements
  float* lse;  // log-sum-exp (heads, tokens), or null
  int most_parts;  // parts of a tile at most, if its own length alone divides it; otherwise 0
  float* partials;  // sums of parts
  int* counters;  // finished parts of a tile, 0 between launches
};

using Element = unsigned short;  // the bits of one fp16

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

// cvt.rn.f16x2.f32: converts two floats to a pair of fp16, `low` in the lower half (PTX ISA, "cvt")
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
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

// Steps of all tiles of a request.
__device__ __forceinline__ int64 steps_of(const Params& p, const Request& request) {
  return static_cast<int64>(request.tiles) * p.kv_heads * request.steps;
}

// Request of a token, by binary search; the last one that begins at or before it.
__device__ __forceinline__ int request_of_token(const Params& p, int token) {
  if (p.cu_seqlens_q == nullptr) return token / p.request_queries;
  int first = 0, count = p.batch;
  while (count > 1) {
    const int half = count / 2;
    const bool behind = __ldg(p.cu_seqlens_q + first + half) <= token;
    first = behind ? first + half : first;
    count = behind ? count - half : half;
  }
  return first;
}

// A tile of rows.
struct Tile {
  Request request;
  int index;  // of the request
  int kv_head;
  int first_row, rows;  // of the request
};

// The steps of one thread block, counted over all tiles of the launch.
struct Range {
  int64 total;  // of all thread blocks
  int blocks;  // thread blocks with steps
  int64 next, end;
  int request;  // that of `next`, or one before it
  int64 before;  // steps of all requests before that one
};

struct Run {
  Tile tile;
  int first, last;  // steps of the tile
  int part, parts;
  int64 first_slot, other_slots, slot_stride;  // place of the first part; of the second one; from part to part
  int64 counter;  // index of the counter of finished parts
};

__device__ __forceinline__ int64 range_begin(const Range& range, int block) {
  return range.total * block / range.blocks;
}

// Thread block that has a step.
__device__ __forceinline__ int64 owner(const Range& range, int64 step) {
  return ((step + 1) * range.blocks - 1) / range.total;
}

// Finds the range of this thread block; false if it has none. Lists give all tiles the same number of steps. Otherwise
// the threads add those of the requests.
__device__ __forceinline__ bool find_range(const Params& p, Range& range, unsigned char* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool listed = p.lists != nullptr;
  int64* const sums = reinterpret_cast<int64*>(shared + kScanOffset);
  int64 mine = 0, through = 0;  // steps of this thread's requests, and of those up to its last one
  const int share = (p.batch + kThreads - 1) / kThreads;
  const int first = min(p.batch, static_cast<int>(threadIdx.x) * share), last = min(p.batch, first + share);
  if (listed) {
    range.total = static_cast<int64>(p.total_q) * p.kv_heads * p.token_tiles * p.list_steps;
  } else {
    for (int i = first; i < last; ++i) mine += steps_of(p, request_of(p, i));
    through = mine;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int64 lower = __shfl_up_sync(kAllLanes, through, lanes);
      through += lane >= lanes ? lower : 0;
    }
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    range.total = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      through += i < warp ? sums[i] : 0;
      range.total += sums[i];
    }
  }
  const int64 most = (range.total + kLeastSteps - 1) / kLeastSteps;
  range.blocks = static_cast<int>(most < gridDim.x ? most : gridDim.x);
  if (blockIdx.x >= range.blocks) return false;
  range.next = range_begin(range, blockIdx.x);
  range.end = range_begin(range, blockIdx.x + 1);
  range.request = 0;
  range.before = 0;
  if (listed) return true;
  int64 before = through - mine;
  if (before <= range.next && range.next < through) {
    int request = first;
    for (int64 steps; before + (steps = steps_of(p, request_of(p, request))) <= range.next; ++request) before += steps;
    sums[kWarps] = before;
    sums[kWarps + 1] = request;
  }
  __syncthreads();
  range.before = sums[kWarps];
  range.request = static_cast<int>(sums[kWarps + 1]);
  return true;
}

// Tile of the step `range.next`. Returns the step within the tile, and its number among all tiles of any schedule.
__device__ __forceinline__ int find_tile(const Params& p, Range& range, Tile& tile, int64& number) {
  if (p.lists != nullptr) {
    number = range.next / p.list_steps;
    const int part = number % p.token_tiles;
    const int64 token_head = number / p.token_tiles;
    const int token = token_head / p.kv_heads;
    tile.kv_head = token_head % p.kv_heads;
    tile.index = request_of_token(p, token);
    tile.request = request_of(p, tile.index);
    const int place = token - tile.request.q_begin;
    const bool inside = 0 <= place && place < tile.request.q_len;
    tile.first_row = place * p.group + part * kTileM;
    tile.rows = inside ? min(kTileM, p.group - part * kTileM) : 0;
    tile.request.steps = p.list_steps;
    return range.next % p.list_steps;
  }
  tile.request = request_of(p, range.request);
  for (int64 steps; range.before + (steps = steps_of(p, tile.request)) <= range.next;) {
    range.before += steps;
    tile.request = request_of(p, ++range.request);
  }
  const int64 within = range.next - range.before, index = within / tile.request.steps;
  const int place = index % tile.request.tiles;
  tile.index = range.request;
  tile.kv_head = index / tile.request.tiles;
  tile.first_row = place * kTileM;
  tile.rows = min(kTileM, tile.request.q_len * p.group - tile.first_row);
  const int64 first_tile = static_cast<int64>(tile.request.q_begin) * p.group / kTileM + tile.index;
  number = (first_tile + place) * p.kv_heads + tile.kv_head;
  return within % tile.request.steps;
}

// Moves on to the next run of a range; false at its end. With `most_parts`, tiles are divided by their own lengths
// alone, and a thread block computes the parts that begin in its range.
__device__ __forceinline__ bool next_run(const Params& p, Range& range, Run& run) {
  while (range.next < range.end) {
    int64 number;
    const int step = find_tile(p, range, run.tile, number), steps = run.tile.request.steps;
    if (p.most_parts > 0) {
      const int length = max(kPartSteps, (steps + p.most_parts - 1) / p.most_parts), behind = step % length;
      run.first = step;
      run.last = min(steps, step - behind + length);
      range.next += run.last - run.first;
      if (behind > 0) continue;
      run.part = step / length;
      run.parts = (steps + length - 1) / length;
      run.first_slot = number * p.most_parts;
      run.other_slots = run.first_slot + 1;
      run.slot_stride = 1;
      run.counter = number;
      return true;
    }
    const int64 tile_begin = range.next - step, first_owner = owner(range, tile_begin);
    const int64 left = range.end - range.next;
    run.first = step;
    run.last = left < steps - step ? step + static_cast<int>(left) : steps;
    range.next += run.last - run.first;
    run.part = static_cast<int>(blockIdx.x - first_owner);
    run.parts = static_cast<int>(owner(range, tile_begin + steps - 1) - first_owner) + 1;
    run.first_slot = 2 * first_owner + (tile_begin > range_begin(range, static_cast<int>(first_owner)) ? 1 : 0);
    run.other_slots = 2 * (first_owner + 1);
    run.slot_stride = 2;
    run.counter = first_owner;
    return true;
  }
  return false;
}

// Finds the keys of the steps that a warp loads next; each lane those of key lane % 16. Entries of lists and pages are
// loaded a step before they are used, which hides their latency.
struct Cursor {
  const Tile& tile;
  int step, last, warp;
  const int* list;  // of the tile
  int entries;
  int position, page;  // of the key of `step`; a position of -1 is no key
  int entry;  // of the key of `step` + 1

  __device__ __forceinline__ Cursor(const Params& p, const Run& run, int warp)
      : tile(run.tile), step(run.first), last(run.last), warp(warp), list(nullptr), entries(0) {
    if (p.lists != nullptr) {
      const int64 token = tile.request.q_begin + tile.first_row / p.group;
      const int64 head = p.list_heads == 1 ? 0 : tile.kv_head;
      list = p.lists + head * p.list_head_stride + token * p.list_token_stride;
      const int64 place = head * p.count_head_stride + token * p.count_token_stride;
      entries = tile.rows == 0 ? 0 : p.counts == nullptr ? p.list_length : min(p.list_length, __ldg(p.counts + place));
    }
    entry = load_entry(p, step);
    position = position_of(p, step, entry);
    page = load_page(p);
    entry = load_entry(p, step + 1);
  }

  // Number of the lane's key among those of a list.
  __device__ __forceinline__ int index(int step) const {
    return step * kTileN + warp * kWarpKeys + static_cast<int>(threadIdx.x % kWarpKeys);
  }
  __device__ __forceinline__ int load_entry(const Params& p, int step) const {
    const int i = index(step) >> p.entry_shift;
    return step < last && i < entries ? __ldg(list + i) : -1;
  }
  __device__ __forceinline__ int position_of(const Params& p, int step, int entry) const {
    const Request& request = tile.request;
    int position;
    if (p.lists != nullptr) {
      if (entry < 0 || entry > request.kv_len >> p.entry_shift) return -1;
      position = entry << p.entry_shift | (index(step) & (1 << p.entry_shift) - 1);
    } else {
      const bool of_sink = step < request.sink_steps;
      position = index(of_sink ? step : step - request.sink_steps + request.window_step);
    }
    return step < last && position < request.kv_len ? position : -1;
  }
  __device__ __forceinline__ int load_page(const Params& p) const {
    if (position < 0 || p.block_table == nullptr) return tile.index;
    return __ldg(p.block_table + tile.index * p.table_stride + (position >> p.page_shift));
  }
  // The 16 bytes of K, and of V, at which the lane's key begins, or kNoKey.
  __device__ __forceinline__ uint32 chunk(const Params& p) const {
    if (position < 0 || static_cast<uint32>(page) >= static_cast<uint32>(p.pages)) return kNoKey;
    const uint32 token = position & p.page_mask;
    return page * p.page_chunks + token * p.token_chunks + tile.kv_head * p.head_chunks;
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

// Address of a row of a tile in a (tokens, heads, head_dim) tensor, in elements.
__device__ __forceinline__ int64 row_place(const Params& p, const Tile& tile, int row, int64 token_stride,
    int64 head_stride) {
  const int of_request = tile.first_row + row;
  const int token = of_request / p.group, head = of_request % p.group;
  return (tile.request.q_begin + token) * token_stride + (tile.kv_head * p.group + head) * head_stride;
}

// Copies the rows of Q to shared memory. Rows behind the last one are 0.
__device__ __forceinline__ void load_q(const Params& p, const Tile& tile, unsigned char* to) {
  for (int i = threadIdx.x; i < kTileM * kQRowChunks; i += kThreads) {
    const int row = i / kQRowChunks, chunk = i % kQRowChunks;
    uint4 x = {};
    if (row < tile.rows) {
      const Element* from = p.q + row_place(p, tile, row, p.q_token_stride, p.q_head_stride) + chunk * 8;
      x = __ldg(reinterpret_cast<const uint4*>(from));
    }
    *reinterpret_cast<uint4*>(to + swizzled<kQRowChunks>(row, chunk)) = x;
  }
}

// Copies the keys and values of the cursor's step to the next slot of a warp's ring, as one group, and their positions.
// Values without a key are 0.
__device__ __forceinline__ void load_step(const Params& p, Cursor& cursor, uint32 ring, int* ring_keys, int& slot) {
  const int lane = threadIdx.x % 32;
  if (cursor.step < cursor.last) {
    const uint32 mine = cursor.chunk(p), to = ring + slot * kSlotBytes;
    if (lane < kWarpKeys) ring_keys[slot * kWarpKeys + lane] = mine == Cursor::kNoKey ? -1 : cursor.position;
#pragma unroll
    for (int i = 0; i < kHalfBytes / 16 / 32; ++i) {
      const int key = (lane + 32 * i) / kRowChunks, chunk = (lane + 32 * i) % kRowChunks;
      const uint32 begin = __shfl_sync(kAllLanes, mine, key);
      const bool valid = begin != Cursor::kNoKey;
      const int64 from = valid ? (static_cast<int64>(begin) + chunk) * 16 : 0;
      const uint32 place = to + swizzled<kRowChunks>(key, chunk);
      cp_async_16(place, p.k + from, valid);
      cp_async_16(place + kHalfBytes, p.v + from, valid);
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
      const int token = (tile.first_row + row) / p.group;
      const int position = tile.request.kv_len - tile.request.q_len + token;
      keys.first[m][half] = position - p.window_left;
      keys.last[m][half] = row < tile.rows ? position + p.window_right : -1;
    }
  }
  keys.scale = p.scale_log2 * (p.k_scale == nullptr ? 1.0f : __ldg(p.k_scale + tile.kv_head * p.k_scale_stride));
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

// A maximum that can be subtracted, where no key is seen too.
__device__ __forceinline__ float finite(float max) { return max == kMinusInfinity ? 0.0f : max; }

// Turns the logits of 16 keys into weights, and scales the sums to the new maximum.
__device__ __forceinline__ void softmax(const Params& p, Sums& sums, const RowKeys& rows, int m, float (&s)[2][4],
    const int* keys) {
  const int column = 2 * static_cast<int>(threadIdx.x % 4);
  float top[2] = {kMinusInfinity, kMinusInfinity};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int2 pair = *reinterpret_cast<const int2*>(keys + n * kMmaColumns + column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x = s[n][i] * rows.scale;
      if (p.softcap > 0.0f) x = p.softcap * kLog2E * tanhf(x / (p.softcap * kLog2E));
      x = rows.sees(p, m, i / 2, i % 2 ? pair.y : pair.x) ? x : kMinusInfinity;
      s[n][i] = x;
      top[i / 2] = fmaxf(top[i / 2], x);
    }
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
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[n][i] = ex2(s[n][i] - finite(sums.max[m][i / 2]));
      sums.weight[m][i / 2] += s[n][i];
    }
  }
}

// Adds 16 keys to the sums of a warp.
__device__ __forceinline__ void compute_step(const Params& p, Sums& sums, const RowKeys& rows, uint32 q, uint32 k,
    const int* keys) {
  const int lane = threadIdx.x % 32;
  const uint32 v = k + kHalfBytes;
  float s[kMmas][2][4] = {};
  // Matrices of K: the two halves of the depth of keys 0 to 7, then of keys 8 to 15.
#pragma unroll
  for (int depth = 0; depth < kDepths; ++depth) {
    uint32 b[4];
    ldmatrix_x4(b, k + swizzled<kRowChunks>(lane / 16 * 8 + lane % 8, 2 * depth + lane / 8 % 2));
#pragma unroll
    for (int m = 0; m < kMmas; ++m) {
      uint32 a[4];
      ldmatrix_x4(a, q + swizzled<kQRowChunks>(m * kMmaRows + lane % 16, 2 * depth + lane / 16));
      mma_m16n8k16(s[m][0], a, b[0], b[1]);
      mma_m16n8k16(s[m][1], a, b[2], b[3]);
    }
  }
  uint32 weights[kMmas][4];
#pragma unroll
  for (int m = 0; m < kMmas; ++m) {
    softmax(p, sums, rows, m, s[m], keys);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      weights[m][2 * n] = pack(s[m][n][0], s[m][n][1]);
      weights[m][2 * n + 1] = pack(s[m][n][2], s[m][n][3]);
    }
  }
  // Matrices of V: keys 0 to 7 and 8 to 15 of 8 columns, then of the next 8.
#pragma unroll
  for (int j = 0; j < kColumns; j += 2) {
    uint32 b[4];
    ldmatrix_x4_trans(b, v + swizzled<kRowChunks>(lane % 16, j + lane / 16));
#pragma unroll
    for (int m = 0; m < kMmas; ++m) {
      mma_m16n8k16(sums.o[m][j], weights[m], b[0], b[1]);
      mma_m16n8k16(sums.o[m][j + 1], weights[m], b[2], b[3]);
    }
  }
}

// Four columns of a row: their sums, with the maximum and the weight of the row.
struct Four {
  float4 o;
  float max, weight;
};

__device__ __forceinline__ void scale(float4& x, float factor) {
  x.x *= factor, x.y *= factor, x.z *= factor, x.w *= factor;
}

// Adds the sums of other keys.
__device__ __forceinline__ void add(Four& to, float4 o, float max, float weight) {
  const float next = fmaxf(to.max, max), shift = finite(next);
  const float mine = ex2(to.max - shift), others = ex2(max - shift);
  scale(to.o, mine);
  scale(o, others);
  to.o.x += o.x, to.o.y += o.y, to.o.z += o.z, to.o.w += o.w;
  to.weight = to.weight * mine + weight * others;
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
        float* const to = o + row * kSumStride + j * kMmaColumns + 2 * (lane % 4);
        *reinterpret_cast<float2*>(to) = {x[0], x[1]};
        *reinterpret_cast<float2*>(to + kMmaColumns) = {y[0], y[1]};
      }
    }
  }
}

// Four columns of a row, of all warps.
__device__ __forceinline__ Four of_warps(const unsigned char* shared, int row, int column) {
  Four four = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), kMinusInfinity, 0.0f};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const float* o = reinterpret_cast<const float*>(shared + kRingOffset + warp * kStages * kSlotBytes);
    const float2 of_row = reinterpret_cast<const float2*>(shared + kRowsOffset)[warp * kTileM + row];
    add(four, *reinterpret_cast<const float4*>(o + row * kSumStride + column), of_row.x, of_row.y);
  }
  return four;
}

__device__ __forceinline__ float* part_place(const Params& p, const Run& run, int part) {
  const int64 slot = part == 0 ? run.first_slot : run.other_slots + (part - 1) * run.slot_stride;
  return p.partials + slot * kPartFloats;
}

// Four columns of a row, of all parts, in the order of the keys.
__device__ __forceinline__ Four of_parts(const Params& p, const Run& run, int row, int column) {
  Four four = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), kMinusInfinity, 0.0f};
#pragma unroll 4
  for (int part = 0; part < run.parts; ++part) {
    const float* from = part_place(p, run, part);
    const float2 of_row = __ldcg(reinterpret_cast<const float2*>(from + kTileM * kHeadDim) + row);
    add(four, __ldcg(reinterpret_cast<const float4*>(from + row * kHeadDim + column)), of_row.x, of_row.y);
  }
  return four;
}

// Stores four columns of a row of the result.
__device__ __forceinline__ void store_result(const Params& p, const Tile& tile, Four four, int row, int column) {
  const int head = tile.kv_head * p.group + (tile.first_row + row) % p.group;
  if (p.sink != nullptr) add(four, make_float4(0.0f, 0.0f, 0.0f, 0.0f), __ldg(p.sink + head) * kLog2E, 1.0f);
  const float v_scale = p.v_scale == nullptr ? 1.0f : __ldg(p.v_scale + tile.kv_head * p.v_scale_stride);
  scale(four.o, four.weight > 0.0f ? v_scale / four.weight : 0.0f);
  Element* const to = p.out + row_place(p, tile, row, p.out_token_stride, p.out_head_stride) + column;
  *reinterpret_cast<uint2*>(to) = {pack(four.o.x, four.o.y), pack(four.o.z, four.o.w)};
  if (p.lse != nullptr && column == 0) {
    const float lse = four.weight > 0.0f ? (four.max + lg2(four.weight)) * kLn2 : kMinusInfinity;
    p.lse[row_place(p, tile, row, 1, p.total_q)] = lse;
  }
}

// Whether this is the last thread block of a tile to store its part. The counter is 0 again afterwards.
__device__ __forceinline__ bool is_last_part(const Params& p, const Run& run, unsigned char* shared) {
  int* const flag = reinterpret_cast<int*>(shared + kScanOffset);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool last = atomicAdd(p.counters + run.counter, 1) == run.parts - 1;
    if (last) p.counters[run.counter] = 0;
    *flag = last;
  }
  __syncthreads();
  const bool last = *flag;
  __threadfence();
  return last;
}

// Adds the sums of all warps. Stores the result, or a part of it; then the result of all parts if they are there.
__device__ __forceinline__ void finish_run(const Params& p, const Run& run, const Sums& sums, unsigned char* shared) {
  constexpr int kRowFours = kHeadDim / 4;
  store_sums(sums, shared);
  __syncthreads();
  const int fours = run.tile.rows * kRowFours;
  for (int i = threadIdx.x; i < fours; i += kThreads) {
    const int row = i / kRowFours, column = i % kRowFours * 4;
    const Four four = of_warps(shared, row, column);
    if (run.parts == 1) {
      store_result(p, run.tile, four, row, column);
      continue;
    }
    float* const part = part_place(p, run, run.part);
    __stcg(reinterpret_cast<float4*>(part + row * kHeadDim + column), four.o);
    if (column == 0) {
      __stcg(reinterpret_cast<float2*>(part + kTileM * kHeadDim) + row, make_float2(four.max, four.weight));
    }
  }
  if (run.parts == 1 || !is_last_part(p, run, shared)) return;
  for (int i = threadIdx.x; i < fours; i += kThreads) {
    const int row = i / kRowFours, column = i % kRowFours * 4;
    store_result(p, run.tile, of_parts(p, run, row, column), row, column);
  }
}

// Computes a run, and the result of its tile if it is the last part.
__device__ __forceinline__ void compute_run(const Params& p, const Run& run, unsigned char* shared, uint32 base) {
  const int warp = threadIdx.x / 32;
  __syncthreads();  // all threads have read the sums of the previous run
  load_q(p, run.tile, shared + kQOffset);
  __syncthreads();

  Sums sums;
  clear(sums);
  const RowKeys rows = row_keys(p, run.tile);
  const uint32 ring = base + kRingOffset + warp * kStages * kSlotBytes;
  int* const ring_keys = reinterpret_cast<int*>(shared + kKeysOffset) + warp * kStages * kWarpKeys;
  Cursor cursor(p, run, warp);
  int filled = 0;  // next slot to fill, and next slot to read
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load_step(p, cursor, ring, ring_keys, filled);
  int slot = 0;
#pragma unroll 1
  for (int step = run.first; step < run.last; ++step) {
    __syncwarp();  // all lanes have read the slot that is filled next
    load_step(p, cursor, ring, ring_keys, filled);
    cp_async_wait<kStages - 1>();
    __syncwarp();
    compute_step(p, sums, rows, base + kQOffset, ring + slot * kSlotBytes, ring_keys + slot * kWarpKeys);
    slot = slot + 1 == kStages ? 0 : slot + 1;
  }
  cp_async_wait<0>();
  __syncwarp();
  finish_run(p, run, sums, shared);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) h100_paged_d64(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 base = static_cast<uint32>(__cvta_generic_to_shared(shared));
  Range range;
  if (!find_range(p, range, shared)) return;
  Run run;
  while (next_run(p, range, run)) compute_run(p, run, shared, base);
}
