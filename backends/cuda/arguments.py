"""The one argument of every CUDA kernel: the structs of `kernels/dilated.cuh` as numpy dtypes, byte for byte, and their values.

`Tile` and `Branch` are `dilkit.backends.tiles.schedule.TILE` and `BRANCH`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dilkit.backends.tiles.relations import FAR
from dilkit.backends.tiles.schedule import Group
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.op.dropout import Dropout

VIEW = np.dtype([("data", np.uint64), ("batch", np.int64), ("row", np.int64), ("head", np.int64)], align=True)
"""A tensor `(batch, seq, heads, head_dim)`: address, and strides in elements; the last one is 1."""

VIEWS = ("query", "key", "value", "out", "dout", "dquery", "dkey", "dvalue")
KEY_VIEWS = ("key", "value", "dkey", "dvalue")
ADDRESSES = ("tiles", "branches", "counter", "starts", "tile_ends", "places")
NO_ADDRESSES = (0,) * len(ADDRESSES)
BIAS_TENSORS = ("bias_weights", "positions", "bias_parts")
COUNTS = ("tile_count", "branch_count", "batch", "seq", "heads", "kv_heads", "head_dim", "back", "ahead", "once", "first")

_STEP_COUNTS = "span_count", "write_count", "stored_count", "positions_count", "unseen_count", "tokens", "splits"
STEP = np.dtype(
    [(name, np.uint64) for name in ("spans", "writes", "pages", "memory", "partials", "sink")]
    + [("page_count", np.int64), *((name, np.int32) for name in _STEP_COUNTS)],
    align=True,
)
"""`StepTables` of `kernels/dilated.cuh`."""

NO_STEP = (0,) * len(STEP.names or ())

ARGUMENTS = np.dtype(
    [(name, VIEW) for name in VIEWS]
    + [(name, np.uint64) for name in ("lse", "delta", "mask")]
    + [(name, np.int64) for name in ("mask_batch", "mask_row")]
    + [(name, np.uint64) for name in ADDRESSES]
    + [(name, np.int32) for name in COUNTS]
    + [("scale", np.float32), ("keep_scale", np.float32)]
    + [(name, np.int32) for name in ("first_batch", "first_head")]
    + [(name, np.uint32) for name in ("seed_low", "seed_high", "threshold")]
    + [(name, np.uint64) for name in BIAS_TENSORS]
    + [("positions_batch", np.int64)]
    + [(name, np.int32) for name in ("entries", "size_0", "size_1", "size_2")]
    + [("softcap", np.float32), ("step", STEP)],
    align=True,
)
"""`Args` of `kernels/dilated.cuh`, which a kernel gets by value. An address that it does not use is 0."""

_TENSORS, _ADDRESSES = struct.Struct(f"{4 * len(VIEWS)}q 3q 2q"), struct.Struct(f"{len(ADDRESSES)}q")
_COUNTS, _DROPOUT = struct.Struct(f"{len(COUNTS)}i f"), struct.Struct("f 2i 3I")
_SCORES, _STEP = struct.Struct(f"{len(BIAS_TENSORS)}q q 4i f 0q"), struct.Struct("7q 7i 0q")
PARTS = (_TENSORS, _ADDRESSES, _COUNTS, _DROPOUT, _SCORES, _STEP)
"""Formats for `struct`, which packs much faster than numpy fills field by field: parts that change together."""

Numbers = tuple[int, ...]


def make_arguments(
    problem: Problem,
    tensors: Mapping[str, Tensor | None],
    group: Group | None = None,
    tile_count: int = 0,
    addresses: Mapping[str, int] | None = None,
    first: bool = True,
    dropout: Dropout | None = None,
    step: tuple[int, ...] = NO_STEP,
) -> NDArray[np.void]:
    """Return the `ARGUMENTS` of one launch; without a `group`, over rows in the order of memory.

    `tensors`: any of `VIEWS` and `BIAS_TENSORS`, and `lse`, `delta`, `mask`. `first`: no earlier group has written the results.
    """
    counts = pack_counts(problem, group, tile_count, first)
    options = pack_options(problem, tensors, dropout, step)
    places = tuple((addresses or {}).get(name, 0) for name in ADDRESSES)
    return join(pack_tensors(*views_of(tensors), tensors), places, counts, options)


def views_of(tensors: Mapping[str, Tensor | None]) -> tuple[Numbers, tuple[Numbers, ...]]:
    """Return the addresses and strides of `VIEWS`, 0 for those that a launch does not have."""
    viewed = [tensors.get(name) for name in VIEWS]
    addresses = tuple([0 if x is None else x.data_ptr() for x in viewed])
    return addresses, tuple([(0, 0, 0) if x is None else x.stride()[:3] for x in viewed])


def join(tensors: bytes, addresses: Numbers, counts: bytes, options: bytes) -> NDArray[np.void]:
    return np.ndarray((), ARGUMENTS, tensors + _ADDRESSES.pack(*addresses) + counts + options)


def pack_tensors(addresses: Numbers, strides: tuple[Numbers, ...], tensors: Mapping[str, Tensor | None]) -> bytes:
    """Pack the arguments up to `mask_row`."""
    numbers = list[int]()
    for view in zip(addresses, strides, strict=True):
        numbers += (view[0], *view[1])
    lse, delta, mask = tensors.get("lse"), tensors.get("delta"), tensors.get("mask")
    for x in (lse, delta, mask):
        numbers.append(0 if x is None else x.data_ptr())
    return _TENSORS.pack(*numbers, *((0, 0) if mask is None else mask.stride()))


def pack_counts(problem: Problem, group: Group | None = None, tile_count: int = 0, first: bool = True) -> bytes:
    """Pack the arguments from `tile_count` to `scale`, which no tensor changes."""
    table = (tile_count, group.branch_count) if group else (0, 0)
    sizes = problem.batch, problem.seq, problem.heads, problem.kv_heads, problem.head_dim
    bounds = (group.back, group.ahead) if group else (FAR, FAR)
    return _COUNTS.pack(*table, *sizes, *bounds, problem.pattern.overlap == "once", first, problem.scale)


def pack_options(
    problem: Problem, tensors: Mapping[str, Tensor | None], dropout: Dropout | None = None, step: tuple[int, ...] = NO_STEP
) -> bytes:
    """Pack the arguments from `keep_scale` on. Without dropout and bias they depend on no tensor."""
    dropped = 1.0, 0, 0, 0, 0, 0
    if dropout is not None:
        seed = dropout.seed & 0xFFFFFFFF, dropout.seed >> 32
        dropped = dropout.factor, dropout.first_batch, dropout.first_head, *seed, dropout.threshold
    return _DROPOUT.pack(*dropped) + _SCORES.pack(*_scores(problem, tensors)) + _STEP.pack(*step)


def _scores(problem: Problem, tensors: Mapping[str, Tensor | None]) -> tuple[float, ...]:
    """Return the kernel arguments from `bias_weights` to `softcap`."""
    form = problem.bias
    if form is None:
        return *(0 for _ in BIAS_TENSORS), 0, 0, 0, 0, 0, problem.softcap
    tensors_of_bias = [tensors.get(name) for name in BIAS_TENSORS]
    positions = tensors.get("positions")
    apart = positions.stride(0) if positions is not None and len(positions) > 1 else 0
    sizes = (*form.sizes, 1, 1, 1)[:3]
    return *(0 if x is None else x.data_ptr() for x in tensors_of_bias), apart, form.entries, *sizes, problem.softcap
