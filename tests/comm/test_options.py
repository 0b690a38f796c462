"""Sinks, softcaps, dropout and tails of zeros over ranks: those of the whole, with gradients, whatever shards, schedules, orders.

A sink and the padding that a row sees are added once, by the rank with the row; weights are dropped by the seed of rank 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.ranks import TURNS, assert_counted, assert_right, even_cuts, of_case, uneven_cuts
from helpers.strategies import Heads, patterns_with_heads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilkit import DilatedAttention, MultiheadDilatedAttention, Pattern, order, ordered_dilated_attention
from dilkit.comm import PlanMismatch, RingDilatedAttention, arguments, ring_dilated_attention, run_threads
from dilkit.comm.transports.threads import ThreadComm
from dilkit.op.dropout import Dropout
from dilkit.oracle import oracle_attention
from dilkit.testing.problems import Case
from dilkit.testing.tensors import make_tensors

pytestmark = pytest.mark.usefixtures("on_one_core")

PATTERN = Pattern([8, 24, 97], [1, 3, 5], tail="zeros")
P, CAP, SEED = 0.4, 0.7, 2**62 + 12345
OPTIONS: dict[str, dict[str, Any]] = {
    "tail": {},
    "sink": dict(sink=True),
    "dropout": dict(dropout_p=P),
    "softcap": dict(softcap=CAP),
}
each_option = pytest.mark.parametrize("option", OPTIONS)


@pytest.fixture(autouse=True)
def _one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads share torch's generator: which draws first is left to chance."""
    monkeypatch.setattr(arguments, "draw_seed", lambda: torch.tensor(SEED))
    monkeypatch.setattr("dilkit.op.arguments.draw_seed", lambda: torch.tensor(SEED))


def tensors(seq: int, heads: Heads, seed: int, option: str) -> list[Tensor]:
    """Query, key, value, and a sink where the option is one."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [*((2, seq, h, 4) for h in (heads[0], heads[1], heads[1])), *([(heads[0],)] if option == "sink" else [])]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def results(attend: Callable[..., Any], leaves: Sequence[Tensor], option: str, **options: Any) -> list[Tensor]:
    """`out`, `lse` `(batch, seq, heads)`, and the gradients of a sum through both."""
    mine = [x.clone().requires_grad_() for x in leaves]
    asked = dict(sink=mine[3]) if option == "sink" else {}
    out, lse = attend(*mine[:3], **asked, **options)
    total = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).square().sum()
    return [out.detach(), lse.detach().transpose(1, 2), *torch.autograd.grad(total, mine)]


def over_ranks(whole: list[Tensor], pattern: Pattern, cuts: tuple[int, ...], option: str, **options: Any) -> list[Tensor]:
    """The results of all ranks together; each computes a part of the sink's gradient."""

    def on_rank(comm: ThreadComm) -> list[Tensor]:
        rows = slice(*cuts[comm.rank : comm.rank + 2])
        part = {name: x[:, rows] if name == "key_padding_mask" else x for name, x in options.items()}
        asked = OPTIONS[option] if option in ("dropout", "softcap") else {}

        def attend(*qkv: Tensor, **more: Any) -> Any:
            return ring_dilated_attention(*qkv, pattern, comm, return_lse=True, **asked, **part, **more)

        return results(attend, [x[:, rows] if x.dim() == 4 else x for x in whole], option)

    every = zip(*run_threads(len(cuts) - 1, on_rank, timeout=30), strict=True)
    return [torch.cat(parts, 1) if parts[0].dim() > 1 else sum(parts, torch.zeros_like(parts[0])) for parts in every]


def on_one(whole: list[Tensor], pattern: Pattern, option: str, first_head: int = 0, **options: Any) -> list[Tensor]:
    """What the oracle gives."""
    asked: dict[str, Any] = dict(softcap=CAP) if option == "softcap" else {}
    if option == "dropout":
        asked = dict(dropout=Dropout(P, SEED, first_head=first_head))
    return results(lambda *qkv, **more: oracle_attention(*qkv, pattern, **asked, **options, **more), whole, option)


def close(computed: list[Tensor], want: list[Tensor]) -> None:
    for got, right in zip(computed, want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-11)


@TURNS
@each_option
@settings(max_examples=8, deadline=None)
@given(patterns_with_heads(), st.integers(4, 40), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 99))
def test_any_pattern(
    option: str,
    turn: int,
    drawn: tuple[Pattern, Heads],
    seq: int,
    world_size: int,
    fuse_branches: bool,
    is_causal: bool,
    seed: int,
) -> None:
    (pattern, heads), cuts = drawn, uneven_cuts(seq, world_size, seed)
    first = 0 if pattern.head_shard is None else pattern.head_shard[0] * heads[0] // heads[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "draw_seed", lambda: torch.tensor(SEED))
        whole = tensors(seq, heads, seed, option)
        computed = over_ranks(whole, pattern, cuts, option, fuse_branches=fuse_branches, is_causal=is_causal)
    close(computed, on_one(whole, pattern, option, first, is_causal=is_causal))


@each_option
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("schedule", ["scatter", "gather", "ring"])
def test_every_schedule(schedule: str, is_causal: bool, option: str) -> None:
    whole = tensors(61, (6, 3), 0, option)
    computed = over_ranks(whole, PATTERN, even_cuts(61, 3), option, schedule=schedule, is_causal=is_causal)
    close(computed, on_one(whole, PATTERN, option, is_causal=is_causal))


@pytest.mark.parametrize("schedule", ["auto", "scatter", "gather", "ring"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_tails_send_what_is_planned(world_size: int, schedule: str) -> None:
    pattern = Pattern([8, 24, 97], [1, 3, 5], offset="block", tail="zeros")
    sizes: dict[str, Any] = dict(seq=61, heads=6, kv_heads=3, dtype="float64", mask="right")
    case = Case(feature="over ranks", variant="tail", pattern=pattern, **sizes)
    for cuts in (even_cuts(case.seq, world_size), uneven_cuts(case.seq, world_size)):
        computed = of_case(case, cuts, schedule=schedule)
        assert_right(case, computed)
        assert_counted(computed, make_tensors(case))


@pytest.mark.parametrize("option", ["tail", "sink", "dropout"])
@pytest.mark.parametrize("masked", [False, True])
def test_along_token_orders(masked: bool, option: str) -> None:
    pattern = Pattern([12, 24, 48], [1, 3, 5], heads=[(0, 4), (0, 3), (1, 4)], tail="zeros")  # the last heads see sinks alone
    orders, whole = [order((6, 8)), order((6, 8), "snake")], tensors(48, (6, 3), 1, option)
    options: dict[str, Any] = dict(key_padding_mask=torch.arange(48).expand(2, -1) % 3 == 0) if masked else {}
    asked = dict(dropout_p=P) if option == "dropout" else {}

    def attend(*qkv: Tensor, **more: Any) -> Any:
        return ordered_dilated_attention(*qkv, pattern, orders, return_lse=True, **asked, **options, **more)

    close(over_ranks(whole, pattern, even_cuts(48, 3), option, order=orders, **options), results(attend, whole, option))


def test_softcap_of_a_module_along_an_order() -> None:
    along, whole, cuts = order((6, 8)), tensors(48, (4, 2), 1, "softcap"), even_cuts(48, 3)

    def on_rank(comm: ThreadComm) -> Tensor:
        rows = slice(*cuts[comm.rank : comm.rank + 2])
        out = RingDilatedAttention(PATTERN, comm, order=along, softcap=CAP)(*(x[:, rows] for x in whole))
        assert isinstance(out, Tensor)
        return out

    want, _ = oracle_attention(*(along.apply(x) for x in whole), PATTERN, softcap=CAP)
    close([torch.cat(run_threads(3, on_rank, timeout=30), 1)], [along.restore(want)])


def test_the_seed_is_that_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cuts = tensors(24, (2, 2), 0, "dropout"), even_cuts(24, 3)
    ranks: dict[int, list[int]] = {}

    def on_rank(comm: ThreadComm) -> Any:
        ranks.setdefault(threading.get_ident(), []).append(comm.rank)
        return ring_dilated_attention(*(x[:, slice(*cuts[comm.rank : comm.rank + 2])] for x in whole), PATTERN, comm, dropout_p=P)

    monkeypatch.setattr(arguments, "draw_seed", lambda: torch.tensor(SEED + 7 * ranks[threading.get_ident()][-1]))
    close([torch.cat(run_threads(3, on_rank, timeout=30), 1)], on_one(whole, PATTERN, "dropout")[:1])


@pytest.mark.parametrize("option", ["sink", "dropout"])
def test_a_module_over_ranks(option: str) -> None:
    options: dict[str, Any] = dict(sink=True) if option == "sink" else dict(dropout=P)
    weights = MultiheadDilatedAttention(24, 4, DilatedAttention(PATTERN), **options).double().state_dict()
    weights |= dict(sinks=torch.arange(4.0)) if option == "sink" else {}

    def on_rank(comm: ThreadComm) -> tuple[Tensor, Tensor]:
        layer = MultiheadDilatedAttention(24, 4, RingDilatedAttention(PATTERN, comm), **options).double()
        layer.load_state_dict(weights)
        x = torch.randn(1, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        out, _ = layer(x[:, slice(*even_cuts(24, comm.size)[comm.rank : comm.rank + 2])])
        (grad,) = torch.autograd.grad(out.square().sum(), layer.sinks if option == "sink" else layer.out_proj.weight)
        return out.detach(), grad

    (want, grad), several = run_threads(1, on_rank, timeout=30)[0], run_threads(3, on_rank, timeout=30)
    close([torch.cat([out for out, _ in several], 1), sum((part for _, part in several), 0 * grad)], [want, grad])


@pytest.mark.parametrize("option", ["sink", "dropout_p", "softcap"])
def test_ranks_agree_on_it(option: str) -> None:
    whole = tensors(16, (4, 4), 0, "sink")

    def on_rank(comm: ThreadComm) -> str:
        rows = slice(8 * comm.rank, 8 * comm.rank + 8)
        given: dict[str, Any] = dict(sink=whole[3] if comm.rank else None, dropout_p=0.1 * (1 + comm.rank))
        given["softcap"] = CAP if comm.rank else None
        with pytest.raises(PlanMismatch, match=option) as caught:
            ring_dilated_attention(*(x[:, rows] for x in whole[:3]), PATTERN, comm, **{option: given[option]})
        return str(caught.value)

    assert all(option in text for text in run_threads(2, on_rank, timeout=30))
