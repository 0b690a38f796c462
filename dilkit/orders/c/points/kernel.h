/* Codes of points by a finite-state machine: the bits of a point are its input, highest first, the bits of its code the output,
 * or the other way round. Each instruction set includes this file once.
 *
 *   coords (any integers, any strides) --read_column--> Planes: 512 points, one byte of each coordinate at a time
 *                                                          |  encode_planes: a vector of bytes, one a point, steps in parallel
 *   codes  (any integers, any strides) <--write_column-- Planes: one byte of each code at a time          (decode: right to left)
 *
 * The curve passes through the 2^ndim parts of a square or cube in rotated and reflected copies of itself. A level is one bit
 * of each axis, and one digit of ndim bits of the code. Converting it needs the orientation of its cube: the state, a byte.
 * With input n,
 *
 *     r = transitions[state ^ n],     state' = state ^ r,     and some bits of r are the output.
 *
 * A step is two levels in 2-D and one level in 3-D. No orientation changes the parity of a level's bits, because reflections
 * come in pairs. This parity is the last bit of the digit and bypasses the machine, in place of the last axis. (The Morton
 * curve has one orientation, and the bit of the last axis itself there.) The remaining reflections are an XOR with the input
 * when encoding, with the output when decoding.
 *
 * A vector looks up 16 entries by the low bits of each byte; a byte with bit 7 set gives 0. The 256 entries of `transitions`
 * that are used are 16 times 2 (2-D, by bit 7) or 16 times 3 (3-D, by bits 6 and 7: 00, 01, 11).
 */
#include "points.h"

#include <string.h>

#if defined __AVX2__
#include <immintrin.h>
#elif defined __aarch64__
#include <arm_neon.h>
#endif

#define INLINE __attribute__((always_inline)) static inline

enum { CHUNK = 512 };

typedef uint8_t Bytes __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef uint16_t Words __attribute__((vector_size(VECTOR_BYTES), may_alias));

/* The bytes of a chunk of numbers, the lowest first: 8 levels are one byte of an axis and ndim bytes of a code. */
typedef struct {
    uint8_t axis[3][8][CHUNK], code[12][CHUNK];
} __attribute__((aligned(64))) Planes;

#define PLANE(plane) (*(Bytes *)(plane))
#define CODE(k) ((uint8_t(*)[CHUNK]) & planes->code[k][at]) /* a vector's bytes of the code, from the k-th on */
#define UP(x, by) ((Bytes)((Words)(x) << (by)))
#define DOWN(x, by) ((Bytes)((Words)(x) >> (by)))

typedef struct {
    Bytes each;             /* 16 entries, repeated to fill a vector */
    const uint8_t *entries; /* for machines without a vector look-up */
} LookupTable;

static LookupTable lookup_table_of(const uint8_t *entries) {
    LookupTable table = {.entries = entries};
    for (int i = 0; i < VECTOR_BYTES; i++)
        table.each[i] = entries[i & 15];
    return table;
}

#if defined __AVX512BW__ && VECTOR_BYTES == 64
#define SHUFFLE(table, x) ((Bytes)_mm512_shuffle_epi8((__m512i)(table), (__m512i)(x)))
#elif defined __AVX2__ && VECTOR_BYTES == 32
#define SHUFFLE(table, x) ((Bytes)_mm256_shuffle_epi8((__m256i)(table), (__m256i)(x)))
#elif defined __aarch64__ && VECTOR_BYTES == 16
#define SHUFFLE(table, x) ((Bytes)vqtbl1q_u8((uint8x16_t)(table), (uint8x16_t)((x) & 0x8F)))
#else
static Bytes byte_by_byte(const uint8_t *entries, Bytes x) {
    uint8_t each[VECTOR_BYTES];
    memcpy(each, &x, VECTOR_BYTES);
    for (int i = 0; i < VECTOR_BYTES; i++)
        each[i] = entries[each[i]];
    memcpy(&x, each, VECTOR_BYTES);
    return x;
}
#endif

/* table[x] for x up to 15. */
INLINE Bytes look_up(const LookupTable *table, Bytes x) {
#ifdef SHUFFLE
    return SHUFFLE(table->each, x);
#else
    return byte_by_byte(table->entries, x);
#endif
}

typedef struct {
    LookupTable transitions[3];
    LookupTable spread, gather; /* bits 3210 at 6420; the last bits of two digits, 2 and 0 or 3 and 0, at 1 and 0 */
} StateTables;

static StateTables state_tables_of(const Points *p) {
    static const uint8_t spread[] = {0, 1, 4, 5, 16, 17, 20, 21, 64, 65, 68, 69, 80, 81, 84, 85};
    static const uint8_t gather[][16] = {{0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 2, 3, 2, 3},
                                         {0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3}};
    LookupTable first = lookup_table_of(p->transitions), second = lookup_table_of(p->transitions + (p->ndim == 2 ? 0x80 : 0x40));
    if (p->ndim == 3)
        second.each ^= first.each; /* the change by bit 6: the first table is looked up for both of its values */
    const LookupTable third = lookup_table_of(p->transitions + 0xC0);
    return (StateTables){{first, second, third}, lookup_table_of(spread), lookup_table_of(gather[p->ndim - 2])};
}

INLINE Bytes transition(const StateTables *t, Bytes x, int ndim) {
#ifdef SHUFFLE
    Bytes r = SHUFFLE(t->transitions[0].each, x);
    if (ndim == 2)
        return r ^ SHUFFLE(t->transitions[1].each, x ^ 0x80);
    return r ^ SHUFFLE(t->transitions[1].each, x + 0xC0) ^ SHUFFLE(t->transitions[2].each, x ^ 0x80);
#else
    return byte_by_byte(t->transitions[0].entries, x & (uint8_t)(ndim == 2 ? 0x8F : 0xCF));
#endif
}

/* A step of encoding: the output, with other bits around it. */
INLINE Bytes encode_step(const StateTables *t, Bytes *state, Bytes n, int ndim, int is_oriented) {
    if (!is_oriented)
        return look_up(&t->transitions[0], n);
    Bytes r = transition(t, *state ^ n, ndim);
    *state ^= r;
    return r;
}

/* A step of decoding: the output, in bits 4 and 5 or 0 and 1. The reflections that apply to it are bits 0 and 1 of the state. */
INLINE Bytes decode_step(const StateTables *t, Bytes *state, Bytes n, int upper, int ndim, int is_oriented) {
    Bytes before = *state, r;
    if (is_oriented)
        r = transition(t, (before & 0xFC) ^ n, ndim), *state ^= r;
    else
        r = look_up(&t->transitions[0], n);
    if (upper)
        return (r ^ UP(before, 4)) & 0x30;
    return (DOWN(r, 4) ^ before) & 0x03;
}

/* Four levels of 2-D, the upper or the lower ones: `odd` and `even` have a step in each nibble, (x x last last). */
INLINE Bytes encode_four_2(const StateTables *t, Bytes *state, Bytes odd, Bytes even, Bytes last, int upper, int is_oriented) {
    Bytes first = encode_step(t, state, (upper ? DOWN(odd, 4) : odd) & 0x0F, 2, is_oriented) & 0x50;
    Bytes second = encode_step(t, state, (upper ? DOWN(even, 4) : even) & 0x0F, 2, is_oriented) & 0x50;
    return UP(first, 1) | DOWN(second, 3) | look_up(&t->spread, (upper ? DOWN(last, 4) : last) & 0x0F);
}

INLINE void encode_byte_2(
    const StateTables *t, Bytes *state, Bytes x, Bytes last, int fours, uint8_t (*code)[CHUNK], int is_oriented
) {
    Bytes odd = (x & 0xCC) | (DOWN(last, 2) & 0x33), even = (UP(x, 2) & 0xCC) | (last & 0x33);
    if (fours > 1)
        PLANE(code[1]) = encode_four_2(t, state, odd, even, last, 1, is_oriented);
    PLANE(code[0]) = encode_four_2(t, state, odd, even, last, 0, is_oriented);
}

/* Four levels of 3-D, in the upper or the lower nibbles of `level`, (last 0 x y): two levels' digits in a byte. */
INLINE void encode_four_3(const StateTables *t, Bytes *state, const Bytes level[4], int upper, Bytes two[2], int is_oriented) {
    Bytes digit[4];
#pragma GCC unroll 4
    for (int j = 3; j >= 0; j--) {
        Bytes n = (upper ? DOWN(level[j], 4) : level[j]) & 0x0F;
        digit[j] = (encode_step(t, state, n, 3, is_oriented) | n) & 0x38;
    }
    two[1] = digit[3] | DOWN(digit[2], 3);
    two[0] = digit[1] | DOWN(digit[0], 3);
}

INLINE void encode_byte_3(
    const StateTables *t, Bytes *state, Bytes x, Bytes y, Bytes last, int fours, uint8_t (*code)[CHUNK], int is_oriented
) {
    Bytes level[4], two[4] = {{0}};
    level[0] = (UP(x, 1) & 0x22) | (y & 0x11) | (UP(last, 3) & 0x88);
    level[1] = (x & 0x22) | (DOWN(y, 1) & 0x11) | (UP(last, 2) & 0x88);
    level[2] = (DOWN(x, 1) & 0x22) | (DOWN(y, 2) & 0x11) | (UP(last, 1) & 0x88);
    level[3] = (DOWN(x, 2) & 0x22) | (DOWN(y, 3) & 0x11) | (last & 0x88);
    if (fours > 1)
        encode_four_3(t, state, level, 1, two + 2, is_oriented);
    encode_four_3(t, state, level, 0, two, is_oriented);
    PLANE(code[0]) = two[0] | (UP(two[1], 6) & 0xC0);
    PLANE(code[1]) = (DOWN(two[1], 2) & 0x0F) | (UP(two[2], 4) & 0xF0);
    PLANE(code[2]) = (DOWN(two[2], 4) & 0x03) | UP(two[3], 2);
}

INLINE void encode_planes(const Points *p, const StateTables *t, Planes *planes, int ndim, int is_oriented) {
    const int fours = (p->bits + 3) / 4;
    for (int at = 0; at < CHUNK; at += VECTOR_BYTES) {
        Bytes state = (Bytes){0} + p->start;
        for (int byte = (fours - 1) / 2; byte >= 0; byte--) {
            Bytes x = PLANE(&planes->axis[0][byte][at]), y = PLANE(&planes->axis[1][byte][at]);
            if (ndim == 2) {
                Bytes last = is_oriented ? (Bytes)(x ^ y) : y;
                encode_byte_2(t, &state, x, last, fours - 2 * byte, CODE(2 * byte), is_oriented);
            } else {
                Bytes z = PLANE(&planes->axis[2][byte][at]);
                Bytes last = is_oriented ? (Bytes)(x ^ y ^ z) : z;
                encode_byte_3(t, &state, x, y, last, fours - 2 * byte, CODE(3 * byte), is_oriented);
            }
        }
    }
}

/* Four levels of a code of 2-D: their bits of x and their last bits, as a nibble. */
INLINE void decode_four_2(const StateTables *t, Bytes *state, Bytes code, int upper, Bytes *x, Bytes *last, int is_oriented) {
    const Bytes first = DOWN(code, 4) & 0x0F, second = code & 0x0F;
    const Bytes lasts = UP(look_up(&t->gather, first), 2) | look_up(&t->gather, second);
    *x |= UP(decode_step(t, state, first, upper, 2, is_oriented), 2);
    *x |= decode_step(t, state, second, upper, 2, is_oriented);
    *last |= upper ? UP(lasts, 4) : lasts;
}

INLINE void decode_byte_2(
    const StateTables *t, Bytes *state, uint8_t (*code)[CHUNK], int fours, Bytes *x, Bytes *last, int is_oriented
) {
    if (fours > 1)
        decode_four_2(t, state, PLANE(code[1]), 1, x, last, is_oriented);
    decode_four_2(t, state, PLANE(code[0]), 0, x, last, is_oriented);
}

/* Four levels of a code of 3-D, two in a byte: (x y) of each in a nibble of `point`, and their last bits, as a nibble. */
INLINE void decode_four_3(
    const StateTables *t, Bytes *state, const Bytes two[2], int upper, Bytes point[4], Bytes *last, int is_oriented
) {
    const Bytes lasts = UP(look_up(&t->gather, two[1] & 0x0F), 2) | look_up(&t->gather, two[0] & 0x0F);
#pragma GCC unroll 4
    for (int j = 3; j >= 0; j--)
        point[j] |= decode_step(t, state, (j % 2 ? DOWN(two[j / 2], 3) : two[j / 2]) & 7, upper, 3, is_oriented);
    *last |= upper ? UP(lasts, 4) : lasts;
}

INLINE void decode_byte_3(
    const StateTables *t, Bytes *state, uint8_t (*code)[CHUNK], int fours, Bytes *x, Bytes *y, Bytes *last, int is_oriented
) {
    const Bytes low = PLANE(code[0]), middle = PLANE(code[1]), high = PLANE(code[2]);
    const Bytes second = (DOWN(low, 6) & 0x03) | (UP(middle, 2) & 0x3C), third = (DOWN(middle, 4) & 0x0F) | (UP(high, 4) & 0x30);
    const Bytes two[4] = {low, second, third, DOWN(high, 2)};
    Bytes point[4] = {{0}};
    if (fours > 1)
        decode_four_3(t, state, two + 2, 1, point, last, is_oriented);
    decode_four_3(t, state, two, 0, point, last, is_oriented);
    *x = (DOWN(point[0], 1) & 0x11) | (point[1] & 0x22) | (UP(point[2], 1) & 0x44) | (UP(point[3], 2) & 0x88);
    *y = (point[0] & 0x11) | (UP(point[1], 1) & 0x22) | (UP(point[2], 2) & 0x44) | (UP(point[3], 3) & 0x88);
}

INLINE void decode_planes(const Points *p, const StateTables *t, Planes *planes, int ndim, int is_oriented) {
    const int fours = (p->bits + 3) / 4;
    for (int at = 0; at < CHUNK; at += VECTOR_BYTES) {
        Bytes state = (Bytes){0} + p->start;
        for (int byte = (fours - 1) / 2; byte >= 0; byte--) {
            Bytes x = {0}, y, last = {0};
            if (ndim == 2) {
                decode_byte_2(t, &state, CODE(2 * byte), fours - 2 * byte, &x, &last, is_oriented);
                y = is_oriented ? (Bytes)(last ^ x) : last;
            } else {
                decode_byte_3(t, &state, CODE(3 * byte), fours - 2 * byte, &x, &y, &last, is_oriented);
                PLANE(&planes->axis[2][byte][at]) = is_oriented ? (Bytes)(last ^ x ^ y) : last;
            }
            PLANE(&planes->axis[0][byte][at]) = x, PLANE(&planes->axis[1][byte][at]) = y;
        }
    }
}

/* Numbers of type T of a chunk into planes of their bytes and back. Numbers that are not contiguous, or not of type L, are copied
 * into a contiguous line first. */
#define COLUMN(T, L)                                                                                                         \
    INLINE T gather_##T##_##L(L *restrict to, const char *from, int64_t stride, T least, int count) {                        \
        T seen = 0;                                                                                                          \
        for (int64_t i = 0; i < count; i++) {                                                                                \
            T number = (T)(*(const Any_##T *)(from + i * stride) - least);                                                   \
            seen |= number, to[i] = (L)number;                                                                               \
        }                                                                                                                    \
        return seen;                                                                                                         \
    }                                                                                                                        \
    INLINE void split_##T##_##L(const uint8_t *restrict from, int count, uint8_t (*restrict to)[CHUNK]) {                    \
        for (int64_t i = 0; i < count; i++)                                                                                  \
            for (int k = 0; k < (int)sizeof(L); k++)                                                                         \
                to[k][i] = from[i * (int64_t)sizeof(L) + k];                                                                 \
    }                                                                                                                        \
    INLINE void join_##T##_##L(uint8_t *restrict to, int count, uint8_t (*restrict from)[CHUNK]) {                           \
        for (int64_t i = 0; i < count; i++)                                                                                  \
            for (int k = 0; k < (int)sizeof(L); k++)                                                                         \
                to[i * (int64_t)sizeof(L) + k] = from[k][i];                                                                 \
    }                                                                                                                        \
    INLINE void scatter_##T##_##L(char *restrict to, int64_t stride, int count, const L *restrict from) {                    \
        for (int64_t i = 0; i < count; i++)                                                                                  \
            *(Any_##T *)(to + i * stride) = (T)from[i];                                                                      \
    }                                                                                                                        \
    static uint64_t read_##T##_##L(const char *from, int64_t stride, T least, int count, uint8_t (*to)[CHUNK]) {             \
        const int64_t size = sizeof(T);                                                                                      \
        L line[CHUNK];                                                                                                       \
        T seen = 0;                                                                                                          \
        if (stride == size && least == 0 && sizeof(T) == sizeof(L)) {                                                        \
            for (int64_t i = 0; i < count; i++)                                                                              \
                seen |= ((const Any_##T *)from)[i];                                                                          \
            split_##T##_##L((const uint8_t *)from, count, to);                                                               \
            return seen;                                                                                                     \
        }                                                                                                                    \
        if (stride == size)                                                                                                  \
            seen = gather_##T##_##L(line, from, size, least, count);                                                         \
        else if (stride == 2 * size)                                                                                         \
            seen = gather_##T##_##L(line, from, 2 * size, least, count);                                                     \
        else if (stride == 3 * size)                                                                                         \
            seen = gather_##T##_##L(line, from, 3 * size, least, count);                                                     \
        else                                                                                                                 \
            seen = gather_##T##_##L(line, from, stride, least, count);                                                       \
        split_##T##_##L((const uint8_t *)line, count, to);                                                                   \
        return seen;                                                                                                         \
    }                                                                                                                        \
    static void write_##T##_##L(char *to, int64_t stride, int count, uint8_t (*from)[CHUNK]) {                               \
        const int64_t size = sizeof(T);                                                                                      \
        L line[CHUNK];                                                                                                       \
        if (stride == size && sizeof(T) == sizeof(L)) {                                                                      \
            join_##T##_##L((uint8_t *)to, count, from);                                                                      \
            return;                                                                                                          \
        }                                                                                                                    \
        join_##T##_##L((uint8_t *)line, count, from);                                                                        \
        if (stride == size)                                                                                                  \
            scatter_##T##_##L(to, size, count, line);                                                                        \
        else                                                                                                                 \
            scatter_##T##_##L(to, stride, count, line);                                                                      \
    }

typedef uint8_t Any_uint8_t __attribute__((may_alias));
typedef uint16_t Any_uint16_t __attribute__((aligned(1), may_alias));
typedef uint32_t Any_uint32_t __attribute__((aligned(1), may_alias));
typedef uint64_t Any_uint64_t __attribute__((aligned(1), may_alias));

COLUMN(uint8_t, uint8_t)
COLUMN(uint16_t, uint16_t)
COLUMN(uint32_t, uint32_t)
COLUMN(uint64_t, uint32_t)
COLUMN(uint64_t, uint64_t)

/* The bytes of the numbers from `first` on; returns the OR of all numbers. */
static uint64_t read_column(const Column *c, int64_t first, int count, int planes, uint8_t (*to)[CHUNK]) {
    const char *from = c->data + first * c->stride;
    for (int k = c->size; k < planes; k++)
        memset(to[k], 0, CHUNK);
    switch (c->size) {
    case 1: return read_uint8_t_uint8_t(from, c->stride, (uint8_t)c->least, count, to);
    case 2: return read_uint16_t_uint16_t(from, c->stride, (uint16_t)c->least, count, to);
    case 4: return read_uint32_t_uint32_t(from, c->stride, (uint32_t)c->least, count, to);
    }
    if (planes <= 4)
        return read_uint64_t_uint32_t(from, c->stride, c->least, count, to);
    return read_uint64_t_uint64_t(from, c->stride, c->least, count, to);
}

static void write_column(const Column *c, int64_t first, int count, int planes, uint8_t (*from)[CHUNK]) {
    char *to = c->data + first * c->stride;
    for (int k = planes; k < c->size; k++)
        memset(from[k], 0, CHUNK);
    switch (c->size) {
    case 1: write_uint8_t_uint8_t(to, c->stride, count, from); return;
    case 2: write_uint16_t_uint16_t(to, c->stride, count, from); return;
    case 4: write_uint32_t_uint32_t(to, c->stride, count, from); return;
    }
    if (planes <= 4)
        write_uint64_t_uint32_t(to, c->stride, count, from);
    else
        write_uint64_t_uint64_t(to, c->stride, count, from);
}

static uint64_t number_at(const Column *c, int64_t index) {
    const char *from = c->data + index * c->stride;
    switch (c->size) {
    case 1: return (uint8_t)(*(const Any_uint8_t *)from - c->least);
    case 2: return (uint16_t)(*(const Any_uint16_t *)from - c->least);
    case 4: return (uint32_t)(*(const Any_uint32_t *)from - c->least);
    default: return *(const Any_uint64_t *)from - c->least;
    }
}

static int64_t first_beyond(const Column *columns, int number, int64_t from, int64_t count) {
    for (int64_t i = from; i < count; i++)
        for (int k = 0; k < number; k++)
            if (number_at(&columns[k], i) > columns[k].most)
                return i;
    return count;
}

static int64_t encode(const Points *p) {
    const StateTables tables = state_tables_of(p);
    const int bytes = (p->bits + 7) / 8;
    Planes planes;
    memset(&planes, 0, sizeof planes);
    for (int64_t first = 0; first < p->count; first += CHUNK) {
        const int count = (int)(p->count - first < CHUNK ? p->count - first : CHUNK);
        int beyond = 0;
        for (int k = 0; k < p->ndim; k++)
            beyond |= read_column(&p->axis[k], first, count, bytes, planes.axis[k]) > p->axis[k].most;
        if (beyond)
            return first_beyond(p->axis, p->ndim, first, p->count);
        if (p->ndim == 2 && p->is_oriented)
            encode_planes(p, &tables, &planes, 2, 1);
        else if (p->ndim == 2)
            encode_planes(p, &tables, &planes, 2, 0);
        else if (p->is_oriented)
            encode_planes(p, &tables, &planes, 3, 1);
        else
            encode_planes(p, &tables, &planes, 3, 0);
        write_column(&p->code, first, count, bytes * p->ndim, planes.code);
    }
    return p->count;
}

static int64_t decode(const Points *p) {
    const StateTables tables = state_tables_of(p);
    const int bytes = (p->bits + 7) / 8;
    Planes planes;
    memset(&planes, 0, sizeof planes);
    for (int64_t first = 0; first < p->count; first += CHUNK) {
        const int count = (int)(p->count - first < CHUNK ? p->count - first : CHUNK);
        if (read_column(&p->code, first, count, bytes * p->ndim, planes.code) > p->code.most)
            return first_beyond(&p->code, 1, first, p->count);
        if (p->ndim == 2 && p->is_oriented)
            decode_planes(p, &tables, &planes, 2, 1);
        else if (p->ndim == 2)
            decode_planes(p, &tables, &planes, 2, 0);
        else if (p->is_oriented)
            decode_planes(p, &tables, &planes, 3, 1);
        else
            decode_planes(p, &tables, &planes, 3, 0);
        for (int k = 0; k < p->ndim; k++)
            write_column(&p->axis[k], first, count, bytes, planes.axis[k]);
    }
    return p->count;
}
