/* The inner loops of hilbert.c for one integer type. hilbert.c includes it twice, with INTEGER and NAMED defined.
 *
 *   cells:   out[i] = origin + row-major offset of cell[i]         shifted: out[block][i] = table[block][i] + by[block]
 *
 * Whoever made the output has seen to it that every index in it fits into INTEGER, so what makes up an index is narrowed.
 */

typedef INTEGER NAMED(Vector) __attribute__((vector_size(VECTOR), aligned(sizeof(INTEGER)), may_alias));

WIDEST static void NAMED(cells)(
    INTEGER *restrict out, const Grid *grid, const uint16_t *restrict cell, int64_t origin, int64_t count) {
    const INTEGER first = (INTEGER)origin, plane = (INTEGER)grid->plane, row = (INTEGER)grid->row;
    const int bits = grid->bits, mask = (1 << bits) - 1;
    for (int64_t i = 0; i < count; i++)
        out[i] = first + (cell[i] >> 2 * bits) * plane + (cell[i] >> bits & mask) * row + (cell[i] & mask);
}

/* For any alignment: all stores but the first and the last of a block are aligned; these two overlap the others. */
WIDEST static void NAMED(shifted)(
    INTEGER *out, const void *const *table, const int64_t *by, int64_t cells, int64_t blocks) {
    for (int64_t block = 0; block < blocks; block++, out += cells) {
        const INTEGER *from = table[block], shift = (INTEGER)by[block];
        *(NAMED(Vector) *)out = *(const NAMED(Vector) *)from + shift;
#pragma GCC unroll 8
        for (int64_t i = (int64_t)(-(uintptr_t)out % VECTOR / sizeof(INTEGER)); i <= cells - LANES(INTEGER); i += LANES(INTEGER))
            *(NAMED(Vector) *)(out + i) = *(const NAMED(Vector) *)(from + i) + shift;
        *(NAMED(Vector) *)(out + cells - LANES(INTEGER)) = *(const NAMED(Vector) *)(from + cells - LANES(INTEGER)) + shift;
    }
}

#undef INTEGER
#undef NAMED
