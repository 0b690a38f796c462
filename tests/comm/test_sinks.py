"""Sinks over ranks: added once, by the rank with a row; gradients of all ranks add up to those of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import even_cuts, uneven_cuts
from helpers.strategies import Heads, patterns_with_heads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilkit import DilatedAttention, MultiheadDilatedAttention, Pattern, order, ordered_dilated_attention
from dilkit.comm import PlanMismatch, RingDilatedAttention, ring_dilated_attention, run_threads
from dilkit.comm.transports.threads import ThreadComm
from dilkit.oracle import oracle_attention

PATTERN = Pattern([8, 24, 97], [1, 3, 5], tail="zeros")


def tensors(seq: int, heads: Heads, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = [*((2, seq, h, 4) for h in (heads[0], heads[1], heads[1])), (heads[0],)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def loss(out: Tensor, lse: Tensor) -> Tensor:
    return out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).square().sum()


def over_ranks(whole: list[Tensor], pattern: Pattern, cuts: tuple[int, ...], **options: Any) -> list[Tensor]:
    """`out`, `lse` `(batch, seq, heads)` and the gradients of query, key, value and sink, of all ranks together."""
    *qkv, sink = whole

    def on_rank(comm: ThreadComm) -> list[Tensor]:
        rows = slice(*cuts[comm.rank : comm.rank + 2])
        mine = [*(x[:, rows].clone().requires_grad_() for x in qkv), sink.clone().requires_grad_()]
        out, lse = ring_dilated_attention(*mine[:3], pattern, comm, sink=mine[3], return_lse=True, **options)
        return [out.detach(), lse.detach().transpose(1, 2), *torch.autograd.grad(loss(out, lse), mine)]

    *rows, sinks = zip(*run_threads(len(cuts) - 1, on_rank, timeout=30), strict=True)
    return [*(torch.cat(parts, 1) for parts in rows), sum(sinks, torch.zeros_like(sink))]


def on_one(attend: Any, whole: list[Tensor]) -> list[Tensor]:
    """The same of one rank."""
    leaves = [x.clone().requires_grad_() for x in whole]
    out, lse = attend(*leaves)
    return [out.detach(), lse.detach().transpose(1, 2), *torch.autograd.grad(loss(out, lse), leaves)]


def close(found: list[Tensor], want: list[Tensor]) -> None:
    for got, right in zip(found, want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(patterns_with_heads(), st.integers(4, 40), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 99))
def test_any_pattern(
    drawn: tuple[Pattern, Heads], seq: int, world_size: int, fuse_branches: bool, is_causal: bool, seed: int
) -> None:
    (pattern, heads), cuts = drawn, uneven_cuts(seq, world_size, seed)
    whole = tensors(seq, heads, seed)
    found = over_ranks(whole, pattern, cuts, fuse_branches=fuse_branches, is_causal=is_causal)
    close(found, on_one(lambda q, k, v, s: oracle_attention(q, k, v, pattern, sink=s, is_causal=is_causal), whole))


@pytest.mark.parametrize("schedule", ["scatter", "gather", "ring"])
def test_every_schedule(schedule: str) -> None:
    whole = tensors(61, (6, 3), 0)
    found = over_ranks(whole, PATTERN, even_cuts(61, 3), schedule=schedule)
    close(found, on_one(lambda q, k, v, s: oracle_attention(q, k, v, PATTERN, sink=s), whole))


@pytest.mark.parametrize("masked", [False, True])
def test_along_token_orders(masked: bool) -> None:
    pattern = Pattern([12, 24, 48], [1, 3, 5], heads=[(0, 4), (0, 3), (1, 4)], tail="zeros")  # the last heads see sinks alone
    orders, whole, mask = [order((6, 8)), order((6, 8), "snake")], tensors(48, (6, 3), 1), torch.arange(48).expand(2, -1) % 3 == 0
    options: dict[str, Any] = dict(key_padding_mask=mask) if masked else {}
    *qkv, sink = whole
    cuts = even_cuts(48, 3)

    def on_rank(comm: ThreadComm) -> list[Tensor]:
        rows = slice(*cuts[comm.rank : comm.rank + 2])
        own, part = sink.clone().requires_grad_(), {name: x[:, rows] for name, x in options.items()}
        mine = [x[:, rows] for x in qkv]
        out, lse = ring_dilated_attention(*mine, pattern, comm, sink=own, order=orders, return_lse=True, **part)
        return [out.detach(), lse.detach().transpose(1, 2), *torch.autograd.grad(loss(out, lse), [own])]

    *results, sinks = zip(*run_threads(3, on_rank, timeout=30), strict=True)
    found = [*(torch.cat(parts, 1) for parts in results), sum(sinks, torch.zeros_like(sink))]

    def ordered(own: Tensor) -> Any:
        return ordered_dilated_attention(*qkv, pattern, orders, sink=own, return_lse=True, **options)

    close(found, on_one(ordered, [sink]))


def test_a_module_over_ranks() -> None:
    weights = MultiheadDilatedAttention(24, 4, DilatedAttention(PATTERN), sink=True).double().state_dict()

    def on_rank(comm: ThreadComm) -> tuple[Tensor, Tensor]:
        layer = MultiheadDilatedAttention(24, 4, RingDilatedAttention(PATTERN, comm), sink=True).double()
        layer.load_state_dict(weights | dict(sinks=torch.arange(4.0)))
        x = torch.randn(1, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        rows = slice(*even_cuts(24, comm.size)[comm.rank : comm.rank + 2])
        out, _ = layer(x[:, rows])
        return out.detach(), torch.autograd.grad(out.square().sum(), layer.sinks)[0]

    (want, grad), several = run_threads(1, on_rank, timeout=30)[0], run_threads(3, on_rank, timeout=30)
    torch.testing.assert_close(torch.cat([out for out, _ in several], 1), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(part for _, part in several), grad, rtol=1e-12, atol=1e-12)


def test_ranks_agree_on_whether_there_is_a_sink() -> None:
    whole = tensors(16, (4, 4), 0)

    def on_rank(comm: ThreadComm) -> str:
        rows = slice(8 * comm.rank, 8 * comm.rank + 8)
        with pytest.raises(PlanMismatch, match="sink") as caught:
            ring_dilated_attention(*(x[:, rows] for x in whole[:3]), PATTERN, comm, sink=whole[3] if comm.rank else None)
        return str(caught.value)

    assert all("sink" in text for text in run_threads(2, on_rank, timeout=30))
