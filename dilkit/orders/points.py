"""Codes of points along a Hilbert or Morton curve: encode, decode, and sort a cloud of points by them."""

from __future__ import annotations

from itertools import combinations
from math import isfinite
from numbers import Integral
from typing import Any

import numpy as np
import torch

from dilkit import environment
from dilkit.checks import integer, one_of, real
from dilkit.orders import point_arrays
from dilkit.orders.checks import empty
from dilkit.orders.compiled import _points
from dilkit.orders.point_arrays import Array
from dilkit.orders.state_tables import state_table
from dilkit.orders.token_order import TokenOrder

CURVES = ("hilbert", "morton")

MAX_BITS = {2: 31, 3: 21}
"""Bits of a coordinate, at most, by ndim: a code has ndim times as many, 63 at most."""


def encode(coords: Any, bits: int | None = None, curve: str = "hilbert", *, out: Any = None) -> Any:
    """Compute the codes `(n,)` of points along a curve through a square or cube of `2**bits` cells a side.

        codes[i] = how many cells of the grid the curve visits before the cell coords[i]

    `encode(order((2**k,) * ndim).coordinates(), k)` is 0, 1, 2, ... Codes for different `bits` are not comparable.

    - `coords`: `(n, ndim)` integers of any dtype and strides, or a tuple of ndim arrays `(n,)`, one for each axis, which is the
      fastest form; numpy arrays or torch tensors on the CPU.
    - `bits`: at most 31 in 2-D and 21 in 3-D; None means as many as the largest coordinate needs.
    - `out`: an array `(n,)` of integers to write the codes to. Without it the result is an array or tensor as `coords` are, of
      uint32 (torch: int32) if `ndim * bits` fit, else of int64.

    Raises TypeError for coordinates that are not integers, ValueError for a wrong shape, an unknown curve, a coordinate out of
    range (the error names it) or an `out` that does not fit.

    Example:

        >>> import numpy as np
        >>> from dilkit.orders.points import decode, encode
        >>> codes = encode(np.array([[0, 0], [0, 1], [1, 1], [1, 0]]), bits=1)
        >>> codes.tolist(), decode(codes, ndim=2, bits=1).tolist()
        ([0, 1, 2, 3], [[0, 0], [0, 1], [1, 1], [1, 0]])
    """
    axes = [point_arrays.integers("coords", axis) for axis in point_arrays.axes("coords", coords)]
    ndim, count = len(axes), len(axes[0])
    if bits is None:
        bits = max(1, *(int(axis.max(initial=0)).bit_length() for axis in axes))
    _check(ndim, bits, curve)
    codes = _codes(count, ndim * bits, point_arrays.is_tensor(coords)) if out is None else out
    code = point_arrays.integers("out", point_arrays.to_write("out", codes))
    point_arrays.check_out("out", code, count, ndim * bits)
    axes = point_arrays.apart(axes, [code])
    done = _run(False, curve, bits, axes, (0,) * ndim, code)
    if done < count:
        point = tuple(int(axis[done]) for axis in axes)
        hint = "subtract the least coordinates" if min(point) < 0 else f"pass bits={max(point).bit_length()}"
        raise ValueError(f"coords[{done}]={point} is out of range: bits={bits} hold 0 to {2**bits - 1}; {hint}")
    return codes


def decode(codes: Any, ndim: int, bits: int, curve: str = "hilbert", *, out: Any = None) -> Any:
    """Compute the points `(n, ndim)`, int32, of codes: the inverse of `encode`.

    `codes`: `(n,)` integers, a numpy array or a torch tensor on the CPU. `out`: an array `(n, ndim)`, or a tuple of ndim arrays
    `(n,)`, which is the fastest form, of any integer dtype that holds `bits`. The other arguments and the errors are those of
    `encode`.
    """
    code = point_arrays.integers("codes", codes)
    if code.ndim != 1:
        raise ValueError(f"codes has shape {code.shape}; it must be (n,)")
    ndim, count = integer("ndim", ndim), len(code)
    _check(ndim, bits, curve)
    if out is None:
        is_tensor = isinstance(codes, torch.Tensor)
        out = torch.empty(count, ndim, dtype=torch.int32, device="cpu") if is_tensor else np.empty((count, ndim), np.int32)
    axes = [point_arrays.integers("out", axis) for axis in point_arrays.axes("out", point_arrays.to_write("out", out))]
    if len(axes) != ndim:
        raise ValueError(f"out has {len(axes)} axes; ndim={ndim}")
    for axis in axes:
        point_arrays.check_out("out", axis, count, bits)
    if any(np.shares_memory(one, other) for one, other in combinations(axes, 2)):
        raise ValueError("out has axes that share memory; each needs its own")
    (code,) = point_arrays.apart([code], axes)
    done = _run(True, curve, bits, axes, (0,) * ndim, code)
    if done < count:
        raise ValueError(
            f"codes[{done}]={code[done]} is out of range: bits={bits} in {ndim}-D give 0 to {2 ** (ndim * bits) - 1}"
        )
    return out


def sort_points(coords: Any, curve: str = "hilbert", *, cell: float | None = None, batch: Any = None) -> TokenOrder:
    """Order points as a curve visits them: a `TokenOrder` of shape `(n,)`.

        perm == np.argsort(encode(cells), kind="stable")        cells = coords - coords.min(0)

    Points in the same cell keep their order.

    - `coords`: `(n, 2)` or `(n, 3)`, or a tuple of arrays `(n,)`, one for each axis; integers, which may be negative, or
      floating-point numbers with `cell`; numpy arrays or torch tensors on the CPU.
    - `curve`: "hilbert" (Skilling's transform, doi 10.1063/1.1751381) or "morton".
    - `cell`: the side of a cell in the units of `coords`: `cells = floor((coords - coords.min(0)) / cell)`, computed in
      float64 whatever the dtype of `coords`, and exactly where `coords` are integers and `cell` is a whole number.
    - `batch`: `(n,)` integers, 0 or more: the cloud that each point belongs to. The order visits one cloud after another.

    Raises TypeError or ValueError, naming the argument, for arguments that do not fit, and ValueError if the points span more
    cells than a code has bits for.

    Example:

        >>> import numpy as np
        >>> from dilkit import sort_points
        >>> points = np.array([[1.5, 0.1], [0.2, 0.3], [0.4, 1.7], [1.1, 1.2]])  # (n, 2), in metres
        >>> order = sort_points(points, cell=1.0)
        >>> order.perm.tolist()
        [1, 2, 3, 0]
        >>> order.apply(points, dim=0)[0].tolist()
        [0.2, 0.3]
    """
    one_of("curve", curve, CURVES)
    axes = point_arrays.axes("coords", coords)
    if cell is not None:
        side = real("cell", cell, above=0.0)
        axes = [_cells(axis, int(cell) if isinstance(cell, Integral) else side) for axis in axes]
    axes = [point_arrays.integers("coords", axis) for axis in axes]
    ndim, count = len(axes), len(axes[0])
    least = tuple(int(axis.min()) if count else 0 for axis in axes)
    bits = max(1, *((int(axis.max(initial=low)) - low).bit_length() for axis, low in zip(axes, least, strict=True)))
    if bits > MAX_BITS[ndim]:
        raise ValueError(f"coords span 2**{bits} cells; a code has room for 2**{MAX_BITS[ndim]} in {ndim}-D: pass a larger cell")
    codes = _codes(count, ndim * bits, False)
    _run(False, curve, bits, axes, least, codes)
    if batch is not None:
        codes = _with_batch(codes, ndim * bits, point_arrays.integers("batch", batch))
    perm = empty(count)
    _points.argsort(codes, perm)
    return TokenOrder((count,), curve, perm, checked=True)


def instruction_set() -> str:
    """Return the name of the instruction set whose code runs: `DILKIT_CPU_ISA`, by default the best that this machine has."""
    sets = _points.instruction_sets()
    name = environment.cpu_isa((*sets, *environment.BF16_SETS) if "avx512" in sets else sets)
    return "avx512" if name in environment.BF16_SETS else name


def _check(ndim: int, bits: Any, curve: str) -> None:
    one_of("curve", curve, CURVES)
    if ndim not in MAX_BITS:
        raise ValueError(f"ndim={ndim}; curves are known in 2-D and 3-D")
    if integer("bits", bits, at_least=1) > MAX_BITS[ndim]:
        raise ValueError(
            f"bits={bits} must be at most {MAX_BITS[ndim]} in {ndim}-D: a code has {ndim} times as many, and 63 at most"
        )


def _codes(count: int, bits: int, is_tensor: bool) -> Any:
    """Make an empty array for codes of `bits` bits. Tensors are signed: torch has few operations on unsigned integers."""
    if is_tensor:
        return torch.empty(count, dtype=torch.int32 if bits <= 31 else torch.int64, device="cpu")
    return np.empty(count, np.uint32 if bits <= 32 else np.int64)


def _run(decoding: bool, curve: str, bits: int, axes: list[Array], least: tuple[int, ...], code: Array) -> int:
    """Encode or decode. Returns the first point out of range, else their number."""
    ndim, table = len(axes), state_table(curve, len(axes), decoding)
    addresses = [point_arrays.column_address(axis, bits, low) for axis, low in zip(axes, least, strict=True)]
    machine = table.transitions, table.start_states[-bits % 4], table.is_oriented, bits
    return _points.convert(
        instruction_set(), decoding, *machine, len(code), addresses, point_arrays.column_address(code, ndim * bits)
    )


def _cells(axis: Array, cell: int | float) -> Array:
    """Return the cell of each coordinate, counted from the cell of the least one."""
    if not len(axis):
        return axis.astype(np.int64)
    of_floats = axis.dtype.kind == "f"
    low, high = (float(x) if of_floats else int(x) for x in (axis.min(), axis.max()))
    if not (isfinite(low) and isfinite(high)):
        raise ValueError(
            f"coords has coordinates from {low} to {high}; leave out the points that hold a number that is not finite"
        )
    if (span := (high - low) / cell) >= 2**31:
        raise ValueError(f"coords span {span:.3g} cells; a code has room for at most 2**31: pass a larger cell")
    if high - low < cell:
        return np.zeros(len(axis), np.int64)
    modulo_2_64 = np.dtype(np.uint64)  # where differences of integers are exact
    places: Array = axis.astype(np.result_type(axis, np.float64) if of_floats else modulo_2_64)
    places -= places[axis.argmin()]
    cells: Array = places // np.uint64(int(cell)) if not of_floats and cell == int(cell) else np.floor(places / cell)
    return cells.astype(np.int64)


def _with_batch(codes: Array, bits: int, batch: Array) -> Array:
    """Put the number of the cloud into the bits above each code, so that codes sort by cloud first."""
    if batch.shape != codes.shape:
        raise ValueError(f"batch has shape {batch.shape}; one number for each of the {len(codes)} points is needed")
    low, high = int(batch.min(initial=0)), int(batch.max(initial=0))
    if low < 0:
        raise ValueError(f"batch has the number {low}; numbers must be 0 or more")
    if high.bit_length() + bits > 63:
        raise ValueError(f"batch has the number {high}, and codes {bits} bits: together more than 63; pass a larger cell")
    keys: Array = batch.astype(np.int64) << bits | codes
    return keys
