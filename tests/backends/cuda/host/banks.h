/* Turns at shared memory. Its 32 banks are 4 bytes wide each: what the lanes of a warp touch with one instruction is served in one
   turn for each 128 bytes, unless different words are in the same bank; the same word serves all lanes.

   With HOST_CHECKED every access is counted, of 8 bytes by half a warp and of 16 by a quarter. What lanes touch from the same place in
   the code, for the same time since they last met, is one instruction. The compiler of a GPU may join accesses that are apart here. */
#ifndef DILKIT_HOST_BANKS
#define DILKIT_HOST_BANKS

enum { BANKS = 32, MAX_TOUCHES = 1 << 14 };

/* Turns of `count` lanes that touch `bytes` each, beyond the first. */
UNCHECKED static int host_turns(const uint32_t *address, int count, int bytes) {
    uint32_t words[WARP], used = 0, most = 0, in_bank[BANKS] = {0};
    for (int i = 0; i < count; i++)
        for (int b = 0; b < bytes || !b; b += 4) {
            uint32_t word = address[i] / 4 + b / 4, known = 0;
            for (uint32_t k = 0; k < used && !known; k++)
                known = words[k] == word;
            if (known)
                continue;
            words[used++] = word;
            in_bank[word % BANKS]++;
            most = in_bank[word % BANKS] > most ? in_bank[word % BANKS] : most;
        }
    return most ? (int)most - 1 : 0;
}

#ifdef HOST_CHECKED

/* By place in the code, then lane, then time: one number. */
typedef struct {
    uint64_t key;
    uint32_t address, bytes;
} Touch;

static struct {
    int count, by_lane[WARP];
    Touch touch[WARP * MAX_TOUCHES];
} host_warp;

/* The running thread touches shared memory. */
UNCHECKED static void host_note_touch(const char *p, int64_t bytes, uint32_t site) {
    int lane = host.current % WARP;
    if (host_warp.by_lane[lane] == MAX_TOUCHES)
        host_fail("more than %d accesses to shared memory before the lanes of the warp meet", MAX_TOUCHES);
    uint64_t key = (uint64_t)site << 32 | (uint64_t)lane << 16 | (uint64_t)host_warp.by_lane[lane]++;
    host_warp.touch[host_warp.count++] = (Touch){key, (uint32_t)(uintptr_t)p, (uint32_t)bytes};
}

UNCHECKED static int host_compare(const void *a, const void *b) {
    uint64_t x = ((const Touch *)a)->key, y = ((const Touch *)b)->key;
    return (x > y) - (x < y);
}

/* Adds one instruction to what is known of its place. */
UNCHECKED static void host_add_turns(uint32_t site, int bytes, int turns) {
    CodePlace *places = host.launch.places;
    int i = 0;
    while (i < MAX_PLACES && places[i].accesses && (places[i].site != site || places[i].bytes != bytes))
        i++;
    if (i == MAX_PLACES)
        host_fail("more than %d places in the code touch shared memory", MAX_PLACES);
    places[i].site = site, places[i].bytes = bytes, places[i].accesses++, places[i].turns += turns;
}

/* The instruction that lane after lane of `touch` has executed for the same time: those of one phase at a time. */
UNCHECKED static void host_count_instruction(Touch *const *touch, int lanes) {
    int bytes = (int)touch[0]->bytes, together = bytes <= 4 ? WARP : 4 * BANKS / bytes, turns = 0;
    uint32_t address[WARP];
    for (int phase = 0; phase < WARP; phase += together) {
        int count = 0;
        for (int i = 0; i < lanes; i++) {
            int lane = (int)(touch[i]->key >> 16 & (WARP - 1));
            if (lane >= phase && lane < phase + together)
                address[count++] = touch[i]->address;
        }
        turns += host_turns(address, count, bytes);
    }
    host_add_turns((uint32_t)(touch[0]->key >> 32), bytes, turns);
}

/* The lanes of the running warp have met. */
UNCHECKED static void host_count_touches(void) {
    Touch *all = host_warp.touch, *end = all + host_warp.count;
    qsort(all, host_warp.count, sizeof *all, host_compare);
    for (Touch *first = all; first < end;) {
        Touch *next[WARP], *stop[WARP], *now[WARP];
        int lanes = 0, left = 1;
        uint64_t site = first->key >> 32;
        while (first < end && first->key >> 32 == site) {
            uint64_t lane = first->key >> 16;
            next[lanes] = first;
            while (first < end && first->key >> 16 == lane)
                first++;
            stop[lanes++] = first;
        }
        while (left) {
            left = 0;
            for (int i = 0; i < lanes; i++)
                if (next[i] < stop[i])
                    now[left++] = next[i]++;
            if (left)
                host_count_instruction(now, left);
        }
    }
    host_warp.count = 0;
    memset(host_warp.by_lane, 0, sizeof host_warp.by_lane);
}

#else

static inline void host_count_touches(void) {}

#endif

#endif
