"""Tables on a device: what is kept there, and what is said where that is not possible."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilkit import GlobalTokens, Pattern, SlidingWindow, plan
from dilkit.backends.tiles import kept
from dilkit.backends.tiles.device import KEYS, QUERIES
from dilkit.backends.tiles.relations import FAR
from dilkit.backends.triton.device import DeviceTables, device_tables
from dilkit.backends.triton.sizes import Sizes
from dilkit.problem import Problem

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_known_yet() -> None:
    plan.cache_clear()
    kept._warn_of_copies.cache_clear()


def tables(kind: str = QUERIES, rows: int = 64, **fields: Any) -> DeviceTables:
    pattern = Pattern.of(SlidingWindow(90), GlobalTokens(3))
    problem = Problem(**{**dict(pattern=pattern, seq=4096, heads=4, head_dim=16, is_causal=True), **fields})
    return device_tables(problem, Sizes(rows, 32, 4, 2), kind, CPU)


def capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dilkit.backends.tiles.kept.capturing", lambda device: True)


def test_tables_are_made_once_for_each_kind_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (found := tables()) is tables(requires_grad=True)
    assert len({id(tables()), id(tables(KEYS)), id(tables(rows=32))}) == 3
    assert tables().nbytes == sum(x.nbytes for x in tables().tensors) > 4096
    capture(monkeypatch)
    assert tables() is found


def test_queries_see_as_far_back_as_keys_are_seen_from_ahead() -> None:
    bounds = [[(group.back, group.ahead) for group in tables(kind).groups] for kind in (QUERIES, KEYS)]
    assert bounds == [[(89, 0), (FAR, 0)], [(0, 89), (0, FAR)]]


def test_nothing_is_copied_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    capture(monkeypatch)
    with pytest.raises(RuntimeError, match=r"the tiles of .* make the same call once before .*DILKIT_CACHE_BYTES is too small"):
        tables()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_tables_beyond_the_cache_are_spoken_of_once_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, requires_grad: bool
) -> None:
    def call() -> list[DeviceTables]:
        found = [tables(requires_grad=requires_grad, rows=128)]
        return [*found, *(tables(kind, requires_grad=True) for kind in (QUERIES, KEYS))] if requires_grad else found

    monkeypatch.setenv("DILKIT_CACHE_BYTES", "4096")
    with pytest.warns(UserWarning, match=r"with DILKIT_CACHE_BYTES=4096 they are not kept") as caught:
        assert call()[0] is not call()[0]
    assert len(caught) == 1
    monkeypatch.setenv("DILKIT_CACHE_BYTES", str(caught[0].message).rpartition("=")[2])
    first, second = call(), call()
    assert all(x is y for x, y in zip(first, second, strict=True))
