"""Rows that are stored in another dtype: what a cache returns is the attention over the rounded keys and values, exactly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.pairwise import every_pair
from torch import Tensor

from dilkit import Alibi, DilatedCache, DilatedSegment, GlobalTokens, Pattern, SlidingWindow, Strided
from dilkit.decoding.stored import decoded, encoded
from dilkit.oracle import oracle_attention
from dilkit.problem import STORED

SEQ = 45
KINDS = {
    "segments": Pattern([4, 8, 16], [1, 2, 4]),
    "once": Pattern([4, 6, 20], [1, 2, 3], overlap="once"),
    "ranges": Pattern([5, 10], [1, 2], heads=[(0, 3), None]),
    "window": Pattern.of(SlidingWindow(7, 2), GlobalTokens([0, 5])),
    "mix": Pattern.of(SlidingWindow(5), Strided(4), DilatedSegment(8, 2), GlobalTokens(3)),
}
PAIRS = [(dtype, stored) for dtype in STORED for stored in STORED[dtype]]
STEPS: dict[str, list[int]] = {
    "steps": [*range(1, SEQ + 1)],
    "chunks": [16, 17, 20, 31, 32, SEQ],
    "few rows": [*range(3, SEQ + 1, 3)],
}
LIMITS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}
"""In fp32, scores up to 40 are off by some 2e-6, and so are weights; a row that is stored wrongly is off by 4e-3."""


def rows(dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    query, kept = torch.randn(2, SEQ, 4, 10), 3 * torch.randn(2, 2, SEQ, 2, 10)
    return query.to(getattr(torch, dtype)), *kept.to(getattr(torch, dtype)).unbind()


def rounded(x: Tensor, stored: str) -> Tensor:
    return decoded(encoded(x, getattr(torch, stored)), torch.float64)


@pytest.mark.parametrize(("dtypes", "kind", "cuts", "backend"), every_pair(PAIRS, KINDS, STEPS, ["native", "reference"]))
def test_rows_are_the_oracles_over_rounded_rows(dtypes: tuple[str, str], kind: str, cuts: str, backend: str) -> None:
    (dtype, stored), pattern = dtypes, KINDS[kind]
    query, key, value = rows(dtype)
    cache, bias = DilatedCache(pattern, 2, stored=stored, rollback=3), Alibi(torch.rand(4))
    right = oracle_attention(query.double(), rounded(key, stored), rounded(value, stored), pattern, is_causal=True, bias=bias)[0]
    for stop in STEPS[cuts]:
        seen = slice(cache.seen, stop)
        out = cache.attend(query[:, seen], key[:, seen], value[:, seen], bias=bias, backend=backend)
        assert out.dtype == query.dtype
        torch.testing.assert_close(out.double(), right[:, seen], atol=LIMITS[dtype], rtol=LIMITS[dtype])
        if stop in (17, 31):  # back, also over where a segment begins
            cache.crop(stop - 2)
            again = cache.attend(*(x[:, stop - 2 : stop] for x in (query, key, value)), bias=bias, backend=backend)
            torch.testing.assert_close(again.double(), right[:, stop - 2 : stop], atol=LIMITS[dtype], rtol=LIMITS[dtype])


@pytest.mark.parametrize("head_dim", [1, 5, 6, 7])
def test_a_scale_may_lie_anywhere_in_memory(head_dim: int) -> None:
    """Of a branch that keeps one row, it is behind `head_dim` bytes."""
    query, key, value = torch.randn(3, 1, 2, 1, head_dim).unbind()
    cache, steps = DilatedCache(Pattern([8], [1]), 1, stored="int8"), []
    for i in range(2):
        steps.append(cache.attend(query[:, i : i + 1], key[:, i : i + 1], value[:, i : i + 1], backend="reference"))
    right = oracle_attention(query, rounded(key, "int8"), rounded(value, "int8"), Pattern([8], [1]), is_causal=True)[0]
    torch.testing.assert_close(torch.cat(steps, 1).double(), right, atol=1e-5, rtol=1e-5)


def test_a_number_is_off_by_half_the_scale_at_most() -> None:
    x = torch.randn(500, 64) * torch.logspace(-30, 30, 500)[:, None]
    scale = x.abs().amax(-1, keepdim=True) / 127
    off = (decoded(encoded(x, torch.int8), torch.float64) - x.double()).abs()
    assert (off <= scale.double() * (0.5 + 1e-5)).all()  # and what float32 rounds a product by
    assert ((decoded(encoded(x, torch.bfloat16), torch.float64) - x.double()).abs() <= 2**-8 * x.double().abs()).all()


def test_numbers_that_are_not_finite_make_a_row_of_nan() -> None:
    x = torch.zeros(4, 5)
    x[1, 2], x[2, 3] = torch.nan, torch.inf
    back = decoded(encoded(x, torch.int8), torch.float32)
    assert back[1:3].isnan().all()
    assert (back[[0, 3]] == 0).all()


@pytest.mark.parametrize(("stored", "share"), [("int8", 0.27), ("bfloat16", 0.5)])
def test_the_memory(stored: str, share: float) -> None:
    row, sizes = torch.randn(1, 40, 2, 64), []
    for kept in (None, stored):
        cache = DilatedCache(Pattern([32, 64], [1, 2]), 2, stored=kept)
        cache.attend(row, row, row)
        cache.attend(*[row[:, :9]] * 3)
        sizes.append((cache.nbytes, cache.allocated_nbytes))
    assert all(small <= share * plain for plain, small in zip(*sizes, strict=True))


@pytest.mark.parametrize("stored", ["int8", "bfloat16"])
def test_beams_and_saved_states(stored: str) -> None:
    query, key, value = rows("float32")
    pattern, more = KINDS["mix"], dict(stored=stored)
    cache = DilatedCache(pattern, 2, stored=stored)
    cache.attend(query[:, :20], key[:, :20], value[:, :20])
    state = cache.state_dict()
    restored = DilatedCache(pattern, 2, stored=stored)
    restored.load_state_dict(state)
    twin = copy.copy(cache)
    following = [x[:, 20:21] for x in (query, key, value)]
    out = cache.attend(*following)
    assert torch.equal(restored.attend(*following), out)
    twin.reorder([1, 0])
    torch.testing.assert_close(twin.attend(*(x.flip(0) for x in following)), out.flip(0))
    for other in (None, *({"int8", "bfloat16"} - {stored})):
        with pytest.raises(
            ValueError, match=rf"state is of a cache with stored={more['stored']}, but this one has stored={other}"
        ):
            DilatedCache(pattern, 2, stored=other).load_state_dict(state)
    for change in (dict(dtype="float64"), dict(dtype=3)):
        with pytest.raises((TypeError, ValueError), match="state: dtype="):
            DilatedCache(pattern, 2, stored=stored).load_state_dict(state | change)  # type: ignore[operator]
    plain = DilatedCache(pattern, 2)
    plain.attend(*following)
    with pytest.raises(ValueError, match="state is of a cache with stored=None"):
        restored.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("stored", "dtype", "error", "message"),
    [
        ("int4", "float32", ValueError, "stored='int4' is not known; choose from 'bfloat16', 'int8'"),
        (8, "float32", ValueError, "stored=8 is not known"),
        (
            "int8",
            "float64",
            TypeError,
            "query is torch.float64, but the cache has stored='int8', which is for float32, bfloat16, float16",
        ),
        ("bfloat16", "float16", TypeError, "stored='bfloat16', which is for float32"),
    ],
)
def test_what_is_stored_has_to_fit(stored: Any, dtype: str, error: type[Exception], message: str) -> None:
    row = torch.zeros(1, 1, 2, 8, dtype=getattr(torch, dtype))
    with pytest.raises(error, match=message):
        DilatedCache(KINDS["segments"], 2, stored=stored).attend(row, row, row)
