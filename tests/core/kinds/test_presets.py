"""Published patterns by name, against what their papers say of pairs of tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dilkit import Pattern

SEQ = 37


def _bigbird(i: int, j: int) -> bool:
    a, b = i // 4, j // 4
    return abs(a - b) < 2 or a in (0, 9) or b in (0, 9)


PRESETS: dict[str, tuple[Pattern, Callable[[int, int], bool]]] = {
    "mistral": (Pattern.mistral(6), lambda i, j: i - j < 6),
    "streaming_llm": (Pattern.streaming_llm(6, sinks=3), lambda i, j: i - j < 6 or j < 3),
    "sparse_transformer": (Pattern.sparse_transformer(7), lambda i, j: i - j <= 7 or (i - j) % 7 == 0),
    "longformer": (Pattern.longformer(8, 2), lambda i, j: abs(i - j) <= 4 or i < 2 or j < 2),
    "bigbird": (Pattern.bigbird(SEQ, 4, random_blocks=0), _bigbird),
}


CAUSAL = ("mistral", "streaming_llm", "sparse_transformer")
"""Those that their papers define for causal attention alone."""
CASES = [(name, is_causal) for name in PRESETS for is_causal in (True, False) if is_causal or name not in CAUSAL]


@pytest.mark.parametrize(("name", "is_causal"), CASES)
def test_a_preset_is_what_its_paper_says(name: str, is_causal: bool) -> None:
    pattern, sees = PRESETS[name]
    expected = [[int(sees(i, j) and (j <= i or not is_causal)) for j in range(SEQ)] for i in range(SEQ)]
    assert torch.equal(pattern.count(SEQ, 2, is_causal=is_causal), torch.tensor([expected] * 2, dtype=torch.int32))
