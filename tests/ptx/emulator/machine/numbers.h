/* Numbers of PTX in C: types that share bits, halves, and operations that C defines for fewer operands. */
#ifndef PTX_NUMBERS
#define PTX_NUMBERS

#include "thread.h"
#include <math.h>

#define INLINE static inline __attribute__((always_inline))

#define IS_eq(a, b) ((a) == (b))
#define IS_ne(a, b) ((a) != (b))
#define IS_lt(a, b) ((a) < (b))
#define IS_le(a, b) ((a) <= (b))
#define IS_gt(a, b) ((a) > (b))
#define IS_ge(a, b) ((a) >= (b))

INLINE float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

CALLED float half_to_float(uint16_t bits) {
    _Float16 x;
    memcpy(&x, &bits, 2);
    return (float)x;
}
CALLED uint16_t float_to_half(float x) {
    _Float16 half = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return x != x ? 0x7fff : bits;
}
CALLED float bfloat_to_float(uint16_t bits) { return as_float((uint32_t)bits << 16); }
CALLED uint16_t float_to_bfloat(float x) {
    uint32_t bits = as_bits(x);
    return x != x ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
CALLED uint32_t pack(uint16_t high, uint16_t low) { return (uint32_t)high << 16 | low; }

/* To an integer towards zero: NaN is 0, what is too large is the largest. */
CALLED int32_t float_to_int(float x) { return x != x ? 0 : x >= 0x1p31f ? INT32_MAX : x <= -0x1p31f ? INT32_MIN : (int32_t)x; }

CALLED int16_t float_to_short(float x) {
    int32_t whole = float_to_int(x);
    return (int16_t)(whole > INT16_MAX ? INT16_MAX : whole < INT16_MIN ? INT16_MIN : whole);
}

CALLED float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

/* A finite number that is up to so many units of the last place off, and neither beyond 0 nor beyond infinity. */
static float off(float x, int ulps) {
    if (!ulps || !isfinite(x) || x == 0.0f)
        return x;
    int64_t bits = (int64_t)as_bits(fabsf(x)) + (int64_t)(draw() % (2 * ulps + 1)) - ulps;
    return copysignf(as_float((uint32_t)(bits < 0 ? 0 : bits > 0x7f800000 ? 0x7f800000 : bits)), x);
}

CALLED float exp2_full(float x) {
    float y = exp2f(x);
    return y == 1.0f ? y : off(y, machine.launch.ulps);
}

CALLED float exp2_approx(float x) { return flushed(exp2_full(flushed(x))); }

/* A relative error of 2^-23 is two units of numbers just below a power of two. */
CALLED float root_approx(float x) { return off(flushed(sqrtf(flushed(x))), machine.launch.ulps ? 2 : 0); }

CALLED float quotient_full(float a, float b) { return off(a / b, machine.launch.ulps ? 2 : 0); }

CALLED float quotient_approx(float a, float b) {
    return fabsf(b) > 0x1p126f && isfinite(b) ? (isinf(a) ? NAN : copysignf(0.0f, a) * copysignf(1.0f, b)) : quotient_full(a, b);
}

CALLED float reciprocal_approx(float x) { return off(flushed(1.0f / flushed(x)), machine.launch.ulps ? 1 : 0); }

#define DIVISION(name, type, operator)                                                                                              \
    CALLED type name(type a, type b, int line) {                                                                                    \
        if (!b)                                                                                                                     \
            fail(line, "divides by 0");                                                                                             \
        return (type)(b == (type)-1 && (type)-1 < 0 ? (type)(#operator[0] == '/' ? 0 - (uint64_t)a : 0) : a operator b);             \
    }
DIVISION(div_s32, int32_t, /)
DIVISION(rem_s32, int32_t, %)
DIVISION(div_u32, uint32_t, /)
DIVISION(rem_u32, uint32_t, %)
DIVISION(div_s64, int64_t, /)
DIVISION(rem_s64, int64_t, %)
DIVISION(div_u64, uint64_t, /)
DIVISION(rem_u64, uint64_t, %)

/* `count` bits of `a` from bit `at` on. */
CALLED uint32_t bit_field(uint32_t a, uint32_t at, uint32_t count) {
    at &= 255, count &= 255;
    return at > 31 || !count ? 0 : a >> at & (count > 31 ? ~0u : (1u << count) - 1);
}

/* The same with the sign of the last of them before it. */
CALLED int32_t signed_bit_field(int32_t a, uint32_t at, uint32_t count, int line) {
    at &= 255, count &= 255;
    if (!count || at + count > 32)
        fail(line, "%u bits from bit %u on: only those within 32 bits are known", count, at);
    return (int32_t)((uint32_t)a << (32 - at - count)) >> (32 - count);
}

/* `b` with `count` bits of `a` from bit `at` on. */
CALLED uint64_t insert_bits(uint64_t a, uint64_t b, uint32_t at, uint32_t count, uint32_t width) {
    at &= 255, count &= 255;
    if (at >= width || !count)
        return b;
    uint64_t mask = (count > 63 ? ~0ull : (1ull << count) - 1) << at;
    return (b & ~mask) | ((a << at) & mask);
}

/* Four of the eight bytes of `a` and `b`, each with its sign alone where bit 3 of its selector is set. */
CALLED uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selectors) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t selector = selectors >> (4 * i) & 15, byte = bytes >> (8 * (selector & 7)) & 255;
        result |= (selector & 8 ? (byte & 128 ? 255 : 0) : byte) << (8 * i);
    }
    return result;
}

/* The bit of `table` that three bits number, for each place. */
CALLED uint32_t three_bits(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
    uint32_t result = 0;
    for (int i = 0; i < 8; i++)
        if (table >> i & 1)
            result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return result;
}

#endif
