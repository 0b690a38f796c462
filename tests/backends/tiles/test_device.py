"""Schedules on a device: what is kept there, and what is said where that is not possible."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch

from dilkit import Pattern, environment, plan
from dilkit.backends.tiles import device, kept
from dilkit.backends.tiles.device import KEYS, QUERIES, device_schedule
from dilkit.problem import Problem

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_said_yet() -> None:
    plan.cache_clear()
    kept._warn_of_copies.cache_clear()


def pose(**fields: Any) -> Problem:
    return Problem(**{**dict(pattern=Pattern([64, 128], [1, 2]), seq=4096, heads=4, head_dim=16), **fields})


def copy(problem: Problem, *kinds: str) -> list[int]:
    """Where the copies of two calls lie."""
    return [device_schedule(problem, 64, kind, CPU).groups[0].tiles for _ in range(2) for kind in kinds]


def test_tables_beyond_the_cache_are_spoken_of_once_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILKIT_CACHE_BYTES", "4096")
    with pytest.warns(UserWarning, match="the tiles of") as caught:
        copy(pose(), QUERIES)
    (said,) = (str(warning.message) for warning in caught)
    need = sum(group.branches.nbytes + group.query_tiles.nbytes for group in device.schedule(pose(), 64).groups)
    assert f"the tiles of seq=4096, heads=4 take {need:,} bytes on the device; with DILKIT_CACHE_BYTES=4096" in said
    enough = re.search(r"set DILKIT_CACHE_BYTES=(\d+)$", said)
    assert enough
    monkeypatch.setenv("DILKIT_CACHE_BYTES", enough[1])
    first, second = copy(pose(), QUERIES)
    assert first == second


def test_gradients_need_room_for_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    one = device_schedule(pose(), 64, QUERIES, CPU).nbytes + plan.ENTRY_BYTES
    monkeypatch.setenv("DILKIT_CACHE_BYTES", str(one))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy(pose(), QUERIES)
    with pytest.warns(UserWarning, match=r"set DILKIT_CACHE_BYTES=\d+") as caught:
        copy(pose(requires_grad=True), QUERIES, KEYS)
    assert len(caught) == 1
    monkeypatch.setenv("DILKIT_CACHE_BYTES", str(caught[0].message).rpartition("=")[2])
    queries, keys, *again = copy(pose(requires_grad=True), QUERIES, KEYS)
    assert again == [queries, keys]


@pytest.mark.parametrize("limit", [0, environment.DEFAULT_CACHE_BYTES])
def test_nothing_is_said_where_there_is_room_or_no_cache_is_wanted(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setenv("DILKIT_CACHE_BYTES", str(limit))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy(pose(), QUERIES)
