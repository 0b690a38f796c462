/* Asynchronous copies of up to 16 bytes to shared memory (PTX: Data Movement and Conversion Instructions: Asynchronous copy). Until the
   thread that began it has waited for its group, what a copy writes may be there or not:

     late 0   it is there at once
     late 1   it is not there before it has been waited for
     late 2   any of them come at any time

   With checks, nobody touches what is on its way, nor does a thread end with it. */
#ifndef DILKIT_PTX_COPIES
#define DILKIT_PTX_COPIES

#include "global.h"
#include "shared.h"

enum { MOST_COPIED = 16 };

static void bring(const Thread *t, const Copy *copy) {
    if (copy->bytes)
        memcpy(t->block->shared + copy->to, (void *)copy->from, copy->bytes);
    memset(t->block->shared + copy->to + copy->bytes, 0, copy->size - copy->bytes);
}

static void complete(Thread *t, const Copy *copy, int line) {
    if (machine.launch.late)
        bring(t, copy);
    for (uint32_t word = copy->to / 4; machine.launch.checked && word < (copy->to + copy->size) / 4; word++) {
        t->block->words[word].copying = 0;
        t->block->words[word].written = touch_of(t, 15, line);
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
        complete(t, &t->copies[t->done++], line);
    if (t->done == t->begun)
        t->done = t->begun = 0;
}

/* Some of what is under way comes now. */
static void bring_some(const Thread *t) {
    for (int i = t->done; i < t->begun; i++)
        if (draw() % 2)
            bring(t, &t->copies[i]);
}

#endif
