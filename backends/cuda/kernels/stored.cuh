/* Four numbers of a row of a tensor at a time, as they are stored and as fp32. */
#ifndef DILKIT_STORED
#define DILKIT_STORED

#include "dilated.cuh"

#if STORAGE

typedef unsigned long long Stored;

DEVICE Stored stored(Storage a, Storage b, Storage c, Storage d) {
    return a | (Stored)b << 16 | (Stored)c << 32 | (Stored)d << 48;
}
DEVICE float4 numbers(Stored x) {
    unsigned low = (unsigned)x, high = (unsigned)(x >> 32);
    return make_float4(low_of(low), high_of(low), low_of(high), high_of(high));
}
DEVICE Stored rounded(float4 x) { return pack(x.x, x.y) | (Stored)pack(x.z, x.w) << 32; }

#else

typedef float4 Stored;

DEVICE Stored stored(float a, float b, float c, float d) { return make_float4(a, b, c, d); }
DEVICE float4 numbers(Stored x) { return x; }
DEVICE Stored rounded(float4 x) { return x; }

#endif

/* Four numbers at `place`, of which `count` exist; the others are 0. */
DEVICE Stored load_four(const Storage *place, int count) {
#if VECTOR
    return count > 0 ? LOAD((const Stored *)place) : stored(0, 0, 0, 0);
#else
    return stored(count > 0 ? LOAD(place) : 0, count > 1 ? LOAD(place + 1) : 0, count > 2 ? LOAD(place + 2) : 0,
                  count > 3 ? LOAD(place + 3) : 0);
#endif
}

DEVICE void store_four(Storage *place, float4 x, int count) {
#if VECTOR
    if (count > 0)
        STORE((Stored *)place, rounded(x));
#else
    float each[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (e < count)
            STORE(place + e, to_storage(each[e]));
#endif
}

/* The row at `position`, by that at 0: sums of bytes, which take fewer instructions. Where vectors are allowed, rows are less than
   2^32 bytes apart. */
DEVICE const Storage *row_at(const Storage *first, int position, long long stride) {
    unsigned long long apart = stride * sizeof(Storage);
#if VECTOR
    apart = (unsigned)apart;
#endif
    return (const Storage *)((const char *)first + (unsigned)position * apart);
}

#endif
