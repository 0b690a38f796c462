/* Products of matrices by a warpgroup, of four warps (PTX: Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions).

   All 128 threads execute the same of these instructions one after the other, but their warps need not meet. A product is computed when
   the first thread has to have it (wgmma.wait_group), from registers and shared memory as they are then. Until then

     registers       no other instruction touches its sums, and what it has of A there; between the last that did and it is a
                     wgmma.fence. But products of one shape may follow each other in the same sums
     shared memory   whoever writes what it reads comes after a wait for it; it comes after who has written that, with a
                     fence.proxy.async in between. Copies that arrive at an mbarrier need none, as in CUTLASS */
#ifndef PTX_WARPGROUP
#define PTX_WARPGROUP

#include "warp.h"

enum { ROWS = 64, DEPTH = 16, MOST_COLUMNS = 256, OF_A = 4, CHUNK = 16 };

/* A register of a thread that products use: the last that does, and, with `columns`, as one of its sums; and whether another instruction
   has touched it since the last wgmma.fence. */
typedef struct {
    uint32_t product;
    int columns, touched, line;
} Held;

typedef struct {
    void *at;
    Held *held;
} Operand;

/* A wgmma.mma_async: registers of a thread, first of the sums, then of A where it has no descriptor. */
typedef struct {
    uint64_t a, b;
    int columns, is_bfloat, a_in_registers, adds, sign_a, sign_b, transposed_a, transposed_b, line;
    const Operand *registers;
} Given;

typedef struct {
    Given given;
    void **registers; /* Of each thread, as in `Given`. */
    int came, group, came_of_warp[4];
} Product;

struct Warpgroup {
    int *lines, step_count, line_capacity; /* Of the instructions that its threads execute. */
    Product *products;
    int product_count, computed, capacity;
};

static void begin_warpgroups(Block *block) { block->warpgroups = calloc(MOST_GROUPS, sizeof(Warpgroup)); }

static void end_warpgroups(Block *block) {
    for (int i = 0; i < MOST_GROUPS; i++) {
        for (int k = block->warpgroups[i].computed; k < block->warpgroups[i].product_count; k++)
            free(block->warpgroups[i].products[k].registers);
        free(block->warpgroups[i].lines), free(block->warpgroups[i].products);
    }
    free(block->warpgroups);
}

static Warpgroup *warpgroup_of(const Thread *t) { return &t->block->warpgroups[t->index / GROUP]; }

/* An instruction that all threads of a warpgroup execute, those of each warp together. */
static void step_together(int line) {
    Thread *t = machine.current;
    Warpgroup *group = warpgroup_of(t);
    int step = t->steps++;
    if (t->index / GROUP * GROUP + GROUP > machine.launch.threads)
        fail(line, "its warpgroup has less than four warps");
    if (step < group->step_count && group->lines[step] != line)
        fail(line, "its warpgroup meets at different instructions, lines %d and %d", line, group->lines[step]);
    if (step == group->line_capacity)
        group->lines = realloc(group->lines, (group->line_capacity = 2 * step + 64) * sizeof(int));
    if (step == group->step_count)
        group->lines[group->step_count++] = line;
    with_warp(ALIGN, line, 0, 0);
}

static void end_steps(Thread *t) {
    if (t->block->warpgroups && t->steps < warpgroup_of(t)->step_count)
        fail(t->line, "ends before the instruction at line %d of its warpgroup", warpgroup_of(t)->lines[t->steps]);
    if (t->issued > t->completed)
        fail(t->line, "ends before wgmma.wait_group");
}

CALLED void touch_register(Held *held, int line) {
    Thread *t = machine.current;
    if (held->product > t->completed)
        fail(line, "touches a register before wgmma.wait_group: a wgmma.mma_async at line %d has it", held->line);
    held->touched = t->fences + 1, held->line = line;
}

static void hold_register(const Given *given, Held *held, int columns, uint32_t product) {
    Thread *t = machine.current;
    if (held->product > t->completed && (held->columns != columns || !columns))
        fail(given->line, "uses a register that the wgmma.mma_async at line %d has, which is of another shape", held->line);
    if (!t->fences)
        fail(given->line, "there is no wgmma.fence before it");
    if (held->touched > t->fences)
        fail(given->line, "there is no wgmma.fence after line %d, which touches its registers", held->line);
    *held = (Held){product, columns, 0, given->line};
}

/* Where a matrix of halves lies in shared memory: `mn` is its row or column, k the other. Offsets are as in the matrix descriptor
   (PTX: Asynchronous wgmma Matrix Descriptor Format, Strides, Swizzling Modes). */
typedef struct {
    uint32_t start, leading, stride, width; /* `width`: chunks of 16 bytes that are swizzled; 1: none are. */
    int is_transposed;
} Matrix;

static Matrix matrix_of(uint64_t descriptor, int is_transposed, int line) {
    static const int widths[] = {1, 8, 4, 2};
    Matrix matrix = {descriptor << 4 & 0x3fff0, descriptor >> 12 & 0x3fff0, descriptor >> 28 & 0x3fff0, widths[descriptor >> 62],
                     is_transposed};
    if (descriptor & 0x3ff1c000c000c000)
        fail(line, "the matrix descriptor %llx: bits that have no meaning are set", (unsigned long long)descriptor);
    if (descriptor >> 49 & 7 || matrix.start >> 7 & (matrix.width - 1))
        fail(line, "the matrix descriptor %llx: only matrices that begin where their swizzling repeats are known",
             (unsigned long long)descriptor);
    return matrix;
}

static uint32_t place_of(const Matrix *m, int mn, int k) {
    uint32_t at = m->start, width = m->width, chunk = mn / 8;
    if (!m->is_transposed)
        at += mn % 8 * CHUNK * width + chunk * m->stride + k / 8 * (width == 1 ? m->leading : CHUNK) + k % 8 * 2;
    else if (width == 1)
        at += chunk * m->stride + k / 8 * m->leading + k % 8 * CHUNK + mn % 8 * 2;
    else
        at += chunk % width * CHUNK + chunk / width * m->leading + k / 8 * m->stride + k % 8 * CHUNK * width + mn % 8 * 2;
    return at ^ (at >> 7 & (width - 1)) << 4;
}

/* The lanes of a warp together know that somebody has written a word, and that it is fenced. */
static void check_operand(const uint32_t *known, uint32_t at, uint32_t product, int line) {
    Thread *t = machine.current;
    Word *word = &t->block->words[at / 4];
    const Touch *written = &word->written;
    if (word->copying)
        fail_copying(word, at, 0, line);
    t->block->readers[at / 4 * MOST_GROUPS + t->index / GROUP] = product;
    if (written->thread == NOBODY)
        return;
    if (written->meeting == t->block->meeting && !is_known(written, known))
        fail(line, "race: it reads shared memory at %u, which thread %d touches at line %d", at, written->thread, written->line);
    if (!written->is_copied && (written->thread < 0 || written->moment > fenced_until(known, written->thread)))
        fail(line, "reads shared memory at %u, which line %d has written without a fence.proxy.async", at, written->line);
}

static void check_matrix(const Matrix *m, int size, const uint32_t *known, uint32_t product, int line) {
    for (int mn = 0; mn < size; mn += 1 + m->is_transposed)
        for (int k = 0; k < DEPTH; k += 2 - m->is_transposed) {
            uint32_t at = place_of(m, mn, k); /* A word, of two halves. */
            if (at + 4 > (uint64_t)machine.shared_bytes)
                fail(line, "reads a matrix in shared memory at %u: it has %lld bytes", at, (long long)machine.shared_bytes);
            if (machine.launch.checked)
                check_operand(known, at, product, line);
        }
}

/* The last lane of a warp that comes looks at what is multiplied. */
static void check_matrices(const Given *given, uint32_t product) {
    Thread *lanes = &machine.current->block->threads[machine.current->index / WARP * WARP];
    uint32_t *all = new_clocks();
    memcpy(all, lanes->known, clock_count() * sizeof *all);
    for (int lane = 1; lane < WARP; lane++)
        for (int i = 0; i < clock_count(); i++)
            all[i] = lanes[lane].known[i] < all[i] ? lanes[lane].known[i] : all[i];
    Matrix a = matrix_of(given->a, given->transposed_a, given->line), b = matrix_of(given->b, given->transposed_b, given->line);
    if (!given->a_in_registers)
        check_matrix(&a, ROWS, all, product, given->line);
    check_matrix(&b, given->columns, all, product, given->line);
    free(all);
}

static Product *new_product(Warpgroup *group, const Given *given) {
    if (group->product_count == group->capacity)
        group->products = realloc(group->products, (group->capacity = group->capacity * 2 + 64) * sizeof(Product));
    Product *made = &group->products[group->product_count++];
    *made = (Product){*given, malloc(GROUP * (MOST_COLUMNS / 2 + OF_A) * sizeof(void *)), 0, 0, {0}};
    return made;
}

static int is_same_product(const Given *a, const Given *b) { return a->a == b->a && a->b == b->b && a->adds == b->adds; }

CALLED void wgmma(const Given *given) {
    Thread *t = machine.current;
    Warpgroup *group = warpgroup_of(t);
    int sums = given->columns / 2, count = sums + OF_A * given->a_in_registers;
    step_together(given->line);
    uint32_t number = ++t->issued;
    for (int i = 0; i < count && machine.launch.checked; i++)
        hold_register(given, given->registers[i].held, i < sums ? given->columns : 0, number);
    Product *product = (int)number > group->product_count ? new_product(group, given) : &group->products[number - 1];
    if (!is_same_product(&product->given, given))
        fail(given->line, "threads of its warpgroup multiply different matrices, or differ in scale-d");
    for (int i = 0; i < count; i++)
        product->registers[t->index % GROUP * (MOST_COLUMNS / 2 + OF_A) + i] = given->registers[i].at;
    product->group = t->groups;
    if (++product->came_of_warp[t->index % GROUP / WARP] == WARP)
        check_matrices(given, number);
    if (++group->products[number - 1].came == GROUP)
        wake(t->block, group);
}

CALLED void wgmma_fence(int line) {
    step_together(line);
    machine.current->fences++;
}

CALLED void wgmma_commit(int line) {
    step_together(line);
    machine.current->groups++;
}

static void load_matrix(const Matrix *m, int size, int sign, int is_bfloat, Element to[][DEPTH]) {
    for (int mn = 0; mn < size; mn++)
        for (int k = 0; k < DEPTH; k++) {
            uint16_t bits;
            memcpy(&bits, machine.current->block->shared + place_of(m, mn, k), 2);
            to[mn][k] = element_of(bits, is_bfloat);
            to[mn][k].value *= sign;
        }
}

static void load_registers(void **registers, int warp, int sign, int is_bfloat, Element to[][DEPTH]) {
    for (int lane = 0; lane < WARP; lane++)
        for (int i = 0; i < 2 * OF_A; i++) {
            int at = A_K16[lane][i];
            Element *one = &to[warp * M + at % M][at / M];
            *one = element(registers[lane * (MOST_COLUMNS / 2 + OF_A) + i / 2], i % 2, is_bfloat);
            one->value *= sign;
        }
}

static void compute(Product *product) {
    const Given *given = &product->given;
    static Element a[ROWS][DEPTH], b[MOST_COLUMNS][DEPTH];
    Matrix left = matrix_of(given->a, given->transposed_a, given->line), right = matrix_of(given->b, given->transposed_b, given->line);
    load_matrix(&right, given->columns, given->sign_b, given->is_bfloat, b);
    if (!given->a_in_registers)
        load_matrix(&left, ROWS, given->sign_a, given->is_bfloat, a);
    for (int warp = 0; warp < GROUP / WARP; warp++) {
        void **registers = product->registers + warp * WARP * (MOST_COLUMNS / 2 + OF_A);
        if (given->a_in_registers)
            load_registers(registers + given->columns / 2, warp, given->sign_a, given->is_bfloat, a);
        for (int lane = 0; lane < WARP; lane++)
            for (int i = 0; i < given->columns / 2; i++) {
                int at = C_ANY[lane][i % 4];
                float *sum = registers[lane * (MOST_COLUMNS / 2 + OF_A) + i];
                *sum = dot(a[warp * M + at % M], b[i / 4 * N + at / M], DEPTH, given->adds ? *sum : 0);
            }
    }
    COUNT(PRODUCTS_K16, given->columns / N * (ROWS / M));
    free(product->registers);
}

/* Waits until at most the `pending` last groups are under way. */
CALLED void wgmma_wait(int pending, int line) {
    Thread *t = machine.current;
    Warpgroup *group = warpgroup_of(t);
    step_together(line);
    while (t->completed < t->issued && group->products[t->completed].group < t->groups - pending) {
        while (group->products[t->completed].came < GROUP)
            wait_for(group, "the other warps of its warpgroup, at a wgmma.mma_async", line);
        if (group->computed == (int)t->completed)
            compute(&group->products[group->computed++]);
        t->completed++;
    }
    *completed_in(t->known, t->index / GROUP) = t->completed;
}

#endif
