"""The merge of partial results in the sdpa backend."""

from __future__ import annotations

import math

import pytest
import torch

from dilkit.backends.sdpa.accumulators import merge_lse


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_lse_and_shares_are_the_same_wherever_a_tensor_is_cut(dtype: torch.dtype) -> None:
    old, new = (torch.randn(5000, dtype=dtype) * 5 for _ in range(2))
    old[::7] = new[::5] = -math.inf
    whole = merge_lse(old, new)
    torch.testing.assert_close(whole[0], torch.logaddexp(old, new))
    for step in (1, 3, 13, 1250, 1667):
        parts = [merge_lse(a, b) for a, b in zip(old.split(step), new.split(step), strict=True)]
        assert all(torch.equal(x, torch.cat(cut)) for x, cut in zip(whole, zip(*parts, strict=True), strict=True))
