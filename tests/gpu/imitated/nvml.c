/* libnvidia-ml.so.1, what `nvidia-smi` asks: names, memory and processes of the GPUs, in the order of the machine. */
#include "machine.h"

enum { SUCCESS = 0, NOT_SUPPORTED = 3, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef void *Device;
struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct utilization { unsigned gpu, memory; };
struct running { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

static int number(Device device) { return (int)(uintptr_t)device - 1; }

int nvmlInit(void) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) { return "error of the imitated NVML"; }

int nvmlDeviceGetCount_v2(unsigned *count) { return *count = gpu_count(), SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    if ((int)index >= gpu_count()) return INVALID_ARGUMENT;
    *device = (Device)(uintptr_t)(index + 1);
    return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
    char own[64];
    for (int i = 0; i < gpu_count(); i++) {
        gpu_uuid(i, own, sizeof own);
        if (!strcmp(uuid, own)) return nvmlDeviceGetHandleByIndex_v2(i, device);
    }
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, Device *device) {
    unsigned bus;
    return sscanf(id, "%*x:%x", &bus) == 1 ? nvmlDeviceGetHandleByIndex_v2(bus - 1, device) : NOT_FOUND;
}
int nvmlDeviceGetIndex(Device device, unsigned *index) { return *index = number(device), SUCCESS; }
int nvmlDeviceGetUUID(Device device, char *text, unsigned size) {
    return gpu_uuid(number(device), text, size), SUCCESS;
}
int nvmlDeviceGetName(Device device, char *text, unsigned size) {
    return gpu_name(number(device), text, size), SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) {
    *major = gpu_capability(number(device)) / 10;
    *minor = gpu_capability(number(device)) % 10;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(Device device, struct memory *memory) {
    memory->total = gpu_memory();
    memory->used = gpu_used(number(device));
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(Device device, struct memory_v2 *memory) {
    memory->total = gpu_memory();
    memory->reserved = 0;
    memory->used = gpu_used(number(device));
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(Device device, struct utilization *rates) {
    rates->gpu = rates->memory = 0;
    return SUCCESS;
}
int nvmlDeviceGetComputeMode(Device device, unsigned *mode) {
    return *mode = setting("IMITATED_EXCLUSIVE", 0) ? 3 : 0, SUCCESS;
}
int nvmlDeviceGetMigMode(Device device, unsigned *now, unsigned *later) { return *now = *later = 0, SUCCESS; }

int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, struct running *running) {
    unsigned room = running ? *count : 0, found = 0;
    struct process *all = processes();
    for (int i = 0; i < MAX_PROCESSES; i++) {
        if (!all[i].pid || !all[i].used[number(device)] || !lives(all[i].pid)) continue;
        if (found < room)
            running[found] = (struct running){all[i].pid, all[i].used[number(device)], 0xffffffff, 0xffffffff};
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}
/* The first version of it, which torch asks where memory is over. */
int nvmlDeviceGetComputeRunningProcesses(Device device, unsigned *count, void *rows) {
    struct { unsigned pid; unsigned long long used; } *first = rows;
    struct running running[MAX_PROCESSES];
    unsigned room = rows ? *count : 0;
    *count = MAX_PROCESSES;
    nvmlDeviceGetComputeRunningProcesses_v3(device, count, running);
    for (unsigned i = 0; i < *count && i < room; i++) {
        first[i].pid = running[i].pid;
        first[i].used = running[i].used;
    }
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "580.00"), SUCCESS; }
int nvmlSystemGetNVMLVersion(char *text, unsigned size) { return snprintf(text, size, "13"), SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, SUCCESS; }
int nvmlDeviceGetNvLinkState(Device device, unsigned link, int *active) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType(Device device, unsigned link, int *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device device, unsigned link, void *info) { return NOT_SUPPORTED; }
int nvmlDeviceGetPciInfo_v3(Device device, void *info) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(Device device, void *info) { return NOT_SUPPORTED; }
