/* Conversions, products and copies of the shim, on words that every thread reads from `in` and writes to `out`. */
#include "intrinsics.cuh"

typedef struct {
    const unsigned *in;
    unsigned *out;
    int what, amount;
} Args;

DEVICE float as_float(unsigned bits) {
    union {
        unsigned bits;
        float value;
    } both = {bits};
    return both.value;
}

DEVICE unsigned as_bits(float value) {
    union {
        float value;
        unsigned bits;
    } both = {value};
    return both.bits;
}

/* A word of each thread to a word. */
KERNEL(words) {
    int place = block_index() * THREADS + thread_index();
    unsigned word = LOAD(args.in + place), out = 0;
    float value = as_float(word);
    switch (args.what) {
    case 0: out = as_bits(half_to_float((unsigned short)word)); break;
    case 1: out = as_bits(bfloat_to_float((unsigned short)word)); break;
    case 2: out = float_to_half(value); break;
    case 3: out = float_to_bfloat(value); break;
    case 4: out = pack_halves(value, -value); break;
    case 5: out = pack_bfloats(value, -value); break;
    }
    STORE(args.out + place, out);
}

/* 32 rows of 8 elements of 2 bytes, 4 words each, and what a lane gets of the matrices they make. */
KERNEL(matrices) {
    SHARED uint4 rows[32];
    int lane = thread_index();
    rows[lane] = load_words(args.in + lane * 4);
    synchronize();
    unsigned got[4] = {0, 0, 0, 0};
#if !defined(__CUDACC__) || __CUDA_ARCH__ >= 750
    switch (args.what) {
    case 0: load_matrix(got, rows + lane); break;
    case 1: load_matrices_2(got, rows + lane); break;
    case 2: load_matrices_4(got, rows + lane); break;
    case 3: load_matrix_transposed(got, rows + lane); break;
    case 4: load_matrices_2_transposed(got, rows + lane); break;
    case 5: load_matrices_4_transposed(got, rows + lane); break;
    }
#endif
    store_words(args.out + lane * 4, make_uint4(got[0], got[1], got[2], got[3]));
}

/* A lane reads 4 words of the left matrix, 2 of the right one and 4 of the sum; it writes the 4 words of the sum. */
KERNEL(products) {
    int lane = thread_index();
    const unsigned *in = args.in + lane * 10;
    unsigned left[4], right[2];
    float sum[4];
    for (int i = 0; i < 4; i++)
        left[i] = LOAD(in + i), sum[i] = as_float(LOAD(in + 6 + i));
    for (int i = 0; i < 2; i++)
        right[i] = LOAD(in + 4 + i);
    switch (args.what) {
#if !defined(__CUDACC__) || __CUDA_ARCH__ >= 750
    case 0: mma_k8_half(sum, left, right); break;
    case 1: mma_k16_half(sum, left, right); break;
#endif
#if !defined(__CUDACC__) || __CUDA_ARCH__ >= 800
    case 2: mma_k8_bfloat(sum, left, right); break;
    case 3: mma_k16_bfloat(sum, left, right); break;
#endif
#if STORAGE
    case 4: sum[0] = low_of(pack(sum[1], sum[2])) + high_of(left[0]) + from_storage(to_storage(sum[3])); break;
#endif
    }
    store_floats(args.out + lane * 4, make_float4(sum[0], sum[1], sum[2], sum[3]));
}

/* Thread t copies 16 bytes three times, each a group, and looks at a word of all three after waiting for all but `amount`. */
KERNEL(copies) {
    SHARED uint4 place[3][THREADS];
    int t = thread_index();
    for (int i = 0; i < 3; i++) {
        copy_async_or_zero(&place[i][t], args.in + (i * THREADS + t) * 4, t % 4 != i);
        copy_async_commit();
    }
    switch (args.amount) {
    case 0: copy_async_wait(0); break;
    case 1: copy_async_wait(1); break;
    case 2: copy_async_wait(2); break;
    }
    for (int i = 0; i < 3; i++)
        STORE(args.out + i * THREADS + t, place[i][t].y);
    copy_async_wait(0);
}
