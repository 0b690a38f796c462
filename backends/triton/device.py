"""The tables of a problem on its device: made once, and kept in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from dilkit import plan
from dilkit.backends.tiles import captured
from dilkit.backends.tiles.device import KEYS
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
class DeviceTables:
    """The tables of each group of branches, in the order of launches."""

    groups: tuple[DeviceGroup, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(x.nbytes for group in self.groups for x in group.tables)

    def keep_while_used(self) -> None:
        """Keep the memory until the kernels that are now queued have ended, even if the cache drops the tables before."""
        import torch

        for x in (x for group in self.groups for x in group.tables):
            if x.is_cuda:
                x.record_stream(torch.cuda.current_stream(x.device))


def device_tables(problem: Problem, sizes: Sizes, kind: str, device: torch.device, capturing: bool) -> DeviceTables:
    """The tables of the tiles that `kind` names on `device`, for a kernel of these `sizes`.

    The first call copies them and waits for that. `capturing`: whether the work is being captured in a CUDA graph; then raises
    RuntimeError for tables that are not there, since nothing can be copied.
    """
    facts = problem.seq, problem.heads, problem.kv_heads, problem.is_causal, sizes.rows, sizes.columns
    key = "triton tables", problem.pattern.to_json(), facts, kind, device
    found = plan.cached(key, partial(_copied, problem, sizes, kind, device, capturing))
    if capturing:
        captured.keep(found, device)
    return found


def _copied(problem: Problem, sizes: Sizes, kind: str, device: torch.device, capturing: bool) -> DeviceTables:
    if capturing:
        raise RuntimeError(
            f"the tables of {problem} are not on {device}, and cannot be copied there while a CUDA graph is captured: make the "
            "same call once before (if you did, DILKIT_CACHE_BYTES is too small to keep them)"
        )
    captured.let_go()
    return DeviceTables(tuple(_on(device, problem, group, kind, sizes) for group in schedule(problem, sizes.rows).groups))


def _on(device: torch.device, problem: Problem, group: Group, kind: str, sizes: Sizes) -> DeviceGroup:
    import torch

    made = make_tables(problem, group, kind, sizes.columns)
    tables = tuple(torch.from_numpy(x).to(device) for x in (made.tiles, made.spans, made.strips, made.biases))
    bounds = (group.ahead, group.back) if kind == KEYS else (group.back, group.ahead)
    return DeviceGroup(tables, *bounds)
