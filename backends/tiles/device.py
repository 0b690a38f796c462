"""A schedule on a device: of each group its branches, then its tiles, in one tensor."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dilkit.backends.tiles.kept import Kept, expect_room, kept
from dilkit.backends.tiles.schedule import TILE, Group, schedule
from dilkit.device import cuda_driver
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

QUERIES, KEYS = "query_tiles", "key_tiles"


@dataclass(frozen=True, eq=False)
class ScheduleGroup:
    """One group: its branches begin at `branches` on the device, its `tile_count` tiles at `tiles`.

    `rows`, int32: the first row of each tile, ascending, where sequences are packed.
    """

    group: Group
    branches: int
    tiles: int
    tile_count: int
    rows: Tensor | None = None

    def tile_ends(self, starts: Tensor) -> Tensor:
        """Return the running sum of tiles over the sequences, int32, on the device of `starts`."""
        import torch

        assert self.rows is not None
        return torch.searchsorted(self.rows, starts.diff()).cumsum(0, dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class DeviceSchedule(Kept):
    """All groups of a problem. `data`, int32 `(records, 4)`, holds what the addresses of `groups` point to.

    The tiles of packed sequences are those of the longest, by ascending row: a sequence has those that begin before its end.
    """

    data: Tensor
    groups: tuple[ScheduleGroup, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.data, *(group.rows for group in self.groups if group.rows is not None)]


def proof_facts(problem: Problem, *compiled: str) -> tuple[str, ...]:
    """Return `Backend.proof_facts` of kernels: `compiled`, the device, its driver and the features of the call."""
    device = problem.device
    features = (
        problem.dtype,
        f"head_dim {problem.head_dim}",
        *(flag for flag in ("requires_grad", "varlen") if getattr(problem, flag)),
        *(("dropout",) if problem.dropout_p else ()),
        *(("softcap",) if problem.softcap else ()),
        *((f"bias {problem.bias.code}",) if problem.bias else ()),
        *((f"{problem.stored} stored, for {problem.heads // problem.kv_heads} query heads",) if problem.stored else ()),
        *(() if problem.pattern.only_segments or problem.stored else ("kinds",)),
    )
    if device.platform == "hip":
        import torch

        return (str(device), torch.__version__, f"HIP {torch.version.hip}", *compiled, *features)
    return (device.name, f"capability {device.capability}", f"driver {cuda_driver()}", *compiled, *features)


def sources_of(module: str) -> str:
    """Return a digest of the sources beside `module`, on which compiled kernels depend."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(module).parent.glob("*.py")))
    return f"sources {hashlib.sha256(sources).hexdigest()[:16]}"


def device_schedule(problem: Problem, tile_rows: int, kind: str, device: torch.device) -> DeviceSchedule:
    """Return the schedule of `problem` on `device`, with the tiles that `kind` names; see `kept`."""
    sizes = problem.seq, problem.heads, problem.kv_heads, problem.is_causal, problem.varlen, tile_rows
    key = "device schedule", problem.pattern.to_json(), sizes, kind
    return kept(key, partial(_copied, problem, tile_rows, kind, device), problem, device)


def _copied(problem: Problem, tile_rows: int, kind: str, device: torch.device) -> DeviceSchedule:
    import torch

    groups = schedule(problem, tile_rows).groups
    kinds = (QUERIES, KEYS) if problem.requires_grad else (QUERIES,)
    expect_room(problem, sum(group.branches.nbytes + getattr(group, x).nbytes for group in groups for x in kinds), len(kinds))
    tiles = [getattr(group, kind) for group in groups]
    if problem.varlen:
        tiles = [records[np.argsort(records["row"], kind="stable")] for records in tiles]
    parts = [records for group, group_tiles in zip(groups, tiles, strict=True) for records in (group.branches, group_tiles)]
    # branches and tiles are both four 32-bit numbers
    data = torch.from_numpy(np.concatenate([records.view(np.int32).reshape(-1, 4) for records in parts])).to(device)
    starts = (data.data_ptr() + TILE.itemsize * np.cumsum([0, *map(len, parts)])).tolist()
    copies = []
    for i, (group, records) in enumerate(zip(groups, tiles, strict=True)):
        rows = torch.from_numpy(records["row"].copy()).to(device) if problem.varlen else None
        copies.append(ScheduleGroup(group, starts[2 * i], starts[2 * i + 1], len(records), rows))
    return DeviceSchedule(data, tuple(copies))


@lru_cache(maxsize=1024)
def tall_tiles(problem: Problem, rows: int) -> int:
    """Count the tiles of at most `rows` rows of the first group; 0 if all tiles together were less than three quarters full."""
    groups = schedule(problem, rows).groups
    of_all = np.concatenate([group.query_tiles["rows"] for group in groups])
    return len(groups[0].query_tiles) if len(of_all) and of_all.mean() * 4 >= rows * 3 else 0
