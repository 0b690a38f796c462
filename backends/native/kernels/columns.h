/* The columns of a tile, as the products of matmul.h read them. Included once for each KIND.
 *
 *     packed    (dim panels, TILE_COLUMNS, PANEL)      column      0: | 0 .. 15 |      panel 1: | 16 .. 31 |     PANEL numbers apart
 *                                                              1: | 0 .. 15 |               | 16 .. 31 |
 *     in place  rows of a tensor, one after the other  column 0: | 0 .. 15 | 16 .. 31 | ... |           `dim` numbers apart
 */
#define Columns N(Columns)

typedef struct {
    REAL *at;
    int64_t column; /* numbers from one column to the next */
} Columns;

/* Whether they are packed: a row of a tensor that is read in place has more than one panel. */
static inline int N(are_packed)(Columns columns) { return columns.column == PANEL; }
