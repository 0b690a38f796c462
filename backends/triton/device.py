"""The tables of a problem on its device: made once, and kept in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from dilkit.backends.tiles.device import KEYS
from dilkit.backends.tiles.kept import Kept, expect_room, kept
from dilkit.backends.tiles.schedule import Group, schedule
from dilkit.backends.triton.sizes import Sizes
from dilkit.backends.triton.tables import make_tables
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class DeviceGroup(NamedTuple):
    """`tiles`, `spans`, `strips` and `biases`, as `Tables` has them, and that row i of a tile sees `i - back .. i + ahead`."""

    tables: tuple[Tensor, ...]
    back: int
    ahead: int


@dataclass(frozen=True, eq=False)
class DeviceTables(Kept):
    """The tables of each group of branches, in the order of launches."""

    groups: tuple[DeviceGroup, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [x for group in self.groups for x in group.tables]


def device_tables(problem: Problem, sizes: Sizes, kind: str, device: torch.device) -> DeviceTables:
    """The tables of the tiles that `kind` names on `device`, for a kernel of these `sizes`; see `kept`."""
    facts = problem.seq, problem.heads, problem.kv_heads, problem.is_causal, sizes.rows, sizes.columns
    key = "triton tables", problem.pattern.to_json(), facts, kind
    return kept(key, partial(_copied, problem, sizes, kind, device), problem, device)


def _copied(problem: Problem, sizes: Sizes, kind: str, device: torch.device) -> DeviceTables:
    tables = DeviceTables(tuple(_on(device, problem, group, kind, sizes) for group in schedule(problem, sizes.rows).groups))
    if kind == KEYS or not problem.requires_grad:  # three kernels have tables of their own: those of keys are the largest
        entries = 3 if problem.requires_grad else 1
        expect_room(problem, entries * tables.nbytes, entries)
    return tables


def _on(device: torch.device, problem: Problem, group: Group, kind: str, sizes: Sizes) -> DeviceGroup:
    import torch

    made = make_tables(problem, group, kind, sizes.columns)
    tables = tuple(torch.from_numpy(x).to(device) for x in (made.tiles, made.spans, made.strips, made.biases))
    bounds = (group.ahead, group.back) if kind == KEYS else (group.back, group.ahead)
    return DeviceGroup(tables, *bounds)
