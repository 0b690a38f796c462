/* When a task of BACKWARD may begin: no two tasks add to the same rows at once, and all sums have one order.
 *
 * In each round a chunk of keys goes with another one of queries. All rounds are in one queue; a task begins when the one before
 * has ended, both of its keys and of its queries. Those before are earlier in the queue, so a thread waits only for tasks that
 * others are running. A head meets its chunks with themselves in the middle, and every second one goes the other way round:
 * under causality one has little to do while another has much.
 */
#ifndef DILKIT_NATIVE_ROUNDS_H
#define DILKIT_NATIVE_ROUNDS_H

#include "native.h"

#include <sched.h>

enum { SPINS = 1024 }; /* looks at a turn before the core is offered to another thread */

/* The rounds of a chunk that have ended, as keys and as queries. */
typedef struct {
    int32_t keys, queries;
} Turns;

/* What a task of a round waits for: the turns of its own chunks, among those of its sequence. */
typedef struct {
    int32_t *keys, *queries, round;
} Turn;

/* How many chunks the queries of a task are after its keys; a chunk with itself, which has the most to do, is in the middle. */
static inline int64_t shift_of(const Problem *p, int64_t index, int64_t round) {
    int64_t half = p->chunks / 2;
    return (index / p->chunks % 2 ? p->chunks + half - round : half + round) % p->chunks;
}

static inline Turn turn_of(Turns *turns, const Problem *p, int64_t index, int64_t round) {
    int64_t chunk = chunk_of_task(p, index), first = index / p->chunks * p->chunks;
    return (Turn){&turns[first + chunk].keys, &turns[first + (chunk + p->shift) % p->chunks].queries, (int32_t)round};
}

static inline int is_due(const Turn *turn) {
    return __atomic_load_n(turn->keys, __ATOMIC_ACQUIRE) == turn->round && __atomic_load_n(turn->queries, __ATOMIC_ACQUIRE) == turn->round;
}

static inline void end_turn(const Turn *turn) {
    __atomic_store_n(turn->keys, turn->round + 1, __ATOMIC_RELEASE);
    __atomic_store_n(turn->queries, turn->round + 1, __ATOMIC_RELEASE);
}

#endif
