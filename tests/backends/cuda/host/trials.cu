/* Kernels that do what the shim must catch, each `what` something else, and kernels that are right. */
#include "intrinsics.cuh"

typedef struct {
    float *in, *out;
    int *counter;
    int what;
} Args;

/* The sum of `in` (1000 elements) in every element of `out` (blocks x THREADS), by shuffles and by shared memory. */
KERNEL(right) {
    SHARED float part[THREADS];
    int t = thread_index();
    float sum = 0;
    for (int i = t; i < 1000; i += THREADS)
        sum += LOAD(args.in + i);
    for (int mask = 16; mask; mask /= 2)
        sum += shuffle_xor(sum, mask);
    part[t] = sum;
    synchronize();
    float all = 0;
    for (int first = 0; first < THREADS; first += 32)
        all += part[first];
    STORE(args.out + block_index() * THREADS + t, all);
}

KERNEL(diverging) {
    int t = thread_index();
    switch (args.what) {
    case 0:
        if (t < 40)
            synchronize();
        else
            synchronize();
        break;
    case 1:
        if (t == 40)
            return;
        synchronize();
        break;
    case 2:
        if (t % 32 < 7)
            synchronize_warp();
        else
            synchronize();
        break;
    case 5:
        if (t % 2)
            shuffle_xor(1.0f, 1);
        else
            ballot(1);
        break;
    }
}

KERNEL(outside) {
    SHARED float first[THREADS];
    DYNAMIC_SHARED(memory);
    int t = thread_index();
    float x = 0;
    first[t] = 0;
    synchronize();
    switch (args.what) {
    case 0: x = LOAD(args.in + 1000); break;
    case 2: STORE(args.out + block_count() * THREADS, x); break;
    case 4: x = load_floats(args.in + 997).x; break;
    case 7: copy_async(first + 4, args.in + 1000); break;
    case 10: atomic_add(args.counter + 1, 1); break;
    case 12: copy_async(first, args.in); break;
    case 13: memory[512] = 1; break;
    case 14: STORE(args.in + t, x); break;
    case 20: x = first[t + (t == 77) * 100]; break;
    case 22: x = ((float *)memory)[2 * t]; break;
    case 23: x = args.in[1000 + t]; break;
    case 26: x = (float)(args.what * 100000000); break;
    }
    synchronize();
    STORE(args.out + block_index() * THREADS + t, x);
}

/* What is right has even numbers, what is a race odd ones. */
KERNEL(racing) {
    SHARED float a[THREADS];
    SHARED unsigned short b[THREADS];
    SHARED uint4 c[THREADS];
    int t = thread_index(), what = args.what;
    a[t] = LOAD(args.in + t);
    b[t] = (unsigned short)t;
    if (what != 1)
        synchronize();
    float x = a[THREADS - 1 - t];
    if (what == 0)
        synchronize();
    if (what == 0 || what == 3)
        a[t] = x;
    if (what == 4 || what == 5) {
        b[t] = 3;
        if (what == 4)
            synchronize_warp();
        x += b[t ^ 1];
    }
    if (what == 6 || what == 7) {
        copy_async(c + t, args.in + 4 * t);
        copy_async_commit();
        copy_async_wait(0);
        if (what == 6)
            synchronize();
        x += ((float *)c)[t];
    }
    if (t < 32 && (what == 8 || what == 9)) {
        x += b[5];
        if (what == 8)
            synchronize_warp();
        else
            x += shuffle(x, 0); /* threads wait for each other, but memory is in no order */
        if (t == 0)
            b[5] = 2;
    }
    STORE(args.out + block_index() * THREADS + t, x);
}

/* What is in shared memory at the start of a block, before it is written to. */
KERNEL(unwritten) {
    SHARED float a[THREADS];
    DYNAMIC_SHARED(memory);
    int t = thread_index();
    STORE(args.out + block_index() * THREADS + t, args.what ? ((float *)memory)[t] : a[t]);
    a[t] = ((float *)memory)[t] = 1;
}

/* Blocks take numbers below 1000 from a counter, and write their own. */
KERNEL(counting) {
    SHARED int item;
    for (;;) {
        synchronize();
        if (thread_index() == 0)
            item = atomic_add(args.counter, 1);
        synchronize();
        if (item >= 1000)
            return;
        if (thread_index() == item % THREADS)
            STORE(args.out + item, LOAD(args.out + item) + item);
    }
}

/* Rows that are `what` words of 16 bytes apart, in shared memory. */
KERNEL(striding) {
    SHARED uint4 rows[64 * 9];
    unsigned got[4];
    for (int i = thread_index(); i < 64 * 9; i += THREADS)
        rows[i] = make_uint4(i, i, i, i);
    synchronize();
    load_matrices_4(got, rows + thread_index() % 32 * args.what);
    STORE(args.out + block_index() * THREADS + thread_index(), (float)got[0]);
}
