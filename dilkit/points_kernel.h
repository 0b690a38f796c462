/* Curves as automata: a point's bits go in, the highest first, and its code's bits come out. Included once an instruction set.
 *
 * A level is one bit of each axis, and one digit of ndim bits of the code. A curve goes through the 2^ndim parts of a cube in
 * turned copies of itself, so a level needs to know how the cube is turned: the state, a byte. With n a level's bits,
 *
 *     r = turns[state ^ n],     state' = state ^ r,     bits 4 and 5 of r are those that come out.
 *
 * A vector holds a byte for each of as many points, which take their steps side by side. Of the 256 entries few differ:
 * bits 4 and 5 of the index do not matter, bits 6 and 7 are 00, 01 or 11, and in 2-D always 00. So vectors look up 16 or 48.
 *
 * In 3-D, flips of the axes come in pairs, so a state keeps those of the first two axes, in bits 0 and 1, and the parity of a
 * level's bits is not touched by any turn: it is the digit's last bit, and stands in for the third axis. Encoding, the flips
 * are part of the index; decoding, they apply to what comes out.
 */
#include "points.h"

#include <string.h>

#if defined __AVX512BW__ || defined __AVX2__
#include <immintrin.h>
#elif defined __aarch64__
#include <arm_neon.h>
#endif

#define INLINE __attribute__((always_inline)) static inline

enum { CHUNK = 512, AXIS_PLANES = 4, CODE_PLANES = 12 };

typedef uint8_t Bytes __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef uint16_t Words __attribute__((vector_size(VECTOR_BYTES), may_alias));

/* The bits of a chunk of points: 8 levels of an axis in a byte; of a code, 4 levels of 2 bits or 2 levels of 3. */
typedef struct {
    uint8_t axis[3][AXIS_PLANES][CHUNK], code[CODE_PLANES][CHUNK];
} __attribute__((aligned(64))) Planes;

#define UP(x, by) ((Bytes)((Words)(x) << (by)))
#define DOWN(x, by) ((Bytes)((Words)(x) >> (by)))

typedef struct {
    Bytes part[3];
    const uint8_t *turns;
} Turns;

/* table[x & 15], and 0 where bit 7 is set. */
#if defined __AVX512BW__ && VECTOR_BYTES == 64
#define LOOKUP(table, x) ((Bytes)_mm512_shuffle_epi8((__m512i)(table), (__m512i)(x)))
#elif defined __AVX2__ && VECTOR_BYTES == 32
#define LOOKUP(table, x) ((Bytes)_mm256_shuffle_epi8((__m256i)(table), (__m256i)(x)))
#elif defined __aarch64__ && VECTOR_BYTES == 16
#define LOOKUP(table, x) ((Bytes)vqtbl1q_u8((uint8x16_t)(table), (uint8x16_t)((x) & 0x8F)))
#endif

#ifdef LOOKUP
INLINE Bytes turn(const Turns *t, Bytes x, int ndim) {
    Bytes r = LOOKUP(t->part[0], x);
    if (ndim == 3)
        r ^= LOOKUP(t->part[1], x + 0xC0) ^ LOOKUP(t->part[2], x ^ 0x80);
    return r;
}
#else
INLINE Bytes turn(const Turns *t, Bytes x, int ndim) {
    uint8_t each[VECTOR_BYTES];
    (void)ndim;
    memcpy(each, &x, VECTOR_BYTES);
    for (int i = 0; i < VECTOR_BYTES; i++)
        each[i] = t->turns[each[i]];
    memcpy(&x, each, VECTOR_BYTES);
    return x;
}
#endif

static Turns prepare(const uint8_t *turns) {
    Turns t = {.turns = turns};
    for (int i = 0; i < VECTOR_BYTES; i++) {
        t.part[0][i] = turns[i & 15];
        t.part[1][i] = turns[0x40 | (i & 15)] ^ turns[i & 15];
        t.part[2][i] = turns[0xC0 | (i & 15)];
    }
    return t;
}

/* One level of encoding: n's bits in, the digit out; in 3-D n has the parity in bit 3 and the digit is in bits 3 to 5. */
INLINE Bytes enter(const Turns *t, Bytes *state, Bytes n, int ndim) {
    Bytes r = turn(t, *state ^ n, ndim);
    *state ^= r;
    return ndim == 2 ? (Bytes)(r & 0x30) : (Bytes)((r | n) & 0x38);
}

/* Four levels, the lowest of each nibble of `level`. */
INLINE void encode_four(const Turns *t, Bytes *state, const Bytes level[4], int high, uint8_t (*code)[CHUNK], int ndim) {
    Bytes digit[4];
#pragma GCC unroll 4
    for (int j = 3; j >= 0; j--)
        digit[j] = enter(t, state, (high ? DOWN(level[j], 4) : level[j]) & 0x0F, ndim);
    if (ndim == 2) {
        *(Bytes *)code[0] = UP(digit[3], 2) | digit[2] | DOWN(digit[1], 2) | DOWN(digit[0], 4);
    } else {
        *(Bytes *)code[1] = digit[3] | DOWN(digit[2], 3);
        *(Bytes *)code[0] = digit[1] | DOWN(digit[0], 3);
    }
}

INLINE void encode_planes(const Points *p, Planes *planes, int ndim) {
    const Turns t = prepare(p->turns);
    const int fours = (p->bits + 3) / 4, per_four = ndim == 2 ? 1 : 2;
    for (int at = 0; at < CHUNK; at += VECTOR_BYTES) {
        Bytes state = (Bytes){0} + p->start;
        for (int byte = (fours - 1) / 2; byte >= 0; byte--) {
            Bytes x = *(Bytes *)&planes->axis[0][byte][at], y = *(Bytes *)&planes->axis[1][byte][at], z = {0}, level[4];
            if (ndim == 3)
                z = *(Bytes *)&planes->axis[2][byte][at];
            if (p->parity)
                z ^= x ^ y;
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                level[j] = (j ? DOWN(x, j - 1) : UP(x, 1)) & 0x22;
                level[j] |= DOWN(y, j) & 0x11;
                if (ndim == 3)
                    level[j] |= UP(z, 3 - j) & 0x88;
            }
            if (2 * byte + 1 < fours)
                encode_four(&t, &state, level, 1, (uint8_t(*)[CHUNK]) & planes->code[(2 * byte + 1) * per_four][at], ndim);
            encode_four(&t, &state, level, 0, (uint8_t(*)[CHUNK]) & planes->code[2 * byte * per_four][at], ndim);
        }
    }
}

/* One level of decoding: the digit in, in bits 4 and 5 the bits of the first two axes out. */
INLINE Bytes leave(const Turns *t, Bytes *state, Bytes digit, int ndim) {
    Bytes before = *state, r = turn(t, (ndim == 2 ? before : (Bytes)(before & 0xFC)) ^ digit, ndim);
    *state ^= r;
    return (ndim == 2 ? r : (Bytes)(r ^ UP(before, 4))) & 0x30;
}

/* Four levels: into `point` their bits of the first two axes, and into `last` those of the digits' last bits, in low nibbles. */
INLINE void decode_four(
    const Turns *t, Bytes *state, const uint8_t (*code)[CHUNK], Bytes *x, Bytes *y, Bytes *last, int high, int ndim
) {
    Bytes digit[4], point[4];
    if (ndim == 2) {
        Bytes all = *(const Bytes *)code[0];
        digit[3] = DOWN(all, 6) & 3, digit[2] = DOWN(all, 4) & 3, digit[1] = DOWN(all, 2) & 3, digit[0] = all & 3;
    } else {
        Bytes upper = *(const Bytes *)code[1], lower = *(const Bytes *)code[0];
        digit[3] = DOWN(upper, 3) & 7, digit[2] = upper & 7, digit[1] = DOWN(lower, 3) & 7, digit[0] = lower & 7;
    }
#pragma GCC unroll 4
    for (int j = 3; j >= 0; j--)
        point[j] = leave(t, state, digit[j], ndim);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const int place = high ? j + 4 : j;
        *x |= (place < 5 ? DOWN(point[j], 5 - place) : UP(point[j], place - 5)) & (uint8_t)(1 << place);
        *y |= (place < 4 ? DOWN(point[j], 4 - place) : UP(point[j], place - 4)) & (uint8_t)(1 << place);
        if (ndim == 3)
            *last |= UP(digit[j], place) & (uint8_t)(1 << place);
    }
}

INLINE void decode_planes(const Points *p, Planes *planes, int ndim) {
    const Turns t = prepare(p->turns);
    const int fours = (p->bits + 3) / 4, per_four = ndim == 2 ? 1 : 2;
    for (int at = 0; at < CHUNK; at += VECTOR_BYTES) {
        Bytes state = (Bytes){0} + p->start;
        for (int byte = (fours - 1) / 2; byte >= 0; byte--) {
            Bytes x = {0}, y = {0}, z = {0};
            if (2 * byte + 1 < fours)
                decode_four(&t, &state, (const uint8_t(*)[CHUNK]) & planes->code[(2 * byte + 1) * per_four][at], &x, &y, &z, 1, ndim);
            decode_four(&t, &state, (const uint8_t(*)[CHUNK]) & planes->code[2 * byte * per_four][at], &x, &y, &z, 0, ndim);
            *(Bytes *)&planes->axis[0][byte][at] = x, *(Bytes *)&planes->axis[1][byte][at] = y;
            if (ndim == 3)
                *(Bytes *)&planes->axis[2][byte][at] = p->parity ? (Bytes)(z ^ x ^ y) : z;
        }
    }
}

/* Numbers into planes of `width` bits, and back; the numbers may lie unaligned. */
#define READ(T)                                                                                                              \
    typedef T Any_##T __attribute__((aligned(1), may_alias));                                                                \
    INLINE T steps_##T(const char *from, int64_t stride, T least, int count, int width, int planes, uint8_t (*to)[CHUNK]) {  \
        T seen = 0;                                                                                                          \
        for (int i = 0; i < count; i++)                                                                                      \
            seen |= (T)(*(const Any_##T *)(from + i * stride) - least);                                                                  \
        for (int k = 0; k < planes; k++) {                                                                                   \
            const int shift = k * width;                                                                                     \
            if (shift >= (int)(8 * sizeof(T)))                                                                               \
                memset(to[k], 0, CHUNK);                                                                                     \
            else                                                                                                             \
                for (int i = 0; i < count; i++)                                                                              \
                    to[k][i] = (uint8_t)((T)(*(const Any_##T *)(from + i * stride) - least) >> shift) & (uint8_t)((1 << width) - 1);      \
        }                                                                                                                    \
        return seen;                                                                                                         \
    }                                                                                                                        \
    static uint64_t read_##T(const char *from, int64_t stride, T least, int count, int width, int planes, uint8_t (*to)[CHUNK]) {     \
        const int64_t size = sizeof(T);                                                                                      \
        if (stride == size)                                                                                                  \
            return steps_##T(from, size, least, count, width, planes, to);                                                          \
        if (stride == 2 * size)                                                                                              \
            return steps_##T(from, 2 * size, least, count, width, planes, to);                                                      \
        if (stride == 3 * size)                                                                                              \
            return steps_##T(from, 3 * size, least, count, width, planes, to);                                                      \
        return steps_##T(from, stride, least, count, width, planes, to);                                                            \
    }                                                                                                                        \
    INLINE void four_##T(const uint8_t (*from)[CHUNK], int width, int shift, int more, char *to, int64_t stride, int count) { \
        for (int i = 0; i < count; i++) {                                                                                    \
            uint32_t all = from[0][i] | (uint32_t)from[1][i] << width;                                                       \
            if (sizeof(T) > 2)                                                                                               \
                all |= (uint32_t)from[2][i] << 2 * width | (uint32_t)from[3][i] << 3 * width;                                \
            Any_##T *place = (Any_##T *)(to + i * stride);                                                                   \
            *place = (T)((more ? *place : 0) | (T)all << shift);                                                             \
        }                                                                                                                    \
    }                                                                                                                        \
    INLINE void all_##T(const uint8_t (*from)[CHUNK], int width, int planes, char *to, int64_t stride, int count) {          \
        four_##T(from, width, 0, 0, to, stride, count);                                                                      \
        for (int k = 4; k < planes; k += 4)                                                                                  \
            if (k * width < (int)(8 * sizeof(T)))                                                                            \
                four_##T(from + k, width, k * width, 1, to, stride, count);                                                  \
    }                                                                                                                        \
    static void write_##T(const uint8_t (*from)[CHUNK], int width, int planes, char *to, int64_t stride, int count) {        \
        const int64_t size = sizeof(T);                                                                                      \
        if (stride == size)                                                                                                  \
            all_##T(from, width, planes, to, size, count);                                                                   \
        else                                                                                                                 \
            all_##T(from, width, planes, to, stride, count);                                                                 \
    }

READ(uint8_t)
READ(uint16_t)
READ(uint32_t)
READ(uint64_t)

static uint64_t read_column(const Column *c, int64_t first, int count, int width, int planes, uint8_t (*to)[CHUNK]) {
    const char *from = c->data + first * c->stride;
    switch (c->size) {
    case 1: return read_uint8_t(from, c->stride, (uint8_t)c->least, count, width, planes, to);
    case 2: return read_uint16_t(from, c->stride, (uint16_t)c->least, count, width, planes, to);
    case 4: return read_uint32_t(from, c->stride, (uint32_t)c->least, count, width, planes, to);
    default: return read_uint64_t(from, c->stride, (uint64_t)c->least, count, width, planes, to);
    }
}

static void write_column(const Column *c, int64_t first, int count, int width, int planes, const uint8_t (*from)[CHUNK]) {
    char *to = c->data + first * c->stride;
    switch (c->size) {
    case 1: return write_uint8_t(from, width, planes, to, c->stride, count);
    case 2: return write_uint16_t(from, width, planes, to, c->stride, count);
    case 4: return write_uint32_t(from, width, planes, to, c->stride, count);
    default: return write_uint64_t(from, width, planes, to, c->stride, count);
    }
}

static uint64_t number_at(const Column *c, int64_t index) {
    const char *from = c->data + index * c->stride;
    switch (c->size) {
    case 1: return *(const Any_uint8_t *)from;
    case 2: return *(const Any_uint16_t *)from;
    case 4: return *(const Any_uint32_t *)from;
    default: return *(const Any_uint64_t *)from;
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
    Planes planes;
    memset(&planes, 0, sizeof planes);
    const int bytes = (p->bits + 7) / 8, digits = (p->bits + 3) / 4 * (p->ndim - 1), width = p->ndim == 2 ? 8 : 6;
    for (int64_t first = 0; first < p->count; first += CHUNK) {
        const int count = (int)(p->count - first < CHUNK ? p->count - first : CHUNK);
        int beyond = 0;
        for (int k = 0; k < p->ndim; k++)
            beyond |= read_column(&p->axis[k], first, count, 8, bytes, planes.axis[k]) > p->axis[k].most;
        if (beyond)
            return first_beyond(p->axis, p->ndim, first, p->count);
        if (p->ndim == 2)
            encode_planes(p, &planes, 2);
        else
            encode_planes(p, &planes, 3);
        write_column(&p->code, first, count, width, digits, (const uint8_t(*)[CHUNK])planes.code);
    }
    return p->count;
}

static int64_t decode(const Points *p) {
    Planes planes;
    memset(&planes, 0, sizeof planes);
    const int bytes = (p->bits + 7) / 8, digits = (p->bits + 3) / 4 * (p->ndim - 1), width = p->ndim == 2 ? 8 : 6;
    for (int64_t first = 0; first < p->count; first += CHUNK) {
        const int count = (int)(p->count - first < CHUNK ? p->count - first : CHUNK);
        if (read_column(&p->code, first, count, width, digits, planes.code) > p->code.most)
            return first_beyond(&p->code, 1, first, p->count);
        if (p->ndim == 2)
            decode_planes(p, &planes, 2);
        else
            decode_planes(p, &planes, 3);
        for (int k = 0; k < p->ndim; k++)
            write_column(&p->axis[k], first, count, 8, bytes, (const uint8_t(*)[CHUNK])planes.axis[k]);
    }
    return p->count;
}
