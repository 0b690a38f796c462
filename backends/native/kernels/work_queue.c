/* The queue from which the threads of the CPU kernel take tasks, by an atomic counter; each thread has a part of one allocation
 * as scratch. Of many sequences, task i of the call is task i - task_end[e - 1] of entry e, which is a round of a sequence.
 */
#define _GNU_SOURCE
#include "rounds.h"
#include "sequences.h"
#include "step.h"
#include "threads.h"

#include <time.h>

/* Scratch of a call that its thread keeps for the next one: for few rows the allocator takes longer than what is computed, and large
 * blocks that come and go make it join what is free. A call within a call, by a signal's handler, finds none kept. */
#ifdef __SANITIZE_ADDRESS__
#define KEPT_BYTES ((size_t)0) /* it tells whoever reads or writes beyond a block, which then has to be as large as asked for */
#else
#define KEPT_BYTES ((size_t)1 << 20) /* of every kept block; what takes more takes long */
#endif

static pthread_key_t kept_block;
static int has_key = 0;

__attribute__((constructor)) static void make_key(void) { has_key = !pthread_key_create(&kept_block, free); }

static int is_kept(size_t bytes) { return has_key && bytes <= KEPT_BYTES; }

/* So many bytes, on whole lines of the cache; NULL where there is no memory. */
static void *take_memory(size_t bytes) {
    void *memory = is_kept(bytes) ? pthread_getspecific(kept_block) : NULL;
    if (memory)
        pthread_setspecific(kept_block, NULL);
    else if (posix_memalign(&memory, 64, is_kept(bytes) ? KEPT_BYTES : bytes))
        return NULL;
    return memory;
}

/* Give back what take_memory gave for so many bytes. */
static void keep_memory(void *memory, size_t bytes) {
    if (!is_kept(bytes) || pthread_getspecific(kept_block) || pthread_setspecific(kept_block, memory))
        free(memory);
}

typedef struct {
    const InstructionSet *code;
    const Problem *problem;
    const Step *step; /* a step, whose tasks are its pieces; NULL: a phase of the problem */
    int (*interrupted)(void);
    int phase, stopped;
    int64_t tasks, next, rounds, side_by_side; /* rounds: 1 but in BACKWARD; side_by_side: tasks of a round */
    int64_t *task_end; /* (rounds, sequences): where the tasks of each sequence end; NULL: the problem is one */
    Turns *turns;      /* (side_by_side,), of the chunks of all sequences; NULL: there is one round */
    char *scratch; /* one allocation for all threads: allocators keep what is freed in other threads than the first */
    size_t scratch_bytes;
    unsigned arrived;
    pthread_t caller;
    double next_check;
} WorkQueue;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Ten times a second, on the caller's thread: end the queue if the caller was interrupted. */
static void check_interrupt(WorkQueue *queue) {
    if (now() < queue->next_check)
        return;
    queue->next_check = now() + 0.1;
    if (queue->interrupted && queue->interrupted()) {
        __atomic_store_n(&queue->stopped, 1, __ATOMIC_RELAXED);
        __atomic_store_n(&queue->next, queue->tasks, __ATOMIC_RELAXED);
    }
}

/* Wait until it is a task's turn; 0 where the queue ended before. */
static int await(WorkQueue *queue, const Turn *turn, int caller) {
    for (int64_t looks = 1; !is_due(turn); looks++) {
        if (__atomic_load_n(&queue->stopped, __ATOMIC_RELAXED))
            return 0;
        if (looks % SPINS)
            continue;
        if (caller)
            check_interrupt(queue);
        sched_yield();
    }
    return 1;
}

/* Run a task of a round of `problem`, whose chunks' turns begin at `first`. */
static void run_in_turn(
    WorkQueue *queue, const Problem *problem, int64_t round, int64_t index, int64_t first, void *scratch, int caller
) {
    if (!queue->turns) {
        queue->code->run_task(problem, queue->phase, index, scratch);
        return;
    }
    Problem of_round = *problem;
    of_round.shift = shift_of(problem, index, round);
    Turn turn = turn_of(queue->turns + first, &of_round, index, round);
    if (await(queue, &turn, caller)) {
        queue->code->run_task(&of_round, queue->phase, index, scratch);
        end_turn(&turn);
    }
}

static void run_task(WorkQueue *queue, int64_t task, void *scratch, int caller) {
    if (queue->step) {
        queue->code->step(queue->step->problem.dtype)->attend_piece(queue->step, task, scratch);
        return;
    }
    if (!queue->task_end) {
        run_in_turn(queue, queue->problem, task / queue->side_by_side, task % queue->side_by_side, 0, scratch, caller);
        return;
    }
    int64_t sequences = sequences_in(queue->problem), entry = first_above(queue->task_end, 0, queue->rounds * sequences - 1, task);
    int64_t sequence = entry % sequences, first = sequence ? queue->task_end[sequence - 1] : 0;
    Problem problem = sequence_of(queue->problem, sequence);
    take_phase(&problem, queue->phase);
    problem.first_part = first / problem.kv_heads;
    run_in_turn(queue, &problem, entry / sequences, task - (entry ? queue->task_end[entry - 1] : 0), first, scratch, caller);
}

static void run_tasks(void *argument) {
    WorkQueue *queue = argument;
    int caller = pthread_equal(pthread_self(), queue->caller);
    char *scratch = queue->scratch + queue->scratch_bytes * __atomic_fetch_add(&queue->arrived, 1, __ATOMIC_RELAXED);
    int64_t task;
    while ((task = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED)) < queue->tasks) {
        run_task(queue, task, scratch, caller);
        if (caller)
            check_interrupt(queue);
    }
}

/* The tasks of all sequences in a round, and the rounds; `chunks` (sequences,) is written where there are rounds. */
static void count_tasks_of_sequences(WorkQueue *queue, int64_t *tasks, int64_t *chunks) {
    for (int64_t i = 0; i < sequences_in(queue->problem); i++) {
        Problem sequence = sequence_of(queue->problem, i);
        take_phase(&sequence, queue->phase);
        tasks[i] = tasks_of_sequence(&sequence, queue->phase);
        chunks[i] = tasks[i] && queue->phase == BACKWARD ? sequence.chunks : 1;
        size_t bytes = tasks[i] ? queue->code->scratch_bytes(&sequence, queue->phase) : 0;
        queue->scratch_bytes = bytes > queue->scratch_bytes ? bytes : queue->scratch_bytes;
        queue->rounds = greater(queue->rounds, chunks[i]);
        queue->side_by_side += tasks[i];
    }
}

/* Round after round the sequences that have chunks for it. */
static int list_sequences(WorkQueue *queue) {
    const int64_t sequences = greater(sequences_in(queue->problem), 1);
    int64_t *tasks = calloc((size_t)sequences, 2 * sizeof *tasks), *chunks = tasks + sequences;
    if (tasks)
        count_tasks_of_sequences(queue, tasks, chunks);
    queue->task_end = tasks ? malloc(sizeof(int64_t) * (size_t)(queue->rounds * sequences)) : NULL;
    for (int64_t entry = 0; queue->task_end && entry < queue->rounds * sequences; entry++) {
        const int64_t sequence = entry % sequences;
        queue->task_end[entry] = queue->tasks += entry / sequences < chunks[sequence] ? tasks[sequence] : 0;
    }
    free(tasks);
    return queue->task_end != NULL;
}

/* Count the tasks, and the scratch that the largest of them needs; 0 where there is no memory for the tables. */
static int count_tasks(WorkQueue *queue) {
    const Problem *problem = queue->problem;
    queue->rounds = 1;
    if (has_sequences(problem)) {
        if (!list_sequences(queue))
            return 0;
    } else {
        queue->rounds = queue->phase == BACKWARD ? problem->chunks : 1;
        queue->side_by_side = native_tasks(problem, queue->phase);
        queue->tasks = queue->rounds * queue->side_by_side;
        queue->scratch_bytes = queue->code->scratch_bytes(problem, queue->phase);
    }
    queue->turns = queue->rounds > 1 ? calloc((size_t)queue->side_by_side, sizeof(Turns)) : NULL;
    return queue->rounds <= 1 || queue->turns != NULL;
}

int64_t native_parts(const Problem *problem) {
    int64_t tasks = has_sequences(problem) ? 0 : native_tasks(problem, BACKWARD);
    for (int64_t i = 0; has_sequences(problem) && i < sequences_in(problem); i++) {
        Problem sequence = sequence_of(problem, i);
        tasks += tasks_of_sequence(&sequence, BACKWARD);
    }
    return tasks / problem->kv_heads;
}

static int run_queue(WorkQueue *queue, int threads) {
    queue->caller = pthread_self(), queue->next_check = now() + 0.1;
    threads = (int)lesser(threads, queue->side_by_side);
    threads = threads > 1 ? threads : 1;
    const size_t bytes = queue->scratch_bytes * (size_t)threads;
    queue->scratch = take_memory(bytes);
    if (!queue->scratch)
        return NATIVE_NO_MEMORY;
    run_on_threads(run_tasks, queue, threads);
    keep_memory(queue->scratch, bytes);
    return queue->stopped ? NATIVE_INTERRUPTED : NATIVE_DONE;
}

int native_run(const InstructionSet *code, const Problem *whole, int phase, int threads, int (*interrupted)(void)) {
    Problem problem = *whole;
    take_phase(&problem, phase);
    WorkQueue queue = {.code = code, .problem = &problem, .phase = phase, .interrupted = interrupted};
    int end = count_tasks(&queue) ? run_queue(&queue, threads) : NATIVE_NO_MEMORY;
    free(queue.task_end), free(queue.turns);
    return end;
}

int native_step(const InstructionSet *code, Step *step, int threads, int (*interrupted)(void)) {
    const StepCode *kernel = code->step(step->problem.dtype);
    WorkQueue queue = {.code = code, .step = step, .interrupted = interrupted, .tasks = step->pieces, .side_by_side = step->pieces};
    queue.scratch_bytes = (size_t)round_up((int64_t)kernel->scratch_bytes(step), 64);
    void *partials = NULL; /* one at least, in which rows are converted before */
    if (posix_memalign(&partials, 64, kernel->partial_bytes(step) * (size_t)greater(step->pieces, 1)))
        return NATIVE_NO_MEMORY;
    step->partials = partials;
    step->first_partial = malloc(sizeof(int64_t) * (size_t)greater(step->problem.batch * step->problem.seq * step->problem.kv_heads, 1));
    int end = NATIVE_NO_MEMORY;
    if (step->first_partial) {
        kernel->write_rows(step);
        end = run_queue(&queue, threads);
        if (end == NATIVE_DONE)
            kernel->merge_pieces(step);
    }
    free(step->first_partial), free(partials);
    return end;
}
