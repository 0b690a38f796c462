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

/* 2**x for x up to 0 and a little more; 0 below 2**-126.5 (2**-1022.5), NaN for NaN.
 *
 * x = n + f with n whole and |f| <= 1/2: a polynomial for 2**f (relative error 1e-7 in degree 5, 5e-18 in degree 11), and n
 * put into the exponent of a factor, which is 0 for the least n.
 */
static inline Vector N(exp2)(Vector x) {
    static const double c5[] = {1.0, 6.931469775988548e-01, 2.4022242085171597e-01, 5.550733743693692e-02, 9.671512648985504e-03,
                                1.3264727064473299e-03};
    static const double c11[] = {1.0, 6.931471805599453093e-01, 2.402265069591015973e-01, 5.550410866482163009e-02,
                                 9.618129107587224196e-03, 1.333355814640543497e-03, 1.540353046375613888e-04,
                                 1.525273384275891624e-05, 1.321543252054703434e-06, 1.017805647237198575e-07,
                                 7.074197066047615224e-09, 4.455930741563681939e-10};
    const REAL round = (REAL)(IS_float ? 0x1.8p23 : 0x1.8p52), least = (REAL)(IS_float ? -127 : -1023);
    const int degree = IS_float ? 5 : 11, shift = IS_float ? 23 : 52;
    const double *c = IS_float ? c5 : c11;
    x = N(larger)(N(all)(least), x);
    Vector shifted = x + round, f = x - (shifted - round), y = N(all)((REAL)c[degree]);
#pragma GCC unroll 12
    for (int i = degree - 1; i >= 0; i--)
        y = y * f + (REAL)c[i];
    Lanes exponent = ((Lanes)shifted << shift) + (Lanes)N(all)((REAL)1);
    return y * (Vector)exponent;
}

#undef IS_float
