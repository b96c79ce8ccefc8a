/* The imitated machine, which all three libraries speak of: its GPUs by environment variables, their memory by a file.
 *
 *   IMITATED_GPUS          how many there are (2)
 *   IMITATED_MEMORY_MIB    memory of each, in MiB (16384)
 *   IMITATED_CAPABILITY    compute capability of each, such as 7.5,9.0; the last one holds for the rest (9.0)
 *   IMITATED_EXCLUSIVE     1: one process to a GPU (exclusive-process mode)
 *   IMITATED_STATE         file that all processes share: which process uses how much of which GPU
 */
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_GPUS 8
#define MAX_PROCESSES 1024
#define MIB (1ull << 20)
/* What a context takes before the first allocation. */
#define CONTEXT_BYTES (300 * MIB)

struct process {
    int pid; /* 0: free */
    unsigned long long used[MAX_GPUS]; /* bytes of each GPU, its context included; 0: no context there */
};

static int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

static int gpu_count(void) {
    int count = setting("IMITATED_GPUS", 2);
    return count > MAX_GPUS ? MAX_GPUS : count;
}

static unsigned long long gpu_memory(void) { return setting("IMITATED_MEMORY_MIB", 16384) * MIB; }

/* 75 for 7.5. */
static int gpu_capability(int gpu) {
    const char *text = getenv("IMITATED_CAPABILITY");
    int major = 9, minor = 0;
    for (int i = 0; text && *text && i <= gpu; i++) {
        sscanf(text, "%d.%d", &major, &minor);
        text = strchr(text, ',') ? strchr(text, ',') + 1 : "";
    }
    return 10 * major + minor;
}

static void gpu_uuid(int gpu, char *text, size_t size) {
    snprintf(text, size, "GPU-%08x-0000-0000-0000-000000000000", gpu + 1);
}

static void gpu_name(int gpu, char *text, size_t size) {
    int capability = gpu_capability(gpu);
    snprintf(text, size, "Imitated GPU %d.%d", capability / 10, capability % 10);
}

static struct process *processes(void) {
    static struct process *table;
    size_t size = MAX_PROCESSES * sizeof(struct process);
    const char *path = getenv("IMITATED_STATE");
    if (table) return table;
    int file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (file < 0 || ftruncate(file, size)) {
        fprintf(stderr, "imitated GPU: IMITATED_STATE must be a file, got %s\n", path ? path : "nothing");
        abort();
    }
    table = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return table;
}

/* A process that has ended gives its memory back, a zombie too: the kernel says that it has no pages. */
static int lives(int pid) {
    char path[64], pages = '0';
    snprintf(path, sizeof path, "/proc/%d/statm", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    if (read(file, &pages, 1) != 1) pages = '0';
    close(file);
    return pages != '0';
}

/* Bytes in use by living processes. */
static unsigned long long gpu_used(int gpu) {
    unsigned long long sum = 0;
    struct process *all = processes();
    for (int i = 0; i < MAX_PROCESSES; i++)
        if (all[i].pid && all[i].used[gpu] && lives(all[i].pid)) sum += all[i].used[gpu];
    return sum;
}

/* This process' row, made when it is first asked for. */
static struct process *own_row(void) {
    static struct process *row;
    struct process *all = processes();
    int own = getpid();
    if (row && row->pid == own) return row;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        int pid = all[i].pid;
        if ((pid == 0 || pid == own || !lives(pid)) && __sync_bool_compare_and_swap(&all[i].pid, pid, own)) {
            memset(all[i].used, 0, sizeof all[i].used);
            return row = &all[i];
        }
    }
    abort();
}
