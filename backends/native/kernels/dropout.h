/* Dropout: which weights of a tile are kept. Included once for each KIND; dilkit/op/dropout.py has the definition.
 *
 *     query i, keys j .. j + 3   --- philox: counter (j / 4, i, batch, head), key seed --->   4 words, a lane is a query
 *     FORWARD     lines are columns, lanes rows      --- keep_weights --->       kept (columns, rows)
 *     BACKWARD    lines are rows, lanes columns      --- transpose_square --->   kept (columns, rows)
 *
 * Queries are in lanes in every phase, because the four words of a query are those of four neighbouring keys: lines that follow
 * each other. A mask has all bits or none. The factor 1 / (1 - p) of weights that are kept is keep_scale, which goes into whole
 * results.
 */
#define Words N(Words)
#define Masks N(Masks)

typedef uint64_t Words __attribute__((vector_size(VECTOR_BYTES)));
enum { N(WORDS) = VECTOR_BYTES / 8 };
typedef INTEGER Masks __attribute__((vector_size(VECTOR_BYTES / 8 * sizeof(INTEGER))));

/* One round after the other of Philox 4x32; what is above the low half of a word is anything. */
static inline void N(philox)(Words x[4], uint64_t seed) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
#pragma GCC unroll 7
    for (int round = 0; round < 7; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
        Words product0 = MULTIPLY_LOW(x[0], 0xD2511F53u - (Words){0}), product1 = MULTIPLY_LOW(x[2], 0xCD9E8D57u - (Words){0});
        x[0] = product1 >> 32 ^ x[1] ^ key0, x[1] = product1;
        x[2] = product0 >> 32 ^ x[3] ^ key1, x[3] = product0;
    }
}

/* masks[k][l]: whether the weight of query l with key k is kept, for `lanes` queries, a multiple of LANES. */
static void N(keep_weights)(
    INTEGER *masks, int64_t apart, const int64_t *queries, int64_t lanes, const int64_t *keys, int64_t count, const Place *place,
    uint64_t seed, uint32_t threshold
) {
    for (int64_t l = 0; l < lanes; l += N(WORDS)) {
        Words i, x[4];
        memcpy(&i, queries + l, sizeof i);
        int64_t of = -1;
        for (int64_t k = 0; k < count; k++) {
            if (keys[k] >> 2 != of) {
                of = keys[k] >> 2;
                x[0] = (uint64_t)of - (Words){0}, x[1] = i, x[2] = (uint64_t)place->batch - (Words){0};
                x[3] = (i >> 32 << 16) + ((uint64_t)place->head | (uint64_t)(of >> 32) << 24);
                N(philox)(x, seed);
            }
            Masks kept = __builtin_convertvector((x[keys[k] & 3] & 0xffffffffu) >= (uint64_t)threshold, Masks);
            memcpy(masks + k * apart + l, &kept, sizeof kept);
        }
    }
}

/* The masks of a tile of scores. */
static void N(mask_tile)(const Task *task, int64_t first, int vectors, int64_t from, int64_t to) {
    const Scratch *s = &task->s;
    const Problem *p = task->p;
    const ColumnTile *tile = s->tiles->current;
    const Place place = place_of(p, task->batch, task->head);
    const int by_column = task->phase == BACKWARD;
    const int64_t row_step = place.step, of_row = by_column ? place.key : place.query, of_column = by_column ? place.query : place.key;
    int64_t rows[TILE_ROWS], columns[TILE_COLUMNS];
    for (int64_t r = 0; r < vectors * N(LANES); r++)
        rows[r] = of_row + row_step * N(position)(task, N(row_of)(p, s->slot_line[first + r]));
    for (int64_t k = 0; k < TILE_COLUMNS; k++)
        columns[k] = k >= from && k < to && k < tile->count ? of_column + row_step * tile->column[k] : 0;
    if (!by_column) {
        N(keep_weights)(s->kept + from * TILE_ROWS, TILE_ROWS, rows, vectors * N(LANES), columns + from, to - from, &place, p->seed, p->threshold);
        return;
    }
    from = from / N(LANES) * N(LANES), to = round_up(to, N(LANES));
    N(keep_weights)(s->kept_by_row + from, TILE_COLUMNS, columns + from, to - from, rows, vectors * N(LANES), &place, p->seed, p->threshold);
    for (int64_t k = from; k < to; k += N(LANES))
        for (int64_t r = 0; r < vectors * N(LANES); r += N(LANES))
            N(transpose_square)((REAL *)s->kept + k * TILE_ROWS + r, TILE_ROWS, (const REAL *)s->kept_by_row + r * TILE_COLUMNS + k, TILE_COLUMNS);
}

/* What is dropped becomes 0, in `numbers` (columns, rows), of which pairs have two columns in a unit. */
__attribute__((always_inline)) static inline void N(drop_weights)(
    const int unit, REAL *restrict numbers, const INTEGER *restrict kept, int64_t from, int64_t to, int64_t count
) {
    for (int64_t k = from; k < to; k += unit)
        for (int64_t r = 0; r < count; r += N(LANES)) {
            REAL *at = numbers + k / unit * TILE_ROWS + r;
            Lanes mask = N(load_lanes)(kept + k * TILE_ROWS + r);
            if (unit == 2)
                mask = (mask & 0xffff) | (N(load_lanes)(kept + (k + 1) * TILE_ROWS + r) & ~0xffff);
            N(store_vector)(at, (Vector)((Lanes)N(load_vector)(at) & mask));
        }
}
