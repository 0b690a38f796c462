/* Loads and stores of one row of a tensor, of any alignment, with conversion between its dtype and the computing type (float or
 * double).
 */
#ifndef DILKIT_NATIVE_LOAD_STORE_H
#define DILKIT_NATIVE_LOAD_STORE_H

#include "native.h"

#include <string.h>

static inline int64_t bytes_of(int dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

static inline char *row_address(const TensorView *x, int64_t batch, int64_t row, int64_t head) {
    return x->data + batch * x->batch + row * x->row + head * x->head;
}

static inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* Exponent and mantissa move up as they are; a multiplication sets the exponent right, subnormal numbers included. */
static inline float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
    uint32_t special = rest >= 0x0f800000 ? 0x7f800000 : 0;
    return from_bits(to_bits(from_bits(rest) * 0x1p112f) | special | sign);
}

/* Round to nearest even: adding a power of two as large as the last bit that is to stay drops those below it. */
static inline uint16_t float_to_half(float x) {
    uint32_t bits = to_bits(x), sign = bits & 0x80000000, size = bits ^ sign, result;
    if (size > 0x7f800000)
        result = 0x7e00;
    else if (size >= 0x477ff000)
        result = 0x7c00;
    else if (size < 0x38800000)
        result = to_bits(from_bits(size) + 0.5f) - 0x3f000000;
    else
        result = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    return (uint16_t)(result | sign >> 16);
}

static inline uint16_t float_to_bfloat(float x) {
    uint32_t bits = to_bits(x);
    return (uint16_t)(x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__attribute__((always_inline)) static inline void load_double(double *to, const char *from, int64_t count, int dtype) {
    (void)dtype;
    memcpy(to, from, (size_t)count * 8);
}

__attribute__((always_inline)) static inline void load_float(float *restrict to, const char *restrict from, int64_t count, int dtype) {
    if (dtype == FLOAT32) {
        memcpy(to, from, (size_t)count * 4);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, from + 2 * i, 2);
        to[i] = dtype == BFLOAT16 ? from_bits((uint32_t)half << 16) : half_to_float(half);
    }
}

static inline void store_double(char *to, const double *from, int64_t count, int dtype) {
    (void)dtype;
    memcpy(to, from, (size_t)count * 8);
}

static inline void store_float(char *restrict to, const float *restrict from, int64_t count, int dtype) {
    if (dtype == FLOAT32) {
        memcpy(to, from, (size_t)count * 4);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        uint16_t half = dtype == BFLOAT16 ? float_to_bfloat(from[i]) : float_to_half(from[i]);
        memcpy(to + 2 * i, &half, 2);
    }
}

#endif
