/* Shared memory: every access is aligned and within what the launch has; what two threads touch, one of them writing, is apart by a
   barrier of the block or the warp (PTX: Memory Consistency Model, Conflict and Data-races). But several threads may write the same at
   the same instruction, whichever of them comes last. Words that no thread has written are NaN. */
#ifndef DILKIT_PTX_SHARED
#define DILKIT_PTX_SHARED

#include "counts.h"
#include "thread.h"

enum { NOBODY = -1, SEVERAL = -2 }; /* In the place of a thread; several, of more than one warp. */

static int in_order(const Touch *before, const Touch *now) {
    if (before->thread == NOBODY || before->thread == now->thread || before->meeting != now->meeting || !(before->bytes & now->bytes))
        return 1;
    return before->thread != SEVERAL && before->thread / WARP == now->thread / WARP && before->warp_meeting != now->warp_meeting;
}

static void race(const Touch *before, const Touch *now, int is_write, uint32_t at) {
    fail(now->line, "race: it %s shared memory at %u, which thread %d touches at line %d", is_write ? "writes" : "reads", at,
         before->thread, before->line);
}

/* `is_same`: it writes what is there. */
static void touch_word(Word *word, uint32_t at, Touch now, int is_write, int is_same) {
    if (word->copying)
        fail(now.line, "%s shared memory at %u while a copy of thread %d to it is under way", is_write ? "writes" : "reads", at,
             word->copying - 1);
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
    return (Touch){t->block->meeting, t->block->warp_meeting[t->index / WARP], (int16_t)t->index, bytes, line};
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

#endif
