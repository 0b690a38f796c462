/* What the lanes of a warp do together, with the fragment layouts of the PTX ISA. */
#ifndef DILKIT_HOST_WARP
#define DILKIT_HOST_WARP

/* out = what the lane `*in[1]` has in `*in[0]`. */
UNCHECKED static void host_exchange(Lane *lanes, const Together *together) {
    uint32_t given[WARP];
    (void)together;
    for (int i = 0; i < WARP; i++)
        given[i] = *(const uint32_t *)lanes[i].in[0];
    for (int i = 0; i < WARP; i++)
        *(uint32_t *)lanes[i].out = given[*(const int *)lanes[i].in[1] & (WARP - 1)];
}

/* out = a bit for each lane whose `*in[0]` is not zero. */
UNCHECKED static void host_collect(Lane *lanes, const Together *together) {
    uint32_t bits = 0;
    (void)together;
    for (int i = 0; i < WARP; i++)
        bits |= (uint32_t)(*(const int *)lanes[i].in[0] != 0) << i;
    for (int i = 0; i < WARP; i++)
        *(uint32_t *)lanes[i].out = bits;
}

/* Memory is in order from here on, among these lanes. */
static void host_join(Lane *lanes, const Together *together) {
    (void)together;
    host_warp_barrier_passed((int)(lanes - host.lane) / WARP);
}

/* The 8 rows of a matrix are served together. */
UNCHECKED static void host_count_matrix(const Lane *lanes) {
    uint32_t address[8];
    for (int i = 0; i < 8; i++)
        address[i] = (uint32_t)(uintptr_t)lanes[i].in[0];
    host.launch.matrices++;
    host.launch.conflicts += host_turns(address, 8, VECTOR_BYTES);
}

/* `count` matrices of 8 x 8 elements of 2 bytes; lane i points at row i % 8 of matrix i / 8. Of each, a lane gets the two elements
   of row lane / 4 from column lane % 4 * 2 on; transposed, of column lane / 4 from that row on. */
UNCHECKED static void host_load_matrices(Lane *lanes, const Together *together) {
    for (int m = 0; m < together->count; m++) {
        host_count_matrix(lanes + m * 8);
        for (int i = 0; i < WARP; i++) {
            uint16_t pair[2];
            for (int e = 0; e < 2; e++) {
                int row = i / 4, column = i % 4 * 2 + e;
                const uint16_t *from = lanes[m * 8 + (together->transposed ? column : row)].in[0];
                pair[e] = from[together->transposed ? row : column];
            }
            ((uint32_t *)lanes[i].out)[m] = pair[0] | (uint32_t)pair[1] << 16;
        }
    }
}

static inline float host_element(uint32_t word, int e, int bfloat) {
    unsigned short bits = (unsigned short)(e ? word >> 16 : word);
    return bfloat ? bfloat_to_float(bits) : half_to_float(bits);
}

/* out (16 x 8) += in[0] (16 x k) in[1] (k x 8), k = 8 * count. Lane i holds, with g = i / 4 and t = i % 4 * 2: of the left matrix
   rows g and g + 8 at columns t, t + 1, then both at 8 columns further; of the right one rows t, t + 1 of column g, then 8 further;
   of the sum rows g and g + 8 at columns t, t + 1. */
UNCHECKED static void host_multiply(Lane *lanes, const Together *together) {
    float left[16][16], right[16][8], sum[16][8];
    for (int i = 0; i < WARP; i++) {
        int g = i / 4, t = i % 4 * 2;
        const uint32_t *a = lanes[i].in[0], *b = lanes[i].in[1];
        const float *d = lanes[i].out;
        for (int c = 0; c < together->count; c++)
            for (int e = 0; e < 2; e++) {
                left[g][c * 8 + t + e] = host_element(a[2 * c], e, together->bfloat);
                left[g + 8][c * 8 + t + e] = host_element(a[2 * c + 1], e, together->bfloat);
                right[c * 8 + t + e][g] = host_element(b[c], e, together->bfloat);
            }
        for (int e = 0; e < 2; e++)
            sum[g][t + e] = d[e], sum[g + 8][t + e] = d[2 + e];
    }
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 8 * together->count; k++)
            for (int n = 0; n < 8; n++)
                sum[row][n] += left[row][k] * right[k][n];
    for (int i = 0; i < WARP; i++) {
        int g = i / 4, t = i % 4 * 2;
        float *d = lanes[i].out;
        for (int e = 0; e < 2; e++)
            d[e] = sum[g][t + e], d[2 + e] = sum[g + 8][t + e];
    }
}

static const Together SYNCHRONIZE_WARP = {"synchronize_warp", host_join, 0, 0, 0}, SHUFFLE = {"shuffle", host_exchange, 0, 0, 0},
                      BALLOT = {"ballot", host_collect, 0, 0, 0};
static const Together LOAD_MATRICES[2][3] = {
    {{"load_matrix", host_load_matrices, 1, 0, 0}, {"load_matrices_2", host_load_matrices, 2, 0, 0},
     {"load_matrices_4", host_load_matrices, 4, 0, 0}},
    {{"load_matrix_transposed", host_load_matrices, 1, 1, 0}, {"load_matrices_2_transposed", host_load_matrices, 2, 1, 0},
     {"load_matrices_4_transposed", host_load_matrices, 4, 1, 0}}};
static const Together MULTIPLY[2][2] = {{{"mma_k8_half", host_multiply, 1, 0, 0}, {"mma_k16_half", host_multiply, 2, 0, 0}},
                                        {{"mma_k8_bfloat", host_multiply, 1, 0, 1}, {"mma_k16_bfloat", host_multiply, 2, 0, 1}}};

static void host_together(const Together *together, void *out, const void *first, const void *second, const char *place) {
    Lane *lane = &host.lane[host.current];
    lane->out = out, lane->in[0] = first, lane->in[1] = second;
    host_wait(together, place);
}

static inline uint32_t host_shuffle(uint32_t value, int from, const char *place) {
    uint32_t result;
    host_together(&SHUFFLE, &result, &value, &from, place);
    return result;
}

static inline int host_least(int x, const char *place) {
    for (int mask = WARP / 2; mask; mask /= 2) {
        int other = (int)host_shuffle((uint32_t)x, host.current ^ mask, place);
        x = other < x ? other : x;
    }
    return x;
}

static inline int host_sum(int x, const char *place) {
    uint32_t sum = (uint32_t)x;
    for (int mask = WARP / 2; mask; mask /= 2)
        sum += host_shuffle(sum, host.current ^ mask, place);
    return (int)sum;
}

static inline uint32_t host_ballot(int condition, const char *place) {
    uint32_t result;
    host_together(&BALLOT, &result, &condition, 0, place);
    return result;
}

UNCHECKED static __attribute__((noinline)) void host_load(int index, int transposed, unsigned *out, const void *row,
                                                          const char *place) {
    const Together *together = &LOAD_MATRICES[transposed][index];
    if (host.current % WARP < 8 * together->count) {
        host_check_shared(row, place);
        host_touch_shared(row, VECTOR_BYTES, 0, SITE);
    }
    host_together(together, out, row, 0, place);
}

static inline int host_above(int delta) { return host.current % WARP + delta < WARP ? host.current + delta : host.current; }
static inline int host_below(int delta) { return host.current % WARP >= delta ? host.current - delta : host.current; }

#define synchronize_warp() host_together(&SYNCHRONIZE_WARP, 0, 0, 0, HOST_PLACE)
#define ballot(condition) host_ballot(condition, HOST_PLACE)
#define shuffle(value, lane) host_float(host_shuffle(host_bits(value), lane, HOST_PLACE))
#define shuffle_xor(value, mask) host_float(host_shuffle(host_bits(value), host.current ^ (mask), HOST_PLACE))
#define shuffle_down(value, delta) host_float(host_shuffle(host_bits(value), host_above(delta), HOST_PLACE))
#define shuffle_up(value, delta) host_float(host_shuffle(host_bits(value), host_below(delta), HOST_PLACE))
#define shuffle_word(word, lane) host_shuffle(word, lane, HOST_PLACE)
#define shuffle_word_xor(word, mask) host_shuffle(word, host.current ^ (mask), HOST_PLACE)
#define warp_min(x) host_least(x, HOST_PLACE)
#define warp_max(x) (~host_least(~(x), HOST_PLACE))
#define warp_sum(x) host_sum(x, HOST_PLACE)

#define load_matrix(out, row) host_load(0, 0, out, row, HOST_PLACE)
#define load_matrices_2(out, row) host_load(1, 0, out, row, HOST_PLACE)
#define load_matrices_4(out, row) host_load(2, 0, out, row, HOST_PLACE)
#define load_matrix_transposed(out, row) host_load(0, 1, out, row, HOST_PLACE)
#define load_matrices_2_transposed(out, row) host_load(1, 1, out, row, HOST_PLACE)
#define load_matrices_4_transposed(out, row) host_load(2, 1, out, row, HOST_PLACE)

#define mma_k8_half(sum, left, right) host_together(&MULTIPLY[0][0], sum, left, right, HOST_PLACE)
#define mma_k16_half(sum, left, right) host_together(&MULTIPLY[0][1], sum, left, right, HOST_PLACE)
#define mma_k8_bfloat(sum, left, right) host_together(&MULTIPLY[1][0], sum, left, right, HOST_PLACE)
#define mma_k16_bfloat(sum, left, right) host_together(&MULTIPLY[1][1], sum, left, right, HOST_PLACE)

#endif
