/* Scratch of a call that its thread keeps for the next one: for few rows the allocator takes longer than what is computed, and large
 * blocks that come and go make it join what is free. Included by work_queue.c alone.
 *
 *     thread    call            take_memory  --->  the kept block, or a new one  --->  keep_memory  --->  the kept block, freed with the thread
 *               one within it   take_memory  --->  a new one, as none is kept    --->  keep_memory
 *               (by a signal's handler)
 */
#ifndef DILKIT_NATIVE_KEPT_MEMORY_H
#define DILKIT_NATIVE_KEPT_MEMORY_H

#include <pthread.h>
#include <stdlib.h>

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

#endif
