"""Problems, patterns and comparisons of the sdpa backend."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from helpers.strategies import Heads, mixes_with_heads, patterns_with_heads
from hypothesis import strategies as st
from torch import Tensor

from dilkit import Pattern
from dilkit.backends.sdpa.accumulators import merge_lse
from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.sdpa.grids import FORMS, ProblemGrid
from dilkit.device import Device
from dilkit.inputs import Inputs
from dilkit.oracle import oracle_attention
from dilkit.pattern.lowering import lower
from dilkit.problem import Problem

LONGNET = Pattern([64, 128, 256], [1, 2, 4])
views_of_heads = (mixes_with_heads() | patterns_with_heads()).filter(lambda drawn: lower(drawn[0], 40, *drawn[1]).names <= FORMS)
other_queries = st.none() | st.tuples(st.integers(1, 40), st.integers(-30, 40))
"""Number of queries, and the position of the first; or None."""


def problem(device: str = "cpu", dtype: str = "float32", **options) -> Problem:
    sizes = dict(pattern=LONGNET, seq=256, heads=8, head_dim=64)
    return Problem(**{**sizes, **options}, dtype=dtype, device=Device.assume(device))


def tensors(seq: int, heads: Heads, dtype: torch.dtype = torch.float64, batch: int = 1, width: int = 8) -> list[Tensor]:
    counts = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(batch, seq, count, width, dtype=dtype) for count in counts]


def agrees_with_the_oracle(
    backend: SDPA,
    pattern: Pattern,
    seq: int,
    heads: Heads,
    masked: bool = False,
    batch: int = 1,
    queries: tuple[int, int] | None = None,
    **options,
) -> bool:
    """Compare results and gradients in fp64; return False where the backend refuses the call. `queries`: as `form_grids`."""
    q, k, v, dout = tensors(seq, heads, batch=batch)
    mask = torch.rand(batch, seq) < 0.6 if masked else None
    posed = Problem.of(q, k, pattern, key_padding_mask=masked, requires_grad=True, **options)
    if queries is not None:
        q, dout = (torch.randn(batch, queries[0], heads[0], 8, dtype=q.dtype) for _ in range(2))
        posed, options = replace(posed, queries=queries[0], query_offset=queries[1]), options | dict(query_offset=queries[1])
    if backend.refusals(posed):
        return False
    out, lse = backend.forward(Inputs(q, k, v, key_padding_mask=mask), posed)
    found = backend.backward(dout, Inputs(q, k, v, key_padding_mask=mask), out, lse, posed)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want, want_lse = oracle_attention(*leaves, pattern, key_padding_mask=mask, **options)
    torch.testing.assert_close((out, lse), (want.detach(), want_lse.detach()), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found, torch.autograd.grad(want, leaves, dout), rtol=1e-10, atol=1e-12)
    return True


def problems_of(grid: ProblemGrid) -> Iterator[tuple[int, int, Any, Any, Any]]:
    """Yield query head, key/value head, queries, keys, and seen pairs of every problem of a grid."""
    kept = np.ones((grid.rows, grid.keys), dtype=bool)
    kept = {"all": kept, "earlier": np.tril(kept), "later": np.triu(kept)}[grid.seen]
    for index in product(*(range(axis.size) for axis in grid.axes)):
        row, head, kv_head = (
            getattr(grid, field) + sum(i * getattr(axis, field) for i, axis in zip(index, grid.axes, strict=True))
            for field in ("row", "head", "kv_head")
        )
        rows, keys = (first + np.arange(n) * grid.row_step for first, n in ((row, grid.rows), (row + grid.key_shift, grid.keys)))
        yield head, kv_head, rows, keys, kept


class TorchRows:
    """Torch versions of the kernels that merge rows: in fp32 (fp64 for fp64), with the names of calls."""

    def __init__(self):
        self.calls: list[str] = []

    def merge(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor):
        """Rows whose lse is -inf are not read."""
        self.calls.append("merge")
        merged, share, part_share = merge_lse(lse, part_lse)
        old, new = (
            weight.unsqueeze(-1) * x.to(lse.dtype).where((weight > 0).unsqueeze(-1), 0.0)
            for weight, x in ((share, out), (part_share, part))
        )
        out.copy_(old + new)
        lse.copy_(merged)

    def add(self, total: Tensor, part: Tensor):
        """Problems of `total` that are the same memory get the sum of theirs."""
        self.calls.append("add")
        shared = next((dim for dim in (0, 1) if total.shape[dim] > 1 and not total.stride(dim)), None)
        wide = part.double() if part.element_size() == 8 else part.float()
        if shared is not None:
            first, *others = wide.split(1, shared)
            for other in others:
                first = first + other
            wide, total = first, total.narrow(shared, 0, 1)
        total.copy_(wide + total)
