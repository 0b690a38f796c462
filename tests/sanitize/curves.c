/* Writes token orders with four threads, under ThreadSanitizer, and compares them with those of one thread. */
#include "curves.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BITS = 11, ROWS = 2100, COLUMNS = 2050 }; /* more than 1 << 22 cells, below which one thread writes all */

static void hilbert(void *out, int bytes, int threads) { curves_hilbert(out, bytes, 2, BITS, threads); }
static void generalised(void *out, int bytes, int threads) {
    curves_generalised_hilbert(out, bytes, (const int64_t[]){1, ROWS, COLUMNS}, threads);
}

int main(void) {
    static void (*const orders[])(void *, int, int) = {hilbert, generalised};
    int wrong = 0;
    curves_prepare();
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++)
        for (int bytes = 4; bytes <= 8; bytes += 4) { /* outputs of 8 bytes are streamed past the caches */
            const size_t size = (size_t)ROWS * COLUMNS * (size_t)bytes;
            char *one = calloc(size, 1), *four = calloc(size, 1);
            orders[i](one, bytes, 1), orders[i](four, bytes, 4);
            wrong += memcmp(one, four, size) != 0;
            free(one), free(four);
        }
    printf("orders by threads: %d wrong\n", wrong);
    return wrong;
}
