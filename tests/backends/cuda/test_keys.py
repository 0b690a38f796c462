"""The keys that kernels find for a tile, against the count of the pattern."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers.host_compile import SHIM
from helpers.host_launcher import HostLauncher
from helpers.strategies import mixes, patterns
from hypothesis import assume, given, strategies as st
from numpy.typing import NDArray

from dilkit import BlockSparse, Documents, GlobalTokens, Pattern, Prefix, SlidingWindow, Strided
from dilkit.backends.cuda.arguments import make_arguments
from dilkit.backends.tiles.relations import FORMS
from dilkit.backends.tiles.schedule import MAX_BRANCHES, Group, schedule, schedule_refusals
from dilkit.problem import Problem

HEADS, KV_HEADS, ROOM = 4, 2, 256
SIZES = dict(heads=HEADS, kv_heads=KV_HEADS, head_dim=8)


def weights(problem: Problem, group: Group, by_keys: bool, checked: bool) -> NDArray[np.float64]:
    """Count how often the kernels' helpers show each query each key: `(heads, seq, seq)`."""
    tiles, heads = (group.key_tiles, HEADS // KV_HEADS) if by_keys else (group.query_tiles, 1)
    macros = dict(THREADS=32, BLOCKS=1, STORAGE=0, TILE_ROWS=4, ROOM=ROOM, BY_KEYS=int(by_keys))
    kernel = SimpleNamespace(source=SHIM / "keys.cu", name="list_keys", macros=macros, shared_bytes=0)
    totals = np.full((len(tiles), heads), -1, np.int32)
    positions = np.zeros((len(tiles), heads, ROOM), np.int32)
    biases = np.zeros((len(tiles), heads, ROOM), np.float32)
    places = dict(tiles=tiles.ctypes.data, branches=group.branches.ctypes.data)
    arguments = make_arguments(problem, {}, group, len(tiles), places, first=True).copy()
    for name, array in dict(dquery=totals, out=positions, dout=biases).items():
        arguments[name]["data"] = array.ctypes.data
    memory = dict(tiles=tiles, branches=group.branches, totals=totals, positions=positions, biases=biases)
    HostLauncher("random", len(tiles), checked=checked).launch(kernel, 3, arguments, memory=memory)
    assert totals.min(initial=0) >= 0
    assert totals.max(initial=0) <= ROOM
    count = np.zeros((HEADS, problem.seq, problem.seq))
    for n, h in np.ndindex(totals.shape):
        total = totals[n, h]
        rows = tiles[n]["row"] + np.arange(tiles[n]["rows"]) * tiles[n]["step"]
        new = np.isfinite(biases[n, h, :total])
        seen, weight = positions[n, h, :total][new], np.exp2(biases[n, h, :total][new], dtype=np.float64)
        assert len(set(seen)) == len(seen)
        head = tiles[n]["head"] * heads + h
        back, ahead = (group.ahead, group.back) if by_keys else (group.back, group.ahead)
        apart = seen - rows[:, None]
        weight = weight * ((-back <= apart) & (apart <= ahead))  # kernels compare the positions of each pair
        count[np.ix_([head], seen, rows) if by_keys else np.ix_([head], rows, seen)] += weight.T if by_keys else weight
    return count


def check(problem: Problem, tile_rows: int = 4, checked: bool = False):
    want = problem.pattern.count(problem.seq, HEADS, kv_heads=KV_HEADS).numpy()
    if problem.is_causal:
        want = np.tril(want)
    for by_keys in (False, True):
        groups = schedule(problem, tile_rows).groups
        count = sum(weights(problem, group, by_keys, checked) for group in groups if len(group.query_tiles))
        np.testing.assert_allclose(count, want, rtol=1e-6)


@given(patterns(heads=HEADS, kv_heads=KV_HEADS), st.integers(1, 40), st.sampled_from([1, 4, 16]), st.booleans())
def test_helpers_show_the_count(pattern, seq, tile_rows, is_causal):
    check(Problem(pattern=pattern, seq=seq, is_causal=is_causal, **SIZES), tile_rows)


@given(mixes(heads=HEADS, kv_heads=KV_HEADS, tokens=40), st.integers(1, 40), st.sampled_from([1, 4, 16]), st.booleans())
def test_helpers_show_the_count_of_every_kind(pattern, seq, tile_rows, is_causal):
    problem = Problem(pattern=pattern, seq=seq, is_causal=is_causal, **SIZES)
    assume(problem.forms.names <= FORMS and not schedule_refusals(problem))
    check(problem, tile_rows)


NAMED = {
    "dense": Pattern.dense(),
    "nested": Pattern([8, 16, 32], [1, 2, 4]),
    "not nested": Pattern([6, 10, 15, 33], [1, 2, 3, 5]),
    "the same twice": Pattern([8, 8, 24], [2, 2, 2]),
    "once": Pattern([6, 10, 15, 33], [1, 2, 3, 5], overlap="once"),
    "wide inside narrow": Pattern([16, 16, 32], [4, 2, 2]),
    "heads": Pattern([8, 32], [1, 2], heads=[(0, 2), (1, 4)]),
    "windows": Pattern.of(SlidingWindow(9), SlidingWindow(12, 3, heads=(1, 4)), SlidingWindow(50)),
    "global tokens": Pattern.of(GlobalTokens([0, 3, 6, 7, 8, 30]), GlobalTokens(2, "read", heads=(0, 3))),
    "mixed": Pattern.of(Pattern([8], [2]).branches[0], Strided(5), GlobalTokens(1), SlidingWindow(3)),
    "kinds once": Pattern.of(SlidingWindow(20, 4), SlidingWindow(6, 2), GlobalTokens([2, 9, 10, 31]), overlap="once"),
    "runs": Pattern.of(BlockSparse(np.random.default_rng(0).random((4, 40, 40)) < 0.4, 1)),
    "runs and others": Pattern.of(Documents([5, 30, 1, 40]), Prefix(20, heads=(1, 3)), SlidingWindow(3)),
    "as many as there may be": Pattern([4 + i // 8 for i in range(MAX_BRANCHES)], [1 + i % 4 for i in range(MAX_BRANCHES)]),
}


CHECKED = [pytest.param(name, True, marks=[] if name == "mixed" else pytest.mark.slow) for name in NAMED]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("name", "checked"), [*((name, False) for name in NAMED), *CHECKED])
def test_named_patterns(name, checked, is_causal):
    check(Problem(pattern=NAMED[name], seq=37, is_causal=is_causal, **SIZES), checked=checked)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_that_see_many_runs(is_causal):
    """More than the lanes of a warp list at a time."""
    layout = np.random.default_rng(0).random((150, 150)) < 0.5
    layout[5], layout[:, 8] = np.arange(150) % 2 == 0, np.arange(150) % 2 == 0
    check(Problem(pattern=Pattern.of(BlockSparse(layout, 1)), seq=150, is_causal=is_causal, **SIZES))
