"""Biases over ranks: those of the whole, with gradients, whatever shards, schedules and orders.

Each rank has the coordinates of its own rows; the gradients of slopes and tables are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, cast

import pytest
import torch
from helpers.ranks import TURNS, even_cuts, uneven_cuts
from helpers.strategies import Heads, has_tokens, mixes_with_heads, patterns_with_heads
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dilkit import (
    Alibi,
    CoordinateAlibi,
    DilatedAttention,
    GridTable,
    MultiheadDilatedAttention,
    Pattern,
    RelativeTable,
    dilated_attention_varlen,
    order,
    ordered_dilated_attention,
    t5_buckets,
)
from dilkit.bias.base import Bias
from dilkit.comm import (
    PlanMismatch,
    RingDilatedAttention,
    exchange_plan,
    ring_dilated_attention,
    ring_dilated_attention_varlen,
    run_threads,
)
from dilkit.comm.plan.kinds.tokens import TokenExchange
from dilkit.comm.transports.threads import ThreadComm
from dilkit.op.scores import positions_along
from dilkit.oracle import oracle_attention

pytestmark = [pytest.mark.usefixtures("on_one_core"), pytest.mark.surroundings]

CAP = 2.0


def coordinates(seq: int) -> Tensor:
    return torch.randn(2, seq, 2, generator=torch.Generator().manual_seed(seq), dtype=torch.float64)


Made = Callable[[Tensor, int, slice], Bias]
"""The bias with these weights of rows of a sequence of so many."""
BIASES: dict[str, tuple[tuple[int, ...], Made]] = {
    "alibi": ((), lambda slopes, seq, rows: Alibi(slopes)),
    "coordinates": ((), lambda slopes, seq, rows: CoordinateAlibi(slopes, coordinates(seq)[:, rows], "l1")),
    "buckets": ((8,), lambda table, seq, rows: RelativeTable(table, t5_buckets(8, 9))),
    "grid": ((5, 3), lambda table, seq, rows: GridTable(table, (-(-seq // 4), 4), (1, 2))),
}


@pytest.fixture(autouse=True)
def _one_thread_a_rank() -> Iterator[None]:
    """Ranks as threads share the cores already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


each_bias = pytest.mark.parametrize("name", BIASES)


def tensors(name: str, seq: int, heads: Heads, seed: int) -> list[Tensor]:
    """Query, key, value and weights."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [*((2, seq, h, 4) for h in (heads[0], heads[1], heads[1])), (heads[0], *BIASES[name][0])]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def results(attend: Callable[..., Any], leaves: list[Tensor]) -> list[Tensor]:
    """`out`, `lse` `(batch, seq, heads)`, and the gradients of a sum through both; `attend` is given the leaves."""
    mine = [x.clone().requires_grad_() for x in leaves]
    out, lse = attend(*mine)
    total = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).square().sum()
    return [out.detach(), lse.detach().transpose(-1, -2), *torch.autograd.grad(total, mine)]


def over_ranks(name: str, whole: list[Tensor], pattern: Pattern, cuts: tuple[int, ...], **options: Any) -> list[Tensor]:
    """The results of all ranks together; each computes a part of the gradient of the weights."""

    def on_rank(comm: ThreadComm) -> list[Tensor]:
        rows = slice(*cuts[comm.rank : comm.rank + 2])
        part = {option: x[:, rows] if option == "key_padding_mask" else x for option, x in options.items()}

        def attend(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Any:
            bias = BIASES[name][1](weights, cuts[-1], rows)
            return ring_dilated_attention(q, k, v, pattern, comm, bias=bias, softcap=CAP, return_lse=True, **part)

        return results(attend, [*(x[:, rows] for x in whole[:3]), whole[3]])

    *by_row, weights = zip(*run_threads(len(cuts) - 1, on_rank, timeout=30), strict=True)
    return [*(torch.cat(parts, 1) for parts in by_row), torch.stack(weights).sum(0)]


def on_one(name: str, whole: list[Tensor], pattern: Pattern, **options: Any) -> list[Tensor]:
    """What the oracle gives."""
    seq = whole[0].shape[1]

    def attend(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Any:
        bias = BIASES[name][1](weights, seq, slice(0, seq))
        return oracle_attention(q, k, v, pattern, bias=bias, softcap=CAP, **options)

    return results(attend, whole)


def close(computed: list[Tensor], want: list[Tensor]) -> None:
    for got, right in zip(computed, want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-11)


@TURNS
@each_bias
@settings(max_examples=5, deadline=None)
@given(
    st.one_of(patterns_with_heads(), mixes_with_heads()),
    st.integers(4, 30),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_pattern(
    name: str,
    turn: int,
    drawn: tuple[Pattern, Heads],
    seq: int,
    world_size: int,
    fuse_branches: bool,
    is_causal: bool,
    seed: int,
) -> None:
    (pattern, heads), cuts = drawn, uneven_cuts(seq, world_size, seed)
    assume(is_causal or has_tokens(pattern, seq))
    plan = exchange_plan(pattern, cuts, *heads, is_causal=is_causal)
    fuse_branches = fuse_branches and not any(isinstance(e, TokenExchange) and e.is_scattered for e in plan.exchanges)
    whole = tensors(name, seq, heads, seed)
    computed = over_ranks(name, whole, pattern, cuts, fuse_branches=fuse_branches, is_causal=is_causal)
    close(computed, on_one(name, whole, pattern, is_causal=is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        pytest.param(schedule, name, marks=[] if (at + of) % 4 == 0 else pytest.mark.slow)
        for at, schedule in enumerate(("scatter", "gather", "ring"))
        for of, name in enumerate(BIASES)
    ],
)
def test_every_schedule(schedule: str, name: str, is_causal: bool) -> None:
    whole, pattern = tensors(name, 61, (6, 3), 0), Pattern([8, 24, 97], [1, 3, 5], tail="zeros")
    options = dict(is_causal=is_causal, key_padding_mask=torch.rand(2, 61, generator=torch.Generator().manual_seed(0)) < 0.3)
    computed = over_ranks(name, whole, pattern, even_cuts(61, 3), schedule=schedule, **options)
    close(computed, on_one(name, whole, pattern, **options))


@pytest.mark.parametrize("schedule", ["auto", "scatter", "gather", "ring"])
def test_positions_are_counted(schedule: str) -> None:
    pattern, cuts, (q, k, v, slopes) = Pattern([8, 24, 97], [1, 3, 5]), (0, 13, 40, 61), tensors("coordinates", 61, (6, 3), 0)
    plan = exchange_plan(pattern, cuts, 6, 3, schedule=schedule)

    def on_rank(comm: ThreadComm) -> None:
        rows, sizes = slice(*cuts[comm.rank : comm.rank + 2]), dict(head_dim=4, dtype="float64", batch=2, position_dims=2)
        mine = [x[:, rows].clone().requires_grad_() for x in (q, k, v)]
        bias = CoordinateAlibi(slopes, coordinates(61)[:, rows])
        out = ring_dilated_attention(*mine, pattern, comm, schedule=schedule, bias=bias)
        assert isinstance(out, Tensor)
        assert comm.sent_bytes == plan.bytes(comm.rank, "forward", **sizes)
        forward = comm.sent_bytes
        out.sum().backward()
        assert comm.sent_bytes - forward == plan.bytes(comm.rank, "backward", **sizes)

    run_threads(3, on_rank, timeout=30)


@each_bias
@pytest.mark.parametrize("several", [False, True])
def test_positions_are_those_of_rows_as_given_along_orders(name: str, several: bool) -> None:
    pattern = Pattern([12, 24, 48], [1, 3, 5], heads=[(0, 4), (0, 3), (1, 4)])
    orders = [order((6, 8)), order((6, 8), "snake")][: 1 + several]
    whole = tensors(name, 48, (6, 3), 1)

    def attend(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Any:
        bias = BIASES[name][1](weights, 48, slice(0, 48))
        return ordered_dilated_attention(q, k, v, pattern, orders, bias=bias, softcap=CAP, return_lse=True)

    close(over_ranks(name, whole, pattern, even_cuts(48, 3), order=orders), results(attend, whole))


@each_bias
def test_positions_of_packed_sequences_begin_anew(name: str) -> None:
    lengths, pattern, cuts = (3, 17, 0, 11, 9), Pattern([8, 24], [1, 3]), (0, 13, 14, 40)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    whole = [x[0] if x.dim() == 4 else x for x in tensors(name, 40, (4, 2), 2)]

    def made(weights: Tensor, rows: slice) -> Bias:
        if name == "coordinates":
            return CoordinateAlibi(weights, coordinates(40)[0, rows])
        return BIASES[name][1](weights, 20, rows)

    def on_rank(comm: ThreadComm) -> list[Tensor]:
        rows = slice(*cuts[comm.rank : comm.rank + 2])

        def attend(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Any:
            options: dict[str, Any] = dict(bias=made(weights, rows), softcap=CAP, return_lse=True)
            return ring_dilated_attention_varlen(q, k, v, pattern, comm, starts, **options)

        return results(attend, [*(x[rows] for x in whole[:3]), whole[3]])

    def attend(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Any:
        bias = made(weights, slice(0, 40))
        return dilated_attention_varlen(q, k, v, pattern, starts, bias=bias, softcap=CAP, return_lse=True)

    *by_row, weights = zip(*run_threads(3, on_rank, timeout=30), strict=True)
    close([*(torch.cat(parts) for parts in by_row), torch.stack(weights).sum(0)], results(attend, whole))


def test_a_module_keeps_its_bias() -> None:
    pattern, x = Pattern([8, 24], [1, 3]), torch.randn(1, 24, 24, generator=torch.Generator().manual_seed(1))
    bias = RelativeTable(nn.Parameter(torch.randn(4, 9, generator=torch.Generator().manual_seed(2))))
    whole = MultiheadDilatedAttention(24, 4, DilatedAttention(pattern, bias=bias))
    want, _ = whole(x)
    (gradient,) = torch.autograd.grad(want.square().sum(), cast(Any, whole.attention).bias_weights)

    def on_rank(comm: ThreadComm) -> tuple[Tensor, Tensor]:
        empty = RelativeTable(nn.Parameter(torch.zeros(4, 9)))
        layer = MultiheadDilatedAttention(24, 4, RingDilatedAttention(pattern, comm, bias=empty))
        layer.load_state_dict(whole.state_dict())
        assert "bias='RelativeTable'" in repr(layer)
        out, _ = layer(x[:, slice(*even_cuts(24, comm.size)[comm.rank : comm.rank + 2])])
        return out.detach(), *torch.autograd.grad(out.square().sum(), cast(Any, layer.attention).bias_weights)

    parts = run_threads(3, on_rank, timeout=30)
    torch.testing.assert_close(torch.cat([out for out, _ in parts], 1), want.detach())
    torch.testing.assert_close(sum(part for _, part in parts), gradient, rtol=1e-4, atol=1e-5)


SLOPES = torch.ones(4)
REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "one without": (lambda rank: Alibi(SLOPES) if rank else None, "bias"),
    "other buckets": (
        lambda rank: RelativeTable(torch.ones(4, 8), t5_buckets(8, 9) + rank * 0 if rank else t5_buckets(6, 9)),
        "bias",
    ),
    "learned on one": (lambda rank: Alibi(SLOPES.clone().requires_grad_(rank == 0)), "requires_grad|bias"),
    "coordinates of all rows": (lambda rank: CoordinateAlibi(SLOPES, torch.zeros(16, 2)), r"coordinates .* \(1, 8, 1 to 3\)"),
    "other heads": (lambda rank: Alibi(torch.ones(3)), "3 heads"),
    "a matrix": (lambda rank: torch.zeros(16, 16), "never a tensor of all pairs"),
    "a grid too small": (lambda rank: GridTable(torch.ones(4, 3, 3), (3, 5)), "15"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(name: str) -> None:
    made, text = REFUSED[name]
    x = torch.randn(1, 8, 4, 4)

    def on_rank(comm: ThreadComm) -> None:
        with pytest.raises((PlanMismatch, ValueError, TypeError), match=text):
            ring_dilated_attention(x, x, x, Pattern([8], [1]), comm, bias=made(comm.rank))

    run_threads(2, on_rank, timeout=30)


def test_positions_beyond_float32_are_refused() -> None:
    weights = torch.ones(4)
    assert positions_along(weights, 2**24 - 2, 3)[0, -1].item() == 2**24
    assert positions_along(weights.double(), 2**24, 3)[0, -1].item() == 2**24 + 2
    with pytest.raises(ValueError, match=r"positions of the bias reach 16,777,218, but .*query in float64"):
        positions_along(weights, 2**24, 3)
