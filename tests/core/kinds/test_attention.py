"""Branches of every kind through what is built on attention."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.calls import tensors
from torch.utils.flop_counter import FlopCounterMode

from dilkit import (
    BlockSparse,
    Device,
    DilatedAttention,
    DilatedCache,
    DilatedSegment,
    GlobalTokens,
    Neighborhood,
    Pattern,
    PatternError,
    Problem,
    SlidingWindow,
    TokenOrder,
    dilated_attention,
    dilated_attention_varlen,
    explain,
    order,
    ordered_dilated_attention,
    plan,
)
from dilkit.comm import packed_cuts, shard_cuts, share_sequences
from dilkit.testing.accuracy import shortened


def test_tables_that_outgrow_the_cache_are_told_of_once(monkeypatch):
    pattern = Pattern.of(BlockSparse(np.random.default_rng(0).random((512, 512)) < 0.5, 1))
    rows = tensors(seq=512, heads=1, kv_heads=1, batch=1, head_dim=1)
    plan.cache_clear()
    monkeypatch.setenv("DILKIT_CACHE_BYTES", str(2**22))
    with pytest.warns(UserWarning, match="made anew at each call; DILKIT_CACHE_BYTES=[0-9]+ keeps them") as told:
        dilated_attention(*rows, pattern, backend="native")
    monkeypatch.setenv("DILKIT_CACHE_BYTES", str(told[0].message).split("DILKIT_CACHE_BYTES=")[1].split()[0])
    dilated_attention(*rows, pattern, backend="native")
    misses = plan.cache_info().misses
    dilated_attention(*rows, pattern, backend="native")
    assert plan.cache_info().misses == misses


def test_neighborhoods_of_cells_do_not_go_along_a_curve():
    q, k, v = tensors(seq=24, kv_heads=2, dtype=torch.float64)
    pattern, curve = Pattern.natten((4, 6), 3), order((4, 6))
    for orders in (curve, [order((24,)), curve]):
        with pytest.raises(
            ValueError, match=r"neighborhoods of 3 x 3 .* row by row, and order\(\(4, 6\), 'hilbert'\) puts them along"
        ):
            ordered_dilated_attention(q, k, v, pattern, orders)
    along = [curve.apply(x) for x in (q, k, v)]  # tokens that lie along the curve, and an order that puts them row by row
    rows = TokenOrder.from_permutation(curve.rank)
    expected = curve.apply(dilated_attention(q, k, v, pattern))
    torch.testing.assert_close(ordered_dilated_attention(*along, pattern, rows), expected)
    for fitting in (Pattern.natten((4, 6), 3), Pattern.of(Neighborhood(24, 3))):
        ordered_dilated_attention(q, k, v, fitting, order((24,)))
    assert ordered_dilated_attention(q, k, v, Pattern.of(Neighborhood(24, 3)), curve).shape == q.shape  # a window along it


BEYOND = Pattern.of(SlidingWindow(3), GlobalTokens([1, 16]))


class Whole(torch.nn.Module):
    def forward(self, query, key, value):
        return dilated_attention(query, key, value, BEYOND)


def exported():
    sizes = {1: torch.export.Dim("seq", min=2)}
    return torch.export.export(Whole(), tuple(tensors(seq=20)), dynamic_shapes=(sizes,) * 3).module()


WAYS = {
    "function": lambda: partial(dilated_attention, pattern=BEYOND),
    "module": lambda: DilatedAttention(BEYOND),
    "order": lambda: lambda q, k, v: ordered_dilated_attention(q, k, v, BEYOND, order((q.shape[1],))),
    "vmap": lambda: torch.func.vmap(lambda q, k, v: Whole()(q[None], k[None], v[None])[0]),
    "compiled": lambda: torch.compile(Whole(), fullgraph=True, dynamic=False, backend="eager"),
    "compiled for all lengths": lambda: torch.compile(Whole(), fullgraph=True, dynamic=True, backend="eager"),
    "exported for all lengths": exported,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_whole_sequence_without_a_global_token_is_refused(way):
    call = WAYS[way]()
    for seq in (17, 20):
        call(*tensors(seq=seq))
    with pytest.raises(PatternError, match="seq=16: tokens has position 16; positions from 0 to 15 are needed"):
        call(*tensors(seq=16))


def test_a_global_token_that_may_yet_come_is_taken():
    inputs = tensors(batch=1, seq=16)
    starts = torch.tensor([0, 6, 16], dtype=torch.int32)
    short = Pattern.of(SlidingWindow(3), GlobalTokens([1]))
    for call in (
        partial(dilated_attention, is_causal=True),
        lambda q, k, v, pattern: dilated_attention_varlen(q[0], k[0], v[0], pattern, starts),
        lambda q, k, v, pattern: DilatedCache(pattern, kv_heads=k.shape[2]).attend(q, k, v),
    ):
        torch.testing.assert_close(call(*inputs, pattern=BEYOND), call(*inputs, pattern=short))


MIX = Pattern.of(SlidingWindow(300), DilatedSegment(512, 4), GlobalTokens(4))


def problem(pattern=MIX, seq=4096):
    return Problem(pattern=pattern, seq=seq, heads=4, head_dim=8, requires_grad=True)


def test_a_pattern_of_another_kind_has_no_lists():
    assert not hasattr(MIX, "segment_lengths")
    assert not hasattr(MIX, "nonsense")
    assert not MIX.only_segments
    assert MIX.heads is None
    assert Pattern.of(SlidingWindow(2, heads=(0, 1)), SlidingWindow(2)).heads == ((0, 1), None)


def test_cuts_keep_to_the_segments_of_a_mix():
    segments, mix = Pattern([64], [4]), Pattern.of(SlidingWindow(300), DilatedSegment(64, 4))
    assert shard_cuts(10_000, 3, mix) == shard_cuts(10_000, 3, segments) != shard_cuts(10_000, 3)
    assert shard_cuts(10_000, 3, Pattern.of(SlidingWindow(300))) == shard_cuts(10_000, 3)
    assert packed_cuts([9000, 1000], 3, mix) == packed_cuts([9000, 1000], 3, segments) != packed_cuts([9000, 1000], 3)


def test_sequences_are_shared_by_the_work_of_every_kind():
    lengths = [100, 7, 60, 44]
    assert share_sequences(lengths, 2, Pattern.dense(), heads=4) == ((0,), (1, 2, 3))
    assert share_sequences(lengths, 2, Pattern.of(SlidingWindow(8)), heads=4) == ((0, 1), (2, 3))


def test_a_shorter_problem_keeps_other_kinds():
    short = shortened(problem(seq=1 << 20))
    assert short.seq < 1 << 20
    assert short.pattern.branches[::2] == MIX.branches[::2]
    assert short.pattern.branches[1].segment_length < 512


def test_a_shorter_grid_keeps_its_windows():
    window, large = Neighborhood((32, 8192), (3, 5), (1, 30)), GlobalTokens(3)
    short = shortened(problem(Pattern.of(window, large), seq=window.tokens))
    assert short.pattern == Pattern.of(Neighborhood((3, 150), (3, 5), (1, 30)), large)
    assert short.seq == 450
    two = problem(Pattern.of(Neighborhood((64, 64), 3), Neighborhood((32, 128), 3)))
    assert shortened(two) == two


FEW = Pattern.of(BlockSparse.local_global(9, 3))


@pytest.mark.parametrize("pattern", [FEW, Pattern.natten((5, 5), 3)], ids=str)
def test_packed_calls_are_prepared_for_more_tokens_than_a_sequence_has(pattern):
    """The prepared length is a power of two; only the sequences' own lengths have to fit."""
    q, k, v = (x.squeeze(0) for x in tensors(batch=1, seq=50))
    starts = torch.tensor([0, 25, 50], dtype=torch.int32)
    with FlopCounterMode(display=False) as counted:
        out = dilated_attention_varlen(q, k, v, pattern, starts)
    assert counted.get_total_flops() > 0
    alone = dilated_attention(q[None, 25:], k[None, 25:], v[None, 25:], pattern)
    torch.testing.assert_close(out[25:], alone[0])
    asked = Problem(pattern=pattern, seq=32, heads=4, head_dim=8, varlen=True, device=Device.assume("sm_80"))
    assert explain(asked).picked in ("cupy_raw", "reference")
    for refused in ([0, 22, 50], [0, 50]):
        with pytest.raises(PatternError, match=r"seq=(28|50|22)"):
            dilated_attention_varlen(q, k, v, pattern, torch.tensor(refused, dtype=torch.int32))
