"""The fused gradients of the CPU kernel over many chunks of keys and queries, as long sequences have them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dilkit import Pattern, plan
from dilkit.backends.native.backend import _chunks
from dilkit.testing.conformance import check
from dilkit.testing.problems import Case

PATTERNS = {
    "nested": Pattern([32, 64, 256], [1, 2, 4]),
    "not nested": Pattern([30, 77, 200], [1, 2, 3], offset="block"),
    "once": Pattern([16, 100], [1, 4], overlap="once"),
    "dense": Pattern.dense(),
}


@pytest.fixture(params=[(16, 16), (48, 32)], ids=["16 rows", "48 rows"])
def short_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    chunk_rows, block_rows = request.param
    monkeypatch.setattr("dilkit.backends.native.backend.CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr("dilkit.backends.native.backend.BLOCK_ROWS", block_rows)
    plan.cache_clear()
    yield
    plan.cache_clear()


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("mask", ["none", "random"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_gradients_of_many_chunks(pattern: Pattern, mask: str, is_causal: bool, dtype: str) -> None:
    sizes = dict(seq=257, heads=4, kv_heads=2, head_dim=20, batch=2)
    case = Case(feature="chunks", variant="many", pattern=pattern, mask=mask, is_causal=is_causal, dtype=dtype, **sizes)
    assert _chunks(case.problem())[0] >= 4
    result = check("native", case)
    assert result.verdict == "passed", "; ".join(result.reasons)
