/* The matrix products of a tile on AMX, in the place of matmul.h: bf16 pairs in tile registers, each 16 lines of 64 bytes.
 * C += A . B, with 2 x 2 tiles of C at a time, tmm0 to tmm3; A is in tmm4 and tmm5, B in tmm6 and tmm7.
 *
 *     compute_scores   A  packed_columns: a line is a column          B  packed_rows: a line is 2 dim            C  scores
 *     add_to_rows      A  added_columns: a line is a dim              B  P or dS: a line is 2 columns            C  slot_sums
 *     add_to_columns   A  gradient_rows, dS: a line is a column       B  plain_rows: a line is 2 rows            C  column_sums
 *
 * The shape of the tile registers is set once for each task, on the thread that runs it, and given up at its end.
 */
enum { TILE_LINES = 16 };
enum { N(LIST_STEP) = TILE_ROWS };           /* rows of a list are filled up to a multiple of it: add_to_columns takes so many */
enum { N(STEP_COLUMNS) = 2 * TILE_LINES };   /* of a tile, in the backward pass */

/* Tiles in memory, as counted in numbers: from line to line of a tile, and to the next tile in two directions. */
typedef struct {
    float *at;
    int64_t line, next, step;
} Tiles;

#ifdef __AMX_BF16__

static const struct {
    uint8_t palette, first_line, reserved[14];
    uint16_t line_bytes[16];
    uint8_t lines[16];
} tile_shapes = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

static void use_tiles(void) { _tile_loadconfig(&tile_shapes); }

static void give_up_tiles(void) { _tile_release(); }

#define LOAD_TILE(tile, from, tiles) _tile_loadd(tile, from, (size_t)tiles.line * sizeof(float))
#define STORE_TILE(tile, to, tiles) _tile_stored(tile, to, (size_t)tiles.line * sizeof(float))

/* c += a . b, or c = a . b: c.next goes down, and c.step to the right; a.step and b.step go along k. */
__attribute__((always_inline)) static inline void multiply_tiles(
    const int down, const int right, const int add, Tiles c, Tiles a, Tiles b, int64_t count
) {
    float *corner = c.at + c.next + c.step;
    __asm__ volatile("" ::: "memory"); /* GCC does not know that a tile register is loaded from memory */
    if (add) {
        LOAD_TILE(0, c.at, c);
        if (right == 2)
            LOAD_TILE(1, c.at + c.step, c);
        if (down == 2)
            LOAD_TILE(2, c.at + c.next, c);
        if (down == 2 && right == 2)
            LOAD_TILE(3, corner, c);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < count; k++, a.at += a.step, b.at += b.step) {
        LOAD_TILE(4, a.at, a);
        LOAD_TILE(6, b.at, b);
        _tile_dpbf16ps(0, 4, 6);
        if (right == 2) {
            LOAD_TILE(7, b.at + b.next, b);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (down == 2) {
            LOAD_TILE(5, a.at + a.next, a);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (down == 2 && right == 2)
            _tile_dpbf16ps(3, 5, 7);
    }
    STORE_TILE(0, c.at, c);
    if (right == 2)
        STORE_TILE(1, c.at + c.step, c);
    if (down == 2)
        STORE_TILE(2, c.at + c.next, c);
    if (down == 2 && right == 2)
        STORE_TILE(3, corner, c);
}

#undef LOAD_TILE
#undef STORE_TILE

#else /* the same in other instructions: slow, for machines that test without these */

static void use_tiles(void) {}
static void give_up_tiles(void) {}

static inline void multiply_tiles(int down, int right, int add, Tiles c, Tiles a, Tiles b, int64_t count) {
    for (int i = 0; i < down * TILE_LINES; i++)
        for (int v = 0; v < right; v++) {
            float *at = c.at + i / TILE_LINES * c.next + i % TILE_LINES * c.line + v * c.step;
            const float *line = a.at + i / TILE_LINES * a.next + i % TILE_LINES * a.line;
            Vector sum = add ? N(load_vector)(at) : N(broadcast)(0);
            for (int64_t k = 0; k < count * TILE_LINES; k++) {
                const float *x = b.at + k / TILE_LINES * b.step + k % TILE_LINES * b.line + v * b.next;
                sum = add_pair_products(sum, line[k / TILE_LINES * a.step + k % TILE_LINES], N(load_vector)(x));
            }
            N(store_vector)(at, sum);
        }
}

#endif

/* The vectors of rows of the next tile of scores, when `left` are left. */
static inline int N(block_vectors)(int64_t left) { return left < ROW_VECTORS ? (int)left : ROW_VECTORS; }

/* max[r] = the maximum over it and the scores of the columns from .. to - 1. */
static inline void N(find_maxima)(const REAL *restrict scores, REAL *restrict max, int64_t from, int64_t to, int64_t count) {
    for (int64_t r = 0; r < count; r += N(LANES)) {
        Vector most[4] = {N(load_vector)(max + r), most[0], most[0], most[0]};
        for (int64_t k = from; k < to; k += 4)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                most[i] = N(vector_max)(N(load_vector)(scores + (k + i) * TILE_ROWS + r), most[i]);
        most[0] = N(vector_max)(N(vector_max)(most[0], most[1]), N(vector_max)(most[2], most[3]));
        N(store_vector)(max + r, most[0]);
    }
}

/* products[k, r] = columns[k] . rows[r], for k in from .. to - 1 and so many vectors of rows. */
static inline void N(compute_products)(
    int vectors, REAL *products, Columns columns, REAL *rows, int64_t from, int64_t to, int64_t units
) {
    const int64_t steps = (units + PANEL - 1) / PANEL, square = PANEL * N(LANES);
    for (int64_t k = from; k < to; k += 2 * TILE_LINES) {
        Tiles c = {products + k * TILE_ROWS, TILE_ROWS, TILE_LINES * TILE_ROWS, N(LANES)};
        Tiles a = {columns.at + k * PANEL, PANEL, TILE_LINES * PANEL, TILE_COLUMNS * PANEL};
        Tiles b = {rows, N(LANES), steps * square, square};
        if (vectors == 2)
            multiply_tiles(2, 2, 0, c, a, b, steps);
        else
            multiply_tiles(2, 1, 0, c, a, b, steps);
    }
}

/* scores[k, r] = columns[k] . rows[r], as above; max[r] = the maximum over k. */
static void N(compute_scores)(
    int vectors, REAL *scores, REAL *max, Columns columns, REAL *rows, int64_t from, int64_t to, int64_t units
) {
    for (int64_t k = from; k < to; k += 2 * TILE_LINES) {
        N(compute_products)(vectors, scores, columns, rows, k, k + 2 * TILE_LINES, units);
        if (k > from) /* while the product of these columns is under way */
            N(find_maxima)(scores, max, k - 2 * TILE_LINES, k, vectors * N(LANES));
    }
    N(find_maxima)(scores, max, to - 2 * TILE_LINES, to, vectors * N(LANES));
}

/* sums[d, r] *= rescale[r], for one vector of rows; most often there is nothing to do. */
static inline void N(rescale_sums)(REAL *restrict sums, const REAL *restrict rescale, int64_t dim) {
    static const REAL ones[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    if (!memcmp(rescale, ones, sizeof ones))
        return;
    Vector factor = N(load_vector)(rescale);
    for (int64_t d = 0; d < dim; d++)
        N(store_vector)(sums + d * N(LANES), factor * N(load_vector)(sums + d * N(LANES)));
}

/* sums[d, r] = rescale[r] * sums[d, r] + sum over k of weights[k, r] * columns[k, d], for d below `dim`, rounded up to PANEL. */
static void N(add_to_rows)(
    int vectors, REAL *sums, int64_t apart, const REAL *rescale, REAL *weights, Columns columns, int64_t from, int64_t to,
    int64_t dim
) {
    const int64_t steps = (to - from) / (2 * TILE_LINES), pair = from / 2;
    for (int v = 0; v < vectors; v++)
        N(rescale_sums)(sums + v * apart, rescale + v * N(LANES), dim);
    Tiles b = {weights + pair * TILE_ROWS, TILE_ROWS, N(LANES), TILE_LINES * TILE_ROWS};
    for (int64_t d = 0; d < dim; d += 2 * TILE_LINES) {
        Tiles c = {sums + d * N(LANES), N(LANES), TILE_LINES * N(LANES), apart};
        Tiles a = {columns.at + (d * TILE_COLUMNS + pair * PANEL), PANEL, TILE_COLUMNS * PANEL, TILE_LINES * PANEL};
        if (vectors == 2 && d + TILE_LINES < dim)
            multiply_tiles(2, 2, 1, c, a, b, steps);
        else if (vectors == 2)
            multiply_tiles(1, 2, 1, c, a, b, steps);
        else if (d + TILE_LINES < dim)
            multiply_tiles(2, 1, 1, c, a, b, steps);
        else
            multiply_tiles(1, 1, 1, c, a, b, steps);
    }
}

/* sums[k, d] += sum over TILE_ROWS rows r of weights[k, r] * rows[r, d]. Weights of rows from `count` on are 0. */
static void N(add_to_columns)(
    REAL *sums, REAL *weights, REAL *rows, int64_t width, int64_t from, int64_t to, int64_t count, int64_t dim
) {
    (void)count;
    for (int64_t k = from; k < to; k += 2 * TILE_LINES)
        for (int64_t d = 0; d < dim; d += 2 * N(LANES)) {
            Tiles c = {sums + k * width + d, width, TILE_LINES * width, N(LANES)}, b = {rows + d, width, N(LANES), 0};
            Tiles a = {weights + k * TILE_ROWS, TILE_ROWS, TILE_LINES * TILE_ROWS, 0};
            if (d + N(LANES) < dim)
                multiply_tiles(2, 2, 1, c, a, b, 1);
            else
                multiply_tiles(2, 1, 1, c, a, b, 1);
        }
}
