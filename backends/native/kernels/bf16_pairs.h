/* Pairs of bf16 in the place of floats, the even member in the low half, and their dot products.
 *
 *     scores (columns, rows), fp32           pair_lines: pairs of columns                pair_lanes: pairs of rows
 *
 *       column 0  a b c d e f ..               columns 0, 1   aA bB cC dD eE fF ..          column 0  ab cd ef ..
 *       column 1  A B C D E F ..                                                            column 1  AB CD EF ..
 */
#if defined(__AVX512BF16__)

/* sum + a.even * x.even + a.odd * x.odd, lane by lane. */
static inline Vector_pairs add_pair_products(Vector_pairs sum, float a, Vector_pairs x) {
    return (Vector_pairs)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(a), (__m512bh)x);
}

static inline Vector_pairs make_pairs(Vector_pairs even, Vector_pairs odd) {
    const Lanes_pairs one_of_each = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                     0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    return (Vector_pairs)_mm512_permutexvar_epi16((__m512i)one_of_each, halves);
}

/* Neighbouring lanes in pairs: those of `low`, then those of `high`. */
static inline Vector_pairs pair_neighbours(Vector_pairs low, Vector_pairs high) {
    return (Vector_pairs)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

#else /* the same in other instructions: slow, for machines that test without these */

static inline Vector_pairs add_pair_products(Vector_pairs sum, float a, Vector_pairs x) {
    float even = from_bits(to_bits(a) << 16), odd = from_bits(to_bits(a) & 0xffff0000);
    return sum + even * (Vector_pairs)((Lanes_pairs)x << 16) + odd * (Vector_pairs)((Lanes_pairs)x & (int32_t)0xffff0000);
}

static inline Vector_pairs make_pairs(Vector_pairs even, Vector_pairs odd) {
    Vector_pairs pairs;
    for (int i = 0; i < LANES_pairs; i++)
        pairs[i] = from_bits((uint32_t)float_to_bfloat(odd[i]) << 16 | float_to_bfloat(even[i]));
    return pairs;
}

static inline Vector_pairs pair_neighbours(Vector_pairs low, Vector_pairs high) {
    Vector_pairs even, odd;
    for (int i = 0; i < LANES_pairs; i++) {
        Vector_pairs half = i < LANES_pairs / 2 ? low : high;
        even[i] = half[2 * i % LANES_pairs], odd[i] = half[2 * i % LANES_pairs + 1];
    }
    return make_pairs(even, odd);
}

#endif

/* Numbers `at` .. `at` + PANEL - 1 of two rows of bf16, in pairs. */
static inline Vector_pairs pair_halves(const float *even, const float *odd, int64_t at) {
    uint16_t x __attribute__((vector_size(2 * PANEL))), y __attribute__((vector_size(2 * PANEL)));
    memcpy(&x, (const char *)even + 2 * at, sizeof x), memcpy(&y, (const char *)odd + 2 * at, sizeof y);
    return (Vector_pairs)(__builtin_convertvector(x, Lanes_pairs) | __builtin_convertvector(y, Lanes_pairs) << 16);
}

/* The lines from .. to - 1 of numbers (columns, rows) two by two, in their place: line k / 2 has lines k and k + 1. */
static inline void pair_lines(float *numbers, int64_t from, int64_t to, int64_t count) {
    for (int64_t k = from; k < to; k += 2)
        for (int64_t r = 0; r < count; r += LANES_pairs) {
            float *at = numbers + k * TILE_ROWS + r;
            store_vector_pairs(numbers + k / 2 * TILE_ROWS + r, make_pairs(load_vector_pairs(at), load_vector_pairs(at + TILE_ROWS)));
        }
}

/* The lanes of numbers (columns, rows) two by two; 0 in the place of rows from `count` on. */
static inline void pair_lanes(float *restrict pairs, const float *restrict numbers, int64_t from, int64_t to, int64_t count) {
    for (int64_t r = 0; r < count; r += 2 * LANES_pairs) {
        const int both = r + LANES_pairs < count;
        Lanes_pairs used;
        for (int i = 0; i < LANES_pairs; i++)
            used[i] = r + 2 * i + 1 < count ? -1 : r + 2 * i < count ? 0xffff : 0;
        for (int64_t k = from; k < to; k++) {
            const float *at = numbers + k * TILE_ROWS + r;
            Vector_pairs low = load_vector_pairs(at), high = both ? load_vector_pairs(at + LANES_pairs) : low;
            store_vector_pairs(pairs + k * TILE_ROWS + r / 2, (Vector_pairs)((Lanes_pairs)pair_neighbours(low, high) & used));
        }
    }
}
