"""Token orders over ranks."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from helpers.ranks import assert_same, even_cuts, on_one, over_ranks, raised_on_all, uneven_cuts

from dilkit import (
    BlockSparse,
    DilatedAttention,
    DilatedSegment,
    GlobalTokens,
    MultiheadDilatedAttention,
    Pattern,
    SlidingWindow,
    Strided,
    TokenOrder,
    order,
    ordered_dilated_attention,
    plan,
)
from dilkit.comm import (
    PlanMismatch,
    RingDilatedAttention,
    load_shard,
    positions,
    ring_dilated_attention,
    run_threads,
    shard,
    unshard,
)
from dilkit.comm.reorder import reorder_plan
from dilkit.comm.transports.threads import ThreadComm
from dilkit.testing.tensors import Tensors

pytestmark = pytest.mark.usefixtures("on_one_core")

SHAPE, SEQ, HEADS, KV_HEADS, DIM = (6, 8), 49, 8, 4, 8
HILBERT = order(SHAPE, extra_tokens=1)
SNAKE = order(SHAPE, "snake", extra_tokens=1)
POINTS = TokenOrder.from_permutation(torch.randperm(48, generator=torch.Generator().manual_seed(1)).numpy(), extra_tokens=1)
ORDERS = {
    "one": HILBERT,
    "points": POINTS,
    "two": [HILBERT, SNAKE],
    "three": [SNAKE, POINTS, order((SEQ,))],
    "identity": order((SEQ,)),
}
PATTERN = Pattern([12, 24, 49], [1, 3, 5])
TIMEOUT = 20


def tensors(dtype=torch.float64):
    return [torch.randn(2, SEQ, heads, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def check(orders, cuts, masked=False, through_lse=False, pattern=PATTERN):
    dout, dlse = torch.randn(2, SEQ, HEADS, DIM, dtype=torch.float64), torch.randn(2, HEADS, SEQ, dtype=torch.float64)
    whole = Tensors(*tensors(), torch.rand(2, SEQ) < 0.3 if masked else None, dout, dlse)
    found = over_ranks(whole, pattern, cuts, through_lse=through_lse, order=orders)
    options = dict(key_padding_mask=whole.mask, return_lse=True)
    attend = partial(ordered_dilated_attention, pattern=pattern, order=orders, **options)
    assert_same(found.results, on_one(attend, whole, through_lse))


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(("name", "through_lse"), [*zip(ORDERS, (False, True, False, True, True), strict=True)])
def test_ranks_find_what_one_rank_finds(name, masked, through_lse, poisoned):
    check(ORDERS[name], uneven_cuts(SEQ, 3), masked, through_lse)


@pytest.mark.parametrize("cuts", [even_cuts(SEQ, 7), (0, SEQ)], ids=["7 ranks", "1 rank"])
def test_any_number_of_ranks(cuts):
    for orders in ORDERS.values():
        check(orders, cuts)


def test_every_kind_of_branches():
    layouts = np.random.default_rng(5).random((8, 7, 7)) < 0.4
    kinds = SlidingWindow(5), DilatedSegment(12, 3), GlobalTokens([0, 30]), BlockSparse(layouts, 7), Strided(9)
    check(ORDERS["two"], even_cuts(SEQ, 3), pattern=Pattern.of(*kinds))


def test_when_some_ranks_have_lse_in_their_loss_and_others_out():
    given, cuts = tensors(), even_cuts(SEQ, 3)
    whole = [x.clone().requires_grad_() for x in given]
    out, lse = ordered_dilated_attention(*whole, PATTERN, ORDERS["two"], return_lse=True)
    expected = torch.autograd.grad(out[:, : cuts[1]].sum() + lse[:, :, cuts[1] :].sum(), whole)

    def on_rank(comm):
        own = [x[:, slice(*cuts[comm.rank : comm.rank + 2])].clone().requires_grad_() for x in given]
        results = ring_dilated_attention(*own, PATTERN, comm, order=ORDERS["two"], return_lse=True)
        return torch.autograd.grad(results[0 if comm.rank == 0 else 1].sum(), own, materialize_grads=True)

    for found, grad in zip(zip(*run_threads(3, on_rank, timeout=TIMEOUT), strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(found, 1), grad)


@pytest.mark.parametrize("schedule", ["scatter", "gather", "ring"])
def test_every_schedule_and_generated_orders(schedule):
    made, whole, cuts = order(SHAPE, extra_tokens=1, is_generation_order=True), tensors(torch.bfloat16), uneven_cuts(SEQ, 3)

    def on_rank(comm):
        rows = [x[:, slice(*cuts[comm.rank : comm.rank + 2])] for x in whole]
        return RingDilatedAttention(PATTERN, comm, order=made, schedule=schedule)(*rows, is_causal=True)

    expected = ordered_dilated_attention(*whole, PATTERN, made, is_causal=True)
    torch.testing.assert_close(torch.cat(run_threads(3, on_rank, timeout=TIMEOUT), 1), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_module_over_ranks_with_rotary_positions(name):
    orders = ORDERS[name] if isinstance(ORDERS[name], list) else [ORDERS[name]]
    model = MultiheadDilatedAttention(64, HEADS, DilatedAttention(PATTERN, orders=orders), rotary=True, dtype=torch.float64)
    x, cuts = torch.randn(2, SEQ, 64, dtype=torch.float64), uneven_cuts(SEQ, 3)
    x.requires_grad_()
    expected = model(x)[0]
    wanted = torch.autograd.grad(expected.sin().sum(), [x, *model.parameters()])

    def on_rank(comm):
        mine = copy.deepcopy(model)
        mine.attention = RingDilatedAttention(PATTERN, comm, orders=orders)
        own = x.detach()[:, slice(*cuts[comm.rank : comm.rank + 2])].requires_grad_()
        out = copy.deepcopy(mine)(own)[0]
        out = mine(own)[0]
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), [own, *mine.parameters()])]

    found = [list(parts) for parts in zip(*run_threads(3, on_rank, timeout=TIMEOUT), strict=True)]
    torch.testing.assert_close(torch.cat(found[0], 1), expected.detach())
    torch.testing.assert_close(torch.cat(found[1], 1), wanted[0])
    for parts, grad in zip(found[2:], wanted[1:], strict=True):
        torch.testing.assert_close(sum(parts), grad)


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("held", [1, 2], ids=["1 head", "2 heads"])
def test_heads_of_the_model_that_are_fewer_than_the_orders(held, masked):
    """Heads are shared out over other ranks: some orders are unused here."""
    given, mask = tensors(), torch.rand(2, SEQ) < 0.3 if masked else None
    orders, weights = ORDERS["three"], torch.randn(2, SEQ, HEADS, DIM, dtype=torch.float64)
    whole = [x.clone().requires_grad_() for x in given]
    out = ordered_dilated_attention(*whole, PATTERN, orders, key_padding_mask=mask)
    grads = torch.autograd.grad((out * weights).sum(), whole)
    for first in range(0, KV_HEADS, held):
        pattern = Pattern(PATTERN.segment_lengths, PATTERN.dilation_rates, head_shard=(first, KV_HEADS))
        heads, kv_heads = (slice(first * group, (first + held) * group) for group in (HEADS // KV_HEADS, 1))

        def on_rank(comm, pattern=pattern, heads=heads, kv_heads=kv_heads):
            own = [
                shard(x[:, :, part], comm).requires_grad_() for x, part in zip(given, (heads, kv_heads, kv_heads), strict=True)
            ]
            part = None if mask is None else shard(mask, comm)
            found = ring_dilated_attention(*own, pattern, comm, order=orders, key_padding_mask=part)
            return [found.detach(), *torch.autograd.grad((found * shard(weights[:, :, heads], comm)).sum(), own)]

        every = [torch.cat(parts, 1) for parts in zip(*run_threads(2, on_rank, timeout=TIMEOUT), strict=True)]
        for found, expected, part in zip(every, (out, *grads), (heads, heads, kv_heads, kv_heads), strict=True):
            torch.testing.assert_close(found, expected.detach()[:, :, part])


def test_one_message_there_and_one_back(monkeypatch):
    steps = []
    exchange = ThreadComm.exchange

    def noted(self, rows, sent, received, step="rows"):
        if self.rank == 0:
            steps.append(step)
        return exchange(self, rows, sent, received, step)

    monkeypatch.setattr(ThreadComm, "exchange", noted)

    def on_rank(comm):
        own = [
            torch.randn(2, 49 // 7 * (comm.rank * 3 + 2), heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        mask = torch.zeros(2, own[0].shape[1], dtype=torch.bool)
        ring_dilated_attention(*own, Pattern([7], [1]), comm, order=[HILBERT, SNAKE], key_padding_mask=mask).sum().backward()
        return comm.sent_bytes

    sent = run_threads(2, on_rank, timeout=TIMEOUT)
    moved = [step for step in steps if "order" in step]
    assert moved == [
        "rows put in order",
        "results put back in order",
        "gradients of results put back in order",
        "gradients of rows put in order",
    ]
    leaving = [(one.perm[:14] >= 14).sum() + (one.perm[:14] < 0).sum() for one in (HILBERT, SNAKE)]
    qkv, out, masks = 4 * 2 * DIM * (HEADS + 2 * KV_HEADS), 4 * 2 * DIM * HEADS, 2 * KV_HEADS
    assert sent == [sum(leaving) * (2 * qkv + 2 * out + masks) // 2] * 2


@pytest.mark.parametrize("cuts", [even_cuts(SEQ, 4), uneven_cuts(SEQ, 5), (0, SEQ)])
def test_tables_of_a_rank_are_as_long_as_its_rows(cuts):
    plan.cache_clear()
    for made in (HILBERT, SNAKE, POINTS):
        moves = [reorder_plan(made, cuts, rank, torch.device("cpu")) for rank in range(len(cuts) - 1)]
        for rank, one in enumerate(moves):
            rows = cuts[rank + 1] - cuts[rank]
            assert one.nbytes == 4 * rows * 4
            assert reorder_plan(made, cuts, rank, torch.device("cpu")) is one
            assert [len(x) for x in (one.row_major.rows, one.along.rows)] == [rows] * 2
            assert [other.along.counts[rank] for other in moves] == list(one.row_major.counts)


REFUSED = {
    "another order": (dict(order=SNAKE), True, "rank 1 has order="),
    "another permutation": (
        dict(order=TokenOrder.from_permutation(POINTS.perm[1:] - 1, extra_tokens=1, curve="mine")),
        True,
        "rank 1 has order=",
    ),
    "none": (dict(order=None), True, "rank 1 has order=''"),
    "no order": (dict(order="hilbert"), True, "is no TokenOrder"),
    "too short": (dict(order=order((6, 8))), False, "49 tokens, but the order is of 48.*extra_tokens=1 would leave 1 in front"),
    "causal": (dict(order=HILBERT, is_causal=True), False, "would let tokens see their future"),
    "too many": (dict(order=[HILBERT, SNAKE] * 3), False, "there are 6 orders but 4 key/value heads"),
}
"""Options of rank 1 alone, or of all ranks; afterwards the transport still works."""


@pytest.mark.parametrize("name", REFUSED)
def test_orders_that_differ_or_do_not_fit_raise_on_all(name):
    changed, is_of_one_rank, text = REFUSED[name]

    def call(comm):
        own = [x[:, slice(*even_cuts(SEQ, 3)[comm.rank : comm.rank + 2])] for x in tensors()]
        options = changed if comm.rank == 1 or not is_of_one_rank else dict(order=POINTS)
        try:
            ring_dilated_attention(*own, PATTERN, comm, **options)
        finally:
            ring_dilated_attention(*own, PATTERN, comm, order=HILBERT)

    errors = raised_on_all(3, call, text)
    assert isinstance(errors[0], PlanMismatch) == is_of_one_rank


@pytest.mark.parametrize("made", [HILBERT, POINTS], ids=["grid", "points"])
def test_tokens_put_in_order_before_they_are_shared_out(made, tmp_path):
    x = torch.randn(2, SEQ, KV_HEADS, DIM, dtype=torch.float64)
    expected = ordered_dilated_attention(x, x, x, PATTERN, made)
    np.save(tmp_path / "x.npy", x[0].numpy())

    def on_rank(comm):
        own = shard(x, comm, PATTERN, order=made)
        out = unshard(ring_dilated_attention(own, own, own, PATTERN, comm), comm, order=made)
        torch.testing.assert_close(out, expected)
        at = positions(own.shape[1], comm, order=made)
        assert torch.equal(x[:, at], own)
        assert torch.equal(load_shard(tmp_path / "x.npy", comm, PATTERN, order=made), own[0])
        wrong = order((5, 5))
        for call in (
            lambda: shard(x, comm, order=wrong),
            lambda: load_shard(tmp_path / "x.npy", comm, order=wrong),
            lambda: positions(own.shape[1], comm, order=wrong),
        ):
            with pytest.raises(ValueError, match="but the order is of 25"):
                call()

    run_threads(3, on_rank, timeout=TIMEOUT)
