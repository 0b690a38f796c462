"""Products of which sums over several threads are made, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(a, b):
    """Return `a * b`, each product rounded: no compiler fuses it with a sum. For sums that several threads share.

    Two threads that add their products have the same sum if each product is rounded. Fused, each thread would round the other's
    alone: their sums would differ in a bit, and either may be what is stored.
    """
    return tl.where(b == b, a * b, b)
