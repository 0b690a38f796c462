"""Rows and gradients kept and sent between the passes of ranks."""

from itertools import product

import pytest
import torch
from helpers.calls import starts_of
from helpers.live_bytes import LiveBytes
from helpers.pairwise import all_but
from helpers.ranks import PATTERN, assert_counted, assert_same, even_cuts, over_ranks, plan_of

from dilkit import BlockSparse, GlobalTokens, Pattern, SlidingWindow
from dilkit.comm import Rows, exchange_plan, ring_dilated_attention, ring_dilated_attention_varlen, run_threads, shard_cuts
from dilkit.comm.plan.exchange_plan import PHASES
from dilkit.comm.plan.forecast import Forecast, Speed, exchange_buffer_bytes
from dilkit.testing.tensors import Tensors

pytestmark = pytest.mark.usefixtures("on_one_core")

SEQ, HEADS, KV_HEADS, D, BATCH = 97, 4, 2, 8, 2
CUTS = even_cuts(SEQ, 3)
SCHEDULES = "auto", "gather", "ring"
KINDS = Pattern.of(SlidingWindow(20), GlobalTokens(4), BlockSparse.local_global(SEQ, 16))
CALLS = {
    "auto": ({}, PATTERN, {}),
    "half types": (dict(dtype=torch.bfloat16), PATTERN, {}),
    "gather, masked": (dict(masked=True), PATTERN, dict(schedule="gather")),
    "ring, causal": ({}, PATTERN, dict(schedule="ring", is_causal=True)),
    "one by one": (dict(dtype=torch.bfloat16), PATTERN, dict(fuse_branches=False)),
    "other kinds": ({}, KINDS, dict(is_causal=True)),
    "joint": ({}, Pattern([16, 48], [1, 2], overlap="once"), {}),
    "packed": (dict(batch=1), PATTERN, dict(lengths=(10, 61, 26))),
}


def random_tensors(dtype=torch.float32, batch=BATCH, masked=False):
    draw = torch.Generator().manual_seed(1)
    query, key, value, dout = (
        torch.randn(batch, SEQ, heads, D, generator=draw).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    mask = torch.rand(batch, SEQ, generator=draw) < 0.2 if masked else None
    return Tensors(query, key, value, mask, dout, torch.randn(batch, HEADS, SEQ, generator=draw))


def slow_unless(quick):
    return [] if quick else [pytest.mark.slow]


@pytest.mark.parametrize("name", all_but(["auto", "gather, masked", "ring, causal", "one by one", "joint"], CALLS))
def test_rows_that_are_sent_again_give_the_same_bits_and_the_planned_bytes(name):
    of_tensors, pattern, options = CALLS[name]
    tensors = random_tensors(**of_tensors)
    kept = over_ranks(tensors, pattern, CUTS, **options)
    again = over_ranks(tensors, pattern, CUTS, keep="nothing", **options)
    assert_same(again.results, kept.results, tolerance=0.0)
    assert_counted(again, tensors)
    assert again.forward_bytes == kept.forward_bytes
    if options.get("schedule") != "ring":
        assert sum(again.backward_bytes) > sum(kept.backward_bytes)


@pytest.mark.parametrize(
    ("keep", "schedule"),
    [pytest.param(*one, marks=slow_unless(one == ("nothing", "auto"))) for one in product(("rows", "nothing"), SCHEDULES)],
)
def test_tensors_hold_as_many_bytes_between_the_passes_as_is_planned(keep, schedule):
    """Beside its own query, key, value, out and lse. What travels through threads is gone by then."""
    tensors = random_tensors(masked=True)

    def on_rank(comm):
        rows = slice(*CUTS[comm.rank : comm.rank + 2])
        own = [x[:, rows].clone() for x in (tensors.query, tensors.key, tensors.value, tensors.mask)]
        query, key, value = (x.requires_grad_() for x in own[:3])

        def attend():
            return ring_dilated_attention(query, key, value, PATTERN, comm, key_padding_mask=own[3], keep=keep, schedule=schedule)

        with LiveBytes(*own) as live:
            attend()  # which makes tables
        comm.share(b"", "all have computed")  # and received what is counted where it was sent
        tables = live.now()
        with live:
            out = attend()
        comm.share(b"", "all have computed")
        return live.now() - tables - out.nbytes - out[..., 0].numel() * 4

    plan = exchange_plan(PATTERN, CUTS, HEADS, KV_HEADS, keep=keep, schedule=schedule)
    planned = Forecast(plan, Rows(D, "float32", BATCH, key_padding_mask=True), Speed(1.0, 1.0)).kept.tolist()
    assert run_threads(3, on_rank) == planned
    assert any(planned) == (keep == "rows" and schedule != "ring")


def peak(ranks, keep):
    pattern, heads, head_dim = Pattern([64, 128, 256, 512, 1024], [1, 2, 4, 8, 16]), 8, 64
    cuts = shard_cuts(1024, ranks, pattern)

    def once(comm):
        rows = cuts[comm.rank + 1] - cuts[comm.rank]
        with LiveBytes() as live:
            *shards, dout = (torch.randn(1, rows, heads, head_dim) for _ in range(4))
            out = ring_dilated_attention(*(x.requires_grad_() for x in shards), pattern, comm, keep=keep)
            torch.autograd.grad(out, shards, dout)
        return live.peak

    def on_rank(comm):
        once(comm)  # which makes tables
        return once(comm)

    return max(run_threads(ranks, on_rank))


def test_a_rank_needs_a_quarter_of_the_memory_of_one_where_nothing_is_kept():
    """Configuration A, with shorter segments: buffers fit where the local gradients are made later."""
    assert peak(1, "nothing") / peak(4, "nothing") >= 3.6


def test_buffers_hold_the_rows_of_one_branch_at_a_time():
    pattern, sizes = Pattern([128, 256], [2, 4]), Rows(D, "float32", BATCH)
    plans = {keep: exchange_plan(pattern, shard_cuts(256, 4), HEADS, KV_HEADS, keep=keep) for keep in ("rows", "nothing")}
    alone = [
        exchange_buffer_bytes(exchange_plan(one, shard_cuts(256, 4), HEADS, KV_HEADS), sizes)
        for one in (Pattern([128], [2]), Pattern([256], [4]))
    ]
    assert (exchange_buffer_bytes(plans["rows"], sizes) == alone[0] + alone[1]).all()
    assert (exchange_buffer_bytes(plans["nothing"], sizes) == alone[0]).all()  # which has more
    forecast = Forecast(plans["nothing"], sizes, Speed(1e9, 1e9))
    assert (forecast.memory["exchange buffers"] == alone[0]).all()
    assert not forecast.kept.any()
    assert "rows once more" in plans["nothing"].explain()
    assert "rows once more" not in plans["rows"].explain()


GRADIENTS = [*product(("q", "k", "v", "qv", "kv"), SCHEDULES, ("rows", "nothing"))]
QUICK_GRADIENTS = (("qv", "auto", "rows"), ("k", "gather", "nothing"), ("v", "ring", "rows"))


def gradients(comm, asked, **options):
    tensors, rows = random_tensors(), slice(*CUTS[comm.rank : comm.rank + 2])
    shards = {role: x[:, rows].clone() for role, x in zip("qkv", (tensors.query, tensors.key, tensors.value), strict=True)}
    leaves = {role: shards[role].requires_grad_() for role in asked}
    out = ring_dilated_attention(*shards.values(), PATTERN, comm, **options)
    sent = comm.sent_bytes
    found = torch.autograd.grad(out, [*leaves.values()], tensors.dout[:, rows])
    return dict(zip(leaves, found, strict=True)), comm.sent_bytes - sent


@pytest.mark.parametrize(
    ("asked", "schedule", "keep"), [pytest.param(*one, marks=slow_unless(one in QUICK_GRADIENTS)) for one in GRADIENTS]
)
def test_gradients_are_sent_for_inputs_that_ask_for_them(asked, schedule, keep):
    """They have the bits that they have beside others, and take the planned bytes."""
    options, sizes = dict(schedule=schedule, keep=keep), dict(head_dim=D, dtype="float32", batch=BATCH)
    plan = exchange_plan(PATTERN, CUTS, HEADS, KV_HEADS, **options)
    every, some = (run_threads(3, lambda comm, roles=roles: gradients(comm, roles, **options)) for roles in ("qkv", asked))
    for rank, ((found, sent), (all_found, all_sent)) in enumerate(zip(some, every, strict=True)):
        assert sent == plan.bytes(rank, "backward", **sizes, gradients=asked)
        assert all_sent == plan.bytes(rank, "backward", **sizes)
        assert all(torch.equal(grad, all_found[role]) for role, grad in found.items())


def test_what_one_rank_asks_for_all_compute():
    every = run_threads(3, lambda comm: gradients(comm, "qkv"))
    mixed = run_threads(3, lambda comm: gradients(comm, "qkq"[comm.rank]))
    for role, (found, _), (all_found, _) in zip("qkq", mixed, every, strict=True):
        assert torch.equal(found[role], all_found[role])


def test_packed_sequences_send_the_gradients_that_are_asked_for():
    lengths, tensors = (10, 61, 26), random_tensors(batch=1)
    starts = starts_of(lengths)
    plan = plan_of(PATTERN, CUTS, lengths, HEADS, KV_HEADS, keep="nothing")

    def on_rank(comm):
        rows = slice(*CUTS[comm.rank : comm.rank + 2])
        query, key, value = (x[0, rows].clone() for x in (tensors.query, tensors.key, tensors.value))
        out = ring_dilated_attention_varlen(query, key, value.requires_grad_(), PATTERN, comm, starts, keep="nothing")
        forward = comm.sent_bytes
        out.sum().backward()
        assert value.grad is not None
        return comm.sent_bytes - forward

    planned = [plan.bytes(rank, "backward", head_dim=D, dtype="float32", gradients="v") for rank in range(3)]
    assert run_threads(3, on_rank) == planned


@pytest.mark.parametrize("phase", PHASES)
def test_what_the_plan_sends_it_receives(phase):
    plan = exchange_plan(KINDS, CUTS, HEADS, KV_HEADS, keep="nothing")
    traffic = plan.traffic(phase, Rows(D, "float32", gradients="qv"))
    assert traffic.sent.sum() == traffic.received.sum() > 0
