/* Every access that a kernel makes, when it is compiled with HOST_CHECKED: the compiler has these functions called before each
   (-fsanitize=thread, with no runtime but this one). Shared memory: inside one array, and no race. All other memory: of the
   launch, or the kernel's own. Signed numbers that do not fit are caught as well.

   A race: two threads touch a byte, one of them writes, and no `synchronize` lies between; in one warp, no `synchronize_warp`
   either. Nothing else orders memory: that lanes ran in some order is an accident. */
#ifndef DILKIT_HOST_CHECK
#define DILKIT_HOST_CHECK

#ifdef HOST_CHECKED

enum { SHARED_LIMIT = 512 * 1024, MAX_ARRAYS = 64 };

/* Who touched a word: barriers so far, those of the warp, the thread, which of the four bytes, and the place in the code. */
typedef struct {
    uint32_t barriers, warp_barriers;
    uint16_t thread, bytes;
    uint32_t site;
} Access;

static struct {
    Range array[MAX_ARRAYS];
    int arrays;
    uint32_t barriers, warp_barriers[WARPS];
    struct {
        Access written, read, also_read;
    } word[SHARED_LIMIT / 4];
    unsigned char owner[SHARED_LIMIT];
} host_check_state;

#define CHECK host_check_state

enum { GAP, DYNAMIC, FIRST };

UNCHECKED static void host_add_array(int id, uintptr_t low, int64_t bytes, const char *name) {
    CHECK.array[id] = (Range){low, bytes, name, 0};
    memset(CHECK.owner + (low - (uintptr_t)__start_shared), id, bytes);
}

/* The launcher knows where the arrays are from the library's symbols; between them lie gaps. */
UNCHECKED static void host_check_starts(void) {
    memset(CHECK.owner, GAP, SHARED_LIMIT);
    CHECK.arrays = FIRST;
    for (int64_t i = 0; i < host.launch.array_count && CHECK.arrays < MAX_ARRAYS; i++) {
        const Range *array = &host.launch.arrays[i];
        uintptr_t low = (uintptr_t)__ehdr_start + array->low;
        if (low >= (uintptr_t)__start_shared && low < (uintptr_t)__stop_shared && low != (uintptr_t)host_dynamic_space)
            host_add_array(CHECK.arrays++, low, array->bytes, array->name);
    }
    host_add_array(DYNAMIC, (uintptr_t)host_dynamic, host.launch.shared_bytes, "dynamic shared memory");
}

UNCHECKED static void host_barrier_passed(void) { CHECK.barriers++; }
UNCHECKED static void host_warp_barrier_passed(int warp) { CHECK.warp_barriers[warp]++; }

UNCHECKED static void host_outside(const char *p, int64_t bytes, const char *verb, uint32_t site) {
    const Range *near = 0;
    for (int i = DYNAMIC; i < CHECK.arrays; i++)
        if (CHECK.array[i].low <= (uintptr_t)p && (!near || near->low < CHECK.array[i].low))
            near = &CHECK.array[i];
    if (near)
        host_fail("out of bounds: it %s %d bytes at byte %lld of %s, which has %lld (@%x)", verb, (int)bytes,
                  (long long)((uintptr_t)p - near->low), near->name, (long long)near->bytes, site);
    host_fail("out of bounds: it %s %d bytes of shared memory before all arrays (@%x)", verb, (int)bytes, site);
}

/* Whether `now` may go on where `then` was: other bytes, from before a barrier, or the same thread's. An unset one is. */
UNCHECKED static int host_ordered_among(const Access *then, const Access *now) {
    return then->thread == now->thread || !(then->bytes & now->bytes) ||
           (then->thread / WARP == now->thread / WARP && then->warp_barriers != now->warp_barriers);
}

UNCHECKED_INLINE int host_ordered(const Access *then, const Access *now) {
    return then->barriers != now->barriers || host_ordered_among(then, now);
}

UNCHECKED static void host_race(int64_t word, const Access *then, const char *was, const Access *now, const char *verb) {
    const Range *array = &CHECK.array[CHECK.owner[4 * word + __builtin_ctz(then->bytes & now->bytes)]];
    host_fail("race: it %s byte %lld of %s (@%x), which thread %d %s (@%x) with no barrier between", verb,
              (long long)((uintptr_t)__start_shared + 4 * word + __builtin_ctz(then->bytes & now->bytes) - array->low), array->name,
              now->site, then->thread, was, then->site);
}

UNCHECKED_INLINE void host_reads(int64_t word, const Access *now) {
    if (!host_ordered(&CHECK.word[word].written, now))
        host_race(word, &CHECK.word[word].written, "wrote", now, "reads");
    if (host_ordered(&CHECK.word[word].read, now))
        CHECK.word[word].read = *now;
    else
        CHECK.word[word].also_read = *now;
}

UNCHECKED_INLINE void host_writes(int64_t word, const Access *now) {
    if (!host_ordered(&CHECK.word[word].written, now))
        host_race(word, &CHECK.word[word].written, "wrote", now, "writes");
    if (!host_ordered(&CHECK.word[word].read, now))
        host_race(word, &CHECK.word[word].read, "read", now, "writes");
    if (!host_ordered(&CHECK.word[word].also_read, now))
        host_race(word, &CHECK.word[word].also_read, "read", now, "writes");
    CHECK.word[word].written = *now;
}

UNCHECKED static void host_touch_shared(const char *p, int64_t bytes, int writes, uint32_t site) {
    int64_t at = p - __start_shared;
    if (CHECK.owner[at] == GAP || CHECK.owner[at + bytes - 1] != CHECK.owner[at])
        host_outside(p, bytes, writes ? "writes" : "reads", site);
    host_note_touch(p, bytes, site);
    Access now = {CHECK.barriers, CHECK.warp_barriers[host.current / WARP], (uint16_t)host.current, 15, site};
    for (int64_t word = at / 4; word * 4 < at + bytes; word++) {
        int64_t skipped = at - word * 4, kept = at + bytes - word * 4;
        now.bytes = (uint16_t)((skipped > 0 ? 15 << skipped : 15) & (kept < 4 ? 15 >> (4 - kept) : 15));
        if (writes)
            host_writes(word, &now);
        else
            host_reads(word, &now);
    }
}

UNCHECKED_INLINE int host_within(const char *p, int64_t bytes, const char *low, const char *high) {
    return p >= low && p + bytes <= high;
}

UNCHECKED static void host_touch(const void *pointer, int64_t bytes, int writes, uint32_t site) {
    const char *p = pointer;
    if (!host.running)
        return;
    if (host_within(p, bytes, __start_shared, __stop_shared))
        host_touch_shared(p, bytes, writes, site);
    else if (!host_within(p, bytes, host.stacks, host.stacks + (int64_t)THREADS * STACK) &&
             !host_within(p, bytes, __ehdr_start, _end) &&
             !host_within(p, bytes, host.args, (const char *)host.args + host.args_bytes))
        host_check(p, bytes, 1, writes, "read or written without LOAD or STORE");
}

#define ACCESS(bytes)                                                                                                              \
    UNCHECKED void __tsan_read##bytes(void *p) { host_touch(p, bytes, 0, SITE); }                                                  \
    UNCHECKED void __tsan_write##bytes(void *p) { host_touch(p, bytes, 1, SITE); }                                                 \
    UNCHECKED void __tsan_unaligned_read##bytes(void *p) { host_touch(p, bytes, 0, SITE); }                                        \
    UNCHECKED void __tsan_unaligned_write##bytes(void *p) { host_touch(p, bytes, 1, SITE); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

UNCHECKED void __tsan_read_range(void *p, long bytes) { host_touch(p, bytes, 0, SITE); }
UNCHECKED void __tsan_write_range(void *p, long bytes) { host_touch(p, bytes, 1, SITE); }
UNCHECKED void __tsan_init(void) {}

/* Where something is undefined, and of which types. */
typedef struct {
    const char *file;
    uint32_t line, column;
    const struct {
        uint16_t kind, info;
        char name[];
    } * type, *index;
} Undefined;

/* An index that is not below the size of its own dimension (-fsanitize=bounds). */
UNCHECKED void __ubsan_handle_out_of_bounds(void *about, void *index) {
    const Undefined *what = about;
    host_fail("index %lld is out of bounds of %s (%s:%d)", (long long)(intptr_t)index, what->type->name, what->file,
              (int)what->line);
}

UNCHECKED static void host_does_not_fit(const Undefined *what, void *left, char sign, void *right) {
    host_fail("overflow: %lld %c %lld is no %s (%s:%d)", (long long)(intptr_t)left, sign, (long long)(intptr_t)right,
              what->type->name, what->file, (int)what->line);
}

/* A result that does not fit into its signed type (-fsanitize=signed-integer-overflow). */
UNCHECKED void __ubsan_handle_add_overflow(void *what, void *left, void *right) { host_does_not_fit(what, left, '+', right); }
UNCHECKED void __ubsan_handle_sub_overflow(void *what, void *left, void *right) { host_does_not_fit(what, left, '-', right); }
UNCHECKED void __ubsan_handle_mul_overflow(void *what, void *left, void *right) { host_does_not_fit(what, left, '*', right); }
UNCHECKED void __ubsan_handle_divrem_overflow(void *what, void *left, void *right) { host_does_not_fit(what, left, '/', right); }
UNCHECKED void __ubsan_handle_negate_overflow(void *what, void *right) { host_does_not_fit(what, 0, '-', right); }

#else

static inline void host_barrier_passed(void) {}
static inline void host_warp_barrier_passed(int warp) { (void)warp; }
static inline void host_touch_shared(const char *p, int64_t bytes, int writes, uint32_t site) {
    (void)p, (void)bytes, (void)writes, (void)site;
}
static inline void host_check_starts(void) {}

#endif

#endif
