"""Sinks, softcaps, dropout, tails of zeros and biases over ranks, against the whole."""

import threading
from typing import Any

import pytest
import torch
from helpers.calls import starts_of
from helpers.fakes import registered
from helpers.pairwise import every_pair
from helpers.ranks import TURNS, even_cuts, raised_on_all, uneven_cuts
from helpers.strategies import has_tokens, mixes_with_heads, patterns_with_heads
from hypothesis import assume, given, settings, strategies as st
from torch import nn

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
from dilkit.backends.native.backend import Native
from dilkit.comm import (
    RingDilatedAttention,
    arguments,
    exchange_plan,
    ring_dilated_attention,
    ring_dilated_attention_varlen,
    run_threads,
)
from dilkit.comm.plan.kinds.tokens import TokenExchange
from dilkit.op.dropout import Dropout
from dilkit.oracle import oracle_attention

pytestmark = [pytest.mark.usefixtures("on_one_core"), pytest.mark.surroundings]

PATTERN = Pattern([8, 24, 97], [1, 3, 5], tail="zeros")
P, CAP, SEED = 0.4, 0.7, 2**62 + 12345


def coordinates(seq):
    return torch.randn(2, seq, 2, generator=torch.Generator().manual_seed(seq), dtype=torch.float64)


BIASES = {
    "alibi": ((), lambda slopes, seq, rows: dict(bias=Alibi(slopes), softcap=CAP)),
    "coordinates": (
        (),
        lambda slopes, seq, rows: dict(bias=CoordinateAlibi(slopes, coordinates(seq)[:, rows], "l1"), softcap=CAP),
    ),
    "buckets": ((8,), lambda table, seq, rows: dict(bias=RelativeTable(table, t5_buckets(8, 9)), softcap=CAP)),
    "grid": ((5, 3), lambda table, seq, rows: dict(bias=GridTable(table, (-(-seq // 4), 4), (1, 2)), softcap=CAP)),
}
OPTIONS = {
    "tail": (None, lambda weights, seq, rows: {}),
    "sink": ((), lambda sink, seq, rows: dict(sink=sink)),
    "dropout": (None, lambda weights, seq, rows: dict(dropout_p=P)),
    "softcap": (None, lambda weights, seq, rows: dict(softcap=CAP)),
    **BIASES,
}
"""The shape of a head's weights, where there are any, and the arguments of a call for some rows of a sequence."""


@pytest.fixture(autouse=True)
def _one_seed(monkeypatch):
    """The threads share torch's generator: which draws first is left to chance."""
    monkeypatch.setattr(arguments, "draw_seed", lambda: torch.tensor(SEED))
    monkeypatch.setattr("dilkit.op.arguments.draw_seed", lambda: torch.tensor(SEED))


def tensors(option, seq, heads, seed=0):
    draw, of_head = torch.Generator().manual_seed(seed), OPTIONS[option][0]
    shapes = [*((2, seq, h, 4) for h in (heads[0], heads[1], heads[1]))]
    shapes += [] if of_head is None else [(heads[0], *of_head)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def results(attend, leaves):
    mine = [x.clone().requires_grad_() for x in leaves]
    out, lse = attend(*mine)
    total = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).square().sum()
    return [out.detach(), lse.detach().transpose(-1, -2), *torch.autograd.grad(total, mine)]


def over_ranks(option, whole, pattern, cuts, **options):
    def on_rank(comm):
        rows = slice(*cuts[comm.rank : comm.rank + 2])
        part = {name: x[:, rows] if name == "key_padding_mask" else x for name, x in options.items()}

        def attend(q, k, v, weights=None):
            asked = OPTIONS[option][1](weights, cuts[-1], rows)
            return ring_dilated_attention(q, k, v, pattern, comm, return_lse=True, **asked, **part)

        return results(attend, [*(x[:, rows] for x in whole[:3]), *whole[3:]])

    rows, weights = [*zip(*run_threads(len(cuts) - 1, on_rank, timeout=30), strict=True)], whole[3:]
    summed = [torch.stack(parts).sum(0) for parts in rows[len(rows) - len(weights) :]]
    return [*(torch.cat(parts, 1) for parts in rows[: len(rows) - len(weights)]), *summed]


def on_one(option, whole, pattern, first_head=0, **options):
    seq = whole[0].shape[1]

    def attend(q, k, v, weights=None):
        asked = OPTIONS[option][1](weights, seq, slice(0, seq))
        if option == "dropout":
            asked = dict(dropout=Dropout(P, SEED, first_head=first_head))
        return oracle_attention(q, k, v, pattern, **asked, **options)

    return results(attend, whole)


def close(computed, want):
    for got, right in zip(computed, want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-11)


@TURNS
@pytest.mark.parametrize("option", OPTIONS)
@settings(max_examples=9, deadline=None)
@given(
    st.one_of(patterns_with_heads(), mixes_with_heads()),
    st.integers(4, 30),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_pattern(option, turn, drawn, seq, world_size, fuse_branches, is_causal, seed):
    (pattern, heads), cuts = drawn, uneven_cuts(seq, world_size, seed)
    assume(is_causal or has_tokens(pattern, seq))
    plan = exchange_plan(pattern, cuts, *heads, is_causal=is_causal)
    fuse_branches = fuse_branches and not any(isinstance(e, TokenExchange) and e.is_scattered for e in plan.exchanges)
    first = 0 if pattern.head_shard is None else pattern.head_shard[0] * heads[0] // heads[1]
    whole = tensors(option, seq, heads, seed)
    computed = over_ranks(option, whole, pattern, cuts, fuse_branches=fuse_branches, is_causal=is_causal)
    close(computed, on_one(option, whole, pattern, first, is_causal=is_causal))


@pytest.mark.parametrize(
    ("option", "schedule", "is_causal", "masked", "keep"),
    every_pair(OPTIONS, ("scatter", "gather", "ring"), (False, True), (False, True), ("rows", "nothing")),
)
def test_every_schedule(option, schedule, is_causal, masked, keep):
    whole, options = tensors(option, 61, (6, 3)), dict[str, Any](is_causal=is_causal)
    if masked:
        options["key_padding_mask"] = torch.rand(2, 61, generator=torch.Generator().manual_seed(0)) < 0.3
    computed = over_ranks(option, whole, PATTERN, even_cuts(61, 3), schedule=schedule, keep=keep, **options)
    close(computed, on_one(option, whole, PATTERN, **options))


@pytest.mark.parametrize("schedule", ["auto", "scatter", "gather", "ring"])
def test_coordinates_are_counted(schedule):
    cuts, (q, k, v, slopes) = (0, 13, 40, 61), tensors("coordinates", 61, (6, 3))
    plan = exchange_plan(PATTERN, cuts, 6, 3, schedule=schedule)

    def on_rank(comm):
        rows, sizes = slice(*cuts[comm.rank : comm.rank + 2]), dict(head_dim=4, dtype="float64", batch=2, position_dims=2)
        mine = [x[:, rows].clone().requires_grad_() for x in (q, k, v)]
        bias = CoordinateAlibi(slopes, coordinates(61)[:, rows])
        out = ring_dilated_attention(*mine, PATTERN, comm, schedule=schedule, bias=bias)
        assert comm.sent_bytes == plan.bytes(comm.rank, "forward", **sizes)
        forward = comm.sent_bytes
        out.sum().backward()
        assert comm.sent_bytes - forward == plan.bytes(comm.rank, "backward", **sizes)

    run_threads(3, on_rank, timeout=30)


@pytest.mark.parametrize(("option", "several", "masked"), every_pair(OPTIONS, (False, True), (False, True)))
def test_along_token_orders(option, several, masked):
    """The last heads see sinks alone. Positions are those of rows as given."""
    pattern = Pattern([12, 24, 48], [1, 3, 5], heads=[(0, 4), (0, 3), (1, 4)], tail="zeros")
    orders, whole = [order((6, 8)), order((6, 8), "snake")][: 1 + several], tensors(option, 48, (6, 3), 1)
    options = dict(key_padding_mask=torch.arange(48).expand(2, -1) % 3 == 0) if masked else {}

    def attend(q, k, v, weights=None):
        asked = OPTIONS[option][1](weights, 48, slice(0, 48))
        return ordered_dilated_attention(q, k, v, pattern, orders, return_lse=True, **asked, **options)

    close(over_ranks(option, whole, pattern, even_cuts(48, 3), order=orders, **options), results(attend, whole))


@pytest.mark.parametrize("name", BIASES)
def test_positions_of_packed_sequences_begin_anew(name):
    lengths, pattern, cuts = (3, 17, 0, 11, 9), Pattern([8, 24], [1, 3]), (0, 13, 14, 40)
    starts = starts_of(lengths)
    whole = [x[0] if x.dim() == 4 else x for x in tensors(name, 40, (4, 2), 2)]

    def options(weights, rows):
        if name == "coordinates":
            return dict(bias=CoordinateAlibi(weights, coordinates(40)[0, rows]), return_lse=True)
        return BIASES[name][1](weights, 20, rows) | dict(return_lse=True)

    def on_rank(comm):
        rows = slice(*cuts[comm.rank : comm.rank + 2])

        def attend(q, k, v, weights):
            return ring_dilated_attention_varlen(q, k, v, pattern, comm, starts, **options(weights, rows))

        return results(attend, [*(x[rows] for x in whole[:3]), whole[3]])

    def attend(q, k, v, weights):
        return dilated_attention_varlen(q, k, v, pattern, starts, **options(weights, slice(0, 40)))

    *by_row, weights = zip(*run_threads(3, on_rank, timeout=30), strict=True)
    close([*(torch.cat(parts) for parts in by_row), torch.stack(weights).sum(0)], results(attend, whole))


def test_the_seed_is_that_of_rank_0(monkeypatch):
    whole, cuts = tensors("dropout", 24, (2, 2)), even_cuts(24, 3)
    ranks = {}

    def on_rank(comm):
        ranks.setdefault(threading.get_ident(), []).append(comm.rank)
        return ring_dilated_attention(*(x[:, slice(*cuts[comm.rank : comm.rank + 2])] for x in whole), PATTERN, comm, dropout_p=P)

    monkeypatch.setattr(arguments, "draw_seed", lambda: torch.tensor(SEED + 7 * ranks[threading.get_ident()][-1]))
    close([torch.cat(run_threads(3, on_rank, timeout=30), 1)], on_one("dropout", whole, PATTERN)[:1])


def test_gradients_through_lse_drop_no_weights():
    """Results would be the same, as their values are zeros, but every random number would be drawn again."""
    whole, cuts = tensors("dropout", 24, (2, 2)), even_cuts(24, 2)
    drops = []

    class Recording(Native):
        name = "recording"

        def backward(self, dout, inputs, *others):
            drops.append(inputs.dropout is not None)
            return super().backward(dout, inputs, *others)

    def on_rank(comm):
        mine = [x[:, slice(*cuts[comm.rank : comm.rank + 2])].requires_grad_() for x in whole]
        options = dict(dropout_p=P, return_lse=True, backend="recording")
        ring_dilated_attention(*mine, PATTERN, comm, **options)[1].sum().backward()

    with registered(Recording()):
        run_threads(2, on_rank, timeout=30)
    assert sum(drops) * 2 == len(drops) > 0


@pytest.mark.parametrize("option", ["sink", "dropout", "softcap", "buckets"])
def test_a_module_over_ranks(option):
    of_layer = dict(sink=dict(sink=True), dropout=dict(dropout=P))
    x = torch.randn(1, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def made(inner, learned):
        of_inner = dict(softcap=dict(softcap=CAP), buckets=dict(bias=RelativeTable(nn.Parameter(learned))))
        return MultiheadDilatedAttention(24, 4, inner(**of_inner.get(option, {})), **of_layer.get(option, {})).double()

    def result(layer, x):
        out, _ = layer(x)
        learned = {"sink": "sinks", "buckets": "attention.bias_weights"}.get(option, "out_proj.weight")
        return out.detach(), *torch.autograd.grad(out.square().sum(), layer.get_parameter(learned))

    alone = made(lambda **options: DilatedAttention(PATTERN, **options), torch.randn(4, 9))
    if option == "sink":
        alone.sinks.data = torch.arange(4.0).double()

    def on_rank(comm):
        layer = made(lambda **options: RingDilatedAttention(PATTERN, comm, **options), torch.zeros(4, 9))
        layer.load_state_dict(alone.state_dict())
        assert option != "buckets" or "bias='RelativeTable'" in repr(layer)
        return result(layer, x[:, slice(*even_cuts(24, comm.size)[comm.rank : comm.rank + 2])])

    want, grad = result(alone, x)
    outs, parts = zip(*run_threads(3, on_rank, timeout=30), strict=True)
    close([torch.cat(outs, 1), torch.stack(parts).sum(0)], [want, grad])


SLOPES = torch.ones(4)
REFUSED = {
    "a sink of one": ("sink", lambda rank: SLOPES if rank else None, "sink"),
    "other dropout": ("dropout_p", lambda rank: 0.1 * (1 + rank), "dropout_p"),
    "a softcap of one": ("softcap", lambda rank: CAP if rank else None, "softcap"),
    "one without": ("bias", lambda rank: Alibi(SLOPES) if rank else None, "bias"),
    "other buckets": ("bias", lambda rank: RelativeTable(torch.ones(4, 8), t5_buckets(8 if rank else 6, 9)), "bias"),
    "learned on one": ("bias", lambda rank: Alibi(SLOPES.clone().requires_grad_(rank == 0)), "requires_grad|bias"),
    "coordinates of all rows": (
        "bias",
        lambda rank: CoordinateAlibi(SLOPES, torch.zeros(16, 2)),
        r"coordinates .* \(1, 8, 1 to 3\)",
    ),
    "coordinates beyond the digits of float32": (
        "bias",
        lambda rank: CoordinateAlibi(SLOPES, torch.tensor([0.0, rank * 2.0**25 + 1]).double().repeat(4)[:, None]),
        "coordinates",
    ),
    "other heads": ("bias", lambda rank: Alibi(torch.ones(3)), "3 heads"),
    "a matrix": ("bias", lambda rank: torch.zeros(16, 16), "never a tensor of all pairs"),
    "a grid too small": ("bias", lambda rank: GridTable(torch.ones(4, 3, 3), (3, 5)), "15"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(name):
    option, made, text = REFUSED[name]
    x, pattern = torch.randn(1, 8, 4, 4), Pattern([8], [1])
    raised_on_all(2, lambda comm: ring_dilated_attention(x, x, x, pattern, comm, **{option: made(comm.rank)}), text)
