"""`PlacedStep`: a step of decoding with its tables on the device of its tensors, for kernels that run there.

    spans | writes | pages | memory      int64, copied as one; `memory` has a line for each tensor of stored, positions and unseen

A CUDA graph that was captured with a placed step reads the tables anew at each replay, and goes by what has been written to them
in place. Their sizes stay. Nobody checks them on the host then: kernels leave out what leads beyond the tensors
(docs/gpu-kernels.md).
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dilkit.decoding._checked import check
from dilkit.decoding.step import Span, Step
from dilkit.problem import Problem


class PlacedStep(NamedTuple):
    """A step that has been checked, and its tables on its device. All of it stays as long as a kernel may read it."""

    step: Step
    problem: Problem
    spans: Tensor
    """int64 `(spans, len(Span._fields))`; one of 0 rows or 0 stored rows shows nothing."""
    writes: Tensor
    pages: Tensor
    memory: Tensor
    """int64 `(tensors, 5)`: an address, how many elements are there, and the strides of what is unseen: heads, group, rows."""
    most: int
    """Stored rows that a query row sees, about: kernels divide their work by it."""


def place(step: Step, problem: Problem, most: int | None = None) -> PlacedStep:
    """A step on its device; its tables are copied. Raises as `Backend.attend_stored`.

    `most`: stored rows that a query row may see when its tables have changed; by default, as many as now.
    """
    check(step, problem)
    pages = np.zeros(0, np.int64) if step.pages is None else step.pages
    tables = step.spans, step.writes, pages, _memory(step)
    flat = torch.from_numpy(np.concatenate([x.ravel() for x in tables])).to(step.query.device)
    starts = [0, *accumulate(x.size for x in tables)]
    spans, writes, listed, memory = (flat[i:][: x.size].view(x.shape) for i, x in zip(starts, tables, strict=False))
    seen = int(step.spans[:, Span._fields.index("seen")].sum())
    return PlacedStep(step, problem, spans, writes, listed, memory, seen if most is None else most)


def _memory(step: Step) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    lines: list[tuple[int, ...]] = [(x.data_ptr(), _reach(x), 0, 0, 0) for x in (*step.stored, *step.positions)]
    for x in step.unseen:
        strides = (stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))
        lines.append((x.data_ptr(), _reach(x), *strides))
    return np.array(lines, np.int64).reshape(len(lines), 5)


def _reach(x: Tensor) -> int:
    """Elements from the first one of a tensor to the end of its memory."""
    return x.untyped_storage().nbytes() // x.element_size() - int(x.storage_offset())
