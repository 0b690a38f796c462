/* Scores that know positions: a softcap and a bias, on a tile of scores. Included once for each KIND.
 *
 *     cap_scores          products -> cap * tanh(scale * s / cap), and in a backward pass 1 - tanh ** 2 in cap_slope
 *     add_bias            t = scale * s, + log count - slope * distance, or + table[index], or + such a sum; the maximum anew
 *
 * A position has one number, along the sequence, or up to three; what a dimension lacks is 0 in every row and column. Positions
 * along the sequence are counted from the start of the block: exact as fp32 numbers where rows are near each other, and else
 * rounded by 6e-8 of their distance.
 */

/* tanh x / x as a polynomial of x ** 2 where |x| < TANH_NEAR: relative errors of up to 1.3e-9 and 1.5e-18. */
#define TANH_NEAR 1

/* How a bias is computed, as the loops below know it. FAR_TABLE: all pairs of the tile have one entry. */
enum { N(NO_BIAS), N(LINE), N(PLANE), N(SPACE), N(SPACE_L1), N(SPACE_MAX), N(LINE_TABLE), N(GRID_TABLE), N(FAR_TABLE), N(SUMMED_TABLES) };

static inline int N(has_scores)(const Problem *p) { return p->softcap > 0 || p->bias != NO_BIAS; }

/* What a tile of scores is still to be multiplied by: in the softmax, and where a bias is added to it. */
static inline REAL N(softmax_factor)(const Problem *p) { return is_scaled_alone(p) ? (REAL)p->scale : 1; }

static inline REAL N(bias_factor)(const Problem *p) { return p->softcap > 0 ? 1 : (REAL)p->scale; }

static int N(bias_way)(const Problem *p) {
    if (p->bias == NO_BIAS)
        return N(NO_BIAS);
    if (is_summed(p))
        return N(SUMMED_TABLES);
    if (p->bias == TABLE)
        return p->position_dims == 1 ? N(LINE_TABLE) : N(GRID_TABLE);
    if (p->position_dims == 1)
        return N(LINE);
    if (p->bias == EUCLIDEAN)
        return p->position_dims == 2 ? N(PLANE) : N(SPACE);
    return p->bias == L1 ? N(SPACE_L1) : N(SPACE_MAX);
}

/* The number `d` of the position of row x of the sequence, as a key or as a query. */
static inline REAL N(position_of)(const Task *task, int64_t x, int d, int as_key) {
    const Problem *p = task->p;
    if (!p->positions.data)
        return (REAL)((x - task->start) * p->step);
    const char *row = row_address(&p->positions, task->batch, x, 0);
    return N(numbers)(row)[as_key ? p->key_position + d : d];
}

static void N(place_row)(const Task *task, int64_t slot, int64_t x, int64_t head) {
    const Problem *p = task->p;
    for (int d = 0; d < 3; d++)
        task->s.row_at[d][slot] = d < p->position_dims ? N(position_of)(task, x, d, task->phase == BACKWARD) : 0;
    task->s.row_slope[slot] = N(numbers)(p->bias_weights)[head * p->entries];
    task->s.row_table[slot] = (INTEGER)(p->bias != ROW_TABLES ? head * p->entries : task->phase == BACKWARD ? 0 : x * p->row_entries);
}

/* Columns up to a whole register block have a place as well, whatever it is: no row sees them. */
static void N(place_column)(const Task *task, int64_t k, int64_t x) {
    for (int d = 0; d < 3; d++)
        task->s.column_at[d][k] = d < task->p->position_dims ? N(position_of)(task, x, d, task->phase != BACKWARD) : 0;
    task->s.column_table[k] = (INTEGER)(task->phase == BACKWARD ? x * task->p->row_entries : 0);
}

/* Where the weights of the sequence's first row begin, of ROW_TABLES; else 0. */
static inline int64_t N(first_table)(const Task *task) {
    return task->head * task->p->head_entries + task->batch * task->p->batch_entries;
}

static inline Vector N(magnitude)(Vector x) { return N(vector_max)(x, -x); }

/* tanh x: an odd polynomial near 0, where 1 - e**-2|x| would lose digits; beyond, by e**-2|x|. */
static inline Vector N(tanh)(Vector x) {
    static const double of_float[] = {
        0.9999999956422977296, -0.3333327737813325292, 0.1333213930517481912, -0.05386970672481631927,
        0.02146141015525662649, -0.007912485058835691915, 0.002278647664871163171,
        -0.0003523280943633134944
    };
    static const double of_double[] = {
        0.999999999999999999, -0.3333333333333327584, 0.1333333333332779468, -0.0539682539661356854,
        0.02186948849337998468, -0.008863235003976633683, 0.00359212375470751921,
        -0.001455810027830967799, 0.0005899270731420480775, -0.0002388222738126308796,
        0.00009620826517827718899, -0.00003803813942672594662, 0.00001425537071611451494,
        -4.741598314640335812e-6, 1.263992130430640459e-6, -2.310510074581507584e-7,
        2.106707006935426215e-8
    };
    const int degree = sizeof(REAL) == 4 ? 7 : 16;
    const double *c = sizeof(REAL) == 4 ? of_float : of_double;
    Vector size = N(magnitude)(x), z = x * x, near = N(broadcast)((REAL)c[degree]), e = N(exp)(size * (REAL)-2);
#pragma GCC unroll 16
    for (int i = degree - 1; i >= 0; i--)
        near = near * z + (REAL)c[i];
    Vector far = (1 - e) / (1 + e);
    return N(select)((Lanes)(size < TANH_NEAR), near * x, N(select)((Lanes)(x < 0), -far, far));
}

/* The softcap of a tile of scores, and its derivative where there is room for it. */
__attribute__((noinline)) static void N(cap_scores)(const Task *task, int vectors, int64_t from, int64_t to) {
    const REAL cap = (REAL)task->p->softcap, factor = (REAL)(task->p->scale / task->p->softcap);
    REAL *scores = task->s.scores, *slope = task->s.cap_slope;
    for (int64_t k = from; k < to; k++)
        for (int64_t r = 0; r < vectors * N(LANES); r += N(LANES)) {
            Vector share = N(tanh)(N(load_vector)(scores + k * TILE_ROWS + r) * factor);
            N(store_vector)(scores + k * TILE_ROWS + r, share * cap);
            if (task->phase == BACKWARD)
                N(store_vector)(slope + k * TILE_ROWS + r, 1 - share * share);
        }
}

/* The distance of LANES rows, whose positions are given, from column k: the maximum with 0 of a neutral row's NaN is 0. */
__attribute__((always_inline)) static inline Vector N(distance)(const int way, const Vector row[3], REAL *const column[3], int64_t k) {
    const Vector none = {0};
    Vector x = row[0] - column[0][k];
    if (way == N(LINE))
        return N(vector_max)(N(magnitude)(x), none);
    Vector y = row[1] - column[1][k];
    if (way == N(PLANE))
        return N(vector_max)(R(VECTOR_SQRT)(x * x + y * y), none);
    Vector z = row[2] - column[2][k];
    if (way == N(SPACE))
        return N(vector_max)(R(VECTOR_SQRT)(x * x + y * y + z * z), none);
    x = N(magnitude)(x), y = N(magnitude)(y), z = N(magnitude)(z);
    return N(vector_max)(way == N(SPACE_L1) ? x + y + z : N(vector_max)(x, N(vector_max)(y, z)), none);
}

/* The entries of dimension d of a table for LANES rows with column k: query less key, clipped. */
__attribute__((always_inline)) static inline Vector N(axis_entries)(
    const Problem *p, const Vector row[3], REAL *const column[3], int64_t k, int d, REAL sign
) {
    const REAL most = (REAL)(p->table_size[d] / 2);
    Vector apart = (row[d] - column[d][k]) * sign;
    return -N(vector_max)(-N(vector_max)(apart, N(broadcast)(-most)), N(broadcast)(-most)) + most;
}

/* The entries of a table of all dimensions for LANES rows with column k. */
__attribute__((always_inline)) static inline Lanes N(entries_of)(
    const int way, const Problem *p, const Vector row[3], REAL *const column[3], int64_t k, REAL sign
) {
    const int dims = way == N(LINE_TABLE) ? 1 : 3;
    Vector entry = {0};
    for (int d = 0; d < dims; d++)
        entry = entry * (REAL)p->table_size[d] + N(axis_entries)(p, row, column, k, d, sign);
    return __builtin_convertvector(entry, Lanes);
}

/* The sum of the weights of each dimension, whose tables follow one another from `table` on. */
__attribute__((always_inline)) static inline Vector N(summed_tables)(
    const Problem *p, const REAL *weights, Lanes table, const Vector row[3], REAL *const column[3], int64_t k, REAL sign
) {
    Vector sum = {0};
    for (int d = 0; d < 3 && d < p->position_dims; d++) {
        sum += R(GATHER)(weights, table + __builtin_convertvector(N(axis_entries)(p, row, column, k, d, sign), Lanes));
        table += (INTEGER)p->table_size[d];
    }
    return sum;
}

static inline void N(load_places)(const Scratch *s, int64_t slot, Vector row[3]) {
    for (int d = 0; d < 3; d++)
        row[d] = N(load_vector)(s->row_at[d] + slot);
}

static inline REAL N(difference_sign)(const Task *task) { return task->phase == BACKWARD ? -1 : 1; }

__attribute__((always_inline)) static inline void N(add_bias_of)(
    const int way, const Task *task, int64_t first, int vectors, int64_t from, int64_t to, REAL log_count, REAL *restrict max,
    int64_t entry
) {
    const Scratch *s = &task->s;
    const REAL *weights = N(numbers)(task->p->bias_weights) + N(first_table)(task);
    const REAL sign = N(difference_sign)(task), factor = N(bias_factor)(task->p);
    for (int64_t r = 0; r < vectors * N(LANES); r += N(LANES)) {
        Vector most = N(broadcast)(-(REAL)INFINITY), row[3] = {{0}}, slope = {0}, added = N(broadcast)(log_count);
        Lanes table = {0};
        if (way != N(NO_BIAS)) {
            N(load_places)(s, first + r, row);
            slope = N(load_vector)(s->row_slope + first + r), table = N(load_lanes)(s->row_table + first + r);
        }
        if (way == N(FAR_TABLE))
            added = R(GATHER)(weights, table + (INTEGER)entry) + log_count;
        for (int64_t k = from; k < to; k++) {
            Vector t = N(load_vector)(s->scores + k * TILE_ROWS + r) * factor + added;
            if (way == N(LINE_TABLE) || way == N(GRID_TABLE))
                t += R(GATHER)(weights, table + N(entries_of)(way, task->p, row, s->column_at, k, sign));
            else if (way == N(SUMMED_TABLES))
                t += N(summed_tables)(task->p, weights, table + s->column_table[k], row, s->column_at, k, sign);
            else if (way != N(NO_BIAS) && way != N(FAR_TABLE))
                t -= slope * N(distance)(way, row, s->column_at, k);
            most = N(vector_max)(t, most);
            N(store_vector)(s->scores + k * TILE_ROWS + r, t);
        }
        N(store_vector)(max + r, most);
    }
}

/* The entry that all pairs of a tile have, where they are farther apart than a table along the sequence reaches; else -1. */
static int64_t N(far_entry)(const Task *task, int64_t first, int64_t count, int64_t from, int64_t to) {
    const REAL *row = task->s.row_at[0] + first, *column = task->s.column_at[0];
    const REAL most = (REAL)(task->p->table_size[0] / 2);
    REAL top = row[0], bottom = row[0], left = column[from], right = column[from];
    for (int64_t r = 1; r < count; r++)
        top = row[r] < top ? row[r] : top, bottom = row[r] > bottom ? row[r] : bottom;
    for (int64_t k = from + 1; k < lesser(to, task->s.tiles->current->count); k++)
        left = column[k] < left ? column[k] : left, right = column[k] > right ? column[k] : right;
    int after = top - right >= most, before = left - bottom >= most, by_key = task->phase == BACKWARD;
    return after || before ? (after != by_key ? task->p->table_size[0] - 1 : 0) : -1;
}

/* The compiler sees the way as a constant. */
#define FOR_WAY(function, way, ...)                                       \
    switch (way) {                                                        \
    case N(NO_BIAS): function(N(NO_BIAS), __VA_ARGS__); break;            \
    case N(LINE): function(N(LINE), __VA_ARGS__); break;                  \
    case N(PLANE): function(N(PLANE), __VA_ARGS__); break;                \
    case N(SPACE): function(N(SPACE), __VA_ARGS__); break;                \
    case N(SPACE_L1): function(N(SPACE_L1), __VA_ARGS__); break;          \
    case N(SPACE_MAX): function(N(SPACE_MAX), __VA_ARGS__); break;        \
    case N(LINE_TABLE): function(N(LINE_TABLE), __VA_ARGS__); break;      \
    case N(FAR_TABLE): function(N(FAR_TABLE), __VA_ARGS__); break;        \
    case N(SUMMED_TABLES): function(N(SUMMED_TABLES), __VA_ARGS__); break; \
    default: function(N(GRID_TABLE), __VA_ARGS__);                        \
    }

/* Products of a tile to scores: scale, softcap, log count and bias; their maximum. */
__attribute__((noinline)) static void N(score_tile)(
    const Task *task, int64_t first, int64_t count, int vectors, int64_t from, int64_t to, REAL log_count, REAL *max
) {
    const int way = N(bias_way)(task->p);
    int64_t entry = way == N(LINE_TABLE) ? N(far_entry)(task, first, count, from, to) : -1;
    if (task->p->softcap > 0)
        N(cap_scores)(task, vectors, from, to);
    FOR_WAY(N(add_bias_of), entry < 0 ? way : N(FAR_TABLE), task, first, vectors, from, to, log_count, max, entry)
}

static void N(uncap_gradients)(const Task *task, int vectors, int64_t from, int64_t to) {
    for (int64_t k = from; k < to; k++)
        for (int64_t r = 0; r < vectors * N(LANES); r += N(LANES)) {
            REAL *at = task->s.score_gradients + k * TILE_ROWS + r;
            Vector ds = N(load_vector)(at), slope = N(load_vector)(task->s.cap_slope + k * TILE_ROWS + r);
            N(store_vector)(at, N(select)((Lanes)(ds == 0), ds, ds * slope)); /* of what is not seen the slope may be NaN */
        }
}

static double *N(bias_part)(const Task *task) {
    const Problem *p = task->p;
    if (p->bias == ROW_TABLES)
        return p->dbias + N(first_table)(task);
    int64_t part = p->one_part ? 0 : p->first_part + task->batch * p->chunks + task->chunk;
    return p->dbias + (part * p->heads + task->head) * p->entries;
}

__attribute__((always_inline)) static inline void N(sum_bias_gradient_of)(
    const int way, const Task *task, int64_t first, int64_t count, int64_t from, int64_t to, int64_t entry
) {
    const Scratch *s = &task->s;
    const int is_summed = way == N(SUMMED_TABLES), is_table = way == N(LINE_TABLE) || way == N(GRID_TABLE) || is_summed;
    const REAL sign = N(difference_sign)(task);
    double *part = N(bias_part)(task), total = 0;
    for (int64_t r = 0; r < count; r += N(LANES)) {
        Vector row[3], sum = {0};
        Lanes used;
        N(load_places)(s, first + r, row);
        for (int l = 0; l < N(LANES); l++)
            used[l] = r + l < count ? -1 : 0;
        for (int64_t k = from; k < to; k++) {
            Vector ds = (Vector)((Lanes)N(load_vector)(s->score_gradients + k * TILE_ROWS + r) & used);
            if (!is_table) {
                sum += way == N(FAR_TABLE) ? ds : -ds * N(distance)(way, row, s->column_at, k);
                continue;
            }
            double *table = part + s->column_table[k];
            for (int d = 0; d < (is_summed ? task->p->position_dims : 1); d++) {
                Lanes entries = is_summed ? __builtin_convertvector(N(axis_entries)(task->p, row, s->column_at, k, d, sign), Lanes)
                                          : N(entries_of)(way, task->p, row, s->column_at, k, sign);
                for (int l = 0; l < N(LANES); l++)
                    table[entries[l]] += (double)ds[l];
                table += task->p->table_size[d];
            }
        }
        for (int l = 0; l < N(LANES); l++)
            total += (double)sum[l];
    }
    if (!is_table)
        part[way == N(FAR_TABLE) ? entry : 0] += total;
}

/* What a tile adds to the gradient of the weights: dS of pairs that are seen, of the `count` rows in use. */
__attribute__((noinline)) static void N(sum_bias_gradient)(const Task *task, int64_t first, int64_t count, int64_t from, int64_t to) {
    int way = N(bias_way)(task->p);
    int64_t entry = way == N(LINE_TABLE) ? N(far_entry)(task, first, count, from, to) : -1;
    if (way != N(NO_BIAS))
        FOR_WAY(N(sum_bias_gradient_of), entry < 0 ? way : N(FAR_TABLE), task, first, count, from, to, entry)
}
