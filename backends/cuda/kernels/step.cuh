/* The tables of a step of decoding on the device (`dilkit.decoding.protocol`), and the stored rows that they lead to.

       spans, writes (int64, global) --find_lines, a line a thread--> bits (shared) of those that are of a row and a head
                                                                        |
       memory, pages (int64, global) --find_seen, a thread a side--> Seen (shared): where rows lie     once a span
                                                                        |
       stored row (global) --load_stored--> Four (registers, as stored) --stored_to_floats--> float4   each row

   STORED says what stored tensors hold: 0 float, 1 half, 2 bfloat16, 3 int8 with the float of a scale after each row.

   Tables may change between launches. Nothing beyond the tensors in `memory` is touched, whatever they say: a span or a write is left
   out where it leads beyond for a row and a head, a stored row where its page or its position is none. */
#ifndef DILKIT_STEP
#define DILKIT_STEP

#define FROM_QUERY 1
#include "scores.cuh"

enum { INT8 = 3, SCALE_BYTES = 4, SIDES = 2, BLOCK_WARPS = THREADS / 32 };

/* Columns of a span; a write has those up to HEADS, then those of its sides. */
enum {
    ROW,
    ROWS,
    FIRST_HEAD,
    HEAD_STEP,
    HEADS,
    SEEN,
    KEY,
    VALUE = KEY + 5,
    QUERY_POSITION = VALUE + 5,
    POSITION,
    POSITION_STEP,
    POSITIONS,
    UNSEEN,
    PAGES,
    PAGE_ROWS,
    PAGE,
    PAGE_FIRST,
    PAGE_STEP,
    SPAN_COLUMNS
};
enum { TO_KEY = HEADS + 1, TO_VALUE = TO_KEY + 4, WRITE_COLUMNS = TO_VALUE + 4 };
/* Of the key or the value of a span or write: a tensor, and where the first row lies; a span has the stride from row to row, too. */
enum { TENSOR, OFFSET, OF_SEQUENCE, OF_HEAD, OF_ROW };
/* Of a line of `memory`: first those of stored tensors, then of positions, then of what is unseen. `reach` elements are there. */
enum { ADDRESS, REACH, UNSEEN_HEAD, UNSEEN_GROUP, UNSEEN_ROW, MEMORY_COLUMNS };

#if STORED == 0
typedef float Element;
typedef float4 Four;
#elif STORED == 3
typedef signed char Element;
typedef unsigned Four;
#else
typedef unsigned short Element;
typedef unsigned long long Four;
#endif

/* What one query row sees of one span and one key/value head. */
typedef struct {
    const Element *rows[SIDES]; /* keys, values: the first row, of page 0 if there are pages; null: the span is left out */
    long long apart[SIDES];
    int whole[SIDES]; /* whether all rows are read four numbers at a time */
    long long page_limit[SIDES];
    long long count;
    long long query_position, position, position_step;
    const long long *positions;
    const unsigned char *unseen; /* of the first query head of the group */
    long long unseen_group, unseen_row;
    const long long *pages;
    long long listed, page_rows, page, page_first, page_step;
} Seen;

DEVICE long long column(const long long *line, int name) { return LOAD(line + name); }

DEVICE const long long *memory_of(const Args *args, int tensor) { return args->step.memory + (long long)tensor * MEMORY_COLUMNS; }

/* The place among the heads of a line that is key/value head `head`, if the line is of it and of a row; -1. */
DEVICE int place_in(const long long *line, int row, int head) {
    long long first = column(line, ROW), apart = head - column(line, FIRST_HEAD), step = column(line, HEAD_STEP);
    if (row < first || row - first >= column(line, ROWS) || apart < 0 || (apart && (step < 1 || apart % step)))
        return -1;
    long long place = apart ? apart / step : 0;
    return place < column(line, HEADS) ? (int)place : -1;
}

/* The place `count` - 1 strides after `at`; -1 if it is beyond `limit`. */
DEVICE long long moved(long long at, long long count, long long stride, long long limit) {
    long long steps = count - 1, room = limit - at;
    if (at < 0 || room < 0)
        return -1;
    if (steps == 0 || stride == 0)
        return at;
    if (stride < 0 || steps > room || stride > room || (float)steps * (float)stride > 4e18f || steps * stride > room)
        return -1;
    return at + steps * stride;
}

/* Where a row and a head begin in the stored tensor of a side of a line; -1: nowhere. *limit: the last place where one may begin. */
DEVICE long long side_of(const Args *args, const long long *side, long long row, int place, long long *limit) {
    long long tensor = column(side, TENSOR);
    if (tensor < 0 || tensor >= args->step.stored_count)
        return -1;
    *limit = column(memory_of(args, (int)tensor), REACH) - args->head_dim - (STORED == INT8 ? SCALE_BYTES : 0);
    long long at = moved(column(side, OFFSET), row + 1, column(side, OF_SEQUENCE), *limit);
    return moved(at, place + 1, column(side, OF_HEAD), *limit);
}

DEVICE Element *stored_at(const Args *args, const long long *side, long long at) {
    return (Element *)column(memory_of(args, (int)column(side, TENSOR)), ADDRESS) + at;
}

/* How many pages of a side lie before `limit`. */
DEVICE long long pages_within(const Seen *seen, long long at, long long apart, long long limit) {
    long long last = moved(at, seen->page_rows, apart, limit);
    if (last < 0 || apart < 1 || seen->page < 0)
        return 0;
    return seen->page ? (limit - last) / seen->page + 1 : 0x7fffffffffffffff;
}

/* Whether all rows of a span are in pages that are listed. */
DEVICE int all_listed(const Seen *seen) {
    long long last = moved(seen->page_first, seen->count, seen->page_step, 1LL << 53);
    return last >= 0 && seen->page_rows > 0 && seen->page_step > 0 && last / seen->page_rows < seen->listed;
}

/* One side of a span, of thread `side`. Null where it leads beyond. */
DEVICE void find_side(const Args *args, const long long *line, int row, int place, int side, Seen *seen) {
    const long long *own = line + (side ? VALUE : KEY);
    long long limit, at = side_of(args, own, row - column(line, ROW), place, &limit), apart = column(own, OF_ROW);
    seen->apart[side] = apart, seen->rows[side] = 0;
    if (at < 0 || seen->count < 1 || (seen->count > 1 && apart < 1))
        return;
    if (seen->pages ? !all_listed(seen) : moved(at, seen->count, apart, limit) < 0)
        return;
    seen->page_limit[side] = seen->pages ? pages_within(seen, at, apart, limit) : 0;
    const Element *first = stored_at(args, own, at);
    unsigned long long bits = (unsigned long long)first | (apart | (seen->pages ? seen->page : 0)) * sizeof(Element);
    seen->whole[side] = bits % sizeof(Four) == 0 && args->head_dim % 4 == 0;
    seen->rows[side] = first;
}

/* The positions of a span. Whether they are there. */
DEVICE int find_positions(const Args *args, const long long *line, Seen *seen) {
    long long given = column(line, POSITIONS);
    seen->query_position = column(line, QUERY_POSITION), seen->positions = 0;
    seen->position = column(line, POSITION), seen->position_step = column(line, POSITION_STEP);
    if (PLACED && (seen->query_position < 0 || seen->query_position >= args->step.tokens))
        return 0;
    if (given == -1 || !BIASED)
        return 1;
    if (given < 0 || given >= args->step.positions_count)
        return 0;
    const long long *memory = memory_of(args, args->step.stored_count + (int)given);
    seen->positions = (const long long *)column(memory, ADDRESS);
    return seen->count <= column(memory, REACH);
}

/* What is not seen of a span, by the head at `place`. Whether that is there. */
DEVICE int find_unseen(const Args *args, const long long *line, int place, Seen *seen) {
    long long given = column(line, UNSEEN);
    seen->unseen = 0;
    if (given == -1)
        return 1;
    if (given < 0 || given >= args->step.unseen_count)
        return 0;
    const long long *memory = memory_of(args, args->step.stored_count + args->step.positions_count + (int)given);
    long long limit = column(memory, REACH) - 1, at = moved(0, place + 1, column(memory, UNSEEN_HEAD), limit);
    seen->unseen_group = column(memory, UNSEEN_GROUP), seen->unseen_row = column(memory, UNSEEN_ROW);
    seen->unseen = (const unsigned char *)column(memory, ADDRESS) + at;
    long long last = moved(at, args->heads / args->kv_heads, seen->unseen_group, limit);
    return moved(last, seen->count, seen->unseen_row, limit) >= 0;
}

/* A span, as a row and a head see it. All threads call it; one finds keys, another values. */
DEVICE void find_seen(const Args *args, const long long *line, int row, int head, Seen *seen) {
    int place = place_in(line, row, head), thread = thread_index();
    synchronize();
    if (thread == 0) {
        long long from = column(line, PAGES);
        int listed = from >= 0 && from < args->step.page_count;
        seen->count = from == -1 || listed ? column(line, SEEN) : 0;
        seen->pages = listed ? args->step.pages + from : 0, seen->listed = args->step.page_count - from;
        seen->page_rows = column(line, PAGE_ROWS), seen->page = column(line, PAGE);
        seen->page_first = column(line, PAGE_FIRST), seen->page_step = column(line, PAGE_STEP);
        if (!find_positions(args, line, seen) || !find_unseen(args, line, place, seen))
            seen->count = 0;
    }
    synchronize();
    if (thread % 32 == 0 && thread / 32 < SIDES)
        find_side(args, line, row, place, thread / 32, seen);
    synchronize();
}

/* Where stored row `number` lies, from the first row of a side on, in elements; -1 where its page is none. */
DEVICE long long place_of(const Seen *seen, long long number, int side) {
    if (!seen->pages)
        return number * seen->apart[side];
    unsigned long long at = seen->page_first + number * seen->page_step, in_page = at / seen->page_rows;
    long long page = in_page < (unsigned long long)seen->listed ? LOAD(seen->pages + in_page) : -1;
    if (page < 0 || page >= seen->page_limit[0] || page >= seen->page_limit[1])
        return -1;
    return page * seen->page + (long long)(at - in_page * seen->page_rows) * seen->apart[side];
}

DEVICE long long position_of(const Seen *seen, long long number) {
    return seen->positions ? LOAD(seen->positions + number) : seen->position + number * seen->position_step;
}

/* Four numbers of a row from number `d` on, of which those below `count` exist; the others are 0. */
DEVICE Four load_stored(const Element *row, int d, int count, const int whole) {
    Four none = {0};
    if (whole)
        return d < count ? LOAD((const Four *)(row + d)) : none;
#if STORED == 0
    return make_float4(d < count ? LOAD(row + d) : 0, d + 1 < count ? LOAD(row + d + 1) : 0, d + 2 < count ? LOAD(row + d + 2) : 0,
                       d + 3 < count ? LOAD(row + d + 3) : 0);
#else
    Four four = 0;
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (d + e < count)
            four |= (Four)(STORED == INT8 ? (unsigned char)LOAD(row + d + e) : LOAD(row + d + e)) << e * 8 * sizeof(Element);
    return four;
#endif
}

DEVICE float element_to_float(Element x) { return STORED == 1 ? half_to_float(x) : STORED == 2 ? bfloat_to_float(x) : x; }

DEVICE float4 stored_to_floats(Four x) {
#if STORED == 0
    return x;
#else
    const int bits = 8 * sizeof(Element);
    return make_float4(element_to_float((Element)x), element_to_float((Element)(x >> bits)), element_to_float((Element)(x >> 2 * bits)),
                       element_to_float((Element)(x >> 3 * bits)));
#endif
}

/* What the integers of a row are multiplied by. */
DEVICE float scale_after(const Element *row, int count, const int whole) {
#if STORED == 3
    union {
        unsigned bits;
        float number;
    } scale = {0};
    if (whole)
        return LOAD((const float *)(row + count));
#pragma unroll
    for (int byte = 0; byte < SCALE_BYTES; byte++)
        scale.bits |= (unsigned)(unsigned char)LOAD(row + count + byte) << 8 * byte;
    return scale.number;
#else
    return 1.0f;
#endif
}

#endif
