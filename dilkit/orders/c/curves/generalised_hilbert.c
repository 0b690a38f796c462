/* The generalised Hilbert curve for boxes of any size: it visits every cell once, and each step leads to a neighbouring cell.
 *
 *   box --write_box--> blocks --split_block--> smaller blocks --> ... --> lines of cells --write_line--> out[d]
 *                                                   |                                                      |
 *                                                   +--> a block like one written before <--copy_block-----+
 *
 * A block is a box with an exit axis: the curve enters it at one corner and leaves it at the next corner along that axis. If
 * the cells are coloured like a chess board, it follows that such a path exists only if the exit axis is even or all sides are
 * odd. Each rule splits a block (w, h, d), with w along its exit axis, into blocks that satisfy this too; h >= d:
 *
 *   split_in_two, if w is well longer than h:       in --> [ 1 ][ 2 ] --> out          the first of an even length
 *
 *   split_in_three, if h is well longer than d,            [    2    ]                   1 along an even part of h, 2 across w,
 *   or if both are odd:                              in ^  [ 1 ] [ 3 ]  v out            3 back along h
 *
 *   split_in_five, otherwise (then one of h and d    the eight octants of Hilbert's      1 along an even part of h, 2 along d,
 *   is even; call it h):                             curve, those in a row joined        3 across w, 4 back along d, 5 along h
 *
 * Sides are split at a power of two near their half, so most small blocks differ only in their position. Such a block is copied
 * from where it was last written in `out`, plus an offset: the output is its own table.
 */
#include "curves.h"

enum { COPIED_CELLS = 1024, SLOTS = 1024 };

typedef struct {
    int direction; /* 2 * axis, + 1 for the negative direction: index into Path.stride */
    int64_t length;
} Side;

typedef struct {
    Side side[3]; /* the exit axis first; each in the direction that leads into the block */
    int64_t cell; /* the corner where the curve enters */
} Block;

typedef struct {
    uint64_t block; /* its sides; 0 is none */
    int64_t at, cell;
} Written; /* a small block that was written: where in `out`, and from which corner */

typedef struct {
    void *out;
    int bytes;
    int64_t at;
    int64_t stride[6];
    Written written[SLOTS];
} Path;

static void copy_shifted_32(int32_t *restrict to, const int32_t *restrict from, int32_t by, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        to[i] = from[i] + by;
}

static void copy_shifted_64(int64_t *restrict to, const int64_t *restrict from, int64_t by, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        to[i] = from[i] + by;
}

static void copy_block(const Path *path, const Written *earlier, int64_t cell, int64_t count) {
    int64_t by = cell - earlier->cell;
    if (path->bytes == 4)
        copy_shifted_32((int32_t *)path->out + path->at, (int32_t *)path->out + earlier->at, (int32_t)by, count);
    else
        copy_shifted_64((int64_t *)path->out + path->at, (int64_t *)path->out + earlier->at, by, count);
}

static void write_line(const Path *path, const Block *block) {
    int64_t step = path->stride[block->side[0].direction];
    if (path->bytes == 4)
        for (int64_t i = 0; i < block->side[0].length; i++)
            ((int32_t *)path->out)[path->at + i] = (int32_t)(block->cell + i * step);
    else
        for (int64_t i = 0; i < block->side[0].length; i++)
            ((int64_t *)path->out)[path->at + i] = block->cell + i * step;
}

static void write_block(Path *path, Block block);

/* Write the block within `whole` whose entry is (x, y, z) cells into it; the sides begin with its exit axis. */
static inline void write_part(Path *path, const Block *whole, const int64_t entry[3], Side exit, Side second, Side third) {
    Block block = {{exit, second, third}, whole->cell};
    for (int i = 0; i < 3; i++)
        block.cell += entry[i] * path->stride[whole->side[i].direction];
    write_block(path, block);
}

#define ENTRY(x, y, z) (const int64_t[3]){x, y, z}
#define FORWARD(side, count) (Side){(side).direction, count}
#define BACKWARD(side, count) (Side){(side).direction ^ 1, count}

/* The power of two nearest to half of a side of at least 2: even unless the side is 2. */
static inline int64_t half(int64_t length) {
    int64_t power = 2;
    while (3 * length >= 8 * power)
        power *= 2;
    return length == 2 ? 1 : power;
}

static void split_in_two(Path *path, const Block *block) {
    Side a = block->side[0], b = block->side[1], c = block->side[2];
    int64_t w = a.length, w1 = half(w);
    write_part(path, block, ENTRY(0, 0, 0), FORWARD(a, w1), b, c);
    write_part(path, block, ENTRY(w1, 0, 0), FORWARD(a, w - w1), b, c);
}

static void split_in_three(Path *path, const Block *block) {
    Side a = block->side[0], b = block->side[1], c = block->side[2];
    int64_t w = a.length, h = b.length, w1 = half(w), h1 = half(h);
    write_part(path, block, ENTRY(0, 0, 0), FORWARD(b, h1), FORWARD(a, w1), c);
    write_part(path, block, ENTRY(0, h1, 0), a, FORWARD(b, h - h1), c);
    write_part(path, block, ENTRY(w - 1, h1 - 1, 0), BACKWARD(b, h1), BACKWARD(a, w - w1), c);
}

static void split_in_five(Path *path, const Block *block) {
    Side a = block->side[0], b = block->side[1], c = block->side[2];
    int64_t w = a.length, h = b.length, d = c.length, w1 = half(w), h1 = half(h), d1 = half(d);
    write_part(path, block, ENTRY(0, 0, 0), FORWARD(b, h1), FORWARD(c, d1), FORWARD(a, w1));
    write_part(path, block, ENTRY(0, h1, 0), c, FORWARD(a, w1), FORWARD(b, h - h1));
    write_part(path, block, ENTRY(0, h1 - 1, d - 1), a, BACKWARD(b, h1), BACKWARD(c, d - d1));
    write_part(path, block, ENTRY(w - 1, h1, d - 1), BACKWARD(c, d), BACKWARD(a, w - w1), FORWARD(b, h - h1));
    write_part(path, block, ENTRY(w - 1, h1 - 1, 0), BACKWARD(b, h1), FORWARD(c, d1), BACKWARD(a, w - w1));
}

static inline void swap(Side *one, Side *other) {
    Side side = *one;
    *one = *other, *other = side;
}

static inline int is_odd(Side side) { return (int)(side.length & 1); }

/* A block of more than one cell, its second side not shorter than its third. */
static void split_block(Path *path, Block block) {
    Side *side = block.side;
    int64_t w = side[0].length, h = side[1].length, d = side[2].length;
    if (h == 1)
        write_line(path, &block);
    else if (3 * w > 4 * h)
        split_in_two(path, &block);
    else if (3 * h > 4 * d || (is_odd(side[1]) && is_odd(side[2])))
        split_in_three(path, &block);
    else {
        if (!is_odd(side[1]))
            swap(&side[1], &side[2]);
        split_in_five(path, &block);
    }
}

static inline uint64_t sides_of(const Block *block) {
    uint64_t sides = 0;
    for (int i = 0; i < 3; i++)
        sides = sides << 16 | (uint64_t)block->side[i].length << 3 | (uint64_t)block->side[i].direction;
    return sides;
}

static void write_block(Path *path, Block block) {
    Side *side = block.side;
    int64_t start = path->at, count = side[0].length * side[1].length * side[2].length;
    if (side[1].length < side[2].length)
        swap(&side[1], &side[2]);
    if (count > COPIED_CELLS)
        split_block(path, block);
    else {
        uint64_t sides = sides_of(&block);
        Written *earlier = &path->written[sides * 0x9E3779B97F4A7C15u >> 32 & (SLOTS - 1)];
        if (earlier->block == sides)
            copy_block(path, earlier, block.cell, count);
        else
            split_block(path, block);
        *earlier = (Written){sides, start, block.cell};
    }
    path->at = start + count;
}

/* The longest axis is the exit axis if possible. Otherwise it is odd and another one is even: the curve then runs along the
 * longest axis for an even number of cells, and leaves along the other one. */
static void write_box(Path *path, Block box) {
    if (is_odd(box.side[1]))
        swap(&box.side[1], &box.side[2]);
    Side a = box.side[0], b = box.side[1], c = box.side[2];
    if (!is_odd(a) || is_odd(b)) {
        write_block(path, box);
        return;
    }
    int64_t stretch = (a.length - b.length / 4) / 8 * 8;
    if (stretch)
        write_part(path, &box, ENTRY(0, 0, 0), FORWARD(a, stretch), b, c);
    write_part(path, &box, ENTRY(stretch, 0, 0), b, FORWARD(a, a.length - stretch), c);
}

void curves_generalised_hilbert(void *out, int bytes, const int64_t shape[3]) {
    Path path = {.out = out, .bytes = bytes};
    Side side[3];
    int64_t stride = 1;
    for (int axis = 2; axis >= 0; stride *= shape[axis--]) {
        path.stride[2 * axis] = stride, path.stride[2 * axis + 1] = -stride;
        side[axis] = (Side){2 * axis, shape[axis]};
        for (int i = axis; i < 2 && side[i].length <= side[i + 1].length; i++)
            swap(&side[i], &side[i + 1]);
    }
    write_box(&path, (Block){{side[0], side[1], side[2]}, 0});
}
