"""What the gallery of patterns says of reach, on patterns whose reach is plain."""

from __future__ import annotations

import pytest

from dilkit import BlockSparse, GlobalTokens, Pattern, SlidingWindow, Strided
from dilkit.tools.site.pattern_gallery import reach

REACHES = [
    (Pattern.dense(), True, (1, 0)),
    (Pattern.of(SlidingWindow(2)), True, (15, 0)),
    (Pattern.of(SlidingWindow(6)), False, (3, 0)),
    (Pattern.of(GlobalTokens(1)), False, (2, 0)),
    (Pattern([8, 16], [1, 4]), False, (2, 0)),
    (Pattern.sparse_transformer(4), True, (2, 0)),
    (Pattern.of(Strided(4)), False, (1, 16 * 12)),
    (Pattern.of(BlockSparse([[True, False], [False, True]], 8)), True, (1, 64)),
]


@pytest.mark.parametrize(("pattern", "is_causal", "expected"), REACHES, ids=lambda x: str(x))
def test_reach(pattern: Pattern, is_causal: bool, expected: tuple[int, int]) -> None:
    assert reach(pattern, 16, 4, is_causal) == expected
