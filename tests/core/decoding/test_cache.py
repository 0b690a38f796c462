"""`DilatedCache`: each row is the full computation's, and nothing is kept that no later row can see."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers.fakes import registered
from helpers.pairwise import every_pair
from helpers.strategies import Heads, patterns_with_heads
from helpers.thinned import diagonal, every_nth
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilkit import DilatedCache, Limits, Pattern, dilated_attention, use_backend
from dilkit.backends.reference import Reference
from dilkit.decoding import cache as cache_module
from dilkit.decoding.kept import kept_count
from dilkit.oracle import oracle_attention
from dilkit.pattern.checks import WHOLE_SEQUENCE
from dilkit.selector import NoBackendError
from dilkit.testing.accuracy import expected
from dilkit.testing.problems import Case
from dilkit.testing.tensors import make_tensors

SEQ, HEAD_DIM, BATCH = 53, 4, 2
PATTERNS = {
    "nested": Pattern([4, 8, 16], [1, 2, 4]),
    "ragged": Pattern([6, 10, 21], [1, 3, 5]),
    "sparse": Pattern([16], [5]),
    "twice": Pattern([8, 8], [2, 2]),
    "whole sequence": Pattern([4, WHOLE_SEQUENCE], [1, 3]),
    "block": Pattern([6, 12], [2, 3], offset="block"),
    "once": Pattern([4, 6, 20], [1, 2, 3], overlap="once"),
    "once, block": Pattern([4, 10], [2, 3], offset="block", overlap="once"),
    "ranges": Pattern([5, 10, 15], [1, 2, 3], heads=[(0, 5), None, (3, 6)]),
    "once, ranges": Pattern([5, 10, 15], [1, 2, 3], overlap="once", heads=[(0, 5), None, (3, 6)]),
    "head split": Pattern.head_split([4, 8], [1, 2], 6),
    "shard": Pattern([6, 12], [2, 4], head_shard=(3, 11)),
    "padded tails": Pattern([8, 24], [3, 5], tail="zeros"),
    "single tokens": Pattern([1], [1]),
}
KV_HEADS = {"as many": 6, "grouped": 3, "one": 1}
each_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)


def tensors(kv_heads: int, heads: int = 6, seq: int = SEQ) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value in fp64."""
    query = torch.randn(BATCH, seq, heads, HEAD_DIM, dtype=torch.float64)
    key, value = torch.randn(2, BATCH, seq, kv_heads, HEAD_DIM, dtype=torch.float64)
    return query, key, value


def decoded(cache: DilatedCache, rows: tuple[Tensor, ...], cuts: Iterable[int], **options: Any) -> Tensor:
    """What the cache gives for chunks of `rows` that end at `cuts`, from what it has seen on."""
    found = []
    for cut in cuts:
        found.append(cache.attend(*(x[:, cache.seen : cut] for x in rows), **options))
    return torch.cat(found, 1)


def seen_later(pattern: Pattern, seen: int, heads: int, kv_heads: int) -> int:
    """By definition: keys before `seen` that a row from there on sees, each for as many branches as show it."""
    seq = seen + 2 * max(length for length in pattern.segment_lengths if length < WHOLE_SEQUENCE)
    total = 0
    for branch in pattern.branches:
        options: Any = dict(heads=branch.heads and [branch.heads], head_shard=pattern.head_shard)
        alone = Pattern([branch.segment_length], [branch.dilation_rate], pattern.offset, **options)
        count = alone.count(seq, heads, kv_heads=kv_heads, is_causal=True)
        total += int(count[:, seen:, :seen].any(1).unflatten(0, (kv_heads, -1)).any(1).sum())
    return total


@pytest.mark.parametrize(("name", "group"), diagonal(PATTERNS, KV_HEADS))
def test_each_step_is_the_last_row(name: str, group: str) -> None:
    pattern, kv_heads = PATTERNS[name], KV_HEADS[group]
    rows = tensors(kv_heads)
    exact, _ = oracle_attention(*rows, pattern, is_causal=True)
    torch.testing.assert_close(decoded(DilatedCache(pattern, kv_heads), rows, range(1, SEQ + 1)), exact)


@pytest.mark.parametrize(("name", "chunk"), diagonal(PATTERNS, [2, 3, 7, 16, 20]))
def test_each_chunk_is_the_last_rows(name: str, chunk: int) -> None:
    pattern, rows = PATTERNS[name], tensors(3)
    exact, _ = oracle_attention(*rows, pattern, is_causal=True)
    for first in (1, chunk, 19):  # where the chunks begin: within segments, and where some of them end
        cuts = [*range(first, SEQ, chunk), SEQ]
        torch.testing.assert_close(decoded(DilatedCache(pattern, 3), rows, cuts), exact)


@settings(max_examples=25, deadline=None)
@given(patterns_with_heads(), st.integers(1, 60))
def test_kept_is_what_a_later_row_sees(drawn: tuple[Pattern, Heads], seq: int) -> None:
    pattern, (heads, kv_heads) = drawn
    cache, rows = DilatedCache(pattern, kv_heads), tensors(kv_heads, heads, seq)
    bound = sum(-(-length // rate) for length, rate in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True))
    row = 2 * BATCH * HEAD_DIM * 8
    for seen in sorted({seq // 2, seq}):
        cache.attend(*(x[:, cache.seen : seen] for x in rows))
        assert cache.nbytes == row * seen_later(pattern, seen, heads, kv_heads)
        assert cache.nbytes <= cache.allocated_nbytes <= row * kv_heads * bound


@pytest.mark.parametrize("pattern", every_nth(2, PATTERNS.values(), 1), ids=PATTERNS)
def test_the_picture_is_of_what_a_later_row_sees(pattern: Pattern) -> None:
    options: Any = dict(overlap=pattern.overlap, head_shard=pattern.head_shard, tail=pattern.tail)
    pattern = Pattern(pattern.segment_lengths, pattern.dilation_rates, pattern.offset, **options)  # for all heads
    kept, row = kept_count(pattern, SEQ, 3), 2 * BATCH * HEAD_DIM * 8
    cache, rows = DilatedCache(pattern, 3), tensors(3)
    for seen in range(1, SEQ + 1):
        decoded(cache, rows, [seen])
        assert int(kept[:, seen - 1].sum()) * row == cache.nbytes


def test_what_is_kept_is_bounded_for_ever_and_one_in_r_of_a_whole_sequence() -> None:
    bounded, growing = (DilatedCache(Pattern([4, length], [1, 4]), 1) for length in (16, WHOLE_SEQUENCE))
    row = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    sizes = []
    for _ in range(160):
        for cache in (bounded, growing):
            cache.attend(row, row, row)
        sizes.append(bounded.nbytes // row.nbytes // 2)
    assert sizes[16:] == sizes[:16] * 9
    assert max(sizes) == 3 + 3  # the last row of a segment is not needed after its step
    assert bounded.allocated_nbytes == 2 * row.nbytes * (4 + 4)
    assert growing.nbytes == 2 * row.nbytes * 40
    assert growing.allocated_nbytes <= 2 * row.nbytes * (4 + 80)


DTYPES, LAYOUTS = ("float64", "float32", "bfloat16", "float16"), ("contiguous", "sliced", "transposed")


@pytest.mark.parametrize(("dtype", "layout", "name"), every_pair(DTYPES, LAYOUTS, ("ragged", "once")))
def test_dtypes_and_strides(dtype: str, layout: str, name: str) -> None:
    pattern = PATTERNS[name]
    case = Case(
        feature="decoding", variant=layout, pattern=pattern, seq=SEQ, kv_heads=2, dtype=dtype, layout=layout, is_causal=True
    )
    given, problem = make_tensors(case), case.problem(requires_grad=False)
    found = decoded(DilatedCache(pattern, 2), given.qkv, [5, 6, 7, 20, *range(21, SEQ + 1)])
    assert found.dtype == given.query.dtype
    for check in expected(problem, given).checks(dict(out=found), SEQ):
        assert check.passed, check.complaint


@pytest.mark.parametrize("cuts", [range(1, 31), [7, 12, 30]], ids=["steps", "chunks"])
def test_scores_beyond_the_largest_half_number(cuts: Iterable[int]) -> None:
    """Products of queries and keys are up to 10**6, before they are scaled."""
    rows = tuple(x[:, :30].half() * (400, 400, 1)[i] for i, x in enumerate(tensors(3)))
    exact, _ = oracle_attention(*(x.double() for x in rows), PATTERNS["nested"], is_causal=True)
    found = decoded(DilatedCache(PATTERNS["nested"], 3), rows, cuts)  # type: ignore[arg-type]
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_is_a_cache_of_its_own(copied: Callable[[DilatedCache], DilatedCache]) -> None:
    pattern, rows, others = PATTERNS["nested"], tensors(3), tensors(3)
    exact, _ = oracle_attention(*rows, pattern, is_causal=True)
    cache = DilatedCache(pattern, 3)
    decoded(cache, rows, [9])
    decoded(other := copied(cache), others, [SEQ])
    torch.testing.assert_close(decoded(cache, rows, [10, SEQ]), exact[:, 9:])
    assert (cache.seen, other.seen) == (SEQ, SEQ)


def test_a_row_like_the_one_before_is_held_against_what_has_changed() -> None:
    pattern, rows = PATTERNS["nested"], tensors(3)
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


def test_rows_of_vmap_are_refused() -> None:
    cache, rows = DilatedCache(PATTERNS["nested"], 3), tensors(3)
    with pytest.raises(ValueError, match="a cache cannot keep the rows of vmap"):
        torch.vmap(lambda *qkv: cache.attend(*qkv))(*(x.unsqueeze(1) for x in rows))
    assert cache.seen == cache.allocated_nbytes == 0


@pytest.mark.parametrize("pattern", every_nth(2, PATTERNS.values()), ids=PATTERNS)
def test_a_row_that_sees_no_key_gets_nothing(pattern: Pattern) -> None:
    sees_none = (pattern.count(SEQ, 6, is_causal=True) == 0).all(-1)
    found = decoded(DilatedCache(pattern, 6), tensors(6), range(1, SEQ + 1))
    assert (found.transpose(1, 2)[:, sees_none] == 0).all()


@each_pattern
def test_a_token_reaches_the_rows_that_see_it_alone(pattern: Pattern, poisoned: None) -> None:
    for token in (0, 9, 30):
        rows = tensors(3)
        rows[1][:, token] = rows[2][:, token] = torch.nan
        seen = pattern.count(SEQ, 6, kv_heads=3, is_causal=True)[:, :, token].T > 0
        found = decoded(DilatedCache(pattern, 3), rows, range(1, SEQ + 1))
        assert (found.isnan().all(-1) == seen).all()
        assert not found[:, ~seen].isnan().any()


def test_a_token_of_a_chunk_reaches_the_rows_that_see_it_alone(poisoned: None) -> None:
    rows, pattern = tensors(3), PATTERNS["nested"]
    rows[1][:, 14] = rows[2][:, 14] = torch.nan
    seen = pattern.count(SEQ, 6, kv_heads=3, is_causal=True)[:, :, 14].T > 0
    found = decoded(DilatedCache(pattern, 3), rows, [1, 20, SEQ])
    assert (found.isnan().all(-1) == seen).all()


def test_long_chunks_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, rows = PATTERNS["whole sequence"], tensors(3)
    exact, _ = oracle_attention(*rows, pattern, is_causal=True)
    monkeypatch.setattr(cache_module, "_MOST_SCORES", 300)
    torch.testing.assert_close(decoded(DilatedCache(pattern, 3), rows, [2, SEQ]), exact)


def test_a_prompt_is_computed_by_dilated_attention() -> None:
    pattern, rows = Pattern([4, 16], [1, 4]), tensors(3)
    cache = DilatedCache(pattern, 3)
    for first, last in ((0, 16), (16, 48)):  # where all segments begin, no row before is seen
        prompt = tuple(x[:, first:last] for x in rows)
        assert torch.equal(cache.attend(*prompt), dilated_attention(*prompt, pattern, is_causal=True))


def test_a_chunk_of_no_rows() -> None:
    rows = tensors(3, seq=0)
    cache = DilatedCache(Pattern.dense(), 3)
    assert cache.attend(*rows).shape == rows[0].shape
    assert (len(cache), cache.nbytes, cache.allocated_nbytes) == (0, 0, 0)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_row_of_no_sequences(backend: str) -> None:
    rows = tuple(x[:0] for x in tensors(3, seq=1))
    assert DilatedCache(PATTERNS["nested"], 3).attend(*rows, backend=backend).shape == rows[0].shape


def test_a_backend_without_steps_leaves_them_to_plain_torch() -> None:
    pattern, rows = PATTERNS["nested"], tensors(3)
    exact, _ = oracle_attention(*rows, pattern, is_causal=True)
    torch.testing.assert_close(decoded(DilatedCache(pattern, 3), rows, range(1, SEQ + 1), backend="sdpa"), exact)


def test_inside_and_outside_of_inference_mode() -> None:
    pattern, rows = PATTERNS["nested"], tensors(3)
    exact, _ = oracle_attention(*rows, pattern, is_causal=True)
    cache = DilatedCache(pattern, 3)
    with torch.inference_mode():
        first = decoded(cache, rows, [20, 21, 22])
    torch.testing.assert_close(torch.cat([first, decoded(cache, rows, range(23, SEQ + 1))], 1), exact)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_an_autocast_takes_nothing_away(backend: str | None) -> None:
    """Of prompts, steps, and chunks in plain torch: they are computed in the dtype of the rows, and kept in it."""
    pattern, rows = PATTERNS["nested"], tensors(3)
    rows = rows[0].float(), rows[1].float(), rows[2].float()
    right = decoded(DilatedCache(pattern, 3), rows, [20, 21, SEQ], backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        found = decoded(DilatedCache(pattern, 3), rows, [20, 21, SEQ], backend=backend)
    assert torch.equal(found, right)  # and of its dtype


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": (dict(query=[1.0]), TypeError, "query is a list; a torch.Tensor is needed"),
    "batch": (dict(size=(3, 1, 6, 4)), ValueError, "these rows have batch=3, but the cache batch=2"),
    "query heads": (dict(query=torch.ones(2, 1, 9, 4)), ValueError, "these rows have heads=9, but the cache heads=6"),
    "kv heads": (dict(key=torch.ones(2, 1, 6, 4)), ValueError, "key has shape .* and value .*; they must be equal"),
    "head_dim": (dict(size=(2, 1, 6, 8)), ValueError, "these rows have head_dim=8, but the cache head_dim=4"),
    "rows": (dict(query=torch.ones(2, 2, 6, 4)), ValueError, "key has seq 1 and query 2"),
    "three dimensions": (dict(size=(2, 6, 4)), ValueError, r"\(batch, seq, heads, head_dim\) is needed"),
    "dtype": (dict(dtype=torch.float64), ValueError, "these rows have dtype=torch.float64, but the cache dtype=torch.float32"),
    "integers": (dict(dtype=torch.int64), TypeError, "query is torch.int64; one of"),
    "device": (dict(device="meta"), ValueError, "these rows have device=meta, but the cache device=cpu"),
    "sink": (dict(sink=torch.zeros(5)), ValueError, r"sink has shape \(5,\); \(heads,\) = \(6,\) is needed"),
    "gradient of a sink": (dict(sink=torch.zeros(6, requires_grad=True)), ValueError, "a tensor requires a gradient"),
    "infinite scores": (dict(scale=1e35), ValueError, r"scale=1e\+35 would make infinite scores in float32; at most 1e\+30"),
    "scale": (dict(scale="large"), TypeError, "scale='large' is a str"),
    "backend": (dict(backend="flash9"), ValueError, "backend='flash9' is not a known backend"),
    "gradient": (dict(value=torch.ones(2, 1, 3, 4, requires_grad=True)), ValueError, r"decode under torch\.no_grad\(\)"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_leaves_the_cache_as_it_was(change: dict[str, Any], error: type[Exception], message: str) -> None:
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
        (("dense", 3), TypeError, "pattern='dense' is a str; a dilkit.Pattern is needed"),
        ((Pattern.dense(), 0), ValueError, "kv_heads=0 must be at least 1"),
        ((Pattern.dense(), 2.0), TypeError, "kv_heads=2.0 is a float"),
        ((Pattern([4], [2], head_shard=(2, 4)), 3), ValueError, "leaves 2 key/value heads, but there are 3"),
    ],
)
def test_a_cache_that_cannot_be(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DilatedCache(*arguments)


class Refusing(Reference):
    limits = Limits(dtypes=frozenset({"float32"}))


def test_a_backend_that_refuses_later_rows_leaves_the_cache_as_it_was() -> None:
    pattern, rows = Pattern([4, 12], [1, 3]), tensors(3)
    cache = DilatedCache(pattern, 3)
    decoded(cache, rows, [5])
    with registered(Refusing(name="refusing")), pytest.raises(NoBackendError, match="computes float32"):
        cache.attend(*(x[:, 5:30] for x in rows), backend="refusing")  # rows 12 to 29 see none before them, and need a backend
    assert cache.seen == 5
    exact, _ = oracle_attention(*rows, pattern, is_causal=True)
    torch.testing.assert_close(decoded(cache, rows, [SEQ]), exact[:, 5:])


def test_ranges_beyond_the_query_heads_are_refused() -> None:
    cache = DilatedCache(Pattern([4], [2], heads=[(4, 8)]), 3)
    with pytest.raises(ValueError, match="reaches past the 6 heads"):
        cache.attend(*tensors(3))
    assert (cache.seen, cache.nbytes) == (0, 0)


@pytest.mark.parametrize(("steps", "longest"), [(1_100, 512), pytest.param(100_000, 4096, marks=pytest.mark.slow)])
def test_bytes_are_flat_and_rows_exact_at_every_length(steps: int, longest: int) -> None:
    """Rows against those of `dilated_attention` over all of them."""
    pattern, kept = Pattern([64, longest // 8, longest], [1, 4, 16]), 64 + longest // 32 + longest // 16
    query, key, value = (torch.randn(1, steps, heads, 8) for heads in (4, 2, 2))
    cache, found, sizes = DilatedCache(pattern, 2), [], []
    for i in range(steps):
        found.append(cache.attend(*(x[:, i : i + 1] for x in (query, key, value))))
        sizes.append(cache.nbytes)
    exact = dilated_attention(*(x.double() for x in (query, key, value)), pattern, is_causal=True)
    torch.testing.assert_close(torch.cat(found, 1).double(), exact, atol=1e-5, rtol=1e-5)
    assert sizes == [*sizes[:longest] * 25][:steps]
    assert max(sizes) < cache.allocated_nbytes == 2 * 2 * kept * 8 * 4
