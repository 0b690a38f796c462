"""Sizes of the kernels in Triton by role, dtype, head_dim and GPU: one table, first match wins.

Every size is a guess until it is measured. They are chosen so that nothing spills, with Triton 3.6 (of torch 2.11) or 3.9: of
fp32 every kernel was compiled with both.

Halves have 5 stages where nothing spills, else 3. A record of the table leads to the keys of a strip, and Triton 3.9 divides the
stages among the two loads. With up to 4, it copies keys to shared memory after the products of the strip before, and waits for
them at once. With 5 it copies two strips ahead, with about as many registers, and at most 97 KiB of shared memory on 9.0, 10.0,
65 elsewhere. A multiprocessor then has room for 8 warps, in one block or two, which sets the rows for 8.6, whose shared memory is
small. Tiles of more columns spill: of head_dim 128 on 9.0 that of 128 x 64, with 3 stages and with 5.

Products in fp32 run on CUDA cores (`input_precision="ieee"`). Three products of TF32 on tensor cores would hold the tolerance if
sums were rounded; a tensor core that cuts them off instead, as is assumed here, has an error beyond it that grows with the keys.
For these products a thread keeps a whole row of each factor in registers, so tiles are small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dilkit.backends.tiles.schedule import LOW_ROWS
from dilkit.backends.tiles.steps import group_of
from dilkit.device import Capability
from dilkit.problem import Problem

HEAD_DIMS = (16, 32, 64, 128)
"""Head dims that kernels are compiled for; a head_dim between two of them is padded to the larger."""

OLDEST: Capability = (8, 0)

RESIDENT_WARPS = 8
"""Warps of the step kernel on a multiprocessor: there is room for them with 255 registers a thread."""


@dataclass(frozen=True)
class Sizes:
    """A kernel's score tile of `rows` by `columns`, the warps that compute it, and the stages of its loop over strips."""

    rows: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Row:
    """A row of the table: `sizes` for a role, halves or not, and `head_dims`, on devices from `since` on."""

    role: str
    halves: bool
    head_dims: tuple[int, ...]
    sizes: Sizes
    since: Capability = OLDEST


SMALL = (16, 32, 64)
TABLE = (
    Row("forward", True, (32, 64), Sizes(128, 32, 8, 5), since=(12, 0)),
    Row("forward", True, SMALL, Sizes(64, 32, 4, 5), since=(12, 0)),
    Row("forward", True, (128,), Sizes(64, 32, 8, 5), since=(12, 0)),
    Row("forward", True, (128,), Sizes(128, 32, 8, 5)),
    Row("forward", True, (128,), Sizes(64, 32, 8, 5), since=(10, 0)),
    Row("forward", True, SMALL, Sizes(128, 64, 8, 5)),
    Row("forward", True, SMALL, Sizes(64, 64, 4, 5)),
    Row("forward", True, (128,), Sizes(64, 32, 4, 5), since=(9, 0)),
    Row("forward", True, (128,), Sizes(64, 32, 8, 5), since=(8, 6)),
    Row("forward", True, (128,), Sizes(64, 32, 4, 5)),
    Row("dquery", True, SMALL, Sizes(64, 32, 4, 3), since=(12, 0)),
    Row("dquery", True, SMALL, Sizes(64, 64, 4, 5)),
    Row("dquery", True, (128,), Sizes(64, 32, 8, 5), since=(12, 0)),
    Row("dquery", True, (128,), Sizes(64, 32, 4, 5), since=(9, 0)),
    Row("dquery", True, (128,), Sizes(64, 32, 8, 5), since=(8, 6)),
    Row("dquery", True, (128,), Sizes(64, 32, 4, 5)),
    Row("dkeyvalue", True, (64,), Sizes(32, 32, 4, 3), since=(12, 0)),
    Row("dkeyvalue", True, (64,), Sizes(64, 16, 4, 5), since=(10, 0)),
    Row("dkeyvalue", True, (64,), Sizes(64, 32, 4, 5), since=(9, 0)),
    Row("dkeyvalue", True, (64,), Sizes(64, 16, 4, 3)),
    Row("dkeyvalue", True, HEAD_DIMS, Sizes(64, 32, 8, 5)),
    Row("forward", False, (32,), Sizes(32, 32, 8, 1)),
    Row("forward", False, SMALL, Sizes(32, 16, 8, 1)),
    Row("forward", False, (128,), Sizes(16, 16, 8, 1)),
    Row("dquery", False, (64,), Sizes(16, 16, 8, 2)),
    Row("dquery", False, HEAD_DIMS, Sizes(16, 16, 8, 1)),
    Row("dkeyvalue", False, (64,), Sizes(32, 16, 8, 1)),
    Row("dkeyvalue", False, (128,), Sizes(16, 16, 4, 1), since=(9, 0)),
    Row("dkeyvalue", False, HEAD_DIMS, Sizes(16, 16, 8, 1)),
    *(Row("dots", halves, HEAD_DIMS, Sizes(64, 0, 4, 1)) for halves in (True, False)),
)
"""Tall tiles before low ones. The kernel of `rowsum(dout * out)` has no score tile."""


def beside_bias(sizes: Sizes) -> Sizes:
    """Return the sizes for a kernel that also adds a bias, which takes registers: more warps and fewer columns."""
    return replace(sizes, warps=max(8, sizes.warps), columns=min(32, sizes.columns))


def hip_sizes(sizes: Sizes) -> Sizes:
    """Return the sizes for AMD's GPUs, where a warp has 64 threads: with 4 warps, not 8, each has up to 512 registers.

    Two stages take at most 32 KiB of shared memory, of 64.
    """
    return replace(sizes, warps=min(4, sizes.warps), stages=min(2, sizes.stages))


def step_sizes(problem: Problem) -> Sizes:
    """Return the sizes of a decoding step: as many stored rows at a time as 4 warps hold in registers with a group's sums."""
    group, warps = group_of(problem), 4
    numbers = 32 // group  # of keys that a thread has, as many of values, and of sums for each query head
    return Sizes(group, warps * 32 * numbers // padded(problem.head_dim), warps, 1)


def padded(head_dim: int) -> int:
    """Return the smallest of `HEAD_DIMS` that holds `head_dim`. Raises ValueError where none does."""
    for size in HEAD_DIMS:
        if head_dim <= size:
            return size
    raise ValueError(f"head_dim={head_dim}: kernels are made for at most {HEAD_DIMS[-1]}; use another backend")


def sizes_for(role: str, dtype: str, head_dim: int, capability: Capability, low: bool = False) -> Sizes:
    """Return the first sizes in `TABLE` that fit, with at most `LOW_ROWS` rows if `low`. Raises ValueError where none do."""
    for row in TABLE:
        fits = row.role == role and row.halves == (dtype != "float32") and padded(head_dim) in row.head_dims
        if fits and row.since <= capability and not (low and row.sizes.rows > LOW_ROWS):
            return row.sizes
    raise ValueError(f"{role} of {dtype} on capability {capability}: no kernel in Triton; use another backend")
