"""Checks of the tensors of a bias."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dilkit.checks import not_distributed, shown
from dilkit.problem import DTYPES

_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_WHOLE = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}
"""The largest whole number up to which a dtype has each."""


def floating(name: str, x: object, dims: tuple[int, ...], shape: str) -> None:
    """Raise TypeError or ValueError unless `x` is a floating-point tensor of finite numbers with so many dimensions."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}={shown(x)} is a {type(x).__name__}; a torch.Tensor {shape} is needed")
    not_distributed(name, x)
    if x.dtype not in _DTYPES or x.layout is not torch.strided:
        raise TypeError(f"{name} is {x.dtype}, {x.layout}; a plain tensor of {', '.join(DTYPES)} is needed ({name}.float())")
    if x.dim() not in dims or 0 in x.shape[-1:]:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; {shape} is needed")
    check_finite(name, x)


def check_finite(name: str, x: Tensor) -> None:
    """Raise ValueError, with the place, for a number that is not finite. Traced tensors are not looked at; a GPU fails later."""
    if _left_to_device(x, lambda: x.detach().isfinite().all(), f"{name} has numbers that are not finite"):
        return
    wrong = (~x.detach().isfinite()).nonzero()
    if len(wrong):
        place = wrong[0].tolist()
        raise ValueError(f"{name}{place} is {x.detach()[tuple(place)].item()}; finite numbers are needed")


def check_reach(name: str, positions: Tensor | int, dtype: torch.dtype) -> None:
    """Raise ValueError for positions, or a largest one, beyond the whole numbers that `dtype` has; a GPU fails later."""
    most = _WHOLE[dtype]
    if isinstance(positions, Tensor):
        reach = positions.detach().abs()
        if _left_to_device(positions, lambda: (reach <= most).all(), f"{name} reach beyond {most}, the whole numbers of {dtype}"):
            return
        beyond = (reach > most).nonzero()  # whose length is known where torch makes a graph of what is called
        positions = int(reach[tuple(beyond[0])]) if len(beyond) else 0
    if positions > most:
        wider = "query in float64" if dtype is torch.float32 else f"{name}.float() before they are rounded"
        reach_of = f"{dtype} has whole numbers up to {most:,} alone"
        raise ValueError(f"{name} reach {positions:,}, but {reach_of}; {wider}, or nearer ones are needed")


def integers(name: str, x: object, what: str) -> Tensor:
    """Return `x`. Raises TypeError, which ends with `what`, unless it is a tensor of integers."""
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} is {kind}; an integer torch.Tensor is needed, {what}")
    return x


def whole(name: str, x: object) -> Tensor:
    """Return `x` as int64. Raises TypeError or ValueError unless it is a tensor `(n,)` of whole numbers, n odd."""
    what = "a bucket for each i - j from -m to m"
    buckets = integers(name, x, what)
    if buckets.dim() != 1 or buckets.shape[0] % 2 == 0:
        raise ValueError(f"{name} has shape {tuple(buckets.shape)}; (2 * m + 1,) is needed, {what}")
    return buckets.long()


def check_range(name: str, x: Tensor, below: int, what: str) -> None:
    """Raise ValueError, which ends with `what`, unless whole numbers are from 0 to `below` - 1; a GPU fails later."""
    if _left_to_device(x, lambda: ((x >= 0) & (x < below)).all(), f"{name} are not from 0 to {below - 1}"):
        return
    least, most = int(x.min()), int(x.max())
    if least < 0 or most >= below:
        raise ValueError(f"{name} are from {least} to {most}; 0 to {below - 1} are needed, {what}")


def _left_to_device(x: Tensor, holds: Callable[[], Tensor], text: str) -> bool:
    """True if numbers cannot be checked here: under tracing they are not, and on a GPU an assertion there fails later."""
    fake = x.is_meta or type(x).__name__ == "FakeTensor"
    if torch.compiler.is_compiling() or fake or torch._C._are_functorch_transforms_active():
        return True
    if x.is_cuda:
        torch._assert_async(holds(), text)
    return x.is_cuda
