"""The definition as loops over pairs and rows."""

from itertools import pairwise, product

import numpy as np
from helpers.strategies import Heads

from dilkit import (
    BlockSparse,
    DilatedSegment,
    Documents,
    GlobalTokens,
    Intervals,
    Neighborhood,
    Pattern,
    Prefix,
    SlidingWindow,
    Strided,
)


def sees(pattern: Pattern, branch: int, head: int, i: int, j: int, heads: Heads) -> bool:
    given = pattern.branches[branch]
    if given.heads is not None and not given.heads[0] <= head < given.heads[1]:
        return False
    match given:
        case DilatedSegment(segment_length=w, dilation_rate=r):
            first, total = pattern.head_shard or (0, heads[1])
            kv_head = first + head // (heads[0] // heads[1])
            offset = kv_head % r if pattern.offset == "modulo" else kv_head // -(-total // r)
            return i // w == j // w and (i % w) % r == offset and (j % w) % r == offset
        case SlidingWindow(window=None, dilation_rate=r, before=before, after=after):
            return (before == -1 or i - j <= before) and (after == -1 or j - i <= after) and (i - j) % r == 0
        case SlidingWindow(window=window, dilation_rate=r):
            return abs(i - j) < window and (i - j) % r == 0
        case GlobalTokens(tokens=tokens, direction=direction):
            positions = range(tokens) if isinstance(tokens, int) else tokens
            return j in positions or (direction == "both" and i in positions)
        case Strided(stride=stride):
            return (i - j) % stride == 0
        case Documents(lengths=lengths):
            starts = np.cumsum([0, *lengths])
            return any(start <= x < stop for start, stop in pairwise(starts) for x in [min(i, j)] if max(i, j) < stop)
        case Prefix(length=length):
            return j <= i or (i < length and j < length)
        case Intervals(rows=rows):
            return any(start <= j < stop for start, stop in rows.array()[i].tolist())
        case Neighborhood(shape=shape):
            at, to = np.unravel_index(i, shape), np.unravel_index(j, shape)
            return all(b in window_of(given, axis, int(a)) for axis, (a, b) in enumerate(zip(at, to, strict=True)))
        case BlockSparse(layout=layout, block_size=size):
            first = (pattern.head_shard or (0, 0))[0] * (heads[0] // heads[1])
            matrix = layout.array()[0 if layout.heads == 1 else first + head].tolist()
            return matrix[i // size][j // size]
    raise NotImplementedError(given)


def nearest(at: int, size: int, kernel_size: int, dilation: int) -> set[int]:
    """Return the `kernel_size` nearest coordinates of the residue of `at`, the lower of two equally near ones."""
    residue = range(at % dilation, size, dilation)
    return set(sorted(residue, key=lambda x: (abs(x - at), x))[:kernel_size])


def window_of(branch: Neighborhood, axis: int, at: int) -> set[int]:
    """Return the coordinates in the window of one; of a branch that cuts windows, those beyond the edges too."""
    size, kernel, dilation = branch.shape[axis], branch.kernel_size[axis], branch.dilation[axis]
    residue, number = range(at % dilation, size, dilation), branch.stride[axis]
    group = next(some for some in (residue[first : first + number] for first in range(0, len(residue), number)) if at in some)
    if branch.causal[axis]:
        return {x for x in range(group[-1] - (kernel - 1) * dilation, at + 1, dilation) if x >= 0 or branch.border == "cut"}
    middle = group[min(number // 2, len(group) - 1)]
    if branch.border == "move":
        return nearest(middle, size, kernel, dilation)
    first = middle - kernel // 2 * dilation
    return set(range(first, first + kernel * dilation, dilation))


def brute_force(pattern: Pattern, seq: int, heads: Heads, is_causal: bool) -> np.ndarray:
    """Count the branches in which each query sees each key, pair by pair, ignoring `overlap`."""
    count = np.zeros((heads[0], seq, seq), dtype=int)
    for head, i, j in np.ndindex(*count.shape):
        if j <= i or not is_causal:
            count[head, i, j] = sum(sees(pattern, b, head, i, j, heads) for b in range(len(pattern.branches)))
    return count


def brute_force_padding(pattern: Pattern, seq: int, heads: Heads, is_causal: bool) -> np.ndarray:
    """Count each query's padded keys, position by position, with every segment padded."""
    found = np.zeros((heads[0], seq), dtype=int)
    if is_causal or pattern.tail == "exact" or not seq:
        return found
    for b, (w, r) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)):
        w = min(w, seq)
        padded = next(n for n in range(w, w + r) if n % r == 0)
        apart = Pattern([padded], [r], pattern.offset, heads=pattern.heads and [pattern.heads[b]], head_shard=pattern.head_shard)
        for head, i in np.ndindex(*found.shape):
            place, tokens = i % w, min(w, seq - i // w * w)
            found[head, i] += sum(sees(apart, 0, head, place, j, heads) for j in range(tokens, padded))
    return found


def brute_force_edges(pattern: Pattern, seq: int, heads: Heads) -> np.ndarray:
    """Count each query's cells beyond the edges of cut neighborhoods."""
    found = np.zeros((heads[0], seq), dtype=int)
    for branch in pattern.branches:
        if isinstance(branch, Neighborhood) and branch.border == "cut":
            for head, i in np.ndindex(*found.shape):
                at = np.unravel_index(i, branch.shape)
                cells = product(*(window_of(branch, *axis) for axis in enumerate(map(int, at)))) if branch.serves(head) else ()
                found[head, i] += sum(any(not 0 <= x < n for x, n in zip(cell, branch.shape, strict=True)) for cell in cells)
    return found


def by_rows(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, count: np.ndarray, padding: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """`out` and `lse`, one row at a time, each key repeated as often as it counts: a plain softmax over a list of keys.

    Beside them it sees `padding[h, i]` keys of zeros with values of zeros.
    """
    batch, seq, heads, _ = q.shape
    out, lse = np.zeros_like(q), np.full((batch, heads, seq), -np.inf)
    group = heads // k.shape[2]
    for b, h, i in np.ndindex(batch, heads, seq):
        seen = np.repeat(np.arange(seq), count[b, h, i])
        if len(seen) + padding[h, i]:
            zeros = np.zeros((padding[h, i], k.shape[-1]))
            scores = scale * (np.concatenate([k[b, seen, h // group], zeros]) @ q[b, i, h])
            weights = np.exp(scores - scores.max())
            out[b, i, h] = weights @ np.concatenate([v[b, seen, h // group], zeros]) / weights.sum()
            lse[b, h, i] = scores.max() + np.log(weights.sum())
    return out, lse
