/* A driver of CUDA with two devices, which runs nothing: it refuses what the true one refuses, and tells of each call.

       CuPy, dilkit --> cuModuleLoadData: ELF of NVRTC --> Module, Function
                    --> cuLaunchKernel --> checked --> listener (Python): name, grid, address of the argument

   Handles of streams are given again as soon as they are free, with other numbers. What is called in the place of torch's runtime
   has names of its own, `stub_...`. */
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, INVALID_VALUE, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, CAPTURE_UNSUPPORTED = 900 };
enum { DEVICES = 2, STREAMS = 8, FUNCTIONS = 64, NAME = 64, MULTIPROCESSORS = 2 };
enum { STATIC_LIMIT = 48 * 1024, OPT_IN_LIMIT = 227 * 1024, MOST_THREADS = 1024 };
enum { MAX_DYNAMIC = 8, CARVEOUT = 9, SHARED_OF_MULTIPROCESSOR = 81 };

typedef struct {
    int used, device, captures;
    uint64_t number;
} Stream;

typedef struct {
    int device;
} Module;

typedef struct {
    const Module *module;
    char name[NAME];
    int most_dynamic;
} Function;

/* What happened: `first` and `second` are what the call is about. */
typedef void Listener(const char *call, int device, const void *stream, const char *name, int64_t first, int64_t second,
                      const void *bytes);

static Listener *listener;
static int current = -1, contexts[DEVICES], function_count;
static Stream streams[STREAMS];
static Function functions[FUNCTIONS];
static uint64_t numbers = 100;

static void tell(const char *call, const void *stream, const char *name, int64_t first, int64_t second, const void *bytes) {
    if (listener)
        listener(call, current, stream, name, first, second, bytes);
}

/* The runtime of torch: the device that is current, and whether it has a context. */

void stub_listen(Listener *own) { listener = own; }
int stub_current(void) { return current; }
int stub_has_context(int device) { return contexts[device]; }
void stub_set_device(int device) { current = device, contexts[device] = 1; }

/* Streams */

static int stream_fits(const Stream *stream) { return !stream || (stream->used && stream->device == current); }

int cuStreamCreate(Stream **stream, unsigned flags) {
    int i = 0;
    while (i < STREAMS && streams[i].used)
        i++;
    if (current < 0 || i == STREAMS)
        return INVALID_CONTEXT;
    streams[i] = (Stream){1, current, 0, numbers++};
    *stream = &streams[i];
    return SUCCESS;
}

int cuStreamDestroy_v2(Stream *stream) {
    stream->used = 0;
    return SUCCESS;
}

int cuStreamGetId(const Stream *stream, uint64_t *number) {
    if (current < 0)
        return INVALID_CONTEXT;
    *number = stream ? stream->number : 0;
    return stream_fits(stream) ? SUCCESS : INVALID_HANDLE;
}

int cuStreamBeginCapture_v2(Stream *stream, int mode) {
    stream->captures = 1;
    return SUCCESS;
}

int cuStreamIsCapturing(const Stream *stream, int *status) {
    *status = stream && stream->captures;
    return SUCCESS;
}

static int any_captures(void) {
    for (int i = 0; i < STREAMS; i++)
        if (streams[i].used && streams[i].captures)
            return 1;
    return 0;
}

/* Code. */

int cuModuleLoadData(Module **module, const void *image) {
    if (current < 0)
        return INVALID_CONTEXT;
    if (any_captures())
        return CAPTURE_UNSUPPORTED;
    if (memcmp(image, ELFMAG, SELFMAG))
        return INVALID_VALUE;
    *module = malloc(sizeof **module);
    (*module)->device = current;
    tell("cuModuleLoadData", 0, "", 0, 0, 0);
    return SUCCESS;
}

int cuModuleUnload(Module *module) { return SUCCESS; }

int cuModuleGetFunction(Function **function, const Module *module, const char *name) {
    if (function_count == FUNCTIONS || strlen(name) >= NAME)
        return NOT_FOUND;
    Function *own = *function = &functions[function_count++];
    own->module = module, strcpy(own->name, name);
    tell("cuModuleGetFunction", 0, name, 0, 0, 0);
    return SUCCESS;
}

int cuFuncSetAttribute(Function *function, int attribute, int value) {
    if (function->module->device != current)
        return INVALID_HANDLE;
    if (attribute == MAX_DYNAMIC && (value < 0 || value > OPT_IN_LIMIT))
        return INVALID_VALUE;
    if (attribute == CARVEOUT && (value < -1 || value > 100))
        return INVALID_VALUE;
    if (attribute == MAX_DYNAMIC)
        function->most_dynamic = value;
    tell("cuFuncSetAttribute", 0, function->name, attribute, value, 0);
    return SUCCESS;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const Function *function, int threads, size_t dynamic) {
    *blocks = 1;
    tell("cuOccupancyMaxActiveBlocksPerMultiprocessor", 0, function->name, threads, (int64_t)dynamic, 0);
    return function->module->device == current ? SUCCESS : INVALID_HANDLE;
}

/* Launches */

int cuLaunchKernel(const Function *function, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned block, unsigned block_y,
                   unsigned block_z, unsigned dynamic, const Stream *stream, void **parameters, void **extra) {
    if (function->module->device != current || !stream_fits(stream))
        return INVALID_HANDLE;
    if (!grid || grid > 0x7fffffff || grid_y != 1 || grid_z != 1 || !block || block > MOST_THREADS || block_y != 1 || block_z != 1)
        return INVALID_VALUE;
    if ((int)dynamic > STATIC_LIMIT && (int)dynamic > function->most_dynamic)
        return INVALID_VALUE;
    if (extra || !parameters)
        return INVALID_VALUE;
    int captured = stream && stream->captures;
    tell(captured ? "captured" : "cuLaunchKernel", stream, function->name, grid, (int64_t)dynamic << 32 | block, parameters[0]);
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    tell("cuDeviceGetAttribute", 0, "", attribute, device, 0);
    *value = attribute == SHARED_OF_MULTIPROCESSOR ? 228 * 1024 : 0;
    return *value && device >= 0 && device < DEVICES ? SUCCESS : INVALID_VALUE;
}

int cuGetErrorName(int code, const char **name) {
    static char text[32];
    snprintf(text, sizeof text, "error %d", code);
    *name = text;
    return SUCCESS;
}

int cuGetErrorString(int code, const char **name) { return cuGetErrorName(code, name); }
