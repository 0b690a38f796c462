/* The functions of CUDA's driver that CuPy and dilkit call. Each hands its arguments on to Python, as integers. */
#include <stdint.h>

typedef int Answer(const char *name, const int64_t *given);

static Answer *answer;

void stub_answer(Answer *own) { answer = own; }

/* What the caller of a function with fewer arguments leaves in the places of the others is not looked at. */
#define CALL(name)                                                                                                               \
    int name(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int64_t g, int64_t h, int64_t i, int64_t j) {      \
        const int64_t given[] = {a, b, c, d, e, f, g, h, i, j};                                                                   \
        return answer(#name, given);                                                                                             \
    }

CALL(cuModuleLoadData)
CALL(cuModuleUnload)
CALL(cuModuleGetFunction)
CALL(cuFuncSetAttribute)
CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor)
CALL(cuLaunchKernel)
CALL(cuStreamGetId)
CALL(cuGetErrorName)
CALL(cuGetErrorString)
