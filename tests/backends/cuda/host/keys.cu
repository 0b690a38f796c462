/* What find_keys, key_position and key_bias make of every tile. For tile n and head h of its group: the number of keys at
   counter[n * heads + h], their positions and biases at (n * heads + h) * ROOM in out and dout. BY_KEYS: the tiles are of keys. */
#include "dilated.cuh"

KERNEL(list_keys) {
    SHARED int item;
    SHARED Keys keys;
    Tile tile;
    int batch;
    int heads = BY_KEYS ? call.heads / call.kv_heads : 1;
    start_tiles(&item);
    while (next_tile(&call, &item, &tile, &batch))
        for (int h = 0; h < heads; h++) {
            int last = tile.row + (tile.rows - 1) * call.step, place = item * heads + h;
            synchronize();
            if (thread_index() == 0) {
                unsigned set = serving(&call, tile.set, tile.head * heads + h);
                int lowest = BY_KEYS && call.causal ? tile.row : 0, highest = !BY_KEYS && call.causal ? last + 1 : call.seq;
                find_keys(&keys, &call, tile.row, set, lowest, highest);
                STORE((int *)call.dquery.data + place, keys.total);
            }
            synchronize();
            for (int i = thread_index(); i < keys.total && i < ROOM; i += THREADS) {
                int branch, position = key_position(&keys, i, &branch);
                STORE((int *)call.out.data + place * ROOM + i, position);
                STORE((float *)call.dout.data + place * ROOM + i, key_bias(&keys, position, branch, call.once));
            }
        }
}
