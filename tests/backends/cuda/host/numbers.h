/* Half and bfloat16 as bits, and the words that hold two of them: the first in the low half. Rounding is to nearest even. */
#ifndef DILKIT_HOST_NUMBERS
#define DILKIT_HOST_NUMBERS

static inline float host_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t host_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The exponent's bias differs by 112; infinities and NaN have all its bits. */
DEVICE float half_to_float(unsigned short half) {
    uint32_t magnitude = host_bits(host_float((uint32_t)(half & 0x7fff) << 13) * 0x1p112f);
    uint32_t special = (half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;
    return host_float(magnitude | special | (uint32_t)(half & 0x8000) << 16);
}

DEVICE unsigned short float_to_half(float value) {
    uint32_t bits = host_bits(value), magnitude = bits & 0x7fffffff, half;
    if (magnitude > 0x7f800000)
        return 0x7fff;
    if (magnitude >= 0x477ff000)
        half = 0x7c00;
    else if (magnitude >= 0x38800000)
        half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    else
        half = host_bits(host_float(magnitude) + 0.5f) - host_bits(0.5f);
    return (unsigned short)(half | (bits >> 16 & 0x8000));
}

DEVICE float bfloat_to_float(unsigned short bfloat) { return host_float((uint32_t)bfloat << 16); }

DEVICE unsigned short float_to_bfloat(float value) {
    uint32_t bits = host_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fff;
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

DEVICE unsigned pack_halves(float low, float high) { return float_to_half(low) | (unsigned)float_to_half(high) << 16; }
DEVICE unsigned pack_bfloats(float low, float high) { return float_to_bfloat(low) | (unsigned)float_to_bfloat(high) << 16; }

DEVICE float exp2_fast(float x) { return exp2f(x); }
DEVICE float exp2_capped(float x) { return exp2f(x > 0.0f ? 0.0f : x); }

DEVICE int bit_count(unsigned word) { return __builtin_popcount(word); }

#endif
