/* The threads of a block as fibers: which one runs, and what the others wait for. */
#ifndef DILKIT_HOST_BLOCK
#define DILKIT_HOST_BLOCK

enum { WARP = 32, MAX_THREADS = 1024, STACK = 128 * 1024, ERROR = 1024, DYNAMIC_BYTES = 228 * 1024 };
enum { FORWARD, REVERSE, RANDOM };

/* Memory that a kernel may read, and unless it is `constant` also write. */
typedef struct {
    uintptr_t low;
    int64_t bytes;
    const char *name;
    int64_t constant;
} Range;

enum { MAX_PLACES = 512 };

/* A place in the code that touches shared memory, `bytes` a lane: how many instructions did, and how many turns more than one for each
   128 bytes that took. */
typedef struct {
    uint32_t site, bytes;
    int64_t accesses, turns;
} CodePlace;

/* What the launcher says. This copy of the library computes blocks first_block, first_block + block_step, ... below `blocks`. */
typedef struct {
    int blocks, first_block, block_step, order;
    uint64_t seed;
    int64_t shared_bytes, range_count, array_count;
    const Range *ranges, *arrays;
    char *error;
    CodePlace *places; /* written, MAX_PLACES of them: only with HOST_CHECKED */
    int64_t matrices, conflicts; /* written: matrices that were loaded, and how many turns more than one each that took */
    int64_t barriers;            /* written: how often all threads of a block have met */
} Launch;

typedef struct Lane Lane;

/* An operation that the lanes of a warp do together: `work` is called once all have come, with the first of them. */
typedef struct Together {
    const char *name;
    void (*work)(Lane *lanes, const struct Together *together);
    int count, transposed, bfloat;
} Together;

/* A thread. What it waits for: null if it can go on. */
struct Lane {
    Fiber fiber;
    const Together *waits;
    const char *place;
    const void *in[2];
    void *out;
};

static const Together BLOCK_BARRIER = {"synchronize", 0, 0, 0, 0}, FINISHED = {"finished", 0, 0, 0, 0};

static struct {
    Lane lane[MAX_THREADS];
    Fiber launcher;
    Launch launch;
    const char *kernel;
    void (*body)(const void *);
    const void *args;
    int64_t args_bytes;
    char *stacks;
    int current, block, warp_turn, lane_turn;
    int warp_order[MAX_THREADS / WARP], lane_order[WARP];
    uint64_t random;
    int running, failed;
} host;

DEVICE int thread_index(void) { return host.current; }
DEVICE int block_index(void) { return host.block; }
DEVICE int block_count(void) { return host.launch.blocks; }

enum { WARPS = (THREADS + WARP - 1) / WARP };

UNCHECKED static int host_lanes(int warp) { return warp == WARPS - 1 ? THREADS - warp * WARP : WARP; }

static void host_shared_starts(void);
static void host_shared_ends(void);
static void host_thread_starts(void);
static void host_thread_ends(void);
static void host_forget_range(void);
static void host_barrier_passed(void);
static void host_warp_barrier_passed(int warp);
static void host_check_starts(void);
static void host_count_touches(void);

/* Writes what went wrong, and leaves the block for good if one of its threads is running. */
static __attribute__((format(printf, 1, 2))) void host_fail(const char *format, ...) {
    char *text = host.launch.error;
    int used = snprintf(text, ERROR, "%s, block %d, thread %d: ", host.kernel, host.block, host.current);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, ERROR - used, format, arguments);
    va_end(arguments);
    host.failed = 1;
    if (!host.running)
        return;
    Fiber nowhere;
    fiber_switch(&nowhere, &host.launcher);
}

UNCHECKED static void host_shuffle_order(int *order, int count) {
    for (int i = 0; i < count; i++)
        order[i] = host.launch.order == REVERSE ? count - 1 - i : i;
    for (int i = count - 1; i > 0 && host.launch.order == RANDOM; i--) {
        host.random = host.random * 6364136223846793005u + 1442695040888963407u;
        int other = (int)((host.random >> 33) % (unsigned)(i + 1)), mine = order[i];
        order[i] = order[other], order[other] = mine;
    }
}

UNCHECKED static int host_same(const Lane *a, const Lane *b) {
    return a->waits == b->waits && (a->place == b->place || !strcmp(a->place, b->place));
}

static void host_diverged(int thread, int other) {
    const Lane *a = &host.lane[thread], *b = &host.lane[other];
    host.current = thread;
    if (b->waits == &FINISHED)
        host_fail("threads diverge: it waits in %s (%s), thread %d has finished", a->waits->name, a->place, other);
    else
        host_fail("threads diverge: it waits in %s (%s), thread %d in %s (%s)", a->waits->name, a->place, other, b->waits->name,
                  b->place);
}

/* Whether all threads from `first` on wait for the same as that one. None of them can go on. */
UNCHECKED static void host_demand_same(int first, int count) {
    for (int i = 1; i < count; i++)
        if (!host_same(&host.lane[first], &host.lane[first + i])) {
            int swap = host.lane[first].waits == &FINISHED;
            host_diverged(swap ? first + i : first, swap ? first : first + i);
        }
}

UNCHECKED static void host_release(int first, int count) {
    for (int i = 0; i < count; i++)
        host.lane[first + i].waits = 0;
}

/* All lanes of a warp wait: they do together what they wait for, and go on. 0 if they wait for other warps. */
UNCHECKED static int host_warp_meets(int warp) {
    int first = warp * WARP, count = host_lanes(warp);
    host_demand_same(first, count);
    host_count_touches();
    Lane *lane = &host.lane[first];
    if (lane->waits == &BLOCK_BARRIER || lane->waits == &FINISHED)
        return 0;
    if (count < WARP)
        host_fail("%s (%s) in a warp of %d threads", lane->waits->name, lane->place, count);
    lane->waits->work(lane, lane->waits);
    host_release(first, count);
    return 1;
}

/* All warps wait: the barrier opens, or the block is at its end. */
UNCHECKED static int host_block_meets(void) {
    host_demand_same(0, THREADS);
    if (host.lane[0].waits == &FINISHED)
        return 0;
    host_barrier_passed();
    host.launch.barriers++;
    host_release(0, THREADS);
    host_shuffle_order(host.warp_order, WARPS);
    host.warp_turn = 0;
    return 1;
}

/* The thread that runs next, -1 at the end of the block: lane after lane of a warp until all wait, warp after warp. */
UNCHECKED static int host_next(void) {
    for (;;) {
        int warp = host.warp_order[host.warp_turn];
        while (++host.lane_turn < host_lanes(warp)) {
            int thread = warp * WARP + host.lane_order[host.lane_turn];
            if (!host.lane[thread].waits)
                return thread;
        }
        if (!host_warp_meets(warp) && ++host.warp_turn == WARPS && !host_block_meets())
            return -1;
        host_shuffle_order(host.lane_order, host_lanes(host.warp_order[host.warp_turn]));
        host.lane_turn = -1;
    }
}

/* The running thread waits; returns when it may go on. */
UNCHECKED static void host_wait(const Together *together, const char *place) {
    int mine = host.current;
    host.lane[mine].waits = together, host.lane[mine].place = place;
    int next = host_next();
    if (next == mine)
        return;
    host.current = next;
    fiber_switch(&host.lane[mine].fiber, next < 0 ? &host.launcher : &host.lane[next].fiber);
}

#define HOST_TEXT(x) #x
#define HOST_LINE(x) HOST_TEXT(x)
#define HOST_PLACE __FILE__ ":" HOST_LINE(__LINE__)

#define synchronize() host_wait(&BLOCK_BARRIER, HOST_PLACE)

static void host_thread(void) {
    host_thread_starts();
    host.body(host.args);
    host_thread_ends();
    host_wait(&FINISHED, "");
}

static void host_run_block(int block) {
    host.block = block;
    host_shared_starts();
    host_barrier_passed();
    for (int i = 0; i < THREADS; i++) {
        /* Stacks begin at different places of the cache. */
        fiber_start(&host.lane[i].fiber, host.stacks + (int64_t)i * STACK, STACK - (i % 64) * 576, host_thread);
        host.lane[i].waits = 0;
    }
    host_shuffle_order(host.warp_order, WARPS);
    host.warp_turn = 0;
    host_shuffle_order(host.lane_order, host_lanes(host.warp_order[0]));
    host.lane_turn = 0;
    host.current = host.warp_order[0] * WARP + host.lane_order[0];
    host.running = 1;
    fiber_switch(&host.launcher, &host.lane[host.current].fiber);
    host.running = 0;
    if (!host.failed)
        host_shared_ends();
}

static int host_run(const char *kernel, void (*body)(const void *), const void *args, int64_t args_bytes, Launch *launch) {
    host.kernel = kernel, host.body = body, host.args = args, host.args_bytes = args_bytes, host.launch = *launch;
    host.random = launch->seed, host.failed = 0;
    if (launch->shared_bytes > DYNAMIC_BYTES) {
        host_fail("%d bytes of dynamic shared memory: there are at most %d", (int)launch->shared_bytes, DYNAMIC_BYTES);
        return 1;
    }
    host_forget_range();
    host_check_starts();
    if (!host.stacks)
        host.stacks = aligned_alloc(4096, (size_t)THREADS * STACK);
    for (int block = launch->first_block; block < launch->blocks && !host.failed; block += launch->block_step)
        host_run_block(block);
    launch->matrices = host.launch.matrices, launch->conflicts = host.launch.conflicts, launch->barriers = host.launch.barriers;
    return host.failed;
}

#endif
