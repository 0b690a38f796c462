"""`PagedCache`."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from dilkit import (
    Alibi,
    BlockSparse,
    CoordinateAlibi,
    DilatedSegment,
    GlobalTokens,
    GridTable,
    PagedCache,
    Pattern,
    PoolFullError,
    SlidingWindow,
    Strided,
)
from dilkit.backends.reference import Reference
from dilkit.oracle import oracle_attention
from dilkit.pattern import PatternError
from dilkit.selector import NoBackendError

SEQ, HEADS, HEAD_DIM = 47, 6, 4
SEGMENTS = Pattern([6, 10, 21], [1, 3, 5])
OF_ALL_KINDS = Pattern.of(DilatedSegment(8, 2), SlidingWindow(5), GlobalTokens([9, 2], "read"), Strided(9))
Rows = tuple[Tensor, Tensor, Tensor]


def made(pattern: Pattern, kv_heads: int = 3, **options) -> PagedCache:
    sizes = dict(nbytes=1 << 18, page_rows=3, dtype=torch.float64)
    return PagedCache(pattern, HEADS, kv_heads, HEAD_DIM, **sizes | options)


def random_rows(kv_heads: int = 3, seq: int = SEQ) -> Rows:
    key, value = torch.randn(2, seq, kv_heads, HEAD_DIM, dtype=torch.float64)
    return torch.randn(seq, HEADS, HEAD_DIM, dtype=torch.float64), key, value


def exact(rows: Rows, pattern: Pattern, **options) -> Tensor:
    return oracle_attention(*(x[None] for x in rows), pattern, is_causal=True, **options)[0][0]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_an_autocast_takes_nothing_away(backend):
    rows, found = [x.float() for x in random_rows()], []
    for enabled in (False, True):
        cache = made(SEGMENTS, dtype=torch.float32)
        number = cache.add()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            parts = zip(*(x.split([20, 1, 26]) for x in rows), strict=True)
            found.append(torch.cat([cache.attend(*part, [number], [len(part[0])], backend=backend) for part in parts]))
    assert torch.equal(*found)  # and of its dtype


@pytest.mark.parametrize(
    "bias", [None, Alibi(torch.ones(HEADS).double()), GridTable(torch.ones(HEADS, 3).double(), (50,))], ids=str
)
def test_no_rows_get_nothing(bias):
    cache, rows = made(Pattern.dense()), random_rows()
    first, second = cache.add(), cache.add()
    for sequences, counts in (([], []), ([first], [0])):
        assert cache.attend(*(x[:0] for x in rows), sequences, counts, bias=bias).shape == (0, HEADS, HEAD_DIM)
    for start, stop in ((0, 7), (7, 8), (8, 11)):
        out = cache.attend(*(x[start:stop] for x in rows), [first, second], [0, stop - start], bias=bias)
        torch.testing.assert_close(out, exact(rows, Pattern.dense(), bias=bias)[start:stop])
    assert (cache.seen(first), cache.seen(second)) == (0, 11)


def test_a_cache_of_a_dense_pattern_is_what_others_have():
    cache, (q, k, v) = made(Pattern.dense(), page_rows=16), random_rows(seq=40)
    number = cache.add()
    cache.attend(q, k, v, [number], [40])
    (stream,) = cache._sequences[number].streams
    for pool, rows in zip(cache.pool.rows, (k, v), strict=True):
        paged = pool.view(-1, 16, 3, HEAD_DIM)  # (pages, page_rows, kv_heads, head_dim)
        assert torch.equal(paged[stream.pages].flatten(0, 1)[:40], rows)


def test_forks_share_pages_until_one_of_them_writes():
    cache, (q, k, v) = made(Pattern.dense(), page_rows=16), random_rows(seq=42)
    first = cache.add()
    cache.attend(q[:40], k[:40], v[:40], [first], [40])
    used = cache.pool.pages - cache.pool.free
    others = [cache.fork(first) for _ in range(5)]
    assert cache.pool.pages - cache.pool.free == used == 3
    six = [torch.cat([x[40:41]] * 6) for x in (q, k, v)]
    cache.attend(*six, [first, *others])
    assert cache.pool.pages - cache.pool.free == 2 + 6, "the last page, which was half full, is everybody's own"
    cache.reorder([first, *others], [5, 5, 0, 1, 2, 3])
    torch.testing.assert_close(cache.attend(*(x[41:42] for x in (q, k, v)), [first])[0], exact((q, k, v), Pattern.dense())[41])


@pytest.mark.parametrize("pattern", [Pattern([8], [1]), Pattern([4, 8], [3, 2]), OF_ALL_KINDS], ids=str)
def test_a_chunk_that_begins_segments_can_be_taken_back(pattern):
    rows = random_rows()
    right = exact(rows, pattern)
    for count, back in itertools.product((1, 2, 9), (1, 3, 8, 12)):
        cache = made(pattern, rollback=back)
        number, seen = cache.add(), 16 + count
        for start, stop in ((0, 16), (16, seen)):
            cache.attend(*(x[start:stop] for x in rows), [number], [stop - start])
        number = cache.fork(number)
        for start in (seen - back // 2, seen - back):
            cache.crop(number, start)
        out = cache.attend(*(x[start : start + 3] for x in rows), [number], [3])
        torch.testing.assert_close(out, right[start : start + 3])


def test_a_refused_crop_advises_what_it_takes_from_the_longest_length():
    for rollback in (2, 3):
        cache, rows = made(Pattern.of(SlidingWindow(5)), rollback=rollback), random_rows()
        number = cache.add()
        cache.attend(*(x[:20] for x in rows), [number], [20])
        cache.crop(number, 18)
        refused = pytest.raises(ValueError, match="has dropped after 20 tokens; a cache with rollback=3 does")
        with refused if rollback < 3 else contextlib.nullcontext():
            cache.crop(number, 17)


def test_a_full_pool_is_said_and_nothing_is_lost():
    pattern, rows = Pattern.dense(), random_rows()
    page = 2 * 3 * 3 * HEAD_DIM * 8
    cache = made(pattern, nbytes=14 * page)
    first, second = cache.add(), cache.add()
    cache.attend(*(x[:30] for x in rows), [first], [30])
    with pytest.raises(PoolFullError, match=r"5 pages are needed and 4 of 14 are free.*drop sequences"):
        cache.attend(*(x[:13] for x in rows), [second], [13])
    with pytest.raises(PoolFullError, match="6 pages are needed"):
        cache.attend(*(torch.cat((x[30:31], x[:13])) for x in rows), [first, second], [1, 13])
    assert (cache.seen(first), cache.seen(second), cache.pool.free) == (30, 0, 4)
    out = cache.attend(*(torch.cat((x[30:31], x[:6])) for x in rows), [first, second], [1, 6])
    torch.testing.assert_close(out, exact(rows, pattern)[[30, *range(6)]])
    cache.drop(first)
    assert cache.pool.free == 12


def test_a_step_that_failed_may_be_taken_again(monkeypatch):
    pattern, rows = OF_ALL_KINDS, random_rows()
    cache = made(pattern)
    first, second = cache.add(), cache.add()
    cache.attend(*(x[:20] for x in rows), [first], [20], backend="reference")
    free = cache.pool.free
    with monkeypatch.context() as patch:
        patch.setattr(Reference, "attend_stored", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.attend(*(torch.cat((x[20:23], x[:9])) for x in rows), [first, second], [3, 9], backend="reference")
    assert (cache.seen(first), cache.seen(second), cache.pool.free) == (20, 0, free)
    out = cache.attend(*(torch.cat((x[20:23], x[:9])) for x in rows), [first, second], [3, 9], backend="reference")
    torch.testing.assert_close(out, exact(rows, pattern)[[20, 21, 22, *range(9)]])


ROWS = random_rows(seq=4)
REFUSED = {
    "no such sequence": (lambda c: c.attend(*ROWS, [0, 1, 2, 9]), ValueError, "sequence=9 is none of this cache"),
    "a sequence twice": (lambda c: c.attend(*ROWS, [0, 0], [2, 2]), ValueError, "names a sequence once"),
    "True for 1": (lambda c: c.attend(*ROWS, [0, True], [2, 2]), TypeError, r"sequences\[1\]=True is a bool"),
    "True by itself": (lambda c: c.seen(True), TypeError, "sequence=True is a bool"),
    "a number": (lambda c: c.attend(*ROWS, 0, [4]), TypeError, "sequences=0 is a int; a sequence of integers"),
    "a set": (lambda c: c.attend(*ROWS, {1, 0}, [2, 2]), TypeError, "is a set; a sequence of integers"),
    "a count": (lambda c: c.attend(*ROWS, [0], 4), TypeError, "counts=4 is a int; a sequence of integers"),
    "True of counts": (lambda c: c.attend(*(x[:1] for x in ROWS), [0], [True]), TypeError, r"counts\[0\]=True is a bool"),
    "beams of a number": (lambda c: c.reorder(0, [0]), TypeError, "sequences=0 is a int"),
    "a beam": (lambda c: c.reorder([0], 0), TypeError, "indices=0 is a int"),
    "counts": (lambda c: c.attend(*ROWS, [0, 1], [2, 3]), ValueError, "are 5 rows, and query has 4"),
    "a negative count": (lambda c: c.attend(*ROWS, [0, 1], [5, -1]), ValueError, "counts"),
    "fewer counts": (lambda c: c.attend(*ROWS, [0, 1], [4]), ValueError, "a count for each sequence"),
    "another dtype": (lambda c: c.attend(*(x.float() for x in ROWS), [0], [4]), ValueError, "query is torch.float32"),
    "other heads": (lambda c: c.attend(ROWS[0], *random_rows(1, 4)[1:], [0], [4]), ValueError, "key is torch.float64"),
    "a batch": (lambda c: c.attend(*(x[None] for x in ROWS), [0], [4]), ValueError, r"\(total, heads, head_dim\)"),
    "coordinates": (
        lambda c: c.attend(*ROWS, [0], [4], bias=CoordinateAlibi(torch.ones(HEADS), torch.rand(1, 4, 2))),
        ValueError,
        "goes by coordinates",
    ),
    "a gradient": (lambda c: c.attend(ROWS[0].clone().requires_grad_(), *ROWS[1:], [0], [4]), ValueError, "gradient"),
    "no backend": (lambda c: c.attend(*ROWS, [0], [4], backend="sdpa"), NoBackendError, "stored rows"),
    "beyond": (lambda c: c.crop(0, 5), ValueError, "length=5 exceeds the 4 tokens of sequence 0"),
    "no longer kept": (lambda c: c.crop(1, 1), ValueError, "a cache with rollback=19 does"),
    "beams": (lambda c: c.reorder([0, 1], [0, 2]), ValueError, "2 numbers from 0 to 1"),
    "beams of a sequence twice": (lambda c: c.reorder([0, 0], [0, 0]), ValueError, "names a sequence once"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(what):
    cache = made(Pattern.of(SlidingWindow(5)))
    numbers = [cache.add() for _ in range(3)]
    rows = random_rows()
    cache.attend(*(torch.cat((x[:4], x[:20])) for x in rows), numbers[:2], [4, 20])
    call, error, message = REFUSED[what]
    free = cache.pool.free
    with pytest.raises(error, match=message):
        call(cache)
    assert ([cache.seen(number) for number in numbers], cache.pool.free) == ([4, 20, 0], free)
    torch.testing.assert_close(cache.attend(*(x[4:5] for x in rows), [0])[0], exact(rows, cache.pattern)[4])


def test_numbers_may_be_those_of_arrays():
    cache, rows = made(Pattern.dense()), random_rows()
    numbers = np.array([cache.add(), cache.add()])
    out = cache.attend(*(torch.cat((x[:3], x[:9])) for x in rows), numbers, torch.tensor([3, 9]))
    torch.testing.assert_close(out, exact(rows, cache.pattern)[[*range(3), *range(9)]])
    cache.reorder(tuple(numbers), np.array([1, 1]))
    cache.crop(numbers[0], np.int32(5))
    cache.drop(numbers[1])
    assert (cache.sequences, cache.seen(numbers[0]), cache.seen(cache.fork(numbers[0]))) == ((0,), 5, 5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(nbytes=10), ValueError, "nbytes=10"),
        (dict(page_rows=0), ValueError, "page_rows=0"),
        (dict(rollback=-1), ValueError, "rollback=-1"),
        (dict(dtype=torch.int32), ValueError, "dtype"),
        (dict(stored="int4"), ValueError, "stored"),
        (dict(pattern=Pattern.natten((4, 4), 3)), PatternError, "grid"),
        (dict(pattern=Pattern.of(BlockSparse(None, 4))), PatternError, "each call chooses what it shows"),
        (dict(kv_heads=4), PatternError, "heads"),
    ],
)
def test_a_cache_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        made(options.pop("pattern", Pattern.dense()), options.pop("kv_heads", 3), **options)


@pytest.mark.parametrize("steps", [640, pytest.param(50_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow(steps):
    pattern = Pattern.of(DilatedSegment(16, 4), DilatedSegment(64, 4), SlidingWindow(8), GlobalTokens(2), tail="zeros")
    cache, (q, k, v) = made(pattern, nbytes=1 << 17), random_rows(seq=2)
    numbers, least = [cache.add(), cache.add()], []
    for step in range(steps):
        cache.attend(q, k, v, numbers)
        if step % 64 == 0:
            least.append(cache.pool.free)
    half = len(least) // 2
    assert min(least[half:]) == min(least[1:half]), "what is free comes and goes with the segments, and does not become less"
