"""`DilatedCache`."""

import copy
import pickle
from collections.abc import Iterable

import pytest
import torch
from helpers.fakes import registered
from torch import Tensor

from dilkit import (
    Alibi,
    BlockSparse,
    CoordinateAlibi,
    DilatedCache,
    DilatedSegment,
    Documents,
    GlobalTokens,
    GridTable,
    Limits,
    PagedCache,
    Pattern,
    SlidingWindow,
    Strided,
    dilated_attention,
    use_backend,
)
from dilkit.backends.reference import Reference
from dilkit.oracle import oracle_attention
from dilkit.pattern import PatternError
from dilkit.selector import NoBackendError

SEQ, HEAD_DIM, BATCH = 53, 4, 2
NESTED = Pattern([4, 8, 16], [1, 2, 4])


def tensors(kv_heads: int, heads: int = 6, seq: int = SEQ) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(BATCH, seq, heads, HEAD_DIM, dtype=torch.float64)
    key, value = torch.randn(2, BATCH, seq, kv_heads, HEAD_DIM, dtype=torch.float64)
    return query, key, value


def decoded(cache: DilatedCache, rows: tuple[Tensor, ...], cuts: Iterable[int], **options) -> Tensor:
    return torch.cat([cache.attend(*(x[:, cache.seen : cut] for x in rows), **options) for cut in cuts], 1)


@pytest.mark.parametrize("cuts", [range(1, 31), [7, 12, 30]], ids=["steps", "chunks"])
def test_scores_beyond_the_largest_half_number(cuts):
    """Products of queries and keys are up to 10**6, before they are scaled."""
    rows = tuple(x[:, :30].half() * (400, 400, 1)[i] for i, x in enumerate(tensors(3)))
    exact, _ = oracle_attention(*(x.double() for x in rows), NESTED, is_causal=True)
    found = decoded(DilatedCache(NESTED, 3), rows, cuts)
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_is_a_cache_of_its_own(copied):
    pattern, rows, others = NESTED, tensors(3), tensors(3)
    exact, _ = oracle_attention(*rows, pattern, is_causal=True)
    cache = DilatedCache(pattern, 3)
    decoded(cache, rows, [9])
    decoded(other := copied(cache), others, [SEQ])
    torch.testing.assert_close(decoded(cache, rows, [10, SEQ]), exact[:, 9:])
    assert (cache.seen, other.seen) == (SEQ, SEQ)


def test_a_row_like_the_one_before_is_held_against_what_has_changed():
    pattern, rows = NESTED, tensors(3)
    cache = DilatedCache(pattern, 3)
    decoded(cache, rows, [9, 10], scale=1.0)
    with pytest.raises(TypeError, match="scale=True is a bool"):
        decoded(cache, rows, [11], scale=True)
    with use_backend("reference"):
        decoded(cache, rows, [11], scale=1.0)
        assert cache._step is not None
        assert cache._step.backend.name == "reference"
    got = decoded(cache, rows, [12, 13], scale=0.5, softcap=2.0)
    exact = dilated_attention(*rows, pattern, is_causal=True, scale=0.5, softcap=2.0)[:, 11:13]
    torch.testing.assert_close(got, exact)
    query, *others = (x[:, 13:14] for x in rows)
    exact = dilated_attention(*(x[:, :14] for x in rows), pattern, is_causal=True, scale=0.5, softcap=2.0)[:, 13:]
    got = cache.attend(torch._neg_view(-query), *others, scale=0.5, softcap=2.0)
    torch.testing.assert_close(got, exact)


def test_rows_of_vmap_are_refused():
    cache, rows = DilatedCache(NESTED, 3), tensors(3)
    with pytest.raises(ValueError, match="a cache cannot keep the rows of vmap"):
        torch.vmap(lambda *qkv: cache.attend(*qkv))(*(x.unsqueeze(1) for x in rows))
    assert cache.seen == cache.allocated_nbytes == 0


def test_long_chunks_are_taken_in_pieces():
    """A piece has at most 64 rows, which a window keeps beside its own; segments end between pieces."""
    pattern, rows = Pattern.of(SlidingWindow(9, 2), DilatedSegment(100, 3), Strided(5)), tensors(3, seq=170)
    exact, _ = oracle_attention(*rows, pattern, is_causal=True)
    torch.testing.assert_close(decoded(DilatedCache(pattern, 3), rows, [2, 150, 170]), exact)


def test_a_prompt_is_computed_by_dilated_attention():
    pattern, rows = Pattern([4, 16], [1, 4]), tensors(3)
    cache = DilatedCache(pattern, 3)
    for first, last in ((0, 16), (16, 48)):  # where all segments begin, no row before is seen
        prompt = tuple(x[:, first:last] for x in rows)
        assert torch.equal(cache.attend(*prompt), dilated_attention(*prompt, pattern, is_causal=True))


def test_a_chunk_of_no_rows():
    rows = tensors(3, seq=0)
    cache = DilatedCache(Pattern.dense(), 3)
    assert cache.attend(*rows).shape == rows[0].shape
    assert (len(cache), cache.nbytes, cache.allocated_nbytes) == (0, 0, 0)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_row_of_no_sequences(backend):
    rows = tuple(x[:0] for x in tensors(3, seq=1))
    assert DilatedCache(NESTED, 3).attend(*rows, backend=backend).shape == rows[0].shape


def test_a_backend_without_steps_leaves_them_to_plain_torch():
    pattern, rows = NESTED, tensors(3)
    exact, _ = oracle_attention(*rows, pattern, is_causal=True)
    torch.testing.assert_close(decoded(DilatedCache(pattern, 3), rows, range(1, SEQ + 1), backend="sdpa"), exact)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_an_autocast_takes_nothing_away(backend):
    pattern, rows = NESTED, tensors(3)
    rows = rows[0].float(), rows[1].float(), rows[2].float()
    right = decoded(DilatedCache(pattern, 3), rows, [20, 21, SEQ], backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        found = decoded(DilatedCache(pattern, 3), rows, [20, 21, SEQ], backend=backend)
    assert torch.equal(found, right)  # and of its dtype


FEW = CoordinateAlibi(torch.ones(6), torch.zeros(2, 7, 2))
WRONG = {
    "batch": (dict(size=(3, 1, 6, 4)), ValueError, "these rows have batch=3, but the cache batch=2"),
    "query heads": (dict(query=torch.ones(2, 1, 9, 4)), ValueError, "these rows have heads=9, but the cache heads=6"),
    "kv heads": (dict(key=torch.ones(2, 1, 6, 4)), ValueError, "key has shape .* and value .*; they must be equal"),
    "head_dim": (dict(size=(2, 1, 6, 8)), ValueError, "these rows have head_dim=8, but the cache head_dim=4"),
    "rows": (dict(query=torch.ones(2, 2, 6, 4)), ValueError, "key has seq 1 and query 2"),
    "dtype": (dict(dtype=torch.float64), ValueError, "these rows have dtype=torch.float64, but the cache dtype=torch.float32"),
    "device": (dict(device="meta"), ValueError, "these rows have device=meta, but the cache device=cpu"),
    "sink": (dict(sink=torch.zeros(5)), ValueError, r"sink has shape \(5,\); \(heads,\) = \(6,\) is needed"),
    "gradient of a sink": (dict(sink=torch.zeros(6, requires_grad=True)), ValueError, "a tensor requires a gradient"),
    "infinite scores": (dict(scale=1e35), ValueError, r"scale=1e\+35 would make infinite scores in float32; at most 1e\+30"),
    "scale": (dict(scale="large"), TypeError, "scale='large' is a str"),
    "backend": (dict(backend="flash9"), ValueError, "backend='flash9' is not a known backend"),
    "coordinates of few rows": (dict(bias=FEW), ValueError, r"coordinates .* \(2, 7, 2\); \(2, 8, 1 to 3\)"),
    "a small grid": (dict(bias=GridTable(torch.ones(6, 3), (2,))), ValueError, "grid of 2 tokens; at least the 8"),
    "gradient of a bias": (dict(bias=Alibi(torch.ones(6).requires_grad_())), ValueError, "requires a gradient"),
    "gradient": (dict(value=torch.ones(2, 1, 3, 4, requires_grad=True)), ValueError, r"decode under torch\.no_grad\(\)"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_leaves_the_cache_as_it_was(change, error, message):
    pattern = Pattern([4, 12], [1, 3])
    rows = tuple(x.float() for x in tensors(3))
    caches = [DilatedCache(pattern, 3) for _ in range(2)]
    for cache in caches:
        decoded(cache, rows, [6, 7])
    size = change.pop("size", (2, 1, 6, 4)) if (change := dict(change)) else (2, 1, 6, 4)
    kind = {name: change.pop(name) for name in ("dtype", "device") if name in change}
    narrow = (*size[:-2], size[-2] // 2, size[-1])
    wrong = dict(query=torch.ones(size, **kind), key=torch.ones(narrow, **kind), value=torch.ones(narrow, **kind)) | change
    with pytest.raises(error, match=message):
        caches[0].attend(**wrong)
    assert (caches[0].seen, caches[0].nbytes) == (caches[1].seen, caches[1].nbytes)
    assert torch.equal(*(decoded(cache, rows, range(8, SEQ)) for cache in caches))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(pattern="dense"), TypeError, "pattern='dense' is a str; a dilkit.Pattern is needed"),
        (dict(kv_heads=0), ValueError, "kv_heads=0 must be at least 1"),
        (dict(kv_heads=2.0), TypeError, "kv_heads=2.0 is a float"),
        (dict(pattern=Pattern([4], [2], head_shard=(2, 4))), ValueError, "leaves 2 key/value heads, but there are 3"),
        (dict(rollback=5), ValueError, "rollback=5 must be at most the shortest segment of the pattern, 4 tokens"),
        (dict(pattern=Pattern.natten((4, 4), 3)), PatternError, r"Neighborhood\(.*: .* is defined on a whole grid"),
    ],
)
def test_a_cache_that_cannot_be(arguments, error, message):
    with pytest.raises(error, match=message):
        DilatedCache(**{**dict(pattern=NESTED, kv_heads=3), **arguments})


class Refusing(Reference):
    limits = Limits(dtypes=frozenset({"float32"}))


def test_a_backend_that_refuses_later_rows_leaves_the_cache_as_it_was():
    pattern, rows = Pattern([4, 12], [1, 3]), tensors(3)
    cache = DilatedCache(pattern, 3)
    decoded(cache, rows, [5])
    with registered(Refusing(name="refusing")), pytest.raises(NoBackendError, match="computes float32"):
        cache.attend(*(x[:, 5:30] for x in rows), backend="refusing")  # rows 12 to 29 see none before them, and need a backend
    assert cache.seen == 5
    exact, _ = oracle_attention(*rows, pattern, is_causal=True)
    torch.testing.assert_close(decoded(cache, rows, [SEQ]), exact[:, 5:])


def test_ranges_beyond_the_query_heads_are_refused():
    cache = DilatedCache(Pattern([4], [2], heads=[(4, 8)]), 3)
    with pytest.raises(ValueError, match="reaches past the 6 heads"):
        cache.attend(*tensors(3))
    assert (cache.seen, cache.nbytes) == (0, 0)


def test_what_is_left_out_is_refused():
    cache = DilatedCache(Pattern.of(SlidingWindow(5), GlobalTokens([12])), 3)
    decoded(cache, tensors(3), [*range(1, 17)])
    needs = r"length=14 needs keys from token 10 on, .*window of 5 tokens.*; a cache with rollback=2 does"
    with pytest.raises(ValueError, match=needs):
        cache.crop(14)
    cache = DilatedCache(Pattern.of(BlockSparse.local_global(5, 4)), 3)
    decoded(cache, tensors(3), [18])
    with pytest.raises(PatternError, match=r"seq=21: BlockSparse is for 20 tokens at most"):
        cache.attend(*(x[:, 18:21] for x in tensors(3)))
    assert cache.seen == 18


def test_rows_after_the_last_document_are_refused():
    pattern, whole = Pattern.of(Documents([3, 4])), [x[:1] for x in tensors(3)]
    alone = DilatedCache(pattern, 3)
    paged = PagedCache(pattern, whole[0].shape[2], 3, HEAD_DIM, nbytes=1 << 16, dtype=whole[0].dtype)
    paged.add()
    for at in range(7):
        alone.attend(*(x[:, at : at + 1] for x in whole))
        paged.attend(*(x[0, at : at + 1] for x in whole), [0], [1])
    with pytest.raises(PatternError, match="seq=8: Documents is for 7 tokens at most"):
        alone.attend(*(x[:, 7:8] for x in whole))
    with pytest.raises(PatternError, match="seq=8: Documents is for 7 tokens at most"):
        paged.attend(*(x[0, 7:8] for x in whole), [0], [1])
    assert alone.seen == paged.seen(0) == 7
