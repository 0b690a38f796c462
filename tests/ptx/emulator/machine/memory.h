/* Global memory: every access is aligned and within a tensor of the launch, and no constant is written. A thread that reads or writes
   what another has written comes after it:

     of its block       a barrier lies between, or its clocks say so
     of another block   the writer, or a thread that it has met since, has fenced, and the reader, or one that it has met, after that

   A thread that writes what one of another block has read last comes after that in the same way, or the read has come too early.

   (PTX: Memory Consistency Model, Fence-SC Order. membar.gl is fence.sc from sm_70 on, and fences of that kind are in one order, here
   that of time; what two blocks say to each other by atomic operations puts the fences before and after them in this order. An atomic
   operation that releases fences before it; one that acquires does so after it, as far as the last release at its place.) Atomic
   operations need no order among themselves, nor do threads of a block that write the same at the same instruction. Counters are not
   looked at. */
#ifndef PTX_MEMORY
#define PTX_MEMORY

#include "clocks.h"

typedef enum { READ, ATOMIC_READ, WRITE, ATOMIC } Access;
enum { IS_MBARRIER = -1 };
enum { ACQUIRES = 1, RELEASES = 2, PLACES = 64 }; /* Of orders of atomic operations, and where there may be some. */

/* Who wrote a byte last, or read it; nobody where `line` is 0. */
typedef struct {
    int64_t time;
    uint32_t meeting, moment; /* As of a `Touch`. */
    int32_t block, line;
    int16_t thread, is_atomic;
} Accessed;

typedef struct {
    uint64_t address;
    Accessed written, read;
} Byte;

/* When an atomic operation last released at a place. */
typedef struct {
    uint64_t address;
    int64_t time;
} Released;

static struct {
    Byte *table;
    uint64_t size, used;
    const Range *last[2]; /* What was read, and written. */
    Released released[PLACES];
} global;

static Byte *byte_of(Byte *table, uint64_t size, uint64_t address) {
    uint64_t at = address * 0x9E3779B97F4A7C15ull >> 20 & (size - 1);
    while (table[at].address && table[at].address != address)
        at = (at + 1) & (size - 1);
    return &table[at];
}

static void grow_bytes(void) {
    uint64_t size = global.size ? global.size * 2 : 1 << 12;
    Byte *table = calloc(size, sizeof *table);
    for (uint64_t i = 0; i < global.size; i++)
        if (global.table[i].address)
            *byte_of(table, size, global.table[i].address) = global.table[i];
    free(global.table);
    global.table = table, global.size = size;
}

static void forget_bytes(void) {
    free(global.table);
    memset(&global, 0, sizeof global);
}

/* The first fence of a block after a time. */
static const Fence *fence_after(const Block *block, int64_t time) {
    int low = 0, high = block->fence_count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (block->fences[middle].time > time)
            high = middle;
        else
            low = middle + 1;
    }
    return block->fences + low;
}

static int is_published(const Accessed *writer, int64_t until) {
    const Block *block = &machine.blocks[writer->block];
    const Fence *end = block->fences + block->fence_count;
    for (const Fence *f = fence_after(block, writer->time); f < end && f->time <= until; f++)
        if (f->thread == writer->thread || f->meeting > writer->meeting ||
            (f->known && writer->moment <= f->known[writer->thread]))
            return 1;
    return 0;
}

static int comes_after(const Accessed *writer, const Thread *t) {
    if (writer->block != t->block->index)
        return is_published(writer, t->fenced);
    if (writer->thread == t->index || writer->meeting != t->block->meeting)
        return 1;
    if (t->known)
        return writer->moment <= t->known[writer->thread];
    int warp = t->index / WARP;
    return writer->thread / WARP == warp && writer->moment != t->block->warp_meeting[warp];
}

/* Whether an access needs no order after the last one. `is_same`: it writes what is there. */
static int is_free(const Accessed *writer, Access access, int is_same, int line) {
    if (access == ATOMIC || access == ATOMIC_READ)
        return writer->is_atomic;
    return access == WRITE && is_same && writer->line == line && writer->block == machine.current->block->index;
}

static void fail_access(const Range *range, uint64_t byte, const Accessed *before, const char *does, const char *done, int line) {
    fail(line, "race: it %s byte %llu of %s, which thread %d of block %d has %s", does, (unsigned long long)(byte - range->low),
         range->name, before->thread, before->block, done);
}

static void check_byte(Byte *byte, const Range *range, Access access, int is_same, int line) {
    Thread *t = machine.current;
    const Accessed *written = &byte->written, *read = &byte->read;
    int is_write = access >= WRITE, is_atomic = access == ATOMIC || access == ATOMIC_READ;
    if (written->line && !comes_after(written, t) && !is_free(written, access, is_same, line))
        fail_access(range, byte->address, written, is_write ? "writes" : "reads", "written", line);
    if (is_write && read->line && read->block != t->block->index && !comes_after(read, t) && !(is_atomic && read->is_atomic))
        fail_access(range, byte->address, read, "writes", "read", line);
    *(is_write ? &byte->written : &byte->read) =
        (Accessed){machine.time, t->block->meeting, moment_of(t), t->block->index, line, (int16_t)t->index, is_atomic};
}

static void check_bytes(const Range *range, uint64_t at, int bytes, Access access, int is_same, int line) {
    if (range->constant || !strcmp(range->name, "counter"))
        return;
    for (uint64_t address = at; address < at + bytes; address++) {
        if (global.used * 2 >= global.size)
            grow_bytes();
        Byte *byte = byte_of(global.table, global.size, address);
        global.used += !byte->address;
        byte->address = address;
        check_byte(byte, range, access, is_same, line);
    }
}

static int holds(const Range *range, uint64_t at, int bytes) {
    return range && at >= range->low && at + bytes <= range->low + range->bytes;
}

static const Range *range_of(uint64_t at, int bytes, int is_write, int line) {
    for (int i = 0; i < machine.launch.range_count; i++)
        if (holds(&machine.launch.ranges[i], at, bytes) && !(is_write && machine.launch.ranges[i].constant))
            return &machine.launch.ranges[i];
    fail(line, "%s %d bytes at %llx, which no tensor of the launch holds%s", is_write ? "writes" : "reads", bytes,
         (unsigned long long)at, is_write ? ", but for constant ones" : "");
    return 0;
}

/* The place of `bytes` of global memory, which are aligned and within a tensor. */
static void *global_bytes_at(uint64_t at, int bytes, int is_write, int line) {
    if (at % bytes)
        fail(line, "%d bytes of global memory at %llx: not aligned", bytes, (unsigned long long)at);
    if (!holds(global.last[is_write], at, bytes))
        global.last[is_write] = range_of(at, bytes, is_write, line);
    return (void *)at;
}

/* The same, of what the running thread reads. */
static const void *global_place(uint64_t at, int bytes, int line) {
    const void *place = global_bytes_at(at, bytes, 0, line);
    if (machine.launch.checked)
        check_bytes(global.last[0], at, bytes, READ, 0, line);
    return place;
}

CALLED const void *global_load(uint64_t at, int bytes, int line) {
    COUNT(GLOBAL_LOADED, bytes);
    return global_place(at, bytes, line);
}

CALLED void global_store(uint64_t at, const void *value, int bytes, int line) {
    void *place = global_bytes_at(at, bytes, 1, line);
    COUNT(GLOBAL_STORED, bytes);
    if (machine.launch.checked)
        check_bytes(global.last[1], at, bytes, WRITE, !memcmp(place, value, bytes), line);
    memcpy(place, value, bytes);
}

static Fence *note_fence(void) {
    Thread *t = machine.current;
    Block *block = t->block;
    if (block->fence_count == block->fence_capacity) {
        block->fence_capacity = block->fence_capacity * 2 + 64;
        block->fences = realloc(block->fences, block->fence_capacity * sizeof *block->fences);
    }
    Fence *made = &block->fences[block->fence_count++];
    *made = (Fence){++machine.time, t->index, block->meeting, t->known ? new_clocks() : 0};
    if (t->known)
        join_clocks(made->known, t->known);
    return made;
}

CALLED void fence(void) { machine.current->fenced = note_fence()->time; }

static Released *released_at(uint64_t at, int line) {
    for (int i = 0; i < PLACES; i++)
        if (!global.released[i].address || global.released[i].address == at)
            return &global.released[i];
    fail(line, "atomic operations that order memory at more than %d places", PLACES);
    return 0;
}

/* The place of an atomic operation, before and after which others may come. */
static void *atomic_place(uint64_t at, Access access, int order, int line) {
    Thread *t = machine.current;
    void *place = global_bytes_at(at, 4, access == ATOMIC, line);
    if (machine.launch.checked)
        check_bytes(global.last[access == ATOMIC], at, 4, access, 0, line);
    COUNT(ATOMICS, 1);
    loop(ATOMIC_LOOPS, line);
    machine.has_yielded = 1;
    give_way();
    if (order) {
        Released *released = released_at(at, line);
        if (order & ACQUIRES && released->time > t->fenced)
            t->fenced = released->time;
        if (order & RELEASES)
            *released = (Released){at, note_fence()->time};
    }
    return place;
}

CALLED uint32_t atomic_load(uint64_t at, int order, int line) { return *(uint32_t *)atomic_place(at, ATOMIC_READ, order, line); }

CALLED uint32_t atomic_add_u32(uint64_t at, uint32_t amount, int order, int line) {
    uint32_t *place = atomic_place(at, ATOMIC, order, line), before = *place;
    *place += amount;
    return before;
}

CALLED uint32_t atomic_or_b32(uint64_t at, uint32_t bits, int order, int line) {
    uint32_t *place = atomic_place(at, ATOMIC, order, line), before = *place;
    *place |= bits;
    return before;
}

CALLED float atomic_add_f32(uint64_t at, float amount, int order, int line) {
    float *place = atomic_place(at, ATOMIC, order, line), before = *place;
    *place += amount;
    return before;
}

/* Shared memory: every access is aligned and within what the launch has; what two threads touch, one of them writing, is apart by a
   barrier of the block or the warp (PTX: Memory Consistency Model, Conflict and Data-races). But several threads may write the same at
   the same instruction, whichever of them comes last. Words that no thread has written are NaN. */
enum { NOBODY = -1, SEVERAL = -2 }; /* In the place of a thread; several, of more than one warp. */

static int in_order(const Touch *before, const Touch *now) {
    if (before->thread == NOBODY || before->thread == now->thread || before->meeting != now->meeting || !(before->bytes & now->bytes))
        return 1;
    if (machine.current->known)
        return is_known(before, machine.current->known);
    return before->thread != SEVERAL && before->thread / WARP == now->thread / WARP && before->moment != now->moment;
}

static void race(const Touch *before, const Touch *now, int is_write, uint32_t at) {
    fail(now->line, "race: it %s shared memory at %u, which thread %d touches at line %d", is_write ? "writes" : "reads", at,
         before->thread, before->line);
}

static void fail_copying(const Word *word, uint32_t at, int is_write, int line) {
    if (word->copying == IS_MBARRIER)
        fail(line, "%s shared memory at %u, which is an mbarrier", is_write ? "writes" : "reads", at);
    fail(line, "%s shared memory at %u while a copy of thread %d to it is under way", is_write ? "writes" : "reads", at,
         word->copying - 1);
}

static void check_no_product(uint32_t at, int line) {
    Thread *t = machine.current;
    for (int group = 0; group < MOST_GROUPS; group++)
        if (t->block->readers[at / 4 * MOST_GROUPS + group] > *completed_in(t->known, group))
            fail(line, "writes shared memory at %u, which a wgmma of warps %d to %d reads: it has not been waited for", at, group * 4,
                 group * 4 + 3);
}

/* `is_same`: it writes what is there. */
static void touch_word(Word *word, uint32_t at, Touch now, int is_write, int is_same) {
    if (word->copying)
        fail_copying(word, at, is_write, now.line);
    if (is_write && machine.current->known)
        check_no_product(at, now.line);
    int is_ordered = in_order(&word->written, &now);
    if (!is_ordered && !(is_write && is_same && word->written.line == now.line))
        race(&word->written, &now, is_write, at);
    if (!is_write) {
        *(in_order(&word->read, &now) ? &word->read : &word->also) = now;
        return;
    }
    if (!in_order(&word->read, &now))
        race(&word->read, &now, 1, at);
    if (!in_order(&word->also, &now))
        race(&word->also, &now, 1, at);
    if (!is_ordered && word->written.thread / WARP != now.thread / WARP)
        now.thread = SEVERAL;
    word->written = now;
}

static Touch touch_of(const Thread *t, uint8_t bytes, int line) {
    return (Touch){t->block->meeting, moment_of(t), (int16_t)t->index, bytes, 0, line};
}

static void touch(uint32_t at, int bytes, int is_write, int is_same, int line) {
    Thread *t = machine.current;
    for (uint32_t word = at / 4; word * 4 < at + bytes; word++) {
        uint32_t low = word * 4 < at ? at % 4 : 0, high = word * 4 + 4 > at + bytes ? at + bytes - word * 4 : 4;
        uint8_t touched = (uint8_t)((1 << high) - (1 << low));
        touch_word(&t->block->words[word], word * 4, touch_of(t, touched, line), is_write, is_same);
    }
}

/* The place of `bytes` of shared memory, which are aligned and within it. */
static uint8_t *shared_bytes_at(uint64_t at, int bytes, int line) {
    if (at % bytes)
        fail(line, "%d bytes of shared memory at %llu: not aligned", bytes, (unsigned long long)at);
    if (at + bytes > (uint64_t)machine.shared_bytes)
        fail(line, "%d bytes of shared memory at %llu: it has %lld", bytes, (unsigned long long)at, (long long)machine.shared_bytes);
    return machine.current->block->shared + at;
}

/* The same, of what the running thread reads or writes. */
static void *shared_place(uint64_t at, int bytes, int is_write, int line) {
    void *place = shared_bytes_at(at, bytes, line);
    if (machine.launch.checked)
        touch(at, bytes, is_write, 0, line);
    return place;
}

CALLED const void *shared_load(uint64_t at, int bytes, int line) {
    note_shared(at, bytes, line);
    return shared_place(at, bytes, 0, line);
}

CALLED void shared_store(uint64_t at, const void *value, int bytes, int line) {
    void *place = shared_bytes_at(at, bytes, line);
    note_shared(at, bytes, line);
    if (machine.launch.checked)
        touch(at, bytes, 1, !memcmp(place, value, bytes), line);
    memcpy(place, value, bytes);
}

static void empty_shared(Block *block) {
    static const Touch nobody = {.thread = NOBODY};
    memset(block->shared, 0xff, machine.shared_bytes);
    for (int64_t i = 0; i < machine.shared_bytes / 4; i++)
        block->words[i] = (Word){nobody, nobody, nobody, 0};
}

/* Asynchronous copies of up to 16 bytes to shared memory (PTX: Data Movement and Conversion Instructions: Asynchronous copy). Until the
   thread that began it has waited for its group, what a copy writes may be there or not:

     late 0   it is there at once
     late 1   it is not there before it has been waited for
     late 2   any of them come at any time

   With checks, nobody touches what is on its way, nor does a thread end with it. */
enum { MOST_COPIED = 16 };

static void bring(const Thread *t, const Copy *copy) {
    if (copy->bytes)
        memcpy(t->block->shared + copy->to, (void *)copy->from, copy->bytes);
    memset(t->block->shared + copy->to + copy->bytes, 0, copy->size - copy->bytes);
}

static void complete(Thread *t, const Copy *copy, Touch touch) {
    if (machine.launch.late)
        bring(t, copy);
    for (uint32_t word = copy->to / 4; machine.launch.checked && word < (copy->to + copy->size) / 4; word++) {
        t->block->words[word].copying = 0;
        t->block->words[word].written = touch;
    }
}

/* Copies `bytes` and fills up with zeros, to `size`, which is `least` or more. */
CALLED void copy_async(uint32_t to, uint64_t from, int size, int bytes, int least, int line) {
    Thread *t = machine.current;
    if (size < least || size > MOST_COPIED || size & (size - 1) || bytes < 0 || bytes > size)
        fail(line, "copies %d bytes of %d: it is of %d or more, a power of 2, at most %d", bytes, size, least, MOST_COPIED);
    if (from % size)
        fail(line, "copies from %llx: not aligned", (unsigned long long)from);
    shared_place(to, size, 1, line);
    for (int at = 0, step = bytes == size ? size : 1; at < bytes; at += step)
        global_place(from + at, step, line);
    COUNT(COPIED, bytes);
    if (t->begun == t->capacity)
        t->copies = realloc(t->copies, (t->capacity = t->capacity * 2 + 64) * sizeof(Copy));
    t->copies[t->begun++] = (Copy){to, size, bytes, t->group, from};
    for (uint32_t word = to / 4; machine.launch.checked && word < (to + size) / 4; word++)
        t->block->words[word].copying = (int16_t)(t->index + 1);
    if (!machine.launch.late)
        bring(t, &t->copies[t->begun - 1]);
}

CALLED void copies_commit(void) { machine.current->group++; }

/* Waits until at most the `pending` last groups of the thread are under way. */
CALLED void copies_wait(int pending, int line) {
    Thread *t = machine.current;
    while (t->done < t->begun && t->copies[t->done].group < t->group - pending)
        complete(t, &t->copies[t->done++], touch_of(t, 15, line));
    if (t->done == t->begun && !t->arrival_count)
        t->done = t->begun = 0;
}

/* Some of what is under way comes now. */
static void bring_some(const Thread *t) {
    for (int i = t->done; i < t->begun; i++)
        if (draw() % 2)
            bring(t, &t->copies[i]);
}

#endif
