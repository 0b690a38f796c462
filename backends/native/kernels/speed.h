/* How fast products are, as the loops of a tile compute them. Included once for each instruction set. Whether products of bf16
 * pairs are faster than those of floats depends on the CPU, not on its having them: so it is measured.
 */
static int64_t score_tiles(int64_t rounds) {
    enum { DIM = 64 };
    REAL columns[TILE_COLUMNS * DIM / UNIT] = {0}, rows[TILE_ROWS * DIM / UNIT] = {0};
    REAL scores[TILE_COLUMNS * TILE_ROWS], max[TILE_ROWS] = {0};
    N(Columns) packed = {columns, PANEL};
#ifdef BF16_TILES
    use_tiles();
#endif
    for (int64_t round = 0; round < rounds; round++) {
        N(compute_scores)(ROW_VECTORS, scores, max, packed, rows, 0, TILE_COLUMNS, DIM / UNIT);
        __asm__ volatile("" ::"r"(scores) : "memory"); /* or nobody would need them */
    }
#ifdef BF16_TILES
    give_up_tiles();
#endif
    return rounds * 2 * TILE_COLUMNS * TILE_ROWS * DIM;
}
