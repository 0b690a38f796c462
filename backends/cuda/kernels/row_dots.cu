/* delta[b, h, i] = dout[b, i, h] . out[b, i, h], in fp32, of tensors of any STORAGE: what both gradients subtract.

       dout row --+
       out row  --+--> quads (registers) --> sum of LANES lanes (shuffles) --> delta      loop over rows, in the order of delta

   THREADS: any multiple of 32. LANES threads of a warp share a row, and each loads several quads before it uses them. Neither
   tiles nor shared memory are used. */
#include "stored.cuh"

enum {
    LANES = HEAD_DIM >= 128 ? 16 : HEAD_DIM >= 64 ? 8 : HEAD_DIM >= 32 ? 4 : 2,
    QUADS = HEAD_DIM / 4 / LANES,
    ROWS = THREADS / LANES,
};

DEVICE const Storage *row_of(const View *view, int batch, int head, int row) {
    return row_at((const Storage *)view->data + batch * view->batch + head * view->head, row, view->row);
}

/* left . right of the elements of a row that are this lane's. */
DEVICE float share_of_dot(const Storage *left, const Storage *right, int head_dim) {
    int lane = thread_index() % LANES;
    Quad a[QUADS], b[QUADS];
    float sum = 0.0f;
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        int d = (q * LANES + lane) * 4;
        a[q] = load_four(left + d, head_dim - d), b[q] = load_four(right + d, head_dim - d);
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        float4 x = to_floats(a[q]), y = to_floats(b[q]);
        sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
    }
    return sum;
}

KERNEL(row_dots) {
    int own = thread_index() / LANES, ahead = block_count() * ROWS;
    long long total = (long long)args.batch * args.heads * args.seq, first = (long long)block_index() * ROWS;
    int pairs_ahead = ahead / args.seq, rows_ahead = ahead % args.seq;
    int pair = (int)((first + own) / args.seq), row = (int)((first + own) % args.seq);
    for (; first < total; first += ahead) {
        int batch = pair / args.heads, head = pair % args.heads, here = first + own < total;
        const Storage *dout = row_of(&args.dout, batch, head, row), *out = row_of(&args.out, batch, head, row);
        float sum = share_of_dot(dout, out, here ? args.head_dim : 0);
#pragma unroll
        for (int lanes = 1; lanes < LANES; lanes *= 2)
            sum += shuffle_xor(sum, lanes);
        if (here && thread_index() % LANES == 0)
            STORE(args.delta + first + own, sum);
        pair += pairs_ahead, row += rows_ahead;
        if (row >= args.seq)
            row -= args.seq, pair++;
    }
}
