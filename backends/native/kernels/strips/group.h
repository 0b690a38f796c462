/* A group of rows of a strip with some vectors of cells: scores along cells, then sums along head_dim, both in blocks of 4 rows x up
 * to 5 vectors, with operands of rows broadcast. Included once for each KIND; FORWARD alone.
 */
enum { N(GROUP_VECTORS) = REGISTER_ROWS * ROW_VECTORS < 20 ? 3 : 5 }; /* of a register block: with 6, GCC reads each operand again */
enum { N(MOST_VECTORS) = TILE_COLUMNS * ROW_VECTORS / GROUP_ROWS };   /* whose scores there is room for */
enum { N(SCORES_APART) = N(MOST_VECTORS) * N(LANES) };                /* from those of a row to those of the next */

/* Vectors of cells: keys and values, and for each row of the group which lanes it sees, -1, or not, 0. */
typedef struct {
    int64_t count, key_step;
    const REAL *keys[N(MOST_VECTORS)], *values[N(MOST_VECTORS)];
    const INTEGER *seen[N(MOST_VECTORS)];
} N(Cells);

/* sum[i * vectors + j] += a[i * a_apart + k] * b[j][k * b_step], for every k. */
__attribute__((always_inline)) static inline void N(add_outer_products)(
    Vector *sum, const int vectors, const REAL *a, int64_t a_apart, const REAL *const *b, int64_t b_step, int64_t count
) {
    for (int64_t k = 0; k < count; k++) {
        Vector x[N(GROUP_VECTORS)];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++)
            x[j] = N(load_vector)(b[j] + k * b_step);
#pragma GCC unroll 4
        for (int i = 0; i < GROUP_ROWS; i++)
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++)
                sum[i * vectors + j] += a[i * a_apart + k] * x[j];
    }
}

/* The scores of some vectors of cells from `first` on, -inf where a row does not see a cell; their maxima. */
__attribute__((always_inline)) static inline void N(score_cells)(
    const int vectors, const Task *task, const N(Cells) *cells, int64_t first, Vector max[GROUP_ROWS]
) {
    const Vector never = N(broadcast)(-(REAL)INFINITY);
    const REAL *keys[N(GROUP_VECTORS)];
    Vector sum[GROUP_ROWS * N(GROUP_VECTORS)] = {{0}};
#pragma GCC unroll 8
    for (int j = 0; j < vectors; j++)
        keys[j] = cells->keys[first + j];
    N(add_outer_products)(sum, vectors, task->s.packed_rows[0], task->padded_dim, keys, cells->key_step, task->p->dim);
#pragma GCC unroll 4
    for (int i = 0; i < GROUP_ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            const Lanes seen = N(load_lanes)(cells->seen[first + j] + i * N(LANES));
            const Vector t = N(select)(seen, sum[i * vectors + j], never);
            max[i] = N(vector_max)(t, max[i]);
            N(store_vector)(task->s.scores + i * N(SCORES_APART) + (first + j) * N(LANES), t);
        }
}

/* sums += P . values, of so many vectors along head_dim from the number `dim` on. */
__attribute__((always_inline)) static inline void N(add_cells)(const int vectors, const Task *task, const N(Cells) *cells, int64_t dim) {
    REAL *sums = task->s.slot_sums[0] + dim;
    Vector sum[GROUP_ROWS * N(GROUP_VECTORS)];
#pragma GCC unroll 32
    for (int n = 0; n < GROUP_ROWS * vectors; n++)
        sum[n] = N(load_vector)(sums + n / vectors * task->padded_dim + n % vectors * N(LANES));
    for (int64_t f = 0; f < cells->count; f++) {
        const REAL *values[N(GROUP_VECTORS)];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++)
            values[j] = cells->values[f] + dim + j * N(LANES);
        N(add_outer_products)(sum, vectors, task->s.scores + f * N(LANES), N(SCORES_APART), values, task->padded_dim, N(LANES));
    }
#pragma GCC unroll 32
    for (int n = 0; n < GROUP_ROWS * vectors; n++)
        N(store_vector)(sums + n / vectors * task->padded_dim + n % vectors * N(LANES), sum[n]);
}

/* The vectors of the next register block when `left` are left: blocks of about the same size. */
static inline int64_t N(next_vectors)(int64_t left) { return parts_of(left, parts_of(left, N(GROUP_VECTORS))); }

/* The compiler sees how many vectors there are. */
#if REGISTER_ROWS * ROW_VECTORS < 20
#define FOR_GROUP(function, vectors, ...)        \
    switch (vectors) {                           \
    case 1: function(1, __VA_ARGS__); break;     \
    case 2: function(2, __VA_ARGS__); break;     \
    default: function(3, __VA_ARGS__);           \
    }
#else
#define FOR_GROUP(function, vectors, ...)        \
    switch (vectors) {                           \
    case 1: function(1, __VA_ARGS__); break;     \
    case 2: function(2, __VA_ARGS__); break;     \
    case 3: function(3, __VA_ARGS__); break;     \
    case 4: function(4, __VA_ARGS__); break;     \
    default: function(5, __VA_ARGS__);           \
    }
#endif

/* The greatest lane, and the sum of the lanes, in each lane. */
static inline Vector N(greatest_lane)(Vector x) {
#pragma GCC unroll 4
    for (int bit = 1; bit < N(LANES); bit *= 2)
        x = N(vector_max)(x, SHUFFLE(x, x, (N(lane_numbers)() ^ bit)));
    return x;
}

static inline Vector N(sum_of_lanes)(Vector x) {
#pragma GCC unroll 4
    for (int bit = 1; bit < N(LANES); bit *= 2)
        x += SHUFFLE(x, x, (N(lane_numbers)() ^ bit));
    return x;
}

/* One online softmax step of row i of a group, as in online_softmax.h. */
static inline void N(softmax_of_row)(const Task *task, int i, int64_t count, Vector max) {
    const Scratch *s = &task->s;
    REAL *scores = s->scores + i * N(SCORES_APART), *sums = s->slot_sums[0] + i * task->padded_dim;
    const REAL scale = (REAL)task->p->scale * LOG2_E;
    const Vector old = N(broadcast)(s->slot_max[i]), most = N(vector_max)(scale * N(greatest_lane)(max), old);
    const Vector base = N(select)((Lanes)(most == -(REAL)INFINITY), N(broadcast)(0), most), factor = N(exp2)(old - base);
    const REAL left = N(round_huge)(scores, N(LANES), 0, count, base, scale, 0) ? 1 : scale;
    Vector total = N(broadcast)(0);
    for (int64_t k = 0; k < count * N(LANES); k += N(LANES)) {
        const Vector p = N(exp2)(left * N(load_vector)(scores + k) - base);
        N(store_vector)(scores + k, p);
        total += p;
    }
    for (int64_t d = 0; s->slot_sum[i] != 0 && d < task->padded_dim; d += N(LANES))
        N(store_vector)(sums + d, factor * N(load_vector)(sums + d));
    s->slot_max[i] = most[0], s->slot_sum[i] = factor[0] * s->slot_sum[i] + N(sum_of_lanes)(total)[0];
}

/* The rows of a group with some cells: one online softmax step. */
static void N(attend_cells)(const Task *task, const N(Cells) *cells) {
    const int64_t across = parts_of(task->p->dim, N(LANES));
    Vector max[GROUP_ROWS];
    for (int i = 0; i < GROUP_ROWS; i++)
        max[i] = N(broadcast)(-(REAL)INFINITY);
    for (int64_t done = 0, vectors; done < cells->count; done += vectors) {
        vectors = N(next_vectors)(cells->count - done);
        FOR_GROUP(N(score_cells), vectors, task, cells, done, max)
    }
    for (int i = 0; i < GROUP_ROWS; i++)
        N(softmax_of_row)(task, i, cells->count, max[i]);
    for (int64_t done = 0, vectors; done < across; done += vectors) {
        vectors = N(next_vectors)(across - done);
        FOR_GROUP(N(add_cells), vectors, task, cells, done * N(LANES))
    }
}

#undef FOR_GROUP
