/* The kernels on the CPU: what intrinsics.cuh has for CUDA, in plain C. A kernel file is one translation unit, and a library.

   The threads of a block are fibers of one thread of the process, so a block is computed in an order that the launch chooses, and
   whatever the threads say to each other is seen here. Blocks run one after the other; several copies of the library share them. */
#ifndef DILKIT_HOST
#define DILKIT_HOST

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICE static inline __attribute__((unused))
#define KEEP_APART(branch) ((void)0)

/* With HOST_CHECKED the compiler has a function called before each access to memory, but for those of UNCHECKED functions.
   SITE: the place in the code where the function has been called; the launcher makes a file and a line of it. */
#ifdef HOST_CHECKED
#define UNCHECKED __attribute__((no_sanitize("thread", "bounds", "signed-integer-overflow"), noinline))
#define UNCHECKED_INLINE static inline __attribute__((no_sanitize("thread", "bounds", "signed-integer-overflow")))
#define SITE ((uint32_t)((char *)__builtin_return_address(0) - __ehdr_start - 1))
extern char __ehdr_start[] __attribute__((visibility("hidden"))), _end[] __attribute__((visibility("hidden")));
#else
#define UNCHECKED
#define UNCHECKED_INLINE static inline
#define SITE 0
#endif

#include "fiber.h"
#include "block.h"
#include "memory.h"
#include "banks.h"
#include "check.h"
#include "numbers.h"
#include "warp.h"

DEVICE int opaque(int x) { return x; }

/* `host_launch_...` is what the launcher calls: 0, or 1 with what went wrong in launch->error. */
#define KERNEL(name)                                                                                                              \
    static __attribute__((noinline)) void name(const Args args);                                                                  \
    static void host_thread_of_##name(const void *args) { name(*(const Args *)args); }                                            \
    int host_launch_##name(const void *args, Launch *launch) {                                                                    \
        return host_run(#name, host_thread_of_##name, args, sizeof(Args), launch);                                                \
    }                                                                                                                             \
    static __attribute__((noinline)) void name(const Args args)

#endif
