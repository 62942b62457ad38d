/* Stands for the driver where there is none: device memory is the host's, and what a launch was given goes to the file
 * that FAKE_LAUNCHES names, one line for each call that matters. A launch computes nothing: with FAKE_MEMORY it takes
 * what the i-th allocation then holds from the file i of that folder, if there is one, and else writes it there. */
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FILE *told(void) {
  static FILE *file;
  if (file == NULL) file = fopen(getenv("FAKE_LAUNCHES"), "w");
  return file;
}

static struct {
  void *place;
  size_t bytes;
} allocations[64];
static int allocated;

static void exchange_memory(const char *folder) {
  for (int i = 0; i < allocated; i++) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", folder, i);
    FILE *file = fopen(path, "rb");
    int is_there = file != NULL;
    if (!is_there) file = fopen(path, "wb");
    size_t done = is_there ? fread(allocations[i].place, 1, allocations[i].bytes, file)
                           : fwrite(allocations[i].place, 1, allocations[i].bytes, file);
    if (done != allocations[i].bytes) abort();
    fclose(file);
  }
}

static int number(const char *name) { return atoi(getenv(name)); }

CUresult cuInit(unsigned int flags) { return (void)flags, CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult status, const char **name) { return (void)status, *name = "FAKE_ERROR", CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  (void)device;
  if (attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) *value = number("FAKE_SM_COUNT");
  if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) *value = number("FAKE_MAJOR");
  if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  return (void)device, *context = NULL, CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return (void)context, CUDA_SUCCESS; }
CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }

CUresult cuModuleLoad(CUmodule *module, const char *path) {
  FILE *file = fopen(path, "rb");
  if (file == NULL) return CUDA_ERROR_FILE_NOT_FOUND;
  fclose(file);
  return *module = NULL, CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *symbol) {
  (void)module;
  fprintf(told(), "function %s\n", symbol);
  return *function = NULL, CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  (void)function;
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) fprintf(told(), "shared %d\n", value);
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) {
  void *made = aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (allocated == sizeof allocations / sizeof *allocations) return CUDA_ERROR_OUT_OF_MEMORY;
  allocations[allocated].place = made;
  allocations[allocated++].bytes = bytes;
  fprintf(told(), "alloc %llu %zu\n", (unsigned long long)(uintptr_t)made, bytes);
  return *address = (CUdeviceptr)(uintptr_t)made, made == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
  return memcpy((void *)(uintptr_t)to, from, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
  return memcpy(to, (const void *)(uintptr_t)from, bytes), CUDA_SUCCESS;
}
CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t bytes) {
  return memset((void *)(uintptr_t)to, value, bytes), CUDA_SUCCESS;
}

/* Leaves the address in the tensor map, and tells the other arguments. */
static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                       const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                       const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  memset(map, 0, sizeof *map);
  memcpy(map, &address, sizeof address);
  fprintf(told(), "encode %llu %d %u", (unsigned long long)(uintptr_t)address, (int)type, rank);
  for (cuuint32_t i = 0; i < rank; i++) fprintf(told(), " %llu", (unsigned long long)dims[i]);
  for (cuuint32_t i = 0; i + 1 < rank; i++) fprintf(told(), " %llu", (unsigned long long)strides[i]);
  for (cuuint32_t i = 0; i < rank; i++) fprintf(told(), " %u", box[i]);
  for (cuuint32_t i = 0; i < rank; i++) fprintf(told(), " %u", steps[i]);
  fprintf(told(), " %d %d %d %d\n", (int)interleave, (int)swizzle, (int)promotion, (int)fill);
  return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *symbol, void **entry, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *found) {
  CUresult (*function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                       const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) = encode;
  (void)version, (void)flags, (void)found;
  if (strcmp(symbol, "cuTensorMapEncodeTiled") != 0) return CUDA_ERROR_NOT_FOUND;
  return memcpy(entry, &function, sizeof function), CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                        CUstream stream, void **arguments, void **extra) {
  const unsigned char *bytes = arguments[0];
  (void)function, (void)stream, (void)extra;
  fprintf(told(), "launch %u %u %u %u %u %u %u ", grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes);
  for (int i = 0; i < number("FAKE_PARAMS_BYTES"); i++) fprintf(told(), "%02x", bytes[i]);
  fprintf(told(), "\n");
  if (getenv("FAKE_MEMORY") != NULL) exchange_memory(getenv("FAKE_MEMORY"));
  return fflush(told()), CUDA_SUCCESS;
}
