/* Barriers of some threads: bar.sync and bar.arrive with a number of threads; mbarriers (PTX: Parallel Synchronization and
   Communication Instructions), which are objects in shared memory that count arrivals, and bytes that copies have yet to bring; and the
   registers that warps give to each other (setmaxnreg). Threads wait until they are woken: if none can run, all that is waited for is
   reported. */
#ifndef PTX_BARRIERS
#define PTX_BARRIERS

#include "warpgroup.h"

enum { NAMED = 16, MOST_ARRIVALS = (1 << 20) - 1, ALL_REGISTERS = 65536, MOST_REGISTERS = 256, HINT = 4 };

typedef struct {
    int expected, arrived;
    uint32_t *known;
} Named;

typedef struct Mbarrier {
    uint32_t at, phase; /* `phase`: how many have completed. */
    int is_valid, expected, pending;
    int64_t bytes;
    uint32_t *arriving, *completed; /* Clocks. */
    Touch made;
} Mbarrier;

struct Barriers {
    Named named[NAMED];
    Mbarrier **all; /* Each by itself, as threads point to it. */
    int count, registers[MAX_WARPS], free_registers;
};

static void begin_barriers(Block *block) {
    int threads = machine.launch.threads, each = ALL_REGISTERS / threads / 8 * 8;
    block->barriers = calloc(1, sizeof(Barriers));
    for (int i = 0; i < MAX_WARPS; i++)
        block->barriers->registers[i] = each < MOST_REGISTERS ? each : MOST_REGISTERS;
    for (int i = 0; i < NAMED; i++)
        block->barriers->named[i].known = new_clocks();
    for (int i = 0; i < threads; i++)
        block->threads[i].known = new_clocks(), block->threads[i].known[i] = 1;
    block->readers = calloc(machine.shared_bytes / 4 + 1, MOST_GROUPS * sizeof(uint32_t));
}

static void end_barriers(Block *block) {
    Barriers *barriers = block->barriers;
    for (int i = 0; i < barriers->count; i++)
        free(barriers->all[i]->arriving), free(barriers->all[i]->completed), free(barriers->all[i]);
    for (int i = 0; i < NAMED; i++)
        free(barriers->named[i].known);
    for (int i = 0; i < machine.launch.threads; i++)
        free(block->threads[i].known), free(block->threads[i].arrivals);
    free(barriers->all), free(block->readers), free(barriers);
}

static void release_named(Block *block, Named *named) {
    for (int i = 0; i < machine.launch.threads; i++) {
        Thread *t = &block->threads[i];
        const Thread *first = &block->threads[i / WARP * WARP];
        if (t->state != WAITING || t->awaited != named)
            continue;
        if (first->state != WAITING || first->line != t->line)
            fail_of(t, t->line, "lanes of a warp meet at different instructions");
        take_clocks(t, named->known);
    }
    memset(named->known, 0, clock_count() * sizeof(uint32_t));
    named->arrived = named->expected = 0;
    wake(block, named);
}

/* bar.sync and bar.arrive of some of the threads. */
CALLED void named_barrier(uint32_t number, uint32_t count, int waits, int line) {
    Thread *t = machine.current;
    if (number >= NAMED || !count || count % WARP || count > MAX_WARPS * WARP)
        fail(line, "barrier %u of %u threads: there are %d, of whole warps", number, count, NAMED);
    Named *named = &t->block->barriers->named[number];
    if (named->expected && named->expected != (int)count)
        fail(line, "barrier %u of %u threads: others wait there for %d", number, count, named->expected);
    named->expected = count;
    leave_clocks(t, named->known);
    if (waits)
        t->state = WAITING, t->awaited = named, t->awaited_name = "a barrier", t->line = line;
    if (++named->arrived == (int)count)
        release_named(t->block, named);
    if (waits)
        give_way();
}

static Mbarrier *mbarrier_at(uint32_t at, int line) {
    Thread *t = machine.current;
    Barriers *barriers = t->block->barriers;
    for (int i = 0; i < barriers->count; i++) {
        Mbarrier *one = barriers->all[i];
        Touch now = touch_of(t, 15, line);
        if (!one->is_valid || one->at != at)
            continue;
        if (!in_order(&one->made, &now))
            fail(line, "race: it uses the mbarrier at %u, which thread %d initializes at line %d", at, one->made.thread, one->made.line);
        return one;
    }
    fail(line, "there is no mbarrier at %u", at);
    return 0;
}

static void mark_mbarrier(uint32_t at, int mark) {
    for (int i = 0; i < 2; i++)
        machine.current->block->words[at / 4 + i].copying = (int16_t)mark;
}

CALLED void mbarrier_init(uint32_t at, uint32_t count, int line) {
    Thread *t = machine.current;
    Barriers *barriers = t->block->barriers;
    shared_place(at, 8, 1, line);
    if (count < 1 || count > MOST_ARRIVALS)
        fail(line, "an mbarrier of %u arrivals: at least 1, at most %d", count, MOST_ARRIVALS);
    Mbarrier *made = malloc(sizeof *made);
    *made = (Mbarrier){at, 0, 1, count, count, 0, new_clocks(), new_clocks(), touch_of(t, 15, line)};
    barriers->all = realloc(barriers->all, (barriers->count + 1) * sizeof *barriers->all);
    barriers->all[barriers->count++] = made;
    mark_mbarrier(at, IS_MBARRIER);
}

CALLED void mbarrier_inval(uint32_t at, int line) {
    mbarrier_at(at, line)->is_valid = 0;
    mark_mbarrier(at, 0);
    shared_place(at, 8, 1, line);
}

static void complete_phase(Block *block, Mbarrier *barrier) {
    if (barrier->pending || barrier->bytes)
        return;
    barrier->phase++, barrier->pending = barrier->expected;
    join_clocks(barrier->completed, barrier->arriving);
    wake(block, barrier);
}

static void count_arrivals(Thread *t, Mbarrier *barrier, int count, int line) {
    if (count < 1 || count > barrier->pending) {
        fail_of(t, line, "%d arrivals at the mbarrier at %u, where %d are pending", count, barrier->at, barrier->pending);
        return;
    }
    barrier->pending -= count;
    complete_phase(t->block, barrier);
}

/* Adds to the bytes that are to come; negative: that have come. */
CALLED void mbarrier_expect(uint32_t at, int bytes, int line) {
    Mbarrier *barrier = mbarrier_at(at, line);
    barrier->bytes += bytes;
    if (barrier->bytes < -MOST_ARRIVALS || barrier->bytes > MOST_ARRIVALS)
        fail(line, "%lld bytes of the mbarrier at %u: at most %d", (long long)barrier->bytes, at, MOST_ARRIVALS);
    if (bytes < 0)
        complete_phase(machine.current->block, barrier);
}

/* Returns the phase. `completes`: whether it may complete it. */
CALLED uint64_t mbarrier_arrive(uint32_t at, int count, int bytes, int completes, int line) {
    Thread *t = machine.current;
    if (bytes)
        mbarrier_expect(at, bytes, line);
    Mbarrier *barrier = mbarrier_at(at, line);
    uint64_t phase = barrier->phase;
    if (!completes && count >= barrier->pending)
        fail(line, "mbarrier.arrive.noComplete completes the phase of the mbarrier at %u", at);
    leave_clocks(t, barrier->arriving);
    count_arrivals(t, barrier, count, line);
    while (machine.failed)
        give_way();
    return phase;
}

/* Whether a phase has completed, of a number or a parity. try_wait may wait for it, and may give up. */
CALLED int mbarrier_wait(uint32_t at, uint64_t phase, int is_parity, int waits, int line) {
    Thread *t = machine.current;
    Mbarrier *barrier = mbarrier_at(at, line);
    if (is_parity && phase > 1)
        fail(line, "the parity %llu of a phase: 0 or 1", (unsigned long long)phase);
    if (is_parity)
        phase = barrier->phase - ((barrier->phase ^ phase) & 1);
    if (phase == barrier->phase && waits && draw() % HINT) {
        wait_for(barrier, "an mbarrier", line);
    } else if (phase == barrier->phase) {
        machine.has_yielded = 1;
        give_way();
    }
    if ((uint32_t)phase == barrier->phase)
        return 0;
    take_clocks(t, barrier->completed);
    return 1;
}

/* The first arrival of `t` comes, and the copies that it waits for. */
static void arrive_copied(Thread *t) {
    Arrival one = *t->arrivals;
    memmove(t->arrivals, t->arrivals + 1, --t->arrival_count * sizeof one);
    machine.arriving--;
    while (t->done < one.end)
        complete(t, &t->copies[t->done++], (Touch){t->block->meeting, one.moment, (int16_t)t->index, 15, 1, one.line});
    if (!t->arrival_count && t->done == t->begun)
        t->done = t->begun = 0;
    if (*copied_in(one.barrier->arriving, t->index) < one.moment)
        *copied_in(one.barrier->arriving, t->index) = one.moment;
    count_arrivals(t, one.barrier, 1, one.line);
}

/* One that is under way, of any thread. Returns whether there is one. */
static int arrive_some(void) {
    int threads = machine.launch.threads, count = machine.launch.resident * threads, first = draw() % count;
    for (int i = 0; machine.arriving && i < count; i++) {
        int at = (first + i) % count;
        Block *block = machine.resident[at / threads];
        if (block && block->threads[at % threads].arrival_count) {
            arrive_copied(&block->threads[at % threads]);
            return 1;
        }
    }
    return 0;
}

/* cp.async.mbarrier.arrive: the mbarrier counts an arrival when all copies so far of the thread have come. Without `is_counted`, one
   more is pending until then. */
CALLED void copies_arrive(uint32_t at, int is_counted, int line) {
    Thread *t = machine.current;
    Mbarrier *barrier = mbarrier_at(at, line);
    barrier->pending += !is_counted;
    t->arrivals = realloc(t->arrivals, (t->arrival_count + 1) * sizeof(Arrival));
    t->arrivals[t->arrival_count++] = (Arrival){barrier, t->known[t->index]++, t->begun, line};
    machine.arriving++;
    if (!machine.launch.late)
        while (t->arrival_count && !machine.failed)
            arrive_copied(t);
    while (machine.failed)
        give_way();
}

static int describe_wait(const Thread *t, char *text, int bytes) {
    if (strcmp(t->awaited_name, "an mbarrier"))
        return snprintf(text, bytes, "%s", t->awaited_name);
    const Mbarrier *barrier = t->awaited;
    return snprintf(text, bytes, "phase %u of the mbarrier at %u, which lacks %d arrivals and %lld bytes", barrier->phase, barrier->at,
                    barrier->pending, (long long)barrier->bytes);
}

/* setmaxnreg, by each warp of a warpgroup. It is launched with as many registers as there are for all threads. */
CALLED void set_registers(int count, int is_more, int line) {
    Thread *t = machine.current;
    Barriers *barriers = t->block->barriers;
    int *own = &barriers->registers[t->index / WARP];
    step_together(line);
    if (count < 24 || count > 256 || count % 8)
        fail(line, "%d registers: 24 to 256, a multiple of 8", count);
    if (t->index % WARP)
        return;
    if (is_more ? count < *own : count > *own)
        fail(line, "setmaxnreg.%s to %d of %d registers", is_more ? "inc" : "dec", count, *own);
    while (WARP * (count - *own) > barriers->free_registers)
        wait_for(&barriers->free_registers, "registers that others free", line);
    barriers->free_registers -= WARP * (count - *own), *own = count;
    wake(t->block, &barriers->free_registers);
}

#endif
