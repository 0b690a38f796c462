"""`tail="zeros"` over ranks: the rank with a row adds the padding that the row sees, once, after partial results are merged."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.ranks import TURNS, assert_counted, assert_right, even_cuts, of_case, uneven_cuts
from helpers.strategies import Heads, patterns_with_heads
from hypothesis import given, settings
from hypothesis import strategies as st

from dilkit import Pattern, order, ordered_dilated_attention
from dilkit.comm import ring_dilated_attention, run_threads
from dilkit.comm.transports.threads import ThreadComm
from dilkit.oracle import oracle_attention
from dilkit.testing.problems import Case
from dilkit.testing.tensors import make_tensors

CASE = Case(
    feature="over ranks",
    variant="tail",
    pattern=Pattern([8, 24, 97], [1, 3, 5], offset="block", tail="zeros"),
    seq=61,
    heads=6,
    kv_heads=3,
    dtype="float64",
    mask="right",
)


@pytest.mark.parametrize("schedule", ["auto", "scatter", "gather", "ring"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_schedule(world_size: int, schedule: str) -> None:
    for cuts in (even_cuts(CASE.seq, world_size), uneven_cuts(CASE.seq, world_size)):
        found = of_case(CASE, cuts, schedule=schedule)
        assert_right(CASE, found)
        assert_counted(found, make_tensors(CASE))


@TURNS
@settings(max_examples=8, deadline=None)
@given(patterns_with_heads(), st.integers(4, 40), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_any_pattern_with_gradients_through_lse(
    turn: int, drawn: tuple[Pattern, Heads], seq: int, world_size: int, fuse_branches: bool, seed: int
) -> None:
    (pattern, heads), cuts = drawn, uneven_cuts(seq, world_size, seed)
    draw = torch.Generator().manual_seed(seed)
    whole = [torch.randn(2, seq, h, 4, generator=draw, dtype=torch.float64) for h in (heads[0], heads[1], heads[1])]
    dout, dlse = torch.randn(2, seq, heads[0], 4, dtype=torch.float64), torch.randn(2, heads[0], seq, dtype=torch.float64)
    is_causal = random.Random(seed).random() < 0.2

    def loss(out: torch.Tensor, lse: torch.Tensor, rows: slice) -> torch.Tensor:
        return (out * dout[:, rows]).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse[:, :, rows]).sum()

    def on_rank(comm: ThreadComm) -> list[torch.Tensor]:
        rows = slice(*cuts[comm.rank : comm.rank + 2])
        mine = [x[:, rows].clone().requires_grad_() for x in whole]
        options = dict(is_causal=is_causal, fuse_branches=fuse_branches)
        out, lse = ring_dilated_attention(*mine, pattern, comm, return_lse=True, **options)
        return [out.detach(), lse.detach().transpose(1, 2), *torch.autograd.grad(loss(out, lse, rows), mine)]

    found = [torch.cat(parts, 1) for parts in zip(*run_threads(world_size, on_rank, timeout=30), strict=True)]
    leaves = [x.clone().requires_grad_() for x in whole]
    out, lse = oracle_attention(*leaves, pattern, is_causal=is_causal)
    grads = torch.autograd.grad(loss(out, lse, slice(None)), leaves)
    for got, want in zip(found, (out, lse.transpose(1, 2), *grads), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_along_token_orders(masked: bool) -> None:
    pattern, orders = CASE.pattern, [order((6, 8)), order((6, 8), "snake")]
    whole = [torch.randn(1, 48, heads, 4, dtype=torch.float64) for heads in (6, 3, 3)]
    mask, cuts = torch.rand(1, 48) < 0.3 if masked else None, even_cuts(48, 3)

    def on_rank(comm: ThreadComm) -> torch.Tensor:
        rows = slice(*cuts[comm.rank : comm.rank + 2])
        part = None if mask is None else mask[:, rows]
        found = ring_dilated_attention(*(x[:, rows] for x in whole), pattern, comm, key_padding_mask=part, order=orders)
        assert isinstance(found, torch.Tensor)
        return found

    want = ordered_dilated_attention(*whole, pattern, orders, key_padding_mask=mask)
    torch.testing.assert_close(torch.cat(run_threads(3, on_rank, timeout=30), 1), want, rtol=1e-12, atol=1e-12)
