/* Which rows see which columns: the branches of a pattern as bit sets, rows and columns grouped by them.
 *
 *     rows of a cell            -- branches_keeping -->  RowLists: rows kept by the same set of branches s
 *     columns of the segments   -- branches_keeping -->  ColumnTiles: up to TILE_COLUMNS columns kept by the same set of branches c
 *
 * In a cell, rows between two ends of segments, each branch has one segment. A column of the set c counts m = |c & s| times for
 * the rows of the set s: it is scored once, with + log m. Rows are queries and columns keys; in BACKWARD it is the other way
 * round.
 */
#ifndef DILKIT_NATIVE_VISIBILITY_H
#define DILKIT_NATIVE_VISIBILITY_H

#include "native.h"

enum { MAX_ROW_LISTS = 8, TILE_COLUMNS = 96, MAX_OPEN_TILES = 32 };

/* The rows that a branch keeps of one segment: start, start + rate, ... below stop. */
typedef struct {
    int64_t start, stop, rate;
    uint64_t lists; /* of columns that come one segment after the other: the row lists that see it, as a bit set; else not used */
    int32_t place[3]; /* of cells of a grid: the first one's place on each axis, as relation.h has them; else not used */
} Segment;

static inline int segment_keeps(const Segment *segment, int64_t x) {
    if (x < segment->start || x >= segment->stop)
        return 0;
    uint64_t from = (uint64_t)(x - segment->start), rate = (uint64_t)segment->rate;
    return (rate & (rate - 1)) ? from % rate == 0 : (from & (rate - 1)) == 0;
}

/* The branches of `group` that serve `head`, as a bit set. */
static inline uint64_t branches_serving(const Problem *problem, uint64_t group, int64_t head) {
    uint64_t found = 0;
    for (int64_t b = 0; b < problem->branches; b++)
        if ((group >> b & 1) && problem->offset[head * problem->branches + b] >= 0)
            found |= (uint64_t)1 << b;
    return found;
}

/* Write the segment of each branch of `served` that row `at` lies in; return where the cell of `at` ends, at most `stop`. */
static inline int64_t segments_around(
    const Problem *problem, uint64_t served, int64_t head, int64_t at, int64_t stop, Segment *segments
) {
    for (int64_t b = 0; b < problem->branches; b++) {
        if (!(served >> b & 1))
            continue;
        int64_t start = at / problem->length[b] * problem->length[b], end = start + problem->length[b];
        end = end < problem->seq ? end : problem->seq;
        segments[b] = (Segment){start + problem->offset[head * problem->branches + b], end, problem->rate[b], 0, {0}};
        stop = stop < end ? stop : end;
    }
    return stop;
}

/* The branches of `served` whose segments overlap first .. last - 1. */
static inline uint64_t branches_overlapping(const Segment *segments, uint64_t served, int64_t first, int64_t last) {
    uint64_t found = 0;
    for (uint64_t left = served; left; left &= left - 1) {
        int b = __builtin_ctzll(left);
        found |= (uint64_t)(segments[b].start < last && segments[b].stop > first) << b;
    }
    return found;
}

/* The branches of `among` that keep row or column `x`. */
static inline uint64_t branches_keeping(const Segment *segments, uint64_t among, int64_t x) {
    uint64_t found = 0;
    for (uint64_t left = among; left; left &= left - 1) {
        int b = __builtin_ctzll(left);
        found |= (uint64_t)segment_keeps(&segments[b], x) << b;
    }
    return found;
}

/* The run of rows of a table that row `x` is in: the first that ends after it. */
static inline int64_t run_of_row(const RunTables *t, int64_t table, int64_t x) {
    return first_above(t->rows_end, t->table[table], t->table[table + 1] - 1, x);
}

/* How many runs from `run` on, before `end`, are of one row each that sees few runs of columns. */
static inline int64_t single_rows(const RunTables *t, int64_t run, int64_t end) {
    enum { MOST_INTERVALS = 8 }; /* the rows are gone through so often */
    int64_t next = run;
    while (next < end && t->first_columns[next + 1] - t->first_columns[next] <= MOST_INTERVALS && (next == run || t->rows_end[next] == t->rows_end[next - 1] + 1))
        next++;
    return next - run;
}

/* Whether row `x` sees any column, by a table; no row does by table -1. */
static inline int in_table(const RunTables *t, int64_t table, int64_t x) {
    if (table < 0)
        return 0;
    int64_t run = run_of_row(t, table, x);
    return t->first_columns[run + 1] > t->first_columns[run];
}

/* Rows that the same branches keep, packed in the slots first .. first + count - 1; `first` begins a panel. */
typedef struct {
    uint64_t set;
    int64_t first, count;
} RowList;

/* Columns that the same branches keep, ascending. */
typedef struct {
    uint64_t set;
    int taken; /* whether the iterator has given it away, and may add nothing to it */
    int64_t count, column[TILE_COLUMNS];
    int32_t place[3][TILE_COLUMNS]; /* of cells of a grid: their place on each axis */
} ColumnTile;

/* All columns of some segments, each once, collected in a tile for each set. */
typedef struct {
    const Segment *segments;
    int64_t count, next;  /* how many, and the one at hand */
    uint64_t among;       /* the branches whose segments are taken: the set of a column is those that keep it */
    int disjoint;         /* no column is in two segments: the set of a column is the lists of its segment, and `among` is 0 */
    int64_t at, from, to; /* the next column, -1 = a segment begins; only columns from .. to - 1 */
    int64_t steps;        /* from the first column of the segment to the next one */
    const char *mask;     /* columns that nobody sees, NULL = none */
    int64_t mask_row;
    const RunTables *runs; /* columns that are left out: those in `without`, -1 = none */
    int64_t without;
    ColumnTile *current, *ahead; /* the tile at hand, and the one after it, whose columns memory can be asked for */
    ColumnTile tile[MAX_OPEN_TILES];
} TileIterator;

/* Iterate over the columns of the branches `among`, or, if that is 0, of `count` disjoint segments. */
static inline void start_tiles(TileIterator *s, const Segment *segments, uint64_t among, int64_t count, int64_t from, int64_t to) {
    s->segments = segments, s->among = among, s->disjoint = !among, s->count = among ? 64 - __builtin_clzll(among) : count, s->next = 0;
    s->at = -1, s->from = from, s->to = to;
    s->mask = NULL, s->without = -1, s->current = s->ahead = NULL;
    for (int i = 0; i < MAX_OPEN_TILES; i++)
        s->tile[i].count = s->tile[i].taken = 0;
}

/* The open tile of `set`, or an empty one for it, or NULL. */
static inline ColumnTile *open_tile(TileIterator *s, uint64_t set) {
    ColumnTile *empty = NULL;
    for (int i = 0; i < MAX_OPEN_TILES; i++) {
        if (s->tile[i].count && s->tile[i].set == set && !s->tile[i].taken)
            return &s->tile[i];
        if (!s->tile[i].count && !empty)
            empty = &s->tile[i];
    }
    if (empty)
        empty->set = set;
    return empty;
}

/* NULL where no column is left. */
static inline ColumnTile *fullest_tile(TileIterator *s) {
    ColumnTile *fullest = NULL;
    for (int i = 0; i < MAX_OPEN_TILES; i++)
        if (!s->tile[i].taken && s->tile[i].count > (fullest ? fullest->count : 0))
            fullest = &s->tile[i];
    return fullest;
}

/* Add the next column of a segment to a tile that has room for it. */
static inline void add_column(TileIterator *s, const Segment *segment, ColumnTile *tile) {
    const int64_t k = tile->count++;
    tile->column[k] = s->at;
    if (s->disjoint)
        tile->place[0][k] = segment->place[0], tile->place[1][k] = segment->place[1], tile->place[2][k] = segment->place[2] + (int32_t)s->steps;
}

/* Add columns of a segment, of which none is left out, up to `stop`; return a tile that is full, or has no room. */
static inline ColumnTile *add_columns(TileIterator *s, const Segment *segment, int64_t stop) {
    while (s->at < stop) {
        ColumnTile *tile = open_tile(s, segment->lists);
        if (!tile || tile->count == TILE_COLUMNS)
            return tile ? tile : fullest_tile(s);
        for (; s->at < stop && tile->count < TILE_COLUMNS; s->at += segment->rate, s->steps++)
            add_column(s, segment, tile);
    }
    return NULL;
}

/* Fill a tile, from the columns that come next; NULL after the last. */
static ColumnTile *fill_tile(TileIterator *s) {
    for (; s->next < s->count; s->next++, s->at = -1) {
        const Segment *segment = &s->segments[s->next];
        int64_t stop = segment->stop < s->to ? segment->stop : s->to, rate = segment->rate;
        uint64_t branch = s->disjoint ? 0 : (uint64_t)1 << s->next, before = s->among & (branch - 1);
        if (!s->disjoint && !(s->among & branch))
            continue;
        if (s->at < 0) {
            s->steps = s->from > segment->start ? (s->from - segment->start + rate - 1) / rate : 0;
            s->at = segment->start + s->steps * rate;
        }
        if (s->disjoint && !s->mask && s->without < 0) {
            ColumnTile *full = add_columns(s, segment, stop);
            if (full)
                return full;
        }
        /* One by one those of which some are left out, or whose set differs from column to column. */
        for (ColumnTile *tile = NULL; s->at < stop; s->at += rate, s->steps++) {
            uint64_t set = s->disjoint ? segment->lists : branches_keeping(s->segments, s->among, s->at);
            if ((set & before) || (s->mask && s->mask[s->at * s->mask_row]) || in_table(s->runs, s->without, s->at))
                continue;
            if (!tile || tile->set != set)
                tile = open_tile(s, set);
            if (!tile || tile->count == TILE_COLUMNS)
                return tile ? tile : fullest_tile(s);
            add_column(s, segment, tile);
        }
        /* Sets that begin with this branch are complete. */
        if (s->disjoint && s->next < s->count - 1)
            continue;
        ColumnTile *tile = fullest_tile(s);
        if (tile)
            return tile;
    }
    return NULL;
}

static ColumnTile *take_tile(TileIterator *s) {
    ColumnTile *tile = fill_tile(s);
    if (tile)
        tile->taken = 1;
    return tile;
}

/* The next tile, valid until the next call; NULL after the last. */
static ColumnTile *next_tile(TileIterator *s) {
    if (s->current)
        s->current->count = s->current->taken = 0;
    s->current = s->ahead ? s->ahead : take_tile(s);
    s->ahead = s->current ? take_tile(s) : NULL;
    return s->current;
}

#endif
