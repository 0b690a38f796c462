"""Dropout over ranks: the weights that one rank drops, whatever shards, schedules and orders, with the seed of rank 0."""

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
from dilkit.comm import PlanMismatch, RingDilatedAttention, arguments, ring_dilated_attention, run_threads
from dilkit.comm.transports.threads import ThreadComm
from dilkit.op.dropout import Dropout
from dilkit.oracle import oracle_attention

PATTERN = Pattern([8, 24, 97], [1, 3, 5], tail="zeros")
P, SEED = 0.4, 2**62 + 12345


def tensors(seq: int, heads: Heads, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn((2, seq, h, 4), generator=draw, dtype=torch.float64) for h in (heads[0], heads[1], heads[1])]


def loss(out: Tensor, lse: Tensor) -> Tensor:
    return out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).square().sum()


def over_ranks(whole: list[Tensor], pattern: Pattern, cuts: tuple[int, ...], **options: Any) -> list[Tensor]:
    """`out`, `lse` `(batch, seq, heads)` and the gradients of query, key and value, of all ranks together."""

    def on_rank(comm: ThreadComm) -> list[Tensor]:
        rows = slice(*cuts[comm.rank : comm.rank + 2])
        mine = [x[:, rows].clone().requires_grad_() for x in whole]
        out, lse = ring_dilated_attention(*mine, pattern, comm, dropout_p=P, return_lse=True, **options)
        return [out.detach(), lse.detach().transpose(1, 2), *torch.autograd.grad(loss(out, lse), mine)]

    with pytest.MonkeyPatch.context() as patch:  # the threads share torch's generator: which draws first is left to chance
        patch.setattr(arguments, "draw_seed", lambda: torch.tensor(SEED))
        found = zip(*run_threads(len(cuts) - 1, on_rank, timeout=30), strict=True)
    return [torch.cat(parts, 1) for parts in found]


def on_one(attend: Any, whole: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in whole]
    out, lse = attend(*leaves)
    return [out.detach(), lse.detach().transpose(1, 2), *torch.autograd.grad(loss(out, lse), leaves)]


def exactly(pattern: Pattern, first_head: int = 0, **options: Any) -> Any:
    dropout = Dropout(P, SEED, first_head=first_head)
    return lambda q, k, v: oracle_attention(q, k, v, pattern, dropout=dropout, **options)


def close(found: list[Tensor], want: list[Tensor]) -> None:
    for got, right in zip(found, want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-11)


@settings(max_examples=12, deadline=None)
@given(patterns_with_heads(), st.integers(4, 40), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 99))
def test_any_pattern(
    drawn: tuple[Pattern, Heads], seq: int, world_size: int, fuse_branches: bool, is_causal: bool, seed: int
) -> None:
    (pattern, heads), cuts = drawn, uneven_cuts(seq, world_size, seed)
    first = 0 if pattern.head_shard is None else pattern.head_shard[0] * heads[0] // heads[1]
    whole = tensors(seq, heads, seed)
    found = over_ranks(whole, pattern, cuts, fuse_branches=fuse_branches, is_causal=is_causal)
    close(found, on_one(exactly(pattern, first, is_causal=is_causal), whole))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("schedule", ["scatter", "gather", "ring"])
def test_every_schedule(schedule: str, is_causal: bool) -> None:
    whole = tensors(61, (6, 3), 0)
    found = over_ranks(whole, PATTERN, even_cuts(61, 3), schedule=schedule, is_causal=is_causal)
    close(found, on_one(exactly(PATTERN, is_causal=is_causal), whole))


@pytest.mark.parametrize("masked", [False, True])
def test_along_token_orders(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, orders = Pattern([12, 48], [1, 3]), [order((6, 8)), order((6, 8), "snake")]
    whole, mask, cuts = tensors(48, (4, 2), 1), torch.arange(48).expand(2, -1) % 3 == 0, even_cuts(48, 3)

    def on_rank(comm: ThreadComm) -> Tensor:
        rows = slice(*cuts[comm.rank : comm.rank + 2])
        options: dict[str, Any] = dict(key_padding_mask=mask[:, rows]) if masked else {}
        mine = [x[:, rows] for x in whole]
        out = ring_dilated_attention(*mine, pattern, comm, dropout_p=P, order=orders, **options)
        assert isinstance(out, Tensor)
        return out

    monkeypatch.setattr(arguments, "draw_seed", lambda: torch.tensor(SEED))
    monkeypatch.setattr("dilkit.op.arguments.draw_seed", lambda: torch.tensor(SEED))
    options: dict[str, Any] = dict(key_padding_mask=mask) if masked else {}
    want = ordered_dilated_attention(*whole, pattern, orders, dropout_p=P, **options)
    torch.testing.assert_close(torch.cat(run_threads(3, on_rank, timeout=30), 1), want, rtol=1e-11, atol=1e-11)


def test_the_seed_is_that_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cuts = tensors(24, (2, 2), 0), even_cuts(24, 3)
    seeds: dict[int, list[int]] = {}

    def on_rank(comm: ThreadComm) -> Tensor:
        import threading

        mine = seeds.setdefault(threading.get_ident(), [])
        mine.append(comm.rank)
        out = ring_dilated_attention(*(x[:, slice(*cuts[comm.rank : comm.rank + 2])] for x in whole), PATTERN, comm, dropout_p=P)
        assert isinstance(out, Tensor)
        return out

    def own_seed() -> Tensor:
        import threading

        return torch.tensor(SEED + 7 * seeds[threading.get_ident()][-1])

    monkeypatch.setattr(arguments, "draw_seed", own_seed)
    found = torch.cat(run_threads(3, on_rank, timeout=30), 1)
    torch.testing.assert_close(found, exactly(PATTERN)(*whole)[0], rtol=1e-11, atol=1e-11)


def test_a_module_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = MultiheadDilatedAttention(24, 4, DilatedAttention(PATTERN)).double().state_dict()
    monkeypatch.setattr(arguments, "draw_seed", lambda: torch.tensor(SEED))

    def on_rank(comm: ThreadComm) -> Tensor:
        layer = MultiheadDilatedAttention(24, 4, RingDilatedAttention(PATTERN, comm), dropout=P).double()
        layer.load_state_dict(weights)
        x = torch.randn(1, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        out, _ = layer(x[:, slice(*even_cuts(24, comm.size)[comm.rank : comm.rank + 2])])
        return out.detach()

    (want,), several = run_threads(1, on_rank, timeout=30), run_threads(3, on_rank, timeout=30)
    torch.testing.assert_close(torch.cat(several, 1), want, rtol=1e-12, atol=1e-12)


def test_ranks_agree_on_the_probability() -> None:
    whole = tensors(16, (4, 4), 0)

    def on_rank(comm: ThreadComm) -> str:
        rows = slice(8 * comm.rank, 8 * comm.rank + 8)
        with pytest.raises(PlanMismatch, match="dropout_p") as caught:
            ring_dilated_attention(*(x[:, rows] for x in whole), PATTERN, comm, dropout_p=0.1 * (1 + comm.rank))
        return str(caught.value)

    assert all("dropout_p" in text for text in run_threads(2, on_rank, timeout=30))
