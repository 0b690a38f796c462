"""Where a pattern is taken apart: branches of other kinds are taken by their count, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.calls import tensors
from torch.utils.flop_counter import FlopCounterMode

from dilkit import (
    Backend,
    BlockSparse,
    Device,
    DilatedSegment,
    GlobalTokens,
    Limits,
    Neighborhood,
    Pattern,
    PatternError,
    Problem,
    SlidingWindow,
    dilated_attention,
    dilated_attention_varlen,
    explain,
)
from dilkit.backend import COUNT
from dilkit.comm import packed_cuts, shard_cuts, share_sequences
from dilkit.registry import backends
from dilkit.selection import tuned
from dilkit.testing.accuracy import shortened

MIX = Pattern.of(SlidingWindow(300), DilatedSegment(512, 4), GlobalTokens(4))


def takes_the_mix(backend: Backend) -> bool:
    forms = backend.limits.forms or set()
    return COUNT in forms or problem().forms.names <= forms


def problem(pattern: Pattern = MIX, seq: int = 4096) -> Problem:
    return Problem(pattern=pattern, seq=seq, heads=4, head_dim=8, requires_grad=True)


def test_backends_refuse_kinds_that_they_do_not_name() -> None:
    for backend in backends().values():
        refused = {r.code: r for r in backend.refusals(problem())}
        if takes_the_mix(backend):
            assert "branch kind" not in refused
        else:
            assert "computes segments" in str(refused["branch kind"])


def test_limits_without_forms_take_dilated_segments_alone() -> None:
    (refused,) = Limits().refusals(problem())
    assert str(refused) == "branch kind global_tokens, sliding_window: supports dilated_segment"
    assert not Limits().refusals(problem(Pattern([512], [2])))


def test_limits_by_kinds_are_read_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"Limits\(branch_kinds=\) is now Limits\(forms=\)"):
        limits = Limits(branch_kinds=frozenset({"sliding_window", "dilated_segment"}))
    (refused,) = limits.refusals(problem())
    assert str(refused) == "branch kind global_tokens: supports dilated_segment, sliding_window"
    with pytest.raises(TypeError, match="branch_kinds and forms say the same; give forms alone"):
        Limits(branch_kinds=frozenset(), forms=frozenset())


@pytest.mark.filterwarnings("ignore:Limits:DeprecationWarning")
def test_limits_by_kinds_do_not_take_neighborhoods_that_are_cut_off() -> None:
    limits, moves = Limits(branch_kinds=frozenset({"neighborhood"})), Neighborhood((8, 512), 3)
    assert not limits.refusals(problem(Pattern.of(moves)))
    (refused,) = limits.refusals(problem(Pattern.of(replace(moves, border="cut"))))
    assert str(refused) == "branch kind neighborhood: no border='cut' and no layout by call, which are newer than branch_kinds"


def test_the_automatic_choice_is_who_takes_them_and_says_why_not_others() -> None:
    trace = explain(problem())
    assert takes_the_mix(backends()[trace.picked])
    reasons = {d.name: " ".join(d.reasons) for d in trace.decisions if d.verdict == "refused"}
    assert "branch kind global_tokens, sliding_window" in reasons["numba_cuda"]
    (reference,) = (d for d in trace.decisions if d.name == "reference")
    assert "every pair of tokens is scored" in reference.detail


def test_a_pattern_of_another_kind_has_no_lists() -> None:
    assert not hasattr(MIX, "segment_lengths")
    assert not hasattr(MIX, "nonsense")
    assert not MIX.only_segments
    assert MIX.heads is None
    assert Pattern.of(SlidingWindow(2, heads=(0, 1)), SlidingWindow(2)).heads == ((0, 1), None)


def test_cuts_keep_to_the_segments_of_a_mix() -> None:
    segments, mix = Pattern([64], [4]), Pattern.of(SlidingWindow(300), DilatedSegment(64, 4))
    assert shard_cuts(10_000, 3, mix) == shard_cuts(10_000, 3, segments) != shard_cuts(10_000, 3)
    assert shard_cuts(10_000, 3, Pattern.of(SlidingWindow(300))) == shard_cuts(10_000, 3)
    assert packed_cuts([9000, 1000], 3, mix) == packed_cuts([9000, 1000], 3, segments) != packed_cuts([9000, 1000], 3)


def test_sequences_are_shared_by_the_work_of_every_kind() -> None:
    lengths = [100, 7, 60, 44]
    assert share_sequences(lengths, 2, Pattern.dense(), heads=4) == ((0,), (1, 2, 3))
    assert share_sequences(lengths, 2, Pattern.of(SlidingWindow(8)), heads=4) == ((0, 1), (2, 3))


def test_measurements_tell_kinds_apart() -> None:
    assert tuned.branches_of(problem()) == "SlidingWindow(300) 512/4 GlobalTokens(4)"
    assert tuned.branches_of(problem(Pattern.of(SlidingWindow(300, 2)))) == "SlidingWindow(300, dilation_rate=2)"


def test_a_shorter_problem_keeps_other_kinds() -> None:
    short = shortened(problem(seq=1 << 20))
    assert short.seq < 1 << 20
    assert short.pattern.branches[::2] == MIX.branches[::2]
    assert short.pattern.branches[1].segment_length < 512


def test_a_shorter_grid_keeps_its_windows() -> None:
    window, large = Neighborhood((32, 8192), (3, 5), (1, 30)), GlobalTokens(3)
    short = shortened(problem(Pattern.of(window, large), seq=window.tokens))
    assert short.pattern == Pattern.of(Neighborhood((3, 150), (3, 5), (1, 30)), large)
    assert short.seq == 450
    two = problem(Pattern.of(Neighborhood((64, 64), 3), Neighborhood((32, 128), 3)))
    assert shortened(two) == two


FEW = Pattern.of(BlockSparse.local_global(9, 3))


@pytest.mark.parametrize("pattern", [FEW, Pattern.natten((5, 5), 3)], ids=str)
def test_packed_calls_are_prepared_for_more_tokens_than_a_sequence_has(pattern: Pattern) -> None:
    """Packed sequences are prepared for a power of two that none is longer than: their own lengths are what has to fit."""
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
