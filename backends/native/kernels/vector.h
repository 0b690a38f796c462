/* Vectors of REAL in GCC's vector extensions: loads, stores, select, max, and exp. Included once for each KIND.
 *
 *     memory (any alignment)  --- load_vector --->  Vector: LANES numbers in one register  --- store_vector --->  memory
 *
 * Lanes are integers as wide as the numbers: masks, and the bits of a Vector.
 */
#define Vector N(Vector)
#define Lanes N(Lanes)

typedef REAL Vector __attribute__((vector_size(VECTOR_BYTES)));
typedef INTEGER Lanes __attribute__((vector_size(VECTOR_BYTES)));
enum { N(LANES) = VECTOR_BYTES / sizeof(REAL) };

static inline Vector N(load_vector)(const REAL *from) {
    Vector x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void N(store_vector)(REAL *to, Vector x) { memcpy(to, &x, sizeof x); }

/* 0, 1, 2, ... */
static inline Lanes N(lane_numbers)(void) {
    static const INTEGER numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Lanes lanes;
    memcpy(&lanes, numbers, sizeof lanes);
    return lanes;
}

static inline Vector N(broadcast)(REAL x) { return x - (Vector){0}; }

static inline Vector N(select)(Lanes which, Vector yes, Vector no) {
    return (Vector)((which & (Lanes)yes) | (~which & (Lanes)no));
}

/* max(a, b), and b where either is NaN. */
static inline Vector N(vector_max)(Vector a, Vector b) { return R(VECTOR_MAX)(a, b); }

/* One step of a transpose: lanes and vectors whose numbers differ in `bit` change places. */
__attribute__((always_inline)) static inline void N(exchange)(Vector x[N(LANES)], const int bit) {
    if (bit >= N(LANES))
        return;
    Lanes low, high;
#pragma GCC unroll 16
    for (int i = 0; i < N(LANES); i++)
        low[i] = i & bit ? i - bit + N(LANES) : i, high[i] = low[i] + bit;
#pragma GCC unroll 16
    for (int i = 0; i < N(LANES); i++)
        if (!(i & bit)) {
            Vector a = x[i], b = x[i + bit];
            x[i] = SHUFFLE(a, b, low), x[i + bit] = SHUFFLE(a, b, high);
        }
}

/* The transpose of LANES vectors, whose lines are so far apart. */
__attribute__((always_inline)) static inline void N(store_transposed)(REAL *to, int64_t to_apart, Vector x[N(LANES)]) {
    N(exchange)(x, 1);
    N(exchange)(x, 2);
    N(exchange)(x, 4);
    N(exchange)(x, 8);
#pragma GCC unroll 16
    for (int i = 0; i < N(LANES); i++)
        N(store_vector)(to + i * to_apart, x[i]);
}

/* The transpose of LANES x LANES numbers, whose lines are so far apart; `to` may be `from`. */
static inline void N(transpose_square)(REAL *to, int64_t to_apart, const REAL *from, int64_t from_apart) {
    Vector x[N(LANES)];
#pragma GCC unroll 16
    for (int i = 0; i < N(LANES); i++)
        x[i] = N(load_vector)(from + i * from_apart);
    N(store_transposed)(to, to_apart, x);
}

/* The transpose of LANES numbers of each of LANES lines, from the number `done` of each on, in lines that are so far apart. */
static inline void N(transpose_lines)(REAL *to, int64_t to_apart, const REAL *const line[N(LANES)], int64_t done) {
    Vector x[N(LANES)];
#pragma GCC unroll 16
    for (int i = 0; i < N(LANES); i++)
        x[i] = N(load_vector)(line[i] + done);
    N(store_transposed)(to, to_apart, x);
}

#if UNIT == 2 && defined(__AVX512DQ__)

/* e**x for x up to 0 and a little more, to a relative 3e-6 and that of rounding x / log 2: for probabilities that are rounded to
 * bf16. x / log 2 is a whole number and a fraction from 0 to 1, for which 2**fraction is a polynomial of degree 4. */
static inline Vector N(exp)(Vector x) {
    __m512 y = (__m512)(x * LOG2_E), f = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vector power = (Vector)f * 0.01342668519f + 0.05224247354f;
    power = power * (Vector)f + 0.24128020436f;
    power = power * (Vector)f + 0.6930448451f;
    return (Vector)_mm512_scalef_ps((__m512)(power * (Vector)f + 1), y);
}

#else
#define IS_float (sizeof(REAL) == 4)

/* e**x for x up to 0 and a little more; 0 below the logarithm of the smallest normal number, NaN for NaN.
 *
 * x = n log 2 + f with n whole and |f| <= log 2 / 2: a polynomial for e**f (relative error 1e-7 in degree 5, 4e-18 in degree
 * 11), and n put into the exponent of a factor, which is 0 for the least n. log 2 is taken in two parts, of which n times the
 * first is exact.
 */
static inline Vector N(exp)(Vector x) {
    static const double c5[] = {1.0, 0.9999997071729571273, 0.4999914951511192832, 0.1666763624414992668, 0.04189793078572596114,
                                0.008290311628263148361};
    static const double c11[] = {1.0, 1.0, 0.5000000000000012501, 0.1666666666666621691, 0.04166666666651778114,
                                 0.008333333333549822321, 0.001388888894636327365, 0.0001984126943657071359,
                                 0.00002480149062687183964, 2.755762687196580739e-6, 2.763103712615049707e-7,
                                 2.499138295938866714e-8};
    const REAL round = (REAL)(IS_float ? 0x1.8p23 : 0x1.8p52), least = (REAL)(IS_float ? -127 * LN_2 : -1023 * LN_2);
    const REAL high = (REAL)(IS_float ? 0x1.62e4p-1 : 0x1.62e42fefap-1), low = (REAL)(LN_2 - (long double)high);
    const int degree = IS_float ? 5 : 11, shift = IS_float ? 23 : 52;
    const double *c = IS_float ? c5 : c11;
    x = N(vector_max)(N(broadcast)(least), x);
    Vector shifted = x * LOG2_E + round, n = shifted - round, f = x - n * high - n * low, y = N(broadcast)((REAL)c[degree]);
#pragma GCC unroll 12
    for (int i = degree - 1; i >= 0; i--)
        y = y * f + (REAL)c[i];
    Lanes exponent = ((Lanes)shifted << shift) + (Lanes)N(broadcast)((REAL)1);
    return y * (Vector)exponent;
}

#undef IS_float
#endif
