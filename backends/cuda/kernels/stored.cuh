/* Quads: four numbers of a row, as they are stored (STORAGE) and as fp32.

       global row --load_four--> Quad (registers, as stored) --to_floats--> float4 --to_quad, store_four--> global row */
#ifndef DILKIT_STORED
#define DILKIT_STORED

#include "dilated.cuh"

#if STORAGE

typedef unsigned long long Quad;

DEVICE Quad make_quad(Storage a, Storage b, Storage c, Storage d) {
    return a | (Quad)b << 16 | (Quad)c << 32 | (Quad)d << 48;
}
DEVICE float4 to_floats(Quad x) {
    unsigned low = (unsigned)x, high = (unsigned)(x >> 32);
    return make_float4(low_of(low), high_of(low), low_of(high), high_of(high));
}
DEVICE Quad to_quad(float4 x) { return pack(x.x, x.y) | (Quad)pack(x.z, x.w) << 32; }

#else

typedef float4 Quad;

DEVICE Quad make_quad(float a, float b, float c, float d) { return make_float4(a, b, c, d); }
DEVICE float4 to_floats(Quad x) { return x; }
DEVICE Quad to_quad(float4 x) { return x; }

#endif

/* Four numbers at `place`, of which `count` exist; the others are 0. */
DEVICE Quad load_four(const Storage *place, int count) {
#if VECTOR
    return count > 0 ? LOAD((const Quad *)place) : make_quad(0, 0, 0, 0);
#else
    return make_quad(count > 0 ? LOAD(place) : 0, count > 1 ? LOAD(place + 1) : 0, count > 2 ? LOAD(place + 2) : 0,
                  count > 3 ? LOAD(place + 3) : 0);
#endif
}

DEVICE void store_four(Storage *place, float4 x, int count) {
#if VECTOR
    if (count > 0)
        STORE((Quad *)place, to_quad(x));
#else
    float each[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (e < count)
            STORE(place + e, to_storage(each[e]));
#endif
}

/* The row at `position`, given the row at 0. The sum is one of bytes, which needs fewer instructions. Where vectors are allowed,
   rows are less than 2^32 bytes apart. */
DEVICE const Storage *row_at(const Storage *first, int position, long long stride) {
    unsigned long long apart = stride * sizeof(Storage);
#if VECTOR
    apart = (unsigned)apart;
#endif
    return (const Storage *)((const char *)first + (unsigned)position * apart);
}

#endif
