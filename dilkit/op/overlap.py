"""Check that tensors do not share memory: a call writes each place once, and reads none of them.

    bytes of a tensor    address + i_0 * step_0 + ... + i_n * step_n        0 <= i_d < size_d, the last step a byte

Two tensors share one if a sum of multiples of their steps is the distance of their addresses, asked only where spans overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from dilkit.op._facts import spans_that_meet

_Extents = tuple[torch.Size, tuple[int, ...], int]
"""Shape, strides and bytes of an element."""

_MOST_DISTANCES = 10_000
"""Distances that are looked at: views of one tensor, whose steps are nested, leave two for each step."""


def check_places(names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError, naming it, if a tensor that is written, one of `names`, overlaps itself in memory."""
    for name in names:
        x = tensors[name]
        if overlaps_itself(x.shape, x.stride()):
            place = f"shape {tuple(x.shape)} and strides {x.stride()}, with several elements in one place"
            raise ValueError(f"{name} has {place}, and is written; {name}.contiguous() is needed")


def check_written(written: Sequence[str], names: tuple[str, ...], tensors: tuple[Tensor, ...], spans: tuple[int, ...]) -> None:
    """Raise ValueError where a tensor of `written` shares memory with another of `names`, or is not to be written."""
    places = [names.index(name) for name in written]
    for name, place in zip(written, places, strict=True):
        if tensors[place].is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(f"{name} was made in inference mode, outside of which it cannot be written ({name}.clone())")
    for place, other in spans_that_meet(tensors, spans, places):
        if share_memory(tensors[place], tensors[other]):
            name, theirs = names[place], names[other]
            raise ValueError(f"{theirs} shares memory with {name}, which is written; give it its own ({theirs}.clone())")


@lru_cache(maxsize=256)
def overlaps_itself(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """True if two elements are in one place, or may be: where a step is no longer than all that lies within it."""
    dims = sorted((step, size) for size, step in zip(shape, strides, strict=True) if size > 1)
    inner = accumulate(((size - 1) * step for step, size in dims), initial=0)
    return 0 not in shape and any(step <= within for (step, _), within in zip(dims, inner, strict=False))


def share_memory(a: Tensor, b: Tensor) -> bool:
    """True if a byte of `a` is one of `b`, neither of them empty, or if that takes too long to find out."""
    return _meet(b.data_ptr() - a.data_ptr(), *((x.shape, x.stride(), x.itemsize) for x in (a, b)))


@lru_cache(maxsize=256)
def _meet(distance: int, a: _Extents, b: _Extents) -> bool:
    factors: dict[int, tuple[int, int]] = {}  # of each step, from the least to the largest
    for (shape, strides, itemsize), sign in ((a, 1), (b, -1)):
        for size, step in ((itemsize, 1), *zip(shape, (stride * itemsize for stride in strides), strict=True)):
            least, most = factors.get(step, (0, 0))
            factors[step] = (least, most + size - 1) if sign > 0 else (least - size + 1, most)
    terms, left = [(step, *factors[step]) for step in sorted(factors, reverse=True) if step], {distance}
    for i, (step, least, most) in enumerate(terms):
        low, high = (sum(term[0] * term[end] for term in terms[i + 1 :]) for end in (1, 2))
        left = {
            rest - factor * step
            for rest in left
            for factor in range(max(least, -((high - rest) // step)), min(most, (rest - low) // step) + 1)
        }
        if len(left) > _MOST_DISTANCES:
            return True
    return 0 in left
