"""Packed sequences on the CUDA kernels: which tiles each gets, what is launched with no look at the lengths, what is compiled."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from helpers.cuda_fakes import RecordingLauncher
from helpers.on_host import FP32
from torch import Tensor

from dilkit import Pattern, Problem, plan
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.tiles.device import KEYS, QUERIES, device_schedule
from dilkit.backends.tiles.schedule import MAX_SEQ
from dilkit.inputs import Inputs

CPU = torch.device("cpu")
PATTERN = Pattern([64, 256, 512], [1, 4, 64])
LENGTHS = [0, 5, 300, 0, 1, 512, 64]


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def packed(**options: Any) -> Problem:
    return Problem(**{**dict(pattern=PATTERN, seq=512, heads=4, kv_heads=2, head_dim=16, varlen=True), **options})


@pytest.mark.parametrize("kind", [QUERIES, KEYS])
def test_each_row_of_each_sequence_is_in_one_tile(kind: str) -> None:
    """As the kernel takes them: as many as begin before a sequence's end, each of which ends with it."""
    heads = 4 if kind == QUERIES else 2
    first, *_ = device_schedule(packed(), 64, kind, CPU).groups
    ends = first.tile_ends(starts(LENGTHS)).tolist()
    table = first.group.query_tiles if kind == QUERIES else first.group.key_tiles
    table = table[table["row"].argsort(kind="stable")]
    assert first.rows is not None
    assert first.rows.tolist() == table["row"].tolist()
    for length, begin, end in zip(LENGTHS, [0, *ends], ends, strict=False):
        found = [
            (int(tile["head"]), row)
            for tile in table[: end - begin]
            for row in range(int(tile["row"]), length, int(tile["step"]))[: int(tile["rows"])]
        ]
        assert sorted(found) == [(head, row) for head in range(heads) for row in range(length)]


def test_nothing_is_read_of_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would wait for a GPU. And what was prepared serves every list of lengths."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a number of a tensor is read")

    plan.cache_clear()
    launcher, entries = RecordingLauncher(), []
    for lengths in ([100, 412, 0], [500, 12, 0]):
        q, k, v = (torch.zeros(1, 512, heads, 16) for heads in (4, 2, 2))
        lse, places = torch.zeros(1, 4, 512), starts(lengths)
        with monkeypatch.context() as reading:
            for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__"):
                reading.setattr(Tensor, name, refuse)
            CupyRaw(launcher, FP32).forward(Inputs(q, k, v, cu_seqlens=places), packed())
            CupyRaw(launcher, FP32).backward(q, Inputs(q, k, v, cu_seqlens=places), q, lse, packed())
        entries.append(plan.cache_info().entries)
    assert entries[0] == entries[1]
    dots = [launch for launch in launcher.launches if launch.kernel.name == "row_dots"]
    others = [launch for launch in launcher.launches if launch.kernel.name != "row_dots"]
    assert {(int(x.arguments["batch"]), int(x.arguments["seq"])) for x in dots} == {(1, 512)}
    assert {(int(x.arguments["batch"]), int(x.arguments["seq"])) for x in others} == {(3, 512)}
    assert all(x.kernel.macros["PACKED"] and x.arguments["starts"] and x.arguments["tile_ends"] for x in others)


def test_rows_are_numbered_in_32_bits() -> None:
    q = torch.zeros(1, 1, 4, 16).expand(1, MAX_SEQ + 1, 4, 16)
    with pytest.raises(ValueError, match=f"query has {MAX_SEQ + 1} rows; at most {MAX_SEQ} in all sequences"):
        CupyRaw(RecordingLauncher(), FP32).launch_role("forward", dict(query=q, key=q, value=q), packed())
