/* What a launch issues, with COUNTED; without it nothing is compiled. `Counts` of tests/ptx/counts.py has the same order.

   An access to shared memory by several lanes takes a wavefront for each 128 bytes, unless different words are in the same of 32 banks:
   of 8 bytes by half a warp at a time, of 16 by a quarter, as is believed. At least it takes as many as there are different words in
   a bank. What lanes touch at the same line, for the same time since they last met, is one instruction. */
#ifndef DILKIT_PTX_COUNTS
#define DILKIT_PTX_COUNTS

#include "thread.h"

enum {
    PRODUCTS_K8,
    PRODUCTS_K16,
    MATRICES,
    MATRIX_WAVEFRONTS,
    SHARED_INSTRUCTIONS,
    SHARED_WAVEFRONTS,
    SHARED_LEAST_WAVEFRONTS,
    GLOBAL_LOADED,
    GLOBAL_STORED,
    COPIED,
    FMA,
    FP32,
    SPECIAL,
    SHUFFLES,
    WARP_BARRIERS,
    BARRIERS,
    ATOMICS,
    COUNTS
};

#ifdef COUNTED

#define COUNT(what, times) (machine.launch.counts[what] += (times))

enum { BANKS = 32, MOST_WORDS = 4 };

/* An access of a lane: the line, and which time since its warp last met. */
typedef struct {
    int line, time, lane, bytes;
    uint32_t at;
} Noted;

typedef struct {
    Noted *all;
    int count, capacity;
} Notes;

static Notes *notes; /* By warp of the launch. */

static void begin_counts(int blocks) { notes = calloc(blocks * MAX_WARPS, sizeof *notes); }

static void end_counts(int blocks) {
    for (int i = 0; i < blocks * MAX_WARPS; i++)
        free(notes[i].all);
    free(notes);
}

static Notes *notes_of(const Thread *t) { return &notes[t->block->index * MAX_WARPS + t->index / WARP]; }

static void note_shared(uint32_t at, int bytes, int line) {
    Thread *t = machine.current;
    Notes *own = notes_of(t);
    int time = 0;
    for (int i = own->count; i-- && own->all[i].lane == t->index % WARP;)
        if (own->all[i].line == line) {
            time = own->all[i].time + 1;
            break;
        }
    if (own->count == own->capacity) {
        own->capacity = own->capacity * 2 + 1024;
        own->all = realloc(own->all, own->capacity * sizeof *own->all);
    }
    own->all[own->count++] = (Noted){line, time, t->index % WARP, bytes, at};
}

/* The most different words in a bank. */
static int wavefronts(const uint32_t *words, int count) {
    uint32_t known[WARP * MOST_WORDS];
    int used = 0, most = 0, in_bank[BANKS] = {0};
    for (int i = 0; i < count; i++) {
        int is_new = 1;
        for (int k = 0; k < used && is_new; k++)
            is_new = known[k] != words[i];
        if (!is_new)
            continue;
        known[used++] = words[i];
        if (++in_bank[words[i] % BANKS] > most)
            most = in_bank[words[i] % BANKS];
    }
    return most;
}

/* Of the words of lanes `from` and above, below `to`. */
static int wavefronts_of_lanes(const Noted *one, int lanes, int from, int to) {
    uint32_t words[WARP * MOST_WORDS];
    int count = 0;
    for (int i = 0; i < lanes; i++)
        for (int b = 0; one[i].lane >= from && one[i].lane < to && b < one[i].bytes; b += 4)
            words[count++] = one[i].at / 4 + b / 4;
    return wavefronts(words, count);
}

/* Of one instruction. */
static int wavefronts_of(const Noted *one, int lanes) {
    int together = one->bytes <= 4 ? WARP : 4 * BANKS / one->bytes, all = 0;
    for (int from = 0; from < WARP; from += together)
        all += wavefronts_of_lanes(one, lanes, from, from + together);
    return all;
}

static int compare_noted(const void *a, const void *b) {
    const Noted *x = a, *y = b;
    return x->line != y->line ? x->line - y->line : x->time != y->time ? x->time - y->time : x->lane - y->lane;
}

/* The lanes of a warp have met, or are done. */
static void count_shared(const Thread *lanes) {
    Notes *own = notes_of(lanes);
    qsort(own->all, own->count, sizeof *own->all, compare_noted);
    for (int first = 0, next; first < own->count; first = next) {
        const Noted *one = own->all + first;
        for (next = first; next < own->count && own->all[next].line == one->line && own->all[next].time == one->time;)
            next++;
        COUNT(SHARED_INSTRUCTIONS, 1);
        COUNT(SHARED_WAVEFRONTS, wavefronts_of(one, next - first));
        COUNT(SHARED_LEAST_WAVEFRONTS, wavefronts_of_lanes(one, next - first, 0, WARP));
    }
    own->count = 0;
}

#else

#define COUNT(what, times) ((void)0)
static inline void begin_counts(int blocks) { (void)blocks; }
static inline void end_counts(int blocks) { (void)blocks; }
static inline void note_shared(uint32_t at, int bytes, int line) { (void)at, (void)bytes, (void)line; }
static inline void count_shared(const Thread *lanes) { (void)lanes; }

#endif

#endif
