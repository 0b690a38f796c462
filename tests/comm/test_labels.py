"""Labels and losses of sharded sequences."""

from itertools import pairwise

import pytest
import torch
from helpers.ranks import raised_on_all
from hypothesis import given, strategies as st

from dilkit.comm import PlanMismatch, positions, roll, run_threads, sum_by_sequence, unshard

FILL = -100


def shards(whole, cuts, comm):
    return whole[:, cuts[comm.rank] : cuts[comm.rank + 1]]


def cuts_of(lengths):
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def filled(whole, shift, ends):
    expected = torch.full_like(whole, FILL)
    for start, stop in pairwise(ends):
        for i in range(max(start, start + shift), min(stop, stop + shift)):
            expected[:, i] = whole[:, i - shift]
    return expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(-40, 40))
def test_shards_roll_as_the_whole(lengths, shift):
    cuts, whole = cuts_of(lengths), torch.arange(2 * sum(lengths) * 3).view(2, -1, 3)
    found = run_threads(len(lengths), lambda comm: unshard(roll(shards(whole, cuts, comm), comm, shift), comm))
    assert all(torch.equal(one, whole.roll(shift, 1)) for one in found)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(-12, 12), st.data())
def test_rows_that_a_sequence_does_not_have_are_filled(lengths, shift, data):
    cuts, whole = cuts_of(lengths), torch.arange(2 * sum(lengths)).view(2, -1)
    inner = data.draw(st.lists(st.integers(0, cuts[-1]), max_size=4))
    ends = sorted([0, *inner, cuts[-1]])
    starts = torch.tensor(ends, dtype=torch.int32)
    packed = run_threads(
        len(lengths), lambda comm: unshard(roll(shards(whole, cuts, comm), comm, shift, fill=FILL, cu_seqlens=starts), comm)
    )
    single = run_threads(len(lengths), lambda comm: unshard(roll(shards(whole, cuts, comm), comm, shift, fill=FILL), comm))
    assert all(torch.equal(one, filled(whole, shift, ends)) for one in packed)
    assert all(torch.equal(one, filled(whole, shift, [0, cuts[-1]])) for one in single)


def test_nan_may_fill():
    def on_rank(comm):
        with pytest.raises(PlanMismatch, match=r"rank 2 has fill=0.0, the others nan"):
            roll(torch.ones(1, 3), comm, -1, fill=0.0 if comm.rank == 2 else float("nan"))
        return unshard(roll(torch.full((1, 3), 1.0 + comm.rank), comm, -1, fill=float("nan")), comm)

    right = torch.tensor([[1.0, 1, 2, 2, 2, 3, 3, 3, torch.nan]])
    assert all(found.allclose(right, equal_nan=True) for found in run_threads(3, on_rank))


def test_a_shift_by_one_sends_one_row_a_border():
    def on_rank(comm):
        roll(torch.zeros(1, 100, dtype=torch.int64), comm, -1, fill=FILL)
        return comm.sent_bytes

    assert run_threads(3, on_rank) == [8, 8, 8]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_sums_by_sequence_and_positions_in_sequences(lengths, data):
    cuts = cuts_of(lengths)
    ends = sorted([0, *data.draw(st.lists(st.integers(0, cuts[-1]), max_size=4)), cuts[-1]])
    starts, losses = torch.tensor(ends, dtype=torch.int32), torch.randn(1, cuts[-1], dtype=torch.float64)

    def on_rank(comm):
        mine = shards(losses, cuts, comm)[0]
        return sum_by_sequence(mine, comm, starts), positions(len(mine), comm, cu_seqlens=starts)

    found = run_threads(len(lengths), on_rank)
    expected = torch.stack([losses[0, a:b].sum() for a, b in pairwise(ends)])
    assert all(torch.allclose(sums, expected) for sums, _ in found)
    places = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])
    assert torch.equal(torch.cat([own for _, own in found]), places)


STARTS = torch.tensor([0, 3, 8], dtype=torch.int32)
ROWS = torch.zeros(1, 4)
REFUSED = {
    "sequences without fill": (lambda comm: roll(ROWS, comm, 1, cu_seqlens=STARTS), ValueError, "cu_seqlens without fill"),
    "sequences of other rows": (
        lambda comm: roll(ROWS, comm, 1, fill=0, cu_seqlens=STARTS[:2]),
        ValueError,
        "cu_seqlens ends with 3",
    ),
    "a gradient": (
        lambda comm: roll(ROWS.clone().requires_grad_(), comm, 1),
        ValueError,
        "requires gradients, but roll has no backward",
    ),
    "another shift": (lambda comm: roll(ROWS, comm, comm.rank), PlanMismatch, "shift"),
    "no number": (lambda comm: roll(ROWS, comm, 1.5), TypeError, "shift=1.5"),
    "sums of matrices": (lambda comm: sum_by_sequence(ROWS, comm, STARTS), TypeError, r"x is torch.float32 \(1, 4\)"),
    "an order and sequences": (
        lambda comm: positions(4, comm, order=object(), cu_seqlens=STARTS),
        ValueError,
        "order and cu_seqlens cannot go together",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_on_all_ranks(name):
    call, kind, text = REFUSED[name]
    raised_on_all(2, call, text, kind)
