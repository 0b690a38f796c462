/* Products and loads of matrices by a warp (PTX: Warp Level Matrix Multiply-Accumulate Instructions). layouts.h says which lane
   holds what.

   Products are summed in double precision and rounded once, or, with `group`, as tensor cores are measured to sum them: the products
   of a group and the sum so far are cut off to `fraction` bits after the first bit that the largest may have, added exactly, and the
   sum is cut off to fp32. */
#ifndef DILKIT_PTX_TENSOR
#define DILKIT_PTX_TENSOR

#include "layouts.h"
#include "numbers.h"
#include "shared.h"

enum { M = 16, N = 8, MAX_K = 16 };

typedef struct {
    double value;
    int exponent;
} Element;

enum { NO_EXPONENT = -10000 };

static double power_of_2(int exponent) {
    uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

static int exponent_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return x == 0 ? NO_EXPONENT : (int)(bits >> 52 & 2047) - 1023;
}

static double cut(double x, int exponent) { return trunc(x * power_of_2(-exponent)) * power_of_2(exponent); }

static float sum_cut_off(const Element *a, const Element *b, int count, float sum) {
    int top = exponent_of(sum), last;
    double exact = sum, total;
    for (int k = 0; k < count; k++) {
        int own = a[k].exponent + b[k].exponent;
        top = own > top ? own : top;
        exact += a[k].value * b[k].value;
    }
    if (!isfinite(exact) || top < NO_EXPONENT / 2)
        return (float)exact;
    last = top - machine.launch.fraction;
    total = cut(sum, last);
    for (int k = 0; k < count; k++)
        total += cut(a[k].value * b[k].value, last);
    return total == 0 ? 0 : (float)cut(total, exponent_of(total) < -126 ? -149 : exponent_of(total) - 23);
}

static float sum_rounded_once(const Element *a, const Element *b, int count, float sum) {
    double exact = 0;
    for (int k = 0; k < count; k++)
        exact += a[k].value * b[k].value;
    return (float)(exact + sum);
}

static Element element(const uint32_t *registers, int number, int is_bfloat) {
    uint16_t bits = (uint16_t)(registers[number / 2] >> number % 2 * 16);
    double value = is_bfloat ? bfloat_to_float(bits) : half_to_float(bits);
    return (Element){value, exponent_of(value)};
}

/* D = A B + C: A is (16, depth), B (depth, 8); the registers of A, B and C are `in` of each lane. */
static void multiply_matrices(Thread *lanes, int depth, int is_bfloat) {
    Element a[M][MAX_K], b[N][MAX_K];
    int of_a = depth / 4, of_b = depth / 8, group = machine.launch.group ? machine.launch.group : depth;
    for (int lane = 0; lane < WARP; lane++) {
        for (int i = 0; i < 2 * of_a; i++) {
            int at = depth == 16 ? A_K16[lane][i] : A_K8[lane][i];
            a[at % M][at / M] = element(lanes[lane].in, i, is_bfloat);
        }
        for (int i = 0; i < 2 * of_b; i++) {
            int at = depth == 16 ? B_K16[lane][i] : B_K8[lane][i];
            b[at % N][at / N] = element(lanes[lane].in + of_a, i, is_bfloat);
        }
    }
    for (int lane = 0; lane < WARP; lane++)
        for (int i = 0; i < 4; i++) {
            int at = C_ANY[lane][i];
            float sum = as_float(lanes[lane].in[of_a + of_b + i]);
            for (int k = 0; k < depth; k += group)
                sum = (machine.launch.group ? sum_cut_off : sum_rounded_once)(&a[at % M][k], &b[at / M][k],
                                                                             group < depth ? group : depth, sum);
            lanes[lane].out[i] = as_bits(sum);
        }
    COUNT(depth == 16 ? PRODUCTS_K16 : PRODUCTS_K8, 1);
}

#ifdef COUNTED
static void count_matrices(const Thread *lanes, int count) {
    for (int matrix = 0; matrix < count; matrix++) {
        uint32_t words[WARP];
        for (int i = 0; i < WARP; i++)
            words[i] = lanes[matrix * 8 + i / 4].in[0] / 4 + i % 4;
        COUNT(MATRIX_WAVEFRONTS, wavefronts(words, WARP));
    }
    COUNT(MATRICES, count);
}
#else
static void count_matrices(const Thread *lanes, int count) { (void)lanes, (void)count; }
#endif

/* `count` matrices of 8 rows of 16 bytes, whose addresses are `in[0]` of 8 lanes each. */
static void load_matrices(Thread *lanes, int count, int is_transposed) {
    for (int lane = 0; lane < WARP; lane++)
        for (int matrix = 0; matrix < count; matrix++) {
            uint16_t halves[2];
            for (int i = 0; i < 2; i++) {
                int at = (is_transposed ? LOADED_TRANSPOSED : LOADED)[lane][i];
                memcpy(&halves[i], lanes->block->shared + lanes[matrix * 8 + at / 8].in[0] + at % 8 * 2, 2);
            }
            lanes[lane].out[matrix] = pack(halves[1], halves[0]);
        }
    count_matrices(lanes, count);
}

/* The same the other way. */
static void store_matrices(Thread *lanes, int count, int is_transposed, int line) {
    uint16_t rows[WARP][8];
    for (int lane = 0; lane < WARP; lane++)
        for (int matrix = 0; matrix < count; matrix++)
            for (int i = 0; i < 2; i++) {
                int at = (is_transposed ? LOADED_TRANSPOSED : LOADED)[lane][i];
                rows[matrix * 8 + at / 8][at % 8] = (uint16_t)(lanes[lane].in[1 + matrix] >> 16 * i);
            }
    for (int row = 0; row < count * 8; row++) {
        machine.current = &lanes[row];
        shared_store(lanes[row].in[0], rows[row], 16, line);
    }
}

#endif
