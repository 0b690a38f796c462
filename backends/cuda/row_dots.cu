/* delta = rowsum(dout * out), fp32: what every score's gradient is less, in both kernels of gradients.

   LANES threads next to each other share a row, 16 bytes of it each. Any tiles will do that have every row of every head. */
#include "dilated.cuh"

enum {
    PART = STORAGE ? 8 : 4,
    PARTS = HEAD_DIM / PART,
    LANES = PARTS <= 2 ? 2 : PARTS <= 4 ? 4 : PARTS <= 8 ? 8 : PARTS <= 16 ? 16 : 32,
};

#if TILE_ROWS % 16
#error "a warp has up to 16 rows at a time, and all its threads meet at each sum"
#endif

/* The sum of PART products, of those below `count` where rows are not read 16 bytes at a time. */
#if !VECTOR

DEVICE float products(const Storage *left, const Storage *right, int count) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PART; i++)
        if (i < count)
            sum += from_storage(LOAD(left + i)) * from_storage(LOAD(right + i));
    return sum;
}

#elif STORAGE == 0

DEVICE float products(const Storage *left, const Storage *right, int count) {
    float4 a = load_floats(left), b = load_floats(right);
    return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

#else

DEVICE float two_products(unsigned a, unsigned b) { return low_of(a) * low_of(b) + high_of(a) * high_of(b); }

DEVICE float products(const Storage *left, const Storage *right, int count) {
    uint4 a = load_words(left), b = load_words(right);
    return two_products(a.x, b.x) + two_products(a.y, b.y) + two_products(a.z, b.z) + two_products(a.w, b.w);
}

#endif

/* Where a row of a tile begins. */
DEVICE const Storage *row_of(const View *view, const Tile *tile, int batch, int row) {
    return (const Storage *)view->data + batch * view->batch + tile->head * view->head + row * view->row;
}

KERNEL(row_dots) {
    SHARED int item;
    Tile tile;
    int batch, column = thread_index() % LANES * PART;
    start_tiles(&item);
    while (next_tile(&call, &item, &tile, &batch)) {
        float *delta = call.delta + ((long long)batch * call.heads + tile.head) * call.seq;
        for (int i = thread_index() / LANES; i < TILE_ROWS; i += THREADS / LANES) {
            float sum = 0.0f;
            int row = i < tile.rows ? tile.row + i * call.step : 0;
            if (i < tile.rows && column < call.head_dim)
                sum = products(row_of(&call.dout, &tile, batch, row) + column, row_of(&call.out, &tile, batch, row) + column,
                               call.head_dim - column);
#pragma unroll
            for (int mask = LANES / 2; mask; mask /= 2)
                sum += shuffle_xor(sum, mask);
            if (i < tile.rows && !column)
                STORE(delta + row, sum);
        }
    }
}
