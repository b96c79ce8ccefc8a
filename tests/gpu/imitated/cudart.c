/* libcudart, preloaded over torch's own: GPUs whose memory is the host's, streams that are always done, and kernels
 * that are not run. Results come from `computing.py`, which computes on the host what kernels would.
 *
 * What is kept of the real one: which calls wait for the GPU, which fail and how, what an error leaves behind.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#include "cuda_runtime_api.h"
#include "machine.h"

/* ---------------------------------------------------------------------------------------------------- the process */

static long waits, launches; /* of the host; of kernels, which do nothing here */
static __thread int current;
static cudaError_t sticky[MAX_GPUS]; /* ends all use of this GPU in this process */
static cudaError_t asserted[MAX_GPUS]; /* by a kernel; sticky as soon as the host waits */
static char assertion[512];
static __thread cudaError_t last;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

long imitated_waits(void) { return waits; }
long imitated_kernels(void) { return launches; }
int imitated_is_lost(int device) { return sticky[device]; }

/* As if a kernel that was launched on the current GPU had met this: the host hears of it when it waits next. */
void imitated_error(int error, const char *text) {
    asserted[current] = error;
    snprintf(assertion, sizeof assertion, "%s", text);
}

static cudaError_t result(cudaError_t error) {
    if (sticky[current]) error = sticky[current];
    if (error) last = error;
    return error;
}

static int (*driver_gpu)(int);
static int (*driver_count)(int *);

/* The driver is initialised, by this process and not by one that it was forked from. */
static cudaError_t start(void) {
    static int (*initialise)(unsigned);
    if (!initialise) {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        if (!driver) return result(cudaErrorInsufficientDriver);
        driver_gpu = (int (*)(int))dlsym(driver, "imitated_gpu");
        driver_count = (int (*)(int *))dlsym(driver, "cuDeviceGetCount");
        initialise = (int (*)(unsigned))dlsym(driver, "cuInit");
    }
    return initialise(0);
}

/* What nearly each call begins with: after a sticky error it ends with that. */
static cudaError_t enter(void) { return result(start()); }

/* ---------------------------------------------------------------------------------------------------------- graphs */

/* What a graph does, one after the other: copies, and operations of `computing.py` by their number. */
struct node {
    void *to;
    const void *from; /* NULL: a byte is written */
    size_t size; /* 0: an operation */
    int value; /* of the byte, or the operation's number */
    struct node *next;
};
struct CUgraph_st { struct node *first, **end; };
struct CUgraphExec_st { struct CUgraph_st *graph; };
struct CUstream_st { int number; };

static struct CUgraph_st *recording;
static cudaStream_t recorded_stream;
static int invalidated;
static void (*replay)(int);

/* By this an operation of a graph is computed when the graph is launched. */
void imitated_replays_by(void (*function)(int)) { replay = function; }
static int is_recorded(cudaStream_t stream) { return recording && stream == recorded_stream; }
int imitated_is_recording(cudaStream_t stream) { return is_recorded(stream); }

static void record(struct node node) {
    struct node *copy = malloc(sizeof node);
    *copy = node;
    copy->next = NULL;
    *recording->end = copy;
    recording->end = &copy->next;
}

void imitated_record(int operation) { record((struct node){.value = operation}); }

static void perform(const struct node *node) {
    if (node->size == 0) {
        if (replay) replay(node->value);
    } else if (node->from) {
        memmove(node->to, node->from, node->size);
    } else {
        memset(node->to, node->value, node->size);
    }
}

/* Copies and fillings are done at once, or kept for later where a graph of their stream is recorded. */
static cudaError_t do_or_record(struct node node, cudaStream_t stream) {
    cudaError_t error = enter();
    if (error || node.size == 0) return error;
    if (is_recorded(stream)) record(node);
    else perform(&node);
    return error;
}

/* The host waits for the GPU, which is not allowed for what is recorded meanwhile. */
static cudaError_t wait_for_gpu(int recorded) {
    cudaError_t error = enter();
    if (error) return error;
    if (recorded) {
        invalidated = 1;
        return result(cudaErrorStreamCaptureUnsupported);
    }
    __sync_add_and_fetch(&waits, 1);
    if (asserted[current]) {
        sticky[current] = asserted[current];
        fprintf(stderr, "%s\n", assertion);
    }
    return result(cudaSuccess);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    cudaError_t error = enter();
    if (error) return error;
    if (recording) return result(cudaErrorIllegalState);
    recording = calloc(1, sizeof *recording);
    recording->end = &recording->first;
    recorded_stream = stream;
    invalidated = 0;
    return error;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = invalidated ? NULL : recording;
    recording = NULL;
    return result(invalidated ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = is_recorded(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return enter();
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    if (id) *id = 1;
    if (graph) *graph = recording;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return enter(); }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    *exec = malloc(sizeof **exec);
    (*exec)->graph = graph;
    return enter();
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    cudaError_t error = enter();
    if (error) return error;
    for (struct node *node = exec->graph->first; node; node = node->next) perform(node);
    return error;
}
/* Nodes are kept: an executable graph outlives the graph it was made of. */
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return enter(); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return free(exec), enter(); }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    size_t found = 0;
    for (struct node *node = graph->first; node; node = node->next, found++)
        if (nodes && found < *count) nodes[found] = (cudaGraphNode_t)node;
    *count = found;
    return enter();
}

/* --------------------------------------------------------------------------------------------------------- devices */

static int number_of_devices(void) {
    int count = 0;
    if (driver_count) driver_count(&count);
    return count;
}

/* Makes this process' context on the current GPU, if there is none yet. */
static cudaError_t make_context(void) {
    unsigned long long *used = &own_row()->used[driver_gpu(current)];
    if (*used) return cudaSuccess;
    if (setting("IMITATED_EXCLUSIVE", 0) && gpu_used(driver_gpu(current))) return result(cudaErrorDevicesUnavailable);
    if (gpu_used(driver_gpu(current)) + CONTEXT_BYTES > gpu_memory()) return result(cudaErrorMemoryAllocation);
    *used = CONTEXT_BYTES;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
    cudaError_t error = last = start();
    *count = error ? 0 : number_of_devices();
    return error;
}
/* Which device it is can be asked after a sticky error, too. */
cudaError_t cudaGetDevice(int *device) { return *device = current, last = start(); }
cudaError_t cudaSetDevice(int device) {
    cudaError_t error = last = start();
    if (error || device == current) return error ? error : make_context();
    if (device < 0 || device >= number_of_devices()) return result(cudaErrorInvalidDevice);
    current = device;
    return make_context();
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    cudaError_t error = start();
    if (error) return error;
    if (device < 0 || device >= number_of_devices()) return result(cudaErrorInvalidDevice);
    int gpu = driver_gpu(device);
    memset(found, 0, sizeof *found);
    gpu_name(gpu, found->name, sizeof found->name);
    found->uuid.bytes[3] = gpu + 1;
    found->pciBusID = gpu + 1;
    found->major = gpu_capability(gpu) / 10;
    found->minor = gpu_capability(gpu) % 10;
    found->totalGlobalMem = gpu_memory();
    found->multiProcessorCount = 132; /* this and what follows: as an H100 has it */
    found->warpSize = 32;
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->maxThreadsPerMultiProcessor = 2048;
    found->sharedMemPerBlock = 49152;
    found->sharedMemPerBlockOptin = 232448;
    found->sharedMemPerMultiprocessor = 233472;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->l2CacheSize = 50 * MIB;
    return error;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp of;
    cudaError_t error = cudaGetDeviceProperties(&of, device);
    if (error) return error;
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = of.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = of.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = of.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = of.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = of.sharedMemPerBlockOptin; break;
    case cudaDevAttrWarpSize: *value = of.warpSize; break;
    default: *value = 1;
    }
    return error;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    cudaError_t error = enter();
    return error ? error : (snprintf(text, size, "0000:%02x:00.0", driver_gpu(device) + 1), error);
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, enter(); }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return result(cudaErrorPeerAccessUnsupported); }
cudaError_t cudaDeviceSynchronize(void) { return wait_for_gpu(recording != NULL); }
cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaProfilerStart(void) { return enter(); }
cudaError_t cudaProfilerStop(void) { return enter(); }

/* ---------------------------------------------------------------------------------------------------------- memory */

struct block {
    char *begin;
    size_t size;
    int gpu; /* PINNED: of the host */
    struct block *next;
};
enum { PINNED = -1, REGISTERED = -2 };
static struct block *blocks;

/* The block that holds an address. With the mutex held. */
static struct block **find(const void *address) {
    struct block **at = &blocks;
    while (*at && !((char *)address >= (*at)->begin && (char *)address < (*at)->begin + (*at)->size)) at = &(*at)->next;
    return at;
}

static void add(void *begin, size_t size, int gpu) {
    struct block *block = malloc(sizeof *block);
    pthread_mutex_lock(&mutex);
    *block = (struct block){begin, size, gpu, blocks};
    blocks = block;
    pthread_mutex_unlock(&mutex);
}

static int take_out(void *begin, struct block *found) {
    pthread_mutex_lock(&mutex);
    struct block **at = find(begin), *block = *at;
    if (block) {
        *found = *block;
        *at = block->next;
        free(block);
    }
    pthread_mutex_unlock(&mutex);
    return block != NULL;
}

static void *pages(size_t size) {
    void *begin = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return begin == MAP_FAILED ? NULL : begin;
}

cudaError_t cudaMalloc(void **begin, size_t size) {
    cudaError_t error = enter();
    if (error || (error = make_context())) return error;
    int gpu = driver_gpu(current);
    pthread_mutex_lock(&mutex);
    int fits = gpu_used(gpu) + size <= gpu_memory();
    if (fits) __sync_add_and_fetch(&own_row()->used[gpu], size);
    pthread_mutex_unlock(&mutex);
    if (!fits || !(*begin = pages(size))) return result(cudaErrorMemoryAllocation);
    add(*begin, size, gpu);
    return error;
}
cudaError_t cudaFree(void *begin) {
    cudaError_t error = begin ? wait_for_gpu(recording != NULL) : enter();
    struct block block;
    if (!begin || !take_out(begin, &block)) return error;
    __sync_sub_and_fetch(&own_row()->used[block.gpu], block.size);
    munmap(block.begin, block.size);
    return error;
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    cudaError_t error = enter();
    if (error || (error = make_context())) return error;
    *total = gpu_memory();
    *available = *total - gpu_used(driver_gpu(current));
    return error;
}
cudaError_t cudaHostAlloc(void **begin, size_t size, unsigned flags) {
    cudaError_t error = enter();
    if (error) return error;
    if (!(*begin = pages(size))) return result(cudaErrorMemoryAllocation);
    add(*begin, size, PINNED);
    return error;
}
cudaError_t cudaFreeHost(void *begin) {
    struct block block;
    if (take_out(begin, &block)) munmap(block.begin, block.size);
    return enter();
}
cudaError_t cudaHostRegister(void *begin, size_t size, unsigned flags) {
    cudaError_t error = enter();
    if (!error) add(begin, size, REGISTERED);
    return error;
}
cudaError_t cudaHostUnregister(void *begin) {
    struct block block;
    return take_out(begin, &block) ? enter() : result(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
    memset(found, 0, sizeof *found);
    pthread_mutex_lock(&mutex);
    struct block *block = *find(address);
    if (!block) {
        found->type = cudaMemoryTypeUnregistered;
    } else if (block->gpu < 0) {
        found->type = cudaMemoryTypeHost;
        found->hostPointer = (void *)address;
    } else {
        found->type = cudaMemoryTypeDevice;
        found->devicePointer = (void *)address;
        for (int device = 0; device < number_of_devices(); device++)
            if (driver_gpu(device) == block->gpu) found->device = device;
    }
    pthread_mutex_unlock(&mutex);
    return enter();
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    cudaError_t error = wait_for_gpu(recording != NULL);
    return error ? error : do_or_record((struct node){to, from, size}, NULL);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return do_or_record((struct node){to, from, size}, stream);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int other, size_t size, cudaStream_t stream) {
    return do_or_record((struct node){to, from, size}, stream);
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    return do_or_record((struct node){to, NULL, size, value}, stream);
}
cudaError_t cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, NULL); }

/* ---------------------------------------------------------------------------------------------- streams and events */

struct CUevent_st { double milliseconds; };

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    cudaError_t error = enter();
    if (!error) *stream = calloc(1, sizeof **stream);
    return error;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return free(stream), enter(); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return enter(); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait_for_gpu(is_recorded(stream)); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return enter(); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = 0, enter(); }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return enter();
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    return function(data), enter();
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
    return function(stream, cudaSuccess, data), enter();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    cudaError_t error = enter();
    if (!error) *event = calloc(1, sizeof **event);
    return error;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), enter(); }
cudaError_t cudaEventQuery(cudaEvent_t event) { return enter(); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return wait_for_gpu(0); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->milliseconds = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
    return enter();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    *milliseconds = end->milliseconds - begin->milliseconds;
    return enter();
}

/* ---------------------------------------------------------------------------------------------------------- errors */

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last;
    last = sticky[current];
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last; }

static const struct { cudaError_t error; const char *name, *text; } ERRORS[] = {
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
};
const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].error == error) return ERRORS[i].name;
    return "cudaError";
}
const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].error == error) return ERRORS[i].text;
    return "error of the imitated GPU";
}

/* --------------------------------------------------------------------------------------------------------- kernels */

/* What nvcc's code calls as it is loaded, and for `kernel<<<grid, block, memory, stream>>>(...)`. */
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[1];
    return handle;
}
void __cudaRegisterFatBinaryEnd(void **binary) {}
void __cudaUnregisterFatBinary(void **binary) {}
char __cudaInitModule(void **binary) { return 1; }
void __cudaRegisterFunction(void **binary, const char *host, char *device, const char *name, int limit, void *thread,
                            void *block, void *block_dim, void *grid_dim, int *warp) {}
void __cudaRegisterVar(void **binary, char *host, char *address, const char *name, int external, size_t size,
                       int constant, int global) {}

static __thread struct { dim3 grid, block; size_t memory; void *stream; } launch_configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t memory, struct CUstream_st *stream) {
    launch_configuration.grid = grid;
    launch_configuration.block = block;
    launch_configuration.memory = memory;
    launch_configuration.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *memory, void *stream) {
    *grid = launch_configuration.grid;
    *block = launch_configuration.block;
    *memory = launch_configuration.memory;
    *(void **)stream = launch_configuration.stream;
    return cudaSuccess;
}

static cudaError_t launch(void) {
    __sync_add_and_fetch(&launches, 1);
    if (setting("IMITATED_STRICT", 0)) abort();
    return enter();
}
cudaError_t __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, cudaSuccess; }
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t memory,
                               cudaStream_t stream) {
    return launch();
}
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t memory,
                             cudaStream_t stream) {
    return launch();
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *kernel, void **arguments) {
    return launch();
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->ptxVersion = found->binaryVersion = 90;
    return enter();
}
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) { return enter(); }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                   size_t memory, unsigned flags) {
    return *blocks = 2, enter();
}
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset,
                               enum cudaMemcpyKind kind) {
    return enter();
}

static int does_nothing(void) { return 0; }
/* Functions of the driver by their names; those that are not imitated do nothing. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *query) {
    cudaError_t error = enter();
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = (void *)does_nothing;
    if (query) *query = cudaDriverEntryPointSuccess;
    return error == cudaErrorNoDevice ? cudaSuccess : error;
}
