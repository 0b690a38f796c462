"""Gradients of the CPU kernel over many chunks."""

import pytest
from helpers.pairwise import every_pair

from dilkit import BlockSparse, DilatedSegment, Neighborhood, Pattern, SlidingWindow, Strided, plan
from dilkit.backends.native.backend import _encode
from dilkit.problem import DTYPES
from dilkit.testing.conformance import check
from dilkit.testing.problems import Case

PATTERNS = {
    "nested": Pattern([32, 64, 256], [1, 2, 4]),
    "not nested": Pattern([30, 77, 200], [1, 2, 3], offset="block"),
    "once": Pattern([16, 100], [1, 4], overlap="once"),
    "dense": Pattern.dense(),
    "classes": Pattern.of(SlidingWindow(200, 2), Strided(4)),
    "mix once": Pattern.of(DilatedSegment(77, 2), SlidingWindow(40), BlockSparse.bigbird(13, 20), overlap="once"),
    "neighborhood": Pattern.of(Neighborhood((6, 43), (3, 9), (1, 2)), SlidingWindow(5)),
}


BLOCK_ROWS = {16: 16, 48: 32}


@pytest.fixture
def short_chunks(chunk_rows, monkeypatch):
    monkeypatch.setattr("dilkit.backends.native.backend.CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr("dilkit.backends.native.backend.BLOCK_ROWS", BLOCK_ROWS[chunk_rows])
    monkeypatch.setattr("dilkit.backends.native.backend.ROW_STEP", 16)
    plan.cache_clear()
    yield
    plan.cache_clear()


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    ("pattern", "chunk_rows", "mask", "is_causal", "dtype"),
    every_pair(PATTERNS, BLOCK_ROWS, ["none", "random", "packed"], [False, True], DTYPES),
)
def test_gradients_of_many_chunks(pattern, mask, is_causal, dtype):
    sizes = dict(seq=258, heads=4, kv_heads=2, head_dim=20, batch=2)
    if mask == "packed":
        lengths = (258, 258) if pattern == "neighborhood" else (5, 170, 0, 1, 258, 17)
        mask, sizes = "none", sizes | dict(seq=sum(lengths), batch=1, lengths=lengths)
    case = Case(feature="chunks", variant="many", pattern=PATTERNS[pattern], mask=mask, is_causal=is_causal, dtype=dtype, **sizes)
    assert case.lengths or _encode(case.problem()).chunks >= 4
    result = check("native", case)
    assert result.verdict == "passed", "; ".join(result.reasons)
