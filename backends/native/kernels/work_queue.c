/* The threads of the CPU kernel, and the queue from which they take tasks.
 *
 *     tasks 0, 1, 2, ...  --- next (an atomic counter) --->  thread 0 (the caller)  run_task(i, scratch 0)
 *                                                            thread 1               run_task(j, scratch 1)   ...
 *
 *     scratch: one allocation of `threads` equal parts, one for each thread that arrives
 *     many sequences: task i of the call is task i - task_end[s - 1] of sequence s
 *
 * The threads are those of the OpenMP runtime that torch has loaded, so that torch's do not spin in the way of others; a child
 * process made by fork cannot use them. Else they are our own, started for this call and joined at its end: nothing is inherited
 * and nothing shared between callers.
 */
#define _GNU_SOURCE
#include "sequences.h"
#include "step.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    const InstructionSet *code;
    const Problem *problem;
    const Step *step; /* a step, whose tasks are its pieces; NULL: a phase of the problem */
    int (*interrupted)(void);
    int phase, stopped;
    int64_t tasks, next;
    int64_t *task_end; /* (sequences,): where the tasks of each sequence end; NULL: the problem is one */
    char *scratch; /* one allocation for all threads: allocators keep what is freed in other threads than the first */
    size_t scratch_bytes;
    unsigned arrived;
    pthread_t caller;
    double next_check;
} WorkQueue;

typedef void (*ParallelRegion)(void (*function)(void *), void *data, unsigned threads, unsigned flags);

static int forked = 0;

static void in_child(void) { forked = 1; }

/* Whether this process is a child that never called exec, as Linux says: what its parent did before this library was loaded
 * is not known. */
static int forked_before(void) {
    enum { FORKED_NO_EXEC = 0x40 };
    char text[1024] = "";
    unsigned flags = 0;
    FILE *file = fopen("/proc/self/stat", "re");
    if (!file)
        return 0;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    const char *name_end = strrchr(text, ')'); /* the name of a program may hold anything */
    return name_end && sscanf(name_end, ") %*c %*d %*d %*d %*d %*d %u", &flags) == 1 && flags & FORKED_NO_EXEC;
}

__attribute__((constructor)) static void watch_forks(void) {
    forked = forked_before();
    pthread_atfork(NULL, NULL, in_child);
}

/* The entry point of torch's OpenMP runtime, or NULL. */
static ParallelRegion openmp_of_torch(void) {
    void *torch = forked ? NULL : dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!torch)
        return NULL;
    ParallelRegion found = (ParallelRegion)dlsym(torch, "GOMP_parallel");
    dlclose(torch);
    return found;
}

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
        queue->stopped = 1;
        __atomic_store_n(&queue->next, queue->tasks, __ATOMIC_RELAXED);
    }
}

static void run_task(const WorkQueue *queue, int64_t task, void *scratch) {
    if (queue->step) {
        queue->code->step(queue->step->problem.dtype)->attend_piece(queue->step, task, scratch);
        return;
    }
    if (!queue->task_end) {
        queue->code->run_task(queue->problem, queue->phase, task, scratch);
        return;
    }
    int64_t sequence = sequence_of_task(queue->task_end, sequences_in(queue->problem), task);
    Problem problem = sequence_of(queue->problem, sequence);
    take_phase(&problem, queue->phase);
    problem.first_part = sequence ? queue->task_end[sequence - 1] / problem.kv_heads : 0;
    queue->code->run_task(&problem, queue->phase, task - (sequence ? queue->task_end[sequence - 1] : 0), scratch);
}

/* What every thread does: take the next task until none is left. */
static void run_tasks(void *argument) {
    WorkQueue *queue = argument;
    int caller = pthread_equal(pthread_self(), queue->caller);
    char *scratch = queue->scratch + queue->scratch_bytes * __atomic_fetch_add(&queue->arrived, 1, __ATOMIC_RELAXED);
    int64_t task;
    while ((task = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED)) < queue->tasks) {
        run_task(queue, task, scratch);
        if (caller)
            check_interrupt(queue);
    }
}

static void *thread_main(void *argument) {
    run_tasks(argument);
    return NULL;
}

static void run_on_own_threads(WorkQueue *queue, int threads) {
    pthread_t *thread = malloc(sizeof(pthread_t) * (size_t)threads);
    int started = 0;
    while (thread && started < threads - 1 && !pthread_create(&thread[started], NULL, thread_main, queue))
        started++;
    run_tasks(queue);
    while (started)
        pthread_join(thread[--started], NULL);
    free(thread);
}

/* Count the tasks, and the scratch that the largest of them needs; 0 where there is no memory for the table of sequences. */
static int count_tasks(WorkQueue *queue) {
    const Problem *problem = queue->problem;
    if (!has_sequences(problem)) {
        queue->tasks = native_tasks(problem, queue->phase);
        queue->scratch_bytes = queue->code->scratch_bytes(problem, queue->phase);
        return 1;
    }
    queue->task_end = malloc(sizeof(int64_t) * (size_t)greater(sequences_in(problem), 1));
    for (int64_t i = 0; queue->task_end && i < sequences_in(problem); i++) {
        Problem sequence = sequence_of(problem, i);
        take_phase(&sequence, queue->phase);
        int64_t tasks = tasks_of_sequence(&sequence, queue->phase);
        size_t bytes = tasks ? queue->code->scratch_bytes(&sequence, queue->phase) : 0;
        queue->scratch_bytes = bytes > queue->scratch_bytes ? bytes : queue->scratch_bytes;
        queue->task_end[i] = queue->tasks += tasks;
    }
    return queue->task_end != NULL;
}

int64_t native_rounds(const Problem *problem) {
    int64_t most = has_sequences(problem) ? 1 : problem->chunks;
    for (int64_t i = 0; has_sequences(problem) && i < sequences_in(problem); i++) {
        Problem sequence = sequence_of(problem, i);
        most = sequence.seq > 0 ? greater(most, sequence.chunks) : most;
    }
    return most;
}

int64_t native_parts(const Problem *problem) {
    int64_t tasks = has_sequences(problem) ? 0 : native_tasks(problem, BACKWARD);
    for (int64_t i = 0; has_sequences(problem) && i < sequences_in(problem); i++) {
        Problem sequence = sequence_of(problem, i);
        tasks += tasks_of_sequence(&sequence, BACKWARD);
    }
    return tasks / problem->kv_heads;
}

/* Run the tasks of a queue, which have been counted. */
static int run_queue(WorkQueue *queue, int threads) {
    queue->caller = pthread_self(), queue->next_check = now() + 0.1;
    threads = (int)(threads < queue->tasks ? threads : queue->tasks);
    threads = threads > 1 ? threads : 1;
    void *memory = NULL;
    if (posix_memalign(&memory, 64, queue->scratch_bytes * (size_t)threads))
        return NATIVE_NO_MEMORY;
    queue->scratch = memory;
    ParallelRegion parallel = threads > 1 ? openmp_of_torch() : NULL;
    if (parallel)
        parallel(run_tasks, queue, (unsigned)threads, 0);
    else
        run_on_own_threads(queue, threads);
    free(memory);
    return queue->stopped ? NATIVE_INTERRUPTED : NATIVE_DONE;
}

int native_run(const InstructionSet *code, const Problem *whole, int phase, int threads, int (*interrupted)(void)) {
    Problem problem = *whole;
    take_phase(&problem, phase);
    WorkQueue queue = {.code = code, .problem = &problem, .phase = phase, .interrupted = interrupted};
    int end = count_tasks(&queue) ? run_queue(&queue, threads) : NATIVE_NO_MEMORY;
    free(queue.task_end);
    return end;
}

int native_step(const InstructionSet *code, Step *step, int threads, int (*interrupted)(void)) {
    const StepCode *kernel = code->step(step->problem.dtype);
    WorkQueue queue = {.code = code, .step = step, .interrupted = interrupted, .tasks = step->pieces};
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
