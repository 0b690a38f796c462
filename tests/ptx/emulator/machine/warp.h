/* Products and loads of matrices by a warp (PTX: Warp Level Matrix Multiply-Accumulate Instructions). layouts.h says which lane
   holds what.

   Products are summed in double precision and rounded once, or, with `group`, as tensor cores are measured to sum them: the products
   of a group and the sum so far are cut off to `fraction` bits after the first bit that the largest may have, added exactly, and the
   sum is cut off to fp32. */
#ifndef PTX_WARP
#define PTX_WARP

#include "layouts.h"
#include "memory.h"
#include "numbers.h"

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

static float dot(const Element *a, const Element *b, int depth, float sum) {
    int group = machine.launch.group && machine.launch.group < depth ? machine.launch.group : depth;
    for (int k = 0; k < depth; k += group)
        sum = (machine.launch.group ? sum_cut_off : sum_rounded_once)(&a[k], &b[k], group, sum);
    return sum;
}

static Element element_of(uint16_t bits, int is_bfloat) {
    double value = is_bfloat ? bfloat_to_float(bits) : half_to_float(bits);
    return (Element){value, exponent_of(value)};
}

static Element element(const uint32_t *registers, int number, int is_bfloat) {
    return element_of((uint16_t)(registers[number / 2] >> number % 2 * 16), is_bfloat);
}

/* D = A B + C: A is (16, depth), B (depth, 8); the registers of A, B and C are `in` of each lane. */
static void multiply_matrices(Thread *lanes, int depth, int is_bfloat) {
    Element a[M][MAX_K], b[N][MAX_K];
    int of_a = depth / 4, of_b = depth / 8;
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
            lanes[lane].out[i] = as_bits(dot(a[at % M], b[at / M], depth, as_float(lanes[lane].in[of_a + of_b + i])));
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

/* The same the other way: the rows are `out` of the lanes that have their addresses. */
static void store_matrices(Thread *lanes, int count, int is_transposed) {
    uint16_t rows[WARP][8];
    for (int lane = 0; lane < WARP; lane++)
        for (int matrix = 0; matrix < count; matrix++)
            for (int i = 0; i < 2; i++) {
                int at = (is_transposed ? LOADED_TRANSPOSED : LOADED)[lane][i];
                rows[matrix * 8 + at / 8][at % 8] = (uint16_t)(lanes[lane].in[1 + matrix] >> 16 * i);
            }
    for (int row = 0; row < count * 8; row++)
        memcpy(lanes[row].out, rows[row], sizeof rows[row]);
}

/* What the 32 lanes of a warp do together, at a .sync instruction. All of them have to be at the same one (PTX: the executing threads
   have to be those of the membermask, which here is always the whole warp). */
/* Names of the PTX ISA are as it writes them. */
enum {
    SHUFFLE_bfly,
    SHUFFLE_idx,
    SHUFFLE_up,
    SHUFFLE_down,
    BALLOT,
    REDUCE_add,
    REDUCE_min,
    REDUCE_max,
    MEET,
    ALIGN,
    ELECT,
    LOAD_MATRICES,
    STORE_MATRICES,
    MULTIPLY
};

/* The running thread waits for its warp, which then does `kind` with `in` of each lane. Returns the thread, whose `out` is set. */
static Thread *with_warp(int kind, int line, int first, int second) {
    Thread *t = machine.current;
    t->kind = kind, t->line = line, t->arguments[0] = first, t->arguments[1] = second, t->state = IN_WARP;
    give_way();
    return t;
}

/* The lane that `lane` reads, and in *is_chosen whether it is one of its segment; its own where not. */
static int shuffled_lane(int kind, int lane, uint32_t b, uint32_t c, int *is_chosen) {
    int distance = (int)(b & 31), clamp = (int)(c & 31), segment = (int)(c >> 8 & 31);
    int last = (lane & segment) | (clamp & ~segment), first = lane & segment, from = lane;
    if (kind == SHUFFLE_bfly)
        from = lane ^ distance;
    else if (kind == SHUFFLE_idx)
        from = first | (distance & ~segment & 31);
    else
        from = kind == SHUFFLE_up ? lane - distance : lane + distance;
    *is_chosen = kind == SHUFFLE_up ? from >= last : from <= last;
    return *is_chosen ? from : lane;
}

static void shuffle_lanes(Thread *lanes, int kind) {
    for (int i = 0; i < WARP; i++) {
        int from = shuffled_lane(kind, i, lanes[i].in[1], lanes[i].in[2], &lanes[i].is_chosen);
        lanes[i].out[0] = lanes[from].in[0];
    }
    COUNT(SHUFFLES, 1);
}

static void combine_lanes(Thread *lanes, int kind) {
    uint32_t all = kind == REDUCE_min || kind == REDUCE_max ? lanes[0].in[0] : 0;
    for (int i = 0; i < WARP; i++) {
        uint32_t x = lanes[i].in[0];
        if (kind == BALLOT)
            all |= (uint32_t)(x != 0) << i;
        else if (kind == REDUCE_add)
            all += x;
        else if (kind == REDUCE_min ? (int32_t)x < (int32_t)all : (int32_t)x > (int32_t)all)
            all = x;
    }
    for (int i = 0; i < WARP; i++)
        lanes[i].out[0] = all;
    COUNT(SHUFFLES, 1);
}

static void do_together(Thread *lanes) {
    int kind = lanes->kind, *arguments = lanes->arguments;
    if (kind <= SHUFFLE_down) {
        shuffle_lanes(lanes, kind);
    } else if (kind <= REDUCE_max) {
        combine_lanes(lanes, kind);
    } else if (kind == MEET) {
        lanes->block->warp_meeting[lanes->index / WARP]++;
        meet_clocks(lanes, WARP);
        COUNT(WARP_BARRIERS, 1);
    } else if (kind == ELECT) {
        for (int i = 0; i < WARP; i++) /* The same lane each time; which, nobody says. */
            lanes[i].out[0] = machine.launch.seed % WARP, lanes[i].is_chosen = i == machine.launch.seed % WARP;
    } else if (kind == LOAD_MATRICES) {
        load_matrices(lanes, arguments[0], arguments[1]);
    } else if (kind == STORE_MATRICES) {
        store_matrices(lanes, arguments[0], arguments[1]);
    } else if (kind == MULTIPLY) {
        multiply_matrices(lanes, arguments[0], arguments[1]);
    }
}

/* Lanes 0 and `lane` of a warp have come to different instructions. */
static void fail_meeting(const Thread *lanes, int lane) {
    machine.failed = 1;
    snprintf(machine.launch.error, MESSAGE, "block %d, warp %d: lanes 0 and %d meet at different instructions, lines %d and %d",
             lanes->block->index, lanes->index / WARP, lane, lanes->line, lanes[lane].line);
}

/* If all lanes have come, they do what they came for and may run on. */
static void let_meet(Thread *lanes) {
    for (int i = 0; i < WARP; i++)
        if (lanes[i].state != IN_WARP)
            return;
    count_shared(lanes);
    for (int i = 1; i < WARP; i++)
        if (lanes[i].line != lanes->line) {
            fail_meeting(lanes, i);
            return;
        }
    do_together(lanes);
    for (int i = 0; i < WARP; i++)
        lanes[i].state = READY;
}

CALLED uint32_t warp_value(int kind, uint32_t x, uint32_t members, int line) {
    if (members != 0xffffffffu)
        fail(line, "membermask %x: only whole warps are known", members);
    machine.current->in[0] = x;
    return with_warp(kind, line, 0, 0)->out[0];
}

CALLED uint32_t shuffle(int kind, uint32_t x, uint32_t b, uint32_t c, uint32_t members, int line) {
    machine.current->in[1] = b, machine.current->in[2] = c;
    return warp_value(kind, x, members, line);
}

CALLED const uint32_t *ldmatrix(int count, int is_transposed, uint32_t at, int line) {
    Thread *t = machine.current;
    t->in[0] = at;
    if (t->index % WARP < count * 8)
        shared_place(at, 16, 0, line);
    return with_warp(LOAD_MATRICES, line, count, is_transposed)->out;
}

/* The address and the registers are in `in`. */
CALLED void stmatrix(int count, int is_transposed, int line) {
    Thread *t = with_warp(STORE_MATRICES, line, count, is_transposed);
    if (t->index % WARP < count * 8)
        shared_store(t->in[0], t->out, 16, line);
}

/* `registers` of A, B and C are in `in`. */
CALLED const uint32_t *mma(int depth, int is_bfloat, int line) { return with_warp(MULTIPLY, line, depth, is_bfloat)->out; }

#endif
