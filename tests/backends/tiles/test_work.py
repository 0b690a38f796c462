"""What the tiles of the measured patterns make a causal kernel score, counted: nothing of it is a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.cuda_fakes import RecordingLauncher
from numpy.typing import NDArray

from dilkit import DilatedSegment, Documents, Pattern
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.tiles.schedule import LOW_ROWS, MOST_ROWS, Group, schedule
from dilkit.inputs import Inputs
from dilkit.problem import Problem

KEYS = 64
"""Of a score tile; a warp computes a quarter of its rows, and leaves out what is after all of them."""

PATTERNS = {
    "A": Pattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16]),
    "C": Pattern([2048, 8192, 32768, 131072], [1, 4, 16, 64]),
}


class Work(NamedTuple):
    """`scored`: products of a row and a key that warps compute; `asked`: pairs of a row and a key that it sees; `padding`: the
    share of rows of tiles that are none; `loads`: of 16 keys by a warp, for each 16 x 16 products."""

    groups: int
    tiles: int
    scored: int
    asked: int
    padding: float
    loads: float


def visible(group: Group, tile: Any, seq: int) -> NDArray[np.int64]:
    """The keys of a causal tile, as its kernel lists them: branch by branch, what is new."""
    last, found, covered = int(tile["row"]) + (int(tile["rows"]) - 1) * int(tile["step"]), [], []
    for b, (segment, rate, *_) in enumerate(group.branches.tolist()):
        if int(tile["set"]) >> b & 1:
            low = int(tile["row"]) // segment * segment
            keys = np.arange(low + (int(tile["row"]) - low) % rate, min(low + segment, last + 1), rate)
            found.append(keys[np.all([(keys < start) | (keys >= stop) for start, stop in covered], axis=0)] if covered else keys)
            covered.append((low, low + segment))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def work(pattern: Pattern, tile_rows: int) -> Work:
    seq, of_warp = max(branch.segment_length for branch in pattern.branches), tile_rows // 4
    groups = schedule(Problem(pattern=pattern, seq=seq, heads=1, head_dim=64, is_causal=True), tile_rows).groups
    scored = asked = 0
    for group in groups:
        for tile in group.query_tiles:
            keys, rows = visible(group, tile, seq), int(tile["row"]) + np.arange(int(tile["rows"])) * int(tile["step"])
            nearest = np.array([part.min() for part in np.split(keys, range(KEYS, len(keys), KEYS))])
            scored += sum(int((nearest <= own[-1]).sum()) for own in np.split(rows, range(of_warp, len(rows), of_warp)))
            asked += int(np.searchsorted(np.sort(keys), rows, "right").sum())
    tiles = [tile for group in groups for tile in group.query_tiles["rows"].tolist()]
    padding = 1 - sum(tiles) / (tile_rows * len(tiles))
    return Work(len(groups), len(tiles), scored * of_warp * KEYS, asked, padding, 16 / of_warp)


@pytest.mark.parametrize(
    ("name", "rows", "groups", "tiles", "waste"),
    [
        ("A", LOW_ROWS, 1, 512, 1.042),
        ("A", MOST_ROWS, 1, 256, 1.063),
        ("C", LOW_ROWS, 2, 2080, 1.045),
        ("C", MOST_ROWS, 2, 1040, 1.069),
    ],
)
def test_causal_tiles_score_little_that_no_row_sees(name: str, rows: int, groups: int, tiles: int, waste: float) -> None:
    """Were all tiles as wide as the widest, it would be 1.095 and 1.107 with low tiles, 1.18 and 1.21 with tall ones."""
    found = work(PATTERNS[name], rows)
    assert (found.groups, found.tiles, found.padding) == (groups, tiles, 0)
    assert found.scored / found.asked == pytest.approx(waste, abs=0.002)


@pytest.mark.parametrize("name", PATTERNS)
def test_tall_tiles_load_half_as_much_for_a_product(name: str) -> None:
    low, tall = (work(PATTERNS[name], rows) for rows in (LOW_ROWS, MOST_ROWS))
    assert (low.loads, tall.loads) == (1.0, 0.5)
    assert tall.loads * tall.scored < 0.52 * low.loads * low.scored


@pytest.mark.parametrize("name", PATTERNS)
def test_causal_patterns_run_on_tall_tiles_alone(name: str) -> None:
    assert heights(PATTERNS[name], max(branch.segment_length for branch in PATTERNS[name].branches)) == {MOST_ROWS}


def test_runs_that_fill_half_of_a_tall_tile_run_on_low_ones_beside_whatever_else() -> None:
    segment = DilatedSegment(2**15, 1)
    assert heights(Pattern.of(segment, Documents([128] * 2**8)), 2**15) == {MOST_ROWS}
    assert heights(Pattern.of(segment, Documents([64] * 2**9)), 2**15) == {LOW_ROWS}


def heights(pattern: Pattern, seq: int) -> set[int]:
    """Of the tiles of all launches of a forward pass."""
    problem = Problem(pattern=pattern, seq=seq, heads=2, head_dim=16, dtype="bfloat16", is_causal=True)
    launcher, x = RecordingLauncher(resident=264), torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16).expand(1, seq, 2, 16)
    CupyRaw(launcher, (9, 0)).forward(Inputs(x, x, x), problem)
    return {launch.kernel.tile_rows for launch in launcher.launches}
