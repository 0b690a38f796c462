/* What find_keys, key_position and key_bias make of every tile. For tile n and head h of its group: the number of keys at
   counter[n * heads + h], their positions and biases at (n * heads + h) * ROOM in out and dout. BY_KEYS: the tiles are of keys. */
#include "dilated.cuh"

DEVICE void list_head(const Args *args, const Keys *keys, int place) {
    if (thread_index() == 0)
        STORE((int *)args->dquery.data + place, keys->total);
    for (int i = thread_index(); i < keys->total && i < ROOM; i += THREADS) {
        int branch, position = key_position(keys, i, &branch);
        STORE((int *)args->out.data + place * ROOM + i, position);
        STORE((float *)args->dout.data + place * ROOM + i, key_bias(keys, position, branch, args->once));
    }
}

KERNEL(list_keys) {
    SHARED Task task;
    int heads = BY_KEYS ? group_of(&args) : 1;
    first_tile(&task, &args, BY_KEYS);
    while (task.tile.rows) {
        int number = take_number(&task, &args);
        for (int h = 0; h < heads; h++) {
            list_head(&args, &task.keys, task.item * heads + h);
            synchronize();
            if (in_first_warp() && h + 1 < heads)
                find_keys(&task.keys, &args, &task.tile, task.batch, task.tile.head * heads + h + 1, args.ahead, args.back);
            synchronize();
        }
        Found next = find_tile(&args, number);
        begin_tile(&task, &args, &next, BY_KEYS);
        synchronize();
    }
}
