"""Exchange plans, without communication."""

from dataclasses import dataclass, field, is_dataclass, replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.ranks import TURNS, even_cuts
from helpers.strategies import mixes_with_heads, patterns_with_heads
from hypothesis import assume, given, settings, strategies as st
from numpy.typing import NDArray
from torch import Tensor

from dilkit import BlockSparse, GlobalTokens, Pattern, SlidingWindow, Strided
from dilkit.comm import ExchangePlan, Rows, exchange_plan, shard_cuts
from dilkit.comm.passes.index_tables import index_tables
from dilkit.comm.passes.ring import RingSegment, ring_segments
from dilkit.comm.plan.exchange_plan import PHASES
from dilkit.comm.plan.forecast import exchange_buffer_bytes, ring_buffer_bytes
from dilkit.comm.plan.segments import assign_heads
from dilkit.plan import cache_clear, cache_info

Labels = NDArray[np.int64]
MIB = 2**20
LONG = Pattern([2048, 8192, 32768, 131072, 524288], [1, 4, 16, 64, 256])


@st.composite
def plans(draw, schedules=("auto", "balanced", "scatter", "gather", "ring"), patterns=None):
    """Any plan that is allowed: up to 16 ranks, shards of any length, segments that end anywhere."""
    pattern, (heads, kv_heads) = draw(patterns_with_heads() if patterns is None else patterns)
    world_size = draw(st.integers(1, 16))
    seq = draw(st.integers(world_size, 48))
    inner = st.lists(st.integers(1, max(seq - 1, 1)), min_size=world_size - 1, max_size=world_size - 1, unique=True)
    uneven = st.builds(lambda cuts: (0, *sorted(cuts), seq), inner)
    cuts = draw(st.sampled_from([even_cuts(seq, world_size), shard_cuts(seq, world_size, pattern)]) | uneven)
    cuts = (*[0] * draw(st.integers(0, 2)), *cuts, *[seq] * draw(st.integers(0, 2)))  # ranks with no rows
    schedule = draw(st.sampled_from(schedules))
    fuse = schedule in ("gather", "ring") or draw(st.booleans())
    try:
        return exchange_plan(pattern, cuts, heads, kv_heads, is_causal=draw(st.booleans()), schedule=schedule, fuse_branches=fuse)
    except ValueError as error:
        assume("schedule=" not in str(error))
        raise


ANY_PLANS = plans() | plans(patterns=mixes_with_heads(tokens=48))


@dataclass
class Computed:
    """The computation of all ranks on labels in place of rows: `(batch, seq, heads)` numbers of the whole."""

    plan: ExchangePlan
    batch: int
    pairs: list[Labels] = field(init=False)
    """For each rank, how many times each query sees each key there, `(batch, heads, seq, seq)`."""

    def __post_init__(self):
        plan, ranks = self.plan, range(self.plan.world_size)
        self.tables = [index_tables(plan, rank, self.batch) for rank in ranks]
        self.pairs = [np.zeros((self.batch, plan.heads, plan.seq, plan.seq), np.int64) for _ in ranks]
        self.received = self._received()
        for rank in ranks:
            self._local(rank)
            for stack in self.tables[rank].stacks:
                self._stack(rank, stack, *self.received[rank])
            for ring in plan.rings:
                for segment in ring_segments(plan, ring, rank, self.batch):
                    self._ring(segment)

    def labels(self, rank, heads, rows):
        start, stop = self.plan.cuts[rank : rank + 2]
        batch, seq, head = np.unravel_index(np.asarray(rows), (self.batch, stop - start, heads))
        return np.ravel_multi_index((batch, seq + start, head), (self.batch, self.plan.seq, heads))

    def _received(self):
        """Return labels and roles (0, 1, 2 for q, k, v) of the rows that each rank receives."""
        plan, boxes = self.plan, []
        for rank, tables in enumerate(self.tables):
            counts = tables.sent["qkv"]
            labels, roles = np.full((2, sum(counts)), -1, np.int64)
            for number, role in enumerate("qkv"):
                for part, rows in tables.packed[role]:
                    assert (roles[part] == -1).all(), "two rows for one place of a message"
                    labels[part] = self.labels(rank, plan.heads if role == "q" else plan.kv_heads, rows)
                    roles[part] = number
            assert (roles >= 0).all(), "a place of a message left unwritten"
            boxes.append([(labels[a:b], roles[a:b]) for a, b in pairwise(np.cumsum([0, *counts]))])
        return [
            tuple(np.concatenate([boxes[s][r][i] for s in range(plan.world_size)]) for i in (0, 1)) for r in range(len(boxes))
        ]

    def _local(self, rank):
        plan, first = self.plan, self.plan.cuts[rank]
        for start, stop, pattern, position in plan.local_ranges(rank):
            assert position == first + start
            count = pattern.count(stop - start, plan.heads, kv_heads=plan.kv_heads, is_causal=plan.is_causal).numpy()
            self.pairs[rank][:, :, first + start : first + stop, first + start : first + stop] += count

    def _stack(self, rank, stack, labels, roles):
        queries, keys, values = (index.numpy() for index in (stack.queries, stack.keys, stack.values))
        assert (roles[queries] == 0).all()
        assert (roles[keys] == 1).all()
        assert (roles[values] == 2).all()
        assert (labels[keys] == labels[values]).all()
        for side, real in ((stack.queries, stack.real_queries), (stack.keys, stack.real_keys)):
            rows = side if real is None else side[real]
            assert len(rows.unique()) == len(rows), "a row twice in a stack: its results would be written over"
        self._attend(rank, stack, labels[queries], labels[keys])

    def _ring(self, segment):
        for hop in range(len(segment.lines)):
            if segment.reaches(-hop):
                other = replace(segment, line=segment.neighbour_line(-hop))
                queries = self.labels(segment.neighbour(0), self.plan.heads, segment.queries)
                keys = self.labels(other.neighbour(0), self.plan.kv_heads, other.keys)
                for stack in segment.make_stacks(hop):
                    self._attend(segment.neighbour(0), stack, queries[stack.queries.numpy()], keys[stack.keys.numpy()])

    def _attend(self, rank, stack, queries, keys):
        """Count the pairs of a stack: queries `(problems * rows * width,)`, keys `(problems * rows,)`."""
        plan, rows, width = self.plan, stack.rows, stack.width
        real_queries = np.ones(len(queries), bool) if stack.real_queries is None else stack.real_queries.numpy()
        real_keys = np.ones(len(keys), bool) if stack.real_keys is None else stack.real_keys.numpy()
        sees = stack.pattern.count(rows, width, kv_heads=1, is_causal=stack.is_causal).numpy().transpose(1, 0, 2)
        times = sees * real_queries.reshape(-1, rows, width, 1) * real_keys.reshape(-1, 1, 1, rows)
        seen = times > 0
        at, row, head = np.unravel_index(queries.reshape(-1, rows, width, 1), (self.batch, plan.seq, plan.heads))
        key_at, key_row, kv_head = np.unravel_index(keys.reshape(-1, 1, 1, rows), (self.batch, plan.seq, plan.kv_heads))
        assert (((at == key_at) & (head // (plan.heads // plan.kv_heads) == kv_head)) | ~seen).all()
        index = [np.broadcast_to(x, seen.shape)[seen] for x in (at, head, row, key_row)]
        np.add.at(self.pairs[rank], tuple(index), times[seen])


@TURNS
@settings(deadline=None, max_examples=25)
@given(ANY_PLANS, st.integers(1, 2))
def test_every_pair_of_the_count_is_computed_once(turn, plan, batch):
    computed = Computed(plan, batch)
    count = plan.pattern.count(plan.seq, plan.heads, kv_heads=plan.kv_heads, is_causal=plan.is_causal).numpy()
    total = sum(computed.pairs)
    assert (total == count).all()
    if not any(route.kind == "ring" for route in plan.routes):
        held = exchange_buffer_bytes(plan, Rows(8, "bfloat16", batch))
        assert held.tolist() == [16 * sum(tables.received["qkv"]) for tables in computed.tables]
    for roles in ("qkv", "q", "k"):
        sent, received = (np.array([getattr(x, way)[roles] for x in computed.tables]) for way in ("sent", "received"))
        assert (sent == received.T).all()
    if plan.pattern.overlap == "count":
        assert [batch * plan.work(rank) for rank in range(plan.world_size)] == [pairs.sum() for pairs in computed.pairs]
    assert sum(map(plan.work, range(plan.world_size))) * 4 == plan.pattern.flops(
        plan.seq, plan.heads, 1, kv_heads=plan.kv_heads, is_causal=plan.is_causal
    )


def test_tables_are_charged_for_all_their_row_numbers():
    plan = exchange_plan(Pattern([8, 24, 97], [1, 3, 5]), (0, 11, 60, 97), 4, 2, schedule="gather")
    for rank in range(3):
        found = index_tables(plan, rank, 2)
        assert found.nbytes == sum(x.nbytes for x in _tensors(found)) > 0


def _tensors(x):
    if isinstance(x, (Tensor, np.ndarray)):
        yield x
    elif isinstance(x, (list, tuple, dict)) or is_dataclass(x):
        inner = x if isinstance(x, (list, tuple)) else (x if isinstance(x, dict) else vars(x)).values()
        for one in inner:
            yield from _tensors(one)


def _others(tables, way, roles, rank):
    counts = getattr(tables, way)[roles]
    return sum(counts) - counts[rank]


@TURNS
@settings(deadline=None, max_examples=15)
@given(plans(("scatter",)))
def test_scatter_sends_each_row_to_one_owner_and_no_key_in_vain(turn, plan):
    assume(not plan.is_joint)  # all rows are moved then, kept by a branch or not
    computed = Computed(plan, 1)
    for branch in range(len(plan.pattern.branches)):
        sent = [
            computed.labels(rank, plan.heads, rows)
            for rank in range(plan.world_size)
            for _, rows in index_tables(plan, rank, 1, branches=(branch,)).packed["q"]
        ]
        labels = np.concatenate(sent) if sent else np.empty(0)
        assert len(np.unique(labels)) == len(labels)
    for tables, (labels, _) in zip(computed.tables, computed.received, strict=True):
        used = [stack.queries for stack in tables.stacks] + [x for stack in tables.stacks for x in (stack.keys, stack.values)]
        assert sorted(np.concatenate([*used, np.empty(0, np.int64)]).tolist()) == list(range(len(labels)))


@settings(deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(0, 50), min_size=1, max_size=16).map(lambda sizes: [*sizes, 1]))
def test_heads_are_dealt_out_in_proportion_and_in_order(heads, sizes):
    (compute_ranks,) = assign_heads(heads, np.array([sizes]))
    counts = np.bincount(compute_ranks, minlength=len(sizes))
    assert len(compute_ranks) == heads
    assert (np.diff(compute_ranks) >= 0).all()
    assert (abs(counts - heads * np.array(sizes) / sum(sizes)) < 1).all()


@settings(deadline=None)
@given(st.data())
def test_causal_work_is_balanced_where_the_ranks_of_a_segment_divide_the_heads(data):
    together = data.draw(st.sampled_from([2, 3, 4, 8]))
    rows, segments = 24 * data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    heads = together * data.draw(st.integers(1, 3))
    rate, short = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.sampled_from([8, 24]))
    pattern = Pattern([short, rows * together], [1, rate])
    plan = exchange_plan(pattern, even_cuts(rows * together * segments, together * segments), heads, is_causal=True)
    assert len({plan.work(rank) for rank in range(plan.world_size)}) == 1
    assert plan.routes[1].kind == "scatter"


@pytest.mark.parametrize(
    ("world_size", "most", "routes"),
    [(8, 1.6, ["scatter"]), (16, 2.9, ["scatter", "scatter"]), (64, 3.5, ["scatter", "scatter", "hybrid"])],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_published_bytes(world_size, most, routes, is_causal):
    plan = exchange_plan(LONG, shard_cuts(2**20, world_size, LONG), 8, is_causal=is_causal)
    sent = plan.all_bytes("forward", head_dim=64, dtype="bfloat16")
    assert sent.max() <= most * MIB
    assert [route.kind for route in plan.routes if route.kind != "local"] == routes


@TURNS
@settings(deadline=None, max_examples=15)
@given(plans(("auto",)))
def test_auto_moves_the_fewest_rows_through_the_busiest_rank(turn, plan):
    pattern = plan.pattern
    limits = None if pattern.heads is None else pattern.heads[:1]
    one = Pattern(pattern.segment_lengths[:1], pattern.dilation_rates[:1], pattern.offset, heads=limits)
    plan = replace(plan, pattern=one, fuse_branches=True)
    others = [_with_schedule(plan, schedule) for schedule in ("scatter", "gather")]
    assert _busiest(plan) <= min(map(_busiest, others))


def _with_schedule(plan, schedule):
    return exchange_plan(plan.pattern, plan.cuts, plan.heads, plan.kv_heads, is_causal=plan.is_causal, schedule=schedule)


def _busiest(plan):
    ways = [("sent", "received"), ("received", "sent")]
    return max(
        _others(tables, way, "qkv", rank) + _others(tables, back, "q", rank)
        for rank, tables in enumerate(index_tables(plan, rank, 1) for rank in range(plan.world_size))
        for way, back in ways
    )


def test_plans_are_kept_as_long_as_their_counts_fit_into_the_cache(monkeypatch):
    """The charge of a plan follows its counts, which grow with the ranks."""
    few, many = (exchange_plan(Pattern([4096], [1]), shard_cuts(4096, ranks), 32, schedule="gather") for ranks in (4, 512))
    for plan in (few, many):
        exchange = plan.exchanges[0]
        assert all(rows.any() for rows in exchange.counts)
        held = sum(x.nbytes for x in _tensors([exchange.counts, exchange.pairs, exchange.shards]))
        assert held / 3 <= plan.nbytes <= 3 * held
    cache_clear()
    monkeypatch.setenv("DILKIT_CACHE_BYTES", str(4 * many.nbytes))
    for rows in range(4096, 4106):
        exchange_plan(Pattern([4096], [1]), shard_cuts(rows, 512), 32).local_ranges(0)
    info = cache_info()
    assert info.bytes <= info.limit
    assert 0 < info.entries < 20
    cache_clear()


def test_a_small_shard_does_not_compute_as_much_as_a_large_one():
    """Queries with many more, or few, keys are padded to tiles of 1024 rows at most."""
    plan = exchange_plan(Pattern([8192], [1]), (0, 16, 8192), 1, schedule="gather")
    computed = [sum(len(stack.keys) * stack.rows for stack in index_tables(plan, rank, 1).stacks) for rank in (0, 1)]
    assert computed[0] <= 1024 * 8192
    assert computed[1] <= 8176 * (8176 + 2 * 1024)


@pytest.mark.parametrize(("kv_heads", "most"), [(8, 1.0), (4, 1.0), (2, 1.5)])
def test_a_balanced_causal_plan_gives_ranks_the_same_work_as_far_as_heads_can(kv_heads, most):
    """Contiguous shards of full causal attention give the last of four ranks 7 / 4 of the mean."""

    def busiest(schedule):
        pairs = exchange_plan(Pattern.dense(), shard_cuts(65536, 4), 32, kv_heads, is_causal=True, schedule=schedule).all_work[
            "total"
        ]
        return float(max(pairs) * 4 / sum(pairs))

    assert busiest("auto") == pytest.approx(7 / 4, abs=1e-3)
    assert busiest("balanced") == pytest.approx(most, abs=1e-3)


@given(st.data())
def test_no_route_computes_less_on_the_busiest_rank_than_balanced(data):
    plan = data.draw(plans(schedules=("balanced",)))
    other = replace(plan, schedule="auto")
    for one, another in zip(plan.exchanges, other.exchanges, strict=True):
        assert max(one.pairs) <= max(another.pairs)


@pytest.mark.parametrize("is_causal", [False, True])
def test_ring_buffers_are_four_blocks(is_causal):
    plan = ExchangePlan(Pattern([10, 70], [2, 3]), shard_cuts(70, 4), 4, 2, is_causal, "ring")
    found = ring_buffer_bytes(plan, Rows(8, "float32", 2, key_padding_mask=True))
    for rank in range(4):
        blocks = [
            sum(max(ring.shards.key_rows[[*segment.lines]]) for segment in ring_segments(plan, ring, rank, 2))
            for ring in plan.rings
        ]
        assert found[rank] == 4 * max(blocks) * 2 * (2 * 8 * 4 + 1)


def test_plans_explain_themselves():
    plan = ExchangePlan(Pattern([16, 64, 128], [1, 2, 4]), shard_cuts(128, 4), 8, 8)
    first, second, third = plan.explain(Rows(8, "bfloat16")).splitlines()
    assert first == "branch 0: segments of 16, rate 1: local: every segment is within one rank: nothing is sent"
    assert second.startswith("branch 1: segments of 64, rate 2: scatter over 2 ranks: ")
    assert "scatter 256, gather 256" in second
    sent = [int(plan.traffic(phase, Rows(8, "bfloat16"), 2).sent.max()) for phase in PHASES]
    assert f"sends {sent[0]:,} bytes forward, {sent[1]:,} backward" in third
    assert "scatter moves the fewest rows" in third
    kinds = SlidingWindow(9), GlobalTokens(4), BlockSparse.local_global(16, 8), Strided(8), SlidingWindow(1)
    plan = ExchangePlan(Pattern.of(*kinds), shard_cuts(128, 4), 8, 8)
    window, tokens, blocks, stride, nothing = plan.explain(Rows(8, "bfloat16")).splitlines()
    assert window.startswith(
        "branch 0: a window of 9 tokens: halo over 4 ranks: each rank is sent the keys and values within reach"
    )
    assert window.endswith("the rank that sends most sends 4,096 bytes forward, 4,096 backward (bfloat16)")  # 8 rows to each side
    assert tokens.startswith(
        "branch 1: the first 4 tokens, seen by all, and seeing all: broadcast over 4 ranks: keys and values of"
    )
    assert ": blocks over 4 ranks: each rank is sent the blocks of keys and values that its own queries see" in blocks
    assert "the whole sequence, counted from each query: scatter over 4 ranks" in stride
    assert nothing.endswith("local: no rank needs rows of another: nothing is sent")
    text = ExchangePlan(Pattern([128], [4]), shard_cuts(128, 4), 8, 8, schedule="ring").explain()
    assert "ring over 4 ranks" in text
    assert "as schedule='ring' says" in text


def test_stacks_of_a_ring_are_kept_as_far_as_the_cache_has_room(monkeypatch):
    plan = exchange_plan(Pattern([64], [1]), (0, 16, 32, 48, 64), 2, schedule="ring")
    made = mock.Mock(side_effect=RingSegment.make_stacks)
    monkeypatch.setattr(RingSegment, "make_stacks", lambda segment, hop: made(segment, hop))
    facts = plan, plan.rings[0], 3, 1, torch.device("cpu"), False
    (kept,) = ring_segments(*facts)
    assert made.call_count == len(kept.stacks) == 4
    assert kept.stack_bytes == sum(x.nbytes for hop in kept.stacks for stack in hop for x in (stack.queries, stack.keys))
    monkeypatch.setenv("DILKIT_CACHE_BYTES", str(2 * kept.stack_bytes))
    cache_clear()
    (lazy,) = ring_segments(*facts)
    assert (made.call_count, lazy.keeps_stacks) == (4, False)
    for hop in range(4):
        for one, other in zip(kept.stacks_at(hop), lazy.stacks_at(hop), strict=True):
            assert torch.equal(one.queries, other.queries)
            assert torch.equal(one.keys, other.keys)
