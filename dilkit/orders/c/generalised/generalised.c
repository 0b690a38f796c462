/* The generalised Hilbert curve: through every cell of a box of any sides, each step to a neighbouring cell.
 *
 * A block is a box with an exit axis: the curve enters it at one corner and leaves it at the next corner along that axis.
 * Colour the cells like a chess board: such a path can only be if the exit axis is even or all sides are odd. Each rule cuts
 * a block (w, h, d), w its exit axis, h and d the longer and the shorter of the others, into blocks of which that is true again:
 *
 *   halves   w well longer than h: two blocks one after the other, the first of an even length.
 *   arch     h well longer than d, or both odd: out along an even part of h, across w, and back.
 *   vault    else one of h and d is even. Hilbert's eight octants, those in a line with each other as one block: out along an
 *            even part of one of them, all along the other, which is even, across w, and both ways back.
 *
 * Blocks that differ in nothing but their place recur, so a small one is copied from where it was last written, plus an offset:
 * the array is its own table. Most are alike, and as compact as Hilbert's, because sides are cut at a power of two near their half.
 */
#include "generalised.h"

#include <pthread.h>

enum { RECALLED = 1024, PLACES = 1024, CELLS_A_THREAD = 1 << 21, MOST_THREADS = 64 };

typedef struct {
    int way; /* 2 * axis, + 1 against it: index into Walk.stride */
    int64_t length;
} Side;

typedef struct {
    Side side[3]; /* the exit axis first; each in the way that leads into the block */
    int64_t cell; /* the corner where the curve enters */
} Block;

typedef struct {
    uint64_t block; /* its sides; 0 is none */
    int64_t at, cell;
} Place;

typedef struct {
    void *out;
    int bytes;
    int64_t first, last, at;
    int64_t stride[6];
    Place places[PLACES];
} Walk;

static void shift32(int32_t *restrict to, const int32_t *restrict from, int32_t by, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        to[i] = from[i] + by;
}

static void shift64(int64_t *restrict to, const int64_t *restrict from, int64_t by, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        to[i] = from[i] + by;
}

static void copy(const Walk *walk, const Place *place, int64_t cell, int64_t count) {
    if (walk->bytes == 4)
        shift32((int32_t *)walk->out + walk->at, (int32_t *)walk->out + place->at, (int32_t)(cell - place->cell), count);
    else
        shift64((int64_t *)walk->out + walk->at, (int64_t *)walk->out + place->at, cell - place->cell, count);
}

static void line(const Walk *walk, const Block *block) {
    int64_t step = walk->stride[block->side[0].way], left = walk->last - walk->at;
    int64_t from = walk->first > walk->at ? walk->first - walk->at : 0;
    int64_t to = block->side[0].length < left ? block->side[0].length : left;
    if (walk->bytes == 4)
        for (int64_t i = from; i < to; i++)
            ((int32_t *)walk->out)[walk->at + i] = (int32_t)(block->cell + i * step);
    else
        for (int64_t i = from; i < to; i++)
            ((int64_t *)walk->out)[walk->at + i] = block->cell + i * step;
}

static void visit(Walk *walk, Block block);

/* The part of a block whose entry is (x, y, z) cells into it, its exit axis first. */
static inline void part(Walk *walk, const Block *whole, const int64_t entry[3], Side exit, Side second, Side third) {
    Block block = {{exit, second, third}, whole->cell};
    for (int i = 0; i < 3; i++)
        block.cell += entry[i] * walk->stride[whole->side[i].way];
    visit(walk, block);
}

#define AT(x, y, z) (const int64_t[3]){x, y, z}
#define ALONG(side, count) (Side){(side).way, count}
#define BACK(side, count) (Side){(side).way ^ 1, count}

/* The power of two nearest to half of a side of at least 2: even unless the side is 2. */
static inline int64_t half(int64_t length) {
    int64_t power = 2;
    while (3 * length >= 8 * power)
        power *= 2;
    return length == 2 ? 1 : power;
}

static void halves(Walk *walk, const Block *block) {
    Side a = block->side[0], b = block->side[1], c = block->side[2];
    int64_t w = a.length, w1 = half(w);
    part(walk, block, AT(0, 0, 0), ALONG(a, w1), b, c);
    part(walk, block, AT(w1, 0, 0), ALONG(a, w - w1), b, c);
}

static void arch(Walk *walk, const Block *block) {
    Side a = block->side[0], b = block->side[1], c = block->side[2];
    int64_t w = a.length, h = b.length, w1 = half(w), h1 = half(h);
    part(walk, block, AT(0, 0, 0), ALONG(b, h1), ALONG(a, w1), c);
    part(walk, block, AT(0, h1, 0), a, ALONG(b, h - h1), c);
    part(walk, block, AT(w - 1, h1 - 1, 0), BACK(b, h1), BACK(a, w - w1), c);
}

static void vault(Walk *walk, const Block *block) {
    Side a = block->side[0], b = block->side[1], c = block->side[2];
    int64_t w = a.length, h = b.length, d = c.length, w1 = half(w), h1 = half(h), d1 = half(d);
    part(walk, block, AT(0, 0, 0), ALONG(b, h1), ALONG(c, d1), ALONG(a, w1));
    part(walk, block, AT(0, h1, 0), c, ALONG(a, w1), ALONG(b, h - h1));
    part(walk, block, AT(0, h1 - 1, d - 1), a, BACK(b, h1), BACK(c, d - d1));
    part(walk, block, AT(w - 1, h1, d - 1), BACK(c, d), BACK(a, w - w1), ALONG(b, h - h1));
    part(walk, block, AT(w - 1, h1 - 1, 0), BACK(b, h1), ALONG(c, d1), BACK(a, w - w1));
}

static inline void swap(Side *one, Side *other) {
    Side side = *one;
    *one = *other, *other = side;
}

static inline int is_odd(Side side) { return (int)(side.length & 1); }

/* A block of more than one cell, its second side not shorter than its third. */
static void cut(Walk *walk, Block block) {
    Side *side = block.side;
    int64_t w = side[0].length, h = side[1].length, d = side[2].length;
    if (h == 1)
        line(walk, &block);
    else if (3 * w > 4 * h)
        halves(walk, &block);
    else if (3 * h > 4 * d || (is_odd(side[1]) && is_odd(side[2])))
        arch(walk, &block);
    else {
        if (!is_odd(side[1]))
            swap(&side[1], &side[2]);
        vault(walk, &block);
    }
}

static inline uint64_t sides_of(const Block *block) {
    uint64_t sides = 0;
    for (int i = 0; i < 3; i++)
        sides = sides << 16 | (uint64_t)block->side[i].length << 3 | (uint64_t)block->side[i].way;
    return sides;
}

/* A small block belongs to the range that it starts in. */
static void visit(Walk *walk, Block block) {
    Side *side = block.side;
    int64_t start = walk->at, count = side[0].length * side[1].length * side[2].length;
    if (side[1].length < side[2].length)
        swap(&side[1], &side[2]);
    if (count > RECALLED) {
        if (start < walk->last && start + count > walk->first)
            cut(walk, block);
    } else if (start >= walk->first && start < walk->last) {
        uint64_t sides = sides_of(&block);
        Place *place = &walk->places[sides * 0x9E3779B97F4A7C15u >> 32 & (PLACES - 1)];
        if (place->block == sides)
            copy(walk, place, block.cell, count);
        else
            cut(walk, block);
        *place = (Place){sides, start, block.cell};
    }
    walk->at = start + count;
}

/* The longest axis is the exit axis if it can be. Else it is odd and another one even: the curve then goes along the longest
 * axis for an even stretch, and ends along the other one. */
static void visit_box(Walk *walk, Block box) {
    if (is_odd(box.side[1]))
        swap(&box.side[1], &box.side[2]);
    Side a = box.side[0], b = box.side[1], c = box.side[2];
    if (!is_odd(a) || is_odd(b)) {
        visit(walk, box);
        return;
    }
    int64_t stretch = (a.length - b.length / 4) / 8 * 8;
    if (stretch)
        part(walk, &box, AT(0, 0, 0), ALONG(a, stretch), b, c);
    part(walk, &box, AT(stretch, 0, 0), b, ALONG(a, a.length - stretch), c);
}

void generalised_range(void *out, int bytes, const int64_t shape[3], int64_t first, int64_t last) {
    Walk walk = {.out = out, .bytes = bytes, .first = first, .last = last};
    Side side[3];
    int64_t stride = 1;
    for (int axis = 2; axis >= 0; stride *= shape[axis--]) {
        walk.stride[2 * axis] = stride, walk.stride[2 * axis + 1] = -stride;
        side[axis] = (Side){2 * axis, shape[axis]};
        for (int i = axis; i < 2 && side[i].length <= side[i + 1].length; i++)
            swap(&side[i], &side[i + 1]);
    }
    visit_box(&walk, (Block){{side[0], side[1], side[2]}, 0});
}

typedef struct {
    void *out;
    int bytes;
    const int64_t *shape;
    int64_t first, last;
} Range;

static void *write_range(void *argument) {
    const Range *range = argument;
    generalised_range(range->out, range->bytes, range->shape, range->first, range->last);
    return NULL;
}

void generalised_curve(void *out, int bytes, const int64_t shape[3], int threads) {
    int64_t count = shape[0] * shape[1] * shape[2], most = count / CELLS_A_THREAD + 1;
    most = most < MOST_THREADS ? most : MOST_THREADS;
    int64_t ranges = threads < most ? threads : most, first = 0;
    Range range[MOST_THREADS];
    pthread_t helper[MOST_THREADS];
    int started = 0;
    for (int64_t i = 0; i < ranges - 1; i++, first = range[started++].last) {
        range[started] = (Range){out, bytes, shape, first, count / ranges * (i + 1)};
        if (pthread_create(&helper[started], NULL, write_range, &range[started]))
            break;
    }
    generalised_range(out, bytes, shape, first, count);
    while (started)
        pthread_join(helper[--started], NULL);
}
