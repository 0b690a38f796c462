/* Vectors of REAL, and exp2 of them. Included once for each type. */
#define Vector N(Vector)
#define Lanes N(Lanes)

typedef REAL Vector __attribute__((vector_size(VECTOR_BYTES)));
typedef INTEGER Lanes __attribute__((vector_size(VECTOR_BYTES)));
enum { N(LANES) = VECTOR_BYTES / sizeof(REAL) };

static inline Vector N(get)(const REAL *from) {
    Vector x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void N(put)(REAL *to, Vector x) { memcpy(to, &x, sizeof x); }

static inline Vector N(all)(REAL x) { return x - (Vector){0}; }

static inline Vector N(choose)(Lanes which, Vector yes, Vector no) {
    return (Vector)((which & (Lanes)yes) | (~which & (Lanes)no));
}

/* max(a, b), and b where either is NaN. */
static inline Vector N(larger)(Vector a, Vector b) { return N(LARGER)(a, b); }

#define IS_float (sizeof(REAL) == 4)

/* 2**x for x up to 0 and a little more; 0 below the smallest normal number, NaN for NaN.
 *
 * x = n + f with n whole and |f| <= 1/2: a polynomial through the Chebyshev nodes for 2**f (relative error 3e-9 in degree 6,
 * 5e-18 in degree 11), and n put into the exponent.
 */
static inline Vector N(exp2)(Vector x) {
    static const double c6[] = {1.0, 6.93147206702832596e-01, 2.402265092228875798e-01, 5.550327226670301757e-02,
                                9.618056678524642407e-03, 1.340042817761591567e-03, 1.546144469856851332e-04};
    static const double c11[] = {1.0, 6.931471805599453093e-01, 2.402265069591015973e-01, 5.550410866482163009e-02,
                                 9.618129107587224196e-03, 1.333355814640543497e-03, 1.540353046375613888e-04,
                                 1.525273384275891624e-05, 1.321543252054703434e-06, 1.017805647237198575e-07,
                                 7.074197066047615224e-09, 4.455930741563681939e-10};
    const REAL round = (REAL)(IS_float ? 0x1.8p23 : 0x1.8p52), least = (REAL)(IS_float ? -126 : -1022);
    const int degree = IS_float ? 6 : 11, shift = IS_float ? 23 : 52;
    const double *c = IS_float ? c6 : c11;
    Lanes tiny = (Lanes)(x < N(all)(least));
    x = N(larger)(N(all)(least), x);
    Vector shifted = x + round, f = x - (shifted - round), y = N(all)((REAL)c[degree]);
#pragma GCC unroll 12
    for (int i = degree - 1; i >= 0; i--)
        y = y * f + (REAL)c[i];
    Lanes exponent = ((Lanes)shifted << shift) + (Lanes)N(all)((REAL)1);
    return (Vector)(~tiny & (Lanes)(y * (Vector)exponent));
}

#undef IS_float
