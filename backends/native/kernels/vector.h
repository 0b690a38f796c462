/* Vectors of REAL in GCC's vector extensions: loads, stores, select, max, and 2**y. Included once for each KIND. Lanes are
 * integers as wide as the numbers: masks, and the bits of a Vector.
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

/* Numbers, wherever their address comes from; and zeros in their place. */
static inline REAL *N(numbers)(const void *from) { return (REAL *)from; }

static inline void N(clear)(REAL *to, int64_t count) { memset(to, 0, (size_t)count * sizeof(REAL)); }

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

/* The transpose of LANES numbers of each of LANES lines, from the number `done` of each on. */
static inline void N(transpose_lines)(REAL *to, int64_t to_apart, const REAL *const line[N(LANES)], int64_t done) {
    Vector x[N(LANES)];
#pragma GCC unroll 16
    for (int i = 0; i < N(LANES); i++)
        x[i] = N(load_vector)(line[i] + done);
    N(store_transposed)(to, to_apart, x);
}

#if UNIT == 2 && defined(__AVX512DQ__)

/* 2**y for y up to 0 and a little more, to a relative 3e-6, for probabilities that are rounded to bf16: a polynomial of degree
 * 4. */
static inline Vector N(exp2)(Vector y) {
    __m512 f = _mm512_reduce_ps((__m512)y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vector power = (Vector)f * 0.01342668519f + 0.05224247354f;
    power = power * (Vector)f + 0.24128020436f;
    power = power * (Vector)f + 0.6930448451f;
    return (Vector)_mm512_scalef_ps((__m512)(power * (Vector)f + 1), (__m512)y);
}

static inline Vector N(exp)(Vector x) { return N(exp2)(x * LOG2_E); }

#else
#define IS_float (sizeof(REAL) == 4)
#define ROUND ((REAL)(IS_float ? 0x1.8p23 + 127 : 0x1.8p52 + 1023)) /* whose last bits are those of the exponent of 1 */
#define LEAST ((REAL)(IS_float ? -127 : -1023))

/* 2**(n + f) for |f| <= 1/2 and a whole n from LEAST on, where it is 0; `shifted` is n + ROUND. Polynomials of a relative
 * error of 1e-7 in degree 5 and 4e-18 in degree 11. */
__attribute__((always_inline)) static inline Vector N(power_of_two)(Vector shifted, Vector f) {
    static const double c5[] = {1.0, 0.6931469775877061505, 0.2402224207788230531, 0.05550733759686096963, 0.00967151298339642637,
                                0.001326472225769502662};
    static const double c11[] = {1.0, 0.6931471805599453094, 0.2402265069591013129, 0.05550410866482008215, 0.009618129107594109157,
                                 0.001333355814677483164, 0.000154035304571238171, 0.00001525273349295232979,
                                 1.321543527717420831e-6, 1.017819963667837438e-7, 7.073784040154218108e-9,
                                 4.434762444086536883e-10};
    const int degree = IS_float ? 5 : 11, shift = IS_float ? 23 : 52;
    const double *c = IS_float ? c5 : c11;
    Vector power = N(broadcast)((REAL)c[degree]);
#pragma GCC unroll 12
    for (int i = degree - 1; i >= 0; i--)
        power = power * f + (REAL)c[i];
    return power * (Vector)((Lanes)shifted << shift);
}

/* 2**y for y up to 0 and a little more; 0 below the binary logarithm of the smallest normal number, NaN for NaN. */
static inline Vector N(exp2)(Vector y) {
    y = N(vector_max)(N(broadcast)(LEAST), y);
    Vector shifted = y + ROUND;
    return N(power_of_two)(shifted, y - (shifted - ROUND));
}

/* e**x, likewise. x = n log 2 + f: log 2 is taken in two parts, of which n times the first is exact. */
static inline Vector N(exp)(Vector x) {
    const REAL high = (REAL)(IS_float ? 0x1.62e4p-1 : 0x1.62e42fefap-1), low = (REAL)(LN_2 - (long double)high);
    x = N(vector_max)(N(broadcast)((REAL)(LEAST * LN_2)), x);
    Vector shifted = x * LOG2_E + ROUND, n = shifted - ROUND;
    return N(power_of_two)(shifted, (x - n * high - n * low) * LOG2_E);
}

#undef IS_float
#undef ROUND
#undef LEAST
#endif
