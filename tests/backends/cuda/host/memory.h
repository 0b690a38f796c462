/* Global memory, checked against the ranges of the launch; shared memory, NaN at the start of every block; copies between them. */
#ifndef DILKIT_HOST_MEMORY
#define DILKIT_HOST_MEMORY

enum { GUARD = 1024, MAX_COPIES = 512, VECTOR_BYTES = 16 };

/* A gap lies before every array, so that what runs over an end is seen. */
#define SHARED HOST_SHARED(__COUNTER__)
#define HOST_SHARED(number) HOST_SHARED_AFTER(number)
#define HOST_SHARED_AFTER(number)                                                                                                  \
    static __attribute__((section("shared"), aligned(64), used)) char host_gap_##number[64];                                       \
    static __attribute__((section("shared"), aligned(64)))
#define DYNAMIC_SHARED(name) unsigned char *const name = host_dynamic

/* The checks want an alignment of 64 at most. */
SHARED unsigned char host_dynamic_space[1024 + DYNAMIC_BYTES + GUARD] __attribute__((used));
#define host_dynamic ((unsigned char *)(((uintptr_t)host_dynamic_space + 1023) & ~(uintptr_t)1023))

static void host_touch_shared(const char *p, int64_t bytes, int writes, uint32_t site);

extern char __start_shared[] __attribute__((visibility("hidden"))), __stop_shared[] __attribute__((visibility("hidden")));

/* The last ones that were read and written. */
static Range host_range[2];

static void host_forget_range(void) { host_range[0] = host_range[1] = (Range){0}; }

/* All bits set: a NaN in every format. */
static void host_shared_starts(void) { memset(__start_shared, 0xff, __stop_shared - __start_shared); }

static void host_shared_ends(void) {
    int bytes = (int)host.launch.shared_bytes, i = 0;
    while (i < GUARD && host_dynamic[bytes + i] == 0xff)
        i++;
    if (i < GUARD)
        host_fail("byte %d of dynamic shared memory was written: there are %d", bytes + i, bytes);
}

UNCHECKED_INLINE int host_in_range(const Range *range, uintptr_t address, int64_t bytes) {
    return address >= range->low && address + bytes <= range->low + range->bytes;
}

/* Looks for a range that holds `bytes` at `address`, and keeps it for the next time. */
UNCHECKED static __attribute__((noinline)) void host_find_range(uintptr_t address, int64_t bytes, int writes, const char *place) {
    const Range *all = host.launch.ranges, *near = 0;
    for (int64_t i = 0; i < host.launch.range_count; i++) {
        if (host_in_range(&all[i], address, bytes) && !(writes && all[i].constant)) {
            host_range[writes] = all[i];
            return;
        }
        if (address >= all[i].low && (!near || all[i].low > near->low))
            near = &all[i];
    }
    if (!near)
        host_fail("out of bounds: %d bytes at %p are before all tensors of the launch (%s)", (int)bytes, (void *)address, place);
    else if (host_in_range(near, address, bytes))
        host_fail("written, though it is only to be read: byte %lld of %s (%s)", (long long)(address - near->low), near->name,
                  place);
    else
        host_fail("out of bounds: %d bytes at byte %lld of %s, which has %lld (%s)", (int)bytes, (long long)(address - near->low),
                  near->name, (long long)near->bytes, place);
}

UNCHECKED_INLINE void host_check(const void *pointer, int64_t bytes, int64_t alignment, int writes, const char *place) {
    if ((uintptr_t)pointer % alignment)
        host_fail("misaligned: %p is no multiple of %d (%s)", pointer, (int)alignment, place);
    if (!host_in_range(&host_range[writes], (uintptr_t)pointer, bytes))
        host_find_range((uintptr_t)pointer, bytes, writes, place);
}

#define LOAD(pointer)                                                                                                              \
    ({                                                                                                                             \
        __typeof__(pointer) place_ = (pointer);                                                                                    \
        host_check(place_, sizeof *place_, _Alignof(__typeof__(*place_)), 0, HOST_PLACE);                                          \
        *place_;                                                                                                                   \
    })
#define STORE(pointer, value)                                                                                                      \
    ({                                                                                                                             \
        __typeof__(pointer) place_ = (pointer);                                                                                    \
        host_check(place_, sizeof *place_, _Alignof(__typeof__(*place_)), 1, HOST_PLACE);                                          \
        *place_ = (value);                                                                                                         \
        (void)0;                                                                                                                   \
    })
#define atomic_add(pointer, amount) host_atomic_add(pointer, amount, HOST_PLACE)

UNCHECKED static int host_atomic_add(int *pointer, int amount, const char *place) {
    host_check(pointer, sizeof *pointer, sizeof *pointer, 1, place);
    return __atomic_fetch_add(pointer, amount, __ATOMIC_SEQ_CST);
}

UNCHECKED static void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

#define HOST_VECTOR(type, element, bytes, fields)                                                                                  \
    typedef struct {                                                                                                               \
        element fields;                                                                                                            \
    } __attribute__((aligned(bytes), may_alias)) type;
#define HOST_2 x, y
#define HOST_4 x, y, z, w
HOST_VECTOR(int2, int, 8, HOST_2)
HOST_VECTOR(int4, int, 16, HOST_4)
HOST_VECTOR(uint2, unsigned, 8, HOST_2)
HOST_VECTOR(uint4, unsigned, 16, HOST_4)
HOST_VECTOR(float2, float, 8, HOST_2)
HOST_VECTOR(float4, float, 16, HOST_4)

/* Functions: a compound literal would be written number by number. */
#define HOST_MAKE_2(type, element)                                                                                                 \
    UNCHECKED static type make_##type(element x, element y) { return (type){x, y}; }
#define HOST_MAKE_4(type, element)                                                                                                 \
    UNCHECKED static type make_##type(element x, element y, element z, element w) { return (type){x, y, z, w}; }
HOST_MAKE_2(int2, int)
HOST_MAKE_4(int4, int)
HOST_MAKE_2(uint2, unsigned)
HOST_MAKE_4(uint4, unsigned)
HOST_MAKE_2(float2, float)
HOST_MAKE_4(float4, float)

#define load_words(pointer) LOAD((const uint4 *)(pointer))
#define store_words(pointer, words) STORE((uint4 *)(pointer), words)
#define load_floats(pointer) LOAD((const float4 *)(pointer))
#define store_floats(pointer, floats) STORE((float4 *)(pointer), floats)

static void host_check_shared(const void *pointer, const char *place) {
    const char *p = pointer;
    const char *low = (char *)host_dynamic_space, *high = low + sizeof host_dynamic_space;
    int dynamic = p >= low && p < high;
    if (p < __start_shared || p + VECTOR_BYTES > __stop_shared ||
        (dynamic && (p < (char *)host_dynamic || p + VECTOR_BYTES > (char *)host_dynamic + host.launch.shared_bytes)))
        host_fail("out of bounds: 16 bytes at %p are not in shared memory (%s)", pointer, place);
    if ((uintptr_t)pointer % VECTOR_BYTES)
        host_fail("misaligned: %p in shared memory is no multiple of 16 (%s)", pointer, place);
}

/* The copies that a thread has begun, in the order of their groups: [done, begun) are under way. */
typedef struct {
    void *to;
    const void *from;
    int group;
} Copy;

static struct {
    Copy copy[MAX_COPIES];
    int begun, done, group;
} host_copies[THREADS];

/* Nothing can be said of the target until the copy is waited for: it is NaN. */
UNCHECKED static __attribute__((noinline)) void host_copy(void *to, const void *from, int present, const char *place) {
    host_check_shared(to, place);
    host_check(from, VECTOR_BYTES, VECTOR_BYTES, 0, place); /* of no bytes, too */
    int mine = host.current;
    if (host_copies[mine].begun - host_copies[mine].done == MAX_COPIES)
        host_fail("more than %d copies under way (%s)", MAX_COPIES, place);
    Copy copy = {to, present ? from : 0, host_copies[mine].group};
    host_copies[mine].copy[host_copies[mine].begun++ % MAX_COPIES] = copy;
    host_touch_shared(to, VECTOR_BYTES, 1, SITE);
    memset(to, 0xff, VECTOR_BYTES);
}

UNCHECKED static __attribute__((noinline)) void host_copy_wait(int pending) {
    int mine = host.current;
    while (host_copies[mine].done < host_copies[mine].begun) {
        Copy copy = host_copies[mine].copy[host_copies[mine].done % MAX_COPIES];
        if (copy.group >= host_copies[mine].group - pending)
            return;
        host_copies[mine].done++;
        host_touch_shared(copy.to, VECTOR_BYTES, 1, SITE);
        if (copy.from)
            memcpy(copy.to, copy.from, VECTOR_BYTES);
        else
            memset(copy.to, 0, VECTOR_BYTES);
    }
}

static void host_thread_starts(void) {
    int mine = host.current;
    host_copies[mine].begun = host_copies[mine].done = host_copies[mine].group = 0;
}

static void host_thread_ends(void) {
    int under_way = host_copies[host.current].begun - host_copies[host.current].done;
    if (under_way)
        host_fail("finished with %d copies that it never waited for", under_way);
}

#define copy_async(to, from) host_copy(to, from, 1, HOST_PLACE)
#define copy_async_or_zero(to, from, present) host_copy(to, from, present, HOST_PLACE)
#define copy_async_commit() ((void)host_copies[host.current].group++)
#define copy_async_wait(pending) host_copy_wait(pending)

#endif
