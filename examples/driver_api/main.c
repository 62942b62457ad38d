/* Causal attention from C: loads what `codegen export h100_causal --shape ... --sm-count ...` wrote, by the driver API
 * alone, and compares sampled rows with double precision on the CPU.
 *
 *     cc -std=c11 -I FOLDER -I CUDA/include main.c -o attention -lcuda -lm && ./attention FOLDER
 *
 * Exit code: 0, the result is right; 1, it is not; 2, it could not be computed. */
#include "h100_causal.h" /* all numbers of the kernel, and of the launch for one shape */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef H100_CAUSAL_LAUNCH_GRID
#error "export the kernel with --shape and --sm-count"
#endif

enum {
  BATCH = H100_CAUSAL_SHAPE_BATCH,
  HEADS = H100_CAUSAL_SHAPE_HEADS,
  KV_HEADS = H100_CAUSAL_SHAPE_KV_HEADS,
  Q_LEN = H100_CAUSAL_SHAPE_Q_LEN,
  KV_LEN = H100_CAUSAL_SHAPE_KV_LEN,
  HEAD_DIM = H100_CAUSAL_kHeadDim,
  SAMPLES = 200
};
static const double OUT_TOLERANCE = 2e-3, LSE_TOLERANCE = 1e-3;

/* cuTensorMapEncodeTiled; cudaTypedefs.h, which is not in every package of headers, has the same. */
typedef CUresult (*EncodeTiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static void fail(const char *what, const char *why) {
  fprintf(stderr, "error: %s: %s\n", what, why);
  exit(2);
}

static void check(CUresult status, const char *what) {
  const char *name = "unknown status";
  if (status == CUDA_SUCCESS) return;
  cuGetErrorName(status, &name);
  fail(what, name);
}
#define CHECK(call) check((call), #call)

/* Bits of a number that fp16 represents as a normal one, or 0. */
static uint16_t half_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value == 0) return 0;
  return (uint16_t)((bits >> 16 & 0x8000) | (((bits >> 23 & 0xff) - 127 + 15) << 10) | (bits >> 13 & 0x3ff));
}

static double value_of(uint16_t bits) {
  int exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
  double size = exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
  if (exponent == 31) size = mantissa ? NAN : INFINITY;
  return bits & 0x8000 ? -size : size;
}

/* (batch, heads, length, HEAD_DIM), contiguous, of multiples of 1/64 from -1 to 1. */
static uint16_t *numbers(size_t heads, size_t length, uint32_t seed) {
  size_t count = BATCH * heads * length * HEAD_DIM;
  uint16_t *made = malloc(count * sizeof *made);
  if (made == NULL) fail("malloc", "no memory");
  for (size_t i = 0; i < count; i++) {
    seed = seed * 1664525u + 1013904223u;
    made[i] = half_of((float)((int)(seed >> 16) % 65) / 64 * (seed >> 31 ? -1 : 1));
  }
  return made;
}

static CUdeviceptr device_copy(const void *from, size_t bytes) {
  CUdeviceptr to;
  CHECK(cuMemAlloc(&to, bytes));
  CHECK(cuMemcpyHtoD(to, from, bytes));
  return to;
}

/* Encodes the tensor map of a contiguous (BATCH, heads, length, HEAD_DIM) tensor; NAME is the prefix of its macros. */
#define ENCODE(encode_tiled, NAME, to, address, heads, length)                                                      \
  do {                                                                                                              \
    CUtensorMap map;                                                                                                \
    const cuuint64_t dims[NAME##_RANK] = {HEAD_DIM, (length), (heads), BATCH}, row = HEAD_DIM * sizeof(uint16_t);   \
    const cuuint64_t strides[NAME##_RANK - 1] = {row, row * (length), row * (length) * (heads)}; /* bytes */        \
    const cuuint32_t box[NAME##_RANK] = NAME##_BOX_DIM, steps[NAME##_RANK] = NAME##_ELEMENT_STRIDES;                \
    CHECK(encode_tiled(&map, NAME##_DATA_TYPE, NAME##_RANK, (void *)(uintptr_t)(address), dims, strides, box,       \
                       steps, NAME##_INTERLEAVE, NAME##_SWIZZLE, NAME##_L2_PROMOTION, NAME##_OOB_FILL));            \
    memcpy((to).bytes, &map, sizeof(to).bytes);                                                                     \
  } while (0)

/* Query i of the reference sees the keys up to i + KV_LEN - Q_LEN: the last query sees all. Returns the LSE. */
static double reference(const uint16_t *q, const uint16_t *k, const uint16_t *v, int query, double out[HEAD_DIM]) {
  static double weight[KV_LEN];
  int seen = query + 1 + KV_LEN - Q_LEN;
  double largest = -INFINITY, sum = 0;
  for (int d = 0; d < HEAD_DIM; d++) out[d] = 0;
  for (int key = 0; key < seen; key++) {
    double dot = 0;
    for (int d = 0; d < HEAD_DIM; d++) dot += value_of(q[d]) * value_of(k[(size_t)key * HEAD_DIM + d]);
    weight[key] = dot / sqrt(HEAD_DIM);
    largest = fmax(largest, weight[key]);
  }
  for (int key = 0; key < seen; key++) sum += weight[key] = exp(weight[key] - largest);
  for (int key = 0; key < seen; key++)
    for (int d = 0; d < HEAD_DIM; d++) out[d] += weight[key] / sum * value_of(v[(size_t)key * HEAD_DIM + d]);
  return seen > 0 ? largest + log(sum) : -INFINITY;
}

/* The larger of two differences; one that is no number is larger than all. */
static double worse(double worst, double difference) { return difference <= worst ? worst : difference; }

static void check_device(CUdevice device) {
  int major, minor, sm_count;
  char why[160];
  CHECK(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
  CHECK(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
  CHECK(cuDeviceGetAttribute(&sm_count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
  if (major != H100_CAUSAL_COMPUTE_CAPABILITY_MAJOR || minor != H100_CAUSAL_COMPUTE_CAPABILITY_MINOR) {
    snprintf(why, sizeof why, "has compute capability %d.%d, the kernel is for %d.%d", major, minor,
             H100_CAUSAL_COMPUTE_CAPABILITY_MAJOR, H100_CAUSAL_COMPUTE_CAPABILITY_MINOR);
    fail("device 0", why);
  }
  if (sm_count != H100_CAUSAL_LAUNCH_SM_COUNT) {
    snprintf(why, sizeof why, "has %d multiprocessors, the launch is for %d: export with --sm-count %d", sm_count,
             H100_CAUSAL_LAUNCH_SM_COUNT, sm_count);
    fail("device 0", why);
  }
}

int main(int argc, char **argv) {
  CUdevice device;
  CUcontext context;
  CUmodule module;
  CUfunction function;
  CUdriverProcAddressQueryResult found;
  EncodeTiled encode_tiled;
  void *entry = NULL;
  char cubin[4096];
  if (argc != 2) fail("usage", "attention FOLDER, which `codegen export` wrote");
  if (snprintf(cubin, sizeof cubin, "%s/h100_causal.cubin", argv[1]) >= (int)sizeof cubin) fail(argv[1], "is too long");

  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  check_device(device);
  CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CHECK(cuCtxSetCurrent(context));
  check(cuModuleLoad(&module, cubin), cubin);
  CHECK(cuModuleGetFunction(&function, module, H100_CAUSAL_SYMBOL));
  CHECK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                           H100_CAUSAL_LAUNCH_DYNAMIC_SHARED_BYTES));
  CHECK(cuGetProcAddress("cuTensorMapEncodeTiled", &entry, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &found));
  if (entry == NULL) fail("cuTensorMapEncodeTiled", "is not in this driver, which is older than CUDA 12");
  memcpy(&encode_tiled, &entry, sizeof encode_tiled);

  /* Tensors. The output begins as NaN: what is not written is found out. */
  const size_t rows = (size_t)BATCH * HEADS * Q_LEN, keys = (size_t)BATCH * KV_HEADS * KV_LEN;
  const size_t out_bytes = rows * HEAD_DIM * sizeof(uint16_t), kv_bytes = keys * HEAD_DIM * sizeof(uint16_t);
  uint16_t *q = numbers(HEADS, Q_LEN, 1), *k = numbers(KV_HEADS, KV_LEN, 2), *v = numbers(KV_HEADS, KV_LEN, 3);
  uint16_t *out = malloc(out_bytes);
  float *lse = malloc(rows * sizeof *lse);
  if (out == NULL || lse == NULL) fail("malloc", "no memory");
  memset(out, 0xff, out_bytes);
  memset(lse, 0xff, rows * sizeof *lse);
  CUdeviceptr q_at = device_copy(q, out_bytes), k_at = device_copy(k, kv_bytes), v_at = device_copy(v, kv_bytes);
  CUdeviceptr out_at = device_copy(out, out_bytes), scheduler;

  struct h100_causal_params params;
  memset(&params, 0, sizeof params);
  ENCODE(encode_tiled, H100_CAUSAL_Q_MAP, params.q_map, q_at, HEADS, Q_LEN);
  ENCODE(encode_tiled, H100_CAUSAL_K_MAP, params.k_map, k_at, KV_HEADS, KV_LEN);
  ENCODE(encode_tiled, H100_CAUSAL_V_MAP, params.v_map, v_at, KV_HEADS, KV_LEN);
  ENCODE(encode_tiled, H100_CAUSAL_O_MAP, params.o_map, out_at, HEADS, Q_LEN);
  params.lse = device_copy(lse, rows * sizeof *lse);
  CHECK(cuMemAlloc(&scheduler, H100_CAUSAL_WORKSPACE_SCHEDULER_BYTES)); /* counters: 0 before the first launch */
  CHECK(cuMemsetD8(scheduler, 0, H100_CAUSAL_WORKSPACE_SCHEDULER_BYTES));
  params.scheduler = scheduler;
  H100_CAUSAL_SET_NUMBERS(&params);
  params.scale_log2 = (float)(1 / sqrt(HEAD_DIM) / log(2)); /* 1 / sqrt(HEAD_DIM) times log2(e) */

  void *arguments[] = {&params};
  for (int launch = 0; launch < 2; launch++) /* the second one finds the counters at 0, as the first one left them */
    CHECK(cuLaunchKernel(function, H100_CAUSAL_LAUNCH_GRID, 1, 1, H100_CAUSAL_LAUNCH_BLOCK, 1, 1,
                         H100_CAUSAL_LAUNCH_DYNAMIC_SHARED_BYTES, NULL, arguments, NULL));
  CHECK(cuCtxSynchronize());
  CHECK(cuMemcpyDtoH(out, out_at, out_bytes));
  CHECK(cuMemcpyDtoH(lse, params.lse, rows * sizeof *lse));

  double worst_out = 0, worst_lse = 0, expected[HEAD_DIM];
  for (size_t sample = 0; sample < SAMPLES; sample++) { /* the first row, the last one, and between them */
    size_t row = sample * (rows - 1) / (SAMPLES - 1), head = row / Q_LEN;
    size_t kv_head = head / HEADS * KV_HEADS + head % HEADS / (HEADS / KV_HEADS);
    const size_t at = kv_head * KV_LEN * HEAD_DIM;
    double sum = reference(q + row * HEAD_DIM, k + at, v + at, (int)(row % Q_LEN), expected);
    for (int d = 0; d < HEAD_DIM; d++)
      worst_out = worse(worst_out, fabs(value_of(out[row * HEAD_DIM + d]) - expected[d]));
    if (lse[row] != sum) worst_lse = worse(worst_lse, fabs(lse[row] - sum)); /* both may be -infinity */
  }
  int right = worst_out <= OUT_TOLERANCE && worst_lse <= LSE_TOLERANCE;
  printf("%s: %d rows, max difference of out %.3g (allowed %.3g), of lse %.3g (allowed %.3g)\n",
         right ? "ok" : "WRONG", SAMPLES, worst_out, OUT_TOLERANCE, worst_lse, LSE_TOLERANCE);
  return right ? 0 : 1;
}
