/* libcuda.so.1, the driver, as far as it is asked directly: whether it was initialised here, and which GPUs it shows. */
#include "machine.h"

enum { SUCCESS = 0, NOT_INITIALIZED = 3, NO_DEVICE = 100 };

static int initialised_by; /* process id */
static int shown[MAX_GPUS], count; /* GPUs in the order that CUDA gives them, as CUDA_VISIBLE_DEVICES restricts it */

/* Fastest first, as CUDA counts them by default. */
static void order(int *gpus) {
    const char *by = getenv("CUDA_DEVICE_ORDER");
    int n = gpu_count();
    for (int i = 0; i < n; i++) gpus[i] = i;
    if (by && !strcmp(by, "PCI_BUS_ID")) return;
    for (int i = 1; i < n; i++) /* stable: insertion sort */
        for (int j = i; j > 0 && gpu_capability(gpus[j]) > gpu_capability(gpus[j - 1]); j--) {
            int other = gpus[j];
            gpus[j] = gpus[j - 1], gpus[j - 1] = other;
        }
}

/* The GPU that an entry of CUDA_VISIBLE_DEVICES means; -1: none. */
static int entry(const char *text, size_t length, const int *gpus) {
    char uuid[64], *end;
    if (length >= 4 && !strncmp(text, "GPU-", 4)) {
        for (int i = 0; i < gpu_count(); i++) {
            gpu_uuid(i, uuid, sizeof uuid);
            if (length <= strlen(uuid) && !strncmp(text, uuid, length)) return i;
        }
        return -1;
    }
    long number = strtol(text, &end, 10);
    return end == text || number < 0 || number >= gpu_count() ? -1 : gpus[number];
}

static void read_visible(void) {
    int gpus[MAX_GPUS];
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    order(gpus);
    if (!text) {
        count = gpu_count();
        memcpy(shown, gpus, sizeof shown);
        return;
    }
    for (count = 0; *text && count < MAX_GPUS;) {
        text += strspn(text, " ");
        size_t length = strcspn(text, ", ");
        int gpu = entry(text, length, gpus);
        if (gpu < 0) return;
        for (int i = 0; i < count; i++)
            if (shown[i] == gpu) { /* named twice: none is shown */
                count = 0;
                return;
            }
        shown[count++] = gpu;
        text += strcspn(text, ",");
        text += *text == ',';
    }
}

int cuInit(unsigned flags) {
    if (initialised_by && initialised_by != getpid()) return NOT_INITIALIZED; /* a fork of one that has used it */
    if (!initialised_by) {
        initialised_by = getpid();
        read_visible();
    }
    return count ? SUCCESS : NO_DEVICE;
}

static int check(void) { return initialised_by == getpid() ? SUCCESS : NOT_INITIALIZED; }

int cuDeviceGetCount(int *found) {
    *found = count;
    return check();
}

/* Ours: the machine's GPU that CUDA shows as number `device`. */
int imitated_gpu(int device) { return device >= 0 && device < count ? shown[device] : -1; }

int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cuDeviceGet(int *device, int number) { return *device = number, check(); }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = 0, check(); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = own_row()->used[imitated_gpu(device)] > 0;
    return check();
}
int cuCtxGetCurrent(void **context) { return *context = (void *)1, check(); }
int cuCtxSetCurrent(void *context) { return check(); }
int cuGetErrorString(int error, const char **text) { return *text = "error of the imitated driver", SUCCESS; }
int cuDeviceGetUuid(unsigned char *uuid, int device) {
    memset(uuid, 0, 16);
    uuid[3] = imitated_gpu(device) + 1;
    return check();
}
