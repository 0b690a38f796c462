"""Schedules, and tables of the kernels in Triton, on a device."""

import re
import warnings
from functools import partial

import pytest
import torch

from dilkit import GlobalTokens, Pattern, SlidingWindow, environment, plan
from dilkit.backends.tiles import device, kept
from dilkit.backends.tiles.device import KEYS, QUERIES, device_schedule
from dilkit.backends.tiles.relations import FAR
from dilkit.backends.triton.sizes import Sizes
from dilkit.backends.triton.tables import device_tables
from dilkit.problem import Problem

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_said_yet():
    plan.cache_clear()
    kept._warn_of_copies.cache_clear()


def pose(**fields):
    return Problem(**{**dict(pattern=Pattern([64, 128], [1, 2]), seq=4096, heads=4, head_dim=16), **fields})


def tiles(kind=QUERIES, **fields):
    return device_schedule(pose(**fields), 64, kind, CPU)


def tables(kind=QUERIES, rows=64, **fields):
    pattern = Pattern.of(SlidingWindow(90), GlobalTokens(3))
    return device_tables(pose(pattern=pattern, is_causal=True, **fields), Sizes(rows, 32, 4, 2), kind, CPU)


LEARNED = [partial(made, kind, requires_grad=True) for made in (tiles, tables) for kind in (QUERIES, KEYS)]


@pytest.mark.parametrize(
    "calls",
    [[tiles], LEARNED[:2], [partial(tables, rows=128)], [partial(tables, rows=128, requires_grad=True), *LEARNED[2:]]],
    ids=["tiles", "tiles, gradients", "tables", "tables, gradients"],
)
def test_tables_beyond_the_cache_are_spoken_of_once_with_the_way_out(monkeypatch, calls):
    """Gradients need room for both kinds, and in Triton also for a forward pass with other tiles."""
    monkeypatch.setenv("DILKIT_CACHE_BYTES", "4096")
    with pytest.warns(UserWarning, match=r"with DILKIT_CACHE_BYTES=4096 they are not kept") as caught:
        one, other = ([call() for call in calls] for _ in range(2))
    assert one[-1] is not other[-1]
    assert len(caught) == 1
    enough = re.search(r"set DILKIT_CACHE_BYTES=(\d+)$", str(caught[0].message))
    assert enough
    monkeypatch.setenv("DILKIT_CACHE_BYTES", enough[1])
    first, second = ([call() for call in calls] for _ in range(2))
    assert all(x is y for x, y in zip(first, second, strict=True))


def test_what_is_said_names_the_sequence_and_the_bytes(monkeypatch):
    monkeypatch.setenv("DILKIT_CACHE_BYTES", "4096")
    need = sum(group.branches.nbytes + group.query_tiles.nbytes for group in device.schedule(pose(), 64).groups)
    with pytest.warns(UserWarning, match=f"the tiles of seq=4096, heads=4 take {need:,} bytes on the device; with"):
        tiles()


@pytest.mark.parametrize("limit", [0, environment.DEFAULT_CACHE_BYTES])
def test_nothing_is_said_where_there_is_room_or_no_cache_is_wanted(monkeypatch, limit):
    monkeypatch.setenv("DILKIT_CACHE_BYTES", str(limit))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiles()


def test_tables_are_made_once_for_each_kind_and_size_and_not_while_a_graph_is_captured(monkeypatch):
    assert (found := tables()) is tables(requires_grad=True)
    assert len({id(tables()), id(tables(KEYS)), id(tables(rows=32))}) == 3
    assert tables().nbytes == sum(x.nbytes for x in tables().tensors) > 4096
    monkeypatch.setattr("dilkit.backends.tiles.kept.capturing", lambda device: True)
    assert tables() is found
    with pytest.raises(RuntimeError, match=r"the tiles of .* make the same call once before .*DILKIT_CACHE_BYTES is too small"):
        tables(rows=16)


def test_queries_see_as_far_back_as_keys_are_seen_from_ahead():
    bounds = [[(group.back, group.ahead) for group in tables(kind).groups] for kind in (QUERIES, KEYS)]
    assert bounds == [[(89, 0), (FAR, 0)], [(0, 89), (0, FAR)]]
