/* A GPU that takes every order and does nothing: one H200 for torch and triton on a machine
 * without one, so that they compile for it as they would there.
 *
 * One library is both of the libraries that they ask: `libcuda.so.1`, the driver, by its soname,
 * and, loaded before anything else (LD_PRELOAD), the part of the CUDA runtime that torch calls. Its
 * memory is the host's, zero and not touched until somebody reads it; copies copy; a kernel that is
 * launched changes nothing, nor does a product of the library. So what Inductor runs while it compiles gets operands, and each kernel
 * is made, loaded and launched through the code that a real build goes through.
 *
 * What is not here is left to the real runtime, which finds this driver and refuses: a call that a
 * later torch needs shows up as an error, not as a wrong result.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <string.h>
#include <sys/mman.h>

#undef cudaGetDeviceProperties
#define OK { return cudaSuccess; }
#define DONE { return CUDA_SUCCESS; }

static const size_t MEMORY = 150754820096;
static char thing; /* what every handle points to: never read */

static int attribute(int which) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrUnifiedAddressing: return 1;
    default: return 0;
  }
}

/* --- the runtime: devices ----------------------------------------------------------------- */

cudaError_t cudaDriverGetVersion(int *version) { *version = CUDA_VERSION; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) OK
cudaError_t cudaDeviceSynchronize(void) OK
cudaError_t cudaGetLastError(void) OK
cudaError_t cudaPeekAtLastError(void) OK

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
  *value = attribute(which);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H200");
  p->major = 9;
  p->totalGlobalMem = MEMORY;
  p->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  p->warpSize = attribute(cudaDevAttrWarpSize);
  p->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  p->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  p->regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock);
  p->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  p->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  p->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  return cudaSuccess;
}

/* --- the runtime: memory ------------------------------------------------------------------ */

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  *free = *total = MEMORY;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
  *pointer = mmap(0, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *pointer == MAP_FAILED ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaFree(void *pointer) OK /* its size is not known here; a process ends soon */

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return cudaMemcpy(to, from, bytes, kind);
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) OK
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) OK

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  return cudaMalloc(pointer, bytes);
}

cudaError_t cudaFreeHost(void *pointer) OK
cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) OK
cudaError_t cudaHostUnregister(void *pointer) OK

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *pointer) {
  memset(a, 0, sizeof *a);
  a->type = cudaMemoryTypeDevice;
  a->devicePointer = (void *)pointer;
  return cudaSuccess;
}

/* --- the runtime: streams, events, kernels ------------------------------------------------ */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
  *s = (cudaStream_t)&thing;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  return cudaStreamIsCapturing(s, status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) OK
cudaError_t cudaStreamSynchronize(cudaStream_t s) OK
cudaError_t cudaStreamQuery(cudaStream_t s) OK
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) OK

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
  *e = (cudaEvent_t)&thing;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) OK
cudaError_t cudaEventQuery(cudaEvent_t e) OK
cudaError_t cudaEventSynchronize(cudaEvent_t e) OK
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) OK
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) OK

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  *ms = 1;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute which, int value) OK

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f,
                                                                   int size, size_t shared,
                                                                   unsigned flags) {
  *blocks = 1;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared,
                             cudaStream_t s) OK
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **args) OK
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 grid, dim3 block, void **args, size_t shared,
                               cudaStream_t s) OK
cudaError_t __cudaGetKernel(cudaKernel_t *f, const void *entry) {
  *f = (cudaKernel_t)&thing;
  return cudaSuccess;
}

/* --- the driver --------------------------------------------------------------------------- */

static CUresult nothing(void) DONE

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void *)nothing;
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

CUresult cuInit(unsigned flags) DONE
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) { *device = 0; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "idle"; return CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  *value = attribute((int)which); /* the runtime's and the driver's numbers are the same */
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)&thing; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) DONE
CUresult cuCtxSetLimit(CUlimit limit, size_t value) DONE
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  return cuCtxGetCurrent(context);
}

CUresult cuModuleLoad(CUmodule *module, const char *file) {
  *module = (CUmodule)&thing;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) { return cuModuleLoad(module, ""); }

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options,
                            void **values) {
  return cuModuleLoad(module, "");
}

CUresult cuModuleUnload(CUmodule module) DONE

CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
  *f = (CUfunction)&thing;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction f) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute which, int value) DONE
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) DONE
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **args, void **extra) DONE
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream s, void **args,
                        void **extra) DONE

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer; /* the one that triton's launcher asks for */
  return CUDA_SUCCESS;
}

/* --- cuBLAS: handles, settings and products of the types that models have ------------------ */

#define CALL(name) int name() { return 0; }
#define MAKE(name) int name(void **made) { *made = &thing; return 0; }

MAKE(cublasCreate_v2)
CALL(cublasDestroy_v2)
CALL(cublasSetStream_v2)
CALL(cublasSetWorkspace_v2)
CALL(cublasSetMathMode)
CALL(cublasSetPointerMode_v2)
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
CALL(cublasGemmEx)
CALL(cublasGemmStridedBatchedEx)
CALL(cublasSgemm_v2)
CALL(cublasSgemmStridedBatched)
CALL(cublasSgemmEx)
MAKE(cublasLtMatmulDescCreate)
CALL(cublasLtMatmulDescDestroy)
CALL(cublasLtMatmulDescSetAttribute)
MAKE(cublasLtMatrixLayoutCreate)
CALL(cublasLtMatrixLayoutDestroy)
CALL(cublasLtMatrixLayoutSetAttribute)
MAKE(cublasLtMatmulPreferenceCreate)
CALL(cublasLtMatmulPreferenceDestroy)
CALL(cublasLtMatmulPreferenceSetAttribute)
CALL(cublasLtMatmul)

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *op, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, void *results, int *found) {
  *found = 1;
  return 0;
}
