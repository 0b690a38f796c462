"""The tiles that kernels are given for patterns of the benchmarks, counted."""

import pytest
import torch
from helpers.cuda_fakes import RecordingLauncher

from dilkit import DilatedSegment, Documents, Pattern
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.tiles.schedule import LOW_ROWS, MOST_ROWS, schedule
from dilkit.inputs import Inputs
from dilkit.problem import Problem

A = Pattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
C = Pattern([2048, 8192, 32768, 131072], [1, 4, 16, 64])


@pytest.mark.parametrize(
    ("pattern", "rows", "groups", "tiles"),
    [(A, LOW_ROWS, 1, 512), (A, MOST_ROWS, 1, 256), (C, LOW_ROWS, 2, 2080), (C, MOST_ROWS, 2, 1040)],
)
def test_tiles_are_full_and_as_few_as_that_allows(pattern, rows, groups, tiles):
    problem = Problem(pattern=pattern, seq=pattern.branches[-1].segment_length, heads=1, head_dim=64, is_causal=True)
    found = schedule(problem, rows).groups
    assert (len(found), sum(len(group.query_tiles) for group in found)) == (groups, tiles)
    assert {int(count) for group in found for count in group.query_tiles["rows"]} == {rows}


@pytest.mark.parametrize(
    ("pattern", "seq", "rows"),
    [
        (A, 2**15, MOST_ROWS),
        (C, 2**17, MOST_ROWS),
        (Pattern.of(DilatedSegment(2**15, 1), Documents([128] * 2**8)), 2**15, MOST_ROWS),
        (Pattern.of(DilatedSegment(2**15, 1), Documents([64] * 2**9)), 2**15, LOW_ROWS),
    ],
    ids=["A", "C", "full runs", "half full runs"],
)
def test_causal_patterns_run_on_tall_tiles_but_for_runs_that_fill_half_of_one(pattern, seq, rows):
    problem = Problem(pattern=pattern, seq=seq, heads=2, head_dim=16, dtype="bfloat16", is_causal=True)
    launcher, x = RecordingLauncher(resident=264), torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16).expand(1, seq, 2, 16)
    CupyRaw(launcher, (9, 0)).forward(Inputs(x, x, x), problem)
    assert {launch.kernel.tile_rows for launch in launcher.launches} == {rows}
