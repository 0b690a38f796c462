"""Packed sequences over ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers.calls import starts_of
from helpers.pairwise import every_pair
from helpers.ranks import TURNS, assert_counted, assert_same, even_cuts, on_one, over_ranks, raised_on_all, uneven_cuts
from helpers.strategies import patterns_with_heads
from hypothesis import given, settings, strategies as st

from dilkit import GlobalTokens, Pattern, Prefix, SlidingWindow, Strided, dilated_attention_varlen
from dilkit.comm import PackedPlan, PlanMismatch, packed_cuts, ring_dilated_attention_varlen, run_threads, share_sequences
from dilkit.oracle import oracle_attention_varlen
from dilkit.testing.tensors import Tensors

pytestmark = pytest.mark.usefixtures("on_one_core")

PATTERN = Pattern([8, 24, 97], [1, 3, 5])
Cuts = tuple[int, ...]


def tensors(total, heads=(4, 2)):
    draw = torch.Generator().manual_seed(total)
    shapes = [*((1, total, h, 6) for h in (heads[0], heads[1], heads[1], heads[0])), (1, heads[0], total), (heads[0],)]
    query, key, value, dout, dlse, sink = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return Tensors(query, key, value, None, dout, dlse, sink)


def on_one_process(work, lengths, whole, through_lse, **options):
    def attend(*rows, sink):
        given = dict(options, sink=sink, return_lse=True)
        found = dilated_attention_varlen(*(x[0] for x in rows), work, starts_of(lengths), **given)
        return tuple(x[None] for x in found)

    return on_one(attend, whole, through_lse)


def check(work, lengths, cuts, asked={}, **options):  # noqa: B006
    """Hold ranks to one process; `asked` are further options of ranks.

    Odd numbers of ranks have gradients through lse, others send what is planned.
    """
    whole, through_lse = tensors(sum(lengths)), len(cuts) % 2 == 0
    found = over_ranks(whole, work, cuts, lengths=lengths, through_lse=through_lse, **options, **asked)
    assert_same(found.results, on_one_process(work, lengths, whole, through_lse, **options))
    if not through_lse:
        assert_counted(found, whole)


PACKINGS = {
    "one long, short ones around": ([3, 0, 150, 7, 40], {2: (0, 90, 200), 3: (0, 60, 110, 200)}),
    "cut in three places": ([60, 60, 60], {2: (0, 50, 180), 3: (0, 30, 70, 180)}),
    "cut where sequences begin": ([50, 0, 70, 60], {2: (0, 50, 180), 3: (0, 50, 120, 180)}),
    "one": ([130], {2: (0, 1, 130), 3: (0, 24, 97, 130)}),
    "many short ones": ([i % 5 for i in range(300)], {2: even_cuts(600, 2), 3: uneven_cuts(600, 3)}),
}


@pytest.mark.parametrize(("packing", "size", "schedule"), every_pair(PACKINGS, (1, 2, 3), ("auto", "scatter", "gather", "ring")))
def test_as_one_process(packing, size, schedule):
    lengths, cuts = PACKINGS[packing]
    check(PATTERN, lengths, cuts.get(size, (0, sum(lengths))), dict(schedule=schedule), is_causal=size == 2)


@TURNS
@settings(max_examples=8, deadline=None)
@given(st.data(), patterns_with_heads(), st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 4), st.booleans())
def test_anything(turn, data, drawn, lengths, size, is_causal):
    (pattern, heads), lengths = drawn, [*lengths, 4]
    cuts = uneven_cuts(sum(lengths), size, data.draw(st.integers(0, 99), "seed"))
    whole, options = tensors(sum(lengths), heads), dict[str, Any](is_causal=is_causal, softcap=(None, 0.7)[size % 2])
    found = over_ranks(whole, pattern, cuts, lengths=lengths, through_lse=True, **options)
    oracle = partial(oracle_attention_varlen, pattern=pattern, lengths=lengths, **options)
    assert_same(found.results, on_one(oracle, whole, through_lse=True))


@pytest.mark.parametrize("pattern", [Pattern.natten((5, 6), 3), Pattern.dilateformer((5, 6), 4, dilations=(1, 3))], ids=str)
def test_neighborhoods_of_grids_packed_one_after_the_other(pattern):
    """Every sequence is a grid of 5 x 6 cells; another length is refused by name."""
    for lengths, cuts in (([30, 0, 30, 30], (0, 10, 40, 75, 90)), ([30, 30, 30], (0, 30, 90))):
        check(pattern, lengths, cuts)
    with pytest.raises(ValueError, match=r"seq=20: the neighborhood is of a grid of 5 x 6, 30 tokens"):
        PackedPlan(pattern, (0, 30, 80), (0, 30, 60, 80), 4, 2)


@pytest.mark.parametrize("tokens", [4, [1, 3]], ids=str)
@pytest.mark.parametrize("direction", ["both", "read"])
@pytest.mark.parametrize("pattern", [(), (SlidingWindow(3),), (Prefix(2), Strided(2))], ids=["alone", "mix", "joint"])
def test_global_tokens_beyond_a_short_sequence_are_of_no_rank(pattern, direction, tokens):
    """The first sequence is cut and shorter than the global tokens; the last rank has none of them."""
    work = Pattern.of(GlobalTokens(tokens, direction), *pattern, overlap="once" if len(pattern) == 2 else "count")
    for is_causal in (False, True):
        check(work, [3, 5], (0, 2, 4, 8), is_causal=is_causal)


def test_whole_sequences_are_sent_nowhere():
    lengths, work = [50, 7, 0, 70, 60, 13], Pattern([8, 24], [1, 3])
    shares = share_sequences(lengths, 3, work, 4)
    assert sorted(i for share in shares for i in share) == [*range(6)]
    loads = [sum(work.flops(lengths[i], 4, 1) for i in share) for share in shares]
    assert max(loads) <= 4 / 3 * max(work.flops(70, 4, 1), sum(loads) / 3)
    assert [len(share) for share in share_sequences([50] * 9, 3, work, 4)] == [3, 3, 3]
    plan = PackedPlan(PATTERN, (0, 57, 127, 200), tuple(starts_of(lengths).tolist()), 4, 2)
    assert plan.cut_sequences == ()
    assert [plan.bytes(rank, "forward", head_dim=6, dtype="float32") for rank in range(3)] == [0, 0, 0]


def test_work_of_all_ranks_is_that_of_all_sequences():
    lengths, cuts = PACKINGS["one long, short ones around"]
    for is_causal in (False, True):
        plan = PackedPlan(PATTERN, cuts[3], tuple(starts_of(lengths).tolist()), 4, 2, is_causal)
        whole = sum(PATTERN.flops(n, 4, 1, kv_heads=2, is_causal=is_causal) // 4 for n in lengths)
        assert sum(map(plan.work, range(3))) == whole


def test_cuts_lie_where_sequences_begin_or_segments_do_or_even():
    assert packed_cuts([100, 100, 100], 3) == (0, 100, 200, 300)
    assert packed_cuts([335, 665], 3) == (0, 335, 666, 1000)  # nothing begins near 666
    assert packed_cuts([340, 660], 3, Pattern([8, 16], [1, 2])) == (0, 21 * 16, 340 + 41 * 8, 1000)
    assert packed_cuts([40, 0, 60], 2) == (0, 50, 100)  # 40 is too far
    assert packed_cuts([100], 1) == (0, 100)


Q, K, V = (torch.zeros(20, heads, 6) for heads in (4, 2, 2))
WRONG = {
    "starts of another rank's": (dict(cu_seqlens=starts_of([6, 34])), PlanMismatch, "cu_seqlens"),
    "a batch": (dict(query=Q[None]), ValueError, r"query has shape \(1, 20, 4, 6\); \(total, heads, head_dim\)"),
    "int64": (dict(cu_seqlens=starts_of([5, 35]).long()), TypeError, "cu_seqlens is torch.int64"),
    "no rows": (dict(query=Q[:0], key=K[:0], value=V[:0]), ValueError, "query has no rows on this rank"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_of_one_rank_is_an_error_of_all(wrong):
    changed, error, text = WRONG[wrong]

    def on_rank(comm):
        given = dict(query=Q, key=K, value=V, pattern=PATTERN, comm=comm, cu_seqlens=starts_of([5, 35]))
        with pytest.raises(error if comm.rank == 1 else PlanMismatch, match=text if comm.rank == 1 else None):
            ring_dilated_attention_varlen(**{**given, **(changed if comm.rank == 1 else {})})

    run_threads(2, on_rank, timeout=30)


@pytest.mark.parametrize(
    ("cu_seqlens", "text"),
    [
        (starts_of([5, 30]), "cu_seqlens ends with 35; the number of rows of query is needed, 40"),
        (starts_of([5, 35]) + 1, "cu_seqlens begins with 1"),
        (starts_of([50, -10]), "cu_seqlens decreases at index 2, from 50 to 40"),
    ],
)
def test_starts_that_do_not_cut_the_rows_of_all_ranks(cu_seqlens, text):
    raised_on_all(2, lambda comm: ring_dilated_attention_varlen(Q, K, V, PATTERN, comm, cu_seqlens), text)
