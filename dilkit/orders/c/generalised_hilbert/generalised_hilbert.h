/* The generalised Hilbert curve for boxes of any size. */
#ifndef DILKIT_GENERALISED_HILBERT_H
#define DILKIT_GENERALISED_HILBERT_H

#include <stdint.h>

/* out[d] = row-major index of the d-th cell along the curve through `shape`, for d in [first, last): the same for every
 * division of the curve into such ranges. `bytes` is 4 or 8, the width of an element of `out`; `out` is the start of the whole
 * curve. */
void generalised_hilbert_range(void *out, int bytes, const int64_t shape[3], int64_t first, int64_t last);

/* The whole curve, by up to `threads` threads, which end with the call. */
void generalised_hilbert_curve(void *out, int bytes, const int64_t shape[3], int threads);

#endif
