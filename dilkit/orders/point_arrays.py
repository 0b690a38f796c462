"""Points and codes as strided columns of integers: checks of arrays and tensors, and their addresses for the C code.

The C code of `dilkit.orders.points` reads and writes them in place, whatever their strides.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = NDArray[Any]
ColumnAddress: TypeAlias = "tuple[int, int, int, int, int]"
"""A column for the C code: address, stride in bytes, bytes of a number, the number to subtract, and the most that may be left."""


def is_tensor(x: Any) -> bool:
    """True if `x`, or the first of a tuple of axes, is a tensor; the results are then tensors, too."""
    return isinstance(x[0] if isinstance(x, (tuple, list)) and x else x, Tensor)


def numbers(name: str, x: Any) -> Array:
    """Return `x` as a numpy array over the same memory. Raises TypeError for anything but an array or CPU tensor of numbers."""
    if isinstance(x, Tensor):
        if x.device.type != "cpu":
            raise ValueError(f"{name} is on {x.device}; codes are computed on the CPU: pass {name}.cpu()")
        try:
            x = x.detach().numpy()
        except (RuntimeError, TypeError) as error:
            what = f"{name} is a tensor of {x.dtype}, {x.layout}"
            raise TypeError(f"{what}; a plain one of a dtype that numpy has is needed: {error}") from error
    if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a {type(x).__name__}; a numpy array without a mask or a torch tensor is needed")
    if x.dtype.kind not in "iuf":
        raise TypeError(f"{name} is of dtype {x.dtype}; integers are needed")
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def to_write(name: str, x: Any) -> Any:
    """Return `x`. Raises ValueError for an array in the byte order of other machines, which `numbers` copies."""
    for array in x if isinstance(x, (tuple, list)) else (x,):
        if isinstance(array, np.ndarray) and not array.dtype.isnative:
            raise ValueError(f"{name} is of dtype {array.dtype.str}; the byte order of this machine is needed to write to it")
    return x


def apart(read: list[Array], written: list[Array]) -> list[Array]:
    """Return `read`, copied where it may share memory with an array that is written block by block."""
    return [array.copy() if any(np.may_share_memory(array, out) for out in written) else array for array in read]


def integers(name: str, x: Any) -> Array:
    """Return `numbers(name, x)`. Raises TypeError for floating-point numbers, too."""
    array = numbers(name, x)
    if array.dtype.kind == "f":
        raise TypeError(
            f"{name} is of dtype {array.dtype}; a curve visits integer cells: pass the cells of the points, "
            f"np.floor(({name} - {name}.min(0)) / cell).astype(int), or sort with sort_points({name}, cell=...)"
        )
    return array


def axes(name: str, x: Any) -> list[Array]:
    """Return the axes of points, `(n,)` each: the columns of `(n, ndim)`, or the parts of a tuple."""
    if isinstance(x, (tuple, list)):
        columns = [numbers(f"{name}[{i}]", axis) for i, axis in enumerate(x)]
    else:
        points = numbers(name, x)
        if points.ndim != 2:
            raise ValueError(f"{name} has shape {points.shape}; it must be (n, 2) or (n, 3), or a tuple of 2 or 3 arrays (n,)")
        columns = list(points.T)
    if len(columns) not in (2, 3):
        raise ValueError(f"{name} has {len(columns)} axes; curves are known in 2-D and 3-D")
    if any(axis.shape != columns[0].shape or axis.ndim != 1 for axis in columns):
        raise ValueError(f"{name} has axes of shapes {', '.join(str(axis.shape) for axis in columns)}; they must be (n,) alike")
    return columns


def check_out(name: str, array: Array, count: int, bits: int) -> None:
    """Raise unless `count` numbers of `bits` bits fit into `array`."""
    if array.shape != (count,):
        raise ValueError(f"{name} has {array.shape[0] if array.ndim == 1 else array.shape} places; {count} are needed")
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only; pass an array that can be written")
    if count > 1 and abs(array.strides[0]) < array.itemsize:
        raise ValueError(f"{name} has places that share memory, {array.strides[0]} bytes apart; each number needs its own")
    if bits > value_bits(array):
        raise ValueError(f"{name} is of dtype {array.dtype}, which holds {value_bits(array)} bits; {bits} are needed")


def value_bits(array: Array) -> int:
    """Return the number of bits of a non-negative number of the array's dtype."""
    return int(np.iinfo(array.dtype).max).bit_length()


def column_address(array: Array, bits: int, least: int = 0) -> ColumnAddress:
    """Return the address of a column whose numbers, less `least`, must have at most `bits` bits."""
    most = min(bits, value_bits(array)) if least == 0 else bits
    return array.ctypes.data, array.strides[0], array.itemsize, least, 2**most - 1
