"""Launches of a role without their addresses: kernel, blocks and packed counts, prepared once for equal calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dilkit.backends.cuda import scores
from dilkit.backends.cuda.arguments import KEY_VIEWS, VIEWS, Numbers, pack_counts
from dilkit.backends.cuda.hopper import hopper_kernel
from dilkit.backends.cuda.launch import CudaLauncher
from dilkit.backends.cuda.table import CudaKernel, kernel_for
from dilkit.backends.tiles.device import KEYS, QUERIES, tall_tiles
from dilkit.backends.tiles.schedule import LOW_ROWS, MAX_SEQ, MOST_ROWS, schedule
from dilkit.device import Capability
from dilkit.problem import DTYPE_BYTES, Problem

if TYPE_CHECKING:
    import torch

MOST_ITEMS = 2**31 - 2**20
"""Tiles times batch: a 32-bit number counts them, and every resident block counts one too many."""
VECTOR_BYTES, ROW_BYTES = 16, 2**32
"""Rows that start at multiples of it, and are as long as one, are read `VECTOR_BYTES` at a time, if each begins less than
`ROW_BYTES` after the one before."""


class LaunchFacts(NamedTuple):
    """Everything but addresses on which the launches of a role depend.

    `launcher`, `capability`, `tile_rows` and `hopper`: see `CupyRaw`. `rows`: in all sequences. `sequences`: how many are packed,
    None for a batch. `strides`: of `VIEWS`. `aligned`: True if their addresses are multiples of `VECTOR_BYTES`.
    """

    role: str
    problem: Problem
    device: torch.device
    rows: int
    sequences: int | None
    strides: tuple[Numbers, ...]
    aligned: bool
    launcher: CudaLauncher
    capability: Capability
    tile_rows: int | None
    hopper: bool = False


class TileLaunch(NamedTuple):
    """One launch: none with 0 `blocks`. `is_counted`: True if the blocks share tiles by a counter."""

    blocks: int
    is_counted: bool
    counts: bytes


class RoleLaunches(NamedTuple):
    """Launches of one kernel, one for each group of branches, over tiles of `kind`; of "dots" one without tiles."""

    kernel: CudaKernel
    kind: str
    launches: tuple[TileLaunch, ...]
    is_counted: bool


@lru_cache(maxsize=1024)
def role_launches(call: LaunchFacts) -> RoleLaunches:
    """Return the launches of `call`, copying nothing to the device. Raises ValueError for more rows or tiles than are counted."""
    if call.rows > MAX_SEQ:
        raise ValueError(f"query has {call.rows} rows; at most {MAX_SEQ} in all sequences: make several calls")
    problem = call.problem if call.rows == call.problem.seq else replace(call.problem, seq=call.rows)
    kernel, kind = _suited(call), KEYS if call.role == "dkeyvalue" else QUERIES
    if call.role == "dots":
        at_least = kernel.threads // 16  # rows that a block computes at a time
        blocks = _blocks(call, kernel, -(-problem.batch * problem.heads * problem.seq // at_least))
        launches = [TileLaunch(blocks, False, pack_counts(problem))] if blocks else []
    else:
        launches = [*_tile_launches(call, kernel, problem, kind)]
    return RoleLaunches(kernel, kind, tuple(launches), any(launch.is_counted for launch in launches))


def _tile_launches(call: LaunchFacts, kernel: CudaKernel, problem: Problem, kind: str) -> Iterator[TileLaunch]:
    """Yield the launches of all groups of tiles; the batch of packed sequences is their number."""
    rows = problem.heads * problem.seq
    if call.sequences is not None:
        problem = replace(problem, batch=call.sequences)
    for i, group in enumerate(schedule(call.problem, kernel.tile_rows).groups):
        tile_count = len(getattr(group, kind))
        items = tile_count * problem.batch if call.sequences is None else min(tile_count * problem.batch, rows)
        if items > MOST_ITEMS:
            raise ValueError(f"{problem}: {items} tiles over the batch, at most {MOST_ITEMS}; use a smaller batch")
        blocks = _blocks(call, kernel, items)
        yield TileLaunch(blocks, items > blocks, pack_counts(problem, group, tile_count, first=i == 0))


def _blocks(call: LaunchFacts, kernel: CudaKernel, items: int) -> int:
    return min(items, call.launcher.resident(kernel, call.device)) if items else 0


def role_kernel(
    role: str,
    problem: Problem,
    capability: Capability,
    vector: bool = True,
    most_rows: int = MOST_ROWS,
    hopper: bool = False,
) -> CudaKernel:
    """Return the kernel of `role` with tiles of at most `most_rows` rows; `vector`: True if all rows allow wide loads.

    `hopper`: True if it may be the one of `hopper_kernel`.
    """
    if hopper and role == "forward" and most_rows >= MOST_ROWS and (own := hopper_kernel(problem, capability, vector)):
        return own
    tiled = role != "dots"
    changed = scores.macros(role, problem.softcap > 0, problem.bias)
    options = vector, most_rows, problem.varlen and tiled, problem.dropout_p > 0 and tiled, changed
    return kernel_for(role, problem.dtype, problem.head_dim, capability, *options)


def _suited(call: LaunchFacts) -> CudaKernel:
    """Return the kernel with tall tiles if these suit the problem and fill the device, else the one with low tiles."""
    problem, role, vector = call.problem, (call.role, call.problem, call.capability), _vectors(call)
    if call.tile_rows is not None and call.role != "dots":
        return role_kernel(*role, vector, call.tile_rows, call.hopper)
    tall = role_kernel(*role, vector, hopper=call.hopper)
    if tall.tile_rows <= LOW_ROWS:
        return tall
    tiles = tall_tiles(problem, tall.tile_rows)
    copies = problem.batch * call.rows / problem.seq
    enough = tiles and tiles * copies >= call.launcher.at_least_resident(tall, call.device)
    return tall if enough else role_kernel(*role, vector, LOW_ROWS)


def _vectors(call: LaunchFacts) -> bool:
    """True if every row of every view allows wide loads."""
    problem, size = call.problem, DTYPE_BYTES[call.problem.dtype]
    bits, apart, heads = problem.head_dim * size, 0, (problem.heads, problem.kv_heads)
    for name, strides in zip(VIEWS, call.strides, strict=True):
        apart |= strides[1] * size
        for length, stride in zip((problem.batch, call.rows, heads[name in KEY_VIEWS]), strides, strict=True):
            if length > 1:
                bits |= stride * size
    return call.aligned and bits % VECTOR_BYTES == 0 and apart < ROW_BYTES
