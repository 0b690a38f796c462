/* What find_keys, key_position and key_bias make of every tile. For tile n and head h of its group: the number of keys at
   counter[n * heads + h], their positions and biases at (n * heads + h) * ROOM in out and dout. BY_KEYS: the tiles are of keys. */
#include "dilated.cuh"

KERNEL(list_keys) {
    SHARED int item;
    SHARED Keys keys;
    Tile tile;
    int batch;
    int heads = BY_KEYS ? args.heads / args.kv_heads : 1;
    start_tiles(&item);
    while (next_tile(&args, &item, &tile, &batch))
        for (int h = 0; h < heads; h++) {
            int last = tile.row + (tile.rows - 1) * tile.step, place = item * heads + h;
            synchronize();
            if (thread_index() == 0) {
                unsigned set = serving_branches(&args, tile.set, tile.head * heads + h);
                int lowest = tile.row - (BY_KEYS ? args.ahead : args.back);
                find_keys(&keys, &args, tile.row, set, lowest, last + (BY_KEYS ? args.back : args.ahead) + 1);
                STORE((int *)args.dquery.data + place, keys.total);
            }
            synchronize();
            for (int i = thread_index(); i < keys.total && i < ROOM; i += THREADS) {
                int branch, position = key_position(&keys, i, &branch);
                STORE((int *)args.out.data + place * ROOM + i, position);
                STORE((float *)args.dout.data + place * ROOM + i, key_bias(&keys, position, branch, args.once));
            }
        }
}
