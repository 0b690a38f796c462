"""Ranks that disagree, are called with nonsense, or fail."""

import functools
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import PATTERN, even_cuts, raised_on_all
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dilkit import Pattern, TokenOrder
from dilkit.comm import (
    CommError,
    CommTimeout,
    Fault,
    PeerLost,
    PlanMismatch,
    positions,
    ring_dilated_attention,
    run_threads,
    shard,
    sum_over_ranks,
)
from dilkit.comm.transports.threads import Killed

pytestmark = pytest.mark.usefixtures("on_one_core")

SEQ, RANKS, ODD = 97, 3, 1
CUTS = even_cuts(SEQ, RANKS)
TIMEOUT, SLACK = 1.0, 2.0
Arguments = dict[str, Any]


def shards(comm, **options):
    rows = CUTS[comm.rank + 1] - CUTS[comm.rank]
    query, key, value = (torch.randn(2, rows, 4, 8, **{"requires_grad": True, **options}) for _ in range(3))
    return dict(query=query, key=key, value=value, pattern=PATTERN)


def attend(comm, arguments):
    tensors = [arguments.pop(name) for name in ("query", "key", "value", "pattern")]
    return ring_dilated_attention(*tensors, comm, **arguments)


def on_all(change):
    def on_rank(comm):
        arguments = shards(comm)
        if comm.rank == ODD:
            change(arguments)
        with pytest.raises((TypeError, ValueError)) as caught:
            attend(comm, arguments)
        attend(comm, shards(comm)).sum().backward()
        return caught.value

    began = time.monotonic()
    found = run_threads(RANKS, on_rank, timeout=5)
    assert time.monotonic() - began < 5
    return found


def each(change, *names):
    return lambda x: x.update({name: change(x[name]) for name in names or ("query", "key", "value")})


def given(**options):
    return lambda arguments: arguments.update(options)


def _mask(arguments):
    arguments["key_padding_mask"] = torch.zeros(arguments["query"].shape[:2], dtype=torch.bool)


def _memory_gone(x):
    x = x.detach().clone().requires_grad_()
    x.untyped_storage().resize_(0)
    return x


DISAGREE = {
    "dtype": (each(Tensor.double), "dtype='torch.float64', the others 'torch.float32'"),
    "batch": (each(lambda x: x[:1]), "batch=1, the others 2"),
    "heads": (each(lambda x: x[:, :, :2]), "heads=2, the others 4"),
    "kv_heads": (each(lambda x: x[:, :, :2], "key", "value"), "kv_heads=2, the others 4"),
    "head_dim": (each(lambda x: x[..., :4]), "head_dim=4, the others 8"),
    "pattern": (given(pattern=Pattern([8], [1])), "pattern="),
    "schedule": (given(schedule="ring"), "schedule='ring', the others 'auto'"),
    "keep": (given(keep="nothing"), "keep='nothing', the others 'rows'"),
    "is_causal": (given(is_causal=True), "is_causal=True, the others False"),
    "scale": (given(scale=0.5), "scale=0.5, the others"),
    "fuse_branches": (given(fuse_branches=False), "fuse_branches=False, the others True"),
    "mask": (_mask, "key_padding_mask=True, the others False"),
    "requires_grad": (each(Tensor.detach), "requires_grad=False, the others True"),
}


@pytest.mark.parametrize("name", DISAGREE)
def test_ranks_that_disagree(name):
    change, text = DISAGREE[name]
    for error in on_all(change):
        assert isinstance(error, PlanMismatch)
        assert error.ranks == (ODD,)
        assert f"arguments of ring_dilated_attention: rank {ODD} has {text}" in str(error)


MALFORMED = {
    "stride": (each(lambda x: x.transpose(1, 3).contiguous().transpose(1, 3), "key"), "key has stride"),
    "no rows": (each(lambda x: x[:, :0]), "query has no rows on this rank"),
    "memory gone": (each(_memory_gone, "value"), "value has shape"),
    "none": (given(value=None), "value is a NoneType"),
    "keep": (given(keep="everything"), "keep='everything' is not known"),
    "causal": (given(is_causal=1), "is_causal=1 is a int"),
    "fuse": (given(fuse_branches=None), "fuse_branches=None is a NoneType"),
    "lse": (given(return_lse="yes"), "return_lse='yes' is a str"),
    "scale": (given(scale=float("nan")), "scale=nan must be finite"),
    "backend name": (given(backend="fastest"), "fastest"),
    "letters": (given(schedule="\N{SNOWMAN}\N{PILE OF POO}" * 500), "schedule='"),
    "letters that are none": (given(schedule="\ud800\0" * 500), "schedule='"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_nonsense_on_one_rank(name):
    change, text = MALFORMED[name]
    for rank, error in enumerate(on_all(change)):
        assert text in str(error)
        if rank != ODD:
            assert isinstance(error, PlanMismatch)
            assert error.ranks == (ODD,)
            assert f"on rank {ODD}: " in str(error)


def test_ranks_that_make_different_calls():
    def on_rank(comm):
        with pytest.raises(PlanMismatch) as caught:
            positions(5, comm) if comm.rank == ODD else attend(comm, shards(comm))
        attend(comm, shards(comm))
        return str(caught.value)

    text = f"rank {ODD} is at 'positions of shards', the others at 'arguments of ring_dilated_attention'"
    assert all(text in said for said in run_threads(RANKS, on_rank, timeout=5))


def test_one_autocast_of_several_is_a_disagreement():
    def call(comm):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=comm.rank == ODD):
            attend(comm, shards(comm))

    raised_on_all(RANKS, call, "rank 1 has dtype='torch.bfloat16'", PlanMismatch)


def test_rows_with_gradients_on_one_rank_alone_along_an_order():
    """The sink has gradients on all ranks; else rows and gradients would wait for each other."""
    options = dict(order=TokenOrder.from_permutation(range(SEQ)[::-1]), sink=torch.zeros(4, requires_grad=True))

    def call(comm):
        attend(comm, shards(comm, requires_grad=comm.rank == ODD) | options)

    raised_on_all(RANKS, call, f"rank {ODD} has rows_require_grad=True, the others False", PlanMismatch)


@pytest.mark.parametrize("odd", [torch.device("meta"), torch.device("cpu")])
def test_sums_of_tensors_of_several_devices(odd):
    def on_rank(comm):
        own = [torch.ones(2, device="meta"), torch.ones(2, device=odd)] if comm.rank == ODD else [torch.ones(2), torch.ones(2)]
        with pytest.raises(ValueError, match=r"device|lie on") as caught:
            sum_over_ranks(own, comm)
        return str(caught.value)

    said = run_threads(RANKS, on_rank, timeout=TIMEOUT)
    assert all(f"rank {ODD}" in text for rank, text in enumerate(said) if rank != ODD)


SCHEDULES = {"scatter": 6, "ring": 11}
"""Exchanges of a forward and a backward pass: agreement in each, then what the schedule needs."""


def step_of(comm, schedule):
    attend(comm, dict(shards(comm), schedule=schedule)).sum().backward()


def with_fault(schedule, fault):
    """Return for each rank its error, the seconds until then, and the error of the next use."""

    def on_rank(comm):
        began, error, again = time.monotonic(), None, None
        try:
            step_of(comm, schedule)
        except (CommError, Killed) as caught:
            error = caught
            if isinstance(caught, Killed):
                comm.abort(caught)
        seconds = time.monotonic() - began
        if isinstance(error, CommError):
            with pytest.raises(CommError) as refused:
                step_of(comm, schedule)
            again = refused.value
        return error, seconds, again

    return run_threads(RANKS, on_rank, timeout=TIMEOUT, faults=[fault])


@functools.cache
def sending(schedule):
    sent = set()

    def on_rank(comm):
        post = comm._post

        def noted(send, *rest):
            if comm.rank == ODD and send:
                sent.add(comm.exchanges)
            return post(send, *rest)

        comm._post = noted
        step_of(comm, schedule)
        return comm.exchanges

    (last,) = set(run_threads(RANKS, on_rank))
    return last, sent


FAULTY = [(schedule, number) for schedule, last in SCHEDULES.items() for number in range(1, last + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_table_of_faults_covers_all_exchanges(schedule):
    assert sending(schedule)[0] == SCHEDULES[schedule]


@pytest.mark.parametrize(
    ("schedule", "number", "kind"),
    [(*at, "kill") for at in FAULTY]
    + [pytest.param(*at, "drop", marks=[pytest.mark.slow] if at[1] % 2 else []) for at in FAULTY]
    + [pytest.param(*at, "delay", marks=pytest.mark.slow) for at in FAULTY if at[0] == "scatter"],
)
def test_a_fault_at_every_exchange(schedule, number, kind):
    found = with_fault(schedule, Fault(kind, ODD, number, seconds=TIMEOUT * 1.3))
    struck = [error for rank, (error, _, _) in enumerate(found) if rank != ODD and error is not None]
    if kind == "kill":
        assert isinstance(found[ODD][0], Killed)
    if kind == "kill" or number in sending(schedule)[1]:
        assert struck, "no rank noticed"
        assert all(isinstance(error, PeerLost if kind == "kill" else (CommTimeout, PeerLost)) for error in struck)
        first = min((entry for rank, entry in enumerate(found) if rank != ODD and entry[0]), key=lambda entry: entry[1])[0]
        # Where a ring loses a message, the next rank waits for it, and the one after that for the next: any gives up first.
        named = {ODD, (ODD + 1) % RANKS} if (schedule, kind) == ("ring", "drop") else {ODD}
        (rank,) = first.ranks
        assert rank in named
        assert f"rank {rank}" in str(first)
        assert first.step
    for error, seconds, again in found:
        assert seconds < TIMEOUT * 1.3 + SLACK
        if isinstance(error, CommError):
            assert "failed before and cannot be used again" in str(again)


def test_after_a_failure_between_exchanges_no_message_is_taken_for_another():
    def on_rank(comm):
        arguments = shards(comm)
        query, out = arguments["query"], attend(comm, arguments)
        if comm.rank == ODD:
            query.detach().mul_(2)  # autograd then refuses the backward pass here, before anything is sent
        with pytest.raises(RuntimeError) as first:
            out.sum().backward()
        with pytest.raises(CommError, match="failed before and cannot be used again") as again:
            attend(comm, shards(comm))
        return [first.value, again.value]

    for rank, (first, again) in enumerate(run_threads(RANKS, on_rank, timeout=TIMEOUT)):
        assert isinstance(first, CommError) == (rank != ODD)
        assert str(first)[:40] in str(again)


def test_a_rank_whose_loss_ignores_what_it_computed():
    """It runs no backward pass; the others miss it, by name, and do not hang."""
    missed = threading.Semaphore(0)

    def on_rank(comm):
        arguments = shards(comm)
        query, out = arguments["query"], attend(comm, arguments)
        loss = query.sum() if comm.rank == ODD else out.sum()
        began = time.monotonic()
        try:
            loss.backward()
        except CommError as error:
            missed.release()
            return error, time.monotonic() - began
        for _ in range(RANKS - 1):  # it is there until nobody waits for it
            missed.acquire(timeout=TIMEOUT + SLACK)
        return None, 0.0

    found = run_threads(RANKS, on_rank, timeout=TIMEOUT)
    assert found[ODD][0] is None
    for rank in (0, 2):
        error, seconds = found[rank]
        assert isinstance(error, CommError)
        assert seconds < TIMEOUT + SLACK
    assert any(found[rank][0].ranks == (ODD,) and isinstance(found[rank][0], CommTimeout) for rank in (0, 2))


@pytest.mark.slow
def test_500_steps_leave_nothing_behind():
    held = []

    def on_rank(comm):
        arguments = {name: x[:1, :, :2] if isinstance(x, Tensor) else x for name, x in shards(comm).items()}
        arguments = {name: x.detach().requires_grad_() if isinstance(x, Tensor) else x for name, x in arguments.items()}
        for step in range(500):
            schedule = ("auto", "ring", "gather")[step % 3]
            attend(comm, dict(arguments, schedule=schedule)).sum().backward()
            if comm.rank == 0 and step % 100 == 99:
                gc.collect()
                held.append((_resident(), len([*Path("/proc/self/fd").iterdir()])))
        comm.agree(b"done")
        assert not [key for key in comm._mailbox.messages if key[1] == comm.rank]

    threads = threading.active_count()
    run_threads(2, on_rank, timeout=20)
    assert threading.active_count() == threads
    assert held[-1][0] - held[0][0] < 4 * 2**20
    assert held[-1][1] == held[0][1]


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _gradients(pack, unpack, schedule):
    torch.manual_seed(0)
    whole = torch.randn(4, 1, 64, 4, 8).unbind()

    def on_rank(comm):
        *inputs, dout = (shard(x, comm) for x in whole)
        inputs = [x.requires_grad_() for x in inputs]
        with saved_tensors_hooks(pack, unpack):
            out = ring_dilated_attention(*inputs, Pattern([16, 64], [1, 4]), comm=comm, schedule=schedule)
        return torch.autograd.grad(out, inputs, dout)

    return run_threads(RANKS, on_rank, timeout=5)


@pytest.mark.parametrize("schedule", ["auto", "gather", "ring"])
def test_hooks_on_saved_tensors_may_change_layouts_and_nothing_else(schedule):
    def strided(x):
        return x.mT.contiguous().mT

    plain, odd = _gradients(lambda x: x, lambda x: x, schedule), _gradients(lambda x: x, strided, schedule)
    assert all(torch.equal(x, y) for on_rank in zip(plain, odd, strict=True) for x, y in zip(*on_rank, strict=True))
    with pytest.raises(TypeError, match=r"query is torch\.bfloat16.*saved_tensors_hooks"):
        _gradients(lambda x: x.bfloat16(), lambda x: x, schedule)


@pytest.mark.parametrize("order", [None, TokenOrder.from_permutation(range(16)[::-1])], ids=["", "along an order"])
def test_backward_passes_in_another_order_are_errors(order):
    """Two calls of equal shapes would exchange each other's rows."""
    x, pattern = torch.randn(1, 16, 2, 4), Pattern([16], [1])

    def on_rank(comm):
        rows = shard(x, comm).requires_grad_()
        calls = [ring_dilated_attention(rows, rows, rows, pattern, comm, order=order) for _ in range(2)]
        for out in calls if comm.rank else reversed(calls):
            out.sum().backward()

    with pytest.raises(PlanMismatch, match="rank 1 and the others are in the backward passes of different calls; all ranks must"):
        run_threads(2, on_rank, timeout=TIMEOUT)
